import os, random, time
import pytest
from tests.chaos.test_lost_workers import *  # noqa
from tests.chaos import test_lost_workers as t

for n in list(globals()):
    if n.startswith("test_"):
        del globals()[n]


@pytest.mark.parametrize("i", range(6))
async def test_dbg(rig, yard, i):
    seed = [1794820659, 1, 2, 3, 4, 5][i]
    rng = random.Random(seed)
    await rig.apply(workflow("five", 5))
    workers = [yard.worker(concurrency=20) for _ in range(3)]
    for worker in workers:
        await worker_of(rig, worker)
    await start_runs(rig, "five", 1000, {"ms": 150})
    for _ in range(8):
        victim = rng.choice(workers)
        print("DBG pause", victim.pid, time.monotonic_ns())
        victim.pause()
        time.sleep(rng.uniform(0.5, 2 * LEASE_SECONDS))
        print("DBG go", victim.pid, time.monotonic_ns())
        victim.go_on()
        time.sleep(rng.uniform(0, 1))
    await until_all_ended(rig, 1000, seconds=180)
    entries = await journal(rig)
    try:
        assert_done_again_only_after_a_loss(yard.executions(), entries, late=True)
    except AssertionError as e:
        rid = str(e).split()[0]
        print("DBG", e)
        for x in yard.executions():
            if x.run_id == rid:
                print("DBG", x.what, x.step, x.attempt, x.pid, x.at)
        for x in entries:
            if str(x["run_id"]) == rid:
                print(
                    "DBG",
                    x["seq"],
                    x["at"],
                    x["type"],
                    x["step"],
                    x["event"],
                    x["to_state"],
                    x["attempt"],
                    x["token"],
                    x["actor"],
                    x["data"],
                )
        for p in yard.processes:
            for l in p.said().splitlines():
                if rid in l or "worker_lost" in l or "register" in l or "error" in l:
                    print("DBG", p, l)
        raise
