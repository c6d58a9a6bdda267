"""Driving one run: ask the journal what may start, do it, append what happened, until the run waits or ends."""

import asyncio
import contextlib
import random
import time
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

import orjson

from interlock import tracing
from interlock.agents import model_call
from interlock.definition.flow import declaration
from interlock.definition.plan import Step, StepKind
from interlock.engine import inbox
from interlock.engine.append import Answer, Beside, Lease, Write
from interlock.engine.children import Child
from interlock.engine.outside import entry_of, journal_for, trace_end
from interlock.engine.receipts import Intent, Prior, Seal
from interlock.engine.workers import DEFAULT_LABEL
from interlock.errors import Conflict, LeaseLost, NotFound, Unavailable
from interlock.flows import Replay
from interlock.governance.action import ProposedAction
from interlock.governance.redact import metadata
from interlock.ids import uuid7
from interlock.journal import (
    NO_OUTPUT,
    TIMED_OUT,
    Ask,
    AskKind,
    Awaited,
    Command,
    Entry,
    EntryType,
    Journal,
    Leave,
    Next,
    Reply,
    Settle,
    StepFold,
    Stop,
    Wait,
    advance,
    apply_word,
    ask,
    conclude,
    encode,
    wind_up,
)
from interlock.lifecycle import ReceiptState, RunEvent, RunReason, RunState, StepEvent, StepState, Tier
from interlock.store.pool import Row
from interlock.telemetry import log, metrics
from interlock.tools import Context, DidNotHappen, Happened, Tool
from interlock.worker.executor import (
    Call,
    Done,
    Failed,
    Interrupted,
    Outcome,
    elapsed_ms,
    encode_result,
    execute,
    finish,
    prepare,
    prepare_as,
    propose_read,
    reconcile,
)
from interlock.worker.flush import Unacceptable
from interlock.worker.gate import Deny, Hold, Pass

if TYPE_CHECKING:
    from interlock.worker.loop import Worker


# How long what a model says is gathered before it is told.
_TELL_SECONDS = 0.15


