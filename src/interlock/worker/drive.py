"""Driving one run: ask the journal what may start, do it, append what happened, until the run waits or ends."""

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING

from interlock import tracing
from interlock.definition.plan import StepKind
from interlock.engine import inbox, leases
from interlock.engine.outside import give_up, replayed
from interlock.errors import LeaseLost, Unavailable, Unreadable
from interlock.flows import Replay
from interlock.journal import (
    TIMED_OUT,
    Command,
    EntryType,
    Leave,
    Next,
    Settle,
    StepFold,
    Stop,
    Wait,
    advance,
    apply_word,
    conclude,
    wind_up,
)
from interlock.lifecycle import RunEvent, RunReason, RunState, StepEvent, StepState
from interlock.store.pool import FOREVER, Row, Tx
from interlock.telemetry import log
from interlock.worker.call import Call
from interlock.worker.executor import execute
from interlock.worker.flush import Unacceptable
from interlock.worker.held import HeldRun
from interlock.worker.outcome import Failed, Interrupted, Outcome
from interlock.worker.passage import Passage
from interlock.worker.recovery import Recovery, nobody_went_on
from interlock.worker.replaying import replay_of
from interlock.worker.settle import Settler
from interlock.worker.telling import Teller
from interlock.worker.trial import end_trial, stand_trial

if TYPE_CHECKING:
    from interlock.worker.loop import Worker


# How often a run that cannot be read is claimed before it is given up.
_MOST_READERS = 20


