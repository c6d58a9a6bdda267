"""Workers that are killed, stopped, drained or poisoned: every run still succeeds, and each step settles once."""

import asyncio
import os
import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from interlock.engine.queueing.leases import WorkerIdentity, claim, move_worker, reclaim_lost, register
from interlock.engine.queueing.sweeps import recount_queues
from interlock.engine.writing.change import RunChange
from interlock.engine.writing.commit import CommitResult, commit, result_of_earlier
from interlock.journal import Entry
from interlock.lifecycle import WorkerEvent
from interlock.store import sql
from interlock.store.pool import Tx
from interlock.store.records import ClaimedRun
from interlock.tools import Context
from interlock.worker.run_driver import Driver
from tests.chaos.oracles import assert_done_again_only_after_a_loss, assert_sound, interrupted
from tests.chaos.processes import (
    LEASE_SECONDS,
    Yard,
    ask,
    journal,
    orphans,
    start_runs,
    steps_of,
    until,
    until_all_ended,
    worker_of,
    workers_of,
    workflow,
)
from tests.rig import Rig, written_row


async def assert_nothing_was_lost(rig: Rig, yard: Yard, runs: int, steps: int, *, late: bool = False) -> None:
    entries = await journal(rig)
    assert_sound(entries, steps_of(steps), runs)
    assert_done_again_only_after_a_loss(yard.executions(), entries, late=late)
    await assert_lanes_are_free(rig)


async def assert_lanes_are_free(rig: Rig) -> None:
    assert [
        tuple(row) for row in await ask(rig, "SELECT tenant_id, in_flight FROM interlock.queue WHERE in_flight <> 0")
    ] == []
    assert await ask(rig, "SELECT run_id FROM interlock.ready_run") == []
    assert await recount_queues(rig.database) == 0


# ---------------------------------------------------------------- killed


async def kill_while_working(rig: Rig, yard: Yard, kills: list[int], runs: int, ms: float) -> list[WorkerIdentity]:
    """Run two workers. Kill and replace one of them each time this many steps have started."""
    await rig.apply(workflow("five", 5))
    at_work = [yard.worker(concurrency=10), yard.worker(concurrency=10)]
    names = {process.pid: await worker_of(rig, process) for process in at_work}
    await start_runs(rig, "five", runs, {"ms": ms})
    killed: list[WorkerIdentity] = []
    for number in kills:
        await yard.until_begun(number)
        victim = at_work.pop(0)
        me = names.get(victim.pid) or await worker_of(rig, victim)
        await _until_it_holds_something(rig, me)
        victim.kill()
        killed.append(me)
        at_work.append(yard.worker(concurrency=10))
    return killed


async def _until_it_holds_something(rig: Rig, me: WorkerIdentity) -> None:
    async def holds() -> list[Any]:
        return await rig.sql("SELECT id FROM interlock.run WHERE lease_worker = $1 LIMIT 1", me.id)

    await until(holds, f"{me.name} holds a run", pause=0.005)


async def test_every_run_succeeds_though_workers_are_killed_in_the_middle_of_steps(rig: Rig, yard: Yard) -> None:
    killed = await kill_while_working(rig, yard, [60, 300, 600], runs=200, ms=12)
    await until_all_ended(rig, 200, seconds=30)

    assert interrupted(yard.executions()), "no kill fell into a step; the test showed nothing"
    await assert_nothing_was_lost(rig, yard, runs=200, steps=5)
    assert await orphans(rig) > 0
    states = await ask(rig, "SELECT status FROM interlock.worker WHERE id = ANY($1)", [me.id for me in killed])
    assert {row["status"] for row in states} == {"terminated"}


@pytest.mark.chaos
async def test_every_run_succeeds_through_a_minute_of_kills(rig: Rig, yard: Yard) -> None:
    seed = int(os.environ.get("CHAOS_SEED", time.time()))
    print(f"CHAOS_SEED={seed}")
    rng = random.Random(seed)
    kills = sorted(rng.sample(range(200, 9000), 12))
    await kill_while_working(rig, yard, kills, runs=2000, ms=40)
    await until_all_ended(rig, 2000, seconds=180)
    await assert_nothing_was_lost(rig, yard, runs=2000, steps=5)


