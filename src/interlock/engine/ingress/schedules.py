"""Schedules: one run for each slot of a cron expression, regardless of which process starts it.

A slot is a moment in UTC. Its run, its idempotency record and the schedule's next slot commit together, so a process
that dies in between leaves the slot due for the next one, and a slot that was started is never started again.
"""

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

import orjson

from interlock.definition.cron import Cron, Missed
from interlock.engine.access import quotas
from interlock.engine.access.principal import Principal
from interlock.engine.access.tenants import principal_of
from interlock.engine.ingress import idempotency
from interlock.engine.ingress.idempotency import Request, StoredResponse
from interlock.engine.ingress.triggers import context_of
from interlock.engine.runs import runs
from interlock.engine.workflows import Plans
from interlock.errors import Conflict, Forbidden, InterlockError, Invalid, NotFound
from interlock.ids import RunId, uuid7
from interlock.journal import encode
from interlock.policy.roles import Permission
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log
from interlock.wire import Initiator, NewSchedule

_BATCH = 100
# The number of slots of one schedule that start together, so that a backlog of a year of minutes delays no other.
_MOST_SLOTS = 200
_SOURCE = "scheduler"


# ---------------------------------------------------------------- definitions


def read_cron(cron: str, timezone: str) -> Cron:
    try:
        return Cron.parse(cron, timezone)
    except ValueError as error:
        raise Invalid(str(error)) from None


async def add(tx: Tx, database: Database, principal: Principal, new: NewSchedule, cron: Cron) -> Row:
    await quotas.check_schedules(tx, database.settings, principal.tenant_id)
    following = cron.after(await tx.value("time_is"))
    row = await tx.row(
        "add_schedule", principal.tenant_id, new.name, principal.key_id, principal.workspace_id, cron.expression,
        new.timezone, new.workflow, encode(new.input), new.missed, following,
    )  # fmt: skip
    if row is None:
        there = await tx.row("schedule_named", principal.tenant_id, new.name, principal.workspace_id)
        raise Conflict(
            f"schedule {new.name} exists already; delete it first" if there else
            f"The name {new.name} is taken in another workspace. Choose another name.", code="SCHEDULE_EXISTS",
        )  # fmt: skip
    log.info("schedule_added", schedule=new.name, tenant=principal.tenant, by=principal.actor)
    return {**row, "key_name": principal.name}


async def named(tx: Tx | Database, principal: Principal, name: str) -> Row:
    row = await tx.row("schedule_named", principal.tenant_id, name, principal.workspace_id)
    if row is None:
        raise NotFound(f"no schedule {name}", code="SCHEDULE_NOT_FOUND")
    return row


async def listed(database: Database, principal: Principal, cursor: str | None, limit: int) -> list[Row]:
    return await database.fetch("list_schedules", principal.tenant_id, cursor, limit, principal.workspace_id)


async def pause(tx: Tx, principal: Principal, name: str) -> Row:
    await named(tx, principal, name)
    await tx.fetch("pause_schedule", principal.tenant_id, name, None, None)
    log.info("schedule_paused", schedule=name, tenant=principal.tenant, by=principal.actor)
    return await named(tx, principal, name)


async def resume(tx: Tx, principal: Principal, name: str) -> Row:
    """Resume the schedule from now on. Its running runs are not affected."""
    row = await named(tx, principal, name)
    following = read_cron(row["cron"], row["timezone"]).after(row["now"])
    place = (principal.tenant_id, name)
    await tx.fetch("resume_schedule", *place, following, principal.key_id)
    log.info("schedule_resumed", schedule=name, tenant=principal.tenant, by=principal.actor)
    return await named(tx, principal, name)


async def delete(tx: Tx, principal: Principal, name: str) -> Row:
    row = await named(tx, principal, name)
    await tx.fetch("delete_schedule", principal.tenant_id, name)
    log.info("schedule_deleted", schedule=name, tenant=principal.tenant, by=principal.actor)
    return row


async def prepare_now(
    database: Database, plans: Plans, principal: Principal, name: str
) -> tuple[Principal, runs.NewRun]:
    """Return a run outside the slots, and the caller as its requester, limited to the schedule's workspace."""
    row = await named(database, principal, name)
    context = context_of("schedule", name, Initiator.USER, user=principal.name, metadata={"schedule": name})
    who = principal.within(row["workspace_id"])
    return who, await runs.prepare(plans, who, row["workflow"], input=orjson.loads(row["input"]), trigger=context)


