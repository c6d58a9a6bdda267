"""Child runs: runs that a step of another run starts and waits for."""

from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID, uuid5

from interlock.ids import RunId, TenantId
from interlock.journal import encode
from interlock.store import sql
from interlock.store.pool import Executor
from interlock.store.records import ClaimedRun, NewRun
from interlock.telemetry import log
from interlock.wire import Initiator


@dataclass(frozen=True, slots=True)
class Child:
    """A run to be started for a step, for the parent's requester, with the parent's rights and in the parent's job."""

    id: RunId
    parent: ClaimedRun
    step: str
    workflow: str
    version: int
    input: Any
    deadline_seconds: float | None
    # Whether its workflow has a concurrency cap.
    capped: bool = False
    traceparent: str | None = None
    # Set for a child that may have been started before, in a history that a restore of the database discarded.
    restored: dict[str, Any] | None = None

    @property
    def root_id(self) -> UUID:
        """Return the id shared with the child that a resumed parent starts for the same step.

        Effects of this child are therefore not repeated by that one.
        """
        return uuid5(self.parent.root_id or self.parent.id, self.step)

    @property
    def trigger(self) -> dict[str, Any]:
        traced = {"traceparent": self.traceparent} if self.traceparent else {}
        about = {"source": "run", "ref": str(self.parent.id), "initiator": Initiator.SYSTEM}
        restored = {"restored": self.restored} if self.restored else {}
        return {**about, "idempotency_key": self.key, **traced, **restored}

    @property
    def key(self) -> str:
        """Return the idempotency key: a step of the parent starts this child once."""
        return f"run:{self.parent.id}:{self.step}"

    @property
    def row(self) -> NewRun:
        parent = self.parent
        return NewRun(
            self.id, parent.tenant_id, parent.workspace_id, self.workflow, self.version, self.capped,
            encode(self.input), encode(self.trigger), parent.requested_by, parent.requester, self.deadline_seconds,
            job_id=parent.job_id, parent_run_id=parent.id, parent_step=self.step, root_id=self.root_id,
        )  # fmt: skip


async def start(tx: Executor, children: list[Child]) -> None:
    """Start the children in the transaction that writes the entries of the waiting steps: both commit, or neither."""
    await sql.start_runs(tx, runs=[child.row for child in children])
    names = await sql.tenant_names(tx, tenant_ids=list({child.parent.tenant_id for child in children}))
    tx.on_commit(partial(_log_creation, children, {tenant.id: tenant.name for tenant in names}))


def _log_creation(children: list[Child], tenants: dict[TenantId, str]) -> None:
    for child in children:
        log.info(
            "run_created", run_id=str(child.id), workflow=child.workflow, tenant=tenants[child.parent.tenant_id],
            idempotency_key=child.key, parent=str(child.parent.id),
        )  # fmt: skip
