"""A policy always answers, and denies in every doubt."""

import contextlib
import json
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import cedarpy
import pytest
from cedarpy import AuthzResult, Schema
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import create_model

from interlock.errors import Invalid
from interlock.lifecycle import Tier
from interlock.policy import evaluator
from interlock.policy.action import ProposedAction, ToolFacts, propose
from interlock.policy.policy import (
    DEFAULT_POLICY,
    ApprovalDemand,
    Asker,
    CasesInvalid,
    Circumstances,
    CompiledPolicy,
    Decision,
    PolicyAnswer,
    PolicyInvalid,
    cedar_schema,
    compile_policy,
    deny_everything,
    load_policy,
    replay,
    run_cases,
)
from interlock.policy.schema import Vocabulary

# As in wire.md.
WIRE = """\
@id("reads") permit(principal, action in Action::"read", resource);
@id("small") @decision("allow") permit(principal, action == Action::"shop.refund", resource)
  when { context.input.amount <= 100 };
@id("large") @decision("needs_approval") @tier("high") @two_person("true") @reason("refunds over 100 need two people")
  permit(principal, action == Action::"shop.refund", resource) when { context.input.amount > 100 };
@id("freeze") forbid(principal, action in Action::"shop", resource) when { context.hour >= 22 };
"""
EVERYTHING = '@id("everything") permit(principal, action, resource);\n'


def tool(name: str, *, writes: bool = True, risk: Tier = Tier.LOW, **parameters: Any) -> ToolFacts:
    """Build the tool with pydantic's schema, as the registry does."""
    model = create_model("Input", __config__={"extra": "forbid"}, **parameters)
    return ToolFacts(name, writes, risk, False, model.model_json_schema())


REFUND = tool("shop.refund", risk=Tier.HIGH, charge=(str, ...), amount=(int, ...), note=(str | None, None))
LOOKUP = tool("shop.lookup_charge", writes=False, charge=(str, ...))
MAIL = tool("mail.send", risk=Tier.MED, to=(list[str], ...), urgent=(bool, False))
PRICE = tool("shop.price", value=(float, ...), weight=(float, 0.5))
TOOLS = [REFUND, LOOKUP, MAIL, PRICE]
ALICE = Asker("alice", "operator", ("finance",), "acme")
CHARGE = {"charge": "ch_1", "amount": 50}


def at(hour: int = 12, **more: Any) -> Circumstances:
    usual = {"weekday": 3, "workflow": "refund", "workspace": "default", "auto_approve": False}
    return Circumstances(hour=hour, run_id="run", step="pay", **{**usual, **more})


def refund(amount: Any = 50, **more: Any) -> ProposedAction:
    return propose(REFUND, {"charge": "ch_1", "amount": amount, **more})


def ask(
    policy: CompiledPolicy | str, action: ProposedAction, asker: Asker = ALICE, when: Circumstances | None = None
) -> Decision:
    compiled = compile_policy(policy, TOOLS) if isinstance(policy, str) else policy
    return compiled.decide(action, asker, when or at())


def faults(text: str, tools: list[ToolFacts] | None = None) -> list[tuple[int | None, str]]:
    with pytest.raises(PolicyInvalid) as caught:
        compile_policy(text, TOOLS if tools is None else tools)
    assert isinstance(caught.value, Invalid) and caught.value.code == "POLICY_INVALID"
    return [(fault.line, fault.message) for fault in caught.value.faults]


def rule(annotations: str, when: str = "true", effect: str = "permit") -> str:
    return f"{annotations} {effect}(principal, action, resource) when {{ {when} }};\n"


# ---------------------------------------------------------------- what it answers


@pytest.mark.parametrize(
    ("action", "hour", "answer", "tier", "two_person", "rules"),
    [
        (propose(LOOKUP, {"charge": "ch_1"}), 12, PolicyAnswer.ALLOW, None, False, ("reads",)),
        (refund(100), 12, PolicyAnswer.ALLOW, None, False, ("small",)),
        (refund(101), 12, PolicyAnswer.NEEDS_APPROVAL, Tier.HIGH, True, ("large",)),
        (refund(100), 22, PolicyAnswer.DENY, None, False, ("freeze",)),
        (refund(101), 23, PolicyAnswer.DENY, None, False, ("freeze",)),
        (propose(LOOKUP, {"charge": "ch_1"}), 22, PolicyAnswer.DENY, None, False, ("freeze",)),
        (propose(MAIL, {"to": []}), 12, PolicyAnswer.DENY, None, False, ()),
    ],
)
def test_the_policy_of_the_wire_page_answers_as_it_reads(
    action: ProposedAction, hour: int, answer: PolicyAnswer, tier: Tier | None, two_person: bool, rules: tuple[str, ...]
) -> None:
    decision = ask(WIRE, action, when=at(hour))
    assert (decision.answer, decision.tier, decision.two_person) == (answer, tier, two_person)
    assert decision.rule_ids == rules
    assert decision.errors == () and decision.reason


