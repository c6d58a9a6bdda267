"""Approvals over HTTP: permitted voters, the exact action of a vote, repeated votes, and expiry."""

from dataclasses import replace
from typing import Any
from uuid import UUID

import orjson
import pytest
from tests.governed.conftest import Person, Shop
from tests.rig import Hold, Rig

from interlock.errors import Retryable
from interlock.lifecycle import Tier
from interlock.tools import Context

REFUND = """
name: refund
steps:
  - {id: look, tool: shop.look, input: {charge: "${input.charge}"}}
  - {id: note, tool: shop.note, input: {charge: "${input.charge}"}}
  - {id: pay, tool: shop.refund, input: {charge: "${input.charge}", amount: "${input.amount}"}}
"""
MAIL = """
name: mail
steps:
  - {id: send, tool: shop.mail, input: {to: "${input.to}", text: "${input.text}"}}
"""
MAIL_POLICY = """
@id("reads") permit (principal, action in Action::"read", resource);
@id("mail") @decision("needs_approval") @tier("med") {more}
permit (principal, action == Action::"shop.mail", resource);
"""


@pytest.fixture
async def stocked(shop: Shop, rig: Rig) -> Shop:
    """A read, a low write, a med write and a high write."""

    @rig.tool("shop.look")
    async def look(charge: str) -> str:
        shop.done.append("look")
        return "Ada"

    @rig.tool("shop.note", writes=True, risk="low", idempotent=True)
    async def note(charge: str) -> None:
        shop.done.append("note")

    @rig.tool("shop.mail", writes=True, risk="med", key="mail:{to}:{fields_hash}", target="{to}")
    async def mail(to: str, text: str) -> str:
        shop.done.append(f"mail {to}: {text}")
        return "sent"

    @rig.tool("shop.refund", writes=True, risk="high", key="refund:{charge}", target="{charge}", show=["amount"])
    async def refund(ctx: Context, charge: str, amount: int) -> dict[str, int]:
        shop.done.append(f"refund {charge} {amount}")
        return {"refunded": amount}

    await rig.apply(REFUND)
    await rig.apply(MAIL)
    return shop


async def test_a_high_write_waits_for_two_other_people_and_then_runs_once(stocked: Shop, rig: Rig) -> None:
    shop = stocked
    asker, one, two = await shop.person("asker", "admin"), await shop.person("one"), await shop.person("two")
    robot, looker = await shop.person("robot", "agent"), await shop.person("looker", "viewer")
    run_id = await shop.start(asker, "refund", charge="ch_1", amount=50)
    question = await shop.held(run_id)
    assert shop.done == ["look", "note"]
    assert [(r["tool"], r["status"]) for r in await shop.receipts(run_id)] == [("shop.note", "succeeded")]
    assert (question["tier"], question["two_person"], question["kind"]) == ("high", True, "action")
    assert question["action"]["fields"] == {"charge": "ch_1", "amount": 50}
    assert question["rationale"]["rule_ids"] == ["high-writes"]
    id, digest = question["id"], question["action"]["digest"]

    async def refused(vote: Any, status: int, code: str) -> None:
        got, body = await vote
        assert (got, body["code"]) == (status, code), body

    await refused(asker.approve(id), 403, "SELF_APPROVAL")
    await refused(robot.approve(id), 403, "AGENT_MAY_NOT_APPROVE")
    await refused(looker.approve(id), 403, "FORBIDDEN")
    await refused(one.approve(id, digest="0" * 64), 409, "ACTION_DIGEST_MISMATCH")
    status, body = await one.approve(id, digest=digest)
    assert (status, body["status"], [v["by"] for v in body["votes"]]) == (200, "requested", ["one"])
    await refused(one.approve(id, digest=digest), 409, "ALREADY_VOTED")
    assert (await rig.run(run_id))["status"] == "waiting_approval"
    status, body = await two.approve(id, digest=digest)
    assert (status, body["status"]) == (200, "approved")
    await refused(one.reject(id), 409, "APPROVAL_DECIDED")

    run = await shop.ended(run_id)
    assert (run["status"], run["result"]) == ("succeeded", {"refunded": 50})
    assert shop.done == ["look", "note", "refund ch_1 50"]
    used = await rig.sql("SELECT approval_id::text, receipt_id::text FROM interlock.approval_use")
    receipt = (await shop.receipts(run_id))[1]
    assert [tuple(row) for row in used] == [(id, receipt["id"])]
    assert (receipt["status"], receipt["idempotency_key"]) == ("succeeded", "refund:ch_1")


