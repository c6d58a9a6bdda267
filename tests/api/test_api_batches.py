"""POST /api/runs/batch: one run per input, all or none, exactly once."""

import asyncio
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx2
import pytest
from tests.rig import Rig

from interlock.testing import ManualClock
from interlock.wire import Page, Run

ECHO = "{name: echo, steps: [{id: a, tool: t.echo, input: {value: '${input.x}'}}]}"
GATE = "{name: gate, steps: [{id: ask, approval: {}}, {id: a, tool: t.echo, input: {value: 1}}]}"


@pytest.fixture
async def http(rig: Rig) -> httpx2.AsyncClient:
    for source in (ECHO, GATE):
        await rig.apply(source)

    @rig.tool("t.echo")
    async def echo(value: Any) -> Any:
        return value

    return rig.http()


async def batch(http: httpx2.AsyncClient, workflow: str, inputs: list[Any], **body: Any) -> list[Run]:
    answer = await http.post("/api/runs/batch", json={"workflow": workflow, "inputs": inputs, **body})
    assert answer.status_code == 201, answer.text
    return list(Page[Run].model_validate(answer.json()).items)


async def how_many(rig: Rig) -> int:
    return int((await rig.sql("SELECT count(*) FROM interlock.run"))[0][0])


async def test_each_input_is_a_run_and_they_are_answered_in_order(rig: Rig, http: httpx2.AsyncClient) -> None:
    inputs = [{"x": n} for n in range(120)]
    runs = await batch(http, "echo", inputs, trigger={"source": "cli", "ref": "import"}, deadline_seconds=60)
    assert [run.input for run in runs] == inputs
    assert {(run.status, run.workflow_version, run.trigger.ref) for run in runs} == {("pending", 1, "import")}
    async with rig.worker():
        for run in runs:
            assert (await rig.until(UUID(run.id)))["result"] == run.input["x"]


async def test_an_accepted_run_looks_as_it_does_in_the_list(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/api/runs/batch", json={"workflow": "echo", "inputs": [{"x": 1}, {}]})
    listed = (await http.get("/api/runs")).json()
    assert answer.json()["items"] == listed["items"][::-1]


async def test_what_begins_with_a_gate_is_opened_by_a_worker(rig: Rig, http: httpx2.AsyncClient) -> None:
    runs = await batch(http, "gate", [{}, {}])
    async with rig.worker():
        for run in runs:
            await rig.until(UUID(run.id), "waiting_approval")


async def test_the_same_key_is_the_same_batch_also_many_times_at_once(rig: Rig, http: httpx2.AsyncClient) -> None:
    body = {"workflow": "echo", "inputs": [{"x": 1}, {"x": 2}]}
    headers = {"Idempotency-Key": "import-1"}
    answers = await asyncio.gather(*[http.post("/api/runs/batch", json=body, headers=headers) for _ in range(20)])
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert await how_many(rig) == 2
    other = await http.post("/api/runs/batch", json=body | {"inputs": [{"x": 1}]}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")
    for run in answers[0].json()["items"]:
        assert run["trigger"]["idempotency_key"].endswith(":import-1")


async def test_over_the_cap_they_wait_for_later_minutes_or_none_is_begun(rig: Rig, clock: ManualClock) -> None:
    clock.fixed = datetime(2031, 5, 1, 12, 0, 30, tzinfo=UTC)
    who = await rig.tenant("acme", max_runs_per_min=3)
    await rig.apply(ECHO, who)
    http = rig.http(await rig.key("op", "operator", tenant_id=who.tenant_id))
    body = {"workflow": "echo", "inputs": [{}] * 4}
    refused = await http.post("/api/runs/batch?over_cap=refuse", json=body)
    assert (refused.status_code, refused.json()["code"], await how_many(rig)) == (429, "RATE_LIMITED", 0)
    assert len(await batch(http, "echo", [{}] * 4)) == 4
    waits = [row["resume_at"] for row in await rig.sql("SELECT resume_at FROM interlock.run ORDER BY id")]
    assert waits == [None, None, None, datetime(2031, 5, 1, 12, 1, tzinfo=UTC)]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"workflow": "echo", "inputs": []}, 422, "it must not be empty"),
        ({"workflow": "echo", "inputs": [{}] * 1001}, 422, "at most 1000 items"),
        ({"workflow": "echo", "inputs": [{}, 7]}, 422, "inputs.1"),
        ({"workflow": "echo", "inputs": {"x": 1}}, 422, "inputs"),
        ({"workflow": "echo"}, 422, "inputs"),
        ({"workflow": "echo", "input": {}, "inputs": [{}]}, 422, "input"),
        ({"workflow": "eco", "inputs": [{}]}, 404, "eco"),
        ({"workflow": "echo", "version": 9, "inputs": [{}]}, 404, "9"),
    ],
)
async def test_a_batch_that_cannot_be_is_refused_whole(
    rig: Rig, http: httpx2.AsyncClient, body: dict[str, Any], status: int, says: str
) -> None:
    answer = await http.post("/api/runs/batch", json=body)
    assert (answer.status_code, await how_many(rig)) == (status, 0)
    assert says in answer.text


async def test_one_that_cannot_be_kept_keeps_the_others_from_starting(rig: Rig, http: httpx2.AsyncClient) -> None:
    answer = await http.post("/api/runs/batch", json={"workflow": "echo", "inputs": [{"x": 1}, {"x": "\u0000"}]})
    assert (answer.status_code, await how_many(rig)) == (422, 0)


@pytest.mark.parametrize("role", ["viewer", "approver"])
async def test_it_takes_a_key_that_may_start_runs(rig: Rig, http: httpx2.AsyncClient, role: str) -> None:
    reader = rig.http(await rig.key("r", role))
    answer = await reader.post("/api/runs/batch", json={"workflow": "echo", "inputs": [{}]})
    assert (answer.status_code, await how_many(rig)) == (403, 0)


async def test_they_belong_to_the_keys_workspace_and_to_its_tenant(rig: Rig, http: httpx2.AsyncClient) -> None:
    made = (await http.post("/api/keys", json={"name": "w", "role": "operator", "workspace_id": "lab"})).json()
    (run,) = await batch(rig.http(made["key"]), "echo", [{}])
    assert run.workspace_id == "lab"
    stranger = rig.http(await rig.key("s", "admin", tenant_id=(await rig.tenant("other")).tenant_id))
    assert (await stranger.get(f"/api/runs/{run.id}")).status_code == 404
    assert (await stranger.post("/api/runs/batch", json={"workflow": "echo", "inputs": [{}]})).status_code == 404
