"""The gate: judges each tool call by the tenant's policy, which denies it, holds it for approval, or allows it.

Every write is judged. A read is judged only if a rule of the policy could deny or hold it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from interlock.definition.plan import EXPIRES_IN
from interlock.engine.approvals import grants
from interlock.engine.policies import Policies, asker_of, circumstances
from interlock.ids import ApprovalId, TenantId
from interlock.journal import StepSnapshot
from interlock.lifecycle import Term, Tier
from interlock.policy.action import ProposedAction
from interlock.policy.policy import Decision, PolicyAnswer
from interlock.policy.quorum import Demand, in_advance
from interlock.store.pool import NO_TIMEOUT, Database
from interlock.store.records import AnyRun
from interlock.telemetry import log


@dataclass(frozen=True, slots=True)
class Deny:
    decision: Decision


class ReapprovalReason(Term):
    """Why people must approve again an action that they had approved."""

    ACTION = "action_digest_mismatch", "it is another action than the one that was approved"
    POLICY = "policy_version_mismatch", "the policy was changed after it was approved"
    DEMAND = "more_is_asked", "more is asked of approvers than when it was approved"
    TRIED = "already_consumed", "it was tried and did not happen, and a yes is used once"


@dataclass(frozen=True, slots=True)
class RequireApproval:
    decision: Decision
    about: dict[str, Any]
    again: ReapprovalReason | None = None


@dataclass(frozen=True, slots=True)
class Allow:
    """Allowed by policy, or by people for exactly this action."""

    decision: Decision
    approval_id: ApprovalId | None = None
    # An approval, a grant, or the sender of a message to an agent.
    allowed_by: str | None = None

    def grounds(self) -> dict[str, Any]:
        """Return the decision and its source as the journal stores them."""
        grounds: dict[str, Any] = {"decision": self.decision.recorded()}
        return grounds | {"allowed_by": self.allowed_by} if self.allowed_by else grounds


Verdict = Deny | RequireApproval | Allow


class PolicyGate:
    def __init__(self, database: Database, policies: Policies) -> None:
        self._database = database
        self._policies = policies

    def lets_read(self, tenant_id: TenantId, tool: str) -> bool:
        """Return True if the cached policy allows this tool for every caller, without any I/O."""
        policy = self._policies.at_hand(tenant_id)
        return policy is not None and policy.always_allows(tool)

    async def needs_no_judge(self, tenant_id: TenantId, tool: str) -> bool:
        policy = await self._policies.current(tenant_id, patience=NO_TIMEOUT)
        return policy.always_allows(tool)

    async def judge(self, run: AnyRun, fold: StepSnapshot, action: ProposedAction, now: datetime) -> Verdict:
        try:
            return await self._judge(run, fold, action, now)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            log.error("gate_failed", run_id=str(run.id), step=fold.step.key, exc_info=error)
            return Deny(
                Decision(answer=PolicyAnswer.DENY, reason=f"the action could not be judged: {why}", errors=(why,))
            )

    async def _judge(self, run: AnyRun, fold: StepSnapshot, action: ProposedAction, now: datetime) -> Verdict:
        # The run waits while the database is unavailable; only a question that can never be answered is denied.
        policy = await self._policies.current(run.tenant_id, patience=NO_TIMEOUT)
        asker, when = asker_of(run), circumstances(run, fold.step.key, now)
        decision = await self._policies.decide(run.tenant_id, policy, action, asker, when)
        match decision.answer:
            case PolicyAnswer.ALLOW:
                return Allow(decision)
            case PolicyAnswer.NEEDS_APPROVAL if fold.allowed_digest is None:
                return await self._granted(run, action, decision) or RequireApproval(decision, _about(decision, action))
            case PolicyAnswer.NEEDS_APPROVAL if (again := _reapproval_reason(fold, action, decision)) is not None:
                about = _about(decision, action)
                about["reason"] = f"{decision.reason}; asked again: {again.doc}"
                return await self._granted(run, action, decision) or RequireApproval(decision, about, again)
            case PolicyAnswer.NEEDS_APPROVAL:
                assert fold.approval_id is not None
                return Allow(decision, ApprovalId(UUID(fold.approval_id)), f"approval:{fold.approval_id}")
            case _:
                return Deny(decision)

    async def _granted(self, run: AnyRun, action: ProposedAction, decision: Decision) -> Allow | None:
        """Return Allow if a grant or a message's sender approved this kind of call in advance."""
        tier = decision.tier or Tier.HIGH
        if not in_advance(tier, two_person=decision.two_person):
            return None
        asks_more = bool(decision.approvers) or decision.reason_required
        if not asks_more and await grants.lets_pass(self._database, run):
            return Allow(decision, allowed_by=f"auto_approve:{run.requested_by}")
        grant = await grants.matching(
            self._database, run, action.tool, action.plain_fields, tier,
            approvers=decision.approvers, reason_required=decision.reason_required,
        )  # fmt: skip
        return Allow(decision, allowed_by=f"grant:{grant['id']}") if grant else None


def _reapproval_reason(fold: StepSnapshot, action: ProposedAction, decision: Decision) -> ReapprovalReason | None:
    """Return None if people approved exactly this action under this policy, and the policy demands no more now.

    Otherwise return why a new approval is needed. The same policy can demand more if the tool's risk was raised, or at
    another time of day.
    """
    if fold.allowed_digest == fold.receipt_id:
        return ReapprovalReason.TRIED  # the last question, already answered, was about the outcome of this very receipt
    if fold.allowed_digest != action.digest:
        return ReapprovalReason.ACTION
    if fold.allowed_policy != decision.policy_digest:
        return ReapprovalReason.POLICY
    given = fold.allowed_demand
    covers = given is not None and _demand(**given).covers(
        _demand(decision.tier or Tier.HIGH, decision.two_person, decision.approvers, decision.reason_required)
    )
    return None if covers else ReapprovalReason.DEMAND


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
