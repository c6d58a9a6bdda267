"""Remove each condition on a tenant or a workspace from its statement or function: the matrix must notice.

It notices an answer with foreign data, an unusual answer to a request that only reads, a wrong status, and a changed
foreign row. `UNNOTICED` lists what no request can show, with the reason.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import UUID

import asyncpg
import httpx2
import pytest

from interlock.engine.approvals import grants
from interlock.engine.ingress import triggers
from interlock.ids import RunId, TenantId
from interlock.store import pool, sql
from interlock.store.queries import STATEMENTS, statements_in
from interlock.testing import Scratch
from interlock.wire import Role
from tests.matrix.expected import EXPECTED
from tests.matrix.pages import EXPECTED_PAGES, Console
from tests.matrix.sweep import UNNOTICED, Mutant, mutants
from tests.matrix.test_matrix import Matrix, filters, looking_first
from tests.matrix.world import Place, World, furnish
from tests.rig import Rig
from tests.store.functions import CREATED, called

Faults = list[str]


@dataclass(frozen=True)
class Probe:
    name: str
    about: str
    # Return the answer and all its faults.
    ask: Callable[[], Awaitable[tuple[str, Faults]]]
    only_reads: bool


class Sweep:
    """Probes against copies of one database, so that each mutant finds the same data."""

    def __init__(self, rig: Rig, scratch: Scratch, world: World) -> None:
        self.rig, self.scratch, self.world = rig, scratch, world
        self.statements = statements_in("interlock")
        self.usual: dict[Probe, str] = {}
        self.users: dict[str, list[Probe]] = {}
        self._kept, self._copies = "", 0

    async def prepare(self, probes: list[Probe], noted: list[str]) -> Faults:
        """Save the database. Send every probe twice, to record its statements and its usual answer."""
        self._kept = _name(self.rig.database.url) + "_kept"
        await self.rig.database.close()
        await self.scratch.create(self._kept, f"TEMPLATE {_name(self.rig.database.url)} STRATEGY FILE_COPY")
        faults: Faults = []
        for _ in range(2):
            await self.restore()
            for probe in probes:
                noted.clear()
                answer, wrong = await self.ask(probe)
                faults += wrong
                for statement in dict.fromkeys(self._executed(noted)):
                    users = self.users.setdefault(statement, [])
                    users.append(probe) if probe not in users else None
                if probe.only_reads and self.usual.setdefault(probe, answer) != answer:
                    self.usual[probe] = ""  # its answer always differs
        await self.restore()
        return faults

    def _executed(self, noted: list[str]) -> Iterator[str]:
        """Return the statements, and the functions that they call."""
        for statement in noted:
            yield statement
            yield from (f"{name}()" for name in called(STATEMENTS[statement].text))

    @asynccontextmanager
    async def changed(self, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
        """Let the rig execute the mutant in place of its original."""
        if not mutant.is_function:
            with monkeypatch.context() as patch:
                patch.setitem(self.statements, mutant.statement, mutant.text)
                yield
            return
        await self.rig.database.pool.execute(mutant.text)
        yield
        await self.rig.database.pool.execute(CREATED[mutant.statement.removesuffix("()")])

    async def restore(self) -> None:
        self._copies += 1
        name, before = f"{self._kept}_{self._copies}", self.rig.database.url
        await self.rig.database.close()
        await self.scratch.create(name, f"TEMPLATE {self._kept} STRATEGY FILE_COPY")
        self.rig.database.url = self.scratch.url_of(name)
        await self.rig.database.open()
        await self.scratch.drop(before)

    async def ask(self, probe: Probe) -> tuple[str, Faults]:
        rig = self.rig
        rig.principals.forget()
        rig.policies._held.clear()
        rig.plans.__init__(rig.database, rig.tools)  # type: ignore[misc]
        before = None if probe.only_reads else await self._theirs(probe)
        answer, faults = await probe.ask()
        if before is not None and before != (after := await self._theirs(probe)):
            faults.append(f"{probe.about} changed {[name for name in after if after[name] != before[name]]}")
        return _masked(answer), faults

    async def _theirs(self, probe: Probe) -> dict[str, str]:
        """Return a digest of each table's rows outside the caller's workspace."""
        async with self.rig.database.connection() as connection:
            columns = await connection.fetch(_COLUMNS)
            tables = [row["table_name"] for row in columns]
            places = [
                " OR t.workspace_id = 'red'" if "workspace_id" in row["columns"] and "whole" not in probe.about else ""
                for row in columns
            ]
            to_others = "" if "whole" in probe.about else " OR target.workspace_id = 'red'"
            queries = [*map(_DIGEST.format, tables, places), _MESSAGES.format(to_others)]
            return {
                row["name"]: row["digest"]
                for row in await connection.fetch(" UNION ALL ".join(queries), self.world.rival_id)
            }

    async def notices(self, mutant: Mutant) -> bool:
        """Return whether a probe that uses the statement notices that its condition is missing."""
        changed, noticed = False, False
        for probe in self.users[mutant.statement]:
            changed = changed or not probe.only_reads
            answer, faults = await self.ask(probe)
            usual = self.usual.get(probe, "")
            if noticed := bool(faults or (usual and answer != usual)):
                break
        if changed:
            await self.restore()
        return noticed


_COLUMNS = """
SELECT table_name, array_agg(column_name::text) AS columns
  FROM information_schema.columns JOIN information_schema.tables USING (table_schema, table_name)
 WHERE table_schema = 'interlock' AND table_type = 'BASE TABLE' AND table_name !~ '^journal_entry_'
 GROUP BY table_name HAVING 'tenant_id' = ANY(array_agg(column_name::text))
