"""A section: one mapping of a definition, read field by field, collecting every fault."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from interlock.definition.cel_lexer import closing_brace
from interlock.definition.diagnostics import Faults, Path
from interlock.definition.duration import parse_duration
from interlock.definition.expression import Expression, Template, TemplateInvalid
from interlock.lifecycle import Term
from interlock.wire.validation_errors import described, suggestion

T = TypeVar("T", bound=Term)
NOTHING = Template.parse(None)


class MappingReader:
    """Reads one mapping. Every reader returns a usable value, a default after a fault, so that reading continues."""

    def __init__(self, value: Mapping[str, Any], path: Path, faults: Faults) -> None:
        self.value = value
        self.path = path
        self.faults = faults

    def has(self, key: str) -> bool:
        """Return True if the key has a value. An optional key without a value counts as omitted."""
        return self.value.get(key) is not None

    def fault(self, key: str, message: str) -> None:
        self.faults.add((*self.path, key), message)

    def expected(self, key: str, what: str) -> None:
        self.fault(key, f"expected {what}, found {described(self.value.get(key))}")

    def only(self, known: Iterable[str]) -> None:
        known = tuple(known)
        for key in self.value:
            if key not in known:
                self.fault(key, "unknown key" + (suggestion(key, known) or f"; known are {', '.join(known)}"))

    def text(self, key: str, default: str = "") -> str:
        if not self.has(key):
            return default
        if not isinstance(self.value[key], str):
            self.expected(key, "a string")
            return default
        return str(self.value[key])

    def flag(self, key: str) -> bool:
        if self.has(key) and not isinstance(self.value[key], bool):
            self.expected(key, "true or false")
        return self.value.get(key) is True

    def choice(self, key: str, terms: type[T], default: T) -> T:
        if not self.has(key):
            return default
        value = self.value[key]
        if isinstance(value, str) and value in terms._value2member_map_:
            return terms(value)
        found = f"`{value}`" if isinstance(value, str) else described(value)
        self.fault(key, f"expected one of {', '.join(terms)}, found {found}")
        return default

    def integer(self, key: str, default: int, least: int, most: int) -> int:
        if not self.has(key):
            return default
        value = self.value[key]
        if isinstance(value, bool) or not isinstance(value, int):
            self.expected(key, f"a whole number from {least} to {most}")
            return default
        if not least <= value <= most:
            self.fault(key, f"expected a whole number from {least} to {most}, found {value}")
        return value

    def duration(self, key: str, default: float, *, above_zero: bool = False) -> float:
        if not self.has(key):
            return default
        return self.seconds(self.value[key], (*self.path, key), above_zero=above_zero)

    def seconds(self, value: Any, path: Path, *, above_zero: bool = False) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            self.faults.add(path, f"expected a duration such as 30s, 5m or 4h, found {described(value)}")
            return 0.0
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            self.faults.add(path, str(error))
            return 0.0
        if above_zero and seconds == 0:
            self.faults.add(path, "expected a duration above zero")
        return seconds

    def template(self, key: str, default: Any) -> Template:
        try:
            return Template.parse(self.value[key] if self.has(key) else default)
        except TemplateInvalid as error:
            for path, message in error.faults:
                self.faults.add((*self.path, key, *path), message)
            return error.rest

    def condition(self, key: str) -> Expression | None:
        """Return an expression, with or without `${}` around it, or true or false."""
        if not self.has(key):
            return None
        value = self.value[key]
        if isinstance(value, bool):
            return Expression.parse("true" if value else "false")
        if not isinstance(value, str):
            self.expected(key, "an expression")
            return None
        try:
            return Expression.parse(_unwrapped(value.strip()))
        except ValueError as error:
            self.fault(key, str(error))
            return None

    def items(self, key: str, what: str) -> list[Any]:
        value = self.value.get(key)
        if isinstance(value, list):
            return value
        self.expected(key, f"a list of {what}")
        return []

    def section(self, key: str, example: str) -> "MappingReader":
        value = self.value[key] if self.has(key) else {}
        if not isinstance(value, Mapping):
            self.fault(key, f"expected a mapping such as {example}, found {described(value)}")
            value = {}
        return MappingReader(value, (*self.path, key), self.faults)


def _unwrapped(text: str) -> str:
    is_wrapped = text.startswith("${") and closing_brace(text, 2) == len(text) - 1
    return text[2:-1] if is_wrapped else text
