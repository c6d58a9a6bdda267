"""A step: one unit of a run, executed by the worker that holds the run's lease."""

from interlock.lifecycle.machine import Machine, Term


class StepState(Term):
    PENDING = "pending", "Not begun, or waiting for its retry time."
    RUNNING = "running", "A worker is doing it."
    WAITING_APPROVAL = "waiting_approval", "A person has to decide."
    WAITING_EXTERNAL = "waiting_external", "An outside event or a timer has to come."
    SUCCEEDED = "succeeded", "Done; its output is stored."
    SKIPPED = "skipped", "Not needed: its condition was false, or what it needs was skipped."
    FAILED = "failed", "Failed for good."
    CANCELED = "canceled", "Its run ended before it did."


class StepEvent(Term):
    CLAIM = "claim", "The worker that holds the run takes it up."
    OPEN = "open", "An approval gate became its run's next step."
    PARK = "park", "A wait became the next step, or the step asks to wait."
    SKIP = "skip", "Its condition is false, or what it needs was skipped."
    RECLAIM = "reclaim", "Its worker was lost; it is done again under a new lease token."
    SUCCEED = "succeed", "It returned; output and cost are stored in the same transaction."
    RETRY = "retry", "A retryable error, and attempts remain."
    FAIL = "fail", "A terminal error, a denial, attempts exhausted, or unsafe to resume."
    HOLD = "hold", "The policy asks for a person."
    RELEASE = "release", "Approved: it is scheduled again."
    GRANT = "grant", "Approved, and the step is the approval."
    REFUSE = "refuse", "Rejected or expired."
    RESUME = "resume", "What it waited for came; it is scheduled again."
    ARRIVE = "arrive", "What it waited for came, and that was all it was for."
    CANCEL = "cancel", "Its run ended."


S, E = StepState, StepEvent

STEP: Machine[StepState, StepEvent] = Machine(
    name="step",
    table={
        S.PENDING: {
            E.CLAIM: S.RUNNING,
            E.OPEN: S.WAITING_APPROVAL,
            E.PARK: S.WAITING_EXTERNAL,
            E.SKIP: S.SKIPPED,
            E.CANCEL: S.CANCELED,
        },
        S.RUNNING: {
            E.RECLAIM: S.RUNNING,
            E.SUCCEED: S.SUCCEEDED,
            E.RETRY: S.PENDING,
            E.FAIL: S.FAILED,
            E.HOLD: S.WAITING_APPROVAL,
            E.PARK: S.WAITING_EXTERNAL,
            E.CANCEL: S.CANCELED,
        },
        S.WAITING_APPROVAL: {
            E.RELEASE: S.PENDING,
            E.GRANT: S.SUCCEEDED,
            E.REFUSE: (S.FAILED, S.SKIPPED),
            E.CANCEL: S.CANCELED,
        },
        S.WAITING_EXTERNAL: {
            E.RESUME: S.PENDING,
            E.ARRIVE: S.SUCCEEDED,
            E.FAIL: S.FAILED,
            E.CANCEL: S.CANCELED,
        },
        S.SUCCEEDED: {},
        S.SKIPPED: {},
        S.FAILED: {},
        S.CANCELED: {},
    },
)

# Later steps may start after these states; the other terminal states end the run.
SETTLED_WELL = frozenset({S.SUCCEEDED, S.SKIPPED})
