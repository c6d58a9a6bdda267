"""A session: a message is a run, writes wait for people, and the same run executes the decision."""

import asyncio
from typing import Any
from uuid import UUID

import orjson
import pytest
from pydantic_ai.messages import ToolReturnPart

from interlock.agents.conversation import conversation
from interlock.engine import sessions
from interlock.engine.proof import audit
from interlock.engine.queueing import sweeps
from interlock.engine.runs import runs
from interlock.ids import RunId
from interlock.integrations.webhooks import run_data
from interlock.wire import WebhookEvent
from interlock.worker.worker import Worker
from tests.agents.conftest import Talk
from tests.governed.conftest import lose
from tests.rig import Rig


async def test_a_read_is_done_a_write_is_held_and_approving_it_goes_on_in_the_same_run(talk: Talk) -> None:
    sent = await talk.told("refund ch_1 40")
    [question] = await talk.held(sent["run_id"])
    assert question["session_id"] == sent["session_id"] and question["action"]["tool"] == "shop.refund"
    assert talk.refunds == []
    status, _ = await talk.post(f"/api/approvals/{question['id']}/approve")
    assert status == 200
    run = await talk.ended(sent["run_id"])
    assert (run["status"], run["reason"], talk.refunds) == ("succeeded", "completed", ["ch_1"])
    assert run["result"] == {"text": 'Done: {"refunded":"ch_1","amount":40}'}
    assert [step["key"] for step in run["steps"]] == ["model", "shop.lookup", "model#2", "shop.refund", "model#3"]
    assert {step["kind"] for step in run["steps"]} == {"model", "tool"}
    assert all(event["session_id"] == sent["session_id"] for event in await talk.events(sent["session_id"]))


async def test_what_was_told_in_parts_is_what_was_said(talk: Talk) -> None:
    sent = await talk.told("hello there")
    await talk.ended(sent["run_id"])
    events = await talk.events(sent["session_id"])
    assert events[0]["data"]["message"] == "hello there"
    assert "".join(e["data"]["text"] for e in events if e["type"] == "message_delta") == "You said: hello there"
    assert [e["data"]["text"] for e in events if e["type"] == "message"] == ["You said: hello there"]
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))


async def test_a_rejected_write_ends_the_run_well_and_nothing_is_done(talk: Talk) -> None:
    sent = await talk.told("refund ch_1 40")
    [question] = await talk.held(sent["run_id"])
    # No worker runs: the decision itself ends the run.
    await talk.post(f"/api/approvals/{question['id']}/reject", {"reason": "not this customer"})
    run = await talk.get(f"/api/runs/{sent['run_id']}")
    assert (run["status"], run["reason"], talk.refunds) == ("succeeded", "rejected", [])
    assert run["result"]["rejected"]["message"] == "not this customer"
    assert {s["key"]: s["status"] for s in run["steps"]}["shop.refund"] == "skipped"


async def test_of_several_calls_reads_run_at_once_and_each_write_has_its_own_approval(talk: Talk) -> None:
    sent = await talk.told("both")
    first, second = await talk.held(sent["run_id"])
    steps = (await talk.rig.run(UUID(sent["run_id"])))["step"]
    assert steps["shop.lookup"]["status"] == "succeeded"
    await talk.post(f"/api/approvals/{first['id']}/approve")
    # The first call executes while the second still waits.
    run = await talk.rig.work_until(UUID(sent["run_id"]), "waiting_approval")
    assert (run["status"], talk.refunds) == ("waiting_approval", ["ch_1"])
    await talk.post(f"/api/approvals/{second['id']}/approve")
    run = await talk.ended(sent["run_id"])
    assert (run["result"], talk.refunds) == ({"text": "All is settled."}, ["ch_1", "ch_2"])


async def test_one_refusal_settles_what_else_was_asked(talk: Talk) -> None:
    sent = await talk.told("both")
    first, second = await talk.held(sent["run_id"])
    await talk.post(f"/api/approvals/{first['id']}/reject")
    run = await talk.get(f"/api/runs/{sent['run_id']}")
    assert (run["status"], run["reason"], talk.refunds) == ("succeeded", "rejected", [])
    assert (await talk.get(f"/api/approvals/{second['id']}"))["status"] == "canceled"


