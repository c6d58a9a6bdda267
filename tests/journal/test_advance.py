"""Which steps may start next: gates, waits, conditions, retries, and how a worker releases a run."""

from datetime import timedelta

import pytest

from interlock.definition.workflow import parse
from interlock.errors import InvalidTransition
from interlock.journal import (
    InterruptInFlight,
    Journal,
    LeaseRelease,
    RunOutcome,
    Suspend,
    advance,
    final_release,
    release_for,
    requeue,
)
from interlock.lifecycle import RunEvent, RunReason, RunState, StepEvent, StepState
from tests.journal.player import BEGINNING, journal, journal_of, lines, states, succeed

NOW = BEGINNING


def started(made: Journal) -> list[str]:
    return [fold.step.key for fold in advance(made, NOW).start]


# ---------------------------------------------------------------- order


def test_a_list_goes_one_by_one() -> None:
    made = journal("[{id: a, tool: t.do}, {id: b, tool: t.do}]")
    assert started(made) == ["a"]
    succeed(made, "a")
    assert started(made) == ["b"]
    succeed(made, "b")
    assert advance(made, NOW).then == RunOutcome(RunEvent.SUCCEED, RunReason.COMPLETED)


def test_a_graph_starts_all_that_can_start() -> None:
    made = journal("[{id: a, tool: t.do}, {id: b, tool: t.do, needs: []}, {id: c, tool: t.do, needs: [a, b]}]")
    assert started(made) == ["a", "b"]
    succeed(made, "a")
    assert started(made) == ["b"]
    succeed(made, "b")
    assert started(made) == ["c"]


def test_a_step_in_flight_is_to_be_resumed_and_nothing_is_started_behind_it() -> None:
    made = journal("[{id: a, tool: t.do}, {id: b, tool: t.do}]")
    made.begin(made.steps["a"])
    following = advance(made, NOW)
    assert (following.start, following.then) == ([], None)
    assert [fold.step.key for fold in following.resume] == ["a"]


def test_asking_again_changes_nothing() -> None:
    made = journal("[{id: a, tool: t.do, when: input.no}, {id: gate, approval: {}}]")
    advance(made, NOW)
    seq = made.seq
    following = advance(made, NOW)
    assert made.seq == seq
    assert following.approvals == []
    assert following.then == Suspend(RunState.WAITING_APPROVAL, None)


# ---------------------------------------------------------------- conditions


def test_a_false_condition_skips_the_step_and_a_list_goes_on() -> None:
    made = journal("[{id: a, tool: t.do, when: input.no}, {id: b, tool: t.do}]")
    assert started(made) == ["b"]
    assert states(made) == {"a": "skipped", "b": "pending"}


def test_a_skip_is_passed_on_to_what_needs_it_and_to_what_needs_that() -> None:
    made = journal("""[{id: a, tool: t.do, when: input.no}, {id: b, tool: t.do, needs: [a]},
                       {id: c, tool: t.do, needs: [b]}, {id: d, tool: t.do, needs: []}]""")
    assert started(made) == ["d"]
    assert states(made) == {"a": "skipped", "b": "skipped", "c": "skipped", "d": "pending"}


def test_all_skipped_is_a_success() -> None:
    made = journal("[{id: a, tool: t.do, when: input.no}]")
    assert advance(made, NOW).then == RunOutcome(RunEvent.SUCCEED, RunReason.COMPLETED)


@pytest.mark.parametrize(
    ("when", "said"),
    [("input.gone", "gone"), ("input.number", "`input.number` gave 1; a condition must give true or false")],
)
def test_a_condition_without_an_answer_fails_the_run_and_says_why(when: str, said: str) -> None:
    made = journal(f"[{{id: a, tool: t.do, when: {when}}}]")
    then = advance(made, NOW).then
    assert isinstance(then, RunOutcome)
    assert (then.event, then.reason) == (RunEvent.FAIL, RunReason.TERMINAL_ERROR)
    assert then.error is not None
    assert then.error["step"] == "a"
    assert said in then.error["message"]