def test_reasons_are_for_people() -> None:
    assert ask(WIRE, refund(500)).reason == "refunds over 100 need two people"
    assert ask(WIRE, refund(5)).reason == "permitted by small"
    assert ask(WIRE, refund(5), when=at(22)).reason == "forbidden by freeze"
    assert ask(WIRE, propose(MAIL, {"to": []})).reason == "no rule permits mail.send for operator alice with this input"
    because = EVERYTHING + rule('@id("freeze") @reason("the books are closed")', effect="forbid")
    assert ask(because, refund()).reason == "forbidden by freeze: the books are closed"


@pytest.mark.parametrize("tools", [TOOLS, [], [REFUND], [LOOKUP]])
def test_the_default_policy_fits_whatever_tools_there_are(tools: list[ToolFacts]) -> None:
    compile_policy(DEFAULT_POLICY, tools)


@pytest.mark.parametrize(
    ("action", "outcome"),
    [
        (propose(LOOKUP, {"charge": "c"}), ApprovalDemand("allow")),
        (propose(PRICE, {"value": 1}), ApprovalDemand("allow")),
        (propose(MAIL, {"to": ["a@b"]}), ApprovalDemand("needs_approval", "med")),
        (refund(), ApprovalDemand("needs_approval", "high", True)),
    ],
)
def test_by_default_people_decide_what_is_not_easily_undone(action: ProposedAction, outcome: ApprovalDemand) -> None:
    assert ask(DEFAULT_POLICY, action).outcome == outcome


def test_the_strictest_of_the_deciding_permits_wins() -> None:
    text = (
        EVERYTHING
        + rule('@id("one") @decision("needs_approval") @tier("low") @expires_in("8h") @approvers("legal,finance")')
        + rule('@id("two") @decision("needs_approval") @tier("high") @two_person("false") @approvers("finance,board")')
        + rule('@id("three") @decision("needs_approval") @tier("med") @two_person("true") @expires_in("30m")')
        + rule(
            '@id("four") @decision("needs_approval") @reason_required("true") @escalate_to("b,a") @reason("why not")'
        )
        + rule('@id("five") @decision("needs_approval") @escalate_to("a,c") @escalate_after("5m") @reason("and so")')
        + rule('@id("six") @decision("needs_approval") @tier("high")', when="false")
    )
    decision = ask(text, propose(MAIL, {"to": []}))
    assert (decision.answer, decision.tier, decision.two_person) == ("needs_approval", "high", True)
    assert decision.expires_in == 1800 and decision.reason_required
    assert decision.approvers == ("finance",)
    assert (decision.escalate_to, decision.escalate_after) == ((), None), "two rules say who decides, and never others"
    assert decision.reason == "why not; and so"
    assert decision.rule_ids == ("everything", "one", "two", "three", "four", "five")


def test_a_second_group_decides_when_every_rule_that_names_somebody_lets_it() -> None:
    def escalated(*rules: str) -> tuple[tuple[str, ...], float | None]:
        text = EVERYTHING + "".join(
            rule(f'@id("r{n}") @decision("needs_approval") {said}') for n, said in enumerate(rules)
        )
        decision = ask(text, propose(MAIL, {"to": []}))
        assert decision.answer == "needs_approval"
        return decision.escalate_to, decision.escalate_after

    after = '@escalate_to("board,heads") @escalate_after("{}")'
    finance = '@approvers("finance")'
    assert escalated(f"{finance} {after.format('5m')}") == (("board", "heads"), 300)
    assert escalated(f"{finance} {after.format('5m')}", finance) == ((), None)
    assert escalated(f"{finance} {after.format('5m')}", '@approvers("finance,heads")') == (("heads",), 300)
    assert escalated(f"{finance} {after.format('5m')}", f"{finance} {after.format('2h')}") == (("board", "heads"), 7200)
    assert escalated(after.format("5m"), '@escalate_to("others") @escalate_after("1h")')[0] == (
        "board",
        "heads",
        "others",
    )


def test_without_a_tier_the_risk_of_the_tool_counts() -> None:
    asks = rule('@id("x") @decision("needs_approval")')
    assert ask(asks, refund()).tier == Tier.HIGH
    assert ask(asks, propose(MAIL, {"to": []})).tier == Tier.MED


def test_rules_that_nobody_could_satisfy_together_deny() -> None:
    text = "".join(rule(f'@id("{g}") @decision("needs_approval") @approvers("{g}")') for g in ("legal", "board"))
    decision = ask(text, refund())
    assert decision.answer == PolicyAnswer.DENY and "common group" in decision.reason


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('principal.role == "operator"', True),
        ('principal.role == "agent"', False),
        ('principal.tenant == "acme"', True),
        ('principal in Group::"finance"', True),
        ('principal in Group::"legal"', False),
        ('principal == Actor::"alice"', True),
        ('resource == Env::"default"', True),
        ("context.weekday == 3 && context.hour == 12", True),
        ('context.workflow == "refund" && context.step == "pay"', True),
        ('context.risk == "high"', True),
        ("context.auto_approve", False),
        ('context has target && context.target == "charge/1"', True),
        ('context.input.charge like "ch_*"', True),
        ("context.input has note", False),
    ],
)
def test_what_a_rule_can_see(condition: str, holds: bool) -> None:
    text = f'@id("x") permit(principal, action == Action::"shop.refund", resource) when {{ {condition} }};'
    decision = ask(text, propose(REFUND, {**CHARGE, "note": None}, "charge/1"))
    assert decision.answer == (PolicyAnswer.ALLOW if holds else PolicyAnswer.DENY)
    assert decision.errors == ()


