"""Comparison: which actions a new policy allows that the current policy denies or holds for approval.

Cedar's Python binding has no symbolic analysis, so this module probes. For each tool it judges an ordinary action by
both policies, and then the same action with one thing changed: a field, the target, a secret, the person, the place or
the time. The values come from the numbers and words in both texts, because a rule changes its answer at the values that
it names. This finds changes that a reviewer easily overlooks. It does not prove their absence: it misses actions that
depend on two changes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from interlock.policy.action import ProposedAction, propose
from interlock.policy.backtest import DecisionChange
from interlock.policy.cedar_types import Many, Number, Record, Text, Truth, Whole
from interlock.policy.decision import NOON, Asker, Circumstances
from interlock.policy.evaluator import CompiledPolicy
from interlock.policy.schema import SchemaEntry
from interlock.policy.source_scan import Literals, literals
from interlock.wire import Role

# Two evaluations of about 0.15 ms each: together at most a second.
_MOST_PROBES = 3000
_MOST_PER_TOOL = 5


@dataclass(frozen=True, slots=True)
class Probe:
    """A made-up action, and how it differs from an ordinary one."""

    action: ProposedAction
    asker: Asker
    when: Circumstances
    differs_by: str


def what_passes_more(
    before: CompiledPolicy, before_text: str, after: CompiledPolicy, after_text: str
) -> list[DecisionChange]:
    """Return probes that need less under `after` than under `before`, at most five for each tool."""
    words = literals(before_text, after_text)
    found: dict[str, list[DecisionChange]] = {}
    for probe in islice(_probes(before, after, words), _MOST_PROBES):
        changes = found.setdefault(probe.action.tool, [])
        if len(changes) < _MOST_PER_TOOL and (change := _judged(before, after, probe)) is not None:
            changes.append(change)
    return [change for changes in found.values() for change in changes]


def _judged(before: CompiledPolicy, after: CompiledPolicy, probe: Probe) -> DecisionChange | None:
    was = before.decide(probe.action, probe.asker, probe.when)
    will_be = after.decide(probe.action, probe.asker, probe.when)
    if not will_be.outcome.passes_more_than(was.outcome):
        return None
    summary = f"{probe.action.tool} for {probe.asker.role}" + (f" with {probe.differs_by}" if probe.differs_by else "")
    return DecisionChange(summary, was.outcome, will_be.outcome, will_be, {})


def _probes(before: CompiledPolicy, after: CompiledPolicy, words: Literals) -> Iterator[Probe]:
    """Yield one ordinary probe for every tool before any changed one, so that the limit never hides a whole tool."""
    ordinary = {name: _ordinary(entry) for name, entry in after.entries.items() if name in before.entries}
    yield from ordinary.values()
    changed = [_changed(after.entries[name], probe, words) for name, probe in ordinary.items()]
    while changed:
        for probes in list(changed):
            if (probe := next(probes, None)) is None:
                changed.remove(probes)
            else:
                yield probe


def _ordinary(entry: SchemaEntry) -> Probe:
    return Probe(propose(entry.facts, entry.input.completed({}, ())), Asker("someone", "operator"), NOON, "")


def _changed(entry: SchemaEntry, base: Probe, words: Literals) -> Iterator[Probe]:
    """Yield the probes that differ from an ordinary one by one thing that a rule looks at."""
    for role in Role:
        if role != base.asker.role:
            yield replace(base, asker=replace(base.asker, role=str(role)))
    if "auto_approve" in words.names:
        yield replace(base, when=replace(base.when, auto_approve=True), differs_by="auto_approve")
    if "secrets" in words.names:
        yield _secret(entry, base, "any", "a secret")
    for word in words.texts:
        yield from _named(entry, base, word, words.names)
    for path, value in _values(entry.input, words, ()):
        fields = _with(base.action.fields, path, value)
        yield replace(base, action=propose(entry.facts, fields), differs_by=f"{'.'.join(path)} = {value!r}")
    for number in words.numbers:
        if "hour" in words.names and 0 <= number <= 23:
            yield replace(base, when=replace(base.when, hour=number), differs_by=f"hour {number}")
        if "weekday" in words.names and 1 <= number <= 7:
            yield replace(base, when=replace(base.when, weekday=number), differs_by=f"weekday {number}")


def _named(entry: SchemaEntry, base: Probe, word: str, names: frozenset[str]) -> Iterator[Probe]:
    """Yield the probes in which the word is each of the things that the rules compare with words."""
    asker, when = base.asker, base.when
    if "Group" in names:
        yield replace(base, asker=replace(asker, groups=(word,)), differs_by=f"group {word}")
    if "Actor" in names:
        yield replace(base, asker=replace(asker, id=word), differs_by=f"actor {word}")
    if "tenant" in names:
        yield replace(base, asker=replace(asker, tenant=word), differs_by=f"tenant {word}")
    if "Env" in names:
        yield replace(base, when=replace(when, workspace=word), differs_by=f"workspace {word}")
    if "workflow" in names:
        yield replace(base, when=replace(when, workflow=word), differs_by=f"workflow {word}")
    if "step" in names:
        yield replace(base, when=replace(when, step=word), differs_by=f"step {word}")
    if "target" in names:
        yield replace(base, action=propose(entry.facts, base.action.fields, word), differs_by=f"target {word}")
    if "secrets" in names:
        yield _secret(entry, base, word, f"secret {word}")


def _secret(entry: SchemaEntry, base: Probe, name: str, differs_by: str) -> Probe:
    action = replace(propose(entry.facts, base.action.fields), secrets={"": (name,)})
    return replace(base, action=action, differs_by=differs_by)


def _values(shape: Record, words: Literals, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, member in shape.members.items():
        inner, is_list = member.shape, False
        while isinstance(inner, Many):
            inner, is_list = inner.of, True
        if isinstance(inner, Record):
            if not is_list:
                yield from _values(inner, words, (*path, name))
            continue
        for value in _candidates(inner, words):
            yield (*path, name), [value] if is_list else value


def _candidates(shape: Any, words: Literals) -> Iterable[Any]:
    match shape:
        case Truth():
            return (True, False)
        case Whole() | Number():
            return words.numbers
        case Text():
            return words.texts
        case _:
            return ()


def _with(fields: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    name, *rest = path
    inner = fields.get(name)
    return {**fields, name: _with(inner if isinstance(inner, Mapping) else {}, tuple(rest), value) if rest else value}
