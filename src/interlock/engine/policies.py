"""Policies: find the one in force for a tenant and compile it. Any failure here denies."""

import asyncio
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import orjson

from interlock.compute import in_thread, pool
from interlock.engine.access.key_store import Salts
from interlock.engine.access.principal import Principal
from interlock.errors import Conflict, Invalid, NotFound, Terminal
from interlock.ids import TenantId
from interlock.policy.action import ProposedAction, ToolFacts
from interlock.policy.policy import (
    DEFAULT_POLICY,
    Asker,
    Circumstances,
    CompiledPolicy,
    Decision,
    deny_everything,
    evaluate_by,
    load_policy,
)
from interlock.store.pool import Database, Row, Tx
from interlock.store.records import AnyRun
from interlock.telemetry import log
from interlock.tools import RegisteredTool, Registry, Veil, as_shown

# Publishing a policy sends a notification. This bounds how long a missed one can matter.
_RECHECK_SECONDS = 2.0
# A longer policy is compiled outside the event loop. One of this length takes about ten milliseconds.
_LONG_POLICY = 4_000


def facts_of(tool: RegisteredTool) -> ToolFacts:
    schema = as_shown(tool.input_schema) if tool.secret else tool.input_schema
    return ToolFacts(tool.name, tool.writes, tool.risk, tool.idempotent, schema, tool.undo)


def facts(tools: Registry) -> list[ToolFacts]:
    return [facts_of(tool) for tool in tools.all()]


def asker_of(run: AnyRun) -> Asker:
    who = orjson.loads(run.requester) if run.requester else {}
    return Asker(run.requested_by, who.get("role", "unknown"), tuple(who.get("groups", ())), who.get("tenant", ""))


def tenant_of(run: AnyRun) -> str:
    """Return the name of the requester's tenant, or "" if the row does not contain it.

    No tool of a tenant accepts "".
    """
    try:
        return asker_of(run).tenant
    except (ValueError, TypeError, AttributeError):
        return ""


def circumstances(run: AnyRun, step: str, now: datetime) -> Circumstances:
    return Circumstances(
        hour=now.hour, weekday=now.isoweekday(), workflow=run.workflow, workspace=run.workspace_id or "",
        auto_approve=run.auto_approve, run_id=str(run.id), step=step,
    )  # fmt: skip


@dataclass(slots=True)
class _Held:
    policy: CompiledPolicy
    version: int
    checked: float
    # The edition of the tools that it was compiled against.
    edition: int


