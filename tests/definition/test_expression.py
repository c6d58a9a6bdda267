import cel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.definition.expression import FUNCTIONS, Expression, ExpressionFailed, Scope


def scope() -> Scope:
    made = Scope(
        input={"x": 1, "f": 1.5, "s": "hey", "n": None, "l": [1, 2, 3], "a-b": 7, "m": {"k": "v"}},
        trigger={"source": "api"},
        run={"id": "r1"},
    )
    made.settle("lookup", "succeeded", {"name": "Ada"})
    made.settle("look-up", "skipped", None)
    return made


def evaluate(source: str):
    return Expression.parse(source).evaluate(scope())


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("input.x + 1", 2),
        ("input.f", 1.5),
        ("input.n", None),
        ("input['a-b']", 7),
        ("input.m", {"k": "v"}),
        ("trigger.source + run.id", "apir1"),
        ("steps.lookup.output.name", "Ada"),
        ('steps["look-up"].status', "skipped"),
        ("has(input.zz) ? 1 : 2", 2),
        ("has(steps.lookup.output.name)", True),
        ("input.l.map(x, x * 2)", [2, 4, 6]),
        ("size(steps)", 2),
        ("timestamp('2024-01-01T02:00:00.5+02:00')", "2024-01-01T00:00:00.500000Z"),
        ("timestamp('2024-01-01T00:00:00Z')", "2024-01-01T00:00:00Z"),
        ("duration('1h30m')", 5400.0),
        ("b'abc'", "YWJj"),
        ("1u", 1),
        ("[b'a', {'d': duration('1s')}]", ["YQ==", {"d": 1.0}]),
        ("{1: 2}", {"1": 2}),
        ("{true: 3}", {"true": 3}),
        ("type(1) == int", True),
    ],
)
def test_a_value_is_plain_json(source, value):
    found = evaluate(source)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("steps.lookup.output.nme", "`steps.lookup.output.nme`: no such key: nme"),
        ("steps.later.output", "no such key: later"),
        ("input.l[7]", "index out of bounds: 7"),
        ("input.x + 'a'", "does not fit the types"),
        ("input.s + 1", "string + int"),
        ("input.n.x", "look out for null"),
        ("nobody.x", "undefined variable or function: 'nobody'"),
        ("1 / 0", "division by zero"),
        ("9223372036854775807 + input.x", "overflow"),
        ("1.0 / 0.0", "inf, which JSON cannot carry"),
        ("[0.0 / 0.0]", "nan, which JSON cannot carry"),
        ("input.s.matches('(')", "regex"),
        ("int('x')", "parse error"),
    ],
)
def test_a_failure_names_the_expression_and_the_reason_in_one_line(source, why):
    with pytest.raises(ExpressionFailed) as failed:
        evaluate(source)
    assert why.lower() in str(failed.value).lower()
    assert "\n" not in str(failed.value)
    assert failed.value.source == source


def test_a_value_that_cel_cannot_hold_fails_the_expression_only():
    odd = Scope(input={"x": object()}, trigger=None, run={})
    with pytest.raises(ExpressionFailed):
        Expression.parse("input.x").evaluate(odd)
    assert Expression.parse("trigger == null").evaluate(odd) is True


@pytest.mark.parametrize(
    "source", ["", "  ", "1 +", "(", "'abc", "input.?x", "for", "a b", "\n1 +\n*", ".input.x", "x" * 5000]
)
def test_a_syntax_error_is_one_clear_line(source):
    with pytest.raises(ValueError, match=r"^[^\n]*(empty|not valid CEL|longer than)") as refused:
        Expression.parse(source)
    assert "expecting {" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("source", "names", "steps"),
    [
        ("input.x", {"input"}, set()),
        ("input . steps . x", {"input"}, set()),
        ("steps.a.output + steps['b-c'].output + steps[\"d\"].x", {"steps"}, {"a", "b-c", "d"}),
        ("steps[ r'a' ].x", {"steps"}, {"a"}),
        ("steps['\\x61'].x", {"steps"}, {"a"}),
        ("'steps.a input' + \"trigger\" + '''x ' steps.b'''", set(), set()),
        ("'it\\'s steps.a' == input.x", {"input"}, set()),
        ("r'\\' + input.x", {"input"}, set()),
        ("1 // steps.a\n + run.x", {"run"}, set()),
        ("input.l.map(x, x + y)", {"input", "y"}, set()),
        ("input.l.map(x, x > 1, x) == x", {"input", "x"}, set()),
        ("input.l.all(i, i.exists(j, j == i && k))", {"input", "k"}, set()),
        ("[1].map(steps, steps.a)", set(), set()),
        ("[1].map(x, steps.a.output == x)", {"steps"}, {"a"}),
        ("size(input.l) > 1e5 && true || x1 in [0x1F, 2u, .5]", {"input", "x1"}, set()),
        ("{'a': b, c: 1}", {"b", "c"}, set()),
        ("type(input) == map", {"input"}, set()),
        ("size(steps)", {"steps"}, set()),
        ("steps.map(k, k)", {"steps"}, set()),
        ("steps.a-b.output", {"steps", "b"}, {"a"}),
        ("inptu.x", {"inptu"}, set()),
    ],
)
def test_the_names_it_reads_are_known_without_running_it(source, names, steps):
    expression = Expression.parse(source)
    assert expression.names() == names
    assert expression.steps() == steps
    assert names <= set(cel.compile(source).variables())


