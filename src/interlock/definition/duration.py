"""Durations in text form: 500ms, 30s, 5m, 4h, 7d, 1h30m."""

import re

from interlock.wire.common import LONGEST_SECONDS

_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_WRITTEN = re.compile(rf"(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m(?!s))?(?:{_NUMBER}s)?(?:{_NUMBER}ms)?")
_SECONDS = (86400.0, 3600.0, 60.0, 1.0, 0.001)
_UNITS_MS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))


def parse_duration(value: str | int | float) -> float:
    """Return the seconds of a duration; a plain number is already in seconds."""
    seconds = _from_text(value) if isinstance(value, str) else _from_number(value)
    if seconds > LONGEST_SECONDS:
        raise ValueError(f"{value!r} is longer than the longest duration, {format_duration(LONGEST_SECONDS)}")
    return seconds


def _from_text(text: str) -> float:
    written = _WRITTEN.fullmatch(text.strip())
    if written is None or not text.strip():
        raise ValueError(f"{text!r} is not a duration; write 30s, 5m, 4h, 7d or 1h30m")
    return sum(float(number) * unit for number, unit in zip(written.groups(), _SECONDS, strict=True) if number)


def _from_number(number: int | float) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f"{number!r} is not a duration; write 30s, 5m, 4h, 7d or 1h30m")
    if not number >= 0:  # so that NaN is rejected too
        raise ValueError(f"{number!r} is not a duration; it must be zero or more seconds, or 30s, 5m, 4h, 7d, 1h30m")
    return float(min(number, 2 * LONGEST_SECONDS))


def format_duration(seconds: float) -> str:
    """Return the shortest text for a duration, to the millisecond."""
    left = round(seconds * 1000)
    parts = []
    for unit, size in _UNITS_MS:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
