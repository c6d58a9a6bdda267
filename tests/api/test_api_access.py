"""Permissions of tenants, roles, workspaces and keys."""

from typing import Any

import httpx2
import pytest
from tests.integrations.people import join
from tests.rig import Rig

from interlock.wire import Key, Page, Problem, Role

GATE = "{name: gate, steps: [{id: ask, approval: {tier: low}}]}"


@pytest.fixture
async def http(rig: Rig) -> httpx2.AsyncClient:
    await rig.apply(GATE)
    return rig.http()


async def start(http: httpx2.AsyncClient) -> tuple[str, str]:
    run = (await http.post("/api/runs", json={"workflow": "gate"})).json()
    [approval] = (await http.get("/api/approvals", params={"run_id": run["id"]})).json()["items"]
    return run["id"], approval["id"]


def problem(answer: httpx2.Response, status: int) -> Problem:
    assert answer.status_code == status, f"{answer.request.method} {answer.request.url.path}: {answer.text}"
    assert answer.headers["content-type"] == "application/problem+json"
    return Problem.model_validate(answer.json())


# ---------------------------------------------------------------- keys


async def test_without_a_valid_key_there_is_nothing(rig: Rig, http: httpx2.AsyncClient) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer nope"},
        {"Authorization": "Basic eDp5"},
        {"Authorization": "Bearer "},
    ):
        answer = await rig.http("").get("/api/runs", headers=headers)
        assert problem(answer, 401).code == "UNAUTHORIZED"
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_a_key_is_shown_once_listed_without_its_secret_and_can_be_revoked(
    rig: Rig, http: httpx2.AsyncClient
) -> None:
    answer = await http.post("/api/keys", json={"name": "ci", "role": "operator"})
    made = Key.model_validate(answer.json())
    assert (answer.status_code, made.role, made.key is not None) == (201, "operator", True)
    client = rig.http(made.key)
    assert (await client.get("/api/runs")).status_code == 200
    listed = await http.get("/api/keys")
    assert made.key not in listed.text and "hash" not in listed.text
    assert [(k.name, k.key) for k in Page[Key].model_validate(listed.json()).items] == [("ci", None), ("admin", None)]
    revoked = Key.model_validate((await http.delete(f"/api/keys/{made.id}")).json())
    assert revoked.revoked_at is not None
    assert problem(await client.get("/api/runs"), 401).code == "UNAUTHORIZED"
    # A second revocation keeps the time of the first.
    assert (await http.delete(f"/api/keys/{made.id}")).json()["revoked_at"] == revoked.model_dump(mode="json")[
        "revoked_at"
    ].replace("Z", "+00:00")


async def test_a_name_with_a_colon_is_shown_whole(rig: Rig, http: httpx2.AsyncClient) -> None:
    made = (await http.post("/api/keys", json={"name": "ops:ann", "role": "admin"})).json()
    ann = rig.http(made["key"])
    assert (await ann.put("/api/secrets/token", json={"value": "s3cret", "tools": ["*"]})).json()[
        "created_by"
    ] == "ops:ann"
    sent = await ann.post("/api/events", json={"type": "t.came", "correlation": "c"})
    listed = (await ann.get("/api/events")).json()["items"]
    assert (sent.status_code, [event["sent_by"] for event in listed]) == (202, ["ops:ann"])


async def test_a_key_cannot_revoke_itself(rig: Rig, http: httpx2.AsyncClient) -> None:
    assert problem(await http.delete(f"/api/keys/{rig.admin.key_id}"), 409).code == "KEY_IN_USE"
    assert (await http.get("/api/keys")).status_code == 200


@pytest.mark.parametrize("name", ["system", "worker", "run", "system:policy"])
async def test_nobody_is_called_like_what_acts_by_itself(http: httpx2.AsyncClient, name: str) -> None:
    """Otherwise the journal would name the engine instead of the person."""
    refused = problem(await http.post("/api/keys", json={"name": name, "role": "approver"}), 422)
    assert (refused.code, name.partition(":")[0] in refused.detail) == ("KEY_NAME_TAKEN", True)
    assert (await http.post("/api/keys", json={"name": "systems", "role": "viewer"})).status_code == 201


async def test_keys_are_stored_as_hashes_only(rig: Rig, http: httpx2.AsyncClient) -> None:
    key = (await http.post("/api/keys", json={"name": "ci", "role": "viewer"})).json()["key"]
    [row] = await rig.sql("SELECT count(*) AS n FROM interlock.api_key WHERE api_key::text LIKE '%' || $1 || '%'", key)
    assert row["n"] == 0


