"""Publication checks tools and arguments against the registry (new-user 7)."""

from typing import Annotated

import pytest

from interlock.definition import parse, parse_agent
from interlock.errors import DefinitionInvalid
from interlock.tools import Registry, Secret, tool
from interlock.tools.fit import fits
from tests.rig import Rig


@pytest.fixture
def tools() -> Registry:
    made = Registry()

    @tool("shop.refund", writes=True, risk="low", register=made)
    async def refund(charge: str, amount: int, lines: list[int] | None = None) -> None: ...

    @tool("shop.undo", writes=True, risk="low", register=made)
    async def undo(refund: str) -> None: ...

    @tool("shop.login", register=made)
    async def login(password: Annotated[int, Secret]) -> None: ...

    return made


def faults(tools: Registry, steps: str) -> list[str]:
    text = f"name: w\nsteps:\n{steps}"
    try:
        parse(text, also=fits(tools))
    except DefinitionInvalid as invalid:
        return [f"{fault.line}: {fault.path}: {fault.message}" for fault in invalid.faults]
    return []


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("{id: a, tool: shop.refund, input: {charge: c, amount: 5}}", None),
        ('{id: a, tool: shop.refund, input: {charge: "${input.c}", amount: "${input.a}"}}', None),
        ("{id: a, tool: shop.refnd}", "steps[0].tool: no tool is called `shop.refnd`; did you mean `shop.refund`?"),
        ("{id: a, tool: other.thing}", "steps[0].tool: no tool is called `other.thing`"),
        (
            "{id: a, tool: shop.refund, input: {charge: c, amuont: 5, amount: 5}}",
            "steps[0].input.amuont: shop.refund has no argument `amuont`; did you mean `amount`?",
        ),
        (
            '{id: a, tool: shop.refund, input: {charge: c, amount: 5, amuont: "${input.a}"}}',
            "steps[0].input.amuont: shop.refund has no argument `amuont`; did you mean `amount`?",
        ),
        ("{id: a, tool: shop.refund, input: {charge: c}}", "steps[0].input: `amount` is missing; shop.refund needs it"),
        ("{id: a, tool: shop.undo}", "steps[0]: `refund` is missing; shop.undo needs it"),
        (
            "{id: a, tool: shop.refund, input: {charge: 7, amount: 5}}",
            "steps[0].input.charge: expected a string, found a number",
        ),
        (
            "{id: a, tool: shop.undo, input: {refund: x}, compensate: {tool: shop.nudo, input: {}}}",
            "steps[0].compensate.tool: no tool is called `shop.nudo`; did you mean `shop.undo`?",
        ),
    ],
)
def test_a_step_is_checked_against_its_tool(tools: Registry, step: str, expected: str | None) -> None:
    found = faults(tools, f"  - {step}\n")
    if expected is None:
        assert found == []
    else:
        assert any(expected.split(": ", 1)[1] in line for line in found), found


def test_a_secret_argument_that_does_not_fit_is_not_repeated(tools: Registry) -> None:
    found = faults(tools, "  - {id: a, tool: shop.login, input: {password: hunter2}}\n")
    assert "hunter2" not in "".join(found)


def test_without_tools_nothing_is_checked() -> None:
    assert fits(Registry()) is None


def test_an_agent_names_tools_that_exist(tools: Registry) -> None:
    parse_agent(
        "name: a\nmodel: scripted\ntools: [shop.*, shop.refund]\nscript: [{turns: [{say: hi}]}]", also=fits(tools)
    )
    with pytest.raises(DefinitionInvalid) as caught:
        parse_agent(
            "name: a\nmodel: scripted\ntools:\n  - shop.refnd\nscript: [{turns: [{say: hi}]}]", also=fits(tools)
        )
    (fault,) = caught.value.faults
    assert (fault.line, fault.path) == (4, "tools[0]")
    assert "did you mean `shop.refund`?" in fault.message


async def test_publication_refuses_unknown_tools_unless_the_caller_allows_them(rig: Rig) -> None:
    @rig.tool("t.echo")
    async def echo(text: str) -> str:
        return text

    definition = "name: w\nsteps:\n  - {id: a, tool: t.ehco, input: {text: hi}}\n"
    async with rig.http() as http:
        headers = {"Content-Type": "application/yaml"}
        refused = await http.post("/api/workflows", content=definition, headers=headers)
        assert refused.status_code == 422 and "did you mean `t.echo`?" in refused.json()["errors"][0]["message"]
        allowed = await http.post("/api/workflows?allow_unknown_tools=true", content=definition, headers=headers)
        assert allowed.status_code == 201
