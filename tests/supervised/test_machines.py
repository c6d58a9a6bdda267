"""All pairs of states and commands: the pairs in the tables succeed; all others are rejected and change nothing."""

import itertools
import socket
from typing import Any
from uuid import UUID

import pytest

from interlock.engine.queueing import jobs, leases, workers
from interlock.errors import InvalidTransition
from interlock.ids import uuid7
from interlock.lifecycle import JOB, WORKER, JobEvent, JobState, WorkerEvent, WorkerState
from interlock.telemetry import metrics
from tests.lifecycle import expected
from tests.rig import Rig

WORKER_TABLE = {(source, event): target for source, event, target in expected.TABLES["worker"]}
JOB_TABLE = {(source, event): target for source, event, target in expected.TABLES["job"]}


def refusals(machine: str, state: str, event: str) -> float:
    return metrics.refused.labels(machine, state, event)._value.get()


async def a_worker(rig: Rig, state: str) -> UUID:
    """Return a worker that reached this state through the table."""
    me = await leases.register(rig.database, capacity=1, lease_seconds=30)
    ways: dict[str, list[WorkerEvent]] = {
        "idle": [],
        "running": [WorkerEvent.START],
        "paused": [WorkerEvent.START, WorkerEvent.PAUSE],
        "completed": [WorkerEvent.START, WorkerEvent.COMPLETE],
        "failed": [WorkerEvent.START, WorkerEvent.FAIL],
        "terminated": [WorkerEvent.TERMINATE],
    }
    for event in ways[state]:
        await order(rig, me.id, event)
    return me.id


async def order(rig: Rig, worker_id: UUID, event: WorkerEvent) -> Any:
    return await rig.database.run_in_transaction(lambda tx: workers.order(tx, "test", worker_id, event, "why"))


async def test_of_all_pairs_of_worker_states_and_events_exactly_those_in_the_table_pass(rig: Rig) -> None:
    for state, event in itertools.product(WorkerState, WorkerEvent):
        worker_id = await a_worker(rig, state)
        before = await rig.sql("SELECT * FROM interlock.worker WHERE id = $1", worker_id)
        counted = refusals("worker", state, event)
        if (state, event) in WORKER_TABLE:
            assert (await order(rig, worker_id, event))["status"] == WORKER_TABLE[state, event]
            continue
        with pytest.raises(InvalidTransition) as refused:
            await order(rig, worker_id, event)
        assert refused.value.fields["state"] == state
        assert set(refused.value.fields["allowed"]) == {e for s, e in WORKER_TABLE if s == state}
        assert set(refused.value.fields["allowed_states"]) == {t for (s, _), t in WORKER_TABLE.items() if s == state}
        assert refused.value.fields["asked_state"] in {t for (_, e), t in WORKER_TABLE.items() if e == event}
        assert refusals("worker", state, event) == counted + 1
        assert await rig.sql("SELECT * FROM interlock.worker WHERE id = $1", worker_id) == before


async def test_of_all_pairs_of_worker_states_and_calls_exactly_those_in_the_table_pass(rig: Rig) -> None:
    http = rig.http()
    await supervisor(rig)
    calls = {"start": "/api/workers/{}/start"} | {
        verb: f"/api/supervisor/workers/{{}}/{verb}" for verb in ("pause", "resume", "terminate")
    }
    for state, (event, path) in itertools.product(WorkerState, calls.items()):
        worker_id = await a_worker(rig, state)
        answer = await http.post(path.format(worker_id), json={"reason": "because"})
        if (state, event) in WORKER_TABLE:
            assert (answer.status_code, answer.json()["status"]) == (200, WORKER_TABLE[state, event]), answer.text
            last = answer.json()["state_history"][-1]
            assert (last["from_state"], last["event"], last["to_state"]) == (state, event, WORKER_TABLE[state, event])
            assert last["reason"] == "because"
        else:
            terminal = state in WORKER.terminal
            code = "WORKER_TERMINAL_STATE" if terminal else "WORKER_INVALID_TRANSITION"
            assert (answer.status_code, answer.json()["code"]) == (409, code), (state, event, answer.text)
            assert answer.json()["state"] == state
            assert set(answer.json()["allowed"]) == {e for s, e in WORKER_TABLE if s == state}


