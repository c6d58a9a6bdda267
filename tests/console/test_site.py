"""Rules for every page: sign-in, valid forms, and error pages."""

import asyncio
import itertools
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from fastapi.routing import APIRoute
from tests.console.pages import Browser, SignIn
from tests.rig import Rig

from interlock.api.limits import COOKIE
from interlock.console import app, live
from interlock.engine.access import console_sessions, tenants
from interlock.wire.common import DEEPEST

ROUTES = [route for module in app.PAGES for route in module.router.routes if isinstance(route, APIRoute)]
FORMS = sorted({route.path for route in ROUTES if "POST" in route.methods} - {"/signin"})
PAGES = sorted({route.path for route in ROUTES if "GET" in route.methods} - {"/signin"})


def filled(path: str) -> str:
    for name in ("run_id", "approval_id", "session_id", "job_id", "worker_id"):
        path = path.replace(f"{{{name}}}", str(uuid4()))
    return path.replace("{event}", "pause").replace("{topic}", "runs").replace("{name}", "x").replace("{order}", "x")


async def test_a_form_that_is_not_ours_changes_nothing(admin: Browser) -> None:
    for path, fields in itertools.product(FORMS, ({}, {"csrf": "0" * 64}, {"csrf": ""})):
        answer = await admin.client.post(filled(path), data=fields)
        assert answer.status_code == 403, (path, answer.status_code)
        assert "before you signed in" in answer.text, path


async def test_nobody_gets_in_without_signing_in(admin: Browser) -> None:
    admin.client.cookies.clear()
    for path in PAGES + FORMS:
        answer = await (admin.client.post(filled(path)) if path in FORMS else admin.client.get(filled(path)))
        assert (answer.status_code, answer.headers["location"].partition("?")[0]) == (303, "/signin"), path


async def test_a_sign_in_ends_with_its_key_and_with_its_day(rig: Rig, sign_in: SignIn) -> None:
    browser = await sign_in(name="eva")
    [key] = [row for row in await tenants.keys(rig.database, rig.admin, None, 10) if row["name"] == "eva"]
    await rig.database.run_in_transaction(lambda tx: tenants.revoke_key(tx, rig.admin, key["id"]))
    assert (await browser.client.get("/inbox")).status_code == 303
    other = await sign_in(name="ida")
    rig.clock.advance(timedelta(seconds=console_sessions.SECONDS - 60).total_seconds())
    assert (await other.client.get("/inbox")).status_code == 200
    rig.clock.advance(120)
    assert (await other.client.get("/inbox")).status_code == 303


async def test_what_is_not_there_is_told_to_people_as_a_page_and_to_programs_as_a_problem(
    rig: Rig, admin: Browser
) -> None:
    for path in (
        "/nothing",
        f"/runs/{uuid4()}",
        "/runs/x",
        f"/jobs/{uuid4()}",
        f"/sessions/{uuid4()}",
        "/tools/no.such",
    ):
        answer = await admin.client.get(path)
        assert answer.status_code == 404 and "text/html" in answer.headers["content-type"], path
        assert "content-security-policy" in answer.headers
    for path in ("/api/nothing", "/api"):
        answer = await rig.http().get(path)
        assert answer.status_code == 404 and answer.headers["content-type"] == "application/problem+json"


async def test_a_page_about_a_problem_has_what_a_browser_is_to_do(rig: Rig, admin: Browser) -> None:
    assert (await admin.client.delete("/inbox")).headers["allow"] == "GET"
    await rig.sql("ALTER TABLE interlock.run RENAME COLUMN workspace_id TO gone")
    signed_in = {"Cookie": f"{COOKIE}={admin.client.cookies[COOKIE]}"}
    answer = await rig.http("").get("/runs", headers=signed_in)
    assert (answer.status_code, answer.headers["connection"]) == (500, "close")


@pytest.mark.parametrize(
    "path",
    [
        "/runs?status=lost",
        "/runs?since=1y",
        "/runs?cursor=!",
        "/jobs?status=lost",
        "/runs?workflow=%00",
        "/audit?cursor=wrI",
        "/workflows/x?version=%C2%B2",
    ],
)
async def test_a_wrong_filter_says_what_would_be_right(path: str, admin: Browser) -> None:
    answer = await admin.client.get(path)
    assert answer.status_code == 422 and "text/html" in answer.headers["content-type"]


@pytest.mark.parametrize(
    "wanted", ["//evil.example", "https://evil.example", "/\\\\evil.example", "javascript:alert(1)"]
)
async def test_signing_in_leads_nowhere_else(wanted: str, rig: Rig, admin: Browser) -> None:
    answer = await admin.client.post("/signin", data={"key": rig.admin_key, "next": wanted})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")


async def test_another_site_signs_nobody_in(rig: Rig, admin: Browser) -> None:
    admin.client.cookies.clear()
    headers: dict[str, Any] = {"Sec-Fetch-Site": "cross-site"}
    answer = await admin.client.post("/signin", data={"key": rig.admin_key}, headers=headers)
    assert "set-cookie" not in answer.headers


