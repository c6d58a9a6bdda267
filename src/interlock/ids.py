"""Ids are UUIDv7: they sort by time, so the journal can be partitioned by them."""

import hashlib
import os
from datetime import UTC, datetime
from typing import NewType
from uuid import UUID

from interlock import clock

TenantId = NewType("TenantId", UUID)
KeyId = NewType("KeyId", UUID)
RunId = NewType("RunId", UUID)
ApprovalId = NewType("ApprovalId", UUID)
ReceiptId = NewType("ReceiptId", UUID)
GrantId = NewType("GrantId", UUID)
SessionId = NewType("SessionId", UUID)
MessageId = NewType("MessageId", UUID)
JobId = NewType("JobId", UUID)
WorkerId = NewType("WorkerId", UUID)
SupervisorId = NewType("SupervisorId", UUID)
QueueId = NewType("QueueId", UUID)
TargetId = NewType("TargetId", UUID)

_last = 0
# The database's time goes back by more than this only after a wrong clock was corrected.
_MOST_AHEAD_MS = 10_000


def uuid7() -> UUID:
    """Return a UUID of 48 bits of time, 12 bits of a counter and 62 random bits.

    The time is the database's, in milliseconds. The counter keeps a process's ids in order.

    The time partitions the journal. An id from a wrong clock would put a run's entries into a month that does
    not exist yet, or that retention has dropped.
    """
    global _last
    now = clock.now_ms()
    stamp = now << 12
    if (_last >> 12) - now < _MOST_AHEAD_MS:
        stamp = max(stamp, _last + 1)
    _last = stamp
    tail = int.from_bytes(os.urandom(8), "big") & ((1 << 62) - 1)
    return UUID(int=(stamp >> 12) << 80 | 0x7 << 76 | (stamp & 0xFFF) << 64 | 0b10 << 62 | tail)


def within(whole: UUID, part: str) -> UUID:
    """Return the id of a part without its own row: it has the time of its whole and is always the same."""
    tail = int.from_bytes(hashlib.sha256(f"{whole}:{part}".encode()).digest()[:10], "big")
    counter, rest = tail >> 68, tail & ((1 << 62) - 1)
    return UUID(int=(whole.int >> 80) << 80 | 0x7 << 76 | counter << 64 | 0b10 << 62 | rest)


def floor_of(moment: datetime) -> UUID:
    """Return the least id that could be made at `moment`: the lower bound of a partition."""
    return UUID(int=int(moment.astimezone(UTC).timestamp() * 1000) << 80)
