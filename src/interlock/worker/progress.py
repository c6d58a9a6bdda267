"""Progress: report that a step has started and what its model says, before the step ends."""

import time
from datetime import timedelta

from interlock.journal import EntryType, ModelReply, StepSnapshot
from interlock.lifecycle import StepState
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
        if self._may_tell() and self._add_start(fold, began):
            self._report()

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
        self._add_start(fold, began)  # a step whose model speaks has started
        self._add_delta(fold)
        self._report()

    def tell_rest(self, fold: StepSnapshot) -> None:
        """Report the remaining text, so that the reported pieces add up to the whole."""
        if self._unsaid and fold.undeclared is None:
            self._add_delta(fold)
        self.forget_said()

    def tell_whole(self, fold: StepSnapshot) -> None:
        reply = ModelReply.of(fold)
        if reply.text or reply.ending:
            data = {"role": "assistant", "text": reply.text, **reply.ending}
            self._run.journal.note(EntryType.MESSAGE, actor=self._run.actor, step=fold.step.key, data=data)

    def forget_said(self) -> None:
        self._unsaid, self._said_at = "", 0.0  # report the start of the next answer at once

    def _add_start(self, fold: StepSnapshot, began: float) -> bool:
        """Add the start entry of a step that has begun without one. Return False if it needs none."""
        run, key = self._run, fold.step.key
        declared = fold.receipt_id is not None or not fold.idempotent  # the step already has a start entry
        if key in self._noted or fold.status != StepState.RUNNING or fold.reclaims or declared:
            return False
        self._noted.add(key)
        since = run.now() - timedelta(seconds=time.perf_counter() - began)
        run.journal.add_start(fold, actor=run.actor, data={"started_at": since})
        return True

    def _add_delta(self, fold: StepSnapshot) -> None:
        text, self._unsaid, self._said_at = self._unsaid, "", time.perf_counter()
        self._run.journal.note(
            EntryType.MESSAGE_DELTA,
            actor=self._run.actor,
            step=fold.step.key,
            attempt=fold.attempt,
            data={"text": text},
        )

    def _may_tell(self) -> bool:
        """Return True once the previous report is stored. If that was rejected, a later one would leave a gap."""
        reported = self._run.reported
        settled = reported is None or (reported.done() and reported.exception() is None)
        return not self._run.journal.unsaved and settled

    def _report(self) -> None:
        self._run.report(self._run.journal.take_unsaved())
