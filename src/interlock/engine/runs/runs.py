"""Runs: start, read and cancel. `resume` continues a failed run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import asyncpg

from interlock.definition.plan import Plan, StepKind
from interlock.engine.access.principal import Principal
from interlock.engine.ingress.idempotency import KEEP_SECONDS, Request, count, says_in_flight
from interlock.engine.workflows import Plans
from interlock.engine.writing.deliver import deliver_command, go_on, put_back, save
from interlock.engine.writing.load import OpenRun, load_for_display, open_run
from interlock.errors import InvalidTransition, NotFound, RateLimited
from interlock.ids import RunId, TenantId, uuid7
from interlock.journal import CommandType, Journal, LeaseRelease, RunCommand, encode
from interlock.lifecycle import RUN, RunEvent, RunReason, RunState
from interlock.store import records, sql
from interlock.store.pool import Database, Executor, Tx
from interlock.store.records import RunDetails, RunRecord, RunToShow, entry_record
from interlock.telemetry import log, metrics

R = TypeVar("R", bound=RunRecord)


@dataclass(frozen=True, slots=True)
class NewRun:
    """What a caller asks for. The id is made with the request, so a repeated call creates the same run."""

    id: RunId
    workflow: str
    version: int
    plan: Plan
    input: Any
    trigger: dict[str, Any]
    deadline_seconds: float | None = None
    watch_seconds: float | None = None
    # The version is the newest one in this process's cache. The run starts only if there is no newer one.
    if_newest: bool = False


async def prepare(
    plans: Plans,
    principal: Principal,
    workflow: str,
    *,
    version: int | None = None,
    input: Any = None,
    trigger: dict[str, Any] | None = None,
    deadline_seconds: float | None = None,
    watch_seconds: float | None = None,
    remembered: bool = False,
    unread: bool = False,
) -> NewRun:
    """Return the run to start.

    With `remembered`, the newest version may come from a cache and be outdated; see `if_newest`. With `unread` the
    run starts even if its definition cannot be read here: see `Plans.to_start`.
    """
    newest = plans.newest(principal.tenant_id, workflow) if remembered and version is None else None
    find = plans.to_start if unread else plans.current
    found, plan = newest or await find(principal.tenant_id, workflow, version)
    trigger = trigger or {"source": "api", "ref": None}
    deadline = deadline_seconds if deadline_seconds is not None else plan.timeout
    return NewRun(RunId(uuid7()), workflow, found, plan, input, trigger, deadline, watch_seconds, newest is not None)


def starts_alone(plan: Plan) -> bool:
    """Return whether this is the ordinary case, which has a fast path: see `start_once`."""
    return starts_in_queue(plan) and plan.max_concurrency is None


def starts_in_queue(plan: Plan) -> bool:
    """Return whether its first step needs a worker. A run reaches a gate or a wait without one."""
    for_workers = (StepKind.TOOL, StepKind.FLOW)
    return plan.is_dynamic or any(step.kind in for_workers and not step.after for step in plan.steps)


async def start_many(
    tx: Executor, principal: Principal, news: Sequence[NewRun], *, may_wait: bool = True,
    **about: Any,
) -> datetime:  # fmt: skip
    """Start many runs in one statement. Each must start in the queue. They are durable when this returns.

    Without `may_wait`, RateLimited rolls the runs back, including their places in the rate limit, if one would wait
    for a later minute. The runs of a job wait in its queue, for its workers; a worker also opens a first step that is
    a gate.
    `about` are further columns of their rows.
    """
    started = await sql.start_runs(tx, runs=[new_row(principal, new, **about) for new in news])
    for new in news:
        _log_creation(tx, principal, new)
    if not may_wait:
        _refuse_to_wait(started.last_place, started.now)
    return started.now


def new_row(principal: Principal, new: NewRun, **about: Any) -> records.NewRun:
    """Return the row of a run that this principal starts."""
    about = {"workspace_id": principal.workspace_id} | about
    return records.NewRun(
        run_id=new.id, tenant_id=principal.tenant_id, workflow=new.workflow, workflow_version=new.version,
        has_concurrency_limit=new.plan.max_concurrency is not None, input=encode(new.input),
        trigger=encode(new.trigger), requested_by=principal.actor, requester=principal.facts,
        deadline_seconds=new.deadline_seconds, watch_seconds=new.watch_seconds, **about,
    )  # fmt: skip


async def start_once(
    database: Database, principal: Principal, new: NewRun, request: Request | None, answer: bytes
) -> datetime | None:
    """Store the run, the record of the request and its answer in one statement, which is its own transaction.

    Return the time of creation, or None if no run started: the request was made before, the workflow has a newer
    version than the cached one, or this is not the ordinary case.
    """
    try:
        with says_in_flight(request):
            created_at = await sql.start_run(
                database, run=new_row(principal, new), if_newest=new.if_newest, answer=answer,
                keep_seconds=KEEP_SECONDS, key=request.key if request else None,
                source=request.source if request else None, digest=request.hash if request else None,
            )  # fmt: skip
    except asyncpg.UniqueViolationError:
        return None  # an earlier try of the same call succeeded
    if created_at is not None:
        _log_creation(database, principal, new)
        if request:
            count(request.source, "miss")
    return created_at


def _log_creation(tx: Executor, principal: Principal, new: NewRun) -> None:
    key = new.trigger.get("idempotency_key")
    about = {"run_id": str(new.id), "workflow": new.workflow, "tenant": principal.tenant, "idempotency_key": key}
    tx.on_commit(lambda: log.info("run_created", **about))


async def start(tx: Tx, principal: Principal, new: NewRun) -> None:
    """Start one run. Its first step may be of any kind."""
    if starts_in_queue(new.plan):
        await start_many(tx, principal, [new])
    else:
        await start_waiting(tx, principal, new)


def _refuse_to_wait(turn: datetime | None, now: datetime) -> None:
    if turn is not None:
        seconds = math.ceil((turn - now).total_seconds())
        raise RateLimited(f"the tenant's next free place is in {seconds} s", retry_after=seconds)


async def start_waiting(tx: Tx, principal: Principal, new: NewRun, *, may_wait: bool = True) -> RunRecord:
    """Start a run whose first step is a gate or a wait. It reaches that step at once, without a worker."""
    run = await insert(tx, principal, new)
    if not may_wait:
        _refuse_to_wait(run.row.resume_at, run.row.now)
    return await begin(tx, run)


async def begin(tx: Tx, run: OpenRun) -> RunRecord:
    if run.journal is None:
        return run.row
    if run.row.resume_at is not None:
        # The rate limit gave it a place in a later minute. Then it goes through the queue, like any other run.
        return await save(tx, run, LeaseRelease(RunState.PENDING, resume_at=run.row.resume_at))
    return await go_on(tx, run)


async def insert(
    tx: Tx, principal: Principal, new: NewRun, resumed: RunRecord | None = None, session_run: int | None = None
) -> OpenRun:
    continued: dict[str, Any] = {} if resumed is None else {
        "workspace_id": resumed.workspace_id, "resumed_from": resumed.id,
        "resume_count": resumed.resume_count + 1, "root_id": resumed.root_id or resumed.id,
        "session_id": resumed.session_id, "session_run": session_run,
    }  # fmt: skip
    inserted = await sql.insert_run(tx, run=new_row(principal, new, **continued))
    row = await sql.lock_run(tx, tenant_id=principal.tenant_id, run_id=new.id)
    assert row is not None
    if inserted is None:  # an earlier try of the same call succeeded
        return OpenRun(row, None, None)
    journal = Journal(
        new.id, new.plan, input=new.input, trigger=new.trigger,
        run={"id": str(new.id), "workflow": new.workflow, "version": new.version}, requested_by=principal.actor,
    )  # fmt: skip
    data: dict[str, Any] = {"workflow": new.workflow, "version": new.version, "trigger": new.trigger}
    if resumed:
        data["resumed_from"] = str(resumed.id)
    journal.create(actor=principal.actor, data=data)
    journal.take_unsaved()  # the statement that inserts the run also writes its first entry
    _log_creation(tx, principal, new)
    return OpenRun(row, journal, None)


async def get(tx: Executor, principal: Principal, run_id: RunId) -> RunDetails:
    return _visible(await sql.get_run(tx, tenant_id=principal.tenant_id, run_id=run_id), principal, run_id)


async def get_with_journal(
    tx: Executor, plans: Plans, principal: Principal, run_id: RunId, *, only_settled: bool = False,
    until_ended: bool = False,
) -> tuple[RunToShow, Journal | None]:  # fmt: skip
    """Return the run with its journal.

    With `only_settled` the journal is None until the run has ended or waits for an approval. With `until_ended` as
    well, it is None until the run has ended.
    """
    found = await sql.get_run_to_show(
        tx, tenant_id=principal.tenant_id, run_id=run_id, with_journal=not only_settled, or_if_waiting=not until_ended
    )
    row = _visible(found, principal, run_id)
    if row.entries is None:
        return row, None
    return row, await load_for_display(tx, plans, row, [entry_record(entry) for entry in row.entries])


def _visible(row: R | None, principal: Principal, run_id: RunId) -> R:
    if row is None or not principal.reaches(row.workspace_id):
        raise NotFound(f"no run {run_id}", code="RUN_NOT_FOUND")
    return row


async def cancel(
    tx: Tx, plans: Plans, principal: Principal, run_id: RunId, *,
    reason: str | None = None, interrupt: bool = False,
) -> RunRecord:  # fmt: skip
    """Cancel at once if no worker holds the run, else through `canceling`. Canceling a canceled run changes nothing."""
    run = await open_run(tx, plans, principal.tenant_id, run_id, principal.workspace_id)
    if run.status in (RunState.CANCELING, RunState.CANCELED):
        return await put_back(tx, run)
    if run.status in RUN.terminal:
        raise refused(run.status, RunEvent.CANCEL)
    code = RunReason.INTERRUPTED if interrupt else RunReason.CANCELED_BY_USER
    data = {"reason_code": code, "said": reason}
    return await deliver_command(tx, run, RunCommand(CommandType.CANCEL, principal.actor, data))


async def time_out(tx: Tx, plans: Plans, tenant_id: TenantId, run_id: RunId) -> RunRecord:
    run = await open_run(tx, plans, tenant_id, run_id)
    overdue = run.row.deadline_at is not None and run.row.deadline_at <= run.row.now
    if not overdue or run.status in RUN.terminal or run.status == RunState.CANCELING or run.row.pending_commands:
        return await put_back(tx, run)
    data = {"deadline_at": run.row.deadline_at}
    return await deliver_command(tx, run, RunCommand(CommandType.TIME_OUT, "system:deadline", data))


def refused(state: RunState, event: str, why: str | None = None) -> InvalidTransition:
    metrics.refused.labels("run", state, event).inc()
    refusal = RUN.refusal(state, event)
    refusal.detail = why or refusal.detail
    return refusal
