"""The inbox: the open approvals, first those that the visitor can decide."""

from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.dependencies import Json
from interlock.api.views import approval_view
from interlock.console.filters import inline
from interlock.console.rendering import FormFields, Visit, Visitor, done, render, uuid_of, wants_json
from interlock.engine.approvals import approvals
from interlock.errors import Invalid
from interlock.ids import ApprovalId
from interlock.journal import ApprovalKind
from interlock.lifecycle import APPROVAL, ApprovalState, Tier
from interlock.policy.policy import DEFAULT_POLICY
from interlock.policy.roles import Permission
from interlock.policy.source_scan import statements
from interlock.store.pool import Row, Tx
from interlock.visible import visible_text
from interlock.wire import VOTE_RECORDED

router = APIRouter()

# The maximum shown of approvals that the visitor can decide and of those they cannot, and the number read at a time.
_SHOWN, _OTHERS, _LOOKED_AT = 100, 20, 500
_SHOWN_DECIDED = 10
_MOST_SEEN = 500
# No page shows more of one value, not even the page of the approval.
LONGEST = 1_000_000
# A list shows only the first lines of a longer summary.
_LONG_SUMMARY = 300


@dataclass(frozen=True, slots=True)
class ApprovalCard:
    """One approval as one person sees it."""

    view: dict[str, Any]
    workflow: str
    changes: list["FieldChangeView"]
    # Why this person cannot vote yes, as text; None if they can.
    barred: str | None
    needed: int
    # An effect in doubt has to be resolved and cannot be approved.
    in_doubt: bool
    editable: bool
    asked_by: str
    rule: str | None

    @property
    def asks_twice(self) -> bool:
        """Return whether a yes takes a second press of the button."""
        return self.view["tier"] == Tier.HIGH or bool(self.view["two_person"])

    def is_cut(self, most: int) -> bool:
        """Return whether a page with this limit per value, and a short summary, leaves something out."""
        values = [value for change in self.changes for value in (change.value, change.before)]
        long = most >= LONGEST or len(self.view["summary"] or "") <= _LONG_SUMMARY
        return not long or any(len(inline(value, LONGEST + 1)) > most for value in values)

    @property
    def outcome(self) -> str:
        """Return how the approval ended, and by whom: "ann rejected"."""
        status = self.view["status"]
        voters = [vote["by"] for vote in self.view["votes"] if vote["decision"] == status]
        return f"{' and '.join(voters)} {status}" if voters else str(status).capitalize()

    @property
    def id(self) -> str:
        return str(self.view["id"])


@dataclass(frozen=True, slots=True)
class FieldChangeView:
    """A field of the action: the proposed value and, if a person changed it, the current value."""

    name: str
    value: Any
    before: Any = None
    edited: bool = False


