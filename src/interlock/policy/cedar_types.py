"""Shapes: the JSON schema of a tool's input, as far as Cedar's types can express it, and the conversion of values.

    string String · integer Long · number decimal · boolean Bool · array Set · object record · null left out

Cedar has no floats: a number becomes a decimal with four places. Input without a Cedar type (any, unions, free
dictionaries, recursion) is invisible to policies; publication rejects a rule that names it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from interlock.audit.canonical import normal
from interlock.wire.validation_errors import described

DEEPEST = 16

_LONG = 2**63
_PLACES = Decimal("0.0001")
_LARGEST_DECIMAL = Decimal("922337203685477.5807")
# 0.1 + 0.2 is 0.30000000000000004: digits smaller than this are artefacts of binary fractions.
_NOISE = Decimal("1e-9")


class UnsupportedType(Exception):
    """A value that does not fit its declared type, so no policy can judge it."""


@dataclass(frozen=True, slots=True)
class Text:
    cedar = "String"
    example = ""

    def fit(self, given: Any, where: str) -> Any:
        if type(given) is not str:
            raise UnsupportedType(f"{where} should be a string, found {described(given)}")
        return given


@dataclass(frozen=True, slots=True)
class Truth:
    cedar = "Bool"
    example = False

    def fit(self, given: Any, where: str) -> Any:
        if type(given) is not bool:
            raise UnsupportedType(f"{where} should be true or false, found {described(given)}")
        return given


@dataclass(frozen=True, slots=True)
class Whole:
    cedar = "Long"
    example = 0

    def fit(self, given: Any, where: str) -> Any:
        number = _untagged(given)
        if type(number) is not int:
            raise UnsupportedType(f"{where} should be a whole number, found {described(given)}")
        if not -_LONG <= number < _LONG:
            raise UnsupportedType(f"{where} is too large for a policy to compare: it has 64 bits")
        return number


@dataclass(frozen=True, slots=True)
class Number:
    """`exact`: a rule uses the number, so a value that four places cannot hold is rejected instead of rounded."""

    exact: bool = True
    from_text: bool = False
    cedar = "decimal"
    example = 0

    def fit(self, given: Any, where: str) -> Any:
        number = self._number(_untagged(given), where)
        if not abs(number) <= _LARGEST_DECIMAL:
            raise UnsupportedType(
                f"{where} is too large for a policy to compare: the largest decimal is {_LARGEST_DECIMAL}"
            )
        rounded = number.quantize(_PLACES)
        if self.exact and abs(rounded - number) > _NOISE:
            raise UnsupportedType(
                f"{where} has more than four decimal places, which a policy cannot compare; round it before"
            )
        return {"__extn": {"fn": "decimal", "arg": f"{rounded:f}"}}

    def _number(self, given: Any, where: str) -> Decimal:
        is_number = type(given) in (int, float) or (self.from_text and type(given) is str)
        try:
            # Convert by way of the text, because the float 0.1 is 0.1000000000000000055….
            number = Decimal(str(given)) if is_number else Decimal("nan")
        except (InvalidOperation, ValueError):
            number = Decimal("nan")
        if not number.is_finite():
            raise UnsupportedType(f"{where} should be a number, found {described(given)}")
        return number


@dataclass(frozen=True, slots=True)
class Many:
    of: "Shape"

    @property
    def cedar(self) -> str:
        return f"Set<{self.of.cedar}>"

    @property
    def example(self) -> Any:
        return []

    def fit(self, given: Any, where: str) -> Any:
        if type(given) is not list:
            raise UnsupportedType(f"{where} should be a list, found {described(given)}")
        return [self.of.fit(item, f"{where}[{i}]") for i, item in enumerate(given) if item is not None]


@dataclass(frozen=True, slots=True)
class Member:
    shape: "Shape"
    always: bool  # present in every request, so that a rule need not test for it with `has`
    default: Any = None


@dataclass(frozen=True, slots=True)
class Record:
    members: Mapping[str, Member]
    left_out: frozenset[str] = frozenset()
    is_closed: bool = False
    names: frozenset[str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", self.left_out.union(self.members))

    @property
    def cedar(self) -> str:
        members = (f"{quoted(n)}{'' if m.always else '?'}: {m.shape.cedar}" for n, m in self.members.items())
        return "{" + ", ".join(members) + "}"

    @property
    def example(self) -> Any:
        return self.completed({}, ())

    def fit(self, given: Any, where: str) -> Any:
        if type(given) is not dict:
            raise UnsupportedType(f"{where} should be an object, found {described(given)}")
        if self.is_closed and not given.keys() <= self.names:
            unknown = ", ".join(sorted(given.keys() - self.names))
            raise UnsupportedType(f"{where} has fields that the tool does not take: {unknown}")
        fitted = {}
        for name, member in self.members.items():
            value = given.get(name, member.default)
            if value is not None:
                fitted[name] = member.shape.fit(value, f"{where}.{name}")
            elif member.always:
                raise UnsupportedType(f"{where}.{name} is missing")
        return fitted

    def completed(self, given: Mapping[str, Any], looked_at: Iterable[str]) -> dict[str, Any]:
        """Add an example for every missing field that no rule uses, so that a test need not name it."""
        missing = self.members.keys() - given.keys() - frozenset(looked_at)
        needed = (name for name in self.members if name in missing and self.members[name].always)
        examples = {name: self.members[name].shape.example for name in needed if self.members[name].default is None}
        return {**given, **examples}

    def every_name(self) -> Iterable[str]:
        for name, member in self.members.items():
            yield name
            inner = member.shape
            while isinstance(inner, Many):
                inner = inner.of
            if isinstance(inner, Record):
                yield from inner.every_name()


Shape = Text | Truth | Whole | Number | Many | Record


def input_shape(schema: Any, looked_at: frozenset[str] | None = None) -> Record | None:
    """Return the shape of the input, or None if the tool declares none.

    `looked_at` are the names that rules use; None means all names.
    """
    if not isinstance(schema, Mapping) or not (schema.get("type") == "object" or "properties" in schema):
        return None
    shape = _TypeReader(schema, looked_at).record(schema, ())
    return shape if isinstance(shape, Record) else None


class _TypeReader:
    def __init__(self, root: Mapping[str, Any], looked_at: frozenset[str] | None) -> None:
        self._root = root
        self._looked_at = looked_at

    def record(self, schema: Mapping[str, Any], trail: tuple[str, ...]) -> Record | None:
        properties = schema.get("properties", {})
        if not isinstance(properties, Mapping):
            return None
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        members, left_out = {}, set()
        for name, inner in properties.items():
            member = self._member(inner, name in required, (*trail, name)) if _is_nameable(name) else None
            if member is None:
                left_out.add(str(name))
            else:
                members[name] = member
        return Record(members, frozenset(left_out), is_closed=schema.get("additionalProperties") is False)

    def _member(self, schema: Any, is_required: bool, trail: tuple[str, ...]) -> Member | None:
        schema = self._resolved(schema)
        shape = self._shape(schema, trail)
        if shape is None:
            return None
        default = self._default(schema, shape)
        return Member(shape, (is_required or default is not None) and not self._is_nullable(schema), default)

    def _default(self, schema: Mapping[str, Any], shape: Shape) -> Any:
        try:
            default = normal(schema.get("default"))
            if default is not None:
                shape.fit(default, "default")
        except Exception:  # ignore a default that does not fit its own type
            return None
        return default

    def _shape(self, schema: Mapping[str, Any], trail: tuple[str, ...]) -> Shape | None:
        if len(trail) > DEEPEST:
            return None
        options = self._options(schema)
        if options is not None:
            return self._union(options, trail)
        match _types(schema):
            case ["string"]:
                return Text()
            case ["integer"]:
                return Whole()
            case ["boolean"]:
                return Truth()
            case ["number"] | ["integer", "number"]:
                return Number(exact=self._is_looked_at(trail))
            case ["array"] if isinstance(schema.get("items"), Mapping) and "prefixItems" not in schema:
                item = self._shape(self._resolved(schema["items"]), (*trail, "[]"))
                return None if item is None else Many(item)
            case ["object"] if schema.get("properties"):
                return self.record(schema, trail)
            case _:
                return None

    def _is_looked_at(self, trail: tuple[str, ...]) -> bool:
        return self._looked_at is None or not self._looked_at.isdisjoint(trail)

    def _union(self, options: list[Mapping[str, Any]], trail: tuple[str, ...]) -> Shape | None:
        kept = [option for option in options if _types(option) != []]
        if _is_decimal(kept):
            # A number or a text: a Decimal if a rule compares it, otherwise left out.
            return Number(from_text=True) if self._is_looked_at(trail) else None
        shapes = [self._shape(option, (*trail, "|")) for option in kept]
        if shapes and all(shape == shapes[0] for shape in shapes):
            return shapes[0]
        numbers = [shape for shape in shapes if isinstance(shape, Number)]
        only_numbers = all(isinstance(shape, Whole | Number) for shape in shapes)
        return numbers[0] if numbers and only_numbers else None

    def _options(self, schema: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                return [self._resolved(option) for option in schema[word]]
        return None

    def _is_nullable(self, schema: Mapping[str, Any]) -> bool:
        options = self._options(schema)
        if options is not None:
            return any(self._is_nullable(option) for option in options)
        declared = schema.get("type")
        if declared is None and "enum" in schema:
            return isinstance(schema["enum"], list) and None in schema["enum"]
        return declared == "null" or (isinstance(declared, list) and "null" in declared)

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """Follow $ref and an allOf with one member.

        Return an empty schema, which has no shape, for a dead reference.
        """
        for _ in range(DEEPEST):
            if not isinstance(schema, Mapping):
                return {}
            only = schema.get("allOf")
            if "$ref" in schema:
                inner = self._pointed(schema["$ref"])
            elif isinstance(only, list) and len(only) == 1 and isinstance(only[0], Mapping):
                inner = only[0]
            else:
                return schema
            schema = {**inner, **{key: value for key, value in schema.items() if key not in ("$ref", "allOf")}}
        return {}

    def _pointed(self, reference: Any) -> Mapping[str, Any]:
        found: Any = self._root
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return {}
        for part in reference[2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}


def _types(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the types except null, sorted, or None if the schema declares none.

    An enumeration declares them by its values.
    """
    declared = schema.get("type")
    if declared is None and isinstance(schema.get("enum"), list):
        declared = [_JSON_TYPES.get(type(value), "unknown") for value in schema["enum"]]
    if declared is None and "const" in schema:
        declared = _JSON_TYPES.get(type(schema["const"]), "unknown")
    if declared is None:
        return None
    names = declared if isinstance(declared, list) else [declared]
    return sorted({str(name) for name in names} - {"null"})


_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def _is_decimal(options: list[Mapping[str, Any]]) -> bool:
    """Return True for pydantic's schema of a Decimal, which is a number or a string of digits."""
    by_type = {(_types(option) or [""])[0]: option for option in options}
    return len(options) == 2 and by_type.keys() == {"number", "string"} and "format" not in by_type["string"]


def _is_nameable(name: Any) -> bool:
    # Cedar's JSON does not read {"__entity": …} and {"__extn": …} as records.
    return isinstance(name, str) and not name.startswith("__") and name == normal(name)


def _untagged(given: Any) -> Any:
    """Return the integer that `canonical` wrote as a tagged string."""
    if type(given) is str and given.startswith("$int:") and len(given) < 30:
        try:
            return int(given[5:])
        except ValueError:
            return given
    return given


def quoted(text: str) -> str:
    """Return a Cedar string literal."""
    return (
        '"' + "".join(c if c.isascii() and (c.isalnum() or c in " ._-/:") else f"\\u{{{ord(c):x}}}" for c in text) + '"'
    )
