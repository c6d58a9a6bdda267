"""The page of schedules: the schedules and their buttons."""

from html import unescape
from typing import Any

import pytest
from tests.console.pages import HOSTILE, Browser, SignIn, text_of
from tests.rig import Rig

WORKFLOW = "name: clean\nsteps: [{id: a, tool: t.a}]"
FORM = {"name": "nightly", "cron": "30 2 * * *", "timezone": "Europe/Berlin", "workflow": "clean", "missed": "last"}


@pytest.fixture
async def workflow(rig: Rig) -> None:
    await rig.apply(WORKFLOW)


async def schedule(rig: Rig) -> Any:
    [row] = await rig.sql("SELECT * FROM interlock.schedule")
    return row


async def test_without_schedules_the_page_says_what_to_do(admin: Browser) -> None:
    page = text_of(await admin.get("/schedules"))
    assert "No schedules yet" in page and "interlock workflow apply" in page


@pytest.mark.usefixtures("workflow")
async def test_a_schedule_is_made_paused_resumed_run_and_deleted(rig: Rig, admin: Browser) -> None:
    page = await admin.post("/schedules", **FORM, input='{"deep": true}')
    assert "nightly starts clean at" in page and "/schedules/nightly/pause" in page and "Europe/Berlin" in page
    assert "/schedules/nightly/resume" in await admin.post("/schedules/nightly/pause")
    assert (await schedule(rig))["paused_at"] is not None
    assert "/schedules/nightly/pause" in await admin.post("/schedules/nightly/resume")
    await admin.post("/schedules/nightly/run")
    [run] = await rig.sql("SELECT workflow, input::text, trigger ->> 'source' AS source FROM interlock.run")
    assert (run["workflow"], run["input"], run["source"]) == ("clean", '{"deep": true}', "schedule")
    assert "is deleted" in await admin.post("/schedules/nightly/delete")
    assert await rig.sql("SELECT FROM interlock.schedule") == []


@pytest.mark.usefixtures("workflow")
async def test_what_is_wrong_is_said_in_place_and_nothing_typed_is_lost(rig: Rig, admin: Browser) -> None:
    for wrong, says in (
        ({"name": "Night Shift"}, "lower-case letters"),
        ({"name": ""}, "this has none"),
        ({"cron": "61 * * * *"}, "61"),
        ({"cron": ""}, "cron"),
        ({"timezone": "Mars/Olympus"}, "Mars/Olympus"),
        ({"workflow": "nope"}, "no workflow nope"),
        ({"input": "{,"}, "not JSON"),
        ({"input": "[]"}, "input"),
        ({"input": '{"a": "\\u0000"}'}, "cannot be stored"),
        ({"missed": "never"}, "missed"),
        ({"name": HOSTILE, "input": HOSTILE, "cron": HOSTILE}, "JSON"),
    ):
        typed = {**FORM, "input": '{"kept": 1}', **wrong}
        page = await admin.client.post("/schedules", data={"csrf": admin.csrf, **typed})
        assert page.status_code in (404, 422), wrong
        assert says in text_of(page.text), wrong
        assert HOSTILE not in page.text
        for field in ("name", "cron", "input"):
            assert typed[field] in unescape(page.text)
    assert await rig.sql("SELECT FROM interlock.schedule") == []
    await admin.post("/schedules", **FORM)
    assert "exists already" in await admin.post("/schedules", 409, **FORM)


@pytest.mark.usefixtures("workflow")
async def test_why_it_is_paused_and_what_it_started_last_are_shown(rig: Rig, admin: Browser) -> None:
    await admin.post("/schedules", **FORM)
    run = await rig.start("clean")
    await rig.sql(
        "UPDATE interlock.schedule SET next_at = NULL, paused_at = now(), paused_why = $1, last_slot = now(),"
        " last_run_id = $2",
        f"the key was revoked {HOSTILE}", run,
    )  # fmt: skip
    page = await admin.get("/schedules")
    assert "the key was revoked" in page and f"/runs/{run}" in page


@pytest.mark.usefixtures("workflow")
async def test_who_may_not_is_offered_nothing_and_refused(rig: Rig, admin: Browser, viewer: Browser) -> None:
    await admin.post("/schedules", **FORM)
    page = await viewer.get("/schedules")
    assert "nightly" in page and "<button>Pause" not in page and "New schedule" not in page
    await viewer.refused("/schedules", **FORM)
    for verb in ("pause", "resume", "delete", "run"):
        await viewer.refused(f"/schedules/nightly/{verb}")
        bare = await admin.client.post(f"/schedules/nightly/{verb}", data={})
        assert bare.status_code == 403
    assert (await schedule(rig))["paused_at"] is None and await rig.sql("SELECT FROM interlock.run") == []


@pytest.mark.usefixtures("workflow")
async def test_another_tenant_and_another_workspace_see_nothing(rig: Rig, admin: Browser, sign_in: SignIn) -> None:
    await admin.post("/schedules", **FORM)
    other = await rig.tenant("other")
    for stranger in (await sign_in(tenant_id=other.tenant_id), await sign_in(workspace_id="east")):
        assert "/schedules/nightly/" not in await stranger.get("/schedules")
        for verb in ("pause", "delete", "run"):
            await stranger.post(f"/schedules/nightly/{verb}", 404)
    assert (await schedule(rig))["paused_at"] is None


@pytest.mark.usefixtures("workflow")
async def test_the_page_stays_small_and_harmless(rig: Rig, admin: Browser) -> None:
    await admin.post("/schedules", **FORM, input='{"x": "' + HOSTILE * 40 + '"}')
    columns = "key_id, cron, timezone, workflow, input, missed, next_at, created_at"
    await rig.sql(
        f"INSERT INTO interlock.schedule (tenant_id, name, {columns})"
        f" SELECT tenant_id, 'many' || n, {columns} FROM interlock.schedule, generate_series(1, 150) AS n"
        " WHERE name = 'nightly'"
    )
    page = await admin.get("/schedules")
    assert 'rel="next"' in page
