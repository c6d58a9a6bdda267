"""Patterns: regular expressions by users, matched by RE2 in time bounded by the pattern and the text.

RE2 has no look-around and no references to groups, so it never backtracks: a match takes at most the size of the
compiled pattern times the length of the text. Both are known before the match starts, so a match can be rejected.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import re2

# Larger patterns do not compile, including those that are large only because of repetitions.
_LONGEST = 10_000
_MOST_MEMORY = 1 << 20
# The cost of compiling, in the unit of `Pattern.work`.
_COMPILING = 1000
# A thousand of these take a microsecond or two.
MOST_WORK = 100_000_000


class PatternInvalid(ValueError):
    """The pattern is too large, or RE2 does not accept it."""


class Pattern:
    __slots__ = ("_compiled", "_size", "source")

    def __init__(self, source: str, dot_matches_newline: bool = False) -> None:
        if len(source) > _LONGEST:
            raise PatternInvalid(f"a pattern has at most {_LONGEST:,} characters; this one has {len(source):,}")
        options = re2.Options()
        options.max_mem, options.log_errors, options.dot_nl = _MOST_MEMORY, False, dot_matches_newline
        self.source = source
        try:
            self._compiled: Any = re2.compile(source, options)
        except (re2.error, UnicodeEncodeError) as error:
            raise PatternInvalid(f"{source[:120]!r} is not a valid regex: {_reason(error)}") from None
        self._size: int = self._compiled.programsize + self._compiled.reverseprogramsize

    def work(self, text: str) -> int:
        """Return the highest cost of a match in this text."""
        return self._size * (4 * len(text) + 1) if not text.isascii() else self._size * (len(text) + 1)

    def matches(self, text: str) -> bool:
        """Return whether the pattern matches anywhere in the text."""
        return self._search(text) is not None

    def groups(self, text: str) -> Mapping[str, str | None] | None:
        """Return the named groups of the first match in the text, or None."""
        found = self._search(text)
        return None if found is None else found.groupdict()

    def _search(self, text: str) -> Any:
        # An unpaired surrogate, which JSON can carry, cannot be encoded.
        return self._compiled.search(text.encode(errors="replace").decode())


@lru_cache(maxsize=64)
def pattern(source: str, *, dot_matches_newline: bool = False) -> Pattern:
    """Return the compiled pattern. Raise `PatternInvalid`."""
    return Pattern(source, dot_matches_newline)


def compiling(source: str) -> int:
    """Return the cost of compiling the pattern, in the unit of `Pattern.work`."""
    return min(len(source), _LONGEST) * _COMPILING


def _reason(error: Exception) -> str:
    said = (
        error.args[0]
        if error.args and not isinstance(error, UnicodeEncodeError)
        else "it contains an unpaired surrogate"
    )
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)
