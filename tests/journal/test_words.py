"""Run commands: the effects of people, timers and deadlines on a run."""

from typing import Any

import pytest

from interlock.definition.workflow import parse
from interlock.journal import (
    CommandType,
    InterruptInFlight,
    Journal,
    RunCommand,
    RunOutcome,
    Suspend,
    advance,
    apply_command,
)
from interlock.lifecycle import RunEvent, RunReason, RunState, StepEvent
from tests.journal.player import BEGINNING, journal, journal_of, lines, states, succeed

GATED = "[{id: a, tool: t.do}, {id: gate, approval: {}}, {id: b, tool: t.do}, {id: c, tool: t.do, needs: [gate]}]"


def asked(steps: str = GATED, on_reject: str = "fail") -> Journal:
    made = journal(steps, on_reject=on_reject)
    if "a" in made.steps:
        succeed(made, "a")
    assert advance(made, BEGINNING).approvals
    made.take_unsaved()
    return made


def decide(made: Journal, decision: str, *, reason: str | None = None, **other: Any) -> None:
    data = {"approval_id": made.steps["gate"].approval_id, "decision": decision, "reason": reason} | other
    apply_command(made, RunCommand(CommandType.DECIDE, "ann", data, step="gate"), in_flight=False)


# ---------------------------------------------------------------- decide


def test_an_approved_gate_is_done_and_what_follows_goes_on() -> None:
    made = asked()
    decide(made, "approved")
    assert lines(made) == ["gate -grant-> succeeded"]
    assert [fold.step.key for fold in advance(made, BEGINNING).start] == ["b", "c"]


@pytest.mark.parametrize(
    ("decision", "code", "said"),
    [
        ("rejected", RunReason.REJECTED, "rejected"),
        ("expired", RunReason.APPROVAL_EXPIRED, "nobody decided in time"),
    ],
)
def test_a_refused_gate_fails_the_run(decision: str, code: RunReason, said: str) -> None:
    made = asked()
    decide(made, decision)
    assert lines(made) == ["gate -refuse-> failed"]
    error = {"step": "gate", "type": "Refused", "message": said}
    assert advance(made, BEGINNING).then == RunOutcome(RunEvent.FAIL, code, error)


def test_what_the_person_said_is_what_is_shown() -> None:
    made = asked()
    decide(made, "rejected", reason="too expensive")
    assert made.steps["gate"].last_error == {"type": "Refused", "message": "too expensive"}


def test_on_reject_continue_skips_the_gate_and_what_needs_it_and_goes_on() -> None:
    made = asked(on_reject="continue")
    decide(made, "rejected")
    following = advance(made, BEGINNING)
    assert [fold.step.key for fold in following.start] == ["b"]
    assert states(made) == {"a": "succeeded", "gate": "skipped", "b": "pending", "c": "skipped"}
    succeed(made, "b")
    assert advance(made, BEGINNING).then == RunOutcome(RunEvent.SUCCEED, RunReason.COMPLETED)


def test_on_reject_complete_does_nothing_more_and_ends_well_as_rejected() -> None:
    made = asked(on_reject="complete")
    decide(made, "rejected")
    assert states(made) == {"a": "succeeded", "gate": "skipped", "b": "skipped", "c": "skipped"}
    assert advance(made, BEGINNING).then == RunOutcome(RunEvent.SUCCEED, RunReason.REJECTED)


def test_on_reject_complete_lets_a_step_in_flight_finish() -> None:
    made = asked("[{id: gate, approval: {}}, {id: x, tool: t.do, needs: []}, {id: y, tool: t.do}]", "complete")
    made.begin(made.steps["x"])
    decide(made, "expired")
    assert states(made) == {"gate": "skipped", "x": "running", "y": "skipped"}
    assert advance(made, BEGINNING).then is None


def test_on_reject_complete_closes_the_other_questions_but_not_the_waits() -> None:
    steps = """[{id: gate, approval: {}}, {id: other, approval: {}, needs: []}, {id: then, tool: t.do},
                {id: nap, wait: {duration: 5m}, needs: []}]"""
    made = asked(steps, "complete")
    decide(made, "rejected")
    assert states(made) == {"gate": "skipped", "other": "skipped", "then": "skipped", "nap": "waiting_external"}


@pytest.mark.parametrize("on_reject", ["fail", "continue"])
def test_without_it_the_other_questions_stay_open(on_reject: str) -> None:
    made = asked("[{id: gate, approval: {}}, {id: other, approval: {}, needs: []}]", on_reject)
    decide(made, "rejected")
    assert states(made)["other"] == "waiting_approval"


