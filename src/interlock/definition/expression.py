"""Expressions: CEL over a run's input, trigger and settled steps, alone or inside the strings of a template.

`${secrets.name}` is not an expression. It is a placeholder in the template that keeps its name when rendered, and gets
its value only where the caller passes the values. CEL never sees a secret. Text from outside is never searched for
placeholders, so it always stays text.
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

from interlock.definition.cel_lexer import Growth, References, closing_brace, growth, references, renamed
from interlock.definition.diagnostics import Path, dotted
from interlock.definition.patterns import PatternInvalid, compiling, pattern

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

# The parser and the interpreter recurse in native code; no legitimate expression comes near this limit.
_LONGEST = 4000
_DEEPEST = 2
# What one expression may cost, in units of up to a hundred nanoseconds. It cannot be interrupted.
_MOST_WORK = 200_000_000
# What one expression may cost on an event loop: about ten milliseconds. More is evaluated in another process.
_MOST_WORK_AT_ONCE = 200_000
# What all expressions of a run may cost there before a step settles, as when the inputs of a thousand steps are
# displayed.
_MOST_WORK_IN_A_ROW = 2_000_000
# Passing a value to CEL costs this many units.
_HANDING_OVER = 20
# What all matches of one expression may cost: see `patterns`.
_MOST_MATCHING = 1_000_000_000
_MOST_MATCHING_AT_ONCE = 5_000_000
# The duration of CEL's own `matches` is unbounded, and it cannot be replaced under its own name.
_MATCHES = "interlock_matches"
# A value costs as much as this many characters.
_CHARACTERS = 64
_SURELY_FEW = 100
_TOO_MUCH = "goes through too much data too often; give its macros smaller lists, or use a tool for it"

_TOO_MUCH_MATCHING = (
    "matches too long a text, too often, or with too large a pattern; "
    "use a smaller pattern or a shorter text, or a tool for it"
)

SECRET_NAME = re.compile(r"[a-z][a-z0-9_]{0,99}")
_SECRET = re.compile(r"\s*secrets\s*\.\s*([A-Za-z_][A-Za-z0-9_]*)\s*")

_SYNTAX_ERROR = re.compile(r"ERROR: <input>:(\d+):(\d+): (?:Syntax error: )?(.*)")
_PLAIN = frozenset({str, int, bool, type(None)})


class ExpressionFailed(ValueError):
    """Raised when a valid expression has no value in this run."""

    def __init__(self, source: str, why: str) -> None:
        super().__init__(f"{_quoted(source)}: {why}")
        self.source = source
        self.why = why


class Elsewhere(Exception):
    """Raised when an expression is too much work for an event loop.

    Evaluate it in another process and give its scope the answer. It is not a ValueError, because an expression that was
    not evaluated has not failed.
    """

    def __init__(self, expression: "Expression", scope: "Scope") -> None:
        super().__init__(f"{_quoted(expression.source)} is too much work for an event loop")
        self.expression = expression
        self.scope = scope

    def question(self) -> tuple[str, dict[str, Any], dict[str, tuple[str, Any]]]:
        """Return what another process needs to evaluate the expression: the source, and the values that it reads."""
        return self.expression.source, *self.scope.read_by(self.expression.references)


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The result of an expression evaluated in another process: its value, or why it has none."""

    value: Any = None
    why: str | None = None


def answer_to(source: str, roots: dict[str, Any], steps: dict[str, tuple[str, Any]]) -> StepAnswer:
    """Return the answer to `Elsewhere.question`, in the process that received it."""
    scope = Scope.of(**roots)
    for key, (status, output) in steps.items():
        scope.settle(key, status, output)
    try:
        return StepAnswer(Expression.parse(source).evaluate(scope))
    except ExpressionFailed as error:
        return StepAnswer(why=error.why)


class TemplateInvalid(ValueError):
    """Raised with every expression of a template that does not compile, each with its path.

    `rest` is the template of the others.
    """

    def __init__(self, faults: tuple[tuple[Path, str], ...], rest: "Template") -> None:
        super().__init__("; ".join(f"{dotted(path)}: {why}" if path else why for path, why in faults))
        self.faults = faults
        self.rest = rest


