"""The command line's contract for webhooks and Slack."""

import json
from typing import Any

import pytest
from tests.cli.stub import NOW, Stub, problem, refused, run

ID = "01990000-0000-7000-8000-000000000000"


def a_webhook(**more: Any) -> dict[str, Any]:
    base = {"id": ID, "url": "https://example.com/hook", "events": ["run.completed"], "created_at": NOW.isoformat()}
    return {**base, **more}


def a_delivery(status: str = "delivered", **more: Any) -> dict[str, Any]:
    base = {"id": "msg_1", "event": "webhook.test", "subject_id": ID, "status": status, "attempts": 1}
    return {**base, "created_at": NOW.isoformat(), **more}


def a_user(**more: Any) -> dict[str, Any]:
    base = {"team_id": "T1", "user_id": "U1", "key_id": ID, "name": "ann", "role": "approver"}
    return {**base, "created_at": NOW.isoformat(), **more}


def page(*items: Any) -> dict[str, Any]:
    return {"items": list(items), "next_cursor": None}


# ---------------------------------------------------------------- webhooks


def test_adding_a_webhook_shows_its_secret_once(stub: Stub) -> None:
    stub.on("POST /api/webhooks", a_webhook(secret="whsec_abc"))
    said = run("webhook", "add", "https://example.com/hook", "--event", "run.completed", "--event", "approval.edited")
    assert stub.body("POST /api/webhooks") == {
        "url": "https://example.com/hook", "events": ["run.completed", "approval.edited"],
    }  # fmt: skip
    assert "whsec_abc" in said.stdout and "not shown again" in said.stdout
    stub.on("GET /api/webhooks", page(a_webhook()))
    assert "whsec" not in run("webhook", "list").stdout


def test_without_events_the_server_chooses_them(stub: Stub) -> None:
    stub.on("POST /api/webhooks", a_webhook(secret="whsec_abc"))
    run("webhook", "add", "https://example.com/hook")
    assert set(stub.body("POST /api/webhooks")["events"]) == {
        "approval.requested", "approval.resolved", "run.completed",
    }  # fmt: skip


def test_an_event_that_there_is_not_is_refused_with_those_there_are(stub: Stub) -> None:
    said = refused(run("webhook", "add", "https://example.com/hook", "--event", "run.exploded"), code=2)
    assert "run.exploded" in said and "run.completed" in said and stub.asked == []


def test_an_address_that_is_refused_says_why(stub: Stub) -> None:
    why = "10.0.0.7 is not a public address"
    stub.on("POST /api/webhooks", problem(422, "WEBHOOK_URL_REFUSED", "Not valid", why))
    assert why in refused(run("webhook", "add", "http://10.0.0.7/"))


@pytest.mark.parametrize(
    ("more", "word"),
    [({}, "on"), ({"failing_since": NOW.isoformat()}, "failing"), ({"disabled_at": NOW.isoformat()}, "off")],
)
def test_the_list_tells_which_are_reached(stub: Stub, more: dict[str, Any], word: str) -> None:
    stub.on("GET /api/webhooks", page(a_webhook(**more)))
    head, line = run("webhook", "list").stdout.splitlines()
    assert (head.split(), line.split()[3]) == (["ID", "URL", "EVENTS", "STATE", "CREATED"], word)


def test_show_has_the_last_deliveries_and_what_to_do(stub: Stub) -> None:
    off = a_webhook(disabled_at=NOW.isoformat(), last_error="answered 500")
    stub.on(f"GET /api/webhooks/{ID}", off)
    failed = a_delivery("failed", attempts=9, response_status=500, last_error="answered 500\x1b[2J")
    stub.on(f"GET /api/webhooks/{ID}/deliveries", page(a_delivery(response_status=204), failed))
    said = run("webhook", "show", ID).stdout
    assert f"interlock webhook enable {ID}" in said and "204" in said and "\x1b" not in said
    assert [d["status"] for d in json.loads(run("webhook", "show", ID, "--json").stdout)["deliveries"]] == [
        "delivered", "failed",
    ]  # fmt: skip


def test_a_test_waits_for_the_first_try_and_exits_by_it(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.cli.webhooks._PAUSE_SECONDS", 0)
    waiting = a_delivery("pending", attempts=0)
    stub.on(f"POST /api/webhooks/{ID}/test", waiting)
    stub.on(f"GET /api/webhooks/{ID}/deliveries", page(waiting), page(a_delivery("pending")), page(a_delivery()))
    assert run("webhook", "test", ID).exit_code == 0
    stub.on(f"GET /api/webhooks/{ID}/deliveries", page(a_delivery("pending", last_error="answered 500")))
    said = run("webhook", "test", ID)
    assert (said.exit_code, "answered 500" in said.stdout) == (1, True)
    stub.on(f"GET /api/webhooks/{ID}/deliveries", page(waiting))
    assert run("webhook", "test", ID, "--wait", "0").exit_code == 1


def test_removing_says_what_is_gone(stub: Stub) -> None:
    stub.on(f"DELETE /api/webhooks/{ID}", a_webhook(disabled_at=NOW.isoformat()))
    assert run("webhook", "remove", ID).stdout == f"removed {ID}, https://example.com/hook\n"
    assert "no such thing" in refused(run("webhook", "remove", "another"))


# ---------------------------------------------------------------- Slack


def test_a_link_code_is_printed_with_what_to_send(stub: Stub) -> None:
    stub.on("POST /api/slack/link-codes", {"code": "ABCD-EFGH", "expires_at": NOW.isoformat()})
    assert "/interlock link ABCD-EFGH" in run("slack", "link").stdout


def test_teams_are_shared_joined_and_left(stub: Stub) -> None:
    team = {"team_id": "T1", "is_member": True, "tenants": ["acme", "default"]}
    for call in ("POST /api/slack/teams/T1/offers", "POST /api/slack/teams/T1/accept", "DELETE /api/slack/teams/T1"):
        stub.on(call, team)
    stub.on("GET /api/slack/teams", page(team, {"team_id": "T2", "is_member": False, "tenants": []}))
    assert "interlock slack join T1" in run("slack", "share", "T1", "acme").stdout
    assert stub.body("POST /api/slack/teams/T1/offers") == {"tenant": "acme"}
    assert run("slack", "join", "T1").exit_code == 0 and run("slack", "leave", "T1").exit_code == 0
    _, one, two = run("slack", "teams").stdout.splitlines()
    assert one.split() == ["T1", "shared", "acme,", "default"] and two.split() == ["T2", "offered"]


def test_users_show_whose_key_is_revoked(stub: Stub) -> None:
    stub.on("GET /api/slack/users", page(a_user(), a_user(user_id="U2", revoked_at=NOW.isoformat())))
    _, one, two = run("slack", "users").stdout.splitlines()
    assert (len(one.split()), len(two.split())) == (8, 11)
    stub.on("DELETE /api/slack/users/T1/U1", a_user())
    assert run("slack", "unlink", "T1", "U1").stdout == "unlinked U1, who acted as ann\n"


def test_a_channel_is_chosen_and_taken_away(stub: Stub) -> None:
    stub.on("PUT /api/slack/channel", {"tenant": "acme", "channel": "C1"})
    stub.on("DELETE /api/slack/channel", {"tenant": "acme", "channel": None})
    assert run("slack", "channel", "C1", "--tenant", "acme").stdout == "approvals of acme go to C1\n"
    assert run("slack", "channel", "none", "--tenant", "acme").stdout == "approvals of acme go to no channel\n"
    assert stub.query("DELETE /api/slack/channel") == {"tenant": "acme"}
