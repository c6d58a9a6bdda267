"""Tools: functions that act on the world, with what the engine has to know about them."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model

from interlock.errors import Invalid, Terminal
from interlock.lifecycle import Tier
from interlock.tools.context import Context


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    function: Callable[..., Any]
    description: str
    is_async: bool
    wants_context: bool
    arguments: type[BaseModel]
    writes: bool
    risk: Tier
    idempotent: bool
    key: str | None
    undo: str | None
    timeout: float | None
    input_schema: dict[str, Any] = field(repr=False)

    @property
    def connector(self) -> str:
        return self.name.partition(".")[0]

    @property
    def operation(self) -> str:
        return self.name.partition(".")[2] or self.name

    def validated(self, given: Any) -> dict[str, Any]:
        """The arguments to call with; Terminal if they do not fit, since trying again cannot help."""
        if not given and not self.arguments.model_fields:
            return {}
        try:
            parsed = self.arguments.model_validate(given if given is not None else {})
        except ValidationError as error:
            raise Terminal(f"input of {self.name} is not valid: {explain(error)}") from None
        return {name: getattr(parsed, name) for name in type(parsed).model_fields}

    def effect_key(self, arguments: dict[str, Any]) -> str | None:
        if self.key is None:
            return None
        try:
            return self.key.format(**arguments)
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise Terminal(f"key of {self.name} does not fit its input: {error}") from None


class Registry:
    def __init__(self) -> None:
        self._tools: dict[str, Tool] = {}

    def add(self, tool: Tool) -> None:
        known = self._tools.get(tool.name)
        if known is not None and (known.function.__module__, known.function.__qualname__) != (
            tool.function.__module__,
            tool.function.__qualname__,
        ):
            raise Invalid(
                f"tool {tool.name} is defined twice: in {known.function.__module__} and {tool.function.__module__}"
            )
        self._tools[tool.name] = tool

    def find(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def all(self) -> list[Tool]:
        return [self._tools[name] for name in sorted(self._tools)]


registry = Registry()


def tool(
    name: str,
    *,
    writes: bool = False,
    risk: str = "low",
    idempotent: bool | None = None,
    key: str | None = None,
    undo: str | None = None,
    timeout: float | None = None,
    register: Registry | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a tool. Async functions run on the worker's loop, plain ones in its threads.

    A tool that only reads is idempotent unless it says otherwise; one that writes is not, unless it says so.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        model, wants_context = _arguments(name, function)
        (register or registry).add(
            Tool(
                name=name,
                function=function,
                description=inspect.getdoc(function) or "",
                is_async=inspect.iscoroutinefunction(function),
                wants_context=wants_context,
                arguments=model,
                writes=writes,
                risk=Tier(risk),
                idempotent=not writes if idempotent is None else idempotent,
                key=key,
                undo=undo,
                timeout=timeout,
                input_schema=model.model_json_schema(),
            )
        )
        return function

    if not name or any(not (c.isalnum() or c in "._-") for c in name):
        raise Invalid(f"{name!r} is not a tool name; write connector.operation, like shop.refund")
    if risk not in tuple(Tier):
        raise Invalid(f"tool {name}: risk is low, med or high, not {risk!r}")
    return decorate


def _arguments(name: str, function: Callable[..., Any]) -> tuple[type[BaseModel], bool]:
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    wants_context = False
    for position, parameter in enumerate(inspect.signature(function).parameters.values()):
        if position == 0 and (parameter.name == "ctx" or hints.get(parameter.name) is Context):
            wants_context = True
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise Invalid(f"tool {name}: parameter {parameter.name} must have a name and a type that a schema can hold")
        else:
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints.get(parameter.name, Any), default)
    try:
        model = create_model(
            f"{name} input", __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields
        )
        model.model_json_schema()
    except PydanticUserError as error:
        raise Invalid(f"tool {name}: its parameters have no JSON schema: {error.message}") from None
    return model, wants_context


def explain(error: ValidationError) -> str:
    """One line that says where and what: `amount: Input should be a valid integer (got 'ten')`."""
    parts = []
    for fault in error.errors(include_url=False):
        where = ".".join(str(part) for part in fault["loc"])
        got = "" if fault["type"] == "missing" else f" (got {fault['input']!r:.80})"
        parts.append(f"{where}: {fault['msg']}{got}" if where else f"{fault['msg']}{got}")
    return "; ".join(parts)


def load_tools(spec: str) -> None:
    """Import every file or module of a comma-separated list; each registers its tools by being imported."""
    for item in filter(None, (part.strip() for part in spec.split(","))):
        try:
            _load(item)
        except (ImportError, SyntaxError, OSError) as error:
            raise Invalid(f"cannot load tools from {item}: {error}", code="TOOLS_INVALID") from error


def _load(item: str) -> None:
    path = Path(item)
    if item.endswith(".py") or path.is_file():
        # Under a name made from its path, so that two files of the same name can be loaded, each once.
        name = "interlock_tools_" + str(path.resolve()).replace("/", "_").replace(".", "_")
        if name in sys.modules:
            return
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {item}")
        located = importlib.util.spec_from_file_location(name, path)
        assert located is not None and located.loader is not None
        module = importlib.util.module_from_spec(located)
        sys.modules[name] = module
        try:
            located.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            importlib.import_module(item)
        finally:
            sys.path.remove(str(Path.cwd()))
