"""Tests of workflows and flows: the whole engine runs in the test's own process, and the test controls the time."""

from interlock.testing.clock import ManualClock
from interlock.testing.engine import Engine
from interlock.testing.fake import Fake, NoFake
from interlock.testing.postgres import Scratch

__all__ = ["Engine", "Fake", "ManualClock", "NoFake", "Scratch"]
