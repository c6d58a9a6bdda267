"""Every machine matches the table of the contract, and no other transition is possible."""

import pytest

from interlock.errors import InvalidTransition
from interlock.lifecycle import (
    APPROVAL,
    COUPLINGS,
    MACHINES,
    MAY_APPEND,
    RUN,
    SETTLED_WELL,
    STEP,
    ApprovalEvent,
    Machine,
    RunEvent,
    RunReason,
    RunState,
    StepEvent,
    Term,
    fired_by,
)
from interlock.lifecycle.run import LEASABLE
from tests.lifecycle import expected

BY_NAME = {machine.name: machine for machine in MACHINES}
EVERY_MACHINE = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)


def events_of(machine: Machine) -> type[Term]:
    return type(next(machine.transitions()).event)


def table_of(machine: Machine) -> set[expected.Row]:
    return {(str(t.source), str(t.event), str(t.target)) for t in machine.transitions()}


def test_there_are_seven_machines() -> None:
    assert set(BY_NAME) == set(expected.TABLES)


@EVERY_MACHINE
def test_a_machine_is_the_table_of_the_contract(machine: Machine) -> None:
    assert table_of(machine) == expected.TABLES[machine.name]
    assert set(machine.states) == set(expected.STATES[machine.name])
    assert machine.initial == expected.STATES[machine.name][0]
    assert machine.terminal == expected.TERMINAL[machine.name]
    assert machine.open == set(expected.STATES[machine.name]) - expected.TERMINAL[machine.name]


@EVERY_MACHINE
def test_every_state_and_event_of_the_enum_stands_in_the_table(machine: Machine) -> None:
    assert set(type(machine.initial)) == set(machine.states)
    assert {t.event for t in machine.transitions()} == set(events_of(machine))


@EVERY_MACHINE
def test_every_state_can_be_reached_and_every_open_state_can_end(machine: Machine) -> None:
    def closure(start: set, edges: set) -> set:
        found = set(start)
        while more := {b for a, b in edges if a in found} - found:
            found |= more
        return found

    edges = {(t.source, t.target) for t in machine.transitions()}
    assert closure({machine.initial}, edges) == set(machine.states)
    assert closure(set(machine.terminal), {(b, a) for a, b in edges}) == set(machine.states)


@EVERY_MACHINE
def test_every_word_says_what_it_means_in_a_sentence(machine: Machine) -> None:
    for word in [*machine.states, *events_of(machine)]:
        assert word.doc.endswith("."), word
        assert word == word.lower()


@EVERY_MACHINE
def test_every_move_in_the_table_is_made_and_every_other_is_refused_with_what_is_allowed(machine: Machine) -> None:
    asked = [(s, e, t) for s in machine.states for e in events_of(machine) for t in machine.states]
    for state, event, target in asked:
        if (state, event, target) in expected.TABLES[machine.name]:
            assert machine.permits(state, event, target)
            assert machine.move(state, event, to=target) == target
            continue
        assert not machine.permits(state, event, target)
        with pytest.raises(InvalidTransition) as caught:
            machine.move(state, event, to=target)
        allowed = sorted({e for s, e, _ in expected.TABLES[machine.name] if s == state})
        is_final = state in expected.TERMINAL[machine.name]
        refusal = caught.value
        assert refusal.fields["state"] == state
        assert refusal.fields["event"] == event
        assert sorted(refusal.fields["allowed"]) == allowed
        assert refusal.code == f"{machine.name.upper()}_{'TERMINAL_STATE' if is_final else 'INVALID_TRANSITION'}"
        assert refusal.status == 409
        assert f"{machine.name} is {state}; {event} is not possible" in refusal.detail
        assert ("it is final" in refusal.detail) == is_final
        assert all(word in refusal.detail for word in allowed)


@EVERY_MACHINE
def test_an_event_with_one_target_needs_not_name_it_and_one_with_several_does(machine: Machine) -> None:
    for state in machine.states:
        for event in machine.allowed(state):
            targets = {t for s, e, t in expected.TABLES[machine.name] if (s, e) == (state, event)}
            if len(targets) == 1:
                assert machine.move(state, event) in targets
            else:
                with pytest.raises(InvalidTransition):
                    machine.move(state, event)


def test_a_run_that_ended_says_so_with_its_own_code() -> None:
    with pytest.raises(InvalidTransition, match=r"run is succeeded; cancel is not possible \(it is final\)") as final:
        RUN.move(RunState.SUCCEEDED, RunEvent.CANCEL)
    assert final.value.code == "RUN_TERMINAL_STATE"
    with pytest.raises(InvalidTransition, match=r"allowed: stopped, fail") as other:
        RUN.move(RunState.CANCELING, RunEvent.RESUME)
    assert other.value.code == "RUN_INVALID_TRANSITION"


def test_the_first_transitions_are_part_of_the_tables() -> None:
    run = {(source, target) for source, _, target in table_of(RUN)}
    step = {(source, target) for source, _, target in table_of(STEP)}
    assert expected.pairs(expected.FIRST_RUN) <= run
    assert expected.pairs(expected.FIRST_STEP) <= step


def test_an_end_has_no_way_out() -> None:
    for state in ("succeeded", "failed", "canceled"):
        assert not RUN.allowed(RunState(state))
        assert not STEP.allowed(type(STEP.initial)(state))


def test_the_reasons_are_those_of_the_contract() -> None:
    assert [str(reason) for reason in RunReason] == expected.REASONS


def test_the_sets_that_code_asks_about_are_those_of_the_contract() -> None:
    assert {"succeeded", "skipped"} == SETTLED_WELL
    assert set(LEASABLE) == {"running", "canceling"}
    assert {"running", "paused"} == MAY_APPEND
    assert set(APPROVAL.columns) == {"resolved_at"}


def test_couplings_only_name_events_that_their_machines_have() -> None:
    machines = BY_NAME | {"gate": STEP, "child run": RUN, "parent step": STEP}
    for coupling in COUPLINGS:
        assert coupling.event in events_of(BY_NAME[coupling.machine])
        assert coupling.with_event in events_of(machines[coupling.fires])


def test_a_run_that_ends_early_cancels_what_is_open_and_one_that_succeeds_does_not() -> None:
    assert fired_by("run", RunEvent.FAIL, "step") == StepEvent.CANCEL
    assert fired_by("run", RunEvent.CANCEL, "step") == StepEvent.CANCEL
    assert fired_by("run", RunEvent.STOPPED, "step") == StepEvent.CANCEL
    assert fired_by("run", RunEvent.SUCCEED, "step") is None
    assert fired_by("run", RunEvent.FAIL, "approval") == ApprovalEvent.CANCEL


def test_a_planted_transition_is_noticed() -> None:
    """The comparison above can fail: one row more or less makes the tables differ."""
    more = {**RUN.table, RunState.SUCCEEDED: {RunEvent.RESUME: RunState.RUNNING}}
    assert table_of(Machine("run", more)) != expected.TABLES["run"]
    less = {**RUN.table, RunState.CANCELING: {}}
    assert table_of(Machine("run", less)) != expected.TABLES["run"]
    assert Machine("run", less).terminal != expected.TERMINAL["run"]