async def test_with_on_reject_continue_the_model_is_told_of_the_refusal(talk: Talk) -> None:
    definition = """
name: stubborn
model: scripted
tools: [shop.*]
on_reject: continue
script:
  - turns: [{calls: [{tool: shop.refund, args: {charge: ch_1, amount: 1}}]}, {say: "{result}"}]
"""
    await talk.http.post("/api/agents", content=definition)
    sent = await talk.told("go", agent="stubborn")
    [question] = await talk.held(sent["run_id"])
    await talk.post(f"/api/approvals/{question['id']}/reject", {"reason": "no"})
    run = await talk.ended(sent["run_id"])
    assert (run["reason"], run["result"]["text"]) == ("completed", '{"error":"A person did not allow it: no"}')


async def test_a_retried_run_tells_its_model_of_the_refusal_too(talk: Talk) -> None:
    definition = """
name: stubborn
model: scripted
tools: [shop.*]
on_reject: continue
script:
  - turns: [{calls: [{tool: shop.refund, args: {charge: ch_1, amount: 1}}]}, {fail: "{result}"}]
"""
    await talk.http.post("/api/agents", content=definition)
    sent = await talk.told("go", agent="stubborn")
    [question] = await talk.held(sent["run_id"])
    await talk.post(f"/api/approvals/{question['id']}/reject", {"reason": "no"})
    failed = await talk.ended(sent["run_id"])
    _, again = await talk.post(f"/api/runs/{sent['run_id']}/retry")
    run = await talk.ended(again["id"])
    assert run["error"]["message"] == failed["error"]["message"] == '{"error":"A person did not allow it: no"}'
    refund = run["step"]["shop.refund"]
    assert (refund["status"], refund["attempt"]) == ("skipped", 0)


async def test_a_call_that_does_not_fit_its_tool_is_told_to_the_model_and_never_made(talk: Talk) -> None:
    sent = await talk.told("wrong")
    run = await talk.ended(sent["run_id"])
    assert run["result"]["text"] == 'I was told: {"error":"There is no tool shop__nothing."}'
    assert [step["key"] for step in run["steps"]] == ["model", "model#2"]
    assert "amount: Field required" in run["steps"][0]["output"]["calls"][0]["problem"]


async def test_what_policy_forbids_is_not_done_and_the_model_is_told(talk: Talk) -> None:
    sent = await talk.told("purge")
    run = await talk.ended(sent["run_id"])
    assert (run["status"], run["reason"], talk.refunds) == ("succeeded", "completed", [])
    assert "The policy does not allow it: forbidden by purge" in run["result"]["text"]
    assert [(step["key"], step["status"]) for step in run["steps"]] == [
        ("model", "succeeded"), ("shop.purge", "failed"), ("model#2", "succeeded"),
    ]  # fmt: skip


async def test_a_model_that_fails_fails_the_run_and_a_retry_asks_it_again(talk: Talk) -> None:
    sent = await talk.told("break")
    run = await talk.ended(sent["run_id"])
    assert (run["status"], run["error"]["message"]) == ("failed", "the provider said no")
    status, again = await talk.post(f"/api/runs/{sent['run_id']}/retry")
    assert (status, again["session_id"]) == (201, sent["session_id"])
    await talk.ended(again["id"])


# ---------------------------------------------------------------- auto_approve, and permission to approve


async def test_auto_approve_lets_pass_what_is_not_high(talk: Talk) -> None:
    sent = await talk.told("refund ch_1 40", auto_approve=True)
    run = await talk.ended(sent["run_id"])
    assert (run["status"], talk.refunds) == ("succeeded", ["ch_1"])
    [entry] = await talk.rig.sql(
        "SELECT data FROM interlock.journal_entry WHERE step = 'shop.refund' AND event = 'claim'"
    )
    assert '"allowed_by": "auto_approve:' in entry["data"]