# ---------------------------------------------------------------- roles

# What each role may do; every role may read.
MAY = {
    Role.VIEWER: set(),
    Role.OPERATOR: {"start", "stop", "define"},
    Role.APPROVER: {"approve"},
    Role.AGENT: {"start"},
    Role.ADMIN: {"start", "stop", "define", "approve", "administer"},
}


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_may_do_exactly_what_it_says(rig: Rig, http: httpx2.AsyncClient, role: Role) -> None:
    mine = rig.http(await rig.key("me", role))
    spare = (await http.post("/api/keys", json={"name": "spare", "role": "viewer"})).json()["id"]
    ids = [await start(http) for _ in range(6)]
    canceled, _ = await start(http)
    await http.post(f"/api/runs/{canceled}/cancel")
    workflow = {"name": "w", "steps": [{"id": "a", "tool": "t.x"}]}
    calls: list[tuple[str, str, str, Any]] = [
        ("read", "GET", "/api/runs", None),
        ("read", "GET", f"/api/runs/{ids[0][0]}", None),
        ("read", "GET", f"/api/runs/{ids[0][0]}/events", None),
        ("read", "GET", "/api/approvals", None),
        ("read", "GET", f"/api/approvals/{ids[0][1]}", None),
        ("read", "GET", "/api/workflows", None),
        ("read", "GET", "/api/workflows/gate", None),
        ("read", "GET", "/api/workers", None),
        ("read", "GET", "/api/tools", None),
        ("start", "POST", "/api/runs", {"workflow": "gate"}),
        ("start", "POST", f"/api/runs/{canceled}/retry", None),
        ("approve", "POST", f"/api/runs/{ids[1][0]}/approve", None),
        ("approve", "POST", f"/api/approvals/{ids[2][1]}/approve", None),
        ("approve", "POST", f"/api/approvals/{ids[3][1]}/reject", None),
        ("stop", "POST", f"/api/runs/{ids[4][0]}/cancel", None),
        ("stop", "POST", f"/api/runs/{ids[5][0]}/interrupt", None),
        ("define", "POST", "/api/workflows", workflow),
        ("administer", "GET", "/api/keys", None),
        ("administer", "POST", "/api/keys", {"name": "k", "role": "viewer"}),
        ("administer", "DELETE", f"/api/keys/{spare}", None),
        ("administer", "GET", "/api/tenants", None),
        ("administer", "POST", "/api/tenants", {"name": "acme"}),
    ]
    for permission, method, path, body in calls:
        answer = await mine.request(method, path, json=body)
        if permission == "read" or permission in MAY[role]:
            assert answer.is_success, f"{role} {method} {path}: {answer.text}"
        else:
            refused = problem(answer, 403)
            never = permission == "approve" and role == Role.AGENT
            assert (refused.code, answer.json()["role"]) == ("AGENT_MAY_NOT_APPROVE" if never else "FORBIDDEN", role)
    statuses = [(await http.get(f"/api/runs/{run_id}")).json()["status"] for run_id, _ in ids[1:]]
    assert statuses[:3] == (
        ["succeeded", "succeeded", "failed"] if "approve" in MAY[role] else ["waiting_approval"] * 3
    )
    assert statuses[3:] == (["canceled"] * 2 if "stop" in MAY[role] else ["waiting_approval"] * 2)


# ---------------------------------------------------------------- tenants


async def test_only_admins_of_the_default_tenant_manage_tenants(rig: Rig, http: httpx2.AsyncClient) -> None:
    made = await http.post("/api/tenants", json={"name": "acme", "max_concurrency": 5, "weight": 2.5})
    assert (made.status_code, made.json()["max_concurrency"], made.json()["weight"]) == (201, 5, 2.5)
    acme = rig.http(made.json()["key"])
    assert problem(await acme.post("/api/tenants", json={"name": "other"}), 403).code == "FORBIDDEN"
    assert problem(await acme.get("/api/tenants"), 403).code == "FORBIDDEN"
    assert problem(await http.post("/api/tenants", json={"name": "acme"}), 409).code == "TENANT_EXISTS"
    listed = (await http.get("/api/tenants")).json()["items"]
    assert [t["name"] for t in listed] == ["default", "acme"]
    assert "key" not in listed[1]


