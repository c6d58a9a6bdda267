"""Jobs: batches of runs, with workers reserved for them for as long as they have something to do."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import UUID

import orjson

from interlock.definition.plan import Plan
from interlock.engine import runs
from interlock.engine.outside import open_run, put_back, say
from interlock.engine.principal import Principal
from interlock.engine.workflows import Plans
from interlock.errors import Conflict, Invalid, NotFound
from interlock.ids import uuid7
from interlock.journal import Command, Word, encode
from interlock.lifecycle import JOB, RUN, JobEvent, JobState, RunReason, RunState
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log, metrics
from interlock.wire import Role

SYSTEM = "system:jobs"
DEEPEST = 5
# Runs that are canceled side by side when their job was.
_AT_ONCE = 4
_BATCH = 200


@dataclass(frozen=True, slots=True)
class NewJob:
    """What a caller asks for. The id is made here, so that the same call repeated is the same job."""

    id: UUID
    task_description: str
    workflow: str
    inputs: list[Any]
    worker_count: int = 1
    version: int | None = None
    parent_job_id: UUID | None = None
    timeout_seconds: float | None = None
    problem: str | None = None


# ---------------------------------------------------------------- commands


async def prepare(plans: Plans, principal: Principal, new: NewJob) -> NewJob:
    """With the version that it is pinned to, or with what is wrong with it."""
    try:
        version, _ = await plans.current(principal.tenant_id, new.workflow, new.version)
    except (NotFound, Invalid, Conflict) as error:
        return replace(new, problem=error.detail)
    return replace(new, version=version)


async def submit(tx: Tx, database: Database, principal: Principal, new: NewJob) -> Row:
    """Accepted and validated in one transaction. What only the definitions can show makes it a failed job."""
    depth = await _depth(tx, database, principal, new.parent_job_id)
    row = await tx.row(
        "insert_job", database.clock(), new.id, principal.tenant_id, principal.workspace_id, new.parent_job_id, depth,
        new.task_description, new.workflow, new.version, encode(new.inputs), len(new.inputs), new.worker_count,
        principal.actor, principal.facts, new.timeout_seconds,
    )  # fmt: skip
    if row is None:  # an earlier try of the same call got through
        return await get(tx, principal, new.id)
    log.info("job_submitted", job_id=str(new.id), workflow=new.workflow, runs=len(new.inputs))
    event = JobEvent.VALIDATE if new.problem is None else JobEvent.FAIL
    return await _move(tx, database, row, event, principal.actor, new.problem)


async def _depth(tx: Tx, database: Database, principal: Principal, parent_id: UUID | None) -> int:
    """The parent stays locked until the child is there: it can neither end nor be canceled meanwhile."""
    if parent_id is None:
        return 0
    parent = _visible(await tx.row("lock_job", database.clock(), parent_id), principal, parent_id)
    if JobState(parent["status"]) in JOB.terminal:
        raise refused(JobState(parent["status"]), "submit a child")
    if parent["depth"] >= DEEPEST:
        raise Invalid(
            f"job {parent_id} is at depth {parent['depth']}, and {DEEPEST} is the deepest; submit to its parent",
            code="JOB_TOO_DEEP",
        )
    return int(parent["depth"]) + 1


async def cancel(tx: Tx, database: Database, principal: Principal, job_id: UUID, *, reason: str | None = None) -> Row:
    """It and all below it, at once; their workers are free. Their runs follow: see `cancel_runs`."""
    row = _visible(await tx.row("lock_job", database.clock(), job_id), principal, job_id)
    if JobState(row["status"]) in JOB.terminal:
        raise refused(JobState(row["status"]), JobEvent.CANCEL)
    await _cancel_tree(tx, database, job_id, principal.actor, reason or "canceled by user")
    return await get(tx, principal, job_id)


async def _cancel_tree(tx: Tx, database: Database, job_id: UUID, actor: str, reason: str) -> None:
    ended: list[UUID] = []
    # Again until nothing is found: a child that was submitted while we waited for its parent's row is seen then.
    while found := await tx.fetch("lock_open_tree", job_id):
        reasons = [reason if row["id"] == job_id else f"its parent was canceled: {reason}" for row in found]
        await _move_all(tx, database, found, reasons, JobEvent.CANCEL, actor)
        ended += [row["id"] for row in found]
    await _release(tx, database, ended)


async def _release(tx: Tx, database: Database, job_ids: list[UUID]) -> None:
    """Lanes before workers: the lock order."""
    await tx.fetch("open_job_lanes", job_ids)
    await tx.fetch("release_workers", database.clock(), job_ids)


# ---------------------------------------------------------------- looking


async def get(tx: Tx | Database, principal: Principal, job_id: UUID) -> Row:
    return _visible(await tx.row("get_job", principal.tenant_id, job_id), principal, job_id)


def _visible(row: Row | None, principal: Principal, job_id: UUID) -> Row:
    if row is None or row["tenant_id"] != principal.tenant_id or not principal.reaches(row["workspace_id"]):
        raise NotFound(f"no job {job_id}", code="JOB_NOT_FOUND")
    return row


@dataclass(frozen=True, slots=True)
class Standing:
    """A job's runs by state, and the workers it has."""

    runs: dict[RunState, int]
    workers: list[Row]

    @property
    def done(self) -> int:
        return sum(self.runs.get(state, 0) for state in RUN.terminal)


