"""/api/hooks: deliveries from outside, signed by their senders.

The sender is no caller of ours: it has no key, is told little, and reads only the status. 202 says that the event has
its run, or that there is nothing to do; anything else that it should try again.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import parse_qs

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from interlock.api.services import Json, Services, Svc
from interlock.definition.trigger import Event, TriggerKind, Unfit
from interlock.engine import signatures, triggers
from interlock.engine.idempotency import IN_FLIGHT
from interlock.engine.principal import DEFAULT_TENANT
from interlock.engine.triggers import Receiver
from interlock.errors import Conflict, Invalid
from interlock.wire import Accepted

router = APIRouter(prefix="/api/hooks", tags=["hooks"])

Tenant = Annotated[str, Query(description="Whose trigger it is.", max_length=100)]
_KEPT_TO_OURSELVES = ("authorization", "cookie", "proxy-authorization")
_LONGEST_ID = 255
_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": {}}}}}


@router.post("/github/{name}", status_code=202, response_model=Accepted, openapi_extra=_BODY)
async def on_github(name: str, request: Request, found: Svc, tenant: Tenant = DEFAULT_TENANT) -> Response:
    """A GitHub webhook, signed with the trigger's secret. The same delivery again answers the same run."""
    to = await triggers.receiver(found.database, tenant, TriggerKind.GITHUB, name)
    body = await request.body()
    signatures.check_github(to.secret, body, request.headers)
    return await _deliver(found, to, triggers.github_event(_headers(request, to), _github_payload(request, body)), body)


@router.post("/{name}", status_code=202, response_model=Accepted, openapi_extra=_BODY)
async def on_webhook(name: str, request: Request, found: Svc, tenant: Tenant = DEFAULT_TENANT) -> Response:
    """A webhook signed by Standard Webhooks, or with an HMAC in a header. The same delivery again, the same run."""
    to = await triggers.receiver(found.database, tenant, TriggerKind.WEBHOOK, name)
    body = await request.body()
    header = to.trigger.header
    if header is None:
        signatures.check_standard(to.secret, body, request.headers, found.database.clock() or datetime.now(UTC))
    else:
        signatures.check_hmac(to.secret, body, request.headers.get(header, ""), header)
    return await _deliver(found, to, _webhook_event(to, request, _payload(body)), body)


def _webhook_event(to: Receiver, request: Request, payload: Any) -> Event:
    kind = payload.get("type") if isinstance(payload, dict) else None
    headers = _headers(request, to)
    event = Event("webhook", kind if isinstance(kind, str) else "webhook", payload, headers)
    try:
        named = to.trigger.id_of(event) if to.trigger.header is not None else headers["webhook-id"]
    except Unfit as error:
        raise Invalid(str(error), code="TRIGGER_UNFIT") from None
    if len(named) > _LONGEST_ID:
        raise Invalid(f"webhook-id may have {_LONGEST_ID} characters; this one has {len(named)}")
    return Event(event.source, event.type, payload, headers, None, named)


async def _deliver(found: Services, to: Receiver, event: Event, body: bytes) -> Response:
    try:
        answer = await triggers.deliver(found.database, found.plans, to, event, body)
    except Conflict as problem:
        if problem.code != IN_FLIGHT:
            raise
        return Json(_accepted("processing", "the first delivery of this event is still being dealt with"), 202)
    if isinstance(answer, str):
        return Json(_accepted("ignored", answer), 202)
    headers = {"Idempotency-Replayed": "true"} if answer.replayed else None
    return Response(answer.body, answer.status, headers=headers, media_type="application/json")


def _accepted(outcome: str, reason: str) -> dict[str, Any]:
    return {"outcome": outcome, "run_id": None, "workflow": None, "reason": reason}


def _headers(request: Request, to: Receiver) -> Mapping[str, str]:
    """Without what proves something: expressions write into runs, and runs are shown."""
    hidden = (*_KEPT_TO_OURSELVES, to.trigger.header)
    given = request.headers.items()
    return {name: value for name, value in given if name not in hidden and "signature" not in name}


def _github_payload(request: Request, body: bytes) -> Any:
    """GitHub can be told to send a form; the signature is over the form then. (curl calls everything a form.)"""
    is_form = "application/x-www-form-urlencoded" in request.headers.get("content-type", "")
    if is_form and body.startswith(b"payload="):
        body = parse_qs(body.decode(errors="replace"), keep_blank_values=True)["payload"][0].encode()
    return _payload(body)


def _payload(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Invalid(f"the body is not JSON: {error}") from None
