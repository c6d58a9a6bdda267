"""Triggers: deliveries and commands from other systems, each of which starts one run or none.

A trigger acts with the key that applied it: its runs have that key's role and groups, and the key's owner cannot
approve what they ask for. If the key is revoked, the trigger starts nothing until it is applied again.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg
import orjson

from interlock.definition.trigger import IncomingEvent, TriggerDefinition, TriggerKind, UnusableEvent, load
from interlock.engine.access.principal import Principal
from interlock.engine.access.secrets import Secrets, Use
from interlock.engine.access.tenants import principal_of
from interlock.engine.expression_answers import here_or_elsewhere
from interlock.engine.ingress import idempotency
from interlock.engine.ingress.idempotency import Request, StoredResponse
from interlock.engine.ingress.trigger_events import ignored, input_of, trial_event
from interlock.engine.ingress.webhook_signatures import why_unfit_for_standard
from interlock.engine.runs import runs
from interlock.engine.workflows import Plans
from interlock.errors import Conflict, InterlockError, Invalid, NotFound, Terminal, Unavailable
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log
from interlock.wire import Initiator

# GitHub gives up after ten seconds, most others later.
_PATIENCE_SECONDS = 4.0
# GitHub redelivers events that are up to three days old. No sender keeps trying for a week.
_REMEMBER_SECONDS = 7 * 86400.0
# Within this time the same event of a pull request is one event, even under two ids.
_TWIN_SECONDS = 5.0
# Error codes that refuse a delivery. The sender receives the same message.
_REFUSES_DELIVERIES = ("TRIGGER_UNFIT", "COMPUTATION_STOPPED", "TRIGGER_KEY_REVOKED", "WORKFLOW_NOT_FOUND")


# ---------------------------------------------------------------- definitions


async def check(database: Database, plans: Plans, principal: Principal, trigger: TriggerDefinition) -> None:
    """Check a trigger before its first delivery: its workflow exists, and its secret can be used."""
    await plans.current(principal.tenant_id, trigger.workflow, None)
    if trigger.secret is None:
        return
    try:
        opened = await Secrets(database).open(principal.tenant_id, [trigger.secret], Use(principal.workspace_id))
    except Terminal as error:
        raise Invalid(str(error), code="TRIGGER_SECRET_MISSING") from None
    is_standard = trigger.kind is TriggerKind.WEBHOOK and trigger.header is None
    if is_standard and (why := why_unfit_for_standard(opened.values[trigger.secret])):
        raise Invalid(f"secret {trigger.secret}: {why}; for a plain HMAC name its `header`")


async def apply(tx: Tx, principal: Principal, trigger: TriggerDefinition) -> Row:
    before = await tx.row("trigger_named", principal.tenant_id, trigger.name, None)
    if before is not None and not principal.reaches(before["workspace_id"]):
        raise Conflict(f"the name {trigger.name} is taken in another workspace", code="TRIGGER_EXISTS")
    try:
        row = await tx.row(
            "put_trigger", principal.tenant_id, trigger.name, trigger.kind, trigger.command,
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


# ---------------------------------------------------------------- deliveries


@dataclass(frozen=True, slots=True)
class Receiver:
    """A trigger and the principal it acts for. `secret` signs its deliveries."""

    trigger: TriggerDefinition
    who: Principal
    secret: str
    is_revoked: bool


# The secret used to check a delivery to a trigger that does not exist.
NO_SECRET = secrets.token_urlsafe(32)
_NAME = re.compile("[a-z0-9][a-z0-9_.-]{0,99}")


async def receiver(database: Database, tenant: str, kind: TriggerKind, name: str) -> Receiver | None:
    """Return the trigger with its secret, or None for a tenant, a name or a kind that does not exist.

    Both cases ask the database the same two questions, so that the response time does not reveal which one it was.
    """
    known = _NAME.fullmatch(tenant) and _NAME.fullmatch(name)
    row = await database.row("trigger_for_delivery", *((tenant, name) if known else ("", "")), kind)
    if row is None:
        await database.fetch("sealed_secrets", UUID(int=0), [])
        return None
    trigger, who = load(row["source"]), principal_of(row)
    assert trigger.secret is not None
    try:
        opened = await Secrets(database).open(who.tenant_id, [trigger.secret], Use(who.workspace_id))
    except Terminal as error:
        log.error("trigger_without_secret", trigger=name, tenant=tenant, error=str(error))
        raise Unavailable("the trigger's secret cannot be opened here", code="TRIGGER_NOT_READY") from None
    return Receiver(trigger, who, opened.values[trigger.secret], row["revoked_at"] is not None)


async def deliver(
    database: Database, plans: Plans, to: Receiver, event: IncomingEvent, body: bytes
) -> StoredResponse | str:
    """Return the answer that every delivery of the event gets, or why it starts nothing.

    The caller has checked the signature.

    An ignored event leaves no record, so it can be delivered again after the trigger was changed.
    """
    trigger, who, key = to.trigger, to.who, f"{event.source}:{event.id}:{to.trigger.name}"
    prepared: runs.NewRun | InterlockError
    try:
        if (reason := await here_or_elsewhere(who.tenant_id, ignored, trigger, event)) is not None:
            log.info("delivery_ignored", trigger=trigger.name, event_type=event.name, reason=reason)
            return reason
        prepared = await _prepare(plans, to, event, key)
    except (InterlockError, UnusableEvent) as error:
        # Raised while holding the key, because a repetition of a successful delivery must still get its first answer.
        prepared = error if isinstance(error, InterlockError) else Invalid(str(error), code="TRIGGER_UNFIT")

    async def work(tx: Tx) -> StoredResponse:
        if isinstance(prepared, InterlockError):
            raise prepared
        twin = _twin(to, event)
        if twin is not None and (seen := await idempotency.begin(tx, database, twin)):
            log.info("idempotency_hit", key=twin.key, cached_run_id=str(seen["run_id"]))
            return StoredResponse(seen["response_status"], seen["response_body"], seen["run_id"], replayed=True)
        await runs.start(tx, who, prepared)
        started = {"outcome": "started", "run_id": str(prepared.id), "workflow": prepared.workflow, "reason": None}
        answer = StoredResponse(202, orjson.dumps(started), prepared.id)
        if twin is not None:
            await idempotency.complete(tx, twin, answer)
        return answer

    request = Request(
        who.tenant_id, key, event.source, Request.hash_of(event.type, body), remember_seconds=_REMEMBER_SECONDS,
    )  # fmt: skip
    return await idempotency.once(database, request, work, patience=_PATIENCE_SECONDS)


async def _prepare(plans: Plans, to: Receiver, event: IncomingEvent, key: str) -> runs.NewRun:
    _require_key(to.trigger, is_revoked=to.is_revoked)
    context = context_of(
        event.source, event.id, Initiator.WEBHOOK, user=_sender(event),
        metadata={"trigger": to.trigger.name, **_about(event)},
        external_event={"event_type": event.name, "source": event.source, "event_id": event.id}, idempotency_key=key,
    )  # fmt: skip
    given = await here_or_elsewhere(to.who.tenant_id, input_of, to.trigger, event)
    return await runs.prepare(plans, to.who, to.trigger.workflow, input=given, trigger=context)


def _require_key(trigger: TriggerDefinition, *, is_revoked: bool) -> None:
    if is_revoked:
        raise Conflict(
            f"the key that trigger {trigger.name} acts with was revoked; apply it again with another",
            code="TRIGGER_KEY_REVOKED",
        )


def context_of(source: str, ref: str | None, initiator: Initiator, **more: Any) -> dict[str, Any]:
    """Return the context that a run stores about its origin."""
    return {"source": source, "ref": ref, "initiator": initiator, **more}


# ---------------------------------------------------------------- GitHub


def _twin(to: Receiver, event: IncomingEvent) -> Request | None:
    """Return the key of an event of a pull request, independent of the id under which GitHub delivers it.

    The key has everything that distinguishes two events: two pushes, edits or resolved threads within the time are
    two.
    """
    if event.source != "github":
        return None
    number = _at(event.payload, "pull_request", "number")
    if number is None and _at(event.payload, "issue", "pull_request") is not None:
        number = _at(event.payload, "issue", "number")
    if number is None:
        return None
    about = [_at(event.payload, *path) for path in _SUBJECTS]
    subject = Request.hash_of(orjson.dumps(about, option=orjson.OPT_SORT_KEYS)).hex()[:16]
    repository = _at(event.payload, "repository", "full_name")
    key = f"github:{repository}#{number}:{event.name}:{subject}:{to.trigger.name}"
    return Request(to.who.tenant_id, key, "github", Request.hash_of(key), keep_seconds=_TWIN_SECONDS)


_SUBJECTS = (
    ("action",),
    ("pull_request", "head", "sha"),
    ("pull_request", "updated_at"),
    ("issue", "updated_at"),
    ("changes",),
    ("thread", "node_id"),
    ("comment", "id"),
    ("comment", "updated_at"),
    ("review", "id"),
    ("label", "name"),
    ("requested_reviewer", "login"),
    ("requested_team", "slug"),
    ("assignee", "login"),
)


def _sender(event: IncomingEvent) -> str | None:
    login = _at(event.payload, "sender", "login") if event.source == "github" else None
    return login if isinstance(login, str) else None


def _about(event: IncomingEvent) -> dict[str, Any]:
    if event.source != "github":
        return {}
    found = {
        "repository": _at(event.payload, "repository", "full_name"),
        "number": _at(event.payload, "pull_request", "number") or _at(event.payload, "issue", "number"),
        "pull_request": _at(event.payload, "pull_request", "html_url")
        or _at(event.payload, "issue", "pull_request", "html_url"),
        "ref": _at(event.payload, "ref"),
    }
    return {name: value for name, value in found.items() if isinstance(value, str | int)}


def _at(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


# ---------------------------------------------------------------- trials and commands


@dataclass(frozen=True, slots=True)
class Sample:
    """A delivery for trying out a trigger."""

    payload: Any
    headers: Mapping[str, str]
    event: str | None = None


async def try_out(database: Database, plans: Plans, principal: Principal, name: str, sample: Sample) -> dict[str, Any]:
    """Return what a delivery of this payload would start, or why it would start nothing. Starts nothing itself."""
    row = await named(database, principal, name)
    trigger = load(row["source"])
    tried: dict[str, Any] = {"outcome": "refused", "workflow": trigger.workflow, "input": None, "reason": None}
    try:
        given = trigger, sample.payload, dict(sample.headers), sample.event
        event = await here_or_elsewhere(principal.tenant_id, trial_event, *given)
        if (reason := await here_or_elsewhere(principal.tenant_id, ignored, trigger, event)) is not None:
            tried |= {"outcome": "ignored", "reason": reason}
        else:
            made = await here_or_elsewhere(principal.tenant_id, input_of, trigger, event)
            await _check_startable(database, plans, principal, trigger)
            tried |= {"outcome": "starts", "input": made}
    except UnusableEvent as error:
        tried["reason"] = str(error)
    except InterlockError as problem:
        if problem.code not in _REFUSES_DELIVERIES:
            raise
        tried["reason"] = problem.detail
    return tried | {"starts": tried["outcome"] == "starts"}


async def _check_startable(database: Database, plans: Plans, principal: Principal, trigger: TriggerDefinition) -> None:
    """Raise the error that would refuse a delivery. A command in Slack acts with the key of its user instead."""
    if trigger.kind is not TriggerKind.SLACK:
        row = await database.row("trigger_for_delivery", principal.tenant, trigger.name, trigger.kind)
        if row is None:
            raise _unknown(trigger.name)
        _require_key(trigger, is_revoked=row["revoked_at"] is not None)
    await plans.current(principal.tenant_id, trigger.workflow, None)


async def of_command(database: Database, who: Principal, command: str) -> tuple[Principal, TriggerDefinition] | None:
    """Return the trigger of a Slack command, and the caller in the trigger's workspace.

    Triggers of other workspaces do not exist for the caller: else their author could make the caller start a run.
    """
    row = await database.row("trigger_of_command", who.tenant_id, command, who.workspace_id)
    if row is None:
        return None
    return who.within(row["workspace_id"] or who.workspace_id), load(row["source"])