async def test_auto_approve_ends_with_the_key_of_whoever_said_so(talk: Talk) -> None:
    _, made = await talk.post("/api/keys", {"name": "me", "role": "admin"})
    sent = await Talk(talk.rig, talk.rig.http(made["key"])).told("refund ch_1 40", auto_approve=True)
    assert (await talk.http.delete(f"/api/keys/{made['id']}")).status_code == 200
    [question] = await talk.held(sent["run_id"])
    assert (question["tier"], talk.refunds) == ("med", [])


async def test_auto_approve_never_passes_what_is_high(talk: Talk) -> None:
    sent = await talk.told("large", auto_approve=True)
    [question] = await talk.held(sent["run_id"])
    assert (question["tier"], talk.refunds) == ("high", [])


NAMED = """
@id("reads") permit(principal, action in Action::"read", resource);
@id("refund") @decision("needs_approval") @tier("med") %s
  permit(principal, action == Action::"shop.refund", resource);
"""


@pytest.mark.parametrize("asks", ['@two_person("true")', '@approvers("finance")'])
async def test_what_asks_for_others_is_not_confirmed_by_who_talks_to_the_agent(talk: Talk, asks: str) -> None:
    assert (await talk.http.put("/api/policy", content=(NAMED % asks).encode())).status_code in (200, 201)
    _, made = await talk.post("/api/keys", {"name": "me", "role": "admin", "groups": ["finance"]})
    me = Talk(talk.rig, talk.rig.http(made["key"]))
    sent = await me.told("refund ch_1 40", auto_approve=True)
    [question] = await talk.held(sent["run_id"])
    status, body = await me.post(f"/api/approvals/{question['id']}/approve")
    assert (status, body["code"], talk.refunds) == (403, "SELF_APPROVAL", [])


async def test_who_edits_an_agents_action_asks_for_it(talk: Talk) -> None:
    sent = await talk.told("refund ch_1 40")
    [question] = await talk.held(sent["run_id"])
    status, edited = await talk.post(f"/api/approvals/{question['id']}/approve", {"patch": {"amount": 41}})
    assert (status, edited["status"]) == (200, "requested"), edited
    status, body = await talk.post(f"/api/approvals/{question['id']}/approve")
    assert (status, body["code"]) == (403, "SELF_APPROVAL")


async def test_two_people_are_enough_where_one_of_them_edits_an_agents_action(talk: Talk) -> None:
    """agents 9: neither the editor nor the person who talks to the agent could approve, so it took a third person."""
    other = Talk(talk.rig, talk.rig.http(await talk.rig.key("another", "approver")))
    sent = await talk.told("refund ch_1 40")
    [question] = await talk.held(sent["run_id"])
    path = f"/api/approvals/{question['id']}/approve"
    # The editor does not confirm their own change; the person who talks to the agent confirms it.
    edited = (await other.post(path, {"patch": {"amount": 41}}))[1]
    digest = edited["action"]["digest"]
    assert (await other.post(path, {"digest": digest}))[1]["code"] == "SELF_APPROVAL"
    assert (await talk.get(f"/api/approvals/{question['id']}"))["barred"] is None
    # Both of them edit it: the last editor cannot confirm it, the other one can.
    status, edited = await talk.post(path, {"patch": {"amount": 42}, "digest": digest})
    assert (status, edited["edited_by"]) == (200, ["another", "admin"])
    digest = edited["action"]["digest"]
    assert (await talk.post(path, {"digest": digest}))[1]["code"] == "SELF_APPROVAL"
    status, body = await other.post(path, {"digest": digest})
    assert (status, body["status"]) == (200, "approved")
    assert (await talk.ended(sent["run_id"]))["status"] == "succeeded"


async def test_an_agents_action_that_an_edit_makes_high_takes_another_person(talk: Talk) -> None:
    other = Talk(talk.rig, talk.rig.http(await talk.rig.key("another", "approver")))
    third = Talk(talk.rig, talk.rig.http(await talk.rig.key("third", "approver")))
    sent = await talk.told("refund ch_1 40")
    [question] = await talk.held(sent["run_id"])
    path = f"/api/approvals/{question['id']}/approve"
    edited = (await other.post(path, {"patch": {"amount": 500}}))[1]
    assert edited["tier"] == "high"
    body = {"digest": edited["action"]["digest"]}
    for person in (talk, other):
        assert (await person.post(path, body))[1]["code"] == "SELF_APPROVAL"
    assert (await third.post(path, body))[1]["status"] == "approved"


