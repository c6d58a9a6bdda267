"""The flows of this process, by name and version."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from interlock.definition.flow import flow_plan
from interlock.definition.plan import Plan
from interlock.definition.workflow import is_name
from interlock.errors import Invalid

Function = Callable[..., Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class RegisteredFlow:
    plan: Plan
    function: Function
    takes_input: bool
    # Only for runs that began with it: new runs use another version.
    is_retired: bool = False

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def version(self) -> str:
        assert self.plan.flow is not None
        return self.plan.flow

    @property
    def description(self) -> str:
        return self.plan.description

    def start(self, context: Any, input: Any) -> Coroutine[Any, Any, Any]:
        return self.function(context, input) if self.takes_input else self.function(context)


class Flows:
    def __init__(self) -> None:
        self._by_version: dict[tuple[str, str], RegisteredFlow] = {}
        self._current: dict[str, RegisteredFlow] = {}

    def add(self, flow: RegisteredFlow) -> None:
        for known in (self._by_version.get((flow.name, flow.version)), self._current.get(flow.name)):
            if (
                known is None
                or _place(known) == _place(flow)
                or (known is self._current.get(flow.name) and flow.is_retired)
            ):
                continue
            if known.version == flow.version:
                raise Invalid(
                    f"flow {flow.name} version {flow.version} is defined twice: in {_place(known)} and {_place(flow)}"
                )
            raise Invalid(
                f"flow {flow.name} is defined in {_place(known)} and in {_place(flow)}; mark the one that is only "
                "kept for runs that began with it as retired=True"
            )
        self._by_version[flow.name, flow.version] = flow
        if not flow.is_retired:
            self._current[flow.name] = flow

    def copy(self) -> "Flows":
        copied = Flows()
        copied._by_version.update(self._by_version)
        copied._current.update(self._current)
        return copied

    def find(self, name: str, version: str) -> RegisteredFlow | None:
        return self._by_version.get((name, version))

    def current(self, name: str) -> RegisteredFlow | None:
        """Return the version that new runs use."""
        return self._current.get(name)

    def all(self) -> list[RegisteredFlow]:
        return [self._by_version[key] for key in sorted(self._by_version)]


def make_flow(
    function: Function, name: str, version: str | int | None, *, retired: bool = False, **limits: Any
) -> RegisteredFlow:
    """Make a flow; `limits` are those of `flow_plan`."""
    if not is_name(name):
        raise Invalid(f"{name!r} is not a flow's name; write lower-case letters, digits, `_`, `.` and `-`")
    if not inspect.iscoroutinefunction(function):
        raise Invalid(f"flow {name}: {function.__qualname__} is not an async function")
    named = version_of(function) if version is None else str(version)
    if not named or len(named) > 100:
        raise Invalid(f"flow {name}: a version has 1 to 100 characters, not {named!r:.120}")
    parameters = list(inspect.signature(function).parameters.values())
    if not 1 <= len(parameters) <= 2 or any(
        p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters
    ):
        raise Invalid(f"flow {name}: {function.__qualname__} takes ctx, or ctx and input")
    for cap in ("max_writes_per_run", "max_concurrency"):
        if (most := limits.get(cap)) is not None and most < 1:
            raise Invalid(f"flow {name}: {cap} is at least 1, not {most}")
    plan = flow_plan(name, named, description=inspect.getdoc(function) or "", **limits)
    return RegisteredFlow(plan, function, len(parameters) == 2, retired)


def version_of(function: Function) -> str:
    """Return the version of a function's source. Comments, spacing and the functions that it calls do not count."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        raise Invalid(f"{function.__qualname__} has no source to tell versions by; give @flow a version=") from None
    node = tree.body[0]
    if isinstance(node, ast.AsyncFunctionDef):
        node.decorator_list = []
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return sha256(ast.dump(node).encode()).hexdigest()[:16]


def _place(flow: RegisteredFlow) -> tuple[str, str]:
    return flow.function.__module__, flow.function.__qualname__