async def standings(tx: Tx | Database, job_ids: Iterable[UUID]) -> dict[UUID, Standing]:
    ids = list(job_ids)
    found = {job_id: Standing({}, []) for job_id in ids}
    for row in await tx.fetch("progress_of", ids):
        found[row["job_id"]].runs[RunState(row["status"])] = row["runs"]
    for row in await tx.fetch("workers_of", ids):
        found[row["job_id"]].workers.append(row)
    return found


# ---------------------------------------------------------------- tending


async def tend(database: Database, plans: Plans) -> None:
    """What jobs need from time to time; any number of processes may do it at once. Each job in its own transaction."""
    if not await database.value("jobs_are_open"):
        return
    for row in await database.fetch("overdue_jobs", database.clock()):
        await database.command(partial(_time_out, database, row["id"]))
    for row in await database.fetch("running_jobs", None):
        await _tend_one(database, row)
    while await _allocate_next(database, plans):
        pass
    await cancel_runs(database, plans)
    await database.fetch("drop_job_lanes")


async def _time_out(database: Database, job_id: UUID, tx: Tx) -> None:
    row = await tx.row("lock_job", database.clock(), job_id)
    if row is not None and JobState(row["status"]) in JOB.open:
        await _cancel_tree(tx, database, job_id, SYSTEM, "timed out")


async def _tend_one(database: Database, row: Row) -> None:
    if row["done"] >= row["total"] and not row["open_children"]:
        await database.command(partial(_settle, database, row["id"]))
        return
    if row["done"] > row["noted"]:
        await database.fetch("note_progress", database.clock(), row["id"], row["done"], row["well"])
    # Nothing that waits holds a worker: one whose runs all wait, or which waits for its children, gives them back.
    if not row["moving"] and row["workers"]:
        await database.fetch("release_workers", database.clock(), [row["id"]])
    elif row["moving"] and row["workers"] < row["worker_count"]:
        await database.command(partial(_replace_workers, database, row["id"]))


async def _settle(database: Database, job_id: UUID, tx: Tx) -> None:
    job = await tx.row("lock_job", database.clock(), job_id)
    # Again under the lock: a child may have been submitted since.
    now = await tx.row("running_jobs", job_id)
    if job is None or now is None or now["done"] < now["total"] or now["open_children"]:
        return
    wrong = []
    if now["well"] < now["total"]:
        wrong.append(f"{now['total'] - now['well']} of {now['total']} runs did not succeed")
    if now["unwell_children"]:
        wrong.append(f"{now['unwell_children']} children did not complete")
    event = JobEvent.FAIL if wrong else JobEvent.SUCCEED
    await _move(tx, database, job, event, SYSTEM, "; ".join(wrong) or None, done=now["done"])
    await _release(tx, database, [job_id])


async def _replace_workers(database: Database, job_id: UUID, tx: Tx) -> None:
    """For a worker that crashed, or that it gave back while it had nothing to do."""
    await tx.fetch("one_allocator")
    job = await tx.row("lock_job", database.clock(), job_id)
    now = await tx.row("running_jobs", job_id)
    if job is not None and now is not None and now["moving"] and (missing := now["worker_count"] - now["workers"]) > 0:
        await tx.fetch("reserve_workers", database.clock(), job_id, missing, job["tenant_id"])


class _TooFew(Exception):
    """Not all of its workers could be had: nothing was reserved."""


async def _allocate_next(database: Database, plans: Plans) -> bool:
    """Start the pending job whose turn it is. False: there is none, or it has to wait for workers."""
    following = await database.row("next_pending_job")
    if following is None or following["free"] < following["worker_count"]:
        return False
    # Before the transaction: in it we would wait for a second connection, and others for ours.
    _, plan = await plans.to_start(following["tenant_id"], following["workflow"], following["workflow_version"])
    return await database.command(partial(_allocate, database, following["id"], plan))


