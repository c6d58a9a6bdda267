import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.definition.expression import ExpressionFailed, Scope, Template, TemplateInvalid

SCOPE = Scope(
    input={"x": 1, "f": 2.5, "t": True, "n": None, "s": 'a "b"', "m": {"k": [1, "é"]}}, trigger=None, run={"id": "r"}
)


@pytest.mark.parametrize(
    ("written", "rendered"),
    [
        ("${input.x}", 1),
        ("${ input.m }", {"k": [1, "é"]}),
        ("${input.n}", None),
        ("a ${input.x} b", "a 1 b"),
        ("${input.s}!", 'a "b"!'),
        ("${input.f}/${input.t}/${input.n}/${input.m}", '2.5/true/null/{"k":[1,"é"]}'),
        ("${input.x}${input.x}", "11"),
        (" ${input.x}", " 1"),
        ("$${input.x}", "${input.x}"),
        ("$${a} ${input.x} $${b}", "${a} 1 ${b}"),
        ("$$${input.x}", "$${input.x}"),
        ("cost: $5 {x} }", "cost: $5 {x} }"),
        ("${{'a': {'b': input.x}}}", {"a": {"b": 1}}),
        ("${'}' + '{' + \"}\"}", "}{}"),
        ("${{'a}': 1}['a}']} }", "1 }"),
        ("https://x/${input.x}", "https://x/1"),
        ({"a": ["${input.x}", {"b": "n ${input.x}"}], "${input.x}": 5}, {"a": [1, {"b": "n 1"}], "${input.x}": 5}),
        ([], []),
        (None, None),
        (True, True),
    ],
)
def test_a_template_renders(written, rendered):
    found = Template.parse(written).render(SCOPE)
    assert found == rendered
    assert type(found) is type(rendered)


@pytest.mark.parametrize("written", ["plain", 5, None, {"a": [1, {"b": "c"}]}, "$${x}", [], {}])
def test_a_constant_is_built_once(written):
    template = Template.parse(written)
    assert template.is_constant
    assert template.render(SCOPE) is template.render(SCOPE)
    assert list(template.expressions()) == []


def test_expressions_come_with_their_paths():
    template = Template.parse({"a": ["x", "${input.x}"], "b": {"c": "${run.id} and ${trigger}"}})
    assert not template.is_constant
    found = [(path, expression.source) for path, expression in template.expressions()]
    assert found == [(("a", 1), "input.x"), (("b", "c"), "run.id"), (("b", "c"), "trigger")]


def test_every_broken_expression_is_reported_and_the_others_stay_checkable():
    with pytest.raises(TemplateInvalid) as refused:
        Template.parse({"a": "${1 +}", "b": ["${"], "c": "${input.x}", "d": "${}"})
    assert [path for path, _ in refused.value.faults] == [("a",), ("b", 0), ("d",)]
    assert "b[0]: `${` is not closed by `}`" in str(refused.value)
    assert [path for path, _ in refused.value.rest.expressions()] == [("c",)]


def test_a_missing_value_fails_the_rendering():
    with pytest.raises(ExpressionFailed, match="no such key: y"):
        Template.parse({"a": "is ${input.y}"}).render(SCOPE)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def escaped(value):
    match value:
        case str():
            return value.replace("${", "$${")
        case list():
            return [escaped(item) for item in value]
        case dict():
            return {key: escaped(item) for key, item in value.items()}
    return value


@given(json_values)
def test_any_escaped_value_renders_as_itself(value):
    template = Template.parse(escaped(value))
    assert template.is_constant
    assert template.render(SCOPE) == value


@given(st.text(alphabet=st.sampled_from("${}'\"ax.+ input")))
def test_any_text_parses_or_says_why_not(text):
    with contextlib.suppress(TemplateInvalid):
        Template.parse(text)
