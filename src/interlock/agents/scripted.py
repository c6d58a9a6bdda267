"""The scripted model: answers and calls tools as the script in its definition says.

It allows conversations to be tried offline.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import orjson
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, ToolReturnPart, UserPromptPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel

from interlock.agents.tool_names import wire_name
from interlock.definition.agent import SCRIPTED
from interlock.definition.duration import parse_duration
from interlock.definition.patterns import MOST_WORK, pattern
from interlock.errors import Terminal

_PLACE = re.compile(r"\{(\w+)\}|\{\{|\}\}")


def scripted(script: Sequence[Mapping[str, Any]]) -> FunctionModel:
    async def answer(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
        message, number, results = _place_in(messages)
        rule, found = _rule_for(script, message)
        values = {"message": message, "result": results[-1] if results else "", **found}
        turn = rule["turns"][min(number, len(rule["turns"]) - 1)] if rule["turns"] else {"say": ""}
        if turn.get("fail"):
            raise Terminal(_filled(turn["fail"], values))
        pause = parse_duration(turn.get("pause", 0))
        for word in re.findall(r"^\s+|\S+\s*", _filled(turn.get("say", ""), values)):
            yield word
            await asyncio.sleep(pause)
        for index, call in enumerate(turn.get("calls", ())):
            name = wire_name(_filled(call["tool"], values))
            args = _arguments(call.get("args", {}), values)
            yield {index: DeltaToolCall(name=name, json_args=args, tool_call_id=f"call-{number + 1}-{index + 1}")}

    return FunctionModel(stream_function=answer, model_name=SCRIPTED)


def _place_in(messages: list[ModelMessage]) -> tuple[str, int, list[str]]:
    """Return the last user message, the number of model responses since then, and the results of their calls."""
    message, number = "", 0
    results: list[str] = []
    for sent in messages:
        if isinstance(sent, ModelResponse):
            number += 1
            continue
        assert isinstance(sent, ModelRequest)
        for part in sent.parts:
            if isinstance(part, UserPromptPart):
                message, number, results = str(part.content), 0, []
            elif isinstance(part, ToolReturnPart):
                results.append(part.model_response_str())
    return message, number, results


def _rule_for(script: Sequence[Mapping[str, Any]], message: str) -> tuple[Mapping[str, Any], dict[str, str]]:
    for rule in script:
        if (found := _found(rule.get("match") or "", message)) is not None:
            return rule, {name: value or "" for name, value in found.items()}
    return {"turns": [{"say": "The script has nothing to say to that."}]}, {}


def _found(source: str, message: str) -> Mapping[str, str | None] | None:
    """Return the named groups that the pattern matches in the message, or None if it does not match."""
    match = pattern(source, dot_matches_newline=True)
    if match.work(message) > MOST_WORK:
        raise Terminal(f"the script's pattern {source!r:.120} is too large for a message of this length")
    return match.groups(message)


def _arguments(args: Any, values: Mapping[str, str]) -> str:
    return _filled(args, values) if isinstance(args, str) else orjson.dumps(_deep(args, values)).decode()


def _deep(value: Any, values: Mapping[str, str]) -> Any:
    match value:
        case str():
            return _filled(value, values)
        case Mapping():
            return {name: _deep(member, values) for name, member in value.items()}
        case list():
            return [_deep(item, values) for item in value]
        case _:
            return value


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Fill the text: `{name}` is a value that the rule's pattern captured; `{{` and `}}` are braces."""
    return _PLACE.sub(lambda place: values.get(place[1], place[0]) if place[1] else place[0][0], text)
