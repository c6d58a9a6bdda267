"""The context of an entry: its initiator, and the approval or external event behind it.

All of it is read from the entry. The journal has actors (`ann:0190…`), the context has their names. A run's entry has
its `cause`; a step's entry has the same in its own data.
"""

from typing import Any

from interlock.engine.access.principal import initiator_behind, initiator_of, name_of
from interlock.journal import Cause, EntryType, cause_of_step
from interlock.store.records import EntryRecord
from interlock.wire import Initiator

_TOLD = ("initiator", "user", "metadata", "external_event")


def context_of(entry: EntryRecord, data: dict[str, Any]) -> dict[str, Any]:
    actor: str = entry.actor
    if entry.type == EntryType.RUN_CREATED:
        told = data.get("trigger") or {}
        context: dict[str, Any] = {"initiator": initiator_of(actor), "user": _person(actor)}
        return context | {name: told[name] for name in _TOLD if name in told}
    cause = _cause_of(entry, data)
    by = cause["by"] if cause else actor
    context = {"initiator": initiator_behind(actor, cause), "user": _person(by)}
    if cause and "approval" in cause:
        context["approval"] = _approval(cause["approval"], entry)
    if cause and "external_event" in cause:
        context["external_event"] = _event(cause["external_event"], by)
    return context


def _cause_of(entry: EntryRecord, data: dict[str, Any]) -> Cause | None:
    if entry.step is None:
        return data.get("cause")
    return cause_of_step(entry.event, entry.from_state, entry.actor, data)


def _approval(approval: dict[str, Any], entry: EntryRecord) -> dict[str, Any]:
    shown = approval | {"requested_by": _person(approval.get("requested_by"))}
    if "decision" not in approval:
        return shown
    # A decision without a recorded time was made in the transaction of this entry.
    decided_at = approval.get("decided_at") or entry.at
    return shown | {"decided_at": decided_at, "decided_by": _person(approval["decided_by"])}


def _event(event: dict[str, Any], by: str) -> dict[str, Any]:
    return {"source": _person(by)} | event if "received_at" in event else event


def _person(actor: str | None) -> str | None:
    return name_of(actor) if actor is not None and initiator_of(actor) is Initiator.USER else None
