"""Options and arguments that many commands have, with the same words everywhere."""

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="How many.")]
Cursor = Annotated[str | None, typer.Option(help="Where the last list ended.")]
Files = Annotated[list[str], typer.Argument(metavar="FILE...", help="YAML files; - reads what is piped in.")]
Version = Annotated[int | None, typer.Option(min=1, help="Another version than the newest.")]
Inputs = Annotated[str, typer.Option(metavar="JSON|@FILE", help="A list of inputs, one run for each.")]
