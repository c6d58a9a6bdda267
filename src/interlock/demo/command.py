"""The demo: a refund that stops for a person, played on a real server, a real worker and a real file.

Everything goes over the HTTP API. It has a database of its own beside the one that is configured, made at the start
and dropped at the end, so that it neither meets other work nor is met by other workers.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
from rich.console import Console
from rich.text import Text

from interlock.client import ApiError, AsyncClient
from interlock.demo import tools
from interlock.demo.screen import fit, heading, note, show_changes, show_event, show_question
from interlock.demo.timeline import show_timeline
from interlock.engine.access.tenants import new_key
from interlock.errors import Unavailable
from interlock.lifecycle import RUN, RunReason, RunState
from interlock.settings import Settings
from interlock.store.pool import Database
from interlock.wire import Run
from interlock.worker.worker import Worker

Serving = Callable[[Settings, Database], AbstractAsyncContextManager[str]]
DemoQuestion = Callable[[Console], Awaitable[bool]]

CHARGE, AMOUNT = "ch_1042", 349
BOT, PERSON = "refund-bot", "you"
_PREFIX = "interlock_demo_"
# An act takes two seconds; a demo that hangs is worse than one that fails.
_PATIENCE_SECONDS = 60


@dataclass(slots=True)
class Stage:
    """What the acts of the play share."""

    console: Console
    settings: Settings
    database: Database
    bot: AsyncClient
    person: AsyncClient
    seen: int = 0


async def play(
    settings: Settings, url: str, yes: bool, console: Console, serving: Serving, ask: DemoQuestion | None = None
) -> int:
    """Answers the exit code: 0 also when the person says no, because then too the demo did what it should."""
    ask = ask or (approve_by_itself if yes or not _has_person(console) else ask_person)
    async with _stage(settings, url, console, serving) as stage:
        before = _open_shop()
        run = await _first_act(stage)
        run = await _decision(stage, run, ask)
        run = await _last_act(stage, run)
        await _epilogue(stage, run, before)
        return 0 if run.reason in (RunReason.COMPLETED, RunReason.REJECTED) else 1


def announce(console: Console) -> None:
    """Before the database is started, which takes a moment the first time."""
    fit(console).print(Text("Interlock demo: a refund that stops for a person", style="bold"))


# ---------------------------------------------------------------- the acts


async def _first_act(stage: Stage) -> Run:
    """Up to the point where the run waits for a person."""
    source = files("interlock.demo").joinpath("refund.yaml").read_text(encoding="utf-8")
    workflow = await stage.bot.apply_workflow(source)
    heading(stage.console, f"{BOT} starts {workflow.name}@{workflow.version} with charge {CHARGE}, amount {AMOUNT}")
    async with _worker(stage):
        run = await stage.bot.start("refund", {"charge": CHARGE, "amount": AMOUNT})
        return await _follow(stage, run)


async def _decision(stage: Stage, run: Run, ask: DemoQuestion) -> Run:
    """Nothing runs now, not even a worker. What a decision changes is in the database before anybody works on it."""
    if run.status != RunState.WAITING_APPROVAL:
        return run
    [approval] = (await stage.person.approvals(run_id=run.id)).items
    show_question(stage.console, approval, BOT)
    note(stage.console, "The worker has gone home: while people think, nothing is kept running.")
    try:
        await stage.bot.approve_approval(approval.id)
    except ApiError as refused:
        note(stage.console, f"{BOT} tries to approve its own refund: ", (f"{refused.status} {refused.code}", "red"))
    stage.console.print()
    if await ask(stage.console):
        decided = await stage.person.approve_approval(
            approval.id, reason="checked in the demo", digest=approval.action.digest
        )
    else:
        decided = await stage.person.reject_approval(approval.id, reason="rejected in the demo")
    heading(stage.console, f"{PERSON} {decided.status}; " + _what_follows(decided.status == "approved"))
    return await stage.bot.run(run.id)


def _what_follows(approved: bool) -> str:
    return "another worker takes the run over" if approved else "nothing of the refund is done"


async def _last_act(stage: Stage, run: Run) -> Run:
    if run.status in RUN.terminal:
        return await _follow(stage, run)
    async with _worker(stage):
        return await _follow(stage, run)


async def _follow(stage: Stage, run: Run) -> Run:
    """Show events as they come, until the run has ended or waits for a person."""
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            async for event in stage.bot.follow(run.id, after=stage.seen):
                show_event(stage.console, event, run.created_at)
                stage.seen = event.seq
                if event.data.get("to_state") == RunState.WAITING_APPROVAL and "step_key" not in event.data:
                    break
    except TimeoutError:
        raise Unavailable(f"the demo's run did not get on for {_PATIENCE_SECONDS} s") from None
    return await stage.bot.run(run.id)


async def _epilogue(stage: Stage, run: Run, before: tuple[str, str]) -> None:
    console = stage.console
    heading(console, "The timeline, from the run's journal")
    show_timeline(console, run, (await stage.person.events(run.id)).items)
    heading(console, "What changed in the world")
    for name, old, new in zip(("shop.json", "outbox.txt"), before, _read_shop(), strict=True):
        show_changes(console, _shown(tools.FOLDER / name), old, new)
    console.print()
    if run.status == RunState.SUCCEEDED:
        note(console, ("The refund was made once, and the journal says who allowed it.", "bold green"))
    else:
        note(console, (f"The run {run.status} with reason {run.reason}: no money moved.", "bold yellow"))
    _show_next(stage)


def _show_next(stage: Stage) -> None:
    """Commands that can be pasted as they stand."""
    console = stage.console
    command = "interlock" if shutil.which("interlock") else _shown(Path(sys.argv[0]))
    from_source = (example := Path("examples/refund/refund.yaml")).exists()
    workflow = example if from_source else Path(__file__).with_name("refund.yaml")
    server = f"http://127.0.0.1:{Settings().port}"  # the one that `up` will have; the demo's own was any
    heading(console, "Try next")
    lines = [
        f"INTERLOCK_TOOLS=interlock.demo.tools {command} up",
        f"{command} workflow apply {_shown(workflow)}",
        f"{command} run start refund --param charge=ch_1043 --param amount=89",
        f"{command} key create me --role approver",
        f"open {server}/inbox   # sign in with THAT_KEY and approve; or:",
        f"{command} --key THAT_KEY run approve RUN",
        f"KEY=$(cat {_shown(stage.settings.data_dir.parent / 'admin.key')})",
        f'curl -H "Authorization: Bearer $KEY" {server}/api/runs',
    ]
    for line in lines:
        console.print(Text(f"  {line}", style="cyan"), no_wrap=True, overflow="ignore", crop=False)
    if from_source:
        note(console, ("README.md and docs/introduction.md tell the rest.", "dim"))


# ---------------------------------------------------------------- the person


def _has_person(console: Console) -> bool:
    return console.is_terminal and sys.stdin is not None and sys.stdin.isatty()


async def approve_by_itself(console: Console) -> bool:
    note(console, ("Nobody is asked (--yes, or no terminal): the demo approves as you.", "yellow"))
    return True


async def ask_person(console: Console) -> bool:
    """Until it is a clear answer. The end of input is a no: what nobody allowed is not done."""
    while True:
        console.print(Text("  Approve the refund? [y/n] ", style="bold"), end="")
        line = await _read_line()
        if not line:
            console.print()
        if (answer := line.strip().lower()) in ("y", "yes") or not line or answer in ("n", "no"):
            return answer in ("y", "yes")


async def _read_line() -> str:
    """Not in a thread: a thread that reads cannot be stopped, and Ctrl-C would have to wait for it."""
    loop = asyncio.get_running_loop()
    typed = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), typed.set)
    try:
        await typed.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return sys.stdin.readline()


# ---------------------------------------------------------------- the stage


@contextlib.asynccontextmanager
async def _stage(settings: Settings, url: str, console: Console, serving: Serving) -> AsyncIterator[Stage]:
    # A data directory of its own: the demo's first key must not take the place of the one in use.
    folder, admin_key = settings.data_dir / "demo", new_key()
    tools.FOLDER = folder
    settings = settings.model_copy(
        update={"host": "127.0.0.1", "port": 0, "data_dir": folder, "bootstrap_key": admin_key}
    )
    async with contextlib.AsyncExitStack() as stack:
        database = await stack.enter_async_context(_own_database(settings, url))
        address = await stack.enter_async_context(serving(settings, database))
        admin = await stack.enter_async_context(AsyncClient(address, admin_key))
        keys = [await admin.create_key(BOT, "operator"), await admin.create_key(PERSON, "approver")]
        bot, person = [await stack.enter_async_context(AsyncClient(address, key.key)) for key in keys]
        version = await database.pool.fetchval("SHOW server_version")
        note(console, (f"PostgreSQL {version.split()[0]}, API at {address}", "dim"))
        note(console, (f"The shop's books are {_shown(folder / 'shop.json')}", "dim"))
        yield Stage(console, settings, database, bot, person)


@contextlib.asynccontextmanager
async def _own_database(settings: Settings, url: str) -> AsyncIterator[Database]:
    name = _PREFIX + secrets.token_hex(4)
    try:
        connection: Any = await asyncpg.connect(url)
        await _drop_leftovers(connection)
        await connection.execute(f"CREATE DATABASE {name}")
    except (asyncpg.PostgresError, OSError) as error:
        raise Unavailable(
            f"the demo cannot make a database of its own: {error}; unset INTERLOCK_DATABASE_URL to play it on the "
            "embedded server"
        ) from error
    try:
        parts = urlsplit(url)
        database = Database(urlunsplit(parts._replace(path=f"/{name}")), settings)
        await database.open()
        try:
            yield database
        finally:
            await database.close()
    finally:
        await connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        await connection.close()


async def _drop_leftovers(connection: Any) -> None:
    """Of demos that were killed: nobody is connected to their databases any more."""
    for row in await connection.fetch(
        "SELECT datname FROM pg_database WHERE starts_with(datname, $1)"
        " AND datname NOT IN (SELECT datname FROM pg_stat_activity WHERE datname IS NOT NULL)",
        _PREFIX,
    ):
        with contextlib.suppress(asyncpg.PostgresError):
            await connection.execute(f'DROP DATABASE IF EXISTS "{row["datname"]}"')


@contextlib.asynccontextmanager
async def _worker(stage: Stage) -> AsyncIterator[None]:
    """A worker for as long as the block lasts; it drains at the end."""
    stop = asyncio.Event()
    working = asyncio.create_task(Worker(stage.database, stage.settings, capacity=10).run(stop))
    try:
        yield
    finally:
        stop.set()
        await working


# ---------------------------------------------------------------- the shop


def _open_shop() -> tuple[str, str]:
    """A new day, a new book: an earlier demo's refund does not stand in the way of this one's."""
    tools.write_books(tools.OPENING_BOOKS)
    (tools.FOLDER / "outbox.txt").write_text("", encoding="utf-8")
    return _read_shop()


def _read_shop() -> tuple[str, str]:
    return (tools.FOLDER / "shop.json").read_text(), (tools.FOLDER / "outbox.txt").read_text()


def _shown(path: Path) -> str:
    """Relative to here where that is shorter."""
    with contextlib.suppress(ValueError):
        return str(min((os.path.relpath(path), str(path.absolute())), key=len))
    return str(path)
