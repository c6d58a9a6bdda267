"""A server whose clock is 100 days ahead destroys nothing, and its new runs land in this month (reliability V1).

Fails on commit 8eeccb8: within seconds the second server has dropped the journal of today.
"""

from pathlib import Path
from typing import Any

import pytest

from interlock.client import AsyncClient
from tests import faketime
from tests.chaos.processes import Yard, ask, journal, until, until_all_ended, workflow
from tests.rig import Rig

pytestmark = pytest.mark.chaos
RUNS = 20


@pytest.fixture
def yard(base: Path, url: str, rig: Rig) -> Any:
    yard = Yard(base, url, retention_days=30)
    yield yard
    yard.close()


async def test_a_server_100_days_ahead_destroys_nothing_of_today(rig: Rig, yard: Yard) -> None:
    wrong = faketime.environment("+100d")
    await rig.apply(workflow("three", 3))
    yard.server(workers=1)
    async with AsyncClient(await yard.address(), rig.admin_key) as client:
        await client.start_many("three", [{"ms": 1}] * RUNS)
        await until_all_ended(rig, RUNS, seconds=60)

    async def proven() -> bool:
        [row] = await ask(rig, "SELECT count(*) AS n FROM interlock.evidence")
        return bool(row["n"] == RUNS)

    await until(proven, "every run has its evidence", 60)
    before = len(await journal(rig))
    ahead = yard.server(workers=0, environment=wrong)
    address = await yard.address()

    async def has_tended() -> bool:
        return "deletes_nothing" in ahead.said() or len(await journal(rig)) < before

    await until(has_tended, "the server with the wrong clock has tended the journal", 60)
    assert len(await journal(rig)) == before, "the journal of today was dropped"
    async with AsyncClient(address, rig.admin_key) as client:
        await client.start("three", {"ms": 1})
    await until_all_ended(rig, RUNS + 1, seconds=60)
    rows = await ask(
        rig, "SELECT tableoid::regclass::text AS partition, count(*) FROM interlock.journal_entry GROUP BY 1"
    )
    assert [row["partition"] for row in rows] == [f"journal_entry_{(await ask(rig, 'SELECT now()'))[0]['now']:%Y%m}"]
