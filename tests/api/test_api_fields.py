"""Fields that the five documents name: of runs, steps, workers and idempotency records.

Findings: the rows "missing" of the specification review, DEV-8, and the remark on reserved trigger sources.
"""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import httpx2
import pytest
import structlog
from tests.rig import Rig

from interlock import Secret
from interlock.flows import FlowContext
from interlock.wire import RESERVED_SOURCES, Run, WorkerView

PAY = """
name: pay
steps:
  - {id: find, tool: t.find, input: {charge: "${input.charge}"}}
  - id: pay
    tool: t.pay
    input: {charge: "${steps.find.output.charge}", pin: "${input.pin}", token: "${secrets.shop}"}
  - {id: ask, approval: {}}
  - {id: tell, tool: t.find, input: {charge: "${steps.pay.output}"}}
"""


@pytest.fixture
async def http(rig: Rig) -> httpx2.AsyncClient:
    @rig.tool("t.find")
    async def find(charge: str) -> Any:
        return {"charge": charge}

    @rig.tool("t.pay", writes=True, risk="low")
    async def pay(charge: str, pin: Annotated[str, Secret], token: str) -> str:
        return charge

    await rig.apply(PAY)
    http = rig.http()
    answer = await http.put("/api/secrets/shop", json={"value": "s3cr3t-value", "tools": ["*"]})
    assert answer.is_success, answer.text
    return http