async def test_the_vote_of_a_revoked_key_counts_only_where_it_has_decided(stocked: Shop, rig: Rig) -> None:
    gone, two, three = [await stocked.person(name) for name in ("gone", "two", "three")]
    decided, open_ = [await stocked.start(stocked.admin, "refund", charge=name, amount=50) for name in ("a", "b")]
    ids = [(await stocked.held(run_id))["id"] for run_id in (decided, open_)]
    for id in ids:
        assert (await gone.approve(id))[1]["status"] == "requested"
    assert (await two.approve(ids[0]))[1]["status"] == "approved"
    await stocked.revoke(gone)

    status, body = await two.approve(ids[1])
    assert (status, body["status"], [v["by"] for v in body["votes"]]) == (200, "requested", ["two"])
    status, body = await three.approve(ids[1])
    assert (status, body["status"]) == (200, "approved")
    shown = await stocked.question(decided, "approved")
    assert [v["by"] for v in shown["votes"]] == ["gone", "two"]
    assert (await stocked.ended(decided))["status"] == "succeeded"


async def test_nobody_can_decide_after_the_time_is_over_swept_or_not(stocked: Shop, rig: Rig) -> None:
    one = await stocked.person("one")
    run_id = await stocked.start(stocked.admin, "mail", to="ada", text="hi")
    question = await stocked.held(run_id)
    rig.clock.advance(8 * 3600 + 1)
    status, body = await one.approve(question["id"])
    assert (status, body["code"]) == (409, "APPROVAL_EXPIRED")
    await rig.sweep()
    status, body = await one.approve(question["id"])
    assert (status, body["code"], body["state"]) == (409, "APPROVAL_EXPIRED", "expired")
    run = await rig.run(run_id)
    assert (run["status"], run["reason"], stocked.done) == ("failed", "approval_expired", [])


async def test_an_approval_is_used_once_also_when_its_action_takes_several_tries(shop: Shop, rig: Rig) -> None:
    keys: list[str] = []

    @rig.tool("shop.flaky", writes=True, risk="med")
    async def flaky(ctx: Context) -> None:
        keys.append(ctx.idempotency_key)
        if len(keys) < 3:
            raise Retryable("busy")

    await rig.apply("name: f\nsteps:\n  - {id: a, tool: shop.flaky, retry: {max_attempts: 3, base_delay: 0s}}")
    run_id = await shop.start(shop.admin, "f")
    question = await shop.held(run_id)
    await (await shop.person("one")).approve(question["id"])
    run = await shop.ended(run_id)
    assert run["status"] == "succeeded"
    assert len(keys) == 3 and len(set(keys)) == 1
    assert len(await rig.sql("SELECT * FROM interlock.approval_use")) == 1
    assert [(r["status"], r["idempotency_key"]) for r in await shop.receipts(run_id)] == [("succeeded", keys[0])]


async def test_only_the_groups_that_a_rule_names_decide_and_give_the_reason_it_asks_for(
    stocked: Shop, rig: Rig
) -> None:
    shop = stocked
    more = '@approvers("finance") @reason_required("true")'
    assert (await shop.admin.publish(MAIL_POLICY.format(more=more)))[0] == 200
    outsider, insider = await shop.person("outsider"), await shop.person("insider", "approver", "finance")
    run_id = await shop.start(shop.admin, "mail", to="ada", text="hi")
    question = await shop.held(run_id)
    assert (question["approvers"], question["reason_required"]) == (["finance"], True)
    for vote in (outsider.approve, outsider.reject):
        status, body = await vote(question["id"], reason="because")
        assert (status, body["code"]) == (403, "NOT_AN_APPROVER")
    status, body = await outsider.approve(question["id"], reason="because", patch={"text": "ha"})
    assert (status, body["code"]) == (403, "NOT_AN_APPROVER")
    status, body = await insider.approve(question["id"])
    assert (status, body["code"]) == (422, "REASON_REQUIRED")
    status, body = await insider.approve(question["id"], reason="she asked for it")
    assert (status, body["status"]) == (200, "approved")
    assert (await shop.ended(run_id))["status"] == "succeeded"


