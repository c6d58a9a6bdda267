"""Backtests, cases and comparisons cover everything that a rule requires of approvers (new-user 3, new-user 12)."""

import pytest

from interlock.definition.diagnostics import Fault
from interlock.lifecycle import Tier
from interlock.policy.action import ToolFacts, propose
from interlock.policy.decision import NOON
from interlock.policy.policy import (
    DEFAULT_POLICY,
    Asker,
    CasesInvalid,
    compile_policy,
    replay,
    run_cases,
    what_passes_more,
)

RESTART = ToolFacts(
    "svc.restart", writes=True, risk=Tier.HIGH, idempotent=False,
    input_schema={
        "type": "object", "required": ["service", "amount"],
        "properties": {
            "service": {"type": "string"}, "amount": {"type": "integer"},
            "where": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
        },
    },
)  # fmt: skip
LOOK = ToolFacts("svc.look", False, Tier.LOW, True, {"type": "object", "properties": {}})
TOOLS = (RESTART, LOOK)

SRE = """
@id("restart") @decision("needs_approval") @approvers("sre") @reason_required("true") @expires_in("4h")
permit (principal, action == Action::"svc.restart", resource) when { context.input.amount > 100 };
@id("small") permit (principal, action == Action::"svc.restart", resource) when { context.input.amount <= 100 };
@id("reads") permit (principal, action in Action::"read", resource);
"""


def recorded(text: str) -> dict[str, object]:
    action = propose(RESTART, {"service": "db", "amount": 500})
    return compile_policy(text, TOOLS).decide(action, Asker("ann", "operator"), NOON).recorded()


def loosened(before: str, after: str) -> list[str]:
    changes = what_passes_more(compile_policy(before, TOOLS), before, compile_policy(after, TOOLS), after)
    return [change.summary for change in changes]


@pytest.mark.parametrize(
    ("old", "new", "passes_more"),
    [
        ('@approvers("sre") ', "", True),
        ('@approvers("sre") ', '@approvers("sre,dba") ', True),
        ('@approvers("sre") ', '@approvers("dba") ', True),
        ('@reason_required("true") ', "", True),
        ('@decision("needs_approval")', '@decision("needs_approval") @two_person("true")', False),
        ('@expires_in("4h")', '@expires_in("8h")', False),
        ('@approvers("sre") ', '@approvers("sre") @escalate_to("managers") @escalate_after("1h") ', True),
    ],
)
def test_a_backtest_reports_every_change_in_what_is_asked_of_approvers(old: str, new: str, passes_more: bool) -> None:
    assert old in SRE
    (change,) = replay([recorded(SRE)], compile_policy(SRE.replace(old, new), TOOLS))
    assert change.passes_more is passes_more


def test_a_backtest_of_the_same_policy_reports_nothing() -> None:
    assert replay([recorded(SRE)], compile_policy(SRE, TOOLS)) == []


