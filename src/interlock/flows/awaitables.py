"""The awaitables of a flow: one step, or several side by side. The replay receives them and answers them."""

import re
from collections.abc import Awaitable, Callable, Generator
from hashlib import sha256
from typing import Any

import orjson

from interlock.definition.plan import PlanStep
from interlock.flows.errors import FlowUsageError

# Not after an escaped backslash: then it is six characters of text.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


class PendingStep:
    """One step that the flow asks for; awaiting it returns its output."""

    __slots__ = ("is_known", "step")

    def __init__(self, step: PlanStep) -> None:
        self.step = step
        # True if it was compared with the history, or is new.
        self.is_known = False

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self)

    def __repr__(self) -> str:
        return described(self.step)


class PendingGather:
    """Several steps side by side; awaiting it returns all their outputs, once the last is settled."""

    __slots__ = ("items", "name", "return_exceptions")

    def __init__(self, name: str, items: tuple[Awaitable[Any], ...], return_exceptions: bool) -> None:
        self.name = name
        self.items = items
        self.return_exceptions = return_exceptions

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self)

    def __repr__(self) -> str:
        return "ctx.gather(…)"


class SecretPlaceholder:
    """The place of a secret in a step's input; the value is inserted only when the tool is called."""

    __slots__ = ("text",)

    def __init__(self, name: str, form: str) -> None:
        self.text = escaped(form).replace("{}", f"${{secrets.{name}}}", 1)


def as_template(value: Any, fallback: Callable[[Any], Any]) -> Any:
    """Return an input as the journal keeps it: text like an expression stays text; secrets keep their names."""
    match value:
        case SecretPlaceholder():
            return value.text
        case str():
            return escaped(value)
        case None | bool() | int() | float():
            return value
        case dict():
            return {str(name): as_template(member, fallback) for name, member in value.items()}
        case list() | tuple():
            return [as_template(item, fallback) for item in value]
        case _:
            return as_template(fallback(value), fallback)


def escaped(text: str) -> str:
    return text.replace("${", "$${")


def request_digest(*said: Any) -> str:
    """Return the digest of the whole request. Raises if a part cannot be stored, before anything is."""
    encoded = orjson.dumps(said, option=orjson.OPT_SORT_KEYS, default=str)
    if _NUL.search(encoded):
        raise FlowUsageError("a NUL character was asked with, which PostgreSQL cannot store")
    return sha256(encoded).hexdigest()[:32]


def described(step: PlanStep) -> str:
    """Return the step roughly as the flow's author wrote it."""
    match step.kind:
        case "tool":
            return f'ctx.call("{step.tool}")'
        case "flow":
            return f'ctx.child("{step.workflow}")'
        case "approval":
            return f'ctx.approve("{step.key}")'
        case _:
            return f'ctx.wait(event="{step.event.type}")' if step.event is not None else "ctx.sleep(…)"
