"""The audit chain: a tenant's journal entries, each linked to the previous one, with signed checkpoints.

    link(n) = sha256(link(n - 1) + canonical(entry n)),    link(0) = 32 zero bytes

Positions count from 1 without gaps, so a checkpoint's position is also the number of entries it covers. An attacker who
changes an entry has to recompute every later link. The chain then contradicts the next checkpoint, whose signature the
attacker cannot make. Checkpoints form their own chain, so that none can be removed; the last sealed entry always has
one.

The chain alone cannot show that it was cut back to an older checkpoint together with everything later. To detect that,
keep checkpoints elsewhere (evidence bundles hold some) and give them to the verifier as anchors.
"""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import orjson

from interlock.audit.canonical import canonical
from interlock.audit.keys import Keyring, SigningKey
from interlock.lifecycle import RUN

GENESIS = bytes(32)
CHECKPOINT_TYPE = "https://interlock.dev/checkpoint/v1"


# ---------------------------------------------------------------- entries


def utc(moment: datetime) -> str:
    """Return the time in UTC with microseconds, so that each moment has one spelling."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def text_digest(text: str | None) -> str | None:
    """Return the digest of a JSON column's text as the database writes it: 1.0 and 1.00 differ."""
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


def leaf(entry: Mapping[str, Any]) -> bytes:
    """Return the bytes of the entry to hash.

    `data` and `output` are digests, so that a chain can be checked without them. Flat, sorted ASCII keys, strings and
    small numbers: orjson writes what `canonical` would, thirty times faster.
    """
    return orjson.dumps(
        {
            "actor": entry["actor"],
            "at": utc(entry["at"]),
            "attempt": entry["attempt"],
            "data_sha256": entry["data_sha256"],
            "event": entry["event"],
            "from_state": entry["from_state"],
            "output_sha256": entry["output_sha256"],
            "run_id": str(entry["run_id"]),
            "seq": entry["seq"],
            "step": entry["step"],
            "tenant_id": str(entry["tenant_id"]),
            "to_state": entry["to_state"],
            "token": entry["token"],
            "type": entry["type"],
        }
    )


