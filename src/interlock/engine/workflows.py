"""Workflows: versions that never change, and the plans made from them."""

from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

import orjson

from interlock.definition.agent import is_agent, load_agent
from interlock.definition.flow import load_flow
from interlock.definition.plan import OnReject, Plan
from interlock.definition.workflow import load
from interlock.engine.principal import DEFAULT_TENANT, Principal
from interlock.errors import Conflict, Forbidden, NotFound, Unreadable
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log
from interlock.tools import Registry, registry

_DEPLOYMENT = "system:deployment"


async def apply(tx: Tx, database: Database, principal: Principal, plan: Plan) -> tuple[Row, bool]:
    """The version that holds this content, and whether it is new: the same content again is the same version."""
    # Workers connect there from inside their own network, with keys from their own environment.
    if plan.agent is not None and plan.agent.is_elsewhere and not principal.is_operator:
        raise Forbidden(
            f"base_url and api_key_env are for whoever operates the workers: a key of tenant {DEFAULT_TENANT}, "
            "of no workspace"
        )
    # Others start it by its name, with rights of their own: what stands behind that is not for one workspace to say.
    await tx.value("lock_workflow_name", principal.tenant_id, plan.name)
    if principal.workspace_id is not None and not await _is_of_workspace(tx, principal, plan):
        raise Conflict(
            f"{plan.name} was applied with a key that is not of workspace {principal.workspace_id}; give the "
            f"{plan.kind} another name, or apply it with a key of the whole tenant", code="WORKFLOW_NAME_TAKEN",
        )  # fmt: skip
    return await _publish(tx, database, principal.tenant_id, principal.actor, plan)


async def _is_of_workspace(tx: Tx, principal: Principal, plan: Plan) -> bool:
    """Nobody has the name, the newest version is from a key of the same workspace, or nothing would change."""
    owner = await tx.row("owner_of_workflow", principal.tenant_id, plan.name)
    if owner is None or owner["workspace_id"] == principal.workspace_id:
        return True
    return await tx.row("find_workflow_digest", principal.tenant_id, plan.name, plan.digest) is not None


async def keep(tx: Tx, database: Database, principal: Principal, plan: Plan) -> Row:
    """A plan that was made for one run, and that nobody wrote: the same for whoever asks, under a name of ours."""
    row, _ = await _publish(tx, database, principal.tenant_id, principal.actor, plan)
    return row


async def _publish(tx: Tx, database: Database, tenant: UUID, actor: str, plan: Plan) -> tuple[Row, bool]:
    await tx.value("lock_workflow_name", tenant, plan.name)
    if row := await tx.row("find_workflow_digest", tenant, plan.name, plan.digest):
        return row, False
    newest = await tx.row("get_workflow", tenant, plan.name, None)
    if newest is not None and (is_now := kind_of(orjson.loads(newest["source"]))) != plan.kind:
        raise Conflict(
            f"{plan.name} is the name of a {is_now}; give the {plan.kind} another", code="WORKFLOW_NAME_TAKEN"
        )
    source = orjson.dumps(plan.source).decode()
    row = await tx.row("add_workflow_version", database.clock(), tenant, plan.name, plan.digest, source, actor)
    assert row is not None
    if await tx.row("set_workflow_cap", tenant, plan.name, plan.max_concurrency):
        await tx.fetch("let_in", [tenant], [plan.name])
    return row, True


def kind_of(source: Mapping[str, Any]) -> str:
    return "agent" if is_agent(source) else "flow" if "flow" in source else "workflow"


_LOAD: Mapping[str, Callable[[Mapping[str, Any]], Plan]] = {"agent": load_agent, "flow": load_flow, "workflow": load}


def _read(row: Row) -> Plan:
    """What one version of Interlock accepted another may not: whatever is wrong with it is no fault of who asks."""
    source = orjson.loads(row["source"])
    try:
        return _LOAD[kind_of(source)](source)
    except Exception as error:
        which = f"{row['name']} version {row['version']}"
        why = f"{which} cannot be read by this version of Interlock; apply it anew: {error}"
        raise Unreadable(why, version=row["version"]) from error


