"""Every call of the API, described once for the sync and the async client."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from interlock.client.call import Call, at, delete, endpoint, get, post, send_text
from interlock.lifecycle import ApprovalState, JobState, RunState, Tier
from interlock.wire import (
    Act,
    Agent,
    Allow,
    Approval,
    AuditEntry,
    AuditVerdict,
    Backtest,
    Backtested,
    BulkDecide,
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
    JobEvent,
    JobTree,
    Key,
    Message,
    NewAct,
    NewGrant,
    NewJob,
    NewKey,
    NewMessage,
    NewSchedule,
    NewSession,
    NewSlackUser,
    NewTenant,
    NewTrigger,
    NewWebhook,
    NewWorker,
    Order,
    OutsideEvent,
    Page,
    Policy,
    PolicyDecision,
    Receipt,
    Reject,
    ResolveReceipt,
    Role,
    Run,
    Schedule,
    SendEvent,
    Sent,
    SentEvent,
    Session,
    SigningKey,
    SlackChannel,
    SlackUser,
    StartRun,
    StartRuns,
    Stop,
    StoredSecret,
    StoredTrigger,
    Supervisor,
    Tenant,
    TenantChannel,
    TestTrigger,
    Tool,
    Tried,
    Usage,
    VerifyAudit,
    Webhook,
    WebhookEvent,
    Worker,
    Workflow,
)

# A long chain takes its time to check.
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
    ) -> Call[Run]:
        """Start a run. With `wait` the answer comes when the run ended, needs a person, or after so many seconds.

        Over the tenant's cap of runs per minute it waits for a later minute, or with `over_cap="refuse"` is not begun.
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
    ) -> Call[Page[Run]]:
        """Start a run for each input, at most 1,000: all of them or none. They are answered in the same order."""
        body = StartRuns(
            workflow=workflow,
            version=version,
            inputs=[dict(given) for given in inputs],
            trigger=trigger,
            deadline_seconds=deadline_seconds,
        )
        return post("/api/runs/batch", Page[Run], body, idempotency_key=idempotency_key, over_cap=over_cap)

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
        parent: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Call[Page[Run]]:
        """A page of runs, newest first, without their steps; with `parent` those that it started."""
        return get(
            "/api/runs", Page[Run], status=status, workflow=workflow, parent_run_id=parent, limit=limit, cursor=cursor
        )

    @endpoint
    def approve(self, run_id: str, *, reason: str | None = None) -> Call[Run]:
        """Approve what the run waits for."""
        return post(at("/api/runs/{}/approve", run_id), Run, Allow(reason=reason))

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

    # ------------------------------------------------------------ events from outside

    @endpoint
    def send_event(self, type: str, correlation: str, payload: Any = None, *, id: str | None = None) -> Call[SentEvent]:
        """Tell what happened outside, to the step that waits for it or will. The same `id` again is the same event."""
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
    ) -> Call[Page[OutsideEvent]]:
        """Events that were sent, newest first, until their time is over."""
        return get(
            "/api/events", Page[OutsideEvent], type=type, correlation=correlation, matched=matched, limit=limit,
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
    ) -> Call[Page[Approval]]:
        return get("/api/approvals", Page[Approval], status=status, run_id=run_id, limit=limit, cursor=cursor)

    @endpoint
    def approval(self, approval_id: str) -> Call[Approval]:
        return get(at("/api/approvals/{}", approval_id), Approval)

    @endpoint
    def approve_approval(
        self,
        approval_id: str,
        *,
        reason: str | None = None,
        digest: str | None = None,
        patch: Mapping[str, Any] | None = None,
    ) -> Call[Approval]:
        """Vote yes. With `digest` the vote counts only if the action is still that one.

        With `patch` these fields replace the proposed ones first: the edited action is judged again, and earlier votes
        no longer count.
        """
        body = Decide(reason=reason, digest=digest, patch=dict(patch) if patch is not None else None)
        return post(at("/api/approvals/{}/approve", approval_id), Approval, body)

    @endpoint
    def reject_approval(
        self, approval_id: str, *, reason: str | None = None, digest: str | None = None
    ) -> Call[Approval]:
        """Vote no; one such vote ends the approval."""
        return post(at("/api/approvals/{}/reject", approval_id), Approval, Reject(reason=reason, digest=digest))

    @endpoint
    def decide_many(
        self, ids: Iterable[str], decision: Literal["approve", "reject"], *, reason: str | None = None
    ) -> Call[Page[Decided]]:
        """The same vote on several approvals, each answered for itself: one that is refused stops no other."""
        body = BulkDecide(ids=list(ids), decision=decision, reason=reason)
        return post("/api/approvals/decide", Page[Decided], body)

    # ------------------------------------------------------------ sessions

    @endpoint
    def apply_agent(self, text: str) -> Call[Agent]:
        """Publish an agent from its YAML. The same content again answers the version it already has."""
        return send_text("/api/agents", Agent, text.encode(), "application/yaml")

    @endpoint
    def agents(self, *, limit: int | None = None, cursor: str | None = None) -> Call[Page[Agent]]:
        """The newest version of every agent."""
        return get("/api/agents", Page[Agent], limit=limit, cursor=cursor)

    @endpoint
    def agent(self, name: str, version: int | None = None) -> Call[Agent]:
        """An agent with its source: the newest version, or the one asked for."""
        return get(at("/api/agents/{}", name), Agent, version=version)

    @endpoint
    def open_session(self, agent: str | None = None, *, auto_approve: bool = False) -> Call[Session]:
        """A session with an agent; without one, with the tenant's `assistant`."""
        return post("/api/sessions", Session, NewSession(agent=agent, auto_approve=auto_approve))

    @endpoint
    def session(self, session_id: str) -> Call[Session]:
        return get(at("/api/sessions/{}", session_id), Session)

    @endpoint
    def sessions(self, *, limit: int | None = None, cursor: str | None = None) -> Call[Page[Session]]:
        """A page of sessions, newest first."""
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
    ) -> Call[Sent]:
        """Say something to an agent. While its session has a run under way: SESSION_BUSY, or later with `queue`."""
        body = NewMessage.model_validate(
            {
                "content": content, "session_id": session_id, "agent": agent, "auto_approve": auto_approve,
                "queue": queue,
            }
        )  # fmt: skip
        return post("/api/messages", Sent, body, idempotency_key=idempotency_key)

    @endpoint
    def messages(self, session_id: str, *, limit: int | None = None, cursor: str | None = None) -> Call[Page[Message]]:
        """What was said in a session, oldest first, each with its answer."""
        return get(at("/api/sessions/{}/messages", session_id), Page[Message], limit=limit, cursor=cursor)

    @endpoint
    def act(
        self, tool: str, args: Mapping[str, Any] | None = None, *, wait: float = 30, idempotency_key: str | None = None
    ) -> Call[Act]:
        """Call one tool through the gate, from an agent's own loop: its result, or `pending_approval` and an id.

        With the key of the agent's own call, the same call again is the same act.
        """
        body = NewAct(tool=tool, args=dict(args or {}))
        return post("/api/acts", Act, body, idempotency_key=idempotency_key, wait=wait)

    @endpoint
    def acted(self, act_id: str, *, wait: float = 0) -> Call[Act]:
        """What became of an act; with `wait`, when it is done or held, or after so many seconds."""
        return get(at("/api/acts/{}", act_id), Act, wait=wait)

    # ------------------------------------------------------------ policy

    @endpoint
    def policy(self) -> Call[Policy]:
        """The policy in force, as it was written."""
        return get("/api/policy", Policy)

    @endpoint
    def publish_policy(self, text: str) -> Call[Policy]:
        """Put a policy in force. One that is not valid is refused, with every fault in the error's `errors`."""
        return send_text("/api/policy", Policy, text.encode(), "text/plain", method="PUT")

    @endpoint
    def evaluate_policy(
        self,
        tool: str,
        input: Mapping[str, Any] | None = None,
        *,
        role: Role | str = Role.OPERATOR,
        workflow: str = "",
        hour: int | None = None,
        policy: str | None = None,
    ) -> Call[PolicyDecision]:
        """What would be decided about an action, by the policy in force or by the text given. Nothing is done."""
        body = Evaluate(
            tool=tool, input=dict(input or {}), role=Role(role), workflow=workflow, hour=hour, policy=policy
        )
        return post("/api/policy/evaluate", PolicyDecision, body)

    @endpoint
    def backtest_policy(self, text: str, *, limit: int = 1000) -> Call[Backtested]:
        """Which of the last `limit` decisions would be others under this policy."""
        return post("/api/policy/backtest", Backtested, Backtest(policy=text, limit=limit))

    # ------------------------------------------------------------ receipts

    @endpoint
    def receipts(self, run_id: str) -> Call[Page[Receipt]]:
        """Every effect of a run: what was attempted, and what became of it."""
        return get(at("/api/runs/{}/receipts", run_id), Page[Receipt])

    @endpoint
    def receipt(self, receipt_id: str) -> Call[Receipt]:
        return get(at("/api/receipts/{}", receipt_id), Receipt)

    @endpoint
    def resolve_receipt(
        self,
        receipt_id: str,
        outcome: Literal["happened", "did_not_happen", "fail"],
        *,
        output: Any = None,
        reason: str | None = None,
    ) -> Call[Receipt]:
        """Say what became of an effect in doubt. `output` is what the tool would have returned, had it been asked."""
        body = ResolveReceipt(outcome=outcome, output=output, reason=reason)
        return post(at("/api/receipts/{}/resolve", receipt_id), Receipt, body)

    @endpoint
    def reverse_receipt(self, receipt_id: str, *, reason: str | None = None) -> Call[Run]:
        """Undo an effect, at most once. The answer is the run that does it, which policy may hold like any other."""
        return post(at("/api/receipts/{}/reverse", receipt_id), Run, Stop(reason=reason))

    # ------------------------------------------------------------ audit and evidence

    @endpoint
    def evidence(self, run_id: str) -> Call[bytes]:
        """The signed bundle of a run that ended, byte for byte: a DSSE envelope."""
        return Call("GET", at("/api/runs/{}/evidence", run_id), lambda response: response.content)

    @endpoint
    def audit(
        self, *, after: int = 0, run_id: str | None = None, limit: int | None = None, cursor: str | None = None
    ) -> Call[Page[AuditEntry]]:
        """The sealed entries that follow position `after`, each with its place in the chain."""
        return get("/api/audit", Page[AuditEntry], after=after, run_id=run_id, limit=limit, cursor=cursor)

    @endpoint
    def verify_audit(self, checkpoints: Iterable[Mapping[str, Any]] = ()) -> Call[AuditVerdict]:
        """Check the whole chain, and that it still holds these checkpoints, which were kept elsewhere."""
        kept = [dict(checkpoint) for checkpoint in checkpoints]
        call = (
            post("/api/audit/verify", AuditVerdict, VerifyAudit(checkpoints=kept))
            if kept
            else get("/api/audit/verify", AuditVerdict)
        )
        return replace(call, wait=VERIFY_SECONDS)

    @endpoint
    def signing_keys(self) -> Call[Page[SigningKey]]:
        """The public keys that checkpoints and evidence are signed with."""
        return get("/api/audit/keys", Page[SigningKey])

    # ------------------------------------------------------------ standing grants

    @endpoint
    def grants(self, *, all: bool = False) -> Call[Page[Grant]]:
        """Those in force; with `all`, those that are over too."""
        return get("/api/grants", Page[Grant], all=all or None)

    @endpoint
    def give_grant(
        self,
        tool: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        tier: Literal[Tier.LOW, Tier.MED] = Tier.LOW,
        expires_in: float = 3600,
        reason: str | None = None,
    ) -> Call[Grant]:
        """Approve in advance: this tool with these arguments, for so many seconds. Arguments not named are free."""
        body = NewGrant(tool=tool, arguments=dict(arguments or {}), tier=tier, expires_in=expires_in, reason=reason)
        return post("/api/grants", Grant, body)

    @endpoint
    def revoke_grant(self, grant_id: str) -> Call[Grant]:
        return delete(at("/api/grants/{}", grant_id), Grant)

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

    @endpoint
    def flows(self) -> Call[Page[Flow]]:
        """The Python flows that the server has, with their versions."""
        return get("/api/flows", Page[Flow])

    # ------------------------------------------------------------ triggers and schedules

    @endpoint
    def apply_trigger(self, text: str) -> Call[StoredTrigger]:
        """Apply a trigger from its YAML; one of the same name is replaced. It acts with this client's key."""
        return send_text("/api/triggers", StoredTrigger, text.encode(), "application/yaml")

    @endpoint
    def triggers(self, *, limit: int | None = None, cursor: str | None = None) -> Call[Page[StoredTrigger]]:
        return get("/api/triggers", Page[StoredTrigger], limit=limit, cursor=cursor)

    @endpoint
    def trigger(self, name: str) -> Call[StoredTrigger]:
        """A trigger with its source."""
        return get(at("/api/triggers/{}", name), StoredTrigger)

    @endpoint
    def delete_trigger(self, name: str) -> Call[StoredTrigger]:
        return delete(at("/api/triggers/{}", name), StoredTrigger)

    @endpoint
    def test_trigger(
        self, name: str, payload: Any, *, event: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Call[Tried]:
        """What an event would start, and with which input. Nothing is started."""
        body = TestTrigger(payload=payload, event=event, headers=dict(headers or {}))
        return post(at("/api/triggers/{}/test", name), Tried, body)

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
    ) -> Call[Schedule]:
        """A run for each slot of a cron expression. It acts with this client's key.

        `missed` says what becomes of slots that passed while nothing ran: none of them, the last one, or all.
        """
        body = NewSchedule(
            name=name, cron=cron, workflow=workflow, input=dict(input or {}), timezone=timezone, missed=missed
        )
        return post("/api/schedules", Schedule, body)

    @endpoint
    def schedules(self, *, limit: int | None = None, cursor: str | None = None) -> Call[Page[Schedule]]:
        return get("/api/schedules", Page[Schedule], limit=limit, cursor=cursor)

    @endpoint
    def schedule(self, name: str) -> Call[Schedule]:
        return get(at("/api/schedules/{}", name), Schedule)

    @endpoint
    def pause_schedule(self, name: str) -> Call[Schedule]:
        return post(at("/api/schedules/{}/pause", name), Schedule)

    @endpoint
    def resume_schedule(self, name: str) -> Call[Schedule]:
        """From now on; the slots of the pause are not made up for. If its key was revoked, this one takes its place."""
        return post(at("/api/schedules/{}/resume", name), Schedule)

    @endpoint
    def run_schedule(self, name: str) -> Call[Run]:
        """A run at once, besides the slots."""
        return post(at("/api/schedules/{}/run", name), Run)

    @endpoint
    def delete_schedule(self, name: str) -> Call[Schedule]:
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
    ) -> Call[Tenant]:
        """A new tenant, with its first admin key in the answer."""
        body = NewTenant(
            name=name,
            max_concurrency=max_concurrency,
            max_runs_per_min=max_runs_per_min,
            max_writes_per_run=max_writes_per_run,
            weight=weight,
        )
        return post("/api/tenants", Tenant, body)

    @endpoint
    def tenants(self, *, limit: int | None = None, cursor: str | None = None) -> Call[Page[Tenant]]:
        return get("/api/tenants", Page[Tenant], limit=limit, cursor=cursor)

    @endpoint
    def update_tenant(self, name: str, changes: Mapping[str, int | float | None]) -> Call[Tenant]:
        """Change caps and weight, by their names in `create_tenant`; a cap of None is taken away."""
        content = ChangeTenant.model_validate(changes).model_dump_json(exclude_unset=True).encode()
        return send_text(at("/api/tenants/{}", name), Tenant, content, "application/json", method="PATCH")

    @endpoint
    def usage(self, *, limit: int | None = None, cursor: str | None = None) -> Call[Page[Usage]]:
        """What the tenant uses of what it may use; for admins of the default tenant, what each of them does."""
        return get("/api/usage", Page[Usage], limit=limit, cursor=cursor)

    # ------------------------------------------------------------ secrets

    @endpoint
    def set_secret(self, name: str, value: str) -> Call[StoredSecret]:
        """For `${secrets.name}` in the input of tools. The value is never shown again."""
        content = json.dumps({"value": value}).encode()
        return send_text(at("/api/secrets/{}", name), StoredSecret, content, "application/json", method="PUT")

    @endpoint
    def secrets(self, *, limit: int | None = None, cursor: str | None = None) -> Call[Page[StoredSecret]]:
        return get("/api/secrets", Page[StoredSecret], limit=limit, cursor=cursor)

    @endpoint
    def delete_secret(self, name: str) -> Call[StoredSecret]:
        return delete(at("/api/secrets/{}", name), StoredSecret)

    # ------------------------------------------------------------ webhooks and Slack

    @endpoint
    def add_webhook(self, url: str, events: Iterable[WebhookEvent | str] | None = None) -> Call[Webhook]:
        """Have messages sent to a URL. The secret that verifies their signature is in this answer and never again."""
        told = {} if events is None else {"events": list(events)}
        return post("/api/webhooks", Webhook, NewWebhook.model_validate({"url": url, **told}))

    @endpoint
    def webhooks(self, *, limit: int | None = None, cursor: str | None = None) -> Call[Page[Webhook]]:
        return get("/api/webhooks", Page[Webhook], limit=limit, cursor=cursor)

    @endpoint
    def webhook(self, webhook_id: str) -> Call[Webhook]:
        return get(at("/api/webhooks/{}", webhook_id), Webhook)

    @endpoint
    def deliveries(
        self, webhook_id: str, *, limit: int | None = None, cursor: str | None = None
    ) -> Call[Page[Delivery]]:
        """What was sent to a webhook in the last 30 days, and what waits. Newest first."""
        return get(at("/api/webhooks/{}/deliveries", webhook_id), Page[Delivery], limit=limit, cursor=cursor)

    @endpoint
    def test_webhook(self, webhook_id: str) -> Call[Delivery]:
        """Send a webhook a message of type `webhook.test`; its deliveries tell what became of it."""
        return post(at("/api/webhooks/{}/test", webhook_id), Delivery)

    @endpoint
    def enable_webhook(self, webhook_id: str) -> Call[Webhook]:
        """Switch one on again that kept failing. What it missed is not sent."""
        return post(at("/api/webhooks/{}/enable", webhook_id), Webhook)

    @endpoint
    def remove_webhook(self, webhook_id: str) -> Call[Webhook]:
        """Send it nothing any more, also nothing that waits."""
        return delete(at("/api/webhooks/{}", webhook_id), Webhook)

    @endpoint
    def link_slack_user(self, team_id: str, user_id: str, key_id: str) -> Call[SlackUser]:
        """Say with whose key a Slack user acts. Saying it again replaces it."""
        body = NewSlackUser.model_validate({"team_id": team_id, "user_id": user_id, "key_id": key_id})
        return post("/api/slack/users", SlackUser, body)

    @endpoint
    def slack_users(self) -> Call[Page[SlackUser]]:
        return get("/api/slack/users", Page[SlackUser])

    @endpoint
    def unlink_slack_user(self, team_id: str, user_id: str) -> Call[SlackUser]:
        return delete(at("/api/slack/users/{}/{}", team_id, user_id), SlackUser)

    @endpoint
    def use_slack_channel(self, channel: str | None, *, tenant: str | None = None) -> Call[TenantChannel]:
        """Post a tenant's approvals to this channel; None: to no channel. For admins of the default tenant."""
        if channel is None:
            return replace(delete("/api/slack/channel", TenantChannel), query={"tenant": tenant} if tenant else {})
        content = SlackChannel(channel=channel, tenant=tenant).model_dump_json(exclude_none=True).encode()
        return send_text("/api/slack/channel", TenantChannel, content, "application/json", method="PUT")

    # ------------------------------------------------------------ keys and workers

    @endpoint
    def create_key(
        self, name: str, role: Role | str, *, workspace_id: str | None = None, groups: Iterable[str] = ()
    ) -> Call[Key]:
        """A new API key; the secret is in this answer and never shown again. Rules may ask for members of `groups`."""
        body = NewKey(name=name, role=Role(role), workspace_id=workspace_id, groups=list(groups))
        return post("/api/keys", Key, body)

    @endpoint
    def keys(self, *, limit: int | None = None, cursor: str | None = None) -> Call[Page[Key]]:
        return get("/api/keys", Page[Key], limit=limit, cursor=cursor)

    @endpoint
    def revoke_key(self, key_id: str) -> Call[None]:
        return delete(at("/api/keys/{}", key_id))

    @endpoint
    def workers(self, *, all: bool = False) -> Call[Page[Worker]]:
        """Those that are there, and those that left within the last hour; with `all`, every one ever."""
        return get("/api/workers", Page[Worker], all=all or None)

    @endpoint
    def worker(self, worker_id: str) -> Call[Worker]:
        """A worker with its `state_history`."""
        return get(at("/api/workers/{}", worker_id), Worker)

    @endpoint
    def worker_events(self, worker_id: str, *, limit: int = 500, cursor: str | None = None) -> Call[Page[JobEvent]]:
        """All that happened to it: its transitions, and the jobs that it was reserved for and released from."""
        return get(at("/api/workers/{}/events", worker_id), Page[JobEvent], limit=limit, cursor=cursor)

    @endpoint
    def create_worker(
        self, *, name: str | None = None, workspace_id: str | None = None, host: str | None = None,
        labels: Iterable[str] = ("default",), tenants: Iterable[str] | None = None, concurrency: int | None = None,
        request_id: str | None = None,
    ) -> Call[Worker]:  # fmt: skip
        """A worker that is idle until `start_worker`. Tenants by name; without them it serves all."""
        body = NewWorker(
            name=name, workspace_id=workspace_id, host=host, labels=list(labels),
            tenants=list(tenants) if tenants is not None else None, concurrency=concurrency,
        )  # fmt: skip
        return post("/api/workers", Worker, body, idempotency_key=request_id)

    @endpoint
    def start_worker(self, worker_id: str, *, request_id: str | None = None) -> Call[Worker]:
        """Give it a process, on a host with a supervisor."""
        return post(at("/api/workers/{}/start", worker_id), Worker, Order(), idempotency_key=request_id)

    @endpoint
    def pause_worker(self, worker_id: str, *, reason: str | None = None, request_id: str | None = None) -> Call[Worker]:
        """It takes no new work; the steps that it is at are finished."""
        body = Order(reason=reason)
        return post(at("/api/supervisor/workers/{}/pause", worker_id), Worker, body, idempotency_key=request_id)

    @endpoint
    def resume_worker(
        self, worker_id: str, *, reason: str | None = None, request_id: str | None = None
    ) -> Call[Worker]:
        body = Order(reason=reason)
        return post(at("/api/supervisor/workers/{}/resume", worker_id), Worker, body, idempotency_key=request_id)

    @endpoint
    def terminate_worker(
        self, worker_id: str, *, reason: str | None = None, request_id: str | None = None
    ) -> Call[Worker]:
        """At once: it can write nothing more, its runs go to others, its process is ended."""
        body = Order(reason=reason)
        return post(at("/api/supervisor/workers/{}/terminate", worker_id), Worker, body, idempotency_key=request_id)

    @endpoint
    def supervisors(self) -> Call[Page[Supervisor]]:
        """The hosts on which workers can be started."""
        return get("/api/supervisor", Page[Supervisor])

    # ------------------------------------------------------------ jobs

    @endpoint
    def submit_job(
        self, task_description: str, workflow: str, inputs: Iterable[Any] = ({},), *, worker_count: int = 1,
        version: int | None = None, parent_job_id: str | None = None, timeout_seconds: float | None = None,
        request_id: str | None = None,
    ) -> Call[Job]:  # fmt: skip
        """One run for each input, on workers that are reserved for it."""
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
    ) -> Call[Page[Job]]:  # fmt: skip
        return get("/api/jobs", Page[Job], status=status, parent_job_id=parent_job_id, limit=limit, cursor=cursor)

    @endpoint
    def job(self, job_id: str) -> Call[Job]:
        """A job with its progress, its workers and its `state_history`."""
        return get(at("/api/jobs/{}", job_id), Job)

    @endpoint
    def job_tree(self, job_id: str) -> Call[JobTree]:
        """A job with its children, and theirs."""
        return get(at("/api/jobs/{}/tree", job_id), JobTree)

    @endpoint
    def job_events(self, job_id: str, *, after: int = 0, limit: int | None = None) -> Call[Page[JobEvent]]:
        return get(at("/api/jobs/{}/events", job_id), Page[JobEvent], after=after, limit=limit)

    @endpoint
    def cancel_job(self, job_id: str, *, reason: str | None = None, request_id: str | None = None) -> Call[Job]:
        """The job and all below it, at once."""
        return post(at("/api/jobs/{}/cancel", job_id), Job, Order(reason=reason), idempotency_key=request_id)

    @endpoint
    def health(self) -> Call[Health]:
        return get("/healthz", Health)
