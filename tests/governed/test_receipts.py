"""Receipts: one effect, one key, one success; a person resolves an effect in doubt, and a reversal happens once."""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import httpx2
import pytest
from tests.governed.conftest import Person, Shop, lose
from tests.rig import Rig

from interlock.engine.effects import receipts
from interlock.engine.effects.receipts import EffectIntent
from interlock.errors import Retryable, Terminal
from interlock.ids import uuid7
from interlock.lifecycle import ReceiptState
from interlock.store.pool import Database, Tx
from interlock.telemetry import metrics
from interlock.tools import Context, DidNotHappen, Happened, RegisteredTool
from interlock.worker import step_recorder, thread_runner
from interlock.worker.worker import Worker

PAY = """
name: pay
steps:
  - id: pay
    tool: bank.pay
    input: {amount: "${input.amount}", to: "${input.to}"}
    retry: {max_attempts: 3, base_delay: 0s}
"""


@pytest.fixture(autouse=True)
def _looks_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_recorder, "_LOOK_SECONDS", 0.05)


def bank(shop: Shop, body: Callable[[int], Awaitable[Any]] | None = None, **options: Any) -> None:
    """A tool that records each call, then runs `body` with the number of calls."""

    @shop.rig.tool("bank.pay", **({"writes": True, "risk": "low", "key": "pay:{to}"} | options))
    async def pay(ctx: Context, amount: int, to: str) -> Any:
        shop.done.append(f"{ctx.idempotency_key} {amount}")
        return await body(len(shop.done)) if body else {"paid": amount, "id": "p_1"}


async def _paid(shop: Shop, **input: Any) -> dict[str, Any]:
    return await shop.ended(await shop.start(shop.admin, "pay", **input))


async def test_every_move_of_a_receipt_is_counted_also_another_try(shop: Shop, rig: Rig) -> None:
    def counted(before: str, after: str) -> float:
        return metrics.transition("receipt", before, after)._value.get()  # type: ignore[no-any-return]

    async def busy_at_first(times: int) -> dict[str, int]:
        if times < 3:
            raise Retryable("busy")
        return {"paid": 5}

    bank(shop, busy_at_first)
    await rig.apply(PAY)
    moves = [("attempted", "failed"), ("failed", "attempted"), ("attempted", "succeeded")]
    before = [counted(*move) for move in moves]
    assert (await _paid(shop, amount=5, to="ada"))["status"] == "succeeded"
    assert [counted(*move) - was for move, was in zip(moves, before, strict=True)] == [2, 2, 1]


# ---------------------------------------------------------------- one effect, one key


async def test_a_key_made_of_a_long_argument_is_shortened_and_still_names_one_effect(shop: Shop, rig: Rig) -> None:
    """A key that a model or an input chooses must not end a worker: a row that was too large for an index did."""
    bank(shop)
    await rig.apply(PAY)
    text = "".join(str(uuid7()) for _ in range(300))
    for to in (f"{text} a", f"{text} a", f"{text} b"):
        assert (await _paid(shop, amount=5, to=to))["status"] == "succeeded"
    keys = [done.rpartition(" ")[0] for done in shop.done]
    assert len(keys) == len(set(keys)) == 2
    assert all(key.startswith("pay:") and len(key) == 255 for key in keys)


