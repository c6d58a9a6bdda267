"""Named statements: the SQL files of `sql/`, by the `-- name:` line before each statement."""

import re
from dataclasses import dataclass
from importlib.resources import files

_INTRODUCTION = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_COMMENT = re.compile(r"^ *--.*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SqlStatement:
    name: str
    file: str
    moves: str | None
    text: str


def _load() -> dict[str, SqlStatement]:
    found: dict[str, SqlStatement] = {}
    for path in sorted(files("interlock.store").joinpath("sql").iterdir(), key=lambda p: p.name):
        parts = _INTRODUCTION.split(path.read_text(encoding="utf-8"))[1:]
        for name, body in zip(parts[::2], parts[1::2], strict=True):
            if name in found:
                raise ValueError(f"statement {name} stands in {found[name].file} and in {path.name}")
            moves = re.search(r"^-- moves: (.+)$", body, re.MULTILINE)
            # The server gets the name as a comment, so that pg_stat_activity shows which statement a session executes.
            text = f"/* {name} */ " + _COMMENT.sub("", body).strip().rstrip(";")
            found[name] = SqlStatement(name, path.name, moves[1] if moves else None, text)
    return found


STATEMENTS = _load()
SQL = {name: statement.text for name, statement in STATEMENTS.items()}
