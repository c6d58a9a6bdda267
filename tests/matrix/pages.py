"""The console's pages and forms, and whose rows each reaches. The routes come from the console's own table."""

import re
from dataclasses import dataclass, field

import httpx2

from interlock.console.app import PAGES
from tests.matrix.expected import Reach
from tests.matrix.world import Place, World

W, T, L, WHOLE, OP = Reach.WORKSPACE, Reach.TENANT, Reach.LIST, Reach.WHOLE, Reach.OPERATORS


@dataclass(frozen=True, slots=True)
class Page:
    reach: Reach
    form: dict[str, str] = field(default_factory=dict)
    # The page is a stream: only its rejections end.
    is_stream: bool = False
    is_asked: bool = True


EXPECTED_PAGES: dict[str, Page] = {
    "GET /approvals/{approval_id}": Page(W),
    "GET /audit": Page(L),
    "GET /inbox": Page(L),
    "GET /jobs": Page(L),
    "GET /jobs/{job_id}": Page(W),
    "GET /live/run/{run_id}": Page(W, is_stream=True),
    "GET /live/session/{session_id}": Page(W, is_stream=True),
    "GET /live/{topic}": Page(L, is_stream=True),
    "GET /policy": Page(L),
    "GET /runs": Page(L),
    "GET /runs/{run_id}": Page(W),
    "GET /runs/{run_id}/evidence": Page(W),
    "GET /schedules": Page(L),
    "GET /sessions": Page(L),
    "GET /sessions/{session_id}": Page(W),
    "GET /signin": Page(L),
    "GET /tools": Page(L),
    "GET /tools/{name}": Page(L),
    "GET /usage": Page(L),
    "GET /workers": Page(L),
    "GET /workers/{worker_id}": Page(L),
    "GET /workflows": Page(L),
    "GET /workflows/{name}": Page(T),
    "POST /approvals/{approval_id}/approve": Page(W, {"digest": "0" * 64}),
    "POST /approvals/{approval_id}/reject": Page(W, {"digest": "0" * 64}),
    "POST /audit/verify": Page(L),
    "POST /jobs/{job_id}/cancel": Page(W),
    "POST /policy": Page(WHOLE, {"text": "", "action": "check"}),
    "POST /runs/{run_id}/cancel": Page(W),
    "POST /runs/{run_id}/retry": Page(W),
    "POST /schedules": Page(L, {"name": "other", "cron": "0 * * * *", "workflow": "gate"}),
    "POST /schedules/{name}/delete": Page(W),
    "POST /schedules/{name}/pause": Page(W),
    "POST /schedules/{name}/resume": Page(W),
    "POST /schedules/{name}/run": Page(W),
    "POST /sessions": Page(L, {"agent": "assistant", "content": "hello"}),
    "POST /sessions/{session_id}": Page(W, {"content": "hello"}),
    "POST /sessions/{session_id}/interrupt": Page(W),
    "POST /signin": Page(L, is_asked=False),  # starts and ends the session that the other requests use
    "POST /signout": Page(L, is_asked=False),
    "POST /workers": Page(OP),
    "POST /workers/{worker_id}/{event}": Page(OP),
    "POST /workflows/{name}/start": Page(T),
}


def routes() -> set[str]:
    """Return every page and form of the console."""
    return {
        f"{method} {route.path}"
        for module in PAGES
        for route in module.router.routes
        for method in getattr(route, "methods", ())
    }


def path_of(page: str, place: Place) -> str:
    kind = page.split("/")[1]
    name = "bank.pay" if kind == "tools" else place.name(kind)
    return page.partition(" ")[2].format(**place.ids, name=name, topic="runs", event="pause")


class Console:
    """A signed-in administrator of the caller's workspace."""

    def __init__(self, world: World, client: httpx2.AsyncClient) -> None:
        self.world, self.faults = world, list[str]()
        self._client, self._csrf = client, ""

    async def sign_in(self, key: str) -> "Console":
        assert (await self._client.post("/signin", data={"key": key})).status_code == 303
        found = re.search(r'name="csrf" value="([0-9a-f]+)"', (await self._client.get("/inbox")).text)
        assert found is not None
        self._csrf = found[1]
        return self

    def asks(self, page: str, place: Place) -> bool:
        """A stream ends only if it is rejected, and signing in or out changes the caller."""
        expected = EXPECTED_PAGES[page]
        return expected.is_asked and not (expected.is_stream and (expected.reach is L or place is self.world.own))

    async def ask(self, page: str, place: Place) -> str:
        """Send one request for things in a place, record every fault of the answer, and return the answer."""
        expected, path = EXPECTED_PAGES[page], path_of(page, place)
        data = {"csrf": self._csrf, **expected.form}
        as_script = {"Accept": "application/json"}
        get = page.startswith("GET")
        answer = await (self._client.get(path) if get else self._client.post(path, data=data, headers=as_script))
        if wrong := self._wrong(expected, place, answer) or self._leak(path, answer):
            self.faults.append(f"{page} for {place.mark}: {wrong}: {answer.text[:200]}")
        return answer.text

    def _wrong(self, expected: Page, place: Place, answer: httpx2.Response) -> str | None:
        world, status = self.world, answer.status_code
        is_shared = expected.reach is L or (expected.reach is T and place is world.neighbour)
        if expected.reach is OP:
            return None if status == 403 else f"{status} and not 403"
        if place is not world.own and expected.reach in (W, T) and not is_shared:
            return None if status == 404 else f"{status} and not 404"
        return f"{status}" if status in (401, 403) or status >= 500 else None

    def _leak(self, path: str, answer: httpx2.Response) -> str | None:
        """An answer may repeat the request, and may contain names that the whole tenant knows."""
        world, text = self.world, answer.text
        known = [world.neighbour.name(kind) for kind in ("agents", "workflows")]
        for said in sorted([*known, *path.split("/")[2:]], key=len, reverse=True):
            text = text.replace(said, "")
        if path.startswith("/workflows"):  # a definition belongs to the whole tenant
            text = text.replace(world.neighbour.mark, "")
        found = [secret for other in (world.neighbour, world.rival) for secret in other.secrets if secret in text]
        return f"it contains {found}" if found else None
