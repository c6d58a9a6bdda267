"""The functions of the store as text, for tests that read SQL: part of a statement may be in functions it calls."""

import re

from interlock.store.migrate import functions
from interlock.store.queries import STATEMENTS

_FUNCTION = re.compile(
    r"^CREATE OR REPLACE FUNCTION interlock\.(\w+)\(.*?AS \$\$\n(.*?)\$\$;", re.MULTILINE | re.DOTALL
)
_COMMENT = re.compile(r"^ *--.*\n", re.MULTILINE)

# Each function as it is created, and its body alone.
CREATED = {found[1]: _COMMENT.sub("", found[0]) for found in _FUNCTION.finditer(functions())}
BODIES = {found[1]: _COMMENT.sub("", found[2]) for found in _FUNCTION.finditer(functions())}

# Every text that the server executes, by the name of the statement or function.
EVERY_TEXT = {name: statement.text for name, statement in STATEMENTS.items()} | {
    f"{name}()": body for name, body in BODIES.items()
}


def called(text: str) -> set[str]:
    """Return the functions of the store that a text calls, those that these call, and so on."""
    found: set[str] = set()
    pending = [text]
    while pending:
        more = set(re.findall(r"\binterlock\.(\w+)\(", pending.pop())) & BODIES.keys() - found
        found |= more
        pending += [BODIES[name] for name in more]
    return found


def whole(text: str) -> str:
    """Return a statement with the bodies of the functions that it calls."""
    return "\n".join([text, *(BODIES[name] for name in sorted(called(text)))])
