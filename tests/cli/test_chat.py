"""`interlock chat`: shows an agent's words and actions as they happen; one key press allows or rejects a call."""

import json
import signal
import sys
from typing import Any

import pytest
import typer
from tests.cli.stub import NOW, Stub, a_run, an_approval, problem, refused, run, sse

from interlock.cli import chat
from interlock.cli.exit_codes import Unfinished
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


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"finish_reason": "length"}, "cut off where the model's limit of tokens was reached"),
        ({"finish_reason": "content_filter"}, "cut off by the provider's content filter"),
        ({"finish_reason": "content_filter", "refusal": "No."}, "the model refused"),
        ({"finish_reason": "\x1b[2J"}, "it ended with \\x1b[2J"),
    ],
)
def test_an_answer_that_is_not_a_whole_one_is_marked(stub: Stub, how: dict[str, str], why: str) -> None:
    said = event(1, "message", step_key="model", role="assistant", text="Half a sen", **how)
    stub.on("POST /api/messages", SENT).on("GET /api/runs/run-1/events", sse(said, ended(2)))
    assert run("chat", "-m", "hello").stdout == f"Half a sen\nThis is not a whole answer: {why}.\n"


def test_what_a_model_said_before_it_was_asked_again_is_ended(stub: Stub) -> None:
    events = [spoken(1, "Let me"), spoken(2, "I will", attempt=2), ended(3, "failed", "terminal_error")]
    stub.on("POST /api/messages", SENT).on("GET /api/runs/run-1/events", sse(*events))
    result = run("chat", "-m", "hello")
    assert (result.exit_code, result.stdout) == (1, "Let me\nI will\nfailed: terminal_error\n")


def test_a_session_that_is_not_there_is_said_before_anybody_types(stub: Stub) -> None:
    assert refused(run("chat", "--session", "nope")) == "interlock: Not found: no such thing"
    assert [call for call, *_ in stub.asked] == ["GET /api/sessions/nope"]


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
    at_a_terminal(monkeypatch, key, "not paid")
    with Client(url, "k") as client:
        assert chat.Talk(client, None, None, False).say("go")
    said = stub.body(f"POST /api/approvals/ap-1/{path}")
    assert (said["digest"], said.get("reason")) == ("sha256:ab", "not paid" if key == "r" else None)
    assert "Refund 120" in capsys.readouterr().out


def at_a_terminal(monkeypatch: pytest.MonkeyPatch, key: str, reason: str = "") -> None:
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    keys = iter(key)
    monkeypatch.setattr(typer, "getchar", lambda: next(keys, "l"))
    monkeypatch.setattr("builtins.input", lambda prompt: reason)


SELF = "you asked for it, so another person must approve it"


@pytest.mark.parametrize(
    ("approval", "key", "offers", "decides"),
    [
        ({"barred": SELF}, "a", "  [r]eject  [l]eave", None),
        ({"barred": SELF}, "r", "  [r]eject  [l]eave", "reject"),
        ({"barred": "your key's role is viewer", "may_reject": False}, "a", None, None),
        ({"kind": "in_doubt", "receipt_id": "rc-1"}, "a", "  [r]eject  [l]eave", None),
    ],
)
def test_only_what_would_count_is_offered(
    stub: Stub, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    approval: dict[str, Any], key: str, offers: str | None, decides: str | None,
) -> None:  # fmt: skip
    asks = event(1, "approval_requested", step_key="shop.refund", to_state="waiting_approval", approval_id="ap-1")
    stub.on("POST /api/messages", SENT).on("GET /api/runs/run-1/events", sse(asks, ended(2)))
    stub.on("GET /api/approvals/ap-1", an_approval(**approval)).on("POST /api/approvals/ap-1/reject", an_approval())
    at_a_terminal(monkeypatch, key)
    with Client(url, "k") as client:
        chat.Talk(client, None, None, False).say("go")
    out = capsys.readouterr().out
    assert "[a]pprove" not in out and (offers is None or offers in out) and ("[r]eject" in out) == bool(offers)
    assert "barred" not in approval or f"You cannot approve this: {approval['barred']}." in out
    posted = [call for call, *_ in stub.asked if call.startswith("POST /api/approvals/")]
    assert posted == ([f"POST /api/approvals/ap-1/{decides}"] if decides else [])


