"""Rules: the meaning of a policy's annotations, and every mistake in a policy with its line.

@id("large")                  names the rule; every rule has one
@decision("needs_approval")   or "allow", the default for a permit
@tier("high")                 low, med or high; the default is the tool's own risk
@two_person("true")           two different people have to approve
@approvers("finance,legal")   only members of one of these groups may approve
@reason_required("true")      the approver has to give a reason
@expires_in("4h")             how long the approval can be decided
@escalate_to("managers") @escalate_after("30m")
@reason("…")                  the explanation for people; also on a forbid
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from cedarpy import PolicySet, Schema, pst, validate_policies

from interlock.definition.diagnostics import Fault, Faults, TooManyFaults
from interlock.definition.duration import parse_duration
from interlock.errors import DefinitionInvalid
from interlock.lifecycle import Tier
from interlock.policy.schema import Vocabulary
from interlock.policy.source_scan import MOST_BYTES, MOST_RULES, PolicyStatement, statements
from interlock.wire.validation_errors import suggestion

# Exceptions that a caller raises through us on purpose. Any other exception is a denial.
PASSING_ON = (KeyboardInterrupt, SystemExit, GeneratorExit)

EMPTY = "an empty policy denies everything; write at least one permit, or keep the default"


class PolicyInvalid(DefinitionInvalid):
    """All the mistakes of a policy at once."""

    title, code = "The policy is not valid", "POLICY_INVALID"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    id: str
    permits: bool
    asks: bool = False
    tier: Tier | None = None
    two_person: bool = False
    approvers: tuple[str, ...] = ()
    reason_required: bool = False
    expires_in: float | None = None
    escalate_to: tuple[str, ...] = ()
    escalate_after: float | None = None
    reason: str = ""


@dataclass(slots=True)
class Reading:
    """A parsed policy: its rules by Cedar's ids, and its faults, split by their effect on a stored policy."""

    file: str
    policy_set: PolicySet | None = None
    schema: Schema | None = None
    vocabulary: Vocabulary = field(default_factory=lambda: Vocabulary({}, {}))
    rules: dict[str, Rule] = field(default_factory=dict)
    nodes: Mapping[str, pst.Template] = field(default_factory=dict)
    looked_at: frozenset[str] = frozenset()
    broken: Faults = field(init=False)  # the policy cannot decide anything
    # a stored policy stays in use: these rules ask for approval, or never apply here
    doubtful: Faults = field(init=False)

    def __post_init__(self) -> None:
        self.broken, self.doubtful = Faults(self.file), Faults(self.file)

    def faults(self) -> list[Fault]:
        return sorted((*self.broken.sorted(), *self.doubtful.sorted()), key=lambda fault: fault.line or 0)


def read_policy(text: str, tools: Iterable[Any], file: str) -> Reading:
    reading = Reading(file)
    try:
        _read(text, tools, reading)
    except TooManyFaults:
        reading.policy_set = None
    except PASSING_ON:
        raise
    except BaseException as error:  # a panic in Cedar is not an Exception
        reading.broken.add((), f"it could not be read: {type(error).__name__}: {error}")
    return reading


def _read(text: str, tools: Iterable[Any], reading: Reading) -> None:
    written = _written(text, reading.broken)
    if reading.broken:
        return
    try:
        reading.policy_set = PolicySet.from_str(text)
        nodes = reading.policy_set.to_pst()
    except ValueError as error:
        _note_grammar(written, str(error), reading.broken)
        return
    at = dict(zip(sorted([*nodes.static_policies, *nodes.templates], key=_position), written, strict=True))
    for key in nodes.templates:
        reading.broken.add((), "a rule cannot have ?principal or ?resource; write one rule each", line=at[key].line)
    reading.nodes = nodes.static_policies
    _read_rules(nodes.static_policies, at, reading)
    reading.looked_at = frozenset(attributes(nodes.static_policies.values()))
    reading.vocabulary = Vocabulary.of(tools, reading.looked_at)
    reading.schema = Schema.from_str(reading.vocabulary.schema())
    _validate(text, nodes.static_policies, at, reading)


def _written(text: str, broken: Faults) -> list[PolicyStatement]:
    if len(text.encode(errors="replace")) > MOST_BYTES:
        broken.add((), f"it is larger than {MOST_BYTES >> 10} KiB")
        return []
    written = statements(text)
    if not written:
        broken.add((), EMPTY)
    if len(written) > MOST_RULES:
        broken.add((), f"it has more than {MOST_RULES} rules")
    for statement in written:
        danger = statement.danger()
        if danger is not None:
            broken.add((), danger, line=statement.line)
    return written