async def test_a_key_of_an_agent_confirms_nothing_in_its_own_session(talk: Talk) -> None:
    bot = Talk(talk.rig, talk.rig.http(await talk.rig.key("bot", "agent")))
    sent = await bot.told("refund ch_1 40")
    [question] = await talk.held(sent["run_id"])
    for path in (f"/api/approvals/{question['id']}/approve", f"/api/runs/{sent['run_id']}/approve"):
        status, body = await bot.post(path)
        assert (status, body["code"]) == (403, "AGENT_MAY_NOT_APPROVE")


async def test_who_talks_to_an_agent_may_let_it_act_but_not_on_what_is_high(talk: Talk) -> None:
    sent = await talk.told("large")
    [question] = await talk.held(sent["run_id"])
    status, body = await talk.post(f"/api/approvals/{question['id']}/approve")
    assert (status, body["code"]) == (403, "SELF_APPROVAL")
    other = Talk(talk.rig, talk.rig.http(await talk.rig.key("another", "approver")))
    assert (await other.post(f"/api/approvals/{question['id']}/approve"))[0] == 200


@pytest.mark.parametrize(("role", "code"), [("agent", "AGENT_MAY_NOT_APPROVE"), ("operator", "FORBIDDEN")])
async def test_who_may_not_approve_cannot_do_so_in_advance(talk: Talk, role: str, code: str) -> None:
    other = Talk(talk.rig, talk.rig.http(await talk.rig.key("other", role)))
    status, body = await other.say("refund ch_1 40", auto_approve=True)
    assert (status, body["code"]) == (403, code)
    opened = (await talk.post("/api/sessions", {"agent": "support", "auto_approve": True}))[1]
    sent = await other.told("refund ch_1 40", session_id=opened["id"])
    assert len(await talk.held(sent["run_id"])) == 1


# ---------------------------------------------------------------- scripts


async def test_a_pattern_that_would_backtrack_for_ever_answers_at_once(talk: Talk) -> None:
    script = [{"match": "(a+)+$", "turns": [{"say": "done"}]}, {"turns": [{"say": "no"}]}]
    assert (await talk.post("/api/agents", {"name": "evil", "model": "scripted", "script": script}))[0] == 201
    run = await talk.ended((await talk.told("a" * 5000 + "!", agent="evil"))["run_id"])
    assert (run["status"], run["result"]) == ("succeeded", {"text": "no"})


async def test_a_pattern_that_is_too_large_for_the_message_fails_its_run(talk: Talk) -> None:
    script = [{"match": "(.{30}){30}!", "turns": [{"say": "done"}]}]
    assert (await talk.post("/api/agents", {"name": "evil", "model": "scripted", "script": script}))[0] == 201
    run = await talk.ended((await talk.told("a" * 50_000, agent="evil"))["run_id"])
    assert (run["status"], run["reason"]) == ("failed", "terminal_error")
    assert "too large for a message of this length" in run["error"]["message"]


@pytest.mark.parametrize("match", [r"(a)\1", "(?=a)b", "((a{30}){30}){30}", "("])
async def test_a_pattern_without_a_bound_is_refused_when_it_is_applied(talk: Talk, match: str) -> None:
    script = [{"match": match, "turns": [{"say": "done"}]}]
    status, body = await talk.post("/api/agents", {"name": "evil", "model": "scripted", "script": script})
    assert (status, body["code"]) == (422, "DEFINITION_INVALID")
    assert "not a regular expression" in body["detail"]


# ---------------------------------------------------------------- one run at a time


async def test_two_messages_at_the_same_moment_make_one_run(talk: Talk) -> None:
    session = (await talk.post("/api/sessions", {"agent": "support"}))[1]["id"]
    answers = await asyncio.gather(*(talk.say("hello", session_id=session) for _ in range(8)))
    assert sorted(status for status, _ in answers) == [202] + [409] * 7
    refused = next(body for status, body in answers if status == 409)
    accepted = next(body for status, body in answers if status == 202)
    assert (refused["code"], refused["run_id"]) == ("SESSION_BUSY", accepted["run_id"])
    assert len(await talk.rig.sql("SELECT FROM interlock.run WHERE session_id = $1", UUID(session))) == 1