def test_groups_hold_for_every_asker_and_not_only_for_the_first() -> None:
    """An entities handle that was built without the schema loses the groups: then no connector is forbidden."""
    policy = compile_policy(EVERYTHING + WIRE, TOOLS)
    for name in ("alice", "bob", "alice"):
        assert ask(policy, refund(), Asker(name, "operator"), at(23)).rule_ids == ("freeze",)


def test_a_default_counts_as_given_even_if_nobody_wrote_it() -> None:
    forbids = EVERYTHING + (
        '@id("calm") forbid(principal, action == Action::"mail.send", resource) when { !context.input.urgent };'
    )
    assert ask(forbids, propose(MAIL, {"to": []})).answer == PolicyAnswer.DENY
    assert ask(forbids, propose(MAIL, {"to": [], "urgent": True})).answer == PolicyAnswer.ALLOW


# ---------------------------------------------------------------- how it can be broken


def price(condition: str) -> str:
    text = '@id("x") forbid(principal, action == Action::"shop.price", resource)'
    return EVERYTHING + f"{text} when {{ {condition} }};"


CAP = EVERYTHING + (
    '@id("cap") forbid(principal, action == Action::"shop.refund", resource)\n'
    "when { context.input.amount * 1000000000000000000 > 5 };"
)


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ('@id("a")\npermit(principal, action, resource)\nwhen { 1 > };\n', 3, "unexpected token"),
        ('@id("a") permit(principal, action, resource)', 1, "unexpected end of input"),
        (EVERYTHING + "\n// fine\npermit(principal", 4, "unexpected end of input"),
        (WIRE.replace("input.amount <=", "input.amout <="), 3, "did you mean `amount`?"),
        (rule('@id("a")', 'principal.rolle == "x"'), 1, "rolle"),
        (WIRE + '@id("z") permit(principal, action == Action::"shop.refnd", resource);', 7, "`shop.refund`?"),
        ('@id("z") permit(principal is User, action, resource);', 1, "User"),
        (WIRE.replace("> 100 }", '> "100" }'), 4, "expected Long but saw String"),
        (WIRE.replace("context.input.amount > 100", 'context.input.note == "x"'), 5, "context.input has note"),
        (price("context.input.value > 5"), 2, 'decimal("100.0")'),
        (price('context.input.value.lessThan(decimal("five"))'), 2, "five"),
        ("", None, "an empty policy denies everything"),
        ("  // nothing here\n", None, "an empty policy denies everything"),
        ("permit(principal, action, resource);", 1, '@id("…")'),
        (EVERYTHING + EVERYTHING, 2, "also the rule in line 1"),
        (rule('@id("a") @id("b")'), 1, "duplicate annotation"),
        (rule('@id("a")\n@desicion("allow")'), 2, "did you mean `decision`?"),
        (rule('@id("a") @decision("maybe")'), 1, "expected allow or needs_approval, found `maybe`"),
        (rule('@id("a") @decision("needs_approval") @tier("huge")'), 1, "low, med or high"),
        (rule('@id("a") @decision("needs_approval") @two_person("yes")'), 1, "true or false"),
        (rule('@id("a") @decision("needs_approval") @expires_in("soon")'), 1, "not a duration"),
        (rule('@id("a") @decision("needs_approval") @expires_in("0s")'), 1, "above zero"),
        (rule('@id("a") @decision("needs_approval") @approvers("a,,b")'), 1, "names of groups"),
        (rule('@id("a") @tier("high")'), 1, 'no effect without @decision("needs_approval")'),
        (rule('@id("a") @decision("allow")', effect="forbid"), 1, "a forbid allows nothing"),
        ('@id("a") permit(principal == ?principal, action, resource);', 1, "?principal"),
        (EVERYTHING + rule('@id("a")', "context.input has amout", "forbid"), 2, "did you mean `amount`?"),
        (rule('@id("a")', "(" * 5000 + "true" + ")" * 5000), 1, "nested deeper"),
        (rule('@id("a")', "[" * 5000 + "]" * 5000 + " == [1]"), 1, "nested deeper"),
        (rule('@id("a")', "// \r" + "(" * 5000 + "true" + ")" * 5000), 1, "nested deeper"),
        (rule('@id("a")', "(;" * 5000), 1, "nested deeper"),
        (rule('@id("a")', "if true then true else " * 50 + "true"), 1, "nested deeper"),
        (rule('@id("a")', "true && " * 5000 + "true"), 1, "split it"),
        (rule('@id("a")', "true && " * 200 + "true"), 1, "nesting exceeds"),
        ("//" + "x" * 300_000, None, "larger than 256 KiB"),
        ("\ud800", 1, ""),
    ],
)
def test_a_broken_policy_is_refused_with_line_and_remedy(text: str, line: int | None, part: str) -> None:
    found = faults(text)
    assert [message for at, message in found if at == line and part in message], found


