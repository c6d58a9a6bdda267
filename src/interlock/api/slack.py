"""/api/hooks/slack: signed buttons and commands. /api/slack: who Slack's users are here, and which channel is told.

A press or a command, also one that a trigger answers, is the same as a call with the key that the Slack user stands
for: the same roles, the same authorisation, the same transaction. What is refused comes back as a message that only
they see.
"""

import asyncio
import shlex
import time
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit
from uuid import UUID

import httpx2
import orjson
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from slack_sdk.signature import Clock, SignatureVerifier
from starlette.background import BackgroundTask

from interlock.api.services import Json, Services, Svc, Who, change, problem_answer, services
from interlock.api.views import dump
from interlock.definition.trigger import OWN_COMMAND, Event, Trigger, Unfit
from interlock.engine import approvals, idempotency, outbox, runs, tenants, triggers
from interlock.engine.idempotency import Answer
from interlock.engine.mrkdwn import escape, moment
from interlock.engine.principal import DEFAULT_TENANT, Principal
from interlock.errors import Forbidden, Invalid, NotFound, Problem, Unauthorized
from interlock.governance.roles import Permission
from interlock.lifecycle import ApprovalState
from interlock.store.pool import Row, Tx
from interlock.telemetry import log
from interlock.wire import Initiator, NewSlackUser, Page, SlackChannel, SlackUser, TenantChannel

router = APIRouter(tags=["slack"])

# Slack shows an error after three seconds, and the answer has to get there.
_ANSWER_SECONDS = 2.5
_TOO_LATE = "That took too long; nothing may have happened yet. Please try again."
_HELP = """\
`/interlock approvals`: what waits for a decision
`/interlock approve ID [reason]`, `/interlock reject ID [reason]`: decide
`/interlock run WORKFLOW key=value …`: start a run
If you belong to several tenants, begin with `in TENANT`."""


# ---------------------------------------------------------------- signed by Slack


async def signed_form(request: Request, found: Annotated[Services, Depends(services)]) -> dict[str, str]:
    """The form, if Slack signed exactly these bytes within the last five minutes."""
    secret = found.settings.slack_signing_secret
    if secret is None:
        raise NotFound("Slack is not set up here (INTERLOCK_SLACK_SIGNING_SECRET)", code="SLACK_NOT_CONFIGURED")
    body, headers = await request.body(), request.headers
    verifier = SignatureVerifier(secret.get_secret_value(), _Clock(found))
    try:
        valid = verifier.is_valid(body, headers.get("x-slack-request-timestamp"), headers.get("x-slack-signature"))
        form = dict(parse_qsl(body.decode(), keep_blank_values=True))
    except (ValueError, TypeError):  # a time that is no number, a signature that is no text
        valid, form = False, {}
    if not valid:
        raise Unauthorized("this is not signed by Slack, or is older than five minutes", code="SIGNATURE_INVALID")
    return form


class _Clock(Clock):
    def __init__(self, found: Services) -> None:
        self._found = found

    def now(self) -> float:
        moved = self._found.database.clock()
        return moved.timestamp() if moved is not None else time.time()


Form = Annotated[dict[str, str], Depends(signed_form)]


@router.post("/api/hooks/slack/actions", include_in_schema=False)
async def on_action(found: Svc, form: Form) -> Response:
    payload = _payload(form)
    actions = payload.get("actions") or [{}]
    if payload.get("type") != "block_actions" or actions[0].get("action_id") not in _DECISIONS:
        return Response()  # another form of ours or of nobody's; Slack wants to hear that it arrived
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            said = await _press(found, payload, actions[0])
    except TimeoutError:
        said = _TOO_LATE
    except Problem as problem:
        said = _refusal(problem)
    return _answer(found, said, payload.get("response_url"))


