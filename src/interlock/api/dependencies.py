"""What every request needs: the database, the caller, and the one way to change state."""

import asyncio
import base64
import binascii
import itertools
import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any, TypeVar
from uuid import UUID

import orjson
from fastapi import Depends, Query, Request, Security
from fastapi.responses import Response
from fastapi.security import HTTPBearer

from interlock.api.limits import KeyUsage, bearer_key
from interlock.api.run_watcher import Follower
from interlock.api.views import dump, with_creation_time
from interlock.engine.access import tenants
from interlock.engine.access.principal import Principal
from interlock.engine.ingress import idempotency
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.engine.policies import Policies
from interlock.engine.proof.evidence import EvidenceSigner
from interlock.engine.workflows import Plans
from interlock.errors import InterlockError, Invalid, Unauthorized
from interlock.settings import Settings
from interlock.store.pool import Database, Tx

T = TypeVar("T")


@dataclass(frozen=True)
class AppContext:
    database: Database
    settings: Settings
    plans: Plans
    principals: tenants.Principals
    policies: Policies
    follower: Follower
    notary: EvidenceSigner
    # Checking a whole chain holds a connection for a long time, so only one check runs at a time.
    checking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    limits: KeyUsage = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", KeyUsage(self.settings))


async def services(request: Request) -> AppContext:
    found: AppContext = request.app.state.services
    return found


def key_in(request: Request) -> str:
    key = bearer_key(request.headers.get("authorization", ""))
    if not key:
        raise Unauthorized("send an API key: `Authorization: Bearer KEY`")
    return key


# Only for the OpenAPI description: `key_in` reads the header and reports what is wrong with it.
_KEY = HTTPBearer(
    scheme_name="key", description="An API key: `Authorization: Bearer il_…`. Its role decides what it may do.",
    auto_error=False,
)  # fmt: skip


async def principal(
    request: Request, found: Annotated[AppContext, Depends(services)], _: Annotated[object, Security(_KEY)] = None
) -> Principal:
    who = await _behind(found, request, key_in(request))
    found.limits.tenants.begin(request.scope, who.tenant_id)
    return who


async def _behind(found: AppContext, request: Request, key: str) -> Principal:
    if (known := found.principals.known(key)) is not None:
        return known
    if found.principals.was_right(key):
        # A key that was valid before is not locked out by wrong keys from the same address.
        return await found.principals.behind(key)
    return await tried(found, request, found.principals.behind(key))


async def tried(found: AppContext, request: Request, attempt: Coroutine[Any, Any, T]) -> T:
    """Return the result of authenticating with a key that may be wrong.

    Raises TooManyFailures after too many wrong keys.
    """
    address = request.client.host if request.client else ""
    try:
        found.limits.failures.check(address)
    except InterlockError:
        attempt.close()
        raise
    try:
        return await attempt
    except Unauthorized:
        found.limits.failures.add(address)
        raise


Ctx = Annotated[AppContext, Depends(services)]
Caller = Annotated[Principal, Depends(principal)]

# Small enough for any column, and only digits that `int` accepts.
NUMBER = re.compile("[0-9]{1,9}")
_POSITION = re.compile("[0-9]{1,18}")
_KEY_HEADERS = ("idempotency-key", "x-idempotency-key", "x-request-id")


# The body of a definition: YAML written by a person, or JSON sent by a program.
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


async def idempotent_write(
    found: AppContext,
    who: Principal,
    request: Request,
    work: Callable[[Tx], Awaitable[StoredResponse]],
    *,
    key: str | None = None,
) -> Response:
    """Run a change of state, at most once per idempotency key if the request has one.

    `key` applies to the whole tenant; without it, the key in the request applies to the caller only.
    """
    asked = await idempotency_request(who, request, key)
    if asked is None:
        return to_response(await found.database.run_in_transaction(work))
    return to_response(await idempotency.once(found.database, asked, work, problem_answer))


async def idempotency_request(who: Principal, request: Request, key: str | None = None) -> idempotency.Request | None:
    """Return the identity of the request for idempotency, or None without an idempotency key."""
    own, body = await _idempotency_key(request)
    key = key or (f"api:{who.key_id}:{own}" if own is not None else None)
    if key is None:
        return None
    asked = sorted((name, value) for name, value in request.query_params.multi_items() if name != "wait")
    digest = idempotency.Request.hash_of(request.method, request.scope["path"], *itertools.chain(*asked), body)
    return idempotency.Request(who.tenant_id, key, key.partition(":")[0], digest)


def to_response(answer: StoredResponse) -> Response:
    headers = {"Idempotency-Replayed": "true"} if answer.replayed else None
    media_type = "application/problem+json" if answer.status >= 400 else "application/json"
    body = answer.body
    if answer.created_at is not None and answer.run_id is not None:
        body = with_creation_time(body, answer.run_id, answer.created_at)
    return Response(body, answer.status, headers=headers, media_type=media_type)


async def _idempotency_key(request: Request) -> tuple[str | None, bytes]:
    """Return the idempotency key and the body to compare: its JSON, with normalised spacing and key order."""
    body = await request.body()
    given: str | None = next((request.headers[h] for h in _KEY_HEADERS if request.headers.get(h)), None)
    if empty := next((h for h in _KEY_HEADERS[:2] if request.headers.get(h, "key").strip() == ""), None):
        # Most likely an unset variable. Without a key, a repeated request would be executed a second time.
        raise Invalid(f"{empty} is empty; give a key, or leave it out")
    try:
        parsed = orjson.loads(body) if body else None
    except orjson.JSONDecodeError:
        parsed = None
    else:
        if isinstance(parsed, dict):
            named = parsed.pop("request_id", None)
            parsed.pop("wait", None)  # like `wait` in the query: it is not part of the request's identity
            given = given or (named if isinstance(named, str) else None)
        try:
            body = orjson.dumps(parsed, option=orjson.OPT_SORT_KEYS)
        except orjson.JSONEncodeError as error:
            raise Invalid(f"the body cannot be written again: {error}") from None
    if given is not None and len(given) > 255:
        raise Invalid(f"an idempotency key may have 255 characters; this one has {len(given)}")
    return given, body


def problem_body(problem: InterlockError) -> dict[str, Any]:
    return {
        "type": f"urn:interlock:problem:{problem.code.lower()}",
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail,
        "code": problem.code,
        **problem.fields,
    }


def problem_answer(problem: InterlockError) -> StoredResponse:
    return StoredResponse(problem.status, orjson.dumps(problem_body(problem), default=str))


# ---------------------------------------------------------------- pages

Limit = Annotated[int, Query(ge=1, le=1000)]
NOT_OUR_CURSOR = "this cursor is not one of ours; leave it out to begin at the start"


def page(rows: list[Any], limit: int, view: Callable[[Any], dict[str, Any]], key: str = "id") -> dict[str, Any]:
    """Return one page. The rows contain one more than the limit; the extra row shows that another page exists."""
    shown = rows[:limit]
    more = len(rows) > limit
    return {
        "items": [view(row) for row in shown],
        "next_cursor": encode_cursor(_field(shown[-1], key)) if more and shown else None,
    }


def _field(row: Any, name: str) -> Any:
    return getattr(row, name) if is_dataclass(row) else row[name]


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
    """Decode a cursor that is a position, which grows for the lifetime of the tenant or server."""
    return _number(cursor, _POSITION) if cursor is not None else None


def _number(cursor: str | None, digits: re.Pattern[str]) -> int:
    text = decode_cursor(cursor)
    if text is not None and not digits.fullmatch(text):
        raise Invalid(NOT_OUR_CURSOR)
    return int(text or 0)
