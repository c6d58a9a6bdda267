"""Idempotency: one mechanism for every call that changes state.

The record, the effect and the answer commit together, so a key never points at half a thing. A second request with
the same key waits at the record's row until the first has ended, then gets the same answer.
"""

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

import asyncpg

from interlock.errors import Conflict, Invalid, Problem, Unavailable
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log, metrics

KEEP_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """`kept` is what a replay answers, where the first answer held a secret that is shown only once."""

    status: int
    body: bytes
    run_id: UUID | None = None
    replayed: bool = False
    kept: bytes | None = None


@dataclass(frozen=True, slots=True)
class Request:
    tenant_id: UUID
    key: str
    source: str
    hash: bytes

    @staticmethod
    def hash_of(*parts: str | bytes) -> bytes:
        digest = hashlib.sha256()
        for part in parts:
            data = part.encode() if isinstance(part, str) else part
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.digest()


async def once(
    database: Database,
    request: Request,
    work: Callable[[Tx], Awaitable[Answer]],
    problem: Callable[[Problem], Answer],
) -> Answer:
    """Do the work and remember its answer, or give the answer it was given the first time, errors included."""

    async def attempt(tx: Tx) -> Answer:
        if seen := await _begin(tx, database, request):
            return _replay(request, seen)
        answer = await work(tx)
        await _complete(tx, request, answer)
        metrics.idempotency_hits.labels(request.source, "miss").inc()
        return answer

    async def remember_error(tx: Tx, answer: Answer) -> Answer:
        if seen := await _begin(tx, database, request):
            return _replay(request, seen)
        await _complete(tx, request, answer)
        return answer

    try:
        with says_in_flight(request):
            return await database.command(attempt)
    except (Conflict, Invalid) as error:
        if error.code in (_REUSED, _IN_FLIGHT):
            raise
        answer = problem(error)
        return await database.command(lambda tx: remember_error(tx, answer))


@contextmanager
def says_in_flight(request: Request | None) -> Iterator[None]:
    """A lock that is not to be had is the record's: another request with the same key holds it."""
    try:
        yield
    except Unavailable as error:
        awaited = isinstance(error.__cause__, asyncpg.LockNotAvailableError | asyncpg.QueryCanceledError)
        if request is None or not awaited:
            raise
        metrics.idempotency_hits.labels(request.source, "in_flight").inc()
        raise Conflict("the first request with this key is still being answered; try again", code=_IN_FLIGHT) from None


_REUSED = "IDEMPOTENCY_KEY_REUSED"
_IN_FLIGHT = "IDEMPOTENCY_CONFLICT"


async def _begin(tx: Tx, database: Database, request: Request) -> Row | None:
    """None: the record is ours. Else the record of the request that came first."""
    args = (database.clock(), request.tenant_id, request.key, request.source, request.hash, KEEP_SECONDS)
    if await tx.value("begin_request", *args) is not None:
        return None
    seen = await tx.row("request_seen", request.tenant_id, request.key)
    assert seen is not None
    return seen


def _replay(request: Request, seen: Row) -> Answer:
    if seen["request_hash"] != request.hash:
        metrics.idempotency_hits.labels(request.source, "conflict").inc()
        raise Invalid(
            "this idempotency key was used for another request; use a new key, or send the same request again",
            code=_REUSED,
        )
    metrics.idempotency_hits.labels(request.source, "hit").inc()
    log.info("idempotency_hit", key=request.key, cached_run_id=str(seen["run_id"]) if seen["run_id"] else None)
    return Answer(seen["response_status"], seen["response_body"], seen["run_id"], replayed=True)


async def _complete(tx: Tx, request: Request, answer: Answer) -> None:
    await tx.fetch(
        "complete_request", request.tenant_id, request.key, answer.status, answer.kept or answer.body, answer.run_id
    )
