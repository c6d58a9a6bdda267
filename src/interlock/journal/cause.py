"""Causes: the approval, external event, person or deadline that made a run or a step move.

A step's own entries say what the step waits for and what ended its wait. A run's entry repeats that as `cause` for
clients that read only that entry.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from interlock.lifecycle import RunReason, StepEvent, StepState

DEADLINE = "system:deadline"
POLICY = "system:policy"

# `by`: the actor; `approval` and `external_event`: what the actor decided, sent or waits for.
Cause = dict[str, Any]


def cause_of_step(event: str | None, from_state: str | None, actor: str, data: Mapping[str, Any]) -> Cause | None:
    """Return what made a step move, or None if the actor of the entry is enough."""
    match event:
        case StepEvent.OPEN | StepEvent.HOLD:
            return {"by": actor, "approval": _asked(data)}
        case StepEvent.RELEASE | StepEvent.GRANT | StepEvent.REFUSE if "decision" in data:
            return {"by": actor, "approval": decided(actor, data)}
        case StepEvent.PARK:
            return {"by": actor, "external_event": _awaited(data)}
        case StepEvent.ARRIVE | StepEvent.RESUME | StepEvent.FAIL if from_state == StepState.WAITING_EXTERNAL:
            return {"by": actor, "external_event": came(data)}
        case StepEvent.FAIL if data.get("reason") == RunReason.POLICY_DENIED:
            return {"by": POLICY}
    return None


def cause_of_command(actor: str, data: Mapping[str, Any], *, requested_by: str) -> Cause:
    """Return what made a run move when a worker will apply the command to it."""
    if "decision" in data:
        return {"by": actor, "approval": decided(actor, {**data, "requested_by": requested_by})}
    if "payload" in data or "child" in data:
        return {"by": actor, "external_event": came(data)}
    return {"by": actor}


def _asked(data: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": data["approval_id"], "action": data.get("summary"), "requested_by": data.get("requested_by")}


def decided(actor: str, data: Mapping[str, Any]) -> dict[str, Any]:
    said = data.get("said", data.get("reason"))
    return _asked(data) | {"decision": data["decision"], "decided_by": actor, "reason": said}


def _awaited(data: Mapping[str, Any]) -> dict[str, Any]:
    if (awaits := data.get("awaits")) is not None:
        known = {"event_type": awaits["event"], "correlation": awaits["correlation"]}
        return known | {"expected_at": awaits.get("timeout_at")}
    if "child" in data:
        return {"event_type": "run_completed", "source": "run", "event_id": data["child"]}
    return {"event_type": "timer", "expected_at": _text(data.get("due_at"))}


def came(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the event that ended a wait or, after a time-out, the event that the step waited for."""
    if isinstance(event := data.get("event"), Mapping):
        known = {"event_type": event["type"], "event_id": event.get("id"), "correlation": event.get("correlation")}
        return known | {"received_at": event.get("received_at"), "expected_at": data.get("expected_at")}
    return _awaited(data)


def _text(moment: str | datetime | None) -> str | None:
    return moment.isoformat() if isinstance(moment, datetime) else moment
