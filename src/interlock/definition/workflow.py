"""A workflow: the YAML or JSON of a user, turned into a checked plan or into a list of all its faults."""

import re
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

import orjson

from interlock.definition import document
from interlock.definition.diagnostics import Fault, Faults, Path, TooManyFaults
from interlock.definition.expression import Template
from interlock.definition.mapping_reader import NOTHING, MappingReader
from interlock.definition.plan import (
    EXPIRES_IN,
    UNDO,
    WRITTEN,
    ApprovalGate,
    ExpectedEvent,
    OnReject,
    OnTimeout,
    Plan,
    PlanStep,
    Retry,
    StepKind,
    digest_of,
)
from interlock.definition.validation import check
from interlock.errors import DefinitionInvalid
from interlock.lifecycle import Tier
from interlock.wire.validation_errors import described

__all__ = ["Fault", "load", "parse"]

MOST_STEPS = 1000
# The entries of all `needs` together: each is checked whenever a run moves.
MOST_NEEDS = 10_000

_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,99}")
_ID = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")
_LABEL = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
_TOOL = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,199}")
_EVENT = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,199}")

NAME_FORM = _NAME, "lower-case letters, digits, `_`, `.` and `-`, beginning with a letter"
_TOP = ("name", "description", "on_reject", "timeout", "caps", "steps")
_EVERY_STEP = ("id", "needs", "when")
_WITH_INPUT = (StepKind.TOOL, StepKind.FLOW)
_TOOL_ONLY = ("retry", "timeout", "compensate", "runs_on")
_WAIT_ONLY = ("on_timeout",)
_KINDS = WRITTEN
_ONE_OF = "tool, approval, wait or flow"
_DEFAULTS = Retry()
_WAITS = "{duration: 5m} or {event: bank.settled, correlation: ch_1}"


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def is_label(text: str) -> bool:
    return _LABEL.fullmatch(text) is not None


def is_event_type(text: str) -> bool:
    return _EVENT.fullmatch(text) is not None


def parse(text: str | bytes, file: str = "workflow", *, also: Callable[[Plan, Faults], None] | None = None) -> Plan:
    """Return the plan of a definition.

    Raise `DefinitionInvalid` with every fault and its line. `also` may add faults (see `tools.fit`).
    """
    return document.made_from(text, file, _plan, also)


def load(source: Mapping[str, Any], file: str = "workflow") -> Plan:
    """Return the plan of a stored source, which has no lines."""
    faults = Faults(file)
    try:
        # Convert through JSON, so that the plan owns its source and contains only JSON.
        return _plan(orjson.loads(orjson.dumps(source)), faults)
    except TypeError as error:
        faults.add((), f"not a JSON value: {error}")
    except TooManyFaults:
        pass
    raise DefinitionInvalid(faults.sorted())


def _plan(value: Any, faults: Faults) -> Plan:
    if not isinstance(value, dict):
        faults.add((), f"expected a workflow with a name and steps, found {described(value)}")
        raise DefinitionInvalid(faults.sorted())
    source = _normalised(value)
    top = MappingReader(source, (), faults)
    top.only(_TOP)
    name = identifier(top, "name", *NAME_FORM)
    steps = _steps(top)
    description = top.text("description")
    on_reject = top.choice("on_reject", OnReject, OnReject.FAIL)
    timeout = top.duration("timeout", 0.0, above_zero=True) or None
    limits = caps(top)
    if (needs := sum(len(step.needs) for step in steps.values())) > MOST_NEEDS:
        # Reported alone, because checking this many would take long.
        top.fault("steps", f"all `needs` together may have {MOST_NEEDS:,} entries, found {needs:,}; "
                  "let steps need the last steps before them, not all of them")  # fmt: skip
    else:
        check(steps, faults)
    if faults:
        raise DefinitionInvalid(faults.sorted())
    return Plan(
        name, description, on_reject, timeout, tuple(steps.values()), source, digest_of(source), *limits
    )  # fmt: skip


def caps(top: MappingReader) -> tuple[int | None, int | None]:
    names = ("max_writes_per_run", "max_concurrency")
    section = top.section("caps", "{max_concurrency: 5, max_writes_per_run: 10}")
    section.only(names)
    writes, runs = (section.integer(name, 0, 1, 1_000_000) or None for name in names)
    return writes, runs


def _normalised(value: dict[str, Any]) -> dict[str, Any]:
    """Omit keys without a value, so that they do not create another version. An empty `approval:` stays."""
    source = {key: member for key, member in value.items() if member is not None}
    if isinstance(steps := source.get("steps"), list):
        source["steps"] = [_normalised_step(step) if isinstance(step, dict) else step for step in steps]
    return source


def _normalised_step(step: dict[str, Any]) -> dict[str, Any]:
    # `needs:` without a value could mean "nothing" or "not decided"; keep it, so that it is reported.
    kept = {key: value for key, value in step.items() if value is not None or key in ("needs", *_KINDS)}
    return {**kept, "approval": {}} if "approval" in kept and kept["approval"] is None else kept


