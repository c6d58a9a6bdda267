"""The demo."""

from rich.console import Console

from interlock.settings import Settings


async def play(settings: Settings, url: str, yes: bool, console: Console) -> int:
    return 0
