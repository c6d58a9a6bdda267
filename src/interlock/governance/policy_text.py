"""The text of a policy, looked at before Cedar sees it: where each rule stands, and whether it is safe to parse.

Cedar's Python binding gives no positions, and a deeply nested expression overflows its parser's stack, which ends the
whole process. So both are found here, from the tokens.
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
class Statement:
    """One rule as it is written, up to its semicolon."""

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
        """Line and message of the first error of grammar."""
        message = _refusal(self.text)
        if message is None:
            return None
        lines = self.text.split("\n")
        for count in range(1, min(len(lines), 200)):
            # The first part that is wrong other than by being too short ends on the line with the mistake.
            if _refusal("\n".join(lines[:count])) not in (None, _END):
                return self.line + count - 1, message
        return self.line + len(lines) - 1, message


def statements(text: str) -> list[Statement]:
    return list(_split(text))


def _split(text: str) -> Iterator[Statement]:
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
        # `if` nests without a bracket, and `else if` without an end. A bracket that does not match closes nothing.
        ifs += word == "if"
        if word in _CLOSING:
            open_brackets.append(_CLOSING[word])
        elif open_brackets and word == open_brackets[-1]:
            open_brackets.pop()
        deepest = max(deepest, len(open_brackets) + ifs)
        if word == ";":
            yield Statement(line + 1, text[start : token.end()], tokens, deepest)
            start = None
    if start is not None:
        yield Statement(line + 1, text[start:].rstrip(), tokens, deepest)


def _refusal(text: str) -> str | None:
    try:
        PolicySet.from_str(text).to_pst()
    except ValueError as error:
        return str(error)
    return None
