"""Acts: one call of one tool as a run of its own, for agents that keep their own loop. Same gate, same receipts."""

from typing import Any
from uuid import UUID

from interlock.definition.plan import Plan
from interlock.definition.workflow import load
from interlock.engine import runs, workflows
from interlock.engine.principal import Principal
from interlock.engine.runs import NewRun
from interlock.store.pool import Database, Tx

STEP = "act"
_LONGEST_NAME = 100


def plan_for(tool: str, args: dict[str, Any]) -> Plan:
    """One version for each set of arguments that a tool is called with; their values are the run's input."""
    wanted = {name: f'${{input["{name}"]}}' for name in sorted(args)}
    name = f"{STEP}.{tool}".lower()[:_LONGEST_NAME]
    return load({"name": name, "steps": [{"id": STEP, "tool": tool, "input": wanted}]})


async def start(
    tx: Tx, database: Database, principal: Principal, run_id: UUID, tool: str, args: dict[str, Any], plan: Plan
) -> None:
    row = await workflows.keep(tx, database, principal, plan)
    trigger = {"source": "act", "ref": tool}
    await runs.start_many(tx, database, principal, [NewRun(run_id, plan.name, row["version"], plan, args, trigger)])
