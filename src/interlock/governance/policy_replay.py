"""Replay: what would have been decided differently, had another policy been in force."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from interlock.governance.decision import Decision, Outcome
from interlock.governance.judge import Policy


@dataclass(frozen=True, slots=True)
class Change:
    summary: str
    before: Outcome
    after: Outcome
    decision: Decision  # the new one, with its reason and its rules
    record: Mapping[str, Any]  # the old one, with whatever its keeper added

    def __str__(self) -> str:
        return f"{self.summary}: {self.before} → {self.after}: {self.decision.reason}"

    def as_dict(self) -> dict[str, Any]:
        added = {key: self.record[key] for key in ("run_id", "step", "at") if key in self.record}
        return {
            **added,
            "summary": self.summary,
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
            "reason": self.decision.reason,
            "rule_ids": list(self.decision.rule_ids),
            "errors": list(self.decision.errors),
        }


def replay(recorded: Iterable[Mapping[str, Any]], policy: Policy) -> list[Change]:
    """`recorded` are decisions as `Decision.recorded` gives them. One that cannot be read is denied now."""
    changes = (_change(record, policy) for record in recorded)
    return [change for change in changes if change.before != change.after]


def _change(record: Mapping[str, Any], policy: Policy) -> Change:
    request = record.get("request")
    request = request if isinstance(request, dict) else {}
    before = Outcome(str(record.get("answer")), record.get("tier"), bool(record.get("two_person")))
    after = policy.evaluate(request)
    return Change(_summary(request), before, after.outcome, after, record)


def _summary(request: Mapping[str, Any]) -> str:
    try:
        action, asker, when = request["action"], request["asker"], request["when"]
        target = f" on {action['target']}" if action["target"] else ""
        where = f" in run {when['run_id']} step {when['step']}" if when["run_id"] else ""
        return f"{action['tool']}{target} for {asker['role']} {asker['id']}{where}"
    except (KeyError, TypeError):
        return "a record that cannot be read"
