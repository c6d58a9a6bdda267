"""An approval as a Slack card: the question, its reason, the approvers, and the decision.

A card with an Approve button shows the whole action: one line for each field, with its value as JSON. If anything was
cut, the card has a link to the approval instead of the button.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from interlock.engine.access.principal import name_of
from interlock.engine.approvals.approvals import excluded_from, question_of
from interlock.integrations.fields import field_blocks
from interlock.journal import ApprovalKind
from interlock.lifecycle import ApprovalState, Tier
from interlock.slack_markup import cut, escape, fence, moment, span
from interlock.store.pool import Row
from interlock.visible import visible_text

APPROVE, REJECT, OPEN = "interlock_approve", "interlock_reject", "interlock_open"
# Slack takes 150 characters in a header, 2,000 in a section's field and about 13,000 in all blocks of a message.
_HEADER, _SUMMARY, _REASON, _NAMES, _NAME = 150, 1500, 1000, 500, 400
_ANY = 10**9

Block = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SlackCard:
    """A card. `text` is for notifications and for clients without blocks."""

    text: str
    blocks: list[Block]


def card(approval: Row, votes: Sequence[Row], link: str | None = None) -> SlackCard:
    """Return the card of an approval. `link` is its page in the console."""
    return _Drawing(approval, votes, link).card()


def reminder(approval: Row) -> str:
    if approval["escalated_at"] is not None:
        asked = " and ".join(escape(group) for group in approval["escalate_to"]) or "everybody who may decide"
        return f"Nobody has decided yet; {asked} can decide now too. It expires {moment(approval['expires_at'])}."
    return f"Still waiting for a decision; it expires {moment(approval['expires_at'])}."


class _Drawing:
    """A card being built. `whole` is False once anything did not fit."""

    def __init__(self, approval: Row, votes: Sequence[Row], link: str | None) -> None:
        self._approval = approval
        self._votes = votes
        self._link = link
        self._is_open = approval["status"] == ApprovalState.REQUESTED
        self.whole = True

    def card(self) -> SlackCard:
        approval = self._approval
        title = "Approval needed" if self._is_open else f"Approval {approval['status']}"
        if approval["workspace_id"] is not None:
            return self._outline(title)
        headline = visible_text(f"{title}: {approval['summary']}")
        blocks: list[Block] = [
            {"type": "header", "text": _plain(cut(headline, _HEADER))},
            *self._summary(),
            {"type": "section", "fields": [_mrkdwn(text) for text in self._facts()]},
            *self._action(),
            _section(self._rationale()),
            {"type": "context", "elements": [_mrkdwn(text) for text in self._story()]},
        ]
        if self._is_open and approval["kind"] != ApprovalKind.IN_DOUBT:
            if not self.whole:
                blocks.append(_section(self._where_to_read()))
            elements = self._buttons()
            blocks.append({"type": "actions", "block_id": f"interlock:{approval['id']}", "elements": elements})
        return SlackCard(escape(f"{title}: {approval['summary']}", 300), blocks)

    def _outline(self, title: str) -> SlackCard:
        """Return the card of a workspace's approval, without values or buttons.

        The whole tenant reads the channel.
        """
        approval = self._approval
        facts = [
            f"*Workflow*\n{self._span(approval['workflow'])}", f"*Tier*\n{Tier(approval['tier'])}",
            *([f"*Expires*\n{moment(approval['expires_at'])}"] if self._is_open else []),
        ]  # fmt: skip
        blocks: list[Block] = [
            {"type": "header", "text": _plain(title)},
            {"type": "section", "fields": [_mrkdwn(text) for text in facts]},
        ]
        if self._is_open:
            blocks.append(_section(f"Only its workspace can read and decide it: {self._place()}"))
        blocks.append({"type": "context", "elements": [_mrkdwn(f"Approval `{approval['id']}`")]})
        return SlackCard(f"{title} in a workspace", blocks)

    # ------------------------------------------------------------ parts

    def _summary(self) -> Iterator[Block]:
        """Yield the full summary if the header had no room for it. Plain text: Slack renders no markup in it."""
        sentence = visible_text(self._approval["summary"])
        if len(sentence) > _HEADER - 30:
            yield {"type": "section", "text": _plain(self._fit(sentence, _SUMMARY)), "expand": True}

    def _facts(self) -> Iterator[str]:
        approval = self._approval
        yield f"*Workflow*\n{self._span(approval['workflow'])}, step {self._span(approval['step'])}"
        yield f"*Asked for by*\n{self._span(_name(approval['requested_by']))}"
        yield f"*Tier*\n{Tier(approval['tier'])}{', two people' if approval['two_person'] else ''}"
        yield f"*May decide*\n{self._deciders()}"
        if self._is_open:
            yield f"*Expires*\n{moment(approval['expires_at'])}"

    def _deciders(self) -> str:
        who = self._spans(sorted(question_of(self._approval).groups), " or ") or "any approver"
        excluded = self._spans(excluded_from(self._approval), " and ")
        return f"{who} except {excluded}" if excluded else who

    def _action(self) -> Iterator[Block]:
        """Yield the action field by field; for an edited action, with the old and the new values."""
        action = json.loads(self._approval["action"])
        if action.get("tool") is None:
            return
        proposed = json.loads(self._approval["proposed"])["fields"] if self._approval["proposed"] else None
        target = f" on {self._span(str(action['target']))}" if action.get("target") else ""
        fields = field_blocks(action["fields"], proposed)
        self.whole &= fields.whole
        yield _section(f"*{self._fit(escape(action['tool'], _ANY), _NAMES)}*{target}")
        yield from ({**_section(fence(lines)), "expand": True} for lines in fields.blocks)
        if self._approval["edited_by"]:
            people = dict.fromkeys(_name(editor) for editor in self._approval["edited_by"])
            yield _section(f"Changed by {self._spans(people, ' and ')}; votes on the earlier form no longer count.")

    def _rationale(self) -> str:
        approval = self._approval
        if approval["kind"] == ApprovalKind.IN_DOUBT:
            why = f" ({self._span(approval['reason'], _REASON)})" if approval["reason"] else ""
            return (
                f"*Why*\nThe action was interrupted{why} and may have happened. Find out, then say so: "
                f"`POST /api/receipts/{approval['receipt_id']}/resolve`."
            )
        rules = self._spans(approval["rule_ids"], ", ")
        reason = self._span(approval["reason"], _REASON) if approval["reason"] else "the workflow asks for it here"
        text = f"*Why*\n{reason}" + (f" (rule {rules})" if rules else "")
        if approval["reason_required"] and self._is_open:
            text += f"\nIt takes a reason: `/interlock approve {approval['id']} {approval['digest']} because …`"
        return text

    def _story(self) -> Iterator[str]:
        """Yield the votes and the outcome."""
        approval = self._approval
        for vote in self._votes[:7]:  # one element each; Slack takes ten in all
            said = f": {self._span(vote['reason'], _NAMES)}" if vote["reason"] else ""
            yield f"{vote['decision'].capitalize()} by *{escape(_name(vote['voter']))}* {moment(vote['at'])}{said}"
        match ApprovalState(approval["status"]):
            case ApprovalState.REQUESTED if self._votes:
                yield "One more approver is needed."
            case ApprovalState.EXPIRED:
                yield f"Expired {moment(approval['resolved_at'])}: nobody decided in time."
            case ApprovalState.CANCELED:
                yield f"Withdrawn {moment(approval['resolved_at'])}: the run ended."
            case _:
                yield f"Approval `{approval['id']}`"
        if self._link:
            yield f"<{self._link}|Open this approval in the console>"

    def _where_to_read(self) -> str:
        return f"*This card does not show the whole action.* Read it before you approve it: {self._place()}"

    def _place(self) -> str:
        return f"in the console: {self._link}" if self._link else f"`interlock approval show {self._approval['id']}`"

    def _buttons(self) -> list[Block]:
        value = f"{self._approval['id']}:{self._approval['digest']}"
        reject = {"type": "button", "action_id": REJECT, "style": "danger", "text": _plain("Reject"), "value": value}
        if self.whole:
            return [self._approve(value), reject]
        opens = {"type": "button", "action_id": OPEN, "text": _plain("Read it and decide"), "url": self._link}
        return [opens, reject] if self._link else [reject]

    def _approve(self, value: str) -> Block:
        button = {"type": "button", "action_id": APPROVE, "style": "primary", "text": _plain("Approve"), "value": value}
        if self._approval["tier"] == Tier.HIGH:
            button["confirm"] = {
                "title": _plain("Hard to undo"), "text": _plain("Approve exactly what this card shows?"),
                "confirm": _plain("Approve"), "deny": _plain("Back"),
            }  # fmt: skip
        return button

    # ------------------------------------------------------------ fitting text

    def _fit(self, text: str, most: int) -> str:
        """Cut escaped text to Slack's limit, and record that the card is incomplete."""
        self.whole &= len(text) <= most
        return cut(text, most)

    def _span(self, text: str, most: int = _NAME) -> str:
        shown = span(text, most)
        self.whole &= shown == span(text, _ANY)
        return shown

    def _spans(self, texts: Iterable[str], between: str) -> str:
        return self._fit(between.join(self._span(text) for text in texts), _NAMES)


def _name(actor: str) -> str:
    return name_of(actor) if not actor.startswith("system:") else actor


def _plain(text: str) -> Block:
    return {"type": "plain_text", "text": text, "emoji": False}


def _mrkdwn(text: str) -> Block:
    # Verbatim: Slack must not turn names in the text into links or mentions.
    return {"type": "mrkdwn", "text": text, "verbatim": True}


def _section(text: str) -> Block:
    return {"type": "section", "text": _mrkdwn(text)}
