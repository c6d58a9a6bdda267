"""The command line's contract for external events and for reversals."""

import json
from datetime import timedelta
from typing import Any

from tests.cli.stub import NOW, Stub, a_run, a_step, refused, run

LATER = (NOW + timedelta(days=7)).isoformat()


def an_outside_event(**more: Any) -> dict[str, Any]:
    base = {"id": "evt_1", "type": "bank.settled", "correlation": "ch_1", "payload": {}, "sent_by": "ci"}
    return {**base, "received_at": NOW.isoformat(), "expires_at": LATER, **more}


def test_send_says_which_step_had_waited_for_it(stub: Stub) -> None:
    stub.on("POST /api/events", an_outside_event(matched=True, run_id="run-1", step_key="paid"))
    sent = run("event", "send", "bank.settled", "ch_1", "--payload", '{"amount": 5}', "--id", "evt_1")
    assert (sent.exit_code, sent.stdout) == (0, "matched step paid of run run-1\n")
    assert stub.body("POST /api/events") == {
        "type": "bank.settled", "correlation": "ch_1", "payload": {"amount": 5}, "id": "evt_1",
    }  # fmt: skip


def test_send_says_that_nobody_waits_yet_and_how_long_it_is_kept(stub: Stub) -> None:
    stub.on("POST /api/events", an_outside_event(matched=False))
    assert run("event", "send", "bank.settled", "ch_1").stdout.startswith("kept until 2026-11-")
    assert json.loads(run("event", "send", "bank.settled", "ch_1", "--json").stdout)["matched"] is False


def test_a_payload_that_is_no_json_is_refused_before_anything_is_sent(stub: Stub) -> None:
    assert "--payload" in refused(run("event", "send", "e", "c", "--payload", "{"), code=2)
    assert stub.asked == []


def test_events_are_listed_with_the_step_they_went_to(stub: Stub) -> None:
    items = [an_outside_event(), an_outside_event(id="evt_0", run_id="run-1", step_key="paid")]
    stub.on("GET /api/events", {"items": items, "next_cursor": None})
    lines = run("event", "list", "--waiting", "--type", "bank.settled").stdout.splitlines()
    assert "waits for a step" in lines[1] and "run-1" in lines[2] and "paid" in lines[2]
    assert stub.query("GET /api/events") == {"type": "bank.settled", "matched": "false", "limit": "50"}


def test_show_says_what_a_step_waits_for_and_until_when(stub: Stub) -> None:
    awaits = {"event": "bank.settled", "correlation": "ch_1", "timeout_at": LATER}
    step = a_step("paid", "waiting_external", kind="wait", tool=None, waits_for=awaits)
    stub.on("GET /api/runs/run-1", a_run(status="waiting_external", steps=[step], resume_count=2))
    shown = run("run", "show", "run-1").stdout
    assert "waits for bank.settled ch_1 until 2026-11-" in shown
    assert "2 times" in shown


def test_show_has_the_log_of_what_was_undone(stub: Stub) -> None:
    error = {"type": "Terminal", "message": "not refundable"}
    undone = a_step("hotel:undo", "failed", undoes="hotel", tool="trip.cancel", last_error=error)
    stub.on("GET /api/runs/run-1", a_run(status="failed", reason="compensation_failed", compensation=[undone]))
    lines = [" ".join(line.split()) for line in run("run", "show", "run-1").stdout.splitlines()]
    assert "UNDO DOES STATUS TRIES TOOK NOTE" in lines
    assert any(line.startswith("hotel trip.cancel failed 1/4") and "not refundable" in line for line in lines)
