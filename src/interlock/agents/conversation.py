"""A conversation as a model is told it: made anew from journals each time, so that it is never out of step."""

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

from interlock.agents.names import wire_name
from interlock.journal import Journal, StepFold
from interlock.journal.turns import Reply, model_steps
from interlock.lifecycle import RunReason, StepState


def conversation(journals: Iterable[tuple[str, Journal]], instructions: str) -> list[ModelMessage]:
    """Each journal with the message that it answers, oldest first; the last is the one under way."""
    messages: list[ModelMessage] = []
    unsent: list[ModelRequestPart] = []
    for said, journal in journals:
        unsent.append(UserPromptPart(said))
        for fold in model_steps(journal):
            if fold.status != StepState.SUCCEEDED:
                continue
            messages.append(ModelRequest(parts=unsent, instructions=instructions or None))
            messages += ModelMessagesTypeAdapter.validate_python([orjson.loads(fold.output or "{}")["response"]])
            unsent = [_answer(call, journal.steps.get(call.get("step", ""))) for call in Reply.of(fold).calls]
    messages.append(ModelRequest(parts=unsent, instructions=instructions or None))
    return messages


def _answer(call: Any, fold: StepFold | None) -> ToolReturnPart:
    """What became of a call. Every call has an answer, or providers refuse the conversation."""
    name, call_id = wire_name(call["tool"]), call["id"]
    if "problem" in call:
        return ToolReturnPart(name, call["problem"], call_id, outcome="failed")
    if fold is None or fold.status not in (StepState.SUCCEEDED, StepState.FAILED, StepState.SKIPPED):
        return ToolReturnPart(name, "It was interrupted and not done.", call_id, outcome="interrupted")
    if fold.status == StepState.SUCCEEDED:
        return ToolReturnPart(name, orjson.loads(fold.output or "null"), call_id)
    why = (fold.last_error or {}).get("message") or "it was not done"
    if fold.reason in (RunReason.REJECTED, RunReason.APPROVAL_EXPIRED):
        return ToolReturnPart(name, f"A person did not allow it: {why}", call_id, outcome="failed")
    if fold.reason == RunReason.POLICY_DENIED:
        return ToolReturnPart(name, f"The policy does not allow it: {why}", call_id, outcome="failed")
    return ToolReturnPart(name, f"It failed: {why}", call_id, outcome="failed")
