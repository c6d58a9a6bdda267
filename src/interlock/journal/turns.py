"""Turns: what an agent does next, given its journal. A model is asked; what it calls is done; it is asked again.

One call of a model is one step, and each tool that it calls is a step of its own, through the same gate as any other.
The model's answer is that step's output and says which steps follow from it, so that nothing here remembers anything:
a worker, a person's decision and a sweep all come to the same next step.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from interlock.definition.expression import Template
from interlock.definition.flow import declaration, flow_step
from interlock.definition.plan import Agent, OnReject, Retry, Step, StepKind
from interlock.journal.journal import FlowEnd, Journal, StepFold
from interlock.lifecycle import STEP, RunReason, StepState

_MODEL = "model"
_MODEL_RETRY = Retry(max_attempts=4, base_delay=2.0)
_TOOL_RETRY = Retry(max_attempts=3, base_delay=1.0)
_REFUSALS = (RunReason.REJECTED, RunReason.APPROVAL_EXPIRED)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered. A call with a `problem` was never made: the model is told so instead."""

    text: str
    calls: tuple[Mapping[str, Any], ...]
    tokens: int

    @classmethod
    def of(cls, fold: StepFold) -> "Reply":
        said = orjson.loads(fold.output or "{}")
        usage = said.get("usage", {})
        tokens = usage.get("input_tokens", 0) + usage.get("output_tokens", 0)
        return cls(said.get("text", ""), tuple(said.get("calls", ())), tokens)

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        return [call for call in self.calls if "problem" not in call]


def take_turn(journal: Journal, agent: Agent) -> None:
    """Declare the steps that come next, or say that it ended. Changes nothing that is under way."""
    asked = model_steps(journal)
    if not asked:
        _ask_model(journal, agent, 1)
        return
    last = asked[-1]
    if last.status == StepState.FAILED:
        reason = RunReason(last.reason or RunReason.TERMINAL_ERROR)
        journal.end = FlowEnd(reason=reason, error={"step": last.step.key, **(last.last_error or {})})
    if last.status != StepState.SUCCEEDED:
        return
    reply = Reply.of(last)
    called = [_call(journal, call) for call in reply.steps]
    if any(fold.status not in STEP.terminal for fold in called):
        return
    refused = next((fold for fold in called if fold.reason in _REFUSALS), None)
    if refused is not None and journal.plan.on_reject != OnReject.CONTINUE:
        _end_refused(journal, refused, reply)
    elif not reply.calls:
        journal.end = FlowEnd(orjson.dumps({"text": reply.text}).decode())
    elif (over := _over_limit(journal, agent, asked)) is not None:
        journal.end = FlowEnd(reason=RunReason.CAP_EXCEEDED, error={"type": "CapExceeded", "message": over})
    else:
        _ask_model(journal, agent, len(asked) + 1)


def model_steps(journal: Journal) -> list[StepFold]:
    return [fold for fold in journal.steps.values() if fold.step.kind is StepKind.MODEL]


def next_keys(journal: Journal, tools: Iterable[str]) -> list[str]:
    """The keys of the steps that call these tools next: a tool called again is `shop.refund#2`, as in a flow."""
    used = Counter(fold.step.tool for fold in journal.steps.values() if fold.step.kind is StepKind.TOOL)
    keys = []
    for tool in tools:
        used[tool] += 1
        # What asks the model has its own name for itself, and no tool has a colon in its.
        keys.append(_key(f"tool:{tool}" if tool == _MODEL else tool, used[tool]))
    return keys


def _key(name: str, again: int) -> str:
    return name if again == 1 else f"{name}#{again}"


def _ask_model(journal: Journal, agent: Agent, turn: int) -> None:
    key = _key(_MODEL, turn)
    _declare(journal, flow_step(
        key, len(journal.steps), StepKind.MODEL, tool=agent.model, retry=_MODEL_RETRY, place=key, digest=str(turn),
    ))  # fmt: skip


def _call(journal: Journal, call: Mapping[str, Any]) -> StepFold:
    key = call["step"]
    input = Template.parse(_literal(call["args"]))
    known = journal.steps.get(key)
    step = flow_step(
        key, known.step.index if known else len(journal.steps), StepKind.TOOL, tool=call["tool"], input=input,
        retry=_TOOL_RETRY, place=key, digest=call["id"],
    )  # fmt: skip
    if known is None:
        return _declare(journal, step)
    known.step = step  # of what was declared before a crash the journal has only a part
    return known


def _declare(journal: Journal, step: Step) -> StepFold:
    # With the input: whoever decides on a call, edits or undoes it has only the journal to ask.
    return journal.declare(step, declaration(step, with_input=step.kind is StepKind.TOOL))


def _literal(value: Any) -> Any:
    """A model's words are never expressions."""
    match value:
        case str():
            return value.replace("${", "$${")
        case dict():
            return {name: _literal(member) for name, member in value.items()}
        case list():
            return [_literal(item) for item in value]
        case _:
            return value


def _end_refused(journal: Journal, refused: StepFold, reply: Reply) -> None:
    reason = RunReason(refused.reason or RunReason.REJECTED)
    error = {"step": refused.step.key, **(refused.last_error or {})}
    if refused.status == StepState.FAILED:
        journal.end = FlowEnd(reason=reason, error=error)
        return
    result = {"text": reply.text, "rejected": error}
    journal.end = FlowEnd(orjson.dumps(result).decode(), reason)


def _over_limit(journal: Journal, agent: Agent, asked: list[StepFold]) -> str | None:
    limits = agent.limits
    if len(asked) >= limits.turns:
        return f"the agent asked its model {len(asked)} times, as often as its limits.turns allow"
    if limits.tokens is not None and (tokens := sum(Reply.of(fold).tokens for fold in asked)) >= limits.tokens:
        return f"the agent used {tokens:,} tokens; its limits.tokens are {limits.tokens:,}"
    if limits.cost_usd is not None and (cost := journal.cost_usd()) >= limits.cost_usd:
        return f"the agent cost {cost:.4f} USD; its limits.cost_usd are {limits.cost_usd:g}"
    return None