class Policies:
    def __init__(self, database: Database, tools: Registry) -> None:
        self._database = database
        self.tools = tools
        self._salts = Salts(database.settings)
        self._held: dict[UUID, _Held] = {}
        self._default: _Held | None = None
        self._compiling: dict[tuple[UUID, int, int], asyncio.Task[CompiledPolicy]] = {}

    def facts(self, tenant: str | None = None) -> list[ToolFacts]:
        """Return the facts about tools that a policy uses: for a tenant's policy, only the tenant's tools."""
        return facts(self.tools if tenant is None else self.tools.of_tenant(tenant))

    def forget(self, tenant: str) -> None:
        """Recheck the policy of a tenant that published one; all policies if a notification may be lost ("")."""
        for held in self._held.values() if not tenant else filter(None, [self._held.get(UUID(tenant))]):
            held.checked = float("-inf")

    def seen(self, tenant_id: TenantId, version: int) -> None:
        """Note the version in force that a claim returned. It saves a query."""
        held, edition = self._held.get(tenant_id), self.tools.edition
        if held is not None and held.version < version:
            held.checked = float("-inf")
        elif held is not None and (held.version, held.edition) == (version, edition):
            held.checked = time.monotonic()
        elif version == 0 and (held is None or held.version == 0):
            self._held[tenant_id] = replace(self._built_in(), checked=time.monotonic())

    def at_hand(self, tenant_id: TenantId) -> CompiledPolicy | None:
        """Return the policy in force if it is known without a query."""
        held = self._held.get(tenant_id)
        if held is None or held.edition != self.tools.edition or time.monotonic() - held.checked >= _RECHECK_SECONDS:
            return None
        return held.policy

    async def current(
        self, tenant_id: TenantId, *, patience: float | None = None, tx: Tx | None = None
    ) -> CompiledPolicy:
        """Return the policy in force. A caller in a transaction passes it as `tx`, as for `Plans.get`."""
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
        policy = await self._compiled(tenant_id, row)
        self._held[tenant_id] = _Held(policy, row["version"] if row else -1, now, edition)
        return policy

    def _built_in(self) -> _Held:
        """Compile the built-in policy once for all tenants without a policy of their own."""
        if self._default is None or self._default.edition != self.tools.edition:
            edition = self.tools.edition
            self._default = _Held(load_policy(DEFAULT_POLICY, facts(self.tools)), 0, 0.0, edition)
        return self._default

    def hidden(self, name: str) -> frozenset[str]:
        """Return the tool's secret parameters."""
        tool = self.tools.find(name)
        return tool.secret if tool is not None else frozenset()

    async def judge_edit(
        self, tx: Tx, run: AnyRun, approval: Row, given: Mapping[str, Any], patch: dict[str, Any], now: datetime
    ) -> tuple[ProposedAction, Decision]:
        """Return an approval's action with some fields replaced, checked like any input and judged like any action.

        `given` is the input that the workflow gives to the tool. The approval does not contain the values of secret
        fields.
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
            action = tool.propose(arguments, tool.shown(arguments, Veil(self._salts(run.tenant_id))), secrets)
        except Terminal as error:
            raise Invalid(str(error), code="ACTION_INVALID") from None
        current = await self.current(run.tenant_id, tx=tx)
        about = asker_of(run), circumstances(run, approval["step"], now)
        return action, await self.decide(run.tenant_id, current, action, *about)

    async def decide(
        self, tenant_id: TenantId, policy: CompiledPolicy, action: ProposedAction, asker: Asker, when: Circumstances
    ) -> Decision:
        """Return the policy's decision, computed here, or in another process if it could take long.

        Raises `compute.Stopped` if it took too long there.
        """
        if policy.text is None or not policy.takes_long(action):
            return policy.decide(action, asker, when)
        known = pickle.dumps(self.facts())
        return await pool.run(tenant_id, evaluate_by, policy.text, known, action, asker, when, must_wait=True)

    async def _compiled(self, tenant_id: TenantId, row: Row | None) -> CompiledPolicy:
        """Compile a long policy in a thread, once for all waiting callers. It kept the limits when it was published."""
        if row is None or len(row["text"] or "") <= _LONG_POLICY:
            return self._compile(tenant_id, row, facts(self.tools))
        key = tenant_id, row["version"], self.tools.edition
        if (task := self._compiling.get(key)) is None:
            work = in_thread(self._compile, tenant_id, row, facts(self.tools))
            task = self._compiling[key] = asyncio.create_task(work)
            task.add_done_callback(lambda _: self._compiling.pop(key, None))
        return await asyncio.shield(task)

    def _compile(self, tenant_id: TenantId, row: Row | None, tools: list[ToolFacts]) -> CompiledPolicy:
        if row is None or (row["version"] > 0 and row["text"] is None):
            return deny_everything("the tenant has no policy; publish one with `interlock policy apply`")
        if row["version"] == 0:
            return self._built_in().policy
        policy = load_policy(row["text"], tools)
        if policy.refusal:
            log.error("policy_broken", tenant_id=str(tenant_id), version=row["version"], detail=policy.refusal)
        return policy


async def publish(tx: Tx, principal: Principal, text: str, digest: str) -> Row:
    """Put a text in force and return its version. The text that is in force already stays the same version."""
    principal.require_whole_tenant("the policy is")
    await tx.fetch("lock_policy", principal.tenant_id)  # one at a time: each gets the next version
    current = await tx.row("policy_in_force", principal.tenant_id)
    if current is not None and current["digest"] == digest:
        return current
    row = await tx.row("publish_policy", principal.tenant_id, digest, text, principal.actor)
    assert row is not None
    return row


async def text_of(database: Database | Tx, tenant_id: TenantId, version: int) -> str:
    """Return the text of a version; version 0 is the built-in policy."""
    if version == 0:
        return DEFAULT_POLICY
    row = await database.row("policy_version", tenant_id, version)
    if row is None:
        raise NotFound(f"There is no version {version} of the policy.", code="POLICY_NOT_FOUND")
    text: str = row["text"]
    return text