async def test_what_belongs_to_another_tenant_does_not_exist(rig: Rig, http: httpx2.AsyncClient) -> None:
    run_id, approval_id = await start(http)
    key_id = (await http.post("/api/keys", json={"name": "k", "role": "viewer"})).json()["id"]
    before = (await http.get(f"/api/runs/{run_id}/events")).json()
    other = rig.http((await http.post("/api/tenants", json={"name": "other"})).json()["key"])
    for method, path, body in [
        ("GET", f"/api/runs/{run_id}", None),
        ("GET", f"/api/runs/{run_id}?wait=5", None),
        ("GET", f"/api/runs/{run_id}/events", None),
        ("POST", f"/api/runs/{run_id}/approve", None),
        ("POST", f"/api/runs/{run_id}/cancel", None),
        ("POST", f"/api/runs/{run_id}/interrupt", None),
        ("POST", f"/api/runs/{run_id}/retry", None),
        ("GET", f"/api/approvals/{approval_id}", None),
        ("POST", f"/api/approvals/{approval_id}/approve", None),
        ("POST", f"/api/approvals/{approval_id}/reject", None),
        ("GET", "/api/workflows/gate", None),
        ("GET", "/api/workflows/gate?version=1", None),
        ("POST", "/api/runs", {"workflow": "gate"}),
        ("POST", "/api/runs", {"workflow": "gate", "version": 1}),
        ("DELETE", f"/api/keys/{key_id}", None),
    ]:
        theirs = problem(await other.request(method, path, json=body), 404)
        # Word for word the answer for an id that never existed.
        nothing = "01a1e364-c6f4-7000-9218-ef8063d9932c"
        made_up = path.replace(run_id, nothing).replace(approval_id, nothing).replace(key_id, nothing)
        never = problem(await http.request(method, made_up.replace("gate", "never"), json=_never(body)), 404)
        assert theirs.code == never.code
    stream = await other.get(f"/api/runs/{run_id}/events", headers={"Accept": "text/event-stream"})
    assert problem(stream, 404).code == "RUN_NOT_FOUND"
    for path in ("/api/runs", "/api/approvals", "/api/workflows", f"/api/approvals?run_id={run_id}"):
        assert (await other.get(path)).json() == {"items": [], "next_cursor": None}
    assert [k["name"] for k in (await other.get("/api/keys")).json()["items"]] == ["admin"]
    assert (await http.get(f"/api/runs/{run_id}/events")).json() == before
    assert (await rig.sql("SELECT revoked_at FROM interlock.api_key WHERE name = 'k'"))[0]["revoked_at"] is None


def _never(body: dict[str, Any] | None) -> dict[str, Any] | None:
    return body and body | {"workflow": "never"}


async def test_the_same_workflow_name_is_another_workflow_in_another_tenant(rig: Rig, http: httpx2.AsyncClient) -> None:
    other = rig.http((await http.post("/api/tenants", json={"name": "other"})).json()["key"])
    source = GATE.replace("tier: low", "tier: high")
    answer = await other.post("/api/workflows", content=source, headers={"content-type": "application/yaml"})
    assert answer.json()["version"] == 1
    assert (await http.get("/api/workflows/gate")).json()["digest"] != answer.json()["digest"]


# ---------------------------------------------------------------- workspaces


@pytest.fixture
async def blue(rig: Rig, http: httpx2.AsyncClient) -> httpx2.AsyncClient:
    return rig.http(await rig.key("blue", "admin", workspace_id="blue"))


@pytest.fixture
async def red(rig: Rig, http: httpx2.AsyncClient) -> httpx2.AsyncClient:
    return rig.http(await rig.key("red", "admin", workspace_id="red"))


async def test_a_key_of_a_workspace_sees_and_moves_only_its_own(
    http: httpx2.AsyncClient, blue: httpx2.AsyncClient, red: httpx2.AsyncClient
) -> None:
    run_id, approval_id = await start(blue)
    outside, _ = await start(http)
    assert (await blue.get(f"/api/runs/{run_id}")).json()["workspace_id"] == "blue"
    for method, path in [
        ("GET", f"/api/runs/{run_id}"),
        ("GET", f"/api/runs/{run_id}/events"),
        ("POST", f"/api/runs/{run_id}/approve"),
        ("POST", f"/api/runs/{run_id}/cancel"),
        ("POST", f"/api/runs/{run_id}/retry"),
        ("GET", f"/api/approvals/{approval_id}"),
        ("POST", f"/api/approvals/{approval_id}/approve"),
        ("POST", f"/api/approvals/{approval_id}/reject"),
        ("GET", f"/api/runs/{outside}"),
        ("POST", f"/api/runs/{outside}/cancel"),
    ]:
        problem(await red.request(method, path), 404)
    assert (await red.get("/api/runs")).json()["items"] == []
    assert (await red.get("/api/approvals")).json()["items"] == []
    assert [r["id"] for r in (await blue.get("/api/runs")).json()["items"]] == [run_id]
    assert [a["id"] for a in (await blue.get("/api/approvals")).json()["items"]] == [approval_id]
    # A key without a workspace belongs to the whole tenant.
    assert len((await http.get("/api/runs")).json()["items"]) == 2
    assert (await http.post(f"/api/approvals/{approval_id}/approve")).json()["status"] == "approved"