async def test_a_second_open_run_of_a_session_is_refused_by_its_row(talk: Talk) -> None:
    sent = await talk.told("hello")
    other = await talk.told("hello")
    with pytest.raises(Exception, match="run_active_in_session"):
        await talk.rig.sql(
            "UPDATE interlock.run SET session_id = $1, session_run = 2 WHERE id = $2",
            UUID(sent["session_id"]), UUID(other["run_id"]),
        )  # fmt: skip


async def test_a_queued_message_runs_when_the_one_before_it_has_ended(talk: Talk) -> None:
    first = await talk.told("hold")
    session = first["session_id"]
    async with talk.rig.worker():
        await talk.hold.inside()
        second = await talk.told("second", session_id=session, queue=True)
        third = await talk.told("third", session_id=session, queue=True)
        assert (second["run_id"], second["queued"]) == (None, True)
        assert (await talk.get(f"/api/sessions/{session}"))["waiting"] == 2
        talk.hold.release.set()
        await talk.rig.until(UUID(first["run_id"]))
        await settled(talk, session)
    said = (await talk.get(f"/api/sessions/{session}/messages"))["items"]
    assert [(m["content"], m["answer"]) for m in said] == [
        ("hold", "It is over."), ("second", "You said: second"), ("third", "You said: third"),
    ]  # fmt: skip
    assert third["message_id"] == said[2]["id"]


async def test_a_waiting_message_is_not_forgotten_if_nobody_was_there_when_the_run_before_it_ended(talk: Talk) -> None:
    first = await talk.told("refund ch_1 40")
    await talk.held(first["run_id"])
    await talk.told("second", session_id=first["session_id"], queue=True)
    await talk.post(f"/api/runs/{first['run_id']}/interrupt")
    assert (await talk.get(f"/api/sessions/{first['session_id']}"))["run_id"] is None
    status, body = await talk.say("pushing in", session_id=first["session_id"])
    assert (status, body["code"]) == (409, "SESSION_BUSY")
    await sessions.start_waiting(talk.rig.database, talk.rig.plans)
    run_id = (await talk.get(f"/api/sessions/{first['session_id']}"))["run_id"]
    assert (await talk.ended(run_id))["result"] == {"text": "You said: second"}


async def settled(talk: Talk, session: str) -> None:
    async with talk.rig.stream(f"/api/sessions/{session}/events?until_idle=true") as frames:
        async for frame in frames:
            if frame["event"] == "end":
                return


async def test_the_model_is_told_what_was_said_before(rig: Rig, talk: Talk) -> None:
    sent = await talk.told("refund ch_1 40", auto_approve=True)
    await talk.ended(sent["run_id"])
    interrupted = await talk.told("refund ch_2 40", session_id=sent["session_id"], auto_approve=False)
    await talk.held(interrupted["run_id"])
    await talk.post(f"/api/runs/{interrupted['run_id']}/interrupt")
    last = await talk.told("hello", session_id=sent["session_id"])
    await talk.ended(last["run_id"])
    row = await runs.get(rig.database, rig.admin, RunId(UUID(last["run_id"])))
    plan = await rig.plans.get(rig.admin.tenant_id, "support", 1)
    told = conversation(await sessions.memory(rig.database, row, plan), "")
    texts: list[Any] = [str(part.content) for message in told for part in message.parts if hasattr(part, "content")]
    assert texts == [
        "refund ch_1 40", "Let me look at that charge.", "{'name': 'Ada', 'charge': 'ch_1'}", "I will refund it.",
        "{'amount': 40, 'refunded': 'ch_1'}", 'Done: {"refunded":"ch_1","amount":40}',
        "refund ch_2 40", "Let me look at that charge.", "{'name': 'Ada', 'charge': 'ch_2'}", "I will refund it.",
        "It was interrupted and not done.",
    ]  # fmt: skip


