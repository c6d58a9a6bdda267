"""Named statements: the SQL files of `sql/`, by the `-- name:` line before each statement.

The files name the schema `interlock`. An installation with another schema gets the same text with that name in its
place, so that nothing depends on a session's search path.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_INTRODUCTION = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_COMMENT = re.compile(r"^ *--.*\n", re.MULTILINE)
_PARAMETER = re.compile(r"@([a-z_]\w*)")
_SCHEMA = re.compile(r"\binterlock\.")
DEFAULT_SCHEMA = "interlock"


@dataclass(frozen=True, slots=True)
class SqlStatement:
    """`parameters` are names with their types. `introduction` is the comment, `text` the statement with $1, $2, …"""

    name: str
    file: str
    moves: str | None
    introduction: str
    parameters: tuple[tuple[str, str], ...]
    returns: str | None
    is_declared: bool
    text: str


def in_schema(text: str, schema: str) -> str:
    """Return SQL that names the schema `interlock` with another schema in its place."""
    return text if schema == DEFAULT_SCHEMA else _SCHEMA.sub(f"{schema}.", text)


def read_statements() -> dict[str, SqlStatement]:
    found: dict[str, SqlStatement] = {}
    for path in sorted(files("interlock.store").joinpath("sql").iterdir(), key=lambda p: p.name):
        if not path.name.endswith(".sql"):
            continue
        parts = _INTRODUCTION.split(path.read_text(encoding="utf-8"))[1:]
        for name, body in zip(parts[::2], parts[1::2], strict=True):
            if name in found:
                raise ValueError(f"statement {name} is in {found[name].file} and in {path.name}")
            found[name] = _read(name, path.name, body)
    return found


def _read(name: str, file: str, body: str) -> SqlStatement:
    declared = _declaration(body, "params")
    parameters = tuple(_parameter(part) for part in (declared or "").split(",") if part.strip())
    comment = [line[2:].strip() for line in body.splitlines() if line.startswith("--")]
    introduction = " ".join(line for line in comment if not re.match(r"(moves|params|returns):", line))
    # The server gets the name as a comment, so that pg_stat_activity shows which statement a session executes.
    text = f"/* {name} */ " + _numbered(name, _COMMENT.sub("", body).strip().rstrip(";"), parameters)
    returns = _declaration(body, "returns")
    is_declared = declared is not None or returns is not None
    return SqlStatement(name, file, _declaration(body, "moves"), introduction, parameters, returns, is_declared, text)


def _declaration(body: str, what: str) -> str | None:
    """Return what the statement declares; a long list continues on comment lines that are indented."""
    found = re.search(rf"^-- {what}: (.+(?:\n--   .+)*)$", body, re.MULTILINE)
    return found and re.sub(r"\n--  +", " ", found[1])


def _parameter(declared: str) -> tuple[str, str]:
    name, _, sql_type = declared.strip().partition(" ")
    return name, sql_type


def _numbered(name: str, text: str, parameters: tuple[tuple[str, str], ...]) -> str:
    """Replace each `@parameter` with its number, cast to its declared type."""
    numbers = {parameter: f"${i}::{t.replace('?', '')}" for i, (parameter, t) in enumerate(parameters, 1)}
    used = set(_PARAMETER.findall(text))
    if used != numbers.keys():
        wrong = sorted(used ^ numbers.keys())
        raise ValueError(f"statement {name}: {', '.join(wrong)} is declared and not used, or used and not declared")
    return _PARAMETER.sub(lambda m: numbers[m[1]], text)


STATEMENTS = read_statements()


@cache
def statements_in(schema: str) -> dict[str, str]:
    """Return the text of every statement for an installation in this schema."""
    return {name: in_schema(statement.text, schema) for name, statement in STATEMENTS.items()}
