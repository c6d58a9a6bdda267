"""The command line's contract: formats, one-line errors, exit codes. The server is a stub on a real socket."""

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from starlette.responses import Response
from tests.cli.stub import NOW, Stub, a_run, a_step, an_approval, an_event, problem, refused, run, sse
from typer.core import TyperGroup
from typer.main import get_command

import interlock
from interlock.cli import app, formatting, run_view
from interlock.cli.exit_codes import explain
from interlock.cli.watch import RunProgress
from interlock.errors import Invalid, Unavailable
from interlock.lifecycle import MACHINES, RUN, RunState
from interlock.wire import Event, Run, Step

# ---------------------------------------------------------------- help


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from _commands(inner, (*path, name))


def test_every_command_has_help_with_an_example() -> None:
    for path in _commands(get_command(app)):
        result = run(*path, "--help")
        assert result.exit_code == 0, path
        _, _, examples = result.stdout.rpartition("Example")
        assert " ".join(("interlock", *path)) in examples


def test_a_group_alone_prints_its_help() -> None:
    result = run("run")
    assert (result.exit_code, result.stderr) == (2, "") and "approve" in result.stdout


def test_version() -> None:
    assert run("--version").stdout == f"interlock {interlock.__version__}\n"


def test_asking_for_help_does_not_load_the_engine() -> None:
    heavy = "'fastapi', 'asyncpg', 'httpx2', 'pydantic_settings', 'interlock.main', 'interlock.definition', 'uvicorn'"
    code = f"import sys, interlock.cli; print([m for m in ({heavy},) if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_path_only())
    assert found.stdout == "[]\n"


def _path_only() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(interlock.__file__).parent.parent)}


# ---------------------------------------------------------------- errors


def test_what_the_server_refuses_is_one_line(stub: Stub) -> None:
    assert refused(run("run", "show", "nope")) == "interlock: Not found: no such thing"


def test_a_detail_of_many_lines_is_still_one(stub: Stub) -> None:
    stub.on("POST /api/runs", problem(422, "INVALID_REQUEST", "Not valid", "first\nsecond\x1b[2J"))
    assert refused(run("run", "start", "refund")) == "interlock: Not valid: first second\\x1b[2J"


def test_a_missing_key_says_how_to_give_one(stub: Stub) -> None:
    stub.on("GET /api/runs", problem(401, "UNAUTHORIZED", "Not signed in", "no key"))
    assert refused(run("run", "list")).endswith("no key (give --key or set INTERLOCK_API_KEY)")


def test_nobody_there_says_how_to_start_one(url: str) -> None:
    line = refused(run("--url", "http://127.0.0.1:1", "run", "list"))
    assert line == "interlock: no Interlock at http://127.0.0.1:1; start one with `interlock up`"


@pytest.mark.parametrize("address", ["foo", "ftp://host", "http://[::1", "http://[x]"])
def test_an_address_that_is_none_is_one_line(url: str, address: str) -> None:
    line = refused(run("--url", address, "run", "list"))
    assert line == f"interlock: '{address}' is not an address; expected one like http://127.0.0.1:8420"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Invalid("cannot listen on 127.0.0.1:80"), "cannot listen on 127.0.0.1:80"),
        (Unavailable("it did not answer"), "The database is not reachable: it did not answer"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(13, "Permission denied", "data"), "data: Permission denied"),
        (UnicodeEncodeError("utf-8", "caf\udce9", 3, 4, "no"), "'caf\\udce9' is no text in UTF-8"),
    ],
)
def test_what_went_wrong_here_is_one_line_that_says_what(error: Exception, line: str) -> None:
    assert explain(error) == (line, 1)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["run", "show"], "Missing argument 'RUN' (see interlock run show --help)"),
        (["run", "lst"], "No such command 'lst'. Did you mean 'list'? (see interlock run --help)"),
        (["run", "list", "--status", "done"], "'--status': 'done' is not one of 'pending', "),
        (["key", "create", "ci", "--role", "king"], "'--role': 'king' is not one of 'viewer', "),
        (["run", "start", "refund", "--param", "amount"], "expected name=value, not 'amount'"),
        (["run", "start", "refund", "--input", "{"], "not JSON"),
        (["run", "start", "refund", "--input", "[1]"], 'expected an object like {"amount": 120}'),
        (["run", "start", "refund", "--deadline", "soon"], "'soon' is not a duration"),
        (["worker", "--label", "G U"], "--label: expected a label such as gpu, of lower-case letters"),
        (["supervise", "--label", "GPU"], "found 'GPU' (see interlock supervise --help)"),
        (["run", "list", "--limit", "0"], "'--limit': expected at least 1, found '0' (see interlock run list --help)"),
        (["workflow", "rollback", "refund", "x"], "'VERSION': expected a whole number, found 'x'"),
    ],
)
def test_what_was_typed_wrong_is_one_line(stub: Stub, args: list[str], says: str) -> None:
    assert says in refused(run(*args), code=2)
    assert not stub.asked


