"""Faults: the mistakes of a file, one line each, found by the server or locally."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from interlock.cli import formatting
from interlock.cli.environment import tools_to_check_against
from interlock.cli.parsing import one_line, read_text, visible

if TYPE_CHECKING:
    from interlock.client import ApiError
    from interlock.wire import Agent, Workflow

T = TypeVar("T")
Faults = Sequence[dict[str, Any]]

_INVALID = ("DEFINITION_INVALID", "POLICY_INVALID")


def applied(name: str, apply: Callable[[str], T], *, as_json: bool) -> T:
    """Return the server's answer to a file, or print the mistakes with their lines."""
    from interlock.client import ApiError

    try:
        return apply(read_text(name))
    except ApiError as error:
        refuse_faults_in(error, name, as_json=as_json)
        raise


def warn_of_older(published: "Iterable[Workflow | Agent]", newest: "Callable[[str], Workflow | Agent]") -> None:
    """Warn if the file is an older version: the same content keeps its version and does not come into force again."""
    for old in published:
        if (now := newest(old.name)).version > old.version:
            told = f"{old.name}@{old.version} exists already, and new runs still start with {now.name}@{now.version}."
            go_back = f"To go back, run: interlock workflow rollback {old.name} {old.version}"
            typer.echo(visible(f"interlock: {told} {go_back}"), err=True)


def check(files: Iterable[str], parse: Callable[..., T], summary: Callable[[T], str], *, as_json: bool) -> None:
    """Read files without a server, and fail if there are mistakes in them."""
    from interlock.errors import DefinitionInvalid

    fits_tools = tools_to_check_against()
    faults: list[dict[str, Any]] = []
    for name in files:
        try:
            plan = parse(read_text(name), file=name, also=fits_tools)
        except DefinitionInvalid as invalid:
            faults += [fault.as_dict() for fault in invalid.faults]
        else:
            if not as_json:
                formatting.console().print(visible(f"{name}: {summary(plan)}"))
    if as_json:
        formatting.print_json({"ok": not faults, "faults": faults})
    else:
        print_faults(faults)
    fail_on(faults)
    if fits_tools is None:
        typer.echo("interlock: INTERLOCK_TOOLS names no tools here, so tools and arguments were not checked", err=True)


def refuse_faults_in(error: "ApiError", name: str, *, as_json: bool = False) -> None:
    """Print what the server finds wrong with a file and fail. Does nothing if the error is about something else."""
    found = error.fields.get("errors") if error.code in _INVALID else None
    faults = [{**fault, "file": name} for fault in found or () if isinstance(fault, dict)]
    if faults and as_json:
        formatting.print_json({"ok": False, "faults": faults})
    else:
        print_faults(faults)
    fail_on(faults)


def print_faults(faults: Faults) -> None:
    out = formatting.console()
    for fault in faults:
        where = ":".join(str(part) for part in (fault.get("file"), fault.get("line")) if part)
        out.print(": ".join(one_line(str(part)) for part in (where, fault.get("path"), fault.get("message")) if part))


def fail_on(faults: Faults) -> None:
    if faults:
        files = len({fault["file"] for fault in faults})
        count = "1 mistake" if len(faults) == 1 else f"{len(faults)} mistakes"
        raise typer.TyperException(f"{count} in {faults[0]['file'] if files == 1 else f'{files} files'}")
