"""The quick start: its files and commands, as written, lead to a run that a person approves."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from interlock import Client
from interlock.testing import Scratch
from tests.docs.reader import ROOT, Reader, blocks, commands, serving
from tests.fixed_time import machine_time as _fixed_time  # noqa: F401

PAGE = ROOT / "docs" / "quickstart.md"
SERVER, APPLY, START, CREATE_KEY, SHOW, CAT, *REQUESTS = commands(PAGE)[3:]


@dataclass
class Project:
    """The directory of a reader who has followed the page so far."""

    folder: Path
    environment: dict[str, str]

    def reader(self, **said: str) -> Reader:
        return Reader(self.folder, self.environment, said)


@pytest.fixture(scope="module")
def project(interlock_scratch: Scratch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop.py").write_text(blocks(PAGE, "python")[0])
    (folder / "refund.yaml").write_text(blocks(PAGE, "yaml")[0])
    url = asyncio.run(interlock_scratch.fresh())
    yield Project(folder, os.environ | {
        "INTERLOCK_DATABASE_URL": url, "INTERLOCK_TOOLS": "shop.py", "INTERLOCK_PORT": "0",
        "INTERLOCK_DATA_DIR": str(folder / ".interlock"),
    })  # fmt: skip
    asyncio.run(interlock_scratch.drop(url))


def test_it_leads_to_an_approved_run(project: Project) -> None:
    reader = project.reader()
    assert SERVER == "INTERLOCK_TOOLS=shop.py interlock up"
    with serving(project.folder, project.environment) as address:
        reader.types(APPLY)
        assert "waiting_approval" in reader.types(START)
        reader.types(CREATE_KEY)
        approve_as(address, reader.known["KEY"], reader.known["RUN"])
        assert "succeeded" in reader.types(SHOW)
        assert reader.types(CAT) == "ch_1043 89\n"
        reader.types(START)
    # A run that waits survives the end of its server.
    with serving(project.folder, project.environment) as address:
        approve_as(address, reader.known["KEY"], reader.known["RUN"])
    assert (project.folder / "refunds.txt").read_text() == "ch_1043 89\n" * 2


def test_the_requests_and_the_script_do_the_same(project: Project) -> None:
    with serving(project.folder, project.environment) as address:
        reader = project.reader(**{"http://127.0.0.1:8420": address, "THE_KEY_OF_ANN": "KEY"})
        reader.types(CREATE_KEY)
        url, admin, *requests = REQUESTS
        apply, start, approve, events = [f"{url}; {admin}; {request}" for request in requests]
        reader.types(apply)
        first, second = reader.types(start), reader.types(start)
        assert '"status":"waiting_approval"' in first and first == second
        reader.types(approve)
        assert "event: end" in reader.types(events)
        with script(project, address) as lines:
            run_id, status = next(lines).split()
            assert status == "waiting_approval"
            approve_as(address, reader.known["KEY"], run_id)
            assert any("run_completed" in line for line in lines)


def script(project: Project, address: str) -> "Lines":
    key = (project.folder / ".interlock" / "admin.key").read_text()
    (project.folder / "client.py").write_text(blocks(PAGE, "python")[1].replace("…", key))
    return Lines(
        subprocess.Popen(
            [sys.executable, "client.py"], cwd=project.folder, env=project.environment | {"INTERLOCK_URL": address},
            stdout=subprocess.PIPE, text=True,
        )
    )  # fmt: skip


class Lines:
    """The lines that a process prints."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def __enter__(self) -> Iterator[str]:
        assert self._process.stdout is not None
        return iter(self._process.stdout)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def approve_as(address: str, key: str, run_id: str) -> None:
    """Decide as the console's button does, and wait until the run has ended."""
    with Client(address, key) as ann:
        ann.approve(run_id)
        assert ann.run(run_id, wait=20).status == "succeeded"
