"""A fault: one mistake in a definition, with its place and the correction."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# The place of a value inside a document: ("steps", 2, "retry").
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    file: str
    line: int | None
    path: str
    message: str

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(part for part in (where, self.path, self.message) if part)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class TooManyFaults(Exception):
    """Raised after the last fault worth reporting, so that a hostile document costs no more than an honest one."""


class Faults:
    """Collects faults while reading continues, so that all of them are reported at once."""

    MOST = 200

    def __init__(self, file: str) -> None:
        self.lines: Mapping[Path, int] = {}
        self._file = file
        self._found: dict[Fault, None] = {}  # in order, each once

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, path: Path, message: str, *, line: int | None = None) -> None:
        self._found[Fault(self._file, line or self._line_of(path), dotted(path), message)] = None
        if len(self._found) >= self.MOST:
            raise TooManyFaults

    def sorted(self) -> list[Fault]:
        return sorted(self._found, key=lambda fault: fault.line or 0)

    def _line_of(self, path: Path) -> int | None:
        # A missing value has no line; use the line of the nearest enclosing value.
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


def dotted(path: Path) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
