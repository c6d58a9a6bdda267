"""The inbox: what waits for people, and above all for whoever looks."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from interlock.api.views import approval_view
from interlock.console.page import Said, Visit, Visitor, done, render, uuid_of
from interlock.engine import approvals
from interlock.errors import Invalid
from interlock.governance.policy import DEFAULT_POLICY
from interlock.governance.policy_text import statements
from interlock.governance.roles import Permission
from interlock.journal import AskKind
from interlock.lifecycle import APPROVAL, ApprovalState
from interlock.store.pool import Row, Tx

router = APIRouter()

# How many are shown of what they can decide and of what they cannot, and looked at in one go.
_SHOWN, _OTHERS, _LOOKED_AT = 100, 20, 500
_SHOWN_DECIDED = 10


@dataclass(frozen=True, slots=True)
class Card:
    """One question as one person sees it."""

    view: dict[str, Any]
    workflow: str
    changes: list["Change"]
    # Why this person cannot say yes, in words; None if they can.
    barred: str | None
    needed: int
    # What became of an effect has to be found out; it cannot be allowed.
    in_doubt: bool
    editable: bool
    asked_by: str
    rule: str | None

    @property
    def id(self) -> str:
        return str(self.view["id"])


@dataclass(frozen=True, slots=True)
class Change:
    """A field of the action: what was proposed and, if a person changed it, what it is now."""

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
        "decided_lately", database.clock(), who.tenant_id, who.workspace_id, _SHOWN_DECIDED, list(APPROVAL.terminal)
    )
    cards, rest = await cards_of(visit, mine[:_SHOWN]), await cards_of(visit, others)
    return await render(
        request, visit, "inbox.html", cards=cards, others=rest, more=waiting - len(cards) - len(rest),
        more_for_you=len(mine) > _SHOWN, decided=await cards_of(visit, decided), live="/live/inbox",
    )  # fmt: skip


async def _waiting(visit: Visitor) -> tuple[list[Row], list[Row]]:
    """What they can decide and what they cannot, soonest to expire first.

    The soonest may all be others', so it is gone through until enough is found that they can decide, or all was seen.
    """
    database, who = visit.services.database, visit.who
    mine: list[Row] = []
    others: list[Row] = []
    place: tuple[datetime | None, UUID | None] = None, None
    while len(mine) <= _SHOWN:
        rows = await database.fetch("inbox", database.clock(), who.tenant_id, who.workspace_id, _LOOKED_AT, *place)
        votes = await approvals.votes_on(database, rows)
        for row in rows:
            own = [vote for vote in votes if vote["approval_id"] == row["id"]]
            (others if approvals.barred(row, own, who, approves=True) else mine).append(row)
        del others[_OTHERS:]
        # Whose role decides nothing need not be looked for further.
        if len(rows) < _LOOKED_AT or not visit.may(Permission.APPROVE):
            break
        place = rows[-1]["expires_at"], rows[-1]["id"]
    return mine, others


@router.get("/approvals/{approval_id}")
async def show(approval_id: str, request: Request, visit: Visit) -> Response:
    visit.who.require(Permission.READ)
    database = visit.services.database
    row = await approvals.get(database, visit.who, uuid_of(approval_id, "approval"))
    run = await database.row("get_run", visit.who.tenant_id, row["run_id"])
    assert run is not None
    [card] = await cards_of(visit, [{**row, "workflow": run["workflow"]}])
    return await render(request, visit, "approval.html", ask=card, live="/live/inbox")


async def cards_of(visit: Visitor, rows: list[Any]) -> list[Card]:
    votes = await approvals.votes_on(visit.services.database, rows)
    digests = {row["policy_digest"] for row in rows} - {None}
    texts = await visit.services.database.fetch("policy_texts", visit.who.tenant_id, list(digests)) if digests else []
    rules = {text["digest"]: text["text"] for text in texts}
    return [_card(visit, row, votes, rules.get(row["policy_digest"], DEFAULT_POLICY)) for row in rows]


def _card(visit: Visitor, row: Any, votes: list[Row], policy: str) -> Card:
    own = [vote for vote in votes if vote["approval_id"] == row["id"]]
    view = approval_view(row, own, visit.who)
    return Card(
        view=view, workflow=row["workflow"], changes=_changes(row), barred=view["barred"],
        needed=2 if row["two_person"] else 1, in_doubt=row["kind"] == AskKind.IN_DOUBT,
        editable=row["kind"] == AskKind.ACTION, asked_by=row["requested_by"], rule=_rule(view, policy),
    )  # fmt: skip


def _changes(row: Any) -> list[Change]:
    action = orjson.loads(row["action"])
    before = (orjson.loads(row["proposed"]) if row["proposed"] else action).get("fields") or {}
    now = action.get("fields") or {}
    return [
        Change(name, now.get(name), before.get(name), edited=before.get(name) != now.get(name))
        for name in [*now, *(name for name in before if name not in now)]
    ]


def _rule(view: dict[str, Any], policy: str) -> str | None:
    """The text of the rules that asked, from the policy that was in force then."""
    wanted = [f'@id("{rule_id}")' for rule_id in view["rationale"]["rule_ids"]]
    return "\n\n".join(rule.text for rule in statements(policy) if any(mark in rule.text for mark in wanted)) or None


# ---------------------------------------------------------------- deciding


@router.post("/approvals/{approval_id}/approve")
async def approve(approval_id: str, visit: Visit, said: Said) -> Response:
    return await _decide(visit, uuid_of(approval_id, "approval"), said, approves=True)


@router.post("/approvals/{approval_id}/reject")
async def reject(approval_id: str, visit: Visit, said: Said) -> Response:
    return await _decide(visit, uuid_of(approval_id, "approval"), said, approves=False)


async def _decide(visit: Visitor, approval_id: UUID, said: dict[str, str], *, approves: bool) -> Response:
    visit.who.require(Permission.APPROVE)
    found = visit.services
    patch = _patch(said.get("patch")) if approves else None

    async def work(tx: Tx) -> Row:
        reason, digest = said.get("reason"), said.get("digest")
        if patch:
            return await approvals.edit(
                tx, found.database, found.plans, found.policies, visit.who, approval_id, patch=patch, reason=reason,
                digest=digest,
            )  # fmt: skip
        return await approvals.decide(
            tx, found.database, found.plans, visit.who, approval_id, approves=approves, reason=reason, digest=digest
        )

    row = await found.database.command(work)
    back = said.get("back", "")
    return done(back if back.startswith(("/runs/", "/sessions/")) else "/inbox", _told(row, patch))


def _told(row: Row, patch: dict[str, Any] | None) -> str:
    if row["status"] == ApprovalState.REQUESTED:
        return "Changed; another person has to allow it." if patch else "Your vote is in; it needs one more."
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