PAYER = """
name: payer
model: scripted
tools: [shop.pay]
script: [{turns: [{calls: [{tool: shop.pay, args: {}}]}]}]
"""


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("ended", ["interrupted", "lost"])
async def test_the_model_is_told_that_nobody_knows_whether_a_write_was_done(
    rig: Rig, talk: Talk, ended: str, idempotent: bool
) -> None:
    rig.settings.max_reclaims = 0

    @rig.tool("shop.pay", writes=True, risk="low", idempotent=idempotent)
    async def pay() -> None:
        await talk.hold()

    await talk.http.put("/api/policy", content='@id("all") permit (principal, action, resource);')
    assert (await talk.http.post("/api/agents", content=PAYER)).status_code == 201
    sent = await talk.told("pay", agent="payer")
    if ended == "interrupted":
        async with rig.worker():
            await talk.hold.inside()
            await talk.post(f"/api/sessions/{sent['session_id']}/interrupt")
            await rig.until(UUID(sent["run_id"]))
    else:
        task = asyncio.create_task(Worker(rig.database, rig.settings, tools=rig.tools).run(asyncio.Event()))
        await talk.hold.inside()
        await lose(rig, task)
        await talk.ended(sent["run_id"])
    [receipt] = (await talk.get(f"/api/runs/{sent['run_id']}/receipts"))["items"]
    last = await talk.told("and now?", session_id=sent["session_id"])
    row = await runs.get(rig.database, rig.admin, RunId(UUID(last["run_id"])))
    told = conversation(await sessions.memory(rig.database, row, await rig.plans.get(row.tenant_id, "payer", 1)), "")
    [answer] = [part for message in told for part in message.parts if isinstance(part, ToolReturnPart)]
    assert "Nobody knows whether it was done" in str(answer.content)
    assert (receipt["status"] == "in_doubt") == (ended == "lost" or not idempotent)


# ---------------------------------------------------------------- interrupting


async def test_interrupting_while_a_tool_runs(talk: Talk) -> None:
    sent = await talk.told("hold")
    async with talk.rig.worker():
        await talk.hold.inside()
        status, run = await talk.post(f"/api/sessions/{sent['session_id']}/interrupt")
        assert (status, run["status"]) == (200, "canceling")
        run = await talk.rig.until(UUID(sent["run_id"]))
    assert (run["status"], run["reason"], talk.hold.interrupted) == ("canceled", "interrupted", True)


async def test_a_tool_may_be_called_model(talk: Talk) -> None:
    """The engine must not mistake the tool's step for a model call, which it would repeat without end."""
    rig = talk.rig

    @rig.tool("model")
    async def model(name: str) -> str:
        return f"{name} is 3 m long"

    agent = """
name: cars
model: scripted
tools: [model]
limits: {turns: 3}
script:
  - turns:
      - calls: [{tool: model, args: {name: a}}, {tool: model, args: {name: b}}]
      - calls: [{tool: model, args: {name: c}}]
      - say: "{result}"
"""
    applied = await talk.http.post("/api/agents", content=agent)
    assert applied.status_code == 201, applied.text
    sent = await talk.told("how long?", agent="cars")
    run = await talk.ended(sent["run_id"])
    assert (run["status"], run["result"]) == ("succeeded", {"text": "c is 3 m long"}), run["error"]
    assert list(run["step"]) == ["model", "tool:model", "tool:model#2", "model#2", "tool:model#3", "model#3"]


async def test_interrupting_while_the_model_speaks(talk: Talk) -> None:
    sent = await talk.told("slowly")
    async with talk.rig.worker():
        await talk.rig.until_journal(UUID(sent["run_id"]), "message_delta")
        status, run = await talk.post(f"/api/runs/{sent['run_id']}/interrupt")
        assert (status, run["status"]) == (200, "canceling")
        run = await talk.rig.until(UUID(sent["run_id"]))
    assert (run["status"], run["reason"], run["step"]["model"]["status"]) == ("canceled", "interrupted", "canceled")


