"""/api/sessions, /api/messages"""

import asyncio
import re
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from interlock.api import streams
from interlock.api.approvals import decide_one
from interlock.api.dependencies import (
    NOT_OUR_CURSOR,
    AppContext,
    Caller,
    Ctx,
    Json,
    Limit,
    decode_cursor,
    encode_cursor,
    idempotency_request,
    idempotent_write,
    number_cursor,
    page,
    uuid_cursor,
)
from interlock.api.runs import stop_run
from interlock.api.views import dump, message_view, session_event_view, session_view
from interlock.engine import sessions
from interlock.engine.access.principal import Principal
from interlock.engine.approvals import approvals
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.errors import Conflict, Invalid, NotFound
from interlock.ids import ApprovalId, MessageId, SessionId, uuid7
from interlock.journal import EntryType
from interlock.policy.roles import Permission
from interlock.store import sql
from interlock.store.pool import Tx
from interlock.store.records import SessionEntry
from interlock.wire import (
    Approval,
    CancelRequest,
    Decide,
    Event,
    Message,
    NewMessage,
    NewSession,
    Page,
    Reject,
    Run,
    Sent,
    Session,
)

router = APIRouter(prefix="/api")

# The id of an event in a session's stream: the number of its run and the event's number within that run.
_PLACE = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")
UntilIdle = Annotated[bool, Query(description="End the stream when nothing is under way and nothing waits.")]


# ---------------------------------------------------------------- sessions


@router.post("/sessions", status_code=201, response_model=Session, tags=["sessions"])
async def create(request: Request, found: Ctx, who: Caller, body: NewSession | None = None) -> Response:
    """Open a session with an agent."""
    who.require(Permission.START)
    body = body or NewSession()
    agent, _, _ = await sessions.agent_named(found.plans, who, body.agent, found.settings.model)
    session_id = uuid7()

    async def work(tx: Tx) -> StoredResponse:
        row = await sessions.create(tx, who, SessionId(session_id), agent, auto_approve=body.auto_approve)
        return StoredResponse(201, dump(session_view(row)))

    return await idempotent_write(found, who, request, work)


@router.get("/sessions", response_model=Page[Session], tags=["sessions"])
async def list_sessions(found: Ctx, who: Caller, cursor: str | None = None, limit: Limit = 50) -> Response:
    """List sessions, newest first."""
    who.require(Permission.READ)
    rows = await found.database.fetch("list_sessions", who.tenant_id, uuid_cursor(cursor), limit + 1, who.workspace_id)
    return Json(page(rows, limit, session_view))


@router.get("/sessions/{session_id}", response_model=Session, tags=["sessions"])
async def show(session_id: SessionId, found: Ctx, who: Caller) -> Response:
    who.require(Permission.READ)
    return Json(session_view(await sessions.get(found.database, who, session_id)))


@router.get("/sessions/{session_id}/messages", response_model=Page[Message], tags=["sessions"])
async def list_messages(
    session_id: SessionId, found: Ctx, who: Caller, cursor: str | None = None, limit: Limit = 100
) -> Response:
    """List the messages of a session, oldest first, each with its answer."""
    who.require(Permission.READ)
    await sessions.get(found.database, who, session_id)
    rows = await found.database.fetch("said_in_session", session_id, number_cursor(cursor), limit + 1)
    return Json(page(rows, limit, message_view, key="number"))


@router.post("/sessions/{session_id}/interrupt", response_model=Run, tags=["sessions"])
async def interrupt(
    session_id: SessionId, request: Request, found: Ctx, who: Caller, body: CancelRequest | None = None
) -> Response:
    """Interrupt the current run of the session. The key that opened the session may do so, including an agent's key."""
    who.require(Permission.START)

    async def work(tx: Tx) -> StoredResponse:
        session = await sessions.get(tx, who, session_id)
        if session["created_by"] != who.actor:
            who.require(Permission.STOP)
        if session["run_id"] is None:
            raise Conflict("nothing is under way in this session", code="SESSION_IDLE")
        return await stop_run(tx, found, who, session["run_id"], body, interrupt=True)

    return await idempotent_write(found, who, request, work)


@router.post("/sessions/{session_id}/approvals/{approval_id}/approve", response_model=Approval, tags=["sessions"])
async def approve(
    session_id: SessionId,
    approval_id: ApprovalId,
    request: Request,
    found: Ctx,
    who: Caller,
    body: Decide | None = None,
) -> Response:
    """Approve an approval of this session only. Otherwise like approving at /api/approvals."""
    await _require_part(found, who, session_id, approval_id)
    return await decide_one(approval_id, request, found, who, body or Decide(), approves=True)


@router.post("/sessions/{session_id}/approvals/{approval_id}/reject", response_model=Approval, tags=["sessions"])
async def reject(
    session_id: SessionId,
    approval_id: ApprovalId,
    request: Request,
    found: Ctx,
    who: Caller,
    body: Reject | None = None,
) -> Response:
    """Reject an approval of this session only. Otherwise like rejecting at /api/approvals."""
    await _require_part(found, who, session_id, approval_id)
    return await decide_one(approval_id, request, found, who, body or Reject(), approves=False)