@pytest.mark.parametrize(
    ("source", "any_step"),
    [("size(steps)", True), ("steps[input.x]", True), ("steps.map(k, k)", True), ("steps.a", False)],
)
def test_using_steps_without_naming_one_is_noticed(source, any_step):
    assert Expression.parse(source).references.any_step is any_step


def test_functions_are_told_from_operators():
    assert Expression.parse("size(input.l) + 1 > now()").functions() == {"size", "now"}


@pytest.mark.parametrize("function", sorted(FUNCTIONS))
def test_every_function_we_promise_exists(function):
    for call in (
        f"{function}(1)",
        f"{function}('1s')",
        f"'a'.{function}('a')",
        f"timestamp('2024-01-01T00:00:00Z').{function}()",
    ):
        try:
            cel.evaluate(call)
        except Exception as error:
            if "Undefined" in str(error):
                continue
        return
    pytest.fail(f"{function} is in no form known to CEL")


def test_a_scope_hands_nothing_to_cel_before_an_expression_asks():
    made = Scope(input=object(), trigger=object(), run={})
    made.settle("a", "succeeded", object())
    assert made._context is None
    assert Expression.parse("1 + 1").evaluate(made) == 2


def test_a_step_that_settles_later_is_seen_by_the_next_evaluation():
    made, expression = Scope(input={}, trigger=None, run={}), Expression.parse("has(steps.a) ? steps.a.output : 0")
    assert expression.evaluate(made) == 0
    made.settle("a", "succeeded", 1)
    assert expression.evaluate(made) == 1
    made.settle("a", "succeeded", 2)
    assert expression.evaluate(made) == 2


def test_expressions_over_different_steps_can_alternate():
    made = Scope(input={}, trigger=None, run={})
    made.settle("a", "succeeded", 1)
    made.settle("b", "succeeded", 2)
    one, two, both = (Expression.parse(s) for s in ("steps.a.output", "steps.b.output", "size(steps)"))
    assert [e.evaluate(made) for e in (one, two, one, both, two, one)] == [1, 2, 1, 2, 2, 1]


TEN = "[0,1,2,3,4,5,6,7,8,9]"


def nested(levels, over=TEN):
    return f"{over}.all(x{levels}, {nested(levels - 1, over)})" if levels else "true"


@pytest.mark.parametrize("source", [nested(3), nested(12), nested(3).replace("x3,", "(x3),"), nested(3, "input.l")])
def test_macros_deeper_than_two_in_one_another_are_refused(source):
    with pytest.raises(ValueError, match="has macros more than 2 deep in one another"):
        Expression.parse(source)


def test_macros_one_after_the_other_cannot_double_for_ever():
    with pytest.raises(ValueError, match="goes through too much data"):
        Expression.parse("['a']" + ".map(x, x + x)" * 40)


MANY = list(range(30_000))


@pytest.mark.parametrize(
    ("source", "data"),
    [
        ("input.all(a, input.all(b, b >= 0))", MANY),
        ("input.all(a, !(-1 in input))", MANY),
        ("input.map(a, a + 1)", MANY),  # CEL copies the list for each element that it adds
        ("input.filter(a, a >= 0)", MANY),
        ("input.all(a, a.all(b, b in a))", [MANY]),
        ("input.l.map(a, input.s)", {"l": MANY[:1000], "s": "x" * 100_000}),
        ("input.map(a, 'CONSTANT')".replace("CONSTANT", "x" * 3000), MANY[:8000]),
        ("[input.s]" + ".map(a, [a, a, a, a, a, a, a, a])" * 5, {"s": "x"}),
        ("(" + "+".join(["input"] * 400) + ").map(a, a)", MANY[:1000]),
    ],
)
def test_what_would_take_minutes_is_not_begun(source, data):
    expression = Expression.parse(source)
    with pytest.raises(ExpressionFailed, match="goes through too much data too often"):
        expression.evaluate(Scope(data, None, {}))


@pytest.mark.parametrize(
    "source",
    [
        "input.items.all(i, i.price > 0 && i.count > 0 && i.count < 100)",
        "input.items.filter(i, i.sku in input.wanted).size() > 0",
        "input.items.map(i, {'sku': i.sku, 'by': input.by}).size() > 0",
        "input.items.exists(i, i.tags.exists(t, t == input.by))",
    ],
)
def test_what_people_write_is_not_too_much(source):
    items = [{"sku": f"s{n}", "price": 5, "count": 2, "tags": ["ada", "b"], "note": "x" * 50} for n in range(100)]
    scope = Scope({"items": items, "wanted": ["s1", "s2"], "by": "ada"}, None, {})
    assert Expression.parse(source).evaluate(scope) is True


def test_a_macro_that_only_looks_at_its_own_items_may_have_any_number_of_them():
    scope = Scope(MANY * 10, None, {})
    assert Expression.parse("input.all(a, a >= 0 && a < 50000)").evaluate(scope) is True


def test_expressions_are_equal_by_source():
    assert Expression.parse("input.x") == Expression.parse(" input.x ")


@given(st.text(alphabet=st.sampled_from("ab.'\"\\()[]{}+-!?:,0 1rsteps\n/"), max_size=40))
def test_any_source_parses_or_is_a_value_error(source):
    try:
        expression = Expression.parse(source)
    except ValueError:
        return
    assert expression.names() <= set(cel.compile(source).variables())
    assert expression.steps() == frozenset() or "steps" in expression.names()
