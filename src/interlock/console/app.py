"""The site: its pages, and its error pages."""

import re
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from fastapi.routing import APIRoute
from starlette.staticfiles import StaticFiles

from interlock.api.app import PROBLEMS, problem_of, problem_response
from interlock.api.dependencies import Json
from interlock.console import (
    approvals,
    audit,
    jobs,
    live,
    policy,
    reference,
    runs,
    schedules,
    sessions,
    signin,
    tools,
    usage,
    workers,
    workflows,
)
from interlock.console.rendering import SignedOut, flash, menu, render_problem, wants_json
from interlock.errors import InterlockError, Unauthorized
from interlock.visible import visible_text

_STATIC = Path(__file__).parent / "static"
_FOR_PROGRAMS = re.compile(r"/(?:api|metrics|healthz|readyz)(?:/|$)")

PAGES = (
    signin, approvals, runs, sessions, jobs, workers, workflows, schedules, policy, tools, audit, usage, live,
)  # fmt: skip


def mount(app: FastAPI) -> None:
    menu.update(route.path for module in PAGES for route in module.router.routes if isinstance(route, APIRoute))
    for module in PAGES:
        app.include_router(module.router, include_in_schema=False)
    app.mount("/static", _Static(directory=_STATIC), name="static")
    _speak_html(app)
    app.add_api_route("/", home, include_in_schema=False)
    app.add_api_route("/api/docs", reference.show, include_in_schema=False)
    app.add_api_route("/favicon.ico", favicon, include_in_schema=False)


def _speak_html(app: FastAPI) -> None:
    """Answer errors as HTML: an error page, or a redirect back to the page with the button.

    The API's paths keep problem+json.
    """

    async def says(request: Request, error: Exception) -> Response:
        problem = problem_of(request, error)
        if _FOR_PROGRAMS.match(request.url.path):
            return problem_response(problem)
        if wants_json(request):
            return _for_script(problem)
        back = signin.way_back(request) if request.method == "POST" else None
        if back is not None:
            return flash(RedirectResponse(back, 303), problem.detail or problem.title, bad=True)
        page = await render_problem(request, problem)
        page.headers.update(problem.headers)
        return page

    for kind in PROBLEMS:
        app.add_exception_handler(kind, says)

    async def signed_out(request: Request, _: Exception) -> Response:
        if wants_json(request):
            return _for_script(Unauthorized("Your sign-in has ended, so nothing was sent. Sign in again."))
        return signin.ask(request)

    app.add_exception_handler(SignedOut, signed_out)


def _for_script(problem: InterlockError) -> Response:
    """Return the problem that the page shows beside the button that was pressed."""
    body = {"status": problem.status, "detail": visible_text(problem.detail or problem.title)}
    return Json(body, problem.status, headers=problem.headers)


async def home() -> Response:
    return RedirectResponse("/inbox", 303)


async def favicon() -> Response:
    return RedirectResponse("/static/mark.svg", 301)


class _Static(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "max-age=3600"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response
