"""A value that a tool marks Secret is hidden wherever the mark is, and only where the engine writes it for others."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, NewType

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from interlock.tools import RegisteredTool, Registry, Secret, Veil, as_shown, tool

HIDDEN = b'"[secret]"'


class Model(BaseModel):
    token: Annotated[str, Secret] = Field(serialization_alias="theToken")
    user: str = "ada"


@dataclass
class Data:
    token: Annotated[str, Secret]


class Typed(TypedDict):
    token: Annotated[str | None, Secret()]
    user: str


class Named(NamedTuple):
    token: Annotated[str, Secret]


Token = NewType("Token", Annotated[str, Secret])  # type: ignore[valid-newtype]


def made(function: Any) -> RegisteredTool:
    registry = Registry()
    tool("t.t", register=registry)(function)
    found = registry.find("t.t")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("returns", "value", "kept"),
    [
        (Annotated[dict[str, Any], Secret], {"a": "value"}, HIDDEN),
        (Annotated[int, Secret], 123456, HIDDEN),
        (Model, Model(token="value"), b'{"theToken":"[secret]","user":"ada"}'),
        (list[Model], [Model(token="value")], b'[{"theToken":"[secret]","user":"ada"}]'),
        (dict[str, Model | None], {"a": Model(token="value"), "b": None}, None),
        (list[Data], [Data("value")], b'[{"token":"[secret]"}]'),
        (Typed, {"token": "value", "user": "ada"}, b'{"token":"[secret]","user":"ada"}'),
        (Typed, {"token": None, "user": "ada"}, b'{"token":null,"user":"ada"}'),
        (Named, Named("value"), b'["[secret]"]'),
        (dict[str, Token], {"a": "value"}, b'{"a":"[secret]"}'),
        (Model, {"wrong": "value"}, HIDDEN),
        (Data, "value", HIDDEN),
    ],
)
def test_a_result_is_kept_without_what_is_secret(returns: Any, value: Any, kept: bytes | None) -> None:
    def function() -> Any: ...

    function.__annotations__["return"] = returns
    result = made(function).kept(value, veil := Veil())
    assert b"value" not in result and b"123456" not in result
    assert kept in (None, result)
    assert veil.hidden <= {"value", "123456"}


def test_a_result_without_a_mark_costs_nothing() -> None:
    def function() -> dict[str, list[int]]: ...

    assert made(function).result is None


def test_who_wrote_the_tool_may_write_the_value_down() -> None:
    assert Model(token="value").model_dump_json() == '{"token":"value","user":"ada"}'


def test_parameters_are_shown_by_a_hash_that_only_the_salt_can_make() -> None:
    def function(pin: Annotated[int, Secret], deep: list[Model], name: str = "x") -> None: ...

    found = made(function)
    assert found.secret == {"pin", "deep"}
    arguments = found.validated({"pin": "7351", "deep": [{"token": "value"}]})
    shown = [found.shown(arguments, Veil(salt)) for salt in (b"one", b"one", b"two", None)]
    assert shown[0] == shown[1] != shown[2]
    assert shown[3] == {"pin": "[secret]", "deep": [{"theToken": "[secret]", "user": "ada"}], "name": "x"}
    assert arguments["pin"] == 7351


def test_what_does_not_fit_is_not_repeated() -> None:
    def function(pin: Annotated[int, Secret], name: str) -> None: ...

    with pytest.raises(Exception, match="pin: expected a whole number") as refused:
        made(function).validated({"pin": "s3cret", "name": "x"})
    assert "s3cret" not in str(refused.value)


def test_a_policy_sees_a_text_where_something_is_hidden() -> None:
    def function(pin: Annotated[int, Secret], maybe: Annotated[int | None, Secret] = None, n: int = 0) -> None: ...

    schema = as_shown(made(function).input_schema)["properties"]
    assert schema["pin"] == {"type": "string"}
    assert schema["maybe"] == {"anyOf": [{"type": "string"}, {"type": "null"}]}
    assert schema["n"]["type"] == "integer"