def test_all_mistakes_are_told_at_once() -> None:
    lines = [line for line, _ in faults(WIRE.replace("amount", "amout") + rule('@tier("x")'))]
    assert lines == [3, 5, 7, 7]


def test_a_rule_may_come_before_its_tools_but_not_before_all_sense() -> None:
    reads = '@id("reads") permit(principal, action in Action::"read", resource);'
    compile_policy(reads, [REFUND])
    compile_policy(EVERYTHING, [])
    assert "can never apply" in faults(rule('@id("x")').replace("principal,", 'principal == Env::"x",'))[0][1]


def test_a_rule_on_what_no_policy_can_see_is_refused() -> None:
    anything = tool("crm.update", values=(dict[str, Any], ...))
    text = '@id("x") permit(principal, action == Action::"crm.update", resource) when { context.input.values == 1 };'
    assert "a policy cannot see it" in faults(text, [anything])[0][1]
    assert (
        ask(compile_policy(EVERYTHING, [anything]), propose(anything, {"values": {"a": 1}})).answer
        == PolicyAnswer.ALLOW
    )


def raising(error: BaseException) -> Callable[..., Any]:
    def is_authorized(*_: Any, **__: Any) -> Any:
        raise error

    return is_authorized


class Panic(BaseException):
    """Like pyo3's, which is not an Exception."""


def answering(response: dict[str, Any]) -> Callable[..., Any]:
    return lambda *_, **__: AuthzResult(response)


NO_SCHEMA = ToolFacts("old.tool", True, Tier.LOW, False, {})
READS_AND_WRITES = ToolFacts("read.all", True, Tier.LOW, False, {"type": "object"})


@pytest.mark.parametrize(
    ("policy", "action", "part"),
    [
        # a forbid that fails while it is evaluated
        (CAP, refund(), "until it is fixed: error while evaluating policy `cap`: integer overflow"),
        # input that does not fit
        (EVERYTHING, propose(REFUND, {"charge": "c"}), "input.amount is missing"),
        (EVERYTHING, refund("50"), "input.amount should be a whole number, found a string"),
        (EVERYTHING, refund(True), "input.amount should be a whole number"),
        (EVERYTHING, refund(50.5), "input.amount should be a whole number"),
        (EVERYTHING, refund(2**63), "input.amount is too large"),
        (EVERYTHING, refund(10**5000), "input.amount"),
        (EVERYTHING, refund({"__extn": {"fn": "decimal", "arg": "1.0"}}), "input.amount should be a whole number"),
        (EVERYTHING, refund(amuont=5), "does not take: amuont"),
        (EVERYTHING, refund(note=5), "input.note should be a string"),
        (EVERYTHING, propose(MAIL, {"to": ["a", 5]}), "input.to[1] should be a string"),
        # bad decimals
        (EVERYTHING, propose(PRICE, {"value": float("nan")}), "input.value should be a number"),
        (EVERYTHING, propose(PRICE, {"value": float("inf")}), "input.value should be a number"),
        (EVERYTHING, propose(PRICE, {"value": 1e15}), "input.value is too large"),
        (EVERYTHING, propose(PRICE, {"value": 1e300}), "input.value is too large"),
        (EVERYTHING, propose(PRICE, {"value": "12"}), "input.value should be a number"),
        (price('context.input.value.lessThan(decimal("5.0"))'), propose(PRICE, {"value": 5.00001}), "round it"),
        # tools that the policy cannot judge or does not know
        (EVERYTHING, propose(ToolFacts("shop.nope", True, Tier.LOW, True, {}), {}), "no tool shop.nope is known"),
        (compile_policy(EVERYTHING, [NO_SCHEMA]), propose(NO_SCHEMA, {}), "no input schema"),
        (compile_policy(EVERYTHING, [READS_AND_WRITES]), propose(READS_AND_WRITES, {}), "groups of a policy"),
        (compile_policy(EVERYTHING, [*TOOLS, tool("shop")]), propose(tool("shop"), {}), "call it shop.something"),
        (EVERYTHING, propose(tool("shop.refund", risk=Tier.LOW), CHARGE), "compile it again"),
        # no usable policy
        (load_policy(None, TOOLS), refund(), "no policy is published"),
        (load_policy("permit(", TOOLS), refund(), "not valid any more"),
        (load_policy("", TOOLS), refund(), "an empty policy denies everything"),
        (
            load_policy(WIRE, [tool("shop.refund", total=(int, ...))]),
            refund(),
            "shop.refund has no `context.input.amount`",
        ),
        (deny_everything("the database said so"), refund(), "the database said so"),
    ],
)
def test_every_doubt_is_a_denial_that_says_what_to_do(
    policy: CompiledPolicy | str, action: ProposedAction, part: str
) -> None:
    decision = ask(policy, action)
    assert decision.answer == PolicyAnswer.DENY
    assert part in decision.reason
    assert decision.tier is None and not decision.two_person


