"""Progress: report that a step has started and what its model says, before the step ends."""

import time
from datetime import timedelta

from interlock.engine.writing.journal_writer import Write
from interlock.journal import Entry, EntryType, ModelReply, StepSnapshot
from interlock.lifecycle import StepEvent, StepState
from interlock.worker.leased_run import LeasedRun

# How long a model's text is collected before it is reported.
_TELL_SECONDS = 0.15


class ProgressReporter:
    __slots__ = ("_noted", "_run", "_said_at", "_unsaid")

    def __init__(self, run: LeasedRun) -> None:
        self._run = run
        self._noted: set[str] = set()
        # The text of a model that has not been reported yet, and the time of the last report.
        self._unsaid = ""
        self._said_at = 0.0

    def note_slow(self, fold: StepSnapshot, began: float) -> None:
        """Write a start entry for a step that takes long, so that people see it.

        A write has one already: its intent.
        """
        if self._may_tell() and (begun := self._begun(fold, began)):
            self._put(begun)

    def forget_slow(self, fold: StepSnapshot) -> None:
        self._noted.discard(fold.step.key)

    def hear(self, fold: StepSnapshot, text: str) -> None:
        self._unsaid += text
        if time.perf_counter() - self._said_at >= _TELL_SECONDS:
            self.tell()

    def tell(self) -> None:
        """Write one entry for all text since the last one, instead of one per word from the provider."""
        if not self._unsaid or self._run.alone is None or not self._may_tell():
            return
        fold, began = self._run.alone
        begun = self._begun(fold, began)  # a step whose model speaks has started
        self._put([*begun, self._delta(fold, after=len(begun))])

    def tell_rest(self, fold: StepSnapshot) -> None:
        """Report the remaining text, so that the reported pieces add up to the whole."""
        if self._unsaid and fold.undeclared is None:
            self._run.journal.add(self._delta(fold))
        self.forget_said()

    def tell_whole(self, fold: StepSnapshot) -> None:
        reply = ModelReply.of(fold)
        if reply.text or reply.ending:
            data = {"role": "assistant", "text": reply.text, **reply.ending}
            self._run.journal.note(EntryType.MESSAGE, actor=self._run.actor, step=fold.step.key, data=data)

    def forget_said(self) -> None:
        self._unsaid, self._said_at = "", 0.0  # report the start of the next answer at once

    def _begun(self, fold: StepSnapshot, began: float) -> list[Entry]:
        run, key = self._run, fold.step.key
        declared = fold.receipt_id is not None or not fold.idempotent  # the step already has a start entry
        if key in self._noted or fold.status != StepState.RUNNING or fold.reclaims or declared:
            return []
        self._noted.add(key)
        since = run.now() - timedelta(seconds=time.perf_counter() - began)
        entry = Entry(
            run.journal.seq + 1, "step_transition", run.actor, key, StepState.PENDING, StepEvent.CLAIM,
            StepState.RUNNING, fold.attempt, run.journal.declaring(fold, {"started_at": since}),
        )  # fmt: skip
        return [entry]

    def _delta(self, fold: StepSnapshot, after: int = 0) -> Entry:
        text, self._unsaid, self._said_at = self._unsaid, "", time.perf_counter()
        seq, actor = self._run.journal.seq + 1 + after, self._run.actor
        return Entry(seq, EntryType.MESSAGE_DELTA, actor, fold.step.key, attempt=fold.attempt, data={"text": text})

    def _may_tell(self) -> bool:
        """Return True once the previous report is stored. If that was rejected, a later one would leave a gap."""
        told = self._run.told
        return not self._run.journal.unsaved and (told is None or (told.done() and told.exception() is None))

    def _put(self, entries: list[Entry]) -> None:
        """Write the entries without waiting, so that the step continues. The run's next write checks the result."""
        self._run.journal.seq = entries[-1].seq
        self._run.told = self._run.worker.flusher.put(Write(self._run.lease, entries))
