"""MCP servers as tools: a server's tools are reviewed once, stored with a digest, and used as stored.

A server's description of itself is an unverified hint. All tools of an untrusted server count as writes, and its hints
can only raise their risk. A definition that differs from the accepted one is not used.
"""

import asyncio
import json
import os
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO

import httpx2
import orjson
from pydantic import BaseModel

from interlock.errors import Invalid, Retryable, Terminal
from interlock.lifecycle import Term, Tier
from interlock.tools import schemas
from interlock.tools.context import Context
from interlock.tools.registry import RegisteredTool, Registry

# The tenant of the installation's operators, who add servers.
DEFAULT_TENANT = "default"
_ODD = re.compile(r"[^A-Za-z0-9_.-]")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,49}")
# How long a server may take to start, answer and list its tools.
CONNECT_SECONDS = 30.0
# How long a call may take, so that a server that never answers does not block its step and a place of the worker for
# ever.
CALL_SECONDS = 300.0


class _Anything(BaseModel):
    pass


class OnError(Term):
    """What an error, or an answer that cannot be understood, means for a write."""

    FAILED = "failed", "The write was not done."
    IN_DOUBT = "in_doubt", "The write may have been done: a person has to find out."


class McpCallFailed(Exception):
    """The server answered with an error that does not say whether the call was done."""


@dataclass(frozen=True, slots=True)
class Server:
    """The place of an MCP server: a command to start, or an address.

    `env` names the variables passed to a command, `token_env` the variable with the token for an address.
    """

    name: str
    command: tuple[str, ...] = ()
    url: str | None = None
    env: tuple[str, ...] = ()
    trusted: bool = False
    # The accepted definitions, by the server's own name of each tool.
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    token_env: str | None = None
    timeout_seconds: float = CALL_SECONDS
    connect_seconds: float = CONNECT_SECONDS
    on_error: OnError = OnError.IN_DOUBT
    # The tenants that have its tools: a server reads and writes with the rights of the installation's operator. Empty
    # means all tenants.
    tenants: tuple[str, ...] = (DEFAULT_TENANT,)

    def as_dict(self) -> dict[str, Any]:
        place: dict[str, Any] = (
            {"url": self.url, "token_env": self.token_env}
            if self.url
            else {"command": list(self.command), "env": list(self.env)}
        )
        return place | {
            "trusted": self.trusted, "timeout_seconds": self.timeout_seconds,
            "connect_seconds": self.connect_seconds, "on_error": str(self.on_error), "tenants": list(self.tenants),
            "tools": dict(self.tools),
        }  # fmt: skip


def read_servers(path: Path) -> dict[str, Server]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["servers"]
        return {
            name: Server(
                name, tuple(about.get("command", ())), about.get("url"), tuple(about.get("env", ())),
                bool(about.get("trusted", False)), about["tools"], about.get("token_env"),
                float(about.get("timeout_seconds", CALL_SECONDS)),
                float(about.get("connect_seconds", CONNECT_SECONDS)), OnError(about.get("on_error", OnError.IN_DOUBT)),
                tuple(about.get("tenants", (DEFAULT_TENANT,))),
            )
            for name, about in found.items()
        }  # fmt: skip
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Invalid(f"{path} is not a list of MCP servers: {error!r}", code="TOOLS_INVALID") from None


def write_servers(path: Path, servers: Mapping[str, Server]) -> None:
    """Write the file atomically: a process that starts at the same time reads either the old or the new one."""
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


# ---------------------------------------------------------------- discovery


async def offered(server: Server) -> dict[str, dict[str, Any]]:
    """Return the server's current tools in the stored form."""
    # A worker's servers write to the worker's stderr. Here the operator gets the last line if the server does not
    # answer.
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        connection = Connection(server, errors)
        try:
            async with asyncio.timeout(server.connect_seconds):
                return await _offered(await connection.client())
        except (Retryable, Terminal) as error:
            why = str(error)
        except TimeoutError:
            why = f"MCP server {server.name} did not answer within {server.connect_seconds:g} seconds"
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
                "title": tool.title or "", "description": tool.description or "", "input_schema": tool.input_schema,
                "output_schema": tool.output_schema or {}, "hints": hints,
            }  # fmt: skip
            found[tool.name] = about | {"digest": digest_of(about)}
        cursor = page.next_cursor
        if not cursor:
            return found


# The parts of a tool's definition that an admin accepts. Any change needs acceptance again.
PARTS = ("title", "description", "input_schema", "output_schema", "hints")


def digest_of(about: Mapping[str, Any]) -> str:
    told = {name: about[name] for name in PARTS}
    return sha256(orjson.dumps(told, option=orjson.OPT_SORT_KEYS)).hexdigest()


def tool_name(server: str, tool: str) -> str:
    return f"{server}.{_ODD.sub('_', tool)}"