@pytest.mark.parametrize("approval", [{}, {"barred": "your key's role is viewer", "may_reject": False}])
def test_one_message_at_a_terminal_does_not_wait_for_others(
    stub: Stub, url: str, monkeypatch: pytest.MonkeyPatch, approval: dict[str, Any]
) -> None:
    asks = event(1, "approval_requested", step_key="shop.refund", to_state="waiting_approval", approval_id="ap-1")
    stub.on("POST /api/messages", SENT).on("GET /api/runs/run-1/events", sse(asks, waits(2), ended(3)))
    stub.on("GET /api/approvals/ap-1", an_approval(**approval)).on(
        "GET /api/runs/run-1", a_run(status="waiting_approval")
    )
    stub.on("GET /api/approvals", {"items": [an_approval(**approval)], "next_cursor": None})
    at_a_terminal(monkeypatch, "l")
    with Client(url, "k") as client, pytest.raises(Unfinished) as left:
        chat.Talk(client, None, None, False, once=True).say("go")
    assert left.value.exit_code == 4


def waits(seq: int) -> dict[str, Any]:
    return event(seq, "run_transition", from_state="running", to_state="waiting_approval")


@pytest.mark.parametrize("way", ["message", "piped", "json"])
def test_a_run_that_waits_for_an_approval_ends_the_command_with_the_next_one(stub: Stub, way: str) -> None:
    """new-user 6: the command waited for up to eight hours."""
    asks = event(1, "approval_requested", step_key="shop.refund", to_state="waiting_approval", approval_id="ap-1")
    # The stream continues after this, like that of a waiting run: the command never reads its end.
    stub.on("POST /api/messages", SENT).on("GET /api/runs/run-1/events", sse(asks, waits(2), ended(3)))
    stub.on("GET /api/approvals/ap-1", an_approval()).on("GET /api/runs/run-1", a_run(status="waiting_approval"))
    stub.on("GET /api/approvals", {"items": [an_approval()], "next_cursor": None})
    args = {"message": ["-m", "refund"], "piped": [], "json": ["-m", "refund", "--json"]}[way]
    result = run("chat", *args, input="refund\nmore\n")
    assert result.exit_code == 4, result.output
    commands = ["interlock approval approve ap-1 --digest sha256:ab", "interlock run watch run-1"]
    if way == "json":
        assert [json.loads(line)["seq"] for line in result.stdout.splitlines()] == [1]
        told = {"code": "WAITS_FOR_APPROVAL", "detail": "The run waits for an approval.", "status": None}
        assert json.loads(result.stderr) == told | {"run_id": "run-1", "commands": commands}
    else:
        assert "Refund 120" in result.stdout
        assert result.stderr.splitlines() == [
            "interlock: The run waits for an approval.",
            f"To continue, run: {commands[0]}",
            f"To see how it ends, run: {commands[1]}",
        ]


def test_who_cannot_approve_is_told_that_another_person_can(stub: Stub) -> None:
    """The command was printed for the person whom it refuses."""
    asks = event(1, "approval_requested", step_key="shop.refund", to_state="waiting_approval", approval_id="ap-1")
    stub.on("POST /api/messages", SENT).on("GET /api/runs/run-1/events", sse(asks, waits(2), ended(3)))
    mine = an_approval(barred="you asked for it")
    stub.on("GET /api/approvals/ap-1", mine).on("GET /api/runs/run-1", a_run(status="waiting_approval"))
    stub.on("GET /api/approvals", {"items": [mine], "next_cursor": None})
    line = run("chat", "-m", "refund").stderr.splitlines()[1]
    assert line == "For another person to continue, run: interlock approval approve ap-1 --digest sha256:ab"


