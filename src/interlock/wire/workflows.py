"""Workflows, flows and tools: what can be run."""

from typing import Any

from pydantic import AwareDatetime

from interlock.lifecycle import Tier
from interlock.wire.grammar import View


class Workflow(View):
    name: str
    version: int
    digest: str
    created_at: AwareDatetime
    source: Any = None


class Tool(View):
    name: str
    description: str = ""
    writes: bool = False
    risk: Tier = Tier.LOW
    idempotent: bool = False
    input_schema: dict[str, Any] = {}


class Flow(View):
    """A Python flow that is deployed; runs keep the version they began with."""

    name: str
    version: str
    description: str = ""
    retired: bool = False
