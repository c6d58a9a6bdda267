"""Views: rows and folds as the wire shows them."""

from datetime import datetime
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

import orjson

from interlock.engine.jobs import Standing
from interlock.engine.principal import Principal
from interlock.engine.runs import NewRun
from interlock.journal import Journal
from interlock.lifecycle import RUN
from interlock.store.pool import Row
from interlock.tools import Tool, default_key

_RUN_COLUMNS = (
    "id", "tenant_id", "workspace_id", "workflow", "workflow_version", "status", "reason", "session_id", "job_id",
    "parent_run_id", "resumed_from", "resume_count", "created_at", "started_at", "completed_at", "duration_ms",
)  # fmt: skip


def run_view(row: Row, journal: Journal | None = None) -> dict[str, Any]:
    view = {column: row[column] for column in _RUN_COLUMNS}
    view |= {column: _json(row[column]) for column in ("input", "result", "error", "trigger")}
    view["cost_usd"] = float(row["cost_usd"])
    if journal is not None:
        view["cost_usd"] = max(view["cost_usd"], journal.cost_usd())
        view["steps"] = step_views(journal)
    return view


def new_run_view(new: NewRun, who: Principal, created_at: Any) -> dict[str, Any]:
    """A run that was just accepted, without asking the database for what we have in hand."""
    journal = Journal(new.id, new.plan, input=None, trigger=None, run={})
    view: dict[str, Any] = dict.fromkeys(_RUN_COLUMNS)
    return view | {
        "id": new.id, "tenant_id": who.tenant_id, "workspace_id": who.workspace_id, "workflow": new.workflow,
        "workflow_version": new.version, "status": journal.status, "resume_count": 0, "created_at": created_at,
        "input": new.input, "result": None, "error": None, "trigger": new.trigger, "cost_usd": 0.0,
        "steps": step_views(journal),
    }  # fmt: skip


def new_run_answer(new: NewRun, who: Principal) -> tuple[str, str]:
    """The same in two parts, for a statement that writes the time of creation between them."""
    mark = f"created at {new.id}"
    before, _, after = dump(new_run_view(new, who, mark)).decode().partition(mark)
    return before, after


def step_views(journal: Journal) -> list[dict[str, Any]]:
    return [
        {
            "id": uuid5(NAMESPACE_OID, f"{journal.run_id}:{key}"),
            "key": key,
            "index": fold.step.index,
            "kind": fold.step.kind,
            "tool": fold.step.tool,
            "status": fold.status,
            "attempt": fold.attempt,
            "max_attempts": fold.step.retry.max_attempts,
            "next_run_at": fold.next_run_at,
            "last_error": fold.last_error,
            "idempotency_key": fold.idempotency_key or (default_key(journal.run_id, key) if fold.step.tool else None),
            "output": _json(fold.output),
            "cost_usd": fold.cost_usd,
            "started_at": fold.started_at,
            "completed_at": fold.completed_at,
            "needs": list(fold.step.after),
        }
        for key, fold in journal.steps.items()
    ]


def event_view(row: Row, session_id: UUID | None = None) -> dict[str, Any]:
    data = _json(row["data"]) or {}
    if row["step"] is not None:
        data = {"step_key": row["step"], **data}
    if row["event"] is not None:
        data |= {"from_state": row["from_state"], "event": row["event"], "to_state": row["to_state"]}
    if row["attempt"] is not None:
        data["attempt"] = row["attempt"]
    if row["output"] is not None:
        data["output"] = _json(row["output"])
    data["actor"] = row["actor"]
    return {
        "seq": row["seq"], "type": row["type"], "at": row["at"], "run_id": row["run_id"], "session_id": session_id,
        "data": data,
    }  # fmt: skip


def audit_view(row: Row) -> dict[str, Any]:
    """An entry as in a run's events, without its output, and its place in the chain."""
    return {"position": row["position"], "link": row["link"], **event_view({**row, "output": None})}


def approval_view(row: Row, votes: list[Row]) -> dict[str, Any]:
    action = _json(row["action"])
    return {
        "id": row["id"],
        "run_id": row["run_id"],
        "step_key": row["step"],
        "session_id": row["session_id"],
        "status": row["status"],
        "tier": row["tier"],
        "two_person": row["two_person"],
        "summary": row["summary"],
        "action": {**action, "digest": row["digest"]},
        "kind": row["kind"],
        "rationale": {
            "rule_ids": list(row["rule_ids"]),
            "reason": row["reason"] or ("the workflow asks for it here" if row["kind"] == "gate" else None),
            "policy_digest": row["policy_digest"],
        },
        "reason_required": row["reason_required"],
        "approvers": list(row["approvers"]),
        "receipt_id": row["receipt_id"],
        "votes": [
            {"by": v["voter"].rpartition(":")[0], "decision": v["decision"], "reason": v["reason"], "at": v["at"]}
            for v in votes
            if v["approval_id"] == row["id"] and v["digest"] == row["digest"]
        ],
        "requested_at": row["requested_at"],
        "expires_at": row["expires_at"],
        "resolved_at": row["resolved_at"],
    }


def workflow_view(row: Row, *, with_source: bool = False) -> dict[str, Any]:
    view = {column: row[column] for column in ("name", "version", "digest", "created_at")}
    return view | {"source": _json(row["source"])} if with_source else view