async def test_a_model_that_is_asked_again_after_its_worker_stopped_says_so(talk: Talk) -> None:
    """Otherwise readers would see its earlier text twice."""
    rig = talk.rig
    rig.settings.drain_seconds = 0.05
    sent = await talk.told("slowly")
    run_id = UUID(sent["run_id"])
    for times in (1, 2):
        async with rig.worker():
            await rig.until_journal(run_id, "message_delta", times)
    said = await rig.sql(
        "SELECT attempt FROM interlock.journal_entry WHERE run_id = $1 AND type = 'message_delta' ORDER BY seq", run_id
    )
    assert [row["attempt"] for row in said] == [1, 2]


async def test_interrupting_while_people_are_asked(talk: Talk) -> None:
    sent = await talk.told("refund ch_1 40")
    [question] = await talk.held(sent["run_id"])
    _, run = await talk.post(f"/api/runs/{sent['run_id']}/interrupt")
    assert (run["status"], run["reason"]) == ("canceled", "interrupted")
    assert (await talk.get(f"/api/approvals/{question['id']}"))["status"] == "canceled"


async def test_an_interrupt_that_is_said_twice_has_one_answer(talk: Talk) -> None:
    sent = await talk.told("refund ch_1 40")
    await talk.held(sent["run_id"])
    path = f"/api/sessions/{sent['session_id']}/interrupt"
    first, second = [await talk.post(path, {"request_id": "i1"}) for _ in range(2)]
    assert (first[0], first[1]["status"]) == (200, "canceled")
    assert second == first
    assert (await talk.post(path, {"request_id": "i2"}))[0] == 409


# ---------------------------------------------------------------- limits, and other people's sessions


@pytest.mark.parametrize(
    ("limits", "says"), [("turns: 3", "asked its model 3 times"), ("tokens: 60", "limits.tokens are 60")]
)
async def test_an_agent_stops_at_its_limits(talk: Talk, limits: str, says: str) -> None:
    definition = f"""
name: bounded
model: scripted
tools: ["*"]
limits: {{{limits}}}
script: [{{turns: [{{calls: [{{tool: shop.lookup, args: {{charge: ch_1}}}}]}}]}}]
"""
    await talk.http.post("/api/agents", content=definition)
    sent = await talk.told("for ever", agent="bounded")
    run = await talk.ended(sent["run_id"])
    assert (run["status"], run["reason"]) == ("failed", "cap_exceeded")
    assert says in run["error"]["message"]


async def test_an_approval_of_one_session_is_unknown_in_another(talk: Talk) -> None:
    sent = await talk.told("refund ch_1 40")
    other = await talk.told("hello")
    [question] = await talk.held(sent["run_id"])
    status, body = await talk.post(f"/api/sessions/{other['session_id']}/approvals/{question['id']}/approve")
    assert (status, body["code"], talk.refunds) == (404, "APPROVAL_NOT_FOUND", [])
    status, _ = await talk.post(f"/api/sessions/{sent['session_id']}/approvals/{question['id']}/approve")
    assert status == 200


async def test_approving_from_two_places_at_once_acts_once(talk: Talk) -> None:
    sent = await talk.told("refund ch_1 40")
    [question] = await talk.held(sent["run_id"])
    other = Talk(talk.rig, talk.rig.http(await talk.rig.key("another", "approver")))
    path = f"/api/approvals/{question['id']}/approve"
    answers = await asyncio.gather(*(who.post(path) for who in (talk, other) * 4))
    assert {status for status, _ in answers} <= {200, 409}
    await talk.ended(sent["run_id"])
    assert talk.refunds == ["ch_1"]


async def test_a_session_of_another_tenant_does_not_exist(talk: Talk) -> None:
    sent = await talk.told("hello")
    stranger = await talk.rig.tenant("other")
    http = talk.rig.http(await talk.rig.key("x", "admin", tenant_id=stranger.tenant_id))
    for path in ("", "/events", "/messages"):
        assert (await http.get(f"/api/sessions/{sent['session_id']}{path}")).status_code == 404
    body = {"content": "hi", "session_id": sent["session_id"]}
    assert (await http.post("/api/messages", json=body)).status_code == 404


