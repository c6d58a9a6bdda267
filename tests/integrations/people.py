"""People in Slack: their names, and Slack's requests when they press a button or type a command."""

from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import httpx2
import orjson
from slack_sdk.signature import SignatureVerifier

from interlock import clock
from interlock.engine.access import slack_links
from interlock.engine.access.principal import Principal
from interlock.integrations import use_settings
from interlock.store.pool import Tx
from tests.rig import Rig

SIGNING_SECRET = "8f742231b10e8888abcd99yyyzzz85a5"
TEAM = "T0TEAM"

GATE = """
name: release
steps:
  - {id: ok, approval: {tier: med, summary: "Release ${input.version}"}}
"""


async def join(rig: Rig, name: str, user_id: str, role: str = "approver", **options: Any) -> Principal:
    """Create a person with a key, and link a Slack user to it."""
    who = await rig.person(name, role, **options)
    if who.tenant_id != rig.admin.tenant_id:
        await share(rig, who)
    await link(rig, who, user_id)
    return who


async def link(rig: Rig, who: Principal, user_id: str, team_id: str = TEAM) -> None:
    async def work(tx: Tx) -> None:
        code, _ = await slack_links.new_code(tx, who)
        await slack_links.link(tx, code, team_id, user_id)

    await rig.database.run_in_transaction(work)


async def share(rig: Rig, who: Principal, team_id: str = TEAM) -> None:
    """Both tenants agree that people of the second act from the first one's Slack team."""

    async def work(tx: Tx) -> None:
        await slack_links.offer(tx, rig.admin, team_id, who.tenant)
        await slack_links.accept(tx, who.within(None), team_id)

    await rig.database.run_in_transaction(work)


async def waiting(rig: Rig, flow: str = GATE, name: str = "release", **input: Any) -> tuple[UUID, Any]:
    """Start a run that waits for approval, and return its approval."""
    await use_settings(rig.database, rig.settings)
    await rig.apply(flow)
    run_id = await rig.start(name, input or {"version": "1.2"})
    (approval,) = await rig.sql("SELECT * FROM interlock.approval WHERE run_id = $1", run_id)
    return run_id, approval


def button(card: dict[str, Any], action_id: str) -> str:
    blocks = card["blocks"]
    blocks = orjson.loads(blocks) if isinstance(blocks, str) else blocks
    (found,) = [
        element["value"]
        for block in blocks
        if block["type"] == "actions"
        for element in block["elements"]
        if element["action_id"] == action_id
    ]
    assert isinstance(found, str)
    return found


def has_buttons(card: dict[str, Any]) -> bool:
    return '"actions"' in (card["blocks"] if isinstance(card["blocks"], str) else orjson.dumps(card["blocks"]).decode())


def pressed(
    value: str, user_id: str, action_id: str = "interlock_approve", response_url: str | None = None,
    ts: str = "1700000000.000001",
) -> dict[str, str]:  # fmt: skip
    """Return the form that Slack posts for a button, as its documentation shows it."""
    payload = {
        "type": "block_actions",
        "user": {"id": user_id, "username": "somebody", "name": "somebody", "team_id": TEAM},
        "api_app_id": "A02",
        "token": "9s8d9as89d8as9d8as989",
        "container": {"type": "message", "message_ts": ts, "channel_id": "C0APPROVALS", "is_ephemeral": False},
        "trigger_id": "12321423423.333649436676.d8c1bb837935619ccad0f624c448ffb3",
        "team": {"id": TEAM, "domain": "example"},
        "enterprise": None,
        "is_enterprise_install": False,
        "channel": {"id": "C0APPROVALS", "name": "approvals"},
        "message": {"bot_id": "B1", "type": "message", "text": "Approval needed", "user": "U9", "ts": ts},
        "state": {"values": {}},
        "response_url": response_url or "https://elsewhere.example/not-slack",
        "actions": [
            {
                "action_id": action_id, "block_id": "interlock:1", "value": value, "style": "primary",
                "text": {"type": "plain_text", "text": "Approve", "emoji": False}, "type": "button",
                "action_ts": "1700000003.123456",
            }
        ],
    }  # fmt: skip
    return {"payload": orjson.dumps(payload).decode()}


def typed(text: str, user_id: str, trigger_id: str = "13345224609.738474920.8088930838d88f008e0") -> dict[str, str]:
    return {
        "token": "gIkuvaNzQIHg97ATvDxqgjtO", "team_id": TEAM, "team_domain": "example", "channel_id": "C2147483705",
        "channel_name": "test", "user_id": user_id, "user_name": "somebody", "command": "/interlock", "text": text,
        "response_url": "https://hooks.slack.com/commands/1234/5678", "trigger_id": trigger_id, "api_app_id": "A123456",
    }  # fmt: skip


async def send(
    rig: Rig, path: str, form: dict[str, str], *, secret: str = SIGNING_SECRET, at: float | None = None,
    headers: dict[str, str] | None = None,
) -> httpx2.Response:  # fmt: skip
    """Sign like Slack: over the bytes of the form."""
    body = urlencode(form)
    moved = rig.clock()
    moment = str(int(at if at is not None else moved.timestamp() if moved else clock.now().timestamp()))
    signature = SignatureVerifier(secret).generate_signature(timestamp=moment, body=body)
    assert signature is not None
    signed = {
        "content-type": "application/x-www-form-urlencoded", "x-slack-request-timestamp": moment,
        "x-slack-signature": signature,
    }  # fmt: skip
    return await rig.http("").post(f"/api/hooks/slack/{path}", content=body, headers=signed | (headers or {}))