async def test_what_the_database_has_no_room_for_costs_its_run_and_no_worker(
    shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(str(uuid7()) for _ in range(300))
    monkeypatch.setattr(sys.modules[RegisteredTool.__module__], "_LONGEST_KEY", 10**9)
    bank(shop)
    await rig.apply(PAY)
    run_id = await shop.start(shop.admin, "pay", amount=5, to=text)
    async with rig.worker() as worker:
        run = await rig.until(run_id)
        (only,) = await rig.sql("SELECT id FROM interlock.worker")
        assert worker.me.id == only["id"]
    assert (run["status"], run["reason"], shop.done) == ("failed", "terminal_error", [])


async def test_the_same_effect_wanted_by_another_run_is_answered_by_its_receipt(shop: Shop, rig: Rig) -> None:
    bank(shop)
    await rig.apply(PAY)
    first, second = await _paid(shop, amount=5, to="ada"), await _paid(shop, amount=5, to="ada")
    assert first["result"] == second["result"] == {"paid": 5, "id": "p_1"}
    assert shop.done == ["pay:ada 5"]
    assert len(await rig.sql("SELECT * FROM interlock.receipt")) == 1
    assert await shop.receipts(second["id"]) == []


async def test_the_same_key_for_another_effect_is_a_loud_conflict(shop: Shop, rig: Rig) -> None:
    bank(shop)
    await rig.apply(PAY)
    first = await _paid(shop, amount=5, to="ada")
    run = await _paid(shop, amount=6, to="ada")
    assert (run["status"], run["reason"], run["error"]["type"]) == ("failed", "terminal_error", "ReceiptConflict")
    assert "pay:ada" in run["error"]["message"] and str(first["id"]) in run["error"]["message"]
    assert shop.done == ["pay:ada 5"]


async def test_an_effect_that_failed_may_be_attempted_by_another_run(shop: Shop, rig: Rig) -> None:
    async def body(calls: int) -> str:
        if calls == 1:
            raise Terminal("no funds")
        return "paid"

    bank(shop, body)
    await rig.apply(PAY)
    first, second = await _paid(shop, amount=5, to="ada"), await _paid(shop, amount=5, to="ada")
    assert (first["status"], second["status"]) == ("failed", "succeeded")
    assert [(r["status"], str(r["run_id"])) for r in await rig.sql("SELECT * FROM interlock.receipt")] == [
        ("succeeded", str(second["id"]))
    ]


async def test_another_tenant_may_use_the_same_key(shop: Shop, rig: Rig) -> None:
    bank(shop)
    other = await rig.tenant("other")
    await rig.apply(PAY)
    await rig.apply(PAY, other)
    await _paid(shop, amount=5, to="ada")
    await rig.work_until(await rig.start("pay", {"amount": 6, "to": "ada"}, other))
    assert shop.done == ["pay:ada 5", "pay:ada 6"]
    assert [r["status"] for r in await rig.sql("SELECT status FROM interlock.receipt")] == ["succeeded"] * 2


async def test_two_runs_that_want_the_same_effect_at_the_same_moment_have_it_done_once(shop: Shop, rig: Rig) -> None:
    bank(shop)
    await rig.apply(PAY.replace("max_attempts: 3, base_delay: 0s", "max_attempts: 9, base_delay: 0s"))
    runs = [await shop.start(shop.admin, "pay", amount=5, to="ada") for _ in range(5)]
    async with rig.worker():
        ended = await _until_all_ended(rig, runs)
    assert [run["status"] for run in ended] == ["succeeded"] * 5, [run["error"] for run in ended]
    assert shop.done == ["pay:ada 5"]


async def _until_all_ended(rig: Rig, runs: list[UUID]) -> list[dict[str, Any]]:
    """The losers retry after a second; the test moves the clock for them."""
    async with asyncio.timeout(20):
        while True:
            found = [await rig.run(run_id) for run_id in runs]
            if all(run["completed_at"] for run in found):
                return found
            await rig.database.pool.execute("UPDATE interlock.run SET resume_at = now() WHERE resume_at IS NOT NULL")
            await rig.sweep()


async def test_an_intent_that_another_worker_declares_at_this_moment_is_waited_for(
    rig: Rig, database: Database
) -> None:
    tenant = rig.admin.tenant_id

    def intent() -> EffectIntent:
        return EffectIntent(id=uuid7(), step="a", tool="t", key="k", digest="d", attempt=1, request_metadata="{}")

    mine, theirs = intent(), intent()
    async with database.pool.acquire() as one, database.pool.acquire() as two:
        transaction = one.transaction()
        await transaction.start()
        assert await receipts.declare_intents(Tx(one), [(tenant, uuid7(), theirs)]) == {}
        waiting = asyncio.create_task(receipts.declare_intents(Tx(two), [(tenant, uuid7(), mine)]))
        await _until_blocked(one, two)
        await transaction.commit()
        prior = (await waiting)[mine.id]
    assert (prior.status, prior.digest) == (ReceiptState.ATTEMPTED, None), "there, but not in our snapshot"


async def _until_blocked(watcher: Any, blocked: Any) -> None:
    while not await watcher.fetchval("SELECT cardinality(pg_blocking_pids($1)) > 0", blocked.get_server_pid()):  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_an_intent_seen_too_late_is_tried_again_and_no_conflict(
    shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank(shop)
    await rig.apply(PAY)
    attempt = receipts._attempt
    unseen: list[bool] = []

    async def at_the_same_moment(tx: Tx, intents: Any) -> Any:
        if unseen:
            return await attempt(tx, intents)
        unseen.append(True)
        found = receipts.ExistingReceipt(None, "pay:ada", None, None, ReceiptState.ATTEMPTED, None, None)
        return {intent.id: found for _, _, intent in intents}

    monkeypatch.setattr(receipts, "_attempt", at_the_same_moment)
    run_id = await shop.start(shop.admin, "pay", amount=5, to="ada")
    async with rig.worker():
        (run,) = await _until_all_ended(rig, [run_id])
    assert (run["status"], shop.done) == ("succeeded", ["pay:ada 5"])


async def test_a_receipt_that_succeeded_is_final_in_the_row_itself(shop: Shop, rig: Rig) -> None:
    bank(shop)
    await rig.apply(PAY)
    await _paid(shop, amount=5, to="ada")
    with pytest.raises(asyncpg.PostgresError):
        await rig.sql("UPDATE interlock.receipt SET status = 'failed'")


# ---------------------------------------------------------------- interrupted calls


class Unheard(Exception):
    """A client's own time-out error; not Python's."""


CUT_OFF = {
    "time-out": TimeoutError("no answer"),
    "reset": ConnectionResetError("gone"),
    "client time-out": httpx2.ReadTimeout("no answer"),
    "client connection": httpx2.RemoteProtocolError("gone"),
    "unknown": Unheard("what?"),
    "misread answer": KeyError("id"),
    "500": httpx2.HTTPStatusError("", request=httpx2.Request("POST", "http://x"), response=httpx2.Response(500)),
}


@pytest.mark.parametrize("error", CUT_OFF.values(), ids=CUT_OFF.keys())
async def test_a_write_that_may_have_happened_is_not_repeated(error: Exception, shop: Shop, rig: Rig) -> None:
    async def body(calls: int) -> None:
        raise error

    bank(shop, body)
    await rig.apply(PAY)
    run_id = await shop.start(shop.admin, "pay", amount=5, to="ada")
    question = await shop.held(run_id)
    assert (question["kind"], question["tier"], len(shop.done)) == ("in_doubt", "high", 1)
    assert question["action"]["fields"] == {"amount": 5, "to": "ada"}
    assert [(r["id"], r["status"]) for r in await shop.receipts(run_id)] == [(question["receipt_id"], "in_doubt")]


async def test_a_write_that_overran_its_time_is_in_doubt(shop: Shop, rig: Rig) -> None:
    async def body(calls: int) -> None:
        await asyncio.Event().wait()

    bank(shop, body, timeout=0.05)
    await rig.apply(PAY)
    question = await shop.held(await shop.start(shop.admin, "pay", amount=5, to="ada"))
    assert (question["kind"], len(shop.done)) == ("in_doubt", 1)


async def test_a_write_whose_thread_is_still_at_it_is_not_asked_about_but_in_doubt(
    shop: Shop, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_runner, "_THREAD_GRACE_SECONDS", 0.01)
    release = threading.Event()

    async def reconcile(amount: int, to: str) -> DidNotHappen:
        return DidNotHappen()  # not yet

    @rig.tool("bank.pay", writes=True, risk="low", timeout=0.05, reconcile=reconcile)
    def pay(amount: int, to: str) -> None:
        shop.done.append("paid")
        release.wait(30)

    await rig.apply(PAY)
    try:
        question = await shop.held(await shop.start(shop.admin, "pay", amount=5, to="ada"))
        assert (question["kind"], len(shop.done)) == ("in_doubt", 1)
    finally:
        release.set()


@pytest.mark.parametrize(
    ("error", "calls", "reason"),
    [
        (Retryable("busy"), 3, "attempts_exhausted"),
        (Terminal("no"), 1, "terminal_error"),
        (
            httpx2.HTTPStatusError("", request=httpx2.Request("POST", "http://x"), response=httpx2.Response(404)),
            1,
            "terminal_error",
        ),
        (
            httpx2.HTTPStatusError("", request=httpx2.Request("POST", "http://x"), response=httpx2.Response(429)),
            3,
            "attempts_exhausted",
        ),
    ],
    ids=["retryable", "terminal", "404", "429"],
)
async def test_a_write_that_surely_did_not_happen_is_tried_again_or_failed_by_what_it_said(
    error: Exception, calls: int, reason: str, shop: Shop, rig: Rig
) -> None:
    async def body(calls: int) -> None:
        raise error

    bank(shop, body)
    await rig.apply(PAY)
    run = await _paid(shop, amount=5, to="ada")
    assert (run["status"], run["reason"]) == ("failed", reason)
    assert shop.done == ["pay:ada 5"] * calls, "always with the same key"
    assert [r["status"] for r in await shop.receipts(run["id"])] == ["failed"]


async def test_an_idempotent_write_that_was_cut_off_is_repeated_with_the_same_key(shop: Shop, rig: Rig) -> None:
    async def body(calls: int) -> str:
        if calls < 3:
            raise TimeoutError
        return "paid"

    bank(shop, body, idempotent=True, key=None)
    await rig.apply(PAY)
    run = await _paid(shop, amount=5, to="ada")
    assert (run["status"], len(shop.done), len(set(shop.done))) == ("succeeded", 3, 1)
    assert [r["status"] for r in await shop.receipts(run["id"])] == ["succeeded"]


async def test_a_retried_run_repeats_an_idempotent_write_with_the_same_key(shop: Shop, rig: Rig) -> None:
    async def body(calls: int) -> str:
        if calls < 3:
            raise TimeoutError("no answer")  # the bank may have paid
        return "paid"

    bank(shop, body, idempotent=True, key=None)
    await rig.apply(PAY.replace("max_attempts: 3", "max_attempts: 1"))
    run = await _paid(shop, amount=5, to="ada")
    for expected in ("failed", "succeeded"):
        status, again = await shop.admin.post(f"/api/runs/{run['id']}/retry")
        assert status == 201, again
        run = await shop.ended(UUID(again["id"]))
        assert run["status"] == expected
    assert len(shop.done) == 3 and len(set(shop.done)) == 1, "also of the retry of a retry"
    assert [r["status"] for r in await shop.receipts(run["id"])] == ["succeeded"]


@pytest.mark.parametrize("happened", [True, False])
async def test_a_system_that_can_be_asked_is_asked_before_anything_is_repeated(
    happened: bool, shop: Shop, rig: Rig
) -> None:
    async def reconcile(ctx: Context, amount: int, to: str) -> Happened | DidNotHappen:
        return Happened({"paid": amount}) if happened else DidNotHappen()

    async def body(calls: int) -> dict[str, int]:
        if calls == 1:
            raise ConnectionResetError
        return {"paid": 5}

    bank(shop, body, reconcile=reconcile)
    await rig.apply(PAY)
    run = await _paid(shop, amount=5, to="ada")
    assert (run["status"], run["result"]) == ("succeeded", {"paid": 5})
    assert len(shop.done) == (1 if happened else 2)


async def test_a_plain_function_that_asks_the_system_holds_up_nobody(shop: Shop, rig: Rig) -> None:
    """The function waits for the network in a thread, like the tool: the worker continues to send heartbeats."""
    goes_on = threading.Event()

    def asked(to: str, amount: int, ctx: Context) -> Happened | None:
        return Happened({"id": "p_9"}) if goes_on.wait(10) else None

    async def lost(calls: int) -> None:
        asyncio.get_running_loop().call_later(0.01, goes_on.set)
        raise ConnectionError("cut off")

    bank(shop, lost, reconcile=lambda ctx, amount, to: asked(to, amount, ctx))
    await rig.apply(PAY)
    run = await _paid(shop, amount=5, to="ada")
    assert (run["status"], run["result"]) == ("succeeded", {"id": "p_9"}), run["error"]


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "plain function"])
@pytest.mark.parametrize("error", [ConnectionError, StopIteration, SystemExit, asyncio.CancelledError])
async def test_a_system_that_does_not_know_either_leaves_it_to_people(
    error: type[BaseException], plain: bool, shop: Shop, rig: Rig
) -> None:
    """For example, `next(each for each in payments if …)` found none. Neither the worker nor the wait ends."""

    def ask(ctx: Context, amount: int, to: str) -> Happened:
        raise error

    async def reconcile(ctx: Context, amount: int, to: str) -> Happened:
        raise error

    async def body(calls: int) -> None:
        raise ConnectionResetError

    bank(shop, body, reconcile=ask if plain else reconcile)
    await rig.apply(PAY)
    question = await shop.held(await shop.start(shop.admin, "pay", amount=5, to="ada"))
    assert (question["kind"], len(shop.done)) == ("in_doubt", 1)


