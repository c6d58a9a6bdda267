"""Jobs: a batch of runs on reserved workers, and the tree that the job belongs to."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.dependencies import encode_cursor, uuid_cursor
from interlock.api.views import job_view
from interlock.console.rendering import FormFields, Visit, Visitor, done, render, uuid_of
from interlock.engine.queueing import jobs
from interlock.errors import Invalid
from interlock.ids import JobId
from interlock.lifecycle import JOB, JobState
from interlock.policy.roles import Permission
from interlock.store.pool import Row, Tx

router = APIRouter()

_PAGE = 50


@router.get("/jobs")
async def listed(request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    before, status = uuid_cursor(request.query_params.get("cursor")), request.query_params.get("status") or None
    if status is not None and status not in JOB.states:
        raise Invalid(f"a job is {', '.join(JOB.states)}; not {status!r}")
    database, who = visit.services.database, visit.who
    rows = await database.fetch("list_jobs", who.tenant_id, before, status, who.workspace_id, None, _PAGE + 1)
    return await render(
        request, visit, "jobs.html", jobs=await _views(visit, rows[:_PAGE]), states=JOB.states, chosen=status,
        next=encode_cursor(rows[_PAGE - 1]["id"]) if len(rows) > _PAGE else None,
        live="/live/jobs" if before is None else None,
    )  # fmt: skip


@router.get("/jobs/{job_id}")
async def show(job_id: str, request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    database = visit.services.database
    row = await jobs.get(database, visit.who, JobId(uuid_of(job_id, "job")))
    tree = await _views(visit, await database.fetch("tree_of", await _root(visit, row), visit.who.workspace_id))
    history = await database.fetch("transitions_of", row["id"])
    standing = (await jobs.standings(database, [row["id"]]))[row["id"]]
    return await render(
        request, visit, "job.html", job=job_view(row, standing, _now(visit), history), tree=list(_in_order(tree)),
        is_open=JobState(row["status"]) in JOB.open, live="/live/jobs",
    )  # fmt: skip


async def _root(visit: Visitor, row: Row) -> UUID:
    """Return the root of the job's tree, at most five levels up."""
    while row["parent_job_id"] is not None:
        row = await jobs.get(visit.services.database, visit.who, row["parent_job_id"])
    root: UUID = row["id"]
    return root


async def _views(visit: Visitor, rows: list[Row]) -> list[dict[str, Any]]:
    standings = await jobs.standings(visit.services.database, [row["id"] for row in rows])
    return [job_view(row, standings[row["id"]], _now(visit)) for row in rows]


def _in_order(views: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Return the jobs depth first: each job before its children, and its children before the next sibling."""
    below: dict[UUID | None, list[dict[str, Any]]] = {}
    known = {view["id"] for view in views}
    for view in views:
        parent = view["parent_job_id"] if view["parent_job_id"] in known else None
        below.setdefault(parent, []).append(view)

    def walk(parent: UUID | None) -> Iterator[dict[str, Any]]:
        for view in below.get(parent, []):
            yield view
            yield from walk(view["id"])

    return walk(None)


def _now(visit: Visitor) -> datetime:
    return visit.services.database.now()


@router.post("/jobs/{job_id}/cancel")
async def cancel(job_id: str, visit: Visit, said: FormFields) -> Response:
    visit.who.require(Permission.STOP)
    found, wanted = visit.services, uuid_of(job_id, "job")

    async def work(tx: Tx) -> Row:
        return await jobs.cancel(tx, visit.who, JobId(wanted), reason=said.get("reason"))

    await found.database.run_in_transaction(work)
    return done(f"/jobs/{wanted}", "Canceled, with all that is below it.")
