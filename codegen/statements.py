"""Generate a typed Python function for every named SQL statement: `store/sql/runs.sql` becomes `store/sql/runs.py`.

A statement declares its parameters and its result, and names its parameters with `@`:

    -- name: get_run
    -- params: tenant_id uuid, run_id uuid, workspace_id text?
    -- returns: RunRecord?
    SELECT ... WHERE tenant_id = @tenant_id AND id = @run_id ...

`?` after a parameter's type means that it may be NULL (`text?[]`: an array whose elements may be). The result is a
record of `store/records.py` or a type of PostgreSQL, alone (one row), with `?` (a row or none) or with `*` (a list of
rows). `nothing` stands for no result.

    python -m codegen.statements            write the modules
    python -m codegen.statements --check    fail if they differ
"""

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from interlock.store.queries import SqlStatement, read_statements

SQL = Path("src/interlock/store/sql")
RECORDS = Path("src/interlock/store/records.py")
IDS = Path("src/interlock/ids.py")

PYTHON_TYPES = {
    "uuid": "UUID", "text": "str", "int": "int", "smallint": "int", "bigint": "int", "float8": "float",
    "numeric": "Decimal", "boolean": "bool", "timestamptz": "datetime", "interval": "timedelta", "bytea": "bytes",
    "jsonb": "str", "json": "str", "void": "None",
}  # fmt: skip


@dataclass(frozen=True)
class Record:
    """A dataclass of `records.py`: its fields with their annotations, in order."""

    name: str
    fields: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Names:
    """What the generated code may import: records, ids, and the enums that the records mention."""

    records: dict[str, Record]
    ids: frozenset[str]
    enums: frozenset[str]


def read_names() -> Names:
    tree = ast.parse(RECORDS.read_text())
    records: dict[str, Record] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            inherited = [
                records[base.id].fields for base in node.bases if isinstance(base, ast.Name) and base.id in records
            ]
            own = tuple(
                (item.target.id, ast.unparse(item.annotation))
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            )
            records[node.name] = Record(node.name, sum(inherited, ()) + own)
    enums = frozenset(
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("interlock.lifecycle")
        for alias in node.names
    )
    ids = frozenset(re.findall(r'^(\w+Id) = NewType\("', IDS.read_text(), re.MULTILINE))
    return Names(records, ids, enums)


# ---------------------------------------------------------------- types


def python_type(name: str, sql_type: str, names: Names) -> str:
    """Return the annotation of a parameter: `run_id uuid` is a RunId, `run_ids uuid[]` a sequence of them."""
    optional = sql_type.endswith("?")
    sql_type = sql_type.removesuffix("?")
    is_array = sql_type.endswith("[]")
    sql_type = sql_type.removesuffix("[]")
    base = sql_type.removesuffix("?")
    if base.startswith("interlock."):
        python = class_name(base.removeprefix("interlock."))
        if python not in names.records:
            raise SystemExit(f"parameter {name}: {RECORDS} has no class {python}")
    elif base == "uuid":
        python = id_type(name.removesuffix("s") if is_array else name, names)
    elif base not in PYTHON_TYPES:
        raise SystemExit(f"parameter {name}: unknown type {base}")
    else:
        python = PYTHON_TYPES[base]
    if is_array:
        python = f"Sequence[{python}{' | None' if sql_type.endswith('?') else ''}]"
    return f"{python} | None" if optional else python


def id_type(name: str, names: Names) -> str:
    guess = class_name(name if name.endswith("_id") else f"{name}_id")
    return guess if guess in names.ids else "UUID"


def class_name(snake: str) -> str:
    return "".join(part.capitalize() for part in snake.split("_"))


# ---------------------------------------------------------------- rendering


@dataclass(frozen=True)
class Function:
    statement: SqlStatement
    names: Names

    @property
    def result(self) -> str:
        return self.statement.returns or ""

    @property
    def base(self) -> str:
        return self.result.rstrip("?*")

    @property
    def value_type(self) -> str:
        if self.base in self.names.records:
            return self.base
        plain = self.base.removesuffix("[]")
        if plain in self.names.ids:
            python = plain
        elif plain in PYTHON_TYPES:
            python = PYTHON_TYPES[plain]
        else:
            raise SystemExit(f"{self.statement.name}: unknown result {self.result}")
        return f"list[{python}]" if self.base.endswith("[]") else python

    @property
    def return_type(self) -> str:
        match self.result[-1:]:
            case _ if self.base == "nothing":
                return "None"
            case "*":
                return f"list[{self.value_type}]"
            case "?":
                return f"{self.value_type} | None"
        return self.value_type

    def render(self) -> str:
        name, parameters = self.statement.name, self.statement.parameters
        signature = ", ".join(f"{p}: {python_type(p, t, self.names)}" for p, t in parameters)
        arguments = "".join(f", {p}" for p, _ in parameters)
        head = f"async def {name}(db: Executor{', *, ' + signature if signature else ''}) -> {self.return_type}:"
        doc = f'    """{docstring(self.statement)}"""\n'
        return f"{head}\n{doc}{textwrap.indent(self.body(name, arguments), '    ')}\n"

    def body(self, name: str, arguments: str) -> str:
        is_record = self.base in self.names.records
        match self.result[-1:]:
            case _ if self.base == "nothing":
                return f'await db.fetch("{name}"{arguments})'
            case "*" if is_record:
                return f'return [{self.build("row")} for row in await db.fetch("{name}"{arguments})]'
            case "*":
                return f'return [row[0] for row in await db.fetch("{name}"{arguments})]'
            case "?" if is_record:
                return (
                    f'row = await db.row("{name}"{arguments})\nreturn {self.build("row")} if row is not None else None'
                )
            case "?":
                return f'value: {self.return_type} = await db.value("{name}"{arguments})\nreturn value'
        if is_record:
            return f'row = await db.one("{name}"{arguments})\nreturn {self.build("row")}'
        return f'value: {self.value_type} = await db.value("{name}"{arguments})\nreturn value'

    def build(self, row: str) -> str:
        """Return the expression that makes the record."""
        if conversions(self.names.records[self.base], self.names):
            return f"_{snake_case(self.base)}({row})"
        return f"{self.base}(*{row}[:{len(self.names.records[self.base].fields)}])"


