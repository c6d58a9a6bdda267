"""The page of one run: it can be looked at whatever it is at."""

from tests.console.pages import Browser, text_of
from tests.rig import Rig

from interlock import Context, FlowContext, Retryable


async def test_a_run_that_waits_for_an_event_says_for_which(rig: Rig, admin: Browser) -> None:
    await rig.apply("name: w\nsteps: [{id: paid, wait: {event: bank.paid, correlation: ch_1, timeout: 2d}}]")
    run_id = await rig.start("w")
    assert "Waits for bank.paid of ch_1 ; times out in 48 h ." in text_of(await admin.get(f"/runs/{run_id}"))
    await rig.apply("name: w\nsteps: [{id: paid, wait: {event: bank.paid, correlation: 7}}]")
    assert "Waits for bank.paid of 7 ." in text_of(await admin.get(f"/runs/{await rig.start('w')}"))


async def test_a_step_that_will_be_tried_again_is_called_retrying_everywhere(rig: Rig, admin: Browser) -> None:
    @rig.tool("t.busy")
    async def busy() -> None:
        raise Retryable("busy")

    await rig.apply(
        "name: n\nsteps: [{id: a, tool: t.busy, retry: {base_delay: 1h, max_delay: 2h}, needs: []},"
        " {id: b, needs: [a], approval: {}}, {id: c, needs: [a], approval: {}}]"
    )
    run_id = await rig.start("n")
    async with rig.worker():
        await rig.until_journal(run_id, "a: running -retry-> pending")
    first, second, _ = (await rig.http().get(f"/api/runs/{run_id}")).json()["steps"]
    assert (first["status"], first["retrying"], second["retrying"]) == ("pending", True, False)
    page = text_of(await admin.get(f"/runs/{run_id}"))
    assert page.count("retrying") == 2 and "Next attempt in 2 h" in page, "in the graph and in the list"


async def test_what_is_asked_can_be_read_to_its_end(rig: Rig, admin: Browser) -> None:
    """A list has the beginning of a long field and says how much more there is; the question's own page has it all."""

    @rig.tool("crm.note", writes=True, risk="med")
    async def note(text: str) -> None: ...

    await rig.apply('name: n\nsteps: [{id: note, tool: crm.note, input: {text: "${input.text}"}}]')
    run_id = await rig.start("n", {"text": "x" * 5000 + "the end"})
    await rig.work_until(run_id, "waiting_approval")
    [asked] = await rig.sql("SELECT id FROM approval WHERE run_id = $1", run_id)
    for path in ("/inbox", f"/runs/{run_id}"):
        page = await admin.get(path)
        assert f'<a href="/approvals/{asked["id"]}">4,607 more characters</a>' in page and "the end" not in page
    assert "the end" in await admin.get(f"/approvals/{asked['id']}")


async def test_steps_of_a_flow_are_no_graph(rig: Rig, admin: Browser) -> None:
    """None needs another: boxes without arrows would say nothing."""

    @rig.tool("t.read")
    async def read() -> int:
        return 1

    @rig.flow("two")
    async def two(ctx: FlowContext, input: dict[str, object]) -> None:
        await ctx.call("t.read")
        await ctx.call("t.read")

    run_id = await rig.start("two")
    await rig.work_until(run_id, "succeeded")
    assert 'class="graph"' not in await admin.get(f"/runs/{run_id}")


async def test_an_approved_step_that_worked_at_once_had_one_attempt(rig: Rig, admin: Browser) -> None:
    told: list[int] = []

    @rig.tool("crm.note", writes=True, risk="med")
    async def note(ctx: Context) -> None:
        told.append(ctx.attempt)

    await rig.apply("name: n\nsteps: [{id: note, tool: crm.note}]")
    run_id = await rig.start("n", who=await rig.person("mira", "operator"))
    await rig.work_until(run_id, "waiting_approval")
    await rig.approve(run_id)
    run = await rig.work_until(run_id, "succeeded")
    assert (told, run["step"]["note"]["attempt"]) == ([1], 1)
    assert "attempt 2" not in text_of(await admin.get(f"/runs/{run_id}"))
