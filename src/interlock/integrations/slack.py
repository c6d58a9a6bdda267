"""Slack: an approval's card is posted once and updated whenever the approval changes."""

from typing import Any

import aiohttp
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from interlock.engine.approvals.approvals import votes_on
from interlock.engine.outbox import LONGEST_WAIT, Delivered, OutboxMessage, Undelivered
from interlock.integrations.cards import SlackCard, card, reminder
from interlock.lifecycle import ApprovalState
from interlock.settings import Settings, console_link
from interlock.store.pool import Database, Row
from interlock.timeouts import retry_after

_MENTIONS = ("approval.reminded", "approval.escalated")
# The card was deleted, or is too old for Slack to change: there is nothing to update.
_CARD_IS_GONE = frozenset({"message_not_found", "cant_update_message", "edit_window_closed", "is_inactive"})


class SlackSender:
    # In sequence: Slack takes about one message a second, and reports when it was too many.
    one_by_one = True

    def __init__(self, database: Database, settings: Settings) -> None:
        assert settings.slack_token is not None
        self._database = database
        self._settings = settings
        # The outbox retries; the client must not.
        self._client = AsyncWebClient(
            settings.slack_token.get_secret_value(), settings.slack_base_url, timeout=10, retry_handlers=[]
        )

    async def close(self) -> None:
        pass  # the client opens a session for each call

    async def send(self, message: OutboxMessage) -> Delivered | Undelivered:
        if message.superseded and message.event not in _MENTIONS:
            return Delivered()
        try:
            await self._show(message)
        except SlackApiError as error:
            return _undelivered(error, message)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return Undelivered(f"{type(error).__name__}: {error}")
        return Delivered(200)

    async def _show(self, message: OutboxMessage) -> None:
        """Post or update the card.

        It is rendered now, so it shows the current state independent of the message's event.
        """
        approval = await self._database.row("card_of", message.subject_id)
        if approval is None:
            return
        is_open = approval["status"] == ApprovalState.REQUESTED
        link = console_link(self._settings, f"/approvals/{approval['id']}")
        shown = card(approval, await votes_on(self._database, [approval]), link)
        places = await self._database.fetch("cards_of", approval["id"])
        if not places and is_open:
            await self._post(message, approval, shown)
        for place in places:
            await self._rewrite(place, shown)
        if places and is_open and message.event in _MENTIONS:
            await self._client.chat_postMessage(
                channel=places[0]["channel"], thread_ts=places[0]["ts"], reply_broadcast=True, text=reminder(approval)
            )

    async def _post(self, message: OutboxMessage, approval: Row, shown: SlackCard) -> None:
        posted = await self._client.chat_postMessage(
            channel=message.address, text=shown.text, blocks=shown.blocks, unfurl_links=False, unfurl_media=False,
            metadata={"event_type": "interlock_approval", "event_payload": {"approval_id": str(approval["id"])}},
        )  # fmt: skip
        await self._database.fetch("add_card", approval["id"], approval["tenant_id"], posted["channel"], posted["ts"])

    async def _rewrite(self, place: Row, shown: SlackCard) -> None:
        try:
            await self._client.chat_update(
                channel=place["channel"], ts=place["ts"], text=shown.text, blocks=shown.blocks
            )
        except SlackApiError as error:
            if _reason(error) not in _CARD_IS_GONE:
                raise


def _undelivered(error: SlackApiError, message: OutboxMessage) -> Undelivered:
    response: Any = error.response
    status = getattr(response, "status_code", None)
    headers = getattr(response, "headers", None) or {}
    after = retry_after(headers.get("Retry-After"), message.now, LONGEST_WAIT) if status == 429 else None
    return Undelivered(f"Slack says {_reason(error)}", status, after)


def _reason(error: SlackApiError) -> str:
    data = getattr(error.response, "data", None)
    return str(data.get("error") or error) if isinstance(data, dict) else str(error)
