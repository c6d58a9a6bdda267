"""Every row of the step table that the engine can produce, one test per row."""

import asyncio
import threading
from datetime import timedelta

import pytest
from tests.rig import Hold, Rig

from interlock import Context, Retryable, Terminal
from interlock.worker import step_recorder, thread_runner, worker


def workflow(*steps: str, **top: str) -> str:
    head = "".join(f"{key}: {value}\n" for key, value in top.items())
    return f"name: w\n{head}steps:\n" + "".join(f"  - {step}\n" for step in steps)


def echo(rig: Rig) -> list[str]:
    seen: list[str] = []

    @rig.tool("t.echo")
    async def say(value: str = "") -> str:
        seen.append(value)
        return value

    return seen


def lines(journal: list[str], key: str) -> list[str]:
    return [line.removeprefix(f"{key}: ") for line in journal if line.startswith(f"{key}: ")]


# ---------------------------------------------------------------- pending


async def test_claim_is_journaled_by_itself_when_a_step_takes_long(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_SLOW_STEP_SECONDS", 0.01)
    hold = Hold()

    @rig.tool("t.hold")
    async def stay() -> None:
        await hold()

    await rig.apply(workflow("{id: a, tool: t.hold}"))
    run_id = await rig.start("w")
    async with rig.worker():
        journal = await rig.until_journal(run_id, "a: pending -claim-> running")
        step = (await rig.run(run_id))["step"]["a"]
        assert (step["status"], step["attempt"], step["completed_at"]) == ("running", 1, None)
        assert step["started_at"] is not None
        hold.release.set()
        await rig.until(run_id)
    journal = await rig.journal(run_id)
    assert lines(journal, "a") == ["pending -claim-> running", "running -succeed-> succeeded"]
    assert (await rig.run(run_id))["step"]["a"]["started_at"] == step["started_at"]


async def test_a_short_step_has_its_start_in_the_entry_that_settles_it(rig: Rig) -> None:
    echo(rig)
    await rig.apply(workflow("{id: a, tool: t.echo}"))
    run = await rig.work_until(await rig.start("w"))
    assert lines(await rig.journal(run["id"]), "a") == ["running -succeed-> succeeded"]
    assert run["step"]["a"]["attempt"] == 1
    assert run["step"]["a"]["started_at"] <= run["step"]["a"]["completed_at"]


async def test_a_gate_opens_when_it_is_next_and_is_never_given_to_a_worker(rig: Rig) -> None:
    seen = echo(rig)
    await rig.apply(workflow("{id: a, tool: t.echo}", "{id: ask, approval: {tier: low}}", "{id: b, tool: t.echo}"))
    run_id = await rig.start("w")
    run = await rig.work_until(run_id, "waiting_approval")
    assert lines(await rig.journal(run_id), "ask") == ["pending -open-> waiting_approval"]
    assert (run["step"]["ask"]["attempt"], run["step"]["b"]["status"], len(seen)) == (0, "pending", 1)


async def test_a_wait_parks_when_it_is_next_and_arrives_when_it_is_due(rig: Rig) -> None:
    echo(rig)
    await rig.apply(workflow("{id: rest, wait: {duration: '${input.long}'}}", "{id: a, tool: t.echo}"))
    start = rig.clock.freeze()
    run_id = await rig.start("w", {"long": "90s"})
    [row] = await rig.sql("SELECT resume_at FROM interlock.run")
    assert row["resume_at"] == start + timedelta(seconds=90)
    rig.clock.advance(90)
    await rig.sweep()
    run = await rig.work_until(run_id)
    assert lines(await rig.journal(run_id), "rest") == [
        "pending -park-> waiting_external",
        "waiting_external -arrive-> succeeded",
    ]
    assert run["status"] == "succeeded"


@pytest.mark.parametrize("long", ["soon", "-5s", 10**40, None])
async def test_a_wait_for_something_that_is_no_duration_fails(rig: Rig, long: object) -> None:
    await rig.apply(workflow("{id: rest, wait: {duration: '${input.long}'}}"))
    run = await rig.run(await rig.start("w", {"long": long} if not isinstance(long, int) else {"long": 1e40}))
    assert (run["status"], run["reason"], run["step"]["rest"]["status"]) == ("failed", "terminal_error", "failed")


async def test_a_step_is_skipped_when_its_condition_is_false(rig: Rig) -> None:
    seen = echo(rig)
    await rig.apply(workflow("{id: a, tool: t.echo, when: 'input.n > 10', input: {value: a}}", "{id: b, tool: t.echo}"))
    run = await rig.work_until(await rig.start("w", {"n": 3}))
    assert lines(await rig.journal(run["id"]), "a") == ["pending -skip-> skipped"]
    # In a plain list the next step continues; only `needs` passes a skip on.
    assert (run["status"], seen, run["step"]["b"]["status"]) == ("succeeded", [""], "succeeded")


async def test_a_step_is_skipped_when_what_it_needs_was_skipped(rig: Rig) -> None:
    seen = echo(rig)
    await rig.apply(
        workflow(
            "{id: a, needs: [], tool: t.echo, when: 'input.wanted'}",
            "{id: b, needs: [a], tool: t.echo}",
            "{id: c, needs: [b], tool: t.echo}",
            "{id: d, needs: [], tool: t.echo, input: {value: d}}",
        )
    )
    run = await rig.work_until(await rig.start("w", {"wanted": False}))
    assert {k: s["status"] for k, s in run["step"].items()} == {
        "a": "skipped", "b": "skipped", "c": "skipped", "d": "succeeded",
    }  # fmt: skip
    assert seen == ["d"]


async def test_a_condition_without_an_answer_fails_the_step(rig: Rig) -> None:
    echo(rig)
    await rig.apply(workflow("{id: a, tool: t.echo, when: 'input.missing > 1'}"))
    run = await rig.work_until(await rig.start("w", {}))
    assert (run["status"], run["reason"]) == ("failed", "terminal_error")
    assert lines(await rig.journal(run["id"]), "a") == ["running -fail-> failed"]


async def test_pending_and_waiting_steps_are_canceled_with_their_run(rig: Rig) -> None:
    await rig.apply(
        workflow("{id: ask, needs: [], approval: {}}", "{id: rest, needs: [], wait: {duration: 1h}}",
                 "{id: a, needs: [ask], tool: t.echo}")
    )  # fmt: skip
    run_id = await rig.start("w")
    before = await rig.run(run_id)
    assert [s["status"] for s in before["steps"]] == ["waiting_approval", "waiting_external", "pending"]
    await rig.cancel(run_id)
    assert [s["status"] for s in (await rig.run(run_id))["steps"]] == ["canceled"] * 3


# ---------------------------------------------------------------- running


async def test_success_stores_output_and_cost_together(rig: Rig) -> None:
    @rig.tool("t.bill")
    async def bill(ctx: Context, amount: float) -> dict[str, float]:
        ctx.cost(amount, provider="acme", tokens=12)
        return {"billed": amount}

    await rig.apply(
        workflow("{id: a, tool: t.bill, input: {amount: 0.25}}", "{id: b, tool: t.bill, input: {amount: 0.5}}")
    )
    run = await rig.work_until(await rig.start("w"))
    assert (run["cost_usd"], run["step"]["a"]["cost_usd"], run["result"]) == (0.75, 0.25, {"billed": 0.5})
    [row] = await rig.sql("SELECT cost_usd FROM interlock.run")
    assert row["cost_usd"] == 0.75


async def test_a_retryable_error_waits_two_to_the_n_times_the_base(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_recorder.random, "random", lambda: 0.5)  # no jitter
    attempts: list[int] = []

    @rig.tool("t.flaky")
    async def flaky() -> str:
        attempts.append(1)
        if len(attempts) < 4:
            raise ConnectionError("not now")
        return "at last"

    await rig.apply(workflow("{id: a, tool: t.flaky, retry: {max_attempts: 4, base_delay: 5s}}"))
    rig.clock.freeze()
    run_id = await rig.start("w")
    for failures, delay in ((1, 10), (2, 20), (3, 40)):
        async with rig.worker():
            await rig.until_journal(run_id, "a: running -retry-> pending", failures)
        step = (await rig.run(run_id))["step"]["a"]
        assert (step["status"], step["attempt"]) == ("pending", failures)
        assert step["last_error"] == {"type": "ConnectionError", "message": "not now"}
        waits = (step["next_run_at"] - rig.clock.freeze()).total_seconds()
        assert delay <= waits < delay + 2
        [row] = await rig.sql("SELECT status, lease_worker, resume_at FROM interlock.run")
        assert (row["status"], row["lease_worker"], row["resume_at"]) == ("running", None, step["next_run_at"])
        # Not a moment before its time.
        rig.clock.advance(delay - 1)
        await rig.sweep()
        assert await rig.sql("SELECT * FROM interlock.ready_run") == []
        rig.clock.advance(3)
        await rig.sweep()
    run = await rig.work_until(run_id)
    assert (run["status"], run["step"]["a"]["attempt"], len(attempts)) == ("succeeded", 4, 4)
    assert run["step"]["a"]["next_run_at"] is None


async def test_a_backoff_list_says_each_delay(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_recorder.random, "random", lambda: 0.5)

    @rig.tool("t.flaky")
    async def flaky() -> None:
        raise RuntimeError("again")

    await rig.apply(workflow("{id: a, tool: t.flaky, retry: {backoff: [7s, 2m]}}"))
    rig.clock.freeze()
    run_id = await rig.start("w")
    for failures, delay in ((1, 7), (2, 120), (3, 120)):
        async with rig.worker():
            await rig.until_journal(run_id, "a: running -retry-> pending", failures)
        waits = (await rig.run(run_id))["step"]["a"]["next_run_at"] - rig.clock.freeze()
        assert delay <= waits.total_seconds() < delay + 2
        rig.clock.advance(delay + 2)
        await rig.sweep()


async def test_a_tool_that_knows_when_to_come_back_is_believed(rig: Rig) -> None:
    @rig.tool("t.busy")
    async def busy() -> None:
        raise Retryable("come back", after=3600)

    await rig.apply(workflow("{id: a, tool: t.busy, retry: {base_delay: 1s}}"))
    now = rig.clock.freeze()
    run_id = await rig.start("w")
    async with rig.worker():
        await rig.until_journal(run_id, "a: running -retry-> pending")
    waits = (await rig.run(run_id))["step"]["a"]["next_run_at"] - now
    assert 3600 <= waits.total_seconds() < 3602


async def test_attempts_run_out(rig: Rig) -> None:
    attempts: list[int] = []

    @rig.tool("t.flaky")
    async def flaky() -> None:
        attempts.append(1)
        raise ConnectionError("never")

    await rig.apply(
        workflow("{id: a, tool: t.flaky, retry: {max_attempts: 2, base_delay: 0s}}", "{id: b, tool: t.flaky}")
    )
    run_id = await rig.start("w")
    async with rig.worker():
        await rig.until_journal(run_id, "a: running -retry-> pending")
        await rig.sweep()
        run = await rig.until(run_id)
    assert (run["status"], run["reason"], len(attempts)) == ("failed", "attempts_exhausted", 2)
    assert lines(await rig.journal(run_id), "a") == ["running -retry-> pending", "running -fail-> failed"]
    assert run["step"]["b"]["status"] == "canceled"


async def test_a_terminal_error_is_not_tried_again(rig: Rig) -> None:
    attempts: list[int] = []

    @rig.tool("t.wrong")
    async def wrong() -> None:
        attempts.append(1)
        raise Terminal("it will never work")

    await rig.apply(workflow("{id: a, tool: t.wrong, retry: {max_attempts: 5}}"))
    run = await rig.work_until(await rig.start("w"))
    assert (run["reason"], len(attempts), run["step"]["a"]["attempt"]) == ("terminal_error", 1, 1)


async def test_input_that_does_not_fit_the_tool_is_terminal(rig: Rig) -> None:
    @rig.tool("t.add")
    async def add(a: int, b: int) -> int:
        return a + b

    await rig.apply(workflow("{id: a, tool: t.add, input: {a: 1, b: '${input.b}'}}"))
    run = await rig.work_until(await rig.start("w", {"b": "two"}))
    assert run["reason"] == "terminal_error"
    assert "b: expected a whole number" in run["error"]["message"]


async def test_a_step_that_takes_too_long_is_interrupted_and_tried_again(rig: Rig) -> None:
    hold = Hold()

    @rig.tool("t.hang")
    async def hang() -> None:
        await hold()

    await rig.apply(workflow("{id: a, tool: t.hang, timeout: 20ms, retry: {max_attempts: 2, base_delay: 0s}}"))
    run_id = await rig.start("w")
    async with rig.worker():
        await rig.until_journal(run_id, "a: running -retry-> pending")
        await rig.sweep()
        run = await rig.until(run_id)
    assert (run["reason"], hold.interrupted, hold.entries) == ("attempts_exhausted", True, 2)
    assert run["error"]["message"] == "t.hang took longer than 0.02 s"


async def test_a_lost_step_is_reclaimed_under_a_new_token(rig: Rig) -> None:
    seen = echo(rig)
    await rig.apply(workflow("{id: a, tool: t.echo}"))
    rig.clock.freeze()
    run_id = await rig.start("w")
    me, claimed = await rig.claim_by_hand()
    assert [run.id for run in claimed] == [run_id]
    rig.clock.advance(6)
    await rig.sweep()
    run = await rig.work_until(run_id)
    assert await rig.journal(run_id) == [
        "run:  -create-> pending",
        "run: pending -start-> running",
        "orphan_detected",
        "a: running -reclaim-> running",
        "a: running -succeed-> succeeded",
        "run: running -succeed-> succeeded",
    ]
    assert (run["step"]["a"]["attempt"], run["resume_count"], len(seen)) == (2, 1, 1)
    tokens = [
        row["token"] for row in await rig.sql("SELECT token FROM interlock.journal_entry WHERE step = 'a' ORDER BY seq")
    ]
    assert tokens == [2, 2]
    [worker] = await rig.sql("SELECT status, reason FROM interlock.worker WHERE id = $1", me.id)
    assert (worker["status"], worker["reason"]) == ("terminated", "heartbeat lost")


async def test_a_step_that_loses_its_worker_again_and_again_fails_as_orphaned(rig: Rig) -> None:
    seen = echo(rig)
    await rig.apply(workflow("{id: a, tool: t.echo}"))
    rig.clock.freeze()
    run_id = await rig.start("w")
    entries = (
        "INSERT INTO interlock.journal_entry (run_id, seq, tenant_id, at, type, step, from_state, event, to_state,"
        " attempt, token, actor)"
        " SELECT id, seq, tenant_id, now(), 'step_transition', 'a', 'running', 'reclaim', 'running', 2, 1, 'worker:x'"
        "   FROM interlock.run"
    )
    for _ in range(rig.settings.max_reclaims + 1):
        _, [claimed] = await rig.claim_by_hand()
        if claimed.reclaimed:  # a driver's first write, before the driver is lost too
            await rig.sql("UPDATE interlock.run SET seq = seq + 1")
            await rig.sql(entries)
        rig.clock.advance(6)
        await rig.sweep()
    run = await rig.work_until(run_id)
    assert (run["status"], run["reason"], seen) == ("failed", "orphaned", [])
    assert run["error"]["code"] == "RUN_ORPHANED"


async def test_a_running_step_is_canceled_when_it_was_interrupted(rig: Rig) -> None:
    hold = Hold()

    @rig.tool("t.hold")
    async def stay() -> None:
        await hold()

    await rig.apply(workflow("{id: a, tool: t.hold}", "{id: b, tool: t.hold}"))
    run_id = await rig.start("w")
    async with rig.worker():
        await hold.inside()
        await rig.cancel(run_id)
        run = await rig.until(run_id)
    assert lines(await rig.journal(run_id), "a") == ["running -cancel-> canceled"]
    assert [s["status"] for s in run["steps"]] == ["canceled", "canceled"]


async def test_a_plain_function_hears_of_a_cancel_at_its_next_heartbeat(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_runner, "_THREAD_GRACE_SECONDS", 20.0)
    entered, stopped = threading.Event(), threading.Event()

    @rig.tool("t.grind")
    def grind(ctx: Context) -> None:
        entered.set()
        try:
            while True:
                ctx.heartbeat()
                stopped.wait(0.001)
        finally:
            stopped.set()

    await rig.apply(workflow("{id: a, tool: t.grind}"))
    run_id = await rig.start("w")
    async with rig.worker():
        await asyncio.to_thread(entered.wait, 20)
        await rig.cancel(run_id)
        run = await rig.until(run_id)
    assert stopped.is_set()
    assert (run["status"], run["step"]["a"]["status"]) == ("canceled", "canceled")


# ---------------------------------------------------------------- waiting for people


GATE = ("{id: ask, approval: {}}", "{id: a, tool: t.echo, input: {value: '${steps.ask.status}'}}")


async def test_a_granted_gate_is_done(rig: Rig) -> None:
    seen = echo(rig)
    await rig.apply(workflow(*GATE))
    run_id = await rig.start("w")
    await rig.decide(run_id, approves=True, reason="looks right")
    run = await rig.work_until(run_id)
    assert lines(await rig.journal(run_id), "ask")[-1] == "waiting_approval -grant-> succeeded"
    assert (run["status"], seen) == ("succeeded", ["succeeded"])


async def test_on_reject_fail_fails_the_gate_and_the_run(rig: Rig) -> None:
    seen = echo(rig)
    await rig.apply(workflow(*GATE, on_reject="fail"))
    run_id = await rig.start("w")
    await rig.decide(run_id, approves=False)
    run = await rig.run(run_id)
    assert lines(await rig.journal(run_id), "ask")[-1] == "waiting_approval -refuse-> failed"
    assert (run["status"], run["reason"], seen) == ("failed", "rejected", [])


async def test_on_reject_complete_ends_well_with_nothing_applied(rig: Rig) -> None:
    seen = echo(rig)
    await rig.apply(workflow(*GATE, on_reject="complete"))
    run_id = await rig.start("w")
    await rig.decide(run_id, approves=False)
    run = await rig.run(run_id)
    assert lines(await rig.journal(run_id), "ask")[-1] == "waiting_approval -refuse-> skipped"
    assert (run["status"], run["reason"], seen) == ("succeeded", "rejected", [])
    assert [s["status"] for s in run["steps"]] == ["skipped", "skipped"]


async def test_on_reject_continue_goes_on_without_the_gate(rig: Rig) -> None:
    seen = echo(rig)
    await rig.apply(workflow(*GATE, on_reject="continue"))
    run_id = await rig.start("w")
    await rig.decide(run_id, approves=False)
    run = await rig.work_until(run_id)
    assert lines(await rig.journal(run_id), "ask")[-1] == "waiting_approval -refuse-> skipped"
    assert (run["status"], run["reason"], seen) == ("succeeded", "completed", ["skipped"])


@pytest.mark.parametrize(
    ("on_reject", "status", "reason"),
    [("fail", "failed", "approval_expired"), ("complete", "succeeded", "rejected")],
)
async def test_an_expired_gate_ends_like_a_refused_one(rig: Rig, on_reject: str, status: str, reason: str) -> None:
    await rig.apply(workflow(*GATE, on_reject=on_reject))
    rig.clock.freeze()
    run_id = await rig.start("w")
    rig.clock.advance(8 * 3600)  # the time limit of a gate of tier med
    await rig.sweep()
    run = await rig.run(run_id)
    assert (run["status"], run["reason"]) == (status, reason)
    assert run["step"]["ask"]["last_error"]["message"] == "nobody decided in time"


async def test_on_reject_complete_lets_a_step_in_flight_finish_and_starts_no_other(rig: Rig) -> None:
    seen, hold = echo(rig), Hold()

    @rig.tool("t.hold")
    async def stay() -> None:
        await hold()

    await rig.apply(
        workflow("{id: a, needs: [], tool: t.hold}", "{id: ask, needs: [], approval: {}}",
                 "{id: b, needs: [a], tool: t.echo}", on_reject="complete")
    )  # fmt: skip
    run_id = await rig.start("w")
    async with rig.worker():
        await hold.inside()
        await rig.until_journal(run_id, "ask: pending -open-> waiting_approval")
        await rig.decide(run_id, approves=False)
        await rig.until_journal(run_id, "ask: waiting_approval -refuse-> skipped")
        hold.release.set()
        run = await rig.until(run_id)
    assert (run["status"], run["reason"], seen) == ("succeeded", "rejected", [])
    assert {k: s["status"] for k, s in run["step"].items()} == {"a": "succeeded", "ask": "skipped", "b": "skipped"}
