"""The scripted model: says and calls what a definition's script has, so that conversations can be tried offline."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, ToolReturnPart, UserPromptPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel

from interlock.agents.names import wire_name
from interlock.definition.agent import SCRIPTED
from interlock.definition.duration import parse_duration
from interlock.errors import Terminal

_PLACE = re.compile(r"\{(\w+)\}|\{\{|\}\}")

# Where an expression chooses: how often something is repeated, or which of several it is.
_CHOICE = re.compile(r"[*+{|]|(?<!\()\?")
# A repeated group may hold choices of its own; groups that are not plain ones, and references, are not looked into.
_NESTED = re.compile(r"\)[*+?{]|\(\?(?!:|P<)|\\[1-9]")
# Steps, of some fifty nanoseconds each.
_QUICK = 100_000
_PATIENCE_SECONDS = 5.0
_SEARCH = """\
import json, re, sys
pattern, message = json.load(sys.stdin)
found = re.search(pattern, message, re.DOTALL)
json.dump(None if found is None else found.groupdict(), sys.stdout)
"""
_OTHERS = ThreadPoolExecutor(2, thread_name_prefix="matching")


def scripted(script: Sequence[Mapping[str, Any]]) -> FunctionModel:
    async def answer(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
        message, number, results = _place_in(messages)
        rule, found = await _rule_for(script, message)
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
    """The last that a person said, how often the model spoke since, and what its calls gave."""
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


async def _rule_for(script: Sequence[Mapping[str, Any]], message: str) -> tuple[Mapping[str, Any], dict[str, str]]:
    for rule in script:
        if (found := await _found(rule.get("match") or "", message)) is not None:
            return rule, {name: value or "" for name, value in found.items()}
    return {"turns": [{"say": "The script has nothing to say to that."}]}, {}


async def _found(pattern: str, message: str) -> Mapping[str, str | None] | None:
    """What the expression finds in the message, by name; None if it does not match.

    Whoever applies an agent chose it, and it can take for ever, with nobody else to run meanwhile. One that may take a
    while is left to another process, which can be ended.
    """
    if _is_quick(pattern, len(message)):
        found = re.search(pattern, message, re.DOTALL)
        return None if found is None else found.groupdict()
    return await asyncio.get_running_loop().run_in_executor(_OTHERS, _found_elsewhere, pattern, message)


def _is_quick(pattern: str, length: int) -> bool:
    """For certain: every choice that it may have to take back, so often as there are places in the message."""
    choices = len(_CHOICE.findall(pattern))
    return not _NESTED.search(pattern) and (length + 2) ** (choices + 1) <= _QUICK


def _found_elsewhere(pattern: str, message: str) -> Mapping[str, str | None] | None:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SEARCH], input=orjson.dumps([pattern, message]),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_PATIENCE_SECONDS, check=True,
        )  # fmt: skip
    except subprocess.SubprocessError:
        raise Terminal(f"the script's expression {pattern!r:.120} came to no end on this message") from None
    found: Mapping[str, str | None] | None = orjson.loads(done.stdout)
    return found


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
    """`{name}` is what the rule's expression found under that name; `{{` and `}}` are braces."""
    return _PLACE.sub(lambda place: values.get(place[1], place[0]) if place[1] else place[0][0], text)
