"""`python -m bench [--quick] [--only throughput,latency,handoff,gate,claim,backlog,console]`"""

import signal
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench import backlog, claim, console, gate, latency, report, throughput
from bench.figures import Figure
from bench.session import FULL, QUICK, Session
from bench.stage import set_up
from interlock.main import run_loop
from interlock.telemetry import configure_logging

Measure = Callable[[Session], Awaitable[list[Figure]]]
MEASURES: dict[str, Measure] = {
    "throughput": throughput.measure,
    "latency": latency.measure_latency,
    "handoff": latency.measure_handoff,
    "gate": gate.measure,
    "claim": claim.measure,
    "backlog": backlog.measure,
    "console": console.measure,
}


def main(
    quick: Annotated[bool, typer.Option(help="Fewer repetitions, a shorter backlog.")] = False,
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(MEASURES)}, comma-separated.")] = "",
) -> None:
    """Measure Interlock against a hand-written ceiling. The report shows a missed goal; it is not an error."""
    chosen = [name.strip() for name in only.split(",") if name.strip()] or list(MEASURES)
    if unknown := set(chosen) - set(MEASURES):
        raise typer.BadParameter(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(MEASURES)}")
    # The client's own log lines would distort the measurement.
    configure_logging("warning", "auto")
    if failed := run_loop(_measure(_console(), chosen, quick)):
        raise SystemExit(f"not measured: {', '.join(failed)}")


async def _measure(console: Console, chosen: list[str], quick: bool) -> list[str]:
    """Return the names of the measurements that failed. The report still shows all others."""
    effort = QUICK if quick else FULL
    figures: list[Figure] = []
    failed: list[str] = []
    with set_up() as stage, _progress(console) as progress:
        task = progress.add_task("starting", total=len(chosen))
        session = Session(stage, effort, tell=lambda text: progress.update(task, description=text))
        for name in chosen:
            try:
                figures += await MEASURES[name](session)
            except Exception:
                failed.append(name)
                console.print_exception()
            progress.advance(task)
        server = await stage.server_version()
    console.print(report.table(figures))
    console.print(report.machine_line(figures, session.calm))
    path = report.write(figures, effort=asdict(effort), best=session.calm.best, server=server)
    console.print(f"Written to {path}", soft_wrap=True)
    return failed


def _console() -> Console:
    """A file or a pipe has room for the whole table."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True)


if __name__ == "__main__":
    # As on Ctrl-C: stop the server that this benchmark started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