def test_a_condition_is_asked_once_before_the_first_attempt() -> None:
    made = journal("[{id: a, tool: t.do, when: input.yes}]")
    fold = made.steps["a"]
    made.begin(fold)
    made.move_step(fold, StepEvent.RETRY, actor="w", data={"error": {}, "next_run_at": NOW})
    made.scope._roots["input"] = {}
    made.scope._context = None
    assert started(made) == ["a"]


# ---------------------------------------------------------------- gates


def test_a_gate_asks_people_with_what_is_known_and_no_worker_gets_it() -> None:
    made = journal("[{id: a, tool: t.do}, {id: gate, approval: {tier: high, summary: 'pay ${steps.a.output.eur}?'}}]")
    succeed(made, "a", {"eur": 12})
    made.take_unsaved()
    following = advance(made, NOW)
    assert following.start == []
    assert following.then == Suspend(RunState.WAITING_APPROVAL, None)
    (ask,) = following.approvals
    assert (ask.kind, ask.step, ask.summary, ask.tier) == ("gate", "gate", "pay 12?", "high")
    assert made.steps["gate"].approval_id == ask.id
    assert lines(made) == ["gate -open-> waiting_approval"]


def test_two_questions_with_the_same_words_are_about_different_things() -> None:
    made = journal("[{id: a, approval: {summary: ok}}, {id: b, approval: {summary: ok}, needs: []}]")
    first, second = advance(made, NOW).approvals
    assert first.digest != second.digest
    again = journal_of(made.plan)
    assert [ask.digest for ask in advance(again, NOW).approvals] == [first.digest, second.digest]


def test_a_summary_that_has_no_value_fails_the_run() -> None:
    made = journal("[{id: gate, approval: {summary: 'pay ${input.gone}?'}}]")
    then = advance(made, NOW).then
    assert isinstance(then, RunOutcome) and then.event == RunEvent.FAIL


def test_while_a_step_can_move_the_run_does_not_wait_for_people() -> None:
    made = journal("[{id: gate, approval: {}}, {id: a, tool: t.do, needs: []}]")
    following = advance(made, NOW)
    assert following.then is None
    assert [fold.step.key for fold in following.start] == ["a"]
    made.begin(made.steps["a"])
    assert advance(made, NOW).then is None


# ---------------------------------------------------------------- waits and retries


def test_a_wait_parks_the_run_until_it_is_due_and_then_it_goes_on_by_itself() -> None:
    made = journal("[{id: nap, wait: {duration: 1h}}, {id: a, tool: t.do}]")
    due = NOW + timedelta(hours=1)
    assert advance(made, NOW).then == Suspend(RunState.WAITING_EXTERNAL, due)
    assert advance(made, due - timedelta(milliseconds=1)).then == Suspend(RunState.WAITING_EXTERNAL, due)
    following = advance(made, due)
    assert [fold.step.key for fold in following.start] == ["a"]
    assert states(made)["nap"] == "succeeded"


def test_a_wait_of_no_time_is_over_at_once() -> None:
    made = journal("[{id: nap, wait: {duration: 0s}}, {id: a, tool: t.do}]")
    assert started(made) == ["a"]


def test_a_duration_can_be_computed_and_a_senseless_one_fails_the_run() -> None:
    made = journal("[{id: nap, wait: {duration: '${input.number}'}}]")
    assert advance(made, NOW).then == Suspend(RunState.WAITING_EXTERNAL, NOW + timedelta(seconds=1))
    made = journal("[{id: nap, wait: {duration: '${input.yes}'}}]")
    then = advance(made, NOW).then
    assert isinstance(then, RunOutcome) and then.event == RunEvent.FAIL


