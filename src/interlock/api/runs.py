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
from interlock.api.direct import DirectRoute, by_way_of
from interlock.api.services import (
    Json,
    Limit,
    Services,
    Svc,
    Who,
    answered,
    asked_once,
    change,
    encode_cursor,
    number_cursor,
    page,
    principal,
    services,
    uuid_cursor,
)
from interlock.api.views import accepted_view, dump, event_view, new_run_answer, new_run_view, run_view
from interlock.engine import approvals, idempotency, retries, runs
from interlock.engine.idempotency import Answer
from interlock.engine.outside import journal_to_show, read_journal
from interlock.engine.principal import Principal
from interlock.governance.roles import Permission
from interlock.ids import uuid7
from interlock.journal import EntryType, Journal
from interlock.lifecycle import RUN, RunState
from interlock.store.pool import Row, Tx
from interlock.waiting import either
from interlock.wire import Allow, Bare, Event, Page, Run, StartRun, StartRuns, Stop

router = APIRouter(prefix="/api/runs", tags=["runs"], route_class=DirectRoute)

# How long a waiting request trusts that it is told; a notification can be lost with its connection.
_POLL_SECONDS = 1.0

Wait = Annotated[float | None, Query(ge=0, le=60, description="Answer when the run ended or waits for a person.")]
OverCap = Annotated[
    Literal["wait", "refuse"],
    Query(description="If the tenant's runs of this minute are taken: wait for a later one, or answer 429."),
]

_ONLY_WAIT = re.compile(rb"(?:wait=([0-9]|[1-5][0-9]))?")


async def _start_shortly(request: Request) -> Response | None:
    """A body in JSON, with nothing in the query but how long to wait."""
    headers, query = request.headers, request.scope["query_string"]
    if headers.get("content-type") != "application/json" or not (plain := _ONLY_WAIT.fullmatch(query)):
        return None
    try:
        body = StartRun.model_validate_json(await request.body())
    except (ValidationError, ClientDisconnect):
        return None
    found = await services(request)
    return await _started(body, request, found, await principal(request, found), float(plain[1] or 0), "wait")


@router.post("", status_code=201, response_model=Run)
@by_way_of(_start_shortly)
async def start(
    body: StartRun, request: Request, found: Svc, who: Who, wait: Wait = None, over_cap: OverCap = "wait"
) -> Response:
    """Start a run of the newest version of a workflow, or of the one that is asked for."""
    return await _started(body, request, found, who, wait or 0, over_cap)


async def _started(
    body: StartRun, request: Request, found: Services, who: Principal, wait: float, over_cap: str
) -> Response:
    who.require(Permission.START)
    watch = wait + 5 if wait else None
    asked = await asked_once(who, request)
    trigger = _trigger(body, request, asked)
    new = await _prepare(found, who, body, trigger, watch, remembered=True)
    with found.follower.watching(new.id) as news:
        response = await _start_at_once(found, who, asked, new) if over_cap == "wait" else None
        if response is None:
            new = dataclasses.replace(await _prepare(found, who, body, trigger, watch), id=new.id)
            response = await _start(found, who, request, new, over_cap)
        if not wait or response.status_code != 201:
            return response
        if "idempotency-replayed" not in response.headers:
            return _run(*await _until_settled(found, who, new.id, wait, news), 201)
    # The key answered with a run that was started before.
    run_id = UUID(orjson.loads(bytes(response.body))["id"])
    return _run(*await watched_until_settled(found, who, run_id, wait), 201, response.headers)


def _trigger(body: StartRun | StartRuns, request: Request, asked: idempotency.Request | None) -> dict[str, Any]:
    trigger = body.trigger.model_dump() if body.trigger else {"source": "api", "ref": None}
    if asked is not None:
        trigger["idempotency_key"] = asked.key
    if traceparent := tracing.current() or tracing.accepted(request.headers.get("traceparent")):
        trigger["traceparent"] = traceparent
    return trigger


async def _prepare(
    found: Services, who: Principal, body: StartRun, trigger: dict[str, Any], watch: float | None, *,
    remembered: bool = False,
) -> runs.NewRun:  # fmt: skip
    return await runs.prepare(
        found.plans, who, body.workflow, version=body.version, input=body.input, trigger=trigger,
        deadline_seconds=body.deadline_seconds, watch_seconds=watch, remembered=remembered,
    )  # fmt: skip


