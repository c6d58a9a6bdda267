"""All tenants share workers, but not every role may read a worker's host and logs."""

from uuid import UUID

from interlock.engine.queueing import jobs, workers
from interlock.lifecycle import WorkerEvent
from interlock.wire import Role
from tests.rig import Rig
from tests.supervised.conftest import Shop


async def test_other_tenants_see_that_a_worker_is_there_and_no_more(shop: Shop, rig: Rig) -> None:
    worker = await shop.worker()
    other = await rig.tenant("other")
    stranger = rig.http(await rig.key("stranger", Role.ADMIN, other.tenant_id))
    await workers.report(rig.database, worker.me.id, WorkerEvent.FAIL, "system:test", "last words: password=hunter2")
    own = (await rig.http().get(f"/api/workers/{worker.me.id}")).json()
    assert own["reason"] == "last words: password=hunter2" and own["host"]
    for answer in (await stranger.get("/api/workers"), await stranger.get(f"/api/workers/{worker.me.id}")):
        assert answer.status_code == 200
        assert "hunter2" not in answer.text and f'"{own["host"]}"' not in answer.text
    shown = (await stranger.get(f"/api/workers/{worker.me.id}")).json()
    assert [shown[name] for name in ("host", "pid", "reason", "job_id", "supervisor_id", "log")] == [None] * 6
    assert {change["by"] for change in shown["state_history"]} == {"system"}
    assert (await stranger.get("/api/supervisor")).status_code == 403
    assert (await stranger.get(f"/api/workers/{worker.me.id}/events")).status_code == 403


async def test_a_reservation_stands_in_the_events_of_worker_and_job(shop: Shop, rig: Rig) -> None:
    worker = await shop.worker()
    job = (await rig.http().post("/api/jobs", json={"task_description": "all", "workflow": "two"})).json()
    await jobs.tend(rig.database, rig.plans)
    events = (await rig.http().get(f"/api/workers/{worker.me.id}/events")).json()["items"]
    [reserved] = [event for event in events if event["type"] == "worker_reserved"]
    assert reserved["data"]["job_id"] == job["id"]
    told = (await rig.http().get(f"/api/jobs/{job['id']}/events")).json()["items"]
    assert [e["data"]["workers"] for e in told if e["type"] == "job_workers"] == [[str(worker.me.id)]]
    await rig.http().post(f"/api/jobs/{job['id']}/cancel")
    events = (await rig.http().get(f"/api/workers/{worker.me.id}/events")).json()["items"]
    assert UUID(events[-1]["data"]["job_id"]) == UUID(job["id"]) and events[-1]["type"] == "worker_released"
