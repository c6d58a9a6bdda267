"""A plan: a workflow that was checked, in the form the engine walks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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


# What a workflow's author can write; the others are an agent's.
WRITTEN = (StepKind.TOOL, StepKind.APPROVAL, StepKind.WAIT, StepKind.FLOW)


class OnReject(Term):
    FAIL = "fail", "The run fails."
    COMPLETE = "complete", "The run ends well, and nothing of what was refused is done."
    CONTINUE = "continue", "The refused step is skipped and the run goes on."


class OnTimeout(Term):
    FAIL = "fail", "The run fails."
    CONTINUE = "continue", "The step ends without an output and the run goes on."


# How long people have, by what is at stake, unless the step or the rule says otherwise.
EXPIRES_IN: Mapping[Tier, float] = MappingProxyType(
    {Tier.LOW: 24 * 3600.0, Tier.MED: 8 * 3600.0, Tier.HIGH: 4 * 3600.0}
)


# What the key of a step is continued with in the key of the step that undoes it: no id has a colon.
UNDO = ":undo"


@dataclass(frozen=True, slots=True)
class Retry:
    max_attempts: int = 4
    base_delay: float = 5.0
    backoff: tuple[float, ...] | None = None
    max_delay: float = 600.0

    def delay(self, failures: int, jitter: float) -> float:
        """Seconds until the next attempt after so many failures; `jitter` in [0, 1) spreads it by a tenth."""
        if self.backoff:
            delay = self.backoff[min(failures, len(self.backoff)) - 1]
        else:
            delay = 2.0 ** min(failures, 64) * self.base_delay
        return min(delay, self.max_delay) * (1 + 0.1 * (2 * jitter - 1))


@dataclass(frozen=True, slots=True)
class Gate:
    tier: Tier
    two_person: bool
    expires_in: float
    summary: Template


@dataclass(frozen=True, slots=True)
class OutsideEvent:
    """What a step waits for: an event of this type about this one thing. Without a time-out it waits for ever."""

    type: str
    correlation: Template
    timeout: Template | None
    on_timeout: OnTimeout


@dataclass(frozen=True, slots=True)
class Step:
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
    gate: Gate | None
    duration: Template | None
    event: OutsideEvent | None = None
    # The step that undoes this one, and in that step the key of the one it undoes.
    undo: "Step | None" = None
    undoes: str | None = None
    # Of a step that runs another workflow: which, and in which version if not the current one.
    workflow: str | None = None
    version: int | None = None
    # Of a flow's step: where in the flow it is asked for, and a digest of all that is asked.
    place: str | None = None
    digest: str | None = None
    # The label of the workers that may do it.
    runs_on: str | None = None

    @property
    def after(self) -> tuple[str, ...]:
        """What must be settled first. Only `needs` also pass a skip on; a step in a plain list just comes later."""
        return self.needs or ((self.follows,) if self.follows is not None else ())


@dataclass(frozen=True, slots=True)
class Limits:
    """What one message to an agent may use. None: as much as it takes."""

    turns: int = 25
    tokens: int | None = None
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class Agent:
    """A model with instructions and tools. Its steps are found out while it runs: see `journal.turns`."""

    model: str
    instructions: str
    # Names, and patterns like `shop.*`.
    tools: tuple[str, ...]
    limits: Limits
    settings: Mapping[str, Any]
    base_url: str | None = None
    # The environment variable of the workers that holds the key, if not the provider's usual one.
    api_key_env: str | None = None
    script: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_elsewhere(self) -> bool:
        """Not at the provider's address, or not with the key that the installation has there."""
        return self.base_url is not None or self.api_key_env is not None

    def may_use(self, tool: str) -> bool:
        return any(fnmatchcase(tool, pattern) for pattern in self.tools)


@dataclass(frozen=True, slots=True)
class Plan:
    """Two plans are the same when their digests are."""

    name: str = field(compare=False)
    description: str = field(compare=False)
    on_reject: OnReject = field(compare=False)
    timeout: float | None = field(compare=False)
    steps: tuple[Step, ...] = field(compare=False, repr=False)
    source: dict[str, Any] = field(compare=False, repr=False)
    digest: str
    # Stricter than the tenant's, never looser.
    max_writes_per_run: int | None = field(default=None, compare=False)
    # The most of its runs in flight, within what the tenant may have.
    max_concurrency: int | None = field(default=None, compare=False)
    # The version of the Python flow that says what the steps are; then there are none here.
    flow: str | None = field(default=None, compare=False)
    # The agent that a model and its tool calls make the steps of; then there are none here either.
    agent: Agent | None = field(default=None, compare=False)
    by_key: Mapping[str, Step] = field(init=False, compare=False, repr=False)
    successors: Mapping[str, tuple[str, ...]] = field(init=False, compare=False, repr=False)
    is_sequence: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        successors: dict[str, list[str]] = {step.key: [] for step in self.steps}
        for step in self.steps:
            for key in step.after:
                successors[key].append(step.key)
        in_order = zip(self.steps[1:], self.steps, strict=False)
        # Once here instead of for every step of every run: frozen, hence the way around.
        put = object.__setattr__
        put(self, "by_key", MappingProxyType({step.key: step for step in self.steps}))
        put(self, "successors", MappingProxyType({key: tuple(later) for key, later in successors.items()}))
        put(self, "is_sequence", not self.is_dynamic and all(step.follows == before.key for step, before in in_order))

    @property
    def is_dynamic(self) -> bool:
        """Its steps are declared while it runs."""
        return self.flow is not None or self.agent is not None

    @property
    def kind(self) -> str:
        return "agent" if self.agent is not None else "flow" if self.flow is not None else "workflow"

    @property
    def awaited(self) -> str:
        """A flow with its version, as runs that wait for it to be deployed name it."""
        return f"{self.name}@{self.flow}"

    @property
    def tools(self) -> tuple[str, ...]:
        """Each once, in the order of their first use."""
        called = (made for step in self.steps for made in (step, step.undo) if made is not None)
        return tuple(dict.fromkeys(step.tool for step in called if step.tool is not None))


def digest_of(source: Mapping[str, Any]) -> str:
    return sha256(orjson.dumps(source, option=orjson.OPT_SORT_KEYS)).hexdigest()
