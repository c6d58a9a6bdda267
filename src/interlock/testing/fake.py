"""A fake: stands in for a tool, remembers what it was called with, and answers what the test says."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from interlock.errors import Invalid
from interlock.tools import Registry, tool


class Fake:
    def __init__(self, returns: Any, raises: BaseException | None, does: Callable[..., Any] | None) -> None:
        self.calls: list[dict[str, Any]] = []
        self.returns = returns
        self.raises = raises
        self.does = does

    async def __call__(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        if self.raises is not None:
            raise self.raises
        if self.does is None:
            return self.returns
        answer = self.does(**arguments)
        return await answer if inspect.isawaitable(answer) else answer


def stand_in(tools: Registry, name: str, fake: Fake, options: dict[str, Any]) -> None:
    """In place of the tool of that name: with its schema and its risk, so that it is validated and judged the same.

    A tool that is not there is made from the signature of `does`.
    """
    if tools.find(name) is None:
        if fake.does is None:
            raise Invalid(
                f"no tool {name} is registered; import the module that defines it, or give the fake `does=`, "
                "a function whose parameters are the tool's"
            )
        tool(name, register=tools, **options)(fake.does)
    elif options:
        raise Invalid(f"tool {name} is registered; {', '.join(options)} cannot be said of it again")
    real = tools.find(name)
    assert real is not None
    tools.put(replace(real, function=fake, is_async=True, wants_context=False, reconcile=None))
