"""A page: who looks at it, what every page has, and the headers that keep everything else out."""

import contextlib
import hashlib
import hmac
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote, unquote, urlencode
from uuid import UUID

from fastapi import Depends, Request
from fastapi.responses import RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from interlock import __version__
from interlock.api.services import Services, Svc
from interlock.console import words
from interlock.engine import signins
from interlock.engine.principal import Principal
from interlock.errors import Forbidden, Invalid, NotFound, Problem
from interlock.governance.roles import MAY, Permission

COOKIE = "interlock_session"
_FLASH = "interlock_said"
_THEMES = ("light", "dark")
# Not whatever Unicode calls a digit: of ² no number is made, nor of thousands of them.
_DIGITS = re.compile("[0-9]{1,10}")

# Nothing but what this server sends; no script or style inside a page, whatever somebody put into a field.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; font-src 'self'; "
    "manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    enable_async=False,
)
_templates.filters |= words.FILTERS
# Which pages the menu has; each adds itself.
menu: set[str] = set()
_templates.globals |= {"version": __version__, "Permission": Permission, "pages": menu}


class SignedOut(Exception):
    """Nobody is signed in here, or not any more."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """Somebody who is signed in, and what their forms have to say to be believed."""

    who: Principal
    csrf: str
    services: Services

    def may(self, permission: Permission) -> bool:
        return permission in MAY[self.who.role]


async def visitor(request: Request, found: Svc) -> Visitor:
    token = request.cookies.get(COOKIE)
    who = await signins.behind(found.database, token) if token else None
    if token is None or who is None:
        raise SignedOut
    return Visitor(who, csrf_of(token), found)


Visit = Annotated[Visitor, Depends(visitor)]


def csrf_of(token: str) -> str:
    """Known only to pages of this session: it cannot be read off the cookie, nor the cookie off it."""
    return hmac.new(token.encode(), b"interlock-csrf", hashlib.sha256).hexdigest()


async def form_of(request: Request) -> dict[str, str]:
    body = (await request.body()).decode(errors="replace")
    return dict(parse_qsl(body, keep_blank_values=True))


async def said(request: Request, visit: Visit) -> dict[str, str]:
    """The fields of a form that one of our own pages sent."""
    form = await form_of(request)
    if not hmac.compare_digest(form.pop("csrf", "").encode(), visit.csrf.encode()):
        raise Forbidden("this form is from before you signed in; go back, reload the page and try again")
    return {name: value for name, value in form.items() if value}


Said = Annotated[dict[str, str], Depends(said)]


# ---------------------------------------------------------------- drawing


async def render(request: Request, visit: Visitor, template: str, *, status: int = 200, **context: Any) -> Response:
    """A page with everything around it."""
    waiting = await visit.services.database.value("count_requested", visit.who.tenant_id, visit.who.workspace_id)
    return _draw(request, template, status, visit=visit, waiting=waiting, **context)


async def plain(request: Request, template: str, *, status: int = 200, **context: Any) -> Response:
    """For somebody who may not be signed in."""
    return _draw(request, template, status, visit=None, waiting=0, **context)


async def render_problem(request: Request, problem: Problem) -> Response:
    """What went wrong; whoever is signed in keeps the menu."""
    # A database that is away would not tell who they are either.
    if problem.status < 500:
        with contextlib.suppress(SignedOut, Problem):
            visit = await visitor(request, request.app.state.services)
            return await render(request, visit, "problem.html", status=problem.status, problem=problem)
    return await plain(request, "problem.html", status=problem.status, problem=problem)


def _draw(request: Request, template: str, status: int, **context: Any) -> Response:
    theme = request.cookies.get("interlock_theme")
    told = unquote(request.cookies.get(_FLASH, ""))
    context |= {
        "path": request.url.path,
        "query_without_cursor": urlencode([p for p in request.query_params.multi_items() if p[0] != "cursor" and p[1]]),
        "theme": theme if theme in _THEMES else None,
        "flash": told[1:] or None,
        "flash_bad": told[:1] == "!",
        "now": datetime.now(UTC),
    }
    html = _templates.get_template(template).render(context)
    response = Response(html, status, headers=_HEADERS, media_type="text/html; charset=utf-8")
    if told:
        response.delete_cookie(_FLASH)
    return response


def done(path: str, message: str | None = None) -> Response:
    """After a form: back to a page, which says once what happened."""
    response = RedirectResponse(path, 303)
    return flash(response, message) if message else response


def flash(response: Response, message: str, *, bad: bool = False) -> Response:
    response.set_cookie(_FLASH, quote(("!" if bad else "+") + message[:700]), max_age=30, httponly=True, samesite="lax")
    return response


def uuid_of(text: str, what: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise NotFound(f"there is no {what} {text}") from None


def number_of(text: str | None, what: str, *, least: int = 1, most: int = 10_000) -> int | None:
    if not text:
        return None
    if not _DIGITS.fullmatch(text) or not least <= int(text) <= most:
        raise Invalid(f"{what} is a number from {least} to {most:,}, not {text!r}")
    return int(text)
