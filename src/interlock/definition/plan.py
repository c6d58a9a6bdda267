"""A plan: a checked definition, ready to be executed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import orjson

from interlock.definition.expression import Expression, Template
from interlock.lifecycle import Term, Tier


class StepKind(Term):
    TOOL = "tool", "Calls a tool."
    APPROVAL = "approval", "Asks people."
    WAIT = "wait", "Lets time pass, or waits for an event from outside."
    FLOW = "flow", "Runs another workflow or flow, and takes its result."
    MODEL = "model", "Asks a language model what to say and do next."


# The kinds that a workflow's author can write; the others are an agent's.
WRITTEN = (StepKind.TOOL, StepKind.APPROVAL, StepKind.WAIT, StepKind.FLOW)


class OnReject(Term):
    FAIL = "fail", "The run fails."
    COMPLETE = "complete", "The run ends well, and nothing of what was refused is done."
    CONTINUE = "continue", "The refused step is skipped and the run goes on."


class OnTimeout(Term):
    FAIL = "fail", "The run fails."
    CONTINUE = "continue", "The step ends without an output and the run goes on."


# How long an approval can be decided by tier, unless the step or the rule says otherwise.
EXPIRES_IN: Mapping[Tier, float] = MappingProxyType(
    {Tier.LOW: 24 * 3600.0, Tier.MED: 8 * 3600.0, Tier.HIGH: 4 * 3600.0}
)


# The suffix for the key of a compensation step. No id has a colon.
UNDO = ":undo"


@dataclass(frozen=True, slots=True)
class Retry:
    max_attempts: int = 4
    base_delay: float = 5.0
    backoff: tuple[float, ...] | None = None
    max_delay: float = 600.0

    def delay(self, failures: int, jitter: float) -> float:
        """Return the seconds until the next attempt after `failures`; `jitter` in [0, 1) varies it by a tenth."""
        if self.backoff:
            delay = self.backoff[min(failures, len(self.backoff)) - 1]
        else:
            delay = 2.0 ** min(failures, 64) * self.base_delay
        return min(delay, self.max_delay) * (1 + 0.1 * (2 * jitter - 1))


@dataclass(frozen=True, slots=True)
class ApprovalGate:
    tier: Tier
    two_person: bool
    expires_in: float
    summary: Template


@dataclass(frozen=True, slots=True)
class ExpectedEvent:
    """The event that a step waits for, by type and correlation. Without a time-out it waits for ever."""

    type: str
    correlation: Template
    timeout: Template | None
    on_timeout: OnTimeout


@dataclass(frozen=True, slots=True)
class PlanStep:
    key: str
    index: int
    kind: StepKind
    needs: tuple[str, ...]
    follows: str | None
    when: Expression | None
    tool: str | None
    input: Template
    retry: Retry
    timeout: float | None
    gate: ApprovalGate | None
    duration: Template | None
    event: ExpectedEvent | None = None
    # The compensation step of this step, and in the compensation step the key of the step it undoes.
    undo: "PlanStep | None" = None
    undoes: str | None = None
    # For a step that runs another workflow: its name, and its version if not the current one.
    workflow: str | None = None
    version: int | None = None
    # For a flow's step: the place in the flow's code, and a digest of the request.
    place: str | None = None
    digest: str | None = None
    # The label of the workers that may run it.
    runs_on: str | None = None

    @property
    def after(self) -> tuple[str, ...]:
        """Return the steps that must settle first.

        Only `needs` also propagate a skip; a step in a plain list just comes later.
        """
        return self.needs or ((self.follows,) if self.follows is not None else ())


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """What one message to an agent may use. None means no limit."""

    turns: int = 25
    tokens: int | None = None
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class Price:
    """A model's price, in USD for a million tokens."""

    input: float
    output: float

    def usd(self, input_tokens: int, output_tokens: int) -> float:
        return (input_tokens * self.input + output_tokens * self.output) / 1_000_000


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """A model with instructions and tools. Its steps are created while it runs: see `journal.agent_loop`."""

    model: str
    instructions: str
    # Names, and patterns such as `shop.*`.
    tools: tuple[str, ...]
    limits: AgentLimits
    settings: Mapping[str, Any]
    base_url: str | None = None
    # The environment variable of the workers with the key, if not the provider's usual one.
    api_key_env: str | None = None
    script: tuple[Mapping[str, Any], ...] = ()
    # For a model whose price is not publicly known, or differs here.
    price: Price | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Return True if the agent uses another address than the provider's, or another key than the installation's."""
        return self.base_url is not None or self.api_key_env is not None

    def may_use(self, tool: str) -> bool:
        return any(fnmatchcase(tool, pattern) for pattern in self.tools)


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked definition. Two plans are equal when their digests are."""

    name: str = field(compare=False)
    description: str = field(compare=False)
    on_reject: OnReject = field(compare=False)
    timeout: float | None = field(compare=False)
    steps: tuple[PlanStep, ...] = field(compare=False, repr=False)
    source: dict[str, Any] = field(compare=False, repr=False)
    digest: str
    # May lower the tenant's limit, but not raise it.
    max_writes_per_run: int | None = field(default=None, compare=False)
    # The highest number of its active runs, within the tenant's limit.
    max_concurrency: int | None = field(default=None, compare=False)
    # The version of the Python flow that declares the steps; then `steps` is empty.
    flow: str | None = field(default=None, compare=False)
    # The agent whose model and tool calls are the steps; then `steps` is empty too.
    agent: AgentPlan | None = field(default=None, compare=False)
    by_key: Mapping[str, PlanStep] = field(init=False, compare=False, repr=False)
    successors: Mapping[str, tuple[str, ...]] = field(init=False, compare=False, repr=False)
    is_sequence: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        successors: dict[str, list[str]] = {step.key: [] for step in self.steps}
        for step in self.steps:
            for key in step.after:
                successors[key].append(step.key)
        in_order = zip(self.steps[1:], self.steps, strict=False)
        # Computed once here instead of for every step of every run. The class is frozen, hence `object.__setattr__`.
        put = object.__setattr__
        put(self, "by_key", MappingProxyType({step.key: step for step in self.steps}))
        put(self, "successors", MappingProxyType({key: tuple(later) for key, later in successors.items()}))
        put(self, "is_sequence", not self.is_dynamic and all(step.follows == before.key for step, before in in_order))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the fields of the constructor; the derived fields are computed again in the other process."""
        return Plan, tuple(getattr(self, each.name) for each in fields(self) if each.init)

    @property
    def is_dynamic(self) -> bool:
        """Return True if the steps are declared while the run executes."""
        return self.flow is not None or self.agent is not None

    @property
    def kind(self) -> str:
        return "agent" if self.agent is not None else "flow" if self.flow is not None else "workflow"

    @property
    def awaited(self) -> str:
        """Return the flow with its version, as runs that wait for its deployment name it."""
        return f"{self.name}@{self.flow}"

    @property
    def tools(self) -> tuple[str, ...]:
        """Return the tools, each once, in the order of their first use."""
        called = (made for step in self.steps for made in (step, step.undo) if made is not None)
        return tuple(dict.fromkeys(step.tool for step in called if step.tool is not None))


def digest_of(source: Mapping[str, Any]) -> str:
    return sha256(orjson.dumps(source, option=orjson.OPT_SORT_KEYS)).hexdigest()
