"""What every request needs: the database, who is asking, and the one way to change something."""

import asyncio
import base64
import binascii
import itertools
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any
from uuid import UUID

import orjson
from fastapi import Depends, Query, Request
from fastapi.responses import Response

from interlock.api.follow import Follower
from interlock.api.views import dump
from interlock.engine import idempotency, tenants
from interlock.engine.evidence import Notary
from interlock.engine.idempotency import Answer
from interlock.engine.policies import Policies
from interlock.engine.principal import Principal
from interlock.engine.workflows import Plans
from interlock.errors import Invalid, Problem, Unauthorized
from interlock.settings import Settings
from interlock.store.pool import Database, Tx


@dataclass(frozen=True)
class Services:
    database: Database
    settings: Settings
    plans: Plans
    principals: tenants.Principals
    policies: Policies
    follower: Follower
    notary: Notary
    # A check of a whole chain takes a connection for long: one at a time.
    checking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))


async def services(request: Request) -> Services:
    found: Services = request.app.state.services
    return found


def key_in(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthorized("send an API key: `Authorization: Bearer KEY`")
    return key.strip()


async def principal(request: Request, found: Annotated[Services, Depends(services)]) -> Principal:
    return await found.principals.behind(key_in(request))


Svc = Annotated[Services, Depends(services)]
Who = Annotated[Principal, Depends(principal)]

# Small enough for any column, and only digits that `int` takes.
NUMBER = re.compile("[0-9]{1,9}")
_POSITION = re.compile("[0-9]{1,18}")
_KEY_HEADERS = ("idempotency-key", "x-idempotency-key", "x-request-id")


# The body of what is applied: what a person wrote, or a program.
YAML = {
    "requestBody": {
        "required": True,
        "content": {
            "application/yaml": {"schema": {"type": "string"}},
            "application/json": {"schema": {"type": "object"}},
        },
    }
}


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else dump(content)


async def change(
    found: Services,
    who: Principal,
    request: Request,
    work: Callable[[Tx], Awaitable[Answer]],
    *,
    key: str | None = None,
) -> Response:
    """Everything that changes state goes through here: once per idempotency key, if one is given.

    `key` is one that the request has for the whole tenant; else the caller's own counts.
    """
    asked = await asked_once(who, request, key)
    if asked is None:
        return answered(await found.database.command(work))
    return answered(await idempotency.once(found.database, asked, work, problem_answer))


async def asked_once(who: Principal, request: Request, key: str | None = None) -> idempotency.Request | None:
    """What the request is known by, if it has an idempotency key."""
    own, body = await _idempotency_key(request)
    key = key or (f"api:{who.key_id}:{own}" if own is not None else None)
    if key is None:
        return None
    asked = sorted((name, value) for name, value in request.query_params.multi_items() if name != "wait")
    digest = idempotency.Request.hash_of(request.method, request.scope["path"], *itertools.chain(*asked), body)
    return idempotency.Request(who.tenant_id, key, key.partition(":")[0], digest)


def answered(answer: Answer) -> Response:
    headers = {"Idempotency-Replayed": "true"} if answer.replayed else None
    media_type = "application/problem+json" if answer.status >= 400 else "application/json"
    return Response(answer.body, answer.status, headers=headers, media_type=media_type)


async def _idempotency_key(request: Request) -> tuple[str | None, bytes]:
    """The key, and what the request is compared by: its JSON, whatever its spacing or the order of its keys."""
    body = await request.body()
    given: str | None = next((request.headers[h] for h in _KEY_HEADERS if request.headers.get(h)), None)
    if empty := next((h for h in _KEY_HEADERS[:2] if request.headers.get(h, "key").strip() == ""), None):
        # A variable that was not set, most likely: without a key the same request again would be a second one.
        raise Invalid(f"{empty} is empty; give a key, or leave it out")
    try:
        parsed = orjson.loads(body) if body else None
    except orjson.JSONDecodeError:
        parsed = None
    else:
        if isinstance(parsed, dict):
            named = parsed.pop("request_id", None)
            given = given or (named if isinstance(named, str) else None)
        try:
            body = orjson.dumps(parsed, option=orjson.OPT_SORT_KEYS)
        except orjson.JSONEncodeError as error:
            raise Invalid(f"the body cannot be written again: {error}") from None
    if given is not None and len(given) > 255:
        raise Invalid(f"an idempotency key may have 255 characters; this one has {len(given)}")
    return given, body


def problem_body(problem: Problem) -> dict[str, Any]:
    return {
        "type": f"urn:interlock:problem:{problem.code.lower()}",
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail,
        "code": problem.code,
        **problem.fields,
    }


def problem_answer(problem: Problem) -> Answer:
    return Answer(problem.status, orjson.dumps(problem_body(problem), default=str))


# ---------------------------------------------------------------- pages

Limit = Annotated[int, Query(ge=1, le=1000)]
NOT_OUR_CURSOR = "this cursor is not one of ours; leave it out to begin at the start"


def page(rows: list[Any], limit: int, view: Callable[[Any], dict[str, Any]], key: str = "id") -> dict[str, Any]:
    """Rows were asked for with one more than the limit: that one says whether there is another page."""
    shown = rows[:limit]
    more = len(rows) > limit
    return {
        "items": [view(row) for row in shown],
        "next_cursor": encode_cursor(shown[-1][key]) if more and shown else None,
    }


def encode_cursor(value: UUID | str | int) -> str:
    return base64.urlsafe_b64encode(str(value).encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None) -> str | None:
    if cursor is None:
        return None
    try:
        return base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise Invalid(NOT_OUR_CURSOR) from None


def uuid_cursor(cursor: str | None) -> UUID | None:
    text = decode_cursor(cursor)
    try:
        return UUID(text) if text is not None else None
    except ValueError:
        raise Invalid(NOT_OUR_CURSOR) from None


def number_cursor(cursor: str | None) -> int:
    return _number(cursor, NUMBER)


def position_cursor(cursor: str | None) -> int | None:
    """Where numbers go on for as long as the tenant or the server does."""
    return _number(cursor, _POSITION) if cursor is not None else None


def _number(cursor: str | None, digits: re.Pattern[str]) -> int:
    text = decode_cursor(cursor)
    if text is not None and not digits.fullmatch(text):
        raise Invalid(NOT_OUR_CURSOR)
    return int(text or 0)
