"""The clients: Client makes each call and blocks, AsyncClient awaits it."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2

from interlock.client.api import Api
from interlock.client.endpoint import EndpointCall, at
from interlock.client.errors import ApiError, HttpResponse, Unreachable
from interlock.client.raw_http import THIS_MACHINE, Direct, reaches
from interlock.client.retry import FOLLOW_SILENCE_SECONDS, Attempts, Following
from interlock.lifecycle import RunState
from interlock.wire import Event, JobHistoryEvent, Run

T = TypeVar("T")
E = TypeVar("E", bound=Event | JobHistoryEvent)

DEFAULT_URL = "http://127.0.0.1:8420"
LOOPBACK: dict[str, None] = {f"all://[{host}]" if ":" in host else f"all://{host}": None for host in THIS_MACHINE}


class _HttpConnection(Api):
    """The server's address and the headers of every request."""

    def __init__(self, url: str | None, key: str | None, timeout: float) -> None:
        self.url = (url or os.environ.get("INTERLOCK_URL") or DEFAULT_URL).rstrip("/")
        self.timeout = timeout
        key = (key or os.environ.get("INTERLOCK_API_KEY") or "").strip()
        if not key.isascii() or not key.isprintable():
            raise ApiError(401, "UNAUTHORIZED", "Not signed in", "this is not an API key: it has odd characters in it")
        self.key = key or None
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._check_url()

    def _check_url(self) -> None:
        try:
            parsed = httpx2.URL(self.url)
        except httpx2.InvalidURL as error:
            raise Unreachable.by(error, self.url) from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise Unreachable.by(httpx2.UnsupportedProtocol(""), self.url)

    def _request(self, call: EndpointCall[Any]) -> dict[str, Any]:
        return {
            "method": call.method,
            "url": self.url + call.path,
            "params": call.query,
            "headers": call.headers,
            "content": call.content,
            "timeout": httpx2.Timeout(self.timeout, read=self.timeout + call.wait),
        }

    def _stream(self, following: Following[Any]) -> dict[str, Any]:
        return {
            "method": "GET",
            "url": self.url + following.path,
            "params": following.query(),
            "headers": following.headers(),
            "timeout": httpx2.Timeout(self.timeout, read=FOLLOW_SILENCE_SECONDS),
        }


class Client(_HttpConnection):
    """A client for scripts and threads.

    >>> with Client() as interlock:
    ...     run = interlock.start("refund", {"charge": "ch_1", "amount": 120}, wait=30)
    """

    _sleep = staticmethod(time.sleep)

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        timeout: float = 30,
        *,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        super().__init__(url, key, timeout)
        self._http = httpx2.Client(headers=self._headers, transport=transport, mounts=None if transport else LOOPBACK)

    def send(self, call: EndpointCall[T]) -> T:
        attempts = Attempts(self.url)
        while True:
            try:
                response = self._http.request(**self._request(call))
            except httpx2.TransportError as error:
                pause = attempts.pause_after(error)
            else:
                if (again := attempts.pause_before_answer(response)) is None:
                    return call.answer(response)
                pause = again
            self._sleep(pause)

    def iter_runs(
        self, *, status: RunState | str | None = None, workflow: str | None = None, limit: int | None = None
    ) -> Iterator[Run]:
        """Iterate over all runs, newest first; `limit` is the size of a page."""
        cursor: str | None = None
        while True:
            page = self.runs(status=status, workflow=workflow, limit=limit, cursor=cursor)
            yield from page.items
            if (cursor := page.next_cursor) is None:
                return

    def follow(self, run_id: str, after: int = 0) -> Iterator[Event]:
        """Yield the run's events after number `after` until the run ends. Reconnects if the connection breaks."""
        return self._follow(Following(self.url, at("/api/runs/{}/events", run_id), Event, after))

    def follow_job(self, job_id: str, after: int = 0) -> Iterator[JobHistoryEvent]:
        """Yield the job's events, its transitions and its progress, until the job ends."""
        return self._follow(Following(self.url, at("/api/jobs/{}/events", job_id), JobHistoryEvent, after))

    def _follow(self, following: Following[E]) -> Iterator[E]:
        while True:
            trouble: Exception | None = None
            try:
                with self._http.stream(**self._stream(following)) as response:
                    if not response.is_success:
                        response.read()
                    following.opened(response)
                    for sent in httpx2.EventSource(response):
                        if event := following.take(sent, response):
                            yield event
                        if following.ended:
                            return
            except httpx2.SSEError as error:
                raise ApiError.unreadable(response) from error
            except httpx2.TransportError as error:
                trouble = error
            self._sleep(following.pause_after(trouble))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_HttpConnection):
    """A client for asyncio.

    >>> async with AsyncClient() as interlock:
    ...     run = await interlock.start("refund", {"charge": "ch_1", "amount": 120}, wait=30)
    """

    _sleep = staticmethod(asyncio.sleep)

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        timeout: float = 30,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, key, timeout)
        self._http = httpx2.AsyncClient(
            headers=self._headers, transport=transport, mounts=None if transport else LOOPBACK
        )
        address = httpx2.URL(self.url)
        self._direct = Direct(address, self._headers) if transport is None and reaches(address) else None

    async def send(self, call: EndpointCall[T]) -> T:
        attempts = Attempts(self.url)
        while True:
            try:
                response = await self._ask(call)
            except httpx2.TransportError as error:
                pause = attempts.pause_after(error)
            else:
                if (again := attempts.pause_before_answer(response)) is None:
                    return call.answer(response)
                pause = again
            await self._sleep(pause)

    async def _ask(self, call: EndpointCall[Any]) -> HttpResponse:
        if self._direct is None:
            return await self._http.request(**self._request(call))
        return await self._direct.request(
            call.method, call.path, call.query, call.headers, call.content, self.timeout, self.timeout + call.wait
        )

    async def iter_runs(
        self, *, status: RunState | str | None = None, workflow: str | None = None, limit: int | None = None
    ) -> AsyncIterator[Run]:
        """Iterate over all runs, newest first; `limit` is the size of a page."""
        cursor: str | None = None
        while True:
            page = await self.runs(status=status, workflow=workflow, limit=limit, cursor=cursor)
            for run in page.items:
                yield run
            if (cursor := page.next_cursor) is None:
                return

    def follow(self, run_id: str, after: int = 0) -> AsyncIterator[Event]:
        """Yield the run's events after number `after` until the run ends. Reconnects if the connection breaks."""
        return self._follow(Following(self.url, at("/api/runs/{}/events", run_id), Event, after))

    def follow_job(self, job_id: str, after: int = 0) -> AsyncIterator[JobHistoryEvent]:
        """Yield the job's events, its transitions and its progress, until the job ends."""
        return self._follow(Following(self.url, at("/api/jobs/{}/events", job_id), JobHistoryEvent, after))

    async def _follow(self, following: Following[E]) -> AsyncIterator[E]:
        while True:
            trouble: Exception | None = None
            try:
                async with self._http.stream(**self._stream(following)) as response:
                    if not response.is_success:
                        await response.aread()
                    following.opened(response)
                    async for sent in httpx2.EventSource(response):
                        if event := following.take(sent, response):
                            yield event
                        if following.ended:
                            return
            except httpx2.SSEError as error:
                raise ApiError.unreadable(response) from error
            except httpx2.TransportError as error:
                trouble = error
            await self._sleep(following.pause_after(trouble))

    async def close(self) -> None:
        if self._direct is not None:
            self._direct.close()
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
