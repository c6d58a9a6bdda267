"""The pulse: memory that the supervisor shares with one worker process, so that either can act for the other.

A tool that holds Python's interpreter lock (a regular expression, a call into C) stops every thread of its worker,
including the heartbeat and its watchdog. The supervisor notices the silence and sends heartbeats for the worker. If
none is acknowledged it kills the worker before its lease ends. The worker reads here how far its lease was renewed.
"""

import mmap
import os
import struct
import tempfile
from dataclasses import dataclass

_SLOT = struct.Struct("d")


@dataclass(slots=True)
class _Moment:
    """A moment of the monotonic clock, which all processes of a machine share. 0 means never."""

    memory: mmap.mmap
    at: int

    def get(self) -> float:
        moment: float = _SLOT.unpack_from(self.memory, self.at)[0]
        return moment

    def set(self, moment: float) -> None:
        _SLOT.pack_into(self.memory, self.at, moment)


class Pulse:
    """`alive`: when the worker's heartbeat thread last ran.

    `own` and `second`: when the worker and its supervisor sent their last acknowledged heartbeat.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        memory = mmap.mmap(number, mmap.PAGESIZE)
        self.alive, self.own, self.second = (_Moment(memory, n * _SLOT.size) for n in range(3))

    @classmethod
    def make(cls) -> "Pulse":
        """Allocate the shared memory. Its file has no name; a child process inherits it by its descriptor number."""
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            return cls(os.dup(file.fileno()))

    def close(self) -> None:
        """Close the descriptor. The memory lives as long as this object."""
        os.close(self.number)