async def test_a_value_as_deep_as_may_be_is_written_shown_and_proven(rig: Rig, admin: Browser) -> None:
    deep: Any = 1
    for _ in range(DEEPEST - 2):
        deep = [deep]

    @rig.tool("shop.store", writes=True, risk="low")
    async def store(value: Any) -> Any:
        return {"stored": value}

    await rig.apply("""
name: deep
steps:
  - {id: ask, approval: {tier: low, summary: "Store ${input.v}?"}}
  - {id: store, tool: shop.store, input: {value: "${input.v}"}}
  - {id: again, tool: shop.store, input: {value: "${steps.store.output.stored}"}}
""")
    run_id = await rig.start("deep", {"v": deep})
    await admin.get("/inbox")
    async with rig.worker():
        while (run := await rig.until(run_id, "waiting_approval"))["status"] == "waiting_approval":
            (waiting,) = (await rig.http().get("/api/approvals", params={"status": "requested"})).json()["items"]
            await admin.get(f"/approvals/{waiting['id']}")
            answer = await rig.http().post(f"/api/approvals/{waiting['id']}/approve", json={})
            assert answer.status_code == 200, answer.text
    assert (run["status"], run["result"]) == ("succeeded", {"stored": deep}), run["error"]
    for page in (f"/runs/{run_id}", "/runs", "/audit", "/tools/shop.store"):
        await admin.get(page)
    assert (await rig.http().get(f"/api/runs/{run_id}/events")).status_code == 200


async def test_the_reference_names_every_call_and_loads_nothing_from_elsewhere(rig: Rig, admin: Browser) -> None:
    admin.client.cookies.clear()
    answer = await admin.client.get("/api/docs")
    assert answer.status_code == 200 and "content-security-policy" in answer.headers
    described = (await rig.http().get("/api/openapi.json")).json()
    for path, methods in described["paths"].items():
        for method in methods:
            assert f'<b class="verb">{method.upper()}</b> <code>{path}</code>' in answer.text
    assert "deadline_seconds" in answer.text and "https://" not in answer.text


@pytest.mark.parametrize(("origin", "is_secure"), [("https://console.example", True), ("http://test", False)])
async def test_the_cookie_of_a_page_over_tls_is_sent_over_nothing_else(
    rig: Rig, admin: Browser, origin: str, is_secure: bool
) -> None:
    # A proxy on another machine terminates TLS, so the server itself receives HTTP.
    answer = await admin.client.post("/signin", data={"key": rig.admin_key}, headers={"Origin": origin})
    assert ("secure" in answer.headers["set-cookie"].lower()) == is_secure


@pytest.mark.parametrize("ends", ["revoked", "signed out", "expired"])
@pytest.mark.parametrize("page", ["inbox", "run"])
async def test_a_live_page_is_told_nothing_once_its_sign_in_has_ended(
    rig: Rig, sign_in: SignIn, page: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ends == "expired":  # expiry sends no notification: the stream detects it by its clock
        monkeypatch.setattr(live, "_QUIET_SECONDS", 0.0)
    await rig.apply("{name: gate, steps: [{id: ask, approval: {tier: low}}]}")
    run_id = await rig.start("gate")
    vera = await sign_in("viewer", name="vera")
    cookie = f"{COOKIE}={vera.client.cookies[COOKIE]}"
    path, looks = (f"/live/run/{run_id}", 1) if page == "run" else ("/live/inbox", 2)
    async with rig.stream(path, cookie=cookie) as frames, asyncio.timeout(10):
        told = (frame async for frame in frames if frame["event"] != "here")
        for _ in range(looks):
            assert (await anext(told))["event"] == "changed"
        if ends == "revoked":
            [key] = await rig.sql("SELECT id FROM interlock.api_key WHERE name = 'vera'")
            assert (await rig.http().delete(f"/api/keys/{key['id']}")).status_code == 200
        elif ends == "signed out":
            assert (await vera.client.post("/signout", data={"csrf": vera.csrf})).status_code == 303
        else:
            rig.clock.advance(console_sessions.SECONDS)
        await rig.cancel(run_id)
        assert [frame async for frame in told] == []


async def test_who_is_signed_in_keeps_the_menu_where_something_is_wrong(admin: Browser) -> None:
    for path, status in (("/nothing", 404), (f"/runs/{uuid4()}", 404), ("/runs?status=lost", 422)):
        assert 'href="/workflows"' in await admin.get(path, status), path
    admin.client.cookies.clear()
    assert 'href="/workflows"' not in (await admin.client.get("/nothing")).text


async def test_who_was_signed_in_is_told_that_it_ended_and_comes_back_to_the_page(rig: Rig, sign_in: SignIn) -> None:
    browser = await sign_in(name="ida")
    rig.clock.advance(console_sessions.SECONDS + 60)
    looked = await browser.client.get("/runs?status=failed")
    page = (await browser.client.get(looked.headers["location"])).text
    assert "has ended" in page and 'name="next" value="/runs?status=failed"' in page
    sent = await browser.client.post("/signout", data={}, headers={"Referer": "http://test/policy"})
    page = (await browser.client.get(sent.headers["location"])).text
    assert "nothing was done" in page and 'name="next" value="/policy"' in page
    browser.client.cookies.clear()
    assert (await browser.client.get("/inbox")).headers["location"] == "/signin?next=%2Finbox"
