"""Jobs: only their own workers do their runs, and every way to end a job releases the workers."""

import asyncio
from typing import Any
from uuid import UUID

import pytest

from interlock import FlowContext
from interlock.engine.queueing import jobs, leases, workers
from interlock.engine.workflows import Plans
from interlock.errors import Conflict, Invalid, Terminal
from interlock.ids import uuid7
from interlock.lifecycle import WorkerEvent
from interlock.store.pool import Database, Row, Tx
from tests.rig import Rig
from tests.supervised.conftest import Shop, until
from tests.supervised.oracles import nobody_served_two_jobs, reservations


async def runs_of(rig: Rig, job_id: UUID) -> list[Any]:
    return await rig.sql("SELECT * FROM interlock.run WHERE job_id = $1 ORDER BY id", job_id)


async def nothing_leaks(rig: Rig) -> None:
    """Check that ended jobs leave no reservation, no queue and no count."""
    await rig.sweep()
    assert await rig.sql("SELECT id FROM interlock.worker WHERE job_id IS NOT NULL") == []
    ended = "SELECT id FROM interlock.job WHERE completed_at IS NOT NULL"
    assert await rig.sql(f"SELECT pool FROM interlock.queue WHERE id IN ({ended})") == []
    assert await rig.sql("SELECT id FROM interlock.queue WHERE in_flight <> 0") == []
    nobody_served_two_jobs(await rig.sql("SELECT * FROM interlock.resource_event ORDER BY subject_id, seq"))


async def test_a_jobs_runs_are_done_by_its_workers_and_its_workers_do_nothing_else(shop: Shop, rig: Rig) -> None:
    both = [await shop.worker(), await shop.worker()]
    job_id = await shop.job("one", runs=3, worker_count=1)
    await rig.sweep()
    (reserved,) = await shop.reserved(job_id)
    await shop.hold.inside()
    plain = [await rig.start("two") for _ in range(3)]
    (free,) = (worker for worker in both if worker.me.id != reserved)

    async def all_held() -> bool:
        rows = await rig.sql("SELECT count(*) AS n FROM interlock.run WHERE lease_worker IS NOT NULL")
        return bool(rows[0]["n"] == 6)

    await until(all_held)
    for run in await runs_of(rig, job_id):
        assert run["lease_worker"] == reserved
    for run_id in plain:
        (run,) = await rig.sql("SELECT lease_worker FROM interlock.run WHERE id = $1", run_id)
        assert run["lease_worker"] == free.me.id
    shop.hold.release.set()
    row = await shop.job_until(job_id, "completed")
    assert (row["done"], row["total"], row["reason"]) == (3, 3, None)
    for run_id in plain:
        await rig.until(run_id, "succeeded")
    await nothing_leaks(rig)


async def test_a_worker_that_does_not_know_yet_that_it_is_reserved_claims_nothing(shop: Shop, rig: Rig) -> None:
    me, _ = await rig.claim_by_hand()
    job_id = await shop.job()
    await rig.sweep()
    assert await shop.reserved(job_id) == {me.id}
    other, _ = await rig.claim_by_hand()
    await rig.start("one")

    async def claimed(who: leases.WorkerIdentity, pool: str) -> list[Any]:
        async with rig.database.pool.acquire() as connection:
            return [run.job_id for run in await leases.claim(Tx(connection), who, 5, pool) or []]

    assert await claimed(me, "default") == []
    assert await claimed(other, str(job_id)) == []
    assert await claimed(other, "default") == [None]
    assert await claimed(me, str(job_id)) == [job_id]


