"""A clock that a test moves: the engine asks it, and the database is told."""

from datetime import UTC, datetime, timedelta


class Clock:
    """The database's time until a test moves it; from then on it only moves when told to."""

    def __init__(self) -> None:
        self.fixed: datetime | None = None

    def __call__(self) -> datetime | None:
        return self.fixed

    def freeze(self) -> datetime:
        self.fixed = self.fixed or datetime.now(UTC)
        return self.fixed

    def advance(self, seconds: float) -> None:
        self.fixed = self.freeze() + timedelta(seconds=seconds)
