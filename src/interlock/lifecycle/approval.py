"""An approval: one question to people about one exact action, answered once."""

from interlock.lifecycle.machine import Machine, Term


class ApprovalState(Term):
    REQUESTED = "requested", "Waiting for people to decide."
    APPROVED = "approved", "As many distinct people as the rule asks said yes."
    REJECTED = "rejected", "A person said no."
    EXPIRED = "expired", "Nobody decided in time."
    CANCELED = "canceled", "The run ended before anybody decided."


class ApprovalEvent(Term):
    APPROVE = "approve", "The last vote that was needed."
    REJECT = "reject", "One vote against is enough."
    EXPIRE = "expire", "Its time ran out."
    CANCEL = "cancel", "Its run ended."


class Tier(Term):
    """The risk of an action."""

    LOW = "low", "Easily undone."
    MED = "med", "Undone with effort."
    HIGH = "high", "Hard or impossible to undo."


S, E = ApprovalState, ApprovalEvent
_DECIDED = frozenset({S.APPROVED, S.REJECTED, S.EXPIRED, S.CANCELED})

APPROVAL: Machine[ApprovalState, ApprovalEvent] = Machine(
    name="approval",
    table={
        S.REQUESTED: {E.APPROVE: S.APPROVED, E.REJECT: S.REJECTED, E.EXPIRE: S.EXPIRED, E.CANCEL: S.CANCELED},
        S.APPROVED: {},
        S.REJECTED: {},
        S.EXPIRED: {},
        S.CANCELED: {},
    },
    columns={"resolved_at": _DECIDED},
)
