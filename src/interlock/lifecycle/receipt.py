"""A receipt: the record of one effect on another system."""

from interlock.lifecycle.machine import Machine, Term


class ReceiptState(Term):
    ATTEMPTED = "attempted", "Begun; it may have happened."
    SUCCEEDED = "succeeded", "It happened, once; its answer is kept."
    FAILED = "failed", "It did not happen."
    IN_DOUBT = "in_doubt", "Nobody knows whether it happened; a person decides."


class ReceiptEvent(Term):
    SEAL = "seal", "The tool returned."
    FAIL = "fail", "The tool said that it failed, or a person that it did not happen."
    DOUBT = "doubt", "It was interrupted, and cannot be asked or safely repeated."
    RETRY = "retry", "It is attempted again under the same key."
    CONFIRM = "confirm", "A person or the system acted on says that it happened."


S, E = ReceiptState, ReceiptEvent

RECEIPT: Machine[ReceiptState, ReceiptEvent] = Machine(
    name="receipt",
    table={
        S.ATTEMPTED: {
            E.SEAL: S.SUCCEEDED,
            E.FAIL: S.FAILED,
            E.DOUBT: S.IN_DOUBT,
            E.RETRY: S.ATTEMPTED,
            E.CONFIRM: S.SUCCEEDED,
        },
        S.IN_DOUBT: {E.CONFIRM: S.SUCCEEDED, E.FAIL: S.FAILED},
        S.FAILED: {E.RETRY: S.ATTEMPTED},
        S.SUCCEEDED: {},
    },
    columns={"completed_at": frozenset({S.SUCCEEDED, S.FAILED})},
)
