"""Views: rows and folds as the wire shows them."""

from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any

import orjson

from interlock.api.event_context import context_of
from interlock.audit.redact import MARK
from interlock.definition.mapping_reader import NOTHING
from interlock.engine.access.principal import DEFAULT_TENANT, Principal, name_of
from interlock.engine.approvals.approvals import approvers_needed, edits_of, excluded_from, question_of, why_cannot_vote
from interlock.engine.queueing.jobs import Standing
from interlock.engine.runs.runs import NewRun
from interlock.flows import RegisteredFlow
from interlock.ids import RunId, SessionId, within
from interlock.journal import Entry, EntryType, Journal, StepSnapshot
from interlock.lifecycle import RUN, SETTLED_WELL, STEP, ApprovalState, StepState
from interlock.store.pool import Row
from interlock.store.records import EntryRecord, ExternalEvent, RunDetails, RunRecord, SessionEntry
from interlock.tools import RegisteredTool, default_key
from interlock.wire import SCHEMA_VERSION, Initiator

_RUN_COLUMNS = (
    "id", "tenant_id", "workspace_id", "workflow", "workflow_version", "status", "reason", "session_id", "job_id",
    "parent_run_id", "resumed_from", "resume_count", "created_at", "started_at", "completed_at", "duration_ms",
)  # fmt: skip


# Returns the names of a tool's secret parameters.
Hidden = Callable[[str], Collection[str]]


def run_view(row: RunRecord, journal: Journal | None = None, hidden: Hidden | None = None) -> dict[str, Any]:
    """Return a run from its row, with its steps if the journal is given.

    `hidden` returns the secret parameters of a tool.
    """
    view = {column: getattr(row, column) for column in _RUN_COLUMNS}
    view |= {column: _json(getattr(row, column)) for column in ("input", "result", "error")}
    view |= _origin(trigger_view(_json(row.trigger), row.requested_by))
    view["updated_at"] = _updated_at(row, journal)
    view["current_step"] = None
    view["cost_usd"] = float(row.cost_usd)
    # Null unless the caller read the worker's heartbeat, which is not a column of the run.
    view["last_heartbeat_at"] = row.last_heartbeat_at if isinstance(row, RunDetails) else None
    view["waiting_for"] = f"a worker with flow {row.awaits_flow}" if row.awaits_flow else None
    if journal is not None:
        view["cost_usd"] = max(view["cost_usd"], journal.cost_usd())
        view["current_step"] = _current_step(journal)
        view["steps"] = step_views(journal, hidden)
        view["compensation"] = [
            _step_view(journal, fold, hidden) | {"undoes": fold.step.undoes} for fold in journal.compensation
        ]
        view["state_history"] = [_move_view(move) for move in journal.moves]
    return view


