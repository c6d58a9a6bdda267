"""The application: routers, errors as problem+json, a size limit on bodies, health and metrics."""

import contextlib
import hmac
from collections.abc import Callable, Collection
from typing import Any

import orjson
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from interlock import __version__, clock, tracing
from interlock.api import (
    admin,
    approvals,
    audit,
    definitions,
    events,
    grants,
    inbound_webhooks,
    jobs,
    policy,
    receipts,
    runs,
    schedules,
    secrets,
    sessions,
    slack,
    tool_calls,
    triggers,
    versions,
    webhooks,
    workers,
)
from interlock.api.dependencies import AppContext, Json, key_in, principal, problem_body
from interlock.api.limits import KeyUsage, limited_request
from interlock.api.query import known_query
from interlock.engine.access.principal import DEFAULT_TENANT
from interlock.errors import Forbidden, InterlockError, Invalid, MethodNotAllowed, NotFound, TooLarge, Unavailable
from interlock.lifecycle import JOB, RUN, WORKER
from interlock.policy.roles import Permission
from interlock.store import sql
from interlock.store.pool import TRANSIENT, UNSTORABLE
from interlock.telemetry import exposition, log, metrics
from interlock.wire.validation_errors import wrong

# The default response: every answer other than the documented success.
_A_PROBLEM: dict[str, Any] = {
    "description": "A problem (RFC 9457); its code says which.",
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
}


def create_app(services: AppContext) -> FastAPI:
    app = FastAPI(
        title="Interlock", version=__version__, openapi_url="/api/openapi.json", docs_url=None, redoc_url=None,
        description="Durable automations and agents that ask before they act.",
        responses={"default": _A_PROBLEM}, dependencies=[Depends(known_query)],
    )  # fmt: skip
    app.state.services = services
    for module in (
        runs, sessions, tool_calls, jobs, events, approvals, receipts, audit, policy, versions, grants, definitions,
        admin, workers, secrets, webhooks, slack, triggers, schedules, inbound_webhooks,
    ):  # fmt: skip
        app.include_router(module.router)
    app.add_middleware(BodyLimit, most=services.settings.max_body_bytes)
    app.add_middleware(KeyLimits, most=services.settings.max_body_bytes)
    app.add_middleware(Traced)
    for kind in PROBLEMS:
        app.add_exception_handler(kind, _on_error)
    app.add_api_route("/healthz", healthz, include_in_schema=False)
    app.add_api_route("/readyz", readyz, include_in_schema=False)
    app.add_api_route("/metrics", show_metrics, include_in_schema=False)
    return app


# ---------------------------------------------------------------- health and metrics


