"""What a bad answer of an MCP server means for its own call and for other calls. agents 2, 6, 7, 8 and 12."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interlock.errors import Retryable, Terminal
from interlock.tools.mcp import Connection, OnError, read_servers, tool_of, write_servers
from tests.agents.conftest import Talk
from tests.agents.servers import GATE, tools_of
from tests.agents.test_mcp import act, over_http  # noqa: F401
from tests.cli.stub import run as run_command

ALLOW = '@id("all") permit(principal, action in Action::"gate", resource);'


@pytest.fixture
async def gated() -> AsyncIterator[Connection]:
    connection = Connection(replace(GATE, tools=await tools_of(GATE)))
    yield connection
    await connection.close()


@pytest.fixture
def gate(tmp_path: Path) -> str:
    """A pipe: a reader waits until the test has opened it for writing and closed it again."""
    os.mkfifo(tmp_path / "gate")
    return str(tmp_path / "gate")


async def _receipt(talk: Talk, call: Any) -> Any:
    [receipt] = (await talk.get(f"/api/runs/{call['id']}/receipts"))["items"]
    return receipt


async def test_an_answer_that_does_not_fit_its_schema_leaves_the_calls_of_others_alone(
    gated: Connection, gate: str
) -> None:
    """agents 2: one client-side validation error closed the connection, and every write on it was in doubt."""
    other = asyncio.create_task(gated.call("wait", {"gate": gate}))
    with await asyncio.to_thread(open, gate, "w") as inside:
        for _ in range(2):
            with pytest.raises(Exception, match="answered, but not as it declares"):
                await gated.call("misfit", {})
        inside.write("done")
    assert await other == {"result": "done"}


async def test_a_server_that_is_too_busy_to_list_its_tools_keeps_the_call_that_it_is_busy_with(
    gated: Connection, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next caller gets a separate connection, and the first call gets its answer."""
    other = asyncio.create_task(gated.call("wait", {"gate": gate}))
    with await asyncio.to_thread(open, gate, "w") as inside:
        client = await gated.client()

        async def never(**_: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(client, "list_tools", never)
        patient, gated.server = gated.server, replace(gated.server, connect_seconds=0.01)
        with pytest.raises(Retryable, match=r"did not answer within 0\.01 seconds"):
            await gated.call("fail", {"why": "x"})
        gated.server = patient
        with pytest.raises(Exception, match="half done"):
            await gated.call("fail", {"why": "half done"})
        inside.write("done")
    assert await other == {"result": "done"}


@pytest.mark.parametrize("on_error", list(OnError))
@pytest.mark.parametrize(
    ("tool", "args", "says"),
    [
        ("fail", {"why": "half done"}, "half done"),
        ("misfit", {}, "'rows' is a required property"),
        ("refuse", {"code": -32603}, "not like this"),
    ],
)
async def test_a_server_declares_what_its_errors_mean_for_a_write_and_the_person_reads_the_error(
    talk: Talk, gated: Connection, tool: str, args: Any, says: str, on_error: OnError
) -> None:
    """agents 7 and 8: `isError` was `failed`, a misfit was in doubt, and the real error stood nowhere."""
    gated.server = replace(gated.server, on_error=on_error)
    talk.rig.tools.put(tool_of(gated, tool))
    await talk.http.put("/api/policy", content=ALLOW)
    async with talk.rig.worker():
        call = await act(talk, f"gate.{tool}", **args)
    receipt = await _receipt(talk, call)
    assert (receipt["status"], says in receipt["error"]) == (str(on_error), True)
    if on_error == OnError.FAILED:
        assert call["status"] == "failed" and says in call["error"]["message"]
        return
    approval = await talk.get(f"/api/approvals/{call['approval_id']}")
    assert (approval["kind"], says in approval["rationale"]["reason"]) == ("in_doubt", True)
    events = (await talk.get(f"/api/runs/{call['id']}/events"))["items"]
    assert says in json.dumps([event["data"].get("error") for event in events])
    run = await talk.get(f"/api/runs/{call['id']}")
    assert says in run["steps"][0]["last_error"]["message"]


@pytest.mark.parametrize("hints", [{"read_only_hint": True}, {"destructive_hint": False, "idempotent_hint": True}])
async def test_an_error_of_a_read_or_of_an_idempotent_write_is_a_plain_failure(gated: Connection, hints: Any) -> None:
    about = gated.server.tools["fail"] | {"hints": hints}
    gated.server = replace(gated.server, trusted=True, tools={**gated.server.tools, "fail": about})
    with pytest.raises(Terminal, match="half done"):
        await tool_of(gated, "fail").function(None, why="half done")


async def test_a_server_that_is_slow_to_start_was_not_called_and_the_call_has_its_whole_time(
    talk: Talk, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """agents 6: with a time-out of 3 seconds and a server that takes 6 to start, the write was in doubt after 3."""
    tools = await tools_of(GATE)
    monkeypatch.setenv("GATE_STARTS_AT", gate)
    connection = Connection(replace(GATE, tools=tools, timeout_seconds=20, connect_seconds=0.05))
    talk.rig.tools.put(tool_of(connection, "fail"))
    await talk.http.put("/api/policy", content=ALLOW)
    await talk.rig.apply("{name: slow, steps: [{id: a, tool: gate.fail, input: {why: x}, retry: {max_attempts: 1}}]}")
    run = await talk.ended(str(await talk.rig.start("slow")))
    receipt = await _receipt(talk, run)
    assert (run["reason"], receipt["status"]) == ("attempts_exhausted", "failed")
    assert "did not answer within 0.05 seconds" in receipt["error"]
    await connection.close()


async def test_the_time_of_a_call_starts_when_it_is_sent(
    talk: Talk, gated: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, timeouts = gated.ready, []

    async def slowly(*args: Any) -> Any:
        timeouts.append(asyncio.current_task())
        await asyncio.sleep(0.3)  # longer than the call's time-out
        return await ready(*args)

    monkeypatch.setattr(gated, "ready", slowly)
    about = replace(gated.server, timeout_seconds=0.25, on_error=OnError.FAILED)
    gated.server = about
    tool = tool_of(gated, "fail")
    await gated.client()
    talk.rig.tools.put(tool)
    await talk.http.put("/api/policy", content=ALLOW)
    async with talk.rig.worker():
        call = await act(talk, "gate.fail", why="the answer")
    assert timeouts and "the answer" in call["error"]["message"]


async def test_a_call_that_is_canceled_while_its_server_starts_was_not_made(
    talk: Talk, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = await tools_of(GATE)
    monkeypatch.setenv("GATE_STARTS_AT", gate)
    connection = Connection(replace(GATE, tools=tools))
    started, opened = asyncio.Event(), connection._open

    def opening() -> Any:
        started.set()
        return opened()

    monkeypatch.setattr(connection, "_open", opening)
    talk.rig.tools.put(tool_of(connection, "fail"))
    await talk.http.put("/api/policy", content=ALLOW)
    async with talk.rig.worker():
        asked = asyncio.create_task(act(talk, "gate.fail", why="x"))
        await started.wait()
        [run] = (await talk.get("/api/runs"))["items"]
        await talk.post(f"/api/runs/{run['id']}/cancel")
        await asked
    receipt = await _receipt(talk, run)
    assert receipt["status"] == "failed"
    await connection.close()


def test_what_is_declared_of_a_server_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_DATA_DIR", str(tmp_path))
    options = ("--on-error", "failed", "--connect-timeout", "7")
    added = run_command("tools", "add-mcp", "gate", *options, "--env", "PATH", "--", *GATE.command)
    assert added.exit_code == 0, added.stderr
    [server] = read_servers(tmp_path / "mcp.json").values()
    assert (server.on_error, server.connect_seconds) == (OnError.FAILED, 7)
    assert run_command("tools", "add-mcp", "gate", "--on-error", "perhaps", "--", "true").exit_code == 2
    write_servers(tmp_path / "mcp.json", {"gate": server})
    assert read_servers(tmp_path / "mcp.json") == {"gate": server}


async def test_a_token_that_is_refused_is_named(
    over_http: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """agents 12: the error read "Server returned an error response"."""
    monkeypatch.setenv("INTERLOCK_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("MY_TOKEN", "wrong")
    add = ("tools", "add-mcp", "clock", "--url", over_http)
    bare = await asyncio.to_thread(run_command, *add)
    assert "answered 401 Unauthorized; name the variable with its token in --token-env" in bare.stderr
    wrong = await asyncio.to_thread(run_command, *add, "--token-env", "MY_TOKEN")
    assert "answered 401 Unauthorized; check the token in MY_TOKEN" in wrong.stderr
