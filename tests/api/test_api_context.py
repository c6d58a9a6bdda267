"""The context of every transition of a run: its true initiator, and its approval or event (004 §2.2).

Finding: specification DEV-2. Each scenario drives one run through the API and a worker; EXPECTED lists what the
run's events say. Together the scenarios cover every transition of the table.
"""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import httpx2
import pytest
from tests.rig import Hold, Rig

from interlock import Terminal
from interlock.lifecycle import RUN

BOOK = "{id: book, tool: t.book, compensate: {tool: t.unbook}}"
WAIT = "wait: {event: bank.settled, correlation: c1, timeout: 1h}"
WORKFLOWS = f"""
{{name: plain, steps: [{{id: a, tool: t.echo}}]}}
{{name: hold, steps: [{{id: a, tool: t.hold}}]}}
{{name: hold_until, timeout: 1h, steps: [{{id: a, tool: t.hold}}]}}
{{name: gate, steps: [{{id: ask, approval: {{summary: really}}}}, {{id: a, tool: t.echo}}]}}
{{name: gate_last, steps: [{{id: a, tool: t.echo}}, {{id: ask, approval: {{}}}}]}}
{{name: gate_complete, on_reject: complete, steps: [{{id: ask, approval: {{}}}}, {{id: a, tool: t.echo}}]}}
{{name: wait, steps: [{{id: w, {WAIT}}}, {{id: a, tool: t.echo}}]}}
{{name: wait_last, steps: [{{id: a, tool: t.echo}}, {{id: w, {WAIT}}}]}}
{{name: timer, steps: [{{id: w, wait: {{duration: 60s}}}}, {{id: a, tool: t.echo}}]}}
{{name: gate_wait, steps: [{{id: ask, approval: {{}}}}, {{id: w, {WAIT}}}, {{id: b, approval: {{}}}}]}}
{{name: held, steps: [{{id: a, tool: t.write}}]}}
{{name: undo_gate, steps: [{BOOK}, {{id: ask, approval: {{}}}}]}}
{{name: undo_wait, steps: [{BOOK}, {{id: w, {WAIT}}}]}}
{{name: undo_fail, steps: [{BOOK}, {{id: a, tool: t.fail}}]}}
{{name: undo_broken, steps: [{{id: book, tool: t.book, compensate: {{tool: t.fail}}}}, {{id: ask, approval: {{}}}}]}}
{{name: undo_hold, steps: [{BOOK}, {{id: a, tool: t.hold}}]}}
"""
ASKED, YES, NO = "approval requested for admin", "approval approved by grace", "approval rejected by grace"
LATE = "approval expired by None"
CALLED, CAME, MISSED = "bank.settled expected", "bank.settled evt_1 from bank", "bank.settled expected"

