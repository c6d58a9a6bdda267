"""An approval as a Slack card: what is asked, why, who may decide, and what was decided."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from interlock.engine.mrkdwn import code, cut, escape, moment
from interlock.engine.principal import name_of
from interlock.journal import AskKind
from interlock.lifecycle import ApprovalState, Tier
from interlock.store.pool import Row

APPROVE, REJECT = "interlock_approve", "interlock_reject"
_MOST_FIELDS = 25

Block = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Card:
    """`text` is what notifications show, and readers that know no blocks."""

    text: str
    blocks: list[Block]


def card(approval: Row, votes: Sequence[Row]) -> Card:
    is_open = approval["status"] == ApprovalState.REQUESTED
    title = "Approval needed" if is_open else f"Approval {approval['status']}"
    blocks: list[Block] = [
        {"type": "header", "text": _plain(f"{title}: {approval['summary']}", 150)},
        {"type": "section", "fields": [_mrkdwn(text) for text in _facts(approval)]},
        *(_section(text) for text in _action(approval)),
        _section(_rationale(approval)),
        {"type": "context", "elements": [_mrkdwn(text) for text in _story(approval, votes)]},
    ]
    if is_open and approval["kind"] != AskKind.IN_DOUBT:
        blocks.append({"type": "actions", "block_id": f"interlock:{approval['id']}", "elements": _buttons(approval)})
    return Card(f"{title}: {escape(approval['summary'], 300)}", blocks)


def reminder(approval: Row) -> str:
    if approval["escalated_at"] is not None:
        asked = " and ".join(escape(group) for group in approval["escalate_to"]) or "everybody who may decide"
        return f"Nobody has decided yet; {asked} can decide now too. It expires {moment(approval['expires_at'])}."
    return f"Still waiting for a decision; it expires {moment(approval['expires_at'])}."


# ---------------------------------------------------------------- its parts


def _facts(approval: Row) -> Iterator[str]:
    yield f"*Workflow*\n{escape(approval['workflow'])}, step {escape(approval['step'])}"
    yield f"*Asked for by*\n{escape(_name(approval['requested_by']))}"
    yield f"*Tier*\n{Tier(approval['tier'])}{', two people' if approval['two_person'] else ''}"
    yield f"*May decide*\n{_deciders(approval)}"
    if approval["status"] == ApprovalState.REQUESTED:
        yield f"*Expires*\n{moment(approval['expires_at'])}"


def _deciders(approval: Row) -> str:
    groups = list(approval["approvers"])
    if groups and approval["escalated_at"] is not None:
        groups += approval["escalate_to"]
    who = " or ".join(escape(group) for group in groups) or "every approver"
    return f"{who}, not who asked" if approval["kind"] != AskKind.GATE or approval["two_person"] else who


def _action(approval: Row) -> Iterator[str]:
    """What is about to be done, field by field; where a person changed it, what it was and what it is now."""
    action = orjson.loads(approval["action"])
    if action.get("tool") is None:
        return
    target = f" on *{escape(str(action['target']))}*" if action.get("target") else ""
    lines = list(_difference(orjson.loads(approval["proposed"])["fields"] if approval["proposed"] else {}, action))
    yield f"*{escape(action['tool'])}*{target}\n{code(chr(10).join(lines) or 'no fields')}"
    if approval["edited_by"]:
        people = " and ".join(dict.fromkeys(escape(_name(editor)) for editor in approval["edited_by"]))
        yield f"Changed by {people}; votes on the earlier form no longer count."


def _difference(before: dict[str, Any], action: dict[str, Any]) -> Iterator[str]:
    after = action["fields"]
    names = [*after, *(name for name in before if name not in after)]
    for name in names[:_MOST_FIELDS]:
        if before and before.get(name) == after.get(name):
            yield f"  {name}: {_value(after[name])}"
            continue
        if name in before:
            yield f"- {name}: {_value(before[name])}"
        if name in after:
            yield f"+ {name}: {_value(after[name])}"
    if len(names) > _MOST_FIELDS:
        yield f"… and {len(names) - _MOST_FIELDS} more"


def _value(value: Any) -> str:
    return cut(value if isinstance(value, str) else orjson.dumps(value, default=str).decode(), 300)


def _rationale(approval: Row) -> str:
    if approval["kind"] == AskKind.IN_DOUBT:
        return (
            "*Why*\nThe action was interrupted and may have happened. Find out, then say so: "
            f"`POST /api/receipts/{approval['receipt_id']}/resolve`."
        )
    reason = approval["reason"] or "the workflow asks for it here"
    rules = ", ".join(f"`{escape(rule)}`" for rule in approval["rule_ids"])
    text = f"*Why*\n{escape(reason, 1500)}" + (f" (rule {rules})" if rules else "")
    if approval["reason_required"] and approval["status"] == ApprovalState.REQUESTED:
        text += f"\nIt takes a reason: `/interlock approve {approval['id']} because …`"
    return text


def _story(approval: Row, votes: Sequence[Row]) -> Iterator[str]:
    """Who said what, and how it ended."""
    for vote in votes:
        said = f": {escape(vote['reason'])}" if vote["reason"] else ""
        yield f"{vote['decision'].capitalize()} by *{escape(_name(vote['voter']))}* {moment(vote['at'])}{said}"
    match ApprovalState(approval["status"]):
        case ApprovalState.REQUESTED if votes:
            yield "One more person has to approve."
        case ApprovalState.EXPIRED:
            yield f"Expired {moment(approval['resolved_at'])}: nobody decided in time."
        case ApprovalState.CANCELED:
            yield f"Withdrawn {moment(approval['resolved_at'])}: the run ended."
        case _:
            yield f"Approval `{approval['id']}`"


def _buttons(approval: Row) -> list[Block]:
    value = f"{approval['id']}:{approval['digest']}"
    approve = {"type": "button", "action_id": APPROVE, "style": "primary", "text": _plain("Approve"), "value": value}
    if approval["tier"] == Tier.HIGH:
        approve["confirm"] = {
            "title": _plain("Hard to undo"), "text": _plain(cut(approval["summary"], 290) or "Approve it?"),
            "confirm": _plain("Approve"), "deny": _plain("Back"),
        }  # fmt: skip
    return [
        approve,
        {"type": "button", "action_id": REJECT, "style": "danger", "text": _plain("Reject"), "value": value},
    ]


def _name(actor: str) -> str:
    return name_of(actor) if not actor.startswith("system:") else actor


def _plain(text: str, most: int = 300) -> Block:
    return {"type": "plain_text", "text": cut(text, most), "emoji": False}


def _mrkdwn(text: str) -> Block:
    return {"type": "mrkdwn", "text": cut(text, 2000)}


def _section(text: str) -> Block:
    return {"type": "section", "text": {"type": "mrkdwn", "text": cut(text, 3000)}}
