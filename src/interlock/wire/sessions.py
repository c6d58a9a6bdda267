"""Sessions: conversations with agents, and single acts of those that keep their own loop."""

from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AfterValidator, AwareDatetime, NonNegativeInt, PositiveInt, StringConstraints

from interlock.lifecycle import RunReason, RunState
from interlock.wire.grammar import Body, Id, Name, View, encodable


class Session(View):
    """A conversation with an agent. `run_id` is the run under way; `waiting` messages come after it."""

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
    """Without `agent` it is the tenant's `assistant`, or the built-in one."""

    agent: Name | None = None
    auto_approve: bool = False
    request_id: Name | None = None


# Long enough for a document, short enough to be stored with every event that quotes it.
Said = Annotated[str, StringConstraints(min_length=1, max_length=200_000, pattern=r"^[^\x00]+$")]


class NewMessage(Body):
    """Without `session_id` it opens a session, with `agent` as in `NewSession`.

    `auto_approve` lets pass what policy would ask one person about and is not high; it takes a key that may approve.
    """

    content: Said
    session_id: UUID | None = None
    agent: Name | None = None
    auto_approve: bool | None = None
    queue: bool = False
    request_id: Name | None = None


class Sent(View):
    """`run_id` is null while the message waits for the run before it."""

    session_id: Id
    run_id: Id | None = None
    message_id: Id
    queued: bool = False


class Message(View):
    """What somebody said, and what became of it: `answer` is the agent's, when its run has ended."""

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


class NewAct(Body):
    """One call of one tool, for an agent that keeps its own loop."""

    tool: Name
    args: Annotated[dict[str, Any], AfterValidator(encodable)] = {}
    request_id: Name | None = None


class Act(View):
    """`pending_approval`: people are asked; ask again by `id`, which is also its run's. `error` says why it failed."""

    id: Id
    tool: str
    status: Literal["done", "pending_approval", "running", "failed"]
    result: Any = None
    error: Any = None
    reason: RunReason | None = None
    approval_id: Id | None = None
