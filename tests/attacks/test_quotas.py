"""Rows that no client removes do not grow without limit: kept events, schedules, versions for missing tools (L9)."""

from typing import Any

import httpx2

from interlock.wire import Role
from tests.rig import Rig


def _said(answer: httpx2.Response) -> tuple[int, Any]:
    return answer.status_code, answer.json().get("code")


async def test_a_tenant_keeps_so_many_events_that_no_step_takes(rig: Rig) -> None:
    rig.settings.max_kept_events = 3
    client = rig.http()

    def event(id: str, type: str = "bank.settled") -> dict[str, str]:
        return {"type": type, "correlation": id, "id": id}

    for n in range(3):
        assert (await client.post("/api/events", json=event(f"e{n}"))).is_success
    refused = await client.post("/api/events", json=event("e3"))
    assert _said(refused) == (429, "TOO_MANY_EVENTS")
    assert "INTERLOCK_MAX_KEPT_EVENTS" in refused.json()["detail"] and int(refused.headers["Retry-After"]) > 0
    assert (await client.post("/api/events", json=event("e0"))).is_success, "it is kept already"
    await rig.apply("name: waits\nsteps: [{id: a, wait: {event: bank.paid, correlation: c}}]")
    async with rig.worker():
        run_id = await rig.start("waits")
        await rig.until(run_id, "waiting_external")
        assert (await client.post("/api/events", json=event("c", "bank.paid"))).is_success, "a step takes it"
        assert (await rig.until(run_id))["status"] == "succeeded"
    other = rig.http(await rig.key("other", Role.ADMIN, (await rig.tenant("other")).tenant_id))
    assert (await other.post("/api/events", json=event("e3"))).is_success, "another tenant has its own quota"


async def test_a_tenant_has_so_many_schedules(rig: Rig) -> None:
    rig.settings.max_schedules = 2
    await rig.apply("name: nightly\nsteps: [{id: a, approval: {summary: go}}]")
    client = rig.http()

    def schedule(name: str) -> dict[str, str]:
        return {"name": name, "cron": "0 3 * * *", "workflow": "nightly"}

    for name in ("a", "b"):
        assert (await client.post("/api/schedules", json=schedule(name))).is_success
    refused = await client.post("/api/schedules", json=schedule("c"))
    assert _said(refused) == (409, "TOO_MANY_SCHEDULES") and "INTERLOCK_MAX_SCHEDULES" in refused.json()["detail"]
    assert (await client.delete("/api/schedules/a")).is_success
    assert (await client.post("/api/schedules", json=schedule("c"))).is_success


async def test_invented_tool_names_make_so_many_versions(rig: Rig) -> None:
    rig.settings.max_tool_call_plans = 2
    agent = rig.http(await rig.key("agent", Role.AGENT))

    async def call(tool: str, **args: int) -> httpx2.Response:
        return await agent.post("/api/tool-calls", json={"tool": tool, "args": args, "wait": 0})

    assert (await call("made.up1")).is_success
    assert (await call("made.up1", n=1)).is_success
    for refused in (await call("made.up2"), await call("made.up1", m=1)):
        assert _said(refused) == (409, "TOO_MANY_TOOL_CALL_PLANS")
    assert (await call("made.up1", n=2)).is_success, "it was called like this before"
    await rig.apply("name: mine\nsteps: [{id: a, tool: made.up2}]")
    assert await rig.sql("SELECT FROM interlock.workflow WHERE name = 'tool_call.made.up2'") == []
