"""CEL source as tokens: enough to see which names an expression uses and where one ends inside a text.

The binding exposes no syntax tree, and its own list of variables includes the names that macros bind.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

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
    """What an expression reads: root names, the steps it names, and whether it uses `steps` without naming one."""

    names: frozenset[str]
    steps: frozenset[str]
    any_step: bool


_END = Token("end", "", -1)


def tokens(source: str, start: int = 0) -> Iterator[Token]:
    for found in _TOKEN.finditer(source, start):
        if found.lastgroup and found.lastgroup != "space":
            yield Token(found.lastgroup, found.group(), found.end())


def closing_brace(text: str, start: int) -> int | None:
    """Where the `}` stands that ends the expression starting at `start`; braces of maps and strings are its own."""
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
    """Of an expression that compiles; the grammar needs no second check here."""
    read = [*tokens(source), _END, _END, _END, _END]
    names, steps, any_step = set[str](), set[str](), False
    for at in _roots(read):
        names.add(read[at].text)
        if read[at].text == "steps":
            key = _step_key(read, at)
            any_step |= key is None
            steps |= {key} if key is not None else set()
    return References(frozenset(names), frozenset(steps), any_step)


def _roots(read: list[Token]) -> Iterator[int]:
    """Positions of the names that are looked up in the scope: not members, functions, or bound by a macro."""
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


def _step_key(read: list[Token], at: int) -> str | None:
    opening, key, closing = read[at + 1 : at + 4]
    if opening.text == "." and key.kind == "name" and closing.text != "(":
        return key.text
    if opening.text == "[" and key.kind == "string" and closing.text == "]":
        literal = cel.evaluate(key.text)  # a literal alone: CEL's own escapes, no variables
        return literal if isinstance(literal, str) else None
    return None