def test_on_reject_complete_leaves_what_is_in_doubt_to_people() -> None:
    made = asked("[{id: gate, approval: {}}, {id: x, tool: t.do, needs: []}]", "complete")
    doubted = made.steps["x"]
    made.move_step(doubted, StepEvent.CLAIM, actor="w", data={"receipt_id": "r"})
    made.move_step(doubted, StepEvent.HOLD, actor="w", data={"approval_id": "d", "digest": "r"})
    decide(made, "rejected")
    assert states(made) == {"gate": "skipped", "x": "waiting_approval"}


def test_a_word_about_another_question_or_one_that_is_answered_changes_nothing() -> None:
    made = asked()
    before = made.seq
    decide(made, "approved", approval_id="another")
    assert made.seq == before
    decide(made, "approved")
    decide(made, "rejected")
    decide(made, "approved")
    assert lines(made) == ["gate -grant-> succeeded"]


# ---------------------------------------------------------------- cancel


def cancel(made: Journal, *, in_flight: bool, why: RunReason = RunReason.INTERRUPTED) -> None:
    data = {"reason_code": why, "said": "enough"}
    apply_command(made, RunCommand(CommandType.CANCEL, "ann", data), in_flight=in_flight)


def test_with_nothing_in_flight_a_cancel_ends_the_run_at_once() -> None:
    made = asked()
    cancel(made, in_flight=False, why=RunReason.CANCELED_BY_USER)
    (entry,) = made.take_unsaved()
    assert (entry.event, entry.to_state, entry.type) == ("cancel", "canceled", "run_completed")
    assert entry.data == {"reason": "canceled_by_user", "said": "enough", "asked": "canceled_by_user"}
    assert (made.status, made.reason) == (RunState.CANCELED, RunReason.CANCELED_BY_USER)
    assert states(made) == {"a": "succeeded", "gate": "canceled", "b": "canceled", "c": "canceled"}


def test_an_interrupt_is_seen_to_stop_the_run_also_with_nothing_in_flight() -> None:
    made = asked()
    cancel(made, in_flight=False)
    assert lines(made) == ["run -cancel-> canceling", "run -stopped-> canceled"]
    assert (made.status, made.reason) == (RunState.CANCELED, RunReason.INTERRUPTED)
    assert states(made) == {"a": "succeeded", "gate": "canceled", "b": "canceled", "c": "canceled"}


def test_with_steps_in_flight_a_cancel_stops_them_first_and_remembers_who_asked_for_what() -> None:
    made = journal("[{id: a, tool: t.do}]")
    made.begin(made.steps["a"])
    made.take_unsaved()
    cancel(made, in_flight=True)
    assert (made.status, made.asked, made.reason) == (RunState.CANCELING, RunReason.INTERRUPTED, None)
    assert advance(made, BEGINNING).then == InterruptInFlight(None)
    cancel(made, in_flight=True)
    assert lines(made) == ["run -cancel-> canceling"]


def test_a_cancel_is_possible_before_the_run_began() -> None:
    made = journal_of(parse("{name: w, steps: [{id: a, tool: t.do}]}"))
    cancel(made, in_flight=False)
    assert made.status == RunState.CANCELED


# ---------------------------------------------------------------- time out


def test_a_deadline_ends_a_run_that_waits() -> None:
    made = asked()
    apply_command(made, RunCommand(CommandType.TIME_OUT, "system:deadline", {}), in_flight=False)
    assert (made.status, made.reason) == (RunState.FAILED, RunReason.TIMED_OUT)
    assert states(made)["gate"] == "canceled"


def test_with_steps_in_flight_their_holder_ends_the_run() -> None:
    made = journal("[{id: a, tool: t.do}]")
    before = made.seq
    apply_command(made, RunCommand(CommandType.TIME_OUT, "system:deadline", {}), in_flight=True)
    assert (made.seq, made.status) == (before, RunState.RUNNING)


def test_waiting_for_two_people_takes_both() -> None:
    made = journal("[{id: gate, approval: {}}, {id: other, approval: {}, needs: []}]")
    advance(made, BEGINNING)
    decide(made, "approved")
    assert advance(made, BEGINNING).then == Suspend(RunState.WAITING_APPROVAL, None)


def test_a_cancel_that_was_accepted_wins_against_the_last_step() -> None:
    """specification DEV-3: a succeeded run has only succeeded steps; a canceled run may have only such steps too."""
    made = journal("[{id: a, tool: t.do}]")
    made.begin(made.steps["a"])
    apply_command(
        made, RunCommand(CommandType.CANCEL, "ann", {"reason_code": RunReason.CANCELED_BY_USER}), in_flight=True
    )
    made.move_step(made.steps["a"], StepEvent.SUCCEED, actor="worker:w", output="1")
    made.move_run(RunEvent.STOPPED, actor="worker:w", reason=made.asked)
    assert (made.status, made.reason, states(made)) == ("canceled", "canceled_by_user", {"a": "succeeded"})
