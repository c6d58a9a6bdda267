"""MCP servers as tools: what a server offers was looked at once, is kept with a digest, and is used as it was kept.

What a server says about itself is a hint by somebody we do not know. An untrusted server's tools all write, and its
hints can only make them riskier. A definition that is not the one that was accepted is not used.
"""

import asyncio
import json
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO

import httpx2
import orjson
from pydantic import BaseModel

from interlock.errors import Invalid, Retryable, Terminal
from interlock.lifecycle import Tier
from interlock.tools.context import Context
from interlock.tools.registry import Registry, Tool

_ODD = re.compile(r"[^A-Za-z0-9_.-]")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,49}")
_CONNECT_SECONDS = 30.0
# How long a call may take. A server that never answers must not hold its step, and a place of the worker, for ever.
CALL_SECONDS = 300.0


class _Anything(BaseModel):
    pass


@dataclass(frozen=True, slots=True)
class Server:
    """Where an MCP server is: a command to start, or an address.

    `env` names the variables that a command is given, `token_env` the one with the token that an address asks for.
    """

    name: str
    command: tuple[str, ...] = ()
    url: str | None = None
    env: tuple[str, ...] = ()
    trusted: bool = False
    # What was accepted, by the server's own name of each tool.
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    token_env: str | None = None
    timeout_seconds: float = CALL_SECONDS

    def as_dict(self) -> dict[str, Any]:
        place: dict[str, Any] = (
            {"url": self.url, "token_env": self.token_env}
            if self.url
            else {"command": list(self.command), "env": list(self.env)}
        )
        return place | {
            "trusted": self.trusted, "timeout_seconds": self.timeout_seconds, "tools": dict(self.tools),
        }  # fmt: skip


def read_servers(path: Path) -> dict[str, Server]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["servers"]
        return {
            name: Server(
                name, tuple(about.get("command", ())), about.get("url"), tuple(about.get("env", ())),
                bool(about.get("trusted", False)), about["tools"], about.get("token_env"),
                float(about.get("timeout_seconds", CALL_SECONDS)),
            )
            for name, about in found.items()
        }  # fmt: skip
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Invalid(f"{path} is not a list of MCP servers: {error!r}", code="TOOLS_INVALID") from None


