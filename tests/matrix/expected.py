"""Each endpoint's requirements on its caller, and whose rows it reaches. The matrix compares this with the answers."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from interlock.policy.roles import Permission

P = Permission


class Reach(StrEnum):
    WORKSPACE = "names a row of a workspace; for every other workspace and tenant there is none: 404"
    TENANT = "names what the whole tenant knows by its name; for every other tenant there is none: 404"
    LIST = "names nothing; lists or makes what belongs to the caller"
    WHOLE = "is the whole tenant's: 403 for a key of a workspace"
    OPERATORS = "is for the operators of the installation: 403 for every other tenant"
    SENDER = "takes a signature and no key: 401 without one"


@dataclass(frozen=True, slots=True)
class Rule:
    """`body` may name placeholders like {run_id}, which the ids of the row's owner replace.

    `own` is a further answer that the caller may get for its own row. `foreign` is the answer to a foreign id in the
    body, if that is not 404.
    """

    permission: Permission | None
    reach: Reach
    body: Any = None
    own: int | None = None
    foreign: int = 404


W, T, L, WHOLE, OP = Reach.WORKSPACE, Reach.TENANT, Reach.LIST, Reach.WHOLE, Reach.OPERATORS
_STEPS = [{"id": "ask", "approval": {"tier": "low"}}]

EXPECTED: dict[str, Rule] = {
    "GET /api/agents": Rule(P.READ, L),
    "POST /api/agents": Rule(
        P.DEFINE, L, {"name": "mine", "model": "scripted", "script": [{"turns": [{"say": "hi"}]}]}
    ),
    "GET /api/agents/{name}": Rule(P.READ, T),
    "GET /api/approvals": Rule(P.READ, L),
    "POST /api/approvals/decide": Rule(P.APPROVE, L, {"ids": ["{approval_id}"], "decision": "reject"}),
    "GET /api/approvals/{approval_id}": Rule(P.READ, W),
    "POST /api/approvals/{approval_id}/approve": Rule(P.APPROVE, W),
    "POST /api/approvals/{approval_id}/reject": Rule(P.APPROVE, W),
    "GET /api/audit": Rule(P.READ, WHOLE),
    "GET /api/audit/keys": Rule(P.READ, L),
    "GET /api/audit/verify": Rule(P.READ, L),
    "POST /api/audit/verify": Rule(P.READ, L, {"checkpoints": []}),
    "GET /api/events": Rule(P.READ, L),
    "POST /api/events": Rule(P.TELL, L, {"type": "bank.settled", "correlation": "ch_9"}),
    "GET /api/flows": Rule(P.READ, L),
    "GET /api/grants": Rule(P.READ, L),
    "POST /api/grants": Rule(P.APPROVE, L, {"tool": "bank.pay", "arguments": {"memo": "x"}, "expires_in": 60}),
    "DELETE /api/grants/{grant_id}": Rule(P.APPROVE, W),
    "POST /api/hooks/github/{name}": Rule(None, Reach.SENDER, {}),
    "POST /api/hooks/{name}": Rule(None, Reach.SENDER, {}),
    "GET /api/jobs": Rule(P.READ, L),
    "POST /api/jobs": Rule(P.START, W, {"task_description": "x", "workflow": "gate", "parent_job_id": "{job_id}"}),
    "GET /api/jobs/{job_id}": Rule(P.READ, W),
    "POST /api/jobs/{job_id}/cancel": Rule(P.STOP, W),
    "GET /api/jobs/{job_id}/events": Rule(P.READ, W),
    "GET /api/jobs/{job_id}/tree": Rule(P.READ, W),
    "GET /api/keys": Rule(P.ADMINISTER, L),
    "POST /api/keys": Rule(P.ADMINISTER, L, {"name": "new", "role": "viewer"}),
    "DELETE /api/keys/{key_id}": Rule(P.ADMINISTER, W),
    "POST /api/messages": Rule(P.START, W, {"content": "hello", "session_id": "{session_id}", "queue": True}),
    "GET /api/policy": Rule(P.READ, L),
    "PUT /api/policy": Rule(P.ADMINISTER, WHOLE, '@id("all") permit (principal, action, resource);'),
    "POST /api/policy/backtest": Rule(P.READ, L, {"policy": '@id("all") permit (principal, action, resource);'}),
    "POST /api/policy/rollback": Rule(P.ADMINISTER, WHOLE, {"version": 1}),
    "GET /api/policy/versions": Rule(P.READ, L),
    "GET /api/policy/versions/{version}": Rule(P.READ, L),
    "GET /api/policy/versions/{version}/diff": Rule(P.READ, L),
    "POST /api/policy/evaluate": Rule(P.READ, L, {"tool": "bank.pay", "input": {"memo": "x"}}),
    "GET /api/receipts/{receipt_id}": Rule(P.READ, W),
    "POST /api/receipts/{receipt_id}/resolve": Rule(P.APPROVE, W, {"outcome": "fail"}),
    "POST /api/receipts/{receipt_id}/reverse": Rule(P.START, W),
    "GET /api/runs": Rule(P.READ, L),
    "POST /api/runs": Rule(P.START, L, {"workflow": "gate"}),
    "POST /api/runs/batch": Rule(P.START, L, {"workflow": "gate", "inputs": [{}]}),
    "GET /api/runs/{run_id}": Rule(P.READ, W),
    "POST /api/runs/{run_id}/approve": Rule(P.APPROVE, W),
    "POST /api/runs/{run_id}/cancel": Rule(P.STOP, W),
    "GET /api/runs/{run_id}/events": Rule(P.READ, W),
    "GET /api/runs/{run_id}/evidence": Rule(P.READ, W, own=409),
    "POST /api/runs/{run_id}/interrupt": Rule(P.START, W, own=403),
    "GET /api/runs/{run_id}/receipts": Rule(P.READ, W),
    "POST /api/runs/{run_id}/retry": Rule(P.START, W),
    "GET /api/schedules": Rule(P.READ, L),
    "POST /api/schedules": Rule(P.DEFINE, L, {"name": "mine", "cron": "0 * * * *", "workflow": "gate"}),
    "DELETE /api/schedules/{name}": Rule(P.DEFINE, W),
    "GET /api/schedules/{name}": Rule(P.READ, W),
    "POST /api/schedules/{name}/pause": Rule(P.DEFINE, W),
    "POST /api/schedules/{name}/resume": Rule(P.DEFINE, W),
    "POST /api/schedules/{name}/run": Rule(P.START, W),
    "GET /api/secrets": Rule(P.ADMINISTER, L),
    "DELETE /api/secrets/{name}": Rule(P.ADMINISTER, WHOLE),
    "PUT /api/secrets/{name}": Rule(P.ADMINISTER, WHOLE, {"value": "a long enough secret", "tools": []}),
    "GET /api/sessions": Rule(P.READ, L),
    "POST /api/sessions": Rule(P.START, L),
    "GET /api/sessions/{session_id}": Rule(P.READ, W),
    "POST /api/sessions/{session_id}/approvals/{approval_id}/approve": Rule(P.APPROVE, W),
    "POST /api/sessions/{session_id}/approvals/{approval_id}/reject": Rule(P.APPROVE, W),
    "GET /api/sessions/{session_id}/events": Rule(P.READ, W),
    "POST /api/sessions/{session_id}/interrupt": Rule(P.START, W, own=403),
    "GET /api/sessions/{session_id}/messages": Rule(P.READ, W),
    "DELETE /api/slack/channel": Rule(P.ADMINISTER, OP),
    "PUT /api/slack/channel": Rule(P.ADMINISTER, OP, {"channel": "C1"}),
    "GET /api/slack/users": Rule(P.ADMINISTER, L),
    "POST /api/slack/link-codes": Rule(P.READ, L),
    "GET /api/slack/teams": Rule(P.ADMINISTER, WHOLE),
    "DELETE /api/slack/teams/{team_id}": Rule(P.ADMINISTER, WHOLE, own=409),
    "POST /api/slack/teams/{team_id}/accept": Rule(P.ADMINISTER, WHOLE, own=404),
    "POST /api/slack/teams/{team_id}/offers": Rule(P.ADMINISTER, WHOLE, {"tenant": "nobody"}, own=404),
    "DELETE /api/slack/users/{team_id}/{user_id}": Rule(P.ADMINISTER, W),
    "GET /api/supervisor": Rule(P.READ, OP),
    "POST /api/supervisor/workers/{worker_id}/pause": Rule(P.SUPERVISE, OP),
    "POST /api/supervisor/workers/{worker_id}/resume": Rule(P.SUPERVISE, OP),
    "POST /api/supervisor/workers/{worker_id}/terminate": Rule(P.SUPERVISE, OP),
    "GET /api/tenants": Rule(P.ADMINISTER, OP),
    "POST /api/tenants": Rule(P.ADMINISTER, OP, {"name": "another"}),
    "PATCH /api/tenants/{name}": Rule(P.ADMINISTER, OP, {"weight": 2}),
    "POST /api/tool-calls": Rule(P.START, L, {"tool": "bank.pay", "args": {"memo": "x"}, "wait": 0}),
    "GET /api/tool-calls/{tool_call_id}": Rule(P.READ, W),
    "POST /api/tool-calls/{tool_call_id}/cancel": Rule(P.START, W, own=403),
    "GET /api/tools": Rule(P.READ, L),
    "GET /api/triggers": Rule(P.READ, L),
    "POST /api/triggers": Rule(P.DEFINE, L, {"name": "mine", "slack": {"command": "/mine"}, "workflow": "gate"}),
    "DELETE /api/triggers/{name}": Rule(P.DEFINE, W),
    "GET /api/triggers/{name}": Rule(P.READ, W),
    "POST /api/triggers/{name}/test": Rule(P.READ, W, {"payload": {"text": ""}}),
    "GET /api/usage": Rule(P.READ, L),
    "GET /api/webhooks": Rule(P.ADMINISTER, L),
    "POST /api/webhooks": Rule(P.ADMINISTER, L, {"url": "https://192.0.1.1/"}),
    "DELETE /api/webhooks/{webhook_id}": Rule(P.ADMINISTER, W),
    "GET /api/webhooks/{webhook_id}": Rule(P.ADMINISTER, W),
    "GET /api/webhooks/{webhook_id}/deliveries": Rule(P.ADMINISTER, W),
    "POST /api/webhooks/{webhook_id}/enable": Rule(P.ADMINISTER, W),
    "POST /api/webhooks/{webhook_id}/test": Rule(P.ADMINISTER, W),
    "GET /api/workers": Rule(P.READ, L),
    "POST /api/workers": Rule(P.SUPERVISE, OP),
    "GET /api/workers/{worker_id}": Rule(P.READ, L),
    "GET /api/workers/{worker_id}/events": Rule(P.READ, OP),
    "POST /api/workers/{worker_id}/start": Rule(P.SUPERVISE, OP),
    "GET /api/workflows": Rule(P.READ, L),
    "POST /api/workflows": Rule(P.DEFINE, L, {"name": "mine", "steps": _STEPS}),
    "GET /api/workflows/{name}": Rule(P.READ, T),
    "POST /api/workflows/{name}/rollback": Rule(P.DEFINE, T, {"version": 1}),
    "GET /api/workflows/{name}/versions": Rule(P.READ, T),
    "GET /api/workflows/{name}/versions/{version}": Rule(P.READ, T),
    "GET /api/workflows/{name}/versions/{version}/diff": Rule(P.READ, T),
}
