"""Workflows: immutable versions, and the plans made from them."""

import asyncio
from uuid import UUID

import orjson

from interlock.compute import pool
from interlock.definition.plan import OnReject, Plan
from interlock.definition.stored import kind_of, plan_of
from interlock.engine.access import quotas
from interlock.engine.access.principal import DEFAULT_TENANT, Principal
from interlock.errors import Conflict, Forbidden, NotFound, Unreadable
from interlock.ids import TenantId
from interlock.store.pool import Database, Executor, Row, Tx
from interlock.telemetry import log
from interlock.tools import Registry, registry

_DEPLOYMENT = "system:deployment"
# A longer source is compiled in another process. One of this length takes about ten milliseconds.
_LONG_SOURCE = 8_000


async def apply(tx: Tx, database: Database, principal: Principal, plan: Plan) -> tuple[Row, bool]:
    """Return the version that holds this content and whether it is new: the same content is the same version."""
    await tx.value("lock_workflow_name", principal.tenant_id, plan.name)
    if row := await tx.row("find_workflow_digest", principal.tenant_id, plan.name, plan.digest):
        return row, False
    await _require_may_define(tx, principal, plan)
    return await _publish(tx, database, principal.tenant_id, principal.actor, plan)


async def version_of(tx: Tx | Database, tenant_id: UUID, name: str, version: int) -> Row:
    row = await tx.row("get_workflow", tenant_id, name, version)
    if row is None:
        raise NotFound(f"There is no version {version} of workflow {name}.", code="WORKFLOW_NOT_FOUND")
    return row


async def roll_back(tx: Tx, principal: Principal, name: str, version: int) -> Row:
    """Return a new version with the content of an earlier one, or the newest if it has that content already."""
    await tx.value("lock_workflow_name", principal.tenant_id, name)
    row = await version_of(tx, principal.tenant_id, name, version)
    plan = await _read(principal.tenant_id, row)
    if plan.kind == "flow":
        raise Conflict(
            f"{name} is a Python flow, and its versions come with the code. Deploy the earlier code instead.",
            code="FLOW_COMES_WITH_CODE",
        )
    await _require_may_define(tx, principal, plan)
    newest = await tx.row("get_workflow", principal.tenant_id, name, None)
    assert newest is not None
    if newest["digest"] == row["digest"]:
        return newest
    return await _add_version(tx, principal.tenant_id, principal.actor, plan)


async def _require_may_define(tx: Tx, principal: Principal, plan: Plan) -> None:
    # Workers connect to this address from inside their own network, with keys from their own environment.
    if plan.agent is not None and plan.agent.is_elsewhere and not principal.is_operator:
        raise Forbidden(
            f"base_url and api_key_env are for whoever operates the workers: a key of tenant {DEFAULT_TENANT}, "
            "of no workspace"
        )
    # Others start it by its name, with their own rights, so one workspace must not replace its content.
    owner = await tx.row("owner_of_workflow", principal.tenant_id, plan.name)
    if principal.workspace_id is not None and owner is not None and owner["workspace_id"] != principal.workspace_id:
        raise Conflict(
            f"{plan.name} was applied with a key that is not of workspace {principal.workspace_id}; give the "
            f"{plan.kind} another name, or apply it with a key of the whole tenant", code="WORKFLOW_NAME_TAKEN",
        )  # fmt: skip


async def keep(tx: Tx, database: Database, principal: Principal, plan: Plan) -> Row:
    """Store a plan that the engine made for one run. It is the same for every caller, under a reserved name."""
    row, _ = await _publish(tx, database, principal.tenant_id, principal.actor, plan)
    return row


async def _publish(tx: Tx, database: Database, tenant: TenantId, actor: str, plan: Plan) -> tuple[Row, bool]:
    await tx.value("lock_workflow_name", tenant, plan.name)
    if row := await tx.row("find_workflow_digest", tenant, plan.name, plan.digest):
        return row, False
    if plan.name.startswith(quotas.TOOL_CALLS):
        await quotas.check_made_plans(tx, database.settings, tenant)
    newest = await tx.row("get_workflow", tenant, plan.name, None)
    if newest is not None and (is_now := kind_of(orjson.loads(newest["source"]))) != plan.kind:
        raise Conflict(
            f"{plan.name} is the name of a {is_now}; give the {plan.kind} another", code="WORKFLOW_NAME_TAKEN"
        )
    return await _add_version(tx, tenant, actor, plan), True


async def _add_version(tx: Tx, tenant: TenantId, actor: str, plan: Plan) -> Row:
    source = orjson.dumps(plan.source).decode()
    row = await tx.row("add_workflow_version", tenant, plan.name, plan.digest, source, actor)
    assert row is not None
    if await tx.row("set_workflow_cap", tenant, plan.name, plan.max_concurrency):
        await tx.fetch("admit_blocked", [tenant], [plan.name])
    return row


