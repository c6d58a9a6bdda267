"""`interlock worker` and `interlock job`: their requests, their output, and their exit."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.cli.stub import NOW, Stub, problem, refused, run, sse

ID = "01990000-0000-7000-8000-000000000000"


def a_worker(status: str = "running", **more: Any) -> dict[str, Any]:
    at = NOW.isoformat()
    base = {"id": ID, "name": "box-1", "host": "box", "pid": 7, "status": status, "capacity": 100, "holds": 3}
    return {**base, "labels": ["gpu"], "heartbeat_at": at, "started_at": at, "updated_at": at, **more}


def a_job(status: str = "running", done: int = 1, **more: Any) -> dict[str, Any]:
    progress = {"done": done, "total": 4, "rate_per_second": 2.0, "eta_seconds": 1.5}
    base = {"id": ID, "tenant_id": "t", "depth": 0, "task_description": "thumbnails", "workflow": "resize"}
    return {
        **base, "worker_count": 2, "status": status, "progress": progress, "created_at": NOW.isoformat(), **more,
    }  # fmt: skip


def test_the_list_shows_who_is_there(stub: Stub) -> None:
    stub.on("GET /api/workers", {"items": [a_worker(reason="looking")], "next_cursor": None})
    shown = run("worker", "list").stdout
    for word in (ID, "box-1", "running", "3/100", "gpu", "looking"):
        assert word in shown
    assert json.loads(run("worker", "list", "--json").stdout)["items"][0]["labels"] == ["gpu"]


@pytest.mark.parametrize("verb", ["pause", "resume", "terminate"])
def test_an_order_is_sent_with_its_reason_and_its_request_id(stub: Stub, verb: str) -> None:
    stub.on(f"POST /api/supervisor/workers/{ID}/{verb}", a_worker())
    assert run("worker", verb, ID, "--reason", "because", "--request-id", "r1").exit_code == 0
    assert stub.body(f"POST /api/supervisor/workers/{ID}/{verb}") == {"reason": "because"}
    assert stub.asked[0][3]["idempotency-key"] == "r1"


def test_a_refused_order_is_one_line(stub: Stub) -> None:
    detail = "worker is idle; pause is not possible (allowed: start, terminate)"
    path = f"POST /api/supervisor/workers/{ID}/pause"
    stub.on(path, problem(409, "WORKER_INVALID_TRANSITION", "Not possible in this state", detail))
    assert "allowed: start, terminate" in refused(run("worker", "pause", ID))


def test_a_worker_is_asked_for_and_started(stub: Stub) -> None:
    stub.on("POST /api/workers", a_worker("idle", pid=None)).on(f"POST /api/workers/{ID}/start", a_worker())
    assert "running" in run("worker", "create", "--label", "gpu", "--tenant", "acme", "--start").stdout
    assert stub.body("POST /api/workers") == {"labels": ["gpu"], "tenants": ["acme"], "metadata": {}}


def test_its_history_is_shown(stub: Stub) -> None:
    change = {
        "from_state": "running",
        "event": "pause",
        "to_state": "paused",
        "reason": "r",
        "by": "ann",
        "at": NOW.isoformat(),
    }
    stub.on(f"GET /api/workers/{ID}", a_worker("paused", state_history=[change]))
    shown = run("worker", "show", ID).stdout
    assert "paused" in shown and "ann" in shown


def test_its_log_is_read_where_it_was_written(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_DATA_DIR", str(tmp_path / "ours"))
    text = "one\ntwo\x1b[31m\nthree\n"
    theirs = tmp_path / f"worker-{ID}.log"
    stub.on(f"GET /api/workers/{ID}", a_worker(log=str(theirs)))
    assert f"is not on this machine: it is on box, in {theirs}" in refused(run("worker", "logs", ID))
    theirs.write_text(text)
    assert run("worker", "logs", ID, "--lines", "2").stdout.splitlines() == ["two\\x1b[31m", "three"]
    (tmp_path / "ours" / "logs").mkdir(parents=True)
    (tmp_path / "ours" / "logs" / f"worker-{ID}.log").write_text("ours\n")
    assert run("worker", "logs", ID).stdout == "ours\n"


def test_a_worker_without_a_log_says_why(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_DATA_DIR", str(tmp_path))
    stub.on(f"GET /api/workers/{ID}", a_worker())
    assert "started by hand on box, process 7" in refused(run("worker", "logs", ID))
    stub.on(f"GET /api/workers/{ID}", a_worker("idle", pid=None))
    assert "its process was not started" in refused(run("worker", "logs", ID))
    stub.on(f"GET /api/workers/{ID}", problem(404, "WORKER_NOT_FOUND", "Not found", f"no worker {ID}"))
    assert f"no worker {ID}" in refused(run("worker", "logs", ID))


def test_a_job_is_submitted(stub: Stub) -> None:
    stub.on("POST /api/jobs", a_job("pending", 0))
    result = run("job", "submit", "resize", "--inputs", '[{"n": 1}, {"n": 2}]', "--workers", "2", "--timeout", "1h")
    assert result.exit_code == 0, result.output
    sent = stub.body("POST /api/jobs")
    assert (sent["inputs"], sent["worker_count"], sent["timeout_seconds"]) == ([{"n": 1}, {"n": 2}], 2, 3600)
    assert "expected a list" in refused(run("job", "submit", "resize", "--inputs", "{}"), code=2)


def test_a_job_that_is_not_valid_fails_the_command(stub: Stub) -> None:
    stub.on("POST /api/jobs", a_job("failed", 0, reason="no workflow resize"))
    assert "no workflow resize" in refused(run("job", "submit", "resize"))


def said(seq: int, seconds: int, type: str = "job_progress", **data: Any) -> dict[str, Any]:
    return {"seq": seq, "type": type, "at": (NOW + timedelta(seconds=seconds)).isoformat(), "data": data}


def test_a_job_is_watched_to_its_end(stub: Stub) -> None:
    started = said(1, 0, "job_transition", from_state="pending", to_state="running", done=0, total=4)
    ended = said(4, 3, "job_completed", from_state="running", to_state="failed", done=4, total=4)
    told = [started, said(2, 1, done=1, total=4, succeeded=1), said(3, 2, done=3, total=4, succeeded=2), ended]
    stub.on(f"GET /api/jobs/{ID}", a_job("pending", 0), a_job("failed", 4, reason="1 of 4 runs did not succeed"))
    stub.on(f"GET /api/jobs/{ID}/events", sse(*told))
    result = run("job", "watch", ID)
    assert result.stdout.splitlines()[:4] == [
        "running 0/4", "running 1/4, 1/s, 3.0s left", "running 3/4, 1 failed, 1.5/s, 667ms left",
        "failed 4/4, 1 failed, 1.33/s",
    ]  # fmt: skip
    assert "1 of 4 runs did not succeed" in result.stderr and result.exit_code == 1


def test_a_job_with_failed_runs_says_how_to_list_them(stub: Stub) -> None:
    """new-user section 7: the output did not say which runs had failed."""
    ended = a_job("failed", 4)
    ended["progress"]["failed"] = 1
    stub.on(f"GET /api/jobs/{ID}", ended, a_job("completed", 4))
    listing = f"interlock run list --job {ID} --status failed"
    assert listing in run("job", "show", ID).stdout
    assert listing not in run("job", "show", ID).stdout


def test_a_watched_job_is_one_event_a_line_for_programs(stub: Stub) -> None:
    stub.on(f"GET /api/jobs/{ID}", a_job(), a_job("completed", 4))
    stub.on(f"GET /api/jobs/{ID}/events", sse(said(1, 0, done=4, total=4, succeeded=4)))
    (line,) = run("job", "watch", ID, "--json").stdout.splitlines()
    assert json.loads(line)["data"]["done"] == 4


def test_a_tree_is_drawn(stub: Stub) -> None:
    stub.on(f"GET /api/jobs/{ID}/tree", a_job(children=[a_job("pending", 0, depth=1, children=[])]))
    shown = run("job", "tree", ID).stdout
    assert "└── " in shown and "pending" in shown


def test_a_job_is_canceled_and_listed(stub: Stub) -> None:
    stub.on(f"POST /api/jobs/{ID}/cancel", a_job("canceled", reason="enough"))
    assert "enough" in run("job", "cancel", ID, "--reason", "enough").stdout
    stub.on("GET /api/jobs", {"items": [a_job()], "next_cursor": None})
    assert "thumbnails" in run("job", "list", "--status", "running").stdout
    assert stub.query("GET /api/jobs")["status"] == "running"
