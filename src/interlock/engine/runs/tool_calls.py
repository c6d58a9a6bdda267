"""Tool calls: one call of one tool as a run, for agents that keep their own loop."""

from typing import Any

from interlock.definition.plan import Plan
from interlock.definition.workflow import load
from interlock.engine import workflows
from interlock.engine.access.principal import Principal
from interlock.engine.runs import runs
from interlock.engine.runs.runs import NewRun
from interlock.ids import RunId
from interlock.store.pool import Database, Tx

SOURCE = "tool_call"
_STEP = "call"
_LONGEST_NAME = 100


def plan_for(tool: str, args: dict[str, Any]) -> Plan:
    """Return a plan of one step. Its version depends on the names of the arguments; the values are the run's input."""
    wanted = {name: f'${{input["{name}"]}}' for name in sorted(args)}
    name = f"{SOURCE}.{tool}".lower()[:_LONGEST_NAME]
    return load({"name": name, "steps": [{"id": _STEP, "tool": tool, "input": wanted}]})


async def start(
    tx: Tx, database: Database, principal: Principal, run_id: RunId, tool: str, args: dict[str, Any], plan: Plan
) -> None:
    row = await workflows.keep(tx, database, principal, plan)
    trigger = {"source": SOURCE, "ref": tool}
    await runs.start_many(tx, principal, [NewRun(run_id, plan.name, row["version"], plan, args, trigger)])