@pytest.mark.parametrize("output", [object(), "x" * 2_000_000, "a\x00b"], ids=["not JSON", "too large", "NUL"])
async def test_a_write_whose_output_cannot_be_stored_succeeds_with_a_marker(output: Any, shop: Shop, rig: Rig) -> None:
    """agents 3: the receipt said `succeeded` and the step `failed`, which is a reason to repeat the write."""

    async def body(calls: int) -> Any:
        return output

    bank(shop, body)
    await rig.apply(PAY)
    run = await _paid(shop, amount=5, to="ada")
    assert (run["status"], run["steps"][-1]["status"]) == ("succeeded", "succeeded")
    assert run["result"]["output_dropped"] is True and "was done, but its output" in run["result"]["reason"]
    [receipt] = await shop.receipts(run["id"])
    assert receipt["status"] == "succeeded"
    again = await _paid(shop, amount=5, to="ada")
    assert (again["status"], again["result"], len(shop.done)) == ("succeeded", run["result"], 1)


# ---------------------------------------------------------------- the three choices


async def _in_doubt(shop: Shop, more: str = "", **options: Any) -> tuple[UUID, Any]:
    async def body(calls: int) -> Any:
        if calls == 1:
            raise ConnectionResetError("gone")
        return {"paid": 5}

    bank(shop, body, **options)
    await shop.rig.apply(PAY + more)
    run_id = await shop.start(shop.admin, "pay", amount=5, to="ada")
    return run_id, await shop.held(run_id)


