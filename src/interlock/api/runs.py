"""/api/runs"""

import asyncio
import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from interlock import tracing
from interlock.api import streams
from interlock.api.dependencies import (
    AppContext,
    Caller,
    Ctx,
    Json,
    Limit,
    encode_cursor,
    idempotency_request,
    idempotent_write,
    number_cursor,
    page,
    principal,
    services,
    to_response,
    uuid_cursor,
)
from interlock.api.fast_path import DirectRoute, by_way_of
from interlock.api.views import (
    accepted_view,
    dump,
    event_view,
    new_run_answer,
    new_run_view,
    run_view,
    with_creation_time,
)
from interlock.engine.access.principal import Principal
from interlock.engine.approvals import approvals
from interlock.engine.ingress import idempotency
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.engine.runs import resume, runs
from interlock.engine.writing.load import load_for_display, load_journal
from interlock.ids import JobId, RunId, SessionId, uuid7
from interlock.journal import EntryType, Journal
from interlock.lifecycle import RUN, RunState
from interlock.policy.roles import Permission
from interlock.store import sql
from interlock.store.pool import Tx
from interlock.store.records import RunRecord, RunToShow
from interlock.timeouts import wait_for_event
from interlock.wire import ApproveRequest, CancelRequest, EmptyBody, Event, Page, Run, StartRun, StartRuns

router = APIRouter(prefix="/api/runs", tags=["runs"], route_class=DirectRoute)

# How long a waiting request relies on notifications before it reads again: one can be lost with its connection.
_POLL_SECONDS = 1.0
# An approval takes minutes, and many calls may wait for one at the same time.
_HELD_POLL_SECONDS = 10.0

Wait = Annotated[float | None, Query(ge=0, le=60, description="Answer when the run ended or waits for a person.")]
OverCap = Annotated[
    Literal["wait", "refuse"],
    Query(description="If the tenant's runs of this minute are taken: wait for a later one, or answer 429."),
]

_ONLY_WAIT = re.compile(rb"(?:wait=([0-9]|[1-5][0-9]))?")


async def _parse_fast(request: Request) -> Response | None:
    """Parse a JSON body of a request whose query has nothing but `wait`."""
    headers, query = request.headers, request.scope["query_string"]
    if headers.get("content-type") != "application/json" or not (plain := _ONLY_WAIT.fullmatch(query)):
        return None
    try:
        body = StartRun.model_validate_json(await request.body())
    except (ValidationError, ClientDisconnect):
        return None
    found = await services(request)
    return await _handle_start(body, request, found, await principal(request, found), float(plain[1] or 0), "wait")


@router.post("", status_code=201, response_model=Run)
@by_way_of(_parse_fast)
async def start(
    body: StartRun, request: Request, found: Ctx, who: Caller, wait: Wait = None, over_cap: OverCap = "wait"
) -> Response:
    """Start a run of the newest version of a workflow, or of the requested version."""
    return await _handle_start(body, request, found, who, wait or 0, over_cap)


async def _handle_start(
    body: StartRun, request: Request, found: AppContext, who: Principal, wait: float, over_cap: str
) -> Response:
    who.require(Permission.START)
    watch = wait + 5 if wait else None
    asked = await idempotency_request(who, request)
    trigger = _trigger(body, request, asked)
    new = await _prepare(found, who, body, trigger, watch, remembered=True)
    with found.follower.watching(new.id) as news:
        response = await _start_single_statement(found, who, asked, new) if over_cap == "wait" else None
        if response is None:
            new = dataclasses.replace(await _prepare(found, who, body, trigger, watch), id=new.id)
            response = await _start_in_transaction(found, who, request, new, over_cap)
        if not wait or response.status_code != 201:
            return response
        if "idempotency-replayed" not in response.headers:
            return _run(found, *await _until_settled(found, who, new.id, wait, news), 201)
    # The idempotency key belongs to a run that was started before.
    run_id = RunId(UUID(orjson.loads(bytes(response.body))["id"]))
    return _run(found, *await watched_until_settled(found, who, run_id, wait), 201, response.headers)


def _trigger(body: StartRun | StartRuns, request: Request, asked: idempotency.Request | None) -> dict[str, Any]:
    trigger = body.trigger.model_dump() if body.trigger else {"source": "api", "ref": None}
    if asked is not None:
        trigger["idempotency_key"] = asked.key
    if traceparent := tracing.current() or tracing.accepted(request.headers.get("traceparent")):
        trigger["traceparent"] = traceparent
    return trigger


async def _prepare(
    found: AppContext, who: Principal, body: StartRun, trigger: dict[str, Any], watch: float | None, *,
    remembered: bool = False,
) -> runs.NewRun:  # fmt: skip
    return await runs.prepare(
        found.plans, who, body.workflow, version=body.version, input=body.input, trigger=trigger,
        deadline_seconds=body.deadline_seconds, watch_seconds=watch, remembered=remembered,
    )  # fmt: skip