async def test_a_job_waits_until_there_are_workers_and_shows_how_far_it_is(shop: Shop, rig: Rig) -> None:
    http = rig.http()
    body = {"task_description": "thumbnails", "workflow": "one", "inputs": [{}, {}], "worker_count": 2}
    made = await http.post("/api/jobs", json=body)
    assert (made.status_code, made.json()["status"], made.json()["progress"]["total"]) == (201, "pending", 2)
    job_id = UUID(made.json()["id"])
    await rig.sweep()
    await shop.worker()
    await rig.sweep()
    assert (await shop.job_row(job_id))["status"] == "pending"
    assert await runs_of(rig, job_id) == []
    await shop.worker()
    await shop.job_until(job_id, "running")
    shown = (await http.get(f"/api/jobs/{job_id}")).json()
    assert len(shown["workers"]) == 2
    shop.hold.release.set()
    await shop.job_until(job_id, "completed")
    shown = (await http.get(f"/api/jobs/{job_id}")).json()
    assert [(h["event"], h["to_state"]) for h in shown["state_history"]] == [
        ("create", "submitted"), ("validate", "pending"), ("allocate", "running"), ("succeed", "completed"),
    ]  # fmt: skip
    assert (shown["progress"]["done"], shown["progress"]["succeeded"], shown["progress"]["eta_seconds"]) == (2, 2, None)
    assert shown["progress"]["rate_per_second"] > 0
    listed = (await http.get("/api/runs", params={"job_id": str(job_id)})).json()["items"]
    assert len(listed) == 2
    async with rig.stream(f"/api/jobs/{job_id}/events") as events:
        types = [event["event"] async for event in events]
    assert (types[0], types[-2:]) == ("job_created", ["job_completed", "end"])


async def test_the_next_job_is_the_fairest_and_a_large_one_is_not_passed_over(shop: Shop, rig: Rig) -> None:
    first, second = [await shop.silent_worker(), await shop.silent_worker()]
    running = await shop.job(worker_count=1)
    await rig.sweep()
    large = await shop.job(worker_count=2)
    small = await shop.job(worker_count=1)
    impossible = await shop.job(worker_count=10)
    await rig.sweep()
    assert [(await shop.job_row(j))["status"] for j in (running, large, small)] == ["running", "pending", "pending"]

    # Another tenant has no workers yet, so it comes first; a job that needs more workers than exist stops no other job.
    acme = await rig.tenant("acme")
    await rig.apply("{name: one, steps: [{id: a, tool: t.hold}]}", acme)
    theirs = await shop.job_of(acme)
    await rig.sweep()
    assert (await shop.job_row(theirs))["status"] == "running"
    for job_id in (running, theirs):
        who = acme if job_id == theirs else rig.admin
        await rig.database.run_in_transaction(lambda tx, j=job_id, w=who: jobs.cancel(tx, w, j))  # type: ignore[misc]
    await rig.sweep()
    assert await shop.reserved(large) == {first, second}
    assert [(await shop.job_row(j))["status"] for j in (small, impossible)] == ["pending", "pending"]


async def test_a_crashed_worker_of_a_job_is_replaced_and_its_run_is_done(shop: Shop, rig: Rig) -> None:
    first = await shop.worker()
    job_id = await shop.job(runs=1)
    await rig.sweep()
    await shop.hold.inside()
    second = await shop.worker()
    shop.hold.entered.clear()
    order = workers.bury(rig.database, first.me.id, "supervisor", "killed by signal 9")
    await order
    assert (await shop.job_row(job_id))["status"] == "running"
    await rig.sweep()
    assert await shop.reserved(job_id) == {second.me.id}
    await shop.hold.inside()
    shop.hold.release.set()
    await shop.job_until(job_id, "completed")
    await nothing_leaks(rig)


async def test_a_paused_worker_of_a_job_is_replaced_and_is_not_one_too_many_later(shop: Shop, rig: Rig) -> None:
    paused, other = await shop.silent_worker(), await shop.silent_worker()
    job_id = await shop.job(worker_count=1)
    await rig.sweep()
    assert await shop.reserved(job_id) == {paused}
    await order(rig, paused, WorkerEvent.PAUSE)
    await rig.sweep()
    assert await shop.reserved(job_id) == {other}
    await order(rig, paused, WorkerEvent.RESUME)
    await rig.sweep()
    assert await shop.reserved(job_id) == {other}
    await rig.database.run_in_transaction(lambda tx: jobs.cancel(tx, rig.admin, job_id))
    await nothing_leaks(rig)