def _note_grammar(written: list[PolicyStatement], message: str, broken: Faults) -> None:
    for statement in written:
        mistake = statement.mistake()
        if mistake is not None:
            broken.add((), mistake[1], line=mistake[0])
    if not broken:
        broken.add((), message)


def may_apply(node: pst.Template, name: str, groups: Iterable[str]) -> bool:
    """Return True if the rule may apply to this tool, judged by its action alone. An unknown form may apply."""
    match node.action:
        case pst.ActionEq(entity):
            return bool(entity.id == name)
        case pst.ActionIn(entities):
            return not {entity.id for entity in entities}.isdisjoint({name, *groups})
        case _:
            return True


def is_for_all(node: pst.Template) -> bool:
    """Return True if the rule applies to everyone, everywhere and always."""
    anybody = isinstance(node.principal, pst.ScopeAny) and isinstance(node.resource, pst.ScopeAny)
    return anybody and not node.clauses


# ---------------------------------------------------------------- annotations


def _read_rules(policies: Mapping[str, pst.Template], at: Mapping[str, PolicyStatement], reading: Reading) -> None:
    lines: dict[str, int] = {}
    for key in sorted(policies, key=_position):
        statement = at[key]
        notes = dict(policies[key].annotations)
        name = notes.pop("id", "")
        if not name:
            reading.doubtful.add((), 'this rule has no name; write @id("…") before it', line=statement.line)
        elif name in lines:
            reading.doubtful.add((), f'@id("{name}") is also the rule in line {lines[name]}', line=statement.line)
        lines.setdefault(name, statement.line)
        reading.rules[key] = _rule(name or key, policies[key].effect == "permit", notes, statement, reading.doubtful)


def _rule(name: str, permits: bool, notes: dict[str, str], statement: PolicyStatement, doubtful: Faults) -> Rule:
    read: dict[str, Any] = {}
    mistakes = []
    for note, text in notes.items():
        known = _ANNOTATIONS if permits else {"reason": _ANNOTATIONS["reason"]}
        try:
            if note not in known:
                raise ValueError(_unknown(note, permits))
            read[_FIELDS.get(note, note)] = known[note](text)
        except ValueError as error:
            mistakes.append((statement.line_of(f"@{note}"), f"@{note}: {error}"))
    wasted = [note for note in notes if note in _ONLY_WHEN_ASKING] if not read.get("asks") else []
    if permits and wasted and not mistakes:
        needs = 'has no effect without @decision("needs_approval")'
        mistakes.append((statement.line_of(f"@{wasted[0]}"), f"@{wasted[0]} {needs}"))
    for line, message in mistakes:
        doubtful.add((name,), message, line=line)
    if mistakes and permits:
        # The author wanted a restriction that we do not understand: ask for approval.
        read |= {"asks": True, "tier": Tier.HIGH}
    return Rule(id=name, permits=permits, **read)


def _unknown(note: str, permits: bool) -> str:
    if not permits and note in _ANNOTATIONS:
        return "a forbid allows nothing, so it has no such annotation"
    return "no such annotation" + (suggestion(note, _ANNOTATIONS) or f"; known are id, {', '.join(_ANNOTATIONS)}")


def _choice(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}, found `{text}`")
        return text

    return read


def _tier(text: str) -> Tier:
    return Tier(_choice(*Tier)(text))


def _asks(text: str) -> bool:
    return _choice("allow", "needs_approval")(text) == "needs_approval"


def _flag(text: str) -> bool:
    return _choice("true", "false")(text) == "true"


def _seconds(text: str) -> float:
    seconds = parse_duration(text)
    if seconds <= 0:
        raise ValueError("expected a duration above zero")
    return seconds


def _groups(text: str) -> tuple[str, ...]:
    groups = tuple(dict.fromkeys(group.strip() for group in text.split(",")))
    if not all(groups):
        raise ValueError("expected the names of groups, like finance,legal")
    return groups


def _said(text: str) -> str:
    if not text.strip():
        raise ValueError("expected a sentence for people to read")
    return text.strip()


_ANNOTATIONS: Mapping[str, Callable[[str], Any]] = {
    "decision": _asks,
    "tier": _tier,
    "two_person": _flag,
    "approvers": _groups,
    "reason_required": _flag,
    "expires_in": _seconds,
    "escalate_to": _groups,
    "escalate_after": _seconds,
    "reason": _said,
}
_FIELDS = {"decision": "asks"}
_ONLY_WHEN_ASKING = frozenset(_ANNOTATIONS) - {"decision", "reason"}


# ---------------------------------------------------------------- against the tools


