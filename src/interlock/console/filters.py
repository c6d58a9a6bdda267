"""Template filters: how pages show times, amounts, states and values."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import orjson
from markupsafe import Markup, escape

from interlock import clock
from interlock.definition.duration import format_duration
from interlock.lifecycle import APPROVAL, JOB, RECEIPT, RUN, STEP, WORKER, Machine
from interlock.lifecycle.severity import tone_of
from interlock.visible import visible_text

# State machines that share a state's name agree on its meaning. The later ones win; runs and steps are the most common.
_MACHINES: tuple[Machine[Any, Any], ...] = (JOB, WORKER, RECEIPT, APPROVAL, STEP, RUN)
# The state machine calls a step that failed and will be retried pending; a page calls it retrying.
_RETRYING = "retrying"
_DAY = 86_400
_TONE = {str(state): tone_of(machine, state) for machine in _MACHINES for state in machine.states}
_MEANS = {str(state): state.doc for machine in _MACHINES for state in machine.states}
_TONE[_RETRYING], _MEANS[_RETRYING] = "warn", "It failed, and will be tried again."


def shown(value: Any) -> Any:
    """Return what a page shows of an expression in a template: text with its invisible characters made visible.

    Every expression goes through here, so that no page can forget it. Markup was made of such text already.
    """
    if not isinstance(value, str) or isinstance(value, Markup) or (value.isascii() and value.isprintable()):
        return value
    return visible_text(value, keep_newlines=True)


def typed(text: str | None) -> Markup:
    """Return text that a form sends back: exactly what was typed or stored."""
    return escape(text or "")


def source(text: str) -> Markup:
    """Return the text of a program or a document: as `shown`, with its tabs."""
    return escape("\t".join(visible_text(part, keep_newlines=True) for part in text.split("\t")))


def state(name: str | None) -> Markup:
    """Return a state as a badge, with its meaning as the title."""
    if name is None:
        return Markup("")
    text = str(name)
    return Markup('<span class="state {}" title="{}">{}</span>').format(
        _TONE.get(text, "quiet"), _MEANS.get(text, ""), text.replace("_", " ")
    )


def tone(name: str | None) -> str:
    return _TONE.get(str(name), "quiet")


def moment(at: datetime | str | None) -> Markup:
    """Return a time relative to now, with the exact time as the title. The script keeps it current."""
    if at is None:
        return Markup('<span class="none">–</span>')
    at = datetime.fromisoformat(at) if isinstance(at, str) else at
    exact = at.astimezone(UTC)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        exact.isoformat(timespec="milliseconds"), f"{exact:%Y-%m-%d %H:%M:%S} UTC", ago(exact)
    )


def ago(at: datetime) -> str:
    """Return how long ago or in how long; beyond a day, the date and time with the zone."""
    seconds = (clock.now() - at).total_seconds()
    if abs(seconds) >= _DAY:
        return f"{at:%Y-%m-%d %H:%M:%S} UTC"
    said = span(abs(seconds))
    return f"in {said}" if seconds < 0 else f"{said} ago"


def span(seconds: float | None) -> str:
    """Return a duration to about two digits."""
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
    """Return the end of an id. The beginning of an id is its time and is shared by ids created together."""
    text = str(identity or "")
    return Markup('<span class="id" title="{}">{}</span>').format(text, text[-8:])


def ref(text: str) -> Markup | str:
    """Return what started a run: the end of an id, or any other value unchanged."""
    try:
        return short(UUID(text))
    except ValueError:
        return inline(text, 60)


def pretty(value: Any) -> str:
    """Return a value in readable form. Text that is JSON is shown as its parsed value."""
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
    """Return the name in `name:key-id`."""
    if not actor:
        return "–"
    name, _, tail = actor.rpartition(":")
    return name if name and len(tail) == 36 else actor


def many(count: int, most: int = 1000) -> str:
    return f"{most - 1:,}+" if count >= most else f"{count:,}"


def code(text: str) -> Markup:
    return Markup("<code>{}</code>").format(shown(text))


FILTERS: dict[str, Callable[..., Any]] = {
    "state": state, "tone": tone, "moment": moment, "span": span, "took": took, "money": money, "short": short,
    "ref": ref, "pretty": pretty, "inline": inline, "who": who, "many": many, "code": code, "typed": typed,
    "source": source, "duration": format_duration,
}  # fmt: skip