# Each line: from -event-> to: initiator, user; and the approval or the event.
EXPECTED: dict[str, list[str]] = {
    "succeeds": ["pending -start-> running: system", "running -succeed-> succeeded: system"],
    "gate_approved": [
        f"pending -hold-> waiting_approval: system; {ASKED}",
        f"waiting_approval -resume-> running: approval grace; {YES}",
        "running -succeed-> succeeded: system",
    ],
    "gate_rejected": [
        f"pending -hold-> waiting_approval: system; {ASKED}",
        f"waiting_approval -fail-> failed: approval grace; {NO}",
    ],
    "gate_expired": [
        f"pending -hold-> waiting_approval: system; {ASKED}",
        f"waiting_approval -fail-> failed: timeout; {LATE}",
    ],
    "gate_rejected_completes": [
        f"pending -hold-> waiting_approval: system; {ASKED}",
        f"waiting_approval -succeed-> succeeded: approval grace; {NO}",
    ],
    "gate_last_approved": [
        "pending -start-> running: system",
        f"running -hold-> waiting_approval: system; {ASKED}",
        f"waiting_approval -succeed-> succeeded: approval grace; {YES}",
    ],
    "event_came": [
        f"pending -park-> waiting_external: system; {CALLED}",
        f"waiting_external -resume-> running: webhook bank; {CAME}",
        "running -succeed-> succeeded: system",
    ],
    "event_came_last": [
        "pending -start-> running: system",
        f"running -park-> waiting_external: system; {CALLED}",
        f"waiting_external -succeed-> succeeded: webhook bank; {CAME}",
    ],
    "event_missed": [
        f"pending -park-> waiting_external: system; {CALLED}",
        f"waiting_external -fail-> failed: timeout; {MISSED}",
    ],
    "timer_due": [
        "pending -park-> waiting_external: system; timer expected",
        "waiting_external -resume-> running: system; timer expected",
        "running -succeed-> succeeded: system",
    ],
    "one_wait_after_another": [
        f"pending -hold-> waiting_approval: system; {ASKED}",
        f"waiting_approval -park-> waiting_external: approval grace; {YES}; {CALLED}",
        f"waiting_external -hold-> waiting_approval: webhook bank; {ASKED}; {CAME}",
        "waiting_approval -cancel-> canceled: user admin",
    ],
    "policy_holds": [
        "pending -start-> running: system",
        f"running -hold-> waiting_approval: policy; {ASKED}",
        f"waiting_approval -fail-> failed: approval grace; {NO}",
    ],
    "policy_denies": ["pending -start-> running: system", "running -fail-> failed: policy"],
    "deadline_in_queue": ["pending -fail-> failed: timeout"],
    "deadline_in_hands": ["pending -start-> running: system", "running -fail-> failed: timeout"],
    "canceled_in_queue": ["pending -cancel-> canceled: user admin"],
    "interrupted_in_queue": ["pending -cancel-> canceling: user admin", "canceling -stopped-> canceled: user admin"],
    "canceled_after_a_wait": [
        f"pending -hold-> waiting_approval: system; {ASKED}",
        f"waiting_approval -resume-> running: approval grace; {YES}",
        "running -cancel-> canceled: user admin",
    ],
    "canceled_in_hands": [
        "pending -start-> running: system",
        "running -cancel-> canceling: user admin",
        "canceling -stopped-> canceled: user admin",
    ],
    "canceled_while_waiting": [
        f"pending -park-> waiting_external: system; {CALLED}",
        "waiting_external -cancel-> canceled: user admin",
    ],
    "rejected_and_undone": [
        "pending -start-> running: system",
        f"running -hold-> waiting_approval: system; {ASKED}",
        f"waiting_approval -compensate-> canceling: approval grace; {NO}",
        f"canceling -fail-> failed: approval grace; {NO}",
    ],
    "missed_and_undone": [
        "pending -start-> running: system",
        f"running -park-> waiting_external: system; {CALLED}",
        f"waiting_external -compensate-> canceling: timeout; {MISSED}",
        f"canceling -fail-> failed: timeout; {MISSED}",
    ],
    "failed_and_undone": [
        "pending -start-> running: system",
        "running -compensate-> canceling: system",
        "canceling -fail-> failed: system",
    ],
    "canceled_and_undone": [
        "pending -start-> running: system",
        f"running -hold-> waiting_approval: system; {ASKED}",
        "waiting_approval -cancel-> canceling: user admin",
        "canceling -compensate-> canceling: user admin",
        "canceling -stopped-> canceled: user admin",
    ],
    "canceled_wait_and_undone": [
        "pending -start-> running: system",
        f"running -park-> waiting_external: system; {CALLED}",
        "waiting_external -cancel-> canceling: user admin",
        "canceling -compensate-> canceling: user admin",
        "canceling -stopped-> canceled: user admin",
    ],
    "undoing_fails": [
        "pending -start-> running: system",
        f"running -hold-> waiting_approval: system; {ASKED}",
        f"waiting_approval -compensate-> canceling: approval grace; {NO}",
        "canceling -fail-> failed: system",
    ],
    "deadline_in_hands_and_undone": [
        "pending -start-> running: system",
        "running -compensate-> canceling: timeout",
        "canceling -fail-> failed: timeout",
    ],
}
# A run that was never claimed has nothing to undo, unless it continues another run.
NOT_DRIVEN = {("pending", "compensate", "canceling")}


class Play:
    """The operations of a scenario."""

    def __init__(self, rig: Rig, hold: Hold, approver: httpx2.AsyncClient, bank: httpx2.AsyncClient) -> None:
        self.rig, self.hold, self.http, self.approver, self.bank = rig, hold, rig.http(), approver, bank

    async def start(self, workflow: str, **body: Any) -> UUID:
        answer = await self.http.post("/api/runs", json={"workflow": workflow, **body})
        assert answer.status_code == 201, answer.text
        return UUID(answer.json()["id"])

    async def decide(self, run_id: UUID, how: str) -> None:
        [question] = (await self.http.get("/api/approvals", params={"status": "requested"})).json()["items"]
        answer = await self.approver.post(f"/api/approvals/{question['id']}/{how}", json={"reason": "so"})
        assert answer.status_code == 200, answer.text

    async def settle(self) -> None:
        event = {"type": "bank.settled", "correlation": "c1", "id": "evt_1", "payload": {}}
        assert (await self.bank.post("/api/events", json=event)).json()["matched"]

    async def later(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)
        await self.rig.sweep()

    async def stop(self, run_id: UUID, how: str = "cancel") -> None:
        assert (await self.http.post(f"/api/runs/{run_id}/{how}")).status_code == 200

    async def ended(self, run_id: UUID, *statuses: str) -> None:
        await self.rig.work_until(run_id, *statuses)


