"""`interlock db` on a real database: months of the journal, and a new epoch after a restore."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from tests.cli.stub import run

from interlock.testing import Scratch


@pytest.fixture
def own(interlock_scratch: Scratch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A database that the commands find through their settings."""
    url = asyncio.run(interlock_scratch.fresh())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INTERLOCK_DATABASE_URL", url)
    with structlog.testing.capture_logs():  # another test may have configured log output
        yield url
    asyncio.run(interlock_scratch.drop(url))


def test_db_lists_keeps_and_releases_months_of_the_journal(own: str) -> None:
    month = json.loads(run("db", "months", "--json").stdout)["items"][0]["name"]
    assert f"{month}  in the journal" in run("db", "months").stdout
    assert run("db", "keep", month).stdout == f"{month} is kept.\n"
    assert f"{month}  kept" in run("db", "months").stdout
    assert json.loads(run("db", "release", month, "--json").stdout) == {"name": month, "kept": False}
    refused = run("db", "keep", "1999-01")
    assert refused.exit_code != 0 and "The journal has no month 1999-01" in refused.stderr


def test_db_restored_asks_first_and_begins_a_new_epoch(own: str) -> None:
    refused = run("db", "restored", input="n\n")
    assert refused.exit_code != 0
    assert "The latest moment that the database knows is" in refused.stderr
    assert "Nothing was changed. To do it without a question, give --yes." in refused.stderr
    begun = run("db", "restored", "--yes")
    assert begun.stdout.startswith("Epoch 2 began. The database was restored to ")
    assert "Schedules that are paused now: none." in begun.stdout
    found = json.loads(run("db", "restored", "--yes", "--json").stdout)
    assert (found["number"], found["runs"], found["schedules"]) == (3, 0, [])
