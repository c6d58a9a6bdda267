"""Named statements and the functions they call: each prepares on the real database, is used, and declares its
transitions correctly.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

import interlock
from interlock.lifecycle import MACHINES
from interlock.store.migrate import functions
from interlock.store.pool import Database
from interlock.store.queries import STATEMENTS, SqlStatement
from tests.store.functions import BODIES, CREATED, called, whole

SOURCE = Path(interlock.__file__).parent
BY_NAME = {machine.name: machine for machine in MACHINES}


async def test_every_statement_prepares(database: Database) -> None:
    wrong = {}
    async with database.pool.acquire() as connection:
        for name, statement in STATEMENTS.items():
            try:
                await connection.prepare(statement.text)
            except asyncpg.PostgresError as error:
                wrong[name] = str(error)
    assert wrong == {}


async def test_a_statement_about_a_column_that_is_not_there_would_not_prepare(database: Database) -> None:
    async with database.pool.acquire() as connection:
        with pytest.raises(asyncpg.UndefinedColumnError):
            await connection.prepare(STATEMENTS["get_run"].text.replace("tenant_id", "tenant"))


def test_a_statement_carries_its_name_to_the_server() -> None:
    for name, statement in STATEMENTS.items():
        assert statement.text.startswith(f"/* {name} */ ")
        assert not statement.text.rstrip().endswith(";")


def test_statements_take_parameters_and_are_never_formatted() -> None:
    paths = list((SOURCE / "store" / "sql").glob("*.sql"))
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"%s|%\(|\{[a-z_]*\}", text), path.name


# ---------------------------------------------------------------- every statement is used, every name exists


def strings(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def asked_for(tree: ast.AST) -> set[str]:
    """Return the names of the typed functions that are used, as `sql.get_run`, and those passed to `fetch`, `row`,
    `one` and `value` (those with a space are SQL text).
    """
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="fetch" | "row" | "one" | "value"), args=[ast.Constant(value=str(name)), *_]
            ):
                if " " not in name.strip() and "\n" not in name:
                    found.add(name)
            case ast.Attribute(value=ast.Name(id="sql"), attr=name):
                found.add(name)
    return found


def trees() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(SOURCE.rglob("*.py")):
        if path.parent != SOURCE / "store" / "sql":  # generated: each function names its own statement
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_every_statement_is_used() -> None:
    used: set[str] = set().union(*(strings(tree) | asked_for(tree) for _, tree in trees()))
    assert STATEMENTS.keys() - used == set()


def test_every_statement_that_is_asked_for_exists() -> None:
    missing = {(path.name, name) for path, tree in trees() for name in asked_for(tree) - STATEMENTS.keys()}
    assert missing == set()


def test_a_name_that_does_not_exist_would_be_found() -> None:
    assert asked_for(ast.parse('await tx.row("get_rum", run_id)')) - STATEMENTS.keys() == {"get_rum"}
    assert asked_for(ast.parse("await sql.get_rum(tx, run_id=run_id)")) - STATEMENTS.keys() == {"get_rum"}


def test_every_function_is_called() -> None:
    text = functions()
    assert len(CREATED) == text.count("FUNCTION interlock.") - text.count("EXECUTE FUNCTION interlock.")
    by_triggers = set(re.findall(r"EXECUTE FUNCTION interlock\.(\w+)\(", text))
    by_conditions = set(re.findall(r"AND NOT interlock\.(\w+)\(", text))
    used = set().union(*(called(statement.text) for statement in STATEMENTS.values()))
    used |= set().union(by_triggers, by_conditions, *(called(BODIES[name]) for name in by_triggers))
    assert BODIES.keys() - used == set()


# ---------------------------------------------------------------- `-- moves:`

_MOVE = re.compile(r"(?P<machine>\w+)(?: (?P<sources>[\w|*]+))? -(?:(?P<events>[\w|]+)-)?> (?P<targets>[\w|*]+)")


def untrue(moves: str) -> list[str]:
    """Return the claims of a `-- moves:` line that are in no table."""
    wrong = []
    for claim in moves.split(", "):
        found = _MOVE.fullmatch(claim)
        if found is None or found["machine"] not in BY_NAME:
            wrong.append(claim)
            continue
        machine = BY_NAME[found["machine"]]
        if found["sources"] is None:
            if found["targets"] != machine.initial or found["events"] not in (None, "create"):
                wrong.append(claim)
            continue
        table = {(str(t.source), str(t.event), str(t.target)) for t in machine.transitions()}
        for source in found["sources"].split("|"):
            for event in (found["events"] or "*").split("|"):
                for target in found["targets"].split("|"):
                    pattern = (source, event, target)
                    if not any(all(p in ("*", w) for p, w in zip(pattern, row, strict=True)) for row in table):
                        wrong.append(f"{claim}: {source} -{event}-> {target}")
    return wrong


@pytest.mark.parametrize("statement", [s for s in STATEMENTS.values() if s.moves], ids=lambda s: s.name)
def test_the_transition_a_statement_announces_is_in_the_table(statement: SqlStatement) -> None:
    assert statement.moves is not None
    assert untrue(statement.moves) == []


def test_an_untrue_announcement_would_be_found() -> None:
    assert untrue("run succeeded -resume-> running")
    assert untrue("run running -hold-> waiting_external")
    assert untrue("run -create-> running")
    assert untrue("task a -b-> c")
    assert untrue("run pending to running")


def writes_status(text: str) -> bool:
    """Return whether a text sets the status of a row to another value, or inserts a run or a record with one."""
    return bool(
        re.search(r"\bSET\s+(?:\w+ = [^,]+,\s*)*status = ", text)
        or re.search(r"INSERT INTO interlock\.(run|idempotency_record) \([^)]*\bstatus\b", text)
    )


def test_every_statement_that_writes_a_status_announces_it() -> None:
    """Setting `status` to its current value (requeueing, counting) is not a move; all others declare their move."""
    writing = {name for name, statement in STATEMENTS.items() if writes_status(whole(statement.text))}
    assert {name for name in writing if STATEMENTS[name].moves is None} == set()
    assert writing >= {"write_runs", "claim_runs", "start_run", "withdraw_pending", "complete_request"}


def test_a_status_that_a_function_writes_would_be_found() -> None:
    assert not writes_status(STATEMENTS["claim_runs"].text)
    assert writes_status(whole(STATEMENTS["claim_runs"].text))
    assert writes_status("INSERT INTO interlock.run (id, status) VALUES ($1, 'pending')")
