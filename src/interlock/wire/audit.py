"""The audit chain, whether it holds, and the keys that sign it."""

from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from interlock.wire.grammar import Body, Id, View
from interlock.wire.runs import Event


class AuditEntry(Event):
    """An entry with its place in the tenant's chain, and the link that the next one is built on."""

    position: PositiveInt
    link: str


class Broken(View):
    """The first place where chain and journal differ. `position` is null where the chain never reached."""

    position: int | None = None
    run_id: Id | None = None
    seq: int | None = None
    why: str

    def __str__(self) -> str:
        entry = f"entry {self.seq} of run {self.run_id}" if self.run_id else None
        place = f"position {self.position}" if self.position is not None else "past the chain"
        return f"{place} ({entry}): {self.why}" if entry else f"{place}: {self.why}"


class AuditVerdict(View):
    """`unsealed` entries are a second old at most: nothing is wrong with them, and nothing is proven yet."""

    ok: bool
    events: NonNegativeInt
    checkpoints: NonNegativeInt
    unsealed: NonNegativeInt = 0
    broken_at: Broken | None = None


class VerifyAudit(Body):
    """Checkpoints that were kept elsewhere, as evidence has them."""

    checkpoints: Annotated[list[dict[str, Any]], Field(max_length=1000)] = []


class SigningKey(View):
    """A public key; the private half never leaves the machine that signs."""

    key_id: str
    current: bool
    pem: str
