"""The evaluator: a compiled policy that decides on one action at a time. Any doubt is a denial.

Cedar itself answers permit or forbid. The third answer comes from the permits that decided, of which the strictest
wins. Cedar skips a forbid whose evaluation fails and answers Allow, so any evaluation error is a denial here.
"""

import re
from collections.abc import Iterable
from typing import Any

import orjson
from cedarpy import Decision as CedarDecision
from cedarpy import Entities, is_authorized, pst

from interlock.lifecycle import Tier
from interlock.policy.action import ProposedAction, propose
from interlock.policy.cedar_types import UnsupportedType
from interlock.policy.decision import NOON, Asker, Circumstances, Decision, PolicyAnswer
from interlock.policy.rules import PASSING_ON, Reading, Rule, attributes, is_for_all, may_apply
from interlock.policy.schema import SchemaEntry

_TIERS = list(Tier)
_MOST_ASKERS = 1024
_PATTERN = re.compile(r'\blike\s*"((?:\\.|[^"\\])*)"')
# Compared characters: a few hundred take a microsecond.
_MOST_AT_ONCE = 3_000_000


class CompiledPolicy:
    """A compiled policy. `decide` and `evaluate` always answer: an internal error is a denial that names the error."""

    def __init__(
        self, reading: Reading, *, digest: str | None, refusal: str | None = None, text: str | None = None
    ) -> None:
        self.digest = digest
        self.refusal = refusal
        self.text = text
        self.rules: tuple[Rule, ...] = tuple(reading.rules.values())
        self.looked_at = reading.looked_at
        self.entries = reading.vocabulary.entries
        self._refused = reading.vocabulary.refused
        self._rules, self._nodes = reading.rules, reading.nodes
        self._free: dict[str, bool] = {}
        self._policy_set, self._schema = reading.policy_set, reading.schema
        self._actors: dict[tuple[Any, ...], Entities] = {}
        # Each rule can examine the whole input, and a pattern compares each of its characters with each character of
        # the input.
        self._looks = len(self.rules) + sum(len(found) for found in _PATTERN.findall(text or ""))

    def takes_long(self, action: ProposedAction) -> bool:
        """Return True if deciding on the action could block an event loop for more than some milliseconds."""
        try:
            size = len(orjson.dumps(action.fields)) + len(action.target or "")
        except (TypeError, ValueError):
            return False  # it cannot be described, so it is denied before it is examined
        return self._looks * size > _MOST_AT_ONCE

    def always_allows(self, tool: str) -> bool:
        """Return True if every caller may use the tool with any input, so that nothing needs to be judged.

        Cached for each tool.
        """
        free = self._free.get(tool)
        if free is None:
            free = self._free[tool] = self._has_nothing_against(tool)
        return free

    def _has_nothing_against(self, tool: str) -> bool:
        """Return True if a permit for all exists, and no rule could forbid, ask, or fail during evaluation."""
        entry = self.entries.get(tool)
        if self.refusal is not None or entry is None:
            return False
        nodes = {key: node for key, node in self._nodes.items() if may_apply(node, tool, entry.groups)}
        plain = [key for key, node in nodes.items() if not node.clauses and _only_permits(self._rules.get(key))]
        return len(plain) == len(nodes) and any(is_for_all(node) for node in nodes.values())

    def outlook(self, tool: str) -> tuple[Decision, frozenset[str]] | None:
        """Return the decision for an operator at noon with ordinary input, and the attributes that it also depends on.

        This is a summary for people. Return None for an unknown tool.
        """
        entry = self.entries.get(tool)
        if self.refusal is not None or entry is None:
            return None
        rules = [node for node in self._nodes.values() if may_apply(node, tool, entry.groups)]
        action = propose(entry.facts, entry.input.completed({}, ()))
        looked_at = frozenset(attributes(rules)) - {"risk"}
        if not all(isinstance(node.principal, pst.ScopeAny) for node in rules):
            looked_at |= {"principal"}
        return self.decide(action, Asker("somebody", "operator"), NOON), looked_at

    def decide(self, action: ProposedAction, asker: Asker, when: Circumstances) -> Decision:
        try:
            request = {
                "action": {**action.as_dict(), "risk": str(action.risk), "writes": action.writes},
                "asker": {"id": asker.id, "role": asker.role, "groups": list(asker.groups), "tenant": asker.tenant},
                "when": _when(when),
            }
        except PASSING_ON:
            raise
        except BaseException as error:
            return self._deny({}, f"the action could not be described: {error}", errors=(_line(error),))
        entry = self.entries.get(action.tool)
        if entry is not None and (entry.facts.writes, entry.facts.risk) != (action.writes, action.risk):
            return self._deny(request, f"{action.tool} has changed since the policy was compiled; compile it again")
        return self.evaluate(request)

    def evaluate(self, request: dict[str, Any]) -> Decision:
        """Decide on a request as `Decision.request` stores it."""
        try:
            return self._judge(request)
        except PASSING_ON:
            raise
        except UnsupportedType as unfit:
            return self._deny(request, f"no policy can judge this: {unfit}", errors=(str(unfit),))
        except BaseException as error:  # a panic in Cedar is not an Exception
            return self._deny(request, f"the policy could not be evaluated: {_line(error)}", errors=(_line(error),))

    def _judge(self, request: dict[str, Any]) -> Decision:
        if self.refusal is not None:
            return self._deny(request, self.refusal)
        tool = request["action"]["tool"]
        entry = self.entries.get(tool)
        if entry is None:
            unknown = f"no tool {tool} is known here; install it, or correct its name"
            return self._deny(request, self._refused.get(tool, unknown))
        assert self._policy_set is not None and self._schema is not None
        asker = request["asker"]
        result = is_authorized(
            {
                "principal": {"type": "Actor", "id": asker["id"]},
                "action": {"type": "Action", "id": tool},
                "resource": {"type": "Env", "id": request["when"]["workspace"]},
                "context": orjson.dumps(_context(request, entry)).decode(),
            },
            self._policy_set,
            self._actor(asker),
            self._schema,
        )
        errors = tuple(self._named(error) for error in result.diagnostics.errors)
        if errors:
            return self._deny(request, _failed(result.decision, "; ".join(errors)), errors=errors)
        reasons = frozenset(result.diagnostics.reasons)
        decided = [rule for key, rule in self._rules.items() if key in reasons]
        if result.decision is not CedarDecision.Allow:
            return self._forbidden(request, decided, result.decision)
        if not decided or len(decided) != len(reasons) or not all(rule.permits for rule in decided):
            return self._deny(request, "Cedar allowed it by rules that this policy does not have")
        return self._permitted(request, decided)

    def _forbidden(self, request: dict[str, Any], forbids: list[Rule], decision: CedarDecision) -> Decision:
        if decision is not CedarDecision.Deny:
            return self._deny(request, "Cedar came to no decision", errors=("no decision",))
        if forbids:
            named = "; ".join(f"{rule.id}: {rule.reason}" if rule.reason else rule.id for rule in forbids)
            return self._deny(request, f"forbidden by {named}", forbids)
        asker = request["asker"]
        why = f"no rule permits {request['action']['tool']} for {asker['role']} {asker['id']} with this input"
        return self._deny(request, why)

    def _permitted(self, request: dict[str, Any], permits: list[Rule]) -> Decision:
        asking = [rule for rule in permits if rule.asks]
        if not asking:
            return self._answer(PolicyAnswer.ALLOW, request, permits, _why(permits) or f"permitted by {_ids(permits)}")
        approvers = _common([rule for rule in asking if rule.approvers])
        if approvers is None:
            why = f"nobody could approve it: {_ids(asking)} name different approvers; let them name a common group"
            return self._deny(request, why, asking)
        risk = Tier(request["action"]["risk"])
        escalate_to, escalate_after = _escalation(asking)
        return self._answer(
            PolicyAnswer.NEEDS_APPROVAL,
            request,
            permits,
            _why(asking) or f"{_ids(asking)} asks for approval",
            tier=max((rule.tier or risk for rule in asking), key=_TIERS.index),
            two_person=any(rule.two_person for rule in asking),
            approvers=approvers,
            reason_required=any(rule.reason_required for rule in asking),
            expires_in=_least(rule.expires_in for rule in asking),
            escalate_to=escalate_to,
            escalate_after=escalate_after,
        )

    def _deny(
        self, request: dict[str, Any], reason: str, rules: Iterable[Rule] = (), errors: tuple[str, ...] = ()
    ) -> Decision:
        return self._answer(PolicyAnswer.DENY, request, rules, reason, errors=errors)

    def _answer(
        self, answer: PolicyAnswer, request: dict[str, Any], rules: Iterable[Rule], reason: str, **more: Any
    ) -> Decision:
        rule_ids = tuple(rule.id for rule in rules)
        return Decision(
            answer=answer, reason=reason, rule_ids=rule_ids, policy_digest=self.digest, request=request, **more
        )

    def _actor(self, asker: dict[str, Any]) -> Entities:
        key = (asker["id"], asker["role"], asker["tenant"], *asker["groups"])
        actor = self._actors.get(key)
        if actor is None:
            if len(self._actors) >= _MOST_ASKERS:
                self._actors.clear()
            # Only with the schema does the handle know the groups of actions. Without it `action in Action::"shop"` is
            # false for every tool, and a forbid on a connector would silently not apply.
            actor = self._actors[key] = Entities.from_json_str(_entity(asker), self._schema)
        return actor

    def _named(self, error: str) -> str:
        """Replace Cedar's numbers of rules by their names."""
        return re.sub(
            r"`(policy\d+)`", lambda key: f"`{self._rules[key[1]].id}`" if key[1] in self._rules else key[0], error
        )


