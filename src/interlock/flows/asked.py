"""What a flow awaits: one step, or several side by side. Whoever runs the flow is handed these and answers them."""

import re
from collections.abc import Awaitable, Callable, Generator
from hashlib import sha256
from typing import Any

import orjson

from interlock.definition.plan import Step
from interlock.flows.faults import FlowMisused

# Not after an escaped backslash: then it is six characters of text.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


class Asked:
    """One step that the flow asks for; awaiting it gives what came of it."""

    __slots__ = ("is_known", "step")

    def __init__(self, step: Step) -> None:
        self.step = step
        # It was compared with the history, or is new.
        self.is_known = False

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self)

    def __repr__(self) -> str:
        return described(self.step)


class Gathered:
    """Several side by side; awaiting it gives all that came of them, once the last is settled."""

    __slots__ = ("items", "name", "return_exceptions")

    def __init__(self, name: str, items: tuple[Awaitable[Any], ...], return_exceptions: bool) -> None:
        self.name = name
        self.items = items
        self.return_exceptions = return_exceptions

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self)

    def __repr__(self) -> str:
        return "ctx.gather(…)"


class SecretPlace:
    """Where a secret goes in a step's input; its value is put in when the tool is called, and nowhere earlier."""

    __slots__ = ("text",)

    def __init__(self, name: str, form: str) -> None:
        self.text = escaped(form).replace("{}", f"${{secrets.{name}}}", 1)


def as_template(value: Any, fallback: Callable[[Any], Any]) -> Any:
    """An input as the journal keeps it: text that looks like an expression is none, and secrets stand by name."""
    match value:
        case SecretPlace():
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


def digest_of_asked(*said: Any) -> str:
    """Of all that is asked; what could not be written down is refused here, before anything is."""
    encoded = orjson.dumps(said, option=orjson.OPT_SORT_KEYS, default=str)
    if _NUL.search(encoded):
        raise FlowMisused("a NUL character was asked with, which PostgreSQL cannot store")
    return sha256(encoded).hexdigest()[:32]


def described(step: Step) -> str:
    """As the flow's author wrote it, more or less."""
    match step.kind:
        case "tool":
            return f'ctx.call("{step.tool}")'
        case "flow":
            return f'ctx.child("{step.workflow}")'
        case "approval":
            return f'ctx.approve("{step.key}")'
        case _:
            return f'ctx.wait(event="{step.event.type}")' if step.event is not None else "ctx.sleep(…)"
