"""Sessions: conversations with agents, and tool calls of agents that keep their own loop."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AfterValidator, AwareDatetime, Field, NonNegativeInt, PositiveInt, StringConstraints

from interlock.lifecycle import RunReason, RunState
from interlock.wire.common import Body, Id, Name, View, encodable


def why_cut(said: Mapping[str, Any]) -> str | None:
    """Return why a model's answer is incomplete, or None if it is complete. `said` is the content of its message."""
    if said.get("refusal"):
        return "the model refused"
    reason = said.get("finish_reason")
    return _WHY_CUT.get(reason, f"it ended with {reason}") if reason else None


_WHY_CUT = {
    "length": "cut off where the model's limit of tokens was reached",
    "content_filter": "cut off by the provider's content filter",
    "error": "cut off by an error of the provider",
}


class Session(View):
    """A conversation with an agent. `run_id` is the current run; `waiting` messages follow it."""

    id: Id
    agent: str
    status: Literal["idle", "busy"]
    run_id: Id | None = None
    waiting: NonNegativeInt = 0
    auto_approve: bool = False
    workspace_id: str | None = None
    messages: NonNegativeInt = 0
    cost_usd: float = 0
    created_by: str
    created_at: AwareDatetime


class NewSession(Body):
    """The body to open a session. Without `agent` it uses the tenant's `assistant`, or the built-in agent."""

    agent: Name | None = None
    auto_approve: bool = False
    request_id: Name | None = None


# Long enough for a document, and short enough to be stored with every event that quotes it.
SessionMessages = Annotated[str, StringConstraints(min_length=1, max_length=200_000, pattern=r"^[^\x00]+$")]


class NewMessage(Body):
    """A message to an agent. Without `session_id` it opens a session, with `agent` as in `NewSession`.

    `auto_approve` approves calls that need one approver and are not tier `high`. It requires a key that may approve.
    """

    content: SessionMessages
    session_id: UUID | None = None
    agent: Name | None = None
    auto_approve: bool | None = None
    queue: bool = False
    request_id: Name | None = None


class Sent(View):
    """A message that was sent. `run_id` is null while the message waits for the previous run."""

    session_id: Id
    run_id: Id | None = None
    message_id: Id
    queued: bool = False


class Message(View):
    """A message and its result: `answer` is the agent's answer once the run has ended."""

    id: Id
    number: PositiveInt
    content: str
    by: str
    at: AwareDatetime
    run_id: Id | None = None
    status: RunState | Literal["queued"]
    reason: RunReason | None = None
    answer: str | None = None


class Agent(View):
    name: str
    version: int
    digest: str
    created_at: AwareDatetime
    model: str = ""
    source: Any = None


class NewToolCall(Body):
    """One call of one tool, for an agent that keeps its own loop.

    The server answers when the call has ended or needs an approval, or after `wait` seconds.
    """

    tool: Name
    # Each argument is an expression of the call's plan, and compiling the plan delays other requests.
    args: Annotated[dict[str, Any], Field(max_length=200), AfterValidator(encodable)] = {}
    wait: Annotated[float, Field(ge=0, le=60)] = 30.0
    request_id: Name | None = None


class ToolCall(View):
    """A tool call. While it is `pending_approval`, an approver has to decide.

    Ask again with `id`, which is also the id of its run.

    `error` says why a call failed.
    """

    id: Id
    tool: str
    status: Literal["done", "pending_approval", "running", "failed"]
    result: Any = None
    error: Any = None
    reason: RunReason | None = None
    approval_id: Id | None = None
