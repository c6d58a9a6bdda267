"""Expressions: CEL over a run's input, trigger and settled steps, alone or inside the strings of a template.

`${secrets.name}` is not one of them. It is a place in the template that keeps its name whenever the template is
rendered, and is given its value only where the values are handed in. CEL never sees a secret, and a text that comes
from outside is never searched for such places: whatever it says, it stays text.
"""

import base64
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import cel
import orjson

from interlock.definition.fault import Path, dotted
from interlock.definition.tokens import Growth, References, closing_brace, growth, references

ROOTS = ("input", "trigger", "run", "steps")
_CONVERSIONS = {"bytes", "double", "duration", "dyn", "int", "string", "timestamp", "type", "uint"}
_PARTS_OF_TIME = {
    "getDate",
    "getDayOfMonth",
    "getDayOfWeek",
    "getDayOfYear",
    "getFullYear",
    "getHours",
    "getMilliseconds",
    "getMinutes",
    "getMonth",
    "getSeconds",
}
FUNCTIONS = frozenset({"contains", "endsWith", "matches", "size", "startsWith"} | _CONVERSIONS | _PARTS_OF_TIME)
MACROS = frozenset({"all", "exists", "exists_one", "existsOne", "filter", "has", "map"})

# The parser and the interpreter recurse in native code; no honest expression comes near this.
_LONGEST = 4000
_DEEPEST = 2
# What one expression may cost, in units of some fifty nanoseconds. It cannot be interrupted, and holds the process.
_MOST_WORK = 200_000_000
# A value costs as much as so many characters.
_CHARACTERS = 64
_SURELY_FEW = 100
_TOO_MUCH = "goes through too much data too often; give its macros smaller lists, or use a tool for it"

SECRET_NAME = re.compile(r"[a-z][a-z0-9_]{0,99}")
_SECRET = re.compile(r"\s*secrets\s*\.\s*([A-Za-z_][A-Za-z0-9_]*)\s*")

_SYNTAX_ERROR = re.compile(r"ERROR: <input>:(\d+):(\d+): (?:Syntax error: )?(.*)")
_PLAIN = frozenset({str, int, bool, type(None)})


class ExpressionFailed(ValueError):
    """An expression that is right in form had no value in this run."""

    def __init__(self, source: str, why: str) -> None:
        super().__init__(f"{_quoted(source)}: {why}")
        self.source = source
        self.why = why


class TemplateInvalid(ValueError):
    """Every expression of a template that does not compile, each with its path, and the template of the others."""

    def __init__(self, faults: tuple[tuple[Path, str], ...], rest: "Template") -> None:
        super().__init__("; ".join(f"{dotted(path)}: {why}" if path else why for path, why in faults))
        self.faults = faults
        self.rest = rest


