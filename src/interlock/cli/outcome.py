"""How a command ends: an exit code, and for an error one line that says what to do about it."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from interlock.cli.text import one_line
from interlock.errors import Invalid, Problem

INTERRUPTED = 130


def example(*lines: str) -> str:
    """The epilog of a command's help. Typer joins single line breaks, so each line is a paragraph."""
    return "\n\n".join(["[bold]Example[/bold]" if len(lines) == 1 else "[bold]Examples[/bold]", *lines])


class OneLine(TyperGroup):
    """The root command. A command may return its exit code; what it raises becomes one line on stderr."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except Exception as error:
            if os.environ.get("INTERLOCK_TRACEBACK"):
                raise
            line, code = explain(error)
            if line:
                typer.echo(f"interlock: {one_line(line)}", err=True)
        sys.exit(code if isinstance(code, int) else 0)


def explain(error: Exception) -> tuple[str, int]:
    from interlock.client import ApiError, ClientError

    match error:
        case typer.TyperException():
            return _usage(error), error.exit_code
        case typer.Abort():
            return "stopped", 1
        case ApiError(status=401):
            return f"{error} (give --key or set INTERLOCK_API_KEY)", 1
        case ApiError(code="EFFECT_IN_DOUBT", fields={"receipt_id": str(receipt)}):
            resolve = f"interlock receipt resolve {receipt} --happened (or --did-not-happen, --fail)"
            return f"nobody knows whether it happened; find out and say: {resolve}", 1
        case ClientError():
            return str(error), 1
        case Problem(title=Invalid.title):  # of no request: it was found out here
            return error.detail, 1
        case Problem():
            return f"{error.title}: {error.detail}", 1
        case OSError(filename=str() as name, strerror=str() as why):
            return f"{name}: {why}", 1
        case OSError(strerror=str() as why):
            return why, 1
        case UnicodeEncodeError():
            return f"{error.object[:80]!r} is no text in UTF-8", 1
        case _:
            return f"unexpected {type(error).__name__}: {error} (INTERLOCK_TRACEBACK=1 shows where)", 1


def _usage(error: typer.TyperException) -> str:
    """What was typed wrong and where to read more; nothing if the help was printed instead."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    ctx = getattr(error, "ctx", None)
    message = error.format_message().replace(": Value error, ", ": ", 1)
    return f"{message.rstrip('.')} (see {ctx.command_path} --help)" if ctx else message