async def test_an_edited_action_is_another_action_judged_again_with_no_votes(stocked: Shop, rig: Rig) -> None:
    shop = stocked
    policy = """
    @id("small") @decision("needs_approval") @tier("med") @two_person("true")
    permit (principal, action == Action::"shop.refund", resource) when { context.input.amount <= 100 };
    @id("large") @decision("needs_approval") @tier("high") @two_person("true")
    @approvers("finance") @reason_required("true")
    permit (principal, action == Action::"shop.refund", resource) when { context.input.amount > 100 };
    @id("never") forbid (principal, action == Action::"shop.refund", resource) when { context.input.amount > 1000 };
    @id("rest") permit (principal, action, resource) unless { action == Action::"shop.refund" };
    """
    assert (await shop.admin.publish(policy))[0] == 200
    people = [await shop.person(name, "approver", "finance") for name in ("one", "two", "three")]
    outsider = await shop.person("outsider")
    run_id = await shop.start(shop.admin, "refund", charge="ch_1", amount=50)
    question = await shop.held(run_id)
    assert (await outsider.approve(question["id"]))[1]["votes"]

    status, body = await people[0].approve(question["id"], patch={"amount": 5000})
    assert (status, body["code"]) == (403, "POLICY_DENIED")
    status, body = await people[0].approve(question["id"], patch={"amount": "much"})
    assert (status, body["code"]) == (422, "ACTION_INVALID")
    status, body = await people[0].approve(question["id"], patch={"colour": "red"})
    assert (status, body["code"]) == (422, "ACTION_INVALID")
    unchanged = await shop.question(run_id)
    assert (unchanged["action"], len(unchanged["votes"])) == (question["action"], 1)

    status, edited = await people[0].approve(question["id"], patch={"amount": 500})
    assert (status, edited["status"], edited["votes"]) == (200, "requested", [])
    assert edited["action"]["fields"] == {"charge": "ch_1", "amount": 500}
    assert edited["action"]["digest"] != question["action"]["digest"]
    assert (edited["tier"], edited["rationale"]["rule_ids"]) == ("high", ["large"])
    assert (edited["approvers"], edited["reason_required"]) == (["finance"], True), "the new rule's own demands hold"

    status, body = await people[1].approve(question["id"], digest=question["action"]["digest"], reason="ok")
    assert (status, body["code"]) == (409, "ACTION_DIGEST_MISMATCH")
    status, body = await people[0].approve(question["id"], reason="ok")
    assert (status, body["code"]) == (403, "SELF_APPROVAL"), "who changed it is who asks for it now"
    assert body["detail"] == "you changed it, so another person must approve it"
    assert (await outsider.approve(question["id"], reason="ok"))[1]["code"] == "NOT_AN_APPROVER"
    for person in people[1:]:
        status, body = await person.approve(question["id"], digest=edited["action"]["digest"], reason="ok")
        assert status == 200, body
    run = await shop.ended(run_id)
    assert (run["status"], run["result"]) == ("succeeded", {"refunded": 500})
    assert shop.done[-1] == "refund ch_1 500"


async def test_who_asked_for_a_run_does_not_approve_it_after_somebody_else_retried_it(stocked: Shop, rig: Rig) -> None:
    """A retry continues another person's request, so both people count as requesters."""
    shop = stocked
    await rig.apply("name: outer\nsteps: [{id: sub, flow: mail, input: {to: ada, text: hi}}]")
    asker, helper = await shop.person("asker", "admin"), await shop.person("helper", "admin")
    first = await shop.start(asker, "outer")
    async with rig.worker():
        await rig.until(first, "waiting_external")
        await rig.cancel(first)
        await rig.until(first)
        _, again = await helper.post(f"/api/runs/{first}/retry")
        await rig.until_journal(again["id"], "sub: pending -park-> waiting_external")
        [child] = await rig.sql("SELECT id FROM interlock.run WHERE parent_run_id = $1", UUID(again["id"]))
        await rig.until(child["id"], "waiting_approval")
    question = await shop.question(child["id"])
    for person in (asker, helper):
        assert (await person.approve(question["id"]))[1]["code"] == "SELF_APPROVAL"
    # A grant that one of them gave in advance does not count either.
    assert (await asker.post("/api/grants", {"tool": "shop.mail", "any_arguments": True, "tier": "med"}))[0] == 201
    await asker.post(f"/api/runs/{again['id']}/cancel")
    _, third = await helper.post(f"/api/runs/{again['id']}/retry")
    async with rig.worker():
        await rig.until_journal(third["id"], "sub: pending -park-> waiting_external")
        [child] = await rig.sql("SELECT id FROM interlock.run WHERE parent_run_id = $1", UUID(third["id"]))
        assert (await rig.until(child["id"], "waiting_approval"))["status"] == "waiting_approval"
    question = await shop.question(child["id"])
    assert (await (await shop.person("other")).approve(question["id"]))[1]["status"] == "approved"


@pytest.mark.parametrize("more", ['@approvers("finance")', '@reason_required("true")'])
async def test_a_vote_counts_for_a_question_that_asks_for_more_only_if_it_gave_that(
    more: str, stocked: Shop, rig: Rig
) -> None:
    """An edit without a change puts the approval under the current policy, but the action stays the same."""
    asks = '@two_person("true")'
    assert (await stocked.admin.publish(MAIL_POLICY.format(more=asks)))[0] == 200
    run_id = await stocked.start(stocked.admin, "mail", to="ada", text="hi")
    id = (await stocked.held(run_id))["id"]
    one = await stocked.person("one")
    assert (await one.approve(id))[1]["status"] == "requested"
    assert (await stocked.admin.publish(MAIL_POLICY.format(more=f"{asks} {more}")))[0] == 200
    ann, bea, cem = [await stocked.person(name, "approver", "finance") for name in ("ann", "bea", "cem")]
    edited = (await ann.approve(id, patch={"text": "hi"}, reason="as is"))[1]
    assert edited["status"] == "requested"
    digest = edited["action"]["digest"]
    status, body = await bea.approve(id, reason="fine", digest=digest)
    assert (status, body["status"], [vote["by"] for vote in body["votes"]]) == (200, "requested", ["bea"])
    assert (await cem.approve(id, reason="fine", digest=digest))[1]["status"] == "approved"
    assert (await stocked.ended(run_id))["status"] == "succeeded"