def test_cedar_alone_would_have_allowed_what_a_failing_forbid_forbids() -> None:
    """The reason for the rule above; if this test fails, Cedar has changed."""
    schema = Schema.from_str(cedar_schema(TOOLS))
    request = {
        "principal": 'Actor::"alice"', "action": 'Action::"shop.refund"', "resource": 'Env::"default"',
        "context": {
            "input": CHARGE, "risk": "high", "hour": 1, "weekday": 1, "workflow": "", "step": "", "auto_approve": False,
            "secrets": [],
        },
    }  # fmt: skip
    result = cedarpy.is_authorized(request, CAP, [], schema)
    assert result.allowed and result.diagnostics.errors


@pytest.mark.parametrize(
    ("stub", "part"),
    [
        (raising(ValueError("boom")), "ValueError: boom"),
        (raising(Panic("index out of bounds")), "Panic: index out of bounds"),
        (raising(MemoryError()), "MemoryError"),
        (answering({"decision": "NoDecision", "diagnostics": {"errors": []}}), "no decision"),
        (answering({"decision": "NoDecision", "diagnostics": {"errors": ["bad context"]}}), "bad context"),
        (answering({"decision": "Deny", "diagnostics": {"errors": ["x"]}}), "until it is fixed: x"),
        (answering({"decision": "Perhaps", "diagnostics": {}}), "Perhaps"),
        (answering({}), "decision"),
        (answering({"decision": "Allow", "diagnostics": {}}), "rules that this policy does not have"),
        (
            answering({"decision": "Allow", "diagnostics": {"reason": ["policy9"]}}),
            "rules that this policy does not have",
        ),
        (
            answering({"decision": "Allow", "diagnostics": {"reason": ["policy3"]}}),
            "rules that this policy does not have",
        ),
        (answering({"decision": "Allow", "diagnostics": {"reason": ["policy1"], "errors": ["x"]}}), "x"),
    ],
)
def test_whatever_cedar_does_wrong_is_a_denial(monkeypatch: pytest.MonkeyPatch, stub: Any, part: str) -> None:
    policy = compile_policy(WIRE, TOOLS)
    monkeypatch.setattr(evaluator, "is_authorized", stub)
    decision = policy.decide(refund(), ALICE, at())
    assert decision.answer == PolicyAnswer.DENY and part in decision.reason


def test_an_interrupt_is_not_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = compile_policy(WIRE, TOOLS)
    monkeypatch.setattr(evaluator, "is_authorized", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        policy.decide(refund(), ALICE, at())


@pytest.mark.parametrize(
    ("asker", "when"),
    [
        (ALICE, at(24)),
        (ALICE, at(weekday=0)),
        (ALICE, at(hour="12")),
        (ALICE, at(workspace=None)),
        (ALICE, at(auto_approve="no")),
        (Asker("\ud800", "operator"), at()),
        (Asker("alice", None), at()),  # type: ignore[arg-type]
        (Asker("alice", "operator", (5,)), at()),  # type: ignore[arg-type]
        (None, at()),
        (ALICE, None),
    ],
)
def test_nonsense_about_who_and_when_is_a_denial(asker: Any, when: Any) -> None:
    assert compile_policy(EVERYTHING, TOOLS).decide(refund(), asker, when).answer == PolicyAnswer.DENY


# ---------------------------------------------------------------- stored policies


@pytest.mark.parametrize("note", ['@decision("maybe")', '@tier("huge")', "@from_the_future", '@two_person("yes")'])
def test_an_annotation_that_a_stored_policy_should_not_have_asks_people(note: str) -> None:
    policy = load_policy(rule(f'@id("a") {note}'), TOOLS)
    assert ask(policy, propose(PRICE, {"value": 1})).outcome == ApprovalDemand("needs_approval", "high")


def test_a_stored_policy_may_speak_of_tools_that_are_elsewhere() -> None:
    policy = load_policy(WIRE, [MAIL, LOOKUP])
    assert ask(policy, propose(LOOKUP, CHARGE | {"charge": "c"})).answer == PolicyAnswer.DENY
    assert ask(policy, propose(LOOKUP, {"charge": "c"})).answer == PolicyAnswer.ALLOW
    assert ask(policy, propose(LOOKUP, {"charge": "c"}), when=at(23)).rule_ids == ("freeze",)
    assert ask(policy, refund()).answer == PolicyAnswer.DENY


def test_a_stored_policy_that_no_longer_fits_its_tools_denies_and_keeps_its_digest() -> None:
    policy = load_policy(WIRE, [tool("shop.refund", amount=(str, ...)), LOOKUP])
    assert ask(policy, propose(LOOKUP, {"charge": "c"})).answer == PolicyAnswer.DENY
    assert policy.digest == compile_policy(WIRE, TOOLS).digest


# ---------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("kind", "cedar"),
    [
        (str, "String"),
        (int, "Long"),
        (float, "decimal"),
        (bool, "Bool"),
        (list[int], "Set<Long>"),
        (list[list[str]], "Set<Set<String>>"),
        (int | float, "decimal"),
        (str | None, "String"),
        (list[str | None], "Set<String>"),
        (
            create_model("Inner", a=(int, ...), b=(str, "x"), c=(str | None, None)),
            '{"a": Long, "b": String, "c"?: String}',
        ),
        (dict[str, int], None),
        (Any, None),
        (int | str, None),
        (tuple[int, str], None),
    ],
)
def test_how_types_are_seen_by_a_policy(kind: Any, cedar: str | None) -> None:
    record = Vocabulary.of([tool("a.b", x=(kind, ...))]).entries["a.b"].input
    assert (record.members["x"].shape.cedar if "x" in record.members else None) == cedar