async def test_an_admin_of_a_workspace_cannot_reach_beyond_it(
    rig: Rig, http: httpx2.AsyncClient, blue: httpx2.AsyncClient, red: httpx2.AsyncClient
) -> None:
    made = await blue.post("/api/keys", json={"name": "mine", "role": "viewer"})
    assert (made.status_code, made.json()["workspace_id"]) == (201, "blue")
    same = await blue.post("/api/keys", json={"name": "same", "role": "viewer", "workspace_id": "blue"})
    assert same.json()["workspace_id"] == "blue"
    foreign = await blue.post("/api/keys", json={"name": "spy", "role": "admin", "workspace_id": "red"})
    assert problem(foreign, 403).code == "FORBIDDEN"
    assert problem(await blue.post("/api/tenants", json={"name": "acme"}), 403).code == "FORBIDDEN"
    assert problem(await blue.get("/api/tenants"), 403).code == "FORBIDDEN"
    assert {k["workspace_id"] for k in (await blue.get("/api/keys")).json()["items"]} == {"blue"}
    problem(await blue.delete(f"/api/keys/{rig.admin.key_id}"), 404)
    problem(await red.delete(f"/api/keys/{made.json()['id']}"), 404)
    assert (await blue.delete(f"/api/keys/{made.json()['id']}")).status_code == 200


async def test_a_workspace_admin_grants_only_its_own_groups(
    rig: Rig, http: httpx2.AsyncClient, blue: httpx2.AsyncClient
) -> None:
    """Security H4: a group decides approvals in the whole tenant, so a workspace must not grant itself one."""
    body = {"name": "mine", "role": "operator", "groups": ["support", "sre"]}
    refused = problem(await blue.post("/api/keys", json=body), 403)
    assert refused.code == "GROUP_NOT_YOURS"
    assert "sre, support" in refused.detail and "admin of the whole tenant" in refused.detail
    assert "mine" not in (await http.get("/api/keys")).text
    # An admin of the whole tenant may grant the group, and the workspace's admin may pass on a received group.
    inside = (await http.post("/api/keys", json=body | {"role": "admin", "workspace_id": "blue"})).json()
    member = rig.http(inside["key"])
    assert (await member.post("/api/keys", json=body | {"groups": ["sre"]})).json()["groups"] == ["sre"]
    problem(await member.post("/api/keys", json=body | {"groups": ["sre", "finance"]}), 403)


async def test_the_policy_is_the_whole_tenants_and_no_workspace_replaces_it(
    rig: Rig, http: httpx2.AsyncClient, blue: httpx2.AsyncClient
) -> None:
    text = b'@id("all") permit (principal, action, resource);'
    refused = problem(await blue.put("/api/policy", content=text), 403)
    assert refused.code == "FORBIDDEN" and "workspace blue" in str(refused.detail)
    assert (await http.get("/api/policy")).json()["version"] == 0
    assert (await http.put("/api/policy", content=text)).json()["version"] == 1


# Routes outside any workspace: definitions that all of a tenant may read, workers and tenants, which only operators
# see, deliveries, whose senders have no key, and routes that a workspace key may not use at all.
_OF_THE_TENANT = (
    "/api/policy", "/api/agents/{name}", "/api/workflows/{name}", "/api/hooks/", "/api/workers/", "/api/supervisor/",
    "/api/tenants/", "/api/secrets/", "/api/slack/teams/",
)  # fmt: skip


