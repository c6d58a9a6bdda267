"""A number in a file that two processes map: one adds, the other reads, and neither asks the database."""

import mmap
import os
import struct
from pathlib import Path


class Counter:
    """For a single writer."""

    def __init__(self, path: str | Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, 8)
        self._map = mmap.mmap(descriptor, 8)
        os.close(descriptor)
        self._count = self.value()

    def add(self) -> None:
        self._count += 1
        struct.pack_into("<q", self._map, 0, self._count)

    def value(self) -> int:
        value: int = struct.unpack_from("<q", self._map, 0)[0]
        return value
