"""A broken policy always denies, with a reason that a person can act on, and allows no effect."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from cedarpy import Decision as CedarDecision
from tests.governed.conftest import Shop
from tests.rig import Rig

from interlock.policy import evaluator

PAY = "name: pay\nsteps:\n  - {id: pay, tool: bank.pay, input: {amount: 5}, retry: {max_attempts: 1}}"
PERMIT = '@id("all") permit (principal, action, resource);\n'

# Each with words of the error on publishing, and of the denial if the policy is in force anyway.
BROKEN = {
    "syntax": ('@id("a") permit (principal, action, resource;', "unexpected", "not valid any more"),
    "unknown attribute": (
        PERMIT
        + '@id("f") forbid (principal, action == Action::"bank.pay", resource) when { context.input.amuont > 3 };',
        "amount",
        "not valid any more",
    ),
    "unknown entity": (
        PERMIT + '@id("f") forbid (principal is Robot, action, resource);',
        "Robot",
        "not valid any more",
    ),
    "wrong type": (
        PERMIT
        + '@id("f") forbid (principal, action == Action::"bank.pay", resource) when { context.input.amount > "3" };',
        "",
        "not valid any more",
    ),
    "empty": ("// nothing\n", "empty policy denies everything", "empty policy denies everything"),
    "template": ('@id("a") permit (principal == ?principal, action, resource);', "?principal", "?principal"),
    "too deep": (
        f'@id("a") permit (principal, action, resource) when {{ {"(" * 60}true{")" * 60} }};',
        "nested",
        "nested",
    ),
    "too large": ("// " + "x" * 300_000, "larger than", "larger than"),
}


@pytest.fixture
async def bank(shop: Shop, rig: Rig) -> Shop:
    @rig.tool("bank.pay", writes=True, risk="low")
    async def pay(amount: int) -> None:
        shop.done.append("paid")

    await rig.apply(PAY)
    return shop


async def _put_in_force(rig: Rig, text: str) -> None:
    """Bypass the check on publishing: an older version, another tool or a manual change in the database could do so."""
    await rig.sql(
        "INSERT INTO interlock.policy VALUES ($1, 1, 'digest', $2, now(), 'somebody')", rig.admin.tenant_id, text
    )
    await rig.sql("UPDATE interlock.tenant_limits SET policy_version = 1 WHERE tenant_id = $1", rig.admin.tenant_id)


async def _denied(shop: Shop, *words: str) -> dict[str, Any]:
    run = await shop.ended(await shop.start(shop.admin, "pay"))
    assert (run["status"], run["reason"], shop.done) == ("failed", "policy_denied", []), run
    for word in words:
        assert word in run["error"]["message"], run["error"]
    assert await shop.receipts(run["id"]) == []
    return run


@pytest.mark.parametrize(("text", "fault", "why"), BROKEN.values(), ids=BROKEN.keys())
async def test_a_broken_policy_is_refused_when_published_and_denies_when_it_is_in_force(
    text: str, fault: str, why: str, bank: Shop, rig: Rig
) -> None:
    status, body = await bank.admin.publish(text)
    assert (status, body["code"]) == (422, "POLICY_INVALID"), body
    assert fault in body["detail"] and body["errors"], body
    assert (await bank.admin.get("/api/policy"))["version"] == 0, "the one before stays in force"
    await _put_in_force(rig, text)
    await _denied(bank, why)


async def test_an_annotation_that_nobody_knows_is_refused_when_published_and_asks_people_when_in_force(
    bank: Shop, rig: Rig
) -> None:
    text = '@id("all") @quorum("3") permit (principal, action, resource);'
    status, body = await bank.admin.publish(text)
    assert (status, body["code"]) == (422, "POLICY_INVALID") and "@quorum: no such annotation" in body["detail"]
    await _put_in_force(rig, text)
    question = await bank.held(await bank.start(bank.admin, "pay"))
    assert (question["tier"], bank.done) == ("high", [])


async def test_a_forbid_that_fails_while_it_is_evaluated_denies(bank: Shop) -> None:
    """Cedar alone would skip it and allow."""
    text = f"""{PERMIT}