"""
_DIGEST = (
    "SELECT '{0}' AS name, md5(coalesce(string_agg(md5(t::text), '' ORDER BY md5(t::text)), '')) AS digest "
    "FROM interlock.{0} AS t WHERE t.tenant_id = $1{1}"
)

_MESSAGES = """
SELECT 'messages to them', count(*)::text
  FROM interlock.outbox_message JOIN interlock.notification_target AS target ON target.id = target_id
 WHERE target.tenant_id = $1{0}
"""


def _name(url: str) -> str:
    return url.partition("@/")[2].partition("?")[0]


# The values that always differ: form tokens, relative times, and the result of the previous form.
_FLEETING = re.compile(r'\b[0-9a-f]{32,}\b|[^>]* ago</time>|value="[0-9a-f-]{36}"|<p class="flash".*?</p>')


def _masked(answer: str) -> str:
    return _FLEETING.sub("", answer)


# ---------------------------------------------------------------- the probes


async def probes_of(rig: Rig, world: World) -> list[Probe]:
    matrix = Matrix(world, rig.app.openapi())
    console = await Console(world, rig.http("")).sign_in(await rig.key("ada", Role.ADMIN, world.tenant_id, "blue"))
    found = []
    for name in looking_first(EXPECTED):
        for place in (world.neighbour, world.rival, world.own):
            queries: list[dict[str, str] | None] = [None]
            if place is not world.own and (query := filters(matrix.operations[name], place)):
                queries.append(query)
            for query in queries:
                for whole in (False, True) if place is not world.neighbour else (False,):
                    found.append(_of_api(matrix, name, place, query, whole))
    theirs = rig.http(await rig.key("theirs", Role.ADMIN, world.rival_id, "blue"))
    # A statement that takes the first row of all tenants is right for one of them.
    found += [_of_rival(theirs, name, world.rival) for name in EXPECTED if name.startswith("GET")]
    for page in looking_first(EXPECTED_PAGES):
        for place in (world.neighbour, world.rival, world.own):
            if console.asks(page, place):
                found.append(_of_console(console, page, place))
    for place in (world.neighbour, world.rival):
        found += _of_engine(rig, world, place)
    order = {name: at for at, name in enumerate(looking_first({probe.name for probe in found}))}
    return sorted(found, key=lambda probe: order[probe.name])


def _of_api(matrix: Matrix, name: str, place: Place, query: dict[str, str] | None, whole: bool) -> Probe:
    async def ask() -> tuple[str, Faults]:
        matrix.faults = []
        return await matrix.ask(name, Role.ADMIN, place, query, whole=whole), matrix.faults

    caller = "the whole tenant" if whole else "a workspace"
    return Probe(name, f"{name} as {caller} for {place.mark} {query}", ask, name.startswith("GET"))


def _of_rival(client: httpx2.AsyncClient, name: str, place: Place) -> Probe:
    async def ask() -> tuple[str, Faults]:
        return (await client.get(place.path(name.partition(" ")[2]))).text, []

    return Probe(name, f"{name} as {place.mark} for itself", ask, only_reads=True)


def _of_console(console: Console, page: str, place: Place) -> Probe:
    async def ask() -> tuple[str, Faults]:
        console.faults = []
        return await console.ask(page, place), console.faults

    return Probe(page, f"{page} for {place.mark}", ask, page.startswith("GET"))


def _of_engine(rig: Rig, world: World, place: Place) -> list[Probe]:
    """Requests that a worker or Slack makes for the caller, with ids of others."""

    async def grant() -> tuple[str, Faults]:
        own = RunId(UUID(world.own.ids["run_id"]))
        run = await sql.get_run(rig.database, tenant_id=TenantId(world.tenant_id), run_id=own)
        assert run is not None
        found = await grants.matching(rig.database, run, "bank.pay", {"memo": place.mark}, "low")
        return "", [f"the grant {found['id']} covers it"] if found else []

    async def command() -> tuple[str, Faults]:
        who = await rig.person("slack", Role.OPERATOR, world.tenant_id, "blue")
        found = await triggers.of_command(rig.database, who, f"/{place.mark}")
        return "", [f"{found} answers the command"] if found else []

    return [
        Probe(name, f"{name} for {place.mark}", ask, only_reads=False)
        for name, ask in (("a grant", grant), ("a command", command))
    ]


# ---------------------------------------------------------------- the sweep


def test_what_cannot_be_noticed_has_a_condition() -> None:
    assert UNNOTICED.keys() - {mutant.statement for mutant in mutants()} == set()


@asynccontextmanager
async def swept(
    rig: Rig, scratch: Scratch, monkeypatch: pytest.MonkeyPatch, *, only_reads: bool
) -> AsyncIterator[Sweep]:
    rig.mount_console()
    world = await furnish(rig)
    await rig.prove()
    rig.clock.freeze()
    probes = [probe for probe in await probes_of(rig, world) if probe.only_reads or not only_reads]
    noted: list[str] = []

    class Noting(dict[str, str]):
        def __getitem__(self, statement: str) -> str:
            noted.append(statement)
            return super().__getitem__(statement)

    sweep = Sweep(rig, scratch, world)
    sweep.statements = Noting(sweep.statements)
    monkeypatch.setattr(pool, "statements_in", lambda schema: sweep.statements)
    await rig.follower.stop()
    try:
        assert await sweep.prepare(probes, noted) == []
        yield sweep
    finally:
        await rig.follower.start()


async def _unnoticed(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Remove each condition in turn. Return the conditions whose absence a probe noticed, and the others."""
    noticed, unnoticed = [], []
    for mutant in mutants():
        if mutant.statement in sweep.users and await _is_statement(sweep.rig, mutant):
            async with sweep.changed(mutant, monkeypatch):
                (noticed if await sweep.notices(mutant) else unnoticed).append(str(mutant))
    return noticed, [each for each in unnoticed if each.partition(":")[0] not in UNNOTICED]


