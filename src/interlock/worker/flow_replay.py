"""The flow of a run: the Python function that asks for its steps, if this worker has it."""

from typing import Any

import orjson

from interlock.definition.flow import declaration
from interlock.definition.plan import PlanStep
from interlock.flows import Replay
from interlock.worker.leased_run import LeasedRun
from interlock.worker.output_encoding import encode_result
from interlock.worker.tool_call import ExecutionResources


def replay_of(run: LeasedRun) -> Replay | None:
    plan, shop = run.journal.plan, run.worker.shop
    if plan.flow is None or (flow := shop.tools.flows.find(plan.name, plan.flow)) is None:
        return None
    return Replay(
        flow, run.journal, tenant_id=run.lease.tenant_id, input=orjson.loads(run.row.input or "null"),
        actor=run.actor, clock=run.now, declares=lambda step: _declaration(shop, step),
        encode=lambda result: encode_result(result, shop.max_output_bytes),
    )  # fmt: skip


def _declaration(shop: ExecutionResources, step: PlanStep) -> dict[str, Any]:
    """Return the declaration of a step.

    For a write it includes the input, because the API that edits or undoes the action does not have the flow's code.
    """
    tool = shop.tools.find(step.tool or "")
    keep = tool is not None and tool.writes
    return declaration(step, hidden=tool.secret if tool else frozenset(), with_input=keep)