async def test_nothing_of_a_workspace_is_there_for_the_key_of_another(
    rig: Rig, http: httpx2.AsyncClient, blue: httpx2.AsyncClient, red: httpx2.AsyncClient
) -> None:
    """Covers every call that names something, so that a new call must declare the owner."""

    @rig.tool("bank.pay", writes=True, risk="low", undo="bank.pay")
    async def pay() -> None: ...

    async def made(path: str, body: Any) -> Any:
        answer = await blue.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    run_id, approval_id = await start(blue)
    async with rig.worker():
        act = await made("/api/tool-calls", {"tool": "bank.pay"})
    [receipt] = (await blue.get(f"/api/runs/{act['id']}/receipts")).json()["items"]
    sent = await made("/api/messages", {"content": "hello"})
    spare = await made("/api/keys", {"name": "spare", "role": "approver"})
    await join(rig, "spare_in_slack", "U1", workspace_id="blue")
    await made("/api/schedules", {"name": "hourly", "cron": "0 * * * *", "workflow": "gate"})
    await made("/api/triggers", {"name": "deploy", "slack": {"command": "/deploy"}, "workflow": "gate"})
    ids = {
        "run_id": run_id, "approval_id": approval_id, "tool_call_id": act["id"], "receipt_id": receipt["id"],
        "session_id": sent["session_id"], "key_id": spare["id"], "team_id": "T1", "user_id": "U1",
        "job_id": (await made("/api/jobs", {"task_description": "all", "workflow": "gate"}))["id"],
        "webhook_id": (await made("/api/webhooks", {"url": "https://192.0.1.1/", "events": ["run.completed"]}))["id"],
        "grant_id": (await made("/api/grants", {"tool": "bank.pay", "any_arguments": True, "expires_in": 3600}))["id"],
    }  # fmt: skip
    names = {"/api/schedules/": "hourly", "/api/triggers/": "deploy"}
    bodies = {
        "/api/receipts/{receipt_id}/resolve": {"outcome": "fail"}, "/api/triggers/{name}/test": {"payload": {}},
    }  # fmt: skip
    asked = 0
    for path, verbs in rig.app.openapi()["paths"].items():
        if "{" not in path or path.startswith(_OF_THE_TENANT):
            continue
        name = next((name for start, name in names.items() if path.startswith(start)), None)
        filled = path.format(**ids, name=name)
        for verb in verbs:
            problem(await red.request(verb.upper(), filled, json=bodies.get(path)), 404)
            asked += 1
    assert asked > 40
    for path in ("runs", "approvals", "sessions", "jobs", "schedules", "triggers", "webhooks", "grants", "events"):
        assert (await red.get(f"/api/{path}")).json()["items"] == [], path
    assert (await blue.get(f"/api/runs/{run_id}")).json()["status"] == "waiting_approval"


async def test_a_key_of_a_workspace_changes_no_workflow_or_agent_of_others(
    http: httpx2.AsyncClient, blue: httpx2.AsyncClient, red: httpx2.AsyncClient
) -> None:
    """Other workspaces start them by name, with their own rights: only the owner may change what a name means."""
    agent = {"name": "helper", "model": "scripted", "script": [{"turns": [{"say": "hi"}]}]}
    other = {"name": "gate", "steps": [{"id": "ask", "approval": {"tier": "low", "summary": "changed"}}]}
    own = other | {"name": "own"}
    for who, path, body, status in [
        (blue, "workflows", other, 409),  # owned by the tenant
        (http, "agents", agent, 201),
        (blue, "agents", agent | {"description": "changed"}, 409),
        (blue, "agents", agent, 201),  # the same content changes nothing
        (blue, "workflows", own, 201),
        (red, "workflows", own | {"description": "red"}, 409),
        (blue, "workflows", own | {"description": "blue"}, 201),
        (http, "workflows", own | {"description": "tenant"}, 201),
        (blue, "workflows", own | {"description": "again"}, 409),  # it now belongs to the tenant
    ]:
        answer = await who.post(f"/api/{path}", json=body)
        assert answer.status_code == status, (body, answer.text)
        if status == 409:
            assert problem(answer, 409).code == "WORKFLOW_NAME_TAKEN"
    assert (await http.get("/api/workflows/gate")).json()["version"] == 1
    # The definition of a single tool call or a reversal has no owner.
    for who in (blue, red, http):
        assert (await who.post("/api/tool-calls", json={"tool": "bank.pay", "wait": 0})).status_code == 202


async def test_an_event_is_not_shown_to_who_gives_its_name_to_another(
    rig: Rig, blue: httpx2.AsyncClient, red: httpx2.AsyncClient
) -> None:
    event = {"id": "e-1", "type": "bank.settled", "correlation": "ch_1", "payload": {"account": "blue's own"}}
    assert (await blue.post("/api/events", json=event)).status_code == 202
    await rig.sql("DELETE FROM interlock.idempotency_record")  # the record expires sooner than the event
    again = await blue.post("/api/events", json=event)
    assert (again.status_code, again.json()["payload"]) == (202, event["payload"])
    await rig.sql("DELETE FROM interlock.idempotency_record")
    answer = await red.post("/api/events", json=event | {"payload": None})
    assert (answer.status_code, answer.json()["workspace_id"]) == (202, "red") and "blue" not in answer.text