@router.post("/api/hooks/slack/commands", include_in_schema=False)
async def on_command(found: Svc, form: Form) -> Response:
    """`/interlock …`. 200 and nothing else: Slack shows everything else as a failure of the command."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            said = await _command(found, form)
    except TimeoutError:
        said = {"text": _TOO_LATE}
    except Problem as problem:
        said = {"text": _refusal(problem)}
    return Json({"response_type": "ephemeral", **said})


def _payload(form: dict[str, str]) -> dict[str, Any]:
    try:
        payload = orjson.loads(form.get("payload", ""))
    except orjson.JSONDecodeError:
        payload = None
    if not isinstance(payload, dict):
        raise Invalid("`payload` is to be a JSON object")
    return payload


def _answer(found: Services, said: str | None, response_url: object) -> Response:
    if said is None:
        return Response()
    message = {"response_type": "ephemeral", "replace_original": False, "text": said}
    # A press is answered at its own address; what the request itself answers is not shown.
    telling = None
    if isinstance(response_url, str) and _is_slacks(found, response_url):
        telling = BackgroundTask(_tell, response_url, message)
    return Response(dump(message), media_type="application/json", background=telling)


def _is_slacks(found: Services, url: str) -> bool:
    parts, base = urlsplit(url), urlsplit(found.settings.slack_base_url)
    return (parts.scheme, parts.netloc) in (("https", "hooks.slack.com"), (base.scheme, base.netloc))


async def _tell(url: str, message: dict[str, Any]) -> None:
    try:
        async with httpx2.AsyncClient(timeout=5) as client:
            await client.post(url, json=message)
    except httpx2.HTTPError as error:  # they will see that nothing changed, and press again
        log.warning("slack_reply_lost", error=f"{type(error).__name__}: {error}")


# ---------------------------------------------------------------- who


async def _people(found: Services, team_id: str, user_id: str) -> list[Principal]:
    rows = await found.database.fetch("keys_of_slack_user", team_id, user_id)
    return [tenants.principal_of(row) for row in rows]


def _unknown(team_id: str, user_id: str) -> str:
    return (
        "Interlock does not know you yet. An admin can say whose key you act with: "
        f"`interlock slack link {escape(team_id, 50)} {escape(user_id, 50)} KEY`."
    )


def _refusal(problem: Problem) -> str:
    return f"{escape(problem.detail, 2000)} ({problem.code})"


# ---------------------------------------------------------------- buttons

_DECISIONS = {"interlock_approve": True, "interlock_reject": False}


async def _press(found: Services, payload: dict[str, Any], action: dict[str, Any]) -> str | None:
    """What the one who pressed has to be told, if the card will not show it."""
    user = payload.get("user") or {}
    team_id = (payload.get("team") or {}).get("id") or user.get("team_id") or ""
    user_id = user.get("id") or ""
    approval_id, _, digest = str(action.get("value") or "").partition(":")
    approval = await found.database.row("approval_by_id", _uuid(approval_id))
    if approval is None:
        return "This approval is not known here."
    who = next((p for p in await _people(found, team_id, user_id) if p.tenant_id == approval["tenant_id"]), None)
    if who is None:
        return _unknown(team_id, user_id)
    await _remember_card(found, approval, payload.get("container") or {})
    try:
        return await _decide(found, who, approval["id"], approves=_DECISIONS[action["action_id"]], digest=digest)
    except Problem as problem:
        # They looked at something that is no longer so: it may be a card that was lost when a sender died.
        await found.database.fetch("refresh_cards", found.database.clock(), approval["tenant_id"], approval["id"])
        return _refusal(problem)


async def _decide(
    found: Services, who: Principal, approval_id: UUID, *, approves: bool, digest: str | None, reason: str | None = None
) -> str | None:
    who.require(Permission.APPROVE)

    async def work(tx: Tx) -> str | None:
        row = await approvals.decide(
            tx, found.database, found.plans, who, approval_id, approves=approves, digest=digest, reason=reason
        )
        votes = await approvals.votes_on(tx, [row])
        if row["status"] == ApprovalState.REQUESTED:
            return "Your vote counts. One more person has to approve."
        if all(vote["voter"] != who.actor for vote in votes):
            await tx.fetch("refresh_cards", found.database.clock(), who.tenant_id, approval_id)
            return f"It was {row['status']} already."
        return None

    return await found.database.command(work)


async def _remember_card(found: Services, approval: Row, container: dict[str, Any]) -> None:
    """So that it is rewritten too, also if we do not know that we posted it."""
    channel, ts = container.get("channel_id"), container.get("message_ts")
    if channel and ts and not container.get("is_ephemeral"):
        await found.database.fetch("add_card", approval["id"], approval["tenant_id"], str(channel), str(ts))


# ---------------------------------------------------------------- commands


async def _command(found: Services, form: dict[str, str]) -> dict[str, Any]:
    words = _words(form.get("text", ""))
    if trigger := await _triggered(found, form):
        return await _pull(found, form, words, *trigger)
    tenant = words[1] if len(words) > 1 and words[0] == "in" else None
    verb, *rest = (words[2:] if tenant is not None else words) or ["help"]
    if verb == "help":
        return {"text": _HELP}
    who = await _speaker(found, form, tenant)
    match verb, rest:
        case "approvals", []:
            return {"text": await _list_approvals(found, who)}
        case (("approve" | "reject"), [approval_id, *reason]):
            told = await _decide(
                found, who, _uuid(approval_id), approves=verb == "approve", digest=None, reason=" ".join(reason) or None
            )
            return {"text": told or {"approve": "Approved.", "reject": "Rejected."}[verb]}
        case "run", [workflow, *pairs]:
            return await _run(found, who, form, workflow, pairs)
        case _:
            return {"text": f"That is not a command here.\n{_HELP}"}


def _words(text: str) -> list[str]:
    """As a shell would read it; phones turn quotes into curly ones."""
    for curly, straight in (("“", '"'), ("”", '"'), ("‘", "'"), ("’", "'")):
        text = text.replace(curly, straight)
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Invalid(f"this cannot be read: {error}") from None


async def _speaker(found: Services, form: dict[str, str], tenant: str | None) -> Principal:
    team_id, user_id = form.get("team_id", ""), form.get("user_id", "")
    people = [p for p in await _people(found, team_id, user_id) if tenant is None or p.tenant == tenant]
    if not people:
        raise Forbidden(_unknown(team_id, user_id), code="SLACK_USER_UNKNOWN")
    if len(people) > 1:
        names = ", ".join(person.tenant for person in people)
        raise Invalid(f"you belong to several tenants ({names}); say which: /interlock in {people[0].tenant} …")
    return people[0]


async def _list_approvals(found: Services, who: Principal) -> str:
    who.require(Permission.READ)
    rows = await approvals.listed(found.database, who, status=ApprovalState.REQUESTED, limit=21)
    lines = [
        f"• *{escape(row['summary'], 150)}* ({row['tier']}{', two people' if row['two_person'] else ''}), "
        f"expires {moment(row['expires_at'])}: `{row['id']}`"
        for row in rows[:20]
    ]
    if len(rows) > 20:
        lines.append("… and more.")
    return "\n".join(lines) or "Nothing waits for a decision."


async def _run(
    found: Services, who: Principal, form: dict[str, str], workflow: str, pairs: list[str]
) -> dict[str, Any]:
    return await _start(found, who, form, workflow, dict(_pair(pair) for pair in pairs))


async def _start(
    found: Services, who: Principal, form: dict[str, str], workflow: str, given: dict[str, Any], **about: str
) -> dict[str, Any]:
    """Once for each time that somebody pressed return, however often Slack sends it."""
    who.require(Permission.START)
    if not form.get("trigger_id"):
        raise Invalid("`trigger_id` is missing: without it a repetition cannot be told from a second command")
    user = f"{form.get('team_id')}:{form.get('user_id')}"
    key = f"slack:{form.get('team_id')}:{form.get('trigger_id')}"
    command = form.get("command", "")
    context = triggers.context_of(
        "slack", user, Initiator.USER, user=form.get("user_name") or user,
        metadata={**about, "command": command, "channel": form.get("channel_id")},
        external_event={"event_type": command, "source": "slack", "event_id": form.get("trigger_id")},
        idempotency_key=key,
    )  # fmt: skip
    new = await runs.prepare(found.plans, who, workflow, input=given, trigger=context)

    async def work(tx: Tx) -> Answer:
        await runs.start(tx, found.database, who, new)
        return Answer(200, dump({"text": f"Started *{escape(workflow)}*: run `{new.id}`", "run_id": new.id}), new.id)

    digest = idempotency.Request.hash_of(form.get("user_id", ""), command, form.get("text", ""))
    asked = idempotency.Request(who.tenant_id, key, "slack", digest)
    answer = await idempotency.once(found.database, asked, work, problem_answer)
    said: dict[str, Any] = orjson.loads(answer.body)
    return said if answer.status == 200 else {"text": escape(str(said.get("detail")))}


async def _triggered(found: Services, form: dict[str, str]) -> tuple[Principal, Trigger] | None:
    """A command of somebody's own, in the one tenant of the speaker's that has it."""
    command = form.get("command", "")
    if command in ("", OWN_COMMAND):
        return None
    people = await _people(found, form.get("team_id", ""), form.get("user_id", ""))
    has = [each for p in people if (each := await triggers.of_command(found.database, p, command))]
    if len(has) > 1:
        names = ", ".join(person.tenant for person, _ in has)
        raise Invalid(f"{command} stands for something in each of your tenants ({names}); give them other names")
    return has[0] if has else None


async def _pull(
    found: Services, form: dict[str, str], words: list[str], who: Principal, trigger: Trigger
) -> dict[str, Any]:
    shown = ("text", "command", "user_id", "user_name", "channel_id", "channel_name", "team_id", "team_domain")
    payload: dict[str, Any] = {name: form.get(name, "") for name in shown} | {"words": words}
    event = Event("slack", form["command"], payload, id=form.get("trigger_id"))
    try:
        if (reason := trigger.ignores(event)) is not None:
            return {"text": f"Nothing to do: {escape(reason, 500)}"}
        given = trigger.input_for(event)
    except Unfit as error:
        raise Invalid(str(error), code="TRIGGER_UNFIT") from None
    return await _start(found, who, form, trigger.workflow, given, trigger=trigger.name)


def _pair(text: str) -> tuple[str, Any]:
    """`amount=50` is a number, `name=Ada` a text, `name="50"` in quotes of its own (name='"50"') a text too."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise Invalid(f"`{text}` is not key=value")
    try:
        return name, orjson.loads(value)
    except orjson.JSONDecodeError:
        return name, value


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise Invalid(f"`{text}` is not an approval's id") from None


