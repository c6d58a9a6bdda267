"""An idempotency record: a request and its answer."""

from interlock.lifecycle.machine import Machine, Term


class IdempotencyState(Term):
    PROCESSING = "processing", "The first request is being answered."
    COMPLETED = "completed", "Answered; the answer is replayed."
    FAILED = "failed", "The attempt failed; it may be made again."


class IdempotencyEvent(Term):
    COMPLETE = "complete", "An answer was stored."
    FAIL = "fail", "The attempt failed."
    RETRY = "retry", "Another attempt, while attempts remain."


S, E = IdempotencyState, IdempotencyEvent

IDEMPOTENCY: Machine[IdempotencyState, IdempotencyEvent] = Machine(
    name="idempotency",
    table={
        S.PROCESSING: {E.COMPLETE: S.COMPLETED, E.FAIL: S.FAILED},
        S.FAILED: {E.RETRY: S.PROCESSING},
        S.COMPLETED: {},
    },
    columns={
        "response_body": frozenset({S.COMPLETED}),
        "error": frozenset({S.FAILED}),
        "lock_expires_at": frozenset({S.PROCESSING}),
    },
)