class Driver:
    """One run, from its claim until it is given back."""

    __slots__ = (
        "_finished", "_flow", "_orphaned", "_overdue", "_passage", "_settler", "_tasks", "_teller", "_undoing",
        "_worker", "run", "task",
    )  # fmt: skip

    def __init__(self, worker: "Worker", row: Row) -> None:
        self._worker = worker
        self.run = HeldRun(worker, row)
        self.task: asyncio.Task[None] | None = None
        self._teller = Teller(self.run)
        self._settler = Settler(self.run, self._teller)
        self._passage = Passage(self.run, self._settler, self._teller.hear)
        # The Python function that asks for the run's steps, if it is a flow's and this worker has its code.
        self._flow: Replay | None = None
        # Steps that are done side by side, by key, each with when it began; and those that are done and not settled.
        self._tasks: dict[str, tuple[asyncio.Task[None], float]] = {}
        self._finished: list[tuple[Call, Outcome, float]] = []
        # The worker that held the run before us was lost, and nobody went on with it since.
        self._orphaned = False
        # The run's deadline passed.
        self._overdue = False
        # Its row says already that it undoes what it did.
        self._undoing = False

    async def drive(self) -> None:
        try:
            await self._load()
            await self._recover()
            while not await self._round():
                pass
        except asyncio.CancelledError:
            await self._abandon()
        except LeaseLost:
            log.warning("lease_lost", run_id=str(self.run.lease.run_id), token=self.run.lease.token)
            await self._interrupt()
            self._worker.suspect()
        except Unacceptable as error:
            await self._interrupt()
            await self._give_up(str(error))
        except Unreadable as error:
            await self._put_aside(error)
        except Unavailable:
            raise  # nothing was begun; the worker asks the database later which runs it holds, and takes this one up
        except Exception as error:
            log.error("drive_failed", run_id=str(self.run.lease.run_id), exc_info=error)
            await self._interrupt()
            await self._hand_on(error)
        finally:
            end_trial(self.run)
            if self._flow is not None:
                self._flow.close()

    # ------------------------------------------------------------ taking it up

    async def _load(self) -> None:
        run = self.run
        plan = await self._worker.plan_of(run.row)
        run.lease.capped = plan.max_concurrency is not None
        run.journal = replayed(run.row, plan, ())
        given = run.journal.scope.trigger.get("traceparent")
        run.traceparent = given if tracing.spans is None else tracing.run_traceparent(run.lease.run_id, given)
        if run.row["fresh"] and run.row["seq"] == 2:
            # The two entries of a run that was just started are known without reading them: it was created, and
            # started by this very claim. A run has more if it continues another, or waited before its first step.
            run.journal.seq, run.journal.status = 2, RunState.RUNNING
            self._take_up_flow()
            return
        entries = await self._worker.database.fetch("journal_of", [run.lease.run_id], patience=FOREVER)
        self._refuse_to_act_for_another(entries)
        run.journal = replayed(run.row, plan, entries)
        if entries:
            run.not_before(entries[-1]["at"])
        self._undoing = run.journal.is_undoing
        self._orphaned = nobody_went_on(entries)
        self._take_up_flow()

    def _take_up_flow(self) -> None:
        if self._flow is not None:
            self._flow.close()  # it ran on a journal that could not be stored
        self._flow = replay_of(self.run)

    @property
    def _lacks_flow(self) -> bool:
        return self.run.journal.plan.flow is not None and self._flow is None

    def _refuse_to_act_for_another(self, entries: list[Row]) -> None:
        """A newer token in the journal, or the loss of ours: somebody else holds the run by now. A worker that stood
        still between its claim and here would do what that one is doing at this moment."""
        token = self.run.lease.token
        if any((e["token"], e["type"] == EntryType.ORPHAN_DETECTED) >= (token, True) for e in entries):
            raise LeaseLost("somebody else holds the run now")

    async def _recover(self) -> None:
        """What another worker was doing when it was lost, or when it had to stop, is begun again or asked about.

        If it was lost, its reads may have begun without an entry that says so: they are counted as begun, so that a
        step that kills its workers is not begun for ever. If it stopped in order, only what has an entry was cut off:
        a write, whose outcome is just as uncertain then, or a model, of whose answer people have heard a part.
        """
        run, lost = self.run, self._orphaned
        if run.journal.seq == 2 or self._lacks_flow:
            return  # nothing was begun yet, or a worker with the flow's code has to see to it
        if self._flow is not None:
            self._flow.resume()  # a step's input is not in the journal: the flow has to ask for the step again
            if run.journal.end is not None:
                return
        if lost:
            await stand_trial(run)
            if self._worker.draining:
                return
            for fold in self._advance().start:
                if self._reads(fold) and run.is_served_here(fold):
                    run.journal.begin(fold)
        for fold in list(run.journal.unsettled()):
            spoke = fold.step.kind is StepKind.MODEL
            cut_off = fold.status == StepState.RUNNING and (lost or fold.receipt_id is not None or spoke)
            if cut_off and run.is_served_here(fold):
                await self._recovery.reclaim(fold)

    @property
    def _recovery(self) -> Recovery:
        """Made when it is needed, which for most runs is never."""
        return Recovery(self.run, self._passage, self._settler)

    def _reads(self, fold: StepFold) -> bool:
        """Whether it certainly does not write: a tool that is not known here may."""
        if fold.step.kind is StepKind.MODEL:
            return True
        tool = self._worker.shop.tools.find(fold.step.tool or "")
        return tool is not None and not tool.writes

    # ------------------------------------------------------------ the loop

    async def _round(self) -> bool:
        """Take one look at what the journal asks for, and do that. True when the run is no longer ours."""
        run = self.run
        if run.mail:
            await self._take_mail()
        following = self._advance()
        if run.journal.is_undoing and not self._undoing:
            await self._begin_to_undo()
        then = following.then
        if self._overdue and not self._undoing and not self._has_come_to_its_end(then):
            then = Stop(TIMED_OUT)
        if isinstance(then, Stop):
            await self._interrupt()
            then = self._wind_up(then)
            if then is None:
                return False  # what the run did is undone before it ends
        if self._lacks_flow and not isinstance(then, Settle):
            return await self._await_flow()
        if then is not None:
            return await self._leave(then)
        if self._must_yield():
            return await run.yield_lease()
        starting = self._to_start(following)
        here = self._served_here(starting)
        if starting and not here and not self._is_busy:
            return await run.move_to(starting[0].step.runs_on)
        calls = await self._passage.ready(here)
        if run.journal.unsaved:
            calls = await self._passage.attempt(calls)
        if len(calls) == 1 and self._is_alone(calls[0]):
            await self._do_alone(calls[0])
        elif calls or self._is_busy:
            for call in calls:
                self._do_beside(call)
            await self._next_outcome()
        return False

    def _advance(self) -> Next:
        """Questions to people and waits for events are kept until the entries that open them are saved."""
        run = self.run
        flow = self._flow if run.journal.status != RunState.CANCELING else None
        while True:
            if flow is not None:
                flow.resume()
            following = advance(run.journal, run.now())
            run.asks += following.ask
            run.awaits += following.await_
            # What the flow asked for may have been settled without a tool, like a wait that is over. Then it goes on.
            if flow is None or not flow.has_news():
                return following

    def _wind_up(self, stop: Stop) -> Settle | None:
        ending = stop.ending or Settle(RunEvent.STOPPED, self.run.journal.asked)
        return wind_up(self.run.journal, ending, actor=self.run.actor)

    async def _begin_to_undo(self) -> None:
        """Before anything is undone. The write that says so also withdraws what the run still asked and waited for."""
        self._undoing = True
        await self.run.save(stops=True)
        self.run.lease.status = RunState.CANCELING
        if self.run.journal.has_children():
            self._worker.run_errands()

    def _has_come_to_its_end(self, then: object) -> bool:
        """Whether it ends by itself. If its last step was interrupted for the deadline, it timed out."""
        interrupted = any(fold.status == StepState.CANCELED for fold in self.run.journal.steps.values())
        return isinstance(then, Settle) and (then.event == RunEvent.FAIL or not interrupted)

    @property
    def _is_busy(self) -> bool:
        """A step is under way beside others, or done and not settled yet."""
        return bool(self._tasks or self._finished)

    def _to_start(self, following: Next) -> list[StepFold]:
        """What the journal lets start; and what it says has begun, unless we are at it."""
        starting = [] if self._worker.gives_back(self.run) else following.start
        if following.resume:
            starting = starting + [fold for fold in following.resume if not self._is_at(fold)]
        return starting

    def _served_here(self, folds: list[StepFold]) -> list[StepFold]:
        """Steps that ask for a label are for workers that have it: see `HeldRun.is_served_here`."""
        if not self.run.is_away and all(fold.step.runs_on is None for fold in folds):
            return folds
        return [fold for fold in folds if self.run.is_served_here(fold)]

    def _must_yield(self) -> bool:
        if self._is_busy:
            return False
        if self._worker.gives_back(self.run):
            return True
        if not self._worker.crowded or self._worker.on_trial is self.run:
            return False
        return self.run.seconds_held > self._worker.settings.slice_seconds

    def _is_at(self, fold: StepFold) -> bool:
        return fold.step.key in self._tasks or any(call.fold is fold for call, _, _ in self._finished)

    # ------------------------------------------------------------ doing steps

    def _is_alone(self, call: Call) -> bool:
        """Nothing else can move while it is done."""
        journal = self.run.journal
        if not journal.plan.is_dynamic:
            return journal.plan.is_sequence
        return all(fold is call.fold for fold in journal.open_steps())

    async def _do_alone(self, call: Call) -> None:
        """In a plain list nothing else can move meanwhile: no task of its own is needed."""
        began = self._settler.begin(call.fold)
        self.run.alone = (call.fold, began)
        try:
            outcome = await execute(self._worker.shop, call)
        finally:
            self.run.alone = None
        if isinstance(outcome, Interrupted):
            assert self.task is not None
            if not self.run.mail or self._worker.abandoning:
                raise asyncio.CancelledError
            self.task.uncancel()
        await self._settle(call, outcome, began)

    def _do_beside(self, call: Call) -> None:
        began = self._settler.begin(call.fold)
        self._tasks[call.fold.step.key] = asyncio.create_task(self._run_step(call, began)), began

    async def _run_step(self, call: Call, began: float) -> None:
        outcome = await execute(self._worker.shop, call)
        del self._tasks[call.fold.step.key]
        self._finished.append((call, outcome, began))
        self.run.wake.set()

    async def _next_outcome(self) -> None:
        """Wait for a step, for mail, or for the time of a retry or a wait that runs beside the steps."""
        run = self.run
        times = [t for f in run.journal.unsettled() for t in (f.next_run_at, f.due_at) if t is not None]
        patience = max((min(times) - run.now()).total_seconds(), 0.0) if times else None
        if not self._finished and not run.mail:
            try:
                async with asyncio.timeout(patience):
                    await run.wake.wait()
            except TimeoutError:
                pass
        run.wake.clear()
        await self._settle_finished()

    async def _settle_finished(self) -> None:
        finished, self._finished = self._finished, []
        for call, outcome, began in finished:
            await self._settle(call, outcome, began)

    async def _settle(self, call: Call, outcome: Outcome, began: float) -> None:
        """A write that was cut off is asked about before anybody repeats it."""
        if isinstance(outcome, Failed) and outcome.in_doubt:
            call.fold.last_error = outcome.error
            if call.left_behind:
                # To ask the other system would prove nothing: the thread may do it after that has answered.
                self._recovery.doubt(call.fold, call.action)
                return
            if not await self._recovery.may_repeat(call.fold):
                return
        self._settler.settle(call, outcome, began)

    def note_slow_steps(self, longer_than: float) -> None:
        at = time.perf_counter() - longer_than
        self._teller.tell()
        if self.run.alone is not None and self.run.alone[1] < at:
            self._teller.note_slow(*self.run.alone)
        for key, (_, began) in self._tasks.items():
            if began < at:
                self._teller.note_slow(self.run.journal.fold_of(key), began)

    # ------------------------------------------------------------ mail and interruptions

    def nudge(self) -> None:
        self.run.mail = True
        self.run.wake.set()
        if self.run.alone is not None:
            self._worker.spawn(self._interrupt_if_asked())

    async def _interrupt_if_asked(self) -> None:
        words = await inbox.read(self._worker.database, self.run.lease.run_id)
        urgent = any(word.command in (Command.CANCEL, Command.TIME_OUT) for word in words)
        # A step that undoes another is not stopped: the run is already doing what it is told to. And a task is
        # canceled once only: it may be busy cleaning up after the first time.
        stoppable = self.run.alone is not None and self.run.alone[0].step.undoes is None
        if urgent and stoppable and self.task is not None and not self.task.cancelling():
            self.task.cancel()

    async def _take_mail(self) -> None:
        run = self.run
        run.mail = False
        words = await inbox.read(self._worker.database, run.lease.run_id, patience=FOREVER)
        for word in words:
            apply_word(run.journal, word, in_flight=True)
            if word.command == Command.CANCEL:
                run.lease.status = RunState.CANCELING
            elif word.command == Command.TIME_OUT:
                self._overdue = True
        if words:
            await run.save(drained=[word.id for word in words if word.id is not None])

    async def _interrupt(self) -> None:
        """Stop what is in flight and take down how each ended."""
        tasks = [task for task, _ in self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._settle_finished()

    # ------------------------------------------------------------ leaving

    async def _leave(self, then: Wait | Settle) -> bool:
        return await self.run.let_go(conclude(self.run.journal, then, actor=self.run.actor))

    async def _await_flow(self) -> bool:
        """The version that the run began with is not here. It waits for a worker that has it, and says so."""
        run = self.run
        flow = run.journal.plan.awaited
        log.warning("flow_not_deployed", run_id=str(run.lease.run_id), flow=flow)
        entry = run.journal.draft_move(RunEvent.PARK, actor=run.actor, data={"awaits_flow": flow})
        return await run.let_go(Leave(RunState.WAITING_EXTERNAL, entry), undeployed=flow)

    async def _abandon(self) -> None:
        """The worker ends before the step does. If it can still write it gives the run back, so that the next worker
        need not wait until this one is declared lost."""
        for task, _ in self._tasks.values():
            task.cancel()
        if self._worker.draining:
            with contextlib.suppress(LeaseLost):
                await self.run.let_go(Leave(self.run.lease.status, queue=True))

    async def _hand_on(self, error: Exception) -> None:
        """Something that should not happen did. Once a step was begun the run ends with that, so nothing is repeated.

        Before that another worker may do better: one that can load what this one cannot.
        """
        if self._settler.has_begun:
            await self._give_up(f"{type(error).__name__}: {error}")
        else:
            await self._hand_back()

    async def _put_aside(self, error: Unreadable) -> None:
        """Another worker may be able to read it, of an older or a newer version. If many could not, it has failed."""
        run, database = self.run, self._worker.database
        log.error("run_unreadable", run_id=str(run.lease.run_id), error=error.detail)
        vain = await leases.claims_in_vain(database, run.lease.run_id, run.lease.token)
        if vain < _MOST_READERS:
            await self._hand_back()
        else:
            await database.command(partial(self._end_unread, error.detail[:2000]))
            self._worker.run_errands()

    async def _end_unread(self, why: str, tx: Tx) -> None:
        """In one transaction: whoever is free would else have the run before it has ended, and find out the same."""
        run, worker = self.run, self._worker
        await leases.hand_back(tx, worker.me, run.lease.run_id, run.lease.token)
        await give_up(tx, worker.database, run.row, run.actor, why)

    async def _hand_back(self) -> None:
        # Not at once: what fails every time must not keep us busy.
        await asyncio.sleep(self._worker.settings.poll_seconds)
        await leases.hand_back(self._worker.database, self._worker.me, self.run.lease.run_id, self.run.lease.token)

    async def _give_up(self, why: str) -> None:
        """What the run produced cannot be stored. The journal is read again as it was before that, and the step that
        comes next in it fails with this as the reason."""
        run = self.run
        run.row = {**dict(run.row), "fresh": False, "lost": False}
        await self._load()
        following = self._advance()
        for fold in (following.start + following.resume)[:1]:
            self._settler.begin(fold)
            error = {"type": "Unacceptable", "message": why.replace("\x00", "\ufffd")[:2000]}
            data = {"error": error, "reason": RunReason.TERMINAL_ERROR}
            run.journal.move_step(fold, StepEvent.FAIL, actor=run.actor, data=data)
        then: object = self._advance().then
        if isinstance(then, Stop):
            then = self._wind_up(then)
        if run.journal.is_undoing and not self._undoing:
            await self._begin_to_undo()
        await (self._leave(then) if isinstance(then, Settle) else run.yield_lease())
