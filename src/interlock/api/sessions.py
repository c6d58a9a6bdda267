"""/api/sessions, /api/messages"""

import asyncio
import re
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from interlock.api import streams
from interlock.api.approvals import decide_one
from interlock.api.runs import stop_run
from interlock.api.services import (
    NOT_OUR_CURSOR,
    Json,
    Limit,
    Services,
    Svc,
    Who,
    change,
    decode_cursor,
    encode_cursor,
    number_cursor,
    page,
    uuid_cursor,
)
from interlock.api.views import dump, message_view, session_event_view, session_view
from interlock.engine import approvals, sessions
from interlock.engine.idempotency import Answer
from interlock.engine.principal import Principal
from interlock.errors import Conflict, Invalid, NotFound
from interlock.governance.roles import Permission
from interlock.ids import uuid7
from interlock.journal import EntryType
from interlock.store.pool import Row, Tx
from interlock.wire import (
    Approval,
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
    Stop,
)

router = APIRouter(prefix="/api")

# In the stream of a session an event is named by the number of its run and its own within that.
_PLACE = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")
UntilIdle = Annotated[bool, Query(description="End the stream when nothing is under way and nothing waits.")]


# ---------------------------------------------------------------- sessions


@router.post("/sessions", status_code=201, response_model=Session, tags=["sessions"])
async def create(request: Request, found: Svc, who: Who, body: NewSession | None = None) -> Response:
    """Open a session with an agent."""
    who.require(Permission.START)
    body = body or NewSession()
    agent, _, _ = await sessions.agent_named(found.plans, who, body.agent, found.settings.model)
    session_id = uuid7()

    async def work(tx: Tx) -> Answer:
        row = await sessions.create(tx, found.database, who, session_id, agent, auto_approve=body.auto_approve)
        return Answer(201, dump(session_view(row)))

    return await change(found, who, request, work)


@router.get("/sessions", response_model=Page[Session], tags=["sessions"])
async def list_sessions(found: Svc, who: Who, cursor: str | None = None, limit: Limit = 50) -> Response:
    """Newest first."""
    who.require(Permission.READ)
    rows = await found.database.fetch("list_sessions", who.tenant_id, uuid_cursor(cursor), limit + 1, who.workspace_id)
    return Json(page(rows, limit, session_view))


@router.get("/sessions/{session_id}", response_model=Session, tags=["sessions"])
async def show(session_id: UUID, found: Svc, who: Who) -> Response:
    who.require(Permission.READ)
    return Json(session_view(await sessions.get(found.database, who, session_id)))


@router.get("/sessions/{session_id}/messages", response_model=Page[Message], tags=["sessions"])
async def list_messages(
    session_id: UUID, found: Svc, who: Who, cursor: str | None = None, limit: Limit = 100
) -> Response:
    """What was said, oldest first, each with its answer."""
    who.require(Permission.READ)
    await sessions.get(found.database, who, session_id)
    rows = await found.database.fetch("said_in_session", session_id, number_cursor(cursor), limit + 1)
    return Json(page(rows, limit, message_view, key="number"))


@router.post("/sessions/{session_id}/interrupt", response_model=Run, tags=["sessions"])
async def interrupt(session_id: UUID, request: Request, found: Svc, who: Who, body: Stop | None = None) -> Response:
    """Interrupt the run that is under way."""
    who.require(Permission.STOP)

    async def work(tx: Tx) -> Answer:
        session = await sessions.get(tx, who, session_id)
        if session["run_id"] is None:
            raise Conflict("nothing is under way in this session", code="SESSION_IDLE")
        return await stop_run(tx, found, who, session["run_id"], body, interrupt=True)

    return await change(found, who, request, work)


@router.post("/sessions/{session_id}/approvals/{approval_id}/approve", response_model=Approval, tags=["sessions"])
async def approve(
    session_id: UUID, approval_id: UUID, request: Request, found: Svc, who: Who, body: Decide | None = None
) -> Response:
    """As at /api/approvals, for an approval of this session and no other."""
    await _require_part(found, who, session_id, approval_id)
    return await decide_one(approval_id, request, found, who, body or Decide(), approves=True)


