"""Who is told of what happens: webhooks, and people in Slack."""

from typing import Annotated, Literal
from uuid import UUID

from pydantic import AwareDatetime, Field, NonNegativeInt, StringConstraints

from interlock.lifecycle import Term
from interlock.wire.grammar import Body, Id, Name, View
from interlock.wire.tenants import Role


class WebhookEvent(Term):
    """What a webhook can be told of. None of them carries inputs, outputs or the fields of an action."""

    APPROVAL_REQUESTED = "approval.requested", "People are asked to decide."
    APPROVAL_EDITED = "approval.edited", "A person changed the action that is to be decided."
    APPROVAL_REMINDED = "approval.reminded", "Half of an approval's time is over."
    APPROVAL_ESCALATED = "approval.escalated", "Nobody had decided; a second group is asked too."
    APPROVAL_RESOLVED = "approval.resolved", "People decided, nobody did in time, or the run ended."
    RUN_COMPLETED = "run.completed", "A run ended: succeeded, failed or canceled."


class NewWebhook(Body):
    url: Annotated[str, StringConstraints(min_length=1, max_length=2000, pattern=r"^[^\x00-\x20]+$")]
    events: Annotated[list[WebhookEvent], Field(min_length=1)] = [
        WebhookEvent.APPROVAL_REQUESTED,
        WebhookEvent.APPROVAL_RESOLVED,
        WebhookEvent.RUN_COMPLETED,
    ]
    request_id: Name | None = None


class Webhook(View):
    id: Id
    url: str
    events: list[str]
    workspace_id: str | None = None
    created_at: AwareDatetime
    # Since when every delivery failed, and with what; it is switched off when that lasts for days.
    failing_since: AwareDatetime | None = None
    last_error: str | None = None
    disabled_at: AwareDatetime | None = None
    # Verifies signatures (Standard Webhooks); in the answer that created it and never again.
    secret: str | None = None


class Delivery(View):
    """One message to a webhook. `id` is its `webhook-id`, the same over all tries."""

    id: str
    event: str
    subject_id: Id
    status: Literal["pending", "delivered", "failed"]
    attempts: NonNegativeInt
    response_status: int | None = None
    last_error: str | None = None
    created_at: AwareDatetime
    next_try_at: AwareDatetime | None = None
    done_at: AwareDatetime | None = None


class NewSlackUser(Body):
    """Who a Slack user is here: what they decide and start counts as that key's."""

    team_id: Name
    user_id: Name
    key_id: UUID
    request_id: Name | None = None


class SlackUser(View):
    team_id: str
    user_id: str
    key_id: Id
    name: str
    role: Role
    created_at: AwareDatetime
    # Then the key, and with it the link, is of no use any more.
    revoked_at: AwareDatetime | None = None


class SlackChannel(Body):
    channel: Name
    # Another tenant's, by its name.
    tenant: Name | None = None
    request_id: Name | None = None


class TenantChannel(View):
    """Where a tenant's approvals are posted; null is nowhere."""

    tenant: str
    channel: str | None = None
