"""Canonical JSON: one spelling for each value, so that equal values have equal digests (RFC 8785).

RFC 8785 rejects integers beyond 2^53, NaN and unpaired surrogates. A digest must not fail on a value that a tool
accepts, so these are written as strings with a tag:

    9007199254740993    "$int:9007199254740993"      also for whole floats, as 50.0 is 50
    nan, inf, -inf      "$float:nan"
    a lone surrogate    "$utf16:d800…"               the whole string, in hexadecimal
    bytes               "$bytes:aGVsbG8="

Writing a document, parsing it with any parser and writing it again gives the same bytes.
"""

import base64
import math
from collections.abc import Mapping, Set
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import orjson
import rfc8785

from interlock.errors import Invalid
from interlock.wire import common

LARGEST_INT = 2**53 - 1
# An action contains its arguments, which may be nested as deeply as a run's input.
DEEPEST = 20 + common.DEEPEST

# From here on a float is written with an exponent, and parsed as a float.
_EXPONENT_FROM = 1e21
# Python refuses to write longer integers in decimal digits.
_LONG_BITS = 10_000


def canonical(value: Any) -> bytes:
    """Return the canonical bytes of any JSON value, and of the values above that JSON cannot hold."""
    return written(normal(value))


def written(plain: Any) -> bytes:
    """Return the canonical bytes of a value that is already `normal`."""
    # orjson writes the same bytes eight times faster where both orders and notations agree.
    return orjson.dumps(plain, option=orjson.OPT_SORT_KEYS) if _is_simple(plain) else rfc8785.dumps(plain)


def normal(value: Any, depth: int = 0) -> Any:
    """Return the value in plain JSON types, with tags where JSON has no type for it. The function is idempotent."""
    kind = type(value)
    if kind is str:
        return value if value.isascii() else _text(value)
    if kind is int:
        return value if -LARGEST_INT <= value <= LARGEST_INT else _large(value)
    if value is None or kind is bool:
        return value
    if depth > DEEPEST:
        raise Invalid(f"it is nested deeper than {DEEPEST} levels")
    if kind is dict:
        return {_key(key): normal(member, depth + 1) for key, member in value.items()}
    if kind is list or kind is tuple:
        return [normal(item, depth + 1) for item in value]
    if kind is float:
        return _float(value)
    return _foreign(value, depth)


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        return "$utf16:" + value.encode("utf-16-be", "surrogatepass").hex()
    return value


def _large(value: int) -> str:
    return f"$int:{value}" if value.bit_length() < _LONG_BITS else f"$int:{value:#x}"


def _float(value: float) -> Any:
    if not math.isfinite(value):
        return f"$float:{value}"
    # 50.0 would be written as 50 and parsed as an integer, so convert it now.
    return normal(int(value)) if value.is_integer() and abs(value) < _EXPONENT_FROM else value


def _key(key: Any) -> str:
    if type(key) is str and key.isascii():
        return key
    plain = normal(key)
    return plain if type(plain) is str else f"$key:{canonical(plain).decode()}"


def _foreign(value: Any, depth: int) -> Any:
    """Convert a value that Python code passed directly; values that came as JSON never get here."""
    match value:
        case Enum():
            return normal(value.value, depth + 1)
        case bool() | int() | float():  # subclasses, as plain numbers
            return normal((int if isinstance(value, int) else float)(value), depth + 1)
        case str():
            return normal(str.__str__(value))
        case bytes() | bytearray():
            return "$bytes:" + base64.b64encode(value).decode()
        case datetime() | date() | time():
            return value.isoformat()
        case Decimal() | UUID():
            return str(value)
        case Mapping():
            return normal(dict(value), depth)
        case Set():
            return sorted((normal(item, depth + 1) for item in value), key=canonical)
        case list() | tuple():
            return normal(list(value), depth)
        case _:
            return normal(f"${type(value).__qualname__}:{value}")


def _is_simple(plain: Any) -> bool:
    """Return True if UTF-8 order equals UTF-16 order for every key, and no float needs an exponent."""
    kind = type(plain)
    if kind is dict:
        return all(key.isascii() and _is_simple(member) for key, member in plain.items())
    if kind is list:
        return all(map(_is_simple, plain))
    return kind is not float or 1e-3 <= abs(plain) < 1e15