def test_a_decimal_may_come_as_text() -> None:
    pay = tool("pay.out", sum=(Decimal, ...))
    text = '@id("x") permit(principal, action, resource) when { context.input.sum.lessThan(decimal("10.5")) };'
    policy = compile_policy(text, [pay])
    assert ask(policy, propose(pay, {"sum": "10.49"})).answer == PolicyAnswer.ALLOW
    assert ask(policy, propose(pay, {"sum": "10.50"})).answer == PolicyAnswer.DENY
    assert ask(policy, propose(pay, {"sum": "lots"})).errors
    assert ask(compile_policy(EVERYTHING, [pay]), propose(pay, {"sum": "lots"})).answer == PolicyAnswer.ALLOW


def test_a_recursive_type_is_left_out() -> None:
    tree = {
        "type": "object", "properties": {"root": {"$ref": "#/$defs/Node"}, "n": {"type": "integer"}},
        "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}},
    }  # fmt: skip
    facts = ToolFacts("a.b", True, Tier.LOW, False, tree)
    assert (
        ask(compile_policy(EVERYTHING, [facts]), propose(facts, {"root": {"next": {}}, "n": 1})).answer
        == PolicyAnswer.ALLOW
    )


@pytest.mark.parametrize(
    ("value", "allowed"),
    [(4.9999, True), (5, False), (0.1 + 0.2, True), (-0.00004, None), (-3.5, True), (1e-12, True), (100000.0, False)],
)
def test_numbers_are_compared_as_decimals(value: float, allowed: bool | None) -> None:
    decision = ask(price('context.input.value.greaterThanOrEqual(decimal("5.0"))'), propose(PRICE, {"value": value}))
    assert bool(decision.errors) == (allowed is None)
    assert (decision.answer == PolicyAnswer.ALLOW) == bool(allowed)


def test_a_fraction_that_no_rule_looks_at_may_be_as_fine_as_it_likes() -> None:
    assert ask(EVERYTHING, propose(PRICE, {"value": 52.5200066, "weight": 1 / 3})).answer == PolicyAnswer.ALLOW


def test_large_identifiers_are_compared_exactly() -> None:
    scope = '(principal, action == Action::"shop.refund", resource)'
    text = f'@id("x") permit{scope} when {{ context.input.amount == {2**60} }};'
    assert ask(text, refund(2**60)).answer == PolicyAnswer.ALLOW
    assert ask(text, refund(2**60 + 1)).answer == PolicyAnswer.DENY


def test_a_write_does_not_slip_in_among_the_reads() -> None:
    """Neither a connector called `read` nor a read tool with the name of its connector makes a write a read."""
    reads = '@id("reads") permit(principal, action in Action::"read", resource);'
    sneaky = [tool("read.all"), tool("db", writes=False), tool("db.drop"), tool("read")]
    policy = compile_policy(reads, sneaky)
    for facts in sneaky:
        assert ask(policy, propose(facts, {})).answer == PolicyAnswer.DENY


# ---------------------------------------------------------------- cases and replay

CASES = """
- name: small refunds go through
  tool: shop.refund
  input: {amount: 50}
  expect: allow
- name: large ones need two
  tool: shop.refund
  input: {amount: 5000}
  as: {role: agent, id: bot}
  expect: needs_approval
  tier: high
  two_person: true
  rules: [large]
- name: nothing at night
  tool: shop.refund
  input: {amount: 50}
  at: {hour: 23}
  expect: deny
  rules: [freeze]
"""


def test_cases_pass_where_the_policy_answers_as_expected() -> None:
    results = run_cases(compile_policy(WIRE, TOOLS), CASES, TOOLS)
    assert [(result.name, result.passed) for result in results] == [
        ("small refunds go through", True),
        ("large ones need two", True),
        ("nothing at night", True),
    ]
    assert results[1].expected == "needs_approval (tier high, two people); by rule large"
    assert results[1].got == "needs_approval (tier high, two people) by large"
    assert results[1].why == "refunds over 100 need two people"


def test_cases_fail_where_it_does_not() -> None:
    results = run_cases(compile_policy(DEFAULT_POLICY, TOOLS), CASES, TOOLS)
    assert [result.passed for result in results] == [False, False, False]
    assert results[0].got == "needs_approval (tier high, two people) by high-writes"