def identifier(section: MappingReader, key: str, pattern: re.Pattern[str], what: str) -> str:
    if not section.has(key):
        section.fault(key, f"`{key}` is missing")
        return ""
    text = section.text(key)
    if isinstance(section.value[key], str) and not pattern.fullmatch(text):
        section.fault(key, f"expected at most 100 {what}, found {text[:120]!r}")
    return text


def _steps(top: MappingReader) -> dict[str, PlanStep]:
    if not top.has("steps"):
        top.fault("steps", "`steps` is missing; a workflow has at least one")
        return {}
    items = top.items("steps", "steps")
    if isinstance(top.value["steps"], list) and not 1 <= len(items) <= MOST_STEPS:
        top.fault("steps", f"expected 1 to {MOST_STEPS} steps, found {len(items)}")
    steps: dict[str, PlanStep] = {}
    follows: str | None = None
    for index, item in enumerate(items[:MOST_STEPS]):
        path: Path = ("steps", index)
        if not isinstance(item, dict):
            top.faults.add(path, f"expected a step such as {{id: lookup, tool: shop.lookup}}, found {described(item)}")
            continue
        step = _step(MappingReader(item, path, top.faults), index, follows)
        is_taken = step.key in steps
        if is_taken:
            top.faults.add((*path, "id"), f"`{step.key}` is already the id of steps[{steps[step.key].index}]")
        # No step can refer to a step without a unique id, but its other fields are still checked.
        steps[f"steps[{index}]" if is_taken or not step.key else step.key] = step
        follows = step.key or follows
    return steps


def _step(section: MappingReader, index: int, follows: str | None) -> PlanStep:
    kind = _kind(section)
    section.only((*_EVERY_STEP, *_KINDS, "input", *_TOOL_ONLY, *_WAIT_ONLY))
    if kind not in _WITH_INPUT and section.has("input"):
        section.fault("input", f"only a tool or a flow takes `input`, and this is a step of kind {kind}")
    for owner, keys in ((StepKind.TOOL, _TOOL_ONLY), (StepKind.WAIT, _WAIT_ONLY)):
        for key in keys if kind is not owner else ():
            if section.has(key):
                section.fault(key, f"only a {owner} step has `{key}`, and this is a step of kind {kind}")
    wait = _wait(section) if kind is StepKind.WAIT else None
    key = identifier(section, "id", _ID, "letters, digits, `_` and `-`, beginning with a letter")
    return PlanStep(
        key=key,
        index=index,
        kind=kind,
        needs=_needs(section),
        follows=None if "needs" in section.value else follows,
        when=section.condition("when"),
        tool=_tool(section) if kind is StepKind.TOOL else None,
        input=_input(section) if kind in _WITH_INPUT else NOTHING,
        retry=_retry(section) if kind is StepKind.TOOL else _DEFAULTS,
        timeout=section.duration("timeout", 0.0, above_zero=True) or None if kind is StepKind.TOOL else None,
        gate=_gate(section) if kind is StepKind.APPROVAL else None,
        duration=_duration(section, wait) if wait and "event" not in wait.value else None,
        event=_event(section, wait) if wait and "event" in wait.value else None,
        undo=_undo(section, key, index) if kind is StepKind.TOOL and section.has("compensate") else None,
        workflow=_workflow(section) if kind is StepKind.FLOW else None,
        runs_on=_runs_on(section) if kind is StepKind.TOOL else None,
    )


def _kind(section: MappingReader) -> StepKind:
    kinds = [kind for kind in _KINDS if kind in section.value]
    if not kinds:
        section.faults.add(section.path, f"it does nothing; give it one of {_ONE_OF}")
    elif len(kinds) > 1:
        section.fault(kinds[1], f"a step is one of {_ONE_OF}; this one is {' and '.join(kinds)}")
    return kinds[0] if kinds else StepKind.TOOL


def _needs(section: MappingReader) -> tuple[str, ...]:
    if "needs" not in section.value:
        return ()
    needs = section.items("needs", "step ids, [] to start at once")
    for at, key in enumerate(needs):
        if not isinstance(key, str):
            section.faults.add((*section.path, "needs", at), f"expected the id of a step, found {described(key)}")
    return tuple(key for key in needs if isinstance(key, str))


def _tool(section: MappingReader) -> str:
    if "tool" in section.value and not section.has("tool"):
        section.expected("tool", "the name of a tool")
    tool = section.text("tool")
    if isinstance(section.value.get("tool"), str) and not _TOOL.fullmatch(tool):
        section.fault("tool", f"expected the name of a tool such as shop.refund, found {tool[:120]!r}")
    return tool


def _runs_on(section: MappingReader) -> str | None:
    if not section.has("runs_on"):
        return None
    label = section.text("runs_on")
    if isinstance(section.value["runs_on"], str) and not is_label(label):
        section.fault("runs_on", f"expected the label of a worker such as gpu, found {label[:120]!r}")
    return label


