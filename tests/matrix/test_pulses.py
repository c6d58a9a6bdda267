"""The pulse of a live page, which says when to refresh, reveals nothing about others (security L13)."""

import asyncio
from typing import Any
from uuid import UUID

from interlock.console import live
from interlock.console.rendering import Visitor
from interlock.wire import Role
from tests.integrations.people import share
from tests.matrix.world import _place
from tests.rig import Hold, Rig


async def test_the_pulse_of_a_list_stands_still_while_others_work(rig: Rig) -> None:
    @rig.tool("bank.pay", writes=True, risk="low", undo="bank.pay")
    async def pay(memo: str) -> dict[str, str]:
        return {"said": memo}

    @rig.tool("bank.ask", writes=True, risk="high")
    async def ask(memo: str) -> None: ...

    acme, rival = await rig.tenant("acme"), await rig.tenant("rival")
    for admin in (acme, rival):
        await share(rig, admin, "T1")
    key = await rig.key("reader", Role.VIEWER, acme.tenant_id, "blue")
    reader = Visitor(await rig.principals.behind(key), "", rig.services)
    async with rig.worker():
        await _until_registered(rig)
        before = await _pulses(reader)
        await _place(rig, "neighbour9c1d", acme.tenant_id, "red")
        await _place(rig, "rival5e2b", rival.tenant_id, "blue")
        assert await _pulses(reader) == before
        await _place(rig, "own7f3a", acme.tenant_id, "blue")
        after = await _pulses(reader)
    changed = {topic for topic in after if after[topic] != before[topic]}
    assert changed >= {"inbox", "runs", "sessions", "jobs", "schedules"}


async def test_the_pulse_of_workers_counts_the_runs_of_ones_own_workspace_alone(rig: Rig) -> None:
    hold = Hold()

    @rig.tool("t.hold")
    async def held() -> None:
        await hold()

    acme, rival = await rig.tenant("acme"), await rig.tenant("rival")
    key = await rig.key("reader", Role.VIEWER, acme.tenant_id, "blue")
    reader = Visitor(await rig.principals.behind(key), "", rig.services)
    places: list[tuple[UUID, str]] = [(acme.tenant_id, "red"), (rival.tenant_id, "blue"), (acme.tenant_id, "blue")]
    async with rig.worker():
        await _until_registered(rig)
        pulses = [await live.LISTS["workers"](rig.services, reader)]
        for tenant_id, workspace in places:
            whole = rig.http(await rig.key("author", Role.ADMIN, tenant_id))
            await whole.post("/api/workflows", json={"name": "w", "steps": [{"id": "a", "tool": "t.hold"}]})
            inside = rig.http(await rig.key("starter", Role.ADMIN, tenant_id, workspace))
            hold.entered.clear()
            assert (await inside.post("/api/runs", json={"workflow": "w"})).is_success
            await hold.inside()
            pulses.append(await live.LISTS["workers"](rig.services, reader))
        hold.release.set()
    assert pulses[0] == pulses[1] == pulses[2] != pulses[3]


async def _pulses(reader: Visitor) -> dict[str, Any]:
    return {topic: await look(reader.services, reader) for topic, look in live.LISTS.items()}


async def _until_registered(rig: Rig) -> None:
    async with asyncio.timeout(10):
        while not await rig.sql("SELECT FROM interlock.worker WHERE status = 'running'"):  # noqa: ASYNC110  the worker says it
            await asyncio.sleep(0)
