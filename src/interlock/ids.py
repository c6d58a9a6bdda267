"""Ids are UUIDv7: they sort by time, so the journal can be partitioned by them."""

import hashlib
import os
import time
from datetime import UTC, datetime
from uuid import UUID

_last = 0


def uuid7() -> UUID:
    """48 bits of milliseconds, 12 of a counter that keeps one process's ids in order, 62 random."""
    global _last
    stamp = max(time.time_ns() // 1_000_000 << 12, _last + 1)
    _last = stamp
    tail = int.from_bytes(os.urandom(8), "big") & ((1 << 62) - 1)
    return UUID(int=(stamp >> 12) << 80 | 0x7 << 76 | (stamp & 0xFFF) << 64 | 0b10 << 62 | tail)


def within(whole: UUID, part: str) -> UUID:
    """The id of a part that has no row of its own: of its whole's time, and always the same."""
    tail = int.from_bytes(hashlib.sha256(f"{whole}:{part}".encode()).digest()[:10], "big")
    counter, rest = tail >> 68, tail & ((1 << 62) - 1)
    return UUID(int=(whole.int >> 80) << 80 | 0x7 << 76 | counter << 64 | 0b10 << 62 | rest)


def floor_of(moment: datetime) -> UUID:
    """The least id that could be made at `moment`: the lower bound of a partition."""
    return UUID(int=int(moment.astimezone(UTC).timestamp() * 1000) << 80)
