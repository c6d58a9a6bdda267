"""Compensation: a run that fails undoes its effects, last first, under the gate."""

import asyncio
from typing import Any
from uuid import UUID

import pytest
from tests.governed.conftest import Person, Shop, lose
from tests.governed.test_crash import CrashAt, drive_to_their_deaths, moments_of_a_run
from tests.rig import Hold, Rig

from interlock import Context, Retryable, Terminal
from interlock.store import sql
from interlock.worker.run_driver import Driver
from interlock.worker.worker import Worker

TRIP = """
name: trip
steps:
  - id: flight
    tool: trip.book
    input: {what: flight}
    compensate: {tool: trip.cancel, input: {booking: "${output.id}"}}
  - {id: look, tool: trip.look}
  - id: hotel
    tool: trip.book
    input: {what: hotel}
    compensate: {tool: trip.cancel, input: {booking: "${output.id}"}}
  - {id: car, tool: trip.car}
"""


class Agency:
    """The bookings, the order of calls, and the scripted failures."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.done: list[str] = []
        self.keys: list[str] = []
        self.broken: dict[str, list[Exception]] = {}

        @rig.tool("trip.book", writes=True, risk="low")
        async def book(ctx: Context, what: str) -> dict[str, str]:
            self.done.append(f"book {what}")
            return {"id": f"{what}-1"}

        @rig.tool("trip.cancel", writes=True, risk="low", idempotent=True)
        async def cancel(ctx: Context, booking: str) -> dict[str, str]:
            if self.broken.get(booking):
                raise self.broken[booking].pop(0)
            self.done.append(f"cancel {booking}")
            self.keys.append(ctx.idempotency_key)
            return {"canceled": booking}

        @rig.tool("trip.look")
        async def look() -> None: ...

        @rig.tool("trip.car", writes=True, risk="low")
        async def car() -> None:
            raise Terminal("no car left")

    async def undone(self) -> None:
        assert self.done == ["book flight", "book hotel", "cancel hotel-1", "cancel flight-1"]
        assert len(set(self.keys)) == 2, "each undoing has a key of its own"


@pytest.fixture
def agency(rig: Rig) -> Agency:
    return Agency(rig)


def log(run: dict[str, Any]) -> list[tuple[str, str]]:
    return [(step["undoes"], step["status"]) for step in run["compensation"]]


async def at_gate(rig: Rig) -> UUID:
    """A run that booked both and waits at an approval gate, and for an event beside it."""
    await rig.apply(
        TRIP.replace("{id: car, tool: trip.car}", "{id: gate, needs: [hotel], approval: {}}")
        + "  - {id: news, needs: [hotel], wait: {event: e, correlation: c}}\n"
    )
    run_id = await rig.start("trip")
    run = await rig.work_until(run_id, "waiting_approval")
    assert run["status"] == "waiting_approval"
    return run_id


# ---------------------------------------------------------------- compensating


async def test_a_run_that_fails_undoes_what_it_did_in_reverse_order_and_then_fails(
    shop: Shop, rig: Rig, agency: Agency
) -> None:
    await rig.apply(TRIP)
    run_id = await rig.start("trip")
    run = await shop.ended(run_id)
    await agency.undone()
    assert (run["status"], run["reason"], run["error"]["message"]) == ("failed", "terminal_error", "no car left")
    assert log(run) == [("hotel", "succeeded"), ("flight", "succeeded")]
    assert run["compensation"][0]["output"] == {"canceled": "hotel-1"}
    assert {key: step["status"] for key, step in run["step"].items()} == {
        "flight": "succeeded", "look": "succeeded", "hotel": "succeeded", "car": "failed",
    }  # fmt: skip
    journal = await rig.journal(run_id)
    assert journal.index("run: running -compensate-> canceling") < journal.index("hotel:undo: pending -claim-> running")
    assert journal[-1] == "run: canceling -fail-> failed"
    receipts = {r["step_key"]: r["status"] for r in await shop.receipts(run_id)}
    assert receipts == {
        "flight": "succeeded", "hotel": "succeeded", "car": "failed",
        "hotel:undo": "succeeded", "flight:undo": "succeeded",
    }  # fmt: skip


async def test_a_run_without_compensation_fails_as_before(shop: Shop, rig: Rig, agency: Agency) -> None:
    await rig.apply("name: t\nsteps: [{id: a, tool: trip.book, input: {what: x}}, {id: b, tool: trip.car}]")
    run = await shop.ended(await rig.start("t"))
    assert (run["status"], run["compensation"]) == ("failed", [])
    assert "run: running -fail-> failed" in await rig.journal(run["id"])


async def test_a_run_that_succeeds_undoes_nothing(shop: Shop, rig: Rig, agency: Agency) -> None:
    await rig.apply(TRIP.replace("{id: car, tool: trip.car}", "{id: car, tool: trip.look}"))
    run = await shop.ended(await rig.start("trip"))
    assert (run["status"], run["compensation"], agency.done) == ("succeeded", [], ["book flight", "book hotel"])


async def test_a_cancel_undoes_and_nobody_is_asked_about_the_rest_meanwhile(
    shop: Shop, rig: Rig, agency: Agency
) -> None:
    run_id = await at_gate(rig)
    await rig.cancel(run_id)
    run = await rig.run(run_id)
    assert (run["status"], log(run)) == ("canceling", [("hotel", "pending"), ("flight", "pending")])
    assert (run["step"]["gate"]["status"], run["step"]["news"]["status"]) == ("canceled", "canceled")
    assert (await shop.question(run_id, "canceled"))["step_key"] == "gate"
    assert await rig.sql("SELECT FROM interlock.event_subscription") == []
    run = await shop.ended(run_id)
    await agency.undone()
    assert (run["status"], run["reason"]) == ("canceled", "canceled_by_user")
    assert (await rig.journal(run_id))[-1] == "run: canceling -stopped-> canceled"


async def test_a_cancel_in_the_middle_of_a_step_interrupts_it_and_undoes_the_others(
    shop: Shop, rig: Rig, agency: Agency
) -> None:
    hold = Hold()

    @rig.tool("trip.stay")
    async def stay() -> None:
        await hold()

    await rig.apply(TRIP.replace("trip.car", "trip.stay"))
    run_id = await rig.start("trip")
    async with rig.worker():
        await hold.inside()
        await rig.cancel(run_id)
        run = await rig.until(run_id)
    await agency.undone()
    assert hold.interrupted and (run["status"], run["step"]["car"]["status"]) == ("canceled", "canceled")


async def test_a_run_that_takes_too_long_is_undone_too(shop: Shop, rig: Rig, agency: Agency) -> None:
    run_id = await at_gate(rig)
    await rig.sql("UPDATE interlock.run SET deadline_at = now()")
    rig.clock.advance(1)
    await rig.sweep()
    run = await shop.ended(run_id)
    await agency.undone()
    assert (run["status"], run["reason"]) == ("failed", "timed_out")


async def test_a_rejection_is_a_failure_and_undoes(shop: Shop, rig: Rig, agency: Agency) -> None:
    run_id = await at_gate(rig)
    await rig.decide(run_id, approves=False, who=await rig.person("ann", "approver"))
    assert (await rig.run(run_id))["status"] == "canceling"
    run = await shop.ended(run_id)
    await agency.undone()
    assert (run["status"], run["reason"]) == ("failed", "rejected")


async def test_in_a_graph_the_last_thing_done_is_undone_first_one_at_a_time(
    shop: Shop, rig: Rig, agency: Agency
) -> None:
    first, second = Hold(), Hold()
    undoing: list[str] = []

    @rig.tool("t.do", writes=True, risk="low")
    async def do(n: int) -> int:
        await (first if n == 1 else second)()
        return n

    @rig.tool("t.undo", writes=True, risk="low")
    async def undo(n: int) -> None:
        assert not undoing, "one at a time"
        undoing.append("")
        await asyncio.sleep(0)
        undoing.pop()
        agency.done.append(f"undo {n}")

    undoes = 'compensate: {tool: t.undo, input: {n: "${output}"}}'
    await rig.apply(
        f"name: g\nsteps:\n  - {{id: a, needs: [], tool: t.do, input: {{n: 1}}, {undoes}}}\n"
        f"  - {{id: b, needs: [], tool: t.do, input: {{n: 2}}, {undoes}}}\n"
        "  - {id: c, needs: [a, b], tool: trip.car}\n"
    )
    run_id = await rig.start("g")
    async with rig.worker():
        await first.inside()
        await second.inside()
        second.release.set()
        await rig.until_journal(run_id, "b: running -succeed-> succeeded")
        first.release.set()
        run = await rig.until(run_id)
    assert (run["status"], agency.done) == ("failed", ["undo 1", "undo 2"])


async def test_what_another_run_did_is_not_this_ones_to_undo(shop: Shop, rig: Rig, agency: Agency) -> None:
    @rig.tool("t.once", writes=True, risk="low", key="once:{n}")
    async def once(n: int) -> dict[str, str]:
        return {"id": "shared"}

    undoes = 'compensate: {tool: trip.cancel, input: {booking: "${output.id}"}}'
    steps = f"steps:\n  - {{id: a, tool: t.once, input: {{n: 1}}, {undoes}}}\n"
    await rig.apply(f"name: well\n{steps}")
    await rig.apply(f"name: badly\n{steps}  - {{id: b, tool: trip.car}}\n")
    assert (await shop.ended(await rig.start("well")))["status"] == "succeeded"
    run = await shop.ended(await rig.start("badly"))
    assert (run["status"], run["compensation"], agency.done) == ("failed", [], [])
    for _ in range(2):  # nor that of a run which continues this one
        _, again = await shop.admin.post(f"/api/runs/{run['id']}/retry")
        run = await shop.ended(UUID(again["id"]))
        assert (run["status"], run["steps"][0]["attempt"], run["compensation"]) == ("failed", 1, [])
    assert agency.done == []


async def test_what_another_run_did_and_was_undone_since_is_not_taken_over(shop: Shop, rig: Rig, rooms: Agency) -> None:
    await rig.apply("name: first\nsteps: [{id: b, tool: trip.reserve, input: {room: '12'}}]")
    await rig.apply("name: r\nsteps: [{id: a, tool: trip.reserve, input: {room: '12'}}, {id: car, tool: trip.car}]")
    first = await shop.ended(await rig.start("first"))
    run = await shop.ended(await rig.start("r"))
    assert (run["steps"][0]["status"], rooms.done) == ("succeeded", ["reserve 12"])
    [receipt] = await shop.receipts(first["id"])
    _, other = await shop.admin.post(f"/api/receipts/{receipt['id']}/reverse")
    await shop.ended(UUID(other["id"]))
    status, problem = await shop.admin.post(f"/api/runs/{run['id']}/retry")
    assert (status, problem["code"], problem["receipt_id"]) == (409, "EFFECT_UNDONE", receipt["id"])


async def test_a_run_that_went_over_its_cap_may_still_undo(shop: Shop, rig: Rig, agency: Agency) -> None:
    await rig.apply("caps: {max_writes_per_run: 2}\n" + TRIP)
    run = await shop.ended(await rig.start("trip"))
    await agency.undone()
    assert (run["status"], run["reason"]) == ("failed", "cap_exceeded")


async def test_a_run_that_was_undone_cannot_be_continued(shop: Shop, rig: Rig, agency: Agency) -> None:
    await rig.apply(TRIP)
    run = await shop.ended(await rig.start("trip"))
    status, problem = await shop.admin.post(f"/api/runs/{run['id']}/retry")
    assert (status, problem["code"]) == (409, "RUN_COMPENSATED")


async def test_what_a_continued_run_took_over_is_undone_even_before_a_worker_saw_it(
    shop: Shop, rig: Rig, agency: Agency
) -> None:
    """The effect became known only after the first run had failed, so the first run did not undo it."""
    began = asyncio.Event()

    @rig.tool("trip.cut", writes=True, risk="low")
    async def cut() -> None:
        began.set()
        await asyncio.Event().wait()

    await rig.apply(TRIP.replace("tool: trip.book\n    input: {what: flight}", "tool: trip.cut", 1))
    run_id = await rig.start("trip")
    task = asyncio.create_task(Worker(rig.database, rig.settings, tools=rig.tools).run(asyncio.Event()))
    await began.wait()
    await lose(rig, task)
    question = await shop.held(run_id)
    ann = await shop.person("ann")
    path = f"/api/receipts/{question['receipt_id']}/resolve"
    assert (await ann.post(path, {"outcome": "fail"}))[0] == 200
    assert (await rig.run(run_id))["compensation"] == []
    assert (await ann.post(path, {"outcome": "happened", "output": {"id": "flight-1"}}))[0] == 200
    status, again = await shop.admin.post(f"/api/runs/{run_id}/retry")
    assert (status, again["status"], again["steps"][0]["status"]) == (201, "pending", "succeeded")
    status, canceled = await shop.admin.post(f"/api/runs/{again['id']}/cancel")
    assert (canceled["status"], [s["undoes"] for s in canceled["compensation"]]) == ("canceling", ["flight"])
    run = await shop.ended(UUID(again["id"]))
    assert (run["status"], agency.done) == ("canceled", ["cancel flight-1"])
    status, problem = await shop.admin.post(f"/api/runs/{run_id}/retry")
    assert (status, problem["code"]) == (409, "EFFECT_UNDONE"), "nobody takes over what the other has undone"


async def test_the_log_of_what_was_undone_is_on_the_wire(shop: Shop, rig: Rig, agency: Agency) -> None:
    await rig.apply(TRIP)
    run = await shop.ended(await rig.start("trip"))
    seen = await shop.admin.get(f"/api/runs/{run['id']}")
    assert [(s["undoes"], s["key"], s["tool"], s["status"], s["attempt"]) for s in seen["compensation"]] == [
        ("hotel", "hotel:undo", "trip.cancel", "succeeded", 1),
        ("flight", "flight:undo", "trip.cancel", "succeeded", 1),
    ]
    events = (await shop.admin.get(f"/api/runs/{run['id']}/events"))["items"]
    [begun] = [e["data"] for e in events if e["data"].get("event") == "compensate"]
    assert begun["undo"] == ["hotel", "flight"] and begun["ending"]["reason"] == "terminal_error"
    await rig.prove()
    assert (await shop.admin.http.get(f"/api/runs/{run['id']}/evidence")).status_code == 200


async def test_an_effect_is_undone_once_whoever_does_it(shop: Shop, rig: Rig, agency: Agency) -> None:
    @rig.tool("trip.reserve", writes=True, risk="low", undo="trip.release")
    async def reserve(booking: str) -> dict[str, str]:
        agency.done.append(f"book {booking}")
        return {"booking": booking}

    @rig.tool("trip.release", writes=True, risk="low", idempotent=True)
    async def release(booking: str) -> None:
        if agency.broken.get(booking):
            raise agency.broken[booking].pop(0)
        agency.done.append(f"cancel {booking}")

    await rig.apply(
        'name: r\nsteps:\n  - {id: a, tool: trip.reserve, input: {booking: "${input.what}"},'
        ' compensate: {tool: trip.release, input: {booking: "${output.booking}"}}}\n  - {id: gate, approval: {}}\n'
    )

    async def reserved(what: str) -> tuple[UUID, str]:
        run_id = await rig.start("r", {"what": what})
        await rig.work_until(run_id, "waiting_approval")
        [receipt] = await shop.receipts(run_id)
        return run_id, f"/api/receipts/{receipt['id']}/reverse"

    # The run compensates first: a person has nothing left to reverse.
    run_id, reverse = await reserved("room")
    await rig.cancel(run_id)
    assert (await shop.ended(run_id))["status"] == "canceled"
    status, problem = await shop.admin.post(reverse)
    assert (status, problem["code"], problem["run_id"]) == (409, "ALREADY_REVERSED", str(run_id))
    # A person reverses first: the run has nothing left to compensate, and names the person.
    run_id, reverse = await reserved("car")
    status, other = await shop.admin.post(reverse)
    assert status == 201 and (await shop.ended(UUID(other["id"])))["status"] == "succeeded"
    await rig.cancel(run_id)
    run = await shop.ended(run_id)
    assert (run["status"], log(run)) == ("canceled", [("a", "succeeded")])
    # The run's compensation failed: a person may reverse the effect.
    agency.broken["boat"] = [Terminal("closed")]
    run_id, reverse = await reserved("boat")
    await rig.cancel(run_id)
    assert (await shop.ended(run_id))["reason"] == "compensation_failed"
    status, other = await shop.admin.post(reverse)
    assert status == 201 and (await shop.ended(UUID(other["id"])))["status"] == "succeeded"
    undone = [line for line in agency.done if line.startswith("cancel")]
    assert undone == ["cancel room", "cancel car", "cancel boat"]


RESERVE = """
name: r
steps:
  - id: a
    tool: trip.reserve
    input: {room: "12"}
    compensate: {tool: trip.release, input: {room: "${output.room}"}}
  - {id: car, tool: trip.car}