def _workflow(section: MappingReader) -> str:
    workflow = section.text("flow") if section.has("flow") else ""
    if not is_name(workflow) and isinstance(section.value["flow"], str | None):
        section.fault("flow", f"expected the name of a workflow or a flow, found {described(section.value['flow'])}")
    return workflow


def _input(section: MappingReader) -> Any:
    if section.has("input") and not isinstance(section.value["input"], dict):
        section.expected("input", "a mapping of the tool's parameters")
        return NOTHING
    return section.template("input", {})


def _retry(section: MappingReader) -> Retry:
    if not section.has("retry"):
        return _DEFAULTS
    retry = section.section("retry", "{max_attempts: 4, base_delay: 5s}")
    retry.only(("max_attempts", "base_delay", "max_delay", "backoff"))
    backoff: tuple[float, ...] | None = None
    if retry.has("backoff"):
        backoff = _backoff(retry)
        if retry.has("base_delay"):
            retry.fault("base_delay", "`backoff` already says how long to wait; leave one of them out")
    base_delay = retry.duration("base_delay", _DEFAULTS.base_delay)
    # A default must not shorten an explicit delay.
    longest = max(_DEFAULTS.max_delay, base_delay, *(backoff or ()))
    return Retry(
        max_attempts=retry.integer("max_attempts", _DEFAULTS.max_attempts, 1, 100),
        base_delay=base_delay,
        backoff=backoff,
        max_delay=retry.duration("max_delay", longest),
    )


def _backoff(retry: MappingReader) -> tuple[float, ...] | None:
    delays = retry.items("backoff", "durations")
    if retry.value["backoff"] == []:
        retry.fault("backoff", "expected at least one duration, found an empty list")
    return tuple(retry.seconds(delay, (*retry.path, "backoff", at)) for at, delay in enumerate(delays)) or None


def _gate(section: MappingReader) -> ApprovalGate:
    gate = section.section("approval", "{tier: high, expires_in: 4h}")
    gate.only(("tier", "two_person", "expires_in", "summary"))
    tier = gate.choice("tier", Tier, Tier.MED)
    gate.text("summary")
    return ApprovalGate(
        tier=tier,
        two_person=gate.flag("two_person"),
        expires_in=gate.duration("expires_in", EXPIRES_IN[tier], above_zero=True),
        summary=gate.template("summary", ""),
    )


def _wait(section: MappingReader) -> MappingReader:
    wait = section.section("wait", _WAITS)
    if "event" in wait.value:
        wait.only(("event", "correlation", "timeout", *_WAIT_ONLY))
        if "on_timeout" in wait.value:
            wait.fault("on_timeout", "it stands beside `wait`, not in it")
    elif section.has("on_timeout"):
        section.fault("on_timeout", "a wait for a duration has no time-out; write {event: …, timeout: 1h}")
    return wait


def _duration(section: MappingReader, wait: MappingReader) -> Template:
    wait.only(("duration",))
    if not wait.has("duration"):
        if isinstance(section.value["wait"], dict | NoneType):
            wait.fault("duration", f"`duration` is missing; write {_WAITS}")
        return NOTHING
    return _span(wait, "duration")


def _event(section: MappingReader, wait: MappingReader) -> ExpectedEvent:
    type = wait.text("event")
    if (type or not wait.has("event")) and not is_event_type(type):
        wait.fault("event", f"expected the type of an event such as bank.settled, found {type[:120]!r}")
    if not wait.has("correlation"):
        wait.fault("correlation", '`correlation` is missing; say what the event is about, such as "${input.charge}"')
    if section.has("on_timeout") and not wait.has("timeout"):
        section.fault("on_timeout", "without `timeout` in `wait` there is none")
    return ExpectedEvent(
        type=type,
        correlation=wait.template("correlation", None),
        timeout=_span(wait, "timeout", above_zero=True) if wait.has("timeout") else None,
        on_timeout=section.choice("on_timeout", OnTimeout, OnTimeout.FAIL),
    )


def _span(section: MappingReader, key: str, *, above_zero: bool = False) -> Template:
    """Return a duration, or an expression that gives one."""
    span = section.template(key, None)
    if span.is_constant and "${" not in str(section.value[key]):
        section.duration(key, 0.0, above_zero=above_zero)
    return span


def _undo(section: MappingReader, key: str, index: int) -> PlanStep:
    undo = section.section("compensate", '{tool: shop.undo_refund, input: {refund: "${output.id}"}}')
    undo.only(("tool", "input", "retry", "timeout"))
    if "tool" not in undo.value and isinstance(section.value["compensate"], dict):
        undo.fault("tool", "`tool` is missing; name the one that undoes this step")
    return PlanStep(
        key=f"{key}{UNDO}",
        index=index,
        kind=StepKind.TOOL,
        needs=(),
        follows=None,
        when=None,
        tool=_tool(undo),
        input=_input(undo),
        retry=_retry(undo),
        timeout=undo.duration("timeout", 0.0, above_zero=True) or None,
        gate=None,
        duration=None,
        undoes=key,
        # The workers that can run a step can also undo it.
        runs_on=_runs_on(section),
    )
