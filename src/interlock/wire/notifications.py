"""Notifications: webhooks, and users in Slack."""

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, NonNegativeInt, StringConstraints

from interlock.lifecycle import Term
from interlock.wire.common import Body, Id, Name, View
from interlock.wire.tenants import Role


class WebhookEvent(Term):
    """The events that a webhook can receive. None of them contains inputs, outputs or the fields of an action."""

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
    # Since when every delivery has failed, and the last error. The webhook is disabled when deliveries fail for days.
    failing_since: AwareDatetime | None = None
    last_error: str | None = None
    disabled_at: AwareDatetime | None = None
    # Verifies signatures (Standard Webhooks). Only in the response that created the webhook.
    secret: str | None = None


class Delivery(View):
    """One message to a webhook. `id` is its `webhook-id`, which stays the same for every attempt."""

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


class SlackLinkCode(View):
    """A code that links the caller's key with a Slack user, after that user sends `/interlock link CODE`.

    It works once.
    """

    code: str
    expires_at: AwareDatetime


class SlackOffer(Body):
    """The tenant that a Slack team is offered to. An admin of that tenant has to accept."""

    tenant: Name
    request_id: Name | None = None


class SlackTeam(View):
    """A Slack team that belongs to the caller's tenant or was offered to it."""

    team_id: str
    is_member: bool
    # All tenants whose users may act from this team, if the caller's tenant is one of them.
    tenants: list[str] = []


class SlackUser(View):
    team_id: str
    user_id: str
    key_id: Id
    name: str
    role: Role
    created_at: AwareDatetime
    # From this time on, the key and its link no longer work.
    revoked_at: AwareDatetime | None = None


class SlackChannel(Body):
    channel: Name
    # The name of the other tenant.
    tenant: Name | None = None
    request_id: Name | None = None


class TenantChannel(View):
    """The Slack channel for a tenant's approvals, or null for no channel."""

    tenant: str
    channel: str | None = None
