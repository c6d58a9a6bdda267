"""Triggers: deliveries and commands from outside, each of which starts one run or none.

A trigger acts with the key of whoever applied it: its runs have that key's role and groups, and its owner cannot
approve what they ask for. If the key is revoked, the trigger starts nothing until somebody applies it again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson

from interlock.definition.trigger import Event, Trigger, TriggerKind, Unfit, load
from interlock.engine import idempotency, runs
from interlock.engine.idempotency import Answer, Request
from interlock.engine.principal import Principal
from interlock.engine.secrets import Secrets
from interlock.engine.signatures import why_unfit_for_standard
from interlock.engine.tenants import principal_of
from interlock.engine.workflows import Plans
from interlock.errors import Conflict, Invalid, NotFound, Problem, Terminal, Unavailable
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log
from interlock.wire import Initiator

# GitHub gives up after ten seconds, most others later.
_PATIENCE_SECONDS = 4.0
# GitHub redelivers what is up to three days old; nobody keeps trying for a week.
_REMEMBER_SECONDS = 7 * 86400.0
# Within this time the same event of a pull request is one event, also under two ids.
_TWIN_SECONDS = 5.0


# ---------------------------------------------------------------- keeping them


async def check(database: Database, plans: Plans, principal: Principal, trigger: Trigger) -> None:
    """What can be known before the first delivery: its workflow is there, and its secret can be used."""
    await plans.current(principal.tenant_id, trigger.workflow, None)
    if trigger.secret is None:
        return
    try:
        opened = await Secrets(database).open(principal.tenant_id, [trigger.secret])
    except Terminal as error:
        raise Invalid(str(error), code="TRIGGER_SECRET_MISSING") from None
    is_standard = trigger.kind is TriggerKind.WEBHOOK and trigger.header is None
    if is_standard and (why := why_unfit_for_standard(opened.values[trigger.secret])):
        raise Invalid(f"secret {trigger.secret}: {why}; for a plain HMAC name its `header`")


async def apply(tx: Tx, database: Database, principal: Principal, trigger: Trigger) -> Row:
    before = await tx.row("trigger_named", principal.tenant_id, trigger.name, None)
    if before is not None and not principal.reaches(before["workspace_id"]):
        raise Conflict(f"the name {trigger.name} is taken in another workspace", code="TRIGGER_EXISTS")
    try:
        row = await tx.row(
            "put_trigger", database.clock(), principal.tenant_id, trigger.name, trigger.kind, trigger.command,
            principal.key_id, principal.workspace_id, trigger.workflow, orjson.dumps(trigger.source).decode(),
            trigger.digest,
        )  # fmt: skip
    except asyncpg.UniqueViolationError:
        raise Conflict(f"another trigger has the command {trigger.command}", code="TRIGGER_EXISTS") from None
    assert row is not None
    log.info("trigger_applied", trigger=trigger.name, tenant=principal.tenant, by=principal.actor)
    return {**row, "key_name": principal.name}


async def named(database: Database, principal: Principal, name: str) -> Row:
    row = await database.row("trigger_named", principal.tenant_id, name, principal.workspace_id)
    if row is None:
        raise _unknown(name)
    return row


async def listed(database: Database, principal: Principal, cursor: str | None, limit: int) -> list[Row]:
    return await database.fetch("list_triggers", principal.tenant_id, cursor, limit, principal.workspace_id)


async def delete(tx: Tx, principal: Principal, name: str) -> Row:
    row = await tx.row("delete_trigger", principal.tenant_id, name, principal.workspace_id)
    if row is None:
        raise _unknown(name)
    log.info("trigger_deleted", trigger=name, tenant=principal.tenant, by=principal.actor)
    return row


def _unknown(name: str) -> NotFound:
    return NotFound(f"no trigger {name}", code="TRIGGER_NOT_FOUND")


# ---------------------------------------------------------------- a delivery


@dataclass(frozen=True, slots=True)
class Receiver:
    """A trigger and whom it acts for; `secret` is what its deliveries are signed with."""

    trigger: Trigger
    who: Principal
    secret: str
    is_revoked: bool


async def receiver(database: Database, tenant: str, kind: TriggerKind, name: str) -> Receiver:
    """The same answer for a tenant, a name or a kind that there is not."""
    row = await database.row("trigger_for_delivery", tenant, name, kind)
    if row is None:
        raise _unknown(name)
    trigger, who = load(orjson.loads(row["source"])), principal_of(row)
    assert trigger.secret is not None
    try:
        opened = await Secrets(database).open(who.tenant_id, [trigger.secret])
    except Terminal as error:
        log.error("trigger_without_secret", trigger=name, tenant=tenant, error=str(error))
        raise Unavailable("the trigger's secret cannot be opened here", code="TRIGGER_NOT_READY") from None
    return Receiver(trigger, who, opened.values[trigger.secret], row["revoked_at"] is not None)


async def deliver(database: Database, plans: Plans, to: Receiver, event: Event, body: bytes) -> Answer | str:
    """The answer that every delivery of the event gets, or why it starts nothing. The signature was checked before.

    An event that is ignored leaves no trace: when the trigger was changed it can be delivered again.
    """
    trigger, who, key = to.trigger, to.who, f"{event.source}:{event.id}:{to.trigger.name}"
    prepared: runs.NewRun | Problem
    try:
        if (reason := trigger.ignores(event)) is not None:
            log.info("delivery_ignored", trigger=trigger.name, event_type=event.name, reason=reason)
            return reason
        prepared = await _prepare(plans, to, event, key)
    except (Problem, Unfit) as error:
        # Raised under the key: a repetition of what went well before must get its answer all the same.
        prepared = error if isinstance(error, Problem) else Invalid(str(error), code="TRIGGER_UNFIT")

    async def work(tx: Tx) -> Answer:
        if isinstance(prepared, Problem):
            raise prepared
        twin = _twin(to, event)
        if twin is not None and (seen := await idempotency.begin(tx, database, twin)):
            log.info("idempotency_hit", key=twin.key, cached_run_id=str(seen["run_id"]))
            return Answer(seen["response_status"], seen["response_body"], seen["run_id"], replayed=True)
        await runs.start(tx, database, who, prepared)
        started = {"outcome": "started", "run_id": str(prepared.id), "workflow": prepared.workflow, "reason": None}
        answer = Answer(202, orjson.dumps(started), prepared.id)
        if twin is not None:
            await idempotency.complete(tx, twin, answer)
        return answer

    request = Request(
        who.tenant_id, key, event.source, Request.hash_of(event.type, body), remember_seconds=_REMEMBER_SECONDS,
    )  # fmt: skip
    return await idempotency.once(database, request, work, patience=_PATIENCE_SECONDS)


async def _prepare(plans: Plans, to: Receiver, event: Event, key: str) -> runs.NewRun:
    if to.is_revoked:
        raise Conflict(
            f"the key that trigger {to.trigger.name} acts with was revoked; apply it again with another",
            code="TRIGGER_KEY_REVOKED",
        )
    context = context_of(
        event.source, event.id, Initiator.WEBHOOK, user=_sender(event),
        metadata={"trigger": to.trigger.name, **_about(event)},
        external_event={"event_type": event.name, "source": event.source, "event_id": event.id}, idempotency_key=key,
    )  # fmt: skip
    return await runs.prepare(plans, to.who, to.trigger.workflow, input=to.trigger.input_for(event), trigger=context)


def context_of(source: str, ref: str | None, initiator: Initiator, **more: Any) -> dict[str, Any]:
    """What a run keeps about how it came to be."""
    return {"source": source, "ref": ref, "initiator": initiator, **more}


# ---------------------------------------------------------------- GitHub


def github_event(headers: Mapping[str, str], payload: Any) -> Event:
    kind, delivery = headers.get("x-github-event"), headers.get("x-github-delivery")
    if not kind or not delivery or len(delivery) > 255:
        raise Invalid("X-GitHub-Event and X-GitHub-Delivery are to be there, as GitHub sends them")
    action = _at(payload, "action")
    return Event("github", kind, payload, headers, action if isinstance(action, str) else None, delivery)


def _twin(to: Receiver, event: Event) -> Request | None:
    """The key of what happened to a pull request, under whichever id it is told.

    Who pushes or comments twice within the time did two things: what it is about is in the key.
    """
    if event.source != "github":
        return None
    number = _at(event.payload, "pull_request", "number")
    if number is None and _at(event.payload, "issue", "pull_request") is not None:
        number = _at(event.payload, "issue", "number")
    if number is None:
        return None
    about = [_at(event.payload, *path) for path in _SUBJECTS]
    subject = Request.hash_of(*(str(part) for part in about if part is not None)).hex()[:16]
    repository = _at(event.payload, "repository", "full_name")
    key = f"github:{repository}#{number}:{event.name}:{subject}:{to.trigger.name}"
    return Request(to.who.tenant_id, key, "github", Request.hash_of(key), keep_seconds=_TWIN_SECONDS)


_SUBJECTS = (
    ("pull_request", "head", "sha"),
    ("comment", "id"),
    ("review", "id"),
    ("label", "name"),
    ("requested_reviewer", "login"),
    ("requested_team", "slug"),
    ("assignee", "login"),
)


def _sender(event: Event) -> str | None:
    login = _at(event.payload, "sender", "login") if event.source == "github" else None
    return login if isinstance(login, str) else None


def _about(event: Event) -> dict[str, Any]:
    if event.source != "github":
        return {}
    found = {
        "repository": _at(event.payload, "repository", "full_name"),
        "number": _at(event.payload, "pull_request", "number") or _at(event.payload, "issue", "number"),
        "ref": _at(event.payload, "ref"),
    }
    return {name: value for name, value in found.items() if isinstance(value, str | int)}


def _at(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


# ---------------------------------------------------------------- trying one, and commands


def try_out(trigger: Trigger, event: Event) -> dict[str, Any]:
    """What the event would start, or why nothing. Nothing is done."""
    try:
        reason = trigger.ignores(event)
        made = trigger.input_for(event) if reason is None else None
    except Unfit as error:
        reason, made = str(error), None
    return {"starts": made is not None, "workflow": trigger.workflow, "input": made, "reason": reason}


async def of_command(database: Database, who: Principal, command: str) -> tuple[Principal, Trigger] | None:
    """What the command stands for, and whoever typed it as they ask for that: in the trigger's workspace.

    Of another workspace's there is none for them: who defined it chose what it starts, and they would start it.
    """
    row = await database.row("trigger_of_command", who.tenant_id, command, who.workspace_id)
    if row is None:
        return None
    return who.within(row["workspace_id"] or who.workspace_id), load(orjson.loads(row["source"]))
