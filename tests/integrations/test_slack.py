"""Slack: a card for each approval, buttons that decide once, and no card with outdated content."""

import asyncio
from typing import Any

import orjson
import pytest

from interlock.engine import outbox, policies
from interlock.integrations import Dispatcher, deliver_forever, use_settings
from interlock.integrations.cards import card
from interlock.policy.policy import compile_policy
from interlock.slack_markup import escape
from interlock.tools import Context
from tests.integrations.conftest import Stub
from tests.integrations.people import TEAM, button, has_buttons, join, pressed, send, typed, waiting
from tests.rig import Rig

POST, UPDATE = "/api/chat.postMessage", "/api/chat.update"

REFUND = """
name: refund
steps:
  - {id: pay, tool: shop.refund, input: {charge: "${input.charge}", amount: "${input.amount}"}}
"""


async def held(rig: Rig) -> Any:
    """A high write that needs two approvals."""

    @rig.tool("shop.refund", writes=True, risk="high", target="{charge}", key="r:{charge}")
    async def refund(ctx: Context, charge: str, amount: int) -> dict[str, int]:
        return {"refunded": amount}

    return await asked_for(rig)


async def asked_for(rig: Rig) -> Any:
    await use_settings(rig.database, rig.settings)
    await rig.apply(REFUND)
    run_id = await rig.start("refund", {"charge": "ch_1", "amount": 50})
    await rig.work_until(run_id, "waiting_approval")
    (approval,) = await rig.sql("SELECT * FROM interlock.approval WHERE run_id = $1", run_id)
    return approval


def text_of(request: Any) -> str:
    return orjson.dumps(request).decode() if not isinstance(request, str) else request


# ---------------------------------------------------------------- cards


async def test_an_approval_is_posted_as_a_card(rig: Rig, slack: Stub, dispatcher: Dispatcher) -> None:
    approval = await held(rig)
    await dispatcher.deliver_due()
    (request,) = slack.at(POST)
    posted = request.json
    assert request.headers["authorization"] == "Bearer xoxb-test"
    assert posted["channel"] == "#approvals"
    shown = text_of(posted)
    for part in ("shop.refund", "ch_1", "+ amount: 50", "two people", "any approver except ", "admin", "<!date^"):
        assert part in shown, part
    assert all(rule in shown for rule in approval["rule_ids"])
    assert button(posted, "interlock_approve") == f"{approval['id']}:{approval['digest']}"
    assert [tuple(r) for r in await rig.sql("SELECT channel, ts FROM interlock.slack_card")] == [
        ("C0APPROVALS", "1700000000.000001")
    ]


async def test_a_card_of_a_workspace_has_no_values(rig: Rig, slack: Stub, dispatcher: Dispatcher) -> None:
    """Security M8: the whole tenant reads the channel. The card has no fields, names, reasons or buttons."""
    await use_settings(rig.database, rig.settings)
    await rig.apply("{name: a, steps: [{id: ok, approval: {tier: low, summary: 'About ${input.who}'}}]}")
    blue = rig.http(await rig.key("bluebell", "admin", workspace_id="blue"))
    run = (await blue.post("/api/runs", json={"workflow": "a", "input": {"who": "marker-7f3a"}})).json()
    await dispatcher.deliver_due()
    posted = text_of(slack.at(POST)[0].json)
    assert "Approval needed" in posted and "Only its workspace can read and decide it" in posted
    await blue.post(f"/api/runs/{run['id']}/cancel")
    await dispatcher.deliver_due()
    updated = text_of(slack.at(UPDATE)[-1].json)
    for shown in (posted, updated):
        assert "marker-7f3a" not in shown and "bluebell" not in shown and '"actions"' not in shown


async def test_a_tenant_without_slack_writes_no_message(rig: Rig) -> None:
    other = await rig.tenant("other")
    await rig.apply("name: a\nsteps:\n  - {id: ok, approval: {tier: low, summary: s}}", other)
    await rig.start("a", {}, other)
    assert await rig.sql("SELECT * FROM interlock.outbox_message") == []


async def test_what_people_wrote_is_not_markup(rig: Rig) -> None:
    _, approval = await waiting(rig, version="<!channel> & <https://evil|click>")
    row = await rig.database.row("card_of", approval["id"])
    assert row is not None
    shown = card(row, [])
    assert "<!channel>" not in shown.text and "&lt;!channel&gt;" in shown.text
    assert "<!channel>" not in "".join(text_of(b) for b in shown.blocks if b["type"] != "header")  # plain text: no mark