async def test_nobody_who_edited_an_action_approves_it_alone_whoever_edited_it_since(stocked: Shop, rig: Rig) -> None:
    one, two, three = [await stocked.person(name) for name in ("one", "two", "three")]
    run_id = await stocked.start(stocked.admin, "mail", to="ada", text="hi")
    question = await stocked.held(run_id)
    id, digest = question["id"], question["action"]["digest"]
    for person, patch in ((one, {"to": "eve"}), (two, {"text": "hello"})):
        status, edited = await person.approve(id, patch=patch, digest=digest)
        assert (status, edited["status"]) == (200, "requested")
        digest = edited["action"]["digest"]
    for person in (one, two):
        status, body = await person.approve(id)
        assert (status, body["code"]) == (403, "SELF_APPROVAL")
    assert (await three.approve(id, digest=digest))[1]["status"] == "approved"
    assert (await stocked.ended(run_id))["status"] == "succeeded"
    assert stocked.done == ["mail eve: hello"]


async def test_an_edited_action_is_escalated_and_expires_as_its_own_rule_says(stocked: Shop, rig: Rig) -> None:
    shop = stocked
    policy = """
    @id("small") @decision("needs_approval") @tier("med") @approvers("staff") @expires_in("1h")
    @escalate_to("directors") @escalate_after("20m")
    permit (principal, action == Action::"shop.refund", resource) when { context.input.amount <= 100 };
    @id("large") @decision("needs_approval") @tier("med") @approvers("staff") @expires_in("4h")
    @escalate_to("board") @escalate_after("2h")
    permit (principal, action == Action::"shop.refund", resource) when { context.input.amount > 100 };
    @id("rest") permit (principal, action, resource) unless { action == Action::"shop.refund" };
    """
    assert (await shop.admin.publish(policy))[0] == 200
    ann, dan, bea = [
        await shop.person(name, "approver", group)
        for name, group in (("ann", "staff"), ("dan", "directors"), ("bea", "board"))
    ]
    rig.clock.freeze()
    run_id = await shop.start(shop.admin, "refund", charge="ch_1", amount=50)
    question = await shop.held(run_id)
    rig.clock.advance(20 * 60)
    await rig.sweep()
    assert (await dan.get(f"/api/approvals/{question['id']}"))["barred"] is None

    status, edited = await ann.approve(question["id"], patch={"amount": 500})
    assert (status, edited["status"], edited["approvers"]) == (200, "requested", ["staff"])
    for person in (dan, bea):
        assert (await person.approve(question["id"]))[1]["code"] == "NOT_AN_APPROVER"
    rig.clock.advance(2 * 3600)
    await rig.sweep()
    assert (await shop.question(run_id))["status"] == "requested", "it has the time that the new rule gives"
    assert (await dan.approve(question["id"]))[1]["code"] == "NOT_AN_APPROVER"
    assert (await bea.approve(question["id"], digest=edited["action"]["digest"]))[1]["status"] == "approved"


async def test_a_policy_that_changed_after_the_approval_asks_again(stocked: Shop, rig: Rig) -> None:
    shop = stocked
    one, two = await shop.person("one"), await shop.person("two")
    run_id = await shop.start(shop.admin, "mail", to="ada", text="hi")
    question = await shop.held(run_id)
    assert (await one.approve(question["id"]))[0] == 200
    assert (await shop.admin.publish(MAIL_POLICY.format(more='@two_person("true")')))[0] == 200
    again = await shop.held(run_id)
    assert again["id"] != question["id"] and again["two_person"] and shop.done == []
    assert again["action"]["digest"] == question["action"]["digest"]
    assert "asked again: the policy was changed" in again["rationale"]["reason"]
    assert await _asked_again(shop, run_id) == [None, "policy_version_mismatch"]
    for person in (one, two):
        assert (await person.approve(again["id"]))[0] == 200
    assert (await shop.ended(run_id))["status"] == "succeeded"
    assert shop.done == ["mail ada: hi"]
    assert len(await rig.sql("SELECT * FROM interlock.approval_use")) == 1


