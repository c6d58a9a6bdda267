"""Three workspaces with equal, marked contents: the caller's, its neighbour's and another tenant's."""

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import httpx2

from interlock.engine.access import slack_links
from interlock.wire import Role
from tests.integrations.people import share
from tests.rig import Rig

ROLES = (*Role, None)
# The name under which a request finds each kind of thing.
_NAMED = ("agents", "workflows", "schedules", "triggers", "secrets", "tenants", "hooks")


@dataclass
class Place:
    """A workspace, the mark that all its rows contain, and their ids and names."""

    mark: str
    ids: dict[str, str] = field(default_factory=dict)

    def name(self, kind: str) -> str:
        return f"{self.mark}_{kind}"

    def path(self, path: str) -> str:
        kind = path.split("/")[2]
        ids = (
            self.ids
            | {"version": "0" if kind == "policy" else "1"}
            | ({"name": self.name(kind)} if kind in _NAMED else {})
        )
        ids["version"] = "1"
        if path.startswith("/api/sessions/{session_id}/approvals"):
            ids["approval_id"] = ids["session_approval_id"]
        return path.format(**ids)

    def body(self, body: Any) -> Any:
        match body:
            case str():
                return body.format(mark=self.mark, **self.ids) if body.startswith("{") else body
            case list():
                return [self.body(each) for each in body]
            case dict():
                return {name: self.body(each) for name, each in body.items()}
            case _:
                return body

    @property
    def secrets(self) -> set[str]:
        """Return the texts that no answer to others may contain."""
        shared = ("team_id", "worker_id")
        return {self.mark, *(value for name, value in self.ids.items() if value and name not in shared)}


@dataclass
class World:
    own: Place
    neighbour: Place
    rival: Place
    callers: dict[Role | None, httpx2.AsyncClient]
    # An admin of the caller's tenant, without a workspace.
    tenant_admin: httpx2.AsyncClient
    tenant_id: UUID
    rival_id: UUID


async def furnish(rig: Rig) -> World:
    """Give the other tenant's workspace the caller's name: this exposes a statement that forgets the tenant."""

    @rig.tool("bank.pay", writes=True, risk="low", undo="bank.pay")
    async def pay(memo: str) -> dict[str, str]:
        return {"said": memo}

    @rig.tool("bank.ask", writes=True, risk="high")
    async def ask(memo: str) -> None: ...

    acme, rival = await rig.tenant("acme"), await rig.tenant("rival")
    for admin in (acme, rival):
        await share(rig, admin, "T1")
    places = {}
    async with rig.worker():
        for mark, tenant_id, workspace in (
            ("own7f3a", acme.tenant_id, "blue"),
            ("neighbour9c1d", acme.tenant_id, "red"),
            ("rival5e2b", rival.tenant_id, "blue"),
        ):
            places[mark] = await _place(rig, mark, tenant_id, workspace)
    await _named_alike(rig.http(await rig.key("alike", "admin", rival.tenant_id, "blue")), places["own7f3a"])
    [worker] = await rig.sql("SELECT id FROM interlock.worker LIMIT 1")
    for place in places.values():
        place.ids["worker_id"] = str(worker["id"])
    callers: dict[Role | None, httpx2.AsyncClient] = {
        role: rig.http(await rig.key(str(role), role, acme.tenant_id, "blue")) for role in Role
    }
    callers[None] = rig.http("")
    whole = rig.http(await rig.key("whole", "admin", acme.tenant_id))
    return World(*places.values(), callers, whole, acme.tenant_id, rival.tenant_id)


async def _named_alike(rival: httpx2.AsyncClient, own: Place) -> None:
    """Give the other tenant things of the same names: a statement that selects by name must select the owner too."""
    steps = [{"id": "theirs", "approval": {"tier": "high"}}]
    alike = {"memo": "rival5e2b"}
    for path, body in (
        ("workflows", {"name": "mine", "steps": steps}),
        ("workflows", {"name": "mine", "caps": {"max_concurrency": 3}, "steps": steps}),
        ("workflows", {"name": own.name("workflows"), "steps": steps}),
        ("schedules", {"name": own.name("schedules"), "cron": "0 0 1 1 *", "workflow": "gate", "input": alike}),
        ("triggers", {
            "name": own.name("triggers"), "slack": {"command": f"/{own.mark}"}, "workflow": "gate", "input": alike,
        }),
    ):  # fmt: skip
        answer = await rival.post(f"/api/{path}", json=body)
        assert answer.is_success, (path, answer.text)


