"""Slack's text form: what people and programs wrote must not turn into mentions, links or markup."""

from datetime import datetime


def escape(text: str, most: int = 500) -> str:
    """As text. `<!channel>` in a run's input notifies nobody."""
    plain = cut(text, most)
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def code(text: str, most: int = 2500) -> str:
    """As a block of code, whatever quotes it contains."""
    return f"```{escape(text, most).replace('```', 'ʼʼʼ')}```"


def moment(at: datetime) -> str:
    """In the reader's own time zone."""
    return f"<!date^{int(at.timestamp())}^{{date_short_pretty}} at {{time}}|{at:%Y-%m-%d %H:%M} UTC>"


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
