"""A player: drives a journal as a worker and people would, without a database, in random order."""

import random
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import orjson
from hypothesis import strategies as st

from interlock.definition.plan import Plan, StepKind
from interlock.definition.workflow import load, parse
from interlock.journal import (
    ApprovalKind,
    CommandType,
    Entry,
    InterruptInFlight,
    Journal,
    NextActions,
    RunCommand,
    RunOutcome,
    StepSnapshot,
    Suspend,
    advance,
    apply_command,
    begin_compensation,
    encode,
    release_for,
    request_approval,
    requeue,
)
from interlock.lifecycle import RUN, SETTLED_WELL, STEP, RunEvent, RunReason, RunState, StepEvent, StepState, Tier

RUN_ID = UUID(int=7)
BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)
CONDITIONS = ["input.yes", "input.no", "input.no", "input.number", "input.gone"]
INPUT = {"yes": True, "no": False, "number": 1}


def journal_of(plan: Plan) -> Journal:
    return Journal(RUN_ID, plan, input=INPUT, trigger={"source": "test"}, run={"id": str(RUN_ID)})


def journal(steps: str, **top: Any) -> Journal:
    """Create and start a journal of the YAML steps."""
    head = "".join(f"{key}: {value}\n" for key, value in top.items())
    made = journal_of(parse(f"name: w\n{head}steps: {steps}"))
    made.create(actor="me", data={})
    made.move_run(RunEvent.START, actor="worker:w")
    return made


def states(made: Journal) -> dict[str, str]:
    return {key: str(fold.status) for key, fold in made.steps.items()}


def lines(made: Journal) -> list[str]:
    """Return the entries since the last call: `step -event-> to`."""
    return [f"{e.step or 'run'} -{e.event}-> {e.to_state}" for e in made.take_unsaved()]


def succeed(made: Journal, key: str, output: Any = None) -> None:
    made.begin(made.steps[key])
    made.move_step(made.steps[key], StepEvent.SUCCEED, actor="worker:w", output=encode(output))


def state_of(made: Journal, *, times: bool = False) -> dict[str, Any]:
    """Return the whole state as plain values. A live journal does not know yet when its entries are committed."""
    steps = {}
    for key, fold in {**made.steps, **made.undos}.items():
        known = {name: getattr(fold, name) for name in fold.__slots__ if name != "step"}
        if not times:
            known = {name: value for name, value in known.items() if name not in ("started_at", "completed_at")}
        steps[key] = known
    failed = made.failed.step.key if made.failed else None
    return {
        "status": made.status, "reason": made.reason, "asked": made.asked, "seq": made.seq, "failed": failed,
        "steps": steps, "undos": list(made.undos), "ending": made.ending, "cost": made.cost_usd(),
        "result": made.result(),
    }  # fmt: skip


def through_the_database(entries: list[Entry]) -> list[Entry]:
    """Return what the database would return: data as JSON, and the time of the commit."""
    return [
        Entry(**asdict(e) | {"data": orjson.loads(encode(e.data)) if e.data else None, "at": e.at or _at(e.seq)})
        for e in entries
    ]


def _at(seq: int) -> datetime:
    return BEGINNING + timedelta(milliseconds=seq)


# ---------------------------------------------------------------- random plans


@st.composite
def plans(draw: st.DrawFn, *, graph: bool = True) -> Plan:
    count = draw(st.integers(1, 7))
    steps: list[dict[str, Any]] = []
    for index in range(count):
        step: dict[str, Any] = {"id": f"s{index}"}
        match draw(st.sampled_from(["tool", "tool", "tool", "approval", "wait"])):
            case "tool":
                step |= {"tool": "t.do", "retry": {"max_attempts": draw(st.integers(1, 3))}}
                if draw(st.booleans()):
                    step["compensate"] = {"tool": "t.undo", "input": {"n": "${output.n}"}}
            case "approval":
                step["approval"] = {}
            case "wait":
                duration = {"duration": draw(st.sampled_from(["0s", "5s", "1h"]))}
                event = {"event": "e", "correlation": "${input.number}", "timeout": "1h"}
                step["wait"] = draw(st.sampled_from([duration, event]))
                if "event" in step["wait"]:
                    step["on_timeout"] = draw(st.sampled_from(["fail", "continue"]))
        if when := draw(
            st.sampled_from([None] * 12 + ["input.yes", "input.no", "input.no", "input.number", "input.gone"])
        ):
            step["when"] = when
        if graph and draw(st.booleans()):
            step["needs"] = draw(st.lists(st.sampled_from([s["id"] for s in steps]), unique=True)) if steps else []
        steps.append(step)
    on_reject = draw(st.sampled_from(["fail", "complete", "continue"]))
    return load({"name": "random", "on_reject": on_reject, "steps": steps})


