"""Recovery as seen from outside: heartbeats, orphans, checkpoints, and where a run resumes."""

import asyncio
from typing import Any

import pytest
import structlog
from tests.rig import Hold, Rig

from interlock import Context
from interlock.lifecycle import StepState
from interlock.telemetry import detail
from interlock.worker.worker import Worker


async def killed_inside(rig: Rig, hold: Hold) -> None:
    """Run a worker that dies in the middle of a step, and the sweep that notices."""
    task = asyncio.create_task(Worker(rig.database, rig.settings, tools=rig.tools).run(asyncio.Event()))
    await hold.inside()
    task.cancel()
    await asyncio.wait([task])
    rig.clock.advance(60)
    await rig.sweep()


async def test_a_runs_heartbeat_is_that_of_the_worker_that_holds_it(rig: Rig) -> None:
    hold = Hold()

    @rig.tool("t.hold")
    async def stay() -> None:
        await hold()

    await rig.apply("{name: w, steps: [{id: a, tool: t.hold}]}")
    run_id = await rig.start("w")
    http = rig.http()
    assert (await http.get(f"/api/runs/{run_id}")).json()["last_heartbeat_at"] is None
    async with rig.worker():
        await hold.inside()
        [worker] = await rig.sql("SELECT heartbeat_at FROM interlock.worker")
        for seen in ((await http.get(f"/api/runs/{run_id}")).json(), (await http.get("/api/runs")).json()["items"][0]):
            assert seen["last_heartbeat_at"] == worker["heartbeat_at"].isoformat()
        canceled = await http.post(f"/api/runs/{run_id}/cancel")
        assert canceled.json()["last_heartbeat_at"] is not None
        await rig.until(run_id)
    assert (await http.get(f"/api/runs/{run_id}")).json()["last_heartbeat_at"] is None


async def test_an_orphan_is_told_of_counted_and_taken_up_again(rig: Rig) -> None:
    hold = Hold()
    done: list[str] = []

    @rig.tool("t.first")
    async def first() -> str:
        done.append("first")
        return "kept"

    @rig.tool("t.hold")
    async def stay() -> None:
        await hold()

    await rig.apply("{name: w, steps: [{id: a, tool: t.first}, {id: b, tool: t.hold}]}")
    run_id = await rig.start("w")
    with structlog.testing.capture_logs() as logs:
        await killed_inside(rig, hold)
    [told] = [line for line in logs if line["event"] == "orphan_detected"]
    assert (told["run_id"], told["resume_count"]) == (str(run_id), 1)
    assert {"worker", "last_heartbeat"} <= told.keys()
    seen = (await rig.http().get(f"/api/runs/{run_id}/events")).json()["items"]
    [event] = [e for e in seen if e["type"] == "orphan_detected"]
    assert event["data"]["last_heartbeat"] and event["data"]["worker"] == told["worker"]
    hold.release.set()
    run = await rig.work_until(run_id)
    assert (run["status"], run["resume_count"], done) == ("succeeded", 1, ["first"])


async def test_a_step_says_whether_it_would_be_done_again(rig: Rig) -> None:
    @rig.tool("t.read")
    async def read(ctx: Context) -> None:
        ctx.cost(0.1, model="m", input_tokens=12, output_tokens=3)
        ctx.cost(0.1, model="m", input_tokens=1)

    @rig.tool("t.safe", writes=True, risk="low", idempotent=True)
    async def safe() -> None: ...

    @rig.tool("t.once", writes=True, risk="low")
    async def once() -> None: ...

    await rig.apply(
        "{name: w, steps: [{id: a, tool: t.read}, {id: b, tool: t.safe}, {id: c, tool: t.once}, {id: d, approval: {}},"
        " {id: e, tool: t.read}]}"
    )
    run = await rig.work_until(await rig.start("w"), "waiting_approval")
    step: dict[str, Any] = run["step"]
    assert {key: (s["resumable"], s["idempotent"]) for key, s in step.items()} == {
        "a": (True, True), "b": (True, True), "c": (True, False), "d": (False, True), "e": (False, None),
    }  # fmt: skip
    assert (step["a"]["tokens"], step["b"]["tokens"]) == ({"input": 13, "output": 3}, None)
    assert step["a"]["duration_ms"] >= 0 and step["e"]["duration_ms"] is None
    events = (await rig.http().get(f"/api/runs/{run['id']}/events")).json()["items"]
    assert [e["data"]["step_key"] for e in events if e["data"].get("resumable")] == ["a", "b", "c"]


@pytest.mark.parametrize("answer", ["rejected", "expired"])
async def test_what_nobody_could_resume_says_so_with_its_code(rig: Rig, answer: str) -> None:
    hold = Hold()

    @rig.tool("t.once", writes=True, risk="low")
    async def once() -> None:
        await hold()

    await rig.apply("{name: w, steps: [{id: a, tool: t.once}]}")
    run_id = await rig.start("w")
    await killed_inside(rig, hold)
    await rig.work_until(run_id, "waiting_approval")
    if answer == "rejected":
        await rig.decide(run_id, approves=False, who=await rig.person("ann", "approver"))
    else:
        rig.clock.advance(31 * 86400)
        await rig.sweep()
    run = await rig.run(run_id)
    reason = {"rejected": "resume_failed", "expired": "approval_expired"}[answer]
    assert (run["status"], run["reason"], run["error"]["code"]) == ("failed", reason, "RUN_RESUME_FAILED")
    found_out = {"rejected": "nobody could find out", "expired": "nobody found out in time"}[answer]
    assert run["error"]["message"] == f"{found_out} whether the interrupted effect happened"


async def test_at_level_debug_every_transition_and_checkpoint_is_logged(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    @rig.tool("t.read")
    async def read() -> None: ...

    monkeypatch.setattr(detail, "wanted", True)
    await rig.apply("{name: w, steps: [{id: a, tool: t.read}]}")
    with structlog.testing.capture_logs() as logs:
        run_id = await rig.start("w")
        await rig.work_until(run_id)
    told = {line["event"]: line for line in logs if line.get("run_id") == str(run_id)}
    assert told["run_created"]["workflow"] == "w"
    assert (told["run_checkpoint"]["step"], told["run_checkpoint"]["resumable"]) == ("a", True)
    assert (told["run_transition"]["from_state"], told["run_transition"]["to_state"]) == ("running", "succeeded")
    assert told["run_completed"]["status"] == StepState.SUCCEEDED and told["run_completed"]["duration_ms"] >= 0


async def test_a_lane_whose_worker_was_lost_has_no_credit_for_having_slept(rig: Rig) -> None:
    await rig.apply("{name: w, steps: [{id: a, tool: t.none}]}")
    other = await rig.tenant("busy")
    await rig.apply("{name: w, steps: [{id: a, tool: t.none}]}", other)
    await rig.start("w")
    await rig.claim_by_hand()
    await rig.sql("UPDATE interlock.queue SET has_work = false WHERE tenant_id = $1", rig.admin.tenant_id)
    await rig.start("w", who=other)
    await rig.sql("UPDATE interlock.queue SET virtual_time = 1000 WHERE tenant_id = $1", other.tenant_id)
    rig.clock.advance(60)
    await rig.sweep()
    assert [
        row["virtual_time"] for row in await rig.sql("SELECT virtual_time FROM interlock.queue WHERE has_work")
    ] == [
        1000,
        1000,
    ]
