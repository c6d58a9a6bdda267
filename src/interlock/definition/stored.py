"""Stored definitions: the source of any kind of plan, and its plan."""

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from interlock.definition.agent import is_agent, load_agent
from interlock.definition.flow import load_flow
from interlock.definition.plan import Plan
from interlock.definition.workflow import load

_LOAD: Mapping[str, Callable[[Mapping[str, Any]], Plan]] = {"agent": load_agent, "flow": load_flow, "workflow": load}


def kind_of(source: Mapping[str, Any]) -> str:
    return "agent" if is_agent(source) else "flow" if "flow" in source else "workflow"


def plan_of(source: str) -> Plan:
    """Return the plan of a stored source. Raise DefinitionInvalid."""
    value = orjson.loads(source)
    return _LOAD[kind_of(value)](value)
