"""A worker: one process that leases runs and executes their steps."""

from interlock.lifecycle.machine import Machine, Term


class WorkerState(Term):
    IDLE = "idle", "Registered; takes no work yet."
    RUNNING = "running", "Leases runs and executes their steps."
    PAUSED = "paused", "Takes no new work; what it has is finished."
    COMPLETED = "completed", "Drained: it finished what it had and left."
    FAILED = "failed", "Ended by an error it could not recover from."
    TERMINATED = "terminated", "Stopped by order, or its heartbeat was lost."


class WorkerEvent(Term):
    START = "start", "It begins to take work."
    PAUSE = "pause", "Told to pause, or short of resources."
    RESUME = "resume", "Told to go on."
    COMPLETE = "complete", "All it had is done and it was asked to leave."
    FAIL = "fail", "An error it cannot recover from."
    TERMINATE = "terminate", "Ordered to stop at once, or lost."


S, E = WorkerState, WorkerEvent

WORKER: Machine[WorkerState, WorkerEvent] = Machine(
    name="worker",
    table={
        S.IDLE: {E.START: S.RUNNING, E.TERMINATE: S.TERMINATED},
        S.RUNNING: {E.PAUSE: S.PAUSED, E.COMPLETE: S.COMPLETED, E.FAIL: S.FAILED, E.TERMINATE: S.TERMINATED},
        S.PAUSED: {E.RESUME: S.RUNNING, E.TERMINATE: S.TERMINATED},
        S.COMPLETED: {},
        S.FAILED: {},
        S.TERMINATED: {},
    },
    columns={"stopped_at": frozenset({S.COMPLETED, S.FAILED, S.TERMINATED})},
)

# Only these may append to a journal: a paused worker still finishes the runs that it holds.
MAY_APPEND = frozenset({S.RUNNING, S.PAUSED})
