"""Databases whose time starts at the same instant in every test, independent of the machine's clock.

The function `now()` of such a database precedes PostgreSQL's own: it adds a fixed difference, so that time passes as
usual. The process clock adds the same difference, so both agree.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest

from interlock import clock
from interlock.testing import Scratch

# The middle of a minute, an hour, a day, a month and a year: no test lasts until the end of one of them.
BEGINS = datetime(2026, 5, 14, 10, 20, 15, 250_000, UTC)

_DATABASE = """
CREATE FUNCTION public.now() RETURNS timestamptz STABLE LANGUAGE sql
RETURN pg_catalog.now() + coalesce(current_setting('tests.ahead', true), '0')::interval;
CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz VOLATILE LANGUAGE sql
RETURN pg_catalog.clock_timestamp() + coalesce(current_setting('tests.ahead', true), '0')::interval;
"""
# As `interlock.testing` replaces it, on top of this module's `now()`.
_MOVABLE_NOW = """
CREATE OR REPLACE FUNCTION interlock.now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS $$
  SELECT coalesce(nullif(current_setting('interlock.now', true), '')::timestamptz, public.now())
$$"""


def ahead() -> float:
    """Return by how many seconds the test's clock is ahead of the machine's clock."""
    return clock.process_time() - time.time()


class FixedScratch(Scratch):
    """Its template has the functions; each database has the time of this process."""

    async def prepare(self) -> str:
        # The template's journal has the months around `BEGINS`, independent of the first test.
        with fixed_process_time():
            return await super().prepare()

    async def create(self, name: str, options: str = "") -> None:
        await super().create(name, options)
        await self.administer(
            f"ALTER DATABASE {name} SET search_path = public, pg_catalog",
            f"ALTER DATABASE {name} SET tests.ahead = '{ahead():.6f} seconds'",
        )

    async def prepare_template(self, url: str) -> None:
        await self.administer(_DATABASE, url=url)
        await super().prepare_template(url)
        await self.administer(_MOVABLE_NOW, url=url)


@contextmanager
def fixed_process_time() -> Iterator[None]:
    """Start this process's clock at `BEGINS` too."""
    real, difference = clock.process_time, BEGINS.timestamp() - time.time()
    clock.process_time = lambda: time.time() + difference
    yield
    clock.process_time = real


@pytest.fixture(autouse=True)
def machine_time() -> None:
    """For a module whose processes ask the machine's clock: imported as `_fixed_time`, it overrides that fixture."""
