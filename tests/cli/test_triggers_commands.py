"""The command line's contract for triggers and schedules."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.stub import NOW, Stub, a_run, problem, refused, run

TRIGGER = {
    "name": "deploys", "kind": "github", "workflow": "deploy", "path": "/api/hooks/github/deploys", "acts_as": "ann",
    "digest": "ab", "created_at": NOW.isoformat(), "updated_at": NOW.isoformat(),
}  # fmt: skip
SCHEDULE = {
    "name": "nightly", "cron": "30 2 * * *", "timezone": "Europe/Berlin", "workflow": "clean-up", "input": {"keep": 3},
    "missed": "last", "acts_as": "ann", "next_at": NOW.isoformat(), "created_at": NOW.isoformat(),
}  # fmt: skip
PAUSED = SCHEDULE | {"next_at": None, "paused_at": NOW.isoformat(), "paused_why": "the key was revoked"}


@pytest.fixture
def file(url: str) -> str:
    Path("deploys.yaml").write_text("name: deploys\n")
    return "deploys.yaml"


def test_apply_says_where_the_sender_posts_to(stub: Stub, file: str) -> None:
    stub.on("POST /api/triggers", TRIGGER)
    assert "/api/hooks/github/deploys" in run("trigger", "apply", file).stdout
    assert stub.asked[0][2] == b"name: deploys\n"


def test_apply_names_every_fault_with_the_local_file(stub: Stub, file: str) -> None:
    fault = {"file": "trigger", "line": 1, "path": "workflow", "message": "`workflow` is missing"}
    stub.on("POST /api/triggers", problem(422, "DEFINITION_INVALID", "not valid", "…", errors=[fault]))
    found = run("trigger", "apply", file)
    assert found.stdout == "deploys.yaml:1: workflow: `workflow` is missing\n"
    assert "1 mistake in deploys.yaml" in refused(found)


def test_triggers_are_listed_shown_and_deleted(stub: Stub) -> None:
    source = {"name": "deploys", "github": {"secret": "gh"}}
    stub.on("GET /api/triggers", {"items": [TRIGGER], "next_cursor": None})
    stub.on("GET /api/triggers/deploys", TRIGGER | {"source": source}).on("DELETE /api/triggers/deploys", TRIGGER)
    assert "deploys  github  deploy" in run("trigger", "list").stdout
    shown = run("trigger", "show", "deploys").stdout
    assert "acts as" in shown and "secret: gh" in shown
    assert run("trigger", "delete", "deploys").stdout == "deleted deploys\n"


def test_a_trigger_is_tried_with_a_payload(stub: Stub) -> None:
    Path("push.json").write_text('{"ref": "main"}')
    starts = {"outcome": "starts", "starts": True, "workflow": "deploy", "input": {"sha": "abc"}}
    stub.on("POST /api/triggers/deploys/test", starts)
    tried = run("trigger", "test", "deploys", "--event", "push", "--payload", "@push.json", "--header", "X-Y=1").stdout
    assert "Starts deploy with" in tried and "sha  abc" in tried
    asked = stub.body("POST /api/triggers/deploys/test")
    assert asked == {"payload": {"ref": "main"}, "event": "push", "headers": {"X-Y": "1"}}
    ignored = {"outcome": "ignored", "starts": False, "workflow": "deploy", "reason": "`x` is false"}
    stub.on("POST /api/triggers/deploys/test", ignored)
    assert run("trigger", "test", "deploys").stdout == "Starts nothing: `x` is false\n"


@pytest.mark.parametrize(("outcome", "code"), [("starts", 0), ("ignored", 3), ("refused", 1)])
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_trial_ends_with_a_code_for_each_outcome(stub: Stub, outcome: str, code: int, flags: tuple[str, ...]) -> None:
    """new-user 5: every outcome exited 0, so CI could not use it as a check."""
    answer = {"outcome": outcome, "starts": outcome == "starts", "workflow": "deploy", "reason": "because"}
    stub.on("POST /api/triggers/deploys/test", answer)
    assert run("trigger", "test", "deploys", *flags).exit_code == code


def test_a_schedule_is_created(stub: Stub) -> None:
    stub.on("POST /api/schedules", SCHEDULE)
    args = ("--timezone", "Europe/Berlin", "--param", "keep=3", "--missed", "all")
    assert "30 2 * * *" in run("schedule", "create", "nightly", "30 2 * * *", "clean-up", *args).stdout
    assert stub.body("POST /api/schedules") == {
        "name": "nightly", "cron": "30 2 * * *", "workflow": "clean-up", "input": {"keep": 3}, "missed": "all",
        "timezone": "Europe/Berlin",
    }  # fmt: skip
    assert "some" in refused(run("schedule", "create", "n", "@daily", "w", "--missed", "some"), code=2)


def test_schedules_are_listed_and_say_that_they_are_paused(stub: Stub) -> None:
    stub.on("GET /api/schedules", {"items": [PAUSED], "next_cursor": None}).on("GET /api/schedules/nightly", PAUSED)
    assert "paused" in run("schedule", "list").stdout
    assert "the key was revoked" in run("schedule", "show", "nightly").stdout
    assert json.loads(run("schedule", "show", "nightly", "--json").stdout)["paused_why"] == "the key was revoked"


@pytest.mark.parametrize(
    ("verb", "call", "answer", "says"),
    [
        ("pause", "POST /api/schedules/nightly/pause", PAUSED, "paused nightly"),
        ("resume", "POST /api/schedules/nightly/resume", SCHEDULE, "resumed nightly, next at"),
        ("run", "POST /api/schedules/nightly/run", a_run(), "run-1"),
        ("delete", "DELETE /api/schedules/nightly", SCHEDULE, "deleted nightly"),
    ],
)
def test_a_schedule_is_told_what_to_do(stub: Stub, verb: str, call: str, answer: Any, says: str) -> None:
    stub.on(call, answer)
    assert says in run("schedule", verb, "nightly").stdout