@router.post("/sessions/{session_id}/approvals/{approval_id}/reject", response_model=Approval, tags=["sessions"])
async def reject(
    session_id: UUID, approval_id: UUID, request: Request, found: Svc, who: Who, body: Reject | None = None
) -> Response:
    """As at /api/approvals, for an approval of this session and no other."""
    await _require_part(found, who, session_id, approval_id)
    return await decide_one(approval_id, request, found, who, body or Reject(), approves=False)


async def _require_part(found: Services, who: Principal, session_id: UUID, approval_id: UUID) -> None:
    await sessions.get(found.database, who, session_id)
    if (await approvals.get(found.database, who, approval_id))["session_id"] != session_id:
        raise NotFound(f"no approval {approval_id} in session {session_id}", code="APPROVAL_NOT_FOUND")


# ---------------------------------------------------------------- messages


@router.post("/messages", status_code=202, response_model=Sent, tags=["sessions"])
async def send(body: NewMessage, request: Request, found: Svc, who: Who) -> Response:
    """Say something to an agent. Its run begins at once; while another is under way: 409, or later with `queue`."""
    who.require(Permission.START)
    name, session_id = body.agent, body.session_id
    if session_id is not None:
        name = (await sessions.get(found.database, who, session_id))["agent"]
        if body.agent not in (None, name):
            raise Conflict(f"this session is with {name}; open another for {body.agent}", code="OTHER_AGENT")
    agent, version, plan = await sessions.agent_named(
        found.plans, who, None if name == sessions.BUILT_IN else name, found.settings.model
    )
    opened, message_id = session_id or uuid7(), uuid7()

    async def work(tx: Tx) -> Answer:
        if session_id is None:
            await sessions.create(tx, found.database, who, opened, agent, auto_approve=body.auto_approve or False)
        sent = await sessions.send(
            tx, found.database, who, opened, version, plan, message_id=message_id, content=body.content,
            auto_approve=body.auto_approve, queue=body.queue,
        )  # fmt: skip
        run_id = sent.run["id"] if sent.run else None
        view = {"session_id": opened, "run_id": run_id, "message_id": message_id, "queued": run_id is None}
        return Answer(202, dump(view), run_id)

    return await change(found, who, request, work)


# ---------------------------------------------------------------- events


@router.get("/sessions/{session_id}/events", response_model=Page[Event], tags=["sessions"])
async def events(
    session_id: UUID, request: Request, found: Svc, who: Who, after: str | None = None, cursor: str | None = None,
    limit: Limit = 500, until_idle: UntilIdle = False,
) -> Response:  # fmt: skip
    """The events of all its runs, one run after the other: a page, or with `Accept: text/event-stream` as they happen.

    Each has its run's own number; in the stream their ids are `RUN.EVENT`, say `3.17`, to go on after.
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
    entries = await found.database.fetch("session_entries_after", session_id, *begin, limit + 1)
    shown = entries[:limit]
    last = f"{shown[-1]['session_run']}.{shown[-1]['seq']}" if len(entries) > limit else None
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


def _entries_after(found: Services, session_id: UUID, place: tuple[int, int], *, until_idle: bool) -> streams.More:
    """As of a run, and on to its next one."""
    watch, idle = streams.Watch(), False

    async def more(news: asyncio.Event) -> list[bytes] | None:
        nonlocal place, idle
        if watch.is_due():
            rows = await found.database.fetch(
                "watch_session", found.database.clock(), session_id, streams.WATCH_SECONDS
            )
            found.follower.listen(news, rows[0]["id"] if rows else None)
            if not rows:
                watch.forget()
        entries = await found.database.fetch("session_entries_after", session_id, *place, 500)
        if entries:
            place, idle = (entries[-1]["session_run"], entries[-1]["seq"]), False
            if any(entry["type"] == EntryType.RUN_COMPLETED for entry in entries):
                watch.forget()
            return [_event(entry, session_id) for entry in entries]
        if idle:
            return None
        if until_idle and not await found.database.value("session_is_busy", session_id):
            idle = True  # it may have ended after we looked: what is there now is all there is
            return await more(news)
        return []

    return more


def _event(entry: Row, session_id: UUID) -> bytes:
    number = b"%d.%d" % (entry["session_run"], entry["seq"])
    return streams.event(number, entry["type"], session_event_view(entry, session_id))