async def start(http: httpx2.AsyncClient, workflow: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
    answer = await http.post("/api/runs", json={"workflow": workflow, **body}, headers=headers)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def get(http: httpx2.AsyncClient, run: Any) -> Run:
    return Run.model_validate((await http.get(f"/api/runs/{run['id']}")).json())


# ---------------------------------------------------------------- runs


async def test_a_run_says_when_it_changed_and_which_step_is_next(rig: Rig, http: httpx2.AsyncClient) -> None:
    made = await start(http, "pay", input={"charge": "ch_1", "pin": "9876"})
    assert (made["schema_version"], made["current_step"]) == (1, "find")
    assert made["updated_at"] == made["created_at"]
    await rig.work_until(UUID(made["id"]), "waiting_approval")
    run = await get(http, made)
    last = (await http.get(f"/api/runs/{made['id']}/events")).json()["items"][-1]
    assert (run.current_step, run.updated_at) == ("ask", datetime.fromisoformat(last["at"]))
    [listed] = (await http.get("/api/runs")).json()["items"]
    assert datetime.fromisoformat(listed["updated_at"]) == run.updated_at > run.created_at
    await http.post(f"/api/runs/{made['id']}/cancel")
    ended = await get(http, made)
    assert (ended.current_step, ended.updated_at) == (None, ended.completed_at)


async def test_a_step_shows_its_input_without_what_is_secret(rig: Rig, http: httpx2.AsyncClient) -> None:
    made = await start(http, "pay", input={"charge": "ch_1", "pin": "9876"})
    assert [step["input"] for step in made["steps"]] == [None] * 4
    await rig.work_until(UUID(made["id"]), "waiting_approval")
    shown = (await http.get(f"/api/runs/{made['id']}")).json()["steps"]
    assert [step["input"] for step in shown] == [
        {"charge": "ch_1"}, {"charge": "ch_1", "pin": "[secret]", "token": "${secrets.shop}"}, None, None,
    ]  # fmt: skip


async def test_a_run_of_a_session_and_a_child_have_an_idempotency_key(rig: Rig, http: httpx2.AsyncClient) -> None:
    @rig.flow("parent")
    async def parent(ctx: FlowContext) -> Any:
        return await ctx.child("pay", {"charge": "ch_1", "pin": "1"})

    headers = {"Idempotency-Key": "m1"}
    with structlog.testing.capture_logs() as logs:
        hello = await http.post("/api/messages", json={"content": "hello"}, headers=headers)
        said = hello.json()
        body = {"content": "again", "session_id": said["session_id"], "queue": True}
        await http.post("/api/messages", json=body, headers={"Idempotency-Key": "m2"})
        await rig.work_until(UUID(said["run_id"]))
        await rig.sweep()
        made = await start(http, "parent")
        await rig.work_until(UUID(made["id"]), "waiting_external")
        [child] = (await http.get("/api/runs", params={"parent_run_id": made["id"]})).json()["items"]
    runs = (await http.get("/api/runs", params={"session_id": said["session_id"]})).json()["items"]
    of_messages = [f"api:{rig.admin.key_id}:{key}" for key in ("m2", "m1")]
    assert [run["idempotency_key"] for run in runs] == of_messages
    assert child["idempotency_key"] == f"run:{made['id']}:pay"
    told = {line["run_id"]: line for line in logs if line["event"] == "run_created"}
    for run in (*runs, child):
        line = told[run["id"]]
        assert (line["idempotency_key"], line["tenant"]) == (run["idempotency_key"], "default")


@pytest.mark.parametrize("source", sorted(RESERVED_SOURCES))
async def test_nobody_can_say_that_a_sender_started_their_run(http: httpx2.AsyncClient, source: str) -> None:
    """A retry of a run from source `reversal` would have counted as undoing the receipt that its `ref` names."""
    body = {"workflow": "pay", "trigger": {"source": source, "ref": "x"}}
    answer = await http.post("/api/runs", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST")
    assert "reserved" in answer.text


async def test_runs_are_found_by_the_repository_that_they_are_about(rig: Rig, http: httpx2.AsyncClient) -> None:
    about = {"repository": "acme/shop", "pull_request": "https://example.test/acme/shop/pull/7"}
    trigger = {"source": "github", "ref": "d1", "metadata": about}
    wanted = await rig.start("pay", {"charge": "c", "pin": "1"}, trigger=trigger)
    await rig.start("pay", {"charge": "c", "pin": "1"})
    [found] = (await http.get("/api/runs", params={"repository": "acme/shop"})).json()["items"]
    assert (found["id"], found["repository"], found["pull_request"]) == (str(wanted), *about.values())
    assert (await http.get("/api/runs", params={"repository": "acme/other"})).json()["items"] == []


# ---------------------------------------------------------------- workers


async def test_a_worker_keeps_what_is_said_of_it_and_when_it_changed(rig: Rig, http: httpx2.AsyncClient) -> None:
    rig.clock.freeze()
    body = {"name": "w", "metadata": {"rack": "b4", "cost_center": 7}}
    made = WorkerView.model_validate((await http.post("/api/workers", json=body)).json())
    assert (made.metadata, made.updated_at) == (body["metadata"], made.started_at)
    rig.clock.advance(5)
    await http.post(f"/api/supervisor/workers/{made.id}/terminate")
    after = WorkerView.model_validate((await http.get(f"/api/workers/{made.id}")).json())
    assert (after.metadata, after.updated_at) == (body["metadata"], after.stopped_at)
    [listed] = (await http.get("/api/workers", params={"all": True})).json()["items"]
    assert datetime.fromisoformat(listed["updated_at"]) == after.updated_at
    other = rig.http(await rig.key("o", "operator", (await rig.tenant("acme")).tenant_id))
    assert (await other.get(f"/api/workers/{made.id}")).json()["metadata"] == {}


# ---------------------------------------------------------------- records


async def test_an_idempotency_record_says_when_it_was_tried_last(rig: Rig, http: httpx2.AsyncClient) -> None:
    rig.clock.freeze()
    await start(http, "pay", headers={"Idempotency-Key": "k1"}, input={"charge": "c", "pin": "1"})
    [record] = await rig.sql("SELECT * FROM interlock.idempotency_record")
    assert record["updated_at"] == record["created_at"] == rig.clock()


async def test_history_is_indexed_by_time(rig: Rig) -> None:
    found = await rig.sql("SELECT indexdef FROM pg_indexes WHERE tablename = 'resource_event'")
    assert any("(machine, at)" in row["indexdef"] for row in found)