async def test_an_append_with_a_dead_workers_token_is_refused(rig: Rig, yard: Yard) -> None:
    await rig.apply(workflow("slow", 2))
    victim = yard.worker(concurrency=5)
    dead = await worker_of(rig, victim)
    await start_runs(rig, "slow", 3, {"ms": 600})
    await yard.until_begun(3)
    leases = await sql.leases_of(rig.database, worker_id=dead.id)
    assert len(leases) == 3
    victim.kill()

    heir = await worker_of(rig, yard.worker(concurrency=5))
    await until(lambda: _held_by(rig, heir, 3), "the runs have a new holder", LEASE_SECONDS + 10)
    before = await journal(rig)
    for row in leases:
        seq = next(e["seq"] for e in reversed(before) if e["run_id"] == row.id)
        for writer in (dead, heir):  # the token decides, not only the worker id
            assert not (await _commit_by_hand(rig, writer, row, row.lease_token, seq + 1)).kept
        assert not (await _commit_by_hand(rig, dead, row, row.lease_token + 1, seq + 1)).kept
    after = await journal(rig)
    assert [e for e in after if e["data"] and "by hand" in str(e["data"])] == []

    await until_all_ended(rig, 3, seconds=15)
    await assert_nothing_was_lost(rig, yard, runs=3, steps=2)


async def test_a_commit_by_hand_with_the_right_token_is_kept(rig: Rig, yard: Yard) -> None:
    """The rejections above have no other cause."""
    await rig.apply(workflow("slow", 2))
    holder = await worker_of(rig, yard.worker(concurrency=5))
    await start_runs(rig, "slow", 1, {"ms": 5000})
    await yard.until_begun(1)
    [row] = await sql.leases_of(rig.database, worker_id=holder.id)
    answer = await _commit_by_hand(rig, holder, row, row.lease_token, row.seq + 20)
    assert answer.kept


async def _held_by(rig: Rig, me: WorkerIdentity, number: int) -> bool:
    return len(await rig.sql("SELECT id FROM interlock.run WHERE lease_worker = $1", me.id)) == number


async def _commit_by_hand(rig: Rig, me: WorkerIdentity, run: ClaimedRun, token: int, seq: int) -> CommitResult:
    states = ("running", "succeed", "succeeded")
    entry = Entry(seq, "step_transition", me.actor, "s1", *states, attempt=1, data={"why": "by hand"})
    async with rig.database.transaction() as tx:
        return (await commit(tx, [RunChange(written_row(run, token), [entry])], me.id))[0]


async def test_a_worker_that_missed_an_answer_and_its_lease_does_not_go_on(rig: Rig) -> None:
    """After an outage the worker reads the outcome of its last write. Neither that write nor the entry about its
    loss, which has the same number and token, allows it to continue.
    """
    await rig.apply(workflow("slow", 2))
    await start_runs(rig, "slow", 2, {"ms": 1})
    me, (kept, lost) = await _claim_by_hand(rig)
    await _commit_by_hand(rig, me, kept, kept.lease_token, 3)
    assert await _was_written(rig, me, [kept]) == [True]
    assert await _was_written(rig, me, [lost]) is None

    await _lose(rig, me)
    assert await _was_written(rig, me, [kept, lost]) == [False, False]
    assert await _was_written(rig, me, [lost]) is None


async def test_a_worker_that_stood_still_between_claim_and_load_begins_nothing(rig: Rig) -> None:
    """Otherwise it would read the new holder's journal and run the step that the new holder is running."""
    begun = []

    @rig.tool("chaos.work")
    async def work(ctx: Context, ms: float) -> None:
        begun.append(ctx.run_id)

    await rig.apply(workflow("slow", 2))
    await start_runs(rig, "slow", 1, {"ms": 1})
    late, (first,) = await _claim_by_hand(rig)
    await _lose(rig, late)
    holder, (second,) = await _claim_by_hand(rig)
    assert (first.lease_token, second.lease_token) == (1, 2)
    await _commit_by_hand(rig, holder, second, 2, 4)
    async with rig.worker() as worker:
        await until(lambda: hasattr(worker, "flusher"), "the worker is there")
        for row, number in ((first, 0), (second, 1)):
            driver = Driver(worker, replace(row, is_new=False))
            driver.task = asyncio.create_task(driver.drive())
            await driver.task
            assert len(begun) == number


async def _claim_by_hand(rig: Rig) -> tuple[WorkerIdentity, list[ClaimedRun]]:
    me = await register(rig.database, capacity=2, lease_seconds=LEASE_SECONDS)
    await move_worker(rig.database, me.id, WorkerEvent.START)
    async with rig.database.transaction() as tx:
        return me, await claim(tx, me, 2) or []


async def _lose(rig: Rig, me: WorkerIdentity) -> None:
    await rig.sql("UPDATE interlock.worker SET heartbeat_at = now() - interval '1 hour' WHERE id = $1", me.id)
    assert await reclaim_lost(rig.database) > 0


