"""`interlock run batch`: a run for each of many inputs, in as many requests as necessary."""

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from interlock.cli import formatting
from interlock.cli.connection import connect
from interlock.cli.options import Inputs, Json, Version
from interlock.cli.parsing import parse_inputs, parse_seconds, visible

# A server accepts a million bytes per request by default; everything besides the inputs needs few of them.
_MOST_BYTES = 900_000


def batch(
    ctx: typer.Context,
    workflow: Annotated[str, typer.Argument(help="The workflow's name.")],
    inputs: Inputs,
    version: Version = None,
    idempotency_key: Annotated[
        str | None, typer.Option(help="The same key again starts only what was not started before.")
    ] = None,
    deadline: Annotated[str | None, typer.Option(metavar="DURATION", help="Each fails if it takes longer.")] = None,
    as_json: Json = False,
) -> None:
    """Start a run of a workflow for each of many inputs."""
    from interlock.wire import NewTrigger, Page, Run

    given = parse_inputs(inputs)
    parts = list(_parts(given))
    seconds = parse_seconds(deadline) if deadline else None
    started: list[Run] = []
    with connect(ctx) as client:
        try:
            for number, part in enumerate(_shown(parts)):
                started += client.start_many(
                    workflow, part, version=version, trigger=NewTrigger(source="cli"), deadline_seconds=seconds,
                    idempotency_key=f"{idempotency_key}:{number}" if idempotency_key else None,
                ).items  # fmt: skip
        except BaseException:
            if started:
                typer.echo(f"{len(started):,} of {len(given):,} runs were started", err=True)
            raise
    if as_json:
        formatting.print_json(Page[Run](items=started))
    else:
        formatting.console().print(
            f"{len(started):,} {'run' if len(started) == 1 else 'runs'} of {visible(workflow)} started"
        )


def _shown(parts: list[list[dict[str, Any]]]) -> Iterable[list[dict[str, Any]]]:
    screen = Console(stderr=True)
    return track(parts, "starting", console=screen, transient=True, disable=not screen.is_terminal)


def _parts(given: list[Any]) -> Iterator[list[dict[str, Any]]]:
    """Split the inputs into parts that fit in one request. The same inputs are always split the same way."""
    from interlock.wire import MOST_RUNS_AT_ONCE

    if not given:
        raise typer.BadParameter("the list is empty; give an input for each run", param_hint="--inputs")
    part: list[dict[str, Any]] = []
    size = 0
    for place, one in enumerate(given):
        if not isinstance(one, dict):
            raise typer.BadParameter(
                f'expected objects like {{"id": 1}}; number {place + 1} is {json.dumps(one)[:40]}',
                param_hint="--inputs",
            )
        length = len(json.dumps(one))
        if part and (len(part) == MOST_RUNS_AT_ONCE or size + length > _MOST_BYTES):
            yield part
            part, size = [], 0
        part.append(one)
        size += length
    yield part
