"""/api/hooks/slack: signed buttons and commands. /api/slack: linked Slack users, teams and channels.

A press or a command, also one that a trigger handles, is the same as a call with the key that the Slack user is linked
to: the same roles, the same authorisation, the same transaction. A rejection is sent as a message that only that user
sees.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit
from uuid import UUID

import httpx2
import orjson
from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import Response
from slack_sdk.signature import Clock, SignatureVerifier
from starlette.background import BackgroundTask

from interlock.api.dependencies import AppContext, Caller, Ctx, Json, idempotent_write, problem_answer, services
from interlock.api.views import dump
from interlock.definition.trigger import OWN_COMMAND, TriggerDefinition, UnusableEvent
from interlock.engine import outbox
from interlock.engine.access import slack_links, tenants
from interlock.engine.access.principal import DEFAULT_TENANT, Principal
from interlock.engine.approvals import approvals
from interlock.engine.expression_answers import here_or_elsewhere
from interlock.engine.ingress import idempotency, triggers
from interlock.engine.ingress.idempotency import StoredResponse
from interlock.engine.ingress.trigger_events import command_event, ignored, input_of, words_of
from interlock.engine.runs import runs
from interlock.errors import Forbidden, InterlockError, Invalid, NotFound, Unauthorized
from interlock.ids import ApprovalId
from interlock.lifecycle import ApprovalState
from interlock.policy.roles import Permission
from interlock.slack_markup import escape, moment
from interlock.store.pool import Row, Tx
from interlock.telemetry import log
from interlock.wire import (
    VOTE_RECORDED,
    EmptyBody,
    Initiator,
    Page,
    SlackChannel,
    SlackLinkCode,
    SlackOffer,
    SlackTeam,
    SlackUser,
    TenantChannel,
)

router = APIRouter(tags=["slack"])

TeamId = Annotated[str, Path(pattern=r"^[A-Za-z0-9]{1,40}$", description="The id of a Slack team, like T012345.")]

# Slack shows an error after three seconds, including the time of the answer on the network.
_ANSWER_SECONDS = 2.5
_TOO_LATE = "That took too long; nothing may have happened yet. Please try again."
_HELP = """\
`/interlock approvals`: what waits for a decision
`/interlock approve ID [DIGEST] [reason]`, `/interlock reject ID [DIGEST] [reason]`: decide; \
with a digest, only if the action is still that one
`/interlock run WORKFLOW key=value …`: start a run
`/interlock link CODE`, `/interlock unlink`: act with your key from here, or stop that
If you belong to several tenants, begin with `in TENANT`."""


# ---------------------------------------------------------------- signed by Slack


async def signed_form(request: Request, found: Annotated[AppContext, Depends(services)]) -> dict[str, str]:
    """Return the form if Slack signed exactly these bytes within the last five minutes."""
    secret = found.settings.slack_signing_secret
    if secret is None:
        raise NotFound("Slack is not set up here (INTERLOCK_SLACK_SIGNING_SECRET)", code="SLACK_NOT_CONFIGURED")
    body, headers = await request.body(), request.headers
    verifier = SignatureVerifier(secret.get_secret_value(), _Clock(found))
    try:
        valid = verifier.is_valid(body, headers.get("x-slack-request-timestamp"), headers.get("x-slack-signature"))
        form = dict(parse_qsl(body.decode(), keep_blank_values=True))
    except (ValueError, TypeError):  # the time is not a number, or the signature is not text
        valid, form = False, {}
    if not valid:
        raise Unauthorized("this is not signed by Slack, or is older than five minutes", code="SIGNATURE_INVALID")
    return form


class _Clock(Clock):
    def __init__(self, found: AppContext) -> None:
        self._found = found

    def now(self) -> float:
        return self._found.database.now().timestamp()


Form = Annotated[dict[str, str], Depends(signed_form)]


@router.post("/api/hooks/slack/actions", include_in_schema=False)
async def on_action(found: Ctx, form: Form) -> Response:
    payload = _payload(form)
    actions = payload.get("actions") or [{}]
    if payload.get("type") != "block_actions" or actions[0].get("action_id") not in _DECISIONS:
        return Response()  # not one of our forms; Slack only needs an acknowledgement
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            said = await _press(found, payload, actions[0])
    except TimeoutError:
        said = _TOO_LATE
    except InterlockError as problem:
        said = _refusal(problem)
    return _answer(found, said, payload.get("response_url"))


@router.post("/api/hooks/slack/commands", include_in_schema=False)
async def on_command(found: Ctx, form: Form) -> Response:
    """Handle `/interlock …`. Always answers 200: Slack shows any other status as a failure of the command."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            said = await _command(found, form)
    except TimeoutError:
        said = {"text": _TOO_LATE}
    except InterlockError as problem:
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


