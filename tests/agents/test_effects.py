"""What an agent's model reads about the effects of its calls. agents 3, 5, 10 and 11."""

# ruff: noqa: F401, F811

import json
from base64 import b64encode
from typing import Any

import pytest
import yaml
from pydantic_ai.messages import BinaryContent

from interlock.agents.media import Allowance, shown
from interlock.definition.agent import load_agent, parse_agent
from interlock.definition.plan import Price
from interlock.errors import DefinitionInvalid
from interlock.wire import Role
from tests.agents.conftest import POLICY, Talk
from tests.agents.test_provider import Provider, provider
from tests.console.pages import Browser, text_of


async def test_the_model_is_told_that_a_write_was_done_whose_output_was_dropped(talk: Talk) -> None:
    """agents 3: the model read "It failed", so it had every reason to call the tool again."""

    @talk.rig.tool("shop.export", writes=True)
    async def export() -> str:
        talk.refunds.append("exported")
        return "x" * 5_000_000

    allowed = '@id("export") permit(principal, action == Action::"shop.export", resource);'
    await talk.http.put("/api/policy", content=POLICY + allowed)
    await _apply(talk, [{"calls": [{"tool": "shop.export", "args": {}}]}, {"say": "I was told: {result}"}])
    run = await talk.ended((await talk.told("go", agent="one"))["run_id"])
    assert (run["status"], talk.refunds) == ("succeeded", ["exported"])
    assert "shop.export was done, but its output was not stored" in run["result"]["text"]


async def _apply(talk: Talk, turns: list[Any], **more: Any) -> None:
    agent = {"name": "one", "model": "scripted", "tools": ["shop.*"], "script": [{"turns": turns}], **more}
    applied = await talk.http.post("/api/agents", content=json.dumps(agent))
    assert applied.status_code == 201, applied.text


# ---------------------------------------------------------------- cost

CALL = {
    "index": 0,
    "id": "c",
    "type": "function",
    "function": {"name": "shop__refund", "arguments": '{"charge": "ch_1", "amount": 5}'},
}
ALLOWED = '@id("all") permit(principal, action, resource);'


async def _hosted(talk: Talk, provider: Provider, model: str = "nobody-knows-it", **more: Any) -> None:
    about = {"name": "hosted", "model": f"openai-chat:{model}", "base_url": provider.url, "tools": ["shop.*"], **more}
    applied = await talk.http.post("/api/agents", content=yaml.safe_dump(about))
    assert applied.status_code == 201, applied.text
    await talk.http.put("/api/policy", content=ALLOWED)


async def test_a_cost_limit_without_a_price_is_refused_before_the_model_is_asked(
    talk: Talk,
    provider: Provider,
) -> None:
    """agents 5: 3.96 million tokens cost 0.0, so the limit of 0.01 never applied."""
    await _hosted(talk, provider, limits={"cost_usd": 0.01})
    run = await talk.ended((await talk.told("go", agent="hosted"))["run_id"])
    assert (run["status"], provider.asked) == ("failed", [])
    assert "price of openai-chat:nobody-knows-it is not known" in run["error"]["message"]


@pytest.mark.parametrize("limits", [{"cost_usd": 0.01}, {"tokens": 1200}])
async def test_the_turn_that_is_over_the_limit_does_nothing(
    talk: Talk,
    provider: Provider,
    limits: Any,
) -> None:
    """agents 5: the turn exceeded the budget, but still wrote. 1,000 tokens in and 200 out cost 0.014 USD here."""
    await _hosted(talk, provider, limits=limits, price={"input": 10, "output": 20})
    provider.answers = [[{"role": "assistant", "tool_calls": [CALL]}]]
    run = await talk.ended((await talk.told("go", agent="hosted"))["run_id"])
    assert (run["reason"], talk.refunds, len(run["steps"])) == ("cap_exceeded", [], 1)
    assert run["cost_usd"] == pytest.approx(0.014)


async def test_within_its_limit_an_agent_with_a_price_of_its_own_does_its_work(
    talk: Talk,
    provider: Provider,
) -> None:
    await _hosted(talk, provider, limits={"cost_usd": 0.02}, price={"input": 10, "output": 20})
    provider.answers = [[{"role": "assistant", "tool_calls": [CALL]}], [{"role": "assistant", "content": "Done."}]]
    run = await talk.ended((await talk.told("go", agent="hosted"))["run_id"])
    assert (run["status"], talk.refunds) == ("succeeded", ["ch_1"])