def tenant_view(row: Row) -> dict[str, Any]:
    return {
        column: row[column]
        for column in (
            "id",
            "name",
            "max_concurrency",
            "max_runs_per_min",
            "max_writes_per_run",
            "weight",
            "in_flight",
            "created_at",
        )
    }


def usage_view(row: Row) -> dict[str, Any]:
    columns = (
        "tenant", "weight", "max_concurrency", "in_flight", "max_runs_per_min", "runs_this_minute", "runs_waiting",
        "max_writes_per_run", "ready",
    )  # fmt: skip
    return {"tenant_id": row["id"]} | {column: row[column] for column in columns}


def secret_view(row: Row) -> dict[str, Any]:
    """Everything but the value."""
    return {column: row[column] for column in ("name", "version", "created_at")} | {
        "created_by": row["created_by"].partition(":")[0]
    }


def key_view(row: Row) -> dict[str, Any]:
    return {
        column: row[column] for column in ("id", "name", "role", "workspace_id", "groups", "created_at", "revoked_at")
    }


_WORKER_COLUMNS = (
    "id", "name", "host", "pid", "status", "reason", "capacity", "labels", "tenants", "workspace_id", "job_id",
    "supervisor_id", "heartbeat_at", "started_at", "stopped_at", "holds",
)  # fmt: skip


def worker_view(row: Row, history: list[Row] | None = None) -> dict[str, Any]:
    view = {column: row[column] for column in _WORKER_COLUMNS}
    return view if history is None else view | {"state_history": state_history(history)}


def supervisor_view(row: Row) -> dict[str, Any]:
    columns = ("id", "host", "pid", "wished", "workers", "reason", "heartbeat_at", "started_at", "stopped_at")
    return {column: row[column] for column in columns}


def state_history(rows: list[Row]) -> list[dict[str, Any]]:
    columns = ("from_state", "event", "to_state", "reason", "at")
    return [{column: r[column] for column in columns} | {"by": r["actor"]} for r in rows]


def history_view(row: Row) -> dict[str, Any]:
    """A line of a worker's or job's history in the form of an event."""
    data = _json(row["data"]) or {}
    if row["event"] is not None:
        data |= {column: row[column] for column in ("from_state", "event", "to_state", "reason")}
    return {"seq": row["seq"], "type": row["type"], "at": row["at"], "data": data | {"actor": row["actor"]}}


_JOB_COLUMNS = (
    "id", "tenant_id", "workspace_id", "parent_job_id", "depth", "task_description", "workflow", "workflow_version",
    "worker_count", "status", "reason", "deadline_at", "created_at", "started_at", "completed_at",
)  # fmt: skip


def job_view(row: Row, standing: Standing, now: datetime, history: list[Row] | None = None) -> dict[str, Any]:
    view = {column: row[column] for column in _JOB_COLUMNS}
    view["requested_by"] = row["requested_by"].rpartition(":")[0]
    view["progress"] = progress_view(row, standing, now)
    view["workers"] = [{"id": worker["id"], "name": worker["name"]} for worker in standing.workers]
    return view if history is None else view | {"state_history": state_history(history)}


def progress_view(row: Row, standing: Standing, now: datetime) -> dict[str, Any]:
    """How far it is, how fast that went, and when at that speed it is done."""
    done, total = standing.done, row["total"]
    seconds = ((row["completed_at"] or now) - row["started_at"]).total_seconds() if row["started_at"] else 0.0
    rate = done / seconds if done and seconds > 0 else None
    ended = row["completed_at"] is not None
    return {
        "done": done,
        "total": total,
        **{str(state): standing.runs.get(state, 0) for state in RUN.terminal},
        "rate_per_second": round(rate, 3) if rate else None,
        "eta_seconds": round((total - done) / rate, 1) if rate and not ended else None,
    }


def tool_view(tool: Tool) -> dict[str, Any]:
    columns = ("name", "description", "writes", "risk", "idempotent", "input_schema")
    return {column: getattr(tool, column) for column in columns}


def _json(text: str | None) -> Any:
    return orjson.loads(text) if text is not None else None


def dump(view: Any) -> bytes:
    # The driver's UUIDs are a subclass, which orjson does not take for one.
    return orjson.dumps(view, default=str)


def receipt_view(row: Row) -> dict[str, Any]:
    columns = ("id", "run_id", "tool", "idempotency_key", "status", "attempt", "created_at", "completed_at")
    reversal = {
        "run_id": row["reversal_run_id"], "reason": row["reversal_reason"], "by": row["reversed_by"],
        "at": row["reversed_at"],
    } if row["reversal_run_id"] else None  # fmt: skip
    return {column: row[column] for column in columns} | {
        "step_key": row["step"],
        "request_metadata": _json(row["request_metadata"]),
        "response_metadata": _json(row["response_metadata"]),
        "reversible": row["undo"] is not None,
        "undo": row["undo"],
        "reversal": reversal,
    }


def grant_view(row: Row) -> dict[str, Any]:
    columns = ("id", "tool", "tier", "reason", "created_at", "expires_at", "revoked_at", "uses")
    return {column: row[column] for column in columns} | {
        "arguments": _json(row["arguments"]),
        "created_by": row["created_by"].partition(":")[0],
    }
