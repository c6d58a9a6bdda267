"""A run's flow: the Python function that asks for its steps, if this worker has it."""

from typing import Any

import orjson

from interlock.definition.flow import declaration
from interlock.definition.plan import Step
from interlock.flows import Replay
from interlock.worker.call import Workshop
from interlock.worker.held import HeldRun
from interlock.worker.output import encode_result


def replay_of(run: HeldRun) -> Replay | None:
    plan, shop = run.journal.plan, run.worker.shop
    if plan.flow is None or (flow := shop.tools.flows.find(plan.name, plan.flow)) is None:
        return None
    return Replay(
        flow, run.journal, tenant_id=run.lease.tenant_id, input=orjson.loads(run.row["input"] or "null"),
        actor=run.actor, clock=run.now, declares=lambda step: _declaration(shop, step),
        encode=lambda result: encode_result(result, shop.max_output_bytes),
    )  # fmt: skip


def _declaration(shop: Workshop, step: Step) -> dict[str, Any]:
    """Of a write the input is kept with it: whoever edits or undoes the action has no code to ask."""
    tool = shop.tools.find(step.tool or "")
    keep = tool is not None and tool.writes
    return declaration(step, hidden=tool.secret if tool else frozenset(), with_input=keep)
