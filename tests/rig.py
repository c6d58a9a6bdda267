"""The rig: an engine on a real database, driven by hand. Nothing here sleeps to wait."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

import httpx2
import orjson
from fastapi import FastAPI

from interlock import clock, console
from interlock.api import AppContext, create_app
from interlock.api.run_watcher import Follower
from interlock.api.views import run_view
from interlock.definition.workflow import parse
from interlock.engine import workflows
from interlock.engine.access import tenants
from interlock.engine.access.key_store import Salts, Signing
from interlock.engine.access.principal import Principal
from interlock.engine.approvals import approvals
from interlock.engine.policies import Policies
from interlock.engine.proof import audit, evidence
from interlock.engine.proof.evidence import EvidenceSigner
from interlock.engine.queueing import jobs, leases, sweeps
from interlock.engine.queueing.leases import reclaim_lost
from interlock.engine.runs import runs
from interlock.engine.writing.change import WrittenRow
from interlock.engine.writing.load import load_for_display
from interlock.ids import RunId
from interlock.integrations.artifacts import Artifacts
from interlock.lifecycle import RunState, WorkerEvent
from interlock.settings import Settings
from interlock.store import sql
from interlock.store.migrate import ensure_partitions
from interlock.store.notify import POLICY
from interlock.store.pool import Database, Tx
from interlock.store.queries import in_schema
from interlock.store.records import ClaimedRun
from interlock.testing import ManualClock
from interlock.testing.engine import journal_line, sweep
from interlock.timeouts import wait_for_event
from interlock.tools import Registry, flow, tool
from interlock.wire import Role
from interlock.worker.worker import Worker


def written_row(run: ClaimedRun, token: int | None = None) -> WrittenRow:
    """Return the row of a run as a worker that claimed it knows it, perhaps with another token."""
    return WrittenRow(
        run.id, run.tenant_id, run.lease_token if token is None else token, RunState.RUNNING, run.requested_by, False,
        run.queue_id, leased_from=run.queue_id,
    )  # fmt: skip


class Hold:
    """A tool body that reports its start and waits until the test releases it."""

    def __init__(self) -> None:
        self.entered, self.release, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.entries, self.interrupted = 0, False

    async def __call__(self) -> None:
        self.entries += 1
        self.entered.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.interrupted = True
            raise
        finally:
            self.left.set()

    async def inside(self, seconds: float = 20) -> None:
        """Wait until a call is inside."""
        await asyncio.wait_for(self.entered.wait(), seconds)


# Applications that no test currently uses, by body limit and console.
_shelf: dict[tuple[int, bool], list[FastAPI]] = defaultdict(list)


class Rig:
    def __init__(self, database: Database, settings: Settings, clock: ManualClock) -> None:
        self.database, self.settings, self.clock = database, settings, clock
        self.tools = Registry()
        self.plans = workflows.Plans(database, self.tools)
        self.principals = tenants.Principals(database)
        self.policies = Policies(database, self.tools)
        self.follower = Follower(database, self.principals, {POLICY: self.policies.forget})
        artifacts = Artifacts((settings.data_dir / "artifacts").absolute().as_uri())
        self.notary = EvidenceSigner(Signing(settings), Salts(settings), artifacts)
        self.services = AppContext(
            database, settings, self.plans, self.principals, self.policies, self.follower, self.notary
        )
        self._borrowed: list[FastAPI] = []
        self.app = self._app(with_console=False)
        self.admin_key: str
        self.admin: Principal
        self._clients: list[httpx2.AsyncClient] = []

    @classmethod
    async def make(cls, database: Database, settings: Settings, clock: ManualClock) -> "Rig":
        rig = cls(database, settings, clock)
        key = await tenants.bootstrap(database, None)
        assert key is not None
        rig.admin_key, rig.admin = key, await tenants.authenticate(database, key)
        await rig.follower.start()
        return rig

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()
        await self.follower.stop()
        for app in self._borrowed:
            app.dependency_overrides.clear()
            _shelf[app.state.kind].append(app)

    def mount_console(self) -> None:
        self.app = self._app(with_console=True)

    def _app(self, *, with_console: bool) -> FastAPI:
        """Reuse an earlier test's application if possible: inspecting all endpoints again would take most of a test."""
        kind = (self.settings.max_body_bytes, with_console)
        if _shelf[kind]:
            app = _shelf[kind].pop()
        else:
            app = create_app(self.services)
            app.state.kind = kind
            if with_console:
                console.mount(app)
        app.state.services = self.services
        self._borrowed.append(app)
        return app

    # ------------------------------------------------------------ people

    async def tenant(self, name: str, **limits: Any) -> Principal:
        row = await self.database.run_in_transaction(lambda tx: tenants.create_tenant(tx, name, **limits))
        return await self.person("admin", Role.ADMIN, tenant_id=row["id"])

    async def key(
        self, name: str, role: Role | str, tenant_id: UUID | None = None, workspace_id: str | None = None
    ) -> str:
        tenant = tenant_id or self.admin.tenant_id
        _, key = await self.database.run_in_transaction(
            lambda tx: tenants.add_key(tx, tenant, name, Role(role), workspace_id=workspace_id)
        )
        return key

    async def person(
        self, name: str, role: Role | str, tenant_id: UUID | None = None, workspace_id: str | None = None
    ) -> Principal:
        return await tenants.authenticate(self.database, await self.key(name, role, tenant_id, workspace_id))

    def http(self, key: str | None = None) -> httpx2.AsyncClient:
        """Return an in-process client of the API, with a key's authority ("" for no key)."""
        key = self.admin_key if key is None else key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        client = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=self.app, raise_app_exceptions=False),
            base_url="http://test",
            headers=headers,
        )
        self._clients.append(client)
        return client

    @asynccontextmanager
    async def stream(
        self, path: str, *, key: str | None = None, last_event_id: int | None = None, cookie: str | None = None
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Read a server-sent event stream, frame by frame as sent (the in-process client waits for its end)."""
        path, _, query = path.partition("?")
        headers = [(b"accept", b"text/event-stream"), (b"authorization", f"Bearer {key or self.admin_key}".encode())]
        if last_event_id is not None:
            headers.append((b"last-event-id", str(last_event_id).encode()))
        if cookie is not None:
            headers.append((b"cookie", cookie.encode()))
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "headers": headers, "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip
        sent: asyncio.Queue[bytes | None] = asyncio.Queue()
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                assert message["status"] == 200, message
            elif message.get("body"):
                sent.put_nowait(message["body"])
            if message["type"] == "http.response.body" and not message.get("more_body"):
                sent.put_nowait(None)

        task = asyncio.create_task(self.app(scope, receive, send))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            yield _frames(sent)
        finally:
            gone.set()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # ------------------------------------------------------------ actions

    def tool(self, name: str, **options: Any) -> Callable[[Any], Any]:
        return tool(name, register=self.tools, **options)

    def flow(self, name: str, **options: Any) -> Callable[[Any], Any]:
        return flow(name, register=self.tools, **options)

    async def apply(self, source: str, who: Principal | None = None) -> int:
        plan = parse(source)
        row, _ = await self.database.run_in_transaction(
            lambda tx: workflows.apply(tx, self.database, who or self.admin, plan)
        )
        version: int = row["version"]
        return version

    async def start(self, workflow: str, input: Any = None, who: Principal | None = None, **options: Any) -> UUID:
        who = who or self.admin
        new = await runs.prepare(self.plans, who, workflow, input=input, **options)
        if runs.starts_in_queue(new.plan):
            await runs.start_many(self.database, who, [new])
        else:
            await self.database.run_in_transaction(lambda tx: runs.start_waiting(tx, who, new))
        return new.id

    async def approve(self, run_id: UUID, who: Principal | None = None) -> None:
        await self.database.run_in_transaction(
            lambda tx: approvals.approve_run(tx, self.plans, who or self.admin, run_id)
        )

    async def decide(
        self, run_id: UUID, *, approves: bool, who: Principal | None = None, reason: str | None = None
    ) -> None:
        """Vote on the waiting approval, for the current action, like a person after reading it."""
        who = who or self.admin
        for row in await approvals.list_approvals(self.database, who, status="requested", run_id=run_id):
            await self.database.run_in_transaction(
                lambda tx, row=row: approvals.decide(  # type: ignore[misc]
                    tx,
                    self.plans,
                    who,
                    row["id"],
                    approves=approves,
                    reason=reason,
                    digest=row["digest"],
                )
            )

    async def cancel(self, run_id: UUID, who: Principal | None = None) -> None:
        await self.database.run_in_transaction(lambda tx: runs.cancel(tx, self.plans, who or self.admin, run_id))

    @asynccontextmanager
    async def worker(self, capacity: int = 20, **serves: Any) -> AsyncIterator[Worker]:
        """Run a worker in this process for as long as the block lasts; it drains at the end."""
        stop = asyncio.Event()
        worker = Worker(self.database, self.settings, tools=self.tools, capacity=capacity, **serves)
        task = asyncio.create_task(worker.run(stop))
        try:
            yield worker
        finally:
            stop.set()
            await asyncio.wait_for(task, 30)

    async def claim_by_hand(
        self, room: int = 1, lease_seconds: float = 5
    ) -> tuple[leases.WorkerIdentity, list[ClaimedRun]]:
        """Register a worker that claims and then does nothing; it does not even send heartbeats."""
        me = await leases.register(self.database, capacity=room, lease_seconds=lease_seconds)
        await leases.move_worker(self.database, me.id, WorkerEvent.START)
        async with self.database.pool.acquire() as connection:
            return me, await leases.claim(Tx(connection), me, room) or []

    async def sweep(self) -> None:
        """Run the sweeper once, at the clock's time."""
        await sweep(self.database, self.plans)
        await reclaim_lost(self.database)
        await sweeps.admit_blocked(self.database)
        await jobs.tend(self.database, self.plans)

    async def prove(self) -> None:
        """Do the servers' background work for proof once: seal waiting entries and make due evidence."""
        self.notary.signing.make()
        self.notary.salts.make()
        await audit.seal_all(self.database, self.notary.signing)
        await evidence.make_all_due(self.database, self.notary)

    async def work_until(self, run_id: UUID, *statuses: str, capacity: int = 20) -> dict[str, Any]:
        """Run a worker until the run is in one of these states (or has ended)."""
        async with self.worker(capacity):
            return await self.until(run_id, *statuses)

    @asynccontextmanager
    async def long_ago(self, days: int = 400) -> AsyncIterator[None]:
        """Give runs that start in this block ids of that time, and create its month in the journal."""
        async with self.database.connection() as connection:
            now = await connection.fetchval("SELECT now()")
            await ensure_partitions(connection, self.settings.database_schema, now - timedelta(days=days))
        clock.follow(days * 86400.0)
        try:
            yield
        finally:
            clock.follow(0.0)

    async def until(self, run_id: UUID, *statuses: str, seconds: float = 20) -> dict[str, Any]:
        """Follow the run's own notifications until it is in one of these states (or has ended)."""
        async with asyncio.timeout(seconds):
            with self.follower.watching(run_id) as news:
                while True:
                    await sql.watch_run(self.database, run_id=RunId(run_id), seconds=60.0)
                    news.clear()
                    found = await self.run(run_id)
                    if found["status"] in statuses or found["completed_at"]:
                        return found
                    await wait_for_event(news, 0.5)

    async def until_journal(self, run_id: UUID, line: str, times: int = 1, seconds: float = 20) -> list[str]:
        """Follow the run until its journal contains this text this many times."""
        async with asyncio.timeout(seconds):
            with self.follower.watching(run_id) as news:
                while True:
                    await sql.watch_run(self.database, run_id=RunId(run_id), seconds=60.0)
                    news.clear()
                    found = await self.journal(run_id)
                    if found.count(line) >= times:
                        return found
                    await wait_for_event(news, 0.5)

    # ------------------------------------------------------------ reads

    async def run(self, run_id: UUID) -> dict[str, Any]:
        [found] = await self.sql("SELECT tenant_id FROM interlock.run WHERE id = $1", run_id)
        row = await sql.get_run(self.database, tenant_id=found["tenant_id"], run_id=RunId(run_id))
        assert row is not None
        view = run_view(row, await load_for_display(self.database, self.plans, row))
        return view | {"step": {step["key"]: step for step in view["steps"]}}

    async def journal(self, run_id: UUID) -> list[str]:
        """Return `step: from -event-> to`, one line per entry."""
        rows = await self.database.fetch("journal_of", [run_id])
        return [journal_line(row) for row in rows]

    async def sql(self, statement: str, *args: Any) -> list[Any]:
        rows: list[Any] = await self.database.pool.fetch(in_schema(statement, self.settings.database_schema), *args)
        return rows


async def _frames(sent: "asyncio.Queue[bytes | None]", seconds: float = 20) -> AsyncIterator[dict[str, Any]]:
    """Yield each frame's fields, with decoded data. Skip frames without an event (the retry hint, heartbeats)."""
    rest = b""
    while (chunk := await asyncio.wait_for(sent.get(), seconds)) is not None:
        *whole, rest = (rest + chunk).split(b"\n\n")
        for frame in whole:
            fields = dict(line.split(": ", 1) for line in frame.decode().split("\n") if not line.startswith(":"))
            if "event" in fields:
                yield fields | {"data": orjson.loads(fields["data"])}