async def test_requests_that_read_notice_a_condition_that_is_missing(
    rig: Rig, interlock_scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swept(rig, interlock_scratch, monkeypatch, only_reads=True) as sweep:
        noticed, unnoticed = await _unnoticed(sweep, monkeypatch)
    assert unnoticed == []
    assert len(noticed) > 60
    assert {each.partition(":")[0] for each in noticed} >= {
        "get_receipt", "get_job", "list_runs", "list_events", "schedule_named", "list_keys", "policy_in_force",
        "inbox", "find_runs", "workflows_to_show",
    }  # fmt: skip


@pytest.mark.chaos
async def test_every_request_notices_a_condition_that_is_missing(
    rig: Rig, interlock_scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swept(rig, interlock_scratch, monkeypatch, only_reads=False) as sweep:
        noticed, unnoticed = await _unnoticed(sweep, monkeypatch)
        unused = {mutant.statement for mutant in mutants()} - sweep.users.keys() - UNNOTICED.keys()
    assert unnoticed == []
    assert unused == set(), "add a probe, or an entry to UNNOTICED in tests/matrix/sweep.py with the reason"
    assert len(noticed) > 80
    assert {each.partition(":")[0] for each in noticed} >= {
        "use_grant", "trigger_of_command", "recorded_decisions", "delete_schedule", "revoke_grant",
    }  # fmt: skip


async def _is_statement(rig: Rig, mutant: Mutant) -> bool:
    """Return whether it was a condition. Without an assignment, the statement or function is invalid."""
    async with rig.database.connection() as connection:
        transaction = connection.transaction()
        await transaction.start()
        try:
            await (connection.execute(mutant.text) if mutant.is_function else connection.prepare(mutant.text))
        except asyncpg.PostgresSyntaxError:
            return False
        finally:
            await transaction.rollback()
    return True
