"""The providers' client code, against a server that speaks their protocols: streaming, tool calls, errors and cost."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from interlock.agents import model_turn
from interlock.definition.agent import load_agent
from interlock.engine import workflows
from interlock.engine.proof import audit
from tests.agents.conftest import Talk


@dataclass
class Provider:
    """Answers each request with its next scripted answer, chunk by chunk."""

    answers: list[Any] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    url: str = ""
    # The finish reason of an answer without calls.
    finish_reason: str = "stop"

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
        done = {"index": 0, "delta": {}, "finish_reason": "tool_calls" if calls else self.finish_reason}
        usage = {"prompt_tokens": 1000, "completion_tokens": 200, "total_tokens": 1200}
        yield f"data: {json.dumps({**base, 'choices': [done]})}\n\n"
        yield f"data: {json.dumps({**base, 'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

    async def message(self, request: Request) -> Response:
        """Like Anthropic: events start, extend and stop content blocks."""
        self.asked.append({"authorization": request.headers.get("authorization"), **await request.json()})
        return StreamingResponse(_events(_blocks(self.answers.pop(0))), media_type="text/event-stream")

    async def generate(self, request: Request) -> Response:
        """Like Google: each chunk is a separate candidate."""
        asked = {"authorization": request.headers.get("x-goog-api-key"), "path": request.url.path}
        self.asked.append(asked | await request.json())
        return StreamingResponse(_events(_candidates(self.answers.pop(0))), media_type="text/event-stream")


async def _events(events: list[dict[str, Any]]) -> AsyncIterator[str]:
    for event in events:
        name = f"event: {event['type']}\n" if "type" in event else ""
        yield f"{name}data: {json.dumps(event)}\n\n"


def _blocks(parts: list[Any]) -> list[dict[str, Any]]:
    usage = {"input_tokens": 1000, "output_tokens": 1}
    about = {"id": "m1", "type": "message", "role": "assistant", "model": "claude-sonnet-4-5", "content": []}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**about, "stop_reason": None, "stop_sequence": None, "usage": usage}}
    ]
    for index, part in enumerate(parts):
        is_text = isinstance(part, str)
        block = (
            {"type": "text", "text": ""} if is_text else {"type": "tool_use", "id": "t1", "name": part[0], "input": {}}
        )
        said = part if is_text else json.dumps(part[1])
        kind, member = ("text_delta", "text") if is_text else ("input_json_delta", "partial_json")
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        for piece in (said[:5], said[5:]):
            delta = {"type": kind, member: piece}
            events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    reason = "end_turn" if all(isinstance(part, str) for part in parts) else "tool_use"
    ending = {"stop_reason": reason, "stop_sequence": None}
    return [
        *events, {"type": "message_delta", "delta": ending, "usage": {"output_tokens": 200}}, {"type": "message_stop"},
    ]  # fmt: skip


def _candidates(parts: list[Any]) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            said += [{"text": part[:5]}, {"text": part[5:]}]
        else:
            said.append({"functionCall": {"name": part[0], "args": part[1]}})
    chunks: list[dict[str, Any]] = [
        {
            "candidates": [{"index": 0, "content": {"role": "model", "parts": [part]}}],
            "modelVersion": "gemini-2.5-flash",
        }
        for part in said
    ]
    chunks[-1]["candidates"][0]["finishReason"] = "STOP"
    chunks[-1]["usageMetadata"] = {"promptTokenCount": 1000, "candidatesTokenCount": 200, "totalTokenCount": 1200}
    return chunks


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    made = Provider()
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", made.complete, methods=["POST"]),
            Route("/v1/messages", made.message, methods=["POST"]),
            Route("/v1/models/{model}", made.generate, methods=["POST"]),
        ]
    )
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
    monkeypatch.setenv("INTERLOCK_MODEL_KEY_SHOP", "sk-test")
    definition = f"""
