"""Sources of runs and wake-ups: triggers, schedules and external events."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, StringConstraints

from interlock.wire.common import Body, Id, Name, View, encodable


class StoredTrigger(View):
    """A trigger: the workflow it starts, and the URL for deliveries."""

    name: str
    kind: str
    workflow: str
    # The URL for the sender's deliveries. Slack commands use the URL of the Slack app instead.
    path: str
    # The name of the owner of the key that the trigger acts with.
    acts_as: str
    workspace_id: str | None = None
    digest: str
    created_at: AwareDatetime
    updated_at: AwareDatetime
    source: Any = None


class TestTrigger(Body):
    """A sample event to test a trigger with. Nothing is started."""

    __test__ = False  # without it, pytest would collect the class as a test

    payload: Annotated[Any, AfterValidator(encodable)] = None
    # push, or pull_request.opened
    event: Name | None = None
    headers: dict[str, str] = {}


class TriggerPreview(View):
    """What a delivery would start.

    The outcome `starts`: a run with this `input`. `ignored`: nothing, for this `reason`. `refused`: the sender would
    get an error, because an expression has no value, or because the trigger's key or workflow was removed.
    """

    outcome: Literal["starts", "ignored", "refused"]
    starts: bool
    workflow: str
    input: dict[str, Any] | None = None
    reason: str | None = None


class Accepted(View):
    """The result of a delivery."""

    # If the delivery was ignored, `reason` says why.
    outcome: Literal["started", "ignored"]
    run_id: Id | None = None
    workflow: str | None = None
    reason: str | None = None


class NewSchedule(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_.-]{0,99}$")]
    cron: Name
    timezone: Name = "UTC"
    workflow: Name
    input: Annotated[dict[str, Any], AfterValidator(encodable)] = {}
    # Which slots that passed while no server ran are started later: none, the last one, or all.
    missed: Literal["skip", "last", "all"] = "last"
    request_id: Name | None = None


class Schedule(View):
    name: str
    cron: str
    timezone: str
    workflow: str
    input: Any = None
    missed: str
    acts_as: str
    workspace_id: str | None = None
    # Null while the schedule is paused.
    next_at: AwareDatetime | None = None
    paused_at: AwareDatetime | None = None
    # Why the schedule was paused, unless a person paused it.
    paused_why: str | None = None
    last_slot: AwareDatetime | None = None
    last_run_id: Id | None = None
    created_at: AwareDatetime


def _event_type(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,199}", value):
        raise ValueError("expected a type such as bank.settled: letters, digits, `_`, `.`, `:`, `/` and `-`")
    return value


class SendEvent(Body):
    """An external event to publish. The same `id` identifies the same event."""

    type: Annotated[str, AfterValidator(_event_type)]
    correlation: Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=r"^[^\x00]+$")]
    payload: Annotated[Any, AfterValidator(encodable)] = {}
    id: Name | None = None
    request_id: Name | None = None


class ReceivedEvent(View):
    """An external event and, once it was matched, the step that waited for it."""

    id: str
    type: str
    correlation: str
    workspace_id: str | None = None
    payload: Any = None
    sent_by: str
    received_at: AwareDatetime
    expires_at: AwareDatetime
    run_id: Id | None = None
    step_key: str | None = None
    consumed_at: AwareDatetime | None = None


class SentEvent(ReceivedEvent):
    """A published event. `matched`: a step was waiting for it. Otherwise it is stored until `expires_at`."""

    matched: bool
