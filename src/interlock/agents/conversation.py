"""The conversation sent to a model: built from journals each time, so that it always matches them."""

from collections.abc import Iterable
from typing import Any

import orjson
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelRequestPart,
    ToolReturnPart,
    UserPromptPart,
)

from interlock.agents.media import Allowance, shown
from interlock.agents.tool_names import wire_name
from interlock.journal import Journal, StepSnapshot
from interlock.journal.agent_loop import ModelReply, model_steps
from interlock.lifecycle import RunReason, StepState


def conversation(journals: Iterable[tuple[str, Journal]], instructions: str) -> list[ModelMessage]:
    """Return the conversation from each journal and the message it answers, oldest first.

    The last journal is the current one.
    """
    messages: list[ModelMessage] = []
    unsent: list[ModelRequestPart] = []
    answered = list(journals)
    for number, (said, journal) in enumerate(answered, 1):
        allowance = Allowance() if number == len(answered) else Allowance(files=0)
        unsent.append(UserPromptPart(said))
        for fold in model_steps(journal):
            if fold.status != StepState.SUCCEEDED:
                continue
            messages.append(ModelRequest(parts=unsent, instructions=instructions or None))
            messages += ModelMessagesTypeAdapter.validate_python([orjson.loads(fold.output or "{}")["response"]])
            unsent = [
                _answer(call, journal.steps.get(call.get("step", "")), allowance) for call in ModelReply.of(fold).calls
            ]
    messages.append(ModelRequest(parts=unsent, instructions=instructions or None))
    return messages


_IN_DOUBT = (
    "It was cut off while it ran. Nobody knows whether it was done. Do not repeat it: find out first, or ask a person."
)


def _answer(call: Any, fold: StepSnapshot | None, allowance: Allowance) -> ToolReturnPart:
    """Return the result of a tool call. Every call needs one, or providers reject the conversation."""
    name, call_id = wire_name(call["tool"]), call["id"]
    if "problem" in call:
        return ToolReturnPart(name, call["problem"], call_id, outcome="failed")
    if fold is not None and (fold.ended_in_doubt or (fold.in_doubt and fold.status != StepState.SUCCEEDED)):
        return ToolReturnPart(name, _IN_DOUBT, call_id, outcome="failed")
    if fold is None or fold.status not in (StepState.SUCCEEDED, StepState.FAILED, StepState.SKIPPED):
        return ToolReturnPart(name, "It was interrupted and not done.", call_id, outcome="interrupted")
    if fold.status == StepState.SUCCEEDED:
        return ToolReturnPart(name, shown(orjson.loads(fold.output or "null"), allowance), call_id)
    why = (fold.last_error or {}).get("message") or "it was not done"
    if fold.reason in (RunReason.REJECTED, RunReason.APPROVAL_EXPIRED):
        return ToolReturnPart(name, f"A person did not allow it: {why}", call_id, outcome="failed")
    if fold.reason == RunReason.POLICY_DENIED:
        return ToolReturnPart(name, f"The policy does not allow it: {why}", call_id, outcome="failed")
    return ToolReturnPart(name, f"It failed: {why}", call_id, outcome="failed")
