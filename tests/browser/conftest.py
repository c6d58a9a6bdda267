"""A site with a real server, and browsers that can reach no other host."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvicorn
from tests.browser.chromium import FLAGS, chromium
from tests.fixed_time import ahead
from tests.rig import Rig

from interlock.settings import Settings
from interlock.store.pool import Database
from interlock.store.session import server_time


class Site:
    """The rig with its console on a port, in real time."""

    def __init__(self, rig: Rig, address: str) -> None:
        self.rig, self.address = rig, address
        self.browsers: Browsers

    async def visit(self, path: str = "/inbox", *, key: str | None = None, **options: Any) -> Any:
        """Open a page in a separate signed-in browser context."""
        page = await self.browsers.page(**options)
        await page.goto(f"{self.address}/signin?next={path}")
        await page.get_by_label("API key").fill(key or self.rig.admin_key)
        await page.get_by_role("button", name="Sign in").click()
        await page.wait_for_url(f"{self.address}{path}")
        return page


# Set the browser's time to the database's time.
_TIME = """
const ahead = %d;
globalThis.Date = class extends Date {
  constructor(...given) { given.length ? super(...given) : super(Date.now()); }
  static now() { return super.now() + ahead; }
};
"""


class Browsers:
    """Chromium, one context per person. A request to another host or a console error fails the test."""

    def __init__(self, browser: Any, address: str) -> None:
        self._browser, self._address = browser, address
        self.complaints: list[str] = []

    async def page(self, **options: Any) -> Any:
        context = await self._browser.new_context(**options)
        await context.add_init_script(_TIME % (ahead() * 1000))
        page = await context.new_page()
        page.set_default_timeout(30_000)
        page.on("request", lambda request: self._asked(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: self._said(said))
        return page

    def _asked(self, url: str) -> None:
        if not url.startswith((self._address, "data:")):
            self.complaints.append(f"a request left the origin: {url}")

    def _said(self, said: Any) -> None:
        # The browser logs an expected 4xx answer as a failed load.
        if said.type == "error" and "status of 4" not in said.text:
            self.complaints.append(said.text)


@pytest.fixture
async def served(url: str, settings: Settings) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        database = await Database(url, settings, size=8).open()
        stack.push_async_callback(database.close)
        rig = await Rig.make(database, settings, server_time)
        stack.push_async_callback(rig.close)
        rig.mount_console()
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(rig.app, log_config=None, access_log=False, lifespan="off"))
        serving = asyncio.create_task(server._serve(sockets=[listening]))

        async def stop() -> None:
            rig.follower.close()
            server.should_exit = True
            server.force_exit = True
            await serving

        stack.push_async_callback(stop)
        yield Site(rig, f"http://127.0.0.1:{listening.getsockname()[1]}")


@pytest.fixture
async def site(served: Site) -> AsyncIterator[Site]:
    """A site with browsers."""
    if (executable := chromium()) is None:
        pytest.skip("Chromium is not here and could not be installed: `python -m tests.browser.chromium` says why")
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=FLAGS)
        served.browsers = Browsers(browser, served.address)
        yield served
        await browser.close()
    assert served.browsers.complaints == []
