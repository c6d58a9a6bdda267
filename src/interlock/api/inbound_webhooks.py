"""/api/hooks: deliveries from other systems, signed by their senders.

The sender has no API key and reads only the status, so the answer tells it little. 202 means that the event has its run
or that there is nothing to do; any other status means that the sender should try again.
"""

from typing import Annotated, Any
from urllib.parse import parse_qs

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from interlock.api.dependencies import AppContext, Ctx, Json
from interlock.definition.trigger import IncomingEvent, TriggerKind
from interlock.engine.access.principal import DEFAULT_TENANT
from interlock.engine.expression_answers import here_or_elsewhere
from interlock.engine.ingress import triggers, webhook_signatures
from interlock.engine.ingress.trigger_events import github_event, webhook_event
from interlock.engine.ingress.triggers import Receiver
from interlock.errors import Invalid, Unauthorized
from interlock.telemetry import log
from interlock.wire import Accepted

router = APIRouter(prefix="/api/hooks", tags=["hooks"])

Tenant = Annotated[str, Query(description="Whose trigger it is.", max_length=100)]
# No API key: the sender signs the body with the trigger's secret.
_SIGNED = {"requestBody": {"required": True, "content": {"application/json": {"schema": {}}}}, "security": []}


@router.post("/github/{name}", status_code=202, response_model=Accepted, openapi_extra=_SIGNED)
async def on_github(name: str, request: Request, found: Ctx, tenant: Tenant = DEFAULT_TENANT) -> Response:
    """Receive a GitHub webhook, signed with the trigger's secret. A repeated delivery returns the same run."""
    to, body = await _received(request, found, tenant, TriggerKind.GITHUB, name)
    event = github_event(to.trigger, request.headers, _github_payload(request, body))
    return await _deliver(found, to, event, body)


@router.post("/{name}", status_code=202, response_model=Accepted, openapi_extra=_SIGNED)
async def on_webhook(name: str, request: Request, found: Ctx, tenant: Tenant = DEFAULT_TENANT) -> Response:
    """Receive a webhook signed by Standard Webhooks or with an HMAC in a header.

    A repeated delivery returns the same run.
    """
    to, body = await _received(request, found, tenant, TriggerKind.WEBHOOK, name)
    given = to.trigger, dict(request.headers), _payload(body)
    return await _deliver(found, to, await here_or_elsewhere(to.who.tenant_id, webhook_event, *given), body)


async def _received(
    request: Request, found: AppContext, tenant: str, kind: TriggerKind, name: str
) -> tuple[Receiver, bytes]:
    """Return the trigger and the body if the body is signed with the trigger's secret.

    An unknown trigger answers like a wrong signature, after the same work, so that names cannot be guessed.
    """
    body = await request.body()
    try:
        to = await triggers.receiver(found.database, tenant, kind, name)
        if to is None:
            webhook_signatures.check_hmac(triggers.NO_SECRET, body, "", "no such trigger: the signature")
        elif kind is TriggerKind.GITHUB:
            webhook_signatures.check_github(to.secret, body, request.headers)
        elif (header := to.trigger.header) is not None:
            webhook_signatures.check_hmac(to.secret, body, request.headers.get(header, ""), header)
        else:
            webhook_signatures.check_standard(to.secret, body, request.headers, found.database.now())
    except Unauthorized as error:
        log.info("delivery_refused", trigger=name, tenant=tenant, reason=error.detail)
        raise Unauthorized(_REFUSED, code=error.code) from None
    assert to is not None  # an unknown trigger makes every signature wrong
    return to, body


_REFUSED = (
    "No trigger at this address accepts this signature. Check the name and the tenant in the address, the secret on "
    "both sides, and the sender's clock. The server's log has the reason."
)


async def _deliver(found: AppContext, to: Receiver, event: IncomingEvent, body: bytes) -> Response:
    # A delivery whose first copy is still being processed gets 409. A 202 would make the sender drop the event, which
    # would be lost if the first copy is then rolled back.
    answer = await triggers.deliver(found.database, found.plans, to, event, body)
    if isinstance(answer, str):
        return Json(_accepted("ignored", answer), 202)
    headers = {"Idempotency-Replayed": "true"} if answer.replayed else None
    return Response(answer.body, answer.status, headers=headers, media_type="application/json")


def _accepted(outcome: str, reason: str) -> dict[str, Any]:
    return {"outcome": outcome, "run_id": None, "workflow": None, "reason": reason}


def _github_payload(request: Request, body: bytes) -> Any:
    """Return the JSON of a delivery.

    GitHub can be configured to send a form and then signs the form; curl labels every body as a form.
    """
    is_form = "application/x-www-form-urlencoded" in request.headers.get("content-type", "")
    if is_form and body.startswith(b"payload="):
        body = parse_qs(body.decode(errors="replace"), keep_blank_values=True)["payload"][0].encode()
    return _payload(body)


def _payload(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Invalid(f"the body is not JSON: {error}") from None
