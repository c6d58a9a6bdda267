"""What every message is made of: views and bodies, ids and names, pages and problems."""

import json
from typing import Annotated, Generic, TypeVar
from uuid import UUID

import orjson
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

T = TypeVar("T")


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, UUID) else value


# Whoever shows a value puts it into others, and no writer of JSON goes deeper than 254.
DEEPEST = 220
_DEEPEST_WRITTEN = 254

# Far beyond any use, and small enough that now + duration is still a date everywhere.
LONGEST_SECONDS = 3650 * 86400.0
Seconds = Annotated[float, Field(gt=0, le=LONGEST_SECONDS)]


def encodable(value: T) -> T:
    """What one parser of JSON reads another may not be able to write: half a character, a number without end."""
    try:
        encoded = orjson.dumps(value)
        if b"null" in encoded:  # as which it writes what is no number
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


# A string to whoever reads it, because nobody computes with an id; the server may hand in the UUID it has.
Id = Annotated[str, BeforeValidator(_as_text), Field(json_schema_extra={"format": "uuid"})]

# PostgreSQL cannot store a NUL, and a name or a reason needs none.
Text = Annotated[str, StringConstraints(min_length=1, max_length=2000, pattern=r"^[^\x00]+$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00]+$")]


class View(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Bare(Body):
    """Nothing is to be said but, if one likes, what the request is called."""

    request_id: Name | None = None


class StateChange(View):
    """One transition: when, by whom and why."""

    from_state: str | None = None
    event: str
    to_state: str
    reason: str | None = None
    by: str
    at: AwareDatetime


class Page(View, Generic[T]):
    """Some of a list; `next_cursor` asks for what follows and is null on the last page."""

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