def test_a_retry_waits_for_its_time_and_the_run_counts_as_running() -> None:
    made = journal("[{id: a, tool: t.do}]")
    fold, later = made.steps["a"], NOW + timedelta(seconds=5)
    made.begin(fold)
    made.move_step(fold, StepEvent.RETRY, actor="w", data={"error": {"type": "E"}, "next_run_at": later})
    following = advance(made, NOW)
    assert (following.start, following.then) == ([], Suspend(RunState.RUNNING, later))
    assert [f.step.key for f in advance(made, later).start] == ["a"]


def test_the_earliest_of_several_times_wakes_the_run_and_people_come_before_timers() -> None:
    made = journal("""[{id: long, wait: {duration: 2h}}, {id: short, wait: {duration: 1h}, needs: []},
                       {id: gate, approval: {}, needs: []}]""")
    assert advance(made, NOW).then == Suspend(RunState.WAITING_APPROVAL, NOW + timedelta(hours=1))


# ---------------------------------------------------------------- failing and stopping


def test_a_failed_step_ends_the_run_and_nothing_more_is_started() -> None:
    made = journal("[{id: a, tool: t.do}, {id: b, tool: t.do, needs: []}, {id: gate, approval: {}, needs: []}]")
    made.begin(made.steps["a"])
    data = {"error": {"type": "E", "message": "no"}, "reason": RunReason.ATTEMPTS_EXHAUSTED}
    made.move_step(made.steps["a"], StepEvent.FAIL, actor="w", data=data)
    following = advance(made, NOW)
    assert following.start == []
    error = {"step": "a", "type": "E", "message": "no"}
    assert following.then == RunOutcome(RunEvent.FAIL, RunReason.ATTEMPTS_EXHAUSTED, error)


def test_what_is_in_flight_beside_a_failed_step_is_stopped_first() -> None:
    made = journal("[{id: a, tool: t.do}, {id: b, tool: t.do, needs: []}]")
    for key in "ab":
        made.begin(made.steps[key])
    made.move_step(made.steps["a"], StepEvent.FAIL, actor="w", data={"error": {}})
    then = advance(made, NOW).then
    assert isinstance(then, InterruptInFlight)
    assert then.ending == RunOutcome(RunEvent.FAIL, RunReason.TERMINAL_ERROR, {"step": "a"})


def test_the_first_failure_gives_the_reason() -> None:
    made = journal("[{id: a, tool: t.do}, {id: b, tool: t.do, needs: []}]")
    for key in "ba":
        made.begin(made.steps[key])
        data = {"error": {}, "reason": RunReason.TERMINAL_ERROR}
        made.move_step(made.steps[key], StepEvent.FAIL, actor="w", data=data)
    assert made.failed is made.steps["b"]
    then = advance(made, NOW).then
    assert isinstance(then, RunOutcome) and then.error == {"step": "b"}


def test_a_run_that_is_being_canceled_starts_nothing() -> None:
    made = journal("[{id: a, tool: t.do}]")
    made.move_run(RunEvent.CANCEL, to=RunState.CANCELING, actor="ann", data={"asked": RunReason.INTERRUPTED})
    following = advance(made, NOW)
    assert (following.start, following.then) == ([], InterruptInFlight(None))
    assert made.asked == RunReason.INTERRUPTED


# ---------------------------------------------------------------- leaving


WAITS = "[{id: gate, approval: {}}, {id: pause, needs: [], wait: {duration: 1h}}]"


def test_a_run_that_waits_says_for_what_and_until_when() -> None:
    made = journal(WAITS)
    advance(made, NOW)
    leave = release_for(made, Suspend(RunState.WAITING_APPROVAL, NOW), actor="worker:w")
    assert (leave.status, leave.resume_at, leave.queue, leave.reason) == ("waiting_approval", NOW, False, None)
    assert leave.entry is not None
    assert (leave.entry.from_state, leave.entry.event, leave.entry.actor) == ("running", "hold", "worker:w")
    leave = release_for(made, Suspend(RunState.WAITING_EXTERNAL, NOW))
    assert leave.entry is not None and leave.entry.event == "park"


