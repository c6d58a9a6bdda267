"""Telling: what people see of a step before it ends, that it has begun and what its model says."""

import time
from datetime import timedelta

from interlock.engine.append import Write
from interlock.journal import Entry, EntryType, Reply, StepFold
from interlock.lifecycle import StepEvent, StepState
from interlock.worker.held import HeldRun

# How long what a model says is gathered before it is told.
_TELL_SECONDS = 0.15


class Teller:
    __slots__ = ("_noted", "_run", "_said_at", "_unsaid")

    def __init__(self, run: HeldRun) -> None:
        self._run = run
        self._noted: set[str] = set()
        # What a model has said and nobody was told yet, and when somebody was told last.
        self._unsaid = ""
        self._said_at = 0.0

    def note_slow(self, fold: StepFold, began: float) -> None:
        """A step that takes long gets an entry of its own, so that people see it. A write has one: its intent."""
        if self._may_tell() and (begun := self._begun(fold, began)):
            self._put(begun)

    def forget_slow(self, fold: StepFold) -> None:
        self._noted.discard(fold.step.key)

    def hear(self, fold: StepFold, text: str) -> None:
        self._unsaid += text
        if time.perf_counter() - self._said_at >= _TELL_SECONDS:
            self.tell()

    def tell(self) -> None:
        """An entry for all that was said since the last one: what a provider sends word by word is not stored so."""
        if not self._unsaid or self._run.alone is None or not self._may_tell():
            return
        fold, began = self._run.alone
        begun = self._begun(fold, began)  # a step that speaks has begun
        self._put([*begun, self._delta(fold, after=len(begun))])

    def tell_rest(self, fold: StepFold) -> None:
        """Put together, what was told is what was said."""
        if self._unsaid and fold.undeclared is None:
            self._run.journal.add(self._delta(fold))
        self.forget_said()

    def tell_whole(self, fold: StepFold) -> None:
        if text := Reply.of(fold).text:
            data = {"role": "assistant", "text": text}
            self._run.journal.note(EntryType.MESSAGE, actor=self._run.actor, step=fold.step.key, data=data)

    def forget_said(self) -> None:
        self._unsaid, self._said_at = "", 0.0  # the first of the next answer is told at once

    def _begun(self, fold: StepFold, began: float) -> list[Entry]:
        run, key = self._run, fold.step.key
        if key in self._noted or fold.status != StepState.RUNNING or fold.reclaims or fold.receipt_id is not None:
            return []
        self._noted.add(key)
        since = run.now() - timedelta(seconds=time.perf_counter() - began)
        entry = Entry(
            run.journal.seq + 1, "step_transition", run.actor, key, StepState.PENDING, StepEvent.CLAIM,
            StepState.RUNNING, fold.attempt, run.journal.declaring(fold, {"started_at": since}),
        )  # fmt: skip
        return [entry]

    def _delta(self, fold: StepFold, after: int = 0) -> Entry:
        text, self._unsaid, self._said_at = self._unsaid, "", time.perf_counter()
        seq, actor = self._run.journal.seq + 1 + after, self._run.actor
        return Entry(seq, EntryType.MESSAGE_DELTA, actor, fold.step.key, attempt=fold.attempt, data={"text": text})

    def _may_tell(self) -> bool:
        """Not before what was told last is stored: if it was refused, what comes after it would leave a hole."""
        told = self._run.told
        return not self._run.journal.unsaved and (told is None or (told.done() and told.exception() is None))

    def _put(self, entries: list[Entry]) -> None:
        """On its own, and not waited for: the step goes on. The run's next write sees what became of it."""
        self._run.journal.seq = entries[-1].seq
        self._run.told = self._run.worker.flusher.put(Write(self._run.lease, entries))