async def _start_single_statement(
    found: AppContext, who: Principal, asked: idempotency.Request | None, new: runs.NewRun
) -> Response | None:
    """Start the run in one statement. None if it did not start; the transaction then finds out why."""
    if not runs.starts_alone(new.plan):
        return None
    answer = new_run_answer(new, who)
    created_at = await runs.start_once(found.database, who, new, asked, answer)
    if created_at is None:
        return None
    return to_response(StoredResponse(201, with_creation_time(answer, new.id, created_at), new.id))


async def _start_in_transaction(
    found: AppContext, who: Principal, request: Request, new: runs.NewRun, over_cap: str
) -> Response:
    async def work(tx: Tx) -> StoredResponse:
        if runs.starts_in_queue(new.plan):
            created_at = await runs.start_many(tx, who, [new], may_wait=over_cap == "wait")
            view = new_run_view(new, who, created_at)
        else:
            row = await runs.start_waiting(tx, who, new, may_wait=over_cap == "wait")
            view = run_view(row, await load_journal(tx, found.plans, row), found.policies.hidden)
        return StoredResponse(201, dump(view), new.id)

    return await idempotent_write(found, who, request, work)


@router.post("/batch", status_code=201, response_model=Page[Run])
async def start_batch(
    body: StartRuns, request: Request, found: Ctx, who: Caller, over_cap: OverCap = "wait"
) -> Response:
    """Start a run for each of up to 1,000 inputs in one transaction: all of them or none, answered in their order.

    The runs go to the queue, so a worker opens any approval or wait that they begin with.
    """
    who.require(Permission.START)
    trigger = _trigger(body, request, await idempotency_request(who, request))
    first = await runs.prepare(
        found.plans, who, body.workflow, version=body.version, trigger=trigger, deadline_seconds=body.deadline_seconds
    )
    news = [dataclasses.replace(first, id=RunId(uuid7()), input=given) for given in body.inputs]

    async def work(tx: Tx) -> StoredResponse:
        created_at = await runs.start_many(tx, who, news, may_wait=over_cap == "wait")
        return StoredResponse(
            201, dump({"items": [accepted_view(new, who, created_at) for new in news], "next_cursor": None})
        )

    return await idempotent_write(found, who, request, work)


@router.get("", response_model=Page[Run])
async def list_runs(
    found: Ctx,
    who: Caller,
    status: RunState | None = None,
    workflow: str | None = None,
    session_id: SessionId | None = None,
    job_id: JobId | None = None,
    parent_run_id: RunId | None = None,
    repository: str | None = None,
    cursor: str | None = None,
    limit: Limit = 50,
) -> Response:
    """List runs, newest first, without their steps."""
    who.require(Permission.READ)
    rows = await sql.list_runs(
        found.database, tenant_id=who.tenant_id, before=uuid_cursor(cursor), status=status, workflow=workflow,
        session_id=session_id, job_id=job_id, parent_run_id=parent_run_id, workspace_id=who.workspace_id,
        repository=repository, most=limit + 1,
    )  # fmt: skip
    return Json(page(rows, limit, run_view))


@router.get("/{run_id}", response_model=Run)
async def show(run_id: RunId, found: Ctx, who: Caller, wait: Wait = None) -> Response:
    who.require(Permission.READ)
    row, journal = await runs.get_with_journal(found.database, found.plans, who, run_id)
    if wait and not _is_settled(row):
        row, journal = await watched_until_settled(found, who, run_id, wait)
    return _run(found, row, journal)


@router.post("/{run_id}/approve", response_model=Run)
async def approve(
    run_id: RunId, request: Request, found: Ctx, who: Caller, body: ApproveRequest | None = None
) -> Response:
    """Approve everything the run waits for. Returns 409 if the run waits for no approval."""
    who.require(Permission.APPROVE)
    said = body or ApproveRequest()

    async def work(tx: Tx) -> StoredResponse:
        await approvals.approve_run(tx, found.plans, who, run_id, reason=said.reason, digest=said.digest)
        return await _answer(tx, found, await runs.get(tx, who, run_id))

    return await idempotent_write(found, who, request, work)


@router.post("/{run_id}/cancel", response_model=Run)
async def cancel(
    run_id: RunId, request: Request, found: Ctx, who: Caller, body: CancelRequest | None = None
) -> Response:
    who.require(Permission.STOP)
    return await idempotent_write(
        found, who, request, lambda tx: stop_run(tx, found, who, run_id, body, interrupt=False)
    )


@router.post("/{run_id}/interrupt", response_model=Run)
async def interrupt(
    run_id: RunId, request: Request, found: Ctx, who: Caller, body: CancelRequest | None = None
) -> Response:
    """Interrupt a run. The key that asked for the run may do so, including an agent's key."""
    who.require(Permission.START)

    async def work(tx: Tx) -> StoredResponse:
        if (await runs.get(tx, who, run_id)).requested_by != who.actor:
            who.require(Permission.STOP)
        return await stop_run(tx, found, who, run_id, body, interrupt=True)

    return await idempotent_write(found, who, request, work)


