"""The context of an entry: who or what made it happen, and what it answers. All of it is read from the entry."""

from typing import Any

from interlock.engine.principal import initiator_of, name_of
from interlock.journal import EntryType
from interlock.lifecycle import ApprovalState
from interlock.store.pool import Row
from interlock.wire import Initiator

_TOLD = ("initiator", "user", "metadata", "external_event")


def context_of(row: Row, data: dict[str, Any]) -> dict[str, Any]:
    actor: str = row["actor"]
    initiator = initiator_of(actor)
    somebody = name_of(actor) if initiator is Initiator.USER else None
    context: dict[str, Any] = {"initiator": initiator, "user": somebody}
    match row["type"]:
        case EntryType.RUN_CREATED:
            told = data.get("trigger") or {}
            context |= {name: told[name] for name in _TOLD if name in told}
        case EntryType.STEP_TRANSITION if isinstance(data.get("awaits"), dict):
            awaited = data["awaits"]
            context["external_event"] = {"event_type": awaited["event"]} | {
                name: awaited.get(name) for name in ("correlation", "timeout_at")
            }
        case EntryType.STEP_TRANSITION if isinstance(data.get("event"), dict):
            came = data["event"]
            context["external_event"] = {
                "event_type": came["type"], "source": context["user"], "event_id": came["id"],
                "correlation": came["correlation"], "received_at": came["received_at"],
            }  # fmt: skip
        case EntryType.APPROVAL_REQUESTED:
            context["approval"] = {"id": data["approval_id"], "action": data.get("summary")}
        case EntryType.APPROVAL_RESOLVED:
            decision = ApprovalState(data["decision"])
            if decision != ApprovalState.EXPIRED:
                context["initiator"] = Initiator.APPROVAL
            context["approval"] = {
                "id": data["approval_id"], "decision": decision, "decided_at": row["at"], "decided_by": context["user"],
                "reason": data.get("said", data.get("reason")),
            }  # fmt: skip
    return context