def _origin(trigger: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that say how a run came to be, including those that lists can filter by."""
    about = trigger["metadata"]
    return {
        "schema_version": SCHEMA_VERSION, "trigger": trigger, "idempotency_key": trigger.get("idempotency_key"),
        "repository": about.get("repository"), "pull_request": about.get("pull_request"),
    }  # fmt: skip


def _updated_at(row: RunRecord, journal: Journal | None) -> Any:
    """Return the time of the last entry. A column for it in the run's row would have to be updated by every write."""
    told = journal.updated_at if journal is not None else row.updated_at if isinstance(row, RunDetails) else None
    return told or row.completed_at or row.started_at or row.created_at


def _current_step(journal: Journal) -> str | None:
    if journal.status in RUN.terminal:
        return None
    undoing = (fold for fold in journal.compensation if fold.status not in STEP.terminal)
    return next((fold.step.key for fold in (*journal.open_steps(), *undoing)), None)


def _move_view(move: Entry) -> dict[str, Any]:
    data = move.data or {}
    why = data.get("said") or data.get("reason") or data.get("asked")
    return {
        "from_state": move.from_state, "event": move.event, "to_state": move.to_state, "reason": why,
        "by": move.actor, "at": move.at,
    }  # fmt: skip


def accepted_view(new: NewRun, who: Principal, created_at: Any) -> dict[str, Any]:
    """Return the view of a run that was just accepted, without reading it back from the database."""
    view: dict[str, Any] = dict.fromkeys(_RUN_COLUMNS)
    return view | {
        "id": new.id, "tenant_id": who.tenant_id, "workspace_id": who.workspace_id, "workflow": new.workflow,
        "workflow_version": new.version, "status": RUN.initial, "resume_count": 0, "created_at": created_at,
        "input": new.input, "result": None, "error": None, "updated_at": created_at, "current_step": None,
        "cost_usd": 0.0, "last_heartbeat_at": None, "waiting_for": None,
        **_origin(trigger_view(new.trigger, who.actor)),
    }  # fmt: skip


def new_run_view(new: NewRun, who: Principal, created_at: Any) -> dict[str, Any]:
    """Return the view of a run that was just accepted, with its steps."""
    journal = Journal(new.id, new.plan, input=None, trigger=None, run={})
    about = {
        "current_step": _current_step(journal), "steps": step_views(journal), "compensation": [], "state_history": [],
    }  # fmt: skip
    return accepted_view(new, who, created_at) | about


def new_run_answer(new: NewRun, who: Principal) -> bytes:
    """Return the same as JSON, with a placeholder for the time of creation, which the database decides."""
    return dump(new_run_view(new, who, _placeholder(new.id)))


def with_creation_time(answer: bytes, run_id: RunId, created_at: datetime) -> bytes:
    """Return the answer with the time of creation in place of its placeholder."""
    return answer.replace(_placeholder(run_id).encode(), orjson.loads(dump(created_at)).encode())


def _placeholder(run_id: RunId) -> str:
    return f"created at {run_id}"


def trigger_view(trigger: dict[str, Any], requested_by: str) -> dict[str, Any]:
    """Return what started a run. A run that a caller started without naming a trigger has the caller's name."""
    somebody = {"initiator": Initiator.USER, "user": name_of(requested_by)}
    return somebody | {"metadata": {}, "external_event": None} | trigger


def step_views(journal: Journal, hidden: Hidden | None = None) -> list[dict[str, Any]]:
    return [_step_view(journal, fold, hidden) for fold in journal.steps.values()]


def _step_input(journal: Journal, fold: StepSnapshot, hidden: Hidden | None) -> Any:
    """Return the input of a step, computed again from the journal so that nothing is stored twice."""
    has_begun = fold.attempt > 0 or fold.approval_id is not None
    if not has_begun or (journal.plan.is_dynamic and fold.step.input is NOTHING):
        return None
    try:
        given = fold.input(journal.scope_of(fold))
    except Exception:  # the step's own error already explains an input that cannot be computed
        return None
    secret = hidden(fold.step.tool) if hidden is not None and fold.step.tool else ()
    if not secret or not isinstance(given, dict):
        return given
    return {name: MARK if name in secret else value for name, value in given.items()}


def _step_view(journal: Journal, fold: StepSnapshot, hidden: Hidden | None) -> dict[str, Any]:
    key = fold.step.key
    return {
        "id": within(journal.run_id, key),
        "key": key,
        "index": fold.step.index,
        "kind": fold.step.kind,
        "tool": fold.step.tool,
        "status": fold.status,
        "attempt": fold.attempt,
        "max_attempts": fold.step.retry.max_attempts,
        "next_run_at": fold.next_run_at,
        "retrying": fold.status == StepState.PENDING and fold.attempt >= 1,
        "waits_for": fold.awaits if fold.status == StepState.WAITING_EXTERNAL else None,
        "last_error": fold.last_error,
        "idempotency_key": fold.idempotency_key or (default_key(journal.run_id, key) if fold.step.tool else None),
        "input": _step_input(journal, fold, hidden),
        "output": _json(fold.output),
        "cost_usd": fold.cost_usd,
        "resumable": fold.status in SETTLED_WELL,
        "idempotent": fold.idempotent if fold.attempt or fold.step.tool is None else None,
        "tokens": fold.tokens,
        "started_at": fold.started_at,
        "completed_at": fold.completed_at,
        "duration_ms": fold.duration_ms,
        "needs": list(fold.step.after),
        "runs_on": fold.step.runs_on,
    }


def event_view(entry: EntryRecord, session_id: SessionId | None = None) -> dict[str, Any]:
    data = _json(entry.data) or {}
    context = context_of(entry, data)
    data.pop("cause", None)
    if entry.step is not None:
        data = {"step_key": entry.step, **data}
    if entry.event is not None:
        data |= {"from_state": entry.from_state, "event": entry.event, "to_state": entry.to_state}
        if entry.step is not None and entry.to_state in STEP.terminal:
            data["resumable"] = entry.to_state in SETTLED_WELL
    if entry.attempt is not None:
        data["attempt"] = entry.attempt
    if entry.output is not None:
        data["output"] = _json(entry.output)
    data |= {"actor": entry.actor, "context": context}
    return {
        "seq": entry.seq, "type": entry.type, "at": entry.at, "run_id": entry.run_id, "session_id": session_id,
        "data": data,
    }  # fmt: skip


def external_event_view(event: ExternalEvent) -> dict[str, Any]:
    columns = ("id", "type", "correlation", "workspace_id", "received_at", "expires_at", "run_id", "consumed_at")
    return {column: getattr(event, column) for column in columns} | {
        "payload": _json(event.payload),
        "step_key": event.step,
        "sent_by": name_of(event.sent_by),
    }


def audit_view(row: Row) -> dict[str, Any]:
    """Return an entry as in a run's events, without its output, with its position in the chain."""
    entry = EntryRecord(
        row["run_id"], row["seq"], row["at"], row["type"], row["step"], row["from_state"], row["event"],
        row["to_state"], row["attempt"], 0, row["actor"], row["data"], None,
    )  # fmt: skip
    seen = event_view(entry, row["session_id"])
    return {"position": row["position"], "link": row["link"], **seen}


def approval_view(row: Row, votes: list[Row], who: Principal) -> dict[str, Any]:
    """Return an approval as `who` sees it, including whether they may decide."""
    action = _json(row["action"])
    is_open = row["status"] == ApprovalState.REQUESTED
    counted = [v for v in votes if v["approval_id"] == row["id"] and v["digest"] == row["digest"]]
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
        "requested_by": name_of(row["requested_by"]),
        "reason_required": row["reason_required"],
        "approvers": sorted(question_of(row).groups),
        "excluded": excluded_from(row),
        "receipt_id": row["receipt_id"],
        "votes": [
            {"by": name_of(v["voter"]), "decision": v["decision"], "reason": v["reason"], "at": v["at"]}
            for v in counted
        ],
        "approvers_needed": approvers_needed(row, counted) if is_open else 0,
        **edits_of(row),
        "voted": is_open and any(v["voter"] == who.actor and v["decision"] == ApprovalState.APPROVED for v in counted),
        "barred": why_cannot_vote(row, counted, who, approves=True) if is_open else None,
        "may_reject": is_open and why_cannot_vote(row, counted, who, approves=False) is None,
        "requested_at": row["requested_at"],
        "expires_at": row["expires_at"],
        "resolved_at": row["resolved_at"],
    }


