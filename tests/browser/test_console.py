"""The console in a real browser: people sign in, decide, watch and search, and see only their own tenant's data."""

import asyncio
import contextlib
import re
from typing import Any

import pytest
from playwright.async_api import TimeoutError as PlaywrightTimeout
from playwright.async_api import expect
from tests.browser.chromium import AXE
from tests.browser.conftest import Site
from tests.browser.shop import REFUND, SCRIPT, SUPPORT, open_shop

from interlock.definition.agent import parse_agent
from interlock.engine import workflows
from interlock.wire import Role

WATCHED = """
name: watched
steps:
  - {id: first, tool: shop.wait}
  - {id: second, tool: shop.lookup, input: {charge: "${input.charge}"}}
"""


async def held(site: Site, *charges: str) -> list[Any]:
    """Start refunds that wait for approval, one after the other."""
    asker = await site.rig.person("asker", Role.OPERATOR)
    await site.rig.apply(REFUND)
    ids = []
    for charge in charges:
        ids.append(await site.rig.start("refund", {"charge": charge, "amount": 120, "note": SCRIPT}, asker))
        await site.rig.until(ids[-1], "waiting_approval")
    return ids


async def test_signing_in_and_out(site: Site) -> None:
    page = await site.browsers.page()
    await page.goto(f"{site.address}/runs?status=failed")
    await page.get_by_label("API key").fill("il_nobody_has_this_key_1234567890")
    await page.get_by_role("button", name="Sign in").click()
    assert "not known" in await page.get_by_role("alert").inner_text()
    await page.get_by_label("API key").fill(site.rig.admin_key)
    await page.get_by_role("button", name="Sign in").click()
    await page.wait_for_url("**/runs?status=failed")
    [cookie] = [c for c in await page.context.cookies() if c["name"] == "interlock_session"]
    assert cookie["httpOnly"] and cookie["sameSite"] == "Lax" and site.rig.admin_key not in str(cookie)
    await page.get_by_role("button", name="Sign out").click()
    await page.wait_for_url("**/signin")
    await page.context.add_cookies([cookie])
    await page.goto(f"{site.address}/inbox")
    assert "/signin" in page.url, "the sign-in ended on the server, not only in this browser"


async def test_a_card_that_one_approves_is_settled_for_the_other(site: Site) -> None:
    done = open_shop(site.rig)
    async with site.rig.worker():
        [run_id, _] = await held(site, "ch_1", "ch_2")
        first, second = await site.visit(), await site.visit(key=await site.rig.key("boss", Role.APPROVER))
        await second.get_by_text("ch_1").wait_for()
        await first.locator(".card", has_text="ch_1").get_by_role("button", name="Approve").click()
        await first.get_by_role("status").wait_for()
        settled = second.locator(".card.settled", has_text="ch_1")
        await settled.wait_for()
        assert "admin approved" in await settled.inner_text()
        assert await settled.get_by_role("button").count() == 0
        assert await second.locator(".card:not(.settled)", has_text="ch_2").count() == 1
        await site.rig.until(run_id, "succeeded")
    assert done["refunds"] == [("ch_1", 120)]


async def test_rejecting_with_a_reason(site: Site) -> None:
    open_shop(site.rig)
    async with site.rig.worker():
        [run_id] = await held(site, "ch_1")
        page = await site.visit()
        card = page.locator(".card", has_text="ch_1")
        await card.get_by_label("Reason").fill("not this week")
        await card.get_by_role("button", name="Reject").click()
        await page.get_by_role("status").wait_for()
        await site.rig.until(run_id, "failed")
    await page.goto(f"{site.address}/runs/{run_id}")
    assert "rejected" in await page.locator(".head").inner_text()


async def test_an_edited_action_is_shown_as_a_difference(site: Site) -> None:
    done = open_shop(site.rig)
    async with site.rig.worker():
        [run_id] = await held(site, "ch_1")
        page = await site.visit()
        await page.get_by_text("Edit before allowing").click()
        await page.get_by_label("Fields to change").fill("{amount: 5}")
        alert = page.get_by_role("alert")
        for _ in range(10):  # a card that moved within the last second takes no press
            await page.get_by_role("button", name="Approve").click()
            with contextlib.suppress(TimeoutError, PlaywrightTimeout):
                await alert.wait_for(timeout=1500)
                break
        assert "not JSON" in await alert.inner_text()
        await page.get_by_label("Fields to change").fill('{"amount": 5}')
        await page.get_by_role("button", name="Approve").click()
        assert "Another person" in await page.get_by_role("status").inner_text()
        assert await page.locator(".diff .del").inner_text() == "−\tamount\t120"
        assert "cannot approve" in await page.locator(".card").inner_text(), "who edited it may not allow it"
        await page.keyboard.press("j")
        await page.keyboard.press("a")
        await page.keyboard.press("r")
        assert await page.get_by_label("Reason").evaluate("field => field === document.activeElement"), "a did nothing"
        other = await site.visit(key=await site.rig.key("boss", Role.APPROVER))
        await other.get_by_role("button", name="Approve").click()
        await other.get_by_role("status").wait_for()
        await site.rig.until(run_id, "succeeded")
    assert done["refunds"] == [("ch_1", 5)]


