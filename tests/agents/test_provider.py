"""A provider's own code, against a server that speaks like OpenAI: streaming, tool calls, errors and what it cost."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.agents.conftest import Talk


@dataclass
class Provider:
    """Answers each request with the next of its answers, chunk by chunk."""

    answers: list[Any] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    url: str = ""

    async def complete(self, request: Request) -> Response:
        self.asked.append({"authorization": request.headers.get("authorization"), **await request.json()})
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return JSONResponse({"error": {"message": "no"}}, answer)
        return StreamingResponse(self._chunks(answer), media_type="text/event-stream")

    async def _chunks(self, deltas: list[dict[str, Any]]) -> AsyncIterator[str]:
        base = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-4o-mini"}
        calls = any("tool_calls" in delta for delta in deltas)
        for delta in deltas:
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            yield f"data: {json.dumps({**base, 'choices': [choice]})}\n\n"
        done = {"index": 0, "delta": {}, "finish_reason": "tool_calls" if calls else "stop"}
        usage = {"prompt_tokens": 1000, "completion_tokens": 200, "total_tokens": 1200}
        yield f"data: {json.dumps({**base, 'choices': [done]})}\n\n"
        yield f"data: {json.dumps({**base, 'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    made = Provider()
    app = Starlette(routes=[Route("/v1/chat/completions", made.complete, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", ws="none"))
    listening = socket.create_server(("127.0.0.1", 0))
    made.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    serving = asyncio.create_task(server._serve(sockets=[listening]))
    yield made
    server.should_exit = True
    await serving


def called(name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": name, "arguments": json.dumps(args)}}]}


async def test_a_conversation_through_a_provider(
    talk: Talk, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_MODEL_KEY", "sk-test")
    definition = f"""
name: hosted
model: openai-chat:gpt-4o-mini
base_url: {provider.url}
api_key_env: SHOP_MODEL_KEY
instructions: Be brief.
tools: [shop.*]
settings: {{temperature: 0}}
"""
    applied = await talk.http.post("/api/agents", content=definition)
    assert applied.status_code == 201, applied.text
    provider.answers = [
        [
            {"role": "assistant", "content": "I "},
            {"content": "refund it."},
            called("shop__refund", {"charge": "ch_1", "amount": 5}),
        ],
        [{"role": "assistant", "content": "It is "}, {"content": "done."}],
    ]
    sent = await talk.told("please", agent="hosted")
    [question] = await talk.held(sent["run_id"])
    assert question["action"]["fields"] == {"charge": "ch_1", "amount": 5}
    await talk.post(f"/api/approvals/{question['id']}/approve")
    run = await talk.ended(sent["run_id"])
    assert (run["status"], run["result"], talk.refunds) == ("succeeded", {"text": "It is done."}, ["ch_1"])
    # 1000 tokens in and 200 out, twice, at the list price of that model.
    assert run["cost_usd"] == pytest.approx(2 * (1000 * 0.15 + 200 * 0.6) / 1e6)
    first, second = provider.asked
    assert (first["authorization"], first["stream"], first["temperature"]) == ("Bearer sk-test", True, 0)
    assert {tool["function"]["name"] for tool in first["tools"]} >= {"shop__lookup", "shop__refund"}
    assert first["messages"][0]["content"] == "Be brief."
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert json.loads(second["messages"][3]["content"]) == {"refunded": "ch_1", "amount": 5}
    texts = [e["data"]["text"] for e in await talk.events(sent["session_id"]) if e["type"] == "message"]
    assert texts == ["I refund it.", "It is done."]


async def test_a_refusal_of_the_provider_fails_the_run_with_its_words(talk: Talk, provider: Provider) -> None:
    definition = f"{{name: hosted, model: 'openai-chat:m', base_url: '{provider.url}'}}"
    await talk.http.post("/api/agents", content=definition)
    provider.answers = [401]
    sent = await talk.told("please", agent="hosted")
    run = await talk.ended(sent["run_id"])
    assert (run["status"], run["reason"]) == ("failed", "terminal_error")
    assert "401" in run["error"]["message"]


async def test_a_model_that_nobody_has_says_so(talk: Talk) -> None:
    await talk.http.post("/api/agents", content="{name: lost, model: 'nowhere:m'}")
    sent = await talk.told("please", agent="lost")
    run = await talk.ended(sent["run_id"])
    assert "model nowhere:m: Unknown provider" in run["error"]["message"]
