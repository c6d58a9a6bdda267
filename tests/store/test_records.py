"""The records of the store are the columns of the statements that return them, and the rows that statements take."""

import collections.abc
import dataclasses
import sys
import types
import typing
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from codegen import statements as codegen

from interlock.store import queries, records
from interlock.store.pool import Database
from interlock.store.queries import STATEMENTS, SqlStatement

# What PostgreSQL calls the types that asyncpg turns into these. It describes a domain by the type beneath.
_TYPES: dict[Any, set[str]] = {
    UUID: {"uuid"},
    str: {"text", "jsonb", "json"},
    int: {"int2", "int4", "int8"},
    float: {"float8", "numeric"},
    Decimal: {"numeric"},
    bool: {"bool"},
    datetime: {"timestamptz"},
    timedelta: {"interval"},
    bytes: {"bytea"},
}
# Columns behind a record's own that only say that a notification was sent.
_NOTIFICATIONS = {"announce", "pg_notify"}

# What the server says of a column: its name, its type, and whether that is an array.
Column = tuple[str, str, bool]

RECORDS = {name: kind for name, kind in vars(records).items() if dataclasses.is_dataclass(kind)}
ROWS = {
    name: kind
    for name, kind in vars(records).items()
    if isinstance(kind, type) and issubclass(kind, tuple) and kind.__module__ == records.__name__
}


def plain(annotation: Any) -> tuple[Any, bool]:
    """Return the Python type that an annotation stands for, without NewType, None and enums, and if it is an array."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        [annotation] = [each for each in typing.get_args(annotation) if each is not type(None)]
    if typing.get_origin(annotation) is collections.abc.Sequence:
        return plain(typing.get_args(annotation)[0])[0], True
    while (beneath := getattr(annotation, "__supertype__", None)) is not None:
        annotation = beneath
    return str if isinstance(annotation, type) and issubclass(annotation, Enum) else annotation, False


def fits(annotation: Any, column: Column) -> bool:
    kind, is_array = plain(annotation)
    return is_array == column[2] and (kind is Any or column[1].removesuffix("[]") in _TYPES[kind])


def fields_of(kind: Any) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(kind)
    return [(name, hints[name]) for name in getattr(kind, "__match_args__", None) or kind._fields]


def differences(kind: Any, columns: list[Column]) -> list[str]:
    """Return how the columns differ from the fields of a record, in order."""
    fields = fields_of(kind)
    found = [
        f"{name} is {annotation}, the column {column}"
        for (name, annotation), column in zip(fields, columns, strict=False)
        if name != column[0] or not fits(annotation, column)
    ]
    found += [f"no column for {name}" for name, _ in fields[len(columns) :]]
    return found + [f"no field for {c}" for c in columns[len(fields) :] if c[0] not in _NOTIFICATIONS]


async def columns_of(connection: Any, text: str) -> list[Column]:
    prepared = await connection.prepare(text)
    return [(each.name, each.type.name, each.type.kind == "array") for each in prepared.get_attributes()]


def result_of(statement: SqlStatement) -> str:
    return (statement.returns or "").rstrip("?*")


async def test_each_record_has_the_columns_of_every_statement_that_returns_it(database: Database) -> None:
    wrong = {}
    async with database.connection() as connection:
        for name, statement in STATEMENTS.items():
            if (kind := RECORDS.get(result_of(statement))) is not None:
                columns = await columns_of(connection, statement.text)
                wrong[name] = differences(kind, columns)
    assert len(wrong) > 20
    assert {name: found for name, found in wrong.items() if found} == {}


async def test_each_single_value_is_of_the_type_that_its_statement_declares(database: Database) -> None:
    wrong = {}
    async with database.connection() as connection:
        for name, statement in STATEMENTS.items():
            result = result_of(statement)
            if not result or result == "nothing" or result in RECORDS:
                continue
            element = result.removesuffix("[]")
            declared = element if element in codegen.PYTHON_TYPES else "uuid"  # or an id
            type_name = await connection.fetchval(
                "SELECT typname FROM pg_type WHERE oid = to_regtype($1::text)", declared
            )
            [(_, column, is_array)] = await columns_of(connection, statement.text)
            if (column.removesuffix("[]"), is_array) != (type_name, result.endswith("[]")):
                wrong[name] = f"{result} is declared, {column} returned"
    assert wrong == {}


async def test_each_row_that_a_statement_takes_has_the_columns_of_its_type(database: Database) -> None:
    taken = {
        sql_type.rstrip("?").removesuffix("[]").removeprefix("interlock.")
        for statement in STATEMENTS.values()
        for _, sql_type in statement.parameters
        if sql_type.startswith("interlock.")
    }
    assert {codegen.class_name(name) for name in taken} == ROWS.keys()
    query = """SELECT attname, typname, typcategory = 'A' AS is_array
                 FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid
                WHERE attrelid = ('interlock.' || $1)::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum"""
    for name in taken:
        rows = await database.pool.fetch(query, name)
        columns = [(row["attname"], row["typname"].removeprefix("_"), row["is_array"]) for row in rows]
        assert differences(ROWS[codegen.class_name(name)], columns) == [], name


def test_every_record_is_returned_by_a_statement() -> None:
    returned = {kind for statement in STATEMENTS.values() if (kind := RECORDS.get(result_of(statement))) is not None}
    inherited = {base for kind in returned for base in kind.__mro__}
    assert {name for name, kind in RECORDS.items() if kind not in returned | inherited} == set()


@dataclasses.dataclass
class Example:
    id: records.RunId
    status: records.RunState
    at: datetime | None
    names: collections.abc.Sequence[str]


def test_a_record_that_differs_would_be_found() -> None:
    columns = [
        ("id", "uuid", False),
        ("status", "text", False),
        ("at", "timestamptz", False),
        ("names", "text[]", True),
    ]
    assert differences(Example, columns) == []
    assert differences(Example, [*columns, ("announce", "text", False)]) == []
    assert differences(Example, [*columns, ("more", "text", False)])
    assert differences(Example, columns[:-1]) == ["no column for names"]
    assert differences(Example, [columns[1], columns[0], *columns[2:]])
    for number, changed in ((0, ("id", "text", False)), (2, ("at", "date", False)), (3, ("names", "text", False))):
        assert differences(Example, [*columns[:number], changed, *columns[number + 1 :]])


# ---------------------------------------------------------------- the generated modules


def test_the_typed_functions_are_those_of_the_statements() -> None:
    stale = [str(path) for path, text in codegen.generate().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `make sql`"


def test_a_module_that_is_not_current_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current, stale, missing = tmp_path / "a.py", tmp_path / "b.py", tmp_path / "c.py"
    current.write_text("one\n")
    stale.write_text("two\n")
    monkeypatch.setattr(codegen, "generate", lambda: {current: "one\n", stale: "three\n", missing: "four\n"})
    monkeypatch.setattr(sys, "argv", ["codegen", "--check"])
    with pytest.raises(SystemExit) as caught:
        codegen.main()
    assert caught.value.code == f"{stale}, {missing}: not what the SQL says; run `make sql`"
    monkeypatch.setattr(sys, "argv", ["codegen"])
    codegen.main()
    assert [path.read_text() for path in (current, stale, missing)] == ["one\n", "three\n", "four\n"]


def test_a_parameter_that_is_not_used_or_not_declared_is_refused() -> None:
    for declared in ("tenant_id uuid", "tenant_id uuid, run_id uuid, step text"):
        with pytest.raises(ValueError, match="is declared and not used, or used and not declared"):
            queries._read("bad", "runs.sql", f"-- params: {declared}\nSELECT @tenant_id, @run_id;\n")