async def _was_written(rig: Rig, me: WorkerIdentity, runs: list[ClaimedRun]) -> list[bool] | None:
    changes = [RunChange(written_row(run), [Entry(3, "step_transition", me.actor, "s1")]) for run in runs]
    async with rig.database.connection() as connection:
        results = await result_of_earlier(Tx(connection), changes, me.id)
    return results and [result.kept for result in results]


# ---------------------------------------------------------------- stopped and continued


@pytest.mark.chaos
async def test_a_worker_that_was_stopped_past_its_lease_changes_nothing_and_works_on(rig: Rig, yard: Yard) -> None:
    await rig.apply(workflow("slow", 2))
    stopped = yard.worker(concurrency=5)
    before = await worker_of(rig, stopped)
    await start_runs(rig, "slow", 5, {"ms": 400})
    await yard.until_begun(5)
    stopped.pause()
    other = yard.worker(concurrency=5)
    await worker_of(rig, other)
    await until_all_ended(rig, 5, seconds=20)
    entries = await journal(rig)
    begun = yard.count()

    stopped.go_on()
    lives = await workers_of(rig, stopped, 2)

    assert lives[0] == before and lives[1].id != before.id
    assert await journal(rig) == entries
    assert yard.count() == begun, "it went on with runs that were taken from it"
    await assert_nothing_was_lost(rig, yard, runs=5, steps=2)

    other.ask_to_end()
    assert await other.ended() == 0
    await start_runs(rig, "slow", 5, {"ms": 1})
    await until_all_ended(rig, 10, seconds=10)
    assert {line.pid for line in yard.executions()[-10:]} == {stopped.pid}
    await assert_nothing_was_lost(rig, yard, runs=10, steps=2)


@pytest.mark.chaos
async def test_workers_that_are_stopped_again_and_again_change_nothing(rig: Rig, yard: Yard) -> None:
    seed = int(os.environ.get("CHAOS_SEED", time.time()))
    print(f"CHAOS_SEED={seed}")
    rng = random.Random(seed)
    await rig.apply(workflow("five", 5))
    workers = [yard.worker(concurrency=20) for _ in range(3)]
    for worker in workers:
        await worker_of(rig, worker)
    await start_runs(rig, "five", 1000, {"ms": 150})
    for _ in range(8):
        victim = rng.choice(workers)
        victim.pause()
        time.sleep(rng.uniform(0.5, 2 * LEASE_SECONDS))  # noqa: ASYNC251 — shorter and longer than the lease
        victim.go_on()
        time.sleep(rng.uniform(0, 1))  # noqa: ASYNC251
    await until_all_ended(rig, 1000, seconds=180)
    assert all(worker.is_alive for worker in workers)
    await assert_nothing_was_lost(rig, yard, runs=1000, steps=5, late=True)


# ---------------------------------------------------------------- drained


@pytest.mark.chaos
async def test_a_drained_worker_leaves_nothing_to_reclaim(rig: Rig, yard: Yard) -> None:
    await rig.apply(workflow("five", 5))
    leaving, staying = yard.worker(concurrency=20), yard.worker(concurrency=20)
    me = await worker_of(rig, leaving)
    await worker_of(rig, staying)
    await start_runs(rig, "five", 200, {"ms": 30})
    await yard.until_begun(200)
    leaving.ask_to_end()

    assert await leaving.ended() == 0
    assert await rig.sql("SELECT id FROM interlock.run WHERE lease_worker = $1", me.id) == []
    assert [row["status"] for row in await rig.sql("SELECT status FROM interlock.worker WHERE id = $1", me.id)] == [
        "completed"
    ]
    await until_all_ended(rig, 200, seconds=20)
    assert await orphans(rig) == 0
    assert not interrupted(yard.executions())
    await assert_nothing_was_lost(rig, yard, runs=200, steps=5)


@pytest.mark.chaos
async def test_a_draining_worker_gives_back_what_it_cannot_finish(rig: Rig, yard: Yard) -> None:
    mark = yard.base / "mark"
    await rig.apply(f"name: long\nsteps:\n  - {{id: s1, tool: chaos.long_once, input: {{mark: {mark}}}}}\n")
    leaving = yard.worker(drain_seconds=0.5)
    await worker_of(rig, leaving)
    await start_runs(rig, "long", 1)
    await yard.until_begun(1)
    await worker_of(rig, yard.worker())
    leaving.ask_to_end()

    assert await leaving.ended() == 0
    await until_all_ended(rig, 1, seconds=10)
    assert await orphans(rig) == 0
    assert_sound(await journal(rig), ["s1"], runs=1)
    await assert_lanes_are_free(rig)