async def _allocate(database: Database, job_id: UUID, plan: Plan, tx: Tx) -> bool:
    await tx.fetch("one_allocator")
    following = await tx.row("next_pending_job")
    if following is None or following["free"] < following["worker_count"]:
        return False
    job = await tx.row("lock_job", database.clock(), job_id)
    if following["id"] != job_id or job is None or job["status"] != JobState.PENDING:
        return True  # somebody was faster: look again
    try:
        async with tx.savepoint():
            await _start_runs(tx, database, plan, job)
            args = (database.clock(), job["id"], job["worker_count"], job["tenant_id"])
            if len(await tx.fetch("reserve_workers", *args)) < job["worker_count"]:
                raise _TooFew
            await _move(tx, database, job, JobEvent.ALLOCATE, SYSTEM, None)
    except _TooFew:
        return False
    return True


async def _start_runs(tx: Tx, database: Database, plan: Plan, job: Row) -> None:
    """One for each input, in the lane of the job, asked for by whoever asked for the job."""
    await tx.fetch("add_job_lane", job["id"], job["tenant_id"])
    trigger = {"source": "job", "ref": str(job["id"])}
    news = [
        runs.NewRun(uuid7(), job["workflow"], job["workflow_version"], plan, input, trigger, plan.timeout)
        for input in orjson.loads(job["inputs"])
    ]
    await runs.start_many(tx, database, _asker(job), news, job_id=job["id"])


def _asker(job: Row) -> Principal:
    """Who submitted the job, as they were then."""
    name, _, key_id = job["requested_by"].rpartition(":")
    facts = orjson.loads(job["requester"])
    return Principal(
        UUID(key_id), job["tenant_id"], facts["tenant"], name, Role(facts["role"]), job["workspace_id"],
        tuple(facts["groups"]),
    )  # fmt: skip


async def cancel_runs(database: Database, plans: Plans) -> int:
    """Runs of jobs that were canceled. One transaction each: a bad row stops no other."""
    total = 0
    while found := await database.fetch("runs_of_ended_jobs", _BATCH):
        failed = 0
        for begin in range(0, len(found), _AT_ONCE):
            some = found[begin : begin + _AT_ONCE]
            done = await asyncio.gather(*(_cancel_run(database, plans, row) for row in some), return_exceptions=True)
            for error in done:
                if isinstance(error, BaseException):
                    log.error("job_cancel_failed", exc_info=error)
                    failed += 1
        total += len(found) - failed
        if failed:
            break  # until the next time: they would be found again at once
    return total


async def _cancel_run(database: Database, plans: Plans, row: Row) -> None:
    async def work(tx: Tx) -> None:
        run = await open_run(tx, database, plans, row["tenant_id"], row["id"])
        if run.status in RUN.terminal or run.status == RunState.CANCELING or run.row["inbox"]:
            await put_back(tx, run)
            return
        data = {"reason_code": RunReason.CANCELED_BY_PARENT, "said": row["reason"]}
        await say(tx, database, run, Word(Command.CANCEL, SYSTEM, data))

    await database.command(work)


# ---------------------------------------------------------------- moving


def refused(state: JobState, event: str) -> Exception:
    metrics.refused.labels("job", state, event).inc()
    return JOB.refusal(state, event)


async def _move(
    tx: Tx, database: Database, row: Row, event: JobEvent, actor: str, reason: str | None, *, done: int | None = None
) -> Row:
    (moved,) = await _move_all(tx, database, [row], [reason], event, actor, done=done)
    return moved


async def _move_all(
    tx: Tx, database: Database, rows: list[Row], reasons: list[str | None] | list[str], event: JobEvent, actor: str, *,
    done: int | None = None,
) -> list[Row]:  # fmt: skip
    """Several by one event, which leads all of them to the same state."""
    (target,) = {JOB.move(JobState(row["status"]), event) for row in rows}
    moved = await tx.fetch(
        "move_jobs", database.clock(), [row["id"] for row in rows], [row["status"] for row in rows], list(reasons),
        target, event, actor, target == JobState.RUNNING, target in JOB.terminal, done,
    )  # fmt: skip
    tx.afterwards(partial(_tell, moved, target, actor))
    return moved


def _tell(moved: list[Row], target: JobState, actor: str) -> None:
    for row in moved:
        metrics.transition("job", row["from_state"], target).inc()
        metrics.was_in("job", row["from_state"], row["seconds_before"])
        log.info("job_transition", job_id=str(row["id"]), from_state=row["from_state"], to_state=target, actor=actor)