async def test_a_live_run_is_followed_to_its_end(site: Site) -> None:
    done = open_shop(site.rig)
    await site.rig.apply(WATCHED)
    async with site.rig.worker():
        run_id = await site.rig.start("watched", {"charge": "ch_1"})
        page = await site.visit(f"/runs/{run_id}")
        await page.locator("#step-first .state.busy").wait_for()
        await page.locator("#step-second summary").click()
        done["go"].set()
        await page.locator(".head .state.good").wait_for()
    assert await page.locator("#step-second").get_attribute("open") is not None, "what a person opened stays open"
    assert "Output" in await page.locator("#step-second").inner_text()
    assert await page.locator(".timeline rect").count() == 2
    assert await page.locator("body").get_attribute("data-live") is not None


async def support(site: Site) -> None:
    plan = parse_agent(SUPPORT.encode(), file="support")
    await site.rig.database.run_in_transaction(lambda tx: workflows.apply(tx, site.rig.database, site.rig.admin, plan))


async def test_a_conversation_with_an_interrupt(site: Site) -> None:
    done = open_shop(site.rig)
    await support(site)
    async with site.rig.worker():
        page = await site.visit("/sessions")
        await page.clock.install()
        await page.get_by_label("Agent").select_option("support")
        await page.get_by_label("Message").fill("refund ch_1")
        await page.get_by_role("button", name="Begin").click()
        await page.locator(".answer", has_text="Now I would refund it").wait_for()
        await page.locator(".call", has_text="shop.refund").wait_for()
        await page.get_by_role("button", name="Approve").wait_for()
        await page.clock.fast_forward(2000)  # clicks on a card that has just appeared do not count
        await page.get_by_role("button", name="Approve").click()
        await page.locator(".answer", has_text="The refund is done").wait_for()
        assert done["refunds"] == [("ch_1", 40)]
        await page.get_by_label("Message").fill("wait")
        await page.keyboard.press("Enter")
        await page.locator(".call", has_text="shop.wait").wait_for()
        await page.get_by_label("Message").fill("what I type stays while the page changes")
        await page.get_by_role("button", name="Interrupt").click()
        await page.locator(".verdict", has_text="interrupted").wait_for()
        await page.get_by_label("Message").fill(SCRIPT)
        await page.keyboard.press("Enter")
        await page.locator(".answer", has_text="You said: <script>").wait_for()
        await page.get_by_role("button", name="Interrupt").wait_for(state="hidden")
        assert await page.locator("main script").count() == 0


async def test_a_worker_is_paused(site: Site) -> None:
    open_shop(site.rig)
    async with site.rig.worker() as worker:
        page = await site.visit("/workers")
        row = page.locator(f"#worker-{worker.me.id}")
        await row.get_by_role("button", name="Pause").click()
        await page.get_by_role("status").wait_for()
        await row.locator(".state.warn").wait_for()
        await row.get_by_role("button", name="Resume").click()
        await row.locator(".state.busy").wait_for()
        guest = await site.visit("/workers", key=await site.rig.key("guest", Role.VIEWER))
        await guest.locator(f"#worker-{worker.me.id}").wait_for()
        assert await guest.get_by_role("button", name="Pause").count() == 0
        csrf = await guest.locator(".me [name=csrf]").get_attribute("value")
        asked = f"{site.address}/workers/{worker.me.id}/terminate"
        assert (await guest.request.post(asked, form={"csrf": csrf}, max_redirects=0)).status == 403


async def test_a_policy_is_published_after_a_backtest(site: Site) -> None:
    open_shop(site.rig)
    async with site.rig.worker():
        await held(site, "ch_1")
    page = await site.visit("/policy")
    text = page.get_by_label("The policy, in Cedar")
    await text.fill(
        (await text.input_value()) + '\n@id("stop") forbid(principal, action == Action::"shop.refund", resource);'
    )
    assert await page.get_by_role("button", name="Publish").count() == 0
    await page.get_by_role("button", name="Backtest").click()
    assert "shop.refund" in await page.locator("#result").inner_text()
    await page.get_by_role("button", name="Publish").click()
    await page.get_by_role("status").wait_for()
    [row] = await site.rig.sql("SELECT version, text FROM interlock.policy")
    assert row["version"] == 1 and '@id("stop")' in row["text"]


