"""Child runs: runs that a run started, and the messages between parent and child."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID, uuid5

import orjson

from interlock.engine.proof.instrumentation import observe_woken
from interlock.engine.workflows import Plans
from interlock.engine.writing.run_commands import deliver_command, open_run, put_back
from interlock.errors import NotFound
from interlock.journal import CommandType, RunCommand, encode
from interlock.lifecycle import RUN, RunReason, RunState
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log
from interlock.wire import Initiator

_BATCH = 200


@dataclass(frozen=True, slots=True)
class Child:
    """A run to be started for a step, for the parent's requester, with the parent's rights and in the parent's job."""

    id: UUID
    parent: Row
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
        return uuid5(self.parent["root_id"] or self.parent["id"], self.step)

    @property
    def trigger(self) -> dict[str, Any]:
        traced = {"traceparent": self.traceparent} if self.traceparent else {}
        about = {"source": "run", "ref": str(self.parent["id"]), "initiator": Initiator.SYSTEM}
        restored = {"restored": self.restored} if self.restored else {}
        return {**about, "idempotency_key": self.key, **traced, **restored}

    @property
    def key(self) -> str:
        """Return the idempotency key: a step of the parent starts this child once."""
        return f"run:{self.parent['id']}:{self.step}"


async def start(tx: Tx, database: Database, children: list[Child]) -> None:
    """Start the children in the transaction that writes the entries of the waiting steps: both commit, or neither."""
    await tx.fetch(
        "start_runs", database.clock(), [c.id for c in children], [c.parent["tenant_id"] for c in children],
        [c.parent["workspace_id"] for c in children], [c.workflow for c in children], [c.version for c in children],
        [encode(c.input) for c in children], [encode(c.trigger) for c in children],
        [c.parent["requested_by"] for c in children],
        [c.deadline_seconds for c in children], [None] * len(children), [c.parent["requester"] for c in children],
        [c.capped for c in children], [c.parent["job_id"] for c in children],
    )  # fmt: skip
    adopted = await tx.fetch(
        "adopt_runs", [c.id for c in children], [c.parent["id"] for c in children], [c.step for c in children],
        [c.root_id for c in children],
    )  # fmt: skip
    tx.on_commit(partial(_log_creation, children, {row["id"]: row["tenant"] for row in adopted}))


def _log_creation(children: list[Child], tenants: dict[UUID, str]) -> None:
    for child in children:
        log.info(
            "run_created", run_id=str(child.id), workflow=child.workflow, tenant=tenants[child.id],
            idempotency_key=child.key, parent=str(child.parent["id"]),
        )  # fmt: skip


async def deliver(database: Database, plans: Plans) -> int:
    """Deliver the messages between runs. Any number of processes may deliver at once; each message is applied once."""
    waiting = await database.fetch("waiting_errands", _BATCH)
    for row in waiting:
        try:
            await database.run_in_transaction(partial(_deliver, database, plans, row["id"]))
        except Exception as error:
            log.error("errand_failed", errand=row["id"], exc_info=error)
    return len(waiting)


async def _deliver(database: Database, plans: Plans, errand_id: int, tx: Tx) -> None:
    errand = await tx.row("take_errand", errand_id)
    if errand is None:
        return
    try:
        run = await open_run(tx, database, plans, errand["tenant_id"], errand["to_run"])
    except NotFound:
        return
    word = await _word(tx, errand)
    stopping = word.command == CommandType.CANCEL and run.status == RunState.CANCELING
    if run.status in RUN.terminal or stopping:
        await put_back(tx, run)
    else:
        await deliver_command(tx, database, run, word)


async def _word(tx: Tx, errand: Row) -> RunCommand:
    actor = f"run:{errand['from_run']}"
    if errand["command"] == CommandType.CANCEL:
        return RunCommand(CommandType.CANCEL, actor, {"reason_code": RunReason.CANCELED_BY_PARENT, "said": None})
    child = await tx.row("get_run", errand["tenant_id"], errand["from_run"])
    assert child is not None
    data = {
        "child": str(child["id"]), "status": child["status"], "reason": child["reason"], "output": child["result"],
        "error": orjson.loads(child["error"] or "null"),
    }  # fmt: skip
    return RunCommand(CommandType.CHILD_ENDED, actor, data, step=errand["step"])


async def wake_awaiting(
    database: Database, flows: Iterable[str], actor: str, pools: Iterable[str], tenants: Iterable[UUID] | None, *,
    most: int,
) -> int:  # fmt: skip
    """Requeue runs that wait for code that this worker has, and that it can claim. Leave the rest to other workers."""
    ours = (list(flows), list(pools), None if tenants is None else list(tenants))
    woken = await database.fetch("wake_runs", database.clock(), most, actor, *ours)
    observe_woken(woken, actor)
    return len(woken)