def link(previous: bytes, entry: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(previous + leaf(entry)).digest()


def missing_link(previous: bytes, run_id: object, seq: int) -> bytes:
    """Return the link for an entry that was lost before it could be sealed.

    It keeps the position, so that the loss stays visible.
    """
    return hashlib.sha256(previous + canonical({"missing": True, "run_id": str(run_id), "seq": seq})).digest()


def fold(previous: bytes, entries: Iterable[Mapping[str, Any]]) -> list[bytes]:
    links = []
    for entry in entries:
        previous = link(previous, entry)
        links.append(previous)
    return links


def journal_digest(entries: Iterable[Mapping[str, Any]]) -> str:
    """Return the sha256 of the leaves of one run in the order of `seq`, one per line."""
    journal = hashlib.sha256()
    for entry in entries:
        journal.update(leaf(entry) + b"\n")
    return journal.hexdigest()


# ---------------------------------------------------------------- checkpoints


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A signed statement that the tenant's chain has `position` entries and ends in `head`.

    `released`: retention has deleted entries of runs with ids below this one, so that their absence is not a fault.
    """

    tenant_id: str
    number: int
    position: int
    head: str
    at: str
    previous: str | None
    released: str | None
    key_id: str
    signature: bytes = b""

    def body(self) -> bytes:
        return canonical(
            {
                "_type": CHECKPOINT_TYPE,
                "tenant_id": self.tenant_id,
                "number": self.number,
                "position": self.position,
                "head": self.head,
                "at": self.at,
                "previous": self.previous,
                "released": self.released,
                "key_id": self.key_id,
            }
        )

    def digest(self) -> str:
        return hashlib.sha256(self.body() + self.signature).hexdigest()

    def signed(self, key: SigningKey) -> "Checkpoint":
        mine = replace(self, key_id=key.key_id)
        return replace(mine, signature=key.sign(mine.body()))

    def fault(self, keyring: Keyring) -> str | None:
        """Return why the signature is invalid, or None."""
        key = keyring.get(self.key_id)
        if key is None:
            return f"checkpoint {self.number} is signed with key {self.key_id}, which is not in the keyring"
        if not key.verifies(self.body(), self.signature):
            return f"checkpoint {self.number} was changed or forged: its signature is wrong"
        return None

    def as_dict(self) -> dict[str, Any]:
        return {
            "tenant_id": self.tenant_id,
            "number": self.number,
            "position": self.position,
            "head": self.head,
            "at": self.at,
            "previous": self.previous,
            "released": self.released,
            "key_id": self.key_id,
            "signature": base64.b64encode(self.signature).decode(),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Checkpoint":
        return cls(**{**fields, "signature": base64.b64decode(fields["signature"])})


def next_checkpoint(
    key: SigningKey,
    last: Checkpoint | None,
    *,
    tenant_id: str,
    position: int,
    head: bytes,
    at: datetime,
    released: str | None = None,
) -> Checkpoint:
    before = last.released if last else None
    return Checkpoint(
        tenant_id=tenant_id,
        number=last.number + 1 if last else 1,
        position=position,
        head=head.hex(),
        at=utc(at),
        previous=last.digest() if last else None,
        # `released` never decreases.
        released=max(filter(None, (before, released)), default=None),
        key_id=key.key_id,
    ).signed(key)


# ---------------------------------------------------------------- verification


@dataclass(frozen=True, slots=True)
class LinkedEntry:
    """A position in the chain and its entry, if the entry still exists."""

    position: int
    run_id: str
    seq: int
    link: bytes
    entry: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Break:
    """The first difference between the chain and the journal.

    An entry that the chain never reached has no `position`.
    """

    position: int | None
    run_id: str | None
    seq: int | None
    why: str

    def as_dict(self) -> dict[str, Any]:
        return {"position": self.position, "run_id": self.run_id, "seq": self.seq, "why": self.why}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a verification.

    `unsealed` entries are newer than the last batch: not faulty, but not proven yet.
    """

    entries: int
    checkpoints: int
    broken_at: Break | None = None
    unsealed: int = 0

    @property
    def ok(self) -> bool:
        return self.broken_at is None

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "events": self.entries,
            "checkpoints": self.checkpoints,
            "unsealed": self.unsealed,
            "broken_at": self.broken_at.as_dict() if self.broken_at else None,
        }


