"""Secret: a parameter or result of a tool that must not appear in any row, log, event or evidence bundle.

    @tool("bank.login")
    async def login(user: str, password: Annotated[str, Secret]) -> Annotated[dict, Secret]: ...

    class Session(BaseModel):
        token: Annotated[str, Secret]
        expires_in: int

A parameter is shown as `[secret] 5f0b91c2a4d8e713`, with a keyed hash that distinguishes values. A result is stored as
`[secret]`: later steps see that and not the value, so a tool that needs it has to fetch it itself. The return type must
declare the secrets of a result; a result that does not fit that type is secret as a whole.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from interlock.audit.canonical import canonical
from interlock.audit.redact import MARK


class Secret:
    """Put it into `Annotated` around the type of a parameter, a result, or a field of either."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        # Only in the context of a Veil: the tool's author may serialize the value where it is needed.
        shown = core_schema.wrap_serializer_function_ser_schema(_shown, info_arg=True, schema=schema)
        veiled: CoreSchema = schema | {"serialization": shown}
        return veiled

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "writeOnly": True}


class Veil:
    """Hides secrets during serialization, and remembers them so that they can be scrubbed elsewhere."""

    def __init__(self, salt: bytes | None = None) -> None:
        self._salt = salt
        self.hidden: set[str] = set()

    def hide(self, value: Any) -> Any:
        if value is None:
            return None
        self.hidden |= set(texts(value))
        if self._salt is None:
            return MARK
        return f"{MARK} {hmac.new(self._salt, canonical(value), hashlib.sha256).hexdigest()[:16]}"


def _shown(value: Any, write: Callable[[Any], Any], info: Any) -> Any:
    return info.context.hide(value) if isinstance(info.context, Veil) else write(value)


def texts(value: Any) -> Iterator[str]:
    match value:
        case None | bool():
            return
        case BaseModel():
            yield from texts(value.model_dump())
        case Mapping():
            yield from texts(list(value.values()))
        case list() | tuple() | Set():
            for item in value:
                yield from texts(item)
        case bytes():
            yield value.decode(errors="replace")
        case _ if hasattr(value, "get_secret_value"):
            yield str(value.get_secret_value())
        case _:
            yield str(value)


def is_marked(annotation: Any, _seen: frozenset[Any] = frozenset()) -> bool:
    """Return True if a type contains Secret at any depth."""
    if get_origin(annotation) is Annotated:
        inner, *said = get_args(annotation)
        return _says(said) or is_marked(inner, _seen)
    # The target of a NewType or an alias.
    for meaning in ("__supertype__", "__value__"):
        if hasattr(annotation, meaning):
            return is_marked(getattr(annotation, meaning), _seen)
    if arguments := get_args(annotation):
        return any(is_marked(argument, _seen) for argument in arguments)
    if not isinstance(annotation, type) or annotation in _seen:
        return False
    seen = _seen | {annotation}
    if issubclass(annotation, BaseModel):
        return any(_says(f.metadata) or is_marked(f.annotation, seen) for f in annotation.model_fields.values())
    # A dataclass, a TypedDict of any module, or a NamedTuple.
    if is_dataclass(annotation) or hasattr(annotation, "__total__") or hasattr(annotation, "_fields"):
        return any(is_marked(hint, seen) for hint in get_type_hints(annotation, include_extras=True).values())
    return False


def _says(said: Iterable[Any]) -> bool:
    return any(mark is Secret or isinstance(mark, Secret) for mark in said)


def as_shown(schema: Any) -> Any:
    """Return the JSON schema of the shown form: a string wherever a value is hidden."""
    if isinstance(schema, list):
        return [as_shown(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("writeOnly") is True:
        text = {"type": "string"}
        return {"anyOf": [text, {"type": "null"}]} if {"type": "null"} in schema.get("anyOf", ()) else text
    return {name: as_shown(member) for name, member in schema.items()}
