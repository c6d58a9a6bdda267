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
        run, key = self._run, fold.step.key
        if key in self._noted or run.journal.unsaved or fold.status != StepState.RUNNING or fold.reclaims:
            return
        if fold.receipt_id is not None:
            return
        self._noted.add(key)
        since = run.now() - timedelta(seconds=time.perf_counter() - began)
        entry = Entry(
            run.journal.seq + 1, "step_transition", run.actor, key, StepState.PENDING, StepEvent.CLAIM,
            StepState.RUNNING, fold.attempt, run.journal.declaring(fold, {"started_at": since}),
        )  # fmt: skip
        self._put(entry)

    def forget_slow(self, fold: StepFold) -> None:
        self._noted.discard(fold.step.key)

    def hear(self, fold: StepFold, text: str) -> None:
        self._unsaid += text
        if time.perf_counter() - self._said_at >= _TELL_SECONDS:
            self.tell()

    def tell(self) -> None:
        """An entry for all that was said since the last one: what a provider sends word by word is not stored so."""
        if not self._unsaid or self._run.alone is None or self._run.journal.unsaved:
            return
        fold, began = self._run.alone
        self.note_slow(fold, began)  # a step that speaks has begun
        self._put(self._delta(fold))

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

    def _delta(self, fold: StepFold) -> Entry:
        text, self._unsaid, self._said_at = self._unsaid, "", time.perf_counter()
        seq, actor = self._run.journal.seq + 1, self._run.actor
        return Entry(seq, EntryType.MESSAGE_DELTA, actor, fold.step.key, attempt=fold.attempt, data={"text": text})

    def _put(self, entry: Entry) -> None:
        """On its own, and not waited for: the step goes on."""
        self._run.journal.seq = entry.seq
        self._run.worker.flusher.put(Write(self._run.lease, [entry]))
