"""An engine for tests: a separate database, a worker that runs on request, and a clock that stands still."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson

from interlock.api.views import approval_view, dump, receipt_view, run_view
from interlock.definition.duration import parse_duration
from interlock.definition.workflow import parse
from interlock.engine import policies, workflows
from interlock.engine.access import secrets, tenants
from interlock.engine.access.principal import Principal
from interlock.engine.approvals import approvals
from interlock.engine.ingress import external_events
from interlock.engine.policies import Policies
from interlock.engine.queueing import leases, sweeps
from interlock.engine.runs import run_signals, runs
from interlock.engine.writing.load import load_journal
from interlock.ids import ApprovalId, RunId, uuid7
from interlock.journal import encode
from interlock.policy.policy import check_policy
from interlock.settings import Settings
from interlock.store.pool import Database, Tx
from interlock.testing.clock import ManualClock
from interlock.testing.fake import Fake, Guard, stand_in
from interlock.testing.postgres import Scratch
from interlock.tools import Registry, registry
from interlock.wire import Approval, Receipt, Role, Run
from interlock.worker.worker import Worker

Answers = Callable[[Approval], bool | None]

_MOST_ROUNDS = 10_000


@cache
def _shared() -> Scratch:
    return Scratch()


async def sweep(database: Database, plans: workflows.Plans) -> int:
    """Run every background task of a process once, at the clock's time. Return how much there was to do."""
    woken = await sweeps.resume_due(database)
    delivered = await run_signals.deliver(database, plans)
    return woken + delivered + await sweeps.enforce_deadlines(database, plans)


