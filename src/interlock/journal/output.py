"""A step's output as the database returns it: `jsonb` keeps a value and not its notation.

The worker that executed the step must see the same value as a worker that resumes the run later. Otherwise a flow that
iterates over a dict in key order would ask for other steps when it is replayed.
"""

from decimal import Decimal
from typing import Any

import orjson

NO_OUTPUT = "null"

# From here on a float is written with an exponent, and read back as a whole number if it fits in 64 bits.
_EXPONENT_FROM = 1e16


def read_back(output: str | None) -> Any:
    return as_stored(orjson.loads(output or NO_OUTPUT))


def as_stored(value: Any) -> Any:
    """Return the value as `jsonb` returns it. Idempotent."""
    match value:
        case dict():
            return {name: as_stored(value[name]) for name in sorted(value, key=_place)}
        case list():
            return [as_stored(item) for item in value]
        case float():
            return _number(value)
        case _:
            return value


def _place(name: str) -> tuple[int, bytes]:
    """Return the sort key of a dict key: short ones first, then by their bytes."""
    encoded = name.encode()
    return len(encoded), encoded


def _number(value: float) -> int | float:
    if abs(value) < _EXPONENT_FROM:
        return value or 0.0  # jsonb has no minus zero
    whole = int(Decimal(repr(value)))  # from its digits: 1.2345678901234568e+17 is ...680, not the float's exact value
    return whole if -(2**63) <= whole < 2**64 else value