class Scope:
    """The values visible to the expressions of one run.

    Values are passed to CEL when an expression reads them. Most steps have no expression, and converting every output
    for each step would take time in the square of a run's length.
    """

    __slots__ = ("_answers", "_context", "_meter", "_roots", "_shown", "_spent", "_steps", "_waiting", "on_event_loop")

    def __init__(self, input: Any, trigger: Any, run: Mapping[str, Any], *, on_event_loop: bool = False) -> None:
        # Whether a long evaluation would block others; then `evaluate` raises `Elsewhere`.
        self.on_event_loop = on_event_loop
        # The answers from other processes by source, until a step settles.
        self._answers: dict[str, StepAnswer] = {}
        self._spent = 0
        self._meter = _Meter()
        self._roots: dict[str, Any] = {"input": input, "trigger": trigger, "run": run}
        self._steps: dict[str, tuple[str, Any]] = {}
        self._context: Any = None
        self._waiting: set[str] = set()  # roots not yet passed to CEL
        self._shown: frozenset[str] | None = None  # steps passed to CEL

    @classmethod
    def of(cls, **roots: Any) -> "Scope":
        """Return a scope with other roots, for expressions outside of a run."""
        scope = cls(None, None, {})
        scope._roots = roots
        return scope

    def answer(self, source: str, answer: StepAnswer) -> None:
        """Store the answer from another process."""
        self._answers[source] = answer

    def answered(self, source: str) -> StepAnswer | None:
        return self._answers.get(source) if self._answers else None

    def read_by(self, wanted: References) -> tuple[dict[str, Any], dict[str, tuple[str, Any]]]:
        """Return the wanted roots and settled steps as plain values."""
        roots = {name: self._roots[name] for name in wanted.names if name in self._roots}
        keys = (self._steps.keys() if wanted.any_step else wanted.steps & self._steps.keys()) if self._steps else ()
        found = {key: self._steps[key] for key in keys} if "steps" in wanted.names else {}
        return roots, {key: (str(status), _decoded(output)) for key, (status, output) in found.items()}

    def affords(self, work: int) -> bool:
        """Return whether this much work may block the event loop: at once, and in total until a step settles."""
        if work > _MOST_WORK_AT_ONCE or self._spent > _MOST_WORK_IN_A_ROW:
            return False
        self._spent += work
        return True

    def meter(self) -> "_Meter":
        """Reset and return the meter of `matches`."""
        self._meter.reset(_MOST_MATCHING_AT_ONCE if self.on_event_loop else _MOST_MATCHING)
        return self._meter

    def seeing(self, output: Any) -> "Scope":
        """Return a scope of the same run in which `output` is a step's output, for its compensation."""
        scope = Scope(None, None, {}, on_event_loop=self.on_event_loop)
        scope._roots = {**self._roots, "output": output}
        scope._steps = self._steps
        return scope

    @property
    def trigger(self) -> Mapping[str, Any]:
        """Return what started the run."""
        return self._roots["trigger"] or {}

    def settle(self, key: str, status: str, output: Any) -> None:
        self._steps[key] = (status, output)
        self._shown = None
        self._answers.clear()
        self._spent = 0

    def context(self, wanted: References) -> Any:
        """Return a `cel.Context` that contains at least the wanted values."""
        if self._context is None:
            self._context = cel.Context()
            self._context.add_function(_MATCHES, self._meter.matches)
            self._waiting = set(self._roots)
        for name in self._waiting & wanted.names:
            value = self._roots[name]
            self._context.add_variable(name, dict(value) if isinstance(value, Mapping) else value)
            self._waiting.discard(name)
        if "steps" in wanted.names:
            self._show(frozenset(self._steps) if wanted.any_step else wanted.steps)
        return self._context

    def extent(self, wanted: References, most: int | None = None) -> tuple[int, int]:
        """Return the length of the longest wanted list or object, and the weight of all wanted values.

        Counting stops when the weight exceeds `most`.
        """
        found: list[Any] = [self._roots[name] for name in wanted.names if name in self._roots]
        if "steps" in wanted.names:
            keys = self._steps if wanted.any_step else wanted.steps & self._steps.keys()
            found += [_decoded(self._steps[key][1]) for key in keys]
        longest, weight = len(found), 0
        while found and (most is None or weight <= most):
            value = found.pop()
            weight += 1 + (len(value) // _CHARACTERS if isinstance(value, str) else 0)
            if isinstance(value, Mapping | list | tuple):
                longest = max(longest, len(value))
                if most is not None and weight + len(value) > most:
                    return longest, most + 1
                found += value.values() if isinstance(value, Mapping) else value
        return longest, weight

    def _show(self, keys: frozenset[str]) -> None:
        if self._shown is None or not keys <= self._shown:
            settled = {key: self._steps[key] for key in keys if key in self._steps}
            # An output may be passed undecoded: as a function that returns it, called only when an expression reads it.
            steps = {key: {"status": status, "output": _decoded(output)} for key, (status, output) in settled.items()}
            self._context.add_variable("steps", steps)
            self._shown = keys


def _decoded(output: Any) -> Any:
    return output() if callable(output) else output


class _Meter:
    """The `matches` function of expressions, with its cost so far."""

    __slots__ = ("_left", "failed", "is_over")

    def __init__(self) -> None:
        self.reset(_MOST_MATCHING)

    def reset(self, most: int) -> None:
        self._left = most
        self.failed: str | None = None
        # The matches cost too much: for an expression, or only for an event loop.
        self.is_over = False

    def matches(self, *given: Any) -> bool:
        # CEL can ignore an exception, as in `x.matches(y) || true`, so keep failures and check them later.
        if self.failed is not None or self.is_over:
            return False
        if len(given) != 2 or not all(isinstance(part, str) for part in given):
            self.failed = "matches takes a text and a pattern: write text.matches(pattern)"
            return False
        text, source = given
        try:
            if not self._spend(compiling(source)):
                return False
            found = pattern(source)
        except PatternInvalid as error:
            self.failed = str(error)
            return False
        return self._spend(found.work(text)) and found.matches(text)

    def _spend(self, work: int) -> bool:
        self._left -= work
        self.is_over = self._left < 0
        return not self.is_over


@dataclass(frozen=True, slots=True)
class Expression:
    source: str
    references: References = field(compare=False, repr=False)
    growth: Growth = field(compare=False, repr=False)
    # The functions that it calls, without the operators, which CEL counts as functions named `_+_`.
    _functions: frozenset[str] = field(compare=False, repr=False)
    # None until first evaluated: a large definition has thousands of expressions, and most runs need a few.
    _program: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def parse(cls, source: str) -> "Expression":
        source = source.strip()
        if not source:
            raise ValueError("the expression is empty")
        if len(source) > _LONGEST:
            raise ValueError(f"the expression is longer than {_LONGEST} characters")
        if _MATCHES in source:
            raise ValueError(f"{_quoted(source)}: `{_MATCHES}` is a reserved name; write `matches`")
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
        functions = frozenset(name for name in program.functions() if name.isidentifier())
        return cls(source, references(source), grows, functions, None if "matches" in functions else program)

    def __reduce__(self) -> tuple[Any, ...]:
        """Omit the compiled program, which cannot leave its process."""
        return Expression, (self.source, self.references, self.growth, self._functions)

    def names(self) -> frozenset[str]:
        return self.references.names

    def steps(self) -> frozenset[str]:
        return self.references.steps

    def functions(self) -> frozenset[str]:
        return self._functions

    def evaluate(self, scope: Scope) -> Any:
        """Return a plain JSON value. Raise `Elsewhere` if it would block an event loop for too long."""
        if (answer := scope.answered(self.source)) is not None:
            if answer.why is not None:
                raise ExpressionFailed(self.source, answer.why)
            return answer.value
        if scope.on_event_loop and not scope.affords(self._at_once(scope)):
            raise Elsewhere(self, scope)
        if not scope.on_event_loop and self._is_too_much(scope):
            raise ExpressionFailed(self.source, f"it {_TOO_MUCH}")
        meter = scope.meter()
        try:
            value = self._compiled().execute(scope.context(self.references))
        except Exception as error:
            raise ExpressionFailed(self.source, _reason(error)) from error
        if meter.is_over and scope.on_event_loop:
            raise Elsewhere(self, scope)
        if meter.is_over:
            raise ExpressionFailed(self.source, f"it {_TOO_MUCH_MATCHING}")
        if meter.failed is not None:
            raise ExpressionFailed(self.source, meter.failed)
        try:
            return value if type(value) in _PLAIN else plain(value)
        except ValueError as error:
            raise ExpressionFailed(self.source, str(error)) from error

    def _compiled(self) -> Any:
        if self._program is None:
            source = renamed(self.source, "matches", _MATCHES) if "matches" in self._functions else self.source
            object.__setattr__(self, "_program", cel.compile(source))
        return self._program

    def _is_too_much(self, scope: Scope) -> bool:
        grows = self.growth
        if grows.power == 0 and grows.factor < _SURELY_FEW:
            return False  # linear in data that was read in any case
        return self._work(*scope.extent(self.references)) > _MOST_WORK

    def _at_once(self, scope: Scope) -> int:
        """Return the highest cost on an event loop. Above the limit the result is not exact."""
        if not self.references.names:
            longest, weight = 0, 0
        else:
            longest, weight = scope.extent(self.references, _MOST_WORK_AT_ONCE // _HANDING_OVER)
        handing_over, reading = weight * _HANDING_OVER, weight * self.growth.reads
        return max(handing_over, reading, self._work(longest, weight))

    def _work(self, longest: int, weight: int) -> int:
        longest, weight = max(longest, self.source.count(",") + 1), weight + len(self.source)
        times: int = longest**self.growth.power
        return weight * times * self.growth.factor


def plain(value: Any) -> Any:
    """Return CEL's result as a JSON value; a duration becomes its seconds."""
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
    """Return the source on one line, shortened so that the reason after it stays visible."""
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


# The values for the placeholders of secrets; with None they render as their names.
Secrets = Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class SecretReference:
    """The placeholder of a secret in a template."""

    name: str

    def render(self, scope: Scope, secrets: Secrets = None) -> str:
        return f"${{secrets.{self.name}}}" if secrets is None else secrets[self.name]

    def leaves(self, path: Path) -> "Leaves":
        yield path, self


Leaves = Iterator[tuple[Path, Expression | SecretReference]]


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
    """A string that is exactly one `${…}`: it renders as the native value."""

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
    """A JSON value whose strings, but not its keys, may contain `${expressions}`; `$${` is a literal `${`."""

    value: Any
    _root: _Node = field(compare=False, repr=False)
    # The names of the secrets that it uses, by top-level field.
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
        """Return the rendered value. A constant is the same object each time: do not modify it."""
        return self._root.render(scope, secrets)

    def leaves(self) -> Leaves:
        return self._root.leaves(())

    def expressions(self) -> Iterator[tuple[Path, Expression]]:
        return ((path, leaf) for path, leaf in self.leaves() if isinstance(leaf, Expression))


_Part = str | Expression | SecretReference


def _by_field(root: _Node) -> Mapping[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for path, leaf in root.leaves(()):
        if isinstance(leaf, SecretReference):
            found.setdefault(str(path[0]) if path else "", {})[leaf.name] = None
    return {name: tuple(secrets) for name, secrets in found.items()}


def _written(part: _Part, scope: Scope, secrets: Secrets) -> str:
    match part:
        case str():
            return part
        case SecretReference():
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
        case (SecretReference() as whole,):
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


def _place(source: str) -> Expression | SecretReference:
    secret = _SECRET.fullmatch(source)
    if secret is None:
        return Expression.parse(source)
    if not SECRET_NAME.fullmatch(secret[1]):
        raise ValueError(f"`{secret[1][:120]}` is no name of a secret; write lower-case letters, digits and `_`")
    return SecretReference(secret[1])
