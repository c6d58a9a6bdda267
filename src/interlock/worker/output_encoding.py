"""The stored form of a result of a tool or flow: JSON that PostgreSQL can store and any reader can parse."""

import re
from typing import Any

import orjson
from pydantic_core import PydanticSerializationError, to_json

from interlock.errors import Terminal
from interlock.tools import RegisteredTool, Veil
from interlock.wire.common import DEEPEST, is_too_deep

# Not after an escaped backslash: then these are six characters of text.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def encode_output(result: Any, limit: int, tool: RegisteredTool, veil: Veil) -> str:
    return _fitting(tool.kept(result, veil) if tool.result is not None else _as_json(result, veil), limit)


def encode_result(result: Any, limit: int) -> str:
    """Return the stored form of a flow's result."""
    return _fitting(_as_json(result, Veil()), limit)


def dropped_output(tool: RegisteredTool, why: str) -> str:
    """Return the marker that replaces the output of a completed write if that output cannot be stored."""
    reason = f"{tool.name} was done, but its output was not stored: {why}. Do not repeat the call to get the output."
    return to_json({"output_dropped": True, "reason": reason}).decode()


def _fitting(encoded: bytes, limit: int) -> str:
    if len(encoded) > limit:
        raise Terminal(
            f"the output has {len(encoded):,} bytes; at most {limit:,} are kept (INTERLOCK_MAX_OUTPUT_BYTES)"
        )
    if _NUL.search(encoded):
        raise Terminal("the output contains a NUL character, which PostgreSQL cannot store")
    if is_too_deep(encoded):
        raise Terminal(f"the output is nested deeper than {DEEPEST} levels")
    return encoded.decode()


def _as_json(result: Any, veil: Veil) -> bytes:
    try:
        # Leave dataclasses to pydantic, which knows the secret fields of its dataclasses.
        return orjson.dumps(result, option=orjson.OPT_PASSTHROUGH_DATACLASS)
    except TypeError:
        pass
    try:
        encoded = to_json(result, context=veil, inf_nan_mode="null")
        orjson.loads(encoded)  # reject a number that no reader could parse again
        return encoded
    except (PydanticSerializationError, ValueError) as error:
        raise Terminal(f"the output is not JSON: {error}") from None
