"""Idempotency: one mechanism for every call that changes state.

The record, the effect and the answer commit together, so a key never refers to a partial result. A second request
with the same key waits at the record's row until the first has ended, then gets the same answer. If the first died,
its record was rolled back with it, and the second does the work.

A key names its source:

    api:{key id}:{the caller's key}          github:{delivery id}:{trigger}
    slack:{team id}:{trigger id}             webhook:{message id}:{trigger}
    scheduler:{schedule}:{slot}
"""

import hashlib
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from types import MappingProxyType

import asyncpg

from interlock.errors import Conflict, InterlockError, Invalid, Unavailable
from interlock.ids import RunId, TenantId
from interlock.lifecycle import IdempotencyState
from interlock.store.pool import UNSTORABLE, Database, RetryTransaction, Row, Tx
from interlock.telemetry import log, metrics

KEEP_SECONDS = 24 * 3600.0
_KEEP_FAILED_SECONDS = 3600.0
MOST_ATTEMPTS = 5
# Matches `while inserting index tuple (0,7) in relation "idempotency_record"` in any language of the server.
_RECORD = re.compile(r"\(\d+,\d+\).*\bidempotency_record")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`kept` is what a replay answers, where the first answer held a secret that is shown only once.

    A replay has `created_at`, the time of the first answer.
    """

    status: int
    body: bytes
    run_id: RunId | None = None
    replayed: bool = False
    kept: bytes | None = None
    created_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A key is free again after `keep_seconds`. With `remember_seconds` it is refused for that much longer.

    The caller of an API chooses a key and may choose it again. The id of a delivery is the sender's name for one
    event: if it arrives again after its record expired, it is the same event again.
    """

    tenant_id: TenantId
    key: str
    source: str
    hash: bytes
    keep_seconds: float = KEEP_SECONDS
    remember_seconds: float | None = None

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
    work: Callable[[Tx], Awaitable[StoredResponse]],
    problem: Callable[[InterlockError], StoredResponse] | None = None,
    *,
    patience: float | None = None,
) -> StoredResponse:
    """Do the work and store its answer, or return the answer stored by the first request.

    With `problem`, the refusal of an invalid request is stored as an answer: the same request stays invalid. A
    conflict is not stored, because it describes the state at that time: the key stays free and the same request may
    succeed later. Without `problem` every refusal counts as a failed attempt.
    """
    try:
        with says_in_flight(request):
            return await _first(database, request, work, patience)
    except _Seen as seen:
        raise seen.problem from None
    except Invalid as error:
        if problem is None:
            await _fail(database, request, error.detail)
            raise
        answer = problem(error)
    except UNSTORABLE:
        raise
    except Exception as error:
        # A retry may succeed after any other error. A refusal that is not stored as an answer changed nothing.
        in_flight = isinstance(error, Conflict) and error.code == IN_FLIGHT
        if not in_flight and (problem is None or not isinstance(error, InterlockError)):
            await _fail(database, request, str(error) or type(error).__name__)
        raise

    async def give(tx: Tx) -> StoredResponse:
        return answer

    try:
        return await _first(database, request, give, None)
    except _Seen as seen:
        raise seen.problem from None


@contextmanager
def says_in_flight(request: Request | None) -> Iterator[None]:
    """Report `IN_FLIGHT` if another request with the same key holds the record."""
    try:
        yield
    except Unavailable as error:
        if request is None or not _waited_at_record(error.__cause__):
            raise
        count(request.source, "in_flight")
        raise _in_flight() from None


def _waited_at_record(error: BaseException | None) -> bool:
    """Return whether the statement waited for the lock of this record. The server names the row that it waited at.

    Only that means that another request holds the key. Reporting `IN_FLIGHT` for any other lock, such as one of the
    whole table, would make a sender drop an event that no process handles.
    """
    waited = isinstance(error, asyncpg.LockNotAvailableError | asyncpg.QueryCanceledError)
    return waited and _RECORD.search(getattr(error, "context", None) or "") is not None


async def _first(
    database: Database, request: Request, work: Callable[[Tx], Awaitable[StoredResponse]], patience: float | None
) -> StoredResponse:
    async def attempt(tx: Tx) -> StoredResponse:
        if patience is not None:
            await tx.value("wait_at_most", f"{patience * 1000:.0f}")
        if seen := await begin(tx, database, request):
            return _replay(tx, request, seen)
        answer = await work(tx)
        await complete(tx, request, answer)
        # The event may have been answered under another id.
        tx.on_commit(partial(count, request.source, "hit" if answer.replayed else "miss"))
        return answer

    return await database.run_in_transaction(attempt, patience)


_REUSED = "IDEMPOTENCY_KEY_REUSED"
IN_FLIGHT = "IDEMPOTENCY_CONFLICT"


class _Seen(Exception):
    """Carries the record's own answer out of the transaction; it is not a failed attempt."""

    def __init__(self, problem: InterlockError) -> None:
        super().__init__(problem.detail)
        self.problem = problem


