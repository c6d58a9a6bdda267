"""CEL source as tokens: enough to find the names in an expression, and its end inside a text.

The binding exposes no syntax tree, and its own list of variables includes the names that macros bind.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import cel

_TOKEN = re.compile(
    r"""
    (?P<space>  \s+ | //[^\n]* )
  | (?P<string> [bB]?[rR](?: \"{3}.*?\"{3} | '{3}.*?'{3} | "[^"\n]*" | '[^'\n]*' )
              | [bB]?(?: \"{3}(?:\\.|[^\\])*?\"{3} | '{3}(?:\\.|[^\\])*?'{3}
                       | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' ) )
  | (?P<number> (?: 0x[0-9a-fA-F]+ | (?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)? ) [uU]? )
  | (?P<name>   [A-Za-z_][A-Za-z0-9_]* )
  | (?P<mark>   . )
    """,
    re.VERBOSE | re.DOTALL,
)

_LITERALS = frozenset({"true", "false", "null", "in"})
_TYPES = frozenset({"bool", "bytes", "double", "int", "list", "map", "null_type", "string", "type", "uint"})
_WORDS = _LITERALS | _TYPES
_BINDING_MACROS = frozenset({"all", "exists", "exists_one", "existsOne", "filter", "map"})


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    end: int


@dataclass(frozen=True, slots=True)
class References:
    """What an expression reads: root names, named steps, and whether it uses `steps` without a name."""

    names: frozenset[str]
    steps: frozenset[str]
    any_step: bool


@dataclass(frozen=True, slots=True)
class Growth:
    """How the work of an expression grows with its input: at most weight * longest**power * factor.

    Macros that only read their own items are linear. A macro that reads something else for each item adds a power. So
    does a macro that makes a list, because CEL copies the list for each added item. Repeated operands in the bodies of
    macros are a factor.
    """

    depth: int
    power: int
    factor: int
    # The number of names; each may walk through its whole value.
    reads: int = 0


_END = Token("end", "", -1)
_LONG_CONSTANT = 40
# Starting a macro, or making a list or an object, costs as much as this many operands.
_COST_OF_MAKING = 4


def tokens(source: str, start: int = 0) -> Iterator[Token]:
    for found in _TOKEN.finditer(source, start):
        if found.lastgroup and found.lastgroup != "space":
            yield Token(found.lastgroup, found.group(), found.end())


def closing_brace(text: str, start: int) -> int | None:
    """Return the position of the `}` that ends the expression at `start`, skipping the braces of maps and strings."""
    depth = 0
    for token in tokens(text, start):
        if token.text == "{":
            depth += 1
        elif token.text == "}":
            if depth == 0:
                return token.end - 1
            depth -= 1
    return None


def references(source: str) -> References:
    """Return what an expression reads. It must compile; its grammar is not checked again."""
    read = [*tokens(source), _END, _END, _END, _END]
    names, steps, any_step = set[str](), set[str](), False
    for at in _roots(read):
        names.add(read[at].text)
        if read[at].text == "steps":
            key = _step_key(read, at)
            any_step |= key is None
            steps |= {key} if key is not None else set()
    return References(frozenset(names), frozenset(steps), any_step)


def renamed(source: str, function: str, name: str) -> str:
    """Return the source with every call of the function renamed."""
    read = [*tokens(source), _END]
    calls = [
        token.end for token, after in pairwise(read)
        if token.kind == "name" and token.text == function and after.text == "("
    ]  # fmt: skip
    for end in reversed(calls):
        source = source[: end - len(function)] + name + source[end:]
    return source


def _roots(read: list[Token]) -> Iterator[int]:
    """Yield the positions of names that are looked up in the scope.

    These are not members, functions, or names bound by a macro.
    """
    bound: list[tuple[str, int]] = []
    depth = 0
    for at, token in enumerate(read):
        before, after = read[at - 1], read[min(at + 1, len(read) - 1)]  # read[-1] is an _END too
        if token.text == "(":
            depth += 1
            is_macro = before.text in _BINDING_MACROS and read[at - 2].text == "."
            if is_macro and after.kind == "name" and read[at + 2].text == ",":
                bound.append((after.text, depth))
        elif token.text == ")":
            bound = [(name, where) for name, where in bound if where < depth]
            depth -= 1
        elif token.kind == "name" and before.text != "." and after.text != "(":
            own = {name for name, _ in bound} | _WORDS
            yield from () if token.text in own else (at,)


@dataclass(slots=True)
class _Macro:
    name: str
    variable: str
    operands: int = 0
    reads_outside: bool = False

    @property
    def power(self) -> int:
        match self.name:
            case "map":
                return 1 + self.reads_outside
            case "filter":
                return 1
            case _:
                return int(self.reads_outside)


def growth(source: str) -> Growth:
    """Return an upper bound of the growth of an expression that compiles. Adjacent macros count as if nested."""
    read = [*tokens(source), _END]
    opened: list[_Macro | str] = []
    depth, power, factor = 0, 0, 1
    variables = set[int]()
    reads = 0
    for at, token in enumerate(read):
        around = [bracket for bracket in opened if isinstance(bracket, _Macro)]
        before, after = read[at - 1], read[min(at + 1, len(read) - 1)]
        if token.text == "(" and before.text in _BINDING_MACROS and read[at - 2].text == ".":
            first = next((n for n in range(at, len(read)) if read[n].kind == "name"), at)
            variables.add(first)
            _count(around, None, _COST_OF_MAKING)
            opened.append(_Macro(before.text, read[first].text))
            depth = max(depth, len(around) + 1)
        elif token.text in ("(", "[", "{"):
            opened.append(token.text)
            is_literal = token.text != "(" and before.kind != "name" and before.text not in (")", "]", "}")
            _count(around, None, _COST_OF_MAKING if is_literal else 0)
        elif token.text in (")", "]", "}"):
            closed = opened.pop()
            if isinstance(closed, _Macro):
                power, factor = power + closed.power, factor * max(closed.operands, 1)
        elif token.text == "+" and not around:
            factor += 1
        elif token.text == "," and opened and opened[-1] in ("[", "{"):
            _count(around, None)
        elif token.kind == "string" and len(token.text) > _LONG_CONSTANT:
            _count(around, token.text)
        elif token.kind == "name" and before.text != "." and after.text != "(" and at not in variables:
            _count(around, None if token.text in _WORDS else token.text)
            reads += 1
    return Growth(depth, power, factor, reads)


def _count(around: list[_Macro], read: str | None, times: int = 1) -> None:
    """Count operands in the surrounding macro bodies, as outside reads of those that do not bind the name."""
    is_bound = read is None
    for macro in reversed(around):
        macro.operands += times
        is_bound = is_bound or macro.variable == read
        macro.reads_outside |= not is_bound


def _step_key(read: list[Token], at: int) -> str | None:
    opening, key, closing = read[at + 1 : at + 4]
    if opening.text == "." and key.kind == "name" and closing.text != "(":
        return key.text
    if opening.text == "[" and key.kind == "string" and closing.text == "]":
        literal = cel.evaluate(key.text)  # only a literal: CEL's own escapes, no variables
        return literal if isinstance(literal, str) else None
    return None