def test_a_missing_file_is_one_line(stub: Stub) -> None:
    assert refused(run("workflow", "apply", "none.yaml")) == "interlock: none.yaml: No such file or directory"
    assert (
        refused(run("run", "start", "x", "--input", "@none.json")) == "interlock: none.json: No such file or directory"
    )


def test_a_setting_that_cannot_be_is_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_PORT", "http")
    assert refused(run("up")).startswith("interlock: INTERLOCK_PORT: expected a whole number, found ")
    monkeypatch.delenv("INTERLOCK_PORT")
    monkeypatch.setenv("INTERLOCK_SCHEMA", "Bad Name")
    assert refused(run("up")).startswith("interlock: INTERLOCK_SCHEMA: expected a name of lower-case letters")


def test_a_bug_is_one_line_too(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.cli.runs.connect", lambda ctx: {}["a"])
    assert refused(run("run", "list")) == "interlock: unexpected KeyError: 'a' (INTERLOCK_TRACEBACK=1 shows where)"


def test_a_command_that_is_told_to_end_leaves_nothing_behind() -> None:
    """The embedded PostgreSQL stops when its last user ends; without clean-up a command leaves it running."""
    code = (
        "import atexit, os, signal, interlock.cli as cli\n"
        "atexit.register(print, 'left')\n"
        "cli.app = lambda **_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "cli.main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=_path_only())
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "left\n", "")


