"""docs/reference, generated: `python -m docs.generate` writes it, `--check` lists what is out of date.

Nothing here depends on the machine: no times, no paths, no terminal width, and every list has a fixed order.
"""

import difflib
import json
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from docs.codes import codes_in
from interlock.lifecycle import MACHINES, RunReason
from interlock.lifecycle.render import reference

HERE = Path(__file__).parent
REFERENCE = HERE / "reference"
SOURCE = HERE.parent / "src" / "interlock"


def lifecycles() -> str:
    return reference(MACHINES)


# ---------------------------------------------------------------- errors


def errors() -> str:
    out = _opening(
        "Errors",
        "`interlock.errors` and the places that raise them",
        "Every error of the API is `application/problem+json` (RFC 9457): `type`, `title`, `status`, `detail` and a "
        "`code` that a program can switch on. Some have more fields, such as `allowed` or `errors`.",
    )
    out += ["| code | status | title | for example |", "|---|---|---|---|"]
    for found in codes_in(SOURCE):
        out.append(f"| `{found.code}` | {found.status} | {found.title} | {_cell(found.example)} |")
    out += [
        "",
        "`RUN_…` stands for the machine whose table refused: an event that is not possible in this state answers "
        "`…_INVALID_TRANSITION` with the events that are `allowed`, one on a row that has ended `…_TERMINAL_STATE`.",
        "What FastAPI refuses by itself (a method that does not exist, for one) has the code `HTTP_` and its status.",
        "",
        "A step that failed has `last_error` with `type` and `message`, and a code where a program may want to know: "
        "`RUN_ORPHANED` when its worker was lost too often, `RUN_RESUME_FAILED` when nobody knows what became of it. "
        "A run whose effects could not all be undone has `COMPENSATION_FAILED` in its `error`, one whose flow no "
        "longer fits its history `NONDETERMINISM`. Why a run ended is its `reason`:",
        "",
        "| reason | means |",
        "|---|---|",
    ]
    out += [f"| `{reason}` | {reason.doc} |" for reason in RunReason]
    return _text(out)


# ---------------------------------------------------------------- settings


