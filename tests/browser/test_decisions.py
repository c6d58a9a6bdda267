"""The console must never misdirect a decision: a real browser, changing lists, keys, and a server that goes away.

Findings 1, 2, 10, 11 and 17 of the console review.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import pytest
from tests.browser.conftest import Site
from tests.rig import Rig

from interlock.engine.access.principal import Principal
from interlock.wire import Role

ASK = (
    "{{name: {name}, steps: [{{id: ask, approval: {{tier: {tier}, expires_in: 4h, summary: '{name} ${{input.n}}'}}}}]}}"
)


async def ask(rig: Rig, n: int, *, tier: str = "low") -> UUID:
    """A run that waits for an approval."""
    await rig.apply(ASK.format(name=f"ship-{tier}", tier=tier))
    return await rig.start(f"ship-{tier}", {"n": n}, await asker(rig))


async def asker(rig: Rig) -> Principal:
    return await rig.person(
        f"asker-{await rig.database.pool.fetchval('SELECT count(*) FROM interlock.api_key')}", Role.OPERATOR
    )


async def status_of(rig: Rig, run_id: UUID) -> str:
    [row] = await rig.sql("SELECT status FROM interlock.approval WHERE run_id = $1", run_id)
    status: str = row["status"]
    return status


def card(page: Any, text: str) -> Any:
    return page.locator(".card.ask", has_text=text)


def approve(page: Any, text: str) -> Any:
    return card(page, text).locator("[data-key=a]")


async def place(locator: Any) -> tuple[float, float]:
    """Return the screen coordinates of its centre."""
    box = await locator.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


async def stop_clock(page: Any) -> None:
    """From now on only the test moves the page's time, however slow the machine is."""
    await page.clock.install()
    await page.clock.pause_at(datetime.now(UTC) + timedelta(minutes=1))


async def votes(rig: Rig) -> int:
    [row] = await rig.sql("SELECT count(*) AS votes FROM interlock.vote")
    count: int = row["votes"]
    return count


# ---------------------------------------------------------------- the list stands still


async def test_a_decided_card_stays_in_place_and_the_next_one_does_not_slide_under_the_pointer(site: Site) -> None:
    first, second = await ask(site.rig, 1), await ask(site.rig, 2)
    page = await site.visit()
    aimed_at = await place(approve(page, "ship-low 1"))
    below = await place(approve(page, "ship-low 2"))
    await site.rig.decide(first, approves=False, who=await site.rig.person("ann", Role.APPROVER), reason="paid already")
    settled = page.locator(".card.settled", has_text="ship-low 1")
    await settled.wait_for()
    assert re.search(r"ann rejected, \d+ s ago", await settled.inner_text())
    assert await settled.locator("button").count() == 0
    assert await place(approve(page, "ship-low 2")) == below
    await page.mouse.click(*aimed_at)
    await page.mouse.click(*aimed_at)
    assert (await votes(site.rig), await status_of(site.rig, second)) == (1, "requested")


async def test_new_approvals_wait_until_they_are_asked_for(site: Site) -> None:
    await ask(site.rig, 1, tier="med")
    page = await site.visit()
    await card(page, "ship-med 1").get_by_label("Reason").fill("typed so far")
    before = await place(approve(page, "ship-med 1"))
    for n in (2, 3, 4):
        await ask(site.rig, n, tier="med")
    pill = page.get_by_role("button", name="3 new")
    await pill.wait_for()
    assert (await page.locator(".card.ask").count(), await place(approve(page, "ship-med 1"))) == (1, before)
    await pill.click()
    await card(page, "ship-med 4").wait_for()
    assert await page.locator(".card.ask").count() == 4
    assert await card(page, "ship-med 1").get_by_label("Reason").input_value() == "typed so far"
    assert not await page.locator("#fresh").is_visible()


