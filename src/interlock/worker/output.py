"""What a tool or a flow returned, as it is kept: JSON that PostgreSQL can store and everybody can read again."""

import re
from typing import Any

import orjson
from pydantic_core import PydanticSerializationError, to_json

from interlock.errors import Terminal
from interlock.tools import Tool, Veil
from interlock.wire.grammar import DEEPEST, is_too_deep

# Not after an escaped backslash: then it is six characters of text.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def encode_output(result: Any, limit: int, tool: Tool, veil: Veil) -> str:
    return _fitting(tool.kept(result, veil) if tool.result is not None else _as_json(result, veil), limit)


def encode_result(result: Any, limit: int) -> str:
    """What a flow returned, as it is kept."""
    return _fitting(_as_json(result, Veil()), limit)


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
        # Dataclasses are left to pydantic, which knows what in its own is secret.
        return orjson.dumps(result, option=orjson.OPT_PASSTHROUGH_DATACLASS)
    except TypeError:
        pass
    try:
        encoded = to_json(result, context=veil, inf_nan_mode="null")
        orjson.loads(encoded)  # a number that nobody could read again
        return encoded
    except (PydanticSerializationError, ValueError) as error:
        raise Terminal(f"the output is not JSON: {error}") from None