def _resolve(question: Any) -> str:
    return f"/api/receipts/{question['receipt_id']}/resolve"


async def test_it_happened_goes_on_with_the_output_that_a_person_gives(shop: Shop, rig: Rig) -> None:
    run_id, question = await _in_doubt(shop)
    finder = await shop.person("finder")
    status, receipt = await finder.post(
        _resolve(question), {"outcome": "happened", "output": {"paid": 5, "by": "hand"}}
    )
    assert (status, receipt["status"]) == (200, "succeeded")
    run = await shop.ended(run_id)
    assert (run["status"], run["result"], len(shop.done)) == ("succeeded", {"paid": 5, "by": "hand"}, 1)
    assert (await _paid(shop, amount=5, to="ada"))["result"] == {"paid": 5, "by": "hand"}
    refused = metrics.refused.labels("receipt", "succeeded", "fail")._value
    before = refused.get()
    status, body = await finder.post(_resolve(question), {"outcome": "did_not_happen"})
    assert (status, body["code"], refused.get() - before) == (409, "RECEIPT_RESOLVED", 1)


async def test_it_did_not_happen_does_it_again_with_the_same_key(shop: Shop, rig: Rig) -> None:
    run_id, question = await _in_doubt(shop)
    status, receipt = await (await shop.person("finder")).post(_resolve(question), {"outcome": "did_not_happen"})
    assert (status, receipt["status"]) == (200, "failed")
    run = await shop.ended(run_id)
    assert (run["status"], run["result"]) == ("succeeded", {"paid": 5})
    assert shop.done == ["pay:ada 5"] * 2
    assert [r["status"] for r in await shop.receipts(run_id)] == ["succeeded"]


