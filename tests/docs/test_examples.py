"""The examples: each README's commands are typed, in order, against a real server, and do what the README says."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from interlock import Client
from interlock.testing import Scratch
from tests.docs.reader import ROOT, Reader, commands, serving
from tests.fixed_time import machine_time as _fixed_time  # noqa: F401

# Examples whose commands are typed against one server, which has the tools of all of them.
SERVED = {
    "agents": "desk.py", "approvals": "access.py", "flows": "archive.py", "jobs": "picture.py", "operating": None,
    "policies": "shop.py", "refund": "tools.py", "tools": "bank.py", "triggers": "deploy.py", "workflows": "order.py",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a checkout, as far as the examples need it."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


@pytest.fixture(scope="module")
def environment(interlock_scratch: Scratch, folder: Path) -> dict[str, str]:
    tools = ",".join(f"examples/{name}/{file}" for name, file in SERVED.items() if file)
    return os.environ | {
        "INTERLOCK_DATABASE_URL": f"{interlock_scratch.url_of('examples')}",
        "INTERLOCK_DATA_DIR": str(folder / "data"), "INTERLOCK_TOOLS": tools, "INTERLOCK_PORT": "0",
        "INTERLOCK_WEBHOOK_ALLOW_PRIVATE": "true",
    }  # fmt: skip


@pytest.fixture(scope="module")
def _database(interlock_scratch: Scratch) -> None:
    asyncio.run(interlock_scratch.administer("CREATE DATABASE examples"))


@pytest.fixture(scope="module")
def address(_database: None, folder: Path, environment: dict[str, str]) -> Iterator[str]:
    with serving(folder, environment, "--workers", "2") as address:
        yield address


def said(address: str) -> dict[str, str]:
    """Return this server's address and a free port in place of those that the documents name."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return {"http://127.0.0.1:8420": address, "9009": str(port)}


@pytest.fixture
def reader(address: str, folder: Path, environment: dict[str, str]) -> Iterator[Reader]:
    reader = Reader(folder, environment | {"INTERLOCK_URL": address}, said(address))
    yield reader
    reader.close()


@pytest.fixture
def client(address: str, folder: Path) -> Iterator[Client]:
    with Client(address, (folder / "data" / "admin.key").read_text()) as client:
        yield client


def of(example: str) -> list[str]:
    """Return an example's commands after the one that starts the server."""
    server, *others = commands(ROOT / "examples" / example / "README.md")
    assert server.endswith(("interlock up", "interlock up --workers 2")), server
    if (file := SERVED[example]) is not None:
        assert f"INTERLOCK_TOOLS=examples/{example}/{file} " in server
    return others


def play(reader: Reader, example: str, client: Client) -> list[str]:
    printed = []
    for command in of(example):
        # The agent's refund waits for a person; the command says so with its exit code.
        printed.append(reader.types(command, exits_with=4 if " chat " in command else 0))
        settle(client)
    return printed


def settle(client: Client) -> None:
    """Wait, as a reader does between two commands, until no run moves."""
    for run in client.runs(limit=20).items:
        while client.run(run.id).status in ("pending", "running", "canceling"):
            client.run(run.id, wait=0.2)


def newest(client: Client, workflow: str) -> Any:
    return client.run(client.runs(workflow=workflow, limit=1).items[0].id)


def test_every_example_is_listed_and_played() -> None:
    here = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and not path.name.startswith("_")}
    listed = (ROOT / "examples" / "README.md").read_text()
    assert {name for name in here if f"[{name}]({name}/" not in listed} == set()
    # `own_loop` needs OpenAI; tests/agents/test_tool_calls runs it with a pretended one.
    assert here == {*SERVED, "testing", "own_loop"}


def test_refund(reader: Reader, client: Client) -> None:
    play(reader, "refund", client)
    run = newest(client, "refund")
    assert (run.status, run.steps[-1].output) == ("succeeded", {"to": "Ben Osei"})


def test_workflows(reader: Reader, client: Client) -> None:
    play(reader, "workflows", client)
    canceled, done = client.runs(workflow="order").items
    assert (done.status, canceled.status) == ("succeeded", "canceled")
    undone = [(step.undoes, step.status) for step in client.run(canceled.id).compensation]
    assert undone == [("charge", "succeeded"), ("reserve", "succeeded")]


def test_flows(reader: Reader, client: Client) -> None:
    play(reader, "flows", client)
    run = newest(client, "archive")
    assert (run.status, run.result) == ("succeeded", {"deleted": 2})


def test_tools(reader: Reader, client: Client, folder: Path) -> None:
    play(reader, "tools", client)
    run = newest(client, "transfer")
    assert (run.status, run.result["account"]) == ("succeeded", "DE42")
    client.start("transfer", {"account": "DE42", "amount": 50}, wait=20)
    assert len((folder / "ledger.jsonl").read_text().splitlines()) == 1


def test_triggers(reader: Reader, client: Client) -> None:
    printed = play(reader, "triggers", client)
    assert "4f1d2a90c3" in printed[3] and "202" in printed[4]
    assert reader.types(of("triggers")[4]) == printed[4]
    sources = [run.trigger.source for run in client.runs(workflow="deploy").items]
    assert sorted(sources) == ["schedule", "webhook"]


def test_approvals(reader: Reader, client: Client) -> None:
    printed = play(reader, "approvals", client)
    assert "requested, 1 more needed" in printed[3] and "approved, 0 more needed" in printed[5]
    run = newest(client, "access")
    assert run.status == "succeeded"
    assert [receipt.status for receipt in client.receipts(run.id).items] == ["succeeded"]


def test_agents(reader: Reader, client: Client) -> None:
    printed = play(reader, "agents", client)
    assert "interlock approval approve" in printed[1]
    [message] = [run for run in client.runs().items if run.session_id]
    assert (message.status, message.result["text"]) == ("succeeded", "Done. The money is on its way.")


def test_jobs(reader: Reader, client: Client) -> None:
    play(reader, "jobs", client)
    [job] = client.jobs().items
    assert (job.status, job.progress.done) == ("completed", 4)


def test_operating(reader: Reader, client: Client) -> None:
    printed = play(reader, "operating", client)
    assert "delivered" in printed[3]


def test_policies(folder: Path, environment: dict[str, str], address: str, client: Client) -> None:
    """As another tenant: the policy would judge the tools of the other examples too."""
    key = client.create_tenant("till").key
    reader = Reader(folder, environment | {"INTERLOCK_URL": address, "INTERLOCK_API_KEY": key}, said(address))
    offline, server, *online = commands(ROOT / "examples" / "policies" / "README.md")
    assert server == "INTERLOCK_TOOLS=examples/policies/shop.py interlock up"
    reader.types(offline)
    printed = [reader.types(command) for command in online]
    assert "needs_approval" in printed[2]
    with Client(address, key) as till:
        assert till.start("till-refund", {"charge": "ch_1", "amount": 250}, wait=20).status != "succeeded"


def test_testing(folder: Path) -> None:
    *_, tests = commands(ROOT / "examples" / "testing" / "README.md")
    assert tests == "python -m pytest examples/testing"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "examples/testing"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "2 passed" in ran.stdout, ran.stdout + ran.stderr