async def test_a_press_on_a_card_that_moved_within_a_second_does_nothing(site: Site) -> None:
    run_id = await ask(site.rig, 1)
    page = await site.visit()
    await stop_clock(page)
    push = "card => { const push = document.createElement('p'); push.textContent = 'x'; card.before(push); }"
    await card(page, "ship-low 1").evaluate(push)
    await approve(page, "ship-low 1").click()
    assert "moved just now" in await page.get_by_role("status").inner_text()
    assert await votes(site.rig) == 0
    await page.clock.fast_forward(1100)
    await approve(page, "ship-low 1").click()
    await page.locator(".card.settled").wait_for()
    assert await status_of(site.rig, run_id) == "approved"


async def test_inserted_cards_can_be_pressed_after_a_second(site: Site) -> None:
    page = await site.visit()
    await stop_clock(page)
    await page.get_by_text("Nothing waits for you").wait_for()
    await ask(site.rig, 1)
    await approve(page, "ship-low 1").click()
    assert await votes(site.rig) == 0
    await page.clock.fast_forward(1100)
    await approve(page, "ship-low 1").click()
    await page.locator(".card.settled").wait_for()


async def test_an_action_that_changes_on_the_screen_takes_a_second_press(site: Site) -> None:
    await ask(site.rig, 1)
    page = await site.visit()
    await stop_clock(page)
    await site.rig.sql("""UPDATE interlock.approval SET digest = repeat('0', 64), summary = 'changed'""")
    await card(page, "changed").wait_for()
    assert "Read it again" in await card(page, "changed").get_by_role("alert").inner_text()
    await page.clock.fast_forward(1100)
    await approve(page, "changed").click()
    assert "Press again" in await approve(page, "changed").inner_text()
    assert await votes(site.rig) == 0


async def test_the_cards_of_a_conversation_stay_until_the_page_is_left(site: Site) -> None:
    """A run's page also keeps a decided card: the cards below it do not slide up."""
    run_id = await ask(site.rig, 1)
    page = await site.visit(f"/runs/{run_id}")
    below = await place(page.locator("#time"))
    await approve(page, "ship-low 1").click()
    await page.locator(".card.settled", has_text="admin approved").wait_for()
    assert await place(page.locator("#time")) == below


# ---------------------------------------------------------------- keys


async def test_no_key_approves_without_a_visible_selection(site: Site) -> None:
    await ask(site.rig, 1)
    page = await site.visit()
    await page.keyboard.press("a")
    await page.keyboard.press("r")
    assert await page.evaluate("document.activeElement === document.body"), "r went to no card"
    await page.keyboard.press("j")
    await page.evaluate("document.querySelector('.card').style.marginTop = '4000px'; scrollTo(0, 0)")
    await page.keyboard.press("a")
    assert await page.evaluate("scrollY") > 0, "the card is shown instead"
    await page.evaluate("document.querySelector('.card h2').style.paddingBottom = '1500px'")
    await page.evaluate("document.querySelector('.card').style.marginBottom = '4000px'")
    await stop_clock(page)
    for _ in range(2):  # the first press also finds that the card moved
        await page.evaluate("scrollBy(0, document.querySelector('.buttons').getBoundingClientRect().top - 10)")
        await page.keyboard.press("a")
        await page.clock.fast_forward(1100)
    assert await page.locator(".card .buttons").count() == 1, "the button was in view, but not what it approves"
    await page.clock.resume()
    await page.get_by_role("button", name="Approve").focus()
    await page.evaluate("scrollTo(0, 0)")
    await page.keyboard.press("Enter")
    assert await votes(site.rig) == 0


async def test_g_swallows_the_next_key_for_three_seconds(site: Site) -> None:
    run_id = await ask(site.rig, 1)
    page = await site.visit()
    await stop_clock(page)
    await page.keyboard.press("j")
    await page.keyboard.press("g")
    await page.locator("#going").wait_for()
    await page.clock.fast_forward(2000)
    await page.keyboard.press("a")
    await page.get_by_role("heading", name="Audit").wait_for()
    assert await votes(site.rig) == 0
    await page.goto(f"{site.address}/inbox")
    await page.keyboard.press("j")
    for key in ("e", "x", "g", "k"):
        await page.keyboard.press("g")
        await page.keyboard.press("Shift")
        assert await page.locator("#going").is_visible(), "Shift is no key of its own"
        await page.keyboard.press(key)
        assert not await page.locator("#going").is_visible()
    await page.keyboard.press("g")
    await page.clock.fast_forward(3100)
    assert not await page.locator("#going").is_visible()
    await page.keyboard.press("a")
    await page.locator(".card.settled").wait_for()
    assert await status_of(site.rig, run_id) == "approved"