@pytest.mark.parametrize("on_reject", ["fail", "complete", "continue"])
async def test_fail_fails_the_run_and_claims_nothing_about_the_effect(on_reject: str, shop: Shop, rig: Rig) -> None:
    run_id, question = await _in_doubt(shop, f"on_reject: {on_reject}\n")
    finder = await shop.person("finder")
    status, receipt = await finder.post(_resolve(question), {"outcome": "fail"})
    assert (status, receipt["status"]) == (200, "in_doubt")
    run = await rig.run(run_id)
    assert (run["status"], run["reason"]) == ("failed", "resume_failed")

    # The outcome is still unknown: neither another run nor a retry may repeat the effect.
    other = await _paid_or_failed(shop, amount=5, to="ada")
    assert (other["status"], other["error"]["type"], len(shop.done)) == ("failed", "EffectUnderWay", 1)
    status, body = await shop.admin.post(f"/api/runs/{run_id}/retry")
    assert (status, body["code"], body["receipt_id"]) == (409, "EFFECT_IN_DOUBT", question["receipt_id"])
    # A person finds out later.
    status, body = await finder.post(_resolve(question), {"outcome": "fail"})
    assert (status, body["code"]) == (409, "RUN_TERMINAL_STATE")
    status, receipt = await finder.post(_resolve(question), {"outcome": "happened", "output": {"paid": 5}})
    assert (status, receipt["status"]) == (200, "succeeded")
    status, retried = await shop.admin.post(f"/api/runs/{run_id}/retry")
    assert status == 201
    run = await shop.ended(UUID(retried["id"]))
    assert (run["status"], run["result"], len(shop.done)) == ("succeeded", {"paid": 5}, 1)


async def _paid_or_failed(shop: Shop, **input: Any) -> dict[str, Any]:
    run_id = await shop.start(shop.admin, "pay", **input)
    async with shop.rig.worker():
        (run,) = await _until_all_ended(shop.rig, [run_id])
    return run


async def test_who_asked_for_it_cannot_say_what_became_of_it_and_approve_is_no_answer(shop: Shop, rig: Rig) -> None:
    run_id, question = await _in_doubt(shop)
    status, body = await shop.admin.post(_resolve(question), {"outcome": "did_not_happen"})
    assert (status, body["code"]) == (403, "SELF_APPROVAL")
    status, body = await (await shop.person("bot", "agent")).post(_resolve(question), {"outcome": "happened"})
    assert (status, body["code"]) == (403, "AGENT_MAY_NOT_APPROVE")
    status, body = await (await shop.person("one")).approve(question["id"])
    assert (status, body["code"]) == (409, "EFFECT_IN_DOUBT")
    unknown = {**question, "receipt_id": "01990000-0000-7000-8000-000000000000"}
    status, body = await (await shop.person("two")).post(_resolve(unknown), {"outcome": "happened"})
    assert (status, body["code"]) == (404, "RECEIPT_NOT_FOUND")
    assert (await rig.run(run_id))["status"] == "waiting_approval"


async def test_who_asked_for_what_somebody_else_tried_again_does_not_settle_it_either(shop: Shop, rig: Rig) -> None:
    async def body(calls: int) -> None:
        if calls == 1:
            raise Terminal("not today")
        raise ConnectionResetError("gone")

    bank(shop, body)
    await rig.apply(PAY)
    ann, bob = await shop.person("ann", "admin"), await shop.person("bob", "admin")
    run = await shop.ended(await shop.start(ann, "pay", amount=5, to="ada"))
    _, again = await bob.post(f"/api/runs/{run['id']}/retry")
    question = await shop.held(UUID(again["id"]))
    await rig.cancel(UUID(again["id"]))
    for person in (ann, bob):
        status, body_ = await person.post(_resolve(question), {"outcome": "did_not_happen"})
        assert (status, body_["code"]) == (403, "SELF_APPROVAL")
    status, receipt = await shop.admin.post(_resolve(question), {"outcome": "did_not_happen"})
    assert (status, receipt["status"]) == (200, "failed")


async def test_a_doubtful_effect_that_was_approved_is_approved_anew_and_may_be_edited(shop: Shop, rig: Rig) -> None:
    async def body(calls: int) -> str:
        if calls == 1:
            raise ConnectionResetError
        return "paid"

    bank(shop, body, risk="med", key=None)
    await rig.apply(PAY)
    one, two = await shop.person("one"), await shop.person("two")
    run_id = await shop.start(shop.admin, "pay", amount=5, to="ada")
    await one.approve((await shop.held(run_id))["id"])
    doubt = await shop.held(run_id)
    await one.post(_resolve(doubt), {"outcome": "did_not_happen"})
    again = await shop.held(run_id)
    assert (again["kind"], len(shop.done)) == ("action", 1), "an approval is used once"
    await one.approve(again["id"], patch={"amount": 4})
    seen = await two.get(f"/api/approvals/{again['id']}")
    await two.approve(again["id"], digest=seen["action"]["digest"])
    run = await shop.ended(run_id)
    assert (run["status"], run["error"]) == ("succeeded", None)
    assert [line.split()[-1] for line in shop.done] == ["5", "4"] and len(set(shop.done)) == 2


# ---------------------------------------------------------------- a run that ends during a write


