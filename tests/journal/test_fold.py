"""The fold: the same entries always give the same state, and the invariants across the machines hold."""

import contextlib
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.definition.plan import OnReject, Plan
from interlock.errors import InvalidTransition
from interlock.journal import Entry, EntryType, Journal
from interlock.lifecycle import RUN, SETTLED_WELL, STEP, RunReason, RunState, StepEvent, StepState
from tests.journal.player import (
    BEGINNING,
    Player,
    journal,
    journal_of,
    plans,
    state_of,
    succeed,
    through_the_database,
)

SEEDS = st.integers(0, 2**32)
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def played(plan: Plan, seed: int) -> Player:
    player = Player(plan, seed)
    player.play()
    return player


# ---------------------------------------------------------------- the same entries, the same state


@quick
@given(plans(), SEEDS)
def test_replaying_what_was_written_gives_the_state_that_wrote_it(plan: Plan, seed: int) -> None:
    player = played(plan, seed)
    entries = through_the_database(player.written)
    assert state_of(journal_of(plan).replay(entries)) == state_of(player.journal)
    # The same held at every moment without a step in flight.
    for count, known in player.quiet:
        assert state_of(journal_of(plan).replay(entries[:count])) == known


@quick
@given(plans(), SEEDS)
def test_replaying_twice_gives_the_same_to_the_last_field(plan: Plan, seed: int) -> None:
    entries = through_the_database(played(plan, seed).written)
    once, again = (state_of(journal_of(plan).replay(entries), times=True) for _ in range(2))
    assert once == again
    half = journal_of(plan).replay(entries[: len(entries) // 2])
    assert state_of(half.replay(entries[len(entries) // 2 :]), times=True) == once


@quick
@given(plans(), SEEDS)
def test_entries_are_numbered_without_gaps_and_each_transition_is_in_a_table(plan: Plan, seed: int) -> None:
    entries = played(plan, seed).written
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    state: dict[str | None, str] = {}
    for entry in entries[1:]:
        machine = STEP if entry.step else RUN
        assert (entry.from_state, entry.event, entry.to_state) in {
            (t.source, t.event, t.target) for t in machine.transitions()
        }
        before = state.get(entry.step, machine.initial)
        # For a short step, the entry that settles it is also the record of its start.
        assert entry.from_state == before or (before, entry.from_state) == ("pending", "running")
        assert entry.to_state is not None
        state[entry.step] = entry.to_state


@quick
@given(plans(), SEEDS)
def test_a_changed_entry_would_be_noticed(plan: Plan, seed: int) -> None:
    """The comparison above can fail: without one settled step the fold differs."""
    player = played(plan, seed)
    # Not a canceled step: the end of its run would imply the same.
    settled = [e for e in player.written if e.step and e.to_state in STEP.terminal - {StepState.CANCELED}]
    if settled:
        kept = [e for e in player.written if e is not settled[0]]
        with contextlib.suppress(KeyError):  # a step without an effect cannot be undone
            assert state_of(journal_of(plan).replay(kept)) != state_of(player.journal)


# ---------------------------------------------------------------- invariants across the machines


@quick
@given(plans(), SEEDS)
def test_a_run_succeeds_exactly_when_every_step_succeeded_or_was_skipped(plan: Plan, seed: int) -> None:
    player = played(plan, seed)
    made = player.journal
    all_well = all(fold.status in SETTLED_WELL for fold in made.steps.values())
    assert made.status != RunState.SUCCEEDED or all_well
    if not player.told_to_stop:
        assert (made.status == RunState.SUCCEEDED) == all_well
    assert all(fold.status in STEP.terminal for fold in made.steps.values())
    assert made.reason is not None


@quick
@given(plans(graph=False), SEEDS)
def test_a_plain_list_is_done_in_strict_order(plan: Plan, seed: int) -> None:
    player = played(plan, seed)
    order = [plan.by_key[e.step].index for e in player.written if e.step in plan.by_key]
    if player.journal.status == RunState.SUCCEEDED and plan.on_reject != OnReject.COMPLETE:
        assert order == sorted(order)
    settled = [plan.by_key[e.step].index for e in player.written if e.step in plan.by_key and e.event == "succeed"]
    assert settled == sorted(settled)


@quick
@given(plans(), SEEDS)
def test_what_was_done_is_undone_last_first_unless_the_run_succeeds(plan: Plan, seed: int) -> None:
    player = played(plan, seed)
    made = player.journal
    done = [e.step for e in player.written if e.event == StepEvent.SUCCEED and plan.by_key.get(e.step or "")]
    to_undo = [plan.by_key[key].undo.key for key in reversed(done) if plan.by_key[key].undo]
    assert [fold.step.key for fold in made.compensation] == ([] if made.status == RunState.SUCCEEDED else to_undo)
    undone = [e.step for e in player.written if e.step in made.undos and e.to_state in STEP.terminal]
    assert undone == [fold.step.key for fold in made.compensation], "each of them ended, in this order"
    failed = any(fold.status != StepState.SUCCEEDED for fold in made.compensation)
    assert failed == (made.reason == RunReason.COMPENSATION_FAILED)


@quick
@given(plans(), SEEDS)
def test_a_skip_is_passed_on_along_needs_and_only_along_needs(plan: Plan, seed: int) -> None:
    player = played(plan, seed)
    made = player.journal
    for step in plan.steps:
        needs_a_skipped_one = any(made.steps[key].status == StepState.SKIPPED for key in step.needs)
        if made.steps[step.key].status == StepState.SUCCEEDED:
            assert not needs_a_skipped_one
    for entry in player.written:
        if entry.event == StepEvent.SKIP:
            assert entry.step is not None and entry.data is not None
            step, why = plan.by_key[entry.step], entry.data["why"]
            if why == "what it needs was skipped":
                assert any(made.steps[key].status == StepState.SKIPPED for key in step.needs)
            elif why.endswith("is false"):
                assert step.when is not None and step.when.source == "input.no"
            else:
                assert plan.on_reject == OnReject.COMPLETE and why.endswith("was refused")


@quick
@given(plans(), SEEDS)
def test_what_a_refusal_does_is_the_runs_to_say(plan: Plan, seed: int) -> None:
    player = played(plan, seed)
    refused = [e for e in player.written if e.event == StepEvent.REFUSE]
    if not refused:
        return
    targets = {e.to_state for e in refused}
    if plan.on_reject == OnReject.FAIL:
        assert targets == {"failed"}
        assert player.journal.status != RunState.SUCCEEDED
    else:
        assert targets == {"skipped"}
    if plan.on_reject == OnReject.COMPLETE and player.journal.status == RunState.SUCCEEDED:
        assert player.journal.reason == RunReason.REJECTED
    if plan.on_reject == OnReject.CONTINUE and player.journal.status == RunState.SUCCEEDED:
        assert player.journal.reason == RunReason.COMPLETED


# ---------------------------------------------------------------- single entries


def test_an_illegal_move_leaves_no_trace() -> None:
    made = journal("[{id: a, tool: t.do}]")
    before = state_of(made), len(made.unsaved)
    with pytest.raises(InvalidTransition):
        made.move_step(made.steps["a"], StepEvent.GRANT, actor="me")
    assert (state_of(made), len(made.unsaved)) == before


def test_an_attempt_is_counted_when_it_begins_and_stands_in_the_entry_that_ends_it() -> None:
    made = journal("[{id: a, tool: t.do}]")
    fold = made.steps["a"]
    for attempt in (1, 2):
        made.begin(fold)
        later = BEGINNING + timedelta(seconds=attempt)
        entry = made.move_step(fold, StepEvent.RETRY, actor="w", data={"error": {}, "next_run_at": later})
        assert (entry.attempt, fold.attempt, fold.failures, fold.next_run_at) == (attempt, attempt, attempt, later)
    made.begin(fold)
    assert fold.next_run_at is None
    assert made.move_step(fold, StepEvent.SUCCEED, actor="w", output="1").attempt == 3


def test_a_reclaimed_step_counts_another_attempt_but_no_failure() -> None:
    made = journal("[{id: a, tool: t.do}]")
    fold = made.steps["a"]
    made.begin(fold)
    entry = made.move_step(fold, StepEvent.RECLAIM, actor="w")
    assert (entry.attempt, fold.attempt, fold.failures, fold.reclaims) == (2, 2, 0, 1)


def test_what_people_held_was_no_attempt() -> None:
    made = journal("[{id: a, tool: t.do}]")
    fold = made.steps["a"]
    made.begin(fold)
    asked = {"approval_id": "q", "digest": "d"}
    assert made.move_step(fold, StepEvent.HOLD, actor="w", data=asked).attempt == 1
    made.move_step(fold, StepEvent.RELEASE, actor="ann")
    assert fold.attempt == 0
    made.begin(fold)
    assert made.move_step(fold, StepEvent.SUCCEED, actor="w", output="1").attempt == 1


def test_an_effect_in_doubt_was_an_attempt() -> None:
    made = journal("[{id: a, tool: t.do}]")
    fold = made.steps["a"]
    made.move_step(fold, StepEvent.CLAIM, actor="w", data={"receipt_id": "r"})
    made.move_step(fold, StepEvent.HOLD, actor="w", data={"approval_id": "q", "digest": "r"})
    made.move_step(fold, StepEvent.RELEASE, actor="ann")
    assert fold.attempt == 1


def test_a_short_step_began_its_duration_before_its_entry() -> None:
    made = journal("[{id: a, tool: t.do}]")
    done = Entry(3, "step_transition", "w", "a", "running", "succeed", "succeeded", 1, {"duration_ms": 250}, "1")
    done.at = BEGINNING
    made.replay([done])
    assert made.steps["a"].completed_at == BEGINNING
    assert made.steps["a"].started_at == BEGINNING - timedelta(milliseconds=250)


def test_a_long_step_says_when_it_began() -> None:
    made = journal("[{id: a, tool: t.do}]")
    began = (BEGINNING - timedelta(seconds=9)).isoformat()
    claimed = Entry(3, "step_transition", "w", "a", "pending", "claim", "running", 1, {"started_at": began})
    claimed.at = BEGINNING
    made.replay([claimed])
    assert made.steps["a"].status == StepState.RUNNING
    assert made.steps["a"].started_at == BEGINNING - timedelta(seconds=9)


def test_a_note_takes_a_number_and_changes_nothing() -> None:
    made = journal("[{id: a, approval: {}}]")
    before = state_of(made)
    made.note(EntryType.APPROVAL_VOTE, actor="ann", step="a", data={"votes": 1})
    assert state_of(made) == before | {"seq": before["seq"] + 1}


def test_costs_of_all_attempts_are_added_up() -> None:
    made = journal("[{id: a, tool: t.do}, {id: b, tool: t.do}]")
    made.begin(made.steps["a"])
    data = {"cost_usd": 0.5, "error": {}, "next_run_at": BEGINNING}
    made.move_step(made.steps["a"], StepEvent.RETRY, actor="w", data=data)
    made.begin(made.steps["a"])
    made.move_step(made.steps["a"], StepEvent.SUCCEED, actor="w", data={"cost_usd": 0.25}, output="1")
    succeed(made, "b")
    assert (made.steps["a"].cost_usd, made.cost_usd()) == (0.75, 0.75)


def test_the_result_is_the_output_of_the_last_step_that_has_one() -> None:
    made = journal("[{id: a, tool: t.do}, {id: gate, approval: {}}]")
    assert made.result() == "null"
    succeed(made, "a", {"n": 1})
    assert made.result() == '{"n":1}'


def test_open_steps_are_those_that_are_not_settled_in_order() -> None:
    made: Journal = journal("[{id: a, tool: t.do}, {id: b, tool: t.do, needs: []}, {id: c, tool: t.do, needs: []}]")
    succeed(made, "b")
    assert [fold.step.key for fold in made.open_steps()] == ["a", "c"]
    succeed(made, "a")
    assert [fold.step.key for fold in made.open_steps()] == ["c"]