# ---------------------------------------------------------------- playing a plan


class Player:
    def __init__(self, plan: Plan, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now = BEGINNING
        self.journal = journal_of(plan)
        self.written: list[Entry] = []
        self.in_flight: list[StepSnapshot] = []
        self.told_to_stop = False
        self.quiet: list[tuple[int, dict[str, Any]]] = []  # the state at each moment without a step in flight

    def play(self, most_rounds: int = 300) -> None:
        self.journal.create(actor="me", data={"workflow": "random"})
        for _ in range(most_rounds):
            self._round()
            self._save()
            if not self.in_flight:
                self.quiet.append((len(self.written), state_of(self.journal)))
            if self.journal.status in RUN.terminal:
                return
        raise AssertionError(f"it never ends: {state_of(self.journal)}")

    def _save(self, *more: Entry | None) -> None:
        self.written += self.journal.take_unsaved()
        for entry in filter(None, more):
            self.journal.apply(entry)
            self.written.append(entry)

    def _round(self) -> None:
        following = advance(self.journal, self.now)
        self._check(following)
        self._save()
        match following.then:
            case None:
                self._work(following)
            case Suspend() as wait:
                assert not self.in_flight
                self._save(release_for(self.journal, wait).entry)
                self._wait(wait)
            case InterruptInFlight(ending):
                for fold in self.in_flight:
                    self.journal.move_step(fold, StepEvent.CANCEL, actor="worker:w")
                self.in_flight.clear()
                ending = ending or RunOutcome(RunEvent.STOPPED, self.journal.asked)
                if begin_compensation(self.journal, ending, actor="worker:w"):
                    self._end(ending)
            case RunOutcome() as ending:
                self._end(ending)

    def _end(self, ending: RunOutcome) -> None:
        assert not self.in_flight
        if self.journal.status == RunState.PENDING and ending.event == RunEvent.SUCCEED:
            self.journal.move_run(RunEvent.START, actor="worker:w")
        self._save()
        leave = release_for(self.journal, ending)
        self._save(leave.entry)
        assert (leave.status, leave.reason) == (self.journal.status, self.journal.reason)

    def _work(self, following: NextActions) -> None:
        if self.journal.status == RunState.PENDING:
            self.journal.move_run(RunEvent.START, actor="worker:w")
        self._save()
        self._save(requeue(self.journal).entry)
        for fold in following.start:
            self.journal.begin(fold)
            self.in_flight.append(fold)
        if self.dice.random() < 0.2 and (self._decide(in_flight=True) or self._tell(in_flight=True)):
            return
        if self.dice.random() < 0.03:
            self._cancel(in_flight=True)
            return
        self._outcome(self.in_flight.pop(self.dice.randrange(len(self.in_flight))))

    def _outcome(self, fold: StepSnapshot) -> None:
        error = {"error": {"type": "E", "message": "no"}, "cost_usd": 0.5}
        match self.dice.choice(["done", "done", "done", "retry", "fail", "reclaim", "hold"]):
            case "done":
                data = {"duration_ms": 1.5, "cost_usd": 0.25, "idempotency_key": "k"}
                output = encode({"n": self.dice.randrange(9)})
                self.journal.move_step(fold, StepEvent.SUCCEED, actor="worker:w", data=data, output=output)
            case "retry" if fold.failures + 1 < fold.step.retry.max_attempts:
                later = self.now + timedelta(seconds=fold.step.retry.delay(fold.failures + 1, self.dice.random()))
                self.journal.move_step(fold, StepEvent.RETRY, actor="worker:w", data=error | {"next_run_at": later})
            case "hold" if fold.approval_id is None:
                about: dict[str, Any] = {"tier": Tier.LOW, "two_person": False, "expires_in": 60.0, "summary": ""}
                request_approval(
                    self.journal, fold, StepEvent.HOLD, ApprovalKind.ACTION, **about, action={}, digest="d"
                )
            case "reclaim" if fold.reclaims < 3:
                self.journal.move_step(fold, StepEvent.RECLAIM, actor="worker:x")
                self.in_flight.append(fold)
            case _:
                error["reason"] = RunReason.ATTEMPTS_EXHAUSTED
                self.journal.move_step(fold, StepEvent.FAIL, actor="worker:w", data=error)

    def _wait(self, wait: Suspend) -> None:
        if self.dice.random() < 0.05:
            self._cancel(in_flight=False)
        elif wait.resume_at is not None and self.dice.random() < 0.5:
            self.now = max(self.now, wait.resume_at)
        elif not self._decide(in_flight=False) and not self._tell(in_flight=False):
            assert wait.resume_at is not None, "it waits for nobody and nothing"
            self.now = max(self.now, wait.resume_at)

    def _decide(self, *, in_flight: bool) -> bool:
        asked = [
            f for f in {**self.journal.steps, **self.journal.undos}.values() if f.status == StepState.WAITING_APPROVAL
        ]
        if not asked:
            return False
        fold = self.dice.choice(asked)
        decision = self.dice.choice(["approved", "approved", "rejected", "expired"])
        data = {"approval_id": fold.approval_id, "decision": decision, "reason": None}
        apply_command(
            self.journal, RunCommand(CommandType.DECIDE, "ann", data, step=fold.step.key), in_flight=in_flight
        )
        return True

    def _tell(self, *, in_flight: bool) -> bool:
        """Send an event that a step waits for, or let its time run out."""
        waiting = [f for f in self.journal.steps.values() if f.status == StepState.WAITING_EXTERNAL and f.awaits]
        if not waiting:
            return False
        word = RunCommand(
            CommandType.ARRIVE, "bank", {"event": {"type": "e"}, "payload": "{}"}, step=waiting[0].step.key
        )
        if self.dice.random() < 0.3:
            word = RunCommand(CommandType.MISS, "system:timeout", {}, step=waiting[0].step.key)
        apply_command(self.journal, word, in_flight=in_flight)
        return True

    def _cancel(self, *, in_flight: bool) -> None:
        if self.journal.status == RunState.CANCELING:
            apply_command(
                self.journal, RunCommand(CommandType.CANCEL, "ann", {"reason_code": "interrupted"}), in_flight=in_flight
            )
            return
        self.told_to_stop = True
        command = self.dice.choice([CommandType.CANCEL, CommandType.TIME_OUT])
        data = {"reason_code": RunReason.CANCELED_BY_USER, "said": None} if command == CommandType.CANCEL else {}
        apply_command(self.journal, RunCommand(command, "ann", data), in_flight=in_flight)

    def _check(self, following: NextActions) -> None:
        """Check the invariants of every moment against the fold, not against the code that made it."""
        made = self.journal
        if made.is_undoing:
            assert not any(f.step.undoes is None for f in (*following.start, *self.in_flight)), "it goes no further"
            assert len(following.start) + len(self.in_flight) <= 1, "one at a time"
        for fold in following.start:
            assert fold.step.kind == StepKind.TOOL, "workers never execute an approval"
            assert fold.status == StepState.PENDING
            assert fold.next_run_at is None or fold.next_run_at <= self.now
            assert all(made.steps[key].status in SETTLED_WELL for key in fold.step.after)
            assert not any(made.steps[key].status == StepState.SKIPPED for key in fold.step.needs)
        assert {id(f) for f in following.resume} == {id(f) for f in self.in_flight} or isinstance(
            following.then, InterruptInFlight
        )
        if made.plan.is_sequence:
            moving = [*following.start, *self.in_flight]
            assert len(moving) <= 1
            for fold in moving:
                earlier = made.plan.steps[: fold.step.index]
                assert all(made.steps[step.key].status in STEP.terminal for step in earlier)