def _answer(found: AppContext, said: str | None, response_url: object) -> Response:
    if said is None:
        return Response()
    message = {"response_type": "ephemeral", "replace_original": False, "text": said}
    # The reply to a press goes to its `response_url`; Slack does not show the body of this response.
    telling = None
    if isinstance(response_url, str) and _is_slacks(found, response_url):
        telling = BackgroundTask(_tell, response_url, message)
    return Response(dump(message), media_type="application/json", background=telling)


def _is_slacks(found: AppContext, url: str) -> bool:
    parts, base = urlsplit(url), urlsplit(found.settings.slack_base_url)
    return (parts.scheme, parts.netloc) in (("https", "hooks.slack.com"), (base.scheme, base.netloc))


async def _tell(url: str, message: dict[str, Any]) -> None:
    try:
        async with httpx2.AsyncClient(timeout=5) as client:
            await client.post(url, json=message)
    except httpx2.HTTPError as error:  # the card stays unchanged, and the person presses again
        log.warning("slack_reply_lost", error=f"{type(error).__name__}: {error}")


# ---------------------------------------------------------------- users


async def _people(found: AppContext, team_id: str, user_id: str) -> list[Principal]:
    rows = await found.database.fetch("keys_of_slack_user", team_id, user_id)
    return [tenants.principal_of(row) for row in rows]


_UNKNOWN = (
    "Interlock does not know you yet. Run `interlock slack link` with your own key, and send the code from here: "
    "`/interlock link CODE`."
)


def _refusal(problem: InterlockError) -> str:
    digest = problem.fields.get("digest")
    now = f" The digest of the action is now `{escape(str(digest), 100)}`." if digest else ""
    return f"{escape(problem.detail, 2000)}{now} ({problem.code})"


# ---------------------------------------------------------------- buttons

_DECISIONS = {"interlock_approve": True, "interlock_reject": False}


async def _press(found: AppContext, payload: dict[str, Any], action: dict[str, Any]) -> str | None:
    """Handle a press and return the message for the person who pressed, or None if the card shows the result."""
    user = payload.get("user") or {}
    team_id = (payload.get("team") or {}).get("id") or user.get("team_id") or ""
    user_id = user.get("id") or ""
    approval_id, _, digest = str(action.get("value") or "").partition(":")
    people = await _people(found, team_id, user_id)
    if not people:
        return _UNKNOWN
    approval = await found.database.row("approval_by_id", _uuid(approval_id))
    who = next((p for p in people if approval is not None and p.tenant_id == approval["tenant_id"]), None)
    if approval is None or who is None or not await _reaches(found, who, approval):
        return "This approval is not known here."  # the same answer for an approval of another tenant or workspace
    await _remember_card(found, approval, payload.get("container") or {})
    try:
        return await _decide(found, who, approval["id"], approves=_DECISIONS[action["action_id"]], digest=digest)
    except InterlockError as problem:
        # The card was out of date, perhaps because its update was lost when a sender crashed.
        await found.database.fetch("refresh_cards", approval["tenant_id"], approval["id"])
        return _refusal(problem)


async def _reaches(found: AppContext, who: Principal, approval: Row) -> bool:
    try:
        await approvals.get(found.database, who, approval["id"])
    except NotFound:
        return False
    return True


