"""The agent loop: what an agent does next, given its journal. It calls a model, makes its tool calls, and repeats.

Each model call is one step. Each tool call of the model is a separate step and passes the same gate as any other. The
model's answer is its step's output and determines the next steps, so this module keeps no state: a worker, a person's
decision and a sweep all arrive at the same next step.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from interlock.definition.expression import Template
from interlock.definition.flow import declaration, flow_step
from interlock.definition.plan import AgentPlan, OnReject, PlanStep, Retry, StepKind
from interlock.journal.journal import FlowEnd, Journal, StepSnapshot
from interlock.lifecycle import STEP, RunReason, StepState

_MODEL = "model"
_MODEL_RETRY = Retry(max_attempts=4, base_delay=2.0)
_TOOL_RETRY = Retry(max_attempts=3, base_delay=1.0)
_REFUSALS = (RunReason.REJECTED, RunReason.APPROVAL_EXPIRED)


@dataclass(frozen=True, slots=True)
class ModelReply:
    """A model's answer. A call with a `problem` is never made: the model receives the problem instead."""

    text: str
    calls: tuple[Mapping[str, Any], ...]
    tokens: int
    # How the answer ended, if it is incomplete: `finish_reason` (length, content_filter, error) and `refusal`.
    ending: Mapping[str, str]

    @classmethod
    def of(cls, fold: StepSnapshot) -> "ModelReply":
        said = orjson.loads(fold.output or "{}")
        usage = said.get("usage", {})
        tokens = usage.get("input_tokens", 0) + usage.get("output_tokens", 0)
        ending = {name: said[name] for name in ("finish_reason", "refusal") if name in said}
        return cls(said.get("text", ""), tuple(said.get("calls", ())), tokens, ending)

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        return [call for call in self.calls if "problem" not in call]


def plan_agent_steps(journal: Journal, agent: AgentPlan) -> None:
    """Declare the next steps, or record that the agent ended. Leaves steps in progress unchanged."""
    asked = model_steps(journal)
    if not asked:
        _ask_model(journal, agent, 1)
        return
    last = asked[-1]
    if last.status == StepState.FAILED:
        reason = RunReason(last.reason or RunReason.TERMINAL_ERROR)
        journal.end_flow(FlowEnd(reason=reason, error={"step": last.step.key, **(last.last_error or {})}))
    if last.status != StepState.SUCCEEDED:
        return
    reply = ModelReply.of(last)
    if reply.calls and (over := _over_budget(journal, agent, asked, reply)) is not None:
        _end_over(journal, over)  # before any call of this turn starts
        return
    called = [_call(journal, call) for call in reply.steps]
    if any(fold.status not in STEP.terminal for fold in called):
        return
    refused = next((fold for fold in called if fold.reason in _REFUSALS), None)
    if refused is not None and journal.plan.on_reject != OnReject.CONTINUE:
        _end_refused(journal, refused, reply)
    elif not reply.calls:
        journal.end_flow(FlowEnd(orjson.dumps({"text": reply.text, **reply.ending}).decode()))
    elif (over := _over_limit(journal, agent, asked)) is not None:
        _end_over(journal, over)
    else:
        _ask_model(journal, agent, len(asked) + 1)


def model_steps(journal: Journal) -> list[StepSnapshot]:
    return [fold for fold in journal.steps.values() if fold.step.kind is StepKind.MODEL]


def next_keys(journal: Journal, tools: Iterable[str]) -> list[str]:
    """Return the keys of the next calls of these tools: a tool called again is `shop.refund#2`, as in a flow."""
    used = Counter(fold.step.tool for fold in journal.steps.values() if fold.step.kind is StepKind.TOOL)
    keys = []
    for tool in tools:
        used[tool] += 1
        # The step that calls the model has a reserved name, and tool names contain no colon.
        keys.append(_key(f"tool:{tool}" if tool == _MODEL else tool, used[tool]))
    return keys


def _key(name: str, again: int) -> str:
    return name if again == 1 else f"{name}#{again}"


def _ask_model(journal: Journal, agent: AgentPlan, turn: int) -> None:
    key = _key(_MODEL, turn)
    _declare(journal, flow_step(
        key, len(journal.steps), StepKind.MODEL, tool=agent.model, retry=_MODEL_RETRY, place=key, digest=str(turn),
    ))  # fmt: skip


def _call(journal: Journal, call: Mapping[str, Any]) -> StepSnapshot:
    key = call["step"]
    input = Template.parse(_literal(call["args"]))
    known = journal.steps.get(key)
    step = flow_step(
        key, known.step.index if known else len(journal.steps), StepKind.TOOL, tool=call["tool"], input=input,
        retry=_TOOL_RETRY, place=key, digest=call["id"],
    )  # fmt: skip
    if known is None:
        return _declare(journal, step)
    known.step = step  # the journal has only a part of a step that was declared before a crash
    return known


def _declare(journal: Journal, step: PlanStep) -> StepSnapshot:
    # With the input: a person who decides on a call, edits or reverses it has only the journal to read.
    return journal.declare(step, declaration(step, with_input=step.kind is StepKind.TOOL))


def _literal(value: Any) -> Any:
    """Treat a model's text as a literal, never as an expression."""
    match value:
        case str():
            return value.replace("${", "$${")
        case dict():
            return {name: _literal(member) for name, member in value.items()}
        case list():
            return [_literal(item) for item in value]
        case _:
            return value


def _end_refused(journal: Journal, refused: StepSnapshot, reply: ModelReply) -> None:
    reason = RunReason(refused.reason or RunReason.REJECTED)
    error = {"step": refused.step.key, **(refused.last_error or {})}
    if refused.status == StepState.FAILED:
        journal.end_flow(FlowEnd(reason=reason, error=error))
        return
    result = {"text": reply.text, "rejected": error}
    journal.end_flow(FlowEnd(orjson.dumps(result).decode(), reason))


def _end_over(journal: Journal, over: str) -> None:
    journal.end_flow(FlowEnd(reason=RunReason.CAP_EXCEEDED, error={"type": "CapExceeded", "message": over}))


def _over_limit(journal: Journal, agent: AgentPlan, asked: list[StepSnapshot]) -> str | None:
    if len(asked) >= agent.limits.turns:
        return f"the agent asked its model {len(asked)} times, as often as its limits.turns allow"
    return _over_budget(journal, agent, asked)


def _over_budget(
    journal: Journal, agent: AgentPlan, asked: list[StepSnapshot], reply: ModelReply | None = None
) -> str | None:
    """Return why no more may be spent, or None. The costs of `reply`'s calls do not count: the result decides whether
    these calls are made, and must not change once some of them are done."""
    limits = agent.limits
    if limits.tokens is not None and (tokens := sum(ModelReply.of(fold).tokens for fold in asked)) >= limits.tokens:
        return f"the agent used {tokens:,} tokens; its limits.tokens are {limits.tokens:,}"
    made = [journal.steps[call["step"]] for call in reply.steps if call["step"] in journal.steps] if reply else []
    cost = journal.cost_usd() - sum(fold.cost_usd for fold in made)
    if limits.cost_usd is not None and cost >= limits.cost_usd:
        return f"the agent cost {cost:.4f} USD; its limits.cost_usd are {limits.cost_usd:g}"
    return None
