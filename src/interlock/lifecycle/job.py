"""A job: a batch of runs with reserved workers."""

from interlock.lifecycle.machine import Machine, Term


class JobState(Term):
    SUBMITTED = "submitted", "Received; not validated yet."
    PENDING = "pending", "Valid; waits for workers."
    RUNNING = "running", "Its workers execute its runs."
    COMPLETED = "completed", "All its runs and children ended well."
    FAILED = "failed", "It was invalid, or a run failed."
    CANCELED = "canceled", "Stopped by a user, a time-out or its parent."


class JobEvent(Term):
    VALIDATE = "validate", "Its description is valid."
    ALLOCATE = "allocate", "The workers it asked for are reserved."
    SUCCEED = "succeed", "Its last run ended well."
    FAIL = "fail", "Validation or execution failed."
    CANCEL = "cancel", "Somebody, a time-out or the parent stopped it."


S, E = JobState, JobEvent

JOB: Machine[JobState, JobEvent] = Machine(
    name="job",
    table={
        S.SUBMITTED: {E.VALIDATE: S.PENDING, E.FAIL: S.FAILED, E.CANCEL: S.CANCELED},
        S.PENDING: {E.ALLOCATE: S.RUNNING, E.CANCEL: S.CANCELED},
        S.RUNNING: {E.SUCCEED: S.COMPLETED, E.FAIL: S.FAILED, E.CANCEL: S.CANCELED},
        S.COMPLETED: {},
        S.FAILED: {},
        S.CANCELED: {},
    },
    columns={"completed_at": frozenset({S.COMPLETED, S.FAILED, S.CANCELED})},
)