class Scope:
    """What the expressions of one run can see.

    Values are handed to CEL when an expression asks for them: most steps have none, and converting every output of a
    long run for each of its steps would cost the square of its length.
    """

    __slots__ = ("_context", "_roots", "_shown", "_steps", "_waiting")

    def __init__(self, input: Any, trigger: Any, run: Mapping[str, Any]) -> None:
        self._roots: dict[str, Any] = {"input": input, "trigger": trigger, "run": run}
        self._steps: dict[str, tuple[str, Any]] = {}
        self._context: Any = None
        self._waiting: set[str] = set()  # roots that CEL does not hold yet
        self._shown: frozenset[str] | None = None  # steps that CEL holds now

    @classmethod
    def of(cls, **roots: Any) -> "Scope":
        """What the expressions of something else than a run can see."""
        scope = cls(None, None, {})
        scope._roots = roots
        return scope

    def seeing(self, output: Any) -> "Scope":
        """A scope of the same run in which `output` is what one step returned: for what undoes it."""
        scope = Scope(None, None, {})
        scope._roots = {**self._roots, "output": output}
        scope._steps = self._steps
        return scope

    @property
    def trigger(self) -> Mapping[str, Any]:
        """What started the run."""
        return self._roots["trigger"] or {}

    def settle(self, key: str, status: str, output: Any) -> None:
        self._steps[key] = (status, output)
        self._shown = None

    def context(self, wanted: References) -> Any:
        """A `cel.Context` that holds at least what is wanted."""
        if self._context is None:
            self._context = cel.Context()
            self._waiting = set(self._roots)
        for name in self._waiting & wanted.names:
            value = self._roots[name]
            self._context.add_variable(name, dict(value) if isinstance(value, Mapping) else value)
            self._waiting.discard(name)
        if "steps" in wanted.names:
            self._show(frozenset(self._steps) if wanted.any_step else wanted.steps)
        return self._context

    def extent(self, wanted: References) -> tuple[int, int]:
        """Of what is wanted: the members of its longest list or object, and the weight of all of it."""
        found: list[Any] = [self._roots[name] for name in wanted.names if name in self._roots]
        if "steps" in wanted.names:
            keys = self._steps if wanted.any_step else wanted.steps & self._steps.keys()
            outputs = [self._steps[key][1] for key in keys]
            found += [output() if callable(output) else output for output in outputs]
        longest, weight = len(found), 0
        while found:
            value = found.pop()
            weight += 1 + (len(value) // _CHARACTERS if isinstance(value, str) else 0)
            if isinstance(value, Mapping | list | tuple):
                longest = max(longest, len(value))
                found += value.values() if isinstance(value, Mapping) else value
        return longest, weight

    def _show(self, keys: frozenset[str]) -> None:
        if self._shown is None or not keys <= self._shown:
            settled = {key: self._steps[key] for key in keys if key in self._steps}
            # An output may be handed over undecoded: a function that gives it, called only when it is looked at.
            steps = {
                key: {"status": status, "output": output() if callable(output) else output}
                for key, (status, output) in settled.items()
            }
            self._context.add_variable("steps", steps)
            self._shown = keys


@dataclass(frozen=True, slots=True)
class Expression:
    source: str
    _program: Any = field(compare=False, repr=False)
    references: References = field(compare=False, repr=False)
    growth: Growth = field(compare=False, repr=False)

    @classmethod
    def parse(cls, source: str) -> "Expression":
        source = source.strip()
        if not source:
            raise ValueError("the expression is empty")
        if len(source) > _LONGEST:
            raise ValueError(f"the expression is longer than {_LONGEST} characters")
        try:
            program = cel.compile(source)
        except ValueError as error:
            raise ValueError(f"{_quoted(source)} is not valid CEL: {_syntax(str(error))}") from None
        if any(name.startswith(".") for name in program.variables()):
            raise ValueError(f"{_quoted(source)} is not valid CEL here: leave out the dot before the name")
        grows = growth(source)
        if grows.depth > _DEEPEST:
            raise ValueError(f"{_quoted(source)} has macros more than {_DEEPEST} deep in one another; use a tool")
        if grows.factor > _MOST_WORK:
            raise ValueError(f"{_quoted(source)} {_TOO_MUCH}")
        return cls(source, program, references(source), grows)

    def names(self) -> frozenset[str]:
        return self.references.names

    def steps(self) -> frozenset[str]:
        return self.references.steps

    def functions(self) -> frozenset[str]:
        """Without the operators, which CEL counts as functions named `_+_`."""
        return frozenset(name for name in self._program.functions() if name.isidentifier())

    def evaluate(self, scope: Scope) -> Any:
        """A plain JSON value."""
        if self._is_too_much(scope):
            raise ExpressionFailed(self.source, f"it {_TOO_MUCH}")
        try:
            value = self._program.execute(scope.context(self.references))
        except Exception as error:
            raise ExpressionFailed(self.source, _reason(error)) from error
        try:
            return value if type(value) in _PLAIN else plain(value)
        except ValueError as error:
            raise ExpressionFailed(self.source, str(error)) from error

    def _is_too_much(self, scope: Scope) -> bool:
        grows = self.growth
        if grows.power == 0 and grows.factor < _SURELY_FEW:
            return False  # linear in what was read anyway
        longest, weight = scope.extent(self.references)
        longest, weight = max(longest, self.source.count(",") + 1), weight + len(self.source)
        times: int = longest**grows.power
        return weight * times * grows.factor > _MOST_WORK


def plain(value: Any) -> Any:
    """What CEL returned as a JSON value; a duration is its seconds."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            if not math.isfinite(value):
                raise ValueError(f"the result is {value}, which JSON cannot carry")
            return value
        case list():
            return [plain(item) for item in value]
        case dict():
            return {key if isinstance(key, str) else _text(key): plain(item) for key, item in value.items()}
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case timedelta():
            return value.total_seconds()
        case bytes():
            return base64.b64encode(value).decode()
        case _:
            raise ValueError(f"the result is a {type(value).__name__}, which JSON cannot carry")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _quoted(source: str) -> str:
    """On one line, and not so long that the reason behind it is lost."""
    line = " ".join(source.split())
    return f"`{line}`" if len(line) <= 120 else f"`{line[:120]}…`"


def _syntax(error: str) -> str:
    found = _SYNTAX_ERROR.search(error)
    if found is None:
        return error.splitlines()[0]
    line, column, problem = found.groups()
    problem = problem.split(" expecting {")[0].replace("mismatched input '<EOF>'", "it ends too early")
    return f"{problem} (column {column})" if line == "1" else f"{problem} (line {line}, column {column})"


def _reason(error: Exception) -> str:
    message = str(error.args[0]) if error.args else type(error).__name__
    if isinstance(error, KeyError):
        return f"no such key: {message.strip(chr(39))}"
    if message.startswith("No such overload"):
        return (
            "the operation does not fit the types of its values; "
            "CEL converts nothing by itself, so write int(x), double(x) or string(x), and look out for null"
        )
    if message.startswith("Undefined variable or function"):
        return message.split(". ")[0].replace("Undefined", "undefined")
    return " ".join(message.removesuffix(" Check function arguments and their types.").split())


# What the places of secrets are filled with; without it they show their names.
Secrets = Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Secret:
    """The place of a secret in a template."""

    name: str

    def render(self, scope: Scope, secrets: Secrets = None) -> str:
        return f"${{secrets.{self.name}}}" if secrets is None else secrets[self.name]

    def leaves(self, path: Path) -> "Leaves":
        yield path, self


Leaves = Iterator[tuple[Path, Expression | Secret]]


class _Node(Protocol):
    def render(self, scope: Scope, secrets: Secrets = None) -> Any: ...
    def leaves(self, path: Path) -> Leaves: ...


@dataclass(frozen=True, slots=True)
class _Constant:
    value: Any

    def render(self, scope: Scope, secrets: Secrets = None) -> Any:
        return self.value

    def leaves(self, path: Path) -> Leaves:
        return iter(())


@dataclass(frozen=True, slots=True)
class _Value:
    """A string that is one `${…}` and nothing else: the native value."""

    expression: Expression

    def render(self, scope: Scope, secrets: Secrets = None) -> Any:
        return self.expression.evaluate(scope)

    def leaves(self, path: Path) -> Leaves:
        yield path, self.expression


@dataclass(frozen=True, slots=True)
class _Text:
    parts: "tuple[_Part, ...]"

    def render(self, scope: Scope, secrets: Secrets = None) -> str:
        return "".join(_written(part, scope, secrets) for part in self.parts)

    def leaves(self, path: Path) -> Leaves:
        return ((path, part) for part in self.parts if not isinstance(part, str))


@dataclass(frozen=True, slots=True)
class _List:
    items: tuple[_Node, ...]

    def render(self, scope: Scope, secrets: Secrets = None) -> list[Any]:
        return [item.render(scope, secrets) for item in self.items]

    def leaves(self, path: Path) -> Leaves:
        for index, item in enumerate(self.items):
            yield from item.leaves((*path, index))


@dataclass(frozen=True, slots=True)
class _Object:
    members: Mapping[str, _Node]

    def render(self, scope: Scope, secrets: Secrets = None) -> dict[str, Any]:
        return {key: member.render(scope, secrets) for key, member in self.members.items()}

    def leaves(self, path: Path) -> Leaves:
        for key, member in self.members.items():
            yield from member.leaves((*path, key))


@dataclass(frozen=True, slots=True)
class Template:
    """A JSON value whose strings, but not its keys, may hold `${expressions}`; `$${` stands for a literal `${`."""

    value: Any
    _root: _Node = field(compare=False, repr=False)
    # The names of the secrets it asks for, by the field at its top that asks.
    secrets: Mapping[str, tuple[str, ...]] = field(compare=False, repr=False)

    @classmethod
    def parse(cls, value: Any) -> "Template":
        faults: list[tuple[Path, str]] = []
        root = _parse(value, (), faults)
        template = cls(value, root, _by_field(root))
        if faults:
            raise TemplateInvalid(tuple(faults), template)
        return template

    @property
    def is_constant(self) -> bool:
        return isinstance(self._root, _Constant)

    def render(self, scope: Scope, secrets: Secrets = None) -> Any:
        """A constant is the same object each time: do not change what this returns."""
        return self._root.render(scope, secrets)

    def leaves(self) -> Leaves:
        return self._root.leaves(())

    def expressions(self) -> Iterator[tuple[Path, Expression]]:
        return ((path, leaf) for path, leaf in self.leaves() if isinstance(leaf, Expression))


_Part = str | Expression | Secret


def _by_field(root: _Node) -> Mapping[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for path, leaf in root.leaves(()):
        if isinstance(leaf, Secret):
            found.setdefault(str(path[0]) if path else "", {})[leaf.name] = None
    return {name: tuple(secrets) for name, secrets in found.items()}


def _written(part: _Part, scope: Scope, secrets: Secrets) -> str:
    match part:
        case str():
            return part
        case Secret():
            return part.render(scope, secrets)
        case Expression():
            return _text(part.evaluate(scope))


def _parse(value: Any, path: Path, faults: list[tuple[Path, str]]) -> _Node:
    match value:
        case str():
            return _parse_text(value, path, faults)
        case list() | tuple():
            items = tuple(_parse(item, (*path, index), faults) for index, item in enumerate(value))
            if all(isinstance(item, _Constant) for item in items):
                return _Constant([item.value for item in items if isinstance(item, _Constant)])
            return _List(items)
        case Mapping():
            members = {key: _parse(member, (*path, key), faults) for key, member in value.items()}
            if all(isinstance(member, _Constant) for member in members.values()):
                return _Constant({key: m.value for key, m in members.items() if isinstance(m, _Constant)})
            return _Object(members)
        case _:
            return _Constant(value)


def _parse_text(text: str, path: Path, faults: list[tuple[Path, str]]) -> _Node:
    if "${" not in text:
        return _Constant(text)
    try:
        parts = tuple(_parts(text))
    except ValueError as error:
        faults.append((path, str(error)))
        return _Constant(text)
    match parts:
        case (Expression() as whole,):
            return _Value(whole)
        case (Secret() as whole,):
            return whole
        case _ if all(isinstance(part, str) for part in parts):
            return _Constant("".join(map(str, parts)))
        case _:
            return _Text(parts)


def _parts(text: str) -> Iterator[_Part]:
    at = 0
    while (dollar := text.find("${", at)) >= 0:
        if dollar > at and text[dollar - 1] == "$":
            yield text[at : dollar - 1] + "${"
            at = dollar + 2
            continue
        if dollar > at:
            yield text[at:dollar]
        end = closing_brace(text, dollar + 2)
        if end is None:
            raise ValueError("`${` is not closed by `}`; write `$${` for a literal `${`")
        yield _place(text[dollar + 2 : end])
        at = end + 1
    if at < len(text):
        yield text[at:]


def _place(source: str) -> Expression | Secret:
    secret = _SECRET.fullmatch(source)
    if secret is None:
        return Expression.parse(source)
    if not SECRET_NAME.fullmatch(secret[1]):
        raise ValueError(f"`{secret[1][:120]}` is no name of a secret; write lower-case letters, digits and `_`")
    return Secret(secret[1])
