"""Workflows, flows and tools: everything that can be run."""

from typing import Any

from pydantic import AwareDatetime

from interlock.lifecycle import Tier
from interlock.wire.common import View


class Workflow(View):
    name: str
    version: int
    digest: str
    created_at: AwareDatetime
    created_by: str | None = None
    source: Any = None


class Tool(View):
    name: str
    description: str = ""
    writes: bool = False
    risk: Tier = Tier.LOW
    idempotent: bool = False
    input_schema: dict[str, Any] = {}


class Flow(View):
    """A deployed Python flow. Runs keep the version they started with."""

    name: str
    version: str
    description: str = ""
    retired: bool = False
