"""Behind PgBouncer there are no notifications: each waiter polls at the configured interval."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.rig import Rig

from interlock.api import runs, streams
from interlock.settings import Settings
from interlock.store.pool import Database
from interlock.testing import ManualClock

GATE = "name: gate\nsteps:\n  - {id: ok, approval: {tier: low, summary: 'ok?'}}\n"


@pytest.fixture
async def pooled(url: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    for module, pause in ((runs, "_POLL_SECONDS"), (streams, "_FIRST_PAUSE_SECONDS")):
        monkeypatch.setattr(module, pause, 60.0)
    database = await Database(f"{url}&pgbouncer=true", settings, size=8).open()
    rig = await Rig.make(database, settings, ManualClock())
    await rig.apply(GATE)
    yield rig
    await rig.close()
    await database.close()


async def test_who_follows_a_run_hears_of_its_end_with_the_next_poll(pooled: Rig) -> None:
    run_id = await pooled.start("gate")
    async with asyncio.timeout(15), pooled.stream(f"/api/runs/{run_id}/events") as frames:
        before = [await anext(frames), await anext(frames)]
        await pooled.approve(run_id, await pooled.person("ann", "approver"))
        *after, end = [frame async for frame in frames]
    assert end["event"] == "end"
    assert [int(frame["id"]) for frame in before + after] == list(range(1, len(before + after) + 1))


async def test_who_waits_for_a_run_hears_of_its_end_with_the_next_poll(pooled: Rig) -> None:
    @pooled.tool("t.nothing")
    async def nothing() -> None: ...

    await pooled.apply("name: nothing\nsteps: [{id: s, tool: t.nothing}]\n")
    async with asyncio.timeout(15), pooled.worker():
        answer = await pooled.http().post("/api/runs", params={"wait": 30}, json={"workflow": "nothing"})
    assert answer.json()["status"] == "succeeded"
