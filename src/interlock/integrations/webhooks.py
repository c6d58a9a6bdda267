"""Outgoing webhooks: signed messages by Standard Webhooks, to checked addresses."""

import asyncio
from datetime import datetime
from typing import Any

import httpx2
import orjson
from standardwebhooks import Webhook

from interlock import __version__, clock
from interlock.engine.access import encryption
from interlock.engine.ingress import url_guard
from interlock.engine.outbox import LONGEST_WAIT, Delivered, OutboxMessage, Undelivered, webhook_id
from interlock.errors import Terminal
from interlock.ids import TargetId
from interlock.settings import Settings, console_link
from interlock.store.pool import Database, Row
from interlock.timeouts import retry_after

_RUN_COLUMNS = (
    "id", "workflow", "workflow_version", "workspace_id", "session_id", "status", "reason", "created_at", "started_at",
    "completed_at", "duration_ms",
)  # fmt: skip


class WebhookSender:
    one_by_one = False

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._allow_private = settings.webhook_allow_private
        self._timeout = settings.webhook_timeout_seconds
        # No proxy from the environment: it would connect for us to an unchecked address. No connection is kept: the
        # next message to the same address may be for another name, whose certificate was not checked.
        self._client = httpx2.AsyncClient(
            trust_env=False, follow_redirects=False, timeout=self._timeout,
            limits=httpx2.Limits(max_keepalive_connections=0),
        )  # fmt: skip

    async def close(self) -> None:
        await self._client.aclose()

    async def send(self, message: OutboxMessage) -> Delivered | Undelivered:
        body = await self._body(message)
        try:
            headers = self._signed(message, body)
        except Terminal as error:
            return Undelivered(str(error))
        try:
            async with asyncio.timeout(self._timeout):
                places = await url_guard.resolve(message.address, allow_private=self._allow_private)
                return await self._post(message.address, body, headers, places)
        except (url_guard.Refused, url_guard.Unresolved) as error:
            return Undelivered(str(error))
        except TimeoutError:
            return Undelivered(f"no answer within {self._timeout:g} s")
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            return Undelivered(f"{type(error).__name__}: {error}")

    def _signed(self, message: OutboxMessage, body: str) -> dict[str, str]:
        assert message.sealed is not None
        place = encryption.place_of_webhook(message.tenant_id, TargetId(message.target_id))
        return signed_headers(message, body, encryption.decrypt(self._settings, place, message.sealed, "its secret"))

    async def _post(
        self, address: str, body: str, headers: dict[str, str], places: list[str]
    ) -> Delivered | Undelivered:
        for place in places[:-1]:
            try:
                return await self._post_to(address, body, headers, place)
            except httpx2.ConnectError:
                continue
        return await self._post_to(address, body, headers, places[-1])

    async def _post_to(self, address: str, body: str, headers: dict[str, str], place: str) -> Delivered | Undelivered:
        """Post to this address under the host's name, whose certificate is checked."""
        url = httpx2.URL(address)
        request = self._client.build_request(
            "POST", url.copy_with(host=place), content=body.encode(),
            headers={"Host": url.netloc.decode(), **headers},
            extensions={"sni_hostname": url.raw_host.decode()},
        )  # fmt: skip
        answer = await self._client.send(request, stream=True)
        try:
            return _outcome(answer, self._database.now())
        finally:
            await answer.aclose()  # ignore its body, of any length

    async def _body(self, message: OutboxMessage) -> str:
        data = message.payload
        if data is None:
            run = await self._database.row("get_run", message.tenant_id, message.subject_id)
            data = run_data(run) if run is not None else {"run_id": message.subject_id}
        if link := console_link(self._settings, _page_of(data)):
            data = {**data, "url": link}
        said = {"type": message.event, "timestamp": message.created_at, "data": data}
        return orjson.dumps(said, default=str).decode()


def _page_of(data: dict[str, Any]) -> str:
    for name, page in (("approval_id", "/approvals"), ("run_id", "/runs")):
        if data.get(name):
            return f"{page}/{data[name]}"
    return "/"


def run_data(run: Row) -> dict[str, Any]:
    """Return the run's ids, state and times, without inputs or outputs."""
    data = {column: run[column] for column in _RUN_COLUMNS}
    return {"run_id": data.pop("id"), **data}


def signed_headers(message: OutboxMessage, body: str, secret: str) -> dict[str, str]:
    """Return the signed headers.

    The id is the same for all attempts, so that a receiver detects repetitions; the time is this attempt's.
    """
    now = clock.now()
    message_id = webhook_id(message.message_id)
    return {
        "content-type": "application/json",
        "user-agent": f"Interlock/{__version__}",
        "webhook-id": message_id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign(message_id, now, body),
    }


def _outcome(answer: httpx2.Response, now: datetime) -> Delivered | Undelivered:
    status = answer.status_code
    if 200 <= status < 300:
        return Delivered(status)
    where = f" to {answer.headers['location']}; redirects are not followed" if answer.has_redirect_location else ""
    after = retry_after(answer.headers.get("retry-after"), now, LONGEST_WAIT) if status in (429, 503) else None
    return Undelivered(f"answered {status}{where}", status, after, gone=status == 410)
