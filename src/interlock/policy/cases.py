"""Cases: expected answers of a policy, written next to it in YAML and checked before publication.

- name: nobody refunds at night
  tool: shop.refund
  input: {amount: 50}             # fields that no rule looks at may be left out
  as: {role: operator}
  at: {hour: 23}
  expect: deny                    # and, if it matters: rules; for needs_approval also tier, two_person,
                                  # approvers, reason_required, expires_in, escalate_to, escalate_after
  rules: [freeze]
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from interlock.definition.diagnostics import Faults, TooManyFaults
from interlock.definition.document import InvalidDocument, read
from interlock.definition.mapping_reader import MappingReader
from interlock.errors import DefinitionInvalid
from interlock.lifecycle import Tier
from interlock.policy.action import ProposedAction, ToolFacts, propose
from interlock.policy.decision import (
    NOON,
    OUTCOME_FIELDS,
    ApprovalDemand,
    Asker,
    Circumstances,
    Decision,
    PolicyAnswer,
)
from interlock.policy.evaluator import CompiledPolicy
from interlock.wire import Role
from interlock.wire.validation_errors import described, suggestion

# What a case may expect of an approval: the fields of an outcome except its answer.
_ASKED = OUTCOME_FIELDS[1:]
_KEYS = ("name", "tool", "input", "target", "as", "at", "expect", *_ASKED, "rules")


class CasesInvalid(DefinitionInvalid):
    title, code = "The cases are not valid", "POLICY_CASES_INVALID"


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    action: ProposedAction
    asker: Asker
    when: Circumstances
    answer: PolicyAnswer
    # Fields of the outcome that the case names, with the expected value; the others may have any value.
    asked: Mapping[str, Any]
    rules: tuple[str, ...] | None

    def __str__(self) -> str:
        expected = str(ApprovalDemand(self.answer, **self.asked))
        # An outcome omits what is not asked for, but the case states it explicitly.
        absent = [f"no {name}" for name, value in self.asked.items() if not value]
        by = [] if self.rules is None else [f"by rule {', '.join(self.rules)}" if self.rules else "by no rule"]
        return "; ".join([expected, *absent, *by])

    def is_met_by(self, decision: Decision) -> bool:
        # A failed evaluation is a denial, but not the expected one.
        return (
            not decision.errors
            and decision.answer == self.answer
            and all(_same(value, getattr(decision, name)) for name, value in self.asked.items())
            and (self.rules is None or set(self.rules) == set(decision.rule_ids))
        )


def _same(expected: Any, found: Any) -> bool:
    """Compare values. Groups are a set: their order does not matter."""
    return set(expected) == set(found) if isinstance(expected, tuple) else bool(expected == found)


@dataclass(frozen=True, slots=True)
class CaseResult:
    name: str
    passed: bool
    expected: str
    got: str
    why: str


def run_cases(
    policy: CompiledPolicy, yaml_text: str, tools: Iterable[ToolFacts], *, file: str = "cases"
) -> list[CaseResult]:
    """Return a result for each case. Raise CasesInvalid with every mistake in the file."""
    return [_result(case, policy) for case in read_cases(policy, yaml_text, tools, file=file)]


def _result(case: Case, policy: CompiledPolicy) -> CaseResult:
    decision = policy.decide(case.action, case.asker, case.when)
    by = f" by {', '.join(decision.rule_ids)}" if decision.rule_ids else ""
    return CaseResult(case.name, case.is_met_by(decision), str(case), f"{decision.outcome}{by}", decision.reason)


def read_cases(policy: CompiledPolicy, yaml_text: str, tools: Iterable[ToolFacts], *, file: str) -> list[Case]:
    faults = Faults(file)
    try:
        document = read(yaml_text, faults)
        faults.lines = document.lines
        cases = _cases(document.value, _CaseReader(policy, {tool.name: tool for tool in tools}, faults), faults)
    except InvalidDocument as stopped:
        faults.add(stopped.path, stopped.message, line=stopped.line)
    except TooManyFaults:
        pass
    if faults:
        raise CasesInvalid(faults.sorted())
    return cases


def _cases(value: Any, reader: "_CaseReader", faults: Faults) -> list[Case]:
    if not isinstance(value, list) or not value:
        faults.add((), f"expected a list of cases, each beginning with `- name:`, found {described(value)}")
        return []
    read = [reader.case(item, position) for position, item in enumerate(value)]
    return [case for case in read if case is not None]


class _CaseReader:
    def __init__(self, policy: CompiledPolicy, tools: Mapping[str, ToolFacts], faults: Faults) -> None:
        self._policy, self._tools, self._faults = policy, tools, faults
        self._asked: Mapping[str, Callable[[MappingReader, str], Any]] = {
            "tier": lambda section, key: section.choice(key, Tier, Tier.LOW),
            "two_person": MappingReader.flag,
            "approvers": self._words,
            "reason_required": MappingReader.flag,
            "expires_in": lambda section, key: section.duration(key, 0),
            "escalate_to": self._words,
            "escalate_after": lambda section, key: section.duration(key, 0),
        }

    def case(self, item: Any, position: int) -> Case | None:
        if not isinstance(item, Mapping):
            self._faults.add((position,), f"expected a case such as {{tool: …, expect: deny}}, found {described(item)}")
            return None
        section = MappingReader(item, (position,), self._faults)
        section.only(_KEYS)
        action = self._action(section)
        if not section.has("expect"):
            section.expected("expect", "one of " + ", ".join(PolicyAnswer))
        answer = section.choice("expect", PolicyAnswer, PolicyAnswer.DENY)
        if answer != PolicyAnswer.NEEDS_APPROVAL and (named := [name for name in _ASKED if section.has(name)]):
            section.fault("expect", f"{named[0]} belongs to needs_approval, not to {answer}")
        asker, when = self._asker(section), self._when(section)
        if action is None:
            return None
        return Case(
            name=section.text("name", f"case {position + 1}"),
            action=action,
            asker=asker,
            when=when,
            answer=answer,
            asked={name: read(section, name) for name, read in self._asked.items() if section.has(name)},
            rules=self._words(section, "rules") if section.has("rules") else None,
        )

    def _action(self, section: MappingReader) -> ProposedAction | None:
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

    def _asker(self, section: MappingReader) -> Asker:
        who = section.section("as", "{role: operator}")
        who.only(("id", "role", "groups", "tenant"))
        groups = self._words(who, "groups") if who.has("groups") else ()
        role = who.choice("role", Role, Role.OPERATOR)
        return Asker(who.text("id", "somebody"), str(role), groups, who.text("tenant", "default"))

    def _when(self, section: MappingReader) -> Circumstances:
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

    def _words(self, section: MappingReader, key: str) -> tuple[str, ...]:
        items = section.items(key, "names")
        if not all(isinstance(item, str) for item in items):
            section.expected(key, "a list of names")
        return tuple(str(item) for item in items)