async def _read(tenant_id: TenantId, row: Row) -> Plan:
    """Return the plan, or raise Unreadable: another version of Interlock may have accepted its source."""
    try:
        if len(row["source"]) <= _LONG_SOURCE:
            return plan_of(row["source"])
        return await pool.run(tenant_id, plan_of, row["source"], must_wait=True)
    except Exception as error:
        which = f"{row['name']} version {row['version']}"
        why = f"{which} cannot be read by this version of Interlock; apply it anew: {error}"
        raise Unreadable(why, version=row["version"]) from error


def unread(name: str) -> Plan:
    """Return a placeholder for an unreadable plan. A cap of 1 makes the database look up the real one."""
    return Plan(name, "", OnReject.FAIL, None, (), {}, "", max_concurrency=1, flow="")


class Plans:
    """Plans by tenant, name and version. A version never changes, so cached plans stay valid."""

    _MOST = 2000

    def __init__(self, database: Database, tools: Registry = registry) -> None:
        self._database = database
        self._flows = tools.flows
        self._plans: dict[tuple[UUID, str, int], Plan] = {}
        self._newest: dict[tuple[UUID, str], int] = {}
        self._published: dict[tuple[UUID, str], int] = {}
        self._reading: dict[tuple[UUID, str, int], asyncio.Task[Plan]] = {}

    def known(self, tenant_id: TenantId, name: str, version: int) -> Plan | None:
        return self._plans.get((tenant_id, name, version))

    def newest(self, tenant_id: TenantId, name: str) -> tuple[int, Plan] | None:
        """Return the newest version as of the last read, for a statement that checks that it still is."""
        if self._flows.current(name) is not None:
            return None  # this process starts its own version of the flow, even if others were published
        version = self._newest.get((tenant_id, name))
        plan = self.known(tenant_id, name, version) if version is not None else None
        return (version, plan) if version is not None and plan is not None else None

    async def get(self, tenant_id: TenantId, name: str, version: int, tx: Executor | None = None) -> Plan:
        """Return the plan. A caller in a transaction passes `tx`: waiting for a second connection could deadlock."""
        return self.known(tenant_id, name, version) or (await self.find(tenant_id, name, version, tx))[1]

    async def current(
        self, tenant_id: TenantId, name: str, version: int | None, tx: Tx | None = None
    ) -> tuple[int, Plan]:
        """Return the version asked for, else the flow's in this process, else the newest. Using a flow publishes it."""
        flow = self._flows.current(name) if version is None else None
        return await (self.find(tenant_id, name, version, tx) if flow is None else self.publish(tenant_id, flow.plan))

    async def to_start(
        self, tenant_id: TenantId, name: str, version: int | None, tx: Tx | None = None
    ) -> tuple[int, Plan]:
        """Return a plan for a run that no caller waits for. An unreadable plan starts too, for a worker to handle."""
        try:
            return await self.current(tenant_id, name, version, tx)
        except Unreadable as error:
            log.warning("workflow_unreadable", workflow=name, error=error.detail)
            return error.fields["version"], unread(name)

    async def publish(self, tenant_id: TenantId, plan: Plan) -> tuple[int, Plan]:
        """Publish a plan that comes with the code, and return its version for this tenant."""
        known = self._published.get((tenant_id, plan.digest))
        if known is None:
            row, _ = await self._database.run_in_transaction(
                lambda tx: _publish(tx, self._database, tenant_id, _DEPLOYMENT, plan)
            )
            known = self._published[tenant_id, plan.digest] = row["version"]
        return known, plan

    async def knows(self, tenant_id: TenantId, name: str) -> bool:
        """Return whether a user published it, and not only the deployment."""
        row = await self._database.row("get_workflow", tenant_id, name, None)
        return row is not None and row["created_by"] != _DEPLOYMENT

    async def find(
        self, tenant_id: TenantId, name: str, version: int | None, tx: Executor | None = None
    ) -> tuple[int, Plan]:
        """Return the version asked for, or the newest."""
        row = await (tx or self._database).row("get_workflow", tenant_id, name, version)
        if row is None:
            which = f"{name} version {version}" if version else name
            raise NotFound(f"no workflow {which}; apply it first", code="WORKFLOW_NOT_FOUND")
        key = (tenant_id, name, row["version"])
        if key not in self._plans:
            if len(self._plans) >= self._MOST:
                self._plans.clear()
                self._newest.clear()
            self._plans[key] = await self._read(key, row)
        if version is None:
            self._newest[tenant_id, name] = row["version"]
        return row["version"], self._plans[key]

    async def _read(self, key: tuple[UUID, str, int], row: Row) -> Plan:
        """Make the plan once, for all callers that wait for it."""
        if (task := self._reading.get(key)) is None:
            task = self._reading[key] = asyncio.create_task(_read(TenantId(key[0]), row))
            task.add_done_callback(lambda _: self._reading.pop(key, None))
        return await asyncio.shield(task)