def test_a_case_is_not_passed_by_a_mistake_in_its_input() -> None:
    case = "[{tool: shop.refund, input: {amout: 5}, expect: deny}, {tool: shop.refund, input: {}, expect: deny}]"
    assert [result.passed for result in run_cases(compile_policy(WIRE, TOOLS), case, TOOLS)] == [False, False]


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("", None, "expected a list of cases"),
        ("- [", 2, "not valid YAML"),
        ("cases: 1", 1, "expected a list of cases"),
        ("- 5", 1, "expected a case"),
        ("- tool: shop.refnd\n  expect: deny", 1, "did you mean `shop.refund`?"),
        ("- expect: deny", 1, "missing"),
        ("- tool: shop.refund", 1, "expected one of allow, deny, needs_approval"),
        ("- tool: shop.refund\n  expect: maybe", 2, "allow, deny, needs_approval"),
        ("- tool: shop.refund\n  expect: allow\n  tier: high", 2, "tier belongs to needs_approval"),
        ("- tool: shop.refund\n  expect: allow\n  as: {role: king}", 3, "viewer"),
        ("- tool: shop.refund\n  expect: allow\n  at: {hour: 24}", 3, "from 0 to 23"),
        ("- tool: shop.refund\n  expect: allow\n  at: {huor: 2}", 3, "did you mean `hour`?"),
        ("- tool: shop.refund\n  expect: allow\n  rules: [1]", 3, "a list of names"),
        ("- tool: shop.refund\n  expect: allow\n  input: 5", 3, "expected a mapping"),
    ],
)
def test_bad_cases_are_told_with_line_and_remedy(text: str, line: int | None, part: str) -> None:
    with pytest.raises(CasesInvalid) as caught:
        run_cases(compile_policy(WIRE, TOOLS), text, TOOLS)
    assert [fault for fault in caught.value.faults if fault.line == line and part in fault.message], caught.value.faults


def test_replay_shows_what_another_policy_would_have_answered() -> None:
    policy = compile_policy(WIRE, TOOLS)
    decisions = [
        ask(policy, refund(amount), when=at(hour)) for amount, hour in ((50, 12), (150, 12), (500, 12), (50, 23))
    ]
    recorded = [json.loads(json.dumps(decision.recorded())) for decision in decisions]
    assert replay(recorded, policy) == []
    changes = replay(recorded, compile_policy(WIRE.replace("100", "200"), TOOLS))
    assert [(str(change.before), str(change.after)) for change in changes] == [
        ("needs_approval (tier high, two people)", "allow")
    ]
    assert changes[0].summary == "shop.refund for operator alice in run run step pay"
    assert changes[0].as_dict()["after"]["answer"] == "allow"
    assert json.dumps(changes[0].as_dict())


def test_replay_of_a_record_that_cannot_be_read_is_a_denial_and_shown() -> None:
    good = ask(WIRE, refund()).recorded()
    bad = [{**good, "request": None}, {**good, "request": {"action": {}}}, {**good, "request": {"action": 5}}]
    changes = replay([*bad, good], compile_policy(WIRE, TOOLS))
    assert [change.after.answer for change in changes] == ["deny"] * 3
    assert all(change.decision.errors for change in changes)


def test_a_decision_can_be_replayed_from_its_record_with_large_numbers_and_nulls() -> None:
    policy = compile_policy(EVERYTHING, TOOLS)
    decision = ask(policy, refund(2**60, note=None))
    assert policy.evaluate(json.loads(json.dumps(decision.recorded()))["request"]).outcome == decision.outcome


# ---------------------------------------------------------------- for every input

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CONDITIONS = st.sampled_from(
    [
        "true",
        "context.hour >= 22",
        "context.input.amount * 4611686018427387904 > 0",
        "context.input.amount + 9223372036854775807 > 0",
        "-context.input.amount < 5",
        'context.input has note && context.input.note == "x"',
        "context.input.amount <= 100",
    ]
)
RULES = st.lists(st.tuples(st.sampled_from(["permit", "forbid"]), CONDITIONS), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(
    RULES,
    st.dictionaries(st.sampled_from(["charge", "amount", "note", "other"]), JSON),
    st.integers() | st.sampled_from([2**61, -(2**63), 2**63 - 1, 0, 1]),
    st.integers(-1, 25),
)
def test_it_never_raises_and_never_allows_after_an_error(
    rules: list[tuple[str, str]], fields: dict[str, Any], amount: int, hour: int
) -> None:
    scope = '(principal, action == Action::"shop.refund", resource)'
    text = "".join(f'@id("r{i}") {effect}{scope} when {{ {when} }};' for i, (effect, when) in enumerate(rules))
    policy = compile_policy(text, TOOLS)
    seen: list[AuthzResult] = []

    def watched(*args: Any) -> AuthzResult:
        seen.append(cedarpy.is_authorized(*args))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluator, "is_authorized", watched)
        for given in (fields, {"charge": "c", "amount": amount, **fields}, {"charge": "c", "amount": amount}):
            seen.clear()
            decision = policy.decide(propose(REFUND, given), ALICE, at(hour))
            assert decision.answer in (PolicyAnswer.ALLOW, PolicyAnswer.DENY)
            if decision.answer == PolicyAnswer.ALLOW:
                assert seen[0].allowed and not seen[0].diagnostics.errors and not decision.errors
            assert decision.reason
            assert replay([json.loads(json.dumps(decision.recorded()))], policy) == []


