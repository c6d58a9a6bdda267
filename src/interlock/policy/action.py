"""A proposed action: the exact call that would be made.

People can read it, and approvals can be bound to it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from interlock.audit.canonical import canonical, normal, written
from interlock.lifecycle import Tier

__all__ = ["ProposedAction", "ToolFacts", "canonical", "propose"]


def connector_of(tool: str) -> str:
    return tool.partition(".")[0]


def operation_of(tool: str) -> str:
    return tool.partition(".")[2] or tool


@dataclass(frozen=True, slots=True)
class ToolFacts:
    """What the policy needs to know about a tool. This cannot run the tool."""

    name: str
    writes: bool
    risk: Tier
    idempotent: bool
    input_schema: dict[str, Any] = field(hash=False)
    undo: str | None = None

    @property
    def connector(self) -> str:
        return connector_of(self.name)

    @property
    def operation(self) -> str:
        return operation_of(self.name)


@dataclass(frozen=True)
class ProposedAction:
    tool: str
    connector: str
    operation: str
    target: str | None
    fields: dict[str, Any] = field(hash=False)
    risk: Tier
    writes: bool
    # The secrets that each field refers to, by name. Without an entry here, `${secrets.name}` in a field is plain text.
    secrets: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    @cached_property
    def plain_fields(self) -> dict[str, Any]:
        """Return the fields as the digest covers them and as they can be stored (see `canonical`)."""
        plain: dict[str, Any] = normal(self.fields)
        return plain

    # Cached, because the gate, the approval and the receipt each use it.
    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(written(self._identity())).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        return {**self._identity(), "digest": self.digest}

    def _identity(self) -> dict[str, Any]:
        """Return what identifies the action.

        The risk is not part of it: it comes from the tool, and the policy judges it each time.
        """
        identity = {
            "tool": self.tool,
            "connector": self.connector,
            "operation": self.operation,
            "target": normal(self.target),
            "fields": self.plain_fields,
        }
        return identity | {"secrets": normal(self.secrets)} if self.secrets else identity


def propose(facts: ToolFacts, fields: Mapping[str, Any], target: str | None = None) -> ProposedAction:
    return ProposedAction(
        tool=facts.name,
        connector=facts.connector,
        operation=facts.operation,
        target=target,
        fields=dict(fields),
        risk=facts.risk,
        writes=facts.writes,
    )