@pytest.mark.chaos
async def test_a_worker_that_was_declared_lost_can_still_be_asked_to_end(rig: Rig, yard: Yard) -> None:
    worker = yard.worker()
    me = await worker_of(rig, worker)
    worker.pause()
    await until(lambda: _is_lost(rig, me), "it was declared lost", LEASE_SECONDS + 10)
    worker.ask_to_end()
    worker.go_on()
    assert await worker.ended() == 0, worker.said()


async def _is_lost(rig: Rig, me: WorkerIdentity) -> bool:
    await reclaim_lost(rig.database)
    return (await rig.sql("SELECT status FROM interlock.worker WHERE id = $1", me.id))[0]["status"] == "terminated"


# ---------------------------------------------------------------- poisoned


async def poison(rig: Rig, yard: Yard, workers: int, bystanders: int, reclaims: int, seconds: float) -> None:
    await rig.apply("name: poison\nsteps:\n  - {id: s1, tool: chaos.poison}\n")
    await rig.apply(workflow("five", 5))
    await start_runs(rig, "five", bystanders // 2, {"ms": 20})
    await start_runs(rig, "poison", 1)
    await start_runs(rig, "five", bystanders - bystanders // 2, {"ms": 20})
    yard.server(workers=workers, max_reclaims=reclaims, lease_seconds=1)
    await until_all_ended(rig, bystanders + 1, seconds)

    ended = await ask(rig, "SELECT workflow, status, reason, count(*) FROM interlock.run GROUP BY 1, 2, 3 ORDER BY 1")
    assert [tuple(row) for row in ended] == [
        ("five", "succeeded", "completed", bystanders),
        ("poison", "failed", "orphaned", 1),
    ]
    poisoned = str((await rig.sql("SELECT id FROM interlock.run WHERE workflow = 'poison'"))[0]["id"])
    assert [line.attempt for line in yard.executions() if line.run_id == poisoned] == list(range(1, reclaims + 2))
    others = [entry for entry in await journal(rig) if str(entry["run_id"]) != poisoned]
    assert_sound(others, steps_of(5), bystanders)
    await assert_lanes_are_free(rig)


@pytest.mark.chaos
async def test_a_step_that_kills_its_worker_fails_its_run_and_no_other(rig: Rig, yard: Yard) -> None:
    await poison(rig, yard, workers=2, bystanders=20, reclaims=2, seconds=40)


@pytest.mark.chaos
async def test_a_poisoned_run_is_given_up_after_the_usual_number_of_workers(rig: Rig, yard: Yard) -> None:
    await poison(rig, yard, workers=2, bystanders=300, reclaims=5, seconds=120)


@pytest.mark.chaos
async def test_a_poisoned_run_takes_others_down_twice_at_most(rig: Rig, yard: Yard) -> None:
    """A poisoned run kills the runs beside it with the first worker and with the second. Afterwards it stands trial
    alone, and no concurrent write is cut off (reliability 5).
    """
    reclaims, capacity = 4, 8
    await rig.apply("{name: poison, steps: [{id: s1, tool: chaos.poison, input: {ms: 150}}]}")
    await rig.apply("{name: once, steps: [{id: s1, tool: chaos.pay, input: {ms: 300}}]}")
    await start_runs(rig, "once", 20)
    await start_runs(rig, "poison", 1)
    await start_runs(rig, "once", 60)
    yard.server(workers=1, concurrency=capacity, max_reclaims=reclaims, lease_seconds=1)
    await until_all_ended(rig, 81, seconds=60)

    ended = await ask(rig, "SELECT workflow, status, count(*) FROM interlock.run GROUP BY 1, 2 ORDER BY 1")
    assert [tuple(row) for row in ended] == [("once", "succeeded", 80), ("poison", "failed", 1)]
    poisoned = str((await rig.sql("SELECT id FROM interlock.run WHERE workflow = 'poison'"))[0]["id"])
    lines = yard.executions()
    effects = Counter(line.run_id for line in lines if line.what == "effect")
    assert len(effects) == 80 and set(effects.values()) == {1}
    killed = [line.pid for line in lines if line.run_id == poisoned and line.what == "begin"]
    assert len(killed) == reclaims + 1
    ends = {(line.run_id, line.attempt) for line in lines if line.what == "end"}
    others = [line for line in lines if line.what == "begin" and line.run_id != poisoned]
    cut_off = Counter(killed.index(line.pid) for line in others if (line.run_id, line.attempt) not in ends)
    print(f"cut off beside the poison, by the number of the worker: {dict(sorted(cut_off.items()))}")
    assert cut_off[0], "nothing was cut off by the first worker's end; the test showed nothing"
    assert set(cut_off) <= {0, 1}