class Driver:
    """One run in this worker's hands."""

    __slots__ = (
        "_actor", "_asks", "_awaits", "_begun", "_children", "_finished", "_flow", "_inline", "_intents", "_mail",
        "_orphaned", "_overdue", "_said_at", "_seals", "_since", "_slow", "_spent_before", "_tasks", "_traceparent",
        "_undoing", "_unsaid", "_wake", "_worker", "_zero", "journal", "lease", "row", "task",
    )  # fmt: skip

    def __init__(self, worker: "Worker", row: Row) -> None:
        self._worker = worker
        self._actor = worker.me.actor
        self.row = row
        self.lease = Lease(
            row["id"],
            row["tenant_id"],
            row["lease_token"],
            RunState(row["status"]),
            row["workflow"],
            row["requested_by"],
            row["parent_run_id"] is not None,
            row["side_id"],
        )
        self.journal: Journal
        self.task: asyncio.Task[None] | None = None
        # The database's time when the run was claimed, and ours: between them they give the database's time now.
        self._zero: datetime = row["now"]
        self._since = time.monotonic()
        self._mail: bool = row["inbox"] > 0
        self._wake = asyncio.Event()
        self._finished: list[tuple[Call, Outcome, float]] = []
        self._tasks: dict[str, tuple[asyncio.Task[None], float]] = {}
        self._inline: tuple[StepFold, float] | None = None
        self._slow: set[str] = set()
        self._asks: list[Ask] = []
        self._awaits: list[Awaited] = []
        self._intents: list[Intent] = []
        self._seals: list[Seal] = []
        self._children: list[Child] = []
        # Of a run whose steps a Python function asks for, if this worker has it.
        self._flow: Replay | None = None
        # What a model has said and nobody was told yet, and when somebody was told last.
        self._unsaid = ""
        self._said_at = 0.0
        self._overdue = False
        self._begun = False
        self._orphaned = False
        self._undoing = False
        self._spent_before = 0.0
        self._traceparent: str | None = None

    def now(self) -> datetime:
        if (fixed := self._worker.database.clock()) is not None:
            return max(fixed, self._zero)  # time stands still until somebody moves it
        return self._zero + timedelta(seconds=time.monotonic() - self._since)

    # ------------------------------------------------------------ the loop

    async def drive(self) -> None:
        try:
            await self._load()
            await self._recover()
            while not await self._round():
                pass
        except asyncio.CancelledError:
            await self._abandon()
        except LeaseLost:
            log.warning("lease_lost", run_id=str(self.lease.run_id), token=self.lease.token)
            await self._interrupt()
            self._worker.suspect()
        except Unacceptable as error:
            await self._interrupt()
            await self._give_up(str(error))
        except Unavailable:
            raise  # nothing was begun: the worker takes its leases up again
        except Exception as error:
            log.error("drive_failed", run_id=str(self.lease.run_id), exc_info=error)
            await self._interrupt()
            await self._hand_on(error)
        finally:
            self._end_trial()
            if self._flow is not None:
                self._flow.close()

    async def _hand_on(self, error: Exception) -> None:
        """Something that should not happen did. Once a step was begun the run ends with that, so nothing is repeated.

        Before that another worker may do better: one that can load what this one cannot.
        """
        if self._begun:
            await self._give_up(f"{type(error).__name__}: {error}")
        else:
            await asyncio.sleep(self._worker.settings.poll_seconds)
            leave = Leave(self.lease.status, queue=True)
            await self._worker.flusher.put(Write(self.lease, [], leave, self.row["seq"], next_side=self.lease.side_id))

    async def _abandon(self) -> None:
        """The worker ends before the step does. If it can still write, the next worker need not wait for its death."""
        for task, _ in self._tasks.values():
            task.cancel()
        if self._worker.draining:
            with contextlib.suppress(LeaseLost):
                await self.let_go(Leave(self.lease.status, queue=True))

    async def _load(self) -> None:
        plan = await self._worker.plan_of(self.row)
        self.lease.capped = plan.max_concurrency is not None
        self.journal = journal_for(self.row, plan)
        given = self.journal.scope.trigger.get("traceparent")
        self._traceparent = given if tracing.spans is None else tracing.run_traceparent(self.lease.run_id, given)
        if self.row["fresh"] and self.row["seq"] == 2:
            # Two entries are known without reading them: created, and started by this very claim. There are more
            # if the run continues another one, or had a gate or a wait before its first step.
            self.journal.seq, self.journal.status = 2, RunState.RUNNING
            self._take_up_flow()
            return
        entries = await self._worker.database.fetch("journal_of", [self.lease.run_id], patience=float("inf"))
        self._refuse_to_act_for_another(entries)
        self.journal.replay(entry_of(e) for e in entries)
        # Whoever woke the run may have looked at the clock after the claim did: what was due then is due now.
        self._zero = max(self._zero, entries[-1]["at"]) if entries else self._zero
        self._spent_before = self.journal.cost_usd()
        self._undoing = self.journal.is_undoing
        self._orphaned = _nobody_went_on(entries)
        self._take_up_flow()

    def _take_up_flow(self) -> None:
        if self._flow is not None:
            self._flow.close()  # of a journal that could not be written
        plan = self.journal.plan
        if plan.flow is None or (flow := self._worker.shop.tools.flows.find(plan.name, plan.flow)) is None:
            return
        self._flow = Replay(
            flow, self.journal, tenant_id=self.lease.tenant_id, input=orjson.loads(self.row["input"] or "null"),
            actor=self._actor, clock=self.now, declares=self._declaration, encode=self._encode_result,
        )  # fmt: skip

    def _declaration(self, step: Step) -> dict[str, Any]:
        """Of a write the input is kept with it: whoever edits or undoes the action has no code to ask."""
        tool = self._worker.shop.tools.find(step.tool or "")
        keep = tool is not None and tool.writes
        return declaration(step, hidden=tool.secret if tool else frozenset(), with_input=keep)

    def _encode_result(self, result: Any) -> str:
        return encode_result(result, self._worker.shop.max_output_bytes)

    @property
    def _lacks_flow(self) -> bool:
        return self.journal.plan.flow is not None and self._flow is None

    def _refuse_to_act_for_another(self, entries: list[Row]) -> None:
        """A worker that stood still between claim and load would do what the new holder is doing at this moment."""
        if any((e["token"], e["type"] == EntryType.ORPHAN_DETECTED) >= (self.lease.token, True) for e in entries):
            raise LeaseLost("somebody else holds the run now")

    def _advance(self) -> Next:
        """Questions to people and waits for events are kept until the entries that open them are saved."""
        flow = self._flow if self.journal.status != RunState.CANCELING else None
        while True:
            if flow is not None:
                flow.resume()
            following = advance(self.journal, self.now())
            self._asks += following.ask
            self._awaits += following.await_
            # What the flow asks for may be settled without a tool, say a wait that is over: then it goes on at once.
            if flow is None or not flow.has_news():
                return following

    async def _stand_trial(self) -> None:
        """A step that lost a second worker is begun again, and counted, when no other such step is under way here.

        One of them may be what kills the workers. Side by side they would all reach the limit together.
        """
        if not any(fold.reclaims for fold in self.journal.unsettled()):
            return
        while self._worker.on_trial is not None and not (self._mail or self._worker.draining):
            self._wake.clear()
            await self._wake.wait()
        if self._worker.on_trial is None:
            self._worker.on_trial = self
            # Long steps are not made to wait for each other to the end.
            asyncio.get_running_loop().call_later(self._worker.settings.slice_seconds, self._end_trial)

    def _end_trial(self) -> None:
        if self._worker.on_trial is self:
            self._worker.on_trial = None
            for driver in self._worker.drivers.values():
                driver._wake.set()

    async def _recover(self) -> None:
        """What the lost worker was doing is begun again, and counted: no step kills workers for ever.

        A write is begun again only where that is safe: nothing was attempted yet, the tool is idempotent, or the
        system it acts on says that it did not happen. Else a person is asked. A worker that had no time left to wait
        for a write when it stopped gave the run back in order, but what it cut off is just as uncertain.
        """
        lost = self._orphaned
        if self._lacks_flow:
            return
        if self._flow is not None:
            self._flow.resume()  # what a step was called with is known only when the flow has asked for it again
            if self.journal.end is not None:
                return
        if lost:
            await self._stand_trial()
            if self._worker.draining:
                return
            for fold in self._advance().start:
                reads = fold.step.kind in (StepKind.TOOL, StepKind.MODEL) and not self._writes(fold)
                if reads and self._is_served_here(fold):
                    self.journal.begin(fold)
        for fold in list(self.journal.unsettled()):
            cut_off = fold.status == StepState.RUNNING and (lost or fold.receipt_id is not None)
            if cut_off and self._is_served_here(fold):
                await self._reclaim_step(fold)

    async def _reclaim_step(self, fold: StepFold) -> None:
        if fold.reclaims >= self._worker.settings.max_reclaims:
            message = f"its worker was lost {fold.reclaims + 1} times"
            error = {"type": "Orphaned", "message": message, "code": "RUN_ORPHANED"}
            self._fail(fold, error, RunReason.ORPHANED, receipt=ReceiptState.IN_DOUBT)
        elif fold.receipt_id is None or await self._may_repeat(fold):
            data = {"receipt_id": fold.receipt_id} if fold.receipt_id else None
            self.journal.move_step(fold, StepEvent.RECLAIM, actor=self._actor, data=data)

    async def _may_repeat(self, fold: StepFold) -> bool:
        """An effect was under way. True if it may be attempted again; else its outcome was recorded."""
        call = self._prepare(fold)
        if isinstance(call, Call) and call.tool.idempotent:
            return True
        answer = await reconcile(self._worker.shop, call) if isinstance(call, Call) else None
        match answer:
            case DidNotHappen():
                return True
            case Happened(output):
                assert isinstance(call, Call)
                self._settle(call, finish(self._worker.shop, call, output), time.perf_counter(), reconciled=True)
            case None:
                self._doubt(fold, call.action if isinstance(call, Call) else None)
        return False

    async def _round(self) -> bool:
        """True when the run is no longer ours."""
        if self._mail:
            await self._take_mail()
        following = self._advance()
        if self.journal.is_undoing and not self._undoing:
            await self._begin_to_undo()
        then = following.then
        if self._overdue and not self._undoing and not self._has_come_to_its_end(then):
            then = Stop(TIMED_OUT)
        if isinstance(then, Stop):
            await self._interrupt()
            then = wind_up(self.journal, then.ending or Settle(RunEvent.STOPPED, self.journal.asked), actor=self._actor)
            if then is None:
                return False
        if self._lacks_flow and not isinstance(then, Settle):
            return await self._await_flow()
        if then is not None:
            return await self._leave(then)
        if self._must_yield():
            return await self.let_go(Leave(self.journal.status, queue=True))
        starting = [] if self._worker.gives_back(self) else following.start
        if following.resume:
            starting = starting + [fold for fold in following.resume if not self._is_at(fold)]
        if starting and (self._is_away or any(fold.step.runs_on is not None for fold in starting)):
            here = [fold for fold in starting if self._is_served_here(fold)]
            if not here and not self._tasks and not self._finished:
                return await self._move_to(starting[0].step.runs_on)
            starting = here
        calls = await self._ready(starting)
        if self.journal.unsaved:
            calls = await self._attempt(calls)
        if len(calls) == 1 and self._is_alone(calls[0]):
            await self._do_inline(calls[0])
        elif calls or self._tasks or self._finished:
            for call in calls:
                self._do(call)
            await self._next_outcome()
        return False

    # ------------------------------------------------------------ labels

    @property
    def _is_away(self) -> bool:
        """In the lane of a label, and not where it is at home: with its tenant or its job."""
        return bool(self.lease.side_id != self.row["job_id"])

    def _is_served_here(self, fold: StepFold) -> bool:
        """Steps that ask for a label go to workers that have it, all others to where the run is at home."""
        if fold.step.runs_on is not None:
            return self._worker.serves(fold.step.runs_on)
        return not self._is_away or (self.row["job_id"] is None and self._worker.serves(DEFAULT_LABEL))

    async def _move_to(self, label: str | None) -> bool:
        """Into the lane that the workers for the next step claim from."""
        tenant_id = self.lease.tenant_id
        lane = self.row["job_id"] if label is None else await self._worker.lane_for(tenant_id, label)
        return await self._depart(Leave(self.journal.status, queue=True), lane)

    # ------------------------------------------------------------ undoing

    async def _begin_to_undo(self) -> None:
        """Before anything is undone: what the run still asked and waited for is withdrawn with this very write."""
        self._undoing = True
        await self._save(stops=True)
        self.lease.status = RunState.CANCELING
        if self.journal.has_children():
            self._worker.run_errands()

    def _is_alone(self, call: Call) -> bool:
        """Nothing else can move while it is done."""
        if not self.journal.plan.is_dynamic:
            return self.journal.plan.is_sequence
        return all(fold is call.fold for fold in self.journal.open_steps())

    def _has_come_to_its_end(self, then: object) -> bool:
        """By itself, and not because its last step was interrupted."""
        interrupted = any(fold.status == StepState.CANCELED for fold in self.journal.steps.values())
        return isinstance(then, Settle) and (then.event == RunEvent.FAIL or not interrupted)

    def _is_at(self, fold: StepFold) -> bool:
        return fold.step.key in self._tasks or any(call.fold is fold for call, _, _ in self._finished)

    # ------------------------------------------------------------ the gate

    async def _ready(self, folds: list[StepFold]) -> list[Call]:
        """Resolve, and for a write: propose, judge, declare the intent. What does not get through is settled here."""
        calls = []
        for fold in folds:
            if fold.step.kind is StepKind.FLOW:
                await self._start_child(fold)
                continue
            call = self._prepare(fold)
            if isinstance(call, Failed):
                self._begin(fold)
                self._settle_failure(fold, call, 0.0)
            elif fold.step.kind is StepKind.MODEL:
                calls.append(call)  # what it wants done is judged, call by call
            elif call.action is None:
                if self._worker.gate.lets_read(self.lease.tenant_id, call.tool.name) or await self._may_read(call):
                    calls.append(call)
            elif await self._passes(call):
                calls.append(call)
        return calls

    async def _start_child(self, fold: StepFold) -> None:
        """The child is there with the entry that says that the step waits for it."""
        step = fold.step
        assert step.workflow is not None
        try:
            version, plan = await self._worker.plans.current(self.lease.tenant_id, step.workflow, step.version)
        except (NotFound, Conflict) as error:
            self._begin(fold)
            self._fail(fold, {"type": type(error).__name__, "message": error.detail}, RunReason.TERMINAL_ERROR)
            return
        child = Child(
            uuid7(), self.row, step.key, step.workflow, version, fold.input(self.journal.scope), plan.timeout,
            plan.max_concurrency is not None, self._traceparent,
        )  # fmt: skip
        data = {"child": str(child.id), "workflow": step.workflow, "version": version}
        self.journal.move_step(fold, StepEvent.PARK, actor=self._actor, data=data)
        self._children.append(child)

    def _prepare(self, fold: StepFold) -> Call | Failed:
        shop, run, tenant = self._worker.shop, self.lease.run_id, self.lease.tenant_id
        scope = self.journal.scope_of(fold)
        if fold.step.kind is StepKind.MODEL:
            tool = model_call(self._worker.database, shop.tools, self.row, self.journal, partial(self._hear, fold))
            call = prepare_as(tool, shop, fold, scope, run, tenant)
        else:
            call = prepare(shop, fold, scope, run, tenant)
        if self._traceparent is not None and isinstance(call, Call):
            call.context._traceparent = self._traceparent
        return call

    async def _passes(self, call: Call) -> bool:
        fold = call.fold
        if fold.status == StepState.RUNNING:
            return True  # reclaimed: it was judged before its intent was declared
        assert call.action is not None
        if (over := self._over_cap(fold)) is not None:
            self._begin(fold)
            self._fail(fold, over, RunReason.CAP_EXCEEDED)
            return False
        passed = await self._judged(fold, call.action)
        if passed is not None:
            self._declare(call, passed)
        return passed is not None

    async def _may_read(self, call: Call) -> bool:
        """Judged anew at every try. Nothing is declared before it: what let it through goes with the step's end."""
        if await self._worker.gate.needs_no_judge(self.lease.tenant_id, call.tool.name):
            return True
        action = propose_read(self._worker.shop, call)
        if isinstance(action, Failed):
            self._begin(call.fold)
            self._settle_failure(call.fold, action, 0.0)
            return False
        passed = await self._judged(call.fold, action)
        if passed is not None:
            call.grounds = _grounds(passed)
        return passed is not None

    async def _judged(self, fold: StepFold, action: ProposedAction) -> Pass | None:
        """What is denied or held is taken down here."""
        verdict = await self._worker.gate.judge(self.row, fold, action, self.now())
        match verdict:
            case Deny(decision):
                self._begin(fold)
                error: dict[str, Any] = {
                    "type": "PolicyDenied",
                    "message": decision.reason,
                    "rules": list(decision.rule_ids),
                }
                self._fail(fold, error, RunReason.POLICY_DENIED, decision=decision.recorded())
                return None
            case Hold(decision, about):
                self._begin(fold)
                data = {"decision": decision.recorded()}
                self._asks.append(ask(self.journal, fold, StepEvent.HOLD, AskKind.ACTION, data=data, **about))
                return None
            case Pass():
                return verdict

    def _over_cap(self, fold: StepFold) -> dict[str, Any] | None:
        """Against the stricter of two caps. Another try at a write that was counted is not another write.

        What undoes one is none either: a run that went over its cap must still be able to take back what it did.
        """
        if fold.step.undoes is not None:
            return None
        caps = {"tenant": self.row["max_writes_per_run"], "workflow": self.journal.plan.max_writes_per_run}
        known = [(cap, whose) for whose, cap in caps.items() if cap is not None]
        if not known or fold.receipt_id is not None or self.journal.effects() < min(known)[0]:
            return None
        cap, whose = min(known)
        return {"type": "CapExceeded", "message": f"the run made {cap} writes, as many as its {whose} allows"}

    def _declare(self, call: Call, passed: Pass) -> None:
        """The intent is committed before the effect begins, so that after a crash we know that it may have happened."""
        assert call.action is not None
        call.receipt_id = uuid7()
        key = call.context.idempotency_key
        data = {"receipt_id": str(call.receipt_id), "idempotency_key": key, **_grounds(passed)}
        if call.tool.idempotent:
            data["idempotent"] = True
        self.journal.move_step(call.fold, StepEvent.CLAIM, actor=self._actor, data=data)
        self._intents.append(
            Intent(
                id=call.receipt_id, step=call.fold.step.key, tool=call.tool.name, key=key,
                digest=call.action.digest, attempt=call.fold.attempt, undo=call.tool.undo,
                approval_id=passed.approval_id,
                request_metadata=encode(self._metadata(call.action.fields, call.tool)),
                reverses=self._reverses(call.fold),
            )
        )  # fmt: skip

    def _reverses(self, fold: StepFold) -> UUID | None:
        """The receipt of what it undoes, if that was this run's own write."""
        done = self.journal.steps[fold.step.undoes] if fold.step.undoes is not None else None
        return UUID(done.receipt_id) if done is not None and done.receipt_id is not None else None

    def _metadata(self, value: Any, tool: Tool) -> Any:
        return metadata(value, allow=tool.show, salt=self._worker.shop.salts(self.lease.tenant_id))

    async def _attempt(self, calls: list[Call]) -> list[Call]:
        """Save, and leave out the effects that have their answer already."""
        answer = await self._save()
        remaining = []
        for call in calls:
            prior = answer.receipts.get(call.receipt_id) if call.receipt_id else None
            if prior is None:
                remaining.append(call)
            else:
                self._settle_from(call, prior)
        return remaining

    def _settle_from(self, call: Call, prior: Prior) -> None:
        """The key was used before: for this very effect, or for another, which is an error somebody must see."""
        fold = call.fold
        if call.action is None or prior.digest not in (call.action.digest, None):
            message = (
                f"the idempotency key {prior.key} was used for another action (run {prior.run_id}, step {prior.step})"
            )
            self._fail(fold, {"type": "ReceiptConflict", "message": message}, RunReason.TERMINAL_ERROR)
        elif prior.status == ReceiptState.SUCCEEDED:
            data = {"replayed_from": str(prior.run_id)} | ({"receipt_id": str(prior.id)} if prior.id else {})
            self.journal.move_step(
                fold, StepEvent.SUCCEED, actor=self._actor, data=data, output=prior.output or NO_OUTPUT
            )
        else:
            where = f"run {prior.run_id}, step {prior.step}" if prior.run_id else "another run"
            message = f"the same effect is {prior.status} in {where}"
            self._settle_failure(fold, Failed({"type": "EffectUnderWay", "message": message}, True, 1.0, None), 0.0)

    def _doubt(self, fold: StepFold, action: ProposedAction | None) -> None:
        """Nobody knows whether it happened: a person has to find out and say."""
        assert fold.receipt_id is not None
        self._seals.append(Seal(UUID(fold.receipt_id), ReceiptState.IN_DOUBT))
        shown = action.as_dict() if action else {"tool": fold.step.tool, "fields": {}}
        self._asks.append(
            ask(
                self.journal, fold, StepEvent.HOLD, AskKind.IN_DOUBT, tier=Tier.HIGH, two_person=False,
                expires_in=30 * 86400.0, summary=f"{fold.step.tool} was interrupted. Did it happen?", action=shown,
                digest=fold.receipt_id, receipt_id=fold.receipt_id,
                reason="the worker was lost or the call was cut off",
            )
        )  # fmt: skip

    def _writes(self, fold: StepFold) -> bool:
        tool = self._worker.shop.tools.find(fold.step.tool or "")
        return tool is not None and tool.writes

    # ------------------------------------------------------------ doing steps

    def _begin(self, fold: StepFold) -> float:
        self._begun = True
        if fold.status == StepState.PENDING:
            self.journal.begin(fold)
        return time.perf_counter()

    async def _do_inline(self, call: Call) -> None:
        """In a plain list nothing else can move meanwhile: no task of its own is needed."""
        began = self._begin(call.fold)
        self._inline = (call.fold, began)
        try:
            outcome = await execute(self._worker.shop, call)
        finally:
            self._inline = None
        if isinstance(outcome, Interrupted):
            assert self.task is not None
            if not self._mail or self._worker.abandoning:
                raise asyncio.CancelledError
            self.task.uncancel()
        await self._settle_outcome(call, outcome, began)

    def _do(self, call: Call) -> None:
        began = self._begin(call.fold)
        self._tasks[call.fold.step.key] = asyncio.create_task(self._run_step(call, began)), began

    async def _run_step(self, call: Call, began: float) -> None:
        outcome = await execute(self._worker.shop, call)
        del self._tasks[call.fold.step.key]
        self._finished.append((call, outcome, began))
        self._wake.set()

    async def _next_outcome(self) -> None:
        """Wait for a step, for mail, or for the time of a retry or a wait that runs beside the steps."""
        times = [t for f in self.journal.unsettled() for t in (f.next_run_at, f.due_at) if t is not None]
        patience = max((min(times) - self.now()).total_seconds(), 0.0) if times else None
        if not self._finished and not self._mail:
            try:
                async with asyncio.timeout(patience):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()
        finished, self._finished = self._finished, []
        for call, outcome, began in finished:
            await self._settle_outcome(call, outcome, began)

    async def _settle_outcome(self, call: Call, outcome: Outcome, began: float) -> None:
        """A write that was cut off is asked about before anybody repeats it."""
        if isinstance(outcome, Failed) and outcome.in_doubt:
            call.fold.last_error = outcome.error
            if not await self._may_repeat(call.fold):
                return
        self._settle(call, outcome, began)

    def _settle(self, call: Call, outcome: Outcome, began: float, *, reconciled: bool = False) -> None:
        fold, duration_ms = call.fold, elapsed_ms(began)
        self._end_trial()
        self._slow.discard(fold.step.key)
        metrics.step_took(fold.step.tool, type(outcome).__name__.lower()).observe(duration_ms / 1000)
        match outcome:
            case Done(output, context):
                data: dict[str, object] = {"duration_ms": duration_ms, **_costs(context)}
                if context._idempotency_key:
                    data["idempotency_key"] = context._idempotency_key
                data |= call.grounds or {}
                if reconciled:
                    data["reconciled"] = True
                self._seal(fold, ReceiptState.SUCCEEDED, output, call.tool)
                self._tell_rest(fold)
                self.journal.move_step(fold, StepEvent.SUCCEED, actor=self._actor, data=data, output=output)
                if fold.step.kind is StepKind.MODEL:
                    self._tell_whole(fold)
            case Failed():
                self._settle_failure(fold, outcome, duration_ms, call.grounds)
            case Interrupted():
                self._tell_rest(fold)
                self._seal(fold, ReceiptState.FAILED if call.tool.idempotent else ReceiptState.IN_DOUBT)
                self.journal.move_step(fold, StepEvent.CANCEL, actor=self._actor, data={"duration_ms": duration_ms})

    def _seal(self, fold: StepFold, state: ReceiptState, output: str | None = None, tool: Tool | None = None) -> None:
        """With the entry that settles the step, in one transaction."""
        if fold.receipt_id is not None:
            shown = encode(self._metadata(orjson.loads(output), tool)) if output and tool else None
            releases = self._reverses(fold) if state == ReceiptState.FAILED else None
            self._seals.append(Seal(UUID(fold.receipt_id), state, output, shown, releases))

    def _settle_failure(
        self, fold: StepFold, failed: Failed, duration_ms: float, grounds: dict[str, Any] | None = None
    ) -> None:
        self._unsaid, self._said_at = "", 0.0
        data: dict[str, object] = {"duration_ms": duration_ms, "error": failed.error, **_costs(failed.context)}
        data |= grounds or {}
        self._seal(fold, ReceiptState.SUCCEEDED if failed.happened else ReceiptState.FAILED)
        failures = fold.failures + 1
        retry = fold.step.retry
        if failed.retryable and failures < retry.max_attempts:
            delay = max(retry.delay(failures, random.random()), failed.after or 0)
            data["next_run_at"] = self.now() + timedelta(seconds=delay)
            self.journal.move_step(fold, StepEvent.RETRY, actor=self._actor, data=data)
            return
        data["reason"] = RunReason.ATTEMPTS_EXHAUSTED if failed.retryable else RunReason.TERMINAL_ERROR
        self.journal.move_step(fold, StepEvent.FAIL, actor=self._actor, data=data)

    def _fail(
        self, fold: StepFold, error: dict[str, Any], reason: RunReason, *,
        receipt: ReceiptState = ReceiptState.FAILED, **more: Any,
    ) -> None:  # fmt: skip
        self._seal(fold, receipt)
        self.journal.move_step(fold, StepEvent.FAIL, actor=self._actor, data={"error": error, "reason": reason, **more})

    def note_slow_steps(self, longer_than: float) -> None:
        """A step that takes long gets an entry of its own, so that people see it. A write has one: its intent."""
        at = time.perf_counter() - longer_than
        self._tell()
        if self._inline is not None and self._inline[1] < at:
            self._note_slow(*self._inline)
        for key, (_, began) in self._tasks.items():
            if began < at:
                self._note_slow(self.journal.fold_of(key), began)

    def _note_slow(self, fold: StepFold, began: float) -> None:
        if fold.step.key in self._slow or self.journal.unsaved or fold.status != StepState.RUNNING or fold.reclaims:
            return
        if fold.receipt_id is not None:
            return
        self._slow.add(fold.step.key)
        since = self.now() - timedelta(seconds=time.perf_counter() - began)
        entry = Entry(
            self.journal.seq + 1, "step_transition", self._actor, fold.step.key, StepState.PENDING, StepEvent.CLAIM,
            StepState.RUNNING, fold.attempt, self.journal.declaring(fold, {"started_at": since}),
        )  # fmt: skip
        self.journal.seq = entry.seq
        self._worker.flusher.put(Write(self.lease, [entry]))

    # ------------------------------------------------------------ what a model says

    def _hear(self, fold: StepFold, text: str) -> None:
        self._unsaid += text
        if time.perf_counter() - self._said_at >= _TELL_SECONDS:
            self._tell()

    def _tell(self) -> None:
        """An entry for all that was said since the last one: what a provider sends word by word is not stored so."""
        if not self._unsaid or self._inline is None or self.journal.unsaved:
            return
        fold, began = self._inline
        self._note_slow(fold, began)  # a step that speaks has begun
        entry = self._delta(fold)
        self.journal.seq = entry.seq
        self._worker.flusher.put(Write(self.lease, [entry]))

    def _delta(self, fold: StepFold) -> Entry:
        text, self._unsaid, self._said_at = self._unsaid, "", time.perf_counter()
        key, data = fold.step.key, {"text": text}
        return Entry(self.journal.seq + 1, EntryType.MESSAGE_DELTA, self._actor, key, attempt=fold.attempt, data=data)

    def _tell_rest(self, fold: StepFold) -> None:
        """Put together, what was told is what was said."""
        if self._unsaid and fold.undeclared is None:
            self.journal.add(self._delta(fold))
        self._unsaid, self._said_at = "", 0.0  # the first of the next answer is told at once

    def _tell_whole(self, fold: StepFold) -> None:
        if text := Reply.of(fold).text:
            data = {"role": "assistant", "text": text}
            self.journal.note(EntryType.MESSAGE, actor=self._actor, step=fold.step.key, data=data)

    # ------------------------------------------------------------ mail and interruptions

    def nudge(self) -> None:
        self._mail = True
        self._wake.set()
        if self._inline is not None:
            self._worker.spawn(self._interrupt_if_asked())

    async def _interrupt_if_asked(self) -> None:
        words = await inbox.read(self._worker.database, self.lease.run_id)
        urgent = any(word.command in (Command.CANCEL, Command.TIME_OUT) for word in words)
        # What undoes a step is not stopped: the run does already what it is told to. Once: it may be busy cleaning up.
        stoppable = self._inline is not None and self._inline[0].step.undoes is None
        if urgent and stoppable and self.task is not None and not self.task.cancelling():
            self.task.cancel()

    async def _take_mail(self) -> None:
        self._mail = False
        words = await inbox.read(self._worker.database, self.lease.run_id, patience=float("inf"))
        for word in words:
            apply_word(self.journal, word, in_flight=True)
            if word.command == Command.CANCEL:
                self.lease.status = RunState.CANCELING
            elif word.command == Command.TIME_OUT:
                self._overdue = True
        if words:
            await self._save(drained=[word.id for word in words if word.id is not None])

    async def _interrupt(self) -> None:
        """Stop what is in flight and take down how each ended."""
        tasks = [task for task, _ in self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        finished, self._finished = self._finished, []
        for call, outcome, began in finished:
            await self._settle_outcome(call, outcome, began)

    # ------------------------------------------------------------ writing and letting go

    async def _save(self, drained: list[int] | None = None, *, stops: bool = False) -> Answer:
        beside = self._take_beside(stops=stops)
        return await self._write(Write(self.lease, self.journal.take_unsaved(), beside=beside, drained=drained or []))

    def _take_beside(self, *, stops: bool = False) -> Beside:
        """What has to be committed with the entries that speak of it."""
        beside = Beside(
            self._asks, self._intents, self._seals, self._awaits, stops, self._children,
            stops_children=stops and self.journal.has_children(),
        )  # fmt: skip
        self._asks, self._intents, self._seals, self._awaits, self._children = [], [], [], [], []
        return beside

    async def _write(self, write: Write) -> Answer:
        answer = await self._worker.flusher.put(write)
        if not answer.kept and write.leave is None:
            raise LeaseLost("somebody else holds the run now")
        if answer.nudged:
            self._mail = True
        return answer

    async def _leave(self, then: Wait | Settle) -> bool:
        return await self.let_go(conclude(self.journal, then, actor=self._actor))

    async def _await_flow(self) -> bool:
        """The version that the run began with is not here. It waits for a worker that has it, and says so."""
        flow = self.journal.plan.awaited
        log.warning("flow_not_deployed", run_id=str(self.lease.run_id), flow=flow)
        entry = self.journal.draft_move(RunEvent.PARK, actor=self._actor, data={"awaits_flow": flow})
        return await self.let_go(Leave(RunState.WAITING_EXTERNAL, entry), undeployed=flow)

    async def let_go(self, leave: Leave, undeployed: str | None = None) -> bool:
        """A run that others go on with stays in its lane, for what was begun there is for there; else it goes home."""
        return await self._depart(leave, self.lease.side_id if leave.queue else self.row["job_id"], undeployed)

    async def _depart(self, leave: Leave, lane: UUID | None, undeployed: str | None = None) -> bool:
        """Give the lease back with the last entries. If mail came meanwhile, the entries are kept and we go on."""
        if self._awaits:
            # While the run is still ours: what it is to wait for may have come already.
            await self._save()
            if self._mail:
                return False
        entries, beside = self.journal.take_unsaved(), self._take_beside()
        kept_back = beside
        if leave.reason is not None and self.journal.has_children():
            beside = replace(beside, stops_children=True)
        if undeployed is not None:
            beside = replace(beside, undeployed=undeployed)
        leaving = [*entries, leave.entry] if leave.entry else entries
        seq = leaving[-1].seq if leaving else self.journal.seq
        cost = self.journal.cost_usd() - self._spent_before
        write = Write(self.lease, leaving, leave, seq=seq, cost_usd=cost, beside=beside, next_side=lane)
        answer = await self._write(write)
        if answer.kept:
            self._log_end(leave)
            if beside.stops_children or (self._has_followers and leave.reason is not None):
                self._worker.run_errands()
            return True
        if entries:
            await self._write(Write(self.lease, entries, beside=kept_back))
        self._mail = True
        if not await inbox.read(self._worker.database, self.lease.run_id, patience=float("inf")):
            raise LeaseLost("somebody else holds the run now")
        return False

    @property
    def _has_followers(self) -> bool:
        """A parent that waits for its end, or messages that wait for their turn."""
        return self.lease.has_parent or self.row["session_id"] is not None

    def _log_end(self, leave: Leave) -> None:
        if leave.reason is None:
            return
        seconds = (self.now() - self.row["created_at"]).total_seconds()
        metrics.run_duration.labels(self.lease.workflow, leave.status).observe(seconds)
        log.info(
            "run_completed", run_id=str(self.lease.run_id), status=leave.status, reason=leave.reason,
            duration_ms=round(seconds * 1000),
        )  # fmt: skip
        trace_end(self.row, self.now(), leave.status, leave.reason)

    def _must_yield(self) -> bool:
        if self._tasks or self._finished:
            return False
        if self._worker.gives_back(self):
            return True
        overstayed = time.monotonic() - self._since > self._worker.settings.slice_seconds
        return self._worker.crowded and overstayed and self._worker.on_trial is not self

    async def _give_up(self, why: str) -> None:
        """What the run produced cannot be stored. Its step fails with that as the reason."""
        self.row = {**dict(self.row), "fresh": False, "lost": False}
        await self._load()
        following = self._advance()
        for fold in (following.start + following.resume)[:1]:
            self._begin(fold)
            error = {"type": "Unacceptable", "message": why.replace("\x00", "\ufffd")[:2000]}
            data = {"error": error, "reason": RunReason.TERMINAL_ERROR}
            self.journal.move_step(fold, StepEvent.FAIL, actor=self._actor, data=data)
        then: object = self._advance().then
        if isinstance(then, Stop):
            ending = then.ending or Settle(RunEvent.STOPPED, self.journal.asked)
            then = wind_up(self.journal, ending, actor=self._actor)
        if self.journal.is_undoing and not self._undoing:
            await self._begin_to_undo()
        await (self._leave(then) if isinstance(then, Settle) else self.let_go(Leave(self.journal.status, queue=True)))


def _nobody_went_on(entries: list[Row]) -> bool:
    """The last that was written under a lease is that it was lost.

    Asked of the journal and not of the claim: its answer can get lost, and a holder can give the run back untouched.
    """
    return next((e["type"] for e in reversed(entries) if e["token"]), None) == EntryType.ORPHAN_DETECTED


def _grounds(passed: Pass) -> dict[str, Any]:
    grounds: dict[str, Any] = {"decision": passed.decision.recorded()}
    return grounds | {"allowed_by": passed.allowed_by} if passed.allowed_by else grounds


def _costs(context: Context | None) -> dict[str, object]:
    return {"cost_usd": context.cost_usd, "costs": context.costs} if context and context.costs else {}