def test_a_price_has_two_amounts() -> None:
    plan = load_agent({"name": "a", "model": "x:y", "price": {"input": 3, "output": 15.5}})
    assert plan.agent is not None and plan.agent.price == Price(3.0, 15.5)
    with pytest.raises(DefinitionInvalid, match=r"`output` is missing"):
        parse_agent("{name: a, model: 'x:y', price: {input: 3}}")
    with pytest.raises(DefinitionInvalid, match="an amount above zero"):
        parse_agent("{name: a, model: 'x:y', price: {input: 3, output: many}}")


# ---------------------------------------------------------------- how an answer ended


@pytest.mark.parametrize("reason", ["length", "content_filter"])
async def test_an_answer_that_is_not_a_whole_one_says_so(
    talk: Talk,
    provider: Provider,
    reason: str,
) -> None:
    """agents 10: the run succeeded with half a sentence and did not mark it."""
    provider.finish_reason = reason
    await _hosted(talk, provider)
    provider.answers = [[{"role": "assistant", "content": "Half a sen"}]]
    sent = await talk.told("go", agent="hosted")
    run = await talk.ended(sent["run_id"])
    assert run["result"] == {"text": "Half a sen", "finish_reason": reason}
    [message] = [
        e["data"]
        for e in await talk.events(sent["session_id"])
        if e["type"] == "message" and e["data"]["role"] == "assistant"
    ]
    assert message["finish_reason"] == reason
    talk.rig.mount_console()
    browser = await Browser(talk.rig.http("")).sign_in(await talk.rig.key("reader", Role.VIEWER))
    assert "not a whole answer cut off " in text_of(await browser.get(f"/sessions/{sent['session_id']}"))


async def test_a_refusal_is_the_answer_and_says_that_it_is_one(talk: Talk, provider: Provider) -> None:
    await _hosted(talk, provider)
    provider.answers = [[{"role": "assistant", "refusal": "I will not do that."}]]
    run = await talk.ended((await talk.told("go", agent="hosted"))["run_id"])
    said = "I will not do that."
    assert run["result"] == {"text": said, "finish_reason": "content_filter", "refusal": said}


# ---------------------------------------------------------------- images and audio


def _media(kind: str, data: bytes, media_type: str) -> dict[str, Any]:
    return {"type": kind, "data": b64encode(data).decode(), "mime_type": media_type}


def test_images_and_audio_reach_the_model_as_media_within_bounds() -> None:
    """agents 11: the model received them as base64 text."""
    output = [
        {"type": "text", "text": "a chart"},
        _media("image", b"png", "image/png"),
        _media("audio", b"wav", "audio/wav"),
    ]
    assert shown(output, Allowance()) == [
        "a chart",
        BinaryContent(data=b"png", media_type="image/png"),
        BinaryContent(data=b"wav", media_type="audio/wav"),
    ]
    assert shown(output, Allowance(files=1))[2] == "[audio of audio/wav, 3 bytes: not shown]"
    assert shown(output, Allowance(bytes=2))[1] == "[image of image/png, 3 bytes: not shown]"
    assert shown([_media("image", b"x", "image/x-odd")], Allowance()) == ["[image of image/x-odd, 1 bytes: not shown]"]
    assert shown([{"type": "image", "data": "!", "mime_type": "image/png"}], Allowance()) == [
        "[image of image/png: its data is not base64]"
    ]
    for plain in ({"type": "image"}, [1], "text", [{"type": "text", "text": "x"}], [{"type": "other"}], None):
        assert shown(plain, Allowance()) == plain


async def test_an_image_is_sent_to_the_provider_as_an_image(talk: Talk, provider: Provider) -> None:
    @talk.rig.tool("shop.draw")
    async def draw() -> Any:
        return [_media("image", b"a picture", "image/png")]

    await _hosted(talk, provider)
    call = CALL | {"function": {"name": "shop__draw", "arguments": "{}"}}
    provider.answers = [[{"role": "assistant", "tool_calls": [call]}], [{"role": "assistant", "content": "Nice."}]]
    run = await talk.ended((await talk.told("go", agent="hosted"))["run_id"])
    assert run["status"] == "succeeded", run["error"]
    sent = json.dumps(provider.asked[1]["messages"])
    assert '"type": "image_url"' in sent and "data:image/png;base64," in sent