# ---------------------------------------------------------------- due slots


async def start_due(database: Database, plans: Plans) -> int:
    """Start the due slots, each schedule in its own transaction: a bad one stops no other.

    Any number of processes may do this at once.
    """
    started = 0
    if database.went_back:
        return 0
    for row in await database.fetch("due_schedules", _BATCH):
        try:
            started += await _start_one(database, plans, row)
        except Exception as error:
            log.error("schedule_failed", schedule=row["schedule"], tenant=row["tenant"], exc_info=error)
    return started


async def _start_one(database: Database, plans: Plans, row: Row) -> int:
    who = principal_of(row).within(row["place"])
    cron = Cron.parse(row["cron"], row["timezone"])
    slots = cron.due(row["next_at"], row["now"], Missed(row["missed"]), _MOST_SLOTS)
    try:
        news = await _runs_for(plans, who, row, slots)
    except (Forbidden, NotFound, Conflict) as problem:
        return await _give_up(database, row, problem)
    # Continue after the batch if there are more slots, else after now: slots that were left out stay left out.
    whole = len(slots) == _MOST_SLOTS
    following = cron.after(slots[-1] if whole else row["now"])

    async def work(tx: Tx) -> int:
        place = (who.tenant_id, row["schedule"])
        if await tx.value("lock_due_schedule", *place, row["next_at"]) is None:
            return 0
        started = await _start_slots(tx, database, who, row["schedule"], news)
        last = started[-1] if started else None
        await tx.fetch("advance_schedule", *place, following, last and last[0], last and last[1])
        return len(started)

    return await database.run_in_transaction(work)


async def _runs_for(
    plans: Plans, who: Principal, row: Row, slots: list[datetime]
) -> list[tuple[datetime, runs.NewRun]]:
    if row["revoked_at"] is not None:
        raise Forbidden("the key that it acts with was revoked; resume it with another")
    who.require(Permission.START)
    if not slots:
        return []
    one = await runs.prepare(plans, who, row["workflow"], input=orjson.loads(row["input"]), unread=True)
    return [(slot, replace(one, id=RunId(uuid7()), trigger=_context(row["schedule"], slot))) for slot in slots]


def _context(name: str, slot: datetime) -> dict[str, Any]:
    about = {"schedule": name, "slot": written(slot)}
    key = _key(name, slot)
    return context_of("schedule", name, Initiator.SYSTEM, user=None, metadata=about, idempotency_key=key)


def _key(name: str, slot: datetime) -> str:
    return f"{_SOURCE}:{name}:{written(slot)}"


def written(slot: datetime) -> str:
    return slot.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def _start_slots(
    tx: Tx, database: Database, who: Principal, name: str, news: list[tuple[datetime, runs.NewRun]]
) -> list[tuple[datetime, UUID]]:
    """Start the slots whose key was free, and return them."""
    if not news:
        return []
    asked = {_key(name, slot): (slot, new) for slot, new in news}
    requests = {key: Request(who.tenant_id, key, _SOURCE, Request.hash_of(key)) for key in asked}
    ours = await idempotency.begin_many(tx, database, list(requests.values()))
    tx.on_commit(partial(idempotency.count, _SOURCE, "hit", len(asked) - len(ours)))
    tx.on_commit(partial(idempotency.count, _SOURCE, "miss", len(ours)))
    begun = [(requests[key], *found) for key, found in asked.items() if key in ours]
    if not begun:
        return []
    mine = [new for _, _, new in begun]
    if runs.starts_in_queue(mine[0].plan):
        await runs.start_many(tx, who, mine)
    else:
        for new in mine:
            await runs.start_waiting(tx, who, new)
    answers = [StoredResponse(201, orjson.dumps({"run_id": str(new.id)}), new.id) for new in mine]
    await idempotency.complete_many(tx, [request for request, _, _ in begun], answers)
    return [(slot, new.id) for _, slot, new in begun]


async def _give_up(database: Database, row: Row, problem: InterlockError) -> int:
    """Pause the schedule and record why, because it would fail the same way every second."""
    place = (row["tenant_id"], row["schedule"])
    await database.fetch("pause_schedule", *place, problem.detail, row["next_at"])
    log.error("schedule_paused", schedule=row["schedule"], tenant=row["tenant"], error=problem.detail)
    return 0
