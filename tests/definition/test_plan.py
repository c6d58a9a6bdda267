import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.definition import parse
from interlock.definition.plan import Retry


@pytest.mark.parametrize(
    ("retry", "delays"),
    [
        (Retry(), [10, 20, 40, 80, 160, 320, 600, 600]),
        (Retry(base_delay=1, max_delay=5), [2, 4, 5]),
        (Retry(backoff=(5, 30, 120)), [5, 30, 120, 120]),
        (Retry(backoff=(5, 900)), [5, 600]),
    ],
)
def test_delays_grow_and_are_capped(retry, delays):
    assert [retry.delay(failures, 0.5) for failures in range(1, len(delays) + 1)] == pytest.approx(delays)


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_jitter_spreads_a_delay_by_a_tenth(failures, jitter):
    middle = Retry().delay(failures, 0.5)
    assert middle * 0.9 <= Retry().delay(failures, jitter) <= middle * 1.1


GRAPH = """
name: graph
steps:
  - {id: a, tool: t.one}
  - {id: b, tool: t.two, needs: []}
  - {id: c, approval: {}, needs: [a, b]}
  - {id: d, tool: t.one}
"""


def test_a_step_without_needs_follows_the_one_before_it():
    plan = parse(GRAPH)
    assert {step.key: step.after for step in plan.steps} == {"a": (), "b": (), "c": ("a", "b"), "d": ("c",)}
    assert plan.by_key["d"].follows == "c" and plan.by_key["d"].needs == ()
    assert plan.by_key["c"].follows is None
    assert dict(plan.successors) == {"a": ("c",), "b": ("c",), "c": ("d",), "d": ()}
    assert not plan.is_sequence


def test_a_plain_list_is_a_sequence():
    assert parse("name: x\nsteps: [{id: a, tool: t}, {id: b, tool: t}]").is_sequence
    assert parse("name: x\nsteps: [{id: a, tool: t}]").is_sequence
    # Not even here: skipping `a` would also skip `b`.
    assert not parse("name: x\nsteps: [{id: a, tool: t}, {id: b, tool: t, needs: [a]}]").is_sequence


def test_tools_are_listed_once_in_order():
    assert parse(GRAPH).tools == ("t.one", "t.two")


def test_plans_are_equal_by_digest_and_can_be_keys():
    assert {parse(GRAPH): 1}[parse(GRAPH + "# a comment\n")] == 1
