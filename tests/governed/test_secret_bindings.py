"""A tool gets a secret only if the secret's admin named the tool and the workspace (security M6)."""

from typing import Any

import pytest
from tests.rig import Rig

VALUE = "sk-live-4242424242424242"
STEPS = 'steps:\n  - {id: s, tool: TOOL, input: {text: "${secrets.tok}"}, retry: {max_attempts: 1}}\n'


@pytest.fixture
async def given(rig: Rig) -> list[str]:
    """The secrets that the tools received."""
    received: list[str] = []

    @rig.tool("shop.pay", writes=True, risk="low")
    async def pay(text: str) -> None:
        received.append(text)

    @rig.tool("web.echo")
    async def echo(text: str) -> str:
        received.append(text)
        return text

    for tool in ("shop.pay", "web.echo"):
        await rig.apply(f"name: {tool}\n{STEPS.replace('TOOL', tool)}")
    return received


async def keep(rig: Rig, **about: Any) -> None:
    answer = await rig.http().put("/api/secrets/tok", json={"value": VALUE, **about})
    assert answer.status_code == 200, answer.text


async def end_of(rig: Rig, workflow: str, workspace_id: str | None = None) -> dict[str, Any]:
    key = await rig.key("olga", "operator", workspace_id=workspace_id)
    answer = await rig.http(key).post("/api/runs?wait=10", json={"workflow": workflow})
    assert answer.status_code == 201, answer.text
    run: dict[str, Any] = answer.json()
    return run


async def test_a_secret_goes_only_to_the_tools_it_names(rig: Rig, given: list[str]) -> None:
    """A workspace operator's workflow passed any secret to any tool, for example to a tool that sends it away."""
    await keep(rig, tools=["shop.*"])
    async with rig.worker():
        assert (await end_of(rig, "shop.pay"))["status"] == "succeeded"
        refused = await end_of(rig, "web.echo")
    assert refused["status"] == "failed"
    assert refused["error"]["message"].startswith("Secret tok is not for tool web.echo.")
    assert given == [VALUE]


POLICY = """
@id("rest") permit (principal, action, resource) when { context.secrets.isEmpty() };
@id("tok") @decision("needs_approval") @tier("low")
permit (principal, action, resource) when { context.secrets.contains("tok") };
"""


@pytest.mark.parametrize("tool", ["shop.pay", "web.echo"])
async def test_a_policy_sees_which_secrets_an_action_carries(rig: Rig, given: list[str], tool: str) -> None:
    """Also of a tool that only reads: with one that sends, a secret would leave without a question."""
    await keep(rig, tools=["*"])
    published = await rig.http().put("/api/policy", content=POLICY)
    assert published.status_code == 200, published.text
    await rig.apply(f"name: plain\nsteps: [{{id: s, tool: {tool}, input: {{text: '$${{secrets.tok}}'}}}}]")
    async with rig.worker():
        held = await end_of(rig, tool)
        assert (held["status"], given) == ("waiting_approval", [])
        [approval] = await rig.sql("SELECT rule_ids FROM interlock.approval")
        assert approval["rule_ids"] == ["tok"]
        assert (await end_of(rig, "plain"))["status"] == "succeeded"
    assert given == ["${secrets.tok}"], "a text that only looks like a reference carries no secret"


async def test_a_secret_for_triggers_only_goes_to_no_tool(rig: Rig, given: list[str]) -> None:
    await keep(rig, tools=[])
    async with rig.worker():
        assert (await end_of(rig, "shop.pay"))["status"] == "failed"
    assert given == []


async def test_a_secret_goes_only_to_the_workspaces_it_names(rig: Rig, given: list[str]) -> None:
    await keep(rig, tools=["*"], workspaces=["blue"])
    async with rig.worker():
        assert (await end_of(rig, "web.echo", "blue"))["status"] == "succeeded"
        for workspace_id in ("red", None):
            run = await end_of(rig, "web.echo", workspace_id)
            assert run["status"] == "failed" and "Secret tok is not for" in run["error"]["message"]
    assert given == [VALUE]


async def test_a_secret_of_the_environment_goes_to_no_workspace(
    rig: Rig, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLOCK_SECRET_TOK", VALUE)
    async with rig.worker():
        assert (await end_of(rig, "web.echo"))["status"] == "succeeded"
        assert (await end_of(rig, "web.echo", "blue"))["status"] == "failed"


async def test_setting_a_secret_names_its_tools(rig: Rig) -> None:
    http = rig.http()
    refused = await http.put("/api/secrets/tok", json={"value": VALUE})
    assert refused.status_code == 422 and "tools" in refused.json()["detail"]
    wrong = await http.put("/api/secrets/tok", json={"value": VALUE, "tools": ["no good"]})
    assert wrong.status_code == 422
    await keep(rig, tools=["shop.*"], workspaces=["blue"])
    (listed,) = (await http.get("/api/secrets")).json()["items"]
    assert (listed["tools"], listed["workspaces"]) == (["shop.*"], ["blue"])
