"""Fit: check that the steps of a definition call existing tools with valid arguments.

A definition does not know the tools, so publication checks here. Values of expressions are checked when the step runs;
only the names of their arguments are checked before.
"""

from collections.abc import Callable, Iterator, Mapping

from pydantic import ValidationError

from interlock.definition.diagnostics import Faults, Path
from interlock.definition.plan import Plan, PlanStep
from interlock.tools.registry import RegisteredTool, Registry
from interlock.wire.validation_errors import suggestion, wrong

_WILDCARDS = frozenset("*?[")


def fits(tools: Registry) -> Callable[[Plan, Faults], None] | None:
    """Return a check of a plan against these tools, or None if there are no tools.

    A server without tools is a valid deployment: only its workers import them.
    """
    return (lambda plan, faults: _check(plan, tools, faults)) if tools.all() else None


def _check(plan: Plan, tools: Registry, faults: Faults) -> None:
    if plan.agent is not None:
        for position, name in enumerate(plan.agent.tools):
            if _WILDCARDS.isdisjoint(name):
                _find(name, ("tools", position), tools, faults)
        return
    for path, step in _calls(plan):
        assert step.tool is not None
        tool = _find(step.tool, (*path, "tool"), tools, faults)
        if tool is not None:
            _check_arguments(step, tool, (*path, "input"), faults)


def _calls(plan: Plan) -> Iterator[tuple[Path, PlanStep]]:
    for step in plan.steps:
        if step.tool is not None:
            yield ("steps", step.index), step
        if step.undo is not None:
            yield ("steps", step.index, "compensate"), step.undo


def _find(name: str, path: Path, tools: Registry, faults: Faults) -> RegisteredTool | None:
    tool = tools.find(name)
    if tool is None:
        near = suggestion(name, [known.name for known in tools.all()])
        faults.add(path, f"no tool is called `{name}`{near}")
    return tool


def _check_arguments(step: PlanStep, tool: RegisteredTool, path: Path, faults: Faults) -> None:
    given = step.input.value
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        return  # an expression produces all of it
    made_later = {str(where[0]) for where, _ in step.input.leaves() if where}
    constants = {name: value for name, value in given.items() if name not in made_later}
    known = tool.arguments.model_fields
    try:
        tool.arguments.model_validate(constants)
    except ValidationError as error:
        for found in error.errors(include_url=False):
            where = tuple(part for part in found["loc"] if isinstance(part, str | int))
            name = str(where[0])
            if found["type"] == "extra_forbidden" and len(where) == 1:
                faults.add((*path, *where), f"{tool.name} has no argument `{name}`{suggestion(name, known)}")
            elif found["type"] == "missing" and len(where) == 1:
                if name not in made_later:
                    faults.add(path, f"`{name}` is missing; {tool.name} needs it")
            elif name not in tool.secret:
                faults.add((*path, *where), wrong(found))
    for name in sorted(made_later - known.keys()):
        faults.add((*path, name), f"{tool.name} has no argument `{name}`{suggestion(name, known)}")