class Verifier:
    """Verifies the chain from its start, entries and checkpoints in the order of positions, and keeps the first fault.

    `latest` is the last checkpoint: it says how far the chain must go and what retention deleted.
    """

    def __init__(
        self,
        tenant_id: str,
        keyring: Keyring,
        latest: Checkpoint | None = None,
        anchors: Iterable[Checkpoint] = (),
    ) -> None:
        self.tenant_id, self.keyring = tenant_id, keyring
        self.broken: Break | None = None
        self.position, self._head = 0, GENESIS
        self._last: Checkpoint | None = None
        self._seen: dict[str, int] = {}  # run → its last seq, for runs that may still get entries
        self._anchors = {anchor.number: anchor for anchor in anchors}
        # An unsigned `released` would excuse any deletion.
        genuine = latest is not None and latest.fault(keyring) is None
        self.released = latest.released if latest is not None and genuine else None

    def entry(self, sealed: LinkedEntry) -> None:
        if self.broken is None:
            self.broken = self._entry_fault(sealed)
            self.position, self._head = sealed.position, sealed.link

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        if self.broken is None:
            self.broken = self._checkpoint_fault(checkpoint)
            self._last = checkpoint

    def finish(self, unsealed: int = 0) -> Verdict:
        self.broken = self.broken or self._end_fault()
        return Verdict(self.position, self._last.number if self._last else 0, self.broken, unsealed)

    def _entry_fault(self, sealed: LinkedEntry) -> Break | None:
        place = (sealed.position, sealed.run_id, sealed.seq)
        if sealed.position != self.position + 1:
            missing = self.position + 1
            return Break(missing, None, None, f"position {missing} was deleted; {sealed.position} is the next there is")
        if sealed.entry is None:
            if self.released is not None and sealed.run_id < self.released:
                return None
            return Break(*place, "the entry is missing: it was deleted")
        if link(self._head, sealed.entry) != sealed.link:
            return Break(*place, "the entry (or its seal) was changed, moved or put in after it was sealed")
        return self._order_fault(sealed, sealed.entry)

    def _order_fault(self, sealed: LinkedEntry, entry: Mapping[str, Any]) -> Break | None:
        """Check that a run's entries are numbered without gaps.

        This also detects an entry that was lost before it was sealed.
        """
        before = self._seen.get(sealed.run_id, 0)
        if entry["step"] is None and entry["to_state"] in RUN.terminal:
            self._seen.pop(sealed.run_id, None)  # keep only open runs, however long the chain
        else:
            self._seen[sealed.run_id] = sealed.seq
        if sealed.seq == before + 1:
            return None
        why = f"the run's entry {before + 1} was never sealed: {sealed.seq} follows {before or 'nothing'}"
        return Break(sealed.position, sealed.run_id, sealed.seq, why)

    def _checkpoint_fault(self, checkpoint: Checkpoint) -> Break | None:
        number, position = checkpoint.number, checkpoint.position
        last = self._last
        since = last.position if last else 0
        if checkpoint.tenant_id != self.tenant_id:
            return Break(position, None, None, f"checkpoint {number} belongs to tenant {checkpoint.tenant_id}")
        if fault := checkpoint.fault(self.keyring):
            return Break(position, None, None, fault)
        if number != (last.number + 1 if last else 1):
            missing = last.number + 1 if last else 1
            return Break(since, None, None, f"checkpoint {missing} is missing; {number} is the next there is")
        if checkpoint.previous != (last.digest() if last else None):
            return Break(position, None, None, f"checkpoint {number} does not follow the checkpoint before it")
        anchor = self._anchors.pop(number, None)
        if anchor is not None and anchor != checkpoint:
            return Break(since + 1, None, None, f"checkpoint {number} is not the one that you hold: history was redone")
        if position > self.position:
            gone = f"the chain ends at {self.position}, but checkpoint {number} covers {position} entries"
            return Break(self.position + 1, None, None, f"the tail was cut: {gone}")
        if checkpoint.head != self._head.hex():
            where = f"positions {since + 1} to {position}" if position > since else f"position {position}"
            return Break(since + 1, None, None, f"{where} were rewritten after checkpoint {number} was signed")
        return None

    def _end_fault(self) -> Break | None:
        covered = self._last.position if self._last else 0
        if self.position > covered:
            return Break(covered + 1, None, None, f"no checkpoint covers positions {covered + 1} to {self.position}")
        if self._anchors:
            anchor = min(self._anchors.values(), key=lambda a: a.number)
            why = f"the tail was cut: checkpoint {anchor.number}, which you hold, covers {anchor.position} entries"
            return Break(self.position + 1, None, None, why)
        return None


def verify_chain(
    tenant_id: str,
    sealed: Iterable[LinkedEntry],
    checkpoints: Iterable[Checkpoint],
    keyring: Keyring,
    anchors: Iterable[Checkpoint] = (),
) -> Verdict:
    """Verify a whole chain in memory. A database's chain is read in pieces: see `engine.audit.verify`."""
    signed = list(checkpoints)
    verifier = Verifier(tenant_id, keyring, signed[-1] if signed else None, anchors)
    due = iter([*signed, None])
    following = next(due)
    for one in sealed:
        while following is not None and following.position < one.position:
            verifier.checkpoint(following)
            following = next(due)
        verifier.entry(one)
    while following is not None:
        verifier.checkpoint(following)
        following = next(due)
    return verifier.finish()