@pytest.mark.parametrize(("idempotent", "status"), [(False, "in_doubt"), (True, "failed")])
async def test_canceling_a_write_in_flight_says_so_on_its_receipt(
    idempotent: bool, status: str, shop: Shop, rig: Rig
) -> None:
    began = asyncio.Event()

    async def body(calls: int) -> None:
        began.set()
        await asyncio.Event().wait()

    bank(shop, body, idempotent=idempotent)
    await rig.apply(PAY)
    run_id = await shop.start(shop.admin, "pay", amount=5, to="ada")
    async with rig.worker():
        await began.wait()
        assert (await shop.admin.post(f"/api/runs/{run_id}/cancel"))[0] == 200
        run = await rig.until(run_id)
    assert run["status"] == "canceled"
    (receipt,) = await shop.receipts(run_id)
    assert receipt["status"] == status
    if status == "in_doubt":
        finder = await shop.person("finder")
        got, receipt = await finder.post(f"/api/receipts/{receipt['id']}/resolve", {"outcome": "did_not_happen"})
        assert (got, receipt["status"]) == (200, "failed"), "also when its run has ended"


async def test_a_write_that_waits_for_a_thread_never_begins_after_a_cancel(shop: Shop, rig: Rig) -> None:
    busy = threading.Event()

    @rig.tool("bank.look")
    def look(ctx: Context) -> None:
        busy.set()
        while True:
            ctx.heartbeat()
            threading.Event().wait(0.001)

    @rig.tool("bank.pay", writes=True, risk="low")
    def pay() -> None:
        shop.done.append("paid")

    await rig.apply("{name: w, steps: [{id: a, needs: [], tool: bank.look}, {id: b, needs: [], tool: bank.pay}]}")
    run_id = await rig.start("w")
    async with rig.worker(capacity=1):
        await asyncio.to_thread(busy.wait, 20)
        await rig.cancel(run_id)
        run = await rig.until(run_id)
    assert (run["status"], shop.done) == ("canceled", [])
    assert [r["status"] for r in await shop.receipts(run_id)] == ["failed"], "and nobody has to look"


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_run_that_ends_after_its_worker_was_lost_leaves_no_effect_that_nobody_looks_at(
    how: str, shop: Shop, rig: Rig
) -> None:
    began = asyncio.Event()

    async def body(calls: int) -> None:
        began.set()
        await asyncio.Event().wait()

    bank(shop, body)
    await rig.apply(PAY)
    _, started = await shop.admin.post(
        "/api/runs", {"workflow": "pay", "input": {"amount": 5, "to": "ada"}, "deadline_seconds": 3000}
    )
    run_id = UUID(started["id"])
    task = asyncio.create_task(Worker(rig.database, rig.settings, tools=rig.tools).run(asyncio.Event()))
    await began.wait()
    if how == "cancel":
        rig.clock.freeze()
        task.cancel()
        await asyncio.wait([task])
        await rig.sql("UPDATE interlock.worker SET heartbeat_at = heartbeat_at - interval '1 minute'")
        await rig.sweep()
        assert (await shop.admin.post(f"/api/runs/{run_id}/cancel"))[1]["status"] == "canceled"
    else:
        await lose(rig, task)
        assert (await shop.ended(run_id))["reason"] == "timed_out"
    assert (await rig.run(run_id))["completed_at"]
    assert [r["status"] for r in await shop.receipts(run_id)] == ["in_doubt"]


# ---------------------------------------------------------------- reversing


UNDO = """
name: charge
steps:
  - {id: charge, tool: bank.charge, input: {amount: "${input.amount}", customer: ada}}
"""


def _undoable(shop: Shop, **options: Any) -> None:
    @shop.rig.tool(
        "bank.charge",
        writes=True,
        undo="bank.refund",
        key="charge:{customer}",
        show=["customer", "id"],
        **{"risk": "low", **options},
    )
    async def charge(amount: int, customer: str) -> dict[str, Any]:
        shop.done.append(f"charge {amount}")
        return {"id": "ch_1", "card": "4242 4242"}

    @shop.rig.tool("bank.refund", writes=True, risk="med", key="refund:{id}")
    async def refund(id: str, amount: int, note: str = "undone") -> None:
        shop.done.append(f"refund {id} {amount} {note}")


async def test_an_effect_is_undone_by_a_governed_run_at_most_once(shop: Shop, rig: Rig) -> None:
    _undoable(shop)
    await rig.apply(UNDO)
    run = await shop.ended(await shop.start(shop.admin, "charge", amount=5))
    (receipt,) = await shop.receipts(run["id"])
    assert (receipt["reversible"], receipt["undo"], receipt["reversal"]) == (True, "bank.refund", None)
    path = f"/api/receipts/{receipt['id']}/reverse"
    status, undo = await shop.admin.post(path, {"reason": "wrong card"})
    assert (status, undo["input"]) == (201, {"id": "ch_1", "amount": 5})
    assert (undo["trigger"]["source"], undo["trigger"]["ref"]) == ("reversal", receipt["id"])
    question = await shop.held(UUID(undo["id"]))
    assert (question["tier"], shop.done) == ("med", ["charge 5"]), "the gate stands before an undo too"
    status, body = await shop.admin.post(path)
    assert (status, body["code"], body["run_id"]) == (409, "ALREADY_REVERSED", undo["id"])
    await (await shop.person("one")).approve(question["id"])
    assert (await shop.ended(UUID(undo["id"])))["status"] == "succeeded"
    assert shop.done == ["charge 5", "refund ch_1 5 undone"]
    shown = (await shop.admin.get(f"/api/receipts/{receipt['id']}"))["reversal"]
    assert (shown["run_id"], shown["reason"]) == (undo["id"], "wrong card")