@pytest.mark.parametrize("how", ["approved", "rejected", "expired", "canceled"])
async def test_a_card_loses_its_buttons_once_it_is_decided_anywhere(
    rig: Rig, slack: Stub, dispatcher: Dispatcher, how: str
) -> None:
    run_id, _ = await waiting(rig)
    await dispatcher.deliver_due()
    ada = await rig.person("ada", "approver")
    match how:
        case "approved" | "rejected":
            await rig.decide(run_id, approves=how == "approved", who=ada, reason="because <b>")
        case "expired":
            rig.clock.advance(9 * 86400)
            await rig.sweep()
        case "canceled":
            await rig.cancel(run_id)
    await dispatcher.deliver_due()
    last = slack.at(UPDATE)[-1].json
    assert (last["channel"], last["ts"]) == ("C0APPROVALS", "1700000000.000001")
    assert not has_buttons(last)
    assert {"approved": "Approved by *ada*", "rejected": "Rejected by *ada*", "expired": "nobody decided in time",
            "canceled": "the run ended"}[how] in text_of(last)  # fmt: skip
    assert len(slack.at(POST)) == 1


async def test_the_first_of_two_votes_shows_on_the_card(rig: Rig, slack: Stub, dispatcher: Dispatcher) -> None:
    await held(rig)
    await dispatcher.deliver_due()
    await join(rig, "ada", "U1")
    answer = await send(rig, "actions", pressed(button(slack.at(POST)[0].json, "interlock_approve"), "U1"))
    assert "One more approver is needed" in answer.json()["text"]
    await dispatcher.deliver_due()
    (last,) = [r.json for r in slack.at(UPDATE)]
    assert has_buttons(last) and "Approved by *ada*" in text_of(last) and "One more approver" in text_of(last)


async def test_an_edited_action_shows_what_was_and_what_is(rig: Rig, slack: Stub, dispatcher: Dispatcher) -> None:
    approval = await held(rig)
    await dispatcher.deliver_due()
    key = await rig.key("ada", "approver")
    answer = await rig.http(key).post(f"/api/approvals/{approval['id']}/approve", json={"patch": {"amount": 40}})
    assert answer.status_code == 200, answer.text
    await dispatcher.deliver_due()
    last = slack.at(UPDATE)[-1].json
    shown = text_of(last)
    assert "- amount: 50" in shown and "+ amount: 40" in shown and r"  charge: \"ch_1\"" in shown
    assert button(last, "interlock_approve") != f"{approval['id']}:{approval['digest']}"


# ---------------------------------------------------------------- buttons


async def test_two_people_press_at_the_same_moment_and_it_is_decided_once(
    rig: Rig, slack: Stub, dispatcher: Dispatcher
) -> None:
    run_id, _ = await waiting(rig)
    await dispatcher.deliver_due()
    await join(rig, "ada", "U1")
    await join(rig, "bob", "U2")
    value = button(slack.at(POST)[0].json, "interlock_approve")
    answers = await asyncio.gather(*(send(rig, "actions", pressed(value, user)) for user in ("U1", "U2", "U1", "U2")))
    assert [a.status_code for a in answers] == [200] * 4
    assert len(await rig.sql("SELECT * FROM interlock.vote")) == 1
    journal = await rig.journal(run_id)
    assert sum("-grant->" in line for line in journal) == 1
    assert (await rig.run(run_id))["status"] == "succeeded"
    await dispatcher.deliver_due()
    last = slack.at(UPDATE)[-1].json
    assert not has_buttons(last) and text_of(last).count("Approved by") == 1
    assert len(slack.at(POST)) == 1


async def test_one_approves_while_the_other_rejects(rig: Rig, slack: Stub, dispatcher: Dispatcher) -> None:
    run_id, _ = await waiting(rig)
    await dispatcher.deliver_due()
    await join(rig, "ada", "U1")
    await join(rig, "bob", "U2")
    posted = slack.at(POST)[0].json
    yes, no = await asyncio.gather(
        send(rig, "actions", pressed(button(posted, "interlock_approve"), "U1")),
        send(rig, "actions", pressed(button(posted, "interlock_reject"), "U2", "interlock_reject")),
    )
    late = [a for a in (yes, no) if a.content]
    assert len(late) == 1 and "APPROVAL_DECIDED" in late[0].json()["text"]
    assert len(await rig.sql("SELECT * FROM interlock.vote")) == 1
    assert (await rig.run(run_id))["completed_at"]


