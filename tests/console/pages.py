"""The console in process: a user with a key signs in, reads pages and submits their forms."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from html import unescape
from typing import Any

import httpx2
import pytest
from tests.rig import Rig

HOSTILE = "<script>alert(1)</script>"
MOST = 100_000


class Browser:
    """Keeps its cookies, and follows the redirect after a form."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self.client = client
        self.csrf = ""

    async def sign_in(self, key: str) -> "Browser":
        answer = await self.client.post("/signin", data={"key": key})
        assert answer.status_code == 303, answer.text
        self.csrf = self._csrf((await self.client.get("/inbox")).text)
        return self

    def _csrf(self, page: str) -> str:
        found = re.search(r'name="csrf" value="([0-9a-f]+)"', page)
        assert found is not None
        return found[1]

    async def get(self, path: str, status: int = 200) -> str:
        """Get a page. It must be complete, small enough, and free of injected scripts."""
        answer = await self.client.get(path)
        assert answer.status_code == status, (path, answer.status_code, answer.text[:300])
        check(answer)
        return answer.text

    async def post(self, path: str, status: int = 200, **fields: Any) -> str:
        """Submit a form with its CSRF token, and return the resulting page."""
        answer = await self.client.post(path, data={"csrf": self.csrf, **fields})
        if answer.status_code == 303:
            answer = await self.client.get(answer.headers["location"])
        assert answer.status_code == status, (path, answer.status_code, text_of(answer.text)[:600])
        check(answer)
        return answer.text

    async def refused(self, path: str, **fields: Any) -> None:
        """The server rejects an action that the page does not offer."""
        answer = await self.client.post(path, data={"csrf": self.csrf, **fields})
        assert answer.status_code == 403, (path, answer.status_code)


def check(answer: httpx2.Response) -> None:
    page = answer.text
    assert len(answer.content) < MOST, f"{answer.url} has {len(answer.content):,} bytes"
    assert "unsafe-inline" not in answer.headers["content-security-policy"]
    assert page.count("<script") == 1  # our own script
    assert HOSTILE not in page
    assert not re.search(r"<[a-z][^>]*\s(style|on[a-z]+)=", page), "inline style or script"


def text_of(page: str) -> str:
    """Return the visible text: no tags, single spaces."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", page))).strip()


SignIn = Callable[..., Awaitable[Browser]]


@pytest.fixture
async def sign_in(rig: Rig) -> AsyncIterator[SignIn]:
    rig.mount_console()
    clients: list[httpx2.AsyncClient] = []

    async def signed_in(
        role: str = "admin", *, workspace_id: str | None = None, tenant_id: Any = None, name: str = "ada"
    ) -> Browser:
        key = await rig.key(name, role, tenant_id, workspace_id)
        transport = httpx2.ASGITransport(app=rig.app, raise_app_exceptions=True)
        client = httpx2.AsyncClient(transport=transport, base_url="http://test")
        clients.append(client)
        return await Browser(client).sign_in(key)

    yield signed_in
    for client in clients:
        await client.aclose()


@pytest.fixture
async def admin(sign_in: SignIn) -> Browser:
    return await sign_in("admin")


@pytest.fixture
async def viewer(sign_in: SignIn) -> Browser:
    return await sign_in("viewer", name="vera")
