"""`interlock chat`: what an agent says and does is shown as it happens, and one key allows or refuses it."""

import sys
from typing import Any

import pytest
import typer
from tests.cli.stub import NOW, Stub, an_approval, problem, run, sse

from interlock.cli import chat
from interlock.client import Client

SENT = {"session_id": "s-1", "run_id": "run-1", "message_id": "m-1", "queued": False}


def event(seq: int, type: str, **data: Any) -> dict[str, Any]:
    return {"seq": seq, "type": type, "at": NOW.isoformat(), "run_id": "run-1", "session_id": "s-1", "data": data}


def call(seq: int, state: str, **more: Any) -> dict[str, Any]:
    declares = {"kind": "tool", "tool": "shop.refund", "input": {"charge": "ch_1", "note": "\x1b[2J"}}
    return event(seq, "step_transition", step_key="shop.refund", to_state=state, declares=declares, **more)


def spoken(seq: int, text: str, attempt: int = 1) -> dict[str, Any]:
    return event(seq, "message_delta", step_key="model", text=text, attempt=attempt)


def ended(seq: int, state: str = "succeeded", reason: str = "completed", **more: Any) -> dict[str, Any]:
    return event(seq, "run_completed", to_state=state, reason=reason, **more)


def test_text_is_shown_as_it_comes_and_calls_with_what_became_of_them(stub: Stub) -> None:
    said = event(4, "message", step_key="model", role="assistant", text="Let me see.")
    quiet = event(6, "message", step_key="model#2", role="assistant", text="Done.")
    events = [spoken(1, "Let "), spoken(2, "me "), spoken(3, "see."), said, call(5, "succeeded"), quiet, ended(7)]
    stub.on("POST /api/messages", SENT).on("GET /api/runs/run-1/events", sse(*events))
    result = run("chat", "-m", "refund ch_1")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "Let me see.\n✓ shop.refund(charge=ch_1, note=\\x1b[2J)\nDone.\n"


def test_what_a_model_said_before_it_was_asked_again_is_ended(stub: Stub) -> None:
    events = [spoken(1, "Let me"), spoken(2, "I will", attempt=2), ended(3, "failed", "terminal_error")]
    stub.on("POST /api/messages", SENT).on("GET /api/runs/run-1/events", sse(*events))
    result = run("chat", "-m", "hello")
    assert (result.exit_code, result.stdout) == (1, "Let me\nI will\nfailed: terminal_error\n")


def test_a_busy_session_is_one_line(stub: Stub) -> None:
    stub.on("POST /api/messages", problem(409, "SESSION_BUSY", "Busy", "run 7 of this session has not ended"))
    result = run("chat", "-m", "hello")
    assert result.exit_code == 1 and "has not ended" in result.stderr


@pytest.mark.parametrize(("key", "path"), [("a", "approve"), ("r", "reject")])
def test_one_key_decides_on_exactly_what_is_shown(
    stub: Stub, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str, path: str
) -> None:
    asks = event(1, "approval_requested", step_key="shop.refund", to_state="waiting_approval", approval_id="ap-1")
    stub.on("POST /api/messages", SENT).on("GET /api/runs/run-1/events", sse(asks, ended(2)))
    stub.on("GET /api/approvals/ap-1", an_approval()).on(f"POST /api/approvals/ap-1/{path}", an_approval())
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr(typer, "getchar", lambda: key)
    with Client(url, "k") as client:
        assert chat.Talk(client, None, None, False, as_json=False).say("go")
    asked = {call: body for call, _, body, _ in stub.asked}
    assert b'"digest":"sha256:ab"' in asked[f"POST /api/approvals/ap-1/{path}"]
    assert "Refund 120" in capsys.readouterr().out


def test_ctrl_c_interrupts_the_run_and_listens_to_its_end(stub: Stub, url: str) -> None:
    class Interrupting(Client):
        followed = 0

        def follow(self, run_id: str, after: int = 0) -> Any:
            self.followed += 1
            if self.followed == 1:
                raise KeyboardInterrupt
            return super().follow(run_id, after)

    stub.on("POST /api/messages", SENT).on("GET /api/runs/run-1/events", sse(ended(1, "canceled", "interrupted")))
    stub.on("POST /api/runs/run-1/interrupt", problem(409, "RUN_TERMINAL_STATE", "Final", "run is canceled"))
    with Interrupting(url, "k") as client:
        assert not chat.Talk(client, None, None, False, as_json=False).say("go")
    assert "POST /api/runs/run-1/interrupt" in [call for call, *_ in stub.asked]
