"""Workspaces of one tenant: the data of one neither appears in another nor changes its behavior.

Holds specification BUG-1 and BUG-2, security M3, M5 and L2, and the remark on names of schedules.
"""

from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest
from tests.rig import Rig

from interlock.engine.ingress import schedules

WAITS = "{name: waits, steps: [{id: came, wait: {event: bank.settled, correlation: ch_1}}]}"
GATE = "{name: gate, steps: [{id: ask, approval: {tier: low}}]}"
ALLOW = b'@id("all") permit (principal, action, resource);'
EVENT = {"type": "bank.settled", "correlation": "ch_1", "payload": {"account": "blue-secret"}, "id": "evt-77"}


@pytest.fixture
async def http(rig: Rig) -> httpx2.AsyncClient:
    return rig.http()


@pytest.fixture
async def blue(rig: Rig) -> httpx2.AsyncClient:
    return rig.http(await rig.key("blue", "admin", workspace_id="blue"))


@pytest.fixture
async def red(rig: Rig) -> httpx2.AsyncClient:
    return rig.http(await rig.key("red", "admin", workspace_id="red"))


async def made(client: httpx2.AsyncClient, path: str, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.is_success, answer.text
    return answer.json()


async def status(client: httpx2.AsyncClient, run_id: str) -> str:
    return str((await client.get(f"/api/runs/{run_id}")).json()["status"])


# ---------------------------------------------------------------- events


async def test_an_event_id_belongs_to_one_workspace(
    rig: Rig, http: httpx2.AsyncClient, blue: httpx2.AsyncClient, red: httpx2.AsyncClient
) -> None:
    """Specification BUG-1: the server dropped the second workspace's event and answered with the first one's run."""
    await rig.apply(WAITS)
    ours, theirs = [(await made(client, "/api/runs", workflow="waits"))["id"] for client in (blue, red)]
    sent = await made(blue, "/api/events", **EVENT)
    assert (sent["run_id"], sent["workspace_id"]) == (ours, "blue")
    answer = await red.post("/api/events", json=EVENT)
    assert (answer.json()["run_id"], answer.json()["workspace_id"]) == (theirs, "red")
    assert ours not in answer.text and "Idempotency-Replayed" not in answer.headers
    assert [await status(http, run) for run in (ours, theirs)] == ["succeeded"] * 2
    # Within a workspace it is one event for all its keys. The same holds for the keys of the whole tenant.
    other = rig.http(await rig.key("other", "operator", workspace_id="blue"))
    again = await other.post("/api/events", json=EVENT)
    assert (again.json()["run_id"], again.headers["Idempotency-Replayed"]) == (ours, "true")
    kept = await made(http, "/api/events", **EVENT)
    assert (kept["matched"], kept["workspace_id"]) == (False, None)
    assert len((await http.get("/api/events")).json()["items"]) == 3


async def test_another_payload_under_the_same_event_id_is_no_conflict_across_workspaces(
    blue: httpx2.AsyncClient, red: httpx2.AsyncClient
) -> None:
    await made(blue, "/api/events", **EVENT)
    mine = await made(red, "/api/events", **EVENT | {"payload": {"account": "red"}})
    assert (mine["payload"], mine["workspace_id"]) == ({"account": "red"}, "red")
    reused = await blue.post("/api/events", json=EVENT | {"payload": None})
    assert (reused.status_code, reused.json()["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")


# ---------------------------------------------------------------- receipts


async def test_a_receipt_of_another_workspace_is_as_unknown_as_none(
    rig: Rig, blue: httpx2.AsyncClient, red: httpx2.AsyncClient
) -> None:
    """Specification BUG-2 and security L2: the answer named the other workspace's run."""

    @rig.tool("bank.pay", writes=True, risk="low", undo="bank.pay")
    async def pay() -> None: ...

    async with rig.worker():
        call = await made(blue, "/api/tool-calls", tool="bank.pay")
    [receipt] = (await blue.get(f"/api/runs/{call['id']}/receipts")).json()["items"]
    for verb, tail, body in (("GET", "", None), ("POST", "/reverse", {}), ("POST", "/resolve", {"outcome": "fail"})):
        answers = [await red.request(verb, f"/api/receipts/{id}{tail}", json=body) for id in (receipt["id"], uuid4())]
        assert [answer.status_code for answer in answers] == [404, 404]
        told = [answer.json() | {"detail": answer.json()["detail"][:10]} for answer in answers]
        assert told[0] == told[1] and told[0]["code"] == "RECEIPT_NOT_FOUND"
        assert call["id"] not in answers[0].text


async def test_an_effect_of_another_workspace_is_neither_reused_nor_in_the_way(
    rig: Rig, http: httpx2.AsyncClient, blue: httpx2.AsyncClient, red: httpx2.AsyncClient
) -> None:
    """Security M5: the same key revealed the first workspace's output, and another action named its run."""
    done: list[str] = []

    @rig.tool("bank.pay", writes=True, risk="low", key="pay:{charge}")
    async def pay(charge: str, memo: str) -> dict[str, Any]:
        done.append(memo)
        return {"paid": memo}

    async with rig.worker():
        first = await made(blue, "/api/tool-calls", tool="bank.pay", args={"charge": "c1", "memo": "blue"})
        second = await made(red, "/api/tool-calls", tool="bank.pay", args={"charge": "c1", "memo": "blue"})
        third = await made(http, "/api/tool-calls", tool="bank.pay", args={"charge": "c1", "memo": "tenant"})
        again = await made(blue, "/api/tool-calls", tool="bank.pay", args={"charge": "c1", "memo": "blue"})
        other = await made(blue, "/api/tool-calls", tool="bank.pay", args={"charge": "c1", "memo": "changed"})
    assert done == ["blue", "blue", "tenant"]
    assert [call["result"] for call in (first, second, third, again)] == [
        {"paid": memo} for memo in ("blue", "blue", "tenant", "blue")
    ]
    assert other["status"] == "failed"
    for call in (second, third):
        assert first["id"] not in (await http.get(f"/api/runs/{call['id']}")).text


# ---------------------------------------------------------------- jobs


async def test_a_child_job_is_in_the_workspace_of_its_parent(
    rig: Rig, http: httpx2.AsyncClient, blue: httpx2.AsyncClient, red: httpx2.AsyncClient
) -> None:
    """Security M3: a child job without a workspace could be read and canceled through its parent, and only that way."""
    await rig.apply(GATE)
    parent = await made(blue, "/api/jobs", task_description="all", workflow="gate")
    child = await made(http, "/api/jobs", task_description="part", workflow="gate", parent_job_id=parent["id"])
    tree = (await blue.get(f"/api/jobs/{parent['id']}/tree")).json()
    assert [each["id"] for each in tree["children"]] == [child["id"]]
    assert (await blue.get(f"/api/jobs/{child['id']}")).status_code == 200
    listed = (await blue.get("/api/jobs", params={"parent_job_id": parent["id"]})).json()["items"]
    assert [each["id"] for each in listed] == [child["id"]]
    for verb, tail in (("GET", ""), ("GET", "/tree"), ("POST", "/cancel")):
        assert (await red.request(verb, f"/api/jobs/{child['id']}{tail}")).status_code == 404
    submitted = {"task_description": "x", "workflow": "gate", "parent_job_id": child["id"]}
    assert (await red.post("/api/jobs", json=submitted)).status_code == 404


async def test_a_job_of_others_is_not_locked_to_find_out_whose_it_is(
    rig: Rig, http: httpx2.AsyncClient, blue: httpx2.AsyncClient, red: httpx2.AsyncClient
) -> None:
    """A caller from elsewhere who knows the id must neither wait for nor block the transaction that changes the job."""
    await rig.apply(GATE)
    job = await made(blue, "/api/jobs", task_description="all", workflow="gate")
    async with rig.database.pool.acquire() as connection, connection.transaction():
        await connection.execute("SELECT FROM interlock.job WHERE id = $1 FOR UPDATE", UUID(job["id"]))
        assert (await red.post(f"/api/jobs/{job['id']}/cancel")).status_code == 404


# ---------------------------------------------------------------- schedules


async def test_a_schedule_name_taken_elsewhere_is_said_to_be_elsewhere(
    rig: Rig, blue: httpx2.AsyncClient, red: httpx2.AsyncClient
) -> None:
    """As for triggers and workflows: the answer advised to delete a schedule that the key cannot see."""
    await rig.apply(GATE)
    hourly = {"name": "hourly", "cron": "0 * * * *", "workflow": "gate"}
    await made(blue, "/api/schedules", **hourly)
    there, here = [await client.post("/api/schedules", json=hourly) for client in (red, blue)]
    assert [answer.json()["code"] for answer in (there, here)] == ["SCHEDULE_EXISTS"] * 2
    assert there.json()["detail"] == "The name hourly is taken in another workspace. Choose another name."
    assert "delete it first" in here.json()["detail"]


async def test_a_schedule_stays_in_its_workspace_whoever_resumes_it(
    rig: Rig, http: httpx2.AsyncClient, blue: httpx2.AsyncClient
) -> None:
    """A tenant admin lends the schedule a key; its runs and the schedule itself stay visible to its owners."""
    await rig.apply(GATE)
    key = await made(blue, "/api/keys", name="leaver", role="operator")
    await made(rig.http(key["key"]), "/api/schedules", name="hourly", cron="0 * * * *", workflow="gate")
    assert (await blue.delete(f"/api/keys/{key['id']}")).is_success
    rig.clock.advance(3600)
    await schedules.start_due(rig.database, rig.plans)
    assert (await blue.get("/api/schedules/hourly")).json()["paused_at"] is not None
    assert (await http.post("/api/schedules/hourly/resume")).is_success
    rig.clock.advance(3600)
    await schedules.start_due(rig.database, rig.plans)
    shown = (await blue.get("/api/schedules/hourly")).json()
    assert shown["paused_at"] is None
    [run] = (await blue.get("/api/runs")).json()["items"]
    assert (run["id"], run["workspace_id"]) == (shown["last_run_id"], "blue")
