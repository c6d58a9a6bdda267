"""Users' patterns match in bounded time: security H3, and the `match` of scripted agents."""

import time

import pytest

from interlock.definition.expression import Elsewhere, Expression, ExpressionFailed, Scope, StepAnswer, answer_to
from interlock.definition.patterns import PatternInvalid, pattern

MUCH = "a" * 900_000
# The pattern is a constant or comes from the run's input.
BLOWN_UP = "(((a{30}){30}){30})"


@pytest.mark.parametrize(
    "source", ["input.s.matches(input.re)", f"input.s.matches('{BLOWN_UP}')", "matches(input.s, input.re)"]
)
def test_a_pattern_that_repetitions_blow_up_is_refused_in_no_time(source: str) -> None:
    expression = Expression.parse(f"{source} && {source} && {source}")
    began = time.process_time()
    with pytest.raises(ExpressionFailed, match="not a valid regex"):
        expression.evaluate(Scope({"s": MUCH, "re": BLOWN_UP}, None, {}))
    assert time.process_time() - began < 1


def test_a_large_pattern_on_a_long_text_is_refused_before_it_is_matched() -> None:
    expression = Expression.parse("input.s.matches(input.re) || true")
    began = time.process_time()
    with pytest.raises(ExpressionFailed, match="matches too long a text, too often, or with too large a pattern"):
        expression.evaluate(Scope({"s": MUCH, "re": "(a?){700}b"}, None, {}))
    assert time.process_time() - began < 1


def test_all_matches_of_an_expression_are_counted_together() -> None:
    expression = Expression.parse("input.l.all(x, !x.matches('(b|c){30}'))")
    assert expression.evaluate(Scope({"l": ["a" * 1000] * 10}, None, {})) is True
    with pytest.raises(ExpressionFailed, match="matches too long a text, too often"):
        expression.evaluate(Scope({"l": ["a" * 1000] * 30_000}, None, {}))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("'ch_1'.matches('^ch_[0-9]+$')", True),
        ("'ch_x'.matches('^ch_[0-9]+$')", False),
        ("matches('größe', 'ö')", True),
        ("['a1', 'b'].filter(x, x.matches('[0-9]'))", ["a1"]),
        ("input.matches.matches('x')", True),
        ("'a.matches(b)'.contains('.matches(')", True),
    ],
)
def test_matches_is_what_cel_says_it_is(source: str, found: object) -> None:
    expression = Expression.parse(source)
    assert expression.evaluate(Scope({"matches": "xyz"}, None, {})) == found
    assert "interlock_matches" not in expression.functions()


@pytest.mark.parametrize("source", ["input.n.matches('x')", "'x'.matches()", "'x'.matches(1)", "'x'.matches('(?=a)')"])
def test_a_match_of_something_else_fails_also_where_cel_would_pass_over_it(source: str) -> None:
    with pytest.raises(ExpressionFailed):
        Expression.parse(f"{source} || true").evaluate(Scope({"n": 1}, None, {}))


def test_the_name_behind_matches_is_reserved() -> None:
    with pytest.raises(ValueError, match="reserved name; write `matches`"):
        Expression.parse("'a'.interlock_matches('a')")


def test_a_pattern_has_a_longest_length() -> None:
    with pytest.raises(PatternInvalid, match="at most 10,000 characters"):
        pattern("a" * 10_001)


# ---------------------------------------------------------------- on an event loop


@pytest.mark.parametrize(
    ("source", "given"),
    [
        ("input.s.matches('(b|c){30}')", {"s": MUCH}),
        ("input.l.all(a, input.l.all(b, b >= a - 1000))", {"l": list(range(150))}),
        ("input.l.size() > 0", {"l": list(range(50_000))}),
        (" && ".join(["input.l == input.l"] * 150), {"l": list(range(1000))}),
    ],
)
def test_what_takes_long_is_not_evaluated_on_an_event_loop(source: str, given: dict[str, object]) -> None:
    expression, scope = Expression.parse(source), Scope(given, None, {}, on_event_loop=True)
    began = time.process_time()
    with pytest.raises(Elsewhere) as asked:
        expression.evaluate(scope)
    assert time.process_time() - began < 0.2
    source, roots, steps = asked.value.question()
    answer = answer_to(source, roots, steps)
    scope.answer(source, answer)
    assert answer.why is None and expression.evaluate(scope) == answer.value
    scope.settle("a", "succeeded", 1)  # a condition that held before a step settled may no longer hold
    with pytest.raises(Elsewhere):
        expression.evaluate(scope)


def test_an_answer_from_elsewhere_may_be_a_failure() -> None:
    expression, scope = Expression.parse("input.l.map(x, x / 0)"), Scope({"l": []}, None, {}, on_event_loop=True)
    scope.answer(expression.source, StepAnswer(why="it divides by zero"))
    with pytest.raises(ExpressionFailed, match="divides by zero"):
        expression.evaluate(scope)


def test_what_people_write_is_evaluated_at_once() -> None:
    items = [{"sku": f"s{n}", "price": n} for n in range(20)]
    scope = Scope({"items": items, "kind": "a1"}, None, {}, on_event_loop=True)
    for source in ("input.items.all(i, i.price >= 0)", "input.kind.matches('^[a-z][0-9]+$')", "input.kind == 'a1'"):
        assert Expression.parse(source).evaluate(scope) is True