async def supervisor(rig: Rig) -> None:
    await rig.database.fetch("register_supervisor", uuid7(), socket.gethostname(), 1, 0, 3600.0, "/logs")


async def a_job(rig: Rig, state: str) -> Any:
    new = jobs.JobRequest(uuid7(), "t", "w", [{}])
    row = await rig.database.row(
        "insert_job", new.id, rig.admin.tenant_id, None, None, 0, "t", "w", 1, "[{}]", 1, 1,
        rig.admin.actor, rig.admin.facts, None,
    )  # fmt: skip
    ways: dict[str, list[JobEvent]] = {
        "submitted": [],
        "pending": [JobEvent.VALIDATE],
        "running": [JobEvent.VALIDATE, JobEvent.ALLOCATE],
        "completed": [JobEvent.VALIDATE, JobEvent.ALLOCATE, JobEvent.SUCCEED],
        "failed": [JobEvent.FAIL],
        "canceled": [JobEvent.CANCEL],
    }
    for event in ways[state]:
        row = await move(rig, row, event)
    return row


async def move(rig: Rig, row: Any, event: JobEvent) -> Any:
    return await rig.database.run_in_transaction(lambda tx: jobs._move(tx, row, event, "test", None))


async def test_of_all_pairs_of_job_states_and_events_exactly_those_in_the_table_pass(rig: Rig) -> None:
    for state, event in itertools.product(JobState, JobEvent):
        row = await a_job(rig, state)
        if (state, event) in JOB_TABLE:
            assert (await move(rig, row, event))["status"] == JOB_TABLE[state, event]
        else:
            with pytest.raises(InvalidTransition):
                await move(rig, row, event)


async def test_canceling_a_job_passes_in_exactly_the_states_of_the_table(rig: Rig) -> None:
    http = rig.http()
    for state in JobState:
        job_id = (await a_job(rig, state))["id"]
        counted = refusals("job", state, "cancel")
        answer = await http.post(f"/api/jobs/{job_id}/cancel", json={"reason": "enough"})
        if (state, "cancel") in JOB_TABLE:
            assert (answer.status_code, answer.json()["status"]) == (200, "canceled")
            assert answer.json()["state_history"][-1]["reason"] == "enough"
        elif state == JobState.CANCELED:  # as for a run: it is canceled already
            assert (answer.status_code, answer.json()["status"]) == (200, "canceled")
        else:
            assert state in JOB.terminal
            assert (answer.status_code, answer.json()["code"]) == (409, "JOB_TERMINAL_STATE")
            assert (answer.json()["state"], answer.json()["asked_state"]) == (state, "canceled")
            assert answer.json()["allowed"] == []
            assert refusals("job", state, "cancel") == counted + 1


async def test_every_transition_has_a_line_of_history_with_who_why_and_when(rig: Rig) -> None:
    worker_id = await a_worker(rig, "paused")
    rows = await rig.sql("SELECT * FROM interlock.resource_event WHERE subject_id = $1 ORDER BY seq", worker_id)
    assert [(r["from_state"], r["event"], r["to_state"]) for r in rows] == [
        (None, "create", "idle"), ("idle", "start", "running"), ("running", "pause", "paused"),
    ]  # fmt: skip
    assert [r["seq"] for r in rows] == [1, 2, 3]
    assert (rows[-1]["actor"], rows[-1]["reason"]) == ("test", "why")
    taken = metrics.state_seconds["worker"].labels("paused")._sum.get()
    rig.clock.advance(100)
    await order(rig, worker_id, WorkerEvent.RESUME)
    assert metrics.state_seconds["worker"].labels("paused")._sum.get() - taken == pytest.approx(100, abs=2)