async def test_a_job_that_needs_a_paused_worker_stands_in_nobodys_way(shop: Shop, rig: Rig) -> None:
    await shop.silent_worker()
    paused = await shop.silent_worker()
    await order(rig, paused, WorkerEvent.PAUSE)
    large = await shop.job(worker_count=2)
    small = await shop.job(worker_count=1)
    await rig.sweep()
    assert [(await shop.job_row(j))["status"] for j in (large, small)] == ["pending", "running"]


async def order(rig: Rig, worker_id: UUID, event: WorkerEvent) -> None:
    await rig.database.run_in_transaction(lambda tx: workers.order(tx, "t", worker_id, event))


async def test_a_job_that_is_not_valid_fails_at_once(shop: Shop, rig: Rig) -> None:
    http = rig.http()
    body = {"task_description": "t", "workflow": "nothing"}
    made = await http.post("/api/jobs", json=body)
    assert (made.status_code, made.json()["status"]) == (201, "failed")
    assert "nothing" in made.json()["reason"]
    for wrong in (
        {"worker_count": 11},
        {"worker_count": 0},
        {"inputs": []},
        {"inputs": [1]},
        {"timeout_seconds": -1},
        {"workers": 2},
    ):
        assert (await http.post("/api/jobs", json=body | wrong)).status_code == 422, wrong
    lost = await http.post("/api/jobs", json=body | {"parent_job_id": str(uuid7())})
    assert (lost.status_code, lost.json()["code"]) == (404, "JOB_NOT_FOUND")


async def test_a_job_that_takes_too_long_is_canceled_with_its_runs(shop: Shop, rig: Rig) -> None:
    rig.clock.freeze()
    await shop.worker()
    job_id = await shop.job(runs=2, timeout_seconds=60)
    never_started = await shop.job(worker_count=9, timeout_seconds=60)
    await rig.sweep()
    await shop.hold.inside()
    rig.clock.advance(3)
    await rig.sweep()
    assert (await shop.job_row(job_id))["status"] == "running"
    await rig.sql("UPDATE interlock.worker SET heartbeat_at = heartbeat_at + interval '1 hour'")
    rig.clock.advance(60)
    row = await shop.job_until(job_id, "canceled")
    assert (row["reason"], (await shop.job_row(never_started))["status"]) == ("timed out", "canceled")

    async def all_ended() -> bool:
        return all(run["status"] == "canceled" for run in await runs_of(rig, job_id))

    await until(all_ended)
    assert {run["reason"] for run in await runs_of(rig, job_id)} == {"canceled_by_parent"}
    await nothing_leaks(rig)


async def test_a_run_that_fails_makes_the_job_fail_when_all_are_done(shop: Shop, rig: Rig) -> None:
    @rig.tool("t.odd")
    async def odd(n: int) -> None:
        if n == 1:
            raise Terminal("one is bad")

    await rig.apply('{name: odd, steps: [{id: a, tool: t.odd, input: {n: "${input.n}"}}]}')
    await shop.worker()
    job_id = await shop.job("odd", runs=3)
    row = await shop.job_until(job_id, "failed")
    assert (row["reason"], row["done"]) == ("1 of 3 runs did not succeed", 3)
    await nothing_leaks(rig)


async def test_a_parent_ends_after_its_children_and_holds_no_worker_while_it_waits(shop: Shop, rig: Rig) -> None:
    await rig.apply("{name: quick, steps: [{id: a, tool: t.after}]}")
    await shop.worker()
    await shop.worker()
    parent = await shop.job("quick")
    await shop.job_until(parent, "running")
    child = await shop.job("quick", parent_job_id=parent)
    grandchild = await shop.job("one", parent_job_id=child)

    async def all_but_the_last_are_done() -> bool:
        await rig.sweep()
        rows = await rig.sql("SELECT done FROM interlock.job WHERE id = ANY($1)", [parent, child])
        return [row["done"] for row in rows] == [1, 1] and shop.hold.entered.is_set()

    await until(all_but_the_last_are_done)
    for job in (parent, child):
        assert ((await shop.job_row(job))["status"], await shop.reserved(job)) == ("running", set())
    shop.hold.release.set()
    await shop.job_until(parent, "completed")
    ends = [(await shop.job_row(job))["completed_at"] for job in (grandchild, child, parent)]
    assert ends == sorted(ends)
    assert [(await shop.job_row(job))["depth"] for job in (parent, child, grandchild)] == [0, 1, 2]
    await nothing_leaks(rig)