async def test_two_people_release_a_high_write_and_the_card_names_both(
    rig: Rig, slack: Stub, dispatcher: Dispatcher
) -> None:
    approval = await held(rig)
    await dispatcher.deliver_due()
    await join(rig, "ada", "U1")
    await join(rig, "bob", "U2")
    value = button(slack.at(POST)[0].json, "interlock_approve")
    await asyncio.gather(*(send(rig, "actions", pressed(value, user)) for user in ("U1", "U2")))
    run = await rig.work_until(approval["run_id"])
    assert run["status"] == "succeeded"
    await dispatcher.deliver_due()
    last = text_of(slack.at(UPDATE)[-1].json)
    assert "Approved by *ada*" in last and "Approved by *bob*" in last


async def test_refusals_come_back_to_who_pressed(rig: Rig, slack: Stub, dispatcher: Dispatcher) -> None:
    rig.admin = await join(rig, "asker", "U0", "admin")
    approval = await held(rig)
    await dispatcher.deliver_due()
    await join(rig, "ada", "U1")
    await join(rig, "robot", "U3", "agent")
    value = button(slack.at(POST)[0].json, "interlock_approve")

    async def told(user: str, value: str = value) -> str:
        form = pressed(value, user, response_url=f"{slack.url}/actions/1")
        answer = await send(rig, "actions", form)
        assert answer.status_code == 200
        said = slack.at("/actions/1")[-1].json
        assert said["response_type"] == "ephemeral" and said["replace_original"] is False
        text: str = said["text"]
        return text

    assert "SELF_APPROVAL" in await told("U0")
    assert "One more approver is needed" in await told("U1")
    assert "ALREADY_VOTED" in await told("U1")
    assert "AGENT_MAY_NOT_APPROVE" in await told("U3")
    stranger = await told("U99")
    assert "does not know you" in stranger and "/interlock link CODE" in stranger
    assert "ACTION_DIGEST_MISMATCH" in await told("U1", f"{approval['id']}:{'0' * 64}")
    assert "not known here" in await told("U1", "01890000-0000-7000-8000-000000000000:x")
    rig.clock.advance(9 * 86400)
    assert "APPROVAL_EXPIRED" in await told("U1")
    assert len(await rig.sql("SELECT * FROM interlock.vote")) == 1


async def test_an_approval_of_another_tenant_or_workspace_is_unknown_to_a_slack_user(
    rig: Rig, slack: Stub, dispatcher: Dispatcher
) -> None:
    """Specification remark on t013: a press for it got another answer than a press for an unknown id."""
    await waiting(rig)
    await dispatcher.deliver_due()
    other = await rig.tenant("other")
    await join(rig, "eve", "U6", "admin", tenant_id=other.tenant_id)
    value = button(slack.at(POST)[0].json, "interlock_approve")
    red = await join(rig, "red", "U7")
    await rig.sql("UPDATE interlock.api_key SET workspace_id = 'red' WHERE id = $1", red.key_id)
    told = set()
    for user in ("U6", "U7"):
        for pressed_on in (value, "01890000-0000-7000-8000-000000000000:x"):
            told.add((await send(rig, "actions", pressed(pressed_on, user))).json()["text"])
    assert told == {"This approval is not known here."}
    assert await rig.sql("SELECT * FROM interlock.vote") == []


async def test_a_revoked_key_decides_nothing(rig: Rig, slack: Stub, dispatcher: Dispatcher) -> None:
    await waiting(rig)
    await dispatcher.deliver_due()
    ada = await join(rig, "ada", "U1")
    assert (await rig.http().delete(f"/api/keys/{ada.key_id}")).status_code == 200
    answer = await send(rig, "actions", pressed(button(slack.at(POST)[0].json, "interlock_approve"), "U1"))
    assert "does not know you" in answer.json()["text"]
    assert await rig.sql("SELECT * FROM interlock.vote") == []


async def test_replies_go_to_slack_and_nowhere_else(rig: Rig, slack: Stub, dispatcher: Dispatcher) -> None:
    await waiting(rig)
    await dispatcher.deliver_due()
    value = button(slack.at(POST)[0].json, "interlock_approve")
    elsewhere = slack.url.replace("127.0.0.1", "localhost")
    answer = await send(rig, "actions", pressed(value, "U99", response_url=f"{elsewhere}/actions/1"))
    assert answer.status_code == 200 and slack.at("/actions/1") == []


# ---------------------------------------------------------------- signatures


