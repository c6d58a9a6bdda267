"""Oracles: properties of every journal and of the tools' own records, after any kill. All are pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from interlock.lifecycle import STEP

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Execution:
    """A line that a tool wrote: it started, made its effect or ended; or the engine called its `reconcile`."""

    what: Literal["begin", "effect", "end", "asked"]
    run_id: str
    step: str
    attempt: int
    pid: int
    at: int

    @classmethod
    def read(cls, line: str) -> "Execution":
        what, run_id, step, attempt, pid, at = line.split()
        assert what in ("begin", "effect", "end", "asked")
        return cls(what, run_id, step, int(attempt), int(pid), int(at))  # type: ignore[arg-type]


def by_run(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    journals: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        journals[str(entry["run_id"])].append(entry)
    return journals


def assert_sound(entries: Iterable[Entry], steps: Sequence[str], runs: int) -> None:
    """Check that this many runs have unique entry numbers, end once, in their last entry, and settle each step once."""
    journals = by_run(entries)
    assert len(journals) == runs, f"{len(journals)} runs have a journal, {runs} were started"
    for run_id, journal in journals.items():
        assert_gap_free([e["seq"] for e in journal], run_id)
        assert_one_ending(journal, run_id)
        assert_settled_once(journal, steps, run_id)
        assert_tokens_grow(journal, run_id)


def assert_gap_free(numbers: Sequence[int], run_id: str = "run") -> None:
    assert list(numbers) == list(range(1, len(numbers) + 1)), f"{run_id}: numbers {numbers}"


def assert_one_ending(journal: Sequence[Entry], run_id: str = "run") -> None:
    endings = [e["seq"] for e in journal if e["type"] == "run_completed"]
    assert endings == [journal[-1]["seq"]], f"{run_id}: ended at {endings} of {journal[-1]['seq']}"
    assert journal[-1]["to_state"] == "succeeded", f"{run_id}: {journal[-1]['to_state']}, {journal[-1]['data']}"


def assert_settled_once(journal: Sequence[Entry], steps: Sequence[str], run_id: str = "run") -> None:
    settled = [e["step"] for e in journal if e["step"] and e["to_state"] in STEP.terminal]
    assert settled == list(steps), f"{run_id}: settled {settled}"


def assert_tokens_grow(journal: Sequence[Entry], run_id: str = "run") -> None:
    """A writer that lost its lease wrote nothing after the next writer had started."""
    tokens = [e["token"] for e in journal if e["token"]]
    assert tokens == sorted(tokens), f"{run_id}: tokens {tokens}"


def assert_done_again_only_after_a_loss(
    executions: Iterable[Execution], entries: Iterable[Entry], *, late: bool = False
) -> None:
    """A tool ran once for each attempt. Each repeated attempt follows one that was lost with its worker; the last
    counts.

    An attempt may leave no line: it counts also if its worker is lost before it calls the tool. With `late`, a
    stopped worker may have had a claim or a commit in progress. When it continues, it may start a step of another
    worker's run.
    """
    attempts: dict[tuple[str, str], list[int]] = defaultdict(list)
    for line in executions:
        if line.what == "begin":
            attempts[line.run_id, line.step].append(line.attempt)
    for run_id, journal in by_run(entries).items():
        losses = sum(e["type"] == "orphan_detected" for e in journal)
        for entry in journal:
            if entry["event"] != "succeed" or entry["step"] is None:
                continue
            began = attempts.pop((run_id, entry["step"]), [])
            began = sorted(began) if late else began
            name = f"{run_id} {entry['step']}"
            assert began and began[-1] == entry["attempt"], f"{name}: began {began}, settled {entry['attempt']}"
            assert all(a < b for a, b in pairwise(began)), f"{name}: attempts {began}"
            assert len(began) <= 1 + losses, f"{name}: done {len(began)} times, its worker was lost {losses} times"
    assert not attempts, f"done, but in no journal: {list(attempts)[:5]}"


def interrupted(executions: Iterable[Execution]) -> set[tuple[str, str, int]]:
    """Return attempts that started and never ended: a kill interrupted them."""
    seen: dict[str, set[tuple[str, str, int]]] = {"begin": set(), "end": set()}
    for line in executions:
        seen[line.what].add((line.run_id, line.step, line.attempt))
    return seen["begin"] - seen["end"]


def most_at_once(executions: Iterable[Execution]) -> int:
    now = most = 0
    for line in sorted(executions, key=lambda line: line.at):
        now += 1 if line.what == "begin" else -1
        most = max(most, now)
    return most


def assert_ratio(first: int, second: int, expected: float, tolerance: float) -> None:
    assert second > 0, "the second got nothing"
    ratio = first / second
    assert abs(ratio / expected - 1) <= tolerance, f"{first}:{second} is {ratio:.2f}, not {expected} ± {tolerance:.0%}"
