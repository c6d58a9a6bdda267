"""Cron: the slots of a schedule in its own time zone, and which missed slots still have to start.

As in Debian's cron, a job at a fixed hour runs once a day. On a day that has this hour twice it runs the first time; on
a day without it, at the end of the gap. A job with `*` in its hours or minutes follows real time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from interlock.lifecycle import Term

# Until then a slot counts as on time, for every `Missed` policy: the sweeper was just busy.
LATE = timedelta(seconds=60)
_NAMED = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_FIELDS = "minute, hour, day of month, month, day of week"
_ANY_DAY = datetime(2026, 1, 1, tzinfo=UTC)


class Missed(Term):
    """What happens to slots that passed while no process could start them."""

    SKIP = "skip", "They are left out."
    LAST = "last", "The last of them is started, once."
    ALL = "all", "Each of them is started, the oldest first."


@dataclass(frozen=True, slots=True)
class Cron:
    expression: str
    zone: ZoneInfo

    @classmethod
    def parse(cls, expression: str, timezone: str) -> "Cron":
        """Parse a cron expression. Raise ValueError with the correction."""
        text = " ".join(_NAMED.get(expression.strip().lower(), expression).split())
        if len(text.split()) != 5:
            raise ValueError(
                f"`{expression[:100]}` is not a cron expression: it has five fields ({_FIELDS}), as in `30 2 * * *`, "
                f"or is one of {', '.join(_NAMED)}"
            )
        cron = cls(text, _zone(timezone))
        try:
            following = cron.after(_ANY_DAY)
        except CronSimError as error:
            raise ValueError(f"`{expression[:100]}` is not a cron expression: {_explained(error)}") from None
        if following is None:
            raise ValueError(f"`{expression[:100]}` is valid, but no day in the next fifty years has it")
        return cron

    def after(self, moment: datetime) -> datetime | None:
        """Return the first slot after a moment."""
        return next(self.slots_after(moment), None)

    def slots_after(self, moment: datetime) -> Iterator[datetime]:
        last = moment
        for local in CronSim(self.expression, moment.astimezone(self.zone)):
            slot = local.astimezone(UTC)
            # In an hour that comes twice the same local time names a moment that has passed.
            if slot > last:
                last = slot
                yield slot

    def due(self, first: datetime, now: datetime, missed: Missed, most: int) -> list[datetime]:
        """Return the slots from `first`, itself a slot, until now that have to start; at most `most` of them."""
        match missed:
            case Missed.ALL:
                return self._until(first, now, most)
            case Missed.LAST:
                # Searching backwards is quick but skips a slot in an hour that comes twice, so search forwards from
                # there.
                return self._until(max(first, self._before(now, first)), now)[-1:]
            case Missed.SKIP:
                on_time = now - LATE
                start = first if first >= on_time else self.after(on_time)
                return self._until(start, now) if start is not None else []

    def _until(self, start: datetime, now: datetime, most: int | None = None) -> list[datetime]:
        if start > now:
            return []
        found = [start]
        for slot in self.slots_after(start):
            if slot > now or len(found) == most:
                break
            found.append(slot)
        return found

    def _before(self, moment: datetime, otherwise: datetime) -> datetime:
        earlier = next(CronSim(self.expression, moment.astimezone(self.zone), reverse=True), None)
        return earlier.astimezone(UTC) if earlier is not None else otherwise


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        near = get_close_matches(name, available_timezones(), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "; write one such as Europe/Berlin, or UTC"
        raise ValueError(f"no time zone {name[:100]!r}{hint}") from None


def _explained(error: CronSimError) -> str:
    """Return what is wrong with which field, given an error such as `Bad hour`."""
    field = str(error).removeprefix("Bad ").replace("-", " ")
    return f"the {field} is wrong; the fields are {_FIELDS}"