@pytest.mark.parametrize("path", ["actions", "commands"])
async def test_a_wrong_or_old_signature_is_refused(rig: Rig, path: str) -> None:
    now = rig.clock.freeze().timestamp()
    form = typed("help", "U1")
    assert (await send(rig, "commands", form)).status_code == 200
    assert (await send(rig, "commands", form, at=now - 299)).status_code == 200
    for wrong in (
        {"secret": "another"}, {"at": now - 301}, {"at": now + 301}, {"headers": {"x-slack-signature": "v0=00"}},
        {"headers": {"x-slack-signature": "ü".encode()}}, {"headers": {"x-slack-request-timestamp": "soon"}},
        {"headers": {"x-slack-request-timestamp": str(int(now) + 1)}},
    ):  # fmt: skip
        answer = await send(rig, path, form, **wrong)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["code"]) == (401, "SIGNATURE_INVALID"), wrong
    unsigned = await rig.http("").post(f"/api/hooks/slack/{path}", data=form)
    assert unsigned.status_code == 401


async def test_without_a_signing_secret_nothing_is_accepted(rig: Rig) -> None:
    rig.services.settings.slack_signing_secret = None
    assert (await send(rig, "actions", typed("help", "U1"))).status_code == 404


# ---------------------------------------------------------------- delivery


async def test_too_many_requests_are_tried_again_when_slack_says(rig: Rig, slack: Stub, dispatcher: Dispatcher) -> None:
    rig.clock.freeze()
    await waiting(rig)
    await rig.start("release", {"version": "1.3"})
    slack.script(POST, (429, {"Retry-After": "17"}, {"ok": False, "error": "ratelimited"}))
    await dispatcher.deliver_due()
    assert len(slack.at(POST)) == 1  # the second card waits too
    rig.clock.advance(16)
    assert await dispatcher.deliver_due() == 0
    rig.clock.advance(1)
    await dispatcher.deliver_due()
    assert len(slack.at(POST)) == 3
    rows = await rig.sql(
        "SELECT attempts, failed, done_at IS NOT NULL AS done FROM interlock.outbox_message ORDER BY id"
    )
    assert [tuple(r) for r in rows] == [(2, False, True), (1, False, True)]


async def test_failures_are_tried_again_with_growing_pauses_and_given_up_after_a_day(
    rig: Rig, slack: Stub, dispatcher: Dispatcher
) -> None:
    began = rig.clock.freeze()
    await waiting(rig, "name: release\nsteps: [{id: ok, approval: {tier: low, summary: s, expires_in: 9d}}]")
    slack.default = lambda path: (200, {}, {"ok": False, "error": "invalid_auth"})
    pauses = []
    for _ in range(60):
        await dispatcher.deliver_due()
        (row,) = await rig.sql("SELECT * FROM interlock.outbox_message WHERE event = 'approval.requested'")
        if row["done_at"]:
            break
        pauses.append((row["due_at"] - rig.clock.freeze()).total_seconds())
        rig.clock.advance(pauses[-1])
    assert pauses[:6] == [5, 30, 120, 600, 3600, 3600]
    assert row["failed"] and row["last_error"] == "Slack says invalid_auth"
    assert 23 * 3600 < (row["done_at"] - began).total_seconds() <= 24 * 3600
    assert (await rig.sql("SELECT last_error, disabled_at FROM interlock.notification_target"))[0][
        "disabled_at"
    ] is None


