"""Sessions: conversations with an agent. A message is a run; a session has at most one that has not ended."""

from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

import orjson

from interlock.definition.agent import load_agent
from interlock.definition.plan import Plan
from interlock.engine.access.principal import Principal
from interlock.engine.workflows import Plans
from interlock.engine.writing.load import empty_journal, entry_of
from interlock.errors import Conflict, Invalid, NotFound
from interlock.ids import MessageId, RunId, SessionId, TenantId, uuid7
from interlock.journal import Journal, encode
from interlock.policy.roles import MAY, Permission
from interlock.store import sql
from interlock.store.pool import NO_TIMEOUT, Database, Row, Tx
from interlock.store.records import AnyRun, LockedRun, NewRun, RunFacts
from interlock.telemetry import log

_BATCH = 100
# How many earlier runs of a session a model sees.
_MEMORY = 50

# The built-in agent, used if a tenant has no agent of that name. It follows its input word by word, so that
# everything can be tried without a provider. Naming a model makes it an assistant.
BUILT_IN = "assistant"


def built_in(model: str | None) -> Plan:
    source: dict[str, Any] = {
        "name": BUILT_IN, "description": "The built-in assistant.", "model": model or "scripted", "tools": ["*"],
        "instructions": "You are a careful assistant. Use the tools that you have, and say plainly what you did.",
    }  # fmt: skip
    if model is None:
        source["script"] = [
            {
                "match": r"^\s*(?P<tool>[A-Za-z_][\w.-]*)\s*(?P<args>\{.*\})\s*$",
                "turns": [{"calls": [{"tool": "{tool}", "args": "{args}"}]}, {"say": "{result}"}],
            },
            {"turns": [{"say": "This is the scripted model: no provider is set up. Name a tool and its input, as in\n"
                               'shop.refund {{"charge": "ch_1", "amount": 120}}\nand I will call it.'}]},
        ]  # fmt: skip
    return load_agent(source)


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message that was accepted. `run` is its run, or None while it waits for the one before it."""

    session_id: SessionId
    message: Row
    run: LockedRun | None


async def agent_named(plans: Plans, principal: Principal, name: str | None, model: str | None) -> tuple[str, int, Plan]:
    """Return the newest version of the named agent. The default is the tenant's `assistant`, or the built-in one."""
    if name is None and not await plans.knows(principal.tenant_id, BUILT_IN):
        version, plan = await plans.publish(principal.tenant_id, built_in(model))
        return BUILT_IN, version, plan
    try:
        version, plan = await plans.current(principal.tenant_id, name or BUILT_IN, None)
    except NotFound:
        raise NotFound(f"no agent {name}; apply it first", code="AGENT_NOT_FOUND") from None
    if plan.agent is None:
        raise Invalid(f"{plan.name} is a {plan.kind}; a session needs an agent", code="NOT_AN_AGENT")
    return plan.name, version, plan


async def create(tx: Tx, principal: Principal, session_id: SessionId, agent: str, *, auto_approve: bool) -> Row:
    if auto_approve:
        principal.require(Permission.APPROVE)
    await tx.row(
        "create_session", session_id, principal.tenant_id, principal.workspace_id, agent,
        auto_approve, principal.actor,
    )  # fmt: skip
    return await get(tx, principal, session_id)


async def get(tx: Tx | Database, principal: Principal, session_id: SessionId) -> Row:
    row = await tx.row("get_session", principal.tenant_id, session_id)
    if row is None or not principal.reaches(row["workspace_id"]):
        raise NotFound(f"no session {session_id}", code="SESSION_NOT_FOUND")
    return row


async def send(
    tx: Tx, principal: Principal, session_id: SessionId, version: int, plan: Plan, *,
    message_id: MessageId, content: str, auto_approve: bool | None = None, queue: bool = False,
    idempotency_key: str | None = None,
) -> SentMessage:  # fmt: skip
    """Send a message. Its run begins at once, or after the current one if the sender accepts to wait.

    The run is known by the idempotency key of the request, whenever it begins.
    """
    session = await _lock(tx, principal.tenant_id, session_id)
    is_busy = await tx.value("session_is_busy", session_id)
    if is_busy and not queue:
        raise await _busy(tx, session_id)
    message = await tx.row(
        "add_message", session_id, message_id, principal.tenant_id, content,
        _lets_pass(principal, session, auto_approve), principal.actor, principal.facts,
        idempotency_key,
    )  # fmt: skip
    assert message is not None
    if is_busy:
        return SentMessage(session_id, message, None)
    return SentMessage(session_id, message, await _begin(tx, session, message, version, plan))


