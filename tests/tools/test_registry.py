"""Tools: a function and the engine's information about it."""

import asyncio
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from interlock.errors import Invalid, Terminal
from interlock.lifecycle import Tier
from interlock.tools import Context, RegisteredTool, Registry, registry, tool


class Address(BaseModel):
    street: str
    number: int = 1


def made(function: Any, name: str = "shop.do", **options: Any) -> RegisteredTool:
    """Return the tool that the decorator makes of a function."""
    shelf = Registry()
    assert tool(name, register=shelf, **options)(function) is function, "it stays a function that can be called"
    found = shelf.find(name)
    assert found is not None
    return found


# ---------------------------------------------------------------- a tool's properties


def test_an_async_function_and_a_plain_one_are_both_tools() -> None:
    async def ask() -> int:
        return 1

    def compute() -> int:
        return 1

    assert made(ask).is_async
    assert not made(compute).is_async


def test_what_is_not_said_is_the_safe_thing() -> None:
    def look() -> None:
        """Look at an order."""

    found = made(look, "shop.orders.look")
    assert found.description == "Look at an order."
    assert (found.connector, found.operation) == ("shop", "orders.look")
    assert (found.writes, found.risk, found.idempotent) == (False, Tier.LOW, True)
    assert (found.key, found.undo, found.timeout, found.wants_context) == (None, None, None, False)
    assert made(look, "look").operation == "look"


def test_a_tool_that_writes_is_not_idempotent_unless_it_says_so() -> None:
    def pay() -> None: ...

    assert not made(pay, writes=True).idempotent
    assert made(pay, writes=True, idempotent=True).idempotent
    assert not made(pay, idempotent=False).idempotent
    found = made(pay, writes=True, risk="high", undo="shop.refund", timeout=2.5, key="k")
    assert (found.risk, found.undo, found.timeout, found.key) == (Tier.HIGH, "shop.refund", 2.5, "k")


def test_a_write_that_declares_no_risk_is_no_low_one() -> None:
    """specification DEV-5: only an explicit `low` passes the default policy without an approval."""

    def pay() -> None: ...

    assert [made(pay, writes=writes).risk for writes in (True, False)] == [Tier.MED, Tier.LOW]
    assert made(pay, writes=True, risk="low").risk == Tier.LOW


# ---------------------------------------------------------------- the schema


def test_the_schema_comes_from_the_signature() -> None:
    async def send(
        ctx: Context,
        to: str,
        amount: Annotated[int, Field(gt=0)],
        kind: Literal["mail", "parcel"] = "mail",
        address: Address | None = None,
        anything: Any = None,
    ) -> None: ...

    found = made(send)
    schema = found.input_schema
    assert found.wants_context
    assert set(schema["properties"]) == {"to", "amount", "kind", "address", "anything"}
    assert schema["required"] == ["to", "amount"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["amount"] == {"exclusiveMinimum": 0, "title": "Amount", "type": "integer"}
    assert schema["properties"]["kind"]["enum"] == ["mail", "parcel"]


def test_the_context_is_known_by_its_name_or_by_its_type_and_only_in_front() -> None:
    def by_name(ctx, x: int) -> None: ...  # type: ignore[no-untyped-def]

    def by_type(about: Context, x: int) -> None: ...

    def behind(x: int, ctx: int = 0) -> None: ...

    assert made(by_name).wants_context
    assert made(by_type).wants_context
    assert not made(behind).wants_context
    assert set(made(by_type).input_schema["properties"]) == {"x"}


@pytest.mark.parametrize("parameters", ["*args", "**more", "x, /"])
def test_a_parameter_that_a_schema_cannot_hold_is_refused(parameters: str) -> None:
    names: dict[str, Any] = {}
    exec(f"def do({parameters}): ...", names)
    with pytest.raises(Invalid, match=r"tool shop\.do: parameter \w+ must have a name and a type"):
        made(names["do"])


def test_a_type_without_a_schema_is_refused() -> None:
    def do(when: asyncio.Event) -> None: ...

    with pytest.raises(Invalid, match=r"tool shop\.do: its parameters have no JSON schema"):
        made(do)


@pytest.mark.parametrize("name", ["", "shop pay", "shop/pay", "shop:pay", "shop\npay"])
def test_a_name_that_a_workflow_could_not_write_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match=r"is not a tool name; write connector\.operation"):
        tool(name)


def test_a_risk_that_nobody_knows_is_refused() -> None:
    with pytest.raises(Invalid, match=r"tool shop\.do: risk is low, med or high, not 'huge'"):
        tool("shop.do", risk="huge")


# ---------------------------------------------------------------- input


def pay(amount: int, to: Address, note: str = "thanks") -> None: ...


