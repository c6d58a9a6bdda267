"""Runs: start, read and cancel. `resume` continues a failed run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from interlock.definition.plan import Plan, StepKind
from interlock.engine.access.principal import Principal
from interlock.engine.ingress.idempotency import KEEP_SECONDS, Request, StoredResponse, count, says_in_flight
from interlock.engine.workflows import Plans
from interlock.engine.writing.run_commands import (
    OpenRun,
    deliver_command,
    journal_to_show,
    move_on,
    open_run,
    put_back,
    save,
)
from interlock.errors import InvalidTransition, NotFound, RateLimited
from interlock.ids import uuid7
from interlock.journal import CommandType, Journal, LeaseRelease, RunCommand, encode
from interlock.lifecycle import RUN, RunEvent, RunReason, RunState
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log, metrics


@dataclass(frozen=True, slots=True)
class NewRun:
    """What a caller asks for. The id is made with the request, so a repeated call creates the same run."""

    id: UUID
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
    return NewRun(uuid7(), workflow, found, plan, input, trigger, deadline, watch_seconds, newest is not None)


def starts_alone(plan: Plan) -> bool:
    """Return whether this is the ordinary case, which has a fast path: see `start_once`."""
    return starts_in_queue(plan) and plan.max_concurrency is None


def starts_in_queue(plan: Plan) -> bool:
    """Return whether its first step needs a worker. A run reaches a gate or a wait without one."""
    for_workers = (StepKind.TOOL, StepKind.FLOW)
    return plan.is_dynamic or any(step.kind in for_workers and not step.after for step in plan.steps)


async def start_many(
    tx: Tx | Database, database: Database, principal: Principal, news: Sequence[NewRun], *, may_wait: bool = True,
    job_id: UUID | None = None,
) -> datetime:  # fmt: skip
    """Start many runs in one statement. Each must start in the queue. They are durable when this returns.

    Without `may_wait`, RateLimited rolls the runs back, including their places in the rate limit, if one would wait
    for a later minute. The runs of a job wait in its lane, for its workers; a worker also opens a first step that is
    a gate.
    """
    row = await tx.row(
        "start_runs", database.clock(), [n.id for n in news], [principal.tenant_id] * len(news),
        [principal.workspace_id] * len(news), [n.workflow for n in news], [n.version for n in news],
        [encode(n.input) for n in news], [encode(n.trigger) for n in news], [principal.actor] * len(news),
        [n.deadline_seconds for n in news], [n.watch_seconds for n in news], [principal.facts] * len(news),
        [n.plan.max_concurrency is not None for n in news], [job_id] * len(news),
    )  # fmt: skip
    assert row is not None
    for new in news:
        _log_creation(tx, principal, new)
    if not may_wait:
        _refuse_to_wait(row["turn"], row["now"])
    created_at: datetime = row["now"]
    return created_at


async def start_once(
    database: Database, principal: Principal, new: NewRun, request: Request | None, answer: str
) -> StoredResponse | None:
    """Store the run, the record of the request and its answer in one statement, which is its own transaction.

    The statement writes the time of creation into the answer, wherever that says `created at ID`. Returns None if no
    run started: the request was made before, the workflow has a newer version than the cached one, or this is not the
    ordinary case.
    """
    record = (request.key, request.source, request.hash, KEEP_SECONDS) if request else (None,) * 4
    try:
        with says_in_flight(request):
            row = await database.row(
                "start_run", database.clock(), new.id, principal.tenant_id, principal.workspace_id, new.workflow,
                new.version, new.if_newest, encode(new.input), encode(new.trigger), principal.actor,
                new.deadline_seconds, new.watch_seconds, principal.facts, *record, answer,
            )  # fmt: skip
    except asyncpg.UniqueViolationError:
        return None  # an earlier try of the same call succeeded
    if row is None:
        return None
    _log_creation(database, principal, new)
    if request:
        count(request.source, "miss")
    return StoredResponse(201, row["answer"], new.id)


def _log_creation(tx: Tx | Database, principal: Principal, new: NewRun) -> None:
    key = new.trigger.get("idempotency_key")
    about = {"run_id": str(new.id), "workflow": new.workflow, "tenant": principal.tenant, "idempotency_key": key}
    tx.on_commit(lambda: log.info("run_created", **about))


async def start(tx: Tx, database: Database, principal: Principal, new: NewRun) -> None:
    """Start one run. Its first step may be of any kind."""
    if starts_in_queue(new.plan):
        await start_many(tx, database, principal, [new])
    else:
        await start_waiting(tx, database, principal, new)


def _refuse_to_wait(turn: datetime | None, now: datetime) -> None:
    if turn is not None:
        seconds = math.ceil((turn - now).total_seconds())
        raise RateLimited(f"the tenant's next free place is in {seconds} s", retry_after=seconds)


async def start_waiting(tx: Tx, database: Database, principal: Principal, new: NewRun, *, may_wait: bool = True) -> Row:
    """Start a run whose first step is a gate or a wait. It reaches that step at once, without a worker."""
    run = await insert(tx, database, principal, new)
    if not may_wait:
        _refuse_to_wait(run.row["wake_at"], run.now)
    return await begin(tx, database, run)


async def begin(tx: Tx, database: Database, run: OpenRun) -> Row:
    if run.journal is None:
        return run.row
    if run.row["wake_at"] is not None:
        # The rate limit gave it a place in a later minute. Then it goes through the queue, like any other run.
        return await save(tx, database, run, LeaseRelease(RunState.PENDING, wake_at=run.row["wake_at"]))
    return await move_on(tx, database, run)


async def insert(tx: Tx, database: Database, principal: Principal, new: NewRun, resumed: Row | None = None) -> OpenRun:
    row = await tx.row(
        "insert_run", database.clock(), new.id, principal.tenant_id,
        resumed["workspace_id"] if resumed else principal.workspace_id, new.workflow, new.version,
        encode(new.input), encode(new.trigger), principal.actor, new.deadline_seconds, new.watch_seconds,
        resumed["id"] if resumed else None, resumed["resume_count"] + 1 if resumed else 0,
        principal.facts, new.plan.max_concurrency is not None,
        (resumed["root_id"] or resumed["id"]) if resumed else None,
    )  # fmt: skip
    if row is None:  # an earlier try of the same call succeeded
        again = await tx.row("lock_run", database.clock(), principal.tenant_id, new.id)
        assert again is not None
        return OpenRun(again, again["now"], None, None)
    journal = Journal(
        new.id, new.plan, input=new.input, trigger=new.trigger,
        run={"id": str(new.id), "workflow": new.workflow, "version": new.version}, requested_by=principal.actor,
    )  # fmt: skip
    data: dict[str, Any] = {"workflow": new.workflow, "version": new.version, "trigger": new.trigger}
    if resumed:
        data["resumed_from"] = str(resumed["id"])
    journal.create(actor=principal.actor, data=data)
    _log_creation(tx, principal, new)
    return OpenRun(row, row["created_at"], journal, None)


async def get(tx: Tx | Database, principal: Principal, run_id: UUID) -> Row:
    return _visible(await tx.row("get_run", principal.tenant_id, run_id), principal, run_id)


async def get_with_journal(
    tx: Tx | Database, plans: Plans, principal: Principal, run_id: UUID, *, only_settled: bool = False,
    until_ended: bool = False,
) -> tuple[Row, Journal | None]:  # fmt: skip
    """Return the run with its journal.

    With `only_settled` the journal is None until the run has ended or waits for an approval. With `until_ended` as
    well, it is None until the run has ended.
    """
    found = await tx.row("get_run_to_show", principal.tenant_id, run_id, not only_settled, not until_ended)
    row = _visible(found, principal, run_id)
    if row["entries"] is None:
        return row, None
    return row, await journal_to_show(tx, plans, row, row["entries"])


def _visible(row: Row | None, principal: Principal, run_id: UUID) -> Row:
    if row is None or not principal.reaches(row["workspace_id"]):
        raise NotFound(f"no run {run_id}", code="RUN_NOT_FOUND")
    return row


async def cancel(
    tx: Tx, database: Database, plans: Plans, principal: Principal, run_id: UUID, *,
    reason: str | None = None, interrupt: bool = False,
) -> Row:  # fmt: skip
    """Cancel at once if no worker holds the run, else through `canceling`. Canceling a canceled run changes nothing."""
    run = await open_run(tx, database, plans, principal.tenant_id, run_id, principal.workspace_id)
    if run.status in (RunState.CANCELING, RunState.CANCELED):
        return await put_back(tx, run)
    if run.status in RUN.terminal:
        raise refused(run.status, RunEvent.CANCEL)
    code = RunReason.INTERRUPTED if interrupt else RunReason.CANCELED_BY_USER
    data = {"reason_code": code, "said": reason}
    return await deliver_command(tx, database, run, RunCommand(CommandType.CANCEL, principal.actor, data))


async def time_out(tx: Tx, database: Database, plans: Plans, tenant_id: UUID, run_id: UUID) -> Row:
    run = await open_run(tx, database, plans, tenant_id, run_id)
    overdue = run.row["deadline_at"] is not None and run.row["deadline_at"] <= run.now
    if not overdue or run.status in RUN.terminal or run.status == RunState.CANCELING or run.row["inbox"]:
        return await put_back(tx, run)
    data = {"deadline_at": run.row["deadline_at"]}
    return await deliver_command(tx, database, run, RunCommand(CommandType.TIME_OUT, "system:deadline", data))


def refused(state: RunState, event: str, why: str | None = None) -> InvalidTransition:
    metrics.refused.labels("run", state, event).inc()
    refusal = RUN.refusal(state, event)
    refusal.detail = why or refusal.detail
    return refusal
