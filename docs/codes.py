"""Error codes, read from the source: every place that creates a problem with a specific code."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from interlock import errors
from interlock.engine.approvals.approvals import REFUSED
from interlock.errors import InterlockError
from interlock.lifecycle import JOB, RUN, WORKER, JobEvent, JobState, RunEvent, RunState, WorkerEvent, WorkerState


@dataclass(frozen=True, slots=True)
class Code:
    code: str
    status: int
    title: str
    example: str


_CLASSES: dict[str, type[InterlockError]] = {
    name: made for name, made in vars(errors).items() if isinstance(made, type) and issubclass(made, InterlockError)
}


def codes_in(source: Path) -> list[Code]:
    """Return each code once, by status, then by code, with the sentence of the first place that uses it."""
    found: dict[str, Code] = {}
    for path in sorted(source.rglob("*.py")):
        # The client repeats the server's codes, and the errors themselves are listed below.
        if path.parent.name != "client" and path.name != "errors.py":
            for code in _codes_of(ast.parse(path.read_text(encoding="utf-8"))):
                found.setdefault(code.code, code)
    for problem in _refused_transitions():
        found[problem.code] = Code(problem.code, problem.status, problem.title, problem.detail)
    for made in _CLASSES.values():
        found.setdefault(made.code, Code(made.code, made.status, made.title, ""))
    return sorted(found.values(), key=lambda code: (code.status, code.code))


def _refused_transitions() -> Iterator[InterlockError]:
    yield RUN.refusal(RunState.RUNNING, "retry")
    yield RUN.refusal(RunState.SUCCEEDED, RunEvent.CANCEL)
    yield WORKER.refusal(WorkerState.IDLE, WorkerEvent.PAUSE)
    yield WORKER.refusal(WorkerState.COMPLETED, WorkerEvent.RESUME)
    yield JOB.refusal(JobState.SUBMITTED, JobEvent.ALLOCATE)
    yield JOB.refusal(JobState.CANCELED, JobEvent.CANCEL)


def _codes_of(tree: ast.Module) -> Iterator[Code]:
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id == "Refusal" and isinstance(node.args[0], ast.Constant):
            code = str(ast.literal_eval(node.args[0]))
            made = REFUSED.get(code, errors.Conflict)
            yield Code(code, made.status, made.title, _sentence(node.args[1]))
        elif (named := _CLASSES.get(node.func.id)) and (given := _code_of(node, constants)):
            yield Code(given, named.status, named.title, _sentence(node.args[0]))


def _code_of(call: ast.Call, constants: dict[str, str]) -> str | None:
    for keyword in call.keywords:
        if keyword.arg == "code":
            match keyword.value:
                case ast.Constant(value=str(code)):
                    return code
                case ast.Name(id=name):
                    return constants.get(name)
    return None


def _sentence(node: ast.expr) -> str:
    """Return the message, with … for values known only at run time."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_sentence(part) for part in parts)
        case ast.BinOp(left=left):
            return _sentence(left)
        case _:
            return "…"
