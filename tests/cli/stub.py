"""A server with scripted answers, and the command line run against it."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import Any

import typer.testing
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typer.main import get_command
from typer.testing import CliRunner, Result

from interlock.cli import app

# The runner would rebuild all commands for each call, which takes longer than most calls.
made: Callable[[typer.Typer], Any] = cache(get_command)
typer.testing._get_command = made

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)


def a_step(key: str, status: str = "succeeded", **more: Any) -> dict[str, Any]:
    base = {"id": f"s-{key}", "key": key, "index": 0, "kind": "tool", "tool": f"shop.{key}", "status": status}
    return {**base, "attempt": 1, "max_attempts": 4, **more}


def a_run(id: str = "run-1", status: str = "running", **more: Any) -> dict[str, Any]:
    base = {"id": id, "tenant_id": "t", "workflow": "refund", "workflow_version": 3, "status": status}
    at = NOW.isoformat()
    return {**base, "trigger": {"source": "cli"}, "created_at": at, "updated_at": at, "steps": [], **more}


def an_approval(id: str = "ap-1", run_id: str = "run-1", **more: Any) -> dict[str, Any]:
    action = {"tool": "shop.refund", "fields": {"amount": 120}, "digest": "sha256:ab"}
    base = {"id": id, "run_id": run_id, "step_key": "review", "status": "requested", "tier": "high"}
    return {
        **base,
        "two_person": True,
        "action": action,
        "summary": "Refund 120",
        "requested_at": NOW.isoformat(),
        **more,
    }


def an_event(seq: int, **data: Any) -> dict[str, Any]:
    return {"seq": seq, "type": "step_transition", "at": NOW.isoformat(), "run_id": "run-1", "data": data}


class Stub:
    """Answers each `METHOD /path` with the test's answer, and records the requests."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = {}
        self.asked: list[tuple[str, dict[str, str], bytes, dict[str, str]]] = []
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        self.app = Starlette(routes=[Route("/{path:path}", self.answer, methods=methods)])

    def on(self, call: str, *answers: Any) -> "Stub":
        self.answers[call] = list(answers)
        return self

    async def answer(self, request: Request) -> Response:
        call = f"{request.method} {request.url.path}"
        self.asked.append((call, dict(request.query_params), await request.body(), dict(request.headers)))
        waiting = self.answers.get(call)
        if not waiting:
            return problem(404, "NOT_FOUND", "Not found", "no such thing")
        found = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return found if isinstance(found, Response) else JSONResponse(found)

    def body(self, call: str) -> Any:
        return json.loads(next(body for asked, _, body, _ in self.asked if asked == call))

    def query(self, call: str) -> dict[str, str]:
        return next(query for asked, query, _, _ in self.asked if asked == call)


def problem(status: int, code: str, title: str, detail: str, **more: Any) -> Response:
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail, "code": code, **more}
    return JSONResponse(body, status, media_type="application/problem+json")


def sse(*events: dict[str, Any]) -> Response:
    lines = [f"id: {e['seq']}\nevent: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events]
    return Response("".join([*lines, "event: end\ndata: {}\n\n"]), media_type="text/event-stream")


def run(*args: str, input: str | None = None) -> Result:
    return CliRunner().invoke(app, args, input=input, prog_name="interlock")


def refused(result: Result, *, code: int = 1) -> str:
    """Return the one line of an error."""
    lines = result.stderr.splitlines()
    assert (result.exit_code, len(lines)) == (code, 1), result.output
    return lines[0]