async def _start_at_once(
    found: Services, who: Principal, asked: idempotency.Request | None, new: runs.NewRun
) -> Response | None:
    """In one statement. None: nothing started; the long way finds out why."""
    if not runs.starts_alone(new.plan):
        return None
    answer = await runs.start_once(found.database, who, new, asked, new_run_answer(new, who))
    return None if answer is None else answered(answer)


async def _start(found: Services, who: Principal, request: Request, new: runs.NewRun, over_cap: str) -> Response:
    async def work(tx: Tx) -> Answer:
        if runs.starts_in_queue(new.plan):
            created_at = await runs.start_many(tx, found.database, who, [new], may_wait=over_cap == "wait")
            view = new_run_view(new, who, created_at)
        else:
            row = await runs.start_waiting(tx, found.database, who, new, may_wait=over_cap == "wait")
            view = run_view(row, await read_journal(tx, found.plans, row))
        return Answer(201, dump(view), new.id)

    return await change(found, who, request, work)


@router.post("/batch", status_code=201, response_model=Page[Run])
async def start_batch(body: StartRuns, request: Request, found: Svc, who: Who, over_cap: OverCap = "wait") -> Response:
    """Start a run for each of up to 1,000 inputs: all of them or none, in one transaction, answered in their order.

    They go to the queue, so what begins with an approval or a wait is opened by a worker.
    """
    who.require(Permission.START)
    trigger = _trigger(body, request, await asked_once(who, request))
    first = await runs.prepare(
        found.plans, who, body.workflow, version=body.version, trigger=trigger, deadline_seconds=body.deadline_seconds
    )
    news = [dataclasses.replace(first, id=uuid7(), input=given) for given in body.inputs]

    async def work(tx: Tx) -> Answer:
        created_at = await runs.start_many(tx, found.database, who, news, may_wait=over_cap == "wait")
        return Answer(201, dump({"items": [accepted_view(new, who, created_at) for new in news], "next_cursor": None}))

    return await change(found, who, request, work)


@router.get("", response_model=Page[Run])
async def list_runs(
    found: Svc, who: Who, status: RunState | None = None, workflow: str | None = None, session_id: UUID | None = None,
    job_id: UUID | None = None, parent_run_id: UUID | None = None, cursor: str | None = None, limit: Limit = 50,
) -> Response:  # fmt: skip
    """Newest first, without their steps."""
    who.require(Permission.READ)
    rows = await found.database.fetch(
        "list_runs", who.tenant_id, uuid_cursor(cursor), status, workflow, session_id, job_id, limit + 1,
        who.workspace_id, parent_run_id,
    )  # fmt: skip
    return Json(page(rows, limit, run_view))


@router.get("/{run_id}", response_model=Run)
async def show(run_id: UUID, found: Svc, who: Who, wait: Wait = None) -> Response:
    who.require(Permission.READ)
    row, journal = await runs.get_to_show(found.database, found.plans, who, run_id)
    if wait and not _is_settled(row):
        row, journal = await watched_until_settled(found, who, run_id, wait)
    return _run(row, journal)


@router.post("/{run_id}/approve", response_model=Run)
async def approve(run_id: UUID, request: Request, found: Svc, who: Who, body: Allow | None = None) -> Response:
    """Approve what the run waits for. If it waits for nothing, nothing changes."""
    who.require(Permission.APPROVE)
    reason = body.reason if body else None

    async def work(tx: Tx) -> Answer:
        await approvals.approve_run(tx, found.database, found.plans, who, run_id, reason)
        return await _answer(tx, found, await runs.get(tx, who, run_id))

    return await change(found, who, request, work)


@router.post("/{run_id}/cancel", response_model=Run)
async def cancel(run_id: UUID, request: Request, found: Svc, who: Who, body: Stop | None = None) -> Response:
    who.require(Permission.STOP)
    return await change(found, who, request, lambda tx: stop_run(tx, found, who, run_id, body, interrupt=False))


@router.post("/{run_id}/interrupt", response_model=Run)
async def interrupt(run_id: UUID, request: Request, found: Svc, who: Who, body: Stop | None = None) -> Response:
    who.require(Permission.STOP)
    return await change(found, who, request, lambda tx: stop_run(tx, found, who, run_id, body, interrupt=True))


