"""The vocabulary of a policy: one Cedar action per tool, so that a rule with an unknown name is rejected.

principal   Actor::"<who started the run>", with role and tenant; `principal in Group::"finance"`
action      Action::"shop.refund", in the groups Action::"read" or Action::"write" and Action::"shop"
resource    Env::"<workspace>"
context     input (the tool's arguments), target, risk, hour, weekday, workflow, step, auto_approve,
            secrets (the names of those that the input refers to)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from interlock.policy.action import ToolFacts
from interlock.policy.cedar_types import Record, input_shape, quoted

READ, WRITE = "read", "write"

CONTEXT = {
    "target?": "String",
    "risk": "String",
    "hour": "Long",
    "weekday": "Long",
    "workflow": "String",
    "step": "String",
    "auto_approve": "Bool",
    "secrets": "Set<String>",
}
ACTOR = {"role": "String", "tenant": "String"}


@dataclass(frozen=True, slots=True)
class SchemaEntry:
    """A tool that a policy can judge."""

    facts: ToolFacts
    input: Record

    @property
    def groups(self) -> tuple[str, ...]:
        effect = WRITE if self.facts.writes else READ
        return (effect,) if self.facts.connector == self.facts.name else (effect, self.facts.connector)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    entries: Mapping[str, SchemaEntry]
    refused: Mapping[str, str]  # tools that no policy can judge, each with the reason

    @classmethod
    def of(cls, tools: Iterable[ToolFacts], looked_at: frozenset[str] | None = None) -> "Vocabulary":
        by_name = {tool.name: tool for tool in tools}
        connectors = {tool.connector for tool in by_name.values() if tool.connector != tool.name}
        entries, refused = {}, {}
        for name in sorted(by_name):
            shape = input_shape(by_name[name].input_schema, looked_at)
            why = _clash(by_name[name], connectors)
            if why is not None:
                refused[name] = why
            elif shape is None:
                refused[name] = f"{name} has no input schema, so no policy can judge it: declare its parameters"
            else:
                entries[name] = SchemaEntry(by_name[name], shape)
        return cls(entries, refused)

    def actions(self) -> frozenset[str]:
        groups = (group for entry in self.entries.values() for group in entry.groups)
        return frozenset({READ, WRITE, *self.entries, *groups})

    def idle(self) -> frozenset[str]:
        """Return the groups without tools. A rule about reads is valid before the first tool that reads exists."""
        return frozenset({READ, WRITE}) - {group for entry in self.entries.values() for group in entry.groups}

    def names(self) -> frozenset[str]:
        """Return every attribute that a rule may use."""
        inputs = (name for entry in self.entries.values() for name in entry.input.every_name())
        return frozenset({"input", *(name.rstrip("?") for name in CONTEXT), *ACTOR, *inputs})

    def schema(self) -> str:
        groups = sorted(self.actions() - self.entries.keys())
        lines = [
            "entity Group;",
            f"entity Actor in [Group] = {_record(ACTOR)};",
            "entity Env;",
            *(f"action {quoted(group)};" for group in groups),
            *(_action(name, entry) for name, entry in self.entries.items()),
        ]
        return "\n".join(lines) + "\n"


def cedar_schema(tools: Iterable[ToolFacts]) -> str:
    return Vocabulary.of(tools).schema()


def _clash(tool: ToolFacts, connectors: set[str]) -> str | None:
    """Return why the name is invalid, or None.

    A tool named like a group would pull other tools into that group, such as a write into the reads.
    """
    if tool.connector in (READ, WRITE):
        return (
            f"{tool.name} cannot be judged: {READ} and {WRITE} are groups of a policy, so no connector is called that"
        )
    if tool.name in connectors:
        return f"{tool.name} cannot be judged: other tools have it as their connector; call it {tool.name}.something"
    return None


def _action(name: str, entry: SchemaEntry) -> str:
    groups = ", ".join(f"Action::{quoted(group)}" for group in entry.groups)
    context = _record({"input": entry.input.cedar, **CONTEXT})
    applies = f"{{principal: [Actor], resource: [Env], context: {context}}}"
    return f"action {quoted(name)} in [{groups}] appliesTo {applies};"


def _record(members: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name}: {kind}" for name, kind in members.items()) + "}"
