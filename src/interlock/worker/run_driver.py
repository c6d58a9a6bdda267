"""The run driver: ask the journal what may start, execute it, append the results, until the run waits or ends."""

import asyncio
import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from interlock import tracing
from interlock.definition.plan import StepKind
from interlock.engine import expression_answers as answers
from interlock.engine.queueing import leases
from interlock.engine.writing.change import OpenApproval, SubscribeEvent
from interlock.engine.writing.deliver import commands_for, fail_unreadable
from interlock.engine.writing.load import replayed
from interlock.errors import LeaseLost, Unavailable, Unreadable
from interlock.flows import Replay
from interlock.journal import (
    TIMED_OUT,
    CommandType,
    EntryType,
    InterruptInFlight,
    LeaseRelease,
    NextActions,
    RunOutcome,
    StepSnapshot,
    Suspend,
    advance,
    apply_command,
    begin_compensation,
    release_for,
)
from interlock.lifecycle import RunEvent, RunReason, RunState, StepEvent, StepState
from interlock.store import sql
from interlock.store.pool import NO_TIMEOUT, Tx
from interlock.store.records import ClaimedRun, EntryRecord
from interlock.telemetry import log
from interlock.worker.admission import Admission
from interlock.worker.batch_committer import Unacceptable
from interlock.worker.crash_quarantine import await_quarantine_slot, end_trial, give_way
from interlock.worker.executor import execute
from interlock.worker.flow_replay import replay_of
from interlock.worker.leased_run import LeasedRun
from interlock.worker.local_lease import Lapsed
from interlock.worker.outcome import CallOutcome, Failed, Interrupted
from interlock.worker.progress import ProgressReporter
from interlock.worker.recovery import Recovery, was_orphaned
from interlock.worker.step_recorder import StepRecorder
from interlock.worker.tool_call import PreparedCall

if TYPE_CHECKING:
    from interlock.worker.worker import Worker


# How often an unreadable run is claimed before it fails.
_MOST_READERS = 20


