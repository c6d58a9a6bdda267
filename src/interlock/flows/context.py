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
from interlock.definition.plan import EXPIRES_IN, ApprovalGate, Retry, StepKind
from interlock.definition.workflow import is_event_type, is_label
from interlock.flows.awaitables import (
    PendingGather,
    PendingStep,
    SecretPlaceholder,
    as_template,
    escaped,
    request_digest,
)
from interlock.flows.errors import FlowUsageError
from interlock.ids import RunId, TenantId
from interlock.lifecycle import Tier
from interlock.telemetry import log

if TYPE_CHECKING:
    from interlock.flows.replay import Replay

Duration = str | float | timedelta

_NAMED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-")


class FlowContext:
    """The argument of a flow. Each call that the flow awaits becomes a step; its key is the same in every replay.

    The key is the name of the tool or wait; a repeated name is `shop.refund#2`. Within `gather` the branch comes first:
    `gather.0/shop.refund`. `ctx.step("mine").call(…)` sets the key explicitly.
    """

    __slots__ = ("_key", "_replay", "_retry", "_runs_on", "_timeout", "run_id", "tenant_id", "workflow")

    def __init__(self, replay: "Replay", run_id: RunId, tenant_id: TenantId, workflow: str) -> None:
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
        """Set the name, the attempts and the workers of the next step, as in
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
            raise FlowUsageError(f"max_attempts is at least 1, not {max_attempts}")
        if runs_on is not None and not (isinstance(runs_on, str) and is_label(runs_on)):
            raise FlowUsageError(f"runs_on: expected the label of a worker such as gpu, not {runs_on!r:.120}")
        return named

    # ------------------------------------------------------------ steps

    def call(self, tool: str, /, **input: Any) -> Awaitable[Any]:
        """Call a tool, through the same gate and with the same receipts as in any workflow. Return its output."""
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
        """Request approval, and wait as long as it takes. Raises `Rejected` if it is rejected or expires."""
        _check_name("approval", name)
        if tier not in tuple(Tier):
            raise FlowUsageError(f"approval {name}: tier is low, med or high, not {tier!r}")
        chosen = Tier(tier)
        seconds = EXPIRES_IN[chosen] if expires_in is None else _seconds("expires_in", expires_in)
        gate = ApprovalGate(chosen, two_person, seconds, Template.parse(escaped(summary)))
        return self._ask(name, StepKind.APPROVAL, [tier, two_person, seconds, summary], gate=gate)

    def sleep(self, duration: Duration, /) -> Awaitable[None]:
        """Wait for seconds or for months: the suspended run holds no lease, thread, connection or memory."""
        seconds = _seconds("duration", duration)
        return self._ask("sleep", StepKind.WAIT, [seconds], duration=Template.parse(seconds))

    def wait(
        self, *, duration: Duration | None = None, event: str | None = None, correlation: str | int | None = None,
        timeout: Duration | None = None,
    ) -> Awaitable[Any]:  # fmt: skip
        """Wait for a duration, or for an external event and return its payload, like `wait` in a workflow.

        An event that came before counts. Raises `EventTimeout` if none comes in time; without a time-out it waits.
        """
        if event is not None and duration is None:
            return self._wait_for(event, correlation, timeout)
        if duration is None or event is not None:
            raise FlowUsageError("ctx.wait takes either a duration or an event")
        if correlation is not None or timeout is not None:
            raise FlowUsageError("only a wait for an event has a correlation and a timeout")
        seconds = _seconds("duration", duration)
        return self._ask("wait", StepKind.WAIT, [seconds], duration=Template.parse(seconds))

    def _wait_for(self, event: Any, correlation: Any, timeout: Duration | None) -> Awaitable[Any]:
        if not isinstance(event, str) or not is_event_type(event):
            raise FlowUsageError(f"{event!r:.120} is not the type of an event; write one such as bank.settled")
        about = str(correlation) if isinstance(correlation, int) and not isinstance(correlation, bool) else correlation
        if not isinstance(about, str) or not 0 < len(about) <= 500:
            raise FlowUsageError(f"correlation: expected a number or a text of 1 to 500 characters, not {about!r:.120}")
        seconds = None if timeout is None else _seconds("timeout", timeout)
        if seconds == 0:
            raise FlowUsageError("timeout: expected a duration above zero")
        awaited = awaited_event(event, escaped(about), seconds)
        return self._ask("wait", StepKind.WAIT, [event, about, seconds], event=awaited)

    def child(self, workflow: str, input: Any = None, /, *, version: int | None = None) -> Awaitable[Any]:
        """Start a child run of a workflow or flow, wait for it, and return its result. It is canceled with this run."""
        _check_name("workflow", workflow)
        given = _plain(workflow, {} if input is None else input)
        template = Template.parse(given)
        if template.secrets:
            raise FlowUsageError(
                f"the input of {workflow} is kept and shown: a secret can only go into the input of a tool"
            )
        return self._ask(
            workflow, StepKind.FLOW, [workflow, version, given], workflow=workflow, version=version, input=template
        )  # fmt: skip

    def gather(self, *steps: Awaitable[Any], return_exceptions: bool = False) -> Awaitable[list[Any]]:
        """Run several side by side: steps, or coroutines that await steps. Returns once all are settled."""
        named = self._replay.branch().named("gather")
        return self._replay.gathered(PendingGather(named, steps, return_exceptions))

    def _ask(self, name: str, kind: StepKind, said: list[Any], **about: Any) -> Awaitable[Any]:
        branch = self._replay.branch()
        key = branch.named(self._key or name)
        digest = request_digest(kind, *said)
        return self._replay.asked(
            PendingStep(flow_step(key, 0, kind, place=branch.next_place(), digest=digest, **about))
        )

    # ------------------------------------------------------------ values that would change in a replay

    def now(self) -> datetime:
        """Return the time, the same in every replay. `datetime.now()` would change."""
        return datetime.fromisoformat(self._replay.recorded("now", lambda: self._replay.clock().isoformat()))

    def random(self) -> float:
        """Return a random number from 0 to 1, the same in every replay."""
        number: float = self._replay.recorded("random", random.random)
        return number

    def uuid(self) -> UUID:
        """Return a random id, the same in every replay."""
        return UUID(self._replay.recorded("uuid", lambda: str(uuid.uuid4())))

    def secret(self, name: str, form: str = "{}", /) -> Any:
        """Refer to a stored secret in the input of a tool, and only there: `ctx.secret("token", "Bearer {}")`."""
        if "{}" not in form:
            raise FlowUsageError(f"secret {name}: {form!r} has no {{}} for the secret to stand at")
        return SecretPlaceholder(name, form)

    @property
    def log(self) -> Any:
        """Return a logger that is silent while the flow only repeats what it did before."""
        return self._replay.log(log.bind(run_id=str(self.run_id), flow=self.workflow))


def _check_name(what: str, name: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= 200 or not _NAMED.issuperset(name):
        raise FlowUsageError(f"{name!r:.120} is no name for a step's {what}; write letters, digits and . _ : -")


def _seconds(what: str, duration: Duration) -> float:
    try:
        return parse_duration(duration.total_seconds() if isinstance(duration, timedelta) else duration)
    except ValueError as error:
        raise FlowUsageError(f"{what}: {error}") from None


def _plain(name: str, input: Any) -> Any:
    try:
        return as_template(input, to_jsonable_python)
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        raise FlowUsageError(f"the input of {name} is not JSON: {error}") from None