@dataclass(frozen=True, slots=True)
class McpTool(RegisteredTool):
    """A tool of an MCP server. Its own JSON schema validates its arguments, not a pydantic model."""

    def validated(self, given: Any, *, show_input: bool = True) -> dict[str, Any]:
        from jsonschema_specifications import REGISTRY

        arguments = given if given is not None else {}
        try:
            # Pass all schemas it may refer to. Otherwise jsonschema would fetch any reference of the server, including
            # local files.
            found = schemas.validator()(self.input_schema, registry=REGISTRY).iter_errors(arguments)
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

    # For a read, and for a write that may be repeated, an error of the server is an ordinary failure.
    in_doubt = writes and not idempotent and server.on_error == OnError.IN_DOUBT
    error = McpCallFailed if in_doubt else Terminal

    async def call(ctx: Context, /, **arguments: Any) -> Any:
        return await connection.call(tool, arguments, error)

    async def connect() -> Callable[..., Awaitable[Any]]:
        send = await connection.ready(tool, error)

        async def call(ctx: Context, /, **arguments: Any) -> Any:
            return await send(arguments)

        return call

    return McpTool(
        name=tool_name(server.name, tool), function=call, description=about["description"], is_async=True,
        wants_context=True, arguments=_Anything, writes=writes, risk=risk, idempotent=idempotent, key=None, undo=None,
        timeout=server.timeout_seconds, target=None, show=frozenset(), reconcile=None,
        input_schema=dict(about["input_schema"]), connect=connect,
        tenants=frozenset(server.tenants) if server.tenants else None,
    )  # fmt: skip


def judged(hints: Mapping[str, Any], *, trusted: bool) -> tuple[bool, Tier, bool]:
    """Return whether the tool writes, its risk, and whether it may be repeated."""
    destroys = hints.get("destructive_hint") is True
    if not trusted:
        return True, Tier.HIGH if destroys else Tier.MED, False
    writes = hints.get("read_only_hint") is not True
    # The protocol's default is that a tool is destructive. But trusting a server must not make its tools riskier.
    risk = Tier.LOW if not writes else Tier.HIGH if destroys else Tier.MED
    return writes, risk, not writes or hints.get("idempotent_hint") is True


# ---------------------------------------------------------------- calling


class _Link:
    """One connection to a server, with the number of calls that await an answer on it."""

    __slots__ = ("calls", "client", "http_error", "keeping", "retired")

    def __init__(self) -> None:
        self.client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.keeping: asyncio.Task[None] | None = None
        self.calls = 0
        self.retired = False
        # The status with which the server rejected the last request over HTTP.
        self.http_error: str | None = None

    def close_if_idle(self) -> None:
        if self.retired and not self.calls and self.keeping is not None:
            self.keeping.cancel()


