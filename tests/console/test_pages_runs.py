"""The page of one run: it opens in every state of the run."""

import re

from tests.console.pages import Browser, text_of
from tests.rig import Rig

from interlock import Context, FlowContext, Retryable, Terminal


async def test_a_run_that_waits_for_an_event_says_for_which(rig: Rig, admin: Browser) -> None:
    await rig.apply("name: w\nsteps: [{id: paid, wait: {event: bank.paid, correlation: ch_1, timeout: 2d}}]")
    run_id = await rig.start("w")
    page = text_of(await admin.get(f"/runs/{run_id}"))
    assert re.search(r"Waits for bank.paid of ch_1 ; times out \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC \.", page)
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
    """A list shows the beginning of a long field and the length of the rest; the approval's page shows all of it."""

    @rig.tool("crm.note", writes=True, risk="med")
    async def note(text: str) -> None: ...

    await rig.apply('name: n\nsteps: [{id: note, tool: crm.note, input: {text: "${input.text}"}}]')
    run_id = await rig.start("n", {"text": "x" * 5000 + "the end"})
    await rig.work_until(run_id, "waiting_approval")
    [asked] = await rig.sql("SELECT id FROM interlock.approval WHERE run_id = $1", run_id)
    for path in ("/inbox", f"/runs/{run_id}"):
        page = await admin.get(path)
        assert f'<a href="/approvals/{asked["id"]}">4,607 more characters</a>' in page and "the end" not in page
        assert 'data-key="a"' not in page and "Read all of it to approve" in page, (
            "nobody approves what they cannot see"
        )
    page = await admin.get(f"/approvals/{asked['id']}")
    assert "the end" in page and 'data-key="a"' in page


async def test_steps_of_a_flow_are_no_graph(rig: Rig, admin: Browser) -> None:
    """Steps of a flow have no dependencies: boxes without arrows would say nothing."""

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


async def test_retry_is_offered_where_it_would_be_accepted_and_a_retried_run_says_so(rig: Rig, admin: Browser) -> None:
    """Console review 16."""

    @rig.tool("shop.break", writes=False)
    async def broken() -> None:
        raise Terminal("no such charge")

    @rig.tool("shop.refund", writes=True, risk="low", undo="shop.take_back", key="refund")
    async def refund() -> dict[str, str]:
        return {"id": "re_1"}

    @rig.tool("shop.take_back", writes=True, risk="low", key="take-back:{id}")
    async def take_back(id: str) -> None: ...

    await rig.apply("{name: plain, steps: [{id: a, tool: shop.break}]}")
    undo = "compensate: {tool: shop.take_back, input: {id: '${output.id}'}}"
    await rig.apply(f"{{name: undone, steps: [{{id: a, tool: shop.refund, {undo}}}, {{id: b, tool: shop.break}}]}}")
    async with rig.worker():
        plain, undone = await rig.start("plain"), await rig.start("undone")
        for run_id in (plain, undone):
            await rig.until(run_id, "failed")
        page = await admin.get(f"/runs/{undone}")
        assert f"/runs/{undone}/retry" not in page
        assert "This run cannot be retried: it undid what it had done" in text_of(page)
        page = await admin.get(f"/runs/{plain}")
        assert f"/runs/{plain}/retry" in page and "Retried as" not in page
        assert text_of(page).count("Terminal no such charge") == 2, "the run's error and its step's, with their type"
        again = await admin.post(f"/runs/{plain}/retry")
        assert f"Retry of run {str(plain)[-8:]}" in text_of(again)
        page = await admin.get(f"/runs/{plain}")
        assert "Retried as run" in text_of(page) and "This run was retried already" in page


async def test_the_bar_of_a_failed_job_has_the_colour_of_a_failure(rig: Rig, admin: Browser) -> None:
    """Console review 30: it was a full blue bar, like that of a job that did everything."""

    @rig.tool("t.break")
    async def broken() -> None:
        raise Terminal("no")

    await rig.apply("{name: fails, steps: [{id: a, tool: t.break}]}")
    await rig.apply("{name: works, steps: [{id: a, wait: {duration: 0s}}]}")
    http = rig.http()
    async with rig.worker():
        for workflow, end in (("works", "completed"), ("fails", "failed")):
            job = (await http.post("/api/jobs", json={"task_description": workflow, "workflow": workflow})).json()
            while (await http.get(f"/api/jobs/{job['id']}")).json()["status"] != end:
                await rig.sweep()
            for page in ("/jobs", f"/jobs/{job['id']}"):
                bars = re.findall(r"<progress[^>]*>", await admin.get(page))
                assert ['class="bad"' in bar for bar in bars][:1] == [end == "failed"]