async def _decide(
    found: AppContext,
    who: Principal,
    approval_id: ApprovalId,
    *,
    approves: bool,
    digest: str | None,
    reason: str | None = None,
) -> str | None:
    who.require(Permission.APPROVE)

    async def work(tx: Tx) -> str | None:
        row = await approvals.decide(tx, found.plans, who, approval_id, approves=approves, digest=digest, reason=reason)
        votes = await approvals.votes_on(tx, [row])
        if row["status"] == ApprovalState.REQUESTED:
            return VOTE_RECORDED
        if all(vote["voter"] != who.actor for vote in votes):
            await tx.fetch("refresh_cards", who.tenant_id, approval_id)
            return f"It was {row['status']} already."
        return None

    return await found.database.run_in_transaction(work)


async def _remember_card(found: AppContext, approval: Row, container: dict[str, Any]) -> None:
    """Register the card so that it is rewritten too, even if Interlock has no record of posting it."""
    channel, ts = container.get("channel_id"), container.get("message_ts")
    if channel and ts and not container.get("is_ephemeral"):
        await found.database.fetch("add_card", approval["id"], approval["tenant_id"], str(channel), str(ts))


# ---------------------------------------------------------------- commands


async def _command(found: AppContext, form: dict[str, str]) -> dict[str, Any]:
    if trigger := await _triggered(found, form):
        return await _pull(found, form, *trigger)
    words = words_of(form.get("text", ""))
    tenant = words[1] if len(words) > 1 and words[0] == "in" else None
    verb, *rest = (words[2:] if tenant is not None else words) or ["help"]
    if verb == "help":
        return {"text": _HELP}
    if verb == "link":
        return {"text": await _link(found, form, rest)}
    who = await _speaker(found, form, tenant)
    match verb, rest:
        case "approvals", []:
            return {"text": await _list_approvals(found, who)}
        case (("approve" | "reject"), [approval_id, *said]):
            digest, reason = _parted(said)
            told = await _decide(
                found, who, ApprovalId(_uuid(approval_id)), approves=verb == "approve", digest=digest, reason=reason
            )
            return {"text": told or {"approve": "Approved.", "reject": "Rejected."}[verb]}
        case "unlink", []:
            await found.database.run_in_transaction(
                lambda tx: slack_links.unlink(tx, who, form["team_id"], form["user_id"])
            )
            return {"text": f"You do not act as {escape(who.name, 100)} any more."}
        case "run", [workflow, *pairs]:
            return await _run(found, who, form, workflow, pairs)
        case _:
            return {"text": f"That is not a command here.\n{_HELP}"}


async def _link(found: AppContext, form: dict[str, str], words: list[str]) -> str:
    team_id, user_id = form.get("team_id", ""), form.get("user_id", "")
    if not (team_id and user_id and words):
        raise Invalid("send the code that `interlock slack link` prints: `/interlock link CODE`")
    code = "".join(words)
    who = await found.database.run_in_transaction(lambda tx: slack_links.link(tx, code, team_id, user_id))
    return f"From here you act as *{escape(who.name, 100)}* ({who.role}) in tenant {escape(who.tenant, 100)}."


_DIGEST = re.compile("[0-9a-f]{64}")


def _parted(said: list[str]) -> tuple[str | None, str | None]:
    """Split the words into the digest, if the first word is one, and the reason."""
    digest = said[0] if said and _DIGEST.fullmatch(said[0]) else None
    return digest, " ".join(said[1:] if digest else said) or None


async def _speaker(found: AppContext, form: dict[str, str], tenant: str | None) -> Principal:
    team_id, user_id = form.get("team_id", ""), form.get("user_id", "")
    people = [p for p in await _people(found, team_id, user_id) if tenant is None or p.tenant == tenant]
    if not people:
        raise Forbidden(_UNKNOWN, code="SLACK_USER_UNKNOWN")
    if len(people) > 1:
        names = ", ".join(person.tenant for person in people)
        raise Invalid(f"you belong to several tenants ({names}); say which: /interlock in {people[0].tenant} …")
    return people[0]


