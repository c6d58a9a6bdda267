"""A pydantic-ai agent with its own loop: our gate holds, executes once, or denies its calls."""

from typing import Any

import httpx2
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from interlock.client import AsyncClient
from interlock.client.pydantic_ai import interlock_tools
from interlock.wire import ToolCall
from tests.agents.conftest import Talk


def calling(tool: str, **args: Any) -> FunctionModel:
    """A model that calls the tool once and then repeats the tool's result."""

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        returned = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
        if returned:
            return ModelResponse(parts=[TextPart(returned[-1].model_response_str())])
        return ModelResponse(parts=[ToolCallPart(tool, args, "call-1")])

    return FunctionModel(answer)


async def test_its_writes_wait_for_people_and_are_done_once(talk: Talk) -> None:
    key = await talk.rig.key("bot", "agent")
    transport = httpx2.ASGITransport(app=talk.rig.app, raise_app_exceptions=False)

    async def approve(act: ToolCall) -> None:
        assert talk.refunds == []
        await talk.post(f"/api/approvals/{act.approval_id}/approve")

    asked: list[str] = []
    handle = transport.handle_async_request

    async def counted(request: httpx2.Request) -> httpx2.Response:
        asked.append(f"{request.method} {request.url.path}")
        return await handle(request)

    transport.handle_async_request = counted  # type: ignore[method-assign]
    async with AsyncClient("http://test", key, transport=transport) as client, talk.rig.worker():
        tools = await interlock_tools(client, "shop.*", on_pending=approve)
        agent = Agent(calling("shop__refund", charge="ch_1", amount=5), toolsets=[tools])
        done = await agent.run("go", run_id="the-run")
        again = await agent.run("go", run_id="the-run")
        denied = await Agent(calling("shop__purge"), toolsets=[tools]).run("go")
    assert done.output == again.output and '"refunded":"ch_1"' in done.output
    assert talk.refunds == ["ch_1"]
    assert "forbidden by purge" in denied.output
    # One request for the tools, three for calls, and one that waits for approval and result: the client does not poll.
    assert len(asked) == 5, asked
