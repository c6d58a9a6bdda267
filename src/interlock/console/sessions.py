"""Sessions: a conversation with an agent, the agent's tool calls, and their approvals."""

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.dependencies import encode_cursor, uuid_cursor
from interlock.console.approvals import ApprovalCard, cards_of, seen_in
from interlock.console.rendering import FormFields, Visit, Visitor, done, render, uuid_of
from interlock.engine import sessions
from interlock.engine.runs import runs
from interlock.engine.writing.load import entry_of
from interlock.errors import Conflict, Invalid
from interlock.ids import MessageId, RunId, SessionId, uuid7
from interlock.journal import Entry, EntryType
from interlock.lifecycle import STEP, StepState
from interlock.policy.roles import Permission
from interlock.store import sql
from interlock.store.pool import Row, Tx
from interlock.store.records import RunRecord
from interlock.wire import why_cut

router = APIRouter()

_PAGE = 50
# The last messages of a long conversation; the pages of its runs have the rest.
_TURNS = 30


@dataclass(slots=True)
class Part:
    """Text or a tool call of an agent."""

    kind: str
    key: str
    text: str = ""
    # Why the text is an incomplete answer, or None.
    why_cut: str | None = None
    tool: str = ""
    given: Any = None
    status: str = ""
    output: str | None = None
    error: str | None = None
    card: ApprovalCard | None = None


@dataclass(slots=True)
class Turn:
    number: int
    said: str
    by: str
    at: Any
    run_id: RunId | None
    status: str
    reason: str | None
    error: str | None
    parts: list[Part] = field(default_factory=list)


