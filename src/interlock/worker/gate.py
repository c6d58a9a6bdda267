"""The gate: what a tool does is judged by its tenant's policy, and refused, held for people, or let through.

Every write is. A read is where the policy has a rule that could say anything but yes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from interlock.definition.plan import EXPIRES_IN
from interlock.engine import grants
from interlock.engine.policies import Policies, asker_of, circumstances
from interlock.governance.action import ProposedAction
from interlock.governance.policy import Answer, Decision
from interlock.governance.quorum import Demand, in_advance
from interlock.journal import StepFold
from interlock.lifecycle import Term, Tier
from interlock.store.pool import FOREVER, Database, Row
from interlock.telemetry import log


@dataclass(frozen=True, slots=True)
class Deny:
    decision: Decision


class Again(Term):
    """Why people are asked once more about what they had said yes to."""

    ACTION = "action_digest_mismatch", "it is another action than the one that was approved"
    POLICY = "policy_version_mismatch", "the policy was changed after it was approved"
    DEMAND = "more_is_asked", "more is asked of approvers than when it was approved"
    TRIED = "already_consumed", "it was tried and did not happen, and a yes is used once"


@dataclass(frozen=True, slots=True)
class Hold:
    decision: Decision
    about: dict[str, Any]
    again: Again | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """Allowed by policy, or by people for exactly this action."""

    decision: Decision
    approval_id: UUID | None = None
    # An approval, a standing grant, or the sender of a message to an agent.
    allowed_by: str | None = None

    def grounds(self) -> dict[str, Any]:
        """As the journal has them."""
        grounds: dict[str, Any] = {"decision": self.decision.recorded()}
        return grounds | {"allowed_by": self.allowed_by} if self.allowed_by else grounds


Verdict = Deny | Hold | Pass


class Gate:
    def __init__(self, database: Database, policies: Policies) -> None:
        self._database = database
        self._policies = policies

    def lets_read(self, tenant_id: UUID, tool: str) -> bool:
        """Without asking anybody: the policy in force is at hand, and has nothing against this tool whoever asks."""
        policy = self._policies.at_hand(tenant_id)
        return policy is not None and policy.always_allows(tool)

    async def needs_no_judge(self, tenant_id: UUID, tool: str) -> bool:
        policy = await self._policies.current(tenant_id, patience=FOREVER)
        return policy.always_allows(tool)

    async def judge(self, row: Row, fold: StepFold, action: ProposedAction, now: datetime) -> Verdict:
        try:
            return await self._judge(row, fold, action, now)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            log.error("gate_failed", run_id=str(row["id"]), step=fold.step.key, exc_info=error)
            return Deny(Decision(answer=Answer.DENY, reason=f"the action could not be judged: {why}", errors=(why,)))

    async def _judge(self, row: Row, fold: StepFold, action: ProposedAction, now: datetime) -> Verdict:
        # A run waits for a lost database; only what can never be answered is denied.
        policy = await self._policies.current(row["tenant_id"], patience=FOREVER)
        decision = policy.decide(action, asker_of(row), circumstances(row, fold.step.key, now))
        match decision.answer:
            case Answer.ALLOW:
                return Pass(decision)
            case Answer.NEEDS_APPROVAL if fold.allowed_digest is None:
                return await self._granted(row, action, decision) or Hold(decision, _about(decision, action))
            case Answer.NEEDS_APPROVAL if (again := _why_again(fold, action, decision)) is not None:
                about = _about(decision, action)
                about["reason"] = f"{decision.reason}; asked again: {again.doc}"
                return await self._granted(row, action, decision) or Hold(decision, about, again)
            case Answer.NEEDS_APPROVAL:
                assert fold.approval_id is not None
                return Pass(decision, UUID(fold.approval_id), f"approval:{fold.approval_id}")
            case _:
                return Deny(decision)

    async def _granted(self, row: Row, action: ProposedAction, decision: Decision) -> Pass | None:
        """Somebody said yes in advance to exactly this kind of action."""
        tier = decision.tier or Tier.HIGH
        if not in_advance(tier, two_person=decision.two_person):
            return None
        asks_more = bool(decision.approvers) or decision.reason_required
        if not asks_more and await grants.lets_pass(self._database, row):
            return Pass(decision, allowed_by=f"auto_approve:{row['requested_by']}")
        grant = await grants.matching(
            self._database, row, action.tool, action.plain_fields, tier,
            approvers=decision.approvers, reason_required=decision.reason_required,
        )  # fmt: skip
        return Pass(decision, allowed_by=f"grant:{grant['id']}") if grant else None


def _why_again(fold: StepFold, action: ProposedAction, decision: Decision) -> Again | None:
    """None: people said yes to exactly this, under exactly this policy, and no less was asked of them than is now.

    Anything else is a new question. More is asked under the same policy if the tool's risk was raised, or by the hour.
    """
    if fold.allowed_digest == fold.receipt_id:
        return Again.TRIED  # what people were asked last, and answered, is what became of it
    if fold.allowed_digest != action.digest:
        return Again.ACTION
    if fold.allowed_policy != decision.policy_digest:
        return Again.POLICY
    given = fold.allowed_demand
    covers = given is not None and _demand(**given).covers(
        _demand(decision.tier or Tier.HIGH, decision.two_person, decision.approvers, decision.reason_required)
    )
    return None if covers else Again.DEMAND


def _demand(tier: str, two_person: bool, approvers: Iterable[str], reason_required: bool) -> Demand:
    return Demand(Tier(tier), two_person, frozenset(approvers), reason_required)


def _about(decision: Decision, action: ProposedAction) -> dict[str, Any]:
    tier = decision.tier or Tier.HIGH
    return {
        "tier": tier, "two_person": decision.two_person, "expires_in": decision.expires_in or EXPIRES_IN[tier],
        "summary": f"{action.tool} on {action.target}" if action.target else action.tool, "action": action.as_dict(),
        "digest": action.digest, "rule_ids": decision.rule_ids, "reason": decision.reason,
        "reason_required": decision.reason_required, "policy_digest": decision.policy_digest,
        "approvers": decision.approvers, "escalate_to": decision.escalate_to, "escalate_after": decision.escalate_after,
    }  # fmt: skip
