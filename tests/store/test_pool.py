"""The database as the engine sees it: calls survive a broken connection, and report an error after the time limit."""

import asyncio
import contextlib
import re
import shutil
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from interlock.errors import Conflict, Invalid, Unavailable
from interlock.settings import Settings
from interlock.store import embedded, notify, pool
from interlock.store.notify import Listener
from interlock.store.pool import (
    TRANSIENT,
    ConnectionPool,
    Database,
    RetryTransaction,
    Tx,
    behind_pooler,
    connect,
    connection_options,
    retrying,
    without_password,
)
from tests.store.between import Between, drops_settings, is_silent, passes_on, refuses_settings

# ---------------------------------------------------------------- broken connections


async def kill(database: Database, pid: int) -> None:
    """Terminate another session and wait until it is gone: the server answers before that."""
    async with database.pool.acquire() as connection:
        await connection.execute("SELECT pg_terminate_backend($1, 5000)", pid)


async def test_a_command_whose_connection_breaks_is_done_again_and_happens_once(database: Database) -> None:
    tries = 0

    async def work(tx: Tx) -> str:
        nonlocal tries
        tries += 1
        await tx.value("create_tenant", uuid4(), "acme", None, 1.0, None, None)
        if tries == 1:
            await kill(database, await tx.connection.fetchval("SELECT pg_backend_pid()"))
        row = await tx.row("tenant_named", "acme")
        assert row is not None
        return str(row["name"])

    assert await database.run_in_transaction(work) == "acme"
    assert tries == 2
    assert await database.pool.fetchval("SELECT count(*) FROM interlock.tenant") == 1


async def test_a_single_statement_survives_idle_connections_that_died(database: Database) -> None:
    async with database.pool.acquire() as one, database.pool.acquire() as two:
        pids = [await c.fetchval("SELECT pg_backend_pid()") for c in (one, two)]
    for pid in pids:
        other = await asyncpg.connect(database.url)
        await other.execute("SELECT pg_terminate_backend($1, 5000)", pid)
        await other.close()
    assert await database.value("any_key") is False


async def test_the_victim_of_a_deadlock_is_done_again(database: Database) -> None:
    both_hold_one = asyncio.Barrier(2)
    tries = 0

    async def lock(tx: Tx, first: int, second: int) -> None:
        nonlocal tries
        tries += 1
        await tx.connection.execute("SET LOCAL deadlock_timeout = '10ms'")
        await tx.connection.execute(f"SELECT pg_advisory_xact_lock({first})")
        if tries <= 2:
            await both_hold_one.wait()
        await tx.connection.execute(f"SELECT pg_advisory_xact_lock({second})")

    both = (
        database.run_in_transaction(lambda tx: lock(tx, 1, 2)),
        database.run_in_transaction(lambda tx: lock(tx, 2, 1)),
    )
    await asyncio.wait_for(asyncio.gather(*both), 20)
    assert tries >= 3


