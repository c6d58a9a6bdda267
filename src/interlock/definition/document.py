"""A document: YAML or JSON parsed into plain JSON values, with the line of each.

This uses parser events instead of a loader. A loader would follow aliases, take the last of two equal keys and convert
`on`, `1:30` and dates. Plain scalars mean what they mean in JSON; all others are strings.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml

from interlock.definition.diagnostics import Faults, Path, TooManyFaults
from interlock.errors import DefinitionInvalid

T = TypeVar("T")

MOST_BYTES = 1 << 20
DEEPEST = 64

_PARSER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# Any escape, so that the second half of `\\\\u` is not taken for a new one; the groups are a surrogate pair.
_ESCAPE = re.compile(r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|.)", re.IGNORECASE | re.DOTALL)


class InvalidDocument(Exception):
    """Raised when the text cannot be parsed to its end."""

    def __init__(self, line: int | None, message: str, path: Path = ()) -> None:
        super().__init__(message)
        self.line, self.message, self.path = line, message, path


@dataclass(frozen=True, slots=True)
class Document:
    value: Any
    lines: dict[Path, int]


def made_from(
    text: str | bytes, file: str, make: Callable[[Any, Faults], T], also: Callable[[T, Faults], None] | None = None
) -> T:
    """Return what `make` makes of a document. Raise `DefinitionInvalid` with every fault and its line.

    `also` checks the result against facts outside the document, such as the tools of this server.
    """
    faults = Faults(file)
    try:
        found = read(text, faults)
        faults.lines = found.lines
        made = make(found.value, faults)
        if also is not None:
            also(made, faults)
        if not faults:
            return made
    except InvalidDocument as error:
        faults.add(error.path, error.message, line=error.line)
    except TooManyFaults:
        pass
    raise DefinitionInvalid(faults.sorted())


def lines_of(text: str | bytes) -> dict[Path, int]:
    """Return the line of each value of a document that was parsed before."""
    return read(text, Faults("")).lines


def read(text: str | bytes, faults: Faults) -> Document:
    """Parse a document. Raise `InvalidDocument` where parsing has to stop; add other mistakes to `faults`."""
    decoded = _decode(text)
    if not decoded.lstrip().startswith("{"):
        return _YamlReader(decoded, faults).document()
    try:
        json.loads(decoded)
    except RecursionError:
        raise InvalidDocument(None, f"it is nested deeper than {DEEPEST} levels") from None
    except ValueError as error:
        return _read_flow_style(decoded, faults, error)
    return _YamlReader(_as_yaml(decoded), faults).document()


def _read_flow_style(text: str, faults: Faults, error: ValueError) -> Document:
    """Parse text that starts like JSON but is not: as YAML's flow style, else report the JSON error."""
    try:
        return _YamlReader(text, faults).document()
    except InvalidDocument:
        if isinstance(error, json.JSONDecodeError):
            raise InvalidDocument(error.lineno, f"not valid JSON: {error.msg} (column {error.colno})") from None
        raise


def _decode(text: str | bytes) -> str:
    try:
        raw = text.encode() if isinstance(text, str) else bytes(text)
        decoded = raw.decode("utf-8-sig")
    except UnicodeError as error:
        raise InvalidDocument(None, f"not valid UTF-8: {error.reason if hasattr(error, 'reason') else error}") from None
    if len(raw) > MOST_BYTES:
        raise InvalidDocument(None, f"it is larger than {MOST_BYTES >> 10} KiB")
    return decoded


def _as_yaml(text: str) -> str:
    """Adapt valid JSON where YAML parsers reject it: tabs, and characters written as surrogate pairs."""

    def join(escape: re.Match[str]) -> str:
        high, low = escape.groups()
        return bytes.fromhex(high + low).decode("utf-16-be") if high else escape.group()

    return _ESCAPE.sub(join, text.replace("\t", " "))


class _YamlReader:
    def __init__(self, text: str, faults: Faults) -> None:
        self._events = _events(text)
        self._faults = faults
        self._lines: dict[Path, int] = {}

    def document(self) -> Document:
        next(self._events)  # the start of the stream
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return Document(None, self._lines)
        value = self._value(next(self._events), ())
        next(self._events)  # the end of the document
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise InvalidDocument(_line(after), "expected one document, found a second")
        return Document(value, self._lines)

    def _value(self, event: Any, path: Path) -> Any:
        self._lines.setdefault(path, _line(event))
        if len(path) > DEEPEST:
            raise InvalidDocument(_line(event), f"it is nested deeper than {DEEPEST} levels")
        if isinstance(event, yaml.AliasEvent):
            return self._fault(event, path, f"`*{event.anchor}` is an alias; write the value out")
        if event.tag not in (None, "!"):
            self._fault(event, path, f"`{event.tag}` is a tag; only plain values can be used")
        match event:
            case yaml.ScalarEvent():
                return self._scalar(event, path)
            case yaml.SequenceStartEvent():
                return self._list(path)
            case _:
                return self._mapping(path)

    def _list(self, path: Path) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._value(event, (*path, len(items))))
        return items

    def _mapping(self, path: Path) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise InvalidDocument(_line(event), "a key must be a plain word, found something else", path)
            key = event.value
            if key in members:
                self._fault(event, (*path, key), "this key is written twice")
            elif "\0" in key:
                self._fault(event, path, "a key contains a NUL character, which cannot be stored")
            else:
                self._lines[(*path, key)] = _line(event)
            members[key] = self._value(next(self._events), (*path, key))
        return members

    def _scalar(self, event: yaml.ScalarEvent, path: Path) -> Any:
        text: str = event.value
        if "\0" in text:
            return self._fault(event, path, "it contains a NUL character, which cannot be stored")
        if not event.implicit[0]:  # quoted, or a block
            return text
        if text in _WORDS:
            return _WORDS[text]
        number = _NUMBER.fullmatch(text)
        return self._number(event, path, whole=not any(number.groups())) if number else text

    def _number(self, event: yaml.ScalarEvent, path: Path, *, whole: bool) -> Any:
        # Beyond these limits the database would return a different number.
        if whole and len(event.value) < 21 and -(2**63) <= int(event.value) < 2**63:
            return int(event.value)
        if not whole and abs(value := float(event.value)) < float("inf"):
            return value
        return self._fault(event, path, f"{event.value[:40]} is too large for a number; write it as a string")

    def _fault(self, event: Any, path: Path, message: str) -> None:
        self._faults.add(path, message, line=_line(event))


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _events(text: str) -> Iterator[Any]:
    try:
        yield from yaml.parse(text, Loader=_PARSER)
    except yaml.MarkedYAMLError as error:
        raise InvalidDocument(*_explained(error, text)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InvalidDocument(line, "not valid YAML: it contains a control character") from None


def _explained(error: yaml.MarkedYAMLError, text: str) -> tuple[int | None, str]:
    mark = error.problem_mark or error.context_mark
    problem = " ".join(part for part in (error.problem, error.context) if part)
    if mark is None:
        return None, f"not valid YAML: {problem}"
    lines = text.splitlines()
    if mark.line < len(lines) and lines[mark.line][mark.column : mark.column + 1] == "\t":
        problem = "it is indented with a tab; YAML wants spaces"
    return mark.line + 1, f"not valid YAML: {problem} (column {mark.column + 1})"