def test_a_run_that_was_approved_meanwhile_is_followed_to_its_end(stub: Stub) -> None:
    asks = event(1, "approval_requested", step_key="shop.refund", to_state="waiting_approval", approval_id="ap-1")
    stub.on("POST /api/messages", SENT).on("GET /api/runs/run-1/events", sse(asks, waits(2), ended(3)))
    stub.on("GET /api/approvals/ap-1", an_approval()).on("GET /api/runs/run-1", a_run(status="running"))
    assert run("chat", "-m", "refund").exit_code == 0


@pytest.mark.parametrize("during", ["say", "follow"])
def test_a_time_out_ends_the_command_and_says_how_to_go_on(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    stub.on("POST /api/messages", SENT)

    def silent(*_: Any, **__: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)  # as the timer would, a moment later

    monkeypatch.setattr(Client, during, silent)
    result = run("chat", "-m", "go", "--timeout", "1h")
    assert (result.exit_code, signal.getitimer(signal.ITIMER_REAL)[0]) == (124, 0)
    assert (
        result.stderr.splitlines()
        == {
            "say": ["interlock: The server has not answered in time."],
            "follow": [
                "interlock: The agent has not ended its turn in time. Its run continues.",
                "To see how it ends, run: interlock run watch run-1",
            ],
        }[during]
    )
    told = json.loads(run("chat", "-m", "go", "--timeout", "1h", "--json").stderr)
    assert (told["code"], told["run_id"]) == ("TIMED_OUT", None if during == "say" else "run-1")


def test_a_time_out_needs_a_message_and_a_duration(stub: Stub) -> None:
    assert "--timeout" in refused(run("chat", "-m", "x", "--timeout", "soon"), code=2)
    assert "--timeout: expected more than 0s" in refused(run("chat", "-m", "x", "--timeout", "0s"), code=2)
    assert "it needs --message" in refused(run("chat", "--timeout", "5s"), code=2)


@pytest.mark.parametrize(("keys", "decides"), [("x\x1b a", "approve"), ("\r?n", "reject"), ("q l", None)])
def test_a_stray_key_decides_nothing_and_the_question_is_asked_again(
    stub: Stub, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keys: str,
    decides: str | None,
) -> None:  # fmt: skip
    """console 29: any stray key left the approval to others and could not be undone."""
    asks = event(1, "approval_requested", step_key="shop.refund", to_state="waiting_approval", approval_id="ap-1")
    stub.on("POST /api/messages", SENT).on("GET /api/runs/run-1/events", sse(asks, waits(2), ended(3)))
    stub.on("GET /api/approvals/ap-1", an_approval())
    for verb in ("approve", "reject"):
        stub.on(f"POST /api/approvals/ap-1/{verb}", an_approval(status=f"{verb}d".replace("reject", "rejecte")))
    at_a_terminal(monkeypatch, keys)
    with Client(url, "k") as client:
        assert chat.Talk(client, None, None, False).say("go")
    posted = [call for call, *_ in stub.asked if call.startswith("POST /api/approvals/")]
    assert posted == ([f"POST /api/approvals/ap-1/{decides}"] if decides else [])
    out = capsys.readouterr().out
    assert out.count("Press a, r or l.") == len(keys) - 1
    assert ("Left to others." in out) == (decides is None)


def test_a_call_is_shown_when_it_begins_and_once_however_often_it_is_tried(stub: Stub) -> None:
    events = [call(1, "running"), call(2, "pending"), call(3, "running"), call(4, "succeeded"), ended(5)]
    stub.on("POST /api/messages", SENT).on("GET /api/runs/run-1/events", sse(*events))
    shown = "shop.refund(charge=ch_1, note=\\x1b[2J)"
    assert run("chat", "-m", "refund ch_1").stdout == f"… {shown}\n✓ {shown}\n"


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
        assert not chat.Talk(client, None, None, False).say("go")
    assert "POST /api/runs/run-1/interrupt" in [call for call, *_ in stub.asked]