@router.get("/inbox")
async def inbox(request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    database, who = visit.services.database, visit.who
    mine, others = await _waiting(visit)
    waiting = await database.value("count_open", who.tenant_id, who.workspace_id)
    decided = await database.fetch(
        "decided_lately", who.tenant_id, who.workspace_id, _SHOWN_DECIDED, list(APPROVAL.terminal)
    )
    cards, rest = await cards_of(visit, mine[:_SHOWN]), await cards_of(visit, others)
    gone = seen_in(request) - {card.id for card in [*cards, *rest]}
    settled = await database.fetch("approvals_by_id", who.tenant_id, who.workspace_id, [UUID(each) for each in gone])
    return await render(
        request, visit, "inbox.html", cards=cards, others=rest, more=waiting - len(cards) - len(rest),
        more_for_you=len(mine) > _SHOWN, decided=await cards_of(visit, decided), live="/live/inbox",
        settled=await cards_of(visit, settled),
    )  # fmt: skip


def seen_in(request: Request) -> set[str]:
    """Return the approvals whose cards the page already shows. The page keeps them after they are decided."""
    ids = filter(None, request.query_params.get("seen", "").split("."))
    return {str(uuid_of(each, "approval")) for each in islice(ids, _MOST_SEEN)}


async def _waiting(visit: Visitor) -> tuple[list[Row], list[Row]]:
    """Return the approvals that the visitor can decide and those they cannot, soonest to expire first.

    The first ones may all be for others, so it reads on until it has enough that the visitor can decide, or has read
    all.
    """
    database, who = visit.services.database, visit.who
    mine: list[Row] = []
    others: list[Row] = []
    place: tuple[datetime | None, UUID | None] = None, None
    while len(mine) <= _SHOWN:
        rows = await database.fetch("inbox", who.tenant_id, who.workspace_id, _LOOKED_AT, *place)
        votes = await approvals.votes_on(database, rows)
        for row in rows:
            own = [vote for vote in votes if vote["approval_id"] == row["id"]]
            (others if approvals.why_cannot_vote(row, own, who, approves=True) else mine).append(row)
        del others[_OTHERS:]
        # A visitor whose role cannot decide needs no further search.
        if len(rows) < _LOOKED_AT or not visit.may(Permission.APPROVE):
            break
        place = rows[-1]["expires_at"], rows[-1]["id"]
    return mine, others


@router.get("/approvals/{approval_id}")
async def show(approval_id: str, request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    database = visit.services.database
    row = await approvals.get(database, visit.who, ApprovalId(uuid_of(approval_id, "approval")))
    run = await database.row("get_run", visit.who.tenant_id, row["run_id"])
    assert run is not None
    [card] = await cards_of(visit, [{**row, "workflow": run["workflow"]}])
    return await render(request, visit, "approval.html", ask=card, live="/live/inbox")


async def cards_of(visit: Visitor, rows: list[Any]) -> list[ApprovalCard]:
    votes = await approvals.votes_on(visit.services.database, rows)
    digests = {row["policy_digest"] for row in rows} - {None}
    texts = await visit.services.database.fetch("policy_texts", visit.who.tenant_id, list(digests)) if digests else []
    rules = {text["digest"]: text["text"] for text in texts}
    return [_card(visit, row, votes, rules.get(row["policy_digest"], DEFAULT_POLICY)) for row in rows]


def _card(visit: Visitor, row: Any, votes: list[Row], policy: str) -> ApprovalCard:
    own = [vote for vote in votes if vote["approval_id"] == row["id"]]
    view = approval_view(row, own, visit.who)
    return ApprovalCard(
        view=view, workflow=row["workflow"], changes=_changes(row), barred=view["barred"],
        needed=2 if row["two_person"] else 1, in_doubt=row["kind"] == ApprovalKind.IN_DOUBT,
        editable=row["kind"] == ApprovalKind.ACTION, asked_by=row["requested_by"], rule=_rule(view, policy),
    )  # fmt: skip


def _changes(row: Any) -> list[FieldChangeView]:
    action = orjson.loads(row["action"])
    before = (orjson.loads(row["proposed"]) if row["proposed"] else action).get("fields") or {}
    now = action.get("fields") or {}
    return [
        FieldChangeView(name, now.get(name), before.get(name), edited=before.get(name) != now.get(name))
        for name in [*now, *(name for name in before if name not in now)]
    ]


def _rule(view: dict[str, Any], policy: str) -> str | None:
    """Return the text of the rules that required approval, from the policy that was in force at that time."""
    wanted = [f'@id("{rule_id}")' for rule_id in view["rationale"]["rule_ids"]]
    return "\n\n".join(rule.text for rule in statements(policy) if any(mark in rule.text for mark in wanted)) or None


# ---------------------------------------------------------------- voting


@router.post("/approvals/{approval_id}/approve")
async def approve(approval_id: str, request: Request, visit: Visit, said: FormFields) -> Response:
    return await _decide(request, visit, ApprovalId(uuid_of(approval_id, "approval")), said, approves=True)


@router.post("/approvals/{approval_id}/reject")
async def reject(approval_id: str, request: Request, visit: Visit, said: FormFields) -> Response:
    return await _decide(request, visit, ApprovalId(uuid_of(approval_id, "approval")), said, approves=False)


async def _decide(
    request: Request, visit: Visitor, approval_id: ApprovalId, said: dict[str, str], *, approves: bool
) -> Response:
    visit.who.require(Permission.APPROVE)
    found = visit.services
    patch = _patch(said.get("patch")) if approves else None

    async def work(tx: Tx) -> Row:
        reason, digest = said.get("reason"), said.get("digest")
        if patch:
            return await approvals.edit(
                tx, found.plans, found.policies, visit.who, approval_id, patch=patch, reason=reason,
                digest=digest,
            )  # fmt: skip
        return await approvals.decide(
            tx, found.plans, visit.who, approval_id, approves=approves, reason=reason, digest=digest
        )

    row = await found.database.run_in_transaction(work)
    if wants_json(request):
        return Json({"message": visible_text(_told(row, patch)), "status": row["status"]})
    back = said.get("back", "")
    return done(back if back.startswith(("/runs/", "/sessions/")) else "/inbox", _told(row, patch))


def _told(row: Row, patch: dict[str, Any] | None) -> str:
    if row["status"] == ApprovalState.REQUESTED:
        return "The action is changed. Another person has to approve it." if patch else VOTE_RECORDED
    return f"{str(row['status']).capitalize()}: {row['summary']}"


def _patch(text: str | None) -> dict[str, Any] | None:
    if not text or not text.strip():
        return None
    try:
        patch = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Invalid(f"the changed fields are not JSON: {error}") from None
    if not isinstance(patch, dict):
        raise Invalid('the changed fields are a JSON object, for example {"amount": 50}')
    return patch