def _only_permits(rule: Rule | None) -> bool:
    return rule is not None and rule.permits and not rule.asks


def _when(when: Circumstances) -> dict[str, Any]:
    return {
        "hour": when.hour,
        "weekday": when.weekday,
        "workflow": when.workflow,
        "workspace": when.workspace,
        "auto_approve": when.auto_approve,
        "run_id": when.run_id,
        "step": when.step,
    }


def _context(request: dict[str, Any], entry: SchemaEntry) -> dict[str, Any]:
    action, when = request["action"], request["when"]
    if not 0 <= when["hour"] <= 23 or not 1 <= when["weekday"] <= 7:
        raise UnsupportedType(f"hour {when['hour']} is not 0 to 23, or weekday {when['weekday']} not 1 (Monday) to 7")
    context = {
        "input": entry.input.fit(action["fields"], "input"),
        "risk": action["risk"],
        "hour": when["hour"],
        "weekday": when["weekday"],
        "workflow": when["workflow"],
        "step": when["step"],
        "auto_approve": when["auto_approve"],
        # Names, never values. Decisions recorded before secrets were part of requests have none.
        "secrets": sorted({name for names in action.get("secrets", {}).values() for name in names}),
    }
    return context if action["target"] is None else {**context, "target": action["target"]}


def _entity(asker: dict[str, Any]) -> str:
    actor = {
        "uid": {"type": "Actor", "id": asker["id"]},
        "attrs": {"role": asker["role"], "tenant": asker["tenant"]},
        "parents": [{"type": "Group", "id": group} for group in asker["groups"]],
    }
    return orjson.dumps([actor]).decode()