"""


@pytest.fixture
def rooms(rig: Rig, agency: Agency) -> Agency:
    @rig.tool("trip.reserve", writes=True, risk="low", key="reserve:{room}", undo="trip.release")
    async def reserve(room: str) -> dict[str, str]:
        agency.done.append(f"reserve {room}")
        return {"room": room}

    @rig.tool("trip.release", writes=True, risk="low")
    async def release(room: str) -> None:
        if agency.broken.get(room):
            raise agency.broken[room].pop(0)
        agency.done.append(f"release {room}")

    return agency


async def test_what_was_undone_is_done_anew_for_the_next_run_that_wants_it(shop: Shop, rig: Rig, rooms: Agency) -> None:
    await rig.apply(RESERVE)
    for _ in range(2):
        assert log(await shop.ended(await rig.start("r"))) == [("a", "succeeded")]
    assert rooms.done == ["reserve 12", "release 12"] * 2


async def test_a_run_undoes_what_somebody_else_gave_up_to_undo(shop: Shop, rig: Rig, rooms: Agency) -> None:
    await rig.apply(RESERVE.replace("{id: car, tool: trip.car}", "{id: gate, approval: {}}"))
    run_id = await rig.start("r")
    await rig.work_until(run_id, "waiting_approval")
    [receipt] = await shop.receipts(run_id)
    rooms.broken["12"] = [Terminal("closed")]
    _, other = await shop.admin.post(f"/api/receipts/{receipt['id']}/reverse")
    assert (await shop.ended(UUID(other["id"])))["status"] == "failed"
    await rig.cancel(run_id)
    run = await shop.ended(run_id)
    assert (run["status"], log(run), rooms.done) == ("canceled", [("a", "succeeded")], ["reserve 12", "release 12"])


async def test_an_undo_has_one_key_whoever_tries_it_and_however_often(shop: Shop, rig: Rig, agency: Agency) -> None:
    """A reversal that failed without an answer may have happened: the other system must recognize the repeated call."""
    keys: list[str] = []

    @rig.tool("trip.reserve", writes=True, risk="low", undo="trip.release")
    async def reserve(room: str) -> dict[str, str]:
        return {"room": room}

    @rig.tool("trip.release", writes=True, risk="low", idempotent=True)
    async def release(ctx: Context, room: str) -> None:
        keys.append(ctx.idempotency_key)
        if len(keys) < 4:
            raise Terminal("no answer")

    await rig.apply(RESERVE)
    run = await shop.ended(await rig.start("r"))
    assert run["reason"] == "compensation_failed"
    [receipt] = [r for r in await shop.receipts(run["id"]) if r["step_key"] == "a"]
    for _ in range(2):
        _, undo = await shop.admin.post(f"/api/receipts/{receipt['id']}/reverse")
        assert (await shop.ended(UUID(undo["id"])))["status"] == "failed"
    _, undo = await shop.admin.post(f"/api/runs/{undo['id']}/retry")
    assert (await shop.ended(UUID(undo["id"])))["status"] == "succeeded"
    assert len(keys) == 4 and len(set(keys)) == 1


async def test_a_run_whose_effect_was_undone_since_is_not_continued_as_if_it_were_done(
    shop: Shop, rig: Rig, rooms: Agency
) -> None:
    await rig.apply("name: r\nsteps: [{id: a, tool: trip.reserve, input: {room: '12'}}, {id: car, tool: trip.car}]")
    run = await shop.ended(await rig.start("r"))
    status, again = await shop.admin.post(f"/api/runs/{run['id']}/retry")
    assert status == 201 and (await shop.ended(UUID(again["id"])))["status"] == "failed"
    [receipt] = [r for r in await shop.receipts(run["id"]) if r["step_key"] == "a"]
    _, other = await shop.admin.post(f"/api/receipts/{receipt['id']}/reverse")
    for run_id in (run["id"], again["id"]):  # also in the run that only took the effect over
        status, problem = await shop.admin.post(f"/api/runs/{run_id}/retry")
        assert (status, problem["code"], problem["receipt_id"]) == (409, "EFFECT_UNDONE", receipt["id"])
        await shop.ended(UUID(other["id"]))


async def test_a_cancel_that_was_under_way_does_not_interrupt_the_undoing(
    shop: Shop, rig: Rig, agency: Agency, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, heard = Hold(), asyncio.Event()
    asked = Driver._interrupt_if_asked

    @rig.tool("trip.slow", writes=True, risk="low")
    async def slow(booking: str) -> None:
        await hold()
        agency.done.append(f"cancel {booking}")
        agency.keys.append(booking)

    async def and_say_so(self: Driver) -> None:
        await asked(self)
        heard.set()

    monkeypatch.setattr(Driver, "_interrupt_if_asked", and_say_so)
    await rig.apply(TRIP.replace("trip.cancel", "trip.slow"))
    run_id = await rig.start("trip")
    async with rig.worker():
        await hold.inside()
        # Sent before the run recorded its compensation, and read after it.
        await sql.post_command(
            rig.database, run_id=run_id, command="cancel", step=None, actor="ann",
            data='{"reason_code": "canceled_by_user", "said": null}', status="canceling",
        )  # fmt: skip
        await heard.wait()
        hold.release.set()
        run = await rig.until(run_id)
    await agency.undone()
    assert not hold.interrupted and (run["status"], run["reason"]) == ("failed", "terminal_error")


# ---------------------------------------------------------------- failing compensation


async def test_a_failing_compensation_is_tried_again_with_backoff(shop: Shop, rig: Rig, agency: Agency) -> None:
    agency.broken["hotel-1"] = [Retryable("busy"), Retryable("busy")]
    await rig.apply(TRIP)
    rig.clock.freeze()
    run_id = await rig.start("trip")
    for attempt in (1, 2):
        async with rig.worker():
            await rig.until_journal(run_id, "hotel:undo: running -retry-> pending", times=attempt)
        run = await rig.run(run_id)
        assert (run["status"], run["compensation"][0]["attempt"]) == ("canceling", attempt)
        assert run["compensation"][0]["last_error"]["message"] == "busy"
        # The run waits as every run does: without a lease.
        [row] = await rig.sql("SELECT lease_worker, resume_at, status FROM interlock.run")
        assert (row["lease_worker"], row["status"]) == (None, "canceling") and row["resume_at"] is not None
        rig.clock.advance(60)
        await rig.sweep()
    run = await shop.ended(run_id)
    await agency.undone()
    assert (run["status"], run["reason"], run["compensation"][0]["attempt"]) == ("failed", "terminal_error", 3)


@pytest.mark.parametrize("canceled", [True, False])
async def test_what_cannot_be_undone_is_shown_and_the_rest_is_undone(
    shop: Shop, rig: Rig, agency: Agency, canceled: bool
) -> None:
    agency.broken["hotel-1"] = [Terminal("not refundable")]
    if canceled:
        run_id = await at_gate(rig)
        await rig.cancel(run_id)
    else:
        await rig.apply(TRIP)
        run_id = await rig.start("trip")
    run = await shop.ended(run_id)
    assert agency.done[2:] == ["cancel flight-1"]
    assert (run["status"], run["reason"]) == ("failed", "compensation_failed")
    assert log(run) == [("hotel", "failed"), ("flight", "succeeded")]
    error = run["error"]
    assert (error["message"], error["code"]) == ("hotel could not be undone: not refundable", "COMPENSATION_FAILED")
    assert error["not_undone"] == ["hotel"]
    assert error.get("because", {}).get("reason") == (None if canceled else "terminal_error")


async def test_an_input_that_has_no_value_fails_the_undoing_and_is_shown(shop: Shop, rig: Rig, agency: Agency) -> None:
    await rig.apply(TRIP.replace("${output.id}", "${output.number}", 1))
    run = await shop.ended(await rig.start("trip"))
    assert (run["reason"], log(run)) == ("compensation_failed", [("hotel", "succeeded"), ("flight", "failed")])
    assert "no such key: number" in run["error"]["message"]


@pytest.mark.parametrize("booking", ["${input.booking}", "${output.id}"])
async def test_a_write_whose_output_was_dropped_is_undone_or_shown(
    shop: Shop, rig: Rig, agency: Agency, booking: str
) -> None:
    @rig.tool("trip.vague", writes=True, risk="low")
    async def vague() -> str:
        agency.done.append("book train")
        return "\0"

    @rig.tool("trip.pay")
    async def pay() -> None:
        raise Terminal("the card is declined")

    await rig.apply(
        "{name: trip, steps: [{id: train, tool: trip.vague,"
        f" compensate: {{tool: trip.cancel, input: {{booking: '{booking}'}}}}}}, {{id: pay, tool: trip.pay}}]}}"
    )
    run = await shop.ended(await rig.start("trip", {"booking": "train-1"}))
    assert run["steps"][0]["status"] == "succeeded"
    if booking == "${input.booking}":
        assert (run["reason"], log(run)) == ("terminal_error", [("train", "succeeded")])
        assert agency.done == ["book train", "cancel train-1"]
    else:
        assert (run["reason"], log(run)) == ("compensation_failed", [("train", "failed")])
        assert run["error"]["not_undone"] == ["train"]


# ---------------------------------------------------------------- the gate

HELD = """
@id("all") permit(principal, action, resource);
@id("ask") @decision("needs_approval") @tier("low") permit(principal, action == Action::"trip.cancel", resource);
"""
DENIED = """
@id("all") permit(principal, action, resource);
@id("never") forbid(principal, action == Action::"trip.cancel", resource);
"""


async def held(shop: Shop, rig: Rig) -> tuple[UUID, Person]:
    """A failed run that needs an approval for each compensation."""
    assert (await shop.admin.publish(HELD))[0] == 200
    await rig.apply(TRIP)
    run_id = await rig.start("trip")
    async with rig.worker():
        await rig.until_journal(run_id, "hotel:undo: running -hold-> waiting_approval")
    return run_id, await shop.person("ann")


async def next_question(shop: Shop, rig: Rig, run_id: UUID, step: str) -> Any:
    async with rig.worker():
        await rig.until_journal(run_id, f"{step}: running -hold-> waiting_approval")
    return await shop.question(run_id)


async def test_a_compensation_that_policy_holds_waits_for_a_person(shop: Shop, rig: Rig, agency: Agency) -> None:
    run_id, ann = await held(shop, rig)
    run = await rig.run(run_id)
    assert (run["status"], log(run)[0]) == ("canceling", ("hotel", "waiting_approval"))
    [row] = await rig.sql("SELECT lease_worker FROM interlock.run")
    assert row["lease_worker"] is None and await rig.sql("SELECT FROM interlock.ready_run") == []
    question = await shop.question(run_id)
    assert (question["step_key"], question["action"]["fields"]) == ("hotel:undo", {"booking": "hotel-1"})
    # A cancel now changes nothing: the run is compensating already and keeps its outcome.
    await rig.cancel(run_id)
    assert (await shop.question(run_id))["id"] == question["id"]
    assert (await ann.approve(question["id"]))[0] == 200
    question = await next_question(shop, rig, run_id, "flight:undo")
    assert (await ann.approve(question["id"]))[0] == 200
    run = await shop.ended(run_id)
    await agency.undone()
    assert (run["status"], run["reason"]) == ("failed", "terminal_error")


async def test_who_refuses_a_compensation_leaves_it_visibly_undone(shop: Shop, rig: Rig, agency: Agency) -> None:
    await rig.apply(TRIP.replace("name: trip", "name: trip\non_reject: continue"))
    run_id, ann = await held(shop, rig)
    await ann.reject((await shop.question(run_id))["id"], reason="keep the room")
    question = await next_question(shop, rig, run_id, "flight:undo")
    await ann.approve(question["id"])
    run = await shop.ended(run_id)
    assert (run["reason"], log(run)) == ("compensation_failed", [("hotel", "failed"), ("flight", "succeeded")])
    assert "keep the room" in run["error"]["message"]


async def test_a_compensation_that_policy_denies_is_shown(shop: Shop, rig: Rig, agency: Agency) -> None:
    assert (await shop.admin.publish(DENIED))[0] == 200
    await rig.apply(TRIP)
    run = await shop.ended(await rig.start("trip"))
    assert (run["reason"], agency.done) == ("compensation_failed", ["book flight", "book hotel"])
    assert log(run) == [("hotel", "failed"), ("flight", "failed")]
    assert run["error"]["not_undone"] == ["hotel", "flight"]


# ---------------------------------------------------------------- crashes


async def test_a_worker_that_dies_while_it_undoes_is_followed_by_another(shop: Shop, rig: Rig, agency: Agency) -> None:
    began = asyncio.Event()

    @rig.tool("trip.slow", writes=True, risk="low", idempotent=True)
    async def slow(ctx: Context, booking: str) -> None:
        agency.keys.append(ctx.idempotency_key)
        if not began.is_set():
            began.set()
            await asyncio.Event().wait()
        agency.done.append(f"cancel {booking}")

    await rig.apply(TRIP.replace("trip.cancel", "trip.slow"))
    run_id = await rig.start("trip")
    task = asyncio.create_task(Worker(rig.database, rig.settings, tools=rig.tools).run(asyncio.Event()))
    await began.wait()
    assert (await rig.run(run_id))["status"] == "canceling"
    await lose(rig, task)
    run = await shop.ended(run_id)
    await agency.undone()
    assert agency.keys[0] == agency.keys[1], "the same effect has the same key"
    assert (run["status"], run["reason"], run["resume_count"]) == ("failed", "terminal_error", 1)


async def test_an_undoing_that_was_cut_off_and_cannot_be_repeated_is_asked_about(
    shop: Shop, rig: Rig, agency: Agency
) -> None:
    began = asyncio.Event()

    @rig.tool("trip.slow", writes=True, risk="low")
    async def slow(booking: str) -> None:
        agency.done.append(f"cancel {booking}")
        if not began.is_set():
            began.set()
            await asyncio.Event().wait()

    await rig.apply(TRIP.replace("trip.cancel", "trip.slow"))
    run_id = await rig.start("trip")
    task = asyncio.create_task(Worker(rig.database, rig.settings, tools=rig.tools).run(asyncio.Event()))
    await began.wait()
    await lose(rig, task)
    async with rig.worker():
        await rig.until_journal(run_id, "hotel:undo: running -hold-> waiting_approval")
    question = await shop.question(run_id)
    assert (question["kind"], question["step_key"]) == ("in_doubt", "hotel:undo")
    ann = await shop.person("ann")
    assert (await ann.post(f"/api/receipts/{question['receipt_id']}/resolve", {"outcome": "happened"}))[0] == 200
    run = await shop.ended(run_id)
    assert agency.done == ["book flight", "book hotel", "cancel hotel-1", "cancel flight-1"]
    assert (run["status"], log(run)) == ("failed", [("hotel", "succeeded"), ("flight", "succeeded")])


SAGA = """
name: saga
steps:
  - id: book
    tool: saga.book
    compensate: {tool: saga.cancel, input: {booking: "${output.id}"}}
  - {id: fail, tool: saga.fail}
