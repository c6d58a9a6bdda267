"""Replay: which recorded decisions another policy would have decided differently."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from interlock.policy.decision import ApprovalDemand, Decision
from interlock.policy.evaluator import CompiledPolicy


@dataclass(frozen=True, slots=True)
class DecisionChange:
    summary: str
    before: ApprovalDemand
    after: ApprovalDemand
    decision: Decision  # the new one, with its reason and its rules
    record: Mapping[str, Any]  # the old one, with the fields that its store added

    def __str__(self) -> str:
        return f"{self.summary}: {self.before} → {self.after}: {self.decision.reason}"

    @property
    def passes_more(self) -> bool:
        return self.after.passes_more_than(self.before)

    def as_dict(self) -> dict[str, Any]:
        added = {key: self.record[key] for key in ("run_id", "step", "at") if key in self.record}
        return {
            **added,
            "summary": self.summary,
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
            "passes_more": self.passes_more,
            "reason": self.decision.reason,
            "rule_ids": list(self.decision.rule_ids),
            "errors": list(self.decision.errors),
        }


def replay(recorded: Iterable[Mapping[str, Any]], policy: CompiledPolicy) -> list[DecisionChange]:
    """Return the decisions that differ under `policy`.

    `recorded` are decisions as `Decision.recorded` returns them. A record that cannot be read is now denied.
    """
    changes = (_change(record, policy) for record in recorded)
    return [change for change in changes if change.before != change.after]


def _change(record: Mapping[str, Any], policy: CompiledPolicy) -> DecisionChange:
    request = record.get("request")
    request = request if isinstance(request, dict) else {}
    before = ApprovalDemand.of_record(record)
    after = policy.evaluate(request)
    return DecisionChange(summary_of(request), before, after.outcome, after, record)


def summary_of(request: Mapping[str, Any]) -> str:
    try:
        action, asker, when = request["action"], request["asker"], request["when"]
        target = f" on {action['target']}" if action["target"] else ""
        where = f" in run {when['run_id']} step {when['step']}" if when["run_id"] else ""
        return f"{action['tool']}{target} for {asker['role']} {asker['id']}{where}"
    except (KeyError, TypeError):
        return "a record that cannot be read"