def test_input_is_parsed_into_what_the_function_asks_for() -> None:
    given = {"amount": "12", "to": {"street": "Main"}}
    assert made(pay).validated(given) == {"amount": 12, "to": Address(street="Main", number=1), "note": "thanks"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"amount": "ten", "to": {"street": "x"}}, r"amount: expected a whole number, found 'ten'$"),
        ({"to": {"street": "x"}}, r"amount: Field required$"),
        ({"amount": 1, "to": {}}, r"to\.street: Field required"),
        (
            {"amount": 1, "to": {"street": "x"}, "amuont": 2},
            r"amuont: there is no such field; did you mean `amount`\?$",
        ),
        ({"amount": "x", "to": 5}, r"amount: .*; to: "),
        (None, r"amount: Field required; to: Field required"),
        ([1, 2], r"expected a mapping, found a list$"),
        ({"amount": "x" * 500, "to": {"street": "x"}}, r"found 'x{79}$"),
    ],
)
def test_input_that_does_not_fit_is_terminal_and_says_where_and_what(given: Any, said: str) -> None:
    with pytest.raises(Terminal, match=r"input of shop\.do is not valid: .*" + said):
        made(pay).validated(given)


def test_a_tool_without_parameters_takes_nothing_and_nothing_else() -> None:
    def do() -> None: ...

    assert made(do).validated({}) == made(do).validated(None) == {}
    with pytest.raises(Terminal, match=r"x: there is no such field$"):
        made(do).validated({"x": 1})


# ---------------------------------------------------------------- the key of an effect


def test_a_key_is_rendered_from_the_arguments() -> None:
    found = made(pay, key="pay:{to.street}:{amount:05d}")
    assert found.effect_key(found.validated({"amount": 7, "to": {"street": "Main"}})) == "pay:Main:00007"
    assert made(pay).effect_key({"amount": 7}) is None


def test_a_key_may_have_the_hash_of_an_argument_or_of_all() -> None:
    def post(channel: str, body: str, thread_ts: str | None = None) -> None: ...

    found = made(post, key="slack:post:{channel}:{thread_ts}:{body_hash}")
    keys = {found.effect_key(found.validated({"channel": "C1", "body": text})) for text in ("hi", "hi", "ho")}
    assert len(keys) == 2 and all(key and key.startswith("slack:post:C1:None:") and "hi" not in key for key in keys)
    whole = made(post, key="{fields_hash}")
    assert whole.effect_key({"channel": "C1", "body": "hi"}) != whole.effect_key({"channel": "C2", "body": "hi"})


@pytest.mark.parametrize("what", ["key", "target"])
@pytest.mark.parametrize("template", ["{gone}", "{0}", "{}", "{", "{gone_hash}"])
def test_a_template_that_names_no_argument_is_refused_where_it_is_written(what: str, template: str) -> None:
    with pytest.raises(Invalid, match=rf"tool shop\.do: {what} .*(amount, to, note|expected)"):
        made(pay, **{what: template})


@pytest.mark.parametrize("key", ["{to.gone}", "{note:d}", "{amount[0]}"])
def test_a_key_that_does_not_fit_the_input_is_terminal(key: str) -> None:
    found = made(pay, key=key)
    with pytest.raises(Terminal, match=r"key of shop\.do does not fit its input"):
        found.effect_key(found.validated({"amount": 7, "to": {"street": "Main"}}))


# ---------------------------------------------------------------- the registry


def test_tools_are_found_by_name_and_listed_in_order() -> None:
    shelf = Registry()
    for name in ("b.two", "a.one"):
        tool(name, register=shelf)(lambda: None)
    assert [found.name for found in shelf.all()] == ["a.one", "b.two"]
    assert shelf.find("c.three") is None
    assert shelf.missing("c.three") == "no tool c.three here; add its file to INTERLOCK_TOOLS"
    assert shelf.missing("b.tow", "in this worker") == "no tool b.tow in this worker; did you mean `b.two`?"


def test_the_same_function_again_replaces_itself_and_another_is_refused() -> None:
    shelf = Registry()

    def do() -> None: ...

    def other() -> None: ...

    tool("shop.do", register=shelf)(do)
    tool("shop.do", register=shelf, timeout=1)(do)
    found = shelf.find("shop.do")
    assert found is not None and found.timeout == 1
    with pytest.raises(Invalid, match=r"tool shop\.do is defined twice: in .*test_registry and .*test_registry"):
        tool("shop.do", register=shelf)(other)


def test_without_another_shelf_tools_stand_on_the_common_one() -> None:
    @tool("test_registry.common")
    def do() -> None: ...

    assert registry.find("test_registry.common") is not None
    del registry._tools["test_registry.common"]
