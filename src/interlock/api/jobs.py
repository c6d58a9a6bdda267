"""/api/jobs"""

import asyncio
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from interlock.api import streams
from interlock.api.dependencies import (
    Caller,
    Ctx,
    Json,
    Limit,
    encode_cursor,
    idempotent_write,
    number_cursor,
    uuid_cursor,
)
from interlock.api.views import dump, history_view, job_view
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.engine.queueing import jobs
from interlock.ids import JobId, uuid7
from interlock.lifecycle import JobState
from interlock.policy.roles import Permission
from interlock.store.pool import Database, Row, Tx
from interlock.wire import Job, JobHistoryEvent, JobTree, NewJob, Order, Page

router = APIRouter(prefix="/api/jobs", tags=["jobs"])


@router.post("", status_code=201, response_model=Job)
async def submit(body: NewJob, request: Request, found: Ctx, who: Caller) -> Response:
    """Start one run for each input, on `worker_count` workers reserved for the job.

    The job is `pending` until enough workers are free.

    A job that names an unknown workflow is `failed` from the start, with the reason.
    """
    who.require(Permission.START)
    asked = jobs.JobRequest(
        uuid7(), body.task_description, body.workflow, body.inputs, body.worker_count, body.version,
        JobId(body.parent_job_id) if body.parent_job_id else None,
        body.timeout_seconds,
    )  # fmt: skip
    new = await jobs.prepare(found.plans, who, asked)

    async def work(tx: Tx) -> StoredResponse:
        row = await jobs.submit(tx, who, new)
        return StoredResponse(201, dump(await _view(tx, found.database, row)))

    return await idempotent_write(found, who, request, work)


@router.get("", response_model=Page[Job])
async def list_jobs(
    found: Ctx,
    who: Caller,
    status: JobState | None = None,
    parent_job_id: JobId | None = None,
    cursor: str | None = None,
    limit: Limit = 50,
) -> Response:
    """List jobs, newest first."""
    who.require(Permission.READ)
    rows = await found.database.fetch(
        "list_jobs", who.tenant_id, uuid_cursor(cursor), status, who.workspace_id, parent_job_id, limit + 1
    )
    shown = rows[:limit]
    standings = await jobs.standings(found.database, [row["id"] for row in shown])
    views = [job_view(row, standings[row["id"]], _now(found.database)) for row in shown]
    return Json({"items": views, "next_cursor": encode_cursor(shown[-1]["id"]) if len(rows) > limit else None})


@router.get("/{job_id}", response_model=Job)
async def show(job_id: JobId, found: Ctx, who: Caller) -> Response:
    """Return a job with its progress, its workers and its `state_history`."""
    who.require(Permission.READ)
    return Json(await _view(found.database, found.database, await jobs.get(found.database, who, job_id)))


@router.get("/{job_id}/tree", response_model=JobTree)
async def tree(job_id: JobId, found: Ctx, who: Caller) -> Response:
    """Return the job with its descendants, as a tree."""
    who.require(Permission.READ)
    await jobs.get(found.database, who, job_id)
    rows = await found.database.fetch("tree_of", job_id, who.workspace_id)
    standings = await jobs.standings(found.database, [row["id"] for row in rows])
    views: dict[UUID, dict[str, Any]] = {}
    for row in rows:
        views[row["id"]] = job_view(row, standings[row["id"]], _now(found.database)) | {"children": []}
        if row["parent_job_id"] in views:
            views[row["parent_job_id"]]["children"].append(views[row["id"]])
    return Json(views[job_id])


@router.post("/{job_id}/cancel", response_model=Job)
async def cancel(job_id: JobId, request: Request, found: Ctx, who: Caller, body: Order | None = None) -> Response:
    """Cancel the job and its descendants at once. Their runs are stopped and their workers are released."""
    who.require(Permission.STOP)
    reason = body.reason if body else None

    async def work(tx: Tx) -> StoredResponse:
        row = await jobs.cancel(tx, who, job_id, reason=reason)
        return StoredResponse(200, dump(await _view(tx, found.database, row)))

    return await idempotent_write(found, who, request, work)


@router.get("/{job_id}/events", response_model=Page[JobHistoryEvent])
async def events(
    job_id: JobId, request: Request, found: Ctx, who: Caller, after: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    cursor: str | None = None, limit: Limit = 500,
) -> Response:  # fmt: skip
    """Return the job's history: one page, or with `Accept: text/event-stream` a live stream of events."""
    who.require(Permission.READ)
    await jobs.get(found.database, who, job_id)
    after = max(after, number_cursor(cursor))
    if streams.is_wanted(request):
        return streams.stream(
            found, request, job_id, _history_after(found.database, job_id, streams.resumed(request, after))
        )
    rows = await found.database.fetch("history_of", job_id, after, limit + 1)
    shown = [history_view(row) for row in rows[:limit]]
    return Json({"items": shown, "next_cursor": encode_cursor(shown[-1]["seq"]) if len(rows) > limit else None})


def _history_after(database: Database, job_id: JobId, after: int) -> streams.More:
    async def more(_news: asyncio.Event) -> list[bytes] | None:
        nonlocal after
        rows = await database.fetch("history_of", job_id, after, 500)
        if not rows:
            return None if await _has_ended(database, job_id, after) else []
        after = rows[-1]["seq"]
        return [streams.event(b"%d" % row["seq"], row["type"], history_view(row)) for row in rows]

    return more


async def _has_ended(database: Database, job_id: JobId, after: int) -> bool:
    """Return whether the client already received the final event: it reconnected after the end."""
    last = await database.fetch("history_of", job_id, after - 1, 2) if after else []
    return len(last) == 1 and last[0]["type"] == "job_completed"


async def _view(tx: Tx | Database, database: Database, row: Row) -> dict[str, Any]:
    standing = (await jobs.standings(tx, [row["id"]]))[row["id"]]
    return job_view(row, standing, _now(database), await tx.fetch("transitions_of", row["id"]))


def _now(database: Database) -> datetime:
    return database.now()
