"""Tests of the workflow in ../workflows: a real engine, fakes for the tools, and a clock that the test moves."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "workflows"
sys.path.insert(0, str(FOLDER))
import order  # noqa: E402, F401  registers its tools

ORDER = {"customer": "ada", "article": "lamp", "count": 1}


@pytest.mark.real_tools("order.*")
async def test_an_order_waits_for_its_parcel(engine):
    await engine.apply(FOLDER / "order.yaml")
    run = await engine.run("order", ORDER)
    assert run.steps[1].retrying  # the bank did not answer
    await engine.advance("10s")
    assert (await engine.look(run)).status == "waiting_external"
    assert await engine.event("parcel.collected", "parcel-ada")
    run = await engine.look(run)
    assert (run.status, run.steps[-1].status) == ("succeeded", "skipped")


async def test_an_order_without_a_parcel_is_undone_last_effect_first(engine):
    await engine.apply(FOLDER / "order.yaml")
    engine.fake("order.reserve", {"reservation": "r1", "amount": 25})
    engine.fake("order.charge", {"payment": "p1"})
    engine.fake("order.label", {"parcel": "parcel-ada"})
    refund, release = engine.fake("order.refund", {}), engine.fake("order.release", {})
    run = await engine.run("order", ORDER)
    await engine.advance("2d")
    run = await engine.look(run)
    assert (run.status, run.reason) == ("failed", "external_timeout")
    assert (refund.calls, release.calls) == ([{"payment": "p1"}], [{"reservation": "r1"}])