COMPENSATED = """
name: charge
steps:
  - id: charge
    tool: bank.charge
    input: {amount: "${input.amount}", customer: ada}
    compensate: {tool: bank.give_back, input: {charge: "${output.id}", cents: "${input.amount * 100}"}}
"""


@pytest.mark.parametrize("undo", [None, "bank.refund"])
async def test_what_a_step_says_about_undoing_goes_before_what_its_tool_says(
    undo: str | None, shop: Shop, rig: Rig
) -> None:
    @rig.tool("bank.charge", writes=True, risk="low", undo=undo)
    async def charge(amount: int, customer: str) -> dict[str, Any]:
        return {"id": "ch_1"}

    @rig.tool("bank.give_back", writes=True, risk="low")
    async def give_back(charge: str, cents: int) -> None:
        shop.done.append(f"{charge} {cents}")

    await rig.apply(COMPENSATED)
    run = await shop.ended(await shop.start(shop.admin, "charge", amount=5))
    (receipt,) = await shop.receipts(run["id"])
    assert (receipt["reversible"], receipt["undo"]) == (True, "bank.give_back")
    status, undone = await shop.admin.post(f"/api/receipts/{receipt['id']}/reverse")
    assert (status, undone["input"]) == (201, {"charge": "ch_1", "cents": 500})
    assert (await shop.ended(UUID(undone["id"])))["status"] == "succeeded"
    assert shop.done == ["ch_1 500"]
    status, body = await shop.admin.post(f"/api/receipts/{receipt['id']}/reverse")
    assert (status, body["code"]) == (409, "ALREADY_REVERSED")


async def test_undoing_that_asks_for_what_was_not_returned_says_so_and_may_be_asked_for_again(
    shop: Shop, rig: Rig
) -> None:
    @rig.tool("bank.charge", writes=True, risk="low")
    async def charge(amount: int, customer: str) -> dict[str, Any]:
        return {"number": "ch_1"}

    @rig.tool("bank.give_back", writes=True, risk="low")
    async def give_back(charge: str, cents: int) -> None: ...

    await rig.apply(COMPENSATED)
    _, reverse = await _charged(shop)
    status, body = await shop.admin.post(reverse)
    assert (status, body["code"]) == (409, "NOT_REVERSIBLE")
    assert "output.id" in body["detail"]
    assert await rig.sql("SELECT * FROM interlock.reversal") == []


async def test_an_effect_is_undone_in_the_workspace_in_which_it_was_done(shop: Shop, rig: Rig) -> None:
    """The policy for that workspace also judges the reversal, for every caller."""
    _undoable(shop)
    await rig.apply(UNDO)
    _, reverse = await _charged(shop, await shop.person("blue", "operator", workspace_id="blue"))
    freeze = 'forbid (principal, action == Action::"bank.refund", resource == Env::"blue");'
    await shop.admin.publish(f'@id("all") permit (principal, action, resource);\n@id("freeze") {freeze}')
    _, undo = await shop.admin.post(reverse)
    assert undo["workspace_id"] == "blue"
    run = await shop.ended(UUID(undo["id"]))
    assert (run["reason"], shop.done) == ("policy_denied", ["charge 5"])


async def _charged(shop: Shop, who: Person | None = None) -> tuple[UUID, str]:
    """A run that charged, and the path of its reversal."""
    run = await shop.ended(await shop.start(who or shop.admin, "charge", amount=5))
    (receipt,) = await shop.receipts(run["id"])
    return run["id"], f"/api/receipts/{receipt['id']}/reverse"


async def test_a_key_whose_effect_was_undone_is_free_again(shop: Shop, rig: Rig) -> None:
    _undoable(shop)
    await rig.apply(UNDO)
    _, reverse = await _charged(shop)
    _, undo = await shop.admin.post(reverse)
    question = await shop.held(UUID(undo["id"]))
    waiting = await shop.start(shop.admin, "charge", amount=5)
    async with rig.worker():
        await rig.until_journal(waiting, "charge: running -retry-> pending")
    error = (await rig.run(waiting))["step"]["charge"]["last_error"]
    assert error["type"] == "EffectUnderWay" and undo["id"] in error["message"]
    await rig.cancel(waiting)
    await (await shop.person("one")).approve(question["id"])
    assert (await shop.ended(UUID(undo["id"])))["status"] == "succeeded"
    await _charged(shop)
    assert shop.done == ["charge 5", "refund ch_1 5 undone", "charge 5"]
    again = await shop.ended(await shop.start(shop.admin, "charge", amount=5))
    assert (again["status"], len(shop.done)) == ("succeeded", 3), "the last one stands, and answers"