def write_servers(path: Path, servers: Mapping[str, Server]) -> None:
    """As a whole: a process that starts meanwhile reads the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"servers": {name: servers[name].as_dict() for name in sorted(servers)}}, indent=2)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(text + "\n", encoding="utf-8")
    aside.replace(path)


def check_server_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise Invalid(f"{name!r:.80} is no name for a server; write lower-case letters, digits, `_` and `-`")


def load_mcp(path: Path, registry: Registry) -> None:
    for server in read_servers(path).values():
        connection = Connection(server)
        for name in server.tools:
            tool = tool_of(connection, name)
            if not isinstance(registry.find(tool.name) or tool, McpTool):
                raise Invalid(
                    f"{tool.name} is a tool of INTERLOCK_TOOLS and MCP server {server.name} offers one of that name; "
                    "add the server under another", code="TOOLS_INVALID",
                )  # fmt: skip
            registry.put(tool)


# ---------------------------------------------------------------- what a server offers


async def offered(server: Server) -> dict[str, dict[str, Any]]:
    """What the server offers now, as it is kept."""
    # A worker's servers write where the worker does. Whoever adds one sees what it wrote if it does not answer.
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        connection = Connection(server, errors)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return await _offered(await connection.client())
        except (Retryable, Terminal) as error:
            why = str(error)
        except TimeoutError:
            why = f"MCP server {server.name} did not answer within {_CONNECT_SECONDS:g} seconds"
        except Exception as error:
            why = connection.absent(error)
        finally:
            await connection.close()
        if last := _last_line(errors):
            why = f"{why}: {last}"
        raise Invalid(f"nothing is accepted: {why}", code="TOOLS_INVALID")


def _last_line(errors: TextIO) -> str:
    errors.seek(0)
    last = ""
    for line in errors:
        last = line.strip() or last
    return last[:500]


async def _offered(client: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor, cache_mode="bypass")
        for tool in page.tools:
            hints = tool.annotations.model_dump(exclude_none=True) if tool.annotations else {}
            about = {
                "description": tool.description or "", "input_schema": tool.input_schema, "hints": hints,
            }  # fmt: skip
            found[tool.name] = about | {"digest": digest_of(about)}
        cursor = page.next_cursor
        if not cursor:
            return found


def digest_of(about: Mapping[str, Any]) -> str:
    told = {name: about[name] for name in ("description", "input_schema", "hints")}
    return sha256(orjson.dumps(told, option=orjson.OPT_SORT_KEYS)).hexdigest()


def tool_name(server: str, tool: str) -> str:
    return f"{server}.{_ODD.sub('_', tool)}"


@dataclass(frozen=True, slots=True)
class McpTool(Tool):
    """Its arguments are what its own JSON schema says, not a model of ours."""

    def validated(self, given: Any, *, show_input: bool = True) -> dict[str, Any]:
        from jsonschema import Draft202012Validator
        from jsonschema_specifications import REGISTRY

        arguments = given if given is not None else {}
        try:
            # With all that it may refer to: else it would fetch whatever the server names, a file of ours included.
            found = Draft202012Validator(self.input_schema, registry=REGISTRY).iter_errors(arguments)
            faults = sorted(found, key=lambda fault: str(fault.json_path))
        except Exception as error:
            raise Terminal(f"input of {self.name} cannot be checked by its server's schema: {error!r:.500}") from None
        if faults:
            why = "; ".join(_described(fault, show_input=show_input) for fault in faults[:5])
            raise Terminal(f"input of {self.name} is not valid: {why[:1000]}")
        return dict(arguments)


def _described(fault: Any, *, show_input: bool) -> str:
    where = fault.json_path.removeprefix("$.")
    return f"{where}: {fault.message}" if show_input else f"{where}: it does not fit {fault.validator}"


def tool_of(connection: "Connection", tool: str) -> McpTool:
    server = connection.server
    about = server.tools[tool]
    writes, risk, idempotent = judged(about["hints"], trusted=server.trusted)

    async def call(ctx: Context, /, **arguments: Any) -> Any:
        return await connection.call(tool, arguments)

    return McpTool(
        name=tool_name(server.name, tool), function=call, description=about["description"], is_async=True,
        wants_context=True, arguments=_Anything, writes=writes, risk=risk, idempotent=idempotent, key=None, undo=None,
        timeout=server.timeout_seconds, target=None, show=frozenset(), reconcile=None,
        input_schema=dict(about["input_schema"]),
    )  # fmt: skip


def judged(hints: Mapping[str, Any], *, trusted: bool) -> tuple[bool, Tier, bool]:
    """Whether it writes, how risky it is, and whether it may be repeated."""
    destroys = hints.get("destructive_hint") is True
    if not trusted:
        return True, Tier.HIGH if destroys else Tier.MED, False
    writes = hints.get("read_only_hint") is not True
    # As the protocol has it, what says nothing about itself is destructive.
    risk = Tier.LOW if not writes else Tier.HIGH if hints.get("destructive_hint", True) else Tier.MED
    return writes, risk, not writes or hints.get("idempotent_hint") is True


# ---------------------------------------------------------------- talking to it


class Connection:
    """One server, connected when it is first needed and for as long as that lasts; then anew."""

    def __init__(self, server: Server, errors: TextIO | None = None) -> None:
        self.server = server
        self._errors = errors
        self._opened: asyncio.Future[Any] | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        opened = self._open()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                client = await self._client(opened)
                # Before each call: what the server says now is what would be called.
                now = (await _offered(client)).get(tool)
        except (Retryable, Terminal):
            raise
        except Exception as error:
            self._drop_unless_answered(opened, error)
            raise Retryable(self.absent(error)) from None
        self._refuse_changed(tool, now)
        try:
            result = await client.call_tool(tool, arguments)
        except Exception as error:
            self._drop_unless_answered(opened, error)
            if _is_refusal(error):
                raise Terminal(f"MCP server {self.server.name} refuses the call: {error}") from None
            raise  # whether it was done nobody knows; the executor sees to that
        return _answer(result)

    def _refuse_changed(self, tool: str, now: Mapping[str, Any] | None) -> None:
        name = tool_name(self.server.name, tool)
        if now is None:
            raise Terminal(f"MCP server {self.server.name} no longer offers {tool}")
        if now["digest"] != self.server.tools[tool]["digest"]:
            raise Terminal(
                f"the definition of {name} is not the one that was accepted; look at it and accept it with "
                f"`interlock tools accept-mcp {self.server.name}`, then restart the workers"
            )

    async def client(self) -> Any:
        return await self._client(self._open())

    def _open(self) -> "asyncio.Future[Any]":
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            # A task of its own: whoever opens a connection has to close it, and callers come and go.
            self._keeping = asyncio.create_task(self._keep(self._opened))
        return self._opened

    async def _client(self, opened: "asyncio.Future[Any]") -> Any:
        try:
            return await asyncio.shield(opened)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Another caller gave it up. Ours was not cut off: nothing was sent.
            raise Retryable(f"MCP server {self.server.name} is not there: it did not answer another call") from None

    async def _keep(self, opened: "asyncio.Future[Any]") -> None:
        try:
            from mcp import Client
        except ImportError:
            self._opened = None
            opened.set_exception(Terminal("the mcp package is not installed; install interlock[mcp]"))
            return
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(Client(await self._place(stack)))
                opened.set_result(client)
                await asyncio.get_running_loop().create_future()  # until it is dropped
        except Terminal as error:
            opened.set_exception(error)
        except Exception as error:
            if not opened.done():
                opened.set_exception(Retryable(self.absent(error)))
        finally:
            if self._opened is opened:
                self._opened = None
            with suppress(asyncio.InvalidStateError):
                opened.cancel()

    async def _place(self, stack: AsyncExitStack) -> Any:
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if self.server.url is not None:
            token = self.server.token_env
            headers = {"Authorization": f"Bearer {self._token(token)}"} if token is not None else {}
            # A stream is open for as long as the tool takes. No redirects: the token is for this address.
            patience = httpx2.Timeout(_CONNECT_SECONDS, read=max(CALL_SECONDS, self.server.timeout_seconds))
            http = httpx2.AsyncClient(headers=headers, timeout=patience)
            return streamable_http_client(self.server.url, http_client=await stack.enter_async_context(http))
        env = {name: os.environ[name] for name in self.server.env if name in os.environ}
        command, *args = self.server.command
        start = StdioServerParameters(command=command, args=args, env=env or None)
        return stdio_client(start, errlog=self._errors) if self._errors else start

    def absent(self, error: BaseException) -> str:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        inner = _innermost(error)
        if self.server.command and isinstance(inner, MCPError) and inner.code == CONNECTION_CLOSED:
            return f"MCP server {self.server.name}: `{shlex.join(self.server.command)}` ended before it answered"
        why = str(inner).split("\n")[0] or type(inner).__name__
        return f"MCP server {self.server.name} is not there: {why}"

    def _token(self, variable: str) -> str:
        if token := os.environ.get(variable):
            return token
        raise Terminal(f"the environment variable {variable}, the token of MCP server {self.server.name}, is not set")

    def _drop_unless_answered(self, opened: "asyncio.Future[Any]", error: Exception) -> None:
        """An error that the server sent is an answer. Others may be waiting for theirs on the same connection."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        if not isinstance(error, MCPError) or error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
            self._drop(opened)

    def _drop(self, opened: "asyncio.Future[Any] | None") -> None:
        """Unless another has taken its place: that one has not failed."""
        if self._keeping is not None and self._opened is opened:
            self._keeping.cancel()
            self._opened = self._keeping = None

    async def close(self) -> None:
        keeping = self._keeping
        self._drop(self._opened)
        if keeping is not None:
            with suppress(asyncio.CancelledError):
                await keeping


def _is_refusal(error: Exception) -> bool:
    """By the protocol a call that these answer was not made."""
    from mcp import MCPError
    from mcp.types import INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR

    return isinstance(error, MCPError) and error.code in (
        INVALID_PARAMS,
        INVALID_REQUEST,
        METHOD_NOT_FOUND,
        PARSE_ERROR,
    )


def _answer(result: Any) -> Any:
    texts = [block.text for block in result.content if block.type == "text"]
    if result.is_error:
        raise Terminal("\n".join(texts) or "the tool says that it failed")
    if result.structured_content is not None:
        return result.structured_content
    if len(texts) == len(result.content):
        return "\n".join(texts)
    return [block.model_dump(mode="json", exclude_none=True) for block in result.content]


def _innermost(error: BaseException) -> BaseException:
    """What went wrong, out of the groups of the tasks in which it did."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
