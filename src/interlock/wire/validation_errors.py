"""Messages about invalid values, for the person who wrote them: fields, arguments, options and settings."""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

_AN_ID = "01990000-0000-7000-8000-000000000000"

# What a value has to be, by pydantic's name of the error. The texts of pydantic describe a program, not a value.
_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "enum": "{expected}",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller number",
    "int_type": "a whole number",
    "list_type": "a list",
    "literal_error": "{expected}",
    "mapping_type": "a mapping",
    "model_attributes_type": "a mapping",
    "model_type": "a mapping",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "string_type": "a string",
    "too_long": "at most {max_length} items",
    "too_short": "at least {min_length} items",
}
# What a value that may have almost any character has nevertheless, by the pattern that it does not match.
_FORBIDDEN = {r"^[^\x00]+$": "a NUL character", r"^[^\x00-\x20]+$": "a blank or a control character"}
# Only the length or the kind of these values is shown: the field takes any content, which may be long or secret.
_BY_LENGTH = frozenset({"string_too_long", "string_too_short", "too_long", "too_short"})
_BY_KIND = frozenset({"dict_type", "list_type", "mapping_type", "model_attributes_type", "model_type", "string_type"})
# The message says it all, or comes from one of our validators.
_WITHOUT_VALUE = frozenset({"assertion_error", "extra_forbidden", "missing", "value_error"})


def explain(error: ValidationError, *, show_input: bool = True, known: Collection[str] = ()) -> str:
    """Return one line with each place and its problem: `amount: expected a whole number, found 'ten'`."""
    return "; ".join(
        ": ".join(filter(None, (".".join(map(str, fault["loc"])), wrong(fault, show_input=show_input, known=known))))
        for fault in error.errors(include_url=False)
    )


def wrong(fault: Mapping[str, Any], *, show_input: bool = True, known: Collection[str] = ()) -> str:
    """Return the message for one pydantic error: what was expected, and unless hidden what was found.

    `known` are the names that a mapping with a misspelt one may have.
    """
    kind, context = fault["type"], fault.get("ctx", {})
    if kind in ("uuid_parsing", "uuid_type"):
        return f"{_shown(fault['input'])} is not an id, such as {_AN_ID}"
    if kind == "extra_forbidden":
        return f"there is no such field{suggestion(str(fault['loc'][-1]), known)}"
    if kind in ("string_too_short", "too_short") and not fault["input"]:
        return "it must not be empty"
    if kind == "string_pattern_mismatch" and context["pattern"] in _FORBIDDEN:
        return f"it contains {_FORBIDDEN[context['pattern']]}"
    if kind == "string_pattern_mismatch" and context["pattern"].startswith("^[a-z"):
        signs = "`_`, `.` and `-`" if "." in context["pattern"] else "`_`"
        return f"expected a name of lower-case letters, digits, {signs}, found {_shown(fault['input'])}"
    message = _expected(fault)
    if not show_input or kind in _WITHOUT_VALUE:
        return message
    return f"{message}, found {_found(kind, fault['input'])}"


def _expected(fault: Mapping[str, Any]) -> str:
    if (expected := _EXPECTED.get(fault["type"])) is not None:
        return f"expected {expected.format(**{name: _plain(value) for name, value in fault.get('ctx', {}).items()})}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    return message.replace("Input should be", "expected", 1) if message.startswith("Input should be") else message


def _found(kind: str, value: Any) -> str:
    if kind in _BY_LENGTH:
        return str(len(value))
    return described(value) if kind in _BY_KIND else _shown(value)


def _plain(limit: Any) -> Any:
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def _shown(value: Any) -> str:
    # An unpaired surrogate, which JSON can contain, has to be printable in the answer.
    return repr(value)[:80].encode(errors="backslashreplace").decode()


# Comparing two words takes time in the square of their length, and a document may misspell as many words as it has
# faults.
_LONGEST_GUESS = 40
_MOST_GUESSES = 20


def suggestion(word: str, known: Iterable[str]) -> str:
    if len(word) > _LONGEST_GUESS:
        return ""
    short = [name for name in known if len(name) <= _LONGEST_GUESS]
    guesses = sorted(short, key=lambda name: abs(len(name) - len(word)))[:_MOST_GUESSES]
    near = get_close_matches(word, guesses, n=1)
    return f"; did you mean `{near[0]}`?" if near else ""


def described(value: Any) -> str:
    """Return the kind of value in the words of a user."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "a mapping"
        case _:
            return f"a {type(value).__name__}"