async def test_who_is_cancelled_between_two_parts_of_a_statement_leaves_a_clean_connection(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = await Database(url, Settings(), size=1).open()
    prepare = asyncpg.Connection._get_statement

    async def cancelled(*args: object, **kwargs: object) -> None:
        await prepare(*args, **kwargs)
        raise asyncio.CancelledError

    monkeypatch.setattr(asyncpg.Connection, "_get_statement", cancelled)
    with pytest.raises(asyncio.CancelledError):
        await database.value("watch_run", uuid4(), 1.0)
    monkeypatch.undo()
    outside = await asyncpg.connect(url)
    half_done = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%watch_run%' AND state = 'active'"
    assert await outside.fetchval(f"{half_done} AND pid <> pg_backend_pid()") == 0
    await outside.close()
    await database.close()


async def test_a_transaction_over_a_migration_is_done_again(url: str) -> None:
    database = await Database(url, Settings(), size=1).open()

    async def look(tx: Tx) -> object:
        return await tx.row("lock_run", uuid4(), uuid4())

    assert await database.run_in_transaction(look) is None
    outside = await asyncpg.connect(url)
    await outside.execute("ALTER TABLE interlock.run ADD COLUMN from_the_future text")
    await outside.close()
    assert await database.run_in_transaction(look) is None
    await database.close()


async def test_a_full_disk_is_waited_for(database: Database) -> None:
    tries = 0

    async def work(tx: Tx) -> int:
        nonlocal tries
        tries += 1
        if tries == 1:
            full = "RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'"
            await tx.connection.execute(f"DO $$ BEGIN {full}; END $$")
        return tries

    assert await database.run_in_transaction(work) == 2


async def test_who_finds_every_connection_in_use_is_told_so_in_time(url: str) -> None:
    database = await Database(url, Settings(database_patience_seconds=0.1), size=1).open()
    async with database.transaction():
        with pytest.raises(Unavailable, match="all of this process's connections are in use"):
            await asyncio.wait_for(database.value("any_key"), 5)
    assert await database.value("any_key") is False
    await database.close()


async def add_tenant(tx: Tx, name: str) -> None:
    await tx.value("create_tenant", uuid4(), name, None, 1.0, None, None)


async def are_there(url: str) -> list[str]:
    """Return the tenants as other sessions see them."""
    outside = await asyncpg.connect(url)
    names = [row["name"] for row in await outside.fetch("SELECT name FROM interlock.tenant ORDER BY name")]
    await outside.close()
    return names


@pytest.mark.parametrize("is_begun", [True, False], ids=["begun", "not begun"])
@pytest.mark.parametrize("error", [asyncio.CancelledError, TimeoutError, asyncpg.QueryCanceledError])
async def test_who_ends_while_a_transaction_begins_takes_nothing_from_those_who_come_after(
    url: str, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], is_begun: bool
) -> None:
    database = await Database(url, Settings(), size=1).open()
    execute = asyncpg.Connection.execute

    async def ended(connection: asyncpg.Connection, statement: str, **options: object) -> str:
        if not statement.startswith("BEGIN"):
            return str(await execute(connection, statement, **options))
        if is_begun:
            await execute(connection, statement)
        raise error

    monkeypatch.setattr(asyncpg.Connection, "execute", ended)
    with pytest.raises(error):
        async with database.transaction():
            pass
    monkeypatch.undo()
    await database.run_in_transaction(lambda tx: add_tenant(tx, "a"))
    await database.value("create_tenant", uuid4(), "b", None, 1.0, None, None)
    assert await are_there(url) == ["a", "b"]
    assert await database.pool.fetchval("SHOW lock_timeout") != "0"
    await database.close()


async def test_a_command_can_be_cancelled_at_any_moment_and_the_next_is_kept(url: str) -> None:
    database = await Database(url, Settings(), size=1).open()
    for steps in range(8):
        first = asyncio.create_task(database.run_in_transaction(lambda tx: add_tenant(tx, "never")))
        for _ in range(steps):
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await database.run_in_transaction(lambda tx, steps=steps: add_tenant(tx, str(steps)))  # type: ignore[misc]
        assert str(steps) in await are_there(url)
    await database.close()


async def test_a_cancelled_command_ends_though_its_connection_cannot_be_cleaned(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, inside = 0, asyncio.Event()

    async def work(tx: Tx) -> None:
        nonlocal tries
        tries += 1
        inside.set()
        await asyncio.Event().wait()

    async def gone(*_: object, **__: object) -> None:
        raise ConnectionResetError("the server went away")

    command = asyncio.create_task(database.run_in_transaction(work))
    await inside.wait()
    monkeypatch.setattr(asyncpg.Connection, "execute", gone)
    command.cancel()
    done, _ = await asyncio.wait([command], timeout=10)
    monkeypatch.undo()
    assert done and command.cancelled() and tries == 1
    assert await database.value("any_key") is False


async def test_a_connection_that_cannot_be_cleaned_is_left_and_the_cancellation_stays_one(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: object, **__: object) -> None:
        raise TimeoutError

    async def cancelled() -> None:
        monkeypatch.setattr(asyncpg.Connection, "execute", gone)
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        async with database.connection() as connection:
            await cancelled()
    monkeypatch.undo()
    assert connection.is_closed()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda _: "foo", "scheme is expected"),
        (lambda url: url + "&sslmode=bogus", "`sslmode` parameter must be one of"),
        (lambda url: re.sub("@/[^?]+", "@/nowhere", url), 'database "nowhere" does not exist'),
        (lambda url: url.replace("postgres@", "nobody@"), 'role "nobody" does not exist'),
    ],
    ids=["no address", "no such mode", "no such database", "no such role"],
)
async def test_an_address_that_cannot_be_right_is_said_at_once(
    database: Database, wrong: Callable[[str], str], said: str
) -> None:
    with pytest.raises(Invalid, match=said):
        await Database(wrong(database.url), database.settings).open(patience=60)


