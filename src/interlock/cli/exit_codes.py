"""How a command ends: an exit code and, for an error, one line with the remedy."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from interlock.cli.parsing import one_line, visible
from interlock.errors import InterlockError, Invalid

INTERRUPTED = 130
# `trigger test`: the trigger would ignore the event. Not an error.
STARTS_NOTHING = 3
# `chat` without a terminal: the run waits for an approval.
WAITS_FOR_APPROVAL = 4
# `chat --timeout`: the run did not end in time.
TIMED_OUT = 124


class Unfinished(typer.TyperException):
    """The command ended before the run did. `commands` lead to its end; each has words that say who runs it."""

    def __init__(
        self, exit_code: int, code: str, message: str, *, run_id: str | None = None,
        commands: Sequence[tuple[str, str]] = (),
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.exit_code, self.code = exit_code, code
        self.run_id, self.commands = run_id, commands


def example(*lines: str) -> str:
    """Return the epilog of a command's help. Typer joins single line breaks, so each line is a paragraph."""
    return "\n\n".join(["[bold]Example[/bold]" if len(lines) == 1 else "[bold]Examples[/bold]", *lines])


class OneLine(TyperGroup):
    """The root command. A command may return its exit code; an exception becomes one line on stderr."""

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
                wants_json = "--json" in (sys.argv[1:] if args is None else args)
                typer.echo(json.dumps(_as_object(error, line)) if wants_json else _as_text(error, line), err=True)
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
        case ApiError(
            code="ACTION_DIGEST_REQUIRED" | "ACTION_DIGEST_MISMATCH", detail=str(detail), fields={"digest": str(digest)}
        ):
            return f"{detail} The digest of the action is now {digest} (--digest).", 1
        case ClientError():
            return str(error), 1
        case InterlockError(title=Invalid.title):  # no request was sent: the client found the error
            return error.detail, 1
        case InterlockError():
            return f"{error.title}: {error.detail}", 1
        case OSError(filename=str() as name, strerror=str() as why):
            return f"{name}: {why}", 1
        case OSError(strerror=str() as why):
            return why, 1
        case UnicodeEncodeError():
            return f"{error.object[:80]!r} is no text in UTF-8", 1
        case _:
            return f"unexpected {type(error).__name__}: {error} (INTERLOCK_TRACEBACK=1 shows where)", 1


def _as_text(error: Exception, line: str) -> str:
    commands = error.commands if isinstance(error, Unfinished) else ()
    return "\n".join([f"interlock: {one_line(line)}", *(visible(f"{who}, run: {what}") for who, what in commands)])


def _as_object(error: Exception, line: str) -> dict[str, Any]:
    """Return the error for programs: `code`, `detail`, and the HTTP `status` if a server answered."""
    from interlock.client import ApiError, Unreachable

    match error:
        case ApiError():
            return {"code": error.code, "detail": line, "status": error.status, **error.fields}
        case Unfinished():
            more = {"run_id": error.run_id, "commands": [command for _, command in error.commands]}
            return {"code": error.code, "detail": line, "status": None, **more}
        case Unreachable():
            code = "UNREACHABLE"
        case InterlockError():
            code = error.code
        case typer.TyperException(exit_code=2):
            code = "USAGE"
        case _:
            code = "COMMAND_FAILED"
    return {"code": code, "detail": line, "status": None}


def _usage(error: typer.TyperException) -> str:
    """Print a usage error and where to read more; nothing if the help was printed instead."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return ""
    ctx = getattr(error, "ctx", None)
    if isinstance(error, typer.BadParameter) and error.__cause__ is not None:
        _use_our_words(error, error.__cause__)
    message = error.format_message()
    return f"{message.rstrip('.')} (see {ctx.command_path} --help)" if ctx else message


def _use_our_words(error: typer.TyperException, cause: BaseException) -> None:
    """Replace the text of pydantic, which checks the values of options, by our own."""
    from pydantic import ValidationError

    from interlock.wire.validation_errors import wrong

    if isinstance(cause, ValidationError):
        error.message = wrong(cause.errors()[0])