async def test_a_job_whose_runs_all_wait_for_people_holds_no_worker(shop: Shop, rig: Rig) -> None:
    await rig.apply("{name: gated, steps: [{id: ok, approval: {tier: low}}, {id: b, tool: t.after}]}")
    await shop.worker()
    job_id = await shop.job("gated")

    async def waits() -> bool:
        await rig.sweep()
        return {run["status"] for run in await runs_of(rig, job_id)} == {"waiting_approval"} and not (
            await shop.reserved(job_id)
        )

    await until(waits)
    (run,) = await runs_of(rig, job_id)
    await rig.approve(run["id"], await rig.person("ann", "approver"))
    await shop.job_until(job_id, "completed")
    assert shop.after == 1


async def test_depth_ends_at_five(shop: Shop, rig: Rig) -> None:
    job_id: UUID | None = None
    for _ in range(6):
        job_id = await shop.job(parent_job_id=job_id)
    with pytest.raises(Invalid, match="5 is the deepest"):
        await shop.job(parent_job_id=job_id)
    tree = (
        await rig.http().get(
            f"/api/jobs/{(await rig.sql('SELECT id FROM interlock.job ORDER BY depth'))[0]['id']}/tree"
        )
    ).json()
    depth = 0
    while tree["children"]:
        (tree,) = tree["children"]
        depth += 1
    assert (depth, tree["depth"]) == (5, 5)


async def test_a_tree_that_is_canceled_at_its_root_is_canceled_everywhere(shop: Shop, rig: Rig) -> None:
    both = [await shop.worker(), await shop.worker()]
    root = await shop.job(runs=2)
    level = [root]
    for _ in range(3):
        level = [await shop.job(parent_job_id=parent) for parent in level for _ in range(3)]
    await rig.sweep()
    await shop.hold.inside()
    answer = await rig.http().post(f"/api/jobs/{root}/cancel", json={"reason": "enough"})
    assert answer.json()["status"] == "canceled"
    states = {
        row["status"]: row["n"] for row in await rig.sql("SELECT status, count(*) AS n FROM interlock.job GROUP BY 1")
    }
    assert states == {"canceled": 40}
    async with asyncio.timeout(5):

        async def all_ended() -> bool:
            await rig.sweep()
            rows = await rig.sql("SELECT status FROM interlock.run WHERE job_id IS NOT NULL")
            return {row["status"] for row in rows} == {"canceled"}

        await until(all_ended)
    assert shop.hold.interrupted
    await until(lambda: _no_drivers(both))
    with pytest.raises(Conflict, match="takes no more children"):
        await shop.job(parent_job_id=root)
    await nothing_leaks(rig)


async def _no_drivers(both: list[Any]) -> bool:
    return not any(worker.drivers for worker in both)