async def test_what_the_address_asks_for_and_the_server_does_not_know_is_said_at_once(database: Database) -> None:
    with pytest.raises(Invalid, match='INTERLOCK_DATABASE_URL: unrecognized configuration parameter "channel_binding"'):
        await Database(f"{database.url}&channel_binding=require", database.settings).open(patience=60)


async def test_a_certificate_that_is_not_the_hosts_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(**_: object) -> None:
        raise ssl.SSLCertVerificationError("certificate is not valid for 'db'")

    monkeypatch.setattr(asyncpg, "connect", refuse)
    with pytest.raises(Invalid, match=r"INTERLOCK_DATABASE_URL: .*certificate is not valid for 'db'"):
        await Database("postgresql://db/app", Settings()).open(patience=1)


@pytest.mark.parametrize("password", ["a@SECRET", "SECRET/b", "SECRET#b", "a?SECRET", "a[SECRET", "a:b/SECRET"])
async def test_a_password_that_breaks_the_address_is_not_shown_and_how_to_write_it_is(password: str) -> None:
    with pytest.raises(Invalid, match=r"in a password, @ : / .* are written %40 %3A") as caught:
        await Database(f"postgresql://ann:{password}@127.0.0.1:1/app", Settings()).open(patience=60)
    assert "SECRET" not in str(caught.value) and caught.value.__cause__ is None


async def test_a_wrong_number_of_arguments_is_said_at_once(database: Database) -> None:
    with pytest.raises(asyncpg.InterfaceError, match="argument"):
        await database.value("watch_run")


async def test_a_problem_is_no_reason_to_try_again(database: Database) -> None:
    tries = 0

    async def work(tx: Tx) -> None:
        nonlocal tries
        tries += 1
        await tx.value("create_tenant", uuid4(), "acme", None, 1.0, None, None)
        raise Conflict("no")

    with pytest.raises(Conflict):
        await database.run_in_transaction(work)
    assert tries == 1
    assert await database.pool.fetchval("SELECT count(*) FROM interlock.tenant") == 0


async def test_what_is_told_of_a_command_is_told_once_and_only_if_it_was_committed(database: Database) -> None:
    told: list[str] = []
    tries = 0

    async def work(tx: Tx) -> None:
        nonlocal tries
        tries += 1
        tx.on_commit(lambda: told.append("done"))
        if tries == 1:
            raise RetryTransaction("try again")
        with contextlib.suppress(Conflict):
            async with tx.savepoint():
                tx.on_commit(lambda: told.append("undone"))
                raise Conflict("no")
        assert told == []

    await database.run_in_transaction(work)
    assert (tries, told) == (2, ["done"])

    async def refused(tx: Tx) -> None:
        tx.on_commit(lambda: told.append("refused"))
        raise Conflict("no")

    with pytest.raises(Conflict):
        await database.run_in_transaction(refused)

    async def refused_at_its_end(tx: Tx) -> None:
        tx.on_commit(lambda: told.append("refused"))
        await tx.connection.execute("""
          CREATE TEMPORARY TABLE one (number int UNIQUE DEFERRABLE INITIALLY DEFERRED) ON COMMIT DROP;
          INSERT INTO one VALUES (1), (1)""")

    with pytest.raises(asyncpg.UniqueViolationError):
        await database.run_in_transaction(refused_at_its_end)
    assert told == ["done"]


