"""Messages about invalid fields of a request, for the author of the request."""

from collections.abc import Mapping
from typing import Any

_AN_ID = "01990000-0000-7000-8000-000000000000"


def wrong(fault: Mapping[str, Any]) -> str:
    """Return the message for one pydantic error.

    Most are clear as they are; the others describe a program, not a field.
    """
    match fault["type"]:
        case "uuid_parsing" | "uuid_type":
            return f"{_found(fault)} is not an id, such as {_AN_ID}"
        case "extra_forbidden":
            return "there is no such field"
        case "string_pattern_mismatch" if "a-z" in fault["ctx"]["pattern"]:
            signs = "`_`, `.` and `-`" if "." in fault["ctx"]["pattern"] else "`_`"
            return f"expected a name of lower-case letters, digits, {signs}, found {_found(fault)}"
        case _:
            return str(fault["msg"]).removeprefix("Value error, ")


def _found(fault: Mapping[str, Any]) -> str:
    # An unpaired surrogate, which JSON can contain, has to be printable in the answer.
    return repr(fault["input"])[:80].encode(errors="backslashreplace").decode()
