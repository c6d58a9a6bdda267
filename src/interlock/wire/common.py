"""The parts of every message: views and bodies, ids and names, pages and problems."""

import json
from typing import Annotated, Generic, TypeVar
from uuid import UUID

import orjson
from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from interlock.visible import is_visible, visible_json

T = TypeVar("T")


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, UUID) else value


# Other messages embed a value, and no JSON serialiser accepts more than 254 levels.
DEEPEST = 220
_DEEPEST_WRITTEN = 254

# Far beyond any use, and small enough that now + duration is a valid date everywhere.
LONGEST_SECONDS = 3650 * 86400.0
Seconds = Annotated[float, Field(gt=0, le=LONGEST_SECONDS)]


def encodable(value: T) -> T:
    """Return the value if every JSON parser and writer can handle it.

    Some parsers read an unpaired surrogate or an infinite number, which others cannot write.
    """
    try:
        encoded = orjson.dumps(value)
        if b"null" in encoded:  # the serialiser writes a number that is not finite as null
            json.dumps(value, allow_nan=False)
    except orjson.JSONEncodeError as error:
        raise ValueError(f"it cannot be stored: {error}") from None
    except ValueError:
        raise ValueError("it cannot be stored: NaN and Infinity, and numbers as large as that, are not JSON") from None
    if is_too_deep(encoded):
        raise ValueError(f"it cannot be stored: it is nested deeper than {DEEPEST} levels")
    return value


def is_too_deep(encoded: bytes) -> bool:
    if encoded.count(b"[") + encoded.count(b"{") <= DEEPEST:
        return False
    try:
        value = orjson.loads(encoded)
        for _ in range(_DEEPEST_WRITTEN - DEEPEST):
            value = [value]
        orjson.dumps(value)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return True
    return False


# A string for clients, which never compute with an id. The server may pass a UUID.
Id = Annotated[str, BeforeValidator(_as_text), Field(json_schema_extra={"format": "uuid"})]

# PostgreSQL cannot store a NUL, and no name or reason needs one.
Text = Annotated[str, StringConstraints(min_length=1, max_length=2000, pattern=r"^[^\x00]+$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00]+$")]


def readable(name: str) -> str:
    """Return the name if people can distinguish it from every other name by looking at it."""
    if not is_visible(name):
        raise ValueError(
            f"{visible_json(name)} has characters that a reader cannot see. A name has no line breaks and no control,"
            " bidirectional or zero-width characters."
        )
    if name != name.strip():
        raise ValueError(f"{visible_json(name)} begins or ends with a blank.")
    return name


# A name that people read to decide whether they trust it.
ReadableName = Annotated[Name, AfterValidator(readable)]


class View(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EmptyBody(Body):
    """A body without required fields. It may carry a `request_id`, which acts as an idempotency key."""

    request_id: Name | None = None


class StateChange(View):
    """One transition: its time, its actor and its reason."""

    from_state: str | None = None
    event: str
    to_state: str
    reason: str | None = None
    by: str
    at: AwareDatetime


class Page(View, Generic[T]):
    """A page of a list. `next_cursor` requests the next page and is null on the last page."""

    items: list[T]
    next_cursor: str | None = None


class Problem(BaseModel):
    """application/problem+json (RFC 9457). Some problems have more fields: `allowed`, `errors`, …"""

    model_config = ConfigDict(extra="allow")

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    code: str
