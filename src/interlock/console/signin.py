"""Signing in with an API key, and out again. The console does not store the key."""

from urllib.parse import urlencode, urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from interlock.api.dependencies import Ctx, tried
from interlock.api.limits import COOKIE, TooManyFailures
from interlock.console.rendering import FormFields, Visit, form_of, plain
from interlock.engine.access import console_sessions
from interlock.errors import Unauthorized

router = APIRouter()

_ENDED = {
    "looking": "Your sign-in has ended. Sign in again to go on.",
    "sending": "Your sign-in had ended, so nothing was done. Sign in, and do it again.",
}


@router.get("/signin")
async def show(request: Request) -> Response:
    ended = _ENDED.get(request.query_params.get("ended", ""))
    return await plain(request, "signin.html", error=None, ended=ended, next=_ours(request.query_params.get("next")))


@router.post("/signin")
async def sign_in(request: Request, found: Ctx) -> Response:
    # A form on another site must not be able to sign a visitor in with another identity.
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return RedirectResponse("/signin", 303)
    form = await form_of(request)
    wanted = _ours(form.get("next"))
    try:
        token = await tried(found, request, console_sessions.begin(found.database, form.get("key", "").strip()))
    except (Unauthorized, TooManyFailures) as error:
        page = await plain(request, "signin.html", status=error.status, error=error.detail, ended=None, next=wanted)
        page.headers.update(error.headers if isinstance(error, TooManyFailures) else {})
        return page
    response = RedirectResponse(wanted, 303)
    response.set_cookie(
        COOKIE, token, max_age=console_sessions.SECONDS, httponly=True, samesite="lax", secure=_is_secure(request)
    )
    return response


def _is_secure(request: Request) -> bool:
    """Return whether the browser uses HTTPS. A proxy may have terminated TLS, so the Origin header counts too."""
    return "https" in (request.url.scheme, request.headers.get("origin", "").partition(":")[0])


@router.post("/signout")
async def sign_out(request: Request, visit: Visit, _: FormFields) -> Response:
    await console_sessions.end(visit.services.database, request.cookies[COOKIE])
    response = RedirectResponse("/signin", 303)
    response.delete_cookie(COOKIE)
    return response


def ask(request: Request) -> Response:
    """Redirect to the sign-in page, and from there back to the requested page.

    Tell visitors whose session has ended.
    """
    looks = request.method == "GET"
    wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "") if looks else way_back(request)
    query = {"next": wanted} if wanted and wanted != "/" else {}
    if COOKIE in request.cookies:
        query["ended"] = "looking" if looks else "sending"
    return RedirectResponse("/signin" + (f"?{urlencode(query)}" if query else ""), 303)


def _ours(path: str | None) -> str:
    """Return a path within this site, or "/" for anything else."""
    if not path or not path.startswith("/") or path.startswith(("//", "/\\")):
        return "/"
    return path


def way_back(request: Request) -> str | None:
    """Return the page that contained the form, if it belongs to this site."""
    parts = urlsplit(request.headers.get("referer", ""))
    if parts.netloc != request.url.netloc or not parts.path.startswith("/"):
        return None
    return parts.path + (f"?{parts.query}" if parts.query else "")
