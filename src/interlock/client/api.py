"""Every call of the API, described once for the sync and the async client."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from interlock.client.endpoint import EndpointCall, at, delete, endpoint, get, post, send_text
from interlock.lifecycle import ApprovalState, JobState, RunState, Tier
from interlock.wire import (
    Agent,
    Approval,
    ApproveRequest,
    AuditEntry,
    AuditVerdict,
    Backtest,
    Backtested,
    BulkDecide,
    CancelRequest,
    ChangeTenant,
    Decide,
    Decided,
    Delivery,
    Evaluate,
    Event,
    Flow,
    Grant,
    Health,
    Job,
    JobHistoryEvent,
    JobTree,
    Key,
    Message,
    NewGrant,
    NewJob,
    NewKey,
    NewMessage,
    NewSchedule,
    NewSession,
    NewTenant,
    NewToolCall,
    NewTrigger,
    NewWebhook,
    NewWorker,
    Order,
    Page,
    Policy,
    PolicyDecision,
    PublicKey,
    PublishedPolicy,
    Receipt,
    ReceivedEvent,
    Reject,
    ResolveReceipt,
    Role,
    Rollback,
    Run,
    Schedule,
    SendEvent,
    Sent,
    SentEvent,
    Session,
    SlackChannel,
    SlackLinkCode,
    SlackOffer,
    SlackTeam,
    SlackUser,
    StartRun,
    StartRuns,
    StoredSecret,
    StoredTrigger,
    SupervisorView,
    Tenant,
    TenantChannel,
    TestTrigger,
    Tool,
    ToolCall,
    TriggerPreview,
    Usage,
    VerifyAudit,
    VersionDifference,
    Webhook,
    WebhookEvent,
    WorkerView,
    Workflow,
)

# Checking a long chain takes a long time.
VERIFY_SECONDS = 1800.0


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
        over_cap: Literal["wait", "refuse"] | None = None,
    ) -> EndpointCall[Run]:
        """Start a run. With `wait`, return when the run ended or needs a person, at the latest after `wait` seconds.

        Over the tenant's cap of runs per minute, the run waits for a later minute. With `over_cap="refuse"` it is
        rejected.
        """
        body = StartRun(
            workflow=workflow,
            version=version,
            input=dict(input or {}),
            trigger=trigger,
            deadline_seconds=deadline_seconds,
        )
        return post("/api/runs", Run, body, idempotency_key=idempotency_key, wait=wait, over_cap=over_cap)

    @endpoint
    def start_many(
        self,
        workflow: str,
        inputs: Iterable[Mapping[str, Any]],
        *,
        version: int | None = None,
        trigger: NewTrigger | None = None,
        deadline_seconds: float | None = None,
        idempotency_key: str | None = None,
        over_cap: Literal["wait", "refuse"] | None = None,
    ) -> EndpointCall[Page[Run]]:
        """Start a run for each of up to 1,000 inputs: all of them or none. The runs are returned in the same order."""
        body = StartRuns(
            workflow=workflow,
            version=version,
            inputs=[dict(given) for given in inputs],
            trigger=trigger,
            deadline_seconds=deadline_seconds,
        )
        return post("/api/runs/batch", Page[Run], body, idempotency_key=idempotency_key, over_cap=over_cap)

    @endpoint
    def run(self, run_id: str, wait: float | None = None) -> EndpointCall[Run]:
        """Return a run with its steps. `wait` works as in `start`."""
        return get(at("/api/runs/{}", run_id), Run, wait=wait)

    @endpoint
    def runs(
        self,
        *,
        status: RunState | str | None = None,
        workflow: str | None = None,
        parent: str | None = None,
        job: str | None = None,
        repository: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> EndpointCall[Page[Run]]:
        """Return a page of runs, newest first, without their steps. Filter by a job, or by a `parent` run."""
        return get(
            "/api/runs", Page[Run], status=status, workflow=workflow, parent_run_id=parent, job_id=job,
            repository=repository, limit=limit, cursor=cursor,
        )  # fmt: skip

    @endpoint
    def approve(self, run_id: str, *, reason: str | None = None, digest: str | None = None) -> EndpointCall[Run]:
        """Approve everything the run waits for, or with `digest` the one action that has this digest."""
        return post(at("/api/runs/{}/approve", run_id), Run, ApproveRequest(reason=reason, digest=digest))

    @endpoint
    def cancel(self, run_id: str, *, reason: str | None = None) -> EndpointCall[Run]:
        """Stop a run, as its operator."""
        return post(at("/api/runs/{}/cancel", run_id), Run, CancelRequest(reason=reason))

    @endpoint
    def interrupt(self, run_id: str, *, reason: str | None = None) -> EndpointCall[Run]:
        """Stop a run, as the user of its session."""
        return post(at("/api/runs/{}/interrupt", run_id), Run, CancelRequest(reason=reason))

    @endpoint
    def retry(self, run_id: str) -> EndpointCall[Run]:
        """Start a new run that continues a failed one."""
        return post(at("/api/runs/{}/retry", run_id), Run)

    @endpoint
    def events(self, run_id: str, *, after: int = 0, limit: int | None = None) -> EndpointCall[Page[Event]]:
        """Return the events after number `after`. If there is a `next_cursor`, more events follow."""
        return get(at("/api/runs/{}/events", run_id), Page[Event], after=after, limit=limit)

    # ------------------------------------------------------------ external events

    @endpoint
    def send_event(
        self, type: str, correlation: str, payload: Any = None, *, id: str | None = None
    ) -> EndpointCall[SentEvent]:
        """Publish an external event, for a step that waits for it now or later.

        The same `id` identifies the same event.
        """
        body = SendEvent(type=type, correlation=correlation, payload={} if payload is None else payload, id=id)
        return post("/api/events", SentEvent, body)

    @endpoint
    def outside_events(
        self,
        *,
        type: str | None = None,
        correlation: str | None = None,
        matched: bool | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> EndpointCall[Page[ReceivedEvent]]:
        """Return published external events, newest first, until they expire."""
        return get(
            "/api/events", Page[ReceivedEvent], type=type, correlation=correlation, matched=matched, limit=limit,
            cursor=cursor,
        )  # fmt: skip

    # ------------------------------------------------------------ approvals

    @endpoint
    def approvals(
        self,
        *,
        status: ApprovalState | str | None = None,
        run_id: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> EndpointCall[Page[Approval]]:
        return get("/api/approvals", Page[Approval], status=status, run_id=run_id, limit=limit, cursor=cursor)

    @endpoint
    def approval(self, approval_id: str) -> EndpointCall[Approval]:
        return get(at("/api/approvals/{}", approval_id), Approval)

    @endpoint
    def approve_approval(
        self,
        approval_id: str,
        *,
        reason: str | None = None,
        digest: str | None = None,
        patch: Mapping[str, Any] | None = None,
    ) -> EndpointCall[Approval]:
        """Vote yes. With `digest` the vote counts only for that exact action; an edited action requires it.

        With `patch` these fields replace the proposed ones first. The policy evaluates the edited action again, and
        earlier votes no longer count.
        """
        body = Decide(reason=reason, digest=digest, patch=dict(patch) if patch is not None else None)
        return post(at("/api/approvals/{}/approve", approval_id), Approval, body)

    @endpoint
    def reject_approval(
        self, approval_id: str, *, reason: str | None = None, digest: str | None = None
    ) -> EndpointCall[Approval]:
        """Vote no. One such vote ends the approval."""
        return post(at("/api/approvals/{}/reject", approval_id), Approval, Reject(reason=reason, digest=digest))

    @endpoint
    def decide_many(
        self,
        ids: Iterable[str],
        decision: Literal["approve", "reject"],
        *,
        reason: str | None = None,
        digests: Mapping[str, str] | None = None,
    ) -> EndpointCall[Page[Decided]]:
        """Vote the same way on several approvals, with a separate result for each.

        A rejected vote does not stop the others.

        `digests` maps an approval's id to the digest of its action: that vote counts only for that exact action.
        """
        body = BulkDecide(ids=list(ids), decision=decision, reason=reason, digests=dict(digests) if digests else None)
        return post("/api/approvals/decide", Page[Decided], body)

    # ------------------------------------------------------------ sessions

    @endpoint
    def apply_agent(self, text: str, *, allow_unknown_tools: bool = False) -> EndpointCall[Agent]:
        """Publish an agent from its YAML. Publishing the same content again returns the existing version.

        `allow_unknown_tools` accepts tools that the server does not have, because some workers may have them.
        """
        unknown = allow_unknown_tools or None
        return send_text("/api/agents", Agent, text.encode(), "application/yaml", allow_unknown_tools=unknown)

    @endpoint
    def agents(self, *, limit: int | None = None, cursor: str | None = None) -> EndpointCall[Page[Agent]]:
        """Return the newest version of every agent."""
        return get("/api/agents", Page[Agent], limit=limit, cursor=cursor)

    @endpoint
    def agent(self, name: str, version: int | None = None) -> EndpointCall[Agent]:
        """Return an agent with its source: the newest version, or the requested one."""
        return get(at("/api/agents/{}", name), Agent, version=version)

    @endpoint
    def open_session(self, agent: str | None = None, *, auto_approve: bool = False) -> EndpointCall[Session]:
        """Open a session with an agent; without one, with the tenant's `assistant`."""
        return post("/api/sessions", Session, NewSession(agent=agent, auto_approve=auto_approve))

    @endpoint
    def session(self, session_id: str) -> EndpointCall[Session]:
        return get(at("/api/sessions/{}", session_id), Session)

    @endpoint
    def sessions(self, *, limit: int | None = None, cursor: str | None = None) -> EndpointCall[Page[Session]]:
        """Return a page of sessions, newest first."""
        return get("/api/sessions", Page[Session], limit=limit, cursor=cursor)

    @endpoint
    def say(
        self,
        content: str,
        *,
        session_id: str | None = None,
        agent: str | None = None,
        auto_approve: bool | None = None,
        queue: bool = False,
        idempotency_key: str | None = None,
    ) -> EndpointCall[Sent]:
        """Send a message to an agent.

        While its session has an active run, this raises SESSION_BUSY, or with `queue` the message waits.
        """
        body = NewMessage.model_validate(
            {
                "content": content, "session_id": session_id, "agent": agent, "auto_approve": auto_approve,
                "queue": queue,
            }
        )  # fmt: skip
        return post("/api/messages", Sent, body, idempotency_key=idempotency_key)

    @endpoint
    def messages(
        self, session_id: str, *, limit: int | None = None, cursor: str | None = None
    ) -> EndpointCall[Page[Message]]:
        """Return the messages of a session, oldest first, each with its answer."""
        return get(at("/api/sessions/{}/messages", session_id), Page[Message], limit=limit, cursor=cursor)

    @endpoint
    def tool_call(
        self, tool: str, args: Mapping[str, Any] | None = None, *, wait: float = 30,
        idempotency_key: str | None = None, allow_unknown_tools: bool = False,
    ) -> EndpointCall[ToolCall]:  # fmt: skip
        """Call one tool through the policy gate, from an agent's own loop.

        Returns when the call has ended or is `pending_approval`, or after `wait` seconds. Pass the id of the model's
        own call as `idempotency_key`, so that the same call made twice is one tool call. `allow_unknown_tools` accepts
        a tool that the server does not have, because some workers may have it.
        """
        body = NewToolCall(tool=tool, args=dict(args or {}), wait=wait)
        unknown = allow_unknown_tools or None
        made = post("/api/tool-calls", ToolCall, body, idempotency_key=idempotency_key, allow_unknown_tools=unknown)
        return replace(made, wait=wait)

    @endpoint
    def get_tool_call(self, tool_call_id: str, *, wait: float = 0) -> EndpointCall[ToolCall]:
        """Return a tool call. With `wait`, return when it has ended, at the latest after `wait` seconds."""
        return get(at("/api/tool-calls/{}", tool_call_id), ToolCall, wait=wait)

    @endpoint
    def cancel_tool_call(self, tool_call_id: str, *, reason: str | None = None) -> EndpointCall[ToolCall]:
        """Cancel a tool call that this key made."""
        return post(at("/api/tool-calls/{}/cancel", tool_call_id), ToolCall, CancelRequest(reason=reason))

    # ------------------------------------------------------------ policy

    @endpoint
    def policy(self) -> EndpointCall[Policy]:
        """Return the policy in force, with its text as published."""
        return get("/api/policy", Policy)

    @endpoint
    def publish_policy(self, text: str) -> EndpointCall[PublishedPolicy]:
        """Publish a policy. An invalid one is rejected, with every fault in the error's `errors`."""
        return send_text("/api/policy", PublishedPolicy, text.encode(), "text/plain", method="PUT")

    @endpoint
    def evaluate_policy(
        self,
        tool: str,
        input: Mapping[str, Any] | None = None,
        *,
        role: Role | str = Role.OPERATOR,
        groups: Sequence[str] = (),
        workflow: str = "",
        hour: int | None = None,
        policy: str | None = None,
    ) -> EndpointCall[PolicyDecision]:
        """Return the decision on an action, by the policy in force or by the given text. Nothing is executed."""
        body = Evaluate(
            tool=tool,
            input=dict(input or {}),
            role=Role(role),
            groups=list(groups),
            workflow=workflow,
            hour=hour,
            policy=policy,
        )
        return post("/api/policy/evaluate", PolicyDecision, body)

    @endpoint
    def backtest_policy(self, text: str, *, limit: int = 1000) -> EndpointCall[Backtested]:
        """Return which of the last `limit` decisions this policy would make differently."""
        return post("/api/policy/backtest", Backtested, Backtest(policy=text, limit=limit))

    @endpoint
    def policy_versions(
        self, *, digest: str | None = None, limit: int | None = None, cursor: str | None = None
    ) -> EndpointCall[Page[Policy]]:
        """Return the versions of the policy, newest first. `digest` finds the version that evidence names."""
        return get("/api/policy/versions", Page[Policy], digest=digest, limit=limit, cursor=cursor)

    @endpoint
    def policy_version(self, version: int) -> EndpointCall[Policy]:
        """Return one version of the policy with its text. Version 0 is the built-in policy."""
        return get(at("/api/policy/versions/{}", str(version)), Policy)

    @endpoint
    def compare_policy(self, version: int, against: int | None = None) -> EndpointCall[VersionDifference]:
        """Compare a version of the policy with another one, by default with the previous one."""
        return get(at("/api/policy/versions/{}/diff", str(version)), VersionDifference, against=against)

    @endpoint
    def roll_back_policy(self, version: int) -> EndpointCall[Policy]:
        """Publish the text of an earlier version as a new one."""
        return post("/api/policy/rollback", Policy, Rollback(version=version))

    # ------------------------------------------------------------ receipts

    @endpoint
    def receipts(self, run_id: str) -> EndpointCall[Page[Receipt]]:
        """Return every effect of a run: what was attempted, and its result."""
        return get(at("/api/runs/{}/receipts", run_id), Page[Receipt])

    @endpoint
    def receipt(self, receipt_id: str) -> EndpointCall[Receipt]:
        return get(at("/api/receipts/{}", receipt_id), Receipt)

    @endpoint
    def resolve_receipt(
        self,
        receipt_id: str,
        outcome: Literal["happened", "did_not_happen", "fail"],
        *,
        output: Any = None,
        reason: str | None = None,
    ) -> EndpointCall[Receipt]:
        """Resolve an effect in doubt. `output` is what the tool would have returned."""
        body = ResolveReceipt(outcome=outcome, output=output, reason=reason)
        return post(at("/api/receipts/{}/resolve", receipt_id), Receipt, body)

    @endpoint
    def reverse_receipt(self, receipt_id: str, *, reason: str | None = None) -> EndpointCall[Run]:
        """Undo an effect, at most once. Returns the new run that undoes it. Policy may require approval of it."""
        return post(at("/api/receipts/{}/reverse", receipt_id), Run, CancelRequest(reason=reason))

    # ------------------------------------------------------------ audit and evidence

    @endpoint
    def evidence(self, run_id: str) -> EndpointCall[bytes]:
        """Return the signed bundle of a run that ended, byte for byte: a DSSE envelope."""
        return EndpointCall("GET", at("/api/runs/{}/evidence", run_id), lambda response: response.content)

    @endpoint
    def audit(
        self, *, after: int = 0, run_id: str | None = None, limit: int | None = None, cursor: str | None = None
    ) -> EndpointCall[Page[AuditEntry]]:
        """Return the sealed entries after position `after`, each with its place in the chain."""
        return get("/api/audit", Page[AuditEntry], after=after, run_id=run_id, limit=limit, cursor=cursor)

    @endpoint
    def verify_audit(self, checkpoints: Iterable[Mapping[str, Any]] = ()) -> EndpointCall[AuditVerdict]:
        """Check the whole chain, and that it still contains these checkpoints, which were kept elsewhere."""
        kept = [dict(checkpoint) for checkpoint in checkpoints]
        call = (
            post("/api/audit/verify", AuditVerdict, VerifyAudit(checkpoints=kept))
            if kept
            else get("/api/audit/verify", AuditVerdict)
        )
        return replace(call, wait=VERIFY_SECONDS)

    @endpoint
    def signing_keys(self) -> EndpointCall[Page[PublicKey]]:
        """Return the public keys that sign checkpoints and evidence."""
        return get("/api/audit/keys", Page[PublicKey])

    # ------------------------------------------------------------ standing grants

    @endpoint
    def grants(self, *, all: bool = False) -> EndpointCall[Page[Grant]]:
        """Return the grants in force; with `all`, expired and revoked ones too."""
        return get("/api/grants", Page[Grant], all=all or None)

    @endpoint
    def give_grant(
        self,
        tool: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        any_arguments: bool | None = None,
        tier: Literal[Tier.LOW, Tier.MED] = Tier.LOW,
        expires_in: float = 3600,
        reason: str | None = None,
        allow_unknown_tools: bool = False,
    ) -> EndpointCall[Grant]:
        """Approve in advance this tool with these arguments, for a limited time.

        Arguments not named may have any value. `allow_unknown_tools` accepts a tool that the server does not have,
        because some workers may have it.

        To cover every call of the tool, name no arguments and pass `any_arguments=True`.
        """
        body = NewGrant(
            tool=tool, arguments=dict(arguments or {}), any_arguments=any_arguments, tier=tier, expires_in=expires_in,
            reason=reason,
        )  # fmt: skip
        return post("/api/grants", Grant, body, allow_unknown_tools=allow_unknown_tools or None)

    @endpoint
    def revoke_grant(self, grant_id: str) -> EndpointCall[Grant]:
        return delete(at("/api/grants/{}", grant_id), Grant)

    # ------------------------------------------------------------ workflows and tools

    @endpoint
    def apply_workflow(self, text: str, *, allow_unknown_tools: bool = False) -> EndpointCall[Workflow]:
        """Publish a workflow from its YAML. Publishing the same content again returns the existing version.

        `allow_unknown_tools` accepts tools that the server does not have, because some workers may have them.
        """
        unknown = allow_unknown_tools or None
        return send_text("/api/workflows", Workflow, text.encode(), "application/yaml", allow_unknown_tools=unknown)

    @endpoint
    def workflows(self, *, limit: int | None = None, cursor: str | None = None) -> EndpointCall[Page[Workflow]]:
        """Return the newest version of every workflow."""
        return get("/api/workflows", Page[Workflow], limit=limit, cursor=cursor)

    @endpoint
    def workflow(self, name: str, version: int | None = None) -> EndpointCall[Workflow]:
        """Return a workflow with its source: the newest version, or the requested one."""
        return get(at("/api/workflows/{}", name), Workflow, version=version)

    @endpoint
    def workflow_versions(
        self, name: str, *, limit: int | None = None, cursor: str | None = None
    ) -> EndpointCall[Page[Workflow]]:
        """Return the versions of a workflow or agent, newest first."""
        return get(at("/api/workflows/{}/versions", name), Page[Workflow], limit=limit, cursor=cursor)

    @endpoint
    def compare_workflow(self, name: str, version: int, against: int | None = None) -> EndpointCall[VersionDifference]:
        """Compare a version of a workflow with another one, by default with the previous one."""
        path = at("/api/workflows/{}/versions/{}/diff", name, str(version))
        return get(path, VersionDifference, against=against)

    @endpoint
    def roll_back_workflow(self, name: str, version: int) -> EndpointCall[Workflow]:
        """Publish the content of an earlier version as a new one; new runs start with it."""
        return post(at("/api/workflows/{}/rollback", name), Workflow, Rollback(version=version))

    @endpoint
    def tools(self) -> EndpointCall[Page[Tool]]:
        """Return the tools that the server knows."""
        return get("/api/tools", Page[Tool])

    @endpoint
    def flows(self) -> EndpointCall[Page[Flow]]:
        """Return the Python flows that the server has, with their versions."""
        return get("/api/flows", Page[Flow])

    # ------------------------------------------------------------ triggers and schedules

    @endpoint
    def apply_trigger(self, text: str) -> EndpointCall[StoredTrigger]:
        """Create or replace a trigger by name, from its YAML. It acts with this client's key."""
        return send_text("/api/triggers", StoredTrigger, text.encode(), "application/yaml")

    @endpoint
    def triggers(self, *, limit: int | None = None, cursor: str | None = None) -> EndpointCall[Page[StoredTrigger]]:
        return get("/api/triggers", Page[StoredTrigger], limit=limit, cursor=cursor)

    @endpoint
    def trigger(self, name: str) -> EndpointCall[StoredTrigger]:
        """Return a trigger with its source."""
        return get(at("/api/triggers/{}", name), StoredTrigger)

    @endpoint
    def delete_trigger(self, name: str) -> EndpointCall[StoredTrigger]:
        return delete(at("/api/triggers/{}", name), StoredTrigger)

    @endpoint
    def test_trigger(
        self, name: str, payload: Any, *, event: str | None = None, headers: Mapping[str, str] | None = None
    ) -> EndpointCall[TriggerPreview]:
        """Return what an event would start, and with which input. Nothing is started."""
        body = TestTrigger(payload=payload, event=event, headers=dict(headers or {}))
        return post(at("/api/triggers/{}/test", name), TriggerPreview, body)

    @endpoint
    def create_schedule(
        self,
        name: str,
        cron: str,
        workflow: str,
        input: Mapping[str, Any] | None = None,
        *,
        timezone: str = "UTC",
        missed: Literal["skip", "last", "all"] = "last",
    ) -> EndpointCall[Schedule]:
        """Create a schedule: a run for each slot of a cron expression. It acts with this client's key.

        `missed` says which slots that passed while no server ran are started later: none, the last one, or all.
        """
        body = NewSchedule(
            name=name, cron=cron, workflow=workflow, input=dict(input or {}), timezone=timezone, missed=missed
        )
        return post("/api/schedules", Schedule, body)

    @endpoint
    def schedules(self, *, limit: int | None = None, cursor: str | None = None) -> EndpointCall[Page[Schedule]]:
        return get("/api/schedules", Page[Schedule], limit=limit, cursor=cursor)

    @endpoint
    def schedule(self, name: str) -> EndpointCall[Schedule]:
        return get(at("/api/schedules/{}", name), Schedule)

    @endpoint
    def pause_schedule(self, name: str) -> EndpointCall[Schedule]:
        return post(at("/api/schedules/{}/pause", name), Schedule)

    @endpoint
    def resume_schedule(self, name: str) -> EndpointCall[Schedule]:
        """Resume a schedule from now on; slots missed during the pause are skipped.

        If its key was revoked, this key replaces it.
        """
        return post(at("/api/schedules/{}/resume", name), Schedule)

    @endpoint
    def run_schedule(self, name: str) -> EndpointCall[Run]:
        """Start a run now, in addition to the slots."""
        return post(at("/api/schedules/{}/run", name), Run)

    @endpoint
    def delete_schedule(self, name: str) -> EndpointCall[Schedule]:
        return delete(at("/api/schedules/{}", name), Schedule)

    # ------------------------------------------------------------ tenants and usage

    @endpoint
    def create_tenant(
        self,
        name: str,
        *,
        max_concurrency: int | None = None,
        max_runs_per_min: int | None = None,
        max_writes_per_run: int | None = None,
        weight: float = 1,
    ) -> EndpointCall[Tenant]:
        """Create a tenant. The answer contains its first admin key."""
        body = NewTenant(
            name=name,
            max_concurrency=max_concurrency,
            max_runs_per_min=max_runs_per_min,
            max_writes_per_run=max_writes_per_run,
            weight=weight,
        )
        return post("/api/tenants", Tenant, body)

    @endpoint
    def tenants(self, *, limit: int | None = None, cursor: str | None = None) -> EndpointCall[Page[Tenant]]:
        return get("/api/tenants", Page[Tenant], limit=limit, cursor=cursor)

    @endpoint
    def update_tenant(self, name: str, changes: Mapping[str, int | float | None]) -> EndpointCall[Tenant]:
        """Change caps and weight, by their names in `create_tenant`; a cap of None is removed."""
        content = ChangeTenant.model_validate(changes).model_dump_json(exclude_unset=True).encode()
        return send_text(at("/api/tenants/{}", name), Tenant, content, "application/json", method="PATCH")

    @endpoint
    def usage(self, *, limit: int | None = None, cursor: str | None = None) -> EndpointCall[Page[Usage]]:
        """Return the tenant's current usage of its caps. Admins of the default tenant get the usage of every tenant."""
        return get("/api/usage", Page[Usage], limit=limit, cursor=cursor)

    # ------------------------------------------------------------ secrets

    @endpoint
    def set_secret(
        self, name: str, value: str, *, tools: Sequence[str], workspaces: Sequence[str] | None = None
    ) -> EndpointCall[StoredSecret]:
        """Set a secret for `${secrets.name}` in the input of these tools. The value is never shown again.

        `tools` may contain patterns such as `shop.*`. With `workspaces`, only their runs and triggers may use the
        secret.
        """
        about = {"value": value, "tools": list(tools), **({"workspaces": list(workspaces)} if workspaces else {})}
        content = json.dumps(about).encode()
        return send_text(at("/api/secrets/{}", name), StoredSecret, content, "application/json", method="PUT")

    @endpoint
    def secrets(self, *, limit: int | None = None, cursor: str | None = None) -> EndpointCall[Page[StoredSecret]]:
        return get("/api/secrets", Page[StoredSecret], limit=limit, cursor=cursor)

    @endpoint
    def delete_secret(self, name: str) -> EndpointCall[StoredSecret]:
        return delete(at("/api/secrets/{}", name), StoredSecret)

    # ------------------------------------------------------------ webhooks and Slack

    @endpoint
    def add_webhook(self, url: str, events: Iterable[WebhookEvent | str] | None = None) -> EndpointCall[Webhook]:
        """Create a webhook for a URL. The secret that verifies its signatures is only in this answer."""
        told = {} if events is None else {"events": list(events)}
        return post("/api/webhooks", Webhook, NewWebhook.model_validate({"url": url, **told}))

    @endpoint
    def webhooks(self, *, limit: int | None = None, cursor: str | None = None) -> EndpointCall[Page[Webhook]]:
        return get("/api/webhooks", Page[Webhook], limit=limit, cursor=cursor)

    @endpoint
    def webhook(self, webhook_id: str) -> EndpointCall[Webhook]:
        return get(at("/api/webhooks/{}", webhook_id), Webhook)

    @endpoint
    def deliveries(
        self, webhook_id: str, *, limit: int | None = None, cursor: str | None = None
    ) -> EndpointCall[Page[Delivery]]:
        """Return what was sent to a webhook in the last 30 days, and what waits, newest first."""
        return get(at("/api/webhooks/{}/deliveries", webhook_id), Page[Delivery], limit=limit, cursor=cursor)

    @endpoint
    def test_webhook(self, webhook_id: str) -> EndpointCall[Delivery]:
        """Send a webhook a message of type `webhook.test`. The list of deliveries shows the result."""
        return post(at("/api/webhooks/{}/test", webhook_id), Delivery)

    @endpoint
    def enable_webhook(self, webhook_id: str) -> EndpointCall[Webhook]:
        """Enable a webhook again that was disabled because its deliveries kept failing.

        Missed messages are not sent.
        """
        return post(at("/api/webhooks/{}/enable", webhook_id), Webhook)

    @endpoint
    def remove_webhook(self, webhook_id: str) -> EndpointCall[Webhook]:
        """Remove a webhook. Messages that still wait are not sent."""
        return delete(at("/api/webhooks/{}", webhook_id), Webhook)

    @endpoint
    def slack_link_code(self) -> EndpointCall[SlackLinkCode]:
        """Create a code that links this key with a Slack user, after that user sends `/interlock link CODE`."""
        return post("/api/slack/link-codes", SlackLinkCode)

    @endpoint
    def slack_teams(self) -> EndpointCall[Page[SlackTeam]]:
        """Return the Slack teams that the tenant shares with other tenants, and those that were offered to it."""
        return get("/api/slack/teams", Page[SlackTeam])

    @endpoint
    def offer_slack_team(self, team_id: str, tenant: str) -> EndpointCall[SlackTeam]:
        """Offer a Slack team of this tenant to another tenant, whose admin has to accept."""
        return post(at("/api/slack/teams/{}/offers", team_id), SlackTeam, SlackOffer(tenant=tenant))

    @endpoint
    def accept_slack_team(self, team_id: str) -> EndpointCall[SlackTeam]:
        """Accept a Slack team that another tenant offered."""
        return post(at("/api/slack/teams/{}/accept", team_id), SlackTeam)

    @endpoint
    def leave_slack_team(self, team_id: str) -> EndpointCall[SlackTeam]:
        """Leave a shared Slack team, or decline an offer."""
        return delete(at("/api/slack/teams/{}", team_id), SlackTeam)

    @endpoint
    def slack_users(self) -> EndpointCall[Page[SlackUser]]:
        return get("/api/slack/users", Page[SlackUser])

    @endpoint
    def unlink_slack_user(self, team_id: str, user_id: str) -> EndpointCall[SlackUser]:
        return delete(at("/api/slack/users/{}/{}", team_id, user_id), SlackUser)

    @endpoint
    def use_slack_channel(self, channel: str | None, *, tenant: str | None = None) -> EndpointCall[TenantChannel]:
        """Post a tenant's approvals to this Slack channel; None disables posting. For admins of the default tenant."""
        if channel is None:
            return replace(delete("/api/slack/channel", TenantChannel), query={"tenant": tenant} if tenant else {})
        content = SlackChannel(channel=channel, tenant=tenant).model_dump_json(exclude_none=True).encode()
        return send_text("/api/slack/channel", TenantChannel, content, "application/json", method="PUT")

    # ------------------------------------------------------------ keys and workers

    @endpoint
    def create_key(
        self, name: str, role: Role | str, *, workspace_id: str | None = None, groups: Iterable[str] = ()
    ) -> EndpointCall[Key]:
        """Create an API key. The secret is only in this answer. Rules may require approvers from its `groups`."""
        body = NewKey(name=name, role=Role(role), workspace_id=workspace_id, groups=list(groups))
        return post("/api/keys", Key, body)

    @endpoint
    def keys(self, *, limit: int | None = None, cursor: str | None = None) -> EndpointCall[Page[Key]]:
        return get("/api/keys", Page[Key], limit=limit, cursor=cursor)

    @endpoint
    def revoke_key(self, key_id: str) -> EndpointCall[None]:
        return delete(at("/api/keys/{}", key_id))

    @endpoint
    def workers(self, *, all: bool = False) -> EndpointCall[Page[WorkerView]]:
        """Return the current workers, and those that left within the last hour; with `all`, all workers ever."""
        return get("/api/workers", Page[WorkerView], all=all or None)

    @endpoint
    def worker(self, worker_id: str) -> EndpointCall[WorkerView]:
        """Return a worker with its `state_history`."""
        return get(at("/api/workers/{}", worker_id), WorkerView)

    @endpoint
    def worker_events(
        self, worker_id: str, *, limit: int = 500, cursor: str | None = None
    ) -> EndpointCall[Page[JobHistoryEvent]]:
        """Return the history of a worker: its transitions, and the jobs that it was reserved for and released from."""
        return get(at("/api/workers/{}/events", worker_id), Page[JobHistoryEvent], limit=limit, cursor=cursor)

    @endpoint
    def create_worker(
        self, *, name: str | None = None, workspace_id: str | None = None, host: str | None = None,
        labels: Iterable[str] = ("default",), tenants: Iterable[str] | None = None, concurrency: int | None = None,
        request_id: str | None = None,
    ) -> EndpointCall[WorkerView]:  # fmt: skip
        """Create a worker, which is idle until `start_worker`.

        `tenants` are names; without them it serves all tenants.
        """
        body = NewWorker(
            name=name, workspace_id=workspace_id, host=host, labels=list(labels),
            tenants=list(tenants) if tenants is not None else None, concurrency=concurrency,
        )  # fmt: skip
        return post("/api/workers", WorkerView, body, idempotency_key=request_id)

    @endpoint
    def start_worker(self, worker_id: str, *, request_id: str | None = None) -> EndpointCall[WorkerView]:
        """Start the worker's process on a host with a supervisor."""
        return post(at("/api/workers/{}/start", worker_id), WorkerView, Order(), idempotency_key=request_id)

    @endpoint
    def pause_worker(
        self, worker_id: str, *, reason: str | None = None, request_id: str | None = None
    ) -> EndpointCall[WorkerView]:
        """Pause a worker. It takes no new work and finishes its current steps."""
        body = Order(reason=reason)
        return post(at("/api/supervisor/workers/{}/pause", worker_id), WorkerView, body, idempotency_key=request_id)

    @endpoint
    def resume_worker(
        self, worker_id: str, *, reason: str | None = None, request_id: str | None = None
    ) -> EndpointCall[WorkerView]:
        body = Order(reason=reason)
        return post(at("/api/supervisor/workers/{}/resume", worker_id), WorkerView, body, idempotency_key=request_id)

    @endpoint
    def terminate_worker(
        self, worker_id: str, *, reason: str | None = None, request_id: str | None = None
    ) -> EndpointCall[WorkerView]:
        """Terminate a worker at once. It can write nothing more, its process ends, and other workers take its runs."""
        body = Order(reason=reason)
        return post(at("/api/supervisor/workers/{}/terminate", worker_id), WorkerView, body, idempotency_key=request_id)

    @endpoint
    def supervisors(self) -> EndpointCall[Page[SupervisorView]]:
        """Return the hosts on which workers can be started."""
        return get("/api/supervisor", Page[SupervisorView])

    # ------------------------------------------------------------ jobs

    @endpoint
    def submit_job(
        self, task_description: str, workflow: str, inputs: Iterable[Any] = ({},), *, worker_count: int = 1,
        version: int | None = None, parent_job_id: str | None = None, timeout_seconds: float | None = None,
        request_id: str | None = None,
    ) -> EndpointCall[Job]:  # fmt: skip
        """Submit a job: one run for each input, on workers that are reserved for it."""
        body = NewJob.model_validate(
            {
                "task_description": task_description, "workflow": workflow, "version": version, "inputs": list(inputs),
                "worker_count": worker_count, "parent_job_id": parent_job_id, "timeout_seconds": timeout_seconds,
            }
        )  # fmt: skip
        return post("/api/jobs", Job, body, idempotency_key=request_id)

    @endpoint
    def jobs(
        self, *, status: JobState | str | None = None, parent_job_id: str | None = None, limit: int | None = None,
        cursor: str | None = None,
    ) -> EndpointCall[Page[Job]]:  # fmt: skip
        return get("/api/jobs", Page[Job], status=status, parent_job_id=parent_job_id, limit=limit, cursor=cursor)

    @endpoint
    def job(self, job_id: str) -> EndpointCall[Job]:
        """Return a job with its progress, its workers and its `state_history`."""
        return get(at("/api/jobs/{}", job_id), Job)

    @endpoint
    def job_tree(self, job_id: str) -> EndpointCall[JobTree]:
        """Return a job with its descendants, as a tree."""
        return get(at("/api/jobs/{}/tree", job_id), JobTree)

    @endpoint
    def job_events(
        self, job_id: str, *, after: int = 0, limit: int | None = None
    ) -> EndpointCall[Page[JobHistoryEvent]]:
        return get(at("/api/jobs/{}/events", job_id), Page[JobHistoryEvent], after=after, limit=limit)

    @endpoint
    def cancel_job(self, job_id: str, *, reason: str | None = None, request_id: str | None = None) -> EndpointCall[Job]:
        """Cancel the job and its descendants at once."""
        return post(at("/api/jobs/{}/cancel", job_id), Job, Order(reason=reason), idempotency_key=request_id)

    @endpoint
    def health(self) -> EndpointCall[Health]:
        return get("/healthz", Health)