# ---------------------------------------------------------------- who Slack's users are


@router.post("/api/slack/users", status_code=201, response_model=SlackUser)
async def map_user(body: NewSlackUser, request: Request, found: Svc, who: Who) -> Response:
    """Say with whose key a Slack user acts. Saying it again replaces it."""
    who.require(Permission.ADMINISTER)

    async def work(tx: Tx) -> Answer:
        await outbox.map_slack_user(
            tx, found.database, who, team_id=body.team_id, user_id=body.user_id, key_id=body.key_id
        )
        rows = await tx.fetch("list_slack_users", who.tenant_id, who.workspace_id)
        row = next(r for r in rows if (r["team_id"], r["user_id"]) == (body.team_id, body.user_id))
        return Answer(201, dump(user_view(row)))

    return await change(found, who, request, work)


@router.get("/api/slack/users", response_model=Page[SlackUser])
async def list_users(found: Svc, who: Who) -> Response:
    who.require(Permission.ADMINISTER)
    rows = await found.database.fetch("list_slack_users", who.tenant_id, who.workspace_id)
    return Json({"items": [user_view(row) for row in rows], "next_cursor": None})


@router.delete("/api/slack/users/{team_id}/{user_id}", response_model=SlackUser)
async def unmap_user(team_id: str, user_id: str, request: Request, found: Svc, who: Who) -> Response:
    who.require(Permission.ADMINISTER)

    async def work(tx: Tx) -> Answer:
        return Answer(200, dump(user_view(await outbox.unmap_slack_user(tx, who, team_id, user_id))))

    return await change(found, who, request, work)