async def test_a_run_of_an_ended_job_that_cannot_be_canceled_stops_no_other(
    shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await shop.job(runs=3)
    await rig.claim_by_hand()
    await rig.sweep()
    bad = (await runs_of(rig, job_id))[0]["id"]
    cancel = jobs._cancel_run

    async def broken(database: Database, plans: Plans, row: Row) -> None:
        if row["id"] == bad:
            raise RuntimeError("boom")
        await cancel(database, plans, row)

    monkeypatch.setattr(jobs, "_cancel_run", broken)
    monkeypatch.setattr(jobs, "_AT_ONCE", 1)
    await rig.database.run_in_transaction(lambda tx: jobs.cancel(tx, rig.admin, job_id))
    assert await jobs.cancel_runs(rig.database, rig.plans) == 2
    assert {run["id"] for run in await runs_of(rig, job_id) if run["status"] != "canceled"} == {bad}


async def test_a_canceling_run_of_an_ended_job_is_finished_by_any_worker(shop: Shop, rig: Rig) -> None:
    """The job's worker dies before it could stop the run, and no worker is reserved for the job any more."""
    job_id = await shop.job()
    me, _ = await rig.claim_by_hand()
    await rig.sweep()
    async with rig.database.pool.acquire() as connection:
        (claimed,) = await leases.claim(Tx(connection), me, 1, str(job_id)) or []
    await rig.database.run_in_transaction(lambda tx: jobs.cancel(tx, rig.admin, job_id))
    await rig.sweep()
    assert (await rig.run(claimed.id))["status"] == "canceling"
    await rig.database.run_in_transaction(lambda tx: workers.order(tx, "t", me.id, WorkerEvent.TERMINATE))
    rig.clock.advance(5)  # its process is silent, so it may act until its lease ends
    await rig.sweep()
    async with rig.worker():
        assert (await rig.until(claimed.id))["status"] == "canceled"
    await nothing_leaks(rig)


async def test_a_run_that_cannot_be_canceled_keeps_no_other_of_its_job_from_it(
    shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shop.silent_worker()
    job_id = await shop.job(runs=7)
    await rig.sweep()
    bad, *good = [run["id"] for run in await runs_of(rig, job_id)]
    cancel = jobs._cancel_run

    async def cancel_run(database: Database, plans: Plans, row: Row) -> None:
        if row["id"] == bad:
            raise ValueError("a bug")
        await cancel(database, plans, row)

    monkeypatch.setattr(jobs, "_cancel_run", cancel_run)
    await rig.database.run_in_transaction(lambda tx: jobs.cancel(tx, rig.admin, job_id))
    await rig.sweep()
    assert {run["id"] for run in await runs_of(rig, job_id) if run["status"] == "canceled"} == set(good)


async def test_the_tenants_cap_counts_the_runs_of_its_jobs(rig: Rig, shop: Shop) -> None:
    acme = await rig.tenant("acme", max_concurrency=2)
    await rig.apply("{name: one, steps: [{id: a, tool: t.hold}]}", acme)
    await shop.worker()
    await shop.worker()
    job_id = await shop.job_of(acme, runs=5)
    await rig.sweep()
    plain = [await rig.start("one", who=acme) for _ in range(3)]

    async def two() -> bool:
        (row,) = await rig.sql("SELECT count(*) AS n FROM interlock.run WHERE lease_worker IS NOT NULL")
        (queue,) = await rig.sql("SELECT in_flight FROM interlock.queue WHERE id = $1", acme.tenant_id)
        assert row["n"] <= 2
        return bool(row["n"] == queue["in_flight"] == 2)

    await until(two)
    for _ in range(20):
        await asyncio.sleep(0.02)
        await two()
    shop.hold.release.set()
    await shop.job_until(job_id, "completed")
    for run_id in plain:
        assert (await rig.until(run_id))["status"] == "succeeded"
    await nothing_leaks(rig)


async def test_runs_of_a_capped_workflow_are_let_into_their_jobs_queue(rig: Rig, shop: Shop) -> None:
    await rig.apply("{name: capped, caps: {max_concurrency: 2}, steps: [{id: a, tool: t.hold}]}")
    mine, other = await shop.worker(), await shop.worker()
    plain = [await rig.start("capped") for _ in range(2)]
    await shop.hold.inside()
    job_id = await shop.job("capped", runs=3)
    await rig.sweep()
    (reserved,) = await shop.reserved(job_id)
    assert [row["queue_id"] for row in await rig.sql("SELECT queue_id FROM interlock.blocked_run")] == [job_id] * 3
    shop.hold.release.set()
    await shop.job_until(job_id, "completed")
    (actor,) = (worker.me.actor for worker in (mine, other) if worker.me.id == reserved)
    for run in await runs_of(rig, job_id):
        rows = await rig.sql(
            "SELECT DISTINCT actor FROM interlock.journal_entry WHERE run_id = $1 AND step > ''", run["id"]
        )
        assert [row["actor"] for row in rows] == [actor]
    for run_id in plain:
        await rig.until(run_id, "succeeded")
    assert await rig.sql("SELECT FROM interlock.blocked_run") == []
    await nothing_leaks(rig)


async def test_runs_that_a_jobs_runs_start_are_done_by_its_workers_and_not_counted(rig: Rig, shop: Shop) -> None:
    """With the only worker reserved, no other worker could do them."""

    @rig.flow("parent")
    async def parent(ctx: FlowContext) -> None:
        await ctx.child("two", {})

    worker = await shop.worker()
    shop.hold.release.set()
    job_id = await shop.job("parent", runs=2)
    row = await shop.job_until(job_id, "completed")
    assert (row["done"], row["total"]) == (2, 2)
    everything = await runs_of(rig, job_id)
    assert len(everything) == 4 and {run["status"] for run in everything} == {"succeeded"}
    shown = (await rig.http().get(f"/api/jobs/{job_id}")).json()["progress"]
    assert (shown["done"], shown["succeeded"]) == (2, 2)
    actors = await rig.sql("SELECT DISTINCT actor FROM interlock.journal_entry WHERE step IN ('a', 'b')")
    assert [row["actor"] for row in actors] == [worker.me.actor]
    await nothing_leaks(rig)


async def test_canceling_a_job_also_stops_what_its_runs_started(rig: Rig, shop: Shop) -> None:
    @rig.flow("parent")
    async def parent(ctx: FlowContext) -> None:
        await ctx.child("one", {})

    await shop.worker()
    job_id = await shop.job("parent")
    await rig.sweep()
    await shop.hold.inside()
    await rig.http().post(f"/api/jobs/{job_id}/cancel")

    async def all_canceled() -> bool:
        await rig.sweep()
        return {run["status"] for run in await runs_of(rig, job_id)} == {"canceled"}

    await until(all_canceled)
    assert len(await runs_of(rig, job_id)) == 2
    await nothing_leaks(rig)


async def test_a_job_is_followed_to_its_end(shop: Shop, rig: Rig) -> None:
    await shop.worker()
    shop.hold.release.set()
    job_id = await shop.job("one", runs=3)
    async with rig.stream(f"/api/jobs/{job_id}/events") as frames:
        seen = [await anext(frames)]
        await shop.job_until(job_id, "completed")
        seen += [frame async for frame in frames]
    kinds = [frame["event"] for frame in seen]
    assert kinds[0] == "job_created" and kinds[-2:] == ["job_completed", "end"], kinds
    assert [int(frame["id"]) for frame in seen[:-1]] == list(range(1, len(seen)))


async def test_another_tenants_job_does_not_exist(shop: Shop, rig: Rig) -> None:
    job_id = await shop.job()
    acme = await rig.tenant("acme")
    http = rig.http(await rig.key("a", "admin", acme.tenant_id))
    for method, path in (("GET", ""), ("GET", "/tree"), ("GET", "/events"), ("POST", "/cancel")):
        answer = await http.request(method, f"/api/jobs/{job_id}{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, "JOB_NOT_FOUND")
    child = {"task_description": "t", "workflow": "one", "parent_job_id": str(job_id)}
    assert (await http.post("/api/jobs", json=child)).status_code == 404


async def test_the_same_request_is_the_same_job(shop: Shop, rig: Rig) -> None:
    http = rig.http()
    body = {"task_description": "t", "workflow": "one", "request_id": "once"}
    answers = await asyncio.gather(*(http.post("/api/jobs", json=body) for _ in range(20)))
    assert len({answer.content for answer in answers}) == 1
    assert len(await rig.sql("SELECT id FROM interlock.job")) == 1


def test_two_jobs_of_one_worker_would_be_found() -> None:
    worker, a, b = uuid7(), uuid7(), uuid7()

    def line(seq: int, type: str, job: UUID) -> dict[str, Any]:
        return {"subject_id": worker, "seq": seq, "type": type, "data": f'{{"job_id": "{job}"}}', "at": seq}

    fine = [line(1, "worker_reserved", a), line(2, "worker_released", a), line(3, "worker_reserved", b)]
    nobody_served_two_jobs(fine)
    assert len(reservations(fine)) == 2
    with pytest.raises(AssertionError, match="two jobs"):
        nobody_served_two_jobs([fine[0], fine[2]])
