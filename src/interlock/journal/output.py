"""What a step returned, as it is read back: `jsonb` keeps a value and not how it was written.

Whoever was there when the step ended must see what whoever takes the run up later will see. A flow that goes through
a dict in the order of its keys would else ask for other steps when it is run again.
"""

from decimal import Decimal
from typing import Any

import orjson

NO_OUTPUT = "null"

# From here on a float is written with an exponent, and read back as a whole number if that has no more than 64 bits.
_EXPONENT_FROM = 1e16


def read_back(output: str | None) -> Any:
    return as_stored(orjson.loads(output or NO_OUTPUT))


def as_stored(value: Any) -> Any:
    """Twice is the same as once."""
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
    """Of a key among others: short ones first, then by their bytes."""
    encoded = name.encode()
    return len(encoded), encoded


def _number(value: float) -> int | float:
    if abs(value) < _EXPONENT_FROM:
        return value or 0.0  # there is no minus zero
    whole = int(Decimal(repr(value)))  # by its digits: 1.2345678901234568e+17 is ...680, whatever the float stands for
    return whole if -(2**63) <= whole < 2**64 else value