@pytest.mark.parametrize("how", ["mouse", "key"])
async def test_high_takes_a_second_press(how: str, site: Site) -> None:
    run_id = await ask(site.rig, 1, tier="high")
    page = await site.visit()
    await stop_clock(page)
    button = approve(page, "ship-high 1")

    async def press() -> None:
        await (button.click() if how == "mouse" else page.keyboard.press("a"))

    await page.keyboard.press("j")
    if how == "mouse":
        await button.dblclick()  # one gesture
    else:
        await page.keyboard.down("a")
        await page.keyboard.down("a")  # the key repeat of a held key
        await page.keyboard.up("a")
    assert await button.inner_text() == "Press again"
    assert await votes(site.rig) == 0
    await press()
    await page.locator(".card.settled").wait_for()
    assert await status_of(site.rig, run_id) == "approved"


async def test_two_people_take_a_second_press_and_the_question_is_withdrawn_after_a_while(site: Site) -> None:
    await site.rig.apply("{name: pair, steps: [{id: ask, approval: {tier: low, two_person: true, summary: both}}]}")
    await site.rig.start("pair", {}, await asker(site.rig))
    page = await site.visit()
    await stop_clock(page)
    await approve(page, "both").click()
    await page.clock.fast_forward(9000)
    assert await approve(page, "both").inner_text() == "Approve"
    await approve(page, "both").click()
    assert await votes(site.rig) == 0
    await approve(page, "both").click()
    await card(page, "both").locator(".barred").wait_for()
    assert "One more approver is needed" in await page.get_by_role("status").inner_text()


# ---------------------------------------------------------------- sending


async def test_deciding_keeps_the_scroll_position_the_selection_and_other_reasons(site: Site) -> None:
    for n in range(8):
        await ask(site.rig, n)
    page = await site.visit(viewport={"width": 900, "height": 500})
    for _ in range(5):
        await page.keyboard.press("j")
    chosen = await page.locator("[data-selected]").get_attribute("id")
    await page.locator(".card.ask").nth(2).get_by_label("Reason").fill("not yet sent")
    await page.locator("[data-selected]").scroll_into_view_if_needed()
    scrolled = await page.evaluate("scrollY")
    assert scrolled > 0
    await page.evaluate("document.activeElement.blur()")
    await page.keyboard.press("a")
    await page.locator(f"#{chosen}.settled").wait_for()
    assert await page.evaluate("scrollY") == scrolled
    assert await page.locator("[data-selected]").get_attribute("id") == chosen
    assert await page.locator(".card.ask").nth(2).get_by_label("Reason").input_value() == "not yet sent"


async def test_a_refusal_of_the_server_is_shown_on_its_card(site: Site) -> None:
    run_id = await ask(site.rig, 1)
    page = await site.visit()

    async def forge(route: Any) -> None:
        sent = re.sub("digest=[^&]+", "digest=" + "0" * 64, route.request.post_data)
        await route.continue_(post_data=sent)

    await page.route("**/approve", forge)
    await card(page, "ship-low 1").get_by_label("Reason").fill("looks right")
    await approve(page, "ship-low 1").click()
    refused = card(page, "ship-low 1").get_by_role("alert")
    await refused.wait_for()
    assert len(await refused.inner_text()) > 20
    assert await card(page, "ship-low 1").get_by_label("Reason").input_value() == "looks right"
    assert await status_of(site.rig, run_id) == "requested"


@asynccontextmanager
async def line_to(site: Site) -> AsyncIterator["Line"]:
    """Put the site behind a connection that the test can cut."""
    direct = site.address
    line = Line(urlsplit(direct).port or 0)
    await line.mend()
    site.address = site.browsers._address = f"http://127.0.0.1:{line.port}"
    try:
        yield line
    finally:
        await line.cut()
        site.address = site.browsers._address = direct
        site.browsers.complaints[:] = [said for said in site.browsers.complaints if "net::ERR_" not in said]


