"""The text of a policy before Cedar parses it: the position of each rule, and whether it is safe to parse.

Cedar's Python binding gives no positions, and a deeply nested expression overflows its parser's stack, which ends the
whole process. Both are therefore derived here from the tokens.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cedarpy import PolicySet

MOST_BYTES = 256 << 10
# Measured on the 8 MB stack of a main thread: 1,000 operators in a row parse, 3,000 do not; brackets fail below 1,000.
MOST_TOKENS = 1000
MOST_RULES = 1000
DEEPEST = 20

_TOKEN = re.compile(r'(?P<space>\s+|//[^\r\n]*)|"(?:\\.|[^"\\])*"|\w+|.', re.DOTALL)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_END = "unexpected end of input"


@dataclass(frozen=True, slots=True)
class PolicyStatement:
    """The source of one rule, up to its semicolon."""

    line: int
    text: str
    tokens: int
    depth: int

    def line_of(self, word: str) -> int:
        found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", self.text) if word else None
        return self.line + (self.text.count("\n", 0, found.start()) if found else 0)

    def danger(self) -> str | None:
        if self.depth > DEEPEST:
            return f"it is nested deeper than {DEEPEST} levels"
        if self.tokens > MOST_TOKENS:
            return f"it has more than {MOST_TOKENS} words and signs; split it into several rules"
        return None

    def mistake(self) -> tuple[int, str] | None:
        """Return the line and message of the first syntax error."""
        message = _refusal(self.text)
        if message is None:
            return None
        lines = self.text.split("\n")
        for count in range(1, min(len(lines), 200)):
            # The first prefix with an error other than an unexpected end finishes on the line with the mistake.
            if _refusal("\n".join(lines[:count])) not in (None, _END):
                return self.line + count - 1, message
        return self.line + len(lines) - 1, message


def statements(text: str) -> list[PolicyStatement]:
    return list(_split(text))


def _split(text: str) -> Iterator[PolicyStatement]:
    open_brackets: list[str] = []
    start: int | None = None
    line = counted = tokens = ifs = deepest = 0
    for token in _TOKEN.finditer(text):
        if token.group("space"):
            continue
        if start is None:
            start, tokens, ifs, deepest = token.start(), 0, 0, len(open_brackets)
            line, counted = line + text.count("\n", counted, start), start
        word = token.group()
        tokens += 1
        # `if` nests without a bracket, and `else if` has no end. A bracket that does not match closes nothing.
        ifs += word == "if"
        if word in _CLOSING:
            open_brackets.append(_CLOSING[word])
        elif open_brackets and word == open_brackets[-1]:
            open_brackets.pop()
        deepest = max(deepest, len(open_brackets) + ifs)
        if word == ";":
            yield PolicyStatement(line + 1, text[start : token.end()], tokens, deepest)
            start = None
    if start is not None:
        yield PolicyStatement(line + 1, text[start:].rstrip(), tokens, deepest)


def _refusal(text: str) -> str | None:
    try:
        PolicySet.from_str(text).to_pst()
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True)
class Literals:
    """The values in rules, with the integers on both sides of each number, and every name that a rule could look at."""

    numbers: tuple[int, ...]
    texts: tuple[str, ...]
    names: frozenset[str]


_MOST_LITERALS = 40
_ANNOTATION = re.compile(r'@\w+\s*\(\s*"(?:\\.|[^"\\])*"\s*\)')


def literals(before: str, after: str) -> Literals:
    """Return the values that two policies compare with. Rules that only one of them has come first."""
    rules = {text: [rule.text for rule in statements(text)] for text in (after, before)}
    in_both = set(rules[after]) & set(rules[before])
    tokens = [
        token.group()
        for rule in sorted((*rules[after], *rules[before]), key=in_both.__contains__)
        for token in _TOKEN.finditer(_ANNOTATION.sub("", rule))
    ]
    texts = dict.fromkeys(token[1:-1] for token in tokens if token[0] == '"')
    named = [int(token) for token in tokens if token.isdecimal() and len(token) < 18]
    numbers = dict.fromkeys(near for number in named[:_MOST_LITERALS] for near in (number, number - 1, number + 1))
    # An attribute can also be written as a text: `context["hour"]`.
    return Literals(tuple(numbers), tuple(texts)[:_MOST_LITERALS], frozenset((*tokens, *texts)))