async def test_retrying_ends_when_patience_does_and_says_what_was_wrong() -> None:
    async def broken() -> None:
        raise ConnectionRefusedError("connection refused")

    with pytest.raises(Unavailable, match="did not answer for 0 s: connection refused"):
        await retrying(broken, 0.1)


async def test_a_database_that_was_not_opened_says_so() -> None:
    with pytest.raises(Unavailable, match="was not opened"):
        await Database("postgresql://nowhere/", Settings()).value("any_key", patience=0.01)


# ---------------------------------------------------------------- poolers and read-only servers


@pytest.mark.parametrize("pooler", [refuses_settings, drops_settings])
async def test_a_pooler_that_the_address_does_not_mention_is_said_at_once(url: str, pooler: Any) -> None:
    async with Between(url, pooler) as between:
        with pytest.raises(Invalid, match=r"a pooler answers there.* add pgbouncer=true"):
            await Database(between.url, Settings()).open(patience=60)


async def test_a_pooler_that_the_address_mentions_is_used(url: str) -> None:
    async with Between(url, drops_settings) as between:
        database = await Database(f"{between.url}&pgbouncer=true", Settings()).open()
        assert await database.value("any_key") is False
        await database.close()


async def test_a_silent_host_keeps_nobody_from_the_next_one_and_is_asked_last_from_then_on(url: str) -> None:
    async with Between(url, is_silent) as silent, Between(url, passes_on) as good:
        address = good.url.replace("@", f"@127.0.0.1:{silent.port},")
        options = connection_options(Database(address, Settings())) | {"timeout": 0.5}
        for _ in range(2):
            connection = await connect(options)
            assert await connection.fetchval("SELECT 1") == 1
            await connection.close()
        assert (silent.asked, good.asked) == (1, 2)


async def test_hosts_that_all_refuse_are_said(url: str) -> None:
    with pytest.raises(ConnectionRefusedError):
        await connect({"dsn": "postgresql://nobody@127.0.0.1:1,127.0.0.1:2/none"})


async def test_a_connection_to_a_server_that_only_reads_is_not_used_again(url: str) -> None:
    """As after a fail-over that broke no connection: another connection may reach the server that accepts writes."""
    database = await Database(url, Settings(), size=1).open()
    async with database.connection() as connection:
        await connection.execute("SET default_transaction_read_only = on")
    await database.run_in_transaction(lambda tx: add_tenant(tx, "a"))
    assert await are_there(url) == ["a"]
    assert connection.is_closed()
    await database.close()


async def test_when_a_connection_is_silent_those_that_lie_idle_are_not_tried_after_it(url: str) -> None:
    database = await Database(url, Settings(), size=2).open()
    async with database.connection() as one, database.connection() as two:
        pass
    with pytest.raises(TimeoutError):
        async with database.connection():
            raise TimeoutError
    assert one.is_closed() and two.is_closed()
    assert await database.value("any_key") is False
    await database.close()


async def test_what_somebody_set_for_our_role_does_not_change_how_we_read(url: str, server: embedded.Joined) -> None:
    name = url.partition("@/")[2].partition("?")[0]
    outside = await asyncpg.connect(server.url)
    await outside.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    await outside.close()
    database = await Database(url, Settings(), size=1).open()
    assert await database.pool.fetchval("SHOW transaction_isolation") == "read committed"
    await database.close()


# ---------------------------------------------------------------- a server that stops


@pytest.fixture
def spare() -> Iterator[embedded.Joined]:
    """A separate server for this test, which may stop it."""
    base = Path(tempfile.mkdtemp(prefix="interlock-spare-"))
    server = embedded.start(base)
    yield server
    server.leave()
    server.leave()  # leaving twice has no further effect
    shutil.rmtree(base, ignore_errors=True)


