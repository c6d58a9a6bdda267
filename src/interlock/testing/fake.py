"""A fake replaces a tool, records the arguments of each call, and answers what the test specifies."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from interlock.agents.tool_names import is_reserved
from interlock.errors import Invalid, Terminal
from interlock.tools import RegisteredTool, Registry, tool

_IMPORT = "import the module that defines it"


class NoFake(AssertionError):
    """A run called a tool that the test neither faked nor allowed to be called for real."""


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
    """Replace the tool of that name, with its schema and its risk, so that validation and policy work the same.

    If the tool does not exist, it is made from the signature of `does`.
    """
    if tools.find(name) is None:
        if fake.does is None:
            remedy = f"{_IMPORT}, or give the fake `does=`, a function whose parameters are the tool's"
            raise Invalid(tools.missing(name, "is registered", remedy))
        tool(name, register=tools, **options)(fake.does)
    elif options:
        raise Invalid(f"tool {name} is registered; {', '.join(options)} cannot be said of it again")
    real = tools.find(name)
    assert real is not None
    tools.put(replace(real, function=fake, is_async=True, wants_context=False, reconcile=None, connect=None))


class Guard:
    """Replaces every tool of an engine until the test fakes it or allows the real one."""

    def __init__(self, tools: Registry) -> None:
        self._tools = tools
        self._real = {tool.name: tool for tool in tools.all() if not is_reserved(tool)}
        self._refused: list[str] = []
        for name, real in self._real.items():
            self._guarded(name, real)

    def allow(self, *patterns: str) -> None:
        for pattern in patterns:
            names = [name for name in self._real if fnmatchcase(name, pattern)]
            if not names:
                raise Invalid(self._tools.missing(pattern, "is registered", _IMPORT))
            for name in names:
                self._tools.put(self._real[name])

    def check(self) -> None:
        """Raise what was rejected since the last check: a run may have caught the error of its step."""
        refused, self._refused = self._refused, []
        if refused:
            raise NoFake(_no_fake(refused[0]))

    def _guarded(self, name: str, real: RegisteredTool) -> None:
        async def refuse(**arguments: Any) -> None:
            self._refused.append(name)
            raise Terminal(_no_fake(name))

        self._tools.put(
            replace(real, function=refuse, is_async=True, wants_context=False, reconcile=None, connect=None)
        )


def _no_fake(name: str) -> str:
    return (
        f"The test has no fake for {name}, so it was not called. Fake it with engine.fake({name!r}, RESULT), or allow "
        f"the real tool with engine.allow_real_tools({name!r})."
    )
