"""Runs: searching them, and the page of one run."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from interlock import clock
from interlock.api.dependencies import encode_cursor, uuid_cursor
from interlock.api.views import event_view, receipt_view, run_view
from interlock.console import graph, timeline
from interlock.console.approvals import cards_of, seen_in
from interlock.console.rendering import FormFields, Visit, Visitor, done, render, uuid_of
from interlock.engine.approvals import approvals
from interlock.engine.proof import evidence
from interlock.engine.runs import resume, runs
from interlock.engine.writing.load import entry_of
from interlock.errors import Invalid
from interlock.ids import RunId, floor_of, uuid7
from interlock.lifecycle import RUN, RunState
from interlock.policy.roles import Permission
from interlock.store.pool import Row, Tx
from interlock.store.records import EntryRecord, RunRecord, entry_record

router = APIRouter()

_PAGE = 50
# The most runs that one page reads, which keeps it fast. The next page continues the search.
_WINDOW = 20_000
_SPANS = {"1h": timedelta(hours=1), "24h": timedelta(days=1), "7d": timedelta(days=7), "30d": timedelta(days=30)}
# The last entries of a long run; the events page has the rest.
_ENTRIES = 200


@dataclass(frozen=True, slots=True)
class Filters:
    status: RunState | None
    workflow: str | None
    trigger: str | None
    session: UUID | None
    job: UUID | None
    text: str | None
    since: str | None

    @classmethod
    def of(cls, query: Any) -> "Filters":
        status, since = query.get("status") or None, query.get("since") or None
        if status is not None and status not in RUN.states:
            raise Invalid(f"a run is {', '.join(RUN.states)}; not {status!r}")
        if since is not None and since not in _SPANS:
            raise Invalid(f"since is one of {', '.join(_SPANS)}; not {since!r}")
        return cls(
            RunState(status) if status else None, query.get("workflow") or None, query.get("trigger") or None,
            _id(query.get("session"), "session"), _id(query.get("job"), "job"), (query.get("q") or "").strip() or None,
            since,
        )  # fmt: skip

    @property
    def any(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)


@router.get("/runs")
async def listed(request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    filters, before = Filters.of(request.query_params), uuid_cursor(request.query_params.get("cursor"))
    if filters.text and (named := _whole_id(filters.text)) is not None:
        return RedirectResponse(f"/runs/{named}", 303)
    found = await _find(visit, filters, before)
    counts = await visit.services.database.fetch(
        "count_runs_by_state", visit.who.tenant_id, list(RUN.states), visit.who.workspace_id
    )
    names = await visit.services.database.fetch("workflow_names", visit.who.tenant_id)
    return await render(
        request, visit, "runs.html", runs=found.runs, filters=filters, spans=list(_SPANS),
        counts={row["status"]: row["runs"] for row in counts}, states=RUN.states,
        workflows=[row["name"] for row in names], next=encode_cursor(found.next) if found.next else None,
        window=_WINDOW if found.cut_short else None, first=before is None,
        live="/live/runs" if before is None else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    runs: list[Row]
    next: UUID | None
    # The page is not full, and there are older runs that it did not read.
    cut_short: bool = False


async def _find(visit: Visitor, filters: Filters, before: UUID | None) -> Found:
    database, who = visit.services.database, visit.who
    floor = floor_of(clock.now() - _SPANS[filters.since]) if filters.since else None

    async def work(tx: Tx) -> Found:
        await tx.value("plan_afresh")
        rows = await tx.fetch(
            "find_runs", who.tenant_id, who.workspace_id, before, floor, filters.status, filters.workflow,
            filters.trigger, filters.session, filters.job, _pattern(filters.text), _PAGE + 1, _WINDOW,
        )  # fmt: skip
        if len(rows) > _PAGE:
            return Found(rows[:_PAGE], rows[_PAGE - 1]["id"])
        last = await tx.value(
            "last_looked_at", who.tenant_id, before, floor, filters.status, filters.workflow, filters.session,
            filters.job, _WINDOW,
        )  # fmt: skip
        return Found(rows, last, cut_short=last is not None)

    return await database.run_in_transaction(work)


def _pattern(text: str | None) -> str | None:
    if text is None:
        return None
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


def _whole_id(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _id(text: str | None, what: str) -> UUID | None:
    return uuid_of(text, what) if text else None


# ---------------------------------------------------------------- one run


@router.get("/runs/{run_id}")
async def show(run_id: str, request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    found, wanted = visit.services, RunId(uuid_of(run_id, "run"))
    row, journal = await runs.get_with_journal(found.database, found.plans, visit.who, wanted)
    assert journal is not None
    every = [entry_record(entry) for entry in row.entries or ()]
    entries = every[-_ENTRIES:][::-1]
    receipts = await found.database.fetch("receipts_of", visit.who.tenant_id, wanted)
    asked = await approvals.list_approvals(found.database, visit.who, run_id=wanted)
    cards = await cards_of(visit, [{**question, "workflow": row.workflow} for question in asked])
    proof = await found.database.row("get_evidence", visit.who.tenant_id, wanted)
    view = run_view(row, journal, found.policies.hidden)
    children = await found.database.fetch("children_to_show", visit.who.tenant_id, wanted)
    ended_badly = row.status in (RunState.FAILED, RunState.CANCELED)
    no_retry = await resume.why_refused(found.database, visit.who.tenant_id, wanted, journal) if ended_badly else None
    return await render(
        request, visit, "run.html", run=view, steps=[*view["steps"], *view["compensation"]], cards=cards, proof=proof,
        seen=seen_in(request), no_retry=no_retry,
        retries=await found.database.fetch("retries_of", visit.who.tenant_id, wanted),
        receipts={str(receipt["step"]): receipt_view(receipt) for receipt in receipts},
        events=[event_view(entry, row.session_id) for entry in entries], more=len(every) - len(entries),
        drawing=_graph(view), chart=_chart(row, view, every), children=children,
        ended=row.completed_at is not None, live=f"/live/run/{wanted}" if row.completed_at is None else None,
    )  # fmt: skip


def _graph(view: dict[str, Any]) -> graph.Drawing | None:
    def said(step: dict[str, Any]) -> str:
        return "retrying" if step["retrying"] else str(step["status"])

    return graph.draw((s["key"], s["key"], said(s), s["needs"]) for s in view["steps"])


def _chart(row: RunRecord, view: dict[str, Any], every: list[EntryRecord]) -> timeline.Timeline:
    entries = [entry_of(entry) for entry in every]
    end = row.completed_at or clock.now()
    return timeline.draw((step["key"] for step in view["steps"]), entries, row.created_at, end)


@router.post("/runs/{run_id}/cancel")
async def cancel(run_id: str, visit: Visit, said: FormFields) -> Response:
    visit.who.require(Permission.STOP)
    found, wanted = visit.services, RunId(uuid_of(run_id, "run"))

    async def work(tx: Tx) -> RunRecord:
        return await runs.cancel(tx, found.plans, visit.who, wanted, reason=said.get("reason"), interrupt=False)

    row = await found.database.run_in_transaction(work)
    ended = row.status == RunState.CANCELED
    return done(f"/runs/{wanted}", "Canceled." if ended else "Canceling: what is under way is being stopped.")


@router.post("/runs/{run_id}/retry")
async def retry(run_id: str, visit: Visit, said: FormFields) -> Response:
    visit.who.require(Permission.START)
    found, wanted, new_id = visit.services, RunId(uuid_of(run_id, "run")), RunId(uuid7())

    async def work(tx: Tx) -> RunRecord:
        return await resume.retry(tx, found.plans, visit.who, wanted, new_id)

    row = await found.database.run_in_transaction(work)
    return done(f"/runs/{row.id}", "This run goes on where the other one had got to.")


@router.get("/runs/{run_id}/evidence")
async def download(run_id: str, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    run = await runs.get(visit.services.database, visit.who, RunId(uuid_of(run_id, "run")))
    envelope, _ = await evidence.of_run(visit.services.database, visit.services.notary, run)
    headers = {"Content-Disposition": f'attachment; filename="evidence-{run.id}.json"'}
    return Response(envelope, headers=headers, media_type="application/json")