async def _require_part(found: AppContext, who: Principal, session_id: SessionId, approval_id: ApprovalId) -> None:
    who.require(Permission.APPROVE)
    await sessions.get(found.database, who, session_id)
    if (await approvals.get(found.database, who, approval_id))["session_id"] != session_id:
        raise NotFound(f"no approval {approval_id} in session {session_id}", code="APPROVAL_NOT_FOUND")


# ---------------------------------------------------------------- messages


@router.post("/messages", status_code=202, response_model=Sent, tags=["sessions"])
async def send(body: NewMessage, request: Request, found: Ctx, who: Caller) -> Response:
    """Send a message to an agent and start its run.

    While another run is active the answer is 409, or with `queue` the message waits.
    """
    who.require(Permission.START)
    name, session_id = body.agent, body.session_id
    if session_id is not None:
        name = (await sessions.get(found.database, who, SessionId(session_id)))["agent"]
        if body.agent not in (None, name):
            raise Conflict(f"this session is with {name}; open another for {body.agent}", code="OTHER_AGENT")
    agent, version, plan = await sessions.agent_named(
        found.plans, who, None if name == sessions.BUILT_IN else name, found.settings.model
    )
    opened, message_id = session_id or SessionId(uuid7()), MessageId(uuid7())
    asked = await idempotency_request(who, request)

    async def work(tx: Tx) -> StoredResponse:
        if session_id is None:
            await sessions.create(tx, who, SessionId(opened), agent, auto_approve=body.auto_approve or False)
        sent = await sessions.send(
            tx, who, SessionId(opened), version, plan, message_id=message_id, content=body.content,
            auto_approve=body.auto_approve, queue=body.queue, idempotency_key=asked.key if asked else None,
        )  # fmt: skip
        run_id = sent.run.id if sent.run else None
        view = {"session_id": opened, "run_id": run_id, "message_id": message_id, "queued": run_id is None}
        return StoredResponse(202, dump(view), run_id)

    return await idempotent_write(found, who, request, work)


# ---------------------------------------------------------------- events


@router.get("/sessions/{session_id}/events", response_model=Page[Event], tags=["sessions"])
async def events(
    session_id: SessionId, request: Request, found: Ctx, who: Caller, after: str | None = None,
    cursor: str | None = None, limit: Limit = 500, until_idle: UntilIdle = False,
) -> Response:  # fmt: skip
    """Return the events of the session's runs, in order: one page, or with `Accept: text/event-stream` a stream.

    `seq` is the number within the run. The id in the stream is `RUN.EVENT`, for example `3.17`; pass it to continue
    after that event.
    """
    who.require(Permission.READ)
    await sessions.get(found.database, who, session_id)
    begin = _given(after, "after is the id of an event in the stream, say 3.17")
    if streams.is_wanted(request):
        place = _place(request.headers.get("last-event-id")) or begin
        return streams.stream(
            found, request, session_id, _entries_after(found, session_id, place, until_idle=until_idle)
        )
    if cursor is not None:
        begin = _given(decode_cursor(cursor), NOT_OUR_CURSOR)
    entries = await sql.session_entries_after(
        found.database, session_id=session_id, session_run=begin[0], seq=begin[1], most=limit + 1
    )
    shown = entries[:limit]
    last = f"{shown[-1].session_run}.{shown[-1].seq}" if len(entries) > limit else None
    return Json(
        {
            "items": [session_event_view(entry, session_id) for entry in shown],
            "next_cursor": encode_cursor(last) if last else None,
        }
    )


def _given(text: str | None, otherwise: str) -> tuple[int, int]:
    if text is not None and _place(text) is None:
        raise Invalid(otherwise)
    return _place(text) or (0, 0)


def _place(text: str | None) -> tuple[int, int] | None:
    found = _PLACE.fullmatch(text or "")
    return (int(found[1]), int(found[2])) if found else None


def _entries_after(
    found: AppContext, session_id: SessionId, place: tuple[int, int], *, until_idle: bool
) -> streams.More:
    """Return the entries after a place, across the runs of the session."""
    watch, idle = streams.Watch(), False

    async def more(news: asyncio.Event) -> list[bytes] | None:
        nonlocal place, idle
        if watch.is_due():
            rows = await found.database.fetch("watch_session", session_id, streams.WATCH_SECONDS)
            found.follower.listen(news, rows[0]["id"] if rows else None)
            if not rows:
                watch.forget()
        entries = await sql.session_entries_after(
            found.database, session_id=session_id, session_run=place[0], seq=place[1], most=500
        )
        if entries:
            place, idle = (entries[-1].session_run, entries[-1].seq), False
            if any(entry.type == EntryType.RUN_COMPLETED for entry in entries):
                watch.forget()
            return [_event(entry, session_id) for entry in entries]
        if idle:
            return None
        if until_idle and not await found.database.value("session_is_busy", session_id):
            idle = True  # the session may have ended after the last read: read the remaining entries once more
            return await more(news)
        return []

    return more


def _event(entry: SessionEntry, session_id: SessionId) -> bytes:
    number = b"%d.%d" % (entry.session_run, entry.seq)
    return streams.event(number, entry.type, session_event_view(entry, session_id))