async def test_a_run_that_is_held_at_a_second_try_waits_for_people_and_for_no_clock(shop: Shop, rig: Rig) -> None:
    """A process that only folds the journal to record one of two votes must see the state that the worker saw."""
    tries: list[int] = []

    @rig.tool("shop.mail", writes=True, risk="med")
    async def mail(ctx: Context) -> None:
        tries.append(ctx.attempt)
        if len(tries) == 1:
            raise Retryable("busy")

    assert (await shop.admin.publish('@id("all") permit (principal, action, resource);'))[0] == 200
    await rig.apply("name: m\nsteps:\n  - {id: a, tool: shop.mail, retry: {max_attempts: 3, base_delay: 60s}}")
    run_id = await shop.start(shop.admin, "m")
    async with rig.worker():
        await rig.until_journal(run_id, "a: running -retry-> pending")
    assert (await shop.admin.publish(MAIL_POLICY.format(more='@two_person("true")')))[0] == 200
    rig.clock.advance(3600)
    await rig.sweep()
    question = await shop.held(run_id)

    assert (await (await shop.person("one")).approve(question["id"]))[1]["status"] == "requested"
    await rig.sweep()
    [row] = await rig.sql("SELECT status, resume_at FROM interlock.run WHERE id = $1", run_id)
    assert tuple(row) == ("waiting_approval", None)
    assert (await (await shop.person("two")).approve(question["id"]))[1]["status"] == "approved"
    assert ((await shop.ended(run_id))["status"], tries) == ("succeeded", [1, 2])


async def test_an_approved_action_that_was_tried_and_did_not_happen_is_asked_about_as_what_it_is(
    shop: Shop, rig: Rig
) -> None:
    @rig.tool("shop.mail", writes=True, risk="med")
    async def mail() -> None:
        shop.done.append("mail")
        if len(shop.done) == 1:
            raise ConnectionResetError

    await rig.apply("name: m\nsteps: [{id: a, tool: shop.mail}]")
    one = await shop.person("one")
    run_id = await shop.start(shop.admin, "m")
    question = await shop.held(run_id)
    assert (await one.approve(question["id"]))[0] == 200
    doubt = await shop.held(run_id)
    status, body = await one.post(f"/api/receipts/{doubt['receipt_id']}/resolve", {"outcome": "did_not_happen"})
    assert status == 200, body
    again = await shop.held(run_id)
    assert (again["kind"], again["action"]["digest"]) == ("action", question["action"]["digest"])
    assert again["rationale"]["reason"].endswith("asked again: it was tried and did not happen, and a yes is used once")
    assert await _asked_again(shop, run_id) == [None, None, "already_consumed"]
    assert (await one.approve(again["id"]))[0] == 200
    assert ((await shop.ended(run_id))["status"], shop.done) == ("succeeded", ["mail", "mail"])


async def _asked_again(shop: Shop, run_id: UUID) -> list[str | None]:
    """Return the reason of each repeated approval."""
    events = await shop.admin.get(f"/api/runs/{run_id}/events")
    return [e["data"].get("asked_again") for e in events["items"] if e["type"] == "approval_requested"]


def _redeployed(rig: Rig, tool: str, risk: str) -> None:
    known = rig.tools.find(tool)
    assert known is not None
    rig.tools.put(replace(known, risk=Tier(risk)))


async def test_an_approval_is_not_enough_for_a_tool_whose_risk_was_raised_since(stocked: Shop, rig: Rig) -> None:
    shop = stocked
    one, two = await shop.person("one"), await shop.person("two")
    run_id = await shop.start(shop.admin, "mail", to="ada", text="hi")
    question = await shop.held(run_id)
    assert (await one.approve(question["id"]))[0] == 200
    _redeployed(rig, "shop.mail", "high")
    again = await shop.held(run_id)
    assert again["id"] != question["id"] and (again["tier"], again["two_person"]) == ("high", True)
    assert again["action"]["digest"] == question["action"]["digest"] and shop.done == []
    assert await _asked_again(shop, run_id) == [None, "more_is_asked"]
    for person in (one, two):
        assert (await person.approve(again["id"]))[0] == 200
    assert (await shop.ended(run_id))["status"] == "succeeded"
    assert shop.done == ["mail ada: hi"]


@pytest.mark.parametrize("more", ['@two_person("true")', '@approvers("night")', '@reason_required("true")'])
async def test_an_approval_is_not_enough_where_the_hour_asks_for_more(stocked: Shop, rig: Rig, more: str) -> None:
    shop = stocked
    hour = rig.clock.freeze().hour
    policy = f"""
    @id("now") @decision("needs_approval") @tier("med")
    permit (principal, action == Action::"shop.mail", resource) when {{ context.hour == {hour} }};
    @id("later") @decision("needs_approval") @tier("med") {more}
    permit (principal, action == Action::"shop.mail", resource) when {{ context.hour != {hour} }};
    """
    assert (await shop.admin.publish(policy))[0] == 200
    run_id = await shop.start(shop.admin, "mail", to="ada", text="hi")
    question = await shop.held(run_id)
    assert (await (await shop.person("one")).approve(question["id"]))[0] == 200
    rig.clock.advance(3600)
    again = await shop.held(run_id)
    assert (again["rationale"]["rule_ids"], shop.done) == (["later"], [])


async def test_an_approval_is_enough_where_less_is_asked_for_now(stocked: Shop, rig: Rig) -> None:
    shop = stocked
    run_id = await shop.start(shop.admin, "refund", charge="ch_1", amount=50)
    question = await shop.held(run_id)
    for name in ("one", "two"):
        assert (await (await shop.person(name)).approve(question["id"]))[0] == 200
    _redeployed(rig, "shop.refund", "med")
    assert (await shop.ended(run_id))["status"] == "succeeded"
    assert [r["approval_id"] for r in await rig.sql("SELECT approval_id::text FROM interlock.approval_use")] == [
        question["id"]
    ]


