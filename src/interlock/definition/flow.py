"""A Python flow for the engine: a plan without steps, and steps that are declared while it runs.

The first entry of a step declares its kind, for readers of the journal that lack the code: the API, an approval, a
sweep.
"""

from collections.abc import Mapping
from typing import Any

from interlock.definition.expression import Template
from interlock.definition.mapping_reader import NOTHING
from interlock.definition.plan import ExpectedEvent, OnReject, OnTimeout, Plan, PlanStep, Retry, StepKind, digest_of

_DEFAULTS = Retry()


def flow_plan(
    name: str,
    version: str,
    *,
    description: str = "",
    timeout: float | None = None,
    max_writes_per_run: int | None = None,
    max_concurrency: int | None = None,
) -> Plan:
    """Return the plan of a flow. Flows are equal if name, version and limits are; the description does not matter."""
    source: dict[str, Any] = {"name": name, "flow": version}
    if timeout is not None:
        source["timeout"] = timeout
    caps = {"max_writes_per_run": max_writes_per_run, "max_concurrency": max_concurrency}
    if known := {cap: most for cap, most in caps.items() if most is not None}:
        source["caps"] = known
    digest = digest_of(source)
    return Plan(
        name, description, OnReject.FAIL, timeout, (), source, digest, max_writes_per_run, max_concurrency, flow=version
    )


def load_flow(source: Mapping[str, Any]) -> Plan:
    return flow_plan(source["name"], source["flow"], timeout=source.get("timeout"), **source.get("caps", {}))


def declaration(step: PlanStep, *, hidden: frozenset[str] = frozenset(), with_input: bool = False) -> dict[str, Any]:
    """Return the declaration of a step for the journal.

    Only a write includes its input, for a later edit or reversal.
    """
    said: dict[str, Any] = {"kind": step.kind, "place": step.place, "digest": step.digest}
    if step.tool is not None:
        said["tool"] = step.tool
    if step.workflow is not None:
        said |= {"workflow": step.workflow, "version": step.version}
    if step.event is not None:
        said["event"] = {"type": step.event.type, "correlation": step.event.correlation.value}
    if step.retry.max_attempts != _DEFAULTS.max_attempts:
        said["max_attempts"] = step.retry.max_attempts
    if step.runs_on is not None:
        said["runs_on"] = step.runs_on
    if with_input:
        said["input"] = {name: value for name, value in step.input.value.items() if name not in hidden}
    return said


def declared_step(key: str, index: int, said: Mapping[str, Any]) -> PlanStep:
    """Return the step as far as its declaration describes it; the flow adds the rest on replay."""
    return flow_step(
        key, index, StepKind(said["kind"]), place=said["place"], digest=said["digest"], tool=said.get("tool"),
        input=Template.parse(said["input"]) if "input" in said else NOTHING, workflow=said.get("workflow"),
        version=said.get("version"), event=awaited_event(**said["event"]) if "event" in said else None,
        retry=Retry(max_attempts=said.get("max_attempts", _DEFAULTS.max_attempts)), runs_on=said.get("runs_on"),
    )  # fmt: skip


def awaited_event(type: str, correlation: Any, timeout: float | None = None) -> ExpectedEvent:
    """Return the event that a flow waits for.

    The flow handles the time-out, whose time is in the entry that starts the wait.
    """
    span = Template.parse(timeout) if timeout is not None else None
    return ExpectedEvent(type, Template.parse(correlation), span, OnTimeout.FAIL)


def flow_step(key: str, index: int, kind: StepKind, **more: Any) -> PlanStep:
    unused: dict[str, Any] = {
        "needs": (), "follows": None, "when": None, "tool": None, "input": NOTHING, "retry": _DEFAULTS,
        "timeout": None, "gate": None, "duration": None,
    }  # fmt: skip
    return PlanStep(key=key, index=index, kind=kind, **(unused | more))