@pytest.fixture
async def play(rig: Rig) -> Play:
    hold = Hold()

    @rig.tool("t.echo")
    async def echo() -> None: ...

    @rig.tool("t.hold")
    async def stay() -> None:
        await hold()

    @rig.tool("t.write", writes=True, risk="med")
    async def write() -> None: ...

    @rig.tool("t.book", writes=True, risk="low")
    async def book() -> None: ...

    @rig.tool("t.unbook", writes=True, risk="low", idempotent=True)
    async def unbook() -> None: ...

    @rig.tool("t.fail", writes=True, risk="low")
    async def fail() -> None:
        raise Terminal("no")

    for source in WORKFLOWS.strip().splitlines():
        await rig.apply(source)
    return Play(rig, hold, rig.http(await rig.key("grace", "approver")), rig.http(await rig.key("bank", "operator")))


async def _simple(play: Play, workflow: str) -> UUID:
    run_id = await play.start(workflow)
    await play.ended(run_id, "waiting_approval", "waiting_external")
    return run_id


async def _gate(play: Play, how: str, workflow: str = "gate", *, works: bool = False) -> UUID:
    run_id = await (_simple(play, workflow) if works else play.start(workflow))
    await play.decide(run_id, how)
    await play.ended(run_id)
    return run_id


async def _expires(play: Play) -> UUID:
    run_id = await play.start("gate")
    await play.later(40 * 86400)
    return run_id


async def _event(play: Play, workflow: str, *, works: bool = False) -> UUID:
    run_id = await (_simple(play, workflow) if works else play.start(workflow))
    await play.settle()
    await play.ended(run_id)
    return run_id


async def _misses(play: Play, workflow: str, *, works: bool = False) -> UUID:
    run_id = await (_simple(play, workflow) if works else play.start(workflow))
    await play.later(3601)
    await play.ended(run_id)
    return run_id


async def _timer(play: Play) -> UUID:
    run_id = await play.start("timer")
    await play.later(61)
    await play.ended(run_id)
    return run_id


async def _waits_in_turn(play: Play) -> UUID:
    run_id = await play.start("gate_wait")
    await play.decide(run_id, "approve")
    await play.settle()
    await play.stop(run_id)
    return run_id


async def _denied(play: Play) -> UUID:
    forbid = '@id("no") forbid(principal, action == Action::"t.write", resource);'
    assert (await play.http.put("/api/policy", content=forbid.encode())).status_code == 200
    run_id = await play.start("held")
    await play.ended(run_id)
    return run_id


async def _overdue_in_queue(play: Play) -> UUID:
    run_id = await play.start("plain", deadline_seconds=60)
    await play.later(61)
    return run_id


async def _in_hands(play: Play, workflow: str, then: Callable[[UUID], Awaitable[None]]) -> UUID:
    run_id = await play.start(workflow)
    async with play.rig.worker():
        await play.hold.inside()
        await then(run_id)
        await play.rig.until(run_id)
    return run_id


async def _overdue_in_hands(play: Play, workflow: str) -> UUID:
    play.rig.clock.freeze()

    async def pass_time(run_id: UUID) -> None:
        await play.rig.sql("UPDATE interlock.run SET deadline_at = $2 WHERE id = $1", run_id, play.rig.clock())
        await play.rig.sweep()

    return await _in_hands(play, workflow, pass_time)


async def _stopped(play: Play, how: str, workflow: str = "plain", *, works: bool = False) -> UUID:
    run_id = await (_simple(play, workflow) if works else play.start(workflow))
    await play.stop(run_id, how)
    await play.ended(run_id)
    return run_id


async def _stopped_after_a_wait(play: Play) -> UUID:
    run_id = await play.start("gate")
    await play.decide(run_id, "approve")
    await play.stop(run_id)
    return run_id


async def _succeeds(play: Play, workflow: str) -> UUID:
    run_id = await play.start(workflow)
    await play.ended(run_id)
    return run_id


