"""Run signals: what a child run tells its parent when it ends, and a parent its children when it stops."""

from functools import partial

import orjson

from interlock.engine.workflows import Plans
from interlock.engine.writing.deliver import deliver_command, put_back
from interlock.engine.writing.load import open_run
from interlock.errors import NotFound
from interlock.journal import CommandType, RunCommand
from interlock.lifecycle import RUN, RunReason, RunState
from interlock.store import sql
from interlock.store.pool import Database, Tx
from interlock.store.records import RunSignal
from interlock.telemetry import log

_BATCH = 200


async def deliver(database: Database, plans: Plans) -> int:
    """Deliver the signals. Any number of processes may deliver at once; each signal is applied once."""
    waiting = await sql.waiting_signals(database, most=_BATCH)
    for signal_id in waiting:
        try:
            await database.run_in_transaction(partial(_deliver, plans, signal_id))
        except Exception as error:
            log.error("signal_failed", signal=signal_id, exc_info=error)
    return len(waiting)


async def _deliver(plans: Plans, signal_id: int, tx: Tx) -> None:
    signal = await sql.take_signal(tx, signal_id=signal_id)
    if signal is None:
        return
    try:
        run = await open_run(tx, plans, signal.tenant_id, signal.to_run)
    except NotFound:
        return
    command = await _command(tx, signal)
    is_stopping = command.command == CommandType.CANCEL and run.status == RunState.CANCELING
    if run.status in RUN.terminal or is_stopping:
        await put_back(tx, run)
    else:
        await deliver_command(tx, run, command)


async def _command(tx: Tx, signal: RunSignal) -> RunCommand:
    actor = f"run:{signal.from_run}"
    if signal.command == CommandType.CANCEL:
        return RunCommand(CommandType.CANCEL, actor, {"reason_code": RunReason.CANCELED_BY_PARENT, "said": None})
    child = await sql.get_run(tx, tenant_id=signal.tenant_id, run_id=signal.from_run)
    assert child is not None
    data = {
        "child": str(child.id), "status": child.status, "reason": child.reason, "output": child.result,
        "error": orjson.loads(child.error or "null"),
    }  # fmt: skip
    return RunCommand(CommandType.CHILD_ENDED, actor, data, step=signal.step)