def _validate(
    text: str, policies: Mapping[str, pst.Template], at: Mapping[str, PolicyStatement], reading: Reading
) -> None:
    actions = reading.vocabulary.actions()
    assert reading.schema is not None
    unknown = {key: _unknown_actions(node, actions) for key, node in policies.items()}
    for key, names in unknown.items():
        for name in sorted(names):
            message = reading.vocabulary.refused.get(name) or f"no tool or group is called `{name}`"
            message += suggestion(name, actions) if name not in reading.vocabulary.refused else ""
            # A stored policy may name tools that this process does not have; such rules never apply here.
            reading.doubtful.add((reading.rules[key].id,), message, line=at[key].line_of(f'"{name}"'))
    for error in validate_policies(text, reading.schema).errors:
        message = re.sub(r"^for policy `\w+`, ", "", error.error)
        if message.startswith(("unrecognized action", _NEVER_APPLIES)) and unknown.get(error.policy_id):
            continue
        if message.startswith(_NEVER_APPLIES) and _is_idle(policies[error.policy_id], reading.vocabulary):
            continue
        path = (reading.rules[error.policy_id].id,) if error.policy_id in reading.rules else ()
        line = at[error.policy_id].line_of(_named(message)) if error.policy_id in at else None
        reading.broken.add(path, explained(message, reading.vocabulary), line=line)
    if not reading.broken:
        _note_misspelt(policies, at, reading)


def _unknown_actions(node: pst.Template, known: frozenset[str]) -> frozenset[str]:
    actions = (uid.id for uid in pst.entity_uids(node) if uid.type.basename == "Action" and not uid.type.namespace)
    return frozenset(actions) - known


def _is_idle(node: pst.Template, vocabulary: Vocabulary) -> bool:
    """Return True if the rule names only groups that have no tools yet."""
    match node.action:
        case pst.ActionEq(entity):
            named = {entity.id}
        case pst.ActionIn(entities):
            named = {entity.id for entity in entities}
        case _:
            return not vocabulary.entries
    return named <= vocabulary.idle()


def _note_misspelt(policies: Mapping[str, pst.Template], at: Mapping[str, PolicyStatement], reading: Reading) -> None:
    """Report unknown attributes.

    `context.input has amout` is valid Cedar and always false; in a forbid it would be a hole.
    """
    names = reading.vocabulary.names()
    for key, node in policies.items():
        for name in sorted(frozenset(attributes([node])) - names):
            message = f"nothing has an attribute `{name}`{suggestion(name, names)}"
            reading.doubtful.add((reading.rules[key].id,), message, line=at[key].line_of(name))


def attributes(nodes: Iterable[Any]) -> Iterator[str]:
    stack: list[Any] = list(nodes)
    while stack:
        node = stack.pop()
        if isinstance(node, pst.Like):
            node = node.base  # its pattern has a node for each character, and no attributes
        match node:
            case pst.GetAttr():
                yield node.attr
            case pst.HasAttr():
                yield from node.attrs
        if isinstance(node, Mapping):
            stack.extend(node.values())
        elif isinstance(node, tuple):
            stack.extend(node)
        elif is_dataclass(node) and not isinstance(node, type):
            stack.extend(getattr(node, part.name) for part in fields(node))


_NEVER_APPLIES = "unable to find an applicable action"
_OPTIONAL = re.compile(
    r"unable to guarantee safety of access to optional attribute `(.+?)` in context for Action::\"(.+)\""
)
_MISSING = re.compile(r"attribute `(.+?)` in context for Action::\"(.+?)\" not found")


def explained(message: str, vocabulary: Vocabulary) -> str:
    """Return Cedar's message with the correction."""
    if found := _OPTIONAL.match(message):
        path, tool = found.groups()
        owner, _, name = f"context.{path}".rpartition(".")
        return f"{tool} may be called without `{path}`: ask for it first, `{owner} has {name} && …`"
    if found := _MISSING.match(message):
        path, tool = found.groups()
        return f"{tool} has no `context.{path}`{_instead(path.rpartition('.')[2], tool, vocabulary)}"
    if message.startswith(_NEVER_APPLIES):
        return "this rule can never apply: no tool fits its principal, action and resource"
    if "but saw decimal" in message:
        return f'{message}; a number with a fraction is compared like .lessThan(decimal("100.0"))'
    return message


def _instead(name: str, tool: str, vocabulary: Vocabulary) -> str:
    entry = vocabulary.entries.get(tool)
    if entry is not None and name in entry.input.left_out:
        return "; the tool takes it, but a policy cannot see it: give it one plain type"
    return suggestion(name, (*entry.input.every_name(), *vocabulary.names()) if entry is not None else ())


def _named(message: str) -> str:
    found = re.search(r"`([^`]+)`", message)
    return re.split(r"[.:]", found.group(1).strip('"'))[-1].strip('"') if found else ""


def _position(key: str) -> int:
    return int(key.removeprefix("policy"))
