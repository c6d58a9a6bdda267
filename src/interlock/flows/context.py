"""The context of a flow: everything that a flow may do to the world or ask of it."""

import random
import uuid
from collections.abc import Awaitable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pydantic_core import PydanticSerializationError, to_jsonable_python

from interlock.definition.duration import parse_duration
from interlock.definition.expression import Template
from interlock.definition.flow import awaited_event, flow_step
from interlock.definition.plan import EXPIRES_IN, Gate, Retry, StepKind
from interlock.definition.workflow import is_event_type, is_label
from interlock.flows.asked import Asked, Gathered, SecretPlace, as_template, digest_of_asked, escaped
from interlock.flows.faults import FlowMisused
from interlock.lifecycle import Tier
from interlock.telemetry import log

if TYPE_CHECKING:
    from interlock.flows.replay import Replay

Duration = str | float | timedelta

_NAMED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-")


class FlowContext:
    """Handed to a flow. What is awaited of it becomes a step, with a key that is the same whenever the flow is run.

    A key is the name of what is asked for; asked for again it is `shop.refund#2`, within `gather` it has the branch in
    front: `gather.0/shop.refund`. `ctx.step("mine").call(…)` names it by hand.
    """

    __slots__ = ("_key", "_replay", "_retry", "_runs_on", "_timeout", "run_id", "tenant_id", "workflow")

    def __init__(self, replay: "Replay", run_id: UUID, tenant_id: UUID, workflow: str) -> None:
        self.run_id = run_id
        self.tenant_id = tenant_id
        self.workflow = workflow
        self._replay = replay
        self._key: str | None = None
        self._retry = Retry()
        self._timeout: float | None = None
        self._runs_on: str | None = None

    def step(
        self,
        key: str | None = None,
        /,
        *,
        max_attempts: int | None = None,
        base_delay: Duration | None = None,
        backoff: list[Duration] | None = None,
        timeout: Duration | None = None,
        runs_on: str | None = None,
    ) -> "FlowContext":
        """How the next step is named and tried, and on which workers, as in
        `await ctx.step("pay", max_attempts=2).call("shop.pay", …)` and `await ctx.step(runs_on="gpu").call("ml.fit")`.
        """
        if key is not None:
            _check_name("key", key)
        named = FlowContext(self._replay, self.run_id, self.tenant_id, self.workflow)
        plain = Retry()
        named._key = key
        named._timeout = None if timeout is None else _seconds("timeout", timeout)
        named._runs_on = runs_on
        named._retry = Retry(
            plain.max_attempts if max_attempts is None else max_attempts,
            plain.base_delay if base_delay is None else _seconds("base_delay", base_delay),
            tuple(_seconds("backoff", delay) for delay in backoff) if backoff else None,
        )
        if named._retry.max_attempts < 1:
            raise FlowMisused(f"max_attempts is at least 1, not {max_attempts}")
        if runs_on is not None and not (isinstance(runs_on, str) and is_label(runs_on)):
            raise FlowMisused(f"runs_on: expected the label of a worker such as gpu, not {runs_on!r:.120}")
        return named

    # ------------------------------------------------------------ steps

    def call(self, tool: str, /, **input: Any) -> Awaitable[Any]:
        """Call a tool, through the same gate and with the same receipts as in any workflow. Gives its output."""
        _check_name("tool", tool)
        given = _plain(tool, input)
        return self._ask(
            tool, StepKind.TOOL, [tool, given], tool=tool, input=Template.parse(given), retry=self._retry,
            timeout=self._timeout, runs_on=self._runs_on,
        )  # fmt: skip

    def approve(
        self, name: str, /, *, tier: str = "med", two_person: bool = False, expires_in: Duration | None = None,
        summary: str = "",
    ) -> Awaitable[None]:  # fmt: skip
        """Ask people, and wait for as long as it takes. Raises `Rejected` if they say no or nobody decides."""
        _check_name("approval", name)
        if tier not in tuple(Tier):
            raise FlowMisused(f"approval {name}: tier is low, med or high, not {tier!r}")
        chosen = Tier(tier)
        seconds = EXPIRES_IN[chosen] if expires_in is None else _seconds("expires_in", expires_in)
        gate = Gate(chosen, two_person, seconds, Template.parse(escaped(summary)))
        return self._ask(name, StepKind.APPROVAL, [tier, two_person, seconds, summary], gate=gate)

    def sleep(self, duration: Duration, /) -> Awaitable[None]:
        """Let time pass, for seconds or for months: nothing is held meanwhile."""
        seconds = _seconds("duration", duration)
        return self._ask("sleep", StepKind.WAIT, [seconds], duration=Template.parse(seconds))

    def wait(
        self, *, duration: Duration | None = None, event: str | None = None, correlation: str | int | None = None,
        timeout: Duration | None = None,
    ) -> Awaitable[Any]:  # fmt: skip
        """As `wait` in a workflow: for a duration, or for an event from outside, whose payload it gives.

        An event that came before counts. Raises `EventMissed` if none comes in time; without a time-out it waits.
        """
        if event is not None and duration is None:
            return self._wait_for(event, correlation, timeout)
        if duration is None or event is not None:
            raise FlowMisused("ctx.wait takes either a duration or an event")
        if correlation is not None or timeout is not None:
            raise FlowMisused("only a wait for an event has a correlation and a timeout")
        seconds = _seconds("duration", duration)
        return self._ask("wait", StepKind.WAIT, [seconds], duration=Template.parse(seconds))

    def _wait_for(self, event: Any, correlation: Any, timeout: Duration | None) -> Awaitable[Any]:
        if not isinstance(event, str) or not is_event_type(event):
            raise FlowMisused(f"{event!r:.120} is not the type of an event; write one such as bank.settled")
        about = str(correlation) if isinstance(correlation, int) and not isinstance(correlation, bool) else correlation
        if not isinstance(about, str) or not 0 < len(about) <= 500:
            raise FlowMisused(f"correlation: expected a number or a text of 1 to 500 characters, not {about!r:.120}")
        seconds = None if timeout is None else _seconds("timeout", timeout)
        if seconds == 0:
            raise FlowMisused("timeout: expected a duration above zero")
        awaited = awaited_event(event, escaped(about), seconds)
        return self._ask("wait", StepKind.WAIT, [event, about, seconds], event=awaited)

    def child(self, workflow: str, input: Any = None, /, *, version: int | None = None) -> Awaitable[Any]:
        """Start a run of another workflow or flow, wait for its end, and give its result. It is canceled with us."""
        _check_name("workflow", workflow)
        given = _plain(workflow, {} if input is None else input)
        template = Template.parse(given)
        if template.secrets:
            raise FlowMisused(
                f"the input of {workflow} is kept and shown: a secret can only go into the input of a tool"
            )
        return self._ask(
            workflow, StepKind.FLOW, [workflow, version, given], workflow=workflow, version=version, input=template
        )  # fmt: skip

    def gather(self, *steps: Awaitable[Any], return_exceptions: bool = False) -> Awaitable[list[Any]]:
        """Several side by side: steps, or coroutines that await steps of their own. All are settled before it ends."""
        named = self._replay.branch().named("gather")
        return self._replay.gathered(Gathered(named, steps, return_exceptions))

    def _ask(self, name: str, kind: StepKind, said: list[Any], **about: Any) -> Awaitable[Any]:
        branch = self._replay.branch()
        key = branch.named(self._key or name)
        digest = digest_of_asked(kind, *said)
        return self._replay.asked(Asked(flow_step(key, 0, kind, place=branch.next_place(), digest=digest, **about)))

    # ------------------------------------------------------------ values that would change

    def now(self) -> datetime:
        """The time, the same whenever the flow is run again. Not `datetime.now()`, which would not be."""
        return datetime.fromisoformat(self._replay.recorded("now", lambda: self._replay.clock().isoformat()))

    def random(self) -> float:
        """A random number from 0 to 1, the same whenever the flow is run again."""
        number: float = self._replay.recorded("random", random.random)
        return number

    def uuid(self) -> UUID:
        """A random id, the same whenever the flow is run again."""
        return UUID(self._replay.recorded("uuid", lambda: str(uuid.uuid4())))

    def secret(self, name: str, form: str = "{}", /) -> Any:
        """A stored secret, for the input of a tool and nothing else: `ctx.secret("token", "Bearer {}")`."""
        if "{}" not in form:
            raise FlowMisused(f"secret {name}: {form!r} has no {{}} for the secret to stand at")
        return SecretPlace(name, form)

    @property
    def log(self) -> Any:
        """A logger that is silent while the flow only repeats what it did before."""
        return self._replay.log(log.bind(run_id=str(self.run_id), flow=self.workflow))


def _check_name(what: str, name: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= 200 or not _NAMED.issuperset(name):
        raise FlowMisused(f"{name!r:.120} is no name for a step's {what}; write letters, digits and . _ : -")


def _seconds(what: str, duration: Duration) -> float:
    try:
        return parse_duration(duration.total_seconds() if isinstance(duration, timedelta) else duration)
    except ValueError as error:
        raise FlowMisused(f"{what}: {error}") from None


def _plain(name: str, input: Any) -> Any:
    try:
        return as_template(input, to_jsonable_python)
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        raise FlowMisused(f"the input of {name} is not JSON: {error}") from None