def _failed(decision: CedarDecision, errors: str) -> str:
    if decision is CedarDecision.NoDecision:
        return f"the request is not one that this policy can judge: {errors}"
    return f"a rule failed while it was evaluated, so nothing is allowed until it is fixed: {errors}"


def _common(rules: list[Rule]) -> tuple[str, ...] | None:
    """Return the groups that satisfy every rule with approvers; None if these rules share no group."""
    if not rules:
        return ()
    shared = set.intersection(*(set(rule.approvers) for rule in rules))
    return tuple(group for group in rules[0].approvers if group in shared) or None


def _escalation(rules: list[Rule]) -> tuple[tuple[str, ...], float | None]:
    """Return the groups that may decide after a while, if every rule that names approvers allows them."""
    naming = [{*rule.approvers, *rule.escalate_to} for rule in rules if rule.approvers]
    wanted = dict.fromkeys(group for rule in rules for group in rule.escalate_to)
    groups = tuple(group for group in wanted if all(group in named for named in naming))
    times = [rule.escalate_after for rule in rules if rule.escalate_after is not None]
    return groups, max(times, default=None) if groups else None


def _least(times: Iterable[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)


def _why(rules: list[Rule]) -> str:
    return "; ".join(dict.fromkeys(rule.reason for rule in rules if rule.reason))


def _ids(rules: list[Rule]) -> str:
    return ", ".join(rule.id for rule in rules)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
