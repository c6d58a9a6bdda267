"""Tools: functions that act on other systems, with the properties that the engine needs."""

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter, ValidationError, create_model
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from interlock.audit.redact import MARK
from interlock.definition.duration import parse_duration
from interlock.errors import Invalid, Terminal
from interlock.flows import Flows, make_flow
from interlock.lifecycle import Tier
from interlock.policy.action import ProposedAction
from interlock.tools.context import Context
from interlock.tools.secret import Veil, is_marked
from interlock.wire.validation_errors import explain, suggestion

_LONGEST_KEY = 255
NO_SECRETS: Mapping[str, tuple[str, ...]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RegisteredTool:
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
    target: str | None
    show: frozenset[str]
    reconcile: Callable[..., Any] | None
    input_schema: dict[str, Any] = field(repr=False)
    # Parameters that are secret or contain a secret.
    secret: frozenset[str] = frozenset()
    # How to serialize a result that is secret or contains a secret.
    result: TypeAdapter[Any] | None = field(default=None, repr=False)
    # The names of the tenants that have the tool. None means all tenants.
    tenants: frozenset[str] | None = None
    # Connects, and returns the function to call instead of `function`. It has no effect of the tool, so a call that
    # fails here was not started and its time-out has not started.
    connect: Callable[[], Awaitable[Callable[..., Any]]] | None = field(default=None, repr=False)

    @property
    def connector(self) -> str:
        return self.name.partition(".")[0]

    @property
    def operation(self) -> str:
        return self.name.partition(".")[2] or self.name

    def validated(self, given: Any, *, show_input: bool = True) -> dict[str, Any]:
        """Return the arguments to call with. Raise Terminal if they are invalid, because a retry cannot help."""
        if not given and not self.arguments.model_fields:
            return {}
        try:
            parsed = self.arguments.model_validate(given if given is not None else {})
        except ValidationError as error:
            known = self.arguments.model_fields
            why = explain(error, show_input=show_input and not self.secret, known=known)
            raise Terminal(f"input of {self.name} is not valid: {why}") from None
        return {name: getattr(parsed, name) for name in type(parsed).model_fields}

    def shown(self, arguments: dict[str, Any], veil: Veil) -> dict[str, Any]:
        """Return the arguments in the form that may be shown."""
        if not self.secret:
            plain: dict[str, Any] = to_jsonable_python(arguments)
            return plain
        serializer = self.arguments.__pydantic_serializer__
        model = self.arguments.model_construct(**arguments)
        written = serializer.to_python(model, mode="json", context=veil, by_alias=True)
        fields = self.arguments.model_fields
        return {name: written[fields[name].serialization_alias or name] for name in arguments}

    def kept(self, result: Any, veil: Veil) -> bytes:
        """Return the stored form of a result with secrets.

        A result that does not fit its declared type is hidden as a whole.
        """
        assert self.result is not None
        try:
            return self.result.dump_json(self.result.validate_python(result), context=veil, by_alias=True)
        except (ValidationError, PydanticSerializationError):
            return to_json(veil.hide(to_jsonable_python(result, fallback=str)))

    def propose(
        self, arguments: dict[str, Any], shown: dict[str, Any], secrets: Mapping[str, tuple[str, ...]] = NO_SECRETS
    ) -> ProposedAction:
        return ProposedAction(
            tool=self.name, connector=self.connector, operation=self.operation,
            target=self.target_of(arguments, shown), fields=shown, risk=self.risk, writes=self.writes, secrets=secrets,
        )  # fmt: skip

    def effect_key(self, arguments: dict[str, Any], shown: dict[str, Any] | None = None) -> str | None:
        """Return the tool's key of the effect. A key too long for the index ends in a hash of the whole key."""
        key = self._filled("key", self.key, arguments, shown)
        if key is None or len(key) <= _LONGEST_KEY:
            return key
        return f"{key[: _LONGEST_KEY - 65]}:{sha256(key.encode(errors='surrogatepass')).hexdigest()}"

    def target_of(self, arguments: dict[str, Any], shown: dict[str, Any] | None = None) -> str | None:
        return self._filled("target", self.target, arguments, shown)

    def _filled(
        self, what: str, template: str | None, arguments: dict[str, Any], shown: dict[str, Any] | None
    ) -> str | None:
        if template is None:
            return None
        if self.secret:
            arguments = {**arguments, **{name: (shown or {}).get(name, MARK) for name in self.secret}}
        try:
            return template.format_map(_Filling(arguments))
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise Terminal(f"{what} of {self.name} does not fit its input: {error}") from None


@dataclass(frozen=True, slots=True)
class Happened:
    """Returned by `reconcile` if the effect took place. `output` is what the tool would have returned."""

    output: Any = None


@dataclass(frozen=True, slots=True)
class DidNotHappen:
    """Returned by `reconcile` if the effect did not take place, so that it may safely be attempted."""


_HASH = "_hash"
_ALL_FIELDS = "fields" + _HASH


class _Filling(dict[str, Any]):
    """The names in a template: the arguments, the hash of one, or the hash of all.

    Examples: sn:incident:update:{instance}:{sys_id}:{fields_hash} and slack:post:{channel}:{thread_ts}:{body_hash}.
    """

    def __missing__(self, name: str) -> str:
        if name == _ALL_FIELDS:
            return _hash_of(dict(self))
        if not name.endswith(_HASH):
            raise KeyError(name)
        return _hash_of(self[name.removesuffix(_HASH)])


def _hash_of(value: Any) -> str:
    return sha256(to_json(value)).hexdigest()[:16]


def _check_template(name: str, what: str, template: str | None, arguments: Collection[str]) -> None:
    """Raise Invalid if the template uses an unknown name, because every call would then fail."""
    try:
        fields = [field for _, field, _, _ in Formatter().parse(template or "") if field is not None]
    except ValueError as error:
        raise Invalid(f"tool {name}: {what} cannot be read ({error}); expected a text like pay:{{amount}}") from None
    for field_ in fields:
        named = re.split(r"[.\[]", field_)[0]
        if named not in (*arguments, _ALL_FIELDS, *(argument + _HASH for argument in arguments)):
            its = f"its arguments are {', '.join(arguments)}" if arguments else "it has no arguments"
            raise Invalid(f"tool {name}: {what} names {named!r}; {its} (NAME{_HASH}: of one, {_ALL_FIELDS}: of all)")


class Registry:
    def __init__(self) -> None:
        self._tools: dict[str, RegisteredTool] = {}
        self.flows = Flows()
        # Grows with every change, so that caches derived from the tools can detect that they are outdated.
        self.edition = 0

    def add(self, tool: RegisteredTool) -> None:
        known = self._tools.get(tool.name)
        if known is not None and (known.function.__module__, known.function.__qualname__) != (
            tool.function.__module__,
            tool.function.__qualname__,
        ):
            raise Invalid(
                f"tool {tool.name} is defined twice: in {known.function.__module__} and {tool.function.__module__}"
            )
        self.put(tool)

    def put(self, tool: RegisteredTool) -> None:
        """Add the tool, replacing any tool of that name."""
        self._tools[tool.name] = tool
        self.edition += 1

    def copy(self) -> "Registry":
        """Return an independent copy."""
        copied = Registry()
        copied._tools.update(self._tools)
        copied.flows = self.flows.copy()
        return copied

    def find(self, name: str) -> RegisteredTool | None:
        return self._tools.get(name)

    def missing(self, name: str, where: str = "here", remedy: str = "add its file to INTERLOCK_TOOLS") -> str:
        """Return the message about a tool that this registry lacks: the name that was probably meant, or a remedy."""
        return f"no tool {name} {where}{suggestion(name, self._tools) or f'; {remedy}'}"

    def all(self) -> list[RegisteredTool]:
        return [self._tools[name] for name in sorted(self._tools)]

    def of_tenant(self, tenant: str) -> "Registry":
        """Return the tools that a tenant has. The tools of other tenants are invisible."""
        return self._filtered(tenant, self.edition) if any(tool.tenants for tool in self._tools.values()) else self

    @lru_cache(maxsize=64)  # noqa: B019 - a registry lives as long as its process
    def _filtered(self, tenant: str, edition: int) -> "Registry":
        made = Registry()
        made.flows = self.flows
        made._tools = {
            name: tool for name, tool in self._tools.items() if tool.tenants is None or tenant in tool.tenants
        }
        made.edition = edition
        return made


registry = Registry()


def tool(
    name: str,
    *,
    writes: bool = False,
    risk: str | None = None,
    idempotent: bool | None = None,
    key: str | None = None,
    undo: str | None = None,
    timeout: float | None = None,
    target: str | None = None,
    show: Iterable[str] = (),
    reconcile: Callable[..., Any] | None = None,
    register: Registry | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a tool. Async functions run on the worker's loop, plain ones in its threads.

    A tool that reads is idempotent by default; one that writes is not. The default `risk` of a write is `med`, so that
    the default policy holds it for approval; that of a read is `low`.

    `key` names the effect (`shop:refund:{charge}:{amount}`) and `target` what it acts on (`{charge}`). `show` lists the
    fields that receipts keep readable. After a crash `reconcile` tells whether the effect happened: it gets the same
    arguments and returns `Happened(output)` or `DidNotHappen()`. If it raises, the effect stays in doubt.

    `Annotated[str, Secret]` keeps a parameter, a result or a field of one out of everything that is stored. Later steps
    see `[secret]` in its place.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        model, wants_context, secret = _arguments(name, function)
        for what, template in (("key", key), ("target", target)):
            _check_template(name, what, template, model.model_fields)
        (register or registry).add(
            RegisteredTool(
                name=name,
                function=function,
                description=inspect.getdoc(function) or "",
                is_async=inspect.iscoroutinefunction(function),
                wants_context=wants_context,
                arguments=model,
                writes=writes,
                risk=Tier(risk or (Tier.MED if writes else Tier.LOW)),
                idempotent=not writes if idempotent is None else idempotent,
                key=key,
                undo=undo,
                timeout=timeout,
                target=target,
                show=frozenset(show),
                reconcile=reconcile,
                input_schema=model.model_json_schema(),
                secret=secret,
                result=_result(name, function),
            )
        )
        return function

    _refuse_bare("tool", name)
    if not name or any(not (c.isalnum() or c in "._-") for c in name):
        raise Invalid(f"{name!r} is not a tool name; write connector.operation, like shop.refund")
    if risk is not None and risk not in tuple(Tier):
        raise Invalid(f"tool {name}: risk is low, med or high, not {risk!r}")
    return decorate


def flow(
    name: str,
    *,
    version: str | int | None = None,
    retired: bool = False,
    timeout: str | float | None = None,
    max_writes_per_run: int | None = None,
    max_concurrency: int | None = None,
    register: Registry | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make an async function a flow: started by name like a workflow, and replayed on its journal.

    A run keeps the version it started with. Without `version` every change of the function's code makes a new version;
    with it you decide. `retired` keeps an old version for the runs that started with it.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        seconds = None if timeout is None else parse_duration(timeout)
        made = make_flow(
            function, name, version, retired=retired, timeout=seconds, max_writes_per_run=max_writes_per_run,
            max_concurrency=max_concurrency,
        )  # fmt: skip
        (register or registry).flows.add(made)
        return function

    _refuse_bare("flow", name)
    return decorate


def _refuse_bare(decorator: str, name: object) -> None:
    """Reject `@tool` without parentheses, which passes the function in place of its name."""
    if callable(name):
        function = getattr(name, "__name__", "operation")
        raise Invalid(f'@{decorator} takes a name: write @{decorator}("connector.{function}")')


def _arguments(name: str, function: Callable[..., Any]) -> tuple[type[BaseModel], bool, frozenset[str]]:
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
    return model, wants_context, frozenset(name for name, (hint, _) in fields.items() if is_marked(hint))


def _result(name: str, function: Callable[..., Any]) -> TypeAdapter[Any] | None:
    hint: Any = get_type_hints(function, include_extras=True).get("return")
    if not is_marked(hint):
        return None
    try:
        return TypeAdapter(hint)
    except PydanticUserError as error:
        raise Invalid(f"tool {name}: what is secret in its result cannot be told apart: {error.message}") from None


def load_tools(spec: str) -> None:
    """Import every file or module of a comma-separated list. Importing a module registers its tools."""
    for item in filter(None, (part.strip() for part in spec.split(","))):
        try:
            _load(item)
        except Invalid:  # an invalid tool has its own message
            raise
        except (ImportError, SyntaxError, OSError) as error:
            raise Invalid(f"cannot load tools from {item}: {error}", code="TOOLS_INVALID") from error
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise Invalid(f"cannot load tools from {item}: {why}", code="TOOLS_INVALID") from error


def _load(item: str) -> None:
    path = Path(item)
    if item.endswith(".py") or path.is_file():
        # Use a name derived from the path, so that two files of the same name can both be loaded, each once.
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
            with _importable(path.resolve().parent):
                located.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    else:
        with _importable(Path.cwd()):
            importlib.import_module(item)


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Make the folder importable, for the named modules and for the modules beside a tool file."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