class Line:
    """Forwards bytes. When cut, it refuses connections and drops existing ones, like a stopped server."""

    def __init__(self, to: int) -> None:
        self.port, self._to = 0, to
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._open):
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        ways = [asyncio.create_task(self._copy(reader, back)), asyncio.create_task(self._copy(there, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for end in (back, writer):
            end.transport.abort()
        await asyncio.wait(ways)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            self._open.discard(writer)


async def test_a_server_that_is_away_costs_no_reason_and_the_page_says_so(site: Site) -> None:
    run_id = await ask(site.rig, 1)
    async with line_to(site) as line:
        page = await site.visit()
        await card(page, "ship-low 1").get_by_label("Reason").fill("a reason that took a while")
        await line.cut()
        banner = page.locator("#stale")
        await banner.wait_for()
        assert re.fullmatch(r"Not current since \d\d:\d\d\. Retrying\.", await banner.inner_text())
        await card(page, "ship-low 1").get_by_role("button", name="Reject").click()
        refused = card(page, "ship-low 1").get_by_role("alert")
        await refused.wait_for()
        assert "did not answer" in await refused.inner_text()
        assert await card(page, "ship-low 1").get_by_label("Reason").input_value() == "a reason that took a while"
        assert page.url == f"{site.address}/inbox"
        await line.mend()
        await banner.wait_for(state="hidden")
        await card(page, "ship-low 1").get_by_role("button", name="Reject").click()
        await page.locator(".card.settled").wait_for()
        [vote] = await site.rig.sql("SELECT decision, reason FROM interlock.vote")
        assert (vote["decision"], vote["reason"]) == ("rejected", "a reason that took a while")
        assert await status_of(site.rig, run_id) == "rejected"
        await page.close()


async def test_without_script_the_form_decides(site: Site) -> None:
    run_id = await ask(site.rig, 1)
    page = await site.visit(java_script_enabled=False)
    await approve(page, "ship-low 1").click()
    await page.get_by_role("status").wait_for()
    assert await status_of(site.rig, run_id) == "approved"


# ---------------------------------------------------------------- confirmation


async def test_cancel_asks_first(site: Site) -> None:
    run_id = await ask(site.rig, 1)
    page = await site.visit(f"/runs/{run_id}")
    questions: list[str] = []

    async def dismiss(dialog: Any) -> None:
        questions.append(dialog.message)
        await dialog.dismiss()

    page.on("dialog", dismiss)
    await page.get_by_role("button", name="Cancel run").click()
    assert "Cancel this run of ship-low?" in questions[0]
    assert (await site.rig.run(run_id))["status"] == "waiting_approval"
    page.remove_listener("dialog", dismiss)
    page.on("dialog", lambda dialog: dialog.accept())
    await page.get_by_role("button", name="Cancel run").click()
    await page.locator(".head", has_text="canceled").wait_for()


async def test_an_unsaved_policy_is_not_left_without_a_question(site: Site) -> None:
    page = await site.visit("/policy")
    questions: list[str] = []

    async def stay(dialog: Any) -> None:
        questions.append(dialog.type)
        await dialog.dismiss()

    page.on("dialog", stay)
    text = page.get_by_label("The policy, in Cedar")
    await text.click()
    await page.keyboard.type("// mine")
    await page.get_by_role("link", name="Runs").click()
    assert questions == ["beforeunload"]
    assert "// mine" in await text.input_value()
    await page.get_by_role("button", name="Check").click()
    await page.get_by_text("no mistakes").wait_for()
    await page.get_by_label("The policy, in Cedar").click()
    await page.get_by_role("link", name="Runs").click()
    assert questions == ["beforeunload", "beforeunload"], "checked is not published"
    await page.get_by_role("link", name="Discard").click()
    await page.get_by_text("How to change it").wait_for()
    assert len(questions) == 2