async def test_a_crashed_server_is_unavailable_after_patience_and_has_its_data_when_it_is_back(
    spare: embedded.Joined,
) -> None:
    async def answer(tx: Tx) -> int:
        found: int = await tx.connection.fetchval("SELECT n FROM kept")
        return found

    database = await Database(spare.url, Settings(), size=2).open()
    await database.pool.execute("CREATE TABLE kept AS SELECT 42 AS n")
    assert await database.run_in_transaction(answer) == 42

    await asyncio.to_thread(spare.server.control, "-m", "immediate", "stop")
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        await database.run_in_transaction(answer, patience=0.3)
    assert caught.value.status == 503
    assert time.monotonic() - began < 5

    # A killed initdb starts again, beside the existing data.
    spare.server.data.with_name("postgres.new").mkdir()
    waiting = asyncio.create_task(database.run_in_transaction(answer, patience=30))
    await asyncio.to_thread(embedded._ensure_running, spare.server.data)
    assert await asyncio.wait_for(waiting, 30) == 42
    await database.close()


# ---------------------------------------------------------------- notifications


@pytest.fixture
async def heard(database: Database) -> AsyncIterator["asyncio.Queue[str]"]:
    queue: asyncio.Queue[str] = asyncio.Queue()
    listener = Listener(database, {"news": queue.put_nowait})
    await listener.start()
    yield queue
    await listener.stop()


async def hear(queue: "asyncio.Queue[str]") -> str:
    return await asyncio.wait_for(queue.get(), 10)


async def test_a_listener_comes_back_by_itself_and_says_that_something_may_be_missed(
    database: Database, heard: "asyncio.Queue[str]"
) -> None:
    assert await hear(heard) == ""
    await database.pool.execute("SELECT pg_notify('interlock.news', 'one')")
    assert await hear(heard) == "one"

    killed = await database.pool.fetch("""
        SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE datname = current_database() AND query LIKE 'LISTEN %'""")
    assert len(killed) == 1
    assert await hear(heard) == ""
    await database.pool.execute("SELECT pg_notify('interlock.news', 'two')")
    assert await hear(heard) == "two"


LISTENING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN %'"


async def test_all_listeners_of_a_process_share_one_connection(database: Database, heard: "asyncio.Queue[str]") -> None:
    assert await hear(heard) == ""
    also: asyncio.Queue[str] = asyncio.Queue()
    second = Listener(database, {"more": also.put_nowait, "news": also.put_nowait})
    await second.start()
    assert [await hear(also), await hear(also)] == ["", ""]
    assert await database.pool.fetchval(LISTENING) == 1
    await database.pool.execute("SELECT pg_notify('interlock.more', 'a'), pg_notify('interlock.news', 'b')")
    assert [await hear(also), await hear(also), await hear(heard)] == ["a", "b", "b"]
    await second.stop()
    await database.pool.execute("SELECT pg_notify('interlock.news', 'c')")
    assert (await hear(heard), also.empty(), second.listening.is_set()) == ("c", True, False)


async def test_connections_are_no_more_than_allowed_and_the_last_used_comes_first(url: str) -> None:
    database = await Database(url, Settings(), size=2).open()
    async with database.connection() as one, database.connection() as two:
        third = asyncio.create_task(database.pool.fetchval("SELECT 1"))
        await asyncio.sleep(0)
        assert one is not two and not third.done()
    assert await third == 1
    async with database.connection() as again:
        assert again in (one, two)
    async with database.connection() as once_more:
        assert once_more is again
    await database.close()
    assert one.is_closed() and two.is_closed()


async def test_after_a_break_all_listeners_are_told_and_hear_again(
    database: Database, heard: "asyncio.Queue[str]"
) -> None:
    also: asyncio.Queue[str] = asyncio.Queue()
    second = Listener(database, {"more": also.put_nowait})
    await second.start()
    assert [await hear(heard), await hear(also)] == ["", ""]
    for _ in range(2):
        await database.pool.fetch(LISTENING.replace("count(*)", "pg_terminate_backend(pid, 5000)"))
        assert [await hear(heard), await hear(also)] == ["", ""]
        await database.pool.execute("SELECT pg_notify('interlock.news', 'a'), pg_notify('interlock.more', 'b')")
        assert [await hear(heard), await hear(also)] == ["a", "b"]
    assert await database.pool.fetchval(LISTENING) == 1
    await second.stop()


