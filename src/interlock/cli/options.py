"""Options and arguments that many commands share, with the same help texts everywhere."""

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="How many.")]
Cursor = Annotated[str | None, typer.Option(help="Where the last list ended.")]
Digest = Annotated[
    str | None,
    typer.Option(help="Decide only if the action is still the one with this digest; needed once it was edited."),
]
Files = Annotated[list[str], typer.Argument(metavar="FILE...", help="YAML files; - reads what is piped in.")]
AllowUnknownTools = Annotated[
    bool, typer.Option("--allow-unknown-tools", help="Accept tools that the server lacks and only some workers have.")
]
OneVersion = Annotated[int, typer.Argument(metavar="VERSION", min=0, help="The number of a version.")]
Against = Annotated[int | None, typer.Option(min=0, help="The version to compare with; else the one before it.")]
Version = Annotated[int | None, typer.Option(min=1, help="Another version than the newest.")]
Inputs = Annotated[str, typer.Option(metavar="JSON|@FILE", help="A list of inputs, one run for each.")]
