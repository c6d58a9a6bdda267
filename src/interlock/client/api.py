"""Every call of the API, described once for the sync and the async client."""

from collections.abc import Mapping
from typing import Any

from interlock.client.call import Call, at, delete, endpoint, get, post, send_text
from interlock.lifecycle import ApprovalState, RunState
from interlock.wire import (
    Approval,
    Decide,
    Event,
    Health,
    Key,
    NewKey,
    NewTenant,
    NewTrigger,
    Page,
    Role,
    Run,
    StartRun,
    Stop,
    Tenant,
    Tool,
    Worker,
    Workflow,
)


class Api:
    # ------------------------------------------------------------ runs

    @endpoint
    def start(
        self,
        workflow: str,
        input: Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
        trigger: NewTrigger | None = None,
        deadline_seconds: float | None = None,
        idempotency_key: str | None = None,
        wait: float | None = None,
    ) -> Call[Run]:
        """Start a run. With `wait` the answer comes when the run ended, needs a person, or after so many seconds."""
        body = StartRun(
            workflow=workflow,
            version=version,
            input=dict(input or {}),
            trigger=trigger,
            deadline_seconds=deadline_seconds,
        )
        return post("/api/runs", Run, body, idempotency_key=idempotency_key, wait=wait)

    @endpoint
    def run(self, run_id: str, wait: float | None = None) -> Call[Run]:
        """A run with its steps. `wait` as in `start`."""
        return get(at("/api/runs/{}", run_id), Run, wait=wait)

    @endpoint
    def runs(
        self,
        *,
        status: RunState | str | None = None,
        workflow: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Call[Page[Run]]:
        """A page of runs, newest first, without their steps."""
        return get("/api/runs", Page[Run], status=status, workflow=workflow, limit=limit, cursor=cursor)

    @endpoint
    def approve(self, run_id: str, *, reason: str | None = None) -> Call[Run]:
        """Approve what the run waits for."""
        return post(at("/api/runs/{}/approve", run_id), Run, Decide(reason=reason))

    @endpoint
    def cancel(self, run_id: str, *, reason: str | None = None) -> Call[Run]:
        """Stop a run, as its operator."""
        return post(at("/api/runs/{}/cancel", run_id), Run, Stop(reason=reason))

    @endpoint
    def interrupt(self, run_id: str, *, reason: str | None = None) -> Call[Run]:
        """Stop a run, as the user of its session."""
        return post(at("/api/runs/{}/interrupt", run_id), Run, Stop(reason=reason))

    @endpoint
    def retry(self, run_id: str) -> Call[Run]:
        """Start a new run that goes on where this one failed."""
        return post(at("/api/runs/{}/retry", run_id), Run)

    @endpoint
    def events(self, run_id: str, *, after: int = 0, limit: int | None = None) -> Call[Page[Event]]:
        """The events that follow number `after`; while there is a `next_cursor`, more follow the last of them."""
        return get(at("/api/runs/{}/events", run_id), Page[Event], after=after, limit=limit)

    # ------------------------------------------------------------ approvals

    @endpoint
    def approvals(
        self,
        *,
        status: ApprovalState | str | None = None,
        run_id: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Call[Page[Approval]]:
        return get("/api/approvals", Page[Approval], status=status, run_id=run_id, limit=limit, cursor=cursor)

    @endpoint
    def approval(self, approval_id: str) -> Call[Approval]:
        return get(at("/api/approvals/{}", approval_id), Approval)

    @endpoint
    def approve_approval(
        self, approval_id: str, *, reason: str | None = None, digest: str | None = None
    ) -> Call[Approval]:
        """Vote yes. With `digest` the vote counts only if the action is still that one."""
        return post(at("/api/approvals/{}/approve", approval_id), Approval, Decide(reason=reason, digest=digest))

    @endpoint
    def reject_approval(
        self, approval_id: str, *, reason: str | None = None, digest: str | None = None
    ) -> Call[Approval]:
        """Vote no; one such vote ends the approval."""
        return post(at("/api/approvals/{}/reject", approval_id), Approval, Decide(reason=reason, digest=digest))

    # ------------------------------------------------------------ workflows and tools

    @endpoint
    def apply_workflow(self, text: str) -> Call[Workflow]:
        """Publish a workflow from its YAML. The same content again answers the version it already has."""
        return send_text("/api/workflows", Workflow, text.encode(), "application/yaml")

    @endpoint
    def workflows(self, *, limit: int | None = None, cursor: str | None = None) -> Call[Page[Workflow]]:
        """The newest version of every workflow."""
        return get("/api/workflows", Page[Workflow], limit=limit, cursor=cursor)

    @endpoint
    def workflow(self, name: str, version: int | None = None) -> Call[Workflow]:
        """A workflow with its source: the newest version, or the one asked for."""
        return get(at("/api/workflows/{}", name), Workflow, version=version)

    @endpoint
    def tools(self) -> Call[Page[Tool]]:
        """The tools that the server knows."""
        return get("/api/tools", Page[Tool])

    # ------------------------------------------------------------ tenants, keys, workers

    @endpoint
    def create_tenant(self, name: str, *, max_concurrency: int | None = None, weight: float = 1) -> Call[Tenant]:
        """A new tenant, with its first admin key in the answer."""
        return post("/api/tenants", Tenant, NewTenant(name=name, max_concurrency=max_concurrency, weight=weight))

    @endpoint
    def tenants(self, *, limit: int | None = None, cursor: str | None = None) -> Call[Page[Tenant]]:
        return get("/api/tenants", Page[Tenant], limit=limit, cursor=cursor)

    @endpoint
    def create_key(self, name: str, role: Role | str, *, workspace_id: str | None = None) -> Call[Key]:
        """A new API key; the secret is in this answer and never shown again."""
        return post("/api/keys", Key, NewKey(name=name, role=Role(role), workspace_id=workspace_id))

    @endpoint
    def keys(self, *, limit: int | None = None, cursor: str | None = None) -> Call[Page[Key]]:
        return get("/api/keys", Page[Key], limit=limit, cursor=cursor)

    @endpoint
    def revoke_key(self, key_id: str) -> Call[None]:
        return delete(at("/api/keys/{}", key_id))

    @endpoint
    def workers(self, *, limit: int | None = None, cursor: str | None = None) -> Call[Page[Worker]]:
        return get("/api/workers", Page[Worker], limit=limit, cursor=cursor)

    @endpoint
    def health(self) -> Call[Health]:
        return get("/healthz", Health)
