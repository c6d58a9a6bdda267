"""/api/policy"""

from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.dependencies import AppContext, Caller, Ctx, Json, idempotent_write
from interlock.api.views import dump
from interlock.compute import pool
from interlock.engine import policies
from interlock.engine.access.principal import Principal
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.errors import Invalid, NotFound, Terminal
from interlock.ids import floor_of
from interlock.policy.decision import OUTCOME_FIELDS
from interlock.policy.policy import (
    DEFAULT_POLICY,
    Asker,
    Circumstances,
    change_views,
    check_policy,
    decide_by,
    digest_of_text,
    loosened_views,
)
from interlock.policy.roles import Permission
from interlock.store.pool import Tx
from interlock.tools import Veil
from interlock.wire import Backtest, Backtested, Evaluate, Policy, PolicyDecision, PublishedPolicy

router = APIRouter(prefix="/api/policy", tags=["policy"])
_CEDAR = {"requestBody": {"required": True, "content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("", response_model=Policy)
async def show(found: Ctx, who: Caller) -> Response:
    """Return the policy in force, with its text as published."""
    who.require(Permission.READ)
    row = await found.database.row("policy_in_force", who.tenant_id)
    if row is None:
        raise NotFound("this tenant has no policy", code="POLICY_NOT_FOUND")
    text = row["text"] if row["version"] else DEFAULT_POLICY
    digest = digest_of_text(text) if row["version"] == 0 else row["digest"]
    return Json({"version": row["version"], "digest": digest, "text": text, "created_at": row["created_at"]})


@router.put("", response_model=PublishedPolicy)
async def publish(request: Request, found: Ctx, who: Caller) -> Response:
    """Publish a policy.

    The server checks it against the tools first and rejects an invalid one with a list of all faults.

    `loosened` in the answer lists made-up actions that need less than before. `/api/policy/backtest` returns the same
    without publishing anything.
    """
    who.require(Permission.ADMINISTER)
    text = _text(await request.body())
    digest = await pool.run(who.tenant_id, check_policy, text, found.policies.facts(who.tenant))
    loosened = await loosened_by(found, who, text)

    async def work(tx: Tx) -> StoredResponse:
        row = await policies.publish(tx, who, text, digest)
        view = {"version": row["version"], "digest": row["digest"], "created_at": row["created_at"]}
        return StoredResponse(200, dump(view | {"loosened": loosened}))

    return await idempotent_write(found, who, request, work)


@router.post("/evaluate", response_model=PolicyDecision)
async def evaluate(body: Evaluate, found: Ctx, who: Caller) -> Response:
    """Evaluate an action under the policy in force or under a given text. Nothing is executed or recorded."""
    who.require(Permission.READ)
    return Json(await judged(found, who, body))


async def judged(found: AppContext, who: Principal, body: Evaluate) -> dict[str, Any]:
    tools = found.policies.tools.of_tenant(who.tenant)
    if (tool := tools.find(body.tool)) is None:
        raise NotFound(tools.missing(body.tool), code="TOOL_NOT_FOUND")
    try:
        arguments = tool.validated(body.input)
        # Without a salt, so that secrets are not hashed: hashes of chosen values would reveal which values others use.
        action = tool.propose(arguments, tool.shown(arguments, Veil()))
    except Terminal as error:
        raise Invalid(str(error), code="ACTION_INVALID") from None
    now = found.database.now()
    when = Circumstances(
        hour=now.hour if body.hour is None else body.hour, weekday=now.isoweekday(), workflow=body.workflow,
        workspace=who.workspace_id or "", auto_approve=False, run_id="", step="",
    )  # fmt: skip
    asker = Asker(id=who.actor, role=body.role, groups=tuple(body.groups), tenant=who.tenant)
    if body.policy is None:
        current = await found.policies.current(who.tenant_id)
        decision = await found.policies.decide(who.tenant_id, current, action, asker, when)
    else:
        facts = found.policies.facts(who.tenant)
        decision = await pool.run(who.tenant_id, decide_by, body.policy, facts, action, asker, when)
    return {**_decision_view(decision), "action": action.as_dict()}


@router.post("/backtest", response_model=Backtested)
async def backtest(body: Backtest, found: Ctx, who: Caller) -> Response:
    """Evaluate recorded decisions under another policy, and list those that would differ."""
    who.require(Permission.READ)
    return Json(await backtested(found, who, body))


async def backtested(found: AppContext, who: Principal, body: Backtest) -> dict[str, Any]:
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
    changes = await pool.run(who.tenant_id, change_views, body.policy, found.policies.facts(who.tenant), recorded)
    loosened = await loosened_by(found, who, body.policy)
    return {"decisions": len(recorded), "changed": len(changes), "changes": changes, "loosened": loosened}


async def loosened_by(found: AppContext, who: Principal, text: str) -> list[dict[str, Any]]:
    """Return made-up actions that need less under this text than under the policy in force."""
    row = await found.database.row("policy_in_force", who.tenant_id)
    if row is None:
        return []
    before = row["text"] if row["version"] else DEFAULT_POLICY
    return await pool.run(who.tenant_id, loosened_views, before, text, found.policies.facts(who.tenant))


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise Invalid("a policy is UTF-8 text in Cedar", code="POLICY_INVALID") from None


def _decision_view(decision: object) -> dict[str, Any]:
    columns = (*OUTCOME_FIELDS, "rule_ids", "reason", "policy_digest")
    return {column: getattr(decision, column) for column in columns}