async def _place(rig: Rig, mark: str, tenant_id: UUID, workspace: str) -> Place:
    whole = rig.http(await rig.key(mark, "admin", tenant_id))
    inside = rig.http(await rig.key(mark, "admin", tenant_id, workspace))
    place = Place(mark)

    async def made(client: httpx2.AsyncClient, path: str, body: Any, verb: str = "POST") -> Any:
        answer = await client.request(verb, f"/api/{path}", json=body)
        assert answer.is_success, (path, answer.text)
        return answer.json()

    steps = [{"id": "ask", "approval": {"tier": "low", "summary": "About ${input.memo}"}}]
    await made(whole, "workflows", {"name": "gate", "steps": steps})
    script = [{"turns": [{"calls": [{"tool": "bank.ask", "args": {"memo": mark}}]}, {"say": "{result}"}]}]
    agent = {"name": place.name("agents"), "model": "scripted", "tools": ["bank.ask"], "script": script}
    await made(whole, "agents", agent)
    await made(whole, "workflows", {"name": place.name("workflows"), "steps": steps})
    if workspace == "blue":  # the names of a tenant's secrets are not secret within it
        text = (await whole.get("/api/policy")).json()["text"]
        assert (await whole.put("/api/policy", content=f"{text}\n// {mark}\n")).is_success
        await made(whole, f"secrets/{place.name('secrets')}", {"value": f"a secret of {mark}", "tools": []}, "PUT")
    memo, waiting = {"memo": mark}, ""
    run = await made(inside, "runs", {"workflow": "gate", "input": memo})
    call = await made(inside, "tool-calls", {"tool": "bank.pay", "args": memo, "wait": 20})
    assert call["status"] == "done", call
    sent = await made(inside, "messages", {"content": f"about {mark}", "agent": agent["name"]})
    key = await made(inside, "keys", {"name": place.name("keys"), "role": "approver"})
    code = await made(rig.http(key["key"]), "slack/link-codes", None)
    await rig.database.run_in_transaction(lambda tx: slack_links.link(tx, code["code"], "T1", f"U{mark}"))
    decided = await made(inside, "runs", {"workflow": "gate", "input": memo})
    await made(rig.http(key["key"]), f"runs/{decided['id']}/approve", None)
    await made(inside, "schedules", {
        "name": place.name("schedules"), "cron": "0 0 1 1 *", "workflow": "gate", "input": memo,
    })  # fmt: skip
    await made(inside, "triggers", {
        "name": place.name("triggers"), "slack": {"command": f"/{mark}"}, "workflow": "gate", "input": memo,
    })  # fmt: skip
    await made(inside, "events", {"type": "bank.settled", "correlation": mark, "id": mark, "payload": memo})
    if not mark.startswith("own"):  # an event of the caller must not reach the runs of others
        waits = [{"id": "came", "wait": {"event": "bank.settled", "correlation": "ch_9"}}]
        await made(whole, "workflows", {"name": "waits", "steps": waits})
        waiting = (await made(inside, "runs", {"workflow": "waits"}))["id"]
    job = {"task_description": mark, "workflow": "gate", "inputs": [memo]}
    webhook = await made(inside, "webhooks", {"url": f"https://192.0.1.1/{mark}"})
    grant = {"tool": "bank.pay", "arguments": memo, "expires_in": 3600, "reason": mark}
    [receipt] = (await inside.get(f"/api/runs/{call['id']}/receipts")).json()["items"]
    await rig.until(UUID(sent["run_id"]), "waiting_approval")
    [asked] = (await inside.get(f"/api/approvals?session_id={sent['session_id']}")).json()["items"]
    [approval] = (await inside.get(f"/api/approvals?run_id={run['id']}")).json()["items"]
    place.ids = {
        "run_id": run["id"], "approval_id": approval["id"], "tool_call_id": call["id"], "receipt_id": receipt["id"],
        "session_id": sent["session_id"], "key_id": key["id"], "team_id": "T1", "user_id": f"U{mark}",
        "webhook_id": webhook["id"],
        "job_id": (await made(inside, "jobs", job))["id"],
        "grant_id": (await made(inside, "grants", grant))["id"],
        "waiting_run_id": waiting,
        "session_approval_id": asked["id"],
    }  # fmt: skip
    return place