def _in_flight() -> Conflict:
    return Conflict(
        "The first request with this key is still being answered; send it again.", code=IN_FLIGHT, retry_after=1
    )


async def begin(tx: Tx, database: Database, request: Request) -> Row | None:
    """Return None if this request now owns the record, else the record of the earlier request."""
    if await begin_many(tx, database, [request]):
        return None
    seen = await _seen(tx, request)
    if seen["status"] == IdempotencyState.COMPLETED and not seen["is_over"]:
        return seen
    attempts = await tx.value(
        "retake_request", request.tenant_id, request.key, request.hash, request.keep_seconds,
        request.remember_seconds, database.settings.idempotency_lock_seconds, MOST_ATTEMPTS,
    )  # fmt: skip
    if attempts is None:
        # The record is locked, or another request held it while we waited for the row: then it has an answer now.
        return await _seen(tx, request)
    if attempts > 1:
        tx.on_commit(partial(count, request.source, "retry"))
    return None


async def _seen(tx: Tx, request: Request) -> Row:
    seen = await tx.row("request_seen", request.tenant_id, request.key)
    if seen is None:
        raise RetryTransaction("the record was forgotten meanwhile")
    return seen


async def begin_many(tx: Tx, database: Database, requests: Sequence[Request]) -> set[str]:
    """Return the keys that these requests now own, without keys that were ever used.

    All requests have one tenant and source.
    """
    one = requests[0]
    # Sorted, so that two transactions with the same keys cannot deadlock.
    ordered = sorted(requests, key=lambda request: request.key)
    rows = await tx.fetch(
        "begin_requests", one.tenant_id, [r.key for r in ordered], one.source,
        [r.hash for r in ordered], one.keep_seconds, one.remember_seconds, database.settings.idempotency_lock_seconds,
    )  # fmt: skip
    return {row["key"] for row in rows}


async def complete(tx: Tx, request: Request, answer: StoredResponse) -> None:
    body = answer.kept or answer.body
    await tx.fetch("complete_request", request.tenant_id, request.key, answer.status, body, answer.run_id)


async def complete_many(tx: Tx, requests: Sequence[Request], answers: Sequence[StoredResponse]) -> None:
    """Store the answers of requests of one tenant with one status."""
    await tx.fetch(
        "complete_requests", requests[0].tenant_id, [r.key for r in requests], answers[0].status,
        [a.body for a in answers], [a.run_id for a in answers],
    )  # fmt: skip


def count(source: str, result: str, times: int = 1) -> None:
    """Count the results of requests with a key, and the transitions of their records."""
    metrics.idempotency_hits.labels(source, result).inc(times)
    if (move := _MOVES.get(result)) is not None:
        metrics.transition("idempotency", *move).inc(times)


_MOVES: Mapping[str, tuple[IdempotencyState, IdempotencyState]] = MappingProxyType(
    {
        "miss": (IdempotencyState.PROCESSING, IdempotencyState.COMPLETED),
        "failed": (IdempotencyState.PROCESSING, IdempotencyState.FAILED),
        "retry": (IdempotencyState.FAILED, IdempotencyState.PROCESSING),
    }
)


def _replay(tx: Tx, request: Request, seen: Row) -> StoredResponse:
    if refusal := _refusal(request, seen):
        result, problem = refusal
        count(request.source, result)
        raise _Seen(problem)
    tx.on_commit(partial(count, request.source, "hit"))
    log.info("idempotency_hit", key=request.key, cached_run_id=str(seen["run_id"]) if seen["run_id"] else None)
    return StoredResponse(
        seen["response_status"], seen["response_body"], seen["run_id"], replayed=True, created_at=seen["created_at"]
    )


def _refusal(request: Request, seen: Row) -> tuple[str, InterlockError] | None:
    """Return why an existing record has no answer for this request, and the label under which that is counted."""
    if seen["request_hash"] != request.hash:
        return "conflict", Invalid(
            "this idempotency key was used for another request; use a new key, or send the same request again",
            code=_REUSED,
        )
    match IdempotencyState(seen["status"]):
        case IdempotencyState.PROCESSING:
            return "in_flight", _in_flight()
        case IdempotencyState.FAILED:
            return "exhausted", Conflict(
                f"this failed {seen['attempts']} times and is not tried again under the same key; "
                f"the last time: {seen['error']}",
                code="IDEMPOTENCY_EXHAUSTED",
            )
        case IdempotencyState.COMPLETED if seen["is_over"]:
            return "expired", Conflict(
                "this was answered before, and the answer is no longer kept; it is not done a second time",
                code="IDEMPOTENCY_EXPIRED",
                run_id=str(seen["run_id"]) if seen["run_id"] else None,
            )
        case IdempotencyState.COMPLETED:
            return None


async def _fail(database: Database, request: Request, error: str) -> None:
    count(request.source, "failed")
    args = (request.tenant_id, request.key, request.source, request.hash, error[:2000], _KEEP_FAILED_SECONDS)
    attempts = await database.value("fail_request", *args)
    log.warning("request_not_done", key=request.key, error=error, attempts=attempts)
