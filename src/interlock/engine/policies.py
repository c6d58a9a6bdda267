"""Policies: which one is in force for a tenant, compiled and ready. Whatever goes wrong here denies."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import orjson

from interlock.engine.keyfiles import Salts
from interlock.engine.principal import Principal
from interlock.errors import Conflict, Invalid, Terminal
from interlock.governance.action import ProposedAction, ToolFacts
from interlock.governance.policy import (
    DEFAULT_POLICY,
    Asker,
    Circumstances,
    Decision,
    Policy,
    deny_everything,
    load_policy,
)
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log
from interlock.tools import Registry, Tool, Veil, as_shown

# A published policy is announced; this bounds how long a missed announcement can matter.
_RECHECK_SECONDS = 2.0


def facts_of(tool: Tool) -> ToolFacts:
    schema = as_shown(tool.input_schema) if tool.secret else tool.input_schema
    return ToolFacts(tool.name, tool.writes, tool.risk, tool.idempotent, schema, tool.undo)


def facts(tools: Registry) -> list[ToolFacts]:
    return [facts_of(tool) for tool in tools.all()]


def asker_of(run: Row) -> Asker:
    who = orjson.loads(run["requester"]) if run["requester"] else {}
    return Asker(run["requested_by"], who.get("role", "unknown"), tuple(who.get("groups", ())), who.get("tenant", ""))


def circumstances(run: Row, step: str, now: datetime) -> Circumstances:
    return Circumstances(
        hour=now.hour, weekday=now.isoweekday(), workflow=run["workflow"], workspace=run["workspace_id"] or "",
        auto_approve=run["auto_approve"], run_id=str(run["id"]), step=step,
    )  # fmt: skip


@dataclass(slots=True)
class _Held:
    policy: Policy
    version: int
    checked: float
    # Of the tools that it was compiled against.
    edition: int


class Policies:
    def __init__(self, database: Database, tools: Registry) -> None:
        self._database = database
        self.tools = tools
        self._salts = Salts(database.settings)
        self._held: dict[UUID, _Held] = {}
        self._default: _Held | None = None

    def facts(self) -> list[ToolFacts]:
        return facts(self.tools)

    def forget(self, tenant: str) -> None:
        """A policy was published ("" if one may have been, while nobody was listening)."""
        for held in self._held.values() if not tenant else filter(None, [self._held.get(UUID(tenant))]):
            held.checked = float("-inf")

    def seen(self, tenant_id: UUID, version: int) -> None:
        """Somebody who read the tenant's lane found this version in force: nobody has to ask for it."""
        held, edition = self._held.get(tenant_id), self.tools.edition
        if held is not None and held.version < version:
            held.checked = float("-inf")
        elif held is not None and (held.version, held.edition) == (version, edition):
            held.checked = time.monotonic()
        elif version == 0 and (held is None or held.version == 0):
            self._held[tenant_id] = replace(self._built_in(), checked=time.monotonic())

    def at_hand(self, tenant_id: UUID) -> Policy | None:
        """The one in force, if that is known without asking."""
        held = self._held.get(tenant_id)
        if held is None or held.edition != self.tools.edition or time.monotonic() - held.checked >= _RECHECK_SECONDS:
            return None
        return held.policy

    async def current(self, tenant_id: UUID, *, patience: float | None = None, tx: Tx | None = None) -> Policy:
        """Whoever is in a transaction hands it over, as for `Plans.get`."""
        if (known := self.at_hand(tenant_id)) is not None:
            return known
        held = self._held.get(tenant_id)
        if tx is None:
            row = await self._database.row("policy_in_force", tenant_id, patience=patience)
        else:
            row = await tx.row("policy_in_force", tenant_id)
        now, edition = time.monotonic(), self.tools.edition
        if held is not None and row is not None and (row["version"], edition) == (held.version, held.edition):
            held.checked = now
            return held.policy
        policy = self._compile(tenant_id, row)
        self._held[tenant_id] = _Held(policy, row["version"] if row else -1, now, edition)
        return policy

    def _built_in(self) -> _Held:
        """Compiled once for all tenants that have not written their own."""
        if self._default is None or self._default.edition != self.tools.edition:
            edition = self.tools.edition
            self._default = _Held(load_policy(DEFAULT_POLICY, facts(self.tools)), 0, 0.0, edition)
        return self._default

    def hidden(self, name: str) -> frozenset[str]:
        """The parameters that the tool calls secret."""
        tool = self.tools.find(name)
        return tool.secret if tool is not None else frozenset()

    async def judge_edit(
        self, tx: Tx, run: Row, approval: Row, given: Mapping[str, Any], patch: dict[str, Any], now: datetime
    ) -> tuple[ProposedAction, Decision]:
        """The action of an approval with some fields replaced, checked like any input and judged like any action.

        `given` is what the workflow gives to the tool: of what is secret the approval shows no more than that.
        """
        proposed = orjson.loads(approval["action"])
        name = proposed["tool"]
        tool = self.tools.find(name)
        if tool is None:
            raise Conflict(f"no tool {name} here; add its file to INTERLOCK_TOOLS", code="TOOL_NOT_FOUND")
        if hidden := sorted(tool.secret & patch.keys()):
            raise Invalid(f"{', '.join(hidden)} of {name} is secret and cannot be edited", code="SECRET_PARAMETER")
        secrets = {field: names for field, names in proposed.get("secrets", {}).items() if field not in patch}
        kept = {field: given[field] for field in tool.secret if field in given}
        shown_only = {field: value for field, value in proposed["fields"].items() if field not in tool.secret}
        try:
            arguments = tool.validated({**shown_only, **kept, **patch})
            action = tool.propose(arguments, tool.shown(arguments, Veil(self._salts(run["tenant_id"]))), secrets)
        except Terminal as error:
            raise Invalid(str(error), code="ACTION_INVALID") from None
        current = await self.current(run["tenant_id"], tx=tx)
        return action, current.decide(action, asker_of(run), circumstances(run, approval["step"], now))

    def _compile(self, tenant_id: UUID, row: Row | None) -> Policy:
        if row is None or (row["version"] > 0 and row["text"] is None):
            return deny_everything("the tenant has no policy; publish one with `interlock policy apply`")
        if row["version"] == 0:
            return self._built_in().policy
        policy = load_policy(row["text"], facts(self.tools))
        if policy.refusal:
            log.error("policy_broken", tenant_id=str(tenant_id), version=row["version"], detail=policy.refusal)
        return policy


async def publish(tx: Tx, database: Database, principal: Principal, text: str, policy: Policy) -> Row:
    principal.require_whole_tenant("the policy is")
    await tx.row("lock_lane", principal.tenant_id)  # one after the other: each gets the next version
    row = await tx.row("publish_policy", database.clock(), principal.tenant_id, policy.digest, text, principal.actor)
    assert row is not None
    return row