def test_a_probe_finds_the_values_between_an_old_and_a_new_limit() -> None:
    found = loosened(SRE, SRE.replace("100", "5000"))
    assert "svc.restart for operator with amount = 5000" in found
    assert "svc.restart for operator with amount = 101" in found


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        ('permit (principal in Group::"ops", action, resource);', "with group ops"),
        ('permit (principal, action, resource) when { context.hour >= 22 };', "with hour 22"),
        ('permit (principal, action, resource) when { principal.role == "viewer" };', "for viewer"),
        ('permit (principal, action, resource) when { context has target && context.target == "db7" };', "target db7"),
        ('permit (principal, action == Action::"svc.restart", resource) when '
         '{ context.input has where && context.input.where.zone == "lab" };', "where.zone = 'lab'"),
        ('permit (principal, action, resource) when { context.auto_approve };', "auto_approve"),
        ('permit (principal, action, resource) when { context.weekday >= 6 };', "with weekday 6"),
        ('permit (principal, action, resource) when { context["weekday"] >= 6 };', "with weekday 6"),
        ('permit (principal, action, resource) when { context.workflow == "nightly" };', "workflow nightly"),
        ('permit (principal, action, resource) when { context.step == "clean" };', "step clean"),
        ('permit (principal, action, resource == Env::"lab");', "workspace lab"),
        ('permit (principal, action, resource) when { context.secrets.contains("stripe") };', "secret stripe"),
        ('permit (principal == Actor::"ann:1", action, resource);', "actor ann:1"),
        ('permit (principal, action, resource) when { principal.tenant == "acme" };', "tenant acme"),
        ("permit (principal, action, resource);", "svc.restart for operator"),
    ],
)  # fmt: skip
def test_a_probe_finds_what_one_more_permit_lets_pass(extra: str, found: str) -> None:
    strict = SRE.replace("context.input.amount <= 100", "false")
    assert any(found in summary for summary in loosened(strict, strict + '@id("extra") ' + extra))


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("context.weekday >= 6", "with weekday 6"),
        ("context.hour < 6", "with hour 5"),
        ('context.workflow == "nightly"', "with workflow nightly"),
        ("!context.secrets.isEmpty()", "with a secret"),
        ('resource == Env::"prod"', "with workspace prod"),
    ],
)
def test_a_probe_finds_what_one_forbid_less_lets_pass(condition: str, found: str) -> None:
    """A rule that forbids writes at weekends was taken out without a warning."""
    loose = '@id("all") permit (principal, action, resource);'
    strict = loose + f'@id("freeze") forbid (principal, action, resource) when {{ {condition} }};'
    assert any(found in summary for summary in loosened(strict, loose))


def test_a_stricter_policy_passes_nothing_more() -> None:
    assert loosened('@id("all") permit (principal, action, resource);', SRE) == []
    assert loosened(DEFAULT_POLICY, DEFAULT_POLICY) == []


def test_a_bound_on_probes_hides_no_tool() -> None:
    many = [ToolFacts(f"svc.t{n}", True, Tier.HIGH, False, RESTART.input_schema) for n in range(400)]
    allow = '@id("all") permit (principal, action, resource);'
    changes = what_passes_more(compile_policy(DEFAULT_POLICY, many), DEFAULT_POLICY, compile_policy(allow, many), allow)
    assert {change.summary.split()[0] for change in changes} == {tool.name for tool in many}


CASE = """
- tool: svc.restart
  input: {amount: 500}
  expect: needs_approval
"""


@pytest.mark.parametrize(
    ("line", "passed"),
    [
        ("approvers: [sre]", True),
        ("approvers: [dba]", False),
        ("approvers: []", False),
        ("reason_required: true", True),
        ("reason_required: false", False),
        ("expires_in: 4h", True),
        ("expires_in: 1h", False),
        ("escalate_to: [managers]", False),
        ("escalate_to: []", True),
        ("escalate_after: 10m", False),
    ],
)
def test_a_case_asserts_what_is_asked_of_approvers(line: str, passed: bool) -> None:
    (result,) = run_cases(compile_policy(SRE, TOOLS), CASE + f"  {line}\n", TOOLS)
    assert result.passed is passed, result


def test_a_case_without_a_workspace_is_judged_like_a_run_without_one() -> None:
    """A case had the workspace `default`, which no run has by itself: its gate judges `Env::""`."""
    text = '@id("lab") permit (principal, action, resource == Env::"default");'
    cases = "- {tool: svc.look, expect: deny}\n- {tool: svc.look, expect: allow, at: {workspace: default}}\n"
    assert [result.passed for result in run_cases(compile_policy(text, TOOLS), cases, TOOLS)] == [True, True]


def test_a_case_that_expects_approvers_of_an_allowed_action_is_refused() -> None:
    text = CASE.replace("needs_approval", "allow") + "  approvers: [sre]\n"
    with pytest.raises(CasesInvalid) as caught:
        run_cases(compile_policy(SRE, TOOLS), text, TOOLS)
    assert Fault("cases", 4, "[0].expect", "approvers belongs to needs_approval, not to allow") in caught.value.faults