def user_view(row: Row) -> dict[str, Any]:
    columns = ("team_id", "user_id", "key_id", "name", "role", "created_at", "revoked_at")
    return {column: row[column] for column in columns}


# ---------------------------------------------------------------- which channel is told


@router.put("/api/slack/channel", response_model=TenantChannel)
async def use_channel(body: SlackChannel, request: Request, found: Svc, who: Who) -> Response:
    """Post a tenant's approvals to this channel. One bot serves all tenants: only its operator says where it speaks."""
    return await _use_channel(found, who, request, body.tenant, body.channel)


@router.delete("/api/slack/channel", response_model=TenantChannel)
async def use_no_channel(request: Request, found: Svc, who: Who, tenant: str | None = None) -> Response:
    return await _use_channel(found, who, request, tenant, None)


async def _use_channel(
    found: Services, who: Principal, request: Request, tenant: str | None, channel: str | None
) -> Response:
    who.require(Permission.ADMINISTER)
    if not who.is_operator:
        raise Forbidden(f"Slack's channels are chosen by admins of tenant {DEFAULT_TENANT}")

    async def work(tx: Tx) -> Answer:
        row = await tx.row("tenant_named", tenant or DEFAULT_TENANT)
        if row is None:
            raise NotFound(f"no tenant {tenant}")
        await outbox.use_slack_channel(tx, found.database, row["id"], channel, who.actor)
        return Answer(200, dump({"tenant": row["name"], "channel": channel}))

    return await change(found, who, request, work)