async def healthz() -> Response:
    """Return 200 if the process is alive."""
    return Json({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Return 200 if the server can work: the database answers. `warnings` lists what an operator should look at."""
    services: AppContext = request.app.state.services
    try:
        await sql.work_is_waiting(services.database.patiently(0.5), pools=[], tenants=None)
    except Unavailable as error:
        return problem_response(_of_unavailable(request, error))
    warnings = [warning for warning in (clock.difference(), services.database.went_back) if warning is not None]
    return Json({"status": "ready"} | ({"warnings": warnings} if warnings else {}))


async def show_metrics(request: Request) -> Response:
    """Return the metrics of all tenants, for the operator. The token also works while the database is unavailable."""
    services: AppContext = request.app.state.services
    key, token = key_in(request), services.settings.metrics_token
    if token is None or not hmac.compare_digest(key.encode(), token.get_secret_value().encode()):
        who = await principal(request, services)
        who.require(Permission.READ)
        if not who.is_operator:
            raise Forbidden(
                f"Metrics count every tenant's work. Use a key of tenant {DEFAULT_TENANT} without a workspace, or "
                "INTERLOCK_METRICS_TOKEN."
            )
    counts = (
        (RUN, "count_runs_by_status", metrics.run_active),
        (WORKER, "count_workers_by_status", metrics.worker_active),
        (JOB, "count_jobs_by_status", metrics.job_active),
    )
    with contextlib.suppress(Unavailable):  # metrics matter most while the database is unavailable
        for machine, statement, gauge in counts:
            rows = await services.database.fetch(statement, patience=0.5)
            counted = dict.fromkeys(machine.open, 0) | {row["status"]: row["count"] for row in rows}
            for status, count in counted.items():
                gauge.labels(status).set(count)
        unproven = await services.database.row("count_unproven", patience=0.5)
        assert unproven is not None
        metrics.unsealed.set(unproven["unsealed"])
        metrics.evidence_due.set(unproven["evidence_due"])
    return Response(exposition(), media_type=CONTENT_TYPE_LATEST)


# ---------------------------------------------------------------- errors

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
# Errors raised while decoding the body, before any field location is known.
_UNREADABLE: dict[type[BaseException | None], str] = {
    UnicodeDecodeError: "it is not JSON: it is not UTF-8",
    RecursionError: "it is nested too deeply",
}


def problem_response(problem: InterlockError) -> Response:
    body = orjson.dumps(problem_body(problem), default=str)
    return Response(body, problem.status, headers=problem.headers, media_type="application/problem+json")


async def _on_error(request: Request, error: Exception) -> Response:
    return problem_response(problem_of(request, error))


def problem_of(request: Request, error: Exception) -> InterlockError:
    """Return the problem that the API answers for an exception that an endpoint did not handle."""
    return next(PROBLEMS[kind] for kind in type(error).__mro__ if kind in PROBLEMS)(request, error)


def _of_invalid(request: Request, error: RequestValidationError) -> InterlockError:
    known = _fields_of_body(request)
    faults = [_fault(each, known) for each in error.errors()]
    if isinstance(error.body, bytes) and "json" not in request.headers.get("content-type", ""):
        return Invalid("the body was not read as JSON: send it with Content-Type: application/json", errors=faults)
    # A caller of /runs/nope sent an address and not a field, so the `path.` prefix is left out.
    detail = "; ".join(f"{fault['path'].removeprefix('path.')}: {fault['message']}" for fault in faults)
    return Invalid(detail, errors=faults)


def _fields_of_body(request: Request) -> Collection[str]:
    route = request.scope.get("route")
    body = route.body_field.field_info.annotation if isinstance(route, APIRoute) and route.body_field else None
    return body.model_fields if isinstance(body, type) and issubclass(body, BaseModel) else ()


def _fault(found: dict[str, Any], known: Collection[str]) -> dict[str, str]:
    if found["type"] == "json_invalid":  # the location is a character position and not a field
        where = found["loc"][-1]
        return {"path": "body", "message": f"it is not JSON: {found['ctx']['error']} (at character {where})"}
    return {
        "path": _readable(".".join(str(part) for part in found["loc"])),
        "message": wrong(found, known=known if found["loc"][:-1] == ("body",) else ()),
    }


def _readable(path: str) -> str:
    """Return the path as text that can be encoded: a field's name in JSON may contain an unpaired surrogate."""
    return path.encode(errors="replace").decode()


def _of_http(request: Request, error: HTTPException) -> InterlockError:
    if error.status_code == 404:
        return NotFound(f"there is nothing at {request.url.path}")
    if error.status_code == 413:
        return TooLarge(error.detail)
    if error.status_code == 405:
        return _of_method(request)
    if error.status_code == 400 and (why := _UNREADABLE.get(type(error.__cause__))):
        return Invalid(f"body: {why}", errors=[{"path": "body", "message": why}])
    problem = InterlockError(error.detail, code=f"HTTP_{error.status_code}")
    problem.status, problem.title, problem.headers = error.status_code, error.detail, error.headers or {}
    return problem


def _of_method(request: Request) -> InterlockError:
    """Return 405 with the methods of the path. Each endpoint knows only its own methods."""
    allowed = [
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]
    return MethodNotAllowed(request.method, request.url.path, allowed)


def _of_unstorable(request: Request, error: Exception) -> InterlockError:
    # The driver's text names columns, types and parameters of our statements, so it is logged and not sent.
    log.info("request_unstorable", path=request.url.path, error=str(error))
    return Invalid(
        "A value in the request cannot be stored: a number is out of range, or a text is too long or contains a NUL "
        "character or an unpaired surrogate."
    )


def _of_transient(_: Request, __: Exception) -> InterlockError:
    return Unavailable("the database did not answer; try again")


def _of_unavailable(request: Request, error: Unavailable) -> InterlockError:
    if error.__cause__ is None:
        return error
    # The detail ends with the driver's text, which names addresses, tables and statements.
    log.warning("database_away", path=request.url.path, error=error.detail)
    return _of_transient(request, error)


def _of_surprise(request: Request, error: Exception) -> InterlockError:
    log.error("request_failed", path=request.url.path, exc_info=error)
    problem = InterlockError("this is a bug; the server's log has the details")
    problem.headers = {"Connection": "close"}  # the server closes the connection after an exception
    return problem


PROBLEMS: dict[type[Exception], Callable[[Request, Any], InterlockError]] = {
    InterlockError: lambda _, error: error,
    Unavailable: _of_unavailable,
    RequestValidationError: _of_invalid,
    HTTPException: _of_http,
    **dict.fromkeys(UNSTORABLE, _of_unstorable),
    **dict.fromkeys(TRANSIENT, _of_transient),
    Exception: _of_surprise,
}


# ---------------------------------------------------------------- traces


class Traced:
    """Open a span around each request to the API, as a child of the span in the caller's `traceparent`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if tracing.spans is None or scope["type"] != "http" or not scope["path"].startswith("/api/"):
            await self._app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"), None)
        about = {"http.request.method": scope["method"], "url.path": scope["path"]}
        named = f"{scope['method']} {scope['path']}"
        with tracing.spans.span(named, about, parent=tracing.accepted(given), is_request=True) as span:

            async def answered(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    tracing.fail(span, f"status {message['status']}" if message["status"] >= 500 else None)
                await send(message)

            try:
                await self._app(scope, receive, answered)
            finally:
                # The route's template and not the path: the ids in a path would give every request a different span
                # name.
                if (route := scope.get("route")) is not None:
                    span.update_name(f"{scope['method']} {route.path}")


# ---------------------------------------------------------------- limits


class KeyLimits:
    """Reject a request while its key or its tenant has too many requests in progress: see `limits`."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = limited_request(scope, self._most) if scope["type"] == "http" else None
        if request is None:
            await self._app(scope, receive, send)
            return
        limits: KeyUsage = scope["app"].state.services.limits
        try:
            limits.begin(request)
        except InterlockError as problem:
            await problem_response(problem)(scope, receive, send)
            return
        limits.tenants.expect(scope, request)
        try:
            await self._app(scope, receive, send)
        finally:
            limits.end(request)
            limits.tenants.end(scope, request)


class BodyLimit:
    """Reject a body as soon as it is known to be too large, whether or not its length was announced."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._says = f"a request may have {most:,} bytes (INTERLOCK_MAX_BODY_BYTES)"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > self._most:
            await problem_response(TooLarge(self._says))(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most:
                # A route that is reading its body turns any other exception into a 400.
                raise HTTPException(413, self._says)
            return message

        await self._app(scope, counted, send)
