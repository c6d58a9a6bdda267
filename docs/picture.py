"""The picture in the README: `python -m docs.picture` plays the demo and draws its screen.

It is not part of `make docs`, because every demo takes a different time.
"""

import asyncio
import io
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from interlock import main
from interlock.demo import command
from interlock.settings import Settings
from interlock.store import embedded
from interlock.telemetry import configure_logging

HERE = Path(__file__).parent
PICTURE = HERE / "images" / "demo.svg"
_THINKS_SECONDS = 2.5
# What follows is for the reader's own terminal.
_LAST = "What changed in the world"

# Rich's own template without its web font: a picture must not fetch anything.
_SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
  <style>
    .{unique_id}-matrix {{
      font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
      font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width;
    }}
    .{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif; }}
    {styles}
  </style>
  <defs>
    <clipPath id="{unique_id}-clip-terminal">
      <rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
    </clipPath>
    {lines}
  </defs>
  {chrome}
  <g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
    {backgrounds}
    <g class="{unique_id}-matrix" xml:space="preserve">{matrix}</g>
  </g>
</svg>
"""


async def _yes(console: Console) -> bool:
    await asyncio.sleep(_THINKS_SECONDS)
    console.print(Text("  Approve the refund? [y/n] ", style="bold").append("y", style="not bold"))
    return True


def perform() -> str:
    """Return the demo's output as a terminal would receive it."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system="truecolor", highlight=False)
    configure_logging("error", "console")
    command.announce(console)
    settings = Settings()
    server = embedded.start(settings.data_dir)
    try:
        main.run_loop(command.play(settings, server.url, False, console, main.serving, ask=_yes))
    finally:
        server.leave()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def draw(shown: str) -> str:
    console = Console(record=True, file=io.StringIO(), width=82, highlight=False)
    for line in Text.from_ansi(shown).split("\n"):
        if line.plain.strip() == _LAST:
            break
        console.print(Text(" ").append(line), no_wrap=True)
    svg = console.export_svg(title="make demo", theme=MONOKAI, code_format=_SVG, unique_id="demo")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


if __name__ == "__main__":
    for name in [name for name in os.environ if name.startswith("INTERLOCK_")]:
        del os.environ[name]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(draw(perform()), encoding="utf-8")
        os.chdir(HERE)
    print(f"docs/images/{PICTURE.name}")
    sys.exit(0)
