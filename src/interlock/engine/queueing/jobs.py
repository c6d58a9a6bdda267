"""Jobs: batches of runs, with workers reserved for them while they have work."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import UUID

import orjson

from interlock.definition.plan import Plan
from interlock.engine.access.principal import Principal
from interlock.engine.runs import runs
from interlock.engine.workflows import Plans
from interlock.engine.writing.deliver import deliver_command, put_back
from interlock.engine.writing.load import open_run
from interlock.errors import Conflict, Invalid, NotFound
from interlock.ids import JobId, KeyId, RunId, uuid7
from interlock.journal import CommandType, RunCommand, encode
from interlock.lifecycle import JOB, RUN, JobEvent, JobState, RunReason, RunState
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log, metrics
from interlock.wire import Role

SYSTEM = "system:jobs"
DEEPEST = 5
# The number of a canceled job's runs that are canceled concurrently.
_AT_ONCE = 4
_BATCH = 200


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a caller asks for. The id is made with the request, so a repeated call creates the same job."""

    id: UUID
    task_description: str
    workflow: str
    inputs: list[Any]
    worker_count: int = 1
    version: int | None = None
    parent_job_id: JobId | None = None
    timeout_seconds: float | None = None
    problem: str | None = None


# ---------------------------------------------------------------- commands


async def prepare(plans: Plans, principal: Principal, new: JobRequest) -> JobRequest:
    """Return the request with the workflow version that it is pinned to, or with the reason why it is invalid."""
    try:
        version, _ = await plans.current(principal.tenant_id, new.workflow, new.version)
    except (NotFound, Invalid, Conflict) as error:
        return replace(new, problem=error.detail)
    return replace(new, version=version)


async def submit(tx: Tx, principal: Principal, new: JobRequest) -> Row:
    """Accept and validate the job in one transaction. An error that only the definitions reveal fails the job."""
    depth, workspace_id = await _place(tx, principal, new.parent_job_id)
    row = await tx.row(
        "insert_job", new.id, principal.tenant_id, workspace_id, new.parent_job_id, depth,
        new.task_description, new.workflow, new.version, encode(new.inputs), len(new.inputs), new.worker_count,
        principal.actor, principal.facts, new.timeout_seconds,
    )  # fmt: skip
    if row is None:  # an earlier try of the same call succeeded
        return await get(tx, principal, JobId(new.id))
    log.info("job_submitted", job_id=str(new.id), workflow=new.workflow, runs=len(new.inputs))
    event = JobEvent.VALIDATE if new.problem is None else JobEvent.FAIL
    return await _move(tx, row, event, principal.actor, new.problem)


async def _place(tx: Tx, principal: Principal, parent_id: UUID | None) -> tuple[int, str | None]:
    """Return the depth and the workspace. A child is in its parent's workspace: a tree never spans two of them.

    The parent stays locked until the child is inserted, so it can neither end nor be canceled before that.
    """
    if parent_id is None:
        return 0, principal.workspace_id
    parent = await _locked(tx, principal, JobId(parent_id))
    if JobState(parent["status"]) in JOB.terminal:
        raise Conflict(
            f"Job {parent_id} is {parent['status']} and takes no more children; submit the job without a parent.",
            code="JOB_TERMINAL_STATE", state=parent["status"], allowed=[],
        )  # fmt: skip
    if parent["depth"] >= DEEPEST:
        raise Invalid(
            f"job {parent_id} is at depth {parent['depth']}, and {DEEPEST} is the deepest; submit to its parent",
            code="JOB_TOO_DEEP",
        )
    return int(parent["depth"]) + 1, parent["workspace_id"]


async def _locked(tx: Tx, principal: Principal, job_id: JobId) -> Row:
    """Lock a job that the principal reaches. A job of others is looked up without a lock, so nothing waits for them."""
    await get(tx, principal, job_id)
    row = await tx.row("lock_job", job_id)
    assert row is not None  # jobs are never deleted
    return row


async def cancel(tx: Tx, principal: Principal, job_id: JobId, *, reason: str | None = None) -> Row:
    """Cancel the job and all jobs below it, and release their workers. Their runs follow: see `cancel_runs`.

    Canceling a canceled job changes nothing.
    """
    row = await _locked(tx, principal, job_id)
    if row["status"] == JobState.CANCELED:
        return await get(tx, principal, job_id)
    if JobState(row["status"]) in JOB.terminal:
        raise refused(JobState(row["status"]), JobEvent.CANCEL)
    await _cancel_tree(tx, job_id, principal.actor, reason or "canceled by user")
    return await get(tx, principal, job_id)


