"""Cases: what a policy is meant to answer, written next to it in YAML and checked before it is published.

- name: nobody refunds at night
  tool: shop.refund
  input: {amount: 50}             # fields that no rule looks at may be left out
  as: {role: operator}
  at: {hour: 23}
  expect: deny                    # and, if it matters: tier, two_person, rules
  rules: [freeze]
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from interlock.definition.document import Unreadable, read
from interlock.definition.fault import Faults, TooManyFaults, described, suggestion
from interlock.definition.section import Section
from interlock.errors import DefinitionInvalid
from interlock.governance.action import ProposedAction, ToolFacts, propose
from interlock.governance.decision import NOON, Answer, Asker, Circumstances, Decision
from interlock.governance.judge import Policy
from interlock.lifecycle import Tier
from interlock.wire import Role

_KEYS = ("name", "tool", "input", "target", "as", "at", "expect", "tier", "two_person", "rules")


class CasesInvalid(DefinitionInvalid):
    title, code = "The cases are not valid", "POLICY_CASES_INVALID"


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    action: ProposedAction
    asker: Asker
    when: Circumstances
    answer: Answer
    tier: Tier | None
    two_person: bool | None
    rules: tuple[str, ...] | None

    def __str__(self) -> str:
        extras = [f"tier {self.tier}"] * bool(self.tier)
        extras += [] if self.two_person is None else ["two people" if self.two_person else "one person"]
        extras += [] if self.rules is None else [f"by {', '.join(self.rules) or 'no rule'}"]
        return f"{self.answer} ({', '.join(extras)})" if extras else str(self.answer)

    def is_met_by(self, decision: Decision) -> bool:
        # What fails while it is evaluated is a denial, but not the one that was meant.
        return (
            not decision.errors
            and decision.answer == self.answer
            and self.tier in (None, decision.tier)
            and self.two_person in (None, decision.two_person)
            and (self.rules is None or set(self.rules) == set(decision.rule_ids))
        )


@dataclass(frozen=True, slots=True)
class CaseResult:
    name: str
    passed: bool
    expected: str
    got: str
    why: str


def run_cases(policy: Policy, yaml_text: str, tools: Iterable[ToolFacts], *, file: str = "cases") -> list[CaseResult]:
    """CasesInvalid with everything that is wrong in the file; a case that the policy fails is a result."""
    return [_result(case, policy) for case in read_cases(policy, yaml_text, tools, file=file)]


def _result(case: Case, policy: Policy) -> CaseResult:
    decision = policy.decide(case.action, case.asker, case.when)
    by = f" by {', '.join(decision.rule_ids)}" if decision.rule_ids else ""
    return CaseResult(case.name, case.is_met_by(decision), str(case), f"{decision.outcome}{by}", decision.reason)


def read_cases(policy: Policy, yaml_text: str, tools: Iterable[ToolFacts], *, file: str) -> list[Case]:
    faults = Faults(file)
    try:
        document = read(yaml_text, faults)
        faults.lines = document.lines
        cases = _cases(document.value, _Reader(policy, {tool.name: tool for tool in tools}, faults), faults)
    except Unreadable as stopped:
        faults.add(stopped.path, stopped.message, line=stopped.line)
    except TooManyFaults:
        pass
    if faults:
        raise CasesInvalid(faults.sorted())
    return cases


def _cases(value: Any, reader: "_Reader", faults: Faults) -> list[Case]:
    if not isinstance(value, list) or not value:
        faults.add((), f"expected a list of cases, each beginning with `- name:`, found {described(value)}")
        return []
    read = [reader.case(item, position) for position, item in enumerate(value)]
    return [case for case in read if case is not None]


class _Reader:
    def __init__(self, policy: Policy, tools: Mapping[str, ToolFacts], faults: Faults) -> None:
        self._policy, self._tools, self._faults = policy, tools, faults

    def case(self, item: Any, position: int) -> Case | None:
        if not isinstance(item, Mapping):
            self._faults.add((position,), f"expected a case such as {{tool: …, expect: deny}}, found {described(item)}")
            return None
        section = Section(item, (position,), self._faults)
        section.only(_KEYS)
        action = self._action(section)
        if not section.has("expect"):
            section.expected("expect", "one of " + ", ".join(Answer))
        answer = section.choice("expect", Answer, Answer.DENY)
        if answer != Answer.NEEDS_APPROVAL and (section.has("tier") or section.has("two_person")):
            section.fault("expect", f"tier and two_person belong to needs_approval, not to {answer}")
        asker, when = self._asker(section), self._when(section)
        if action is None:
            return None
        return Case(
            name=section.text("name", f"case {position + 1}"),
            action=action,
            asker=asker,
            when=when,
            answer=answer,
            tier=section.choice("tier", Tier, Tier.LOW) if section.has("tier") else None,
            two_person=section.flag("two_person") if section.has("two_person") else None,
            rules=self._words(section, "rules") if section.has("rules") else None,
        )

    def _action(self, section: Section) -> ProposedAction | None:
        name = section.text("tool")
        facts = self._tools.get(name)
        if facts is None:
            section.fault(
                "tool", f"no tool is called `{name}`{suggestion(name, self._tools)}" if name else "is missing"
            )
            return None
        given = section.section("input", "{amount: 50}").value
        entry = self._policy.entries.get(name)
        fields = dict(given) if entry is None else entry.input.completed(given, self._policy.looked_at)
        return propose(facts, fields, section.text("target") if section.has("target") else None)

    def _asker(self, section: Section) -> Asker:
        who = section.section("as", "{role: operator}")
        who.only(("id", "role", "groups", "tenant"))
        groups = self._words(who, "groups") if who.has("groups") else ()
        role = who.choice("role", Role, Role.OPERATOR)
        return Asker(who.text("id", "somebody"), str(role), groups, who.text("tenant", "default"))

    def _when(self, section: Section) -> Circumstances:
        at = section.section("at", "{hour: 23}")
        at.only(("hour", "weekday", "workflow", "workspace", "auto_approve", "step"))
        return Circumstances(
            hour=at.integer("hour", NOON.hour, 0, 23),
            weekday=at.integer("weekday", NOON.weekday, 1, 7),
            workflow=at.text("workflow", NOON.workflow),
            workspace=at.text("workspace", NOON.workspace),
            auto_approve=at.flag("auto_approve"),
            run_id=NOON.run_id,
            step=at.text("step", NOON.step),
        )

    def _words(self, section: Section, key: str) -> tuple[str, ...]:
        items = section.items(key, "names")
        if not all(isinstance(item, str) for item in items):
            section.expected(key, "a list of names")
        return tuple(str(item) for item in items)
