"""A run: one workflow version executing for one trigger.

Each row of the table lists a state's possible events and where each of them leads. The first row is the initial state,
rows without exits are the final states. Constraints, enums, labels, help and diagrams are rendered from this table, so
a new state goes here and into a migration, and nowhere else.
"""

from interlock.lifecycle.machine import Machine, Term


class RunState(Term):
    PENDING = "pending", "Accepted; no step was claimed yet."
    RUNNING = "running", "A step is claimed, claimable or waiting for its retry time."
    WAITING_APPROVAL = "waiting_approval", "Nothing can move until a person decides."
    WAITING_EXTERNAL = "waiting_external", "Nothing can move until an outside event or a timer."
    CANCELING = "canceling", "Told to stop, or failing; in-flight work is interrupted, then effects are undone."
    SUCCEEDED = "succeeded", "Every step succeeded or was skipped."
    FAILED = "failed", "Ended without reaching its goal; the reason says why."
    CANCELED = "canceled", "Stopped because somebody asked."


class RunEvent(Term):
    START = "start", "Its first step is claimed."
    HOLD = "hold", "A person is needed and no other step can move."
    PARK = "park", "An event or a timer is awaited and no other step can move."
    RESUME = "resume", "Approved, the event arrived, or the timer is due."
    SUCCEED = "succeed", "The last step is settled."
    FAIL = "fail", "A step failed for good, a person said no, or time ran out."
    CANCEL = "cancel", "Somebody asked to stop it."
    COMPENSATE = "compensate", "It is to end without reaching its goal, and what it did is undone first."
    STOPPED = "stopped", "After a cancel nothing is in flight any more, and nothing is left to undo."


class RunReason(Term):
    """Why a run ended: a code that a program can switch on."""

    COMPLETED = "completed", "Every step did what it should."
    REJECTED = "rejected", "A person said no."
    APPROVAL_EXPIRED = "approval_expired", "Nobody decided in time."
    POLICY_DENIED = "policy_denied", "The policy forbids the action."
    ATTEMPTS_EXHAUSTED = "attempts_exhausted", "A step failed as often as it was allowed to."
    TERMINAL_ERROR = "terminal_error", "A step failed in a way that trying again cannot fix."
    TIMED_OUT = "timed_out", "The run's deadline passed."
    EXTERNAL_TIMEOUT = "external_timeout", "An outside event did not come in time."
    ORPHANED = "orphaned", "A step's worker was lost again and again."
    RESUME_FAILED = (
        "resume_failed",
        "It could not be resumed safely after a crash, or what is stored of it cannot be read.",
    )
    COMPENSATION_FAILED = "compensation_failed", "What it had done could not all be undone."
    CAP_EXCEEDED = "cap_exceeded", "It went over one of its tenant's caps."
    CANCELED_BY_USER = "canceled_by_user", "An operator canceled it."
    CANCELED_BY_PARENT = "canceled_by_parent", "Its parent was canceled."
    INTERRUPTED = "interrupted", "A session's user interrupted it."


S, E = RunState, RunEvent

# A cancel has two targets: `canceling` if a step is in flight or a compensation is necessary, else `canceled` at once.
RUN: Machine[RunState, RunEvent] = Machine(
    name="run",
    table={
        S.PENDING: {
            E.START: S.RUNNING,
            E.HOLD: S.WAITING_APPROVAL,
            E.PARK: S.WAITING_EXTERNAL,
            E.FAIL: S.FAILED,
            E.CANCEL: (S.CANCELING, S.CANCELED),
            E.COMPENSATE: S.CANCELING,
        },
        S.RUNNING: {
            E.HOLD: S.WAITING_APPROVAL,
            E.PARK: S.WAITING_EXTERNAL,
            E.SUCCEED: S.SUCCEEDED,
            E.FAIL: S.FAILED,
            E.CANCEL: (S.CANCELING, S.CANCELED),
            E.COMPENSATE: S.CANCELING,
        },
        S.WAITING_APPROVAL: {
            E.RESUME: S.RUNNING,
            E.PARK: S.WAITING_EXTERNAL,
            E.SUCCEED: S.SUCCEEDED,
            E.FAIL: S.FAILED,
            E.CANCEL: (S.CANCELING, S.CANCELED),
            E.COMPENSATE: S.CANCELING,
        },
        S.WAITING_EXTERNAL: {
            E.RESUME: S.RUNNING,
            E.HOLD: S.WAITING_APPROVAL,
            E.SUCCEED: S.SUCCEEDED,
            E.FAIL: S.FAILED,
            E.CANCEL: (S.CANCELING, S.CANCELED),
            E.COMPENSATE: S.CANCELING,
        },
        S.CANCELING: {E.STOPPED: S.CANCELED, E.FAIL: S.FAILED, E.COMPENSATE: S.CANCELING},
        S.SUCCEEDED: {},
        S.FAILED: {},
        S.CANCELED: {},
    },
    # These columns have a value exactly in these states.
    columns={
        "completed_at": frozenset({S.SUCCEEDED, S.FAILED, S.CANCELED}),
        "reason": frozenset({S.SUCCEEDED, S.FAILED, S.CANCELED}),
    },
)

# The only states in which a worker may hold a run: neither waiting nor ended.
LEASABLE = (S.RUNNING, S.CANCELING)