async def _cancel_tree(tx: Tx, job_id: JobId, actor: str, reason: str) -> None:
    ended: list[JobId] = []
    # Repeat until no job is found, to see a child that was submitted while we waited for its parent's row.
    while found := await tx.fetch("lock_open_tree", job_id):
        reasons = [reason if row["id"] == job_id else f"its parent was canceled: {reason}" for row in found]
        await _move_all(tx, found, reasons, JobEvent.CANCEL, actor)
        ended += [row["id"] for row in found]
    await _release(tx, ended)


async def _release(tx: Tx, job_ids: list[JobId]) -> None:
    """Release workers before queues: the lock order. Only this job's runs wait in its queue."""
    await tx.fetch("release_workers", job_ids)
    await tx.fetch("open_job_queues", job_ids)


# ---------------------------------------------------------------- reading


async def get(tx: Tx | Database, principal: Principal, job_id: JobId) -> Row:
    row = await tx.row("get_job", principal.tenant_id, job_id, principal.workspace_id)
    if row is None:
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


async def standings(tx: Tx | Database, job_ids: Iterable[JobId]) -> dict[JobId, Standing]:
    ids = list(job_ids)
    found = {job_id: Standing({}, []) for job_id in ids}
    for row in await tx.fetch("progress_of", ids):
        found[row["job_id"]].runs[RunState(row["status"])] = row["runs"]
    for row in await tx.fetch("workers_of", ids):
        found[row["job_id"]].workers.append(row)
    return found


# ---------------------------------------------------------------- periodic work


async def tend(database: Database, plans: Plans) -> None:
    """Do the periodic work of jobs, each in its own transaction. Any number of processes may do it at once."""
    if not await database.value("jobs_are_open"):
        return
    for row in await database.fetch("overdue_jobs"):
        await database.run_in_transaction(partial(_time_out, row["id"]))
    for row in await database.fetch("running_jobs", None):
        await _tend_one(database, row)
    while await _allocate_next(database, plans):
        pass
    await cancel_runs(database, plans)
    await database.fetch("drop_job_queues")


async def _time_out(job_id: JobId, tx: Tx) -> None:
    row = await tx.row("lock_job", job_id)
    if row is not None and JobState(row["status"]) in JOB.open:
        await _cancel_tree(tx, job_id, SYSTEM, "timed out")


async def _tend_one(database: Database, row: Row) -> None:
    if row["done"] >= row["total"] and not row["open_children"]:
        await database.run_in_transaction(partial(_settle, row["id"]))
        return
    if row["done"] > row["noted"]:
        await database.fetch("note_progress", row["id"], row["done"], row["well"])
    # Waiting runs hold no workers: a job whose runs all wait, or that waits for its children, releases its workers.
    if not row["moving"] and row["workers"]:
        await database.fetch("release_workers", [row["id"]])
    elif row["moving"] and row["workers"] < row["worker_count"]:
        await database.run_in_transaction(partial(_replace_workers, row["id"]))


async def _settle(job_id: JobId, tx: Tx) -> None:
    job = await tx.row("lock_job", job_id)
    # Check again under the lock: a child may have been submitted since.
    now = await tx.row("running_jobs", job_id)
    if job is None or now is None or now["done"] < now["total"] or now["open_children"]:
        return
    wrong = []
    if now["well"] < now["total"]:
        wrong.append(f"{now['total'] - now['well']} of {now['total']} runs did not succeed")
    if now["unwell_children"]:
        count = now["unwell_children"]
        wrong.append("1 child job did not complete" if count == 1 else f"{count} child jobs did not complete")
    event = JobEvent.FAIL if wrong else JobEvent.SUCCEED
    await _move(tx, job, event, SYSTEM, "; ".join(wrong) or None, done=now["done"])
    await _release(tx, [job_id])


async def _replace_workers(job_id: JobId, tx: Tx) -> None:
    """Replace workers that crashed, or that the job released while it had no work."""
    if not await tx.value("try_allocate"):
        return
    job = await tx.row("lock_job", job_id)
    now = await tx.row("running_jobs", job_id)
    if job is not None and now is not None and now["moving"] and (missing := now["worker_count"] - now["workers"]) > 0:
        await tx.fetch("reserve_workers", job_id, missing, job["tenant_id"])


class _TooFew(Exception):
    """Fewer workers are free than the job needs. Nothing was reserved."""


