"""The pages of workflows: the list, the changes between versions, and starting a run."""

import json
import re

from tests.console.pages import HOSTILE, Browser, SignIn, text_of
from tests.rig import Rig

YAML = """
name: refund
description: Give money back.
steps:
  - {id: lookup, tool: shop.lookup, input: {charge: "${input.charge}"}}
  - {id: fraud, tool: shop.score, needs: [lookup]}
  - {id: orders, tool: shop.orders, needs: [lookup]}
  - {id: review, needs: [fraud, orders], approval: {tier: high, summary: "Refund ${input.amount}?"}}
"""


async def test_without_workflows_the_page_says_what_to_do(admin: Browser) -> None:
    assert "interlock workflow apply" in await admin.get("/workflows")
    assert "no workflow refund" in await admin.get("/workflows/refund", 404)


async def test_workflows_are_listed_with_version_cap_and_last_run(rig: Rig, admin: Browser) -> None:
    await rig.apply(YAML)
    await rig.apply(YAML.replace("high", "low"))
    await rig.apply("name: capped\ncaps: {max_concurrency: 3}\nsteps: [{id: a, tool: t.a}]")
    run = await rig.start("refund", {"charge": "c"})
    page = await admin.get("/workflows")
    assert f"/runs/{run}" in page and "/runs?workflow=refund" in page
    text = text_of(page)
    assert "Give money back." in text and "0 of 3" in text and "pending" in text


async def test_a_workflow_shows_its_source_its_graph_and_its_versions(rig: Rig, admin: Browser) -> None:
    await rig.apply(YAML)
    await rig.apply(YAML.replace("high", "low"))
    page = await admin.get("/workflows/refund")
    text = text_of(page)
    # In the usual order of the fields, though the stored definition has no order.
    assert "name: refund description: Give money back. steps: - id: lookup tool: shop.lookup" in text
    assert page.count('<g class="node">') == 4 and page.count('class="arrow"') == 4
    assert "version 2" in text and "/workflows/refund?version=1" in page
    assert "tier: high" in text_of(await admin.get("/workflows/refund?version=1"))


async def test_two_versions_are_compared(rig: Rig, admin: Browser) -> None:
    await rig.apply(YAML)
    await rig.apply(YAML.replace("high", "low"))
    page = await admin.get("/workflows/refund?version=2&against=1")
    assert re.search(r'<span class="del">-[^<]*tier: high', page)
    assert re.search(r'<span class="add">\+[^<]*tier: low', page)
    assert "They say the same" in await admin.get("/workflows/refund?version=1&against=1")
    assert "version 9" in await admin.get("/workflows/refund?version=1&against=9", 404)
    assert "not &#39;x&#39;" in await admin.get("/workflows/refund?version=x", 422)


async def test_a_run_is_started_from_its_page(rig: Rig, admin: Browser) -> None:
    await rig.apply(YAML)
    page = await admin.get("/workflows/refund")
    assert "amount" in text_of(page) and "of its input" in text_of(page)
    after = await admin.post("/workflows/refund/start", input='{"charge": "ch_1"}', once="1")
    assert "Started." in after
    [run] = await rig.sql("SELECT input, trigger, requested_by FROM interlock.run")
    assert json.loads(run["input"]) == {"charge": "ch_1"}
    assert json.loads(run["trigger"])["source"] == "console" and run["requested_by"].startswith("ada:")


async def test_a_form_that_is_sent_twice_starts_one_run(rig: Rig, admin: Browser) -> None:
    await rig.apply(YAML)
    for once, input in (("a", "{}"), ("a", "{}"), ("a", '{"n": 1}'), ("b", "{}")):
        await admin.post("/workflows/refund/start", input=input, once=once)
    assert [row["n"] for row in await rig.sql("SELECT count(*) AS n FROM interlock.run")] == [3]


async def test_an_input_that_is_wrong_is_shown_where_it_was_typed(rig: Rig, admin: Browser) -> None:
    await rig.apply(YAML)
    for typed, says in (
        ('{"charge": }', "not JSON"),
        ("[1]", "a JSON object"),
        ('{"a": "' + HOSTILE + '", }', "not JSON"),
        ('{"a": "\\u0000"}', "cannot be stored"),
    ):
        page = await admin.post("/workflows/refund/start", 422, input=typed, once="1")
        assert says in text_of(page)
        assert typed in text_of(page)  # the user's input is kept
    assert await rig.sql("SELECT FROM interlock.run") == []


async def test_a_certain_version_is_started_if_that_is_shown(rig: Rig, admin: Browser) -> None:
    await rig.apply(YAML)
    await rig.apply(YAML.replace("high", "low"))
    assert 'name="version" value="1"' in await admin.get("/workflows/refund?version=1")
    await admin.post("/workflows/refund/start", input="{}", version="1", once="1")
    assert [row["v"] for row in await rig.sql("SELECT workflow_version AS v FROM interlock.run")] == [1]


async def test_who_may_not_start_is_not_asked_to_and_refused(rig: Rig, viewer: Browser, sign_in: SignIn) -> None:
    await rig.apply(YAML)
    assert "/start" not in await viewer.get("/workflows/refund")
    await viewer.refused("/workflows/refund/start", input="{}")
    operator = await sign_in("operator")
    assert "/start" in await operator.get("/workflows/refund")
    answer = await operator.client.post("/workflows/refund/start", data={"input": "{}", "csrf": "0" * 64})
    assert answer.status_code == 403
    assert await rig.sql("SELECT FROM interlock.run") == []


async def test_another_tenant_and_another_workspace_see_nothing(rig: Rig, sign_in: SignIn) -> None:
    await rig.apply(YAML)
    run = await rig.start("refund", {})
    other = await rig.tenant("other")
    stranger = await sign_in("admin", tenant_id=other.tenant_id)
    assert "refund" not in text_of(await stranger.get("/workflows")).replace("interlock workflow apply refund.yaml", "")
    await stranger.get("/workflows/refund", 404)
    assert "no workflow" in await stranger.post("/workflows/refund/start", 404, input="{}")
    # A workflow belongs to the tenant; its page does not show runs of other workspaces.
    neighbour = await sign_in("viewer", workspace_id="east", name="nora")
    assert str(run) not in await neighbour.get("/workflows")


async def test_pages_stay_small_and_harmless(rig: Rig, admin: Browser) -> None:
    steps = "\n".join(f'  - {{id: s{n}, tool: t.a, input: {{x: "{HOSTILE} &&&&&&&&&& {n}"}}}}' for n in range(900))
    long = f"name: long\ndescription: '{HOSTILE}'\nsteps:\n{steps}"
    await rig.apply(long)
    for change in range(55):
        await rig.apply(f"name: w{change}\ndescription: '{HOSTILE * 20}'\nsteps: [{{id: a, tool: t.a}}]")
        await rig.apply(f"name: w\ndescription: '{change}'\nsteps: [{{id: a, tool: t.a}}]")
    await rig.apply(long.replace("&&&", "<<<"))
    for path in ("/workflows", "/workflows/long", "/workflows/long?version=2&against=1", "/workflows/w"):
        await admin.get(path)
    assert "more characters" in await admin.get("/workflows/long")
    first = await admin.get("/workflows")
    following = re.search(r'href="(/workflows\?[^"]*cursor=[^"]+)"', first)
    assert following is not None
    assert ">w9<" in await admin.get(following[1].replace("&amp;", "&"))
