"""Receipts: the effects of runs in other systems."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, NonNegativeInt

from interlock.lifecycle import ReceiptState
from interlock.wire.common import Body, Id, Name, Text, View, encodable


class Receipt(View):
    """One effect in another system: what was attempted and its result, without the values."""

    id: Id
    run_id: Id
    step_key: str
    tool: str
    idempotency_key: str
    status: ReceiptState
    attempt: NonNegativeInt
    request_metadata: Any = None
    response_metadata: Any = None
    error: str | None = None
    reversible: bool = False
    undo: str | None = None
    reversal: dict[str, Any] | None = None
    created_at: AwareDatetime
    completed_at: AwareDatetime | None = None


class ResolveReceipt(Body):
    """The resolution of an effect in doubt. `output` is what the tool would have returned."""

    outcome: Literal["happened", "did_not_happen", "fail"]
    output: Annotated[Any, AfterValidator(encodable)] = None
    reason: Text | None = None
    request_id: Name | None = None
