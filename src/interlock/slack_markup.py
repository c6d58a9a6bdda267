"""Slack's text form: text from people and programs must not turn into mentions, links or markup."""

import re
from collections.abc import Sequence
from datetime import datetime

from interlock.visible import visible_text

_HALF_ENTITY = re.compile(r"&[a-z]*$")


def escape(text: str, most: int = 500) -> str:
    """Return the text on one line, as text. `<!channel>` in a run's input sends no notification."""
    return cut(entities(visible_text(text)), most)


def entities(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def span(text: str, most: int = 500) -> str:
    """Return the text as inline code, where Slack renders no markup: `~1000~ 12` must not read as 12."""
    return f"`{escape(text.replace('`', chr(92) + 'x60'), most)}`" if text else ""


def fence(lines: Sequence[str]) -> str:
    """Return lines that are already escaped as a block of code. No line may contain three backticks."""
    return "```" + "\n".join(lines) + "```"


def moment(at: datetime) -> str:
    """Return the moment as Slack shows it: in the reader's own time zone."""
    return f"<!date^{int(at.timestamp())}^{{date_short_pretty}} at {{time}}|{at:%Y-%m-%d %H:%M} UTC>"


def cut(text: str, most: int) -> str:
    """Shorten escaped text. An entity is kept whole or left out: half of one would show other characters."""
    return text if len(text) <= most else _HALF_ENTITY.sub("", text[: most - 1]) + "…"
