"""An entry: one change in a run, with its number, its actor, and its effect."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from interlock.lifecycle import Term


class EntryType(Term):
    """The types of entries, which are also the types of the events that clients see."""

    RUN_CREATED = "run_created", "The run was accepted."
    RUN_TRANSITION = "run_transition", "The run went from one state to another."
    RUN_COMPLETED = "run_completed", "The run ended."
    STEP_TRANSITION = "step_transition", "A step went from one state to another; a settled one is a checkpoint."
    APPROVAL_REQUESTED = "approval_requested", "A step waits for people."
    ACTION_EDITED = "action_edited", "A person changed the action before it was decided."
    APPROVAL_VOTE = "approval_vote", "A person voted, and more votes are needed."
    APPROVAL_REMINDED = "approval_reminded", "Half of an approval's time was over, and people were reminded of it."
    APPROVAL_ESCALATED = "approval_escalated", "Nobody had decided; a second group was asked too."
    APPROVAL_RESOLVED = "approval_resolved", "People decided, or nobody did in time."
    VALUE_RECORDED = (
        "value_recorded",
        "A flow asked for the time, a random number or an id; it will get the same again.",
    )
    MESSAGE_DELTA = "message_delta", "A model says more; what it said in a moment stands in one entry."
    MESSAGE = "message", "A model has said something, and this is all of it."
    ORPHAN_DETECTED = "orphan_detected", "The worker that held the run was lost."
    RUN_RESTORED = "run_restored", "The database was restored to an earlier moment, at which the run had not ended."


@dataclass(slots=True)
class Entry:
    seq: int
    type: str
    actor: str
    step: str | None = None
    from_state: str | None = None
    event: str | None = None
    to_state: str | None = None
    attempt: int | None = None
    data: dict[str, Any] | None = None
    # The output as JSON text: the step's worker encodes it once, and only a reader that needs it decodes it.
    output: str | None = None
    at: datetime | None = None