def test_ctrl_c_is_quiet(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(ctx: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("interlock.cli.runs.connect", interrupted)
    result = run("run", "list")
    assert (result.exit_code, result.output) == (130, "")


# ---------------------------------------------------------------- server and credentials


def sent_key(stub: Stub) -> str | None:
    return stub.asked[-1][3].get("authorization")


def test_the_server_on_this_machine_is_found(stub: Stub, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INTERLOCK_URL")
    Path(".interlock").mkdir()
    Path(".interlock/url").write_text(f"{url}\n")
    Path(".interlock/admin.key").write_text("il_local\n")
    stub.on("GET /api/runs", {"items": [], "next_cursor": None})
    assert run("run", "list").stdout == "none\n"
    assert sent_key(stub) == "Bearer il_local"


def test_a_given_key_goes_before_the_local_one(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_DATA_DIR", str(tmp_path))
    (tmp_path / "admin.key").write_text("il_local")
    stub.on("GET /api/runs", {"items": []})
    run("run", "list")
    assert sent_key(stub) == "Bearer il_local"
    run("--key", "il_given", "run", "list")
    assert sent_key(stub) == "Bearer il_given"


def test_an_empty_key_is_not_taken_for_none(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_DATA_DIR", str(tmp_path))
    (tmp_path / "admin.key").write_text("il_local")
    assert "Invalid value for --key: it is empty" in refused(run("--key", "", "run", "list"), code=2)
    assert not stub.asked


def test_the_local_admin_key_does_not_travel(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []
    (tmp_path / "admin.key").write_text("il_local")
    monkeypatch.setenv("INTERLOCK_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("interlock.client.Client", lambda url, key: keys.append(key))
    run("--url", "https://elsewhere.example", "run", "list")
    assert keys == [None]


# ---------------------------------------------------------------- runs


def test_start_makes_its_input_of_file_and_params(stub: Stub) -> None:
    Path("in.json").write_text('{"charge": "ch_1", "amount": 1}')
    stub.on("POST /api/runs", a_run())
    result = run(
        *("run", "start", "refund", "--input", "@in.json", "--param", "amount=120", "--param", "note=to Ann"),
        *("--version", "3", "--deadline", "1h30m", "--idempotency-key", "k1", "--json"),
    )
    assert json.loads(result.stdout)["id"] == "run-1"
    assert stub.body("POST /api/runs") == {
        "workflow": "refund",
        "version": 3,
        "input": {"charge": "ch_1", "amount": 120, "note": "to Ann"},
        "trigger": {"source": "cli"},
        "deadline_seconds": 5400,
    }
    assert stub.asked[0][3]["idempotency-key"] == "k1"


def test_start_and_wait_asks_until_the_run_ended(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.cli.runs._POLL_SECONDS", 0)
    stub.on("POST /api/runs", a_run()).on("GET /api/runs/run-1", a_run(), a_run(status="succeeded", reason="completed"))
    result = run("run", "start", "refund", "--wait")
    assert result.exit_code == 0 and "completed" in result.stdout
    assert [call for call, *_ in stub.asked] == ["POST /api/runs", "GET /api/runs/run-1", "GET /api/runs/run-1"]
    assert stub.query("POST /api/runs") == {"wait": "30.0"}


def test_waiting_ends_when_a_person_is_needed(stub: Stub) -> None:
    stub.on("POST /api/runs", a_run(status="waiting_approval"))
    assert run("run", "start", "refund", "--wait").exit_code == 0


def test_a_failed_run_fails_the_command_that_waited(stub: Stub) -> None:
    failed = a_run(status="failed", reason="terminal_error", error={"type": "Terminal", "message": "card\nexpired"})
    stub.on("POST /api/runs", failed)
    line = refused(run("run", "start", "refund", "--wait"))
    assert line == "interlock: run run-1 failed: terminal_error: card expired"


def test_a_step_took_as_long_as_its_last_attempt() -> None:
    step = Step.model_validate(
        a_step("pay", started_at="2026-11-16T12:00:00Z", completed_at="2026-11-16T12:00:39Z", duration_ms=6000)
    )
    assert run_view.STEPS["took"](step) == "6.0s"


def test_an_event_is_one_short_line_though_it_declares_a_step(stub: Stub) -> None:
    declares = {"kind": "tool", "tool": "shop.refund", "input": {"note": "x" * 1000}}
    stub.on(
        "GET /api/runs/run-1/events",
        {"items": [an_event(1, step_key="a", to_state="running", declares=declares)], "next_cursor": None},
    )
    [line] = run("run", "events", "run-1").stdout.splitlines()
    assert "tool=shop.refund" in line and "declares" not in line and len(line) < 120


def test_a_question_is_one_short_line_though_the_policy_judged_it(stub: Stub) -> None:
    """new-user section 2: the line had the decision and its request as JSON, 1,300 characters."""
    judged = {"decision": {"answer": "needs_approval", "request": {"note": "x" * 1000}}, "policy_digest": "ab" * 32}
    asked = an_event(1, step_key="a", to_state="waiting_approval", approval_id="ap-1", tier="high", **judged)
    stub.on("GET /api/runs/run-1/events", {"items": [asked], "next_cursor": None})
    [line] = run("run", "events", "run-1").stdout.splitlines()
    assert "approval_id=ap-1" in line and "tier=high" in line and len(line) < 140


def test_the_failed_runs_of_a_job_are_listed(stub: Stub) -> None:
    stub.on("GET /api/runs", {"items": [a_run(status="failed")], "next_cursor": None})
    assert run("run", "list", "--job", "job-1", "--status", "failed").exit_code == 0
    assert stub.asked[-1][1] == {"job_id": "job-1", "status": "failed", "limit": "50"}


def test_list_is_a_table_for_people_and_the_page_for_programs(stub: Stub) -> None:
    page = {"items": [a_run("01990000-0000-7000-8000-000000000001", "waiting_approval")], "next_cursor": "abc"}
    stub.on("GET /api/runs", page)
    result = run("run", "list", "--status", "waiting_approval", "--workflow", "refund", "--limit", "1")
    head, row, more = result.stdout.splitlines()
    assert head.split() == ["ID", "WORKFLOW", "STATUS", "REASON", "CREATED", "TOOK"]
    assert row.split()[:3] == ["01990000-0000-7000-8000-000000000001", "refund@3", "waiting_approval"]
    assert more == "more: --cursor abc"
    assert stub.query("GET /api/runs") == {"status": "waiting_approval", "workflow": "refund", "limit": "1"}
    assert json.loads(run("run", "list", "--json").stdout)["next_cursor"] == "abc"


def test_a_run_took_as_long_as_its_starter_waited_and_not_since_a_worker_had_it(stub: Stub) -> None:
    began, ended = (NOW + timedelta(seconds=40)).isoformat(), (NOW + timedelta(seconds=42)).isoformat()
    ran = a_run(status="succeeded", started_at=began, completed_at=ended)
    stub.on("GET /api/runs/run-1", ran)
    stub.on("GET /api/runs", {"items": [ran], "next_cursor": None})
    assert "42.0s" in run("run", "show", "run-1").stdout
    assert run("run", "list").stdout.splitlines()[1].split()[-1] == "42.0s"


def test_show_says_when_a_step_is_tried_again(stub: Stub) -> None:
    again = NOW + timedelta(seconds=30)
    steps = [
        a_step("lookup", started_at=NOW.isoformat(), completed_at=(NOW + timedelta(seconds=2)).isoformat()),
        a_step("refund", "pending", attempt=2, next_run_at=again.isoformat(), last_error={"message": "503 from shop"}),
        a_step("tell", "pending", attempt=0),
    ]
    stub.on("GET /api/runs/run-1", a_run(steps=steps))
    lookup, refund, tell = run("run", "show", "run-1").stdout.splitlines()[-3:]
    assert lookup.split() == ["lookup", "shop.lookup", "succeeded", "1/4", "2.0s"]
    assert refund.split()[:4] == ["refund", "shop.refund", "retrying", "2/4"]
    assert refund.endswith(f"retrying at {formatting.moment(again)}: 503 from shop")
    assert tell.split() == ["tell", "shop.tell", "pending"]


def test_watch_without_a_terminal_prints_a_line_per_event(stub: Stub) -> None:
    stub.on("GET /api/runs/run-1", a_run(status="succeeded", reason="completed"))
    moved = an_event(2, step_key="lookup", from_state="running", to_state="succeeded", attempt=1)
    stub.on("GET /api/runs/run-1/events", sse(an_event(1, to_state="pending"), moved))
    result = run("run", "watch", "run-1")
    first, second = result.stdout.splitlines()[:2]
    assert (result.exit_code, first.split()) == (
        0,
        ["1", *formatting.moment(NOW).split(), "step_transition", "pending"],
    )
    assert second.endswith("lookup: running → succeeded  attempt=1")


def test_watching_a_run_that_fails_fails(stub: Stub) -> None:
    stub.on("GET /api/runs/run-1", a_run(status="failed", reason="rejected"))
    stub.on("GET /api/runs/run-1/events", sse(an_event(1)))
    result = run("run", "watch", "run-1", "--json")
    said = {"code": "COMMAND_FAILED", "detail": "run run-1 failed: rejected", "status": None}
    assert json.loads(refused(result)) == said
    assert [json.loads(line)["seq"] for line in result.stdout.splitlines()] == [1]


def test_events_are_read_to_the_last_page(stub: Stub) -> None:
    first = {"items": [an_event(1), an_event(2)], "next_cursor": "2"}
    stub.on("GET /api/runs/run-1/events", first, {"items": [an_event(3)], "next_cursor": None})
    found = json.loads(run("run", "events", "run-1", "--json").stdout)
    assert [event["seq"] for event in found["items"]] == [1, 2, 3]
    assert [query["after"] for _, query, *_ in stub.asked] == ["0", "2"]


@pytest.mark.parametrize(("verb", "body"), [("approve", {"reason": "ok"}), ("cancel", {"reason": "ok"})])
def test_decisions_carry_their_reason(stub: Stub, verb: str, body: dict[str, str]) -> None:
    stub.on(f"POST /api/runs/run-1/{verb}", a_run())
    assert run("run", verb, "run-1", "--reason", "ok").exit_code == 0
    assert stub.body(f"POST /api/runs/run-1/{verb}") == body


def test_retry_shows_the_new_run(stub: Stub) -> None:
    stub.on("POST /api/runs/run-1/retry", a_run("run-2", resumed_from="run-1"))
    assert json.loads(run("run", "retry", "run-1", "--json").stdout)["resumed_from"] == "run-1"


def test_reject_touches_only_the_runs_own_approvals(stub: Stub) -> None:
    stub.on("GET /api/approvals", {"items": [an_approval("ap-9", "run-9"), an_approval()], "next_cursor": None})
    stub.on("POST /api/approvals/ap-1/reject", an_approval(status="rejected"))
    stub.on("GET /api/runs/run-1", a_run(status="failed", reason="rejected"))
    assert run("run", "reject", "run-1", "--reason", "no").exit_code == 0
    assert [call for call, *_ in stub.asked if call.startswith("POST")] == ["POST /api/approvals/ap-1/reject"]
    assert stub.query("GET /api/approvals") == {"status": "requested", "run_id": "run-1"}
    assert stub.body("POST /api/approvals/ap-1/reject") == {"reason": "no", "digest": "sha256:ab"}


def test_rejecting_a_run_that_waits_for_nobody_is_an_error(stub: Stub) -> None:
    stub.on("GET /api/approvals", {"items": []}).on("GET /api/runs/run-1", a_run(status="succeeded"))
    assert refused(run("run", "reject", "run-1")) == "interlock: run run-1 waits for nobody; it is succeeded"


# ---------------------------------------------------------------- errors for programs, and the environment


def test_an_error_with_json_is_an_object_on_stderr(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """new-user section 9: the error was a line of text."""
    stub.on("POST /api/runs/run-1/approve", problem(409, "NOTHING_TO_APPROVE", "No", "It waits.", state="running"))
    said = json.loads(refused(run("run", "approve", "run-1", "--json")))
    assert said == {"code": "NOTHING_TO_APPROVE", "detail": "No: It waits.", "status": 409, "state": "running"}
    said = json.loads(refused(run("run", "list", "--status", "nope", "--json"), code=2))
    assert (said["code"], said["status"]) == ("USAGE", None) and "--status" in said["detail"]
    monkeypatch.setenv("INTERLOCK_URL", "http://127.0.0.1:1")
    assert json.loads(refused(run("run", "list", "--json")))["code"] == "UNREACHABLE"


@pytest.mark.parametrize("command", [["run", "list"], ["db", "status"], ["up"], ["workflow", "validate", "-"]])
def test_a_variable_that_nothing_reads_is_refused_by_every_command(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("INTERLOCK_PROT", "9000")
    says = "interlock: INTERLOCK_PROT is not a variable of Interlock; did you mean `INTERLOCK_PORT`?"
    assert refused(run(*command)) == says
    assert not stub.asked


def test_variables_that_are_read_are_accepted(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INTERLOCK_SECRET_BANK_KEY", "INTERLOCK_MODEL_KEY_VLLM", "INTERLOCK_LOG_LEVEL"):
        monkeypatch.setenv(name, "info")
    stub.on("GET /api/runs", {"items": [], "next_cursor": None})
    assert run("run", "list").exit_code == 0


# ---------------------------------------------------------------- approvals


def test_approvals_that_wait_are_listed(stub: Stub) -> None:
    stub.on("GET /api/approvals", {"items": [an_approval()], "next_cursor": None})
    row = run("approval", "list").stdout.splitlines()[1]
    assert row.split() == ["ap-1", "high", "review", "Refund", "120", "0/2"]
    assert stub.query("GET /api/approvals")["status"] == "requested"


def test_an_action_cannot_paint_over_what_the_approver_sees(stub: Stub) -> None:
    action = {"tool": "shop.refund", "fields": {"note": "\x1b[2Kharmless \u202e[red]"}, "digest": "sha256:ab"}
    stub.on("GET /api/approvals/ap-1", an_approval(action=action))
    out = run("approval", "show", "ap-1").stdout
    assert "\\x1b[2Kharmless \\u202e[red]" in out
    assert "\x1b" not in out and "\u202e" not in out


def test_an_approval_is_decided_for_the_digest_given(stub: Stub) -> None:
    vote = {"by": "key:ann", "decision": "approved", "at": NOW.isoformat(), "reason": "checked"}
    stub.on("POST /api/approvals/ap-1/approve", an_approval(votes=[vote]))
    result = run("approval", "approve", "ap-1", "--reason", "checked", "--digest", "sha256:ab")
    assert "key:ann: approved  checked" in result.stdout
    assert stub.body("POST /api/approvals/ap-1/approve") == {"reason": "checked", "digest": "sha256:ab"}


# ---------------------------------------------------------------- workflows

GOOD = "name: refund\nsteps:\n  - id: lookup\n    tool: shop.lookup\n  - id: review\n    approval: {tier: high}\n"


def test_validate_needs_no_server_and_sums_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.tools.registry._tools", {})
    Path("good.yaml").write_text(GOOD)
    result = run("workflow", "validate", "good.yaml")
    assert result.stdout == "good.yaml: refund is valid: 2 steps: lookup (shop.lookup) → review (approval)\n"
    assert result.stderr == (
        "interlock: INTERLOCK_TOOLS names no tools here, so tools and arguments were not checked\n"
    )
    assert result.exit_code == 0


def test_validate_checks_tools_and_arguments_against_the_registry(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """new-user 7: `tool: no.such` and `input: {n: "lots", zz: 1}` were "valid"."""
    monkeypatch.setattr("interlock.tools.registry._tools", {})
    (tmp_path / "fit_shop.py").write_text(
        'from interlock import tool\n\n\n@tool("shop.lookup")\nasync def lookup(n: int) -> None: ...\n'
    )
    monkeypatch.setenv("INTERLOCK_TOOLS", str(tmp_path / "fit_shop.py"))
    Path("bad.yaml").write_text(
        "name: bad\nsteps:\n  - {id: a, tool: shop.lokup}\n"
        "  - id: b\n    tool: shop.lookup\n    input: {n: lots, zz: 1}\n"
    )
    result = run("workflow", "validate", "bad.yaml")
    assert result.stdout.splitlines() == [
        "bad.yaml:3: steps[0].tool: no tool is called `shop.lokup`; did you mean `shop.lookup`?",
        "bad.yaml:6: steps[1].input.n: expected a whole number, found 'lots'",
        "bad.yaml:6: steps[1].input.zz: shop.lookup has no argument `zz`",
    ]
    assert result.exit_code == 1


def test_validate_names_every_mistake_with_its_line(url: str) -> None:
    result = run("workflow", "validate", "-", input="name: refund\nsteps:\n  - id: lookup\n    tol: shop.lookup\n")
    assert refused(result).startswith("interlock: ")
    assert any(line.startswith("-:4: steps[0]") for line in result.stdout.splitlines()), result.stdout
    found = json.loads(run("workflow", "validate", "-", "--json", input="steps: []").stdout)
    assert found["ok"] is False and found["faults"][0]["file"] == "-"


def test_apply_names_the_servers_faults_with_the_local_file(stub: Stub) -> None:
    Path("bad.yaml").write_text("name: x")
    fault = {"file": "workflow", "line": 1, "path": "steps", "message": "is missing"}
    stub.on("POST /api/workflows", problem(422, "DEFINITION_INVALID", "Not valid", "…", errors=[fault]))
    result = run("workflow", "apply", "bad.yaml")
    assert result.stdout == "bad.yaml:1: steps: is missing\n"
    assert refused(result) == "interlock: 1 mistake in bad.yaml"
    for_programs = run("workflow", "apply", "bad.yaml", "--json")
    assert json.loads(for_programs.stdout) == {"ok": False, "faults": [{**fault, "file": "bad.yaml"}]}
    said = {"code": "COMMAND_FAILED", "detail": "1 mistake in bad.yaml", "status": None}
    assert json.loads(refused(for_programs)) == said


def a_workflow(version: int) -> dict[str, Any]:
    return {"name": "refund", "version": version, "digest": "sha256:1", "created_at": NOW.isoformat()}


def test_apply_says_if_what_was_applied_is_not_what_new_runs_get(stub: Stub) -> None:
    Path("good.yaml").write_text(GOOD)
    stub.on("POST /api/workflows", a_workflow(1)).on("GET /api/workflows/refund", a_workflow(2))
    result = run("workflow", "apply", "good.yaml", "--json")
    assert (result.exit_code, json.loads(result.stdout)["items"][0]["version"]) == (0, 1)
    assert "refund@1 exists already, and new runs still start with refund@2." in result.stderr
    assert "interlock workflow rollback refund 1" in result.stderr


def test_apply_prints_what_was_published(stub: Stub) -> None:
    Path("good.yaml").write_text(GOOD)
    stub.on("POST /api/workflows", a_workflow(3)).on("GET /api/workflows/refund", a_workflow(3))
    assert run("workflow", "apply", "good.yaml").stdout.splitlines()[1].split()[:2] == ["refund", "3"]
    assert stub.asked[0][2].decode() == GOOD


def test_a_published_workflow_is_shown_as_yaml(stub: Stub) -> None:
    source = {"name": "refund", "steps": [{"id": "lookup", "tool": "shop.lookup"}]}
    shown = {"name": "refund", "version": 2, "digest": "d", "created_at": NOW.isoformat(), "source": source}
    stub.on("GET /api/workflows/refund", shown)
    assert "steps:\n- id: lookup\n" in run("workflow", "show", "refund", "--version", "2").stdout
    assert stub.query("GET /api/workflows/refund") == {"version": "2"}


# ---------------------------------------------------------------- keys and tenants


def test_a_new_key_is_shown(stub: Stub) -> None:
    key = {"id": "k-1", "name": "ci", "role": "operator", "created_at": NOW.isoformat(), "key": "il_secret"}
    stub.on("POST /api/keys", key)
    assert "il_secret" in run("key", "create", "ci", "--role", "operator").stdout
    assert stub.body("POST /api/keys") == {"name": "ci", "role": "operator", "groups": []}


def test_a_revoked_key_is_confirmed(stub: Stub) -> None:
    stub.on("DELETE /api/keys/k-1", Response(status_code=204))
    assert run("key", "revoke", "k-1").stdout == "revoked k-1\n"


def test_a_new_tenant_comes_with_its_admin_key(stub: Stub) -> None:
    stub.on("POST /api/tenants", {"id": "t-1", "name": "acme", "created_at": NOW.isoformat(), "key": "il_admin"})
    assert "il_admin" in run("tenant", "create", "acme", "--max-concurrency", "20").stdout
    assert stub.body("POST /api/tenants") == {"name": "acme", "max_concurrency": 20, "weight": 1.0}


def test_a_tenants_caps_are_changed_one_by_one(stub: Stub) -> None:
    stub.on("PATCH /api/tenants/acme", {"id": "t-1", "name": "acme", "created_at": NOW.isoformat(), "weight": 2})
    run("tenant", "update", "acme", "--max-concurrency", "none", "--max-runs-per-min", "60", "--weight", "2")
    assert stub.body("PATCH /api/tenants/acme") == {"max_concurrency": None, "max_runs_per_min": 60, "weight": 2.0}
    line = refused(run("tenant", "update", "acme", "--max-concurrency", "0"), code=2)
    assert "Invalid value for --max-concurrency: expected a whole number" in line
    assert "say what to change" in refused(run("tenant", "update", "acme"), code=2)


def test_usage_is_shown_against_the_caps(stub: Stub) -> None:
    usage = {"tenant_id": "t-1", "tenant": "acme", "max_runs_per_min": 60, "runs_this_minute": 12, "ready": 10_000}
    stub.on("GET /api/usage", {"items": [usage]})
    shown = run("usage").stdout
    assert "12 of 60" in shown and "10000+" in shown


# ---------------------------------------------------------------- secrets


def test_a_secret_is_asked_for_or_piped_in_and_never_printed(stub: Stub) -> None:
    stored = {
        "name": "bank_key", "version": 3, "created_at": NOW.isoformat(), "created_by": "ann", "tools": ["bank.pay"],
    }  # fmt: skip
    stub.on("PUT /api/secrets/bank_key", stored).on("GET /api/secrets", {"items": [stored]})
    stub.on("DELETE /api/secrets/bank_key", stored)
    for flags, typed in (
        ((), "s3cret-value\n"),
        (("--value-stdin",), "s3cret-value\n"),
        (("--value-stdin",), "s3cret-value"),
    ):
        result = run("secret", "set", "bank_key", "--tool", "bank.pay", *flags, input=typed)
        assert (result.exit_code, "s3cret" in result.output) == (0, False)
        assert (result.stdout, result.stderr) == ("set bank_key, version 3\n", "")
        assert stub.body("PUT /api/secrets/bank_key") == {"value": "s3cret-value", "tools": ["bank.pay"]}
    assert "bank_key" in run("secret", "list").stdout
    assert "deleted bank_key" in run("secret", "delete", "bank_key").stdout


def test_a_name_that_cannot_be_is_not_sent(stub: Stub) -> None:
    line = refused(run("tenant", "create", "ACME"))
    assert line.endswith("name: expected a name of lower-case letters, digits, `_`, `.` and `-`, found 'ACME'")
    assert not stub.asked


# ---------------------------------------------------------------- serving


@pytest.fixture
def fake_main(url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = ModuleType("interlock.main")
    monkeypatch.setitem(sys.modules, "interlock.main", fake)
    monkeypatch.setattr(interlock, "main", fake, raising=False)
    return fake


def test_up_hands_its_flags_on_and_its_exit_code_back(fake_main: Any) -> None:
    seen: list[Any] = []

    def up(settings: Any, listening: socket.socket, workers: int, concurrency: int) -> int:
        seen.append((settings.host, settings.port, listening.getsockname()[0], workers, concurrency))
        return 7

    fake_main.up = up
    assert run("up", "--workers", "0", "--concurrency", "9", "--host", "localhost", "--port", "0").exit_code == 7
    assert seen == [("localhost", 0, "127.0.0.1", 0, 9)]


def test_db_commands_print_what_main_answers(fake_main: Any) -> None:
    fake_main.migrate = lambda settings: ["0001_lifecycles"]
    assert run("db", "migrate").stdout == "applied 0001_lifecycles\n"
    status = {"server_version": "18.4", "embedded": True, "url": "postgresql:///x", "applied": ["0001"], "pending": []}
    fake_main.database_status = lambda settings: {**status, "size_bytes": 9_000_000, "runs": 3}
    assert json.loads(run("db", "status", "--json").stdout)["runs"] == 3
    assert "postgresql:///x (embedded)" in run("db", "status").stdout


def test_tools_are_those_that_the_setting_names(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from interlock import tool\n\n@tool('cli_test.ping', writes=True)\ndef ping(): 'Say hello.'\n"
    (tmp_path / "cli_tools.py").write_text(source)
    monkeypatch.setenv("INTERLOCK_TOOLS", str(tmp_path / "cli_tools.py"))
    found = {tool["name"]: tool for tool in json.loads(run("tools", "--json").stdout)["items"]}
    assert found["cli_test.ping"]["writes"] is True
    assert "cli_test.ping" in run("tools").stdout


@pytest.mark.parametrize("what", ["tools", "flows"])
def test_who_has_none_is_told_how_to_have_some(what: str, tmp_path: Path) -> None:
    """In a process of its own: this one knows those of other tests."""
    shown = subprocess.run(
        [sys.executable, "-m", "interlock", what], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")},
    )  # fmt: skip
    assert shown.stdout.startswith("none; ") and "INTERLOCK_TOOLS" in shown.stdout


# ---------------------------------------------------------------- showing


def test_every_state_of_every_machine_has_a_style() -> None:
    for machine in MACHINES:
        for state in machine.states:
            assert formatting.style(state) in {"", "green", "red", "yellow", "cyan", "dim"}
    assert [formatting.style(state) for state in RUN.states if state in RUN.terminal] == ["green", "red", "dim"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-1, "0ms"),
        (0.24, "240ms"),
        (3.14, "3.1s"),
        (125, "2m05s"),
        (3600 * 3 + 425, "3h07m"),
        (86400 * 4 + 7200, "4d02h"),
    ],
)
def test_durations_are_said_as_people_do(seconds: float, said: str) -> None:
    assert formatting.span(seconds) == said


def progress_of(*steps: dict[str, Any]) -> RunProgress:
    return RunProgress(Run.model_validate(a_run(status="pending", steps=list(steps))))


def move(progress: RunProgress, seq: int, **data: Any) -> None:
    progress.apply(Event.model_validate(an_event(seq, **data)))


def test_events_move_the_steps_on_the_screen() -> None:
    progress = progress_of(a_step("lookup", "pending", attempt=0), a_step("refund", "pending", attempt=0))
    move(progress, 1, to_state="running")
    move(progress, 2, step_key="lookup", to_state="succeeded", attempt=1)
    move(
        progress,
        3,
        step_key="refund",
        to_state="pending",
        attempt=1,
        error={"message": "503"},
        next_run_at="2026-11-16T12:01:00Z",
    )
    declares = {"kind": "tool", "tool": "shop.thank"}
    move(progress, 4, step_key="surprise", to_state="running", attempt=1, declares=declares)
    assert (progress.run.status, progress.settled) == (RunState.RUNNING, 1)
    screen = io.StringIO()
    Console(width=120, file=screen).print(progress.page())
    text = screen.getvalue()
    assert "1/3" in text and "503" in text
    assert ["surprise", "shop.thank", "running", "1/4"] in [line.split()[:4] for line in text.splitlines()]


def on_the_screen(progress: RunProgress, width: int = 80) -> list[str]:
    screen = io.StringIO()
    Console(width=width, file=screen).print(progress.page())
    return screen.getvalue().splitlines()


def test_watching_says_which_run_it_is_and_how_to_decide_what_it_waits_for() -> None:
    progress = progress_of(a_step("review", "pending", attempt=0, kind="approval", tool=None))
    move(progress, 1, to_state="running")
    assert on_the_screen(progress)[1].rstrip() == "run run-1"
    move(progress, 2, step_key="review", to_state="waiting_approval")
    move(progress, 3, to_state="waiting_approval")
    assert on_the_screen(progress)[1].rstrip() == "to decide: interlock approval list --run run-1"


def test_a_short_step_took_what_its_end_says() -> None:
    progress = progress_of(a_step("lookup", "pending", attempt=0))
    move(progress, 1, step_key="lookup", to_state="succeeded", attempt=1, duration_ms=30.6)
    [lookup] = [line for line in on_the_screen(progress) if line.startswith("lookup")]
    assert lookup.split() == ["lookup", "shop.lookup", "succeeded", "1/4", "31ms"]


def test_a_failed_run_shows_the_type_of_its_error(stub: Stub) -> None:
    error = {"type": "CardExpired", "message": "use another card"}
    stub.on("GET /api/runs/run-1", a_run(status="failed", reason="terminal_error", error=error))
    assert "CardExpired: use another card" in run("run", "show", "run-1").stdout


def test_a_run_that_waits_for_people_says_how_to_decide(stub: Stub) -> None:
    stub.on("GET /api/runs/run-1", a_run(status="waiting_approval"))
    assert "to decide: interlock approval list --run run-1" in run("run", "show", "run-1").stdout
    stub.on("GET /api/runs/run-1", a_run(status="running"))
    assert "to decide" not in run("run", "show", "run-1").stdout


def test_an_event_about_something_else_moves_nothing() -> None:
    progress = progress_of(a_step("lookup", "pending", attempt=0))
    move(progress, 1, by="key:ann", decision="approved")
    assert progress.run.status is RunState.PENDING and progress.settled == 0


def test_a_step_that_never_began_is_not_retrying() -> None:
    assert not Step.model_validate(a_step("x", "pending", attempt=0)).retrying
    assert Step.model_validate(a_step("x", "pending", attempt=1)).retrying
