"""Named statements: the SQL files of `sql/`, by the name each statement is introduced with."""

import re
from dataclasses import dataclass
from importlib.resources import files

_INTRODUCTION = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_COMMENT = re.compile(r"^ *--.*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Statement:
    name: str
    file: str
    moves: str | None
    text: str


def _load() -> dict[str, Statement]:
    found: dict[str, Statement] = {}
    for path in sorted(files("interlock.store").joinpath("sql").iterdir(), key=lambda p: p.name):
        parts = _INTRODUCTION.split(path.read_text(encoding="utf-8"))[1:]
        for name, body in zip(parts[::2], parts[1::2], strict=True):
            if name in found:
                raise ValueError(f"statement {name} stands in {found[name].file} and in {path.name}")
            moves = re.search(r"^-- moves: (.+)$", body, re.MULTILINE)
            # The name goes to the server as a comment: pg_stat_activity then says what a session is doing.
            text = f"/* {name} */ " + _COMMENT.sub("", body).strip().rstrip(";")
            found[name] = Statement(name, path.name, moves[1] if moves else None, text)
    return found


STATEMENTS = _load()
SQL = {name: statement.text for name, statement in STATEMENTS.items()}