SCENARIOS: dict[str, Callable[[Play], Awaitable[UUID]]] = {
    "succeeds": lambda play: _succeeds(play, "plain"),
    "gate_approved": lambda play: _gate(play, "approve"),
    "gate_rejected": lambda play: _gate(play, "reject"),
    "gate_expired": _expires,
    "gate_rejected_completes": lambda play: _gate(play, "reject", "gate_complete"),
    "gate_last_approved": lambda play: _gate(play, "approve", "gate_last", works=True),
    "event_came": lambda play: _event(play, "wait"),
    "event_came_last": lambda play: _event(play, "wait_last", works=True),
    "event_missed": lambda play: _misses(play, "wait"),
    "timer_due": _timer,
    "one_wait_after_another": _waits_in_turn,
    "policy_holds": lambda play: _gate(play, "reject", "held", works=True),
    "policy_denies": _denied,
    "deadline_in_queue": _overdue_in_queue,
    "deadline_in_hands": lambda play: _overdue_in_hands(play, "hold"),
    "canceled_in_queue": lambda play: _stopped(play, "cancel"),
    "interrupted_in_queue": lambda play: _stopped(play, "interrupt"),
    "canceled_after_a_wait": _stopped_after_a_wait,
    "canceled_in_hands": lambda play: _in_hands(play, "hold", play.stop),
    "canceled_while_waiting": lambda play: _stopped(play, "cancel", "wait"),
    "rejected_and_undone": lambda play: _gate(play, "reject", "undo_gate", works=True),
    "missed_and_undone": lambda play: _misses(play, "undo_wait", works=True),
    "failed_and_undone": lambda play: _succeeds(play, "undo_fail"),
    "canceled_and_undone": lambda play: _stopped(play, "cancel", "undo_gate", works=True),
    "canceled_wait_and_undone": lambda play: _stopped(play, "cancel", "undo_wait", works=True),
    "undoing_fails": lambda play: _gate(play, "reject", "undo_broken", works=True),
    "deadline_in_hands_and_undone": lambda play: _overdue_in_hands(play, "undo_hold"),
}


def line(event: dict[str, Any]) -> str:
    data, context = event["data"], event["data"]["context"]
    parts = [f"{context['initiator']} {context['user']}" if context["user"] else context["initiator"]]
    if (approval := context.get("approval")) is not None:
        if "decision" in approval:
            assert approval["decided_at"] and approval["requested_by"] == "admin", approval
            parts.append(f"approval {approval['decision']} by {approval['decided_by']}")
        else:
            parts.append(f"approval requested for {approval['requested_by']}")
    if (awaited := context.get("external_event")) is not None:
        if "received_at" in awaited:
            assert awaited["correlation"] == "c1" and awaited["expected_at"], awaited
            parts.append(f"{awaited['event_type']} {awaited['event_id']} from {awaited['source']}")
        else:
            parts.append(f"{awaited['event_type']} {'expected' if awaited['expected_at'] else ''}")
    return f"{data['from_state']} -{data['event']}-> {data['to_state']}: {'; '.join(parts)}"


@pytest.mark.parametrize("name", EXPECTED)
async def test_a_transition_names_its_true_initiator_and_what_caused_it(play: Play, name: str) -> None:
    run_id = await SCENARIOS[name](play)
    events = (await play.http.get(f"/api/runs/{run_id}/events")).json()["items"]
    moves = [e for e in events if e["type"] in ("run_transition", "run_completed")]
    assert [line(e) for e in moves] == EXPECTED[name]
    assert all("cause" not in e["data"] for e in events), "the context has it, with names"


def test_the_scenarios_pass_every_transition_of_a_run() -> None:
    told = {line.partition(":")[0] for lines in EXPECTED.values() for line in lines}
    every = {(str(t.source), str(t.event), str(t.target)) for t in RUN.transitions()} - NOT_DRIVEN
    assert told == {f"{source} -{event}-> {target}" for source, event, target in every}


async def test_the_entries_of_a_step_say_who_asked_and_until_when(play: Play) -> None:
    run_id = await SCENARIOS["one_wait_after_another"](play)
    events = (await play.http.get(f"/api/runs/{run_id}/events")).json()["items"]
    asked, decided = (e["data"]["context"] for e in events[1:4] if e["type"].startswith("approval"))
    assert (asked["approval"]["requested_by"], decided["approval"]["requested_by"]) == ("admin", "admin")
    assert (decided["approval"]["decision"], decided["approval"]["decided_by"]) == ("approved", "grace")
    parked, arrived = (e["data"]["context"]["external_event"] for e in events if e["type"] == "step_transition")
    assert parked["expected_at"] == arrived["expected_at"] is not None