class Engine:
    """An engine that runs only on request: after `run_to_idle`, every run waits or has ended."""

    def __init__(self, database: Database, settings: Settings, clock: ManualClock, tools: Registry) -> None:
        self.database = database
        self.clock = clock
        self.tools = tools
        self._guard = Guard(tools)
        self.tester: Principal
        self._settings = settings
        self._plans = workflows.Plans(database, tools)
        self._policies = Policies(database, tools)
        self._worker = Worker(database, settings, tools=tools, capacity=20)
        self._admin: Principal
        self._people: dict[str, Principal] = {}
        self._answers: Answers | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, scratch: Scratch | None = None, *, tools: Registry = registry) -> "AsyncIterator[Engine]":
        """Open an engine with the currently registered tools and flows. Its fakes apply to this engine only.

        A tool is not called unless the test fakes it or names it in `allow_real_tools`.
        """
        server = scratch if scratch is not None else await asyncio.to_thread(_shared)
        url = await server.fresh()
        clock = ManualClock()
        clock.freeze()
        with tempfile.TemporaryDirectory(prefix="interlock-test-") as data_dir:
            settings = Settings(data_dir=Path(data_dir), database_url=url)
            database = await Database(url, settings, clock=clock, size=4).open()
            try:
                engine = cls(database, settings, clock, tools.copy())
                await engine._move_in()
                async with engine._worker.by_hand():
                    yield engine
            finally:
                await database.close()
                await server.drop(url)

    async def _move_in(self) -> None:
        key = await tenants.bootstrap(self.database, None)
        assert key is not None
        self._admin = await tenants.authenticate(self.database, key)
        self.tester = await self.person("tester", "operator")

    # ------------------------------------------------------------ setup

    async def apply(self, workflow: str | Path) -> int:
        """Publish a workflow from its text or its file, and return its version."""
        plan = parse(_text(workflow), file=str(workflow) if isinstance(workflow, Path) else "workflow")
        row, _ = await self.database.run_in_transaction(
            lambda tx: workflows.apply(tx, self.database, self._admin, plan)
        )
        version: int = row["version"]
        return version

    async def policy(self, text: str | Path) -> None:
        """Publish a policy. Without one, the built-in policy decides by the risk of each tool."""
        said = _text(text)
        digest = check_policy(said, self._policies.facts())
        await self.database.run_in_transaction(lambda tx: policies.publish(tx, self._admin, said, digest))
        self._policies.forget("")
        self._worker.policies.forget("")

    async def secret(self, name: str, value: str, *, tools: Sequence[str] = ("*",)) -> None:
        """Store a secret. `tools` are the tools that may use it."""
        await self.database.run_in_transaction(
            lambda tx: secrets.put(tx, self.database, self._admin, name, value, tools=tools)
        )

    def fake(
        self,
        tool: str,
        returns: Any = None,
        *,
        raises: BaseException | None = None,
        does: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Fake:
        """Replace a tool for this engine. `options` describe a tool that is not registered."""
        fake = Fake(returns, raises, does)
        stand_in(self.tools, tool, fake, options)
        return fake

    def allow_real_tools(self, *patterns: str) -> None:
        """Let runs call these real tools: names, or patterns like `shop.*`."""
        self._guard.allow(*patterns)

    async def person(self, name: str, role: str = "approver", groups: tuple[str, ...] = ()) -> Principal:
        """Return a person with a key. The same name is the same person."""
        if name not in self._people:
            _, key = await self.database.run_in_transaction(
                lambda tx: tenants.add_key(tx, self._admin.tenant_id, name, Role(role), groups=groups)
            )
            self._people[name] = await tenants.authenticate(self.database, key)
        return self._people[name]

    # ------------------------------------------------------------ running

    async def run(self, workflow: str, input: dict[str, Any] | None = None, **more: Any) -> Run:
        """Start a run, execute everything that is ready, and return the run."""
        run = await self.start(workflow, input, **more)
        await self.run_to_idle()
        return await self.look(run)

    async def start(
        self, workflow: str, input: dict[str, Any] | None = None, *, by: Principal | None = None,
        version: int | None = None,
    ) -> Run:  # fmt: skip
        who = by or self.tester
        new = await runs.prepare(self._plans, who, workflow, version=version, input=input or {})
        if runs.starts_in_queue(new.plan):
            await runs.start_many(self.database, who, [new])
        else:
            await self.database.run_in_transaction(lambda tx: runs.start_waiting(tx, who, new))
        return await self.look(new.id)

    async def run_to_idle(self) -> None:
        """Execute until every run has ended or waits: for a person, an event, or a later time."""
        for _ in range(_MOST_ROUNDS):
            await leases.heartbeat(self.database, self._worker.me)
            moved = await sweep(self.database, self._plans)
            moved += await self._worker.drain_queue()
            self._guard.check()
            moved += await self._answer()
            if not moved:
                return
        raise RuntimeError(f"there was something to do {_MOST_ROUNDS:,} times in a row: does a run go in circles?")

    async def advance(self, duration: str | float) -> None:
        """Move the clock forward, and execute what is due then."""
        self.clock.advance(parse_duration(duration))
        await self.run_to_idle()

    async def event(self, type: str, correlation: str | int, payload: Any = None) -> bool:
        """Publish an external event.

        True if a step waited for it; otherwise it is stored for the first step that will.
        """
        new = external_events.NewEvent(str(uuid7()), type, str(correlation), encode({} if payload is None else payload))
        row = await self.database.run_in_transaction(
            lambda tx: external_events.send(tx, self.database.settings, self._plans, self.tester, new)
        )
        await self.run_to_idle()
        return row.run_id is not None

    async def cancel(self, run: Run | str, *, reason: str | None = None) -> Run:
        run_id = _id(run)
        await self.database.run_in_transaction(
            lambda tx: runs.cancel(tx, self._plans, self._admin, RunId(run_id), reason=reason)
        )
        await self.run_to_idle()
        return await self.look(run_id)

    # ------------------------------------------------------------ approvals

    async def approve(self, run: Run | str, *, by: Principal | None = None, reason: str | None = None) -> Run:
        """Approve everything that the run waits for, as a person who did not start it.

        A quorum of two is approved by two people.
        """
        return await self._decide_all(run, True, by, reason)

    async def reject(self, run: Run | str, *, by: Principal | None = None, reason: str | None = None) -> Run:
        return await self._decide_all(run, False, by, reason)

    def answer(self, answers: Answers | None) -> None:
        """Answer approvals as they are requested: true is a yes, false a no, None leaves the approval open."""
        self._answers = answers

    async def _answer(self) -> int:
        if self._answers is None:
            return 0
        answered = 0
        for question in await self.approvals():
            if (approves := self._answers(question)) is not None:
                await self._decide(question, approves, None, None)
                answered += 1
        return answered

    async def _decide_all(self, run: Run | str, approves: bool, by: Principal | None, reason: str | None) -> Run:
        questions = await self.approvals(run)
        if not questions:
            raise LookupError(f"run {_id(run)} asks nobody anything; it is {(await self.look(run)).status}")
        for question in questions:
            await self._decide(question, approves, by, reason)
        await self.run_to_idle()
        return await self.look(run)

    async def _decide(self, question: Approval, approves: bool, by: Principal | None, reason: str | None) -> None:
        for name in ("first", "second")[: 1 + (question.two_person and approves and by is None)]:
            groups = tuple(question.approvers)
            who = by or await self.person(" ".join([name, "approver", *groups]), groups=groups)
            said = reason or ("a test says so" if question.reason_required else None)

            async def vote(tx: Tx, who: Principal = who, said: str | None = said) -> None:
                await approvals.decide(
                    tx, self._plans, who, ApprovalId(UUID(question.id)), approves=approves, reason=said,
                    digest=question.action.digest,
                )  # fmt: skip

            await self.database.run_in_transaction(vote)

    # ------------------------------------------------------------ inspecting

    async def look(self, run: Run | str | UUID) -> Run:
        """Return the run as it is now, with its steps."""
        row = await runs.get(self.database, self._admin, RunId(_id(run)))
        journal = await load_journal(self.database, self._plans, row)
        return Run.model_validate(orjson.loads(dump(run_view(row, journal, self._policies.hidden))))

    async def approvals(self, run: Run | str | None = None, *, status: str = "requested") -> list[Approval]:
        run_id = None if run is None else _id(run)
        rows = await approvals.list_approvals(self.database, self._admin, status=status, run_id=run_id, limit=1000)
        votes = await self.database.fetch("votes_on", [row["id"] for row in rows])
        views = [approval_view(row, votes, self._admin) for row in reversed(rows)]
        return [Approval.model_validate(orjson.loads(dump(view))) for view in views]

    async def receipts(self, run: Run | str) -> list[Receipt]:
        rows = await self.database.fetch("receipts_of", self._admin.tenant_id, _id(run))
        return [Receipt.model_validate(orjson.loads(dump(receipt_view(row)))) for row in rows]

    async def journal(self, run: Run | str) -> list[str]:
        """Return the journal, one line per entry: `step: from -event-> to`."""
        rows = await self.database.fetch("journal_of", [_id(run)])
        return [journal_line(row) for row in rows]


def journal_line(row: Any) -> str:
    if not row["event"]:
        return str(row["type"])
    return f"{row['step'] or 'run'}: {row['from_state'] or ''} -{row['event']}-> {row['to_state']}"


def _text(given: str | Path) -> str:
    return given.read_text(encoding="utf-8") if isinstance(given, Path) else given


def _id(run: Run | str | UUID) -> RunId:
    with contextlib.suppress(ValueError):
        return RunId(run) if isinstance(run, UUID) else RunId(UUID(run.id if isinstance(run, Run) else run))
    raise LookupError(f"{run!r} is no run and no id of one")
