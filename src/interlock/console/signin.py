"""Signing in with an API key, and out again. The key itself is kept nowhere."""

from urllib.parse import urlencode, urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from interlock.api.services import Svc
from interlock.console.page import COOKIE, Said, Visit, form_of, plain
from interlock.engine import signins
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
async def sign_in(request: Request, found: Svc) -> Response:
    # A form on another site must not be able to sign somebody in as somebody else.
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return RedirectResponse("/signin", 303)
    form = await form_of(request)
    wanted = _ours(form.get("next"))
    try:
        token = await signins.begin(found.database, form.get("key", "").strip())
    except Unauthorized as error:
        return await plain(request, "signin.html", status=401, error=error.detail, ended=None, next=wanted)
    response = RedirectResponse(wanted, 303)
    response.set_cookie(
        COOKIE, token, max_age=signins.SECONDS, httponly=True, samesite="lax", secure=_is_secure(request)
    )
    return response


def _is_secure(request: Request) -> bool:
    """A proxy may have taken the TLS off; the browser still says what it sees."""
    return "https" in (request.url.scheme, request.headers.get("origin", "").partition(":")[0])


@router.post("/signout")
async def sign_out(request: Request, visit: Visit, _: Said) -> Response:
    await signins.end(visit.services.database, request.cookies[COOKIE])
    response = RedirectResponse("/signin", 303)
    response.delete_cookie(COOKIE)
    return response


def ask(request: Request) -> Response:
    """Back to where they wanted to be; who was signed in is told that this has ended."""
    looks = request.method == "GET"
    wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "") if looks else way_back(request)
    query = {"next": wanted} if wanted and wanted != "/" else {}
    if COOKIE in request.cookies:
        query["ended"] = "looking" if looks else "sending"
    return RedirectResponse("/signin" + (f"?{urlencode(query)}" if query else ""), 303)


def _ours(path: str | None) -> str:
    """A way within this site, and nowhere else."""
    if not path or not path.startswith("/") or path.startswith(("//", "/\\")):
        return "/"
    return path


def way_back(request: Request) -> str | None:
    """The page that a form stood on, if it was one of ours."""
    parts = urlsplit(request.headers.get("referer", ""))
    if parts.netloc != request.url.netloc or not parts.path.startswith("/"):
        return None
    return parts.path + (f"?{parts.query}" if parts.query else "")
