"""/api/jobs"""

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from interlock.api import streams
from interlock.api.services import Json, Limit, Svc, Who, change, encode_cursor, number_cursor, uuid_cursor
from interlock.api.views import dump, history_view, job_view
from interlock.engine import jobs
from interlock.engine.idempotency import Answer
from interlock.governance.roles import Permission
from interlock.ids import uuid7
from interlock.lifecycle import JobState
from interlock.store.pool import Database, Row, Tx
from interlock.wire import Job, JobEvent, JobTree, NewJob, Order, Page

router = APIRouter(prefix="/api/jobs", tags=["jobs"])


@router.post("", status_code=201, response_model=Job)
async def submit(body: NewJob, request: Request, found: Svc, who: Who) -> Response:
    """One run for each input, on `worker_count` workers that do nothing else. Without enough of them it is `pending`.

    A job that names a workflow that is not there is `failed` from the start, and says so.
    """
    who.require(Permission.START)
    asked = jobs.NewJob(
        uuid7(), body.task_description, body.workflow, body.inputs, body.worker_count, body.version, body.parent_job_id,
        body.timeout_seconds,
    )  # fmt: skip
    new = await jobs.prepare(found.plans, who, asked)

    async def work(tx: Tx) -> Answer:
        row = await jobs.submit(tx, found.database, who, new)
        return Answer(201, dump(await _view(tx, found.database, row)))

    return await change(found, who, request, work)


@router.get("", response_model=Page[Job])
async def list_jobs(
    found: Svc, who: Who, status: JobState | None = None, parent_job_id: UUID | None = None, cursor: str | None = None,
    limit: Limit = 50,
) -> Response:  # fmt: skip
    """Newest first."""
    who.require(Permission.READ)
    rows = await found.database.fetch(
        "list_jobs", who.tenant_id, uuid_cursor(cursor), status, who.workspace_id, parent_job_id, limit + 1
    )
    shown = rows[:limit]
    standings = await jobs.standings(found.database, [row["id"] for row in shown])
    views = [job_view(row, standings[row["id"]], _now(found.database)) for row in shown]
    return Json({"items": views, "next_cursor": encode_cursor(shown[-1]["id"]) if len(rows) > limit else None})


@router.get("/{job_id}", response_model=Job)
async def show(job_id: UUID, found: Svc, who: Who) -> Response:
    """A job with its progress, its workers and its `state_history`."""
    who.require(Permission.READ)
    return Json(await _view(found.database, found.database, await jobs.get(found.database, who, job_id)))


@router.get("/{job_id}/tree", response_model=JobTree)
async def tree(job_id: UUID, found: Svc, who: Who) -> Response:
    """The job with its children, and theirs."""
    who.require(Permission.READ)
    await jobs.get(found.database, who, job_id)
    rows = await found.database.fetch("tree_of", job_id)
    standings = await jobs.standings(found.database, [row["id"] for row in rows])
    views: dict[UUID, dict[str, Any]] = {}
    for row in rows:
        views[row["id"]] = job_view(row, standings[row["id"]], _now(found.database)) | {"children": []}
        if row["parent_job_id"] in views:
            views[row["parent_job_id"]]["children"].append(views[row["id"]])
    return Json(views[job_id])


@router.post("/{job_id}/cancel", response_model=Job)
async def cancel(job_id: UUID, request: Request, found: Svc, who: Who, body: Order | None = None) -> Response:
    """The job and all below it, at once; their runs are stopped, their workers are free."""
    who.require(Permission.STOP)
    reason = body.reason if body else None

    async def work(tx: Tx) -> Answer:
        row = await jobs.cancel(tx, found.database, who, job_id, reason=reason)
        return Answer(200, dump(await _view(tx, found.database, row)))

    return await change(found, who, request, work)


@router.get("/{job_id}/events", response_model=Page[JobEvent])
async def events(
    job_id: UUID, request: Request, found: Svc, who: Who, after: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    cursor: str | None = None, limit: Limit = 500,
) -> Response:  # fmt: skip
    """What happened to the job: a page of it, or with `Accept: text/event-stream` all of it as it happens."""
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


def _history_after(database: Database, job_id: UUID, after: int) -> streams.More:
    async def more(_news: asyncio.Event) -> list[bytes] | None:
        nonlocal after
        rows = await database.fetch("history_of", job_id, after, 500)
        if not rows:
            return None if await _has_ended(database, job_id, after) else []
        after = rows[-1]["seq"]
        return [streams.event(b"%d" % row["seq"], row["type"], history_view(row)) for row in rows]

    return more


async def _has_ended(database: Database, job_id: UUID, after: int) -> bool:
    """For a reader that was given everything before it came."""
    last = await database.fetch("history_of", job_id, after - 1, 2) if after else []
    return len(last) == 1 and last[0]["type"] == "job_completed"


async def _view(tx: Tx | Database, database: Database, row: Row) -> dict[str, Any]:
    standing = (await jobs.standings(tx, [row["id"]]))[row["id"]]
    return job_view(row, standing, _now(database), await tx.fetch("transitions_of", row["id"]))


def _now(database: Database) -> datetime:
    return database.clock() or datetime.now(UTC)