async def _allocate_next(database: Database, plans: Plans) -> bool:
    """Start the next pending job. Return False if there is none or it has to wait for workers."""
    following = await database.row("next_pending_job")
    if following is None or following["free"] < following["worker_count"]:
        return False
    # Before the transaction: inside it we would wait for a second connection while others wait for ours.
    _, plan = await plans.to_start(following["tenant_id"], following["workflow"], following["workflow_version"])
    return await database.run_in_transaction(partial(_allocate, following["id"], plan))


async def _allocate(job_id: JobId, plan: Plan, tx: Tx) -> bool:
    if not await tx.value("try_allocate"):
        return False
    following = await tx.row("next_pending_job")
    if following is None or following["free"] < following["worker_count"]:
        return False
    job = await tx.row("lock_job", job_id)
    if following["id"] != job_id or job is None or job["status"] != JobState.PENDING:
        return True  # another process was faster: look again
    try:
        async with tx.savepoint():
            await _start_runs(tx, plan, job)
            args = (job["id"], job["worker_count"], job["tenant_id"])
            if len(await tx.fetch("reserve_workers", *args)) < job["worker_count"]:
                raise _TooFew
            await _move(tx, job, JobEvent.ALLOCATE, SYSTEM, None)
    except _TooFew:
        return False
    return True


async def _start_runs(tx: Tx, plan: Plan, job: Row) -> None:
    """Start one run for each input, in the job's queue, requested by the job's requester."""
    await tx.fetch("add_job_queue", job["id"], job["tenant_id"])
    trigger = {"source": "job", "ref": str(job["id"])}
    news = [
        runs.NewRun(RunId(uuid7()), job["workflow"], job["workflow_version"], plan, input, trigger, plan.timeout)
        for input in orjson.loads(job["inputs"])
    ]
    await runs.start_many(tx, _asker(job), news, job_id=job["id"])


def _asker(job: Row) -> Principal:
    """Return the submitter of the job, with the rights they had then."""
    name, _, key_id = job["requested_by"].rpartition(":")
    facts = orjson.loads(job["requester"])
    return Principal(
        KeyId(UUID(key_id)), job["tenant_id"], facts["tenant"], name, Role(facts["role"]), job["workspace_id"],
        tuple(facts["groups"]),
    )  # fmt: skip


async def cancel_runs(database: Database, plans: Plans) -> int:
    """Cancel the runs of canceled jobs, each in its own transaction: a bad row stops no other."""
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
            break  # until the next sweep: a query now would return the same runs
    return total


async def _cancel_run(database: Database, plans: Plans, row: Row) -> None:
    async def work(tx: Tx) -> None:
        run = await open_run(tx, plans, row["tenant_id"], row["id"])
        if run.status in RUN.terminal or run.status == RunState.CANCELING or run.row.pending_commands:
            await put_back(tx, run)
            return
        data = {"reason_code": RunReason.CANCELED_BY_PARENT, "said": row["reason"]}
        await deliver_command(tx, run, RunCommand(CommandType.CANCEL, SYSTEM, data))

    await database.run_in_transaction(work)


# ---------------------------------------------------------------- transitions


def refused(state: JobState, event: JobEvent) -> Exception:
    metrics.refused.labels("job", state, event).inc()
    return JOB.refusal(state, event)


async def _move(tx: Tx, row: Row, event: JobEvent, actor: str, reason: str | None, *, done: int | None = None) -> Row:
    (moved,) = await _move_all(tx, [row], [reason], event, actor, done=done)
    return moved


async def _move_all(
    tx: Tx, rows: list[Row], reasons: list[str | None] | list[str], event: JobEvent, actor: str, *,
    done: int | None = None,
) -> list[Row]:  # fmt: skip
    """Apply one event to several jobs. It leads all of them to the same state."""
    (target,) = {JOB.move(JobState(row["status"]), event) for row in rows}
    moved = await tx.fetch(
        "move_jobs", [row["id"] for row in rows], [row["status"] for row in rows], list(reasons),
        target, event, actor, target == JobState.RUNNING, target in JOB.terminal, done,
    )  # fmt: skip
    tx.on_commit(partial(_tell, moved, target, actor))
    return moved


def _tell(moved: list[Row], target: JobState, actor: str) -> None:
    for row in moved:
        metrics.transition("job", row["from_state"], target).inc()
        metrics.was_in("job", row["from_state"], row["seconds_before"])
        log.info("job_transition", job_id=str(row["id"]), from_state=row["from_state"], to_state=target, actor=actor)