def session_view(row: Row) -> dict[str, Any]:
    columns = ("id", "agent", "run_id", "waiting", "auto_approve", "workspace_id", "messages", "created_at")
    return {column: row[column] for column in columns} | {
        "status": "busy" if row["run_id"] or row["waiting"] else "idle",
        "cost_usd": float(row["cost_usd"]),
        "created_by": name_of(row["created_by"]),
    }


def message_view(row: Row) -> dict[str, Any]:
    result = _json(row["result"])
    return {column: row[column] for column in ("id", "number", "content", "run_id", "reason")} | {
        "by": name_of(row["sent_by"]),
        "at": row["sent_at"],
        "status": row["status"] or "queued",
        "answer": result.get("text") if isinstance(result, dict) else None,
    }


def session_event_view(entry: SessionEntry, session_id: SessionId) -> dict[str, Any]:
    """Return an event as in the run's own stream; the first event of a run also has the message."""
    view = event_view(entry, session_id)
    if entry.type == EntryType.RUN_CREATED:
        view["data"]["message"] = (_json(entry.input) or {}).get("message")
    return view


def agent_view(row: Row, *, with_source: bool = False) -> dict[str, Any]:
    return workflow_view(row, with_source=with_source) | {"model": (_json(row["source"]) or {}).get("model")}


