"""Admission of steps: resolve the call, judge it, and for a write declare and save its intent."""

from collections.abc import Callable
from functools import partial
from typing import Any

from interlock.agents import model_call
from interlock.definition.expression import Scope
from interlock.definition.plan import StepKind
from interlock.engine.expression_answers import with_answers
from interlock.engine.runs.child_runs import Child
from interlock.engine.writing.change import OpenApproval, StartChild
from interlock.errors import Conflict, NotFound
from interlock.ids import RunId, uuid7
from interlock.journal import ApprovalKind, StepSnapshot, request_approval
from interlock.lifecycle import RunReason, StepEvent, StepState
from interlock.policy.action import ProposedAction
from interlock.worker.gate import Allow, Deny, RequireApproval
from interlock.worker.leased_run import LeasedRun
from interlock.worker.outcome import Failed, describe
from interlock.worker.receipts import declare_intent, effect_of, over_cap
from interlock.worker.step_recorder import StepRecorder
from interlock.worker.tool_call import PreparedCall, prepare, prepare_as, propose_read


class Admission:
    """Decides which steps may be executed. `hear` receives the text of the run's models while they produce it."""

    __slots__ = ("_hear", "_run", "_settler")

    def __init__(self, run: LeasedRun, settler: StepRecorder, hear: Callable[[StepSnapshot, str], None]) -> None:
        self._run = run
        self._settler = settler
        self._hear = hear

    async def ready(self, folds: list[StepSnapshot]) -> list[PreparedCall]:
        """Return the calls that may be executed now. Settle, hold or park every other step."""
        calls = []
        for fold in folds:
            if fold.step.kind is StepKind.FLOW:
                await self._start_child(fold)
                continue
            call = await self.prepare(fold)
            if isinstance(call, Failed):
                self._settler.begin(fold)
                self._settler.settle_failure(fold, call)
            elif fold.step.kind is StepKind.MODEL:
                calls.append(call)  # the model call itself is not judged; each tool call it asks for is
            elif call.action is None:
                gate = self._run.worker.gate
                if gate.lets_read(self._run.lease.tenant_id, call.tool.name) or await self._may_read(call):
                    self._declare_read(call)
                    calls.append(call)
            elif await self._may_write(call):
                calls.append(call)
        return calls

    async def attempt(self, calls: list[PreparedCall]) -> list[PreparedCall]:
        """Save the pending entries and intents, and return the calls that still have to be executed.

        If an effect already happened, its step is settled with the stored answer.
        """
        answer = await self._run.save()
        remaining = []
        for call in calls:
            prior = answer.receipts.get(call.receipt_id) if call.receipt_id else None
            if prior is None:
                remaining.append(call)
            else:
                self._settler.settle_from(call, prior)
        return remaining

    async def prepare(self, fold: StepSnapshot) -> PreparedCall | Failed:
        scope = self._run.journal.scope_of(fold)
        return await with_answers(self._run.lease.tenant_id, partial(self._prepare, fold, scope))

    def _prepare(self, fold: StepSnapshot, scope: Scope) -> PreparedCall | Failed:
        run, shop = self._run, self._run.worker.shop
        if fold.step.kind is StepKind.MODEL:
            tool = model_call(run.worker.database, shop.tools, run.row, run.journal, partial(self._hear, fold))
            call = prepare_as(tool, shop, fold, scope, run.origin)
        else:
            call = prepare(shop, fold, scope, run.origin, partial(effect_of, run, fold))
        if isinstance(call, PreparedCall):
            call.context.fencing_token = run.lease.token
            call.context._traceparent = run.traceparent
        return call

    async def _start_child(self, fold: StepSnapshot) -> None:
        """Create the child run in the same write as the entry that parks the step until the child ends."""
        run, step = self._run, fold.step
        assert step.workflow is not None
        try:
            version, plan = await run.worker.plans.current(run.lease.tenant_id, step.workflow, step.version)
            given = await with_answers(run.lease.tenant_id, partial(fold.input, run.journal.scope))
        except (NotFound, Conflict, ValueError) as error:
            self._settler.begin(fold)
            self._settler.fail(fold, describe(error), RunReason.TERMINAL_ERROR)
            return
        child = Child(
            RunId(uuid7()), run.row, step.key, step.workflow, version, given, plan.timeout,
            plan.max_concurrency is not None, run.traceparent,
            run.journal.restored if run.journal.may_have_done(fold) else None,
        )  # fmt: skip
        data = {"child": str(child.id), "workflow": step.workflow, "version": version}
        run.journal.move_step(fold, StepEvent.PARK, actor=run.actor, data=data)
        run.effects.append(StartChild(child))

    # ------------------------------------------------------------ the gate

    async def _may_write(self, call: PreparedCall) -> bool:
        fold = call.fold
        if fold.status == StepState.RUNNING and fold.receipt_id is not None:
            return True  # reclaimed after a crash: it was judged before its intent was declared
        if fold.status == StepState.RUNNING:
            # The step started when its tool only read, but the tool now writes. Retry it so that it passes the gate as
            # a write.
            data = {"next_run_at": self._run.now()}
            self._run.journal.move_step(fold, StepEvent.RETRY, actor=self._run.actor, data=data)
            return False
        assert call.action is not None
        if (over := over_cap(self._run, fold)) is not None:
            self._settler.begin(fold)
            self._settler.fail(fold, over, RunReason.CAP_EXCEEDED)
            return False
        passed = await self._judged(fold, call.action)
        if passed is not None:
            call.may_have_been_done = not call.tool.idempotent and self._run.journal.may_have_done(fold)
            declare_intent(self._run, call, passed)
        return passed is not None

    def _declare_read(self, call: PreparedCall) -> None:
        """Write the start entry of a read that must not be repeated.

        After a crash the entry shows that the read may have run. Other reads get their entry when they end, or when
        they take long.
        """
        if not call.tool.idempotent and call.fold.status == StepState.PENDING:
            self._run.journal.move_step(
                call.fold, StepEvent.CLAIM, actor=self._run.actor, data={"idempotent": False, **(call.grounds or {})}
            )

    async def _may_read(self, call: PreparedCall) -> bool:
        """Judge the read again at each attempt.

        A read has no intent; the decision that allowed it is stored with its end.
        """
        run = self._run
        if await run.worker.gate.needs_no_judge(run.lease.tenant_id, call.tool.name):
            return True
        action = propose_read(run.worker.shop, call)
        if isinstance(action, Failed):
            self._settler.begin(call.fold)
            self._settler.settle_failure(call.fold, action)
            return False
        passed = await self._judged(call.fold, action)
        if passed is not None:
            call.grounds = passed.grounds()
        return passed is not None

    async def _judged(self, fold: StepSnapshot, action: ProposedAction) -> Allow | None:
        """Return None if the action was denied or is held for approval; the step records which."""
        run = self._run
        verdict = await run.worker.gate.judge(run.row, fold, action, run.now())
        match verdict:
            case Deny(decision):
                self._settler.begin(fold)
                error: dict[str, Any] = {
                    "type": "PolicyDenied",
                    "message": decision.reason,
                    "rules": list(decision.rule_ids),
                }
                self._settler.fail(fold, error, RunReason.POLICY_DENIED, decision=decision.recorded())
                return None
            case RequireApproval(decision, about, again):
                self._settler.begin(fold)
                data = {"decision": decision.recorded()} | ({"asked_again": again} if again else {})
                request = request_approval(run.journal, fold, StepEvent.HOLD, ApprovalKind.ACTION, data=data, **about)
                run.effects.append(OpenApproval(request))
                return None
            case Allow():
                return verdict