"""


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.chaos)])
async def test_a_worker_that_dies_at_any_line_leaves_nothing_half_undone(
    shop: Shop, rig: Rig, agency: Agency, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Kill workers at every line: first of the step, then of its failure, then of its compensation."""
    booked: dict[UUID, set[str]] = {}
    canceled: dict[UUID, set[str]] = {}

    @rig.tool("saga.book", writes=True, risk="low", idempotent=True)
    async def book(ctx: Context) -> dict[str, str]:
        booked.setdefault(ctx.run_id, set()).add(ctx.idempotency_key)
        return {"id": str(ctx.run_id)}

    @rig.tool("saga.cancel", writes=True, risk="low", idempotent=True)
    async def cancel(ctx: Context, booking: str) -> None:
        assert booking == str(ctx.run_id)
        canceled.setdefault(ctx.run_id, set()).add(ctx.idempotency_key)

    @rig.tool("saga.fail", writes=True, risk="low", idempotent=True)
    async def fail() -> None:
        raise Terminal("no")

    await rig.apply(SAGA)
    moments = await moments_of_a_run(rig, monkeypatch, "saga", ending="failed")
    assert len(moments) > 400, "the trace sees the whole way"
    crash = CrashAt({await rig.start("saga"): moment for moment in moments[::step]})
    await drive_to_their_deaths(rig, crash, monkeypatch)
    assert crash.where == crash.moments, "every run died at its line"
    async with rig.worker(capacity=200):
        for run_id, place in crash.where.items():
            run = await rig.until(run_id, seconds=30)
            assert (run["status"], run["reason"]) == ("failed", "terminal_error"), (place, run["error"])
            assert log(run) == [("book", "succeeded")], place
            assert len(booked[run_id]) == len(canceled[run_id]) == 1, place
