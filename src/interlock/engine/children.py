"""Children: runs that a run started, and the errands between them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID, uuid5

import orjson

from interlock.engine.observe import observe_woken
from interlock.engine.outside import open_run, put_back, say
from interlock.engine.workflows import Plans
from interlock.errors import NotFound
from interlock.journal import Command, Word, encode
from interlock.lifecycle import RUN, RunReason, RunState
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log
from interlock.wire import Initiator

_BATCH = 200


@dataclass(frozen=True, slots=True)
class Child:
    """A run to be started for a step: asked for by whoever asked for the parent, with the same rights, in its job."""

    id: UUID
    parent: Row
    step: str
    workflow: str
    version: int
    input: Any
    deadline_seconds: float | None
    # Whether its workflow has a cap.
    capped: bool = False
    traceparent: str | None = None

    @property
    def root_id(self) -> UUID:
        """The same for the child that a retried parent starts in its place: what this one did is not done twice."""
        return uuid5(self.parent["root_id"] or self.parent["id"], self.step)

    @property
    def trigger(self) -> dict[str, Any]:
        traced = {"traceparent": self.traceparent} if self.traceparent else {}
        return {"source": "run", "ref": str(self.parent["id"]), "initiator": Initiator.SYSTEM, **traced}


async def start(tx: Tx, database: Database, children: list[Child]) -> None:
    """In the transaction of the entry that says that the step waits for it: both are there, or neither."""
    await tx.fetch(
        "start_runs", database.clock(), [c.id for c in children], [c.parent["tenant_id"] for c in children],
        [c.parent["workspace_id"] for c in children], [c.workflow for c in children], [c.version for c in children],
        [encode(c.input) for c in children], [encode(c.trigger) for c in children],
        [c.parent["requested_by"] for c in children],
        [c.deadline_seconds for c in children], [None] * len(children), [c.parent["requester"] for c in children],
        [c.capped for c in children], [c.parent["job_id"] for c in children],
    )  # fmt: skip
    await tx.fetch(
        "adopt_runs", [c.id for c in children], [c.parent["id"] for c in children], [c.step for c in children],
        [c.root_id for c in children],
    )  # fmt: skip
    tx.afterwards(partial(_log_creation, children))


def _log_creation(children: list[Child]) -> None:
    for child in children:
        log.info("run_created", run_id=str(child.id), workflow=child.workflow, parent=str(child.parent["id"]))


async def deliver(database: Database, plans: Plans) -> int:
    """What runs have to tell each other. Any number may deliver at once; each errand is done once."""
    waiting = await database.fetch("waiting_errands", _BATCH)
    for row in waiting:
        try:
            await database.command(partial(_deliver, database, plans, row["id"]))
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
    stopping = word.command == Command.CANCEL and run.status == RunState.CANCELING
    if run.status in RUN.terminal or stopping:
        await put_back(tx, run)
    else:
        await say(tx, database, run, word)


async def _word(tx: Tx, errand: Row) -> Word:
    actor = f"run:{errand['from_run']}"
    if errand["command"] == Command.CANCEL:
        return Word(Command.CANCEL, actor, {"reason_code": RunReason.CANCELED_BY_PARENT, "said": None})
    child = await tx.row("get_run", errand["tenant_id"], errand["from_run"])
    assert child is not None
    data = {
        "child": str(child["id"]), "status": child["status"], "reason": child["reason"], "output": child["result"],
        "error": orjson.loads(child["error"] or "null"),
    }  # fmt: skip
    return Word(Command.CHILD_ENDED, actor, data, step=errand["step"])


async def wake_awaiting(
    database: Database, flows: Iterable[str], actor: str, pools: Iterable[str], tenants: Iterable[UUID] | None, *,
    most: int,
) -> int:  # fmt: skip
    """Runs that wait for code that this worker has, and that it can take: those that it leaves others may put back."""
    ours = (list(flows), list(pools), None if tenants is None else list(tenants))
    woken = await database.fetch("wake_runs", database.clock(), most, actor, *ours)
    observe_woken(woken, actor)
    return len(woken)