@router.get("/sessions")
async def listed(request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    database, who = visit.services.database, visit.who
    before = uuid_cursor(request.query_params.get("cursor"))
    rows = await database.fetch("list_sessions", who.tenant_id, before, _PAGE + 1, who.workspace_id)
    agents = await database.fetch("list_workflows", who.tenant_id, None, 200, True)
    return await render(
        request, visit, "sessions.html", sessions=rows[:_PAGE], agents=[row["name"] for row in agents],
        next=encode_cursor(rows[_PAGE - 1]["id"]) if len(rows) > _PAGE else None,
        live="/live/sessions" if before is None else None,
    )  # fmt: skip


@router.get("/sessions/{session_id}")
async def show(session_id: str, request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    session = await sessions.get(visit.services.database, visit.who, SessionId(uuid_of(session_id, "session")))
    return await render(
        request, visit, "session.html", session=session, turns=await _turns(visit, session),
        earlier=max(0, session["messages"] - _TURNS), busy=session["run_id"] is not None,
        seen=seen_in(request), live=f"/live/session/{session['id']}",
    )  # fmt: skip


async def _turns(visit: Visitor, session: Row) -> list[Turn]:
    database = visit.services.database
    first = max(0, session["messages"] - _TURNS)
    messages = await database.fetch("said_in_session", session["id"], first, _TURNS)
    entries = await sql.journal_of(database, run_ids=[row["run_id"] for row in messages if row["run_id"]])
    of_run: dict[UUID, list[Entry]] = {}
    for entry in entries:
        of_run.setdefault(entry.run_id, []).append(entry_of(entry))
    cards = await _cards(visit, [row["run_id"] for row in messages if row["run_id"]])
    return [_turn(row, of_run.get(row["run_id"], []), cards) for row in messages]


async def _cards(visit: Visitor, run_ids: list[RunId]) -> dict[str, ApprovalCard]:
    rows = await visit.services.database.fetch("asked_in_runs", visit.who.tenant_id, run_ids)
    return {card.id: card for card in await cards_of(visit, rows)}


def _turn(row: Row, entries: list[Entry], cards: dict[str, ApprovalCard]) -> Turn:
    parts: dict[str, Part] = {}
    attempts: dict[str, Any] = {}
    for entry in entries:
        _hear(entry, parts, attempts, cards)
    error = orjson.loads(row["error"]) if row["error"] else None
    return Turn(
        row["number"], row["content"], row["sent_by"], row["sent_at"], row["run_id"], row["status"] or "queued",
        row["reason"], error.get("message") if isinstance(error, dict) else None, list(parts.values()),
    )  # fmt: skip


def _hear(entry: Entry, parts: dict[str, Part], attempts: dict[str, Any], cards: dict[str, ApprovalCard]) -> None:
    key, data = entry.step or "", entry.data or {}
    declared = data.get("declares") or {}
    if declared.get("kind") == "tool":
        parts.setdefault(key, Part("tool", key, tool=declared["tool"], given=declared.get("input")))
    match entry.type:
        case EntryType.MESSAGE_DELTA:
            spoken = parts.setdefault(key, Part("text", key))
            if attempts.get(key) != entry.attempt:  # the model was called again: discard its previous text
                spoken.text, attempts[key] = "", entry.attempt
            spoken.text += str(data["text"])
        case EntryType.MESSAGE:
            answer = parts.setdefault(key, Part("text", key))
            answer.text, answer.why_cut = str(data["text"]), why_cut(data)
        case EntryType.APPROVAL_REQUESTED if key in parts:
            parts[key].card = cards.get(str(data["approval_id"]))
    part = parts.get(key)
    if part is None or part.kind != "tool" or entry.to_state is None:
        return
    part.status = entry.to_state
    if StepState(entry.to_state) in STEP.terminal:
        part.output = entry.output
        error = data.get("error")
        part.error = error.get("message") if isinstance(error, dict) else None


# ---------------------------------------------------------------- sending messages


@router.post("/sessions")
async def begin(visit: Visit, said: FormFields) -> Response:
    visit.who.require(Permission.START)
    name = said.get("agent")
    content = _content(said)
    session_id = await _send(visit, SessionId(uuid7()), name, content, new=True, auto_approve="auto_approve" in said)
    return done(f"/sessions/{session_id}")


@router.post("/sessions/{session_id}")
async def say(session_id: str, visit: Visit, said: FormFields) -> Response:
    visit.who.require(Permission.START)
    wanted = uuid_of(session_id, "session")
    session = await sessions.get(visit.services.database, visit.who, SessionId(wanted))
    name = None if session["agent"] == sessions.BUILT_IN else session["agent"]
    await _send(visit, SessionId(wanted), name, _content(said), new=False)
    return done(f"/sessions/{wanted}")


async def _send(
    visit: Visitor, session_id: SessionId, name: str | None, content: str, *, new: bool, auto_approve: bool = False
) -> UUID:
    found, message_id = visit.services, uuid7()
    agent, version, plan = await sessions.agent_named(found.plans, visit.who, name, found.settings.model)

    async def work(tx: Tx) -> None:
        if new:
            await sessions.create(tx, visit.who, session_id, agent, auto_approve=auto_approve)
        # A message sent while the agent works waits in the queue until the run has ended.
        await sessions.send(
            tx, visit.who, session_id, version, plan, message_id=MessageId(message_id), content=content,
            auto_approve=None, queue=True,
        )  # fmt: skip

    await found.database.run_in_transaction(work)
    return session_id


def _content(said: dict[str, str]) -> str:
    content = said.get("content", "").strip()
    if not content or "\0" in content:
        raise Invalid("say something to the agent first")
    return content


@router.post("/sessions/{session_id}/interrupt")
async def interrupt(session_id: str, visit: Visit, said: FormFields) -> Response:
    visit.who.require(Permission.STOP)
    found, wanted = visit.services, uuid_of(session_id, "session")
    session = await sessions.get(found.database, visit.who, SessionId(wanted))
    if session["run_id"] is None:
        raise Conflict("nothing is under way in this session", code="SESSION_IDLE")

    async def work(tx: Tx) -> RunRecord:
        return await runs.cancel(
            tx, found.plans, visit.who, session["run_id"], reason=said.get("reason"), interrupt=True
        )

    await found.database.run_in_transaction(work)
    return done(f"/sessions/{wanted}")
