"""Words: how times, amounts, states and values are said on a page."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import orjson
from markupsafe import Markup, escape

from interlock.lifecycle import APPROVAL, JOB, RECEIPT, RUN, STEP, WORKER, Machine
from interlock.lifecycle.tone import tone_of

# What machines share in words they mean alike; a run's and a step's are met most.
_MACHINES: tuple[Machine[Any, Any], ...] = (JOB, WORKER, RECEIPT, APPROVAL, STEP, RUN)
# A step that failed and will be tried again is pending to its machine, and something else to whoever looks.
_RETRYING = "retrying"
_TONE = {str(state): tone_of(machine, state) for machine in _MACHINES for state in machine.states}
_MEANS = {str(state): state.doc for machine in _MACHINES for state in machine.states}
_TONE[_RETRYING], _MEANS[_RETRYING] = "warn", "It failed, and will be tried again."


def state(name: str | None) -> Markup:
    """A state as a badge; what it means is in its title."""
    if name is None:
        return Markup("")
    text = str(name)
    return Markup('<span class="state {}" title="{}">{}</span>').format(
        _TONE.get(text, "quiet"), _MEANS.get(text, ""), text.replace("_", " ")
    )


def tone(name: str | None) -> str:
    return _TONE.get(str(name), "quiet")


def moment(at: datetime | str | None) -> Markup:
    """When it was, as a person says it; the exact time in its title. The script keeps it current."""
    if at is None:
        return Markup('<span class="none">–</span>')
    at = datetime.fromisoformat(at) if isinstance(at, str) else at
    exact = at.astimezone(UTC)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        exact.isoformat(timespec="milliseconds"), f"{exact:%Y-%m-%d %H:%M:%S} UTC", ago(exact)
    )


def ago(at: datetime) -> str:
    seconds = (datetime.now(UTC) - at).total_seconds()
    said = span(abs(seconds))
    return f"in {said}" if seconds < 0 else f"{said} ago"


def span(seconds: float | None) -> str:
    """About so long: two digits are enough for anybody."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, size, limit in (("s", 1, 90), ("min", 60, 90), ("h", 3600, 48), ("d", 86400, 10_000)):
        if seconds < limit * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def took(milliseconds: float | None) -> str:
    return span(None if milliseconds is None else milliseconds / 1000)


def money(dollars: float | None) -> str:
    return "–" if not dollars else f"${dollars:,.4f}" if dollars < 1 else f"${dollars:,.2f}"


def short(identity: UUID | str | None) -> Markup:
    """The end of an id: its beginning is the time, and the same for all that began together."""
    text = str(identity or "")
    return Markup('<span class="id" title="{}">{}</span>').format(text, text[-8:])


def ref(text: str) -> Markup | str:
    """What a run was started by: an id as its end, anything else as it is."""
    try:
        return short(UUID(text))
    except ValueError:
        return inline(text, 60)


def pretty(value: Any) -> str:
    """A value to read. Text that is JSON is shown as what it says."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return str(value)
    text: str = orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()
    return text


def inline(value: Any, most: int = 160) -> str:
    text: str = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    return text if len(text) <= most else text[: most - 1] + "…"


def who(actor: str | None) -> str:
    """Of `name:key-id` the name."""
    if not actor:
        return "–"
    name, _, tail = actor.rpartition(":")
    return name if name and len(tail) == 36 else actor


def many(count: int, most: int = 1000) -> str:
    return f"{most - 1:,}+" if count >= most else f"{count:,}"


def code(text: str) -> Markup:
    return Markup("<code>{}</code>").format(escape(text))


FILTERS: dict[str, Callable[..., Any]] = {
    "state": state, "tone": tone, "moment": moment, "span": span, "took": took, "money": money, "short": short,
    "ref": ref, "pretty": pretty, "inline": inline, "who": who, "many": many, "code": code,
}  # fmt: skip
