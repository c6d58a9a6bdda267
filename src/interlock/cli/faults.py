"""Faults: the mistakes of a file, a line each, whoever found them."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from interlock.cli import show
from interlock.cli.text import one_line, read_text, visible

if TYPE_CHECKING:
    from interlock.client import ApiError
    from interlock.wire import Agent, Workflow

T = TypeVar("T")
Faults = Sequence[dict[str, Any]]

_INVALID = ("DEFINITION_INVALID", "POLICY_INVALID")


def applied(name: str, apply: Callable[[str], T], *, as_json: bool) -> T:
    """What the server makes of a file; its mistakes are printed with their lines."""
    from interlock.client import ApiError

    try:
        return apply(read_text(name))
    except ApiError as error:
        refuse_faults_in(error, name, as_json=as_json)
        raise


def warn_of_older(published: "Iterable[Workflow | Agent]", newest: "Callable[[str], Workflow | Agent]") -> None:
    """The same content is the same version, so a file that was put back to what it was is not in force again."""
    for old in published:
        if (now := newest(old.name)).version > old.version:
            told = f"{old.name}@{old.version} was there already, and new runs go on with {now.name}@{now.version}"
            typer.echo(visible(f"interlock: {told}; to go back, apply it with another description"), err=True)


def check(files: Iterable[str], parse: Callable[..., T], summary: Callable[[T], str], *, as_json: bool) -> None:
    """Read files without a server, and fail if there are mistakes in them."""
    from interlock.errors import DefinitionInvalid

    faults: list[dict[str, Any]] = []
    for name in files:
        try:
            plan = parse(read_text(name), file=name)
        except DefinitionInvalid as invalid:
            faults += [fault.as_dict() for fault in invalid.faults]
        else:
            if not as_json:
                show.console().print(visible(f"{name}: {summary(plan)}"))
    if as_json:
        show.print_json({"ok": not faults, "faults": faults})
    else:
        print_faults(faults)
    fail_on(faults)


def refuse_faults_in(error: "ApiError", name: str, *, as_json: bool = False) -> None:
    """Print what the server finds wrong with a file and fail; nothing if the error is about something else."""
    found = error.fields.get("errors") if error.code in _INVALID else None
    faults = [{**fault, "file": name} for fault in found or () if isinstance(fault, dict)]
    if faults and as_json:
        show.print_json({"ok": False, "faults": faults})
    else:
        print_faults(faults)
    fail_on(faults)


def print_faults(faults: Faults) -> None:
    out = show.console()
    for fault in faults:
        where = ":".join(str(part) for part in (fault.get("file"), fault.get("line")) if part)
        out.print(": ".join(one_line(str(part)) for part in (where, fault.get("path"), fault.get("message")) if part))


def fail_on(faults: Faults) -> None:
    if faults:
        files = len({fault["file"] for fault in faults})
        count = "1 mistake" if len(faults) == 1 else f"{len(faults)} mistakes"
        raise typer.TyperException(f"{count} in {faults[0]['file'] if files == 1 else f'{files} files'}")