def _lets_pass(principal: Principal, session: Row, asked: bool | None) -> bool:
    """Return whether the agent's actions are approved in advance. That requires the right to approve."""
    if asked:
        principal.require(Permission.APPROVE)
    wanted = session["auto_approve"] if asked is None else asked
    return bool(wanted) and Permission.APPROVE in MAY[principal.role]


async def _begin(tx: Tx, session: Row, message: Row, version: int, plan: Plan) -> LockedRun:
    run_id = RunId(uuid7())
    key = message["idempotency_key"]
    trigger = {"source": "session", "ref": str(session["id"]), **({"idempotency_key": key} if key else {})}
    number = await sql.count_session_run(tx, session_id=session["id"])
    new = NewRun(
        run_id, session["tenant_id"], session["workspace_id"], plan.name, version, plan.max_concurrency is not None,
        encode({"message": message["content"]}), encode(trigger), message["sent_by"], message["sender"], plan.timeout,
        session_id=session["id"], session_run=number, auto_approve=message["auto_approve"],
    )  # fmt: skip
    await sql.start_runs(tx, runs=[new])
    await sql.answer_message(tx, message_id=message["id"], run_id=run_id, session_id=session["id"])
    row = await sql.lock_run(tx, tenant_id=session["tenant_id"], run_id=run_id)
    assert row is not None
    about = {"run_id": str(run_id), "workflow": plan.name, "tenant": session["tenant"], "idempotency_key": key}
    tx.on_commit(lambda: log.info("run_created", **about, session=str(session["id"])))
    return row


async def lock_idle(tx: Tx, tenant_id: TenantId, session_id: SessionId) -> Row:
    """Lock the session for a new run. Raise if it has an open run, which a constraint of the row also prevents."""
    session = await _lock(tx, tenant_id, session_id)
    if await tx.value("session_is_busy", session_id):
        raise await _busy(tx, session_id)
    return session


async def _lock(tx: Tx, tenant_id: TenantId, session_id: SessionId) -> Row:
    session = await tx.row("lock_session", tenant_id, session_id)
    if session is None:
        raise NotFound(f"no session {session_id}", code="SESSION_NOT_FOUND")
    return session


async def _busy(tx: Tx, session_id: SessionId) -> Conflict:
    active = await tx.value("active_run_of_session", session_id)
    what = f"run {active} of this session has not ended" if active else "other messages of this session wait"
    return Conflict(
        f"{what}; wait, interrupt it, or send with queue: true", code="SESSION_BUSY",
        run_id=str(active) if active else None,
    )  # fmt: skip


async def start_waiting(database: Database, plans: Plans) -> int:
    """Begin the runs of messages that waited for another run to end. Any number of processes may do so at once."""
    found = await database.fetch("sessions_with_waiting", _BATCH)
    for row in found:
        try:
            await database.run_in_transaction(partial(_start_next, plans, row))
        except Exception as error:
            log.error("message_waits", session_id=str(row["id"]), exc_info=error)
    return len(found)


async def _start_next(plans: Plans, row: Row, tx: Tx) -> None:
    session = await _lock(tx, row["tenant_id"], row["id"])
    message = await tx.row("next_message", row["id"])
    if message is None or await tx.value("active_run_of_session", row["id"]):
        return  # another process was faster
    version, plan = await plans.to_start(row["tenant_id"], session["agent"], None, tx)
    await _begin(tx, session, message, version, plan)


async def forget(database: Database, floor: UUID) -> None:
    """Delete the messages of runs below `floor`, whose journals are dropped, and sessions that are then empty."""
    for statement in ("forget_said", "forget_sessions"):
        while len(await database.fetch(statement, floor, _BATCH)) == _BATCH:
            pass


async def memory(database: Database, run: AnyRun, plan: Plan) -> list[tuple[str, Journal]]:
    """Return the messages of the session before this run, oldest first, each with the journal of its run."""
    if run.session_id is None or run.session_run is None:
        return []
    waiting = database.patiently(NO_TIMEOUT)
    before = await sql.runs_before(waiting, session_id=run.session_id, session_run=run.session_run, most=_MEMORY)
    entries = await sql.journal_of(waiting, run_ids=[each.id for each in before])
    journals = {each.id: empty_journal(each, plan) for each in before}
    for entry in entries:
        journals[entry.run_id].apply(entry_of(entry))
    # A run whose entries were dropped contributes nothing.
    return [(message_of(each), journals[each.id]) for each in before if journals[each.id].seq > 0]


def message_of(run: RunFacts) -> str:
    """Return the message for an agent's run, or the run's input if a workflow or a schedule started it."""
    given = orjson.loads(run.input or "null")
    if isinstance(given, dict) and isinstance(given.get("message"), str):
        return str(given["message"])
    return given if isinstance(given, str) else encode(given)