async def test_a_policy_that_denies_after_the_approval_has_the_last_word(stocked: Shop, rig: Rig) -> None:
    shop = stocked
    run_id = await shop.start(shop.admin, "mail", to="ada", text="hi")
    question = await shop.held(run_id)
    assert (await (await shop.person("one")).approve(question["id"]))[0] == 200
    forbid = '@id("stop") @reason("no mail today") forbid (principal, action == Action::"shop.mail", resource);'
    assert (await shop.admin.publish(MAIL_POLICY.format(more="") + forbid))[0] == 200
    run = await shop.ended(run_id)
    assert (run["status"], run["reason"], shop.done) == ("failed", "policy_denied", [])
    assert "no mail today" in run["error"]["message"]


async def test_a_grant_for_every_call_of_a_tool_has_to_say_so(stocked: Shop, rig: Rig) -> None:
    """security L10: a grant that named no arguments covered every call."""
    one = await stocked.person("one")
    status, refused = await one.post("/api/grants", {"tool": "shop.mail", "tier": "med"})
    assert (status, refused["code"]) == (422, "INVALID_REQUEST")
    assert "covers every call of the tool" in refused["detail"] and "any_arguments" in refused["detail"]
    both = {"tool": "shop.mail", "tier": "med", "arguments": {"to": "ada"}, "any_arguments": True}
    status, refused = await one.post("/api/grants", both)
    assert (status, refused["code"]) == (422, "INVALID_REQUEST")
    assert (await one.get("/api/grants"))["items"] == []
    status, grant = await one.post("/api/grants", {"tool": "shop.mail", "any_arguments": True})
    assert (status, grant["arguments"]) == (201, {})


async def test_many_are_decided_at_once_and_each_answers_for_itself(stocked: Shop, rig: Rig) -> None:
    shop = stocked
    one = await shop.person("one", "admin")
    theirs = [await shop.start(shop.admin, "mail", to=name, text="hi") for name in ("ada", "bob")]
    own = await shop.start(one, "mail", to="cy", text="hi")
    ids = [(await shop.held(run_id))["id"] for run_id in (*theirs, own)]
    unknown = "01990000-0000-7000-8000-000000000000"
    await one.reject(ids[1])
    body = {"ids": [*ids, unknown], "decision": "approve"}
    status, answer = await one.post("/api/approvals/decide", body)
    assert status == 200
    said = {item["id"]: item.get("status") or item["problem"]["code"] for item in answer["items"]}
    assert said == {
        ids[0]: "approved",
        ids[1]: "APPROVAL_DECIDED",
        ids[2]: "SELF_APPROVAL",
        unknown: "APPROVAL_NOT_FOUND",
    }
    assert (await shop.ended(theirs[0]))["status"] == "succeeded"
    assert shop.done == ["mail ada: hi"]
    status, answer = await (await shop.person("bot", "agent")).post("/api/approvals/decide", body)
    assert (status, answer["code"]) == (403, "AGENT_MAY_NOT_APPROVE")


@pytest.mark.parametrize(
    ("on_reject", "status", "reason", "result"),
    [
        ("fail", "failed", "rejected", None),
        ("complete", "succeeded", "rejected", None),
        ("continue", "succeeded", "completed", "Ada"),
    ],
)
async def test_what_a_rejection_does_is_for_the_workflow_to_say(
    on_reject: str, status: str, reason: str, result: Any, stocked: Shop, rig: Rig
) -> None:
    await rig.apply(f"""
name: careful
on_reject: {on_reject}
steps:
  - {{id: send, tool: shop.mail, input: {{to: ada, text: hi}}}}
  - {{id: look, tool: shop.look, input: {{charge: x}}}}
""")
    run_id = await stocked.start(stocked.admin, "careful")
    question = await stocked.held(run_id)
    await (await stocked.person("one")).reject(question["id"], reason="not today")
    run = await stocked.ended(run_id)
    assert (run["status"], run["reason"], run["result"]) == (status, reason, result)
    assert stocked.done == (["look"] if on_reject == "continue" else [])
    assert run["step"]["send"]["last_error"]["message"] == "not today"


# ---------------------------------------------------------------- standing grants


async def _held_or_done(shop: Shop, who: Person | None = None, **input: Any) -> str:
    run_id = await shop.start(who or shop.admin, "mail", **input)
    run = await shop.rig.work_until(run_id, "waiting_approval")
    await shop.rig.cancel(run_id) if run["status"] == "waiting_approval" else None
    status: str = run["status"]
    return status