def settings() -> str:
    from interlock.settings import Settings, variable_of

    out = _opening("Settings", "`interlock.settings`", "Read from the environment when a process starts.")
    out += ["| variable | default | means |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (None, "") else f"`{field.default}`"
        out.append(f"| `{variable_of(name)}` | {default} | {_cell(field.description or '')} |")
    out += [
        "",
        "The command line and the clients also read `INTERLOCK_URL` (where the server is) and `INTERLOCK_API_KEY`. "
        "Without them the command line uses what `interlock up` left in the data directory.",
        "`INTERLOCK_TRACEBACK=1` makes a failing command show where it failed.",
    ]
    return _text(out)


# ---------------------------------------------------------------- metrics


def metrics() -> str:
    from interlock.lifecycle.render import label_sets
    from interlock.telemetry import Metrics

    who = "a key of tenant `default` or `INTERLOCK_METRICS_TOKEN`"
    bounded = "No label names a tenant; labels that callers choose are bounded."
    out = _opening(
        "Metrics", "`interlock.telemetry`", f"`GET /metrics`, in the Prometheus text format, with {who}. {bounded}"
    )
    out += ["| metric | kind | labels | means |", "|---|---|---|---|"]
    made: Any = Metrics().registry
    collectors = sorted(set(made._collector_to_names), key=lambda collector: str(collector._name))
    for collector in collectors:
        kind = collector._type
        name = collector._name + ("_total" if kind == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)
        out.append(f"| `{name}` | {kind} | {labels} | {_cell(collector._documentation)} |")
    out += ["", "The transitions that can be counted:", ""]
    counted = {name.removeprefix("interlock_").removesuffix("_transitions") for name in (c._name for c in collectors)}
    for machine in MACHINES:
        if machine.name in counted:
            pairs = ", ".join(f"`{source}`→`{target}`" for source, target in label_sets(machine))
            out.append(f"- {machine.name}: {pairs}")
    return _text(out)


# ---------------------------------------------------------------- the command line


def cli() -> str:
    from typer.main import get_command

    from interlock.cli import app

    out = _opening("Command line", "`interlock.cli`", "Every command has `--help`. Errors are one line on stderr.")
    _describe(get_command(app), "interlock", out)
    return _text(out)


_WORDS = {str: "TEXT", int: "NUMBER", float: "NUMBER"}
# Typer's own options, which depend on the shell.
_NOT_OURS = {"install_completion", "show_completion"}


def _describe(command: Any, path: str, out: list[str]) -> None:
    commands: dict[str, Any] = getattr(command, "commands", {})
    options = [p for p in command.params if p.param_type_name == "option" and p.name not in _NOT_OURS and not p.hidden]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    words = [path, *(_metavar(argument) for argument in arguments)]
    words += ["[OPTIONS]"] * bool(options) + ["COMMAND"] * bool(commands)
    out += [f"## {path}", "", (command.help or "").strip(), "", "```", " ".join(words), "```", ""]
    rows = [f"| `{_metavar(a)}` | {_cell(a.help or '')} | |" for a in arguments]
    rows += [f"| `{_flags(o)}` | {_cell(o.help or '')} | {_default(o)} |" for o in options]
    if rows:
        out += ["| | means | default |", "|---|---|---|", *rows, ""]
    if examples := [line for line in (command.epilog or "").split("\n\n") if line and not line.startswith("[")]:
        out += ["```console", *(f"$ {line}" for line in examples), "```", ""]
    for name in commands:
        _describe(commands[name], f"{path} {name}", out)


def _metavar(param: Any) -> str:
    metavar: str = param.metavar or param.name.upper()
    return metavar


def _flags(option: Any) -> str:
    flags = ", ".join([*option.opts, *option.secondary_opts])
    if option.is_flag:
        return flags
    kind = option.type_descriptor.annotation
    if option.multiple:  # list[str]: the type of one element
        kind = next(iter(get_args(kind)), kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"{flags} {'|'.join(member.value for member in kind)}"
    return f"{flags} {option.metavar or _WORDS[kind]}"


def _default(option: Any) -> str:
    if option.required:
        return "required"
    env = f"`{option.envvar}`" if option.envvar else ""
    plain = getattr(option.default, "value", option.default)
    shown = f"`{plain}`" if isinstance(plain, str | int | float) and not isinstance(plain, bool) else ""
    return shown or env


# ---------------------------------------------------------------- OpenAPI


def openapi() -> str:
    """Return the document without the package's version: only pyproject.toml contains the version."""
    from interlock.api import AppContext, create_app
    from interlock.settings import Settings

    needed = [part.name for part in fields(AppContext) if part.init and part.default_factory is MISSING]
    parts: dict[str, Any] = dict.fromkeys(needed) | {"settings": Settings.model_construct(max_body_bytes=0)}
    app = create_app(AppContext(**parts))
    schema = app.openapi()
    schema["info"]["version"] = "0"
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


# ---------------------------------------------------------------- writing and checking

PAGES: dict[str, Callable[[], str]] = {
    "lifecycles.md": lifecycles,
    "errors.md": errors,
    "settings.md": settings,
    "metrics.md": metrics,
    "cli.md": cli,
    "openapi.json": openapi,
}


def _opening(title: str, source: str, text: str) -> list[str]:
    return [f"# {title}", "", f"Generated from {source} by `make docs`.", "", text, ""]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _text(lines: list[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"


def write() -> int:
    REFERENCE.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")
        print(f"docs/reference/{name}")
    return 0


def differences() -> dict[str, str]:
    """Return the files that are out of date, by name, with their expected content."""
    found = {}
    for name, page in PAGES.items():
        path, wanted = REFERENCE / name, page()
        there = path.read_text(encoding="utf-8") if path.exists() else ""
        if there != wanted:
            lines = difflib.unified_diff(there.splitlines(), wanted.splitlines(), "is", "should be", lineterm="", n=0)
            found[name] = "\n".join(list(lines)[2:12])
    return found


def check() -> int:
    wrong = differences()
    for name, change in wrong.items():
        print(f"docs/reference/{name} is out of date:\n{change}\n", file=sys.stderr)
    if wrong:
        print(f"{len(wrong)} of {len(PAGES)} pages differ from the code; run `make docs`", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(check() if "--check" in sys.argv[1:] else write())
