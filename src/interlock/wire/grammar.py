"""What every message is made of: views and bodies, ids and names, pages and problems."""

from typing import Annotated, Generic, TypeVar
from uuid import UUID

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

T = TypeVar("T")


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, UUID) else value


def encodable(value: T) -> T:
    """What one parser of JSON reads another may not be able to write: half a character, a number without end."""
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise ValueError(f"it cannot be stored: {error}") from None
    return value


# A string to whoever reads it, because nobody computes with an id; the server may hand in the UUID it has.
Id = Annotated[str, BeforeValidator(_as_text), Field(json_schema_extra={"format": "uuid"})]

# PostgreSQL cannot store a NUL, and a name or a reason needs none.
Text = Annotated[str, StringConstraints(min_length=1, max_length=2000, pattern=r"^[^\x00]+$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00]+$")]


class View(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


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
