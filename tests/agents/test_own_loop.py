"""A pydantic-ai agent with its own loop in a flow: durable, gated and with receipts, even if processes die."""

import asyncio
from typing import Any
from uuid import UUID

import pytest
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.toolsets import FunctionToolset

from interlock.agents import pydantic_ai_durability
from interlock.agents.pydantic_ai_durability import Durability, governed, run_agent
from interlock.flows import FlowContext
from interlock.worker.worker import Worker
from tests.agents.conftest import POLICY, Talk
from tests.governed.conftest import lose

ALLOWED = (
    POLICY
    + """
@id("functions") @decision("needs_approval") @tier("low") permit(
  principal, action == Action::"agent.function", resource) when { context.input.function == "remember" };
"""
)


class Model:
    """Looks up, refunds, remembers, answers; counts its requests."""

    def __init__(self, *calls: tuple[str, dict[str, Any]]) -> None:
        self.asked = 0
        self.fails = 0
        self._calls = calls

    def __call__(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        self.asked += 1
        if self.asked <= self.fails:
            raise ConnectionError("the provider is away")
        returned = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
        if len(returned) < len(self._calls):
            name, args = self._calls[len(returned)]
            return ModelResponse(parts=[ToolCallPart(name, args, f"call-{len(returned)}")])
        return ModelResponse(parts=[TextPart(" | ".join(part.model_response_str() for part in returned))])


def support(talk: Talk, model: Model) -> list[str]:
    """The flow `support`, and the arguments of its agent's own function."""
    remembered: list[str] = []
    own: FunctionToolset[None] = FunctionToolset(id="own")

    @own.tool_plain
    async def remember(what: str) -> str:
        remembered.append(what)
        return f"remembered {what}"

    pydantic_ai_durability.operations(talk.rig.tools)
    agent = Agent(
        FunctionModel(model), name="support", toolsets=[governed("shop.*", tools=talk.rig.tools), own],
        capabilities=[Durability()],
    )  # fmt: skip

    @talk.rig.flow("support.flow")
    async def flow(ctx: FlowContext, input: dict[str, Any]) -> dict[str, Any]:
        answer = await run_agent(ctx, agent, input["message"])
        return {"answer": answer.output}

    return remembered


async def begin(talk: Talk) -> str:
    status, run = await talk.post("/api/runs", {"workflow": "support.flow", "input": {"message": "go"}})
    assert status == 201, run
    return str(run["id"])


CALLS = (
    ("shop__lookup", {"charge": "ch_1"}), ("shop__refund", {"charge": "ch_1", "amount": 5}),
    ("remember", {"what": "it"}),
)  # fmt: skip


async def test_its_calls_are_steps_held_and_done_once_and_no_model_is_asked_again(talk: Talk) -> None:
    model = Model(*CALLS)
    remembered = support(talk, model)
    assert (await talk.http.put("/api/policy", content=ALLOWED.encode())).status_code in (200, 201)
    other = Talk(talk.rig, talk.rig.http(await talk.rig.key("other", "approver")))
    run_id = await begin(talk)
    [first] = await talk.held(run_id)
    assert (first["action"]["tool"], talk.refunds, model.asked) == ("shop.refund", [], 2)
    assert (await talk.post(f"/api/approvals/{first['id']}/approve"))[1]["code"] == "SELF_APPROVAL"
    assert (await other.post(f"/api/approvals/{first['id']}/approve"))[0] == 200
    [second] = await talk.held(run_id)
    assert second["action"]["tool"] == "agent.function" and second["action"]["fields"]["args"] == {"what": "it"}
    assert (talk.refunds, remembered) == (["ch_1"], [])
    await other.post(f"/api/approvals/{second['id']}/approve")
    run = await talk.ended(run_id)
    assert (run["status"], talk.refunds, remembered, model.asked) == ("succeeded", ["ch_1"], ["it"], 4), run["error"]
    assert run["result"]["answer"].endswith("| remembered it")
    assert [step["key"] for step in run["steps"]] == [
        "support__model.request", "shop.lookup", "support__model.request#2", "shop.refund", "support__model.request#3",
        "remember", "support__model.request#4",
    ]  # fmt: skip
    receipts = (await talk.get(f"/api/runs/{run_id}/receipts"))["items"]
    assert [(receipt["step_key"], receipt["status"]) for receipt in receipts] == [
        ("shop.refund", "succeeded"), ("remember", "succeeded"),
    ]  # fmt: skip


async def test_a_refusal_is_told_to_its_model(talk: Talk) -> None:
    model = Model(CALLS[1])
    support(talk, model)
    run_id = await begin(talk)
    [question] = await talk.held(run_id)
    await talk.post(f"/api/approvals/{question['id']}/reject", {"reason": "too much"})
    run = await talk.ended(run_id)
    assert (run["status"], talk.refunds) == ("succeeded", [])
    assert "too much" in run["result"]["answer"]


async def test_its_own_functions_are_denied_where_no_rule_allows_them(talk: Talk) -> None:
    remembered = support(talk, Model(CALLS[2]))
    run = await talk.ended(await begin(talk))
    assert (run["status"], run["reason"], remembered) == ("failed", "policy_denied", [])


async def test_a_worker_that_dies_in_a_step_costs_that_step_and_no_answer(talk: Talk) -> None:
    model = Model(CALLS[0], ("shop__stick", {}), ("shop__lookup", {"charge": "ch_2"}))
    support(talk, model)
    inside, begun = asyncio.Event(), 0

    @talk.rig.tool("shop.stick")
    async def stick() -> int:
        nonlocal begun
        begun += 1
        if begun == 1:
            inside.set()
            await asyncio.Event().wait()
        return begun

    rig, run_id = talk.rig, await begin(talk)
    worker = Worker(rig.database, rig.settings, tools=rig.tools, capacity=2)
    task = asyncio.create_task(worker.run(asyncio.Event()))
    await asyncio.wait_for(inside.wait(), 20)
    await lose(rig, task)
    run = await talk.ended(run_id)
    assert (run["status"], run["result"]["answer"].split(" | ")[1]) == ("succeeded", "2"), run["error"]
    assert model.asked == 4, "each answer was asked for once"


async def test_a_model_that_is_away_is_asked_again(talk: Talk) -> None:
    model = Model(CALLS[0])
    support(talk, model)
    model.fails = 2
    run_id = await begin(talk)
    for attempt in (1, 2):
        async with talk.rig.worker():
            await talk.rig.until_journal(UUID(run_id), "support__model.request: running -retry-> pending", attempt)
        talk.rig.clock.advance(600)
        await talk.rig.sweep()
    run = await talk.ended(run_id)
    assert (run["status"], model.asked) == ("succeeded", 4), run["error"]


async def test_an_agent_without_the_capability_is_refused(talk: Talk) -> None:
    agent = Agent(FunctionModel(Model()), name="plain")

    @talk.rig.flow("plain.flow")
    async def flow(ctx: FlowContext, input: dict[str, Any]) -> Any:
        return (await run_agent(ctx, agent, "go")).output

    _, begun = await talk.post("/api/runs", {"workflow": "plain.flow", "input": {}})
    run = await talk.ended(begun["id"])
    assert run["status"] == "failed" and "capabilities=[Durability()]" in run["error"]["message"]


async def test_a_function_of_its_own_may_ask_another_durable_agent(talk: Talk) -> None:
    """The other agent runs within the function's step, so the flow does not see its operations."""
    other = Agent(TestModel(custom_output_text="yes"), name="other", capabilities=[Durability()])
    own: FunctionToolset[None] = FunctionToolset(id="own")

    @own.tool_plain
    async def remember(what: str) -> str:
        answer = await asyncio.wait_for(other.run(what), 10)
        return f"{what}? {answer.output}"

    pydantic_ai_durability.operations(talk.rig.tools)
    agent = Agent(FunctionModel(Model(CALLS[2])), name="asker", toolsets=[own], capabilities=[Durability()])

    @talk.rig.flow("asking.flow")
    async def flow(ctx: FlowContext, input: dict[str, Any]) -> Any:
        return (await run_agent(ctx, agent, "go")).output

    allowed = '@id("functions") permit(principal, action == Action::"agent.function", resource);'
    await talk.http.put("/api/policy", content=(POLICY + allowed).encode())
    _, begun = await talk.post("/api/runs", {"workflow": "asking.flow", "input": {}})
    run = await talk.ended(begun["id"])
    assert (run["status"], run["result"]) == ("succeeded", "it? yes"), run["error"]
    assert [step["key"] for step in run["steps"]] == ["asker__model.request", "remember", "asker__model.request#2"]


async def test_an_agent_that_waits_for_anything_else_is_stopped_and_told(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pydantic_ai_durability, "_THINKING_SLICES", 2)

    async def look_it_up() -> str:
        await asyncio.sleep(3600)
        return ""

    agent = Agent(FunctionModel(Model()), name="idler", instructions=look_it_up, capabilities=[Durability()])

    @talk.rig.flow("idle.flow")
    async def flow(ctx: FlowContext, input: dict[str, Any]) -> Any:
        return (await run_agent(ctx, agent, "go")).output

    _, begun = await talk.post("/api/runs", {"workflow": "idle.flow", "input": {}})
    run = await talk.ended(begun["id"])
    assert run["status"] == "failed" and "belongs in a tool" in run["error"]["message"]


async def test_nobody_else_calls_what_its_steps_call(talk: Talk) -> None:
    support(talk, Model())
    definition = """
name: anything
model: scripted
tools: ["*"]
script: [{turns: [{calls: [{tool: agent.operation, args: {agent: a, operation: o}}]}, {say: "{result}"}]}]
"""
    await talk.http.post("/api/agents", content=definition)
    run = await talk.ended((await talk.told("go", agent="anything"))["run_id"])
    assert "There is no tool agent__operation" in run["result"]["text"]
    async with talk.rig.worker():
        _, act = await talk.post(
            "/api/tool-calls", {"tool": "agent.operation", "args": {"agent": "a", "operation": "o"}}
        )
    assert act["status"] == "failed" and "only an agent that runs in a flow" in act["error"]["message"]