@pytest.mark.parametrize("how", ["rejected", "canceled", "failed"])
async def test_an_undo_that_came_to_nothing_may_be_tried_again(how: str, shop: Shop, rig: Rig) -> None:
    broken = how == "failed"

    @rig.tool("bank.charge", writes=True, risk="low", undo="bank.refund")
    async def charge(amount: int, customer: str) -> dict[str, Any]:
        return {"id": "ch_1"}

    @rig.tool("bank.refund", writes=True, risk="low" if how == "failed" else "med")
    async def refund(id: str) -> None:
        if broken:
            raise Terminal("closed")
        shop.done.append(f"refund {id}")

    await rig.apply(UNDO)
    _, reverse = await _charged(shop)
    one = await shop.person("one")

    async def gave_up(run_id: str) -> None:
        if how == "rejected":
            await one.reject((await shop.held(UUID(run_id)))["id"], reason="no")
        elif how == "canceled":
            await shop.held(UUID(run_id))
            await rig.cancel(UUID(run_id))
        assert (await shop.ended(UUID(run_id)))["status"] in ("failed", "canceled")

    _, first = await shop.admin.post(reverse)
    await gave_up(first["id"])
    status, second = await shop.admin.post(reverse)
    assert status == 201, second
    status, problem = await shop.admin.post(f"/api/runs/{first['id']}/retry")
    assert (status, problem["code"], problem["run_id"]) == (409, "ALREADY_REVERSED", second["id"])
    await gave_up(second["id"])
    # Retrying the latest holder works too. Then no other run may reverse until that run has also given up.
    status, third = await shop.admin.post(f"/api/runs/{second['id']}/retry")
    assert status == 201, third
    status, problem = await shop.admin.post(reverse)
    assert (status, problem["code"], problem["run_id"]) == (409, "ALREADY_REVERSED", third["id"])
    broken = False
    if how != "failed":
        await one.approve((await shop.held(UUID(third["id"])))["id"])
    assert (await shop.ended(UUID(third["id"])))["status"] == "succeeded"
    assert (await shop.admin.post(reverse))[1]["run_id"] == third["id"]
    assert shop.done == ["refund ch_1"]


async def test_an_edited_effect_is_undone_as_it_was_done(shop: Shop, rig: Rig) -> None:
    _undoable(shop, risk="med")
    await rig.apply(UNDO)
    run_id = await shop.start(shop.admin, "charge", amount=5)
    one, two = await shop.person("one"), await shop.person("two")
    question = await shop.held(run_id)
    await one.approve(question["id"], patch={"amount": 3})
    seen = await two.get(f"/api/approvals/{question['id']}")
    await two.approve(question["id"], digest=seen["action"]["digest"])
    await shop.ended(run_id)
    (receipt,) = await shop.receipts(run_id)
    _, undo = await shop.admin.post(f"/api/receipts/{receipt['id']}/reverse")
    assert undo["input"] == {"id": "ch_1", "amount": 3}


async def test_what_did_not_happen_or_names_no_undo_or_lacks_its_input_is_not_reversible(shop: Shop, rig: Rig) -> None:
    async def fails(calls: int) -> None:
        raise Terminal("no")

    bank(shop, fails, undo="bank.refund")

    @rig.tool("bank.gift", writes=True, risk="low")
    async def gift() -> None: ...

    @rig.tool("bank.lend", writes=True, risk="low", undo="bank.refund")
    async def lend(amount: int) -> int:
        return amount

    @rig.tool("bank.refund", writes=True, risk="low")
    async def refund(id: str) -> None: ...

    @rig.tool("bank.sell", writes=True, risk="low", undo="bank.nothing")
    async def sell() -> None: ...

    await rig.apply(PAY)
    for name, input in (("gift", "{}"), ("lend", "{amount: 1}"), ("sell", "{}")):
        await rig.apply(f"name: {name}\nsteps:\n  - {{id: a, tool: bank.{name}, input: {input}}}")
    expected = {"gift": "NOT_REVERSIBLE", "lend": "NOT_REVERSIBLE", "sell": "TOOL_NOT_FOUND", "pay": "NOT_REVERSIBLE"}
    for name, code in expected.items():
        given: dict[str, Any] = {"amount": 1, "to": "ada"} if name == "pay" else {}
        run = await shop.ended(await shop.start(shop.admin, name, **given))
        (receipt,) = await shop.receipts(run["id"])
        status, body = await shop.admin.post(f"/api/receipts/{receipt['id']}/reverse")
        assert (name, status, body["code"]) == (name, 409, code)
    assert await rig.sql("SELECT * FROM interlock.reversal") == []


async def test_receipts_show_shapes_and_not_values_except_what_the_tool_lets_them(shop: Shop, rig: Rig) -> None:
    _undoable(shop)
    await rig.apply(UNDO)
    run = await shop.ended(await shop.start(shop.admin, "charge", amount=4711))
    (receipt,) = await shop.receipts(run["id"])
    assert receipt["request_metadata"]["customer"] == "ada"
    assert receipt["request_metadata"]["amount"]["type"] == "number"
    assert receipt["response_metadata"]["id"] == "ch_1"
    assert (receipt["response_metadata"]["card"]["type"], receipt["response_metadata"]["card"]["size"]) == ("string", 9)
    assert "4711" not in str(receipt) and "4242" not in str(receipt)