async def test_a_listener_comes_back_though_the_server_refused_it_for_a_while(
    database: Database, server: embedded.Joined, heard: "asyncio.Queue[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await hear(heard) == ""
    refused = asyncio.Event()

    def said(word: str, **_: object) -> None:
        if word == "listener_lost":
            refused.set()

    monkeypatch.setattr(notify.log, "warning", said)
    name = await database.pool.fetchval("SELECT current_database()")
    outside = await asyncpg.connect(server.url)
    await outside.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    await database.pool.fetch(LISTENING.replace("count(*)", "pg_terminate_backend(pid, 5000)"))
    await asyncio.wait_for(refused.wait(), 10)
    await outside.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    await outside.close()
    assert await hear(heard) == ""
    await database.pool.execute("SELECT pg_notify('interlock.news', 'one')")
    assert await hear(heard) == "one"


async def test_a_listener_uses_its_connection_now_and_then_and_leaves_one_that_does_not_answer(
    database: Database, heard: "asyncio.Queue[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await hear(heard) == ""
    used = 0

    async def half_open(*_: object, **__: object) -> None:
        nonlocal used
        used += 1
        raise TimeoutError

    async def at_once(event: asyncio.Event, _: float) -> None:
        await (event.wait() if used else asyncio.sleep(0))

    monkeypatch.setattr(notify, "wait_for_event", at_once)
    monkeypatch.setattr(asyncpg.Connection, "execute", half_open)
    # A waiting listener keeps its interval: a new listener makes it restart its wait.
    second = Listener(database, {"more": lambda _: None})
    await second.start()
    assert (await hear(heard), used) == ("", 1)
    monkeypatch.undo()
    assert await database.pool.fetchval(LISTENING) == 1
    await second.stop()


async def test_the_last_listener_takes_the_connection_with_it(database: Database) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    listener = Listener(database, {"news": heard.put_nowait})
    for _ in range(2):
        await listener.start()
        assert await hear(heard) == ""
        [pid] = [row["pid"] for row in await database.pool.fetch(LISTENING.replace("count(*)", "pid"))]
        ear = notify._ears[database]
        await listener.stop()
        await listener.stop()  # stopping twice has no further effect
        assert database not in notify._ears and ear._task is not None and ear._task.done()
        # The server notices a lost client late, so the test asks it to terminate the session and waits.
        await database.pool.execute("SELECT pg_terminate_backend($1, 5000)", pid)


async def test_who_stops_while_it_is_begun_hears_nothing_more(
    database: Database, heard: "asyncio.Queue[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await hear(heard) == ""
    add, begun, go_on = asyncpg.Connection.add_listener, asyncio.Event(), asyncio.Event()

    async def slowly(*args: Any) -> None:
        begun.set()
        await go_on.wait()
        await add(*args)

    monkeypatch.setattr(asyncpg.Connection, "add_listener", slowly)
    also: asyncio.Queue[str] = asyncio.Queue()
    second, third = Listener(database, {"more": also.put_nowait}), Listener(database, {"news": also.put_nowait})
    await second.start()
    await begun.wait()
    await second.stop()
    await third.start()
    go_on.set()
    await asyncio.wait_for(third.listening.wait(), 10)
    assert (await hear(also), also.empty(), second.listening.is_set()) == ("", True, False)
    await third.stop()


async def pid_of(connection: Any) -> int:
    pid: int = await connection.fetchval("SELECT pg_backend_pid()")
    return pid


async def killed(connection: Any, url: str) -> None:
    """The server ends the session, and our side has noticed."""
    noticed = asyncio.Event()
    connection.add_termination_listener(lambda _: noticed.set())
    outside = await asyncpg.connect(url)
    await outside.execute("SELECT pg_terminate_backend($1, 5000)", await pid_of(connection))
    await outside.close()
    await asyncio.wait_for(noticed.wait(), 10)


async def test_a_connection_that_broke_gives_its_place_to_a_new_one_and_is_forgotten(url: str) -> None:
    database = await Database(url, Settings(), size=1).open()
    async with database.connection() as idle:
        pass
    await killed(idle, url)
    async with database.connection() as used:  # without a single retry
        assert await used.fetchval("SELECT 1") == 1
        await killed(used, url)
    async with asyncio.timeout(10), database.connection() as third:
        assert await third.fetchval("SELECT 1") == 1
    assert database.pool._all == {third}
    await database.close()


async def test_who_fails_gives_the_connection_back(url: str) -> None:
    database = await Database(url, Settings(), size=1).open()
    for error in (Conflict, asyncio.CancelledError):
        with pytest.raises(error):
            async with database.connection() as first:
                raise error("no")
        async with asyncio.timeout(10), database.connection() as second:
            assert second is first
    await database.close()


@pytest.mark.parametrize("where", ["in the queue", "connecting"])
async def test_who_is_cancelled_before_there_is_a_connection_keeps_no_place(
    url: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    database = Database(url, Settings(), size=1)
    pool = database._pool = ConnectionPool(connection_options(database), 1)
    connecting = asyncio.Event()

    async def for_ever(**_: object) -> None:
        connecting.set()
        await asyncio.Event().wait()

    if where == "connecting":
        monkeypatch.setattr(asyncpg, "connect", for_ever)
        waiting = asyncio.create_task(pool.take())
        await connecting.wait()
    else:
        first = await pool.take()
        waiting = asyncio.create_task(pool.take())
        await asyncio.sleep(0)
        pool.give_back(first)  # the connection is already assigned when the waiter is cancelled
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    monkeypatch.undo()
    async with asyncio.timeout(10):
        assert await pool.fetchval("SELECT 1") == 1
    await database.close()


async def test_a_connection_that_cannot_be_made_keeps_no_place() -> None:
    pool = ConnectionPool({"dsn": "postgresql://nobody@127.0.0.1:1/none"}, 1)
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            async with asyncio.timeout(10):
                await pool.take()


async def test_a_closed_pool_leaves_no_session_behind(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database = await Database(url, Settings(), size=2).open()
    pool, connect = database.pool, asyncpg.connect
    made, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(**options: Any) -> Any:
        connection = await connect(**options)
        made.set()
        await go_on.wait()
        return connection

    used = await pool.take()
    waiting = asyncio.create_task(used.fetchval("SELECT pg_sleep(30)"))
    monkeypatch.setattr(asyncpg, "connect", slowly)
    late = asyncio.create_task(pool.take())
    await made.wait()
    monkeypatch.undo()
    third = asyncio.create_task(pool.take())
    await asyncio.sleep(0)
    await database.close()
    ended, _ = await asyncio.wait([waiting], timeout=10)  # the call in progress ends at once
    assert ended and isinstance(waiting.exception(), TRANSIENT)
    pool.give_back(used)
    with pytest.raises(Unavailable, match="closed"):
        await asyncio.wait_for(third, 10)
    go_on.set()
    connection = await late
    pool.give_back(connection)
    assert connection.is_closed() and not pool._idle and not pool._all
    with pytest.raises(Unavailable, match="closed"):
        await pool.take()


async def test_behind_a_pooler_nobody_listens(url: str) -> None:
    database = Database(f"{url}&pgbouncer=true", Settings())
    listener = Listener(database, {"news": lambda _: None})
    await listener.start()
    assert database not in notify._ears
    await listener.stop()


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:secret@db/app", "postgresql://ann:***@db/app"),
        ("postgresql://ann:secret@db:5432/app?sslmode=require", "postgresql://ann:***@db:5432/app?sslmode=require"),
        ("postgresql://ann:secret@one:5432,two:5433/app", "postgresql://ann:***@one:5432,two:5433/app"),
        ("postgresql://ann:p%40ss:word@db/app", "postgresql://ann:***@db/app"),
        ("postgresql://secret:secret@db/app", "postgresql://secret:***@db/app"),
        ("postgresql://db/app?user=ann&password=secret", "postgresql://db/app?user=ann&password=***"),
        ("postgresql:///app?password=secret&host=/tmp", "postgresql:///app?password=***&host=/tmp"),
        ("postgresql://ann@db/app", "postgresql://ann@db/app"),
        ("postgresql://ann@/app?host=/tmp", "postgresql://ann@/app?host=/tmp"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown
    assert repr(Database(url, Settings())) == f"Database({shown})"


def test_behind_a_pooler_nothing_stays_in_a_session() -> None:
    options = connection_options(Database("postgresql://ann@db/app?sslmode=require&pgbouncer=true", Settings()))
    assert options["statement_cache_size"] == 0
    assert options["dsn"] == "postgresql://ann@db/app?sslmode=require"
    assert "server_settings" not in options


@pytest.mark.parametrize("url", ["postgresql://db/app?pgbouncer=true", "postgresql:///app?host=/tmp&pgbouncer=true"])
def test_the_mark_of_a_pooler_is_not_handed_to_the_server(url: str) -> None:
    assert behind_pooler(url)
    dsn = connection_options(Database(url, Settings()))["dsn"]
    assert dsn == url.replace("?pgbouncer=true", "").replace("&pgbouncer=true", "")


def test_without_a_pooler_sessions_have_limits() -> None:
    settings = Settings(statement_timeout_seconds=7, lock_timeout_seconds=3)
    options = connection_options(Database("postgresql://db/app", settings))
    assert options["server_settings"]["statement_timeout"] == "7000"
    assert options["server_settings"]["lock_timeout"] == "3000"
    assert options["command_timeout"] > 7
    assert "statement_cache_size" not in options


@pytest.mark.parametrize("lease", [4, 30])
async def test_a_session_that_stops_in_a_transaction_loses_its_locks_within_half_a_lease(url: str, lease: int) -> None:
    """reliability V5: the limit was 60 s, twice a lease; behind a pooler there was no limit."""
    for address in (url, f"{url}&pgbouncer=true"):
        database = await Database(address, Settings(lease_seconds=lease), size=1).open()
        async with database.transaction() as tx:
            for name in ("idle_in_transaction_session_timeout", "lock_timeout"):
                limit = await tx.connection.fetchval(
                    "SELECT extract(epoch FROM current_setting($1)::interval)::float8", name
                )
                assert 0 < limit <= lease / 2, name
        await database.close()


async def test_a_server_whose_disk_is_full_is_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """reliability V7: workers ended with XX000 while they connected."""
    real, refusals = asyncpg.connect, 0

    async def without_room(*args: Any, **options: Any) -> Any:
        nonlocal refusals
        refusals += 1
        match refusals:
            case 1:
                raise asyncpg.InternalServerError("could not write init file: No space left on device")
            case 2:
                raise asyncpg.PostgresIOError('could not write to file "pg_internal.init"')
            case 3:
                raise asyncpg.DiskFullError("could not extend file")
        return await real(*args, **options)

    monkeypatch.setattr(asyncpg, "connect", without_room)
    monkeypatch.setattr(pool, "backoff", lambda error, tries: 0.0)
    database = await Database(url, Settings(), size=1).open()
    assert refusals == 4
    await database.close()


async def test_the_same_error_of_a_statement_is_a_defect(database: Database) -> None:
    with pytest.raises(asyncpg.InternalServerError):
        await database.run_in_transaction(
            lambda tx: tx.connection.execute("DO $$ BEGIN RAISE SQLSTATE 'XX000'; END $$")
        )


def test_sessions_come_back_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """reliability section 4: hundreds of sessions tried every 20 ms to connect to a recovering server."""
    waits = [pool.backoff(ConnectionRefusedError(), tries) for tries in range(20)]
    assert min(waits) >= 0.05 and max(waits) <= 1.5
    assert len({pool.backoff(ConnectionRefusedError(), 3) for _ in range(20)}) > 10
    assert pool.backoff(RetryTransaction(), 0) < 0.04


async def test_the_limits_are_what_the_server_enforces(url: str) -> None:
    database = await Database(url, Settings(statement_timeout_seconds=0.2), size=1).open()
    with pytest.raises(asyncpg.QueryCanceledError):
        await database.pool.fetch("SELECT pg_sleep(30)")
    await database.close()


async def test_the_engine_works_through_a_pooled_address(url: str) -> None:
    database = await Database(f"{url}&pgbouncer=true", Settings(), size=2).open()
    assert await database.value("any_key") is False
    assert await database.value("any_key") is False
    async with database.pool.acquire() as connection:
        assert await connection.fetchval("SELECT count(*) FROM pg_prepared_statements") <= 1
    await database.close()
