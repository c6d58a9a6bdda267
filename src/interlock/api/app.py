"""The application: routers, errors as problem+json, a limit on bodies, health and metrics."""

import contextlib
from collections.abc import Callable
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from interlock import __version__, tracing
from interlock.api import (
    acts,
    admin,
    approvals,
    audit,
    definitions,
    events,
    grants,
    hooks,
    hooks_out,
    jobs,
    policy,
    receipts,
    runs,
    schedules,
    secrets,
    sessions,
    slack,
    triggers,
    workers,
)
from interlock.api.services import Json, Services, problem_body
from interlock.errors import Invalid, MethodNotAllowed, NotFound, Problem, TooLarge, Unavailable
from interlock.lifecycle import JOB, RUN, WORKER
from interlock.store.pool import TRANSIENT, UNSTORABLE
from interlock.telemetry import exposition, log, metrics
from interlock.wire.faults import wrong

# Whatever is answered that is not what was asked for.
_A_PROBLEM: dict[str, Any] = {
    "description": "A problem (RFC 9457); its code says which.",
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
}


def create_app(services: Services) -> FastAPI:
    app = FastAPI(
        title="Interlock", version=__version__, openapi_url="/api/openapi.json", docs_url=None, redoc_url=None,
        description="Durable automations and agents that ask before they act.",
        responses={"default": _A_PROBLEM},
    )  # fmt: skip
    app.state.services = services
    for module in (
        runs, sessions, acts, jobs, events, approvals, receipts, audit, policy, grants, definitions, admin, workers,
        secrets, hooks_out, slack, triggers, schedules, hooks,
    ):  # fmt: skip
        app.include_router(module.router)
    app.add_middleware(BodyLimit, most=services.settings.max_body_bytes)
    app.add_middleware(Traced)
    for kind in PROBLEMS:
        app.add_exception_handler(kind, _on_error)
    app.add_api_route("/healthz", healthz, include_in_schema=False)
    app.add_api_route("/readyz", readyz, include_in_schema=False)
    app.add_api_route("/metrics", show_metrics, include_in_schema=False)
    return app


# ---------------------------------------------------------------- health and metrics


async def healthz() -> Response:
    """The process is alive."""
    return Json({"status": "ok"})


async def readyz(request: Request) -> Response:
    """It can do its work: the database answers."""
    services: Services = request.app.state.services
    try:
        await services.database.value("work_is_waiting", patience=0.5)
    except Unavailable as error:
        return problem_response(error)
    return Json({"status": "ready"})


async def show_metrics(request: Request) -> Response:
    services: Services = request.app.state.services
    counts = (
        (RUN, "count_runs_by_status", metrics.run_active),
        (WORKER, "count_workers_by_status", metrics.worker_active),
        (JOB, "count_jobs_by_status", metrics.job_active),
    )
    with contextlib.suppress(Unavailable):  # metrics are wanted most of all when the database is away
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
# What becomes of a body before it can be said where in it the mistake is.
_UNREADABLE: dict[type[BaseException | None], str] = {
    UnicodeDecodeError: "it is not JSON: it is not UTF-8",
    RecursionError: "it is nested too deeply",
}


def problem_response(problem: Problem) -> Response:
    body = orjson.dumps(problem_body(problem), default=str)
    return Response(body, problem.status, headers=problem.headers, media_type="application/problem+json")


async def _on_error(request: Request, error: Exception) -> Response:
    return problem_response(problem_of(request, error))


def problem_of(request: Request, error: Exception) -> Problem:
    """What is answered to an error that left its endpoint."""
    return next(PROBLEMS[kind] for kind in type(error).__mro__ if kind in PROBLEMS)(request, error)


def _of_invalid(request: Request, error: RequestValidationError) -> Problem:
    faults = [_fault(each) for each in error.errors()]
    if isinstance(error.body, bytes) and "json" not in request.headers.get("content-type", ""):
        return Invalid("the body was not read as JSON: send it with Content-Type: application/json", errors=faults)
    # Who asks for /runs/nope has written an address and no field: its name is all they need.
    detail = "; ".join(f"{fault['path'].removeprefix('path.')}: {fault['message']}" for fault in faults)
    return Invalid(detail, errors=faults)


def _fault(found: dict[str, Any]) -> dict[str, str]:
    if found["type"] == "json_invalid":  # and the place is that of a character, not of a field
        where = found["loc"][-1]
        return {"path": "body", "message": f"it is not JSON: {found['ctx']['error']} (at character {where})"}
    return {"path": _readable(".".join(str(part) for part in found["loc"])), "message": wrong(found)}


def _readable(path: str) -> str:
    """A field's name may be anything that JSON can write, also half a character."""
    return path.encode(errors="replace").decode()


def _of_http(request: Request, error: HTTPException) -> Problem:
    if error.status_code == 404:
        return NotFound(f"there is nothing at {request.url.path}")
    if error.status_code == 413:
        return TooLarge(error.detail)
    if error.status_code == 405:
        return _of_method(request)
    if error.status_code == 400 and (why := _UNREADABLE.get(type(error.__cause__))):
        return Invalid(f"body: {why}", errors=[{"path": "body", "message": why}])
    problem = Problem(error.detail, code=f"HTTP_{error.status_code}")
    problem.status, problem.title, problem.headers = error.status_code, error.detail, error.headers or {}
    return problem


def _of_method(request: Request) -> Problem:
    """Each endpoint knows its own methods only; whoever asks wants to know those of the path."""
    allowed = [
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]
    return MethodNotAllowed(request.method, request.url.path, allowed)


def _of_unstorable(_: Request, error: Exception) -> Problem:
    return Invalid(f"a value in the request cannot be stored: {error}")


def _of_transient(_: Request, __: Exception) -> Problem:
    return Unavailable("the database did not answer; try again")


def _of_surprise(request: Request, error: Exception) -> Problem:
    log.error("request_failed", path=request.url.path, exc_info=error)
    problem = Problem("this is a bug; the server's log has the details")
    problem.headers = {"Connection": "close"}  # which the server does after an exception
    return problem


PROBLEMS: dict[type[Exception], Callable[[Request, Any], Problem]] = {
    Problem: lambda _, error: error,
    RequestValidationError: _of_invalid,
    HTTPException: _of_http,
    **dict.fromkeys(UNSTORABLE, _of_unstorable),
    **dict.fromkeys(TRANSIENT, _of_transient),
    Exception: _of_surprise,
}


# ---------------------------------------------------------------- traces


class Traced:
    """A span around each request to the API, below the one that the caller names in `traceparent`."""

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
                # The path with its ids would make every request a name of its own.
                if (route := scope.get("route")) is not None:
                    span.update_name(f"{scope['method']} {route.path}")


# ---------------------------------------------------------------- limits


class BodyLimit:
    """Refuses a body as soon as it is known to be too large, whether its length was announced or not."""

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
                # Of any other exception a route that is reading its body makes a 400.
                raise HTTPException(413, self._says)
            return message

        await self._app(scope, counted, send)