@id("sum") forbid (principal, action == Action::"bank.pay", resource)
when {{ context.input.amount * 9223372036854775807 < 0 }};
"""
    assert (await bank.admin.publish(text))[0] == 200
    await _denied(bank, "a rule failed", "sum")


async def test_a_policy_that_permits_nothing_denies_and_names_the_tool(bank: Shop) -> None:
    text = '@id("reads") permit (principal, action in Action::"read", resource);'
    assert (await bank.admin.publish(text))[0] == 200
    await _denied(bank, "no rule permits bank.pay")


async def test_a_tenant_whose_policy_is_gone_may_do_nothing(bank: Shop, rig: Rig) -> None:
    await rig.sql("UPDATE interlock.tenant_limits SET policy_version = 7")
    await _denied(bank, "no policy", "interlock policy apply")


async def test_a_tool_without_a_schema_cannot_be_judged_and_does_nothing(bank: Shop, rig: Rig) -> None:
    known = rig.tools.find("bank.pay")
    assert known is not None
    rig.tools.add(replace(known, input_schema={}))
    await _denied(bank, "bank.pay has no input schema")


async def test_a_tool_that_nobody_knows_does_nothing(bank: Shop, rig: Rig) -> None:
    await rig.apply(PAY.replace("bank.pay", "bank.steal"))
    run = await bank.ended(await bank.start(bank.admin, "pay"))
    assert (run["status"], run["reason"], bank.done) == ("failed", "attempts_exhausted", [])
    assert "no tool bank.steal" in run["error"]["message"]


class Panic(BaseException):
    """A panic in Rust arrives like this."""


@pytest.mark.parametrize("error", [RuntimeError("broken"), Panic("broken"), MemoryError("broken")], ids=repr)
async def test_whatever_cedar_raises_denies(error: BaseException, bank: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise error

    monkeypatch.setattr(evaluator, "is_authorized", broken)
    await _denied(bank, "could not be evaluated", "broken")


@pytest.mark.parametrize(
    ("decision", "reasons", "why"),
    [
        (CedarDecision.NoDecision, [], "no decision"),
        (CedarDecision.Allow, [], "rules that this policy does not have"),
        (CedarDecision.Allow, ["policy77"], "rules that this policy does not have"),
    ],
)
async def test_an_answer_that_makes_no_sense_denies(
    decision: Any, reasons: list[str], why: str, bank: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = SimpleNamespace(decision=decision, diagnostics=SimpleNamespace(errors=[], reasons=reasons))
    monkeypatch.setattr(evaluator, "is_authorized", lambda *args: said)
    await _denied(bank, why)


async def test_a_gate_that_breaks_itself_denies_and_the_run_ends(bank: Shop, rig: Rig) -> None:
    run_id = await bank.start(bank.admin, "pay")
    await rig.sql("UPDATE interlock.run SET requester = '[1]' WHERE id = $1", run_id)
    run = await bank.ended(run_id)
    assert (run["status"], run["reason"], bank.done) == ("failed", "policy_denied", [])
    assert "could not be judged" in run["error"]["message"]


async def test_a_policy_that_is_mended_lets_the_same_workflow_through(bank: Shop, rig: Rig) -> None:
    await _put_in_force(rig, "nonsense")
    await _denied(bank, "not valid any more")
    assert (await bank.admin.publish(PERMIT))[0] == 200
    assert (await bank.ended(await bank.start(bank.admin, "pay")))["status"] == "succeeded"


async def test_policies_published_at_the_same_moment_get_one_version_each(bank: Shop) -> None:
    answers = await asyncio.gather(*(bank.admin.publish(f"{PERMIT}// {n}") for n in range(6)))
    assert sorted(body["version"] for _, body in answers) == [1, 2, 3, 4, 5, 6]
    assert (await bank.admin.get("/api/policy"))["version"] == 6


async def test_only_admins_publish(bank: Shop) -> None:
    for role in ("viewer", "operator", "approver", "agent"):
        status, body = await (await bank.person(role, role)).publish(PERMIT)
        assert (status, body["code"]) == (403, "FORBIDDEN")


# ---------------------------------------------------------------- backtests


async def test_a_backtest_lists_what_another_policy_would_have_decided(bank: Shop, rig: Rig) -> None:
    await rig.apply(PAY.replace("amount: 5", 'amount: "${input.amount}"'))
    runs = [await bank.ended(await bank.start(bank.admin, "pay", amount=n)) for n in (5, 50, 500)]
    policy = """