async def _list_approvals(found: AppContext, who: Principal) -> str:
    who.require(Permission.READ)
    rows = await approvals.list_approvals(found.database, who, status=ApprovalState.REQUESTED, limit=21)
    lines = [
        f"• *{escape(row['summary'], 150)}* ({row['tier']}{', two people' if row['two_person'] else ''}), "
        f"expires {moment(row['expires_at'])}: `{row['id']}`"
        for row in rows[:20]
    ]
    if len(rows) > 20:
        lines.append("… and more.")
    return "\n".join(lines) or "Nothing waits for a decision."


async def _run(
    found: AppContext, who: Principal, form: dict[str, str], workflow: str, pairs: list[str]
) -> dict[str, Any]:
    return await _start(found, who, form, workflow, dict(_pair(pair) for pair in pairs))


async def _start(
    found: AppContext, who: Principal, form: dict[str, str], workflow: str, given: dict[str, Any], **about: str
) -> dict[str, Any]:
    """Start a run once for each command that the user sent, however often Slack delivers it."""
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

    async def work(tx: Tx) -> StoredResponse:
        await runs.start(tx, who, new)
        return StoredResponse(
            200, dump({"text": f"Started *{escape(workflow)}*: run `{new.id}`", "run_id": new.id}), new.id
        )

    digest = idempotency.Request.hash_of(form.get("user_id", ""), command, form.get("text", ""))
    asked = idempotency.Request(who.tenant_id, key, "slack", digest)
    answer = await idempotency.once(found.database, asked, work, problem_answer)
    said: dict[str, Any] = orjson.loads(answer.body)
    return said if answer.status == 200 else {"text": escape(str(said.get("detail")))}


async def _triggered(found: AppContext, form: dict[str, str]) -> tuple[Principal, TriggerDefinition] | None:
    """Return the trigger for a custom command, from the only one of the speaker's tenants that defines it."""
    command = form.get("command", "")
    if command in ("", OWN_COMMAND):
        return None
    people = await _people(found, form.get("team_id", ""), form.get("user_id", ""))
    has = [each for p in people if (each := await triggers.of_command(found.database, p, command))]
    if len(has) > 1:
        names = ", ".join(person.tenant for person, _ in has)
        raise Invalid(f"{command} stands for something in each of your tenants ({names}); give them other names")
    return has[0] if has else None


async def _pull(found: AppContext, form: dict[str, str], who: Principal, trigger: TriggerDefinition) -> dict[str, Any]:
    event = command_event(form)
    try:
        if (reason := await here_or_elsewhere(who.tenant_id, ignored, trigger, event)) is not None:
            return {"text": f"Nothing to do: {escape(reason, 500)}"}
        given = await here_or_elsewhere(who.tenant_id, input_of, trigger, event)
    except UnusableEvent as error:
        raise Invalid(str(error), code="TRIGGER_UNFIT") from None
    return await _start(found, who, form, trigger.workflow, given, trigger=trigger.name)


def _pair(text: str) -> tuple[str, Any]:
    """Parse `amount=50` as a number and `name=Ada` as text. With quoted quotes, name='"50"' is text too."""
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


@router.post("/api/slack/link-codes", status_code=201, response_model=SlackLinkCode)
async def make_link_code(found: Ctx, who: Caller, body: EmptyBody | None = None) -> Response:
    """Create a code for the caller's key.

    After a Slack user sends `/interlock link CODE`, that user acts with the key.
    """
    code, expires_at = await found.database.run_in_transaction(lambda tx: slack_links.new_code(tx, who))
    return Json({"code": code, "expires_at": expires_at}, 201)


@router.get("/api/slack/users", response_model=Page[SlackUser])
async def list_users(found: Ctx, who: Caller) -> Response:
    who.require(Permission.ADMINISTER)
    rows = await found.database.fetch("list_slack_users", who.tenant_id, who.workspace_id)
    return Json({"items": [user_view(row) for row in rows], "next_cursor": None})


@router.delete("/api/slack/users/{team_id}/{user_id}", response_model=SlackUser)
async def unmap_user(team_id: str, user_id: str, request: Request, found: Ctx, who: Caller) -> Response:
    who.require(Permission.ADMINISTER)

    async def work(tx: Tx) -> StoredResponse:
        return StoredResponse(200, dump(user_view(await slack_links.unlink(tx, who, team_id, user_id))))

    return await idempotent_write(found, who, request, work)