async def test_keys_are_enough(site: Site) -> None:
    done = open_shop(site.rig)
    async with site.rig.worker():
        [first, second] = await held(site, "ch_1", "ch_2")
        page = await site.visit()
        press = page.keyboard.press
        await press("?")
        await page.get_by_role("dialog").wait_for()
        await press("Escape")
        await press("j")
        await press("j")
        assert "ch_2" in await page.locator(".card[data-selected]").inner_text()
        await press("k")
        await press("a")
        await page.get_by_role("status").wait_for()
        await site.rig.until(first, "succeeded")
        await press("j")
        await press("r")
        await page.keyboard.type("no more today")
        await press("Enter")
        await page.locator(".card.settled", has_text="no more today").wait_for()
        await site.rig.until(second, "failed")
        await press("g")
        await press("r")
        await page.wait_for_url("**/runs")
        await press("j")
        await press("Enter")
        await page.wait_for_url(f"**/runs/{second}")
    assert done["refunds"] == [("ch_1", 120)]


PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


def _long_names(site: Site) -> str:
    """A tool whose name and parameter have the maximum length."""
    name = f"crm.{'long_' * 14}name"

    @site.rig.tool(name, writes=True, risk="med")
    async def long(a_parameter_that_somebody_named_with_great_care_and_in_full: str) -> None: ...

    return name


async def test_a_phone_is_enough(site: Site) -> None:
    done = open_shop(site.rig)
    tool = _long_names(site)
    given = "a_parameter_that_somebody_named_with_great_care_and_in_full: x"
    await site.rig.apply(f"{{name: {'long-' * 12}name, steps: [{{id: s, tool: {tool}, input: {{{given}}}}}]}}")
    async with site.rig.worker():
        [run_id] = await held(site, "ch_1")
        long = await site.rig.start(f"{'long-' * 12}name", who=await site.rig.person("mira", Role.OPERATOR))
        await site.rig.until(long, "waiting_approval")
        page = await site.visit(**PHONE)
        for path in ("/runs", f"/runs/{long}", f"/tools/{tool}", "/workflows", "/audit", f"/runs/{run_id}", "/inbox"):
            await page.goto(site.address + path)
            assert await page.evaluate("document.documentElement.scrollWidth") <= 360, f"{path} is wider than the phone"
        button = page.locator(".card", has_text="ch_1").get_by_role("button", name="Approve")
        box = await button.bounding_box()
        assert box is not None and box["height"] >= 44, "a thumb needs room"
        await button.tap()
        await page.get_by_role("status").wait_for()
        await site.rig.until(run_id, "succeeded")
    assert done["refunds"] == [("ch_1", 120)]


async def test_a_viewer_cannot_act(site: Site) -> None:
    done = open_shop(site.rig)
    async with site.rig.worker():
        [run_id] = await held(site, "ch_1")
        page = await site.visit(key=await site.rig.key("guest", Role.VIEWER))
        assert "viewer" in await page.locator(".card .barred").inner_text()
        assert await page.get_by_role("button", name="Approve").count() == 0
        await page.goto(f"{site.address}/runs/{run_id}")
        assert await page.get_by_role("button", name="Cancel run").count() == 0
        csrf = await page.locator(".me [name=csrf]").get_attribute("value")
        for path in (f"/runs/{run_id}/cancel", f"/runs/{run_id}/retry"):
            answer = await page.request.post(site.address + path, form={"csrf": csrf}, max_redirects=0)
            assert answer.status == 403, path
    assert done["refunds"] == []


async def test_another_tenant_sees_nothing(site: Site) -> None:
    open_shop(site.rig)
    other = await site.rig.tenant("other")
    key = await site.rig.key("stranger", Role.ADMIN, other.tenant_id)
    async with site.rig.worker():
        [run_id] = await held(site, "ch_1")
        page = await site.visit(key=key)
        await page.get_by_text("Nothing waits for you").wait_for()
        await page.goto(f"{site.address}/runs")
        await page.get_by_text("No runs yet").wait_for()
        [asked] = await site.rig.database.fetch(
            "list_approvals", site.rig.admin.tenant_id, None, None, run_id, 5, None, None
        )
        for path in (f"/runs/{run_id}", f"/approvals/{asked['id']}", f"/live/run/{run_id}", f"/runs/{run_id}/evidence"):
            answer = await page.request.get(site.address + path)
            assert answer.status == 404, path
            assert "ch_1" not in await answer.text()


