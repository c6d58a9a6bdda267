"""The benchmark runs: each of its measurements, with the minimum useful amount of work."""

import pytest
from bench.__main__ import MEASURES
from bench.calm import Calm
from bench.session import Effort, Session
from bench.stage import Stage, set_up

# The backlog is so long that a ceiling of 100,000 runs a second is sampled more than once in each part of it.
LEAST = Effort(
    repetitions=1, drains=1, samples=3, backlog=60_000, tenants=100, ready=1000, claims=2, console_runs=200,
)  # fmt: skip


class Hasty(Calm):
    """Figures do not count here, so the test does not wait for a calm machine."""

    def is_calm(self, pulse: object) -> bool:
        return True


@pytest.fixture(scope="module")
def stage():
    with set_up() as stage:
        yield stage


@pytest.mark.chaos
@pytest.mark.parametrize("name", MEASURES)
async def test_it_measures(stage: Stage, name: str) -> None:
    figures = await MEASURES[name](Session(stage, LEAST, tell=lambda _: None, calm=Hasty()))
    assert figures and all(one.ours.median > 0 and one.base.median > 0 for one in figures)