def test_a_run_that_waits_for_a_retry_stays_running() -> None:
    made = journal("[{id: a, tool: t.do}]")
    assert release_for(made, Suspend(RunState.RUNNING, NOW)) == LeaseRelease(RunState.RUNNING, resume_at=NOW)


def test_a_run_that_waits_already_writes_nothing_new_and_one_wait_may_follow_another() -> None:
    made = journal(WAITS)
    advance(made, NOW)
    made.move_run(RunEvent.HOLD, actor="w")
    assert release_for(made, Suspend(RunState.WAITING_APPROVAL, None)) == LeaseRelease(RunState.WAITING_APPROVAL)
    leave = release_for(made, Suspend(RunState.WAITING_EXTERNAL, NOW))
    assert leave.entry is not None
    assert (leave.entry.from_state, leave.entry.to_state) == ("waiting_approval", "waiting_external")


def test_drafting_an_entry_does_not_apply_it() -> None:
    made = journal("[{id: a, tool: t.do}]")
    made.take_unsaved()
    leave = release_for(made, RunOutcome(RunEvent.FAIL, RunReason.TIMED_OUT))
    assert leave.status == RunState.FAILED
    assert (made.status, made.unsaved) == (RunState.RUNNING, [])


def test_an_ended_run_carries_reason_result_or_error() -> None:
    made = journal("[{id: a, tool: t.do}]")
    succeed(made, "a", {"n": 1})
    leave = release_for(made, RunOutcome(RunEvent.SUCCEED, RunReason.COMPLETED))
    assert (leave.status, leave.reason, leave.result, leave.error) == ("succeeded", "completed", '{"n":1}', None)
    leave = release_for(made, RunOutcome(RunEvent.FAIL, RunReason.TIMED_OUT, {"type": "TimedOut"}))
    assert (leave.status, leave.reason, leave.result, leave.error) == (
        "failed",
        "timed_out",
        None,
        '{"type":"TimedOut"}',
    )
    assert leave.entry is not None
    assert leave.entry.type == "run_completed"
    assert leave.entry.data == {
        "reason": "timed_out", "error": {"type": "TimedOut"}, "cause": {"by": "system:deadline"},
    }  # fmt: skip
    made.apply(leave.entry)
    assert final_release(made) == LeaseRelease(RunState.FAILED, reason=RunReason.TIMED_OUT)


def test_a_run_that_failed_cancels_what_was_open_and_leaves_what_was_done() -> None:
    made = journal("[{id: a, tool: t.do}, {id: gate, approval: {}}, {id: b, tool: t.do}]")
    succeed(made, "a")
    advance(made, NOW)
    made.move_run(RunEvent.FAIL, actor="w", reason=RunReason.TIMED_OUT)
    assert states(made) == {"a": "succeeded", "gate": "canceled", "b": "canceled"}
    with pytest.raises(InvalidTransition):
        made.move_run(RunEvent.FAIL, actor="w", reason=RunReason.TIMED_OUT)


def test_a_run_with_work_goes_to_the_queue_and_resumes_if_it_waited() -> None:
    made = journal("[{id: a, tool: t.do}]")
    assert requeue(made) == LeaseRelease(RunState.RUNNING, queue=True)
    for event in (RunEvent.HOLD, RunEvent.PARK):
        waiting = journal("[{id: a, tool: t.do}]")
        waiting.move_run(event, actor="w")
        leave = requeue(waiting)
        assert leave.entry is not None
        assert (leave.status, leave.queue, leave.entry.event) == ("running", True, "resume")
    pending = journal_of(parse("{name: w, steps: [{id: a, tool: t.do}]}"))
    assert requeue(pending) == LeaseRelease(RunState.PENDING, queue=True)


def test_pending_steps_of_a_waiting_run_are_still_pending() -> None:
    made = journal("[{id: gate, approval: {}}, {id: a, tool: t.do}]")
    advance(made, NOW)
    assert made.steps["a"].status == StepState.PENDING