async def test_a_script_in_a_field_stays_text(site: Site) -> None:
    open_shop(site.rig)
    sly = await site.rig.person(SCRIPT, Role.OPERATOR)
    await site.rig.apply(REFUND)
    async with site.rig.worker():
        given = {"charge": f"ch_{SCRIPT}", "amount": 3, "note": SCRIPT}
        run_id = await site.rig.start("refund", given, sly, trigger={"source": "api", "ref": SCRIPT})
        await site.rig.until(run_id, "waiting_approval")
        page = await site.visit(key=await site.rig.key(SCRIPT, Role.APPROVER))
        await page.get_by_label("Reason").fill(SCRIPT)
        await page.get_by_role("button", name="Reject").click()
        await page.get_by_role("status").wait_for()
        await site.rig.until(run_id, "failed")
    http = site.rig.http()
    job = (await http.post("/api/jobs", json={"task_description": SCRIPT, "workflow": "refund"})).json()
    worker = (await http.post("/api/workers", json={"name": SCRIPT})).json()
    session = (await http.post("/api/messages", json={"content": SCRIPT})).json()
    [asked] = (await http.get(f"/api/approvals?run_id={run_id}")).json()["items"]
    pages = (
        "/inbox", f"/approvals/{asked['id']}", "/runs", f"/runs/{run_id}", f"/runs?q={SCRIPT}",
        "/runs?workflow=<script>", "/jobs", f"/jobs/{job['id']}", "/workers", f"/workers/{worker['id']}", "/sessions",
        f"/sessions/{session['session_id']}", "/workflows/refund", "/audit", "/usage",
    )  # fmt: skip
    for path in pages:
        await page.goto(site.address + path)
        assert await page.title() != "broken in"
        assert await page.locator("main script").count() == 0
    await page.goto(f"{site.address}/runs/{run_id}")
    assert SCRIPT in await page.content() or "&lt;script&gt;" in await page.content()


async def test_times_are_relative_for_a_day_and_a_touch_shows_them_in_full(site: Site) -> None:
    """console 21: the date was in a tooltip only, which a touch screen does not show."""
    await site.rig.apply("{name: gate, steps: [{id: ask, approval: {}}]}")
    await site.rig.start("gate")
    page = await site.visit("/runs")
    began = page.locator("[data-label=began] time")
    in_full = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$")
    await expect(began).to_have_text(re.compile(r"s ago$"))
    await began.click()
    await expect(began).to_have_text(in_full)
    await began.click()
    await expect(began).to_have_text(re.compile(r"s ago$"))
    await page.evaluate("const now = Date.now; Date.now = () => now() + 25 * 3600 * 1000")
    await page.evaluate("document.dispatchEvent(new Event('interlock:looked'))")
    await expect(began).to_have_text(in_full)


async def test_axe_finds_nothing(site: Site) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not here and could not be installed: `python -m tests.browser.chromium` says why")
    open_shop(site.rig)
    lists = (
        "/signin", "/inbox", "/runs", "/runs?status=failed", "/sessions", "/workers", "/jobs", "/workflows",
        "/schedules", "/policy", "/tools", "/audit", "/usage",
    )  # fmt: skip
    async with site.rig.worker() as worker:
        [run_id] = await held(site, "ch_1")
        http = site.rig.http()
        job = (await http.post("/api/jobs", json={"task_description": "all of it", "workflow": "refund"})).json()
        session = (await http.post("/api/messages", json={"content": "hello"})).json()
        [asked] = (await http.get(f"/api/approvals?run_id={run_id}")).json()["items"]
        single = (
            f"/runs/{run_id}", f"/approvals/{asked['id']}", f"/sessions/{session['session_id']}", f"/jobs/{job['id']}",
            f"/workers/{worker.me.id}", "/workflows/refund", "/tools/shop.refund",
        )  # fmt: skip
        for scheme, paths in (("light", lists + single), ("dark", lists + single[:3])):
            page = await site.visit(color_scheme=scheme)
            for path in paths:
                await page.goto(site.address + path)
                assert await findings(page) == [], f"{path}, {scheme}"


async def findings(page: Any) -> list[str]:
    await page.evaluate(await asyncio.to_thread(AXE.read_text))
    await page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    found = await page.evaluate("axe.run().then(r => r.violations)")
    return [f"{each['id']}: {node['target']} {node['failureSummary']}" for each in found for node in each["nodes"]]