SCHEMAS = st.recursive(
    st.sampled_from(
        [{"type": kind} for kind in ("string", "integer", "number", "boolean", "null", "array", "object", "strange")]
        + [{}, True, 5, None, {"enum": ["a", 1]}, {"const": 1}, {"$ref": "#"}, {"$ref": "#/nowhere"}, {"type": 5}]
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(st.text(max_size=6), inner, max_size=3)},
            optional={"required": st.lists(st.text(max_size=6), max_size=2), "additionalProperties": st.booleans()},
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=8), SCHEMAS, st.booleans()), max_size=4), JSON)
def test_every_set_of_tools_has_a_schema_and_an_answer(tools: list[tuple[str, Any, bool]], fields: Any) -> None:
    facts = [ToolFacts(name, writes, Tier.LOW, False, schema) for name, schema, writes in tools]
    Schema.from_str(cedar_schema(facts))
    policy = compile_policy(DEFAULT_POLICY, facts)
    for each in facts:
        decision = policy.decide(propose(each, fields if isinstance(fields, dict) else {}), ALICE, at())
        assert decision.answer in PolicyAnswer


@settings(max_examples=200, deadline=None)
@given(st.text() | st.lists(st.sampled_from([*WIRE.split(" "), "@id", "(", ")", ";", '"', "//", "\r"])).map(" ".join))
def test_any_text_is_compiled_or_refused(text: str) -> None:
    with contextlib.suppress(PolicyInvalid):
        compile_policy(text, TOOLS)
    assert load_policy(text, TOOLS).decide(refund(), ALICE, at()).reason


# ---------------------------------------------------------------- cost


def test_what_a_decision_costs(capsys: pytest.CaptureFixture[str]) -> None:
    more = (
        f'@id("m{i}") forbid(principal, action in Action::"shop", resource) when {{ context.hour == {i} && '
        f'principal.role == "agent" }};\n'
        for i in range(16)
    )
    policy = compile_policy(WIRE + "".join(more), TOOLS)
    assert len(policy.rules) == 20
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(400):
            policy.decide(propose(REFUND, CHARGE, "charge/ch_1"), ALICE, at())
        best = min(best, (time.perf_counter() - begin) / 400)
    with capsys.disabled():
        print(f"\n{best * 1e6:.0f} µs a decision, 20 rules, with the action proposed and digested")


# ---------------------------------------------------------------- actions that need no judgment

_READS = '@id("r") permit (principal, action in Action::"read", resource);\n'


@pytest.mark.parametrize(
    ("policy", "free"),
    [
        (DEFAULT_POLICY, True),
        (EVERYTHING, True),
        (_READS, True),
        ('@id("s") permit (principal, action in [Action::"shop", Action::"mail"], resource);', True),
        ('@id("s") permit (principal, action == Action::"shop.lookup_charge", resource);', True),
        (_READS + '@id("g") permit (principal in Group::"a", action, resource);', True),
        (_READS + '@id("f") forbid (principal, action == Action::"mail.send", resource);', True),
        (_READS + '@id("f") forbid (principal, action in Action::"write", resource);', True),
        # Each of these could deny, ask for approval, or fail.
        ('@id("w") permit (principal, action in Action::"write", resource);', False),
        ('@id("g") permit (principal in Group::"a", action, resource);', False),
        ('@id("g") permit (principal == Actor::"ann", action, resource);', False),
        ('@id("e") permit (principal, action, resource == Env::"prod");', False),
        ('@id("h") permit (principal, action, resource) when { context.hour < 22 };', False),
        ('@id("h") permit (principal, action, resource) unless { context.hour >= 22 };', False),
        ('@id("q") @decision("needs_approval") @tier("low") permit (principal, action, resource);', False),
        (
            _READS + '@id("f") forbid (principal, action in Action::"shop", resource) when { context.hour >= 22 };',
            False,
        ),
        (_READS + '@id("f") forbid (principal == Actor::"bob", action, resource);', False),
        (_READS + '@id("f") forbid (principal, action in Action::"read", resource == Env::"prod");', False),
        (_READS + '@id("m") permit (principal, action, resource) when { context.hour + 1 > 2 };', False),
        (
            _READS + '@id("q") @decision("needs_approval") permit (principal in Group::"a", action, resource);',
            False,
        ),
        (_READS + '@id("u") @desicion("allow") permit (principal, action, resource);', False),
    ],
)
def test_a_read_need_not_be_judged_only_if_no_rule_could_say_anything_but_yes(policy: str, free: bool) -> None:
    loaded = load_policy(policy, [REFUND, LOOKUP, MAIL])
    assert loaded.always_allows("shop.lookup_charge") is free
    if free:
        for role, groups, hour in (("viewer", (), 3), ("agent", ("a", "b"), 23), ("admin", ("b",), 0)):
            when = Circumstances(
                hour=hour, weekday=1, workflow="w", workspace="prod", auto_approve=False, run_id="r", step="s"
            )
            decided = loaded.decide(propose(LOOKUP, {"charge": "c"}), Asker("bob", role, groups, "t"), when)
            assert decided.answer == PolicyAnswer.ALLOW


def test_what_is_not_known_or_denied_altogether_is_judged() -> None:
    assert not compile_policy(EVERYTHING, [LOOKUP]).always_allows("shop.other")
    assert not deny_everything("no").always_allows("shop.lookup_charge")
