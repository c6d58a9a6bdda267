"""A Python flow as the engine knows it: a plan without steps, and steps that are declared while it runs.

Whoever reads a journal without the code (the API, an approval, a sweep) learns from the first entry of a step what
kind of step it is.
"""

from collections.abc import Mapping
from typing import Any

from interlock.definition.expression import Template
from interlock.definition.plan import OnReject, Plan, Retry, Step, StepKind, digest_of
from interlock.definition.section import NOTHING

_DEFAULTS = Retry()


def flow_plan(
    name: str,
    version: str,
    *,
    description: str = "",
    timeout: float | None = None,
    max_writes_per_run: int | None = None,
) -> Plan:
    """Two flows are the same when name, version and limits are; what they are described as does not matter."""
    source: dict[str, Any] = {"name": name, "flow": version}
    if timeout is not None:
        source["timeout"] = timeout
    if max_writes_per_run is not None:
        source["caps"] = {"max_writes_per_run": max_writes_per_run}
    digest = digest_of(source)
    return Plan(name, description, OnReject.FAIL, timeout, (), source, digest, max_writes_per_run, flow=version)


def load_flow(source: Mapping[str, Any]) -> Plan:
    caps = source.get("caps", {})
    return flow_plan(
        source["name"], source["flow"], timeout=source.get("timeout"),
        max_writes_per_run=caps.get("max_writes_per_run"),
    )  # fmt: skip


def declaration(step: Step, *, hidden: frozenset[str] = frozenset(), with_input: bool = False) -> dict[str, Any]:
    """What the journal keeps of a flow's step. The input only where somebody may want it later: of a write."""
    said: dict[str, Any] = {"kind": step.kind, "place": step.place, "digest": step.digest}
    if step.tool is not None:
        said["tool"] = step.tool
    if step.workflow is not None:
        said |= {"workflow": step.workflow, "version": step.version}
    if step.retry.max_attempts != _DEFAULTS.max_attempts:
        said["max_attempts"] = step.retry.max_attempts
    if with_input:
        said["input"] = {name: value for name, value in step.input.value.items() if name not in hidden}
    return said


def declared_step(key: str, index: int, said: Mapping[str, Any]) -> Step:
    """The step as far as its declaration tells; the flow itself adds the rest when it is run again."""
    return flow_step(
        key, index, StepKind(said["kind"]), place=said["place"], digest=said["digest"], tool=said.get("tool"),
        input=Template.parse(said["input"]) if "input" in said else NOTHING, workflow=said.get("workflow"),
        version=said.get("version"), retry=Retry(max_attempts=said.get("max_attempts", _DEFAULTS.max_attempts)),
    )  # fmt: skip


def flow_step(key: str, index: int, kind: StepKind, **more: Any) -> Step:
    unused: dict[str, Any] = {
        "needs": (), "follows": None, "when": None, "tool": None, "input": NOTHING, "retry": _DEFAULTS,
        "timeout": None, "gate": None, "duration": None,
    }  # fmt: skip
    return Step(key=key, index=index, kind=kind, **(unused | more))