async def test_a_grant_for_an_argument_that_the_tool_does_not_have_is_refused(stocked: Shop) -> None:
    one = await stocked.person("one")
    status, refused = await one.post("/api/grants", {"tool": "shop.mail", "arguments": {"too": "ada"}, "tier": "med"})
    assert (status, refused["code"]) == (422, "ACTION_INVALID")
    assert refused["detail"] == "shop.mail has no argument 'too'; it takes to, text"


async def test_a_grant_for_a_tool_that_there_is_not_is_refused(stocked: Shop) -> None:
    """A misspelt name gave a grant that answers for nothing."""
    one = await stocked.person("one")
    body = {"tool": "shop.mial", "arguments": {"to": "ada"}, "tier": "med"}
    status, refused = await one.post("/api/grants", body)
    assert (status, refused["code"]) == (404, "TOOL_NOT_FOUND")
    assert refused["detail"] == "no tool shop.mial here; did you mean `shop.mail`?"
    # Only some workers may have it.
    status, grant = await one.post("/api/grants?allow_unknown_tools=true", body)
    assert (status, grant["tool"]) == (201, "shop.mial")


async def test_a_standing_grant_answers_for_its_arguments_until_it_ends(stocked: Shop, rig: Rig) -> None:
    shop = stocked
    one = await shop.person("one")
    body = {"tool": "shop.mail", "arguments": {"to": "ada"}, "tier": "med", "expires_in": 3600}
    status, grant = await one.post("/api/grants", body)
    assert (status, grant["uses"]) == (201, 0)
    assert await _held_or_done(shop, to="ada", text="hi") == "succeeded"
    assert await _held_or_done(shop, to="ada", text="again") == "succeeded"
    assert await _held_or_done(shop, to="bob", text="hi") == "waiting_approval"
    assert [g["uses"] for g in (await one.get("/api/grants"))["items"]] == [2]
    rig.clock.advance(3601)
    assert await _held_or_done(shop, to="ada", text="late") == "waiting_approval"
    assert (await one.get("/api/grants"))["items"] == []
    assert [g["uses"] for g in (await one.get("/api/grants", all=True))["items"]] == [2]


async def test_a_revoked_grant_answers_nothing(stocked: Shop) -> None:
    one = await stocked.person("one")
    _, grant = await one.post("/api/grants", {"tool": "shop.mail", "any_arguments": True, "tier": "med"})
    answer = await one.http.delete(f"/api/grants/{grant['id']}")
    assert answer.json()["revoked_at"] is not None
    assert await _held_or_done(stocked, to="ada", text="hi") == "waiting_approval"


async def test_the_grants_of_a_revoked_key_answer_nothing(stocked: Shop) -> None:
    one = await stocked.person("one")
    assert (await one.post("/api/grants", {"tool": "shop.mail", "any_arguments": True, "tier": "med"}))[0] == 201
    assert await _held_or_done(stocked, to="ada", text="hi") == "succeeded"
    await stocked.revoke(one)
    assert await _held_or_done(stocked, to="ada", text="again") == "waiting_approval"
    assert (await stocked.admin.get("/api/grants"))["items"] == []
    assert [g["uses"] for g in (await stocked.admin.get("/api/grants", all=True))["items"]] == [1]


async def test_a_grant_of_a_workspace_answers_within_it_and_is_nobody_elses(stocked: Shop) -> None:
    shop = stocked
    blue, red = [await shop.person(name, "admin", workspace_id=name) for name in ("blue", "red")]
    asker, boss = await shop.person("asker", "operator", workspace_id="blue"), await shop.person("boss")
    _, grant = await blue.post("/api/grants", {"tool": "shop.mail", "any_arguments": True, "tier": "med"})
    assert await _held_or_done(shop, red, to="ada", text="hi") == "waiting_approval"
    assert await _held_or_done(shop, to="ada", text="hi") == "waiting_approval", "nor for a run of no workspace"
    assert await _held_or_done(shop, asker, to="ada", text="hi") == "succeeded"
    assert (await red.get("/api/grants", all=True))["items"] == []
    assert (await red.http.delete(f"/api/grants/{grant['id']}")).status_code == 404
    _, wide = await boss.post("/api/grants", {"tool": "shop.mail", "any_arguments": True, "tier": "med"})
    assert await _held_or_done(shop, red, to="ada", text="all") == "succeeded", "one of the tenant answers everywhere"
    assert [g["id"] for g in (await blue.get("/api/grants"))["items"]] == [grant["id"]]
    assert (await blue.http.delete(f"/api/grants/{wide['id']}")).status_code == 404
    items = (await boss.get("/api/grants"))["items"]
    assert [(g["id"], g["workspace_id"]) for g in items] == [(wide["id"], None), (grant["id"], "blue")]
    assert (await boss.http.delete(f"/api/grants/{grant['id']}")).json()["revoked_at"] is not None


