"""The audit chain, the result of checking it, and the keys that sign it."""

from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from interlock.wire.common import Body, Id, View
from interlock.wire.runs import Event


class AuditEntry(Event):
    """An entry with its position in the tenant's chain, and the link that the next entry is built on."""

    position: PositiveInt
    link: str


class Broken(View):
    """The first place where chain and journal differ. `position` is null if the chain never reached the entry."""

    position: int | None = None
    run_id: Id | None = None
    seq: int | None = None
    why: str

    def __str__(self) -> str:
        entry = f"entry {self.seq} of run {self.run_id}" if self.run_id else None
        place = f"position {self.position}" if self.position is not None else "past the chain"
        return f"{place} ({entry}): {self.why}" if entry else f"{place}: {self.why}"


class AuditVerdict(View):
    """The result of checking the chain. `unsealed` entries are at most about a second old and are not proven yet."""

    ok: bool
    events: NonNegativeInt
    checkpoints: NonNegativeInt
    unsealed: NonNegativeInt = 0
    broken_at: Broken | None = None


class VerifyAudit(Body):
    """Checkpoints that were kept elsewhere, in the form that evidence contains."""

    checkpoints: Annotated[list[dict[str, Any]], Field(max_length=1000)] = []


class PublicKey(View):
    """A public key. The private key never leaves the machine that signs."""

    key_id: str
    current: bool
    pem: str