def unread(name: str) -> Plan:
    """One whose steps are not known here. Nor is whether it has a cap: as if it had one, the database looks."""
    return Plan(name, "", OnReject.FAIL, None, (), {}, "", max_concurrency=1, flow="")


class Plans:
    """Plans by tenant, name and version. A version never changes, so what is here is right for ever."""

    _MOST = 2000

    def __init__(self, database: Database, tools: Registry = registry) -> None:
        self._database = database
        self._flows = tools.flows
        self._plans: dict[tuple[UUID, str, int], Plan] = {}
        self._newest: dict[tuple[UUID, str], int] = {}
        self._published: dict[tuple[UUID, str], int] = {}

    def known(self, tenant_id: UUID, name: str, version: int) -> Plan | None:
        return self._plans.get((tenant_id, name, version))

    def newest(self, tenant_id: UUID, name: str) -> tuple[int, Plan] | None:
        """What was the newest version when we last looked: for a statement that checks that it still is."""
        if self._flows.current(name) is not None:
            return None  # what this process has is what it starts, whatever else was published
        version = self._newest.get((tenant_id, name))
        plan = self.known(tenant_id, name, version) if version is not None else None
        return (version, plan) if version is not None and plan is not None else None

    async def get(self, tenant_id: UUID, name: str, version: int, tx: Tx | Database | None = None) -> Plan:
        """Whoever is in a transaction hands it over: one that waits for a second connection may wait for itself."""
        return self.known(tenant_id, name, version) or (await self.find(tenant_id, name, version, tx))[1]

    async def current(self, tenant_id: UUID, name: str, version: int | None, tx: Tx | None = None) -> tuple[int, Plan]:
        """The version asked for; else that of the flow in this process, which is published by being used."""
        flow = self._flows.current(name) if version is None else None
        return await (self.find(tenant_id, name, version, tx) if flow is None else self.publish(tenant_id, flow.plan))

    async def to_start(self, tenant_id: UUID, name: str, version: int | None, tx: Tx | None = None) -> tuple[int, Plan]:
        """For runs that nobody waits for here. What cannot be read is started too: whoever claims it sees to that."""
        try:
            return await self.current(tenant_id, name, version, tx)
        except Unreadable as error:
            log.warning("workflow_unreadable", workflow=name, error=error.detail)
            return error.fields["version"], unread(name)

    async def publish(self, tenant_id: UUID, plan: Plan) -> tuple[int, Plan]:
        """What comes with the code: its version for this tenant."""
        known = self._published.get((tenant_id, plan.digest))
        if known is None:
            row, _ = await self._database.command(lambda tx: _publish(tx, self._database, tenant_id, _DEPLOYMENT, plan))
            known = self._published[tenant_id, plan.digest] = row["version"]
        return known, plan

    async def knows(self, tenant_id: UUID, name: str) -> bool:
        """Whether somebody published it, and not the deployment itself."""
        row = await self._database.row("get_workflow", tenant_id, name, None)
        return row is not None and row["created_by"] != _DEPLOYMENT

    async def find(
        self, tenant_id: UUID, name: str, version: int | None, tx: Tx | Database | None = None
    ) -> tuple[int, Plan]:
        """The version asked for, or the newest."""
        row = await (tx or self._database).row("get_workflow", tenant_id, name, version)
        if row is None:
            which = f"{name} version {version}" if version else name
            raise NotFound(f"no workflow {which}; apply it first", code="WORKFLOW_NOT_FOUND")
        key = (tenant_id, name, row["version"])
        if key not in self._plans:
            if len(self._plans) >= self._MOST:
                self._plans.clear()
                self._newest.clear()
            self._plans[key] = _read(row)
        if version is None:
            self._newest[tenant_id, name] = row["version"]
        return row["version"], self._plans[key]
