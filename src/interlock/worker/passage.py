"""The passage of a step to its doing: resolved, judged, and for a write its intent declared and saved."""

from collections.abc import Callable
from functools import partial
from typing import Any

from interlock.agents import model_call
from interlock.definition.plan import StepKind
from interlock.engine.children import Child
from interlock.errors import Conflict, NotFound
from interlock.governance.action import ProposedAction
from interlock.ids import uuid7
from interlock.journal import AskKind, StepFold, ask
from interlock.lifecycle import RunReason, StepEvent, StepState
from interlock.worker.call import Call, prepare, prepare_as, propose_read
from interlock.worker.gate import Deny, Hold, Pass
from interlock.worker.held import HeldRun
from interlock.worker.outcome import Failed, describe
from interlock.worker.receipts import declare, effect_of, over_cap
from interlock.worker.settle import Settler


class Passage:
    """`hear` is told what the run's models say, as they say it."""

    __slots__ = ("_hear", "_run", "_settler")

    def __init__(self, run: HeldRun, settler: Settler, hear: Callable[[StepFold, str], None]) -> None:
        self._run = run
        self._settler = settler
        self._hear = hear

    async def ready(self, folds: list[StepFold]) -> list[Call]:
        """The calls that may be performed. A step that gets no such call is settled, held or parked here."""
        calls = []
        for fold in folds:
            if fold.step.kind is StepKind.FLOW:
                await self._start_child(fold)
                continue
            call = self.prepare(fold)
            if isinstance(call, Failed):
                self._settler.begin(fold)
                self._settler.settle_failure(fold, call)
            elif fold.step.kind is StepKind.MODEL:
                calls.append(call)  # asking a model is not judged; what it wants done is, call by call
            elif call.action is None:
                gate = self._run.worker.gate
                if gate.lets_read(self._run.lease.tenant_id, call.tool.name) or await self._may_read(call):
                    calls.append(call)
            elif await self._may_write(call):
                calls.append(call)
        return calls

    async def attempt(self, calls: list[Call]) -> list[Call]:
        """Save what was recorded, the intents among it. An effect that was done before is not done again: its step is
        settled with that answer."""
        answer = await self._run.save()
        remaining = []
        for call in calls:
            prior = answer.receipts.get(call.receipt_id) if call.receipt_id else None
            if prior is None:
                remaining.append(call)
            else:
                self._settler.settle_from(call, prior)
        return remaining

    def prepare(self, fold: StepFold) -> Call | Failed:
        run, shop = self._run, self._run.worker.shop
        run_id, tenant_id, scope = run.lease.run_id, run.lease.tenant_id, run.journal.scope_of(fold)
        if fold.step.kind is StepKind.MODEL:
            tool = model_call(run.worker.database, shop.tools, run.row, run.journal, partial(self._hear, fold))
            call = prepare_as(tool, shop, fold, scope, run_id, tenant_id)
        else:
            call = prepare(shop, fold, scope, run_id, tenant_id, partial(effect_of, run, fold))
        if run.traceparent is not None and isinstance(call, Call):
            call.context._traceparent = run.traceparent
        return call

    async def _start_child(self, fold: StepFold) -> None:
        """The child is there with the entry that says that the step waits for it."""
        run, step = self._run, fold.step
        assert step.workflow is not None
        try:
            version, plan = await run.worker.plans.current(run.lease.tenant_id, step.workflow, step.version)
            given = fold.input(run.journal.scope)
        except (NotFound, Conflict, ValueError) as error:
            self._settler.begin(fold)
            self._settler.fail(fold, describe(error), RunReason.TERMINAL_ERROR)
            return
        child = Child(
            uuid7(), run.row, step.key, step.workflow, version, given, plan.timeout,
            plan.max_concurrency is not None, run.traceparent,
        )  # fmt: skip
        data = {"child": str(child.id), "workflow": step.workflow, "version": version}
        run.journal.move_step(fold, StepEvent.PARK, actor=run.actor, data=data)
        run.children.append(child)

    # ------------------------------------------------------------ the gate

    async def _may_write(self, call: Call) -> bool:
        fold = call.fold
        if fold.status == StepState.RUNNING and fold.receipt_id is not None:
            return True  # begun again after a crash: it was judged before its intent was declared
        if fold.status == StepState.RUNNING:
            # It was begun when its tool only read, and the tool writes now. As a write it has to pass the gate.
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
            declare(self._run, call, passed)
        return passed is not None

    async def _may_read(self, call: Call) -> bool:
        """Judged anew at every try. A read has no intent; the decision that let it through is kept with its end."""
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

    async def _judged(self, fold: StepFold, action: ProposedAction) -> Pass | None:
        """None: it was denied or is held for people, and the step says so."""
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
            case Hold(decision, about, again):
                self._settler.begin(fold)
                data = {"decision": decision.recorded()} | ({"asked_again": again} if again else {})
                run.asks.append(ask(run.journal, fold, StepEvent.HOLD, AskKind.ACTION, data=data, **about))
                return None
            case Pass():
                return verdict