async def test_without_an_agent_the_built_in_one_does_as_it_is_told(talk: Talk) -> None:
    status, sent = await talk.post("/api/messages", {"content": 'shop.lookup {"charge": "ch_7"}'})
    assert status == 202
    run = await talk.ended(sent["run_id"])
    assert (run["workflow"], run["result"]["text"]) == ("assistant", '{"charge":"ch_7","name":"Ada"}')
    again = await talk.told("hello", session_id=sent["session_id"])
    assert "scripted model" in (await talk.ended(again["run_id"]))["result"]["text"]
    assert [a["name"] for a in (await talk.get("/api/agents"))["items"]] == ["assistant", "support"]
    assert (await talk.get("/api/workflows"))["items"] == []


# ---------------------------------------------------------------- retention


async def test_what_was_said_goes_with_the_journal_of_its_run(talk: Talk) -> None:
    rig = talk.rig
    object.__setattr__(rig.settings, "retention_days", 30)
    object.__setattr__(rig.settings, "retention_grace_days", 0)
    async with rig.long_ago():
        gone = await talk.told("hello")
        kept = await talk.told("hello")
        for sent in (gone, kept):
            await talk.ended(sent["run_id"])
        again = await talk.told("again", session_id=kept["session_id"])
        await talk.ended(again["run_id"])
    old, later = gone["session_id"], again["message_id"]
    # Date the message after the month that retention removes.
    await rig.sql("UPDATE interlock.message SET run_id = $1 WHERE id = $2", UUID(int=2**128 - 1), UUID(later))
    await sweeps.tend(rig.database, rig.notary.signing.key())
    assert len(await rig.sql("SELECT FROM interlock.message")) == 3, "its evidence is not there yet"
    await audit.seal_all(rig.database, rig.notary.signing)
    await rig.prove()
    await sweeps.tend(rig.database, rig.notary.signing.key())
    assert [str(row["id"]) for row in await rig.sql("SELECT id FROM interlock.message")] == [later]
    assert [str(row["id"]) for row in await rig.sql("SELECT id FROM interlock.session")] == [kept["session_id"]]
    assert (await talk.http.get(f"/api/sessions/{old}")).status_code == 404
    said = await talk.told("still there?", session_id=kept["session_id"])
    assert (await talk.ended(said["run_id"]))["result"]["text"] == "You said: still there?"


async def test_whatever_is_told_of_a_run_names_its_session(talk: Talk) -> None:
    rig = talk.rig
    await rig.sql(
        "INSERT INTO interlock.notification_target (id, tenant_id, channel, address, events, nonce, ciphertext,"
        " created_at, created_by)"
        " VALUES (gen_random_uuid(), $1, 'webhook', 'https://example.com', $2, $3, '', now(), '')",
        rig.admin.tenant_id, [str(event) for event in WebhookEvent], bytes(12),
    )  # fmt: skip
    sent = await talk.told("refund ch_1 40")
    [question] = await talk.held(sent["run_id"])
    await talk.post(f"/api/approvals/{question['id']}/reject")
    await rig.prove()
    sealed = (await talk.get("/api/audit", run_id=sent["run_id"]))["items"]
    assert {entry["session_id"] for entry in sealed} == {sent["session_id"]}
    [run] = await rig.sql("SELECT * FROM interlock.run")
    told = {
        row["event"]: orjson.loads(row["payload"] or "null")
        for row in await rig.sql("SELECT * FROM interlock.outbox_message")
    }
    assert told.keys() == {"approval.requested", "approval.resolved", "run.completed"}
    told["run.completed"] = orjson.loads(orjson.dumps(run_data(run), default=str))
    assert {data["session_id"] for data in told.values()} == {sent["session_id"]}


@pytest.mark.parametrize("of", ["sessions/{session_id}", "runs/{run_id}"])
async def test_an_agent_interrupts_its_own_session_and_no_other(talk: Talk, of: str) -> None:
    """A remark of the specification review: role `agent` could send messages but had no way to stop them."""
    rig = talk.rig
    agent, other = [rig.http(await rig.key(name, "agent")) for name in ("bot", "other")]
    sent = (await agent.post("/api/messages", json={"content": "hello"})).json()
    path = f"/api/{of.format(**sent)}/interrupt"
    assert (await other.post(path)).status_code == 403
    answer = await agent.post(path)
    assert (answer.status_code, answer.json()["reason"]) == (200, "interrupted"), answer.text