def user_view(row: Row) -> dict[str, Any]:
    columns = ("team_id", "user_id", "key_id", "name", "role", "created_at", "revoked_at")
    return {column: row[column] for column in columns}


# ---------------------------------------------------------------- which tenants a Slack team belongs to


@router.get("/api/slack/teams", response_model=Page[SlackTeam])
async def list_teams(found: Ctx, who: Caller) -> Response:
    """List the Slack teams that the tenant shares with other tenants, and those that were offered to it."""
    who.require(Permission.ADMINISTER)
    who.require_whole_tenant("Slack teams are")
    rows = await found.database.fetch("slack_teams", who.tenant_id)
    return Json({"items": [dict(row) for row in rows], "next_cursor": None})


@router.post("/api/slack/teams/{team_id}/offers", response_model=SlackTeam)
async def offer_team(team_id: TeamId, body: SlackOffer, request: Request, found: Ctx, who: Caller) -> Response:
    """Offer a Slack team of this tenant to another tenant. Nothing changes until an admin of that tenant accepts."""
    who.require(Permission.ADMINISTER)
    return await _change_team(found, who, request, team_id, lambda tx: slack_links.offer(tx, who, team_id, body.tenant))


@router.post("/api/slack/teams/{team_id}/accept", response_model=SlackTeam)
async def accept_team(team_id: TeamId, request: Request, found: Ctx, who: Caller) -> Response:
    """Accept a Slack team that another tenant offered. Users of both tenants may then act from it."""
    who.require(Permission.ADMINISTER)
    return await _change_team(found, who, request, team_id, lambda tx: slack_links.accept(tx, who, team_id))


@router.delete("/api/slack/teams/{team_id}", response_model=SlackTeam)
async def leave_team(team_id: TeamId, request: Request, found: Ctx, who: Caller) -> Response:
    """Leave a shared Slack team, or decline an offer. The tenant's users can no longer act from that team."""
    who.require(Permission.ADMINISTER)
    return await _change_team(found, who, request, team_id, lambda tx: slack_links.leave(tx, who, team_id))


async def _change_team(
    found: AppContext, who: Principal, request: Request, team_id: str, work: Callable[[Tx], Awaitable[None]]
) -> Response:
    async def answer(tx: Tx) -> StoredResponse:
        await work(tx)
        rows = await tx.fetch("slack_teams", who.tenant_id)
        mine = next((dict(row) for row in rows if row["team_id"] == team_id), None)
        return StoredResponse(200, dump(mine or {"team_id": team_id, "is_member": False, "tenants": []}))

    return await idempotent_write(found, who, request, answer)


# ---------------------------------------------------------------- the channel for approvals


@router.put("/api/slack/channel", response_model=TenantChannel)
async def use_channel(body: SlackChannel, request: Request, found: Ctx, who: Caller) -> Response:
    """Set the Slack channel for a tenant's approvals. One bot serves all tenants, so only the operator may set it."""
    return await _use_channel(found, who, request, body.tenant, body.channel)


@router.delete("/api/slack/channel", response_model=TenantChannel)
async def use_no_channel(request: Request, found: Ctx, who: Caller, tenant: str | None = None) -> Response:
    return await _use_channel(found, who, request, tenant, None)


async def _use_channel(
    found: AppContext, who: Principal, request: Request, tenant: str | None, channel: str | None
) -> Response:
    who.require(Permission.ADMINISTER)
    if not who.is_operator:
        raise Forbidden(f"Slack's channels are chosen by admins of tenant {DEFAULT_TENANT}")

    async def work(tx: Tx) -> StoredResponse:
        row = await tx.row("tenant_named", tenant or DEFAULT_TENANT)
        if row is None:
            raise NotFound(f"no tenant {tenant}")
        await outbox.use_slack_channel(tx, row["id"], channel, who.actor)
        return StoredResponse(200, dump({"tenant": row["name"], "channel": channel}))

    return await idempotent_write(found, who, request, work)