name: hosted
model: openai-chat:gpt-4o-mini
base_url: {provider.url}
api_key_env: INTERLOCK_MODEL_KEY_SHOP
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
    # 1,000 tokens in and 200 out, twice, at the list price of that model.
    assert run["cost_usd"] == pytest.approx(2 * (1000 * 0.15 + 200 * 0.6) / 1e6)
    first, second = provider.asked
    assert (first["authorization"], first["stream"], first["temperature"]) == ("Bearer sk-test", True, 0)
    assert {tool["function"]["name"] for tool in first["tools"]} >= {"shop__lookup", "shop__refund"}
    assert first["messages"][0]["content"] == "Be brief."
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert json.loads(second["messages"][3]["content"]) == {"refunded": "ch_1", "amount": 5}
    texts = [e["data"]["text"] for e in await talk.events(sent["session_id"]) if e["type"] == "message"]
    assert texts == ["I refund it.", "It is done."]


@pytest.mark.parametrize(
    ("model", "usd"),
    # Prices per million tokens, in and out.
    [("anthropic:claude-sonnet-4-5", (3.0, 15.0)), ("google:gemini-2.5-flash", (0.3, 2.5))],
)
async def test_other_providers_stream_call_and_cost_in_their_own_words(
    talk: Talk, provider: Provider, model: str, usd: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLOCK_MODEL_KEY_SHOP", "sk-test")
    definition = {
        "name": "hosted", "model": model, "base_url": provider.url.removesuffix("/v1"), "instructions": "Be brief.",
        "api_key_env": "INTERLOCK_MODEL_KEY_SHOP", "tools": ["shop.*"],
    }  # fmt: skip
    assert (await talk.http.post("/api/agents", json=definition)).status_code == 201
    provider.answers = [["I refund it.", ("shop__refund", {"charge": "ch_1", "amount": 5})], ["It is done."]]
    sent = await talk.told("please", agent="hosted")
    [question] = await talk.held(sent["run_id"])
    assert question["action"]["fields"] == {"charge": "ch_1", "amount": 5}
    await talk.post(f"/api/approvals/{question['id']}/approve")
    run = await talk.ended(sent["run_id"])
    assert (run["status"], run["result"], talk.refunds) == ("succeeded", {"text": "It is done."}, ["ch_1"])
    assert run["cost_usd"] == pytest.approx(2 * (1000 * usd[0] + 200 * usd[1]) / 1e6)
    first, second = provider.asked
    assert first["authorization"].endswith("sk-test")
    assert "Be brief." in json.dumps(first) and "shop__refund" in json.dumps(first["tools"])
    assert '"refunded' in json.dumps(second).replace("\\", "")
    events = await talk.events(sent["session_id"])
    told = "".join(e["data"]["text"] for e in events if e["type"] == "message_delta")
    assert told == "I refund it.It is done."


async def is_whole(talk: Talk, run_id: str) -> bool:
    """Check that the journal has no gap, and that the chain it is sealed into verifies."""
    rig = talk.rig
    found = await rig.sql("SELECT seq FROM interlock.journal_entry WHERE run_id = $1 ORDER BY seq", UUID(run_id))
    await rig.prove()
    verdict = await audit.verify(rig.database, rig.admin.tenant_id, rig.notary.signing.trusted())
    return [row["seq"] for row in found] == list(range(1, len(found) + 1)) and verdict.ok


async def test_what_a_model_says_that_is_no_text_is_kept_as_far_as_it_is(talk: Talk, provider: Provider) -> None:
    """PostgreSQL can store neither NUL nor an unpaired surrogate."""
    definition = f"{{name: hosted, model: 'openai-chat:m', base_url: '{provider.url}', tools: [shop.*]}}"
    await talk.http.post("/api/agents", content=definition)
    provider.answers = [
        [{"role": "assistant", "content": "a\x00b"}, called("shop__lookup", {"charge": "ch\x00"})],
        [{"role": "assistant", "content": "c\ud83dd"}],
    ]
    sent = await talk.told("please", agent="hosted")
    run = await talk.ended(sent["run_id"])
    assert (run["status"], run["result"]) == ("succeeded", {"text": "c\ufffdd"}), run["error"]
    events = await talk.events(sent["session_id"])
    assert "".join(e["data"]["text"] for e in events if e["type"] == "message_delta") == "a\ufffdbc\ufffdd"
    assert "NUL" in provider.asked[1]["messages"][-1]["content"]  # and no tool was called with other arguments
    assert await is_whole(talk, sent["run_id"])


async def test_what_is_told_and_cannot_be_stored_fails_the_step_and_leaves_no_hole(
    talk: Talk, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    await talk.http.post("/api/agents", content=f"{{name: hosted, model: 'openai-chat:m', base_url: '{provider.url}'}}")

    def only_the_answer(said: Any) -> Any:
        return said if isinstance(said, str) else json.loads(json.dumps(said).replace("\\u0000", "?"))

    monkeypatch.setattr(model_turn, "storable", only_the_answer)
    provider.answers = [[{"role": "assistant", "content": "a\x00b"}, {"content": "c"}]]
    sent = await talk.told("please", agent="hosted")
    run = await talk.ended(sent["run_id"])
    assert (run["status"], run["reason"], run["error"]["type"]) == ("failed", "terminal_error", "Unacceptable")
    assert await is_whole(talk, sent["run_id"])


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


# ---------------------------------------------------------------- what is never sent


async def test_no_variable_but_a_key_for_models_can_be_named(talk: Talk) -> None:
    definition = "{name: thief, model: 'openai-chat:m', api_key_env: INTERLOCK_DATABASE_URL}"
    refused = await talk.http.post("/api/agents", content=definition)
    assert refused.status_code == 422
    [fault] = refused.json()["errors"]
    assert fault["path"] == "api_key_env"
    assert "begins with INTERLOCK_MODEL_KEY_" in fault["message"]


async def applied_before(talk: Talk, definition: str, tenant_id: UUID | None = None) -> None:
    """An agent that an older Interlock with fewer checks accepted."""
    plan = load_agent(yaml.safe_load(definition))
    async with talk.rig.database.transaction() as tx:
        await workflows._publish(tx, talk.rig.database, tenant_id or talk.rig.admin.tenant_id, "ann", plan)


async def test_an_agent_that_was_applied_before_cannot_name_another_variable_either(
    talk: Talk, provider: Provider
) -> None:
    await applied_before(
        talk, f"{{name: thief, model: 'openai-chat:m', base_url: '{provider.url}', api_key_env: PATH}}"
    )
    run = await talk.ended((await talk.told("please", agent="thief"))["run_id"])
    assert (run["status"], provider.asked) == ("failed", [])
    assert "begins with INTERLOCK_MODEL_KEY_" in run["error"]["message"]


async def test_the_provider_s_own_key_does_not_go_to_another_address(
    talk: Talk, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-installation")
    definition = f"{{name: hosted, model: 'openai-chat:own', base_url: '{provider.url}'}}"
    assert (await talk.http.post("/api/agents", content=definition)).status_code == 201
    provider.answers = [[{"role": "assistant", "content": "Hello."}]]
    run = await talk.ended((await talk.told("please", agent="hosted"))["run_id"])
    assert (run["status"], provider.asked[0]["authorization"]) == ("succeeded", "Bearer none")


@pytest.mark.parametrize("more", ["base_url: 'http://127.0.0.1:9/v1'", "api_key_env: INTERLOCK_MODEL_KEY_SHOP"])
async def test_addresses_and_keys_are_chosen_by_who_operates_the_workers(talk: Talk, more: str) -> None:
    definition = f"{{name: elsewhere, model: 'openai-chat:m', {more}}}"
    acme = await talk.rig.tenant("acme")
    keys = [
        await talk.rig.key("ops", "operator", tenant_id=acme.tenant_id),
        await talk.rig.key("ops", "operator", workspace_id="payments"),
    ]
    for key in keys:
        refused = await talk.rig.http(key).post("/api/agents", content=definition)
        assert (refused.status_code, refused.json()["code"]) == (403, "FORBIDDEN")
    await applied_before(talk, definition, acme.tenant_id)
    theirs = Talk(talk.rig, talk.rig.http(keys[0]))
    run = await talk.ended((await theirs.told("please", agent="elsewhere"))["run_id"])
    assert run["status"] == "failed"
    assert "base_url and api_key_env are for agents of tenant default" in run["error"]["message"]