async def stop_run(
    tx: Tx, found: Services, who: Principal, run_id: UUID, body: Stop | None, *, interrupt: bool
) -> Answer:
    reason = body.reason if body else None
    row = await runs.cancel(tx, found.database, found.plans, who, run_id, reason=reason, interrupt=interrupt)
    return await _answer(tx, found, row)


@router.post("/{run_id}/retry", status_code=201, response_model=Run)
async def retry(run_id: UUID, request: Request, found: Svc, who: Who, body: Bare | None = None) -> Response:
    """A new run that begins where a failed or canceled one had got to."""
    who.require(Permission.START)
    new_id = uuid7()

    async def work(tx: Tx) -> Answer:
        row = await retries.retry(tx, found.database, found.plans, who, run_id, new_id)
        return await _answer(tx, found, row, 201)

    return await change(found, who, request, work)


@router.get("/{run_id}/events", response_model=Page[Event])
async def events(
    run_id: UUID, request: Request, found: Svc, who: Who, after: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    cursor: str | None = None, limit: Limit = 500,
) -> Response:  # fmt: skip
    """The run's journal: a page of it, or with `Accept: text/event-stream` all of it as it happens."""
    who.require(Permission.READ)
    row = await runs.get(found.database, who, run_id)
    after = max(after, number_cursor(cursor))
    if streams.is_wanted(request):
        return streams.stream(found, request, run_id, _entries_after(found, row, streams.resumed(request, after)))
    entries = await found.database.fetch("entries_after", run_id, after, limit + 1)
    shown = [event_view(e, row["session_id"]) for e in entries[:limit]]
    more = len(entries) > limit
    return Json({"items": shown, "next_cursor": encode_cursor(shown[-1]["seq"]) if more else None})


def _entries_after(found: Services, row: Row, after: int) -> streams.More:
    watch, over = streams.Watch(), False

    async def more(_news: asyncio.Event) -> list[bytes] | None:
        nonlocal after, over
        if over:
            return None
        if watch.is_due():
            await found.database.fetch("watch_run", found.database.clock(), row["id"], streams.WATCH_SECONDS)
        entries = await found.database.fetch("entries_after", row["id"], after, 500)
        if not entries:
            return None if await _has_ended(found, row, after) else []
        after, over = entries[-1]["seq"], entries[-1]["type"] == EntryType.RUN_COMPLETED
        return [streams.event(b"%d" % e["seq"], e["type"], event_view(e, row["session_id"])) for e in entries]

    return more


async def _has_ended(found: Services, row: Row, after: int) -> bool:
    """For a reader that was given everything before it came."""
    now = await found.database.row("get_run", row["tenant_id"], row["id"])
    return now is None or (now["completed_at"] is not None and after >= now["seq"])


async def watched_until_settled(
    found: Services, who: Principal, run_id: UUID, wait: float
) -> tuple[Row, Journal | None]:
    with found.follower.watching(run_id) as news:
        await found.database.fetch("watch_run", found.database.clock(), run_id, wait + 5)
        news.set()  # it may have ended before anybody was told to tell
        return await _until_settled(found, who, run_id, wait, news)


async def _until_settled(
    found: Services, who: Principal, run_id: UUID, wait: float, news: asyncio.Event
) -> tuple[Row, Journal | None]:
    deadline = asyncio.get_running_loop().time() + wait
    while True:
        left = deadline - asyncio.get_running_loop().time()
        if left > 0 and not found.follower.closing.is_set():
            await either(news, min(left, found.follower.pause(_POLL_SECONDS, found.settings.poll_seconds)))
        news.clear()
        over = left <= 0 or found.follower.closing.is_set()
        row, journal = await runs.get_to_show(found.database, found.plans, who, run_id, only_settled=not over)
        if journal is not None:
            return row, journal


def _is_settled(row: Row) -> bool:
    return RunState(row["status"]) in RUN.terminal or row["status"] == RunState.WAITING_APPROVAL


async def _answer(tx: Tx, found: Services, row: Row, status: int = 200) -> Answer:
    view: dict[str, Any] = run_view(row, await journal_to_show(tx, found.plans, row))
    return Answer(status, dump(view), row["id"])


def _run(row: Row, journal: Journal | None, status: int = 200, like: Mapping[str, str] | None = None) -> Response:
    response = Json(run_view(row, journal), status)
    if like and "idempotency-replayed" in like:
        response.headers["Idempotency-Replayed"] = like["idempotency-replayed"]
    return response
