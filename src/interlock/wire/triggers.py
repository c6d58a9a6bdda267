"""What starts a run, or wakes it: triggers, schedules and events from outside."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, StringConstraints

from interlock.wire.grammar import Body, Id, Name, View, encodable


class StoredTrigger(View):
    """A trigger: what starts its workflow, and where deliveries go."""

    name: str
    kind: str
    workflow: str
    # Where its sender posts; commands go to Slack's own address.
    path: str
    # The name of whose key it acts with.
    acts_as: str
    workspace_id: str | None = None
    digest: str
    created_at: AwareDatetime
    updated_at: AwareDatetime
    source: Any = None


class TestTrigger(Body):
    """An event to try a trigger on: nothing is started."""

    __test__ = False  # to pytest's collector its name looks like a test

    payload: Annotated[Any, AfterValidator(encodable)] = None
    # push, or pull_request.opened
    event: Name | None = None
    headers: dict[str, str] = {}


class Tried(View):
    """What an event would start."""

    starts: bool
    workflow: str
    input: dict[str, Any] | None = None
    # Why it starts nothing.
    reason: str | None = None


class Accepted(View):
    """What became of a delivery."""

    # started; ignored, with the reason; or processing, when the first delivery of it is still under way
    outcome: Literal["started", "ignored", "processing"]
    run_id: Id | None = None
    workflow: str | None = None
    reason: str | None = None


class NewSchedule(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_.-]{0,99}$")]
    cron: Name
    timezone: Name = "UTC"
    workflow: Name
    input: Annotated[dict[str, Any], AfterValidator(encodable)] = {}
    # What becomes of slots that passed while nothing ran: none of them, the last one, or all.
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
    # Null while it is paused.
    next_at: AwareDatetime | None = None
    paused_at: AwareDatetime | None = None
    # Why it was paused, if not by a person.
    paused_why: str | None = None
    last_slot: AwareDatetime | None = None
    last_run_id: Id | None = None
    created_at: AwareDatetime


def _event_type(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,199}", value):
        raise ValueError("expected a type such as bank.settled: letters, digits, `_`, `.`, `:`, `/` and `-`")
    return value


class SendEvent(Body):
    """Something that happened outside. The same `id` again is the same event."""

    type: Annotated[str, AfterValidator(_event_type)]
    correlation: Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=r"^[^\x00]+$")]
    payload: Annotated[Any, AfterValidator(encodable)] = {}
    id: Name | None = None
    request_id: Name | None = None


class OutsideEvent(View):
    """An event and, once it was matched, the step that had waited for it."""

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


class SentEvent(OutsideEvent):
    """`matched`: a step had waited for it. Else it is kept until `expires_at`."""

    matched: bool