async def test_a_sender_that_dies_before_it_marks_leaves_one_card(
    rig: Rig, slack: Stub, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.clock.freeze()
    await waiting(rig)

    async def die(*_: Any) -> float:
        raise asyncio.CancelledError

    dead = Dispatcher(rig.database, settings)
    with monkeypatch.context() as patch:
        patch.setattr(outbox, "settle", die)
        with pytest.raises(asyncio.CancelledError):
            await dead.deliver_due()
    await dead.close()
    assert len(slack.at(POST)) == 1
    restarted = Dispatcher(rig.database, settings)
    assert await restarted.deliver_due() == 0  # the first sender may still be alive
    rig.clock.advance(outbox.LEASE_SECONDS)
    assert await restarted.deliver_due() == 1
    await restarted.close()
    assert (len(slack.at(POST)), len(slack.at(UPDATE))) == (1, 1)
    assert await rig.sql("SELECT * FROM interlock.outbox_message WHERE done_at IS NULL") == []


async def test_a_card_that_was_lost_is_rewritten_when_somebody_presses_it(
    rig: Rig, slack: Stub, dispatcher: Dispatcher
) -> None:
    """Slack posted the card, but the sender died before it stored the id: of two cards, only one is known."""
    run_id, _ = await waiting(rig)
    await dispatcher.deliver_due()
    await join(rig, "ada", "U1")
    value = button(slack.at(POST)[0].json, "interlock_approve")
    await rig.decide(run_id, approves=True, who=await rig.person("bob", "approver"))
    await dispatcher.deliver_due()
    before = len(slack.at(UPDATE))
    answer = await send(rig, "actions", pressed(value, "U1", ts="1699999999.000009"))
    assert "already" in answer.json()["text"]
    await dispatcher.deliver_due()
    rewritten = [r.json for r in slack.at(UPDATE)[before:]]
    assert {card["ts"] for card in rewritten} == {"1699999999.000009", "1700000000.000001"}
    assert not any(has_buttons(card) for card in rewritten)


async def test_a_deleted_card_is_left_alone(rig: Rig, slack: Stub, dispatcher: Dispatcher) -> None:
    run_id, _ = await waiting(rig)
    await dispatcher.deliver_due()
    slack.script(UPDATE, (200, {}, {"ok": False, "error": "message_not_found"}))
    await rig.decide(run_id, approves=True)
    await dispatcher.deliver_due()
    assert await rig.sql("SELECT * FROM interlock.outbox_message WHERE done_at IS NULL OR failed") == []


async def test_what_is_said_of_one_approval_stays_in_order_over_two_senders(
    rig: Rig, slack: Stub, settings: Any
) -> None:
    """While one sender posts the card, another must neither rewrite it nor post a second one."""
    run_id, _ = await waiting(rig)
    slack.hold = asyncio.Event()
    one, two = Dispatcher(rig.database, settings), Dispatcher(rig.database, settings)
    posting = asyncio.create_task(one.deliver_due())
    await slack.until(POST, 1)
    await rig.decide(run_id, approves=True)
    assert await two.deliver_due() == 0
    slack.hold.set()
    await posting
    await two.deliver_due()
    assert len(slack.at(POST)) == 1 and not has_buttons(slack.at(UPDATE)[-1].json)
    await one.close()
    await two.close()


async def test_old_messages_are_given_up_and_then_forgotten(rig: Rig) -> None:
    rig.clock.freeze()
    await waiting(rig)  # and Slack's token is not configured
    rig.clock.advance(26 * 3600)
    await outbox.tidy(rig.database)
    assert [r["last_error"] for r in await rig.sql("SELECT * FROM interlock.outbox_message WHERE failed")] == [
        "never sent"
    ]
    rig.clock.advance(31 * 86400)
    await outbox.tidy(rig.database)
    assert await rig.sql("SELECT * FROM interlock.outbox_message") == []


async def test_the_server_delivers_by_itself(rig: Rig, slack: Stub, settings: Any) -> None:
    delivering = asyncio.create_task(deliver_forever(rig.database, settings))
    run_id, _ = await waiting(rig)
    await slack.until(POST, 1)
    await rig.decide(run_id, approves=True)
    await slack.until(UPDATE, 1)
    delivering.cancel()
    await asyncio.gather(delivering, return_exceptions=True)


# ---------------------------------------------------------------- reminders and escalation

RULED = """
@id("team") @decision("needs_approval") @tier("med") @approvers("payments") @escalate_to("directors")
@escalate_after("3h") @expires_in("4h") @reason("payments decides")
permit(principal, action == Action::"shop.refund", resource);
"""


async def test_people_are_reminded_once_half_way_to_the_expiry(rig: Rig, slack: Stub, dispatcher: Dispatcher) -> None:
    rig.clock.freeze()
    run_id, approval = await waiting(rig)
    await dispatcher.deliver_due()
    half = (approval["expires_at"] - approval["requested_at"]).total_seconds() / 2
    rig.clock.advance(half - 1)
    await rig.sweep()
    assert "approval_reminded" not in await rig.journal(run_id)
    rig.clock.advance(1)
    await rig.sweep()
    await rig.sweep()
    assert (await rig.journal(run_id)).count("approval_reminded") == 1
    assert (await rig.run(run_id))["status"] == "waiting_approval"
    await dispatcher.deliver_due()
    reply = slack.at(POST)[-1].json
    assert reply["thread_ts"] == "1700000000.000001" and "Still waiting" in reply["text"]
    await rig.approve(run_id)
    assert (await rig.run(run_id))["status"] == "succeeded"


async def test_a_run_that_a_worker_holds_notes_the_reminder_too(rig: Rig) -> None:
    rig.clock.freeze()
    begun, go_on = asyncio.Event(), asyncio.Event()

    @rig.tool("t.long")
    async def long() -> None:
        begun.set()
        await go_on.wait()

    await rig.apply(
        "name: both\nsteps:\n  - {id: ok, needs: [], approval: {tier: low, summary: s, expires_in: 1h}}\n"
        "  - {id: work, needs: [], tool: t.long, input: {}}"
    )
    run_id = await rig.start("both", {})
    async with rig.worker():
        await asyncio.wait_for(begun.wait(), 10)
        while not await rig.sql("SELECT * FROM interlock.approval"):
            await rig.until(run_id, "waiting_approval", "running")
        await rig.sql("UPDATE interlock.worker SET heartbeat_at = heartbeat_at + interval '1 hour'")
        rig.clock.advance(1800)
        await rig.sweep()
        go_on.set()
        await rig.until(run_id, "waiting_approval")
    assert (await rig.journal(run_id)).count("approval_reminded") == 1


async def test_at_its_time_the_second_group_may_decide_too(rig: Rig, slack: Stub, dispatcher: Dispatcher) -> None:
    rig.clock.freeze()

    @rig.tool("shop.refund", writes=True, risk="med", idempotent=True)
    async def refund(charge: str, amount: int) -> None: ...

    compiled = compile_policy(RULED, policies.facts(rig.tools))
    await rig.database.run_in_transaction(lambda tx: policies.publish(tx, rig.admin, RULED, compiled.digest))
    approval = await asked_for(rig)
    made = await rig.http().post("/api/keys", json={"name": "dora", "role": "approver", "groups": ["directors"]})
    http = rig.http(made.json()["key"])
    refused = await http.post(f"/api/approvals/{approval['id']}/approve")
    assert refused.json()["code"] == "NOT_AN_APPROVER"
    await dispatcher.deliver_due()
    rig.clock.advance(3 * 3600)
    for _ in range(3):
        await rig.sweep()
    journal = await rig.journal(approval["run_id"])
    assert journal.count("approval_escalated") == 1 and journal.count("approval_reminded") == 1
    await dispatcher.deliver_due()
    assert "directors" in text_of(slack.at(UPDATE)[-1].json)
    assert (await rig.http().get(f"/api/approvals/{approval['id']}")).json()["approvers"] == ["directors", "payments"]
    assert any("directors can decide now too" in r.json["text"] for r in slack.at(POST))
    assert (await http.post(f"/api/approvals/{approval['id']}/approve")).status_code == 200


# ---------------------------------------------------------------- commands


async def test_the_command_lists_what_waits_and_decides(rig: Rig) -> None:
    run_id, approval = await waiting(rig)
    await join(rig, "ada", "U1")
    assert "key=value" in (await send(rig, "commands", typed("", "U99"))).json()["text"]
    assert "does not know you" in (await send(rig, "commands", typed("approvals", "U99"))).json()["text"]
    listed = (await send(rig, "commands", typed("approvals", "U1"))).json()
    assert listed["response_type"] == "ephemeral"
    assert "Release 1.2" in listed["text"] and str(approval["id"]) in listed["text"]
    said = await send(rig, "commands", typed(f"approve {approval['id']} looks “right to” me", "U1"))
    assert said.json()["text"] == "Approved."
    assert (await rig.sql("SELECT reason FROM interlock.vote"))[0]["reason"] == "looks right to me"
    assert (await rig.run(run_id))["status"] == "succeeded"
    late = await send(rig, "commands", typed(f"reject {approval['id']}", "U1"))
    assert late.status_code == 200 and "APPROVAL_DECIDED" in late.json()["text"]
    assert "Nothing waits" in (await send(rig, "commands", typed("approvals", "U1"))).json()["text"]
    assert "not a command" in (await send(rig, "commands", typed("dance", "U1"))).json()["text"]


async def test_the_command_approves_an_edited_action_only_by_its_digest(rig: Rig, slack: Stub) -> None:
    """security M2: `/interlock approve` had no field for a digest."""
    approval = await held(rig)
    await join(rig, "ada", "U1")
    editor = rig.http(await rig.key("quinn", "approver"))
    path = f"/api/approvals/{approval['id']}/approve"
    edited = (await editor.post(path, json={"patch": {"amount": 40}})).json()
    digest = edited["action"]["digest"]

    async def told(text: str) -> str:
        said: str = (await send(rig, "commands", typed(text, "U1"))).json()["text"]
        return said

    refused = await told(f"approve {approval['id']} looks right")
    assert "quinn changed the action at" in refused and "(amount: 50 → 40)" in refused
    assert "ACTION_DIGEST_REQUIRED" in refused and digest in refused
    assert "ACTION_DIGEST_MISMATCH" in await told(f"approve {approval['id']} {approval['digest']} looks right")
    assert await rig.sql("SELECT * FROM interlock.vote") == []
    assert await told(f"approve {approval['id']} {digest} looks right") == (
        "Your vote is recorded. One more approver is needed."
    )
    assert [row["reason"] for row in await rig.sql("SELECT reason FROM interlock.vote")] == ["looks right"]


async def test_the_command_starts_a_run_once(rig: Rig) -> None:
    await rig.apply("name: hello\nsteps: [{id: ok, approval: {tier: low, summary: s}}]")
    await join(rig, "olga", "U1", "operator")
    await join(rig, "vera", "U2", "viewer")
    text = 'run hello amount=50 name="Ada L" urgent=true'
    first, again = await asyncio.gather(*(send(rig, "commands", typed(text, "U1")) for _ in range(2)))
    assert first.json() == again.json() and "Started *hello*" in first.json()["text"]
    (run,) = await rig.sql("SELECT * FROM interlock.run")
    assert str(run["id"]) == first.json()["run_id"]
    assert orjson.loads(run["input"]) == {"amount": 50, "name": "Ada L", "urgent": True}
    told = orjson.loads(run["trigger"])
    assert (told["source"], told["ref"], told["initiator"]) == ("slack", f"{TEAM}:U1", "user")
    await send(rig, "commands", typed(text, "U1", trigger_id="2.3.4"))
    assert len(await rig.sql("SELECT * FROM interlock.run")) == 2
    assert "may not" in (await send(rig, "commands", typed(text, "U2", trigger_id="5"))).json()["text"]
    assert "key=value" in (await send(rig, "commands", typed("run hello oops", "U1", trigger_id="6"))).json()["text"]
    assert "no workflow" in (await send(rig, "commands", typed("run nothing", "U1", trigger_id="7"))).json()["text"]


async def test_who_belongs_to_two_tenants_says_which(rig: Rig) -> None:
    other = await rig.tenant("other")
    await join(rig, "ada", "U1")
    await join(rig, "ada", "U1", "admin", tenant_id=other.tenant_id)
    answer = await send(rig, "commands", typed("approvals", "U1"))
    assert "several tenants (default, other)" in answer.json()["text"]
    answer = await send(rig, "commands", typed("in other approvals", "U1"))
    assert "Nothing waits" in answer.json()["text"]


async def test_only_the_operator_chooses_where_the_bot_speaks(rig: Rig, slack: Stub, dispatcher: Dispatcher) -> None:
    other = await rig.tenant("other")
    mine = rig.http(await rig.key("a", "admin", other.tenant_id))
    assert (await mine.put("/api/slack/channel", json={"channel": "#general"})).status_code == 403
    body = {"channel": "#other", "tenant": "other"}
    assert (await rig.http().put("/api/slack/channel", json=body)).status_code == 200
    await rig.apply("name: a\nsteps: [{id: ok, approval: {tier: low, summary: s}}]", other)
    await rig.start("a", {}, other)
    await dispatcher.deliver_due()
    assert [r.json["channel"] for r in slack.at(POST)] == ["#other"]
    once = {"Idempotency-Key": "k1"}
    assert (await rig.http().delete("/api/slack/channel?tenant=other", headers=once)).status_code == 200
    await rig.start("a", {}, other)
    assert await dispatcher.deliver_due() == 0
    # The same key for another tenant is a different request.
    assert (await rig.http().delete("/api/slack/channel?tenant=default", headers=once)).status_code == 422


# ---------------------------------------------------------------- custom commands

DEPLOY = {
    "name": "deploy", "slack": {"command": "/deploy"}, "workflow": "release",
    "when": "size(payload.words) > 0", "input": {"version": "${payload.words[0]}", "by": "${payload.user_name}"},
}  # fmt: skip


async def test_a_command_of_ones_own_starts_its_workflow_once(rig: Rig, slack: Stub) -> None:
    await waiting(rig)
    await join(rig, "ada", "U1", "operator")
    answer = await rig.http().post("/api/triggers", json=DEPLOY)
    assert (answer.status_code, answer.json()["path"]) == (201, "/api/hooks/slack/commands")
    form = typed("1.3", "U1") | {"command": "/deploy"}
    first, second = [await send(rig, "commands", form) for _ in range(2)]
    assert first.json() == second.json() and "Started *release*" in first.json()["text"]
    run = await rig.run(first.json()["run_id"])
    assert run["input"] == {"version": "1.3", "by": "somebody"}
    assert run["trigger"] == {
        "source": "slack", "ref": f"{TEAM}:U1", "initiator": "user", "user": "somebody",
        "metadata": {"trigger": "deploy", "command": "/deploy", "channel": "C2147483705"},
        "external_event": {"event_type": "/deploy", "source": "slack", "event_id": form["trigger_id"]},
        "idempotency_key": f"slack:{TEAM}:{form['trigger_id']}",
    }  # fmt: skip
    assert len(await rig.sql("SELECT * FROM interlock.run WHERE trigger->>'source' = 'slack'")) == 1
    answer = await send(rig, "commands", typed("", "U1", "another") | {"command": "/deploy"})
    assert answer.json()["text"] == "Nothing to do: `size(payload.words) &gt; 0` is false"
    answer = await send(rig, "commands", typed("1.3", "U9", "third") | {"command": "/deploy"})
    assert "does not know you" in answer.json()["text"]


@pytest.mark.parametrize("text", ["1.3", "", "“two words” now"])
async def test_a_trial_of_a_command_answers_as_the_command_does(rig: Rig, slack: Stub, text: str) -> None:
    """new-user 5: the trial had no `words`, so it refused every command that Slack could send."""
    await waiting(rig)
    await join(rig, "ada", "U1", "operator")
    http = rig.http()
    assert (await http.post("/api/triggers", json=DEPLOY)).status_code == 201
    form = typed(text, "U1") | {"command": "/deploy"}
    tried = await http.post("/api/triggers/deploy/test", json={"payload": form})
    assert tried.status_code == 200, tried.text
    told = (await send(rig, "commands", form)).json()
    if "run_id" in told:
        assert (tried.json()["outcome"], tried.json()["input"]) == ("starts", (await rig.run(told["run_id"]))["input"])
    else:
        assert tried.json()["outcome"] == "ignored"
        assert told["text"] == f"Nothing to do: {escape(tried.json()['reason'])}"


@pytest.mark.parametrize(
    ("payload", "outcome"),
    [
        ({"text": "1.3"}, "starts"),
        ({"text": 'an "open quote'}, "refused"),
        ({"text": "1.3", "command": "/release"}, "`command`"),
        ({"words": ["1.3"]}, "`text`"),
        ({"text": 1.3}, "form fields"),
        (["1.3"], "form fields"),
    ],
)
async def test_a_trial_of_a_command_takes_what_slack_sends(rig: Rig, slack: Stub, payload: Any, outcome: str) -> None:
    await waiting(rig)
    http = rig.http()
    assert (await http.post("/api/triggers", json=DEPLOY)).status_code == 201
    tried = await http.post("/api/triggers/deploy/test", json={"payload": payload})
    if outcome in ("starts", "refused"):
        assert (tried.status_code, tried.json()["outcome"]) == (200, outcome)
    else:
        assert tried.status_code == 422 and outcome in tried.json()["detail"]


async def test_a_command_of_a_workspace_is_for_its_people_and_starts_runs_there(rig: Rig, slack: Stub) -> None:
    """The author chose what the command starts, so its runs start in the author's workspace."""
    await waiting(rig)
    blue = rig.http(await rig.key("blue", "operator", workspace_id="blue"))
    assert (await blue.post("/api/triggers", json=DEPLOY)).status_code == 201
    red = await join(rig, "red", "U1", "operator")
    await rig.sql("UPDATE interlock.api_key SET workspace_id = 'red' WHERE id = $1", red.key_id)
    answer = await send(rig, "commands", typed("1.3", "U1") | {"command": "/deploy"})
    assert "run_id" not in answer.json() and "not a command" in answer.json()["text"]
    await join(rig, "ada", "U2", "operator")
    answer = await send(rig, "commands", typed("1.3", "U2", "another") | {"command": "/deploy"})
    run = await rig.run(answer.json()["run_id"])
    assert (run["workspace_id"], run["trigger"]["ref"]) == ("blue", f"{TEAM}:U2")


async def test_a_command_stands_for_one_thing(rig: Rig, slack: Stub) -> None:
    await waiting(rig)
    assert (await rig.http().post("/api/triggers", json=DEPLOY)).status_code == 201
    answer = await rig.http().post("/api/triggers", json=DEPLOY | {"name": "other"})
    assert (answer.status_code, answer.json()["code"]) == (409, "TRIGGER_EXISTS")
    answer = await rig.http().post("/api/triggers", json=DEPLOY | {"slack": {"command": "/interlock"}})
    assert "is taken" in answer.json()["detail"]