async def test_nobody_grants_what_they_ask_for_and_agents_grant_nothing(stocked: Shop) -> None:
    grant = {"tool": "shop.mail", "any_arguments": True, "tier": "med"}
    assert (await stocked.admin.post("/api/grants", grant))[0] == 201
    assert await _held_or_done(stocked, to="ada", text="hi") == "waiting_approval"
    status, body = await (await stocked.person("bot", "agent")).post("/api/grants", grant)
    assert (status, body["code"]) == (403, "AGENT_MAY_NOT_APPROVE")


async def test_a_grant_covers_no_higher_tier_than_its_own_and_none_can_be_high(stocked: Shop, rig: Rig) -> None:
    one = await stocked.person("one")
    assert (await one.post("/api/grants", {"tool": "shop.mail", "any_arguments": True, "tier": "low"}))[0] == 201
    assert await _held_or_done(stocked, to="ada", text="hi") == "waiting_approval"
    assert (await one.post("/api/grants", {"tool": "shop.refund", "any_arguments": True, "tier": "high"}))[0] == 422
    assert (await one.post("/api/grants", {"tool": "shop.refund", "any_arguments": True, "tier": "med"}))[0] == 201
    run_id = await stocked.start(stocked.admin, "refund", charge="ch", amount=1)
    assert (await stocked.held(run_id))["tier"] == "high"
    assert (await stocked.admin.publish(MAIL_POLICY.format(more='@two_person("true")')))[0] == 200
    assert (await one.post("/api/grants", {"tool": "shop.mail", "any_arguments": True, "tier": "med"}))[0] == 201
    assert await _held_or_done(stocked, to="ada", text="hi") == "waiting_approval", "two people are two people"


async def test_a_grant_for_one_recipient_is_not_a_grant_for_a_list_that_contains_it(shop: Shop, rig: Rig) -> None:
    @rig.tool("shop.cc", writes=True, risk="med")
    async def cc(to: list[str], options: dict[str, bool]) -> None:
        shop.done.append(str(to))

    await rig.apply("""
name: mail
steps:
  - {id: send, tool: shop.cc, input: {to: "${input.to}", options: "${input.options}"}}
""")
    one = await shop.person("one")
    arguments = {"to": ["ada"], "options": {"draft": True}}
    assert (await one.post("/api/grants", {"tool": "shop.cc", "tier": "med", "arguments": arguments}))[0] == 201
    assert await _held_or_done(shop, to=["ada", "everyone"], options={"draft": True}) == "waiting_approval"
    assert await _held_or_done(shop, to=["ada"], options={"draft": True, "force": True}) == "waiting_approval"
    assert await _held_or_done(shop, to=["ada"], options={"draft": True}) == "succeeded"


async def test_a_grant_satisfies_what_the_rule_asks_of_an_approval(stocked: Shop, rig: Rig) -> None:
    more = '@approvers("finance") @reason_required("true")'
    assert (await stocked.admin.publish(MAIL_POLICY.format(more=more)))[0] == 200
    outsider, insider = await stocked.person("outsider"), await stocked.person("insider", "approver", "finance")
    grant = {"tool": "shop.mail", "any_arguments": True, "tier": "med"}
    assert (await outsider.post("/api/grants", grant | {"reason": "trust me"}))[0] == 201
    assert await _held_or_done(stocked, to="ada", text="hi") == "waiting_approval"
    assert (await insider.post("/api/grants", grant))[0] == 201
    assert await _held_or_done(stocked, to="ada", text="hi") == "waiting_approval"
    assert (await insider.post("/api/grants", grant | {"reason": "month end"}))[0] == 201
    assert await _held_or_done(stocked, to="ada", text="hi") == "succeeded"


async def test_a_vote_that_decides_nothing_yet_is_noted_also_while_a_worker_holds_the_run(shop: Shop, rig: Rig) -> None:
    hold = Hold()

    @rig.tool("t.hold")
    async def long() -> None:
        await hold()

    await rig.apply(
        "name: side\nsteps:\n  - {id: work, needs: [], tool: t.hold}\n"
        "  - {id: ask, needs: [], approval: {tier: high, two_person: true, summary: ok}}"
    )
    ann, bob = await shop.person("ann"), await shop.person("bob")
    run_id = await shop.start(shop.admin, "side")
    async with rig.worker():
        await hold.inside()
        await rig.until_journal(run_id, "ask: pending -open-> waiting_approval")
        asked = await shop.question(run_id)
        assert (await ann.approve(asked["id"]))[1]["status"] == "requested"
        assert "approval_vote" in await rig.until_journal(run_id, "approval_vote")
        assert (await bob.approve(asked["id"]))[1]["status"] == "approved"
        hold.release.set()
        assert (await rig.until(run_id))["status"] == "succeeded"
    journal = await rig.journal(run_id)
    assert journal.count("approval_vote") == 1
    (said,) = await rig.sql("SELECT actor, step, data FROM interlock.journal_entry WHERE type = 'approval_vote'")
    assert "ann" in said["actor"]
    assert (said["step"], orjson.loads(said["data"])) == ("ask", {"approval_id": asked["id"], "votes": 1})
