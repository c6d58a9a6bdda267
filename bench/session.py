"""What every measurement receives: the stage, the amount of work, a calm machine and a progress callback."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from bench.calm import Calm, Pulse
from bench.stage import Stage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effort:
    repetitions: int
    drains: int
    samples: int
    backlog: int
    tenants: int
    ready: int
    claims: int
    console_runs: int


FULL = Effort(
    repetitions=5,
    drains=3,
    samples=100,
    backlog=200_000,
    tenants=10_000,
    ready=1_000_000,
    claims=60,
    console_runs=1_000_000,
)
QUICK = Effort(
    repetitions=2, drains=1, samples=40, backlog=60_000, tenants=10_000, ready=100_000, claims=20, console_runs=100_000
)


@dataclass(slots=True)
class Session:
    stage: Stage
    effort: Effort
    tell: Callable[[str], None]
    calm: Calm = field(default_factory=Calm)
    pulses: list[Pulse] = field(default_factory=list)

    async def calmly(self, what: str, measure: Callable[[], Awaitable[T]]) -> T:
        """Start when the machine is calm, and record its pulse."""
        self.tell(f"{what}: waiting for a calm machine")
        self.pulses.append(self.calm.wait())
        self.tell(what)
        return await measure()

    def take_pulses(self) -> list[Pulse]:
        taken, self.pulses = self.pulses, []
        return taken
