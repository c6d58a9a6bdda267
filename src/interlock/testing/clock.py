"""A clock that a test controls. The engine reads it, and passes its time to the database."""

from datetime import datetime, timedelta

from interlock import clock


class ManualClock:
    """The database's time until a test sets it. From then on only the test changes it."""

    def __init__(self) -> None:
        self.fixed: datetime | None = None

    def __call__(self) -> datetime | None:
        return self.fixed

    def freeze(self) -> datetime:
        self.fixed = self.fixed or clock.now()
        return self.fixed

    def advance(self, seconds: float) -> None:
        self.fixed = self.freeze() + timedelta(seconds=seconds)
