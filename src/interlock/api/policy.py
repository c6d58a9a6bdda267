"""/api/policy"""

from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.services import Json, Services, Svc, Who, change
from interlock.api.views import dump
from interlock.engine import policies
from interlock.engine.idempotency import Answer
from interlock.engine.principal import Principal
from interlock.errors import Invalid, NotFound, Terminal
from interlock.governance.policy import DEFAULT_POLICY, Asker, Circumstances, compile_policy, replay
from interlock.governance.roles import Permission
from interlock.ids import floor_of
from interlock.store.pool import Tx
from interlock.tools import Veil
from interlock.wire import Backtest, Backtested, Evaluate, Policy, PolicyDecision

router = APIRouter(prefix="/api/policy", tags=["policy"])
_CEDAR = {"requestBody": {"required": True, "content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("", response_model=Policy)
async def show(found: Svc, who: Who) -> Response:
    """The policy in force, as it was written."""
    who.require(Permission.READ)
    row = await found.database.row("policy_in_force", who.tenant_id)
    if row is None:
        raise NotFound("this tenant has no policy", code="POLICY_NOT_FOUND")
    text = row["text"] if row["version"] else DEFAULT_POLICY
    digest = compile_policy(text, found.policies.facts()).digest if row["version"] == 0 else row["digest"]
    return Json({"version": row["version"], "digest": digest, "text": text, "created_at": row["created_at"]})


@router.put("", response_model=Policy)
async def publish(request: Request, found: Svc, who: Who) -> Response:
    """Publish a policy. It is checked against the tools first: one that does not fit is refused, with every fault."""
    who.require(Permission.ADMINISTER)
    text = _text(await request.body())
    compiled = compile_policy(text, found.policies.facts())

    async def work(tx: Tx) -> Answer:
        row = await policies.publish(tx, found.database, who, text, compiled)
        view = {"version": row["version"], "digest": row["digest"], "created_at": row["created_at"]}
        return Answer(200, dump(view))

    return await change(found, who, request, work)


@router.post("/evaluate", response_model=PolicyDecision)
async def evaluate(body: Evaluate, found: Svc, who: Who) -> Response:
    """What would happen to an action. Nothing is done and nothing is recorded."""
    who.require(Permission.READ)
    return Json(await judged(found, who, body))


async def judged(found: Services, who: Principal, body: Evaluate) -> dict[str, Any]:
    policy = (
        compile_policy(body.policy, found.policies.facts())
        if body.policy is not None
        else await found.policies.current(who.tenant_id)
    )
    tool = found.policies.tools.find(body.tool)
    if tool is None:
        raise Invalid(f"no tool {body.tool} here; the server loads those of INTERLOCK_TOOLS", code="TOOL_NOT_FOUND")
    try:
        arguments = tool.validated(body.input)
        # Without a salt: hashes of values that a caller can choose would tell them those of others.
        action = tool.propose(arguments, tool.shown(arguments, Veil()))
    except Terminal as error:
        raise Invalid(str(error), code="ACTION_INVALID") from None
    now = datetime.now(UTC)
    when = Circumstances(
        hour=now.hour if body.hour is None else body.hour, weekday=now.isoweekday(), workflow=body.workflow,
        workspace=who.workspace_id or "", auto_approve=False, run_id="", step="",
    )  # fmt: skip
    decision = policy.decide(action, Asker(id=who.actor, role=body.role), when)
    return {**_decision_view(decision), "action": action.as_dict()}


@router.post("/backtest", response_model=Backtested)
async def backtest(body: Backtest, found: Svc, who: Who) -> Response:
    """Judge recorded decisions by another policy, and list those that would differ."""
    who.require(Permission.READ)
    return Json(await backtested(found, who, body))


async def backtested(found: Services, who: Principal, body: Backtest) -> dict[str, Any]:
    compiled = compile_policy(body.policy, found.policies.facts())
    since = floor_of(datetime(2020, 1, 1, tzinfo=UTC))
    rows = await found.database.fetch("recorded_decisions", who.tenant_id, since, body.limit, who.workspace_id)
    recorded = [
        {
            **orjson.loads(row["decision"]),
            "run_id": str(row["run_id"]),
            "step": row["step"],
            "at": row["at"].isoformat(),
        }
        for row in rows
    ]
    changes = replay(recorded, compiled)
    return {"decisions": len(recorded), "changed": len(changes), "changes": [change.as_dict() for change in changes]}


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise Invalid("a policy is UTF-8 text in Cedar", code="POLICY_INVALID") from None


def _decision_view(decision: object) -> dict[str, Any]:
    columns = ("answer", "tier", "two_person", "rule_ids", "reason", "policy_digest")
    return {column: getattr(decision, column) for column in columns}