class Connection:
    """One server, connected on first use. All calls share the connection.

    A failed connection is retired: the next call opens another, and calls that still await an answer on the old one get
    it.
    """

    def __init__(self, server: Server, errors: TextIO | None = None) -> None:
        self.server = server
        self._errors = errors
        self._link: _Link | None = None
        # The tasks that hold the connections that are not closed yet.
        self._keepers: set[asyncio.Task[None]] = set()

    async def call(self, tool: str, arguments: dict[str, Any], error: type[Exception] = McpCallFailed) -> Any:
        return await (await self.ready(tool, error))(arguments)

    async def ready(
        self, tool: str, error: type[Exception] = McpCallFailed
    ) -> Callable[[dict[str, Any]], Awaitable[Any]]:
        """Connect, check that the server offers the accepted definition, and return the function that sends the call.

        Nothing that could have an effect was sent until then, so any failure here means that the call was not made.
        `error` is the exception type for an error that the server answers with.
        """
        link = self._open()
        try:
            async with asyncio.timeout(self.server.connect_seconds):
                client = await self._client(link)
                # Check before each call: the server's current definition is what would be called.
                now = (await _offered(client)).get(tool)
        except (Retryable, Terminal):
            raise
        except TimeoutError:
            self._retire(link)
            raise Retryable(
                f"MCP server {self.server.name} is not there: it did not answer within "
                f"{self.server.connect_seconds:g} seconds"
            ) from None
        except Exception as failure:
            self._retire(link)
            raise Retryable(self.absent(failure, link)) from None
        self._refuse_changed(tool, now)
        return partial(self._send, link, client, tool, error)

    async def _send(
        self, link: _Link, client: Any, tool: str, error: type[Exception], arguments: dict[str, Any]
    ) -> Any:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, METHOD_NOT_FOUND

        link.calls += 1
        try:
            result = await client.call_tool(tool, arguments)
        except MCPError as failure:
            if failure.code == CONNECTION_CLOSED:
                self._retire(link)
                raise  # no answer; the executor decides what that means
            # By the protocol these two mean that the call was not made. The client also produces similar ones, such as
            # a parse error, for an answer that it cannot read.
            if failure.code in (METHOD_NOT_FOUND, INVALID_PARAMS):
                raise Terminal(f"MCP server {self.server.name} refuses the call: {failure}") from None
            raise error(f"MCP server {self.server.name} answered with an error: {failure}") from None
        except (RuntimeError, ValueError) as failure:
            # The server answered, but the answer violates the protocol or the tool's schema.
            why = str(failure).split("\n")[0]
            raise error(f"MCP server {self.server.name} answered, but not as it declares: {why}") from None
        finally:
            link.calls -= 1
            link.close_if_idle()
        return _answer(result, error, self.server.name)

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

    def _open(self) -> _Link:
        if self._link is None:
            self._link = _Link()
            # A separate task: the task that opens a connection has to close it, and callers come and go.
            self._link.keeping = asyncio.create_task(self._keep(self._link))
            self._keepers.add(self._link.keeping)
            self._link.keeping.add_done_callback(self._keepers.discard)
        return self._link

    async def _client(self, link: _Link) -> Any:
        try:
            return await asyncio.shield(link.client)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Another caller canceled the connection attempt. Nothing was sent for this one.
            raise Retryable(f"MCP server {self.server.name} is not there: it did not answer another call") from None

    async def _keep(self, link: _Link) -> None:
        try:
            from mcp import Client
        except ImportError:
            self._forget(link)
            link.client.set_exception(Terminal("the mcp package is not installed; install interlock[mcp]"))
            return
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(Client(await self._place(stack, link)))
                link.client.set_result(client)
                await asyncio.get_running_loop().create_future()  # wait until it is closed
        except Terminal as error:
            link.client.set_exception(error)
        except Exception as error:
            if not link.client.done():
                link.client.set_exception(Retryable(self.absent(error, link)))
        finally:
            self._forget(link)
            with suppress(asyncio.InvalidStateError):
                link.client.cancel()

    async def _place(self, stack: AsyncExitStack, link: _Link) -> Any:
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if self.server.url is not None:
            token = self.server.token_env
            headers = {"Authorization": f"Bearer {self._token(token)}"} if token is not None else {}
            # A stream is open for as long as the tool takes. No redirects: the token is for this address.
            patience = httpx2.Timeout(self.server.connect_seconds, read=max(CALL_SECONDS, self.server.timeout_seconds))

            async def note(response: httpx2.Response) -> None:
                # The mcp package keeps no status: each is "Server returned an error response". A rejected GET is
                # ignored: it asks for a stream that servers need not offer.
                if response.request.method == "POST":
                    status = response.status_code
                    link.http_error = f"{status} {response.reason_phrase}".strip() if status >= 400 else None

            http = httpx2.AsyncClient(headers=headers, timeout=patience, event_hooks={"response": [note]})
            return streamable_http_client(self.server.url, http_client=await stack.enter_async_context(http))
        env = {name: os.environ[name] for name in self.server.env if name in os.environ}
        command, *args = self.server.command
        start = StdioServerParameters(command=command, args=args, env=env or None)
        return stdio_client(start, errlog=self._errors) if self._errors else start

    def absent(self, error: BaseException, link: _Link | None = None) -> str:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        inner = _innermost(error)
        if link is not None and link.http_error is not None:
            hint = f"; {self._token_hint()}" if link.http_error.startswith(("401", "403")) else ""
            return f"MCP server {self.server.name} is not there: {self.server.url} answered {link.http_error}{hint}"
        if self.server.command and isinstance(inner, MCPError) and inner.code == CONNECTION_CLOSED:
            return f"MCP server {self.server.name}: `{shlex.join(self.server.command)}` ended before it answered"
        why = str(inner).split("\n")[0] or type(inner).__name__
        return f"MCP server {self.server.name} is not there: {why}"

    def _token(self, variable: str) -> str:
        if token := os.environ.get(variable):
            return token
        raise Terminal(f"the environment variable {variable}, the token of MCP server {self.server.name}, is not set")

    def _token_hint(self) -> str:
        if self.server.token_env is None:
            return "name the variable with its token in --token-env"
        return f"check the token in {self.server.token_env}"

    def _retire(self, link: _Link) -> None:
        """Let the next call open another connection. This one closes after its last pending answer."""
        self._forget(link)
        link.retired = True
        link.close_if_idle()

    def _forget(self, link: _Link) -> None:
        """Forget the link, unless another has replaced it, which has not failed."""
        if self._link is link:
            self._link = None

    async def close(self) -> None:
        self._link, keepers = None, list(self._keepers)
        for keeper in keepers:
            if not keeper.cancelling():  # canceled twice, it would not wait for the server's process
                keeper.cancel()
        if keepers:
            await asyncio.wait(keepers)


def _answer(result: Any, error: type[Exception], server: str) -> Any:
    texts = [block.text for block in result.content if block.type == "text"]
    if result.is_error:
        said = "\n".join(texts) or "the tool says that it failed"
        raise error(f"MCP server {server} answered with an error: {said}")
    if result.structured_content is not None:
        return result.structured_content
    if len(texts) == len(result.content):
        return "\n".join(texts)
    return [block.model_dump(mode="json", exclude_none=True) for block in result.content]


def _innermost(error: BaseException) -> BaseException:
    """Return the innermost error of nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