def workflow_view(row: Row, *, with_source: bool = False) -> dict[str, Any]:
    view = {column: row[column] for column in ("name", "version", "digest", "created_at")}
    view["created_by"] = name_of(row["created_by"])
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
    capped = orjson.loads(row["workflows"] or "[]")
    return {"tenant_id": row["id"]} | {column: row[column] for column in columns} | {"workflows": capped}


def secret_view(row: Row) -> dict[str, Any]:
    """Return everything about a secret except its value."""
    return {column: row[column] for column in ("name", "version", "tools", "workspaces", "created_at")} | {
        "created_by": name_of(row["created_by"])
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
    view = {column: row[column] for column in _WORKER_COLUMNS} | {"metadata": _json(row["metadata"])}
    view["updated_at"] = row.get("updated_at") or max(row["heartbeat_at"], row["stopped_at"] or row["started_at"])
    return view if history is None else view | {"state_history": state_history(history)}


def supervisor_view(row: Row) -> dict[str, Any]:
    columns = ("id", "host", "pid", "desired_workers", "workers", "reason", "heartbeat_at", "started_at", "stopped_at")
    return {column: row[column] for column in columns}


def state_history(rows: list[Row]) -> list[dict[str, Any]]:
    columns = ("from_state", "event", "to_state", "reason", "at")
    return [{column: r[column] for column in columns} | {"by": r["actor"]} for r in rows]


def history_view(row: Row) -> dict[str, Any]:
    """Return a row of a worker's or job's history in the form of an event."""
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
    view["requested_by"] = name_of(row["requested_by"])
    view["progress"] = progress_view(row, standing, now)
    view["workers"] = [{"id": worker["id"], "name": worker["name"]} for worker in standing.workers]
    return view if history is None else view | {"state_history": state_history(history)}


def progress_view(row: Row, standing: Standing, now: datetime) -> dict[str, Any]:
    """Return the progress of a job, its speed so far, and the estimated end at that speed."""
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


def tool_view(tool: RegisteredTool) -> dict[str, Any]:
    columns = ("name", "description", "writes", "risk", "idempotent", "input_schema")
    return {column: getattr(tool, column) for column in columns}


def flow_view(flow: RegisteredFlow) -> dict[str, Any]:
    return {
        "name": flow.name, "version": flow.version, "description": flow.description, "retired": flow.is_retired,
    }  # fmt: skip


def trigger_definition_view(row: Row, tenant: str) -> dict[str, Any]:
    columns = ("name", "kind", "workflow", "workspace_id", "digest", "created_at", "updated_at")
    path = {"github": f"/api/hooks/github/{row['name']}", "slack": "/api/hooks/slack/commands"}.get(
        row["kind"], f"/api/hooks/{row['name']}"
    )
    if row["kind"] != "slack" and tenant != DEFAULT_TENANT:
        path += f"?tenant={tenant}"
    return {column: row[column] for column in columns} | {"path": path, "acts_as": row["key_name"]}


def schedule_view(row: Row) -> dict[str, Any]:
    columns = (
        "name", "cron", "timezone", "workflow", "missed", "workspace_id", "next_at", "paused_at", "paused_why",
        "last_slot", "last_run_id", "created_at",
    )  # fmt: skip
    return {column: row[column] for column in columns} | {"input": _json(row["input"]), "acts_as": row["key_name"]}


def _json(text: str | None) -> Any:
    return orjson.loads(text) if text is not None else None


def dump(view: Any) -> bytes:
    # The driver's UUID is a subclass, which orjson does not serialise as a UUID.
    return orjson.dumps(view, default=str)


def receipt_view(row: Row) -> dict[str, Any]:
    columns = ("id", "run_id", "tool", "idempotency_key", "status", "attempt", "error", "created_at", "completed_at")
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
    columns = ("id", "tool", "tier", "reason", "workspace_id", "created_at", "expires_at", "revoked_at", "uses")
    return {column: row[column] for column in columns} | {
        "arguments": _json(row["arguments"]),
        "created_by": name_of(row["created_by"]),
    }
