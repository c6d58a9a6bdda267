"""Tools of an MCP server belong to the tenants that its operator names (agents 4).

Every tenant could read the operator's files through a trusted server.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from interlock.tools.mcp import Server, load_mcp, read_servers, write_servers
from interlock.tools.registry import Registry
from tests.rig import Rig

ABOUT = {
    "files_read": {
        "title": "",
        "output_schema": {},
        "description": "",
        "hints": {},
        "input_schema": {"type": "object"},
        "digest": "d",
    }
}


@pytest.fixture
async def files(rig: Rig) -> list[str]:
    """A tool of tenant `default` alone, and its effects."""
    done: list[str] = []

    @rig.tool("files.read")
    async def read() -> str:
        done.append("read")
        return "what the operator has"

    @rig.tool("shared.look")
    async def look() -> str:
        return "for all"

    rig.tools.put(replace(rig.tools.all()[0], tenants=frozenset({"default"})))
    return done


async def test_a_tool_of_one_tenant_does_not_exist_for_another(rig: Rig, files: list[str]) -> None:
    rival = await rig.tenant("rival")
    http, own = rig.http(await rig.key("spy", "admin", rival.tenant_id)), rig.http()
    assert [tool["name"] for tool in (await http.get("/api/tools")).json()["items"]] == ["shared.look"]
    assert len((await own.get("/api/tools")).json()["items"]) == 2
    yaml = {"Content-Type": "application/yaml"}
    definition = "name: w\nsteps: [{id: a, tool: files.read, retry: {max_attempts: 1}}]"
    refused = await http.post("/api/workflows", content=definition, headers=yaml)
    assert refused.status_code == 422 and "no tool is called `files.read`" in refused.text
    evaluated = await http.post("/api/policy/evaluate", json={"tool": "files.read"})
    assert evaluated.json()["code"] == "TOOL_NOT_FOUND"
    rule = '@id("f") permit (principal, action == Action::"files.read", resource);'
    assert (await http.put("/api/policy", content=rule)).status_code == 422
    assert (await own.put("/api/policy", content=rule)).status_code == 200


async def test_a_worker_does_not_call_a_tool_of_another_tenant(rig: Rig, files: list[str]) -> None:
    rival = await rig.tenant("rival")
    http = rig.http(await rig.key("spy", "admin", rival.tenant_id))
    definition = "name: w\nsteps: [{id: a, tool: files.read, retry: {max_attempts: 1}}]"
    path = "/api/workflows?allow_unknown_tools=true"
    assert (await http.post(path, content=definition, headers={"Content-Type": "application/yaml"})).status_code == 201
    async with rig.worker():
        run = (await http.post("/api/runs?wait=10", json={"workflow": "w"})).json()
        assert run["status"] == "failed" and "no tool files.read" in run["error"]["message"], run
        call = (await http.post("/api/tool-calls", json={"tool": "files.read", "args": {}, "wait": 1})).json()
        assert call["status"] != "done", call
    assert files == []


def test_a_server_is_of_tenant_default_unless_its_entry_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    servers = {
        "own": Server("own", ("true",), tools=ABOUT),
        "acme": Server("acme", ("true",), tools=ABOUT, tenants=("acme",)),
        "all": Server("all", ("true",), tools=ABOUT, tenants=()),
    }
    write_servers(path, servers)
    assert read_servers(path) == servers
    registry = Registry()
    load_mcp(path, registry)
    seen = {name: [tool.name for tool in registry.of_tenant(name).all()] for name in ("default", "acme", "other")}
    assert seen == {
        "default": ["all.files_read", "own.files_read"], "acme": ["acme.files_read", "all.files_read"],
        "other": ["all.files_read"],
    }  # fmt: skip
