"""For tests of workflows and flows: the whole engine in the test's own process, and time that the test moves."""

from interlock.testing.clock import Clock
from interlock.testing.engine import Engine
from interlock.testing.fake import Fake
from interlock.testing.scratch import Scratch

__all__ = ["Clock", "Engine", "Fake", "Scratch"]