@id("small") permit (principal, action == Action::"bank.pay", resource) when { context.input.amount <= 10 };
@id("medium") @decision("needs_approval") @tier("med")
permit (principal, action == Action::"bank.pay", resource) when { context.input.amount > 10 };
@id("never") forbid (principal, action == Action::"bank.pay", resource) when { context.input.amount > 100 };
"""
    status, body = await bank.admin.post("/api/policy/backtest", {"policy": policy})
    assert (status, body["decisions"], body["changed"]) == (200, 3, 2)
    found = {change["run_id"]: (change["before"]["answer"], change["after"]["answer"]) for change in body["changes"]}
    assert found == {str(runs[1]["id"]): ("allow", "needs_approval"), str(runs[2]["id"]): ("allow", "deny")}
    denied = next(change for change in body["changes"] if change["after"]["answer"] == "deny")
    assert denied["rule_ids"] == ["never"] and denied["step"] == "pay" and "forbidden by never" in denied["reason"]
    status, body = await bank.admin.post(
        "/api/policy/backtest", {"policy": (await bank.admin.get("/api/policy"))["text"]}
    )
    assert (body["decisions"], body["changed"]) == (3, 0), "the policy in force changes nothing"
    status, body = await bank.admin.post("/api/policy/backtest", {"policy": "nonsense"})
    assert (status, body["code"]) == (422, "POLICY_INVALID")
    assert (await bank.admin.get("/api/policy"))["version"] == 0, "nothing was published"


async def test_a_backtest_does_not_take_what_people_decided_for_a_decision_of_the_policy(shop: Shop, rig: Rig) -> None:
    @rig.tool("bank.pay", writes=True, risk="med")
    async def pay(amount: int) -> None: ...

    await rig.apply(PAY)
    run_id = await shop.start(shop.admin, "pay")
    await (await shop.person("one")).approve((await shop.held(run_id))["id"])
    assert (await shop.ended(run_id))["status"] == "succeeded"
    status, body = await shop.admin.post("/api/policy/backtest", {"policy": PERMIT})
    assert (status, body["decisions"], body["changed"]) == (200, 2, 2), "when it was held, and when it was let through"
    assert {change["before"]["answer"] for change in body["changes"]} == {"needs_approval"}


async def test_evaluating_an_action_says_what_would_happen_and_does_nothing(bank: Shop, rig: Rig) -> None:
    status, body = await bank.admin.post("/api/policy/evaluate", {"tool": "bank.pay", "input": {"amount": 5}})
    assert (status, body["answer"], body["rule_ids"]) == (200, "allow", ["low-writes"])
    status, body = await bank.admin.post("/api/policy/evaluate", {"tool": "bank.pay", "input": {"amount": "x"}})
    assert (status, body["code"]) == (422, "ACTION_INVALID")
    status, body = await bank.admin.post("/api/policy/evaluate", {"tool": "bank.steal"})
    assert (status, body["code"]) == (404, "TOOL_NOT_FOUND")
    assert bank.done == [] and await rig.sql("SELECT * FROM interlock.receipt") == []


@pytest.mark.parametrize(
    "condition",
    [
        'principal.tenant == "default"',
        'principal.role == "operator"',
        'principal in Group::"ops"',
        'context.workflow == "pay"',
        'resource == Env::"blue"',
        'resource == Env::""',
        "context.auto_approve",
    ],
)
@pytest.mark.parametrize("workspace", [None, "blue"])
async def test_evaluating_an_action_answers_as_the_gate_does(bank: Shop, condition: str, workspace: str | None) -> None:
    """It judged without the tenant and without groups, so a rule about them was never met."""
    text = f'@id("only") permit (principal, action, resource) when {{ {condition} }};'
    assert (await bank.admin.publish(text))[0] == 200
    who = await bank.person("mira", "operator", "ops", workspace_id=workspace)
    run = await bank.ended(await bank.start(who, "pay"))
    asked = {"tool": "bank.pay", "input": {"amount": 5}, "role": "operator", "groups": ["ops"], "workflow": "pay"}
    status, said = await who.post("/api/policy/evaluate", asked)
    assert status == 200, said
    assert (said["answer"] == "allow") == (run["status"] == "succeeded"), (said, run["error"])
