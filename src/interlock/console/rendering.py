"""Pages: the visitor, what every page has, and the headers that keep foreign content out."""

import contextlib
import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote, unquote, urlencode
from uuid import UUID

from fastapi import Depends, Request
from fastapi.responses import RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from interlock import __version__, clock
from interlock.api.dependencies import AppContext, Ctx
from interlock.api.limits import COOKIE
from interlock.console import badge, filters
from interlock.engine.access import console_sessions
from interlock.engine.access.principal import Principal
from interlock.errors import Forbidden, InterlockError, Invalid, NotFound
from interlock.policy.roles import MAY, Permission

_FLASH = "interlock_said"
_THEMES = ("light", "dark")
# Only ASCII digits: `int` does not accept ², nor thousands of digits.
_DIGITS = re.compile("[0-9]{1,10}")

# Only content from this server. A page runs no inline script or style, even if a user's field contains one.
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
    finalize=filters.shown,
)
_templates.filters |= filters.FILTERS
# The pages in the menu; each page adds itself.
menu: set[str] = set()
_templates.globals |= {"version": __version__, "Permission": Permission, "pages": menu}


class SignedOut(Exception):
    """The visitor is not signed in, or the session has ended."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """A signed-in person, and the CSRF token that their forms must carry."""

    who: Principal
    csrf: str
    services: AppContext

    def may(self, permission: Permission) -> bool:
        return permission in MAY[self.who.role]


async def visitor(request: Request, found: Ctx) -> Visitor:
    token = request.cookies.get(COOKIE)
    who = await console_sessions.behind(found.database, token) if token else None
    if token is None or who is None:
        raise SignedOut
    found.limits.tenants.begin(request.scope, who.tenant_id)
    return Visitor(who, csrf_of(token), found)


Visit = Annotated[Visitor, Depends(visitor)]


def csrf_of(token: str) -> str:
    """Return the CSRF token of a session. Only pages of this session contain it, and it does not reveal the cookie."""
    return hmac.new(token.encode(), b"interlock-csrf", hashlib.sha256).hexdigest()


async def form_of(request: Request) -> dict[str, str]:
    body = (await request.body()).decode(errors="replace")
    return dict(parse_qsl(body, keep_blank_values=True))


async def said(request: Request, visit: Visit) -> dict[str, str]:
    """Return the fields of a form, after checking that one of our own pages sent it."""
    form = await form_of(request)
    if not hmac.compare_digest(form.pop("csrf", "").encode(), visit.csrf.encode()):
        raise Forbidden("this form is from before you signed in; go back, reload the page and try again")
    return {name: value for name, value in form.items() if value}


def wants_json(request: Request) -> bool:
    """Return whether the page's script sent the form, and not the browser itself."""
    return request.headers.get("accept", "").startswith("application/json")


FormFields = Annotated[dict[str, str], Depends(said)]


# ---------------------------------------------------------------- rendering


async def render(request: Request, visit: Visitor, template: str, *, status: int = 200, **context: Any) -> Response:
    """Render a page with the menu and the header."""
    waiting = await badge.count_for(visit.services.database, visit.who)
    return _draw(request, template, status, visit=visit, waiting=waiting, **context)


async def plain(request: Request, template: str, *, status: int = 200, **context: Any) -> Response:
    """Render a page that does not require a signed-in visitor."""
    return _draw(request, template, status, visit=None, waiting="", **context)


async def render_problem(request: Request, problem: InterlockError) -> Response:
    """Render an error page. A signed-in visitor keeps the menu."""
    # Without the database the visitor cannot be identified either.
    if problem.status < 500:
        with contextlib.suppress(SignedOut, InterlockError):
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
        "now": clock.now(),
    }
    html = _templates.get_template(template).render(context)
    response = Response(html, status, headers=_HEADERS, media_type="text/html; charset=utf-8")
    if told:
        response.delete_cookie(_FLASH)
    return response


def done(path: str, message: str | None = None) -> Response:
    """Redirect back to a page after a form, with a message that is shown once."""
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