async def stop_run(
    tx: Tx, found: AppContext, who: Principal, run_id: RunId, body: CancelRequest | None, *, interrupt: bool
) -> StoredResponse:
    reason = body.reason if body else None
    await runs.cancel(tx, found.plans, who, run_id, reason=reason, interrupt=interrupt)
    return await _answer(tx, found, await runs.get(tx, who, run_id))


@router.post("/{run_id}/retry", status_code=201, response_model=Run)
async def retry(run_id: RunId, request: Request, found: Ctx, who: Caller, body: EmptyBody | None = None) -> Response:
    """Start a new run that continues a failed or canceled one from the step where it stopped."""
    who.require(Permission.START)
    new_id = RunId(uuid7())

    async def work(tx: Tx) -> StoredResponse:
        row = await resume.retry(tx, found.plans, who, run_id, new_id)
        return await _answer(tx, found, row, 201)

    return await idempotent_write(found, who, request, work)


@router.get("/{run_id}/events", response_model=Page[Event])
async def events(
    run_id: RunId, request: Request, found: Ctx, who: Caller, after: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    cursor: str | None = None, limit: Limit = 500,
) -> Response:  # fmt: skip
    """Return the run's journal: one page, or with `Accept: text/event-stream` a live stream of entries."""
    who.require(Permission.READ)
    row = await runs.get(found.database, who, run_id)
    after = max(after, number_cursor(cursor))
    if streams.is_wanted(request):
        return streams.stream(found, request, run_id, _entries_after(found, row, streams.resumed(request, after)))
    entries = await sql.entries_after(found.database, run_id=run_id, seq=after, most=limit + 1)
    shown = [event_view(e, row.session_id) for e in entries[:limit]]
    more = len(entries) > limit
    return Json({"items": shown, "next_cursor": encode_cursor(shown[-1]["seq"]) if more else None})


def _entries_after(found: AppContext, row: RunRecord, after: int) -> streams.More:
    watch, over = streams.Watch(), False

    async def more(_news: asyncio.Event) -> list[bytes] | None:
        nonlocal after, over
        if over:
            return None
        if watch.is_due():
            await sql.watch_run(found.database, run_id=row.id, seconds=streams.WATCH_SECONDS)
        entries = await sql.entries_after(found.database, run_id=row.id, seq=after, most=500)
        if not entries:
            return None if await _has_ended(found, row, after) else []
        after, over = entries[-1].seq, entries[-1].type == EntryType.RUN_COMPLETED
        return [streams.event(b"%d" % e.seq, e.type, event_view(e, row.session_id)) for e in entries]

    return more


async def _has_ended(found: AppContext, row: RunRecord, after: int) -> bool:
    """Return whether the client already received the final event."""
    now = await sql.get_run(found.database, tenant_id=row.tenant_id, run_id=row.id)
    return now is None or (now.completed_at is not None and after >= now.seq)


async def watched_until_settled(
    found: AppContext, who: Principal, run_id: RunId, wait: float, *, until_ended: bool = False
) -> tuple[RunToShow, Journal | None]:
    """Return when the run has ended or waits for an approval; with `until_ended`, only when it has ended."""
    with found.follower.watching(run_id) as news:
        await sql.watch_run(found.database, run_id=run_id, seconds=wait + 5)
        news.set()  # the run may have ended before it was marked as watched
        return await _until_settled(found, who, run_id, wait, news, until_ended=until_ended)


async def _until_settled(
    found: AppContext, who: Principal, run_id: RunId, wait: float, news: asyncio.Event, *, until_ended: bool = False
) -> tuple[RunToShow, Journal | None]:
    deadline = asyncio.get_running_loop().time() + wait
    look_every = _HELD_POLL_SECONDS if until_ended else _POLL_SECONDS
    while True:
        left = deadline - asyncio.get_running_loop().time()
        if left > 0 and not found.follower.closing.is_set():
            await wait_for_event(news, min(left, found.follower.pause(look_every, found.settings.poll_seconds)))
        news.clear()
        over = left <= 0 or found.follower.closing.is_set()
        row, journal = await runs.get_with_journal(
            found.database, found.plans, who, run_id, only_settled=not over, until_ended=until_ended
        )
        if journal is not None:
            return row, journal


def _is_settled(row: RunRecord) -> bool:
    return row.status in RUN.terminal or row.status == RunState.WAITING_APPROVAL


async def _answer(tx: Tx, found: AppContext, row: RunRecord, status: int = 200) -> StoredResponse:
    view = run_view(row, await load_for_display(tx, found.plans, row), found.policies.hidden)
    return StoredResponse(status, dump(view), row.id)


def _run(
    found: AppContext, row: RunRecord, journal: Journal | None, status: int = 200, like: Mapping[str, str] | None = None
) -> Response:
    response = Json(run_view(row, journal, found.policies.hidden), status)
    if like and "idempotency-replayed" in like:
        response.headers["Idempotency-Replayed"] = like["idempotency-replayed"]
    return response
