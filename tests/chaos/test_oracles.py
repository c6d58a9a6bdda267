"""Every oracle can fail: it detects a record of what must never happen."""

from typing import Any

import pytest

from interlock.engine.queueing.sweeps import recount_queues
from tests.chaos.oracles import (
    Execution,
    assert_done_again_only_after_a_loss,
    assert_gap_free,
    assert_one_ending,
    assert_ratio,
    assert_settled_once,
    assert_sound,
    assert_tokens_grow,
    interrupted,
    most_at_once,
)
from tests.rig import Rig


def entry(seq: int, type: str = "step_transition", **more: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("step", "from_state", "event", "to_state", "attempt", "data"))
    return {"run_id": "r", "seq": seq, "type": type, "token": 1, **nothing, **more}


def succeeded(seq: int, step: str, attempt: int = 1, **more: Any) -> dict[str, Any]:
    states = {"from_state": "running", "event": "succeed", "to_state": "succeeded"}
    return entry(seq, step=step, attempt=attempt, **states, **more)


CREATED = entry(1, "run_created", event="create", to_state="pending", token=0)
ENDED = {"from_state": "running", "event": "succeed", "to_state": "succeeded"}
SOUND = [CREATED, succeeded(2, "a"), succeeded(3, "b"), entry(4, "run_completed", **ENDED)]


def begin(attempt: int = 1, step: str = "a", what: str = "begin", at: int = 0) -> Execution:
    return Execution(what, "r", step, attempt, 1, at)  # type: ignore[arg-type]


def test_a_sound_journal_is_sound() -> None:
    assert_sound(SOUND, ["a", "b"], runs=1)
    assert_done_again_only_after_a_loss([begin(), begin(step="b")], SOUND)


def test_a_lost_run_is_found() -> None:
    with pytest.raises(AssertionError, match="2 were started"):
        assert_sound(SOUND, ["a", "b"], runs=2)


def test_a_step_that_is_settled_twice_is_found() -> None:
    with pytest.raises(AssertionError, match="settled"):
        assert_settled_once([CREATED, succeeded(2, "a"), succeeded(3, "a")], ["a"])


def test_a_step_that_is_not_settled_is_found() -> None:
    with pytest.raises(AssertionError, match="settled"):
        assert_sound([*SOUND[:2], entry(3, "run_completed", **ENDED)], ["a", "b"], runs=1)


def test_a_gap_and_a_repetition_in_the_numbers_are_found() -> None:
    for numbers in ([1, 3], [1, 2, 2], [2, 3]):
        with pytest.raises(AssertionError, match="numbers"):
            assert_gap_free(numbers)


def test_a_run_that_ends_twice_or_goes_on_or_fails_is_found() -> None:
    end = entry(5, "run_completed", **ENDED)
    for journal in ([*SOUND, end], [*SOUND, entry(5)], SOUND[:3], [entry(1, "run_completed", to_state="failed")]):
        with pytest.raises(AssertionError, match=r"ended|failed"):
            assert_one_ending(journal)


def test_a_late_word_of_a_lost_worker_is_found() -> None:
    with pytest.raises(AssertionError, match="tokens"):
        assert_tokens_grow([entry(1, token=1), entry(2, token=2), entry(3, token=1)])


def test_an_execution_too_many_is_found() -> None:
    lost = entry(2, "orphan_detected")
    again = [CREATED, lost, succeeded(3, "a", attempt=2)]
    assert_done_again_only_after_a_loss([begin(1), begin(2)], again)
    for executions, journal, why in (
        ([begin(1), begin(2)], [CREATED, succeeded(2, "a", attempt=2)], "lost 0 times"),
        ([begin(2), begin(2)], again, "attempts"),
        ([begin(1)], again, "settled 2"),
        ([], again, "began"),
        ([begin(2), begin(step="z")], again, "in no journal"),
    ):
        with pytest.raises(AssertionError, match=why):
            assert_done_again_only_after_a_loss(executions, journal)


def test_what_overlaps_is_counted() -> None:
    lines = [begin(1, at=1), begin(2, at=2), begin(1, what="end", at=3), begin(3, at=4), begin(2, what="end", at=5)]
    assert most_at_once(lines) == 2
    assert interrupted(lines) == {("r", "a", 3)}


def test_a_ratio_that_is_off_is_found() -> None:
    assert_ratio(310, 100, 3, 0.1)
    with pytest.raises(AssertionError, match="not 3"):
        assert_ratio(350, 100, 3, 0.1)
    with pytest.raises(AssertionError, match="nothing"):
        assert_ratio(350, 0, 3, 0.1)


async def test_a_lane_that_drifted_is_found(rig: Rig) -> None:
    assert await recount_queues(rig.database) == 0
    await rig.sql("UPDATE interlock.queue SET in_flight = 1")
    assert await recount_queues(rig.database) == 1