def conversions(record: Record, names: Names) -> list[tuple[int, str, bool]]:
    """Return the fields that hold an enum, each with its position, the enum, and whether it may be NULL."""
    return [
        (number, next(iter(words(annotation) & names.enums)), "None" in annotation)
        for number, (_, annotation) in enumerate(record.fields)
        if words(annotation) & names.enums
    ]


def builder(record: Record, names: Names) -> str:
    """Return the function that makes a record with enums from a row."""
    lines = [
        f"def _{snake_case(record.name)}(row: Any) -> {record.name}:",
        f"    values = list(row[:{len(record.fields)}])",
    ]
    for number, enum, optional in conversions(record, names):
        value = f"{enum}(values[{number}])"
        lines.append(
            f"    values[{number}] = {f'None if values[{number}] is None else {value}' if optional else value}"
        )
    return "\n".join([*lines, f"    return {record.name}(*values)", ""])


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


def docstring(statement: SqlStatement) -> str:
    text = " ".join(statement.introduction.split()) or f"See `{statement.name}` in {statement.file}."
    wrapped = textwrap.wrap(text.replace('"', "'"), 110)
    if len(wrapped) == 1:
        return wrapped[0]
    return "\n    ".join([wrapped[0], *wrapped[1:]]) + "\n    "


def module(file: str, statements: Iterable[SqlStatement], names: Names) -> str:
    body = "\n\n".join(Function(statement, names).render() for statement in statements)
    made = [
        record for record in names.records.values() if f" _{snake_case(record.name)}(row)" in body.replace("[", " ")
    ]
    body = "\n\n".join([*(builder(record, names) for record in made), body])
    used = words(body)
    records = sorted(used & names.records.keys())
    imports = ["from interlock.store.pool import Executor"]
    if records:
        imports.append(f"from interlock.store.records import {', '.join(records)}")
    if enums := sorted(used & names.enums):
        imports.append(f"from interlock.lifecycle import {', '.join(enums)}")
    if ids := sorted(used & names.ids):
        imports.append(f"from interlock.ids import {', '.join(ids)}")
    for package, parts in {
        "collections.abc": ("Sequence",), "typing": ("Any",), "datetime": ("datetime", "timedelta"),
        "decimal": ("Decimal",), "uuid": ("UUID",),
    }.items():  # fmt: skip
        if needed := [part for part in parts if part in used]:
            imports.append(f"from {package} import {', '.join(needed)}")
    head = f'"""The statements of {file}, generated by codegen/statements.py."""\n\n'
    return head + "\n".join(imports) + "\n\n\n" + body


def index(modules: dict[str, list[str]]) -> str:
    lines = ['"""Every named statement as a typed function, generated by codegen/statements.py."""\n']
    for name, functions in sorted(modules.items()):
        for function in functions:
            lines.append(f"from interlock.store.sql.{name} import {function} as {function}")
    return "\n".join(lines) + "\n"


def generate() -> dict[Path, str]:
    names = read_names()
    by_file: dict[str, list[SqlStatement]] = {}
    for statement in read_statements().values():
        if statement.is_declared:
            by_file.setdefault(statement.file, []).append(statement)
    files = {
        SQL / f"{Path(file).stem}.py": module(file, statements, names) for file, statements in sorted(by_file.items())
    }
    files[SQL / "__init__.py"] = index({Path(f).stem: [s.name for s in found] for f, found in by_file.items()})
    return {path: formatted(text, path) for path, text in files.items()}


def formatted(text: str, path: Path) -> str:
    ruff = [str(Path(sys.executable).parent / "ruff")]
    for command in (["check", "--fix", "--quiet", "--select", "I"], ["format", "--quiet"]):
        done = subprocess.run(
            [*ruff, *command, "--stdin-filename", str(path), "-"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{path}: {done.stderr}")
        text = done.stdout
    return text


def main() -> None:
    files = generate()
    if "--check" not in sys.argv:
        for path, text in files.items():
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
        return
    if stale := [str(path) for path, text in files.items() if not path.exists() or path.read_text() != text]:
        raise SystemExit(f"{', '.join(stale)}: not what the SQL says; run `make sql`")


if __name__ == "__main__":
    main()