class Driver:
    """Drives one run from its claim until its lease is released."""

    __slots__ = (
        "_finished", "_flow", "_orphaned", "_overdue", "_passage", "_settler", "_tasks", "_teller", "_undoing",
        "_worker", "run", "task",
    )  # fmt: skip

    def __init__(self, worker: "Worker", row: ClaimedRun) -> None:
        self._worker = worker
        self.run = LeasedRun(worker, row)
        self.task: asyncio.Task[None] | None = None
        self._teller = ProgressReporter(self.run)
        self._settler = StepRecorder(self.run, self._teller)
        self._passage = Admission(self.run, self._settler, self._teller.hear)
        # The Python function that asks for the run's steps, if the run has a flow and this worker has its code.
        self._flow: Replay | None = None
        # Steps that run side by side: their tasks by key, each with its start time; and finished steps that are not
        # settled.
        self._tasks: dict[str, tuple[asyncio.Task[None], float]] = {}
        self._finished: list[tuple[PreparedCall, CallOutcome, float]] = []
        # The previous worker of the run was lost, and no worker has continued it since.
        self._orphaned = False
        # The run's deadline passed.
        self._overdue = False
        # The run's row already says that it compensates.
        self._undoing = False

    async def drive(self) -> None:
        try:
            await self._load()
            await self._recover()
            if self._worker.trials.alone is not None:
                await give_way(self.run)
            while not await self._round():
                if self._worker.trials.alone is not None:
                    await give_way(self.run)
        except (asyncio.CancelledError, Lapsed):
            await self._abandon()
        except LeaseLost:
            log.warning("lease_lost", run_id=str(self.run.lease.run_id), token=self.run.lease.token)
            await self._interrupt()
            self._worker.recheck_lease()
        except Unacceptable as error:
            await self._interrupt()
            await self._give_up(str(error))
        except Unreadable as error:
            await self._put_aside(error)
        except Unavailable:
            raise  # nothing has started; the worker later asks the database for its runs and takes this one up
        except Exception as error:
            log.error("drive_failed", run_id=str(self.run.lease.run_id), exc_info=error)
            await self._interrupt()
            await self._hand_on(error)
        finally:
            end_trial(self.run)
            if self._flow is not None:
                self._flow.close()

    # ------------------------------------------------------------ loading and recovery

    async def _load(self) -> None:
        run = self.run
        plan = await self._worker.plan_of(run.row)
        run.journal = replayed(run.row, plan, ())
        given = run.journal.scope.trigger.get("traceparent")
        run.traceparent = given if tracing.spans is None else tracing.run_traceparent(run.lease.run_id, given)
        if run.row.is_new and run.row.seq == 2:
            # The two entries of a new run are known without reading them: it was created, and started by this claim. A
            # run has more entries if it continues another or waited before its first step.
            run.journal.at(RunState.RUNNING, seq=2)
            self._take_up_flow()
            return
        entries = await sql.journal_of(self._worker.database.patiently(NO_TIMEOUT), run_ids=[run.row.id])
        self._refuse_to_act_for_another(entries)
        run.journal = replayed(run.row, plan, entries)
        if entries:
            run.not_before(entries[-1].at)
        self._undoing = run.journal.is_undoing
        self._orphaned = was_orphaned(entries)
        self._take_up_flow()

    def _take_up_flow(self) -> None:
        if self._flow is not None:
            self._flow.close()  # the flow ran on a journal that could not be stored
        self._flow = replay_of(self.run)

    @property
    def _lacks_flow(self) -> bool:
        return self.run.journal.plan.flow is not None and self._flow is None

    def _refuse_to_act_for_another(self, entries: list[EntryRecord]) -> None:
        """Raise LeaseLost if the journal has a newer token or records the loss of this one.

        Another worker then holds the run. A worker that was frozen between its claim and this check would repeat that
        worker's steps.
        """
        token = self.run.lease.token
        if any((e.token, e.type == EntryType.ORPHAN_DETECTED) >= (token, True) for e in entries):
            raise LeaseLost("somebody else holds the run now")

    async def _recover(self) -> None:
        """Restart or reconcile the steps that another worker was executing when it was lost or had to stop.

        If the worker was lost, its reads may have started without an entry. They count as started, so that a step that
        kills its workers does not start for ever. After a graceful stop only steps with a start entry were interrupted:
        writes (outcome unknown), reads that must not be repeated, and model calls (partially streamed).
        """
        run, lost = self.run, self._orphaned
        if run.journal.seq == 2 or self._lacks_flow:
            return  # nothing has started yet, or a worker with the flow's code has to recover it
        if self._flow is not None:
            self._flow.resume()  # a step's input is not in the journal: the flow has to ask for the step again
            if run.journal.end is not None:
                return
        if lost:
            await await_quarantine_slot(run)
            if self._worker.draining:
                return
            for fold in (await self._advance()).start:
                if self._may_have_begun(fold) and run.is_served_here(fold):
                    run.journal.begin(fold)
        for fold in list(run.journal.unsettled()):
            spoke = fold.step.kind is StepKind.MODEL
            declared = fold.receipt_id is not None or not fold.idempotent
            cut_off = fold.status == StepState.RUNNING and (lost or declared or spoke)
            if cut_off and run.is_served_here(fold):
                await self._recovery.reclaim(fold)

    @property
    def _recovery(self) -> Recovery:
        """Create the recovery on demand; most runs never need it."""
        return Recovery(self.run, self._passage, self._settler)

    def _may_have_begun(self, fold: StepSnapshot) -> bool:
        """Return True if the step may have started without an entry.

        Writes and reads that must not be repeated have an entry. A tool unknown to this worker may be such a tool.
        """
        if fold.step.kind is StepKind.MODEL:
            return True
        tool = self._worker.shop.tools.find(fold.step.tool or "")
        return tool is not None and not tool.writes and tool.idempotent

    # ------------------------------------------------------------ the loop

    async def _round(self) -> bool:
        """Execute once what the journal asks for. Return True when the run's lease has been released."""
        run = self.run
        if run.has_commands:
            await self._apply_commands()
        following = await self._advance()
        if run.journal.is_undoing and not self._undoing:
            await self._begin_to_undo()
        then = following.then
        if self._overdue and not self._undoing and not self._has_come_to_its_end(then):
            then = InterruptInFlight(TIMED_OUT)
        if isinstance(then, InterruptInFlight):
            await self._interrupt()
            then = self._wind_up(then)
            if then is None:
                return False  # undo what the run did before it ends
        if self._lacks_flow and not isinstance(then, RunOutcome):
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
            calls = [call for call in calls if not call.may_have_been_done or await self._was_not_done(call.fold)]
        if len(calls) == 1 and self._is_alone(calls[0]):
            await self._do_alone(calls[0])
        elif calls or self._is_busy:
            for call in calls:
                self._do_beside(call)
            await self._next_outcome()
        return False

    async def _was_not_done(self, fold: StepSnapshot) -> bool:
        """Return whether the step may be attempted after the database was restored.

        Return False if its effect happened before the restore, or if people have been asked about it.
        """
        assert self.run.journal.restored is not None
        return await self._recovery.can_reattempt(fold, after_restore_to=self.run.journal.restored["to"])

    async def _advance(self) -> NextActions:
        """Return the next actions.

        Keep new approvals and event subscriptions until the entries that open them are saved.
        """
        run = self.run
        flow = self._flow if run.journal.status != RunState.CANCELING else None
        while True:
            if flow is not None:
                flow.resume()
            following = advance(run.journal, run.now())
            run.effects += map(OpenApproval, following.approvals)
            run.effects += map(SubscribeEvent, following.subscriptions)
            if following.elsewhere:
                await answers.answer(run.lease.tenant_id, following.elsewhere)
                continue
            # A request of the flow may have been settled without a tool, like a wait that is over. Then the flow
            # continues.
            if flow is None or not flow.has_news():
                return following

    def _wind_up(self, stop: InterruptInFlight) -> RunOutcome | None:
        ending = stop.ending or RunOutcome(RunEvent.STOPPED, self.run.journal.asked)
        return begin_compensation(self.run.journal, ending, actor=self.run.actor)

    async def _begin_to_undo(self) -> None:
        """Record the start of compensation before anything is undone.

        The same write withdraws the run's open approvals and event subscriptions.
        """
        self._undoing = True
        await self.run.save(stops=True)
        self.run.lease.status = RunState.CANCELING
        if self.run.journal.has_children():
            self._worker.deliver_signals()

    def _has_come_to_its_end(self, then: object) -> bool:
        """Return True if the run ends by itself.

        If its last step was interrupted for the deadline, it timed out instead.
        """
        interrupted = any(fold.status == StepState.CANCELED for fold in self.run.journal.steps.values())
        return isinstance(then, RunOutcome) and (then.event == RunEvent.FAIL or not interrupted)

    @property
    def _is_busy(self) -> bool:
        """Return True if a step runs in a separate task, or has finished but is not settled."""
        return bool(self._tasks or self._finished)

    def _to_start(self, following: NextActions) -> list[StepSnapshot]:
        """Return the steps that the journal allows to start, and started steps that this worker is not executing."""
        starting = [] if self._worker.should_release(self.run) else following.start
        if following.resume:
            starting = starting + [fold for fold in following.resume if not self._is_at(fold)]
        return starting

    def _served_here(self, folds: list[StepSnapshot]) -> list[StepSnapshot]:
        """Return the steps that this worker may run, considering their labels: see `LeasedRun.is_served_here`."""
        if not self.run.is_away and all(fold.step.runs_on is None for fold in folds):
            return folds
        return [fold for fold in folds if self.run.is_served_here(fold)]

    def _must_yield(self) -> bool:
        if self._is_busy:
            return False
        if self._worker.should_release(self.run):
            return True
        if not self._worker.crowded or self._worker.trials.is_standing(self.run):
            return False
        return self.run.seconds_held > self._worker.settings.slice_seconds

    def _is_at(self, fold: StepSnapshot) -> bool:
        return fold.step.key in self._tasks or any(call.fold is fold for call, _, _ in self._finished)

    # ------------------------------------------------------------ executing steps

    def _is_alone(self, call: PreparedCall) -> bool:
        """Return True if no other step can progress while this one runs."""
        journal = self.run.journal
        if not journal.plan.is_dynamic:
            return journal.plan.is_sequence
        return all(fold is call.fold for fold in journal.open_steps())

    async def _do_alone(self, call: PreparedCall) -> None:
        """Execute the only step that can progress. It needs no separate task."""
        began = self._settler.begin(call.fold)
        self.run.alone = (call.fold, began)
        try:
            outcome = await execute(self._worker.shop, call)
        finally:
            self.run.alone = None
        if isinstance(outcome, Interrupted):
            assert self.task is not None
            if not self.run.has_commands or self._worker.abandoning:
                raise asyncio.CancelledError
            self.task.uncancel()
        await self._settle(call, outcome, began)

    def _do_beside(self, call: PreparedCall) -> None:
        began = self._settler.begin(call.fold)
        self._tasks[call.fold.step.key] = asyncio.create_task(self._run_step(call, began)), began

    async def _run_step(self, call: PreparedCall, began: float) -> None:
        outcome = await execute(self._worker.shop, call)
        del self._tasks[call.fold.step.key]
        self._finished.append((call, outcome, began))
        self.run.wake.set()

    async def _next_outcome(self) -> None:
        """Wait for a step, for mail, or for the time of a retry or a timer beside the steps."""
        run = self.run
        times = [t for f in run.journal.unsettled() for t in (f.next_run_at, f.due_at) if t is not None]
        patience = max((min(times) - run.now()).total_seconds(), 0.0) if times else None
        if not self._finished and not run.has_commands:
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

    async def _settle(self, call: PreparedCall, outcome: CallOutcome, began: float) -> None:
        """Settle the step. A write that was cut off is reconciled before any retry."""
        if isinstance(outcome, Interrupted) and self._worker.shop.lease.is_over:
            raise asyncio.CancelledError  # the worker was lost, and the run was not ordered to stop
        if isinstance(outcome, Failed) and outcome.in_doubt:
            if call.left_behind:
                # Reconciling would prove nothing: the thread may cause the effect after the other system has answered.
                self._recovery.doubt(call.fold, call.action, outcome.error)
                return
            if not await self._recovery.can_reattempt(call.fold, outcome.error):
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
        self.run.has_commands = True
        self.run.wake.set()
        if self.run.alone is not None:
            self._worker.spawn(self._interrupt_if_asked())

    async def _interrupt_if_asked(self) -> None:
        commands = await commands_for(self._worker.database, self.run.row.id)
        urgent = any(command.command in (CommandType.CANCEL, CommandType.TIME_OUT) for command in commands)
        # A compensation step is not stopped: the run already does what the command asks. A task is canceled only once,
        # because it may be cleaning up after the first cancellation.
        stoppable = self.run.alone is not None and self.run.alone[0].step.undoes is None
        if urgent and stoppable and self.task is not None and not self.task.cancelling():
            self.task.cancel()

    async def _apply_commands(self) -> None:
        run = self.run
        run.has_commands = False
        commands = await run.pending_commands()
        for command in commands:
            apply_command(run.journal, command, in_flight=True)
            if command.command == CommandType.CANCEL:
                run.lease.status = RunState.CANCELING
            elif command.command == CommandType.TIME_OUT:
                self._overdue = True
        if commands:
            await run.save(drained=[command.id for command in commands if command.id is not None])

    async def _interrupt(self) -> None:
        """Stop all running steps and record how each ended."""
        tasks = [task for task, _ in self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._settle_finished()

    # ------------------------------------------------------------ releasing the run

    async def _leave(self, then: Suspend | RunOutcome) -> bool:
        return await self.run.release_lease(release_for(self.run.journal, then, actor=self.run.actor))

    async def _await_flow(self) -> bool:
        """Park the run until a worker with its version of the flow claims it, and record which version it needs."""
        run = self.run
        flow = run.journal.plan.awaited
        log.warning("flow_not_deployed", run_id=str(run.lease.run_id), flow=flow)
        entry = run.journal.draft_move(RunEvent.PARK, actor=run.actor, data={"awaits_flow": flow})
        return await run.release_lease(LeaseRelease(RunState.WAITING_EXTERNAL, entry, awaits_flow=flow))

    async def _abandon(self) -> None:
        """Stop the steps because the worker ends before them.

        If the worker can still write, it releases the run, so that the next worker need not wait until this one is
        declared lost. It keeps a run that still acts in a thread: no worker may restart or reconcile that call before
        this process has ended.
        """
        tasks = [task for task, _ in self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        lease = self._worker.shop.lease
        if self._worker.draining and not lease.acts_for(self.run.lease.run_id) and not lease.is_over:
            with contextlib.suppress(LeaseLost):
                await self.run.release_lease(LeaseRelease(self.run.lease.status, queue=True))

    async def _hand_on(self, error: Exception) -> None:
        """Handle an unexpected error.

        If a step has started, the run ends with the error, so that nothing is repeated. Before that, release the run:
        another worker may be able to load what this one cannot.
        """
        if self._settler.has_begun:
            await self._give_up(f"{type(error).__name__}: {error}")
        else:
            await self._hand_back()

    async def _put_aside(self, error: Unreadable) -> None:
        """Release an unreadable run, because a worker of another version may be able to read it.

        After many failed claims, fail it.
        """
        run, database = self.run, self._worker.database
        log.error("run_unreadable", run_id=str(run.lease.run_id), error=error.detail)
        vain = await sql.claims_in_vain(database, run_id=run.row.id, token=run.lease.token)
        if vain < _MOST_READERS:
            await self._hand_back()
        else:
            await database.run_in_transaction(partial(self._end_unread, error.detail[:2000]))
            self._worker.deliver_signals()

    async def _end_unread(self, why: str, tx: Tx) -> None:
        """Fail the run in one transaction.

        Otherwise a free worker would claim it before it has ended, and fail the same way.
        """
        run, worker = self.run, self._worker
        await leases.hand_back(tx, worker.me, run.row.id, run.lease.token)
        await fail_unreadable(tx, run.row.tenant_id, run.row.id, run.actor, why)

    async def _hand_back(self) -> None:
        # Not at once: a run that fails every time must not keep this worker busy.
        await asyncio.sleep(self._worker.settings.poll_seconds)
        await leases.hand_back(self._worker.database, self._worker.me, self.run.row.id, self.run.lease.token)

    async def _give_up(self, why: str) -> None:
        """Fail the next step, because what the run produced cannot be stored.

        The journal is read again as it was before that, and its next step fails with `why`.
        """
        run = self.run
        run.row = replace(run.row, is_new=False, reclaimed=False)
        await self._load()
        following = await self._advance()
        for fold in (following.start + following.resume)[:1]:
            self._settler.begin(fold)
            error = {"type": "Unacceptable", "message": why.replace("\x00", "\ufffd")[:2000]}
            data = {"error": error, "reason": RunReason.TERMINAL_ERROR}
            run.journal.move_step(fold, StepEvent.FAIL, actor=run.actor, data=data)
        then: object = (await self._advance()).then
        if isinstance(then, InterruptInFlight):
            then = self._wind_up(then)
        if run.journal.is_undoing and not self._undoing:
            await self._begin_to_undo()
        await (self._leave(then) if isinstance(then, RunOutcome) else run.yield_lease())
