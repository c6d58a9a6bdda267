"""Every invalid request gets an explanation as problem+json, never a 500."""

import re
from collections.abc import AsyncIterator
from functools import reduce
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from tests.rig import Rig

from interlock.settings import Settings
from interlock.wire import Problem

GATE = "{name: gate, steps: [{id: ask, approval: {tier: low, summary: 'Pay ${input.x}'}}]}"
TOOL = "{name: tool, steps: [{id: a, tool: t.x, input: {value: '${input.x}'}}]}"


@pytest.fixture
async def http(rig: Rig) -> httpx2.AsyncClient:
    await rig.apply(GATE)
    await rig.apply(TOOL)
    return rig.http()


def problem(answer: httpx2.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, f"{answer.request.method} {answer.request.url}: {answer.text}"
    assert answer.headers["content-type"] == "application/problem+json"
    found = Problem.model_validate(answer.json())
    assert found.status == status and found.title and found.type.startswith("urn:interlock:problem:")
    body: dict[str, Any] = answer.json()
    return body


async def test_a_body_that_is_not_json(http: httpx2.AsyncClient) -> None:
    for content, said in (
        (b"{", "body: it is not JSON: Expecting property name enclosed in double quotes (at character 1)"),
        (b"[1,", "body: it is not JSON: Expecting value (at character 3)"),
        (b"workflow: gate", "body: it is not JSON: Expecting value (at character 0)"),
        (b'{"workflow": "\xff"}', "body: it is not JSON: it is not UTF-8"),
        (b"[" * 100_000, "body: it is nested too deeply"),
        (b"\xff\xfe", "body: it is not JSON"),
        (b"", "body: Field required"),
    ):
        answer = await http.post("/api/runs", content=content, headers={"content-type": "application/json"})
        found = problem(answer, 422)
        assert (found["code"], found["detail"][: len(said)]) == ("INVALID_REQUEST", said)
        assert [error["path"] for error in found["errors"]] == ["body"]


async def test_what_is_wrong_is_said_of_the_field_and_not_of_the_program(http: httpx2.AsyncClient) -> None:
    an_id = "is not an id, such as 01990000-0000-7000-8000-000000000000"
    for call, body, said in [
        ("GET /api/runs/nope", None, f"run_id: 'nope' {an_id}"),
        ("POST /api/approvals/nope/approve", {}, f"approval_id: 'nope' {an_id}"),
        (
            "POST /api/runs",
            {"workflow": "gate", "inptu": {}},
            "body.inptu: there is no such field; did you mean `input`?",
        ),
        ("POST /api/runs", {"workflow": "gate", "input": []}, "body.input: expected a mapping, found a list"),
        ("POST /api/runs", {"workflow": 5}, "body.workflow: expected a string, found a number"),
        ("POST /api/runs", {"workflow": ""}, "body.workflow: it must not be empty"),
        ("POST /api/runs", {"workflow": "w" * 201}, "body.workflow: expected at most 200 characters, found 201"),
        ("POST /api/runs", {"workflow": "a\x00b"}, "body.workflow: it contains a NUL character"),
        (
            "POST /api/runs",
            {"workflow": "gate", "version": "new"},
            "body.version: expected a whole number, found 'new'",
        ),
        (
            "POST /api/runs",
            {"workflow": "w", "deadline_seconds": -1},
            "body.deadline_seconds: expected more than 0, found -1",
        ),
        ("POST /api/runs?over_cap=no", {"workflow": "w"}, "query.over_cap: expected 'wait' or 'refuse', found 'no'"),
        ("GET /api/runs?limit=0", None, "query.limit: expected at least 1, found '0'"),
        ("POST /api/webhooks", {"url": "https://a b"}, "body.url: it contains a blank or a control character"),
        (
            "POST /api/slack/teams/T-1/accept",
            {},
            "team_id: expected text that matches ^[A-Za-z0-9]{1,40}$, found",
        ),
        ("POST /api/slack/link-codes", {"user": "U1"}, "body.user: there is no such field"),
        ("POST /api/tenants", {"name": "A b"}, "body.name: expected a name of lower-case letters, digits, `_`, `.`"),
        ("POST /api/events", {"type": "", "correlation": "c"}, "body.type: expected a type such as bank.settled"),
    ]:
        method, path = call.split()
        found = problem(await http.request(method, path, json=body), 422)
        assert found["detail"].startswith(said), found["detail"]


async def test_a_body_of_the_wrong_shape_names_the_field(http: httpx2.AsyncClient) -> None:
    for body, path in [
        ({}, "body.workflow"),
        ([], "body"),
        ("gate", "body"),
        ({"workflow": 5}, "body.workflow"),
        ({"workflow": ""}, "body.workflow"),
        ({"workflow": "gate", "deadline_second": 5}, "body.deadline_second"),
        ({"workflow": "gate", "deadline_seconds": -1}, "body.deadline_seconds"),
        ({"workflow": "gate", "deadline_seconds": 10**12}, "body.deadline_seconds"),
        ({"workflow": "gate", "input": {"v": reduce(lambda inner, _: [inner], range(220), 0)}}, "body.input"),
        ({"workflow": "gate", "deadline_seconds": "soon"}, "body.deadline_seconds"),
        ({"workflow": "gate", "version": 0}, "body.version"),
        ({"workflow": "gate", "version": "new"}, "body.version"),
        ({"workflow": "gate", "input": [1]}, "body.input"),
        ({"workflow": "gate", "trigger": {"source": "api", "hm": 1}}, "body.trigger.hm"),
        ({"workflow": "gate", "request_id": "a\x00b"}, "body.request_id"),
    ]:
        found = problem(await http.post("/api/runs", json=body), 422)
        assert found["code"] == "INVALID_REQUEST"
        assert path in [error["path"] for error in found["errors"]], found
        assert path in found["detail"]


async def test_values_that_no_row_could_hold_are_the_callers_mistake(rig: Rig, http: httpx2.AsyncClient) -> None:
    run = (await http.post("/api/runs", json={"workflow": "gate", "input": {"x": 1}})).json()["id"]
    trigger = {"name": "hook", "slack": {"command": "/x"}, "workflow": "gate", "input": {"x": "${payload.x}"}}
    assert (await http.post("/api/triggers", json=trigger)).status_code == 201
    json = {"content-type": "application/json"}
    calls: list[tuple[str, str, bytes]] = [
        ("POST", "/api/runs", b'{"workflow": "tool", "input": {"x": "a\\u0000b"}}'),
        ("POST", "/api/runs", b'{"workflow": "gate", "input": {"x": "a\\u0000b"}}'),
        ("POST", "/api/runs", b'{"workflow": "tool", "input": {"x": "\\ud800"}}'),
        ("POST", "/api/runs", b'{"workflow": "gate", "input": {"x": "\\ud800"}}'),
        ("POST", "/api/runs", b'{"workflow": "tool", "trigger": {"source": "\\ud800"}}'),
        ("POST", "/api/runs", b'{"workflow": "\\ud800"}'),
        ("POST", "/api/runs", b'{"workflow": "tool", "\\ud800": 1}'),
        ("POST", "/api/workflows", b'{"name": "w", "description": "\\ud800", "steps": [{"id": "a", "tool": "t.x"}]}'),
        ("POST", "/api/workflows", b'{"name": "w", "description": "\\u0000", "steps": [{"id": "a", "tool": "t.x"}]}'),
        ("POST", "/api/runs", b'{"workflow": "tool", "input": {"x": 1' + b"0" * 400 + b"}}"),
        ("POST", "/api/runs", b'{"workflow": "tool", "input": {"x": NaN}}'),
        ("POST", "/api/runs", b'{"workflow": "tool", "input": {"x": 1e999}}'),
        ("POST", "/api/events", b'{"type": "a", "correlation": "b", "payload": {"x": 1e999}}'),
        ("POST", "/api/runs", b'{"workflow": "tool", "version": 2147483648}'),
        ("POST", "/api/runs", b'{"workflow": "tool", "deadline_seconds": 1e300}'),
        ("POST", "/api/runs", b'{"workflow": "gate", "deadline_seconds": 1e300}'),
        ("POST", "/api/runs", b'{"workflow": "gate", "deadline_seconds": Infinity}'),
        ("POST", "/api/runs", b'{"workflow": "tool", "input": ' + b'{"x":' * 600 + b"1" + b"}" * 601),
        ("POST", "/api/jobs", b'{"task_description": "t", "workflow": "tool", "inputs": [{"x": NaN}]}'),
        ("POST", "/api/jobs", b'{"task_description": "t", "workflow": "tool", "inputs": [{"x": "\\ud800"}]}'),
        ("POST", "/api/grants", b'{"tool": "t.x", "arguments": {"x": 1e999}}'),
        ("POST", f"/api/approvals/{run}/approve", b'{"patch": {"x": NaN}}'),
        ("POST", f"/api/receipts/{run}/resolve", b'{"outcome": "happened", "output": NaN}'),
        ("POST", f"/api/runs/{run}/retry", b"[" * 300 + b"]" * 300),
        ("POST", "/api/triggers/hook/test", b'{"payload": {"x": "\\ud800"}}'),
        ("POST", "/api/triggers/hook/test", b'{"payload": {"x": NaN}}'),
        ("POST", f"/api/runs/{run}/cancel", b'{"reason": "\\ud800"}'),
        ("POST", f"/api/runs/{run}/approve", b'{"reason": "\\ud800"}'),
        ("POST", "/api/keys", b'{"name": "\\ud800", "role": "viewer"}'),
        ("POST", "/api/keys", b'{"name": "a", "role": "viewer", "workspace_id": "\\ud800"}'),
        ("POST", "/api/tenants", b'{"name": "a", "max_concurrency": 2147483648}'),
        ("POST", "/api/tenants", b'{"name": "a", "weight": 1e-320}'),
        ("GET", "/api/runs?workflow=a%00b", b""),
        ("GET", "/api/workflows/a%00b", b""),
        ("GET", "/api/workflows?cursor=AGE", b""),
        ("GET", f"/api/runs/{run}/events?after=2147483648", b""),
        ("GET", f"/api/runs/{run}/events?after=99999999999999999999", b""),
    ]
    for method, path, content in calls:
        answer = await http.request(method, path, content=content or None, headers=json if content else {})
        expected = (422,) if content else (404, 422)
        assert answer.status_code in expected, f"{method} {path} {content[:80]!r}: {answer.text}"
        problem(answer, answer.status_code)
    [row] = await rig.sql("SELECT count(*) AS n, count(completed_at) AS ended FROM interlock.run")
    assert (row["n"], row["ended"]) == (1, 0)


async def test_what_asks_for_nothing_more_refuses_a_body_that_does(http: httpx2.AsyncClient) -> None:
    paths = (
        f"/api/runs/{uuid4()}/retry",
        "/api/schedules/x/pause",
        "/api/schedules/x/resume",
        "/api/schedules/x/run",
        f"/api/webhooks/{uuid4()}/enable",
        f"/api/webhooks/{uuid4()}/test",
    )
    for path in paths:
        for body in ({"input": {"x": 2}}, [], 5, {"request_id": 5}, {"request_id": ""}):
            assert problem(await http.post(path, json=body), 422)["code"] == "INVALID_REQUEST", (path, body)
        for content in (b"{", b"\xff", b"x: 1"):
            answer = await http.post(path, content=content, headers={"content-type": "application/json"})
            problem(answer, 422)
        assert problem(await http.post(path, json={"request_id": "r1"}), 404), path
        assert problem(await http.post(path), 404), path


async def test_a_decision_has_no_field_that_would_not_count(rig: Rig, http: httpx2.AsyncClient) -> None:
    """A caller that binds an approval to a digest must not get a success if the server ignored the digest."""
    run = (await http.post("/api/runs", json={"workflow": "gate", "input": {"x": 1}})).json()["id"]
    [approval] = (await http.get("/api/approvals", params={"run_id": run})).json()["items"]
    found = problem(await http.post(f"/api/runs/{run}/approve", json={"patch": {"x": 2}}), 422)
    assert found["errors"][0]["path"] == "body.patch"
    found = problem(await http.post(f"/api/runs/{run}/approve", json={"digest": "0" * 64}), 409)
    assert found["code"] == "ACTION_DIGEST_MISMATCH"
    refused = problem(await http.post(f"/api/approvals/{approval['id']}/reject", json={"patch": {"x": 2}}), 422)
    assert "patch" in refused["detail"]
    assert (await http.get(f"/api/runs/{run}")).json()["status"] == "waiting_approval"


async def test_a_query_parameter_that_an_endpoint_does_not_know_is_refused(rig: Rig, http: httpx2.AsyncClient) -> None:
    """new-user 18: `GET /api/runs?q=INC0003` returned all runs. The test asks every endpoint that OpenAPI lists."""
    spec = (await http.get("/api/openapi.json")).json()
    asked = 0
    for path, methods in spec["paths"].items():
        url = re.sub(r"\{[^}]+\}", str(uuid4()), path)
        for method in methods:
            found = problem(await http.request(method.upper(), url, params={"no_such": "x"}), 422)
            assert found["errors"][0]["path"] == "query.no_such", (method, path, found)
            asked += 1
    assert asked > 80
    found = problem(await http.get("/api/runs", params={"stauts": "failed", "limit": 3}), 422)
    assert found["detail"].startswith(
        "query.stauts: There is no such query parameter; did you mean `status`? Known are "
    )
    # The fast path of `POST /api/runs` knows only `wait`.
    body = {"workflow": "gate", "input": {"x": 1}}
    found = problem(await http.post("/api/runs", params={"wiat": "3"}, json=body), 422)
    assert "did you mean `wait`?" in found["detail"]
    found = problem(await http.post("/api/runs", params={"wait": "0", "\u202e": "3"}, json=body), 422)
    assert found["errors"][0]["path"] == "query.\\u202e"
    assert (await http.get("/api/runs")).json()["items"] == []
    assert (await http.post("/api/runs", params={"wait": "0", "over_cap": "refuse"}, json=body)).status_code == 201


async def test_everything_that_is_made_can_be_asked_for_once(http: httpx2.AsyncClient) -> None:
    for path, body in (("/api/keys", {"name": "k", "role": "viewer"}), ("/api/tenants", {"name": "t"})):
        first, again = [await http.post(path, json={**body, "request_id": path}) for _ in range(2)]
        assert (first.status_code, again.status_code) == (201, 201), first.text
        assert (first.json()["id"], again.headers["idempotency-replayed"]) == (again.json()["id"], "true")


async def test_a_checkpoint_that_is_none_is_the_callers_mistake(http: httpx2.AsyncClient) -> None:
    good: dict[str, Any] = {
        "tenant_id": "t", "number": 1, "position": 1, "head": "h", "at": "now", "previous": None, "released": None,
        "key_id": "k", "signature": "AAAA",
    }  # fmt: skip
    for odd in ({"key_id": []}, {"key_id": {}}, {"number": [1.5]}, {"signature": 5}, {"signature": "é"}, {"hm": 1}):
        answer = await http.post("/api/audit/verify", json={"checkpoints": [good | odd]})
        assert problem(answer, 422)["code"] == "BAD_CHECKPOINT", odd


async def test_a_big_number_in_an_input_is_taken_or_refused_but_never_lost(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/api/runs", json={"workflow": "gate", "input": {"x": 2**63}})
    if answer.status_code == 201:
        assert (await http.get(f"/api/runs/{answer.json()['id']}")).json()["input"] == {"x": 2**63}
    else:
        problem(answer, 422)


async def test_ids_cursors_and_parameters_that_cannot_be(http: httpx2.AsyncClient) -> None:
    session = (await http.post("/api/sessions")).json()["id"]
    run = (await http.post("/api/runs", json={"workflow": "gate", "input": {"x": 1}})).json()["id"]
    for path in [
        "/api/runs/not-an-id",
        "/api/approvals/123",
        "/api/runs?cursor=!!!",
        "/api/runs?cursor=bm90LWFuLWlk",
        "/api/runs?cursor=%C3%BC",
        "/api/audit?cursor=wrI",
        f"/api/audit?cursor={'OTk5' * 2000}",
        "/api/approvals?cursor=x",
        "/api/keys?cursor=zzz",
        "/api/tenants?cursor=zzz",
        "/api/runs?limit=0",
        "/api/runs?limit=1001",
        "/api/runs?limit=ten",
        "/api/runs?status=sleeping",
        "/api/runs?session_id=5",
        "/api/approvals?status=pending",
        f"/api/runs/{run}/events?after=-1",
        f"/api/runs/{run}/events?cursor=bm90LWFuLWlk",
        f"/api/sessions/{session}/events?after=17",
        f"/api/sessions/{session}/events?after=last",
        f"/api/sessions/{session}/events?cursor=!!!",
        f"/api/sessions/{session}/events?cursor=bm90LWFuLWlk",
        f"/api/runs/{run}?wait=61",
        f"/api/runs/{run}?wait=nan",
        "/api/workflows/gate?version=0",
    ]:
        assert problem(await http.get(path), 422)["code"] == "INVALID_REQUEST", path


async def test_what_is_not_there(http: httpx2.AsyncClient) -> None:
    for path, code in [
        (f"/api/runs/{uuid4()}", "RUN_NOT_FOUND"),
        (f"/api/approvals/{uuid4()}", "APPROVAL_NOT_FOUND"),
        ("/api/workflows/none", "WORKFLOW_NOT_FOUND"),
        ("/api/workflows/gate?version=9", "WORKFLOW_NOT_FOUND"),
        ("/api/nothing", "NOT_FOUND"),
        ("/", "NOT_FOUND"),
    ]:
        assert problem(await http.get(path), 404)["code"] == code
    assert problem(await http.post("/api/runs", json={"workflow": "none"}), 404)["code"] == "WORKFLOW_NOT_FOUND"


async def test_a_method_that_is_not_for_this_path(http: httpx2.AsyncClient) -> None:
    for method, path, allowed in (
        ("PUT", "/api/runs", "GET, POST"),
        ("DELETE", f"/api/runs/{uuid4()}", "GET"),
        ("GET", f"/api/runs/{uuid4()}/approve", "POST"),
        ("POST", "/api/policy", "GET, PUT"),
        ("PATCH", "/api/triggers/x", "GET, DELETE"),
        ("POST", "/healthz", "GET"),
    ):
        answer = await http.request(method, path)
        found = problem(answer, 405)
        assert (found["code"], answer.headers["allow"]) == ("METHOD_NOT_ALLOWED", allowed)
        assert found["detail"] == f"{method} is not allowed on {answer.request.url.path}. Allowed: {allowed}."


async def test_a_surprise_is_a_problem_too(rig: Rig, http: httpx2.AsyncClient) -> None:
    await rig.sql("ALTER TABLE interlock.run RENAME COLUMN workspace_id TO gone")
    found = problem(await http.get("/api/runs"), 500)
    assert (found["code"], "column" in found["detail"]) == ("INTERNAL_ERROR", False)


async def test_after_a_surprise_the_connection_is_closed_and_that_is_said(rig: Rig, http: httpx2.AsyncClient) -> None:
    await rig.sql("ALTER TABLE interlock.run RENAME COLUMN workspace_id TO gone")
    assert (await http.get("/api/runs")).headers["connection"] == "close"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_json_that_is_not_called_so_is_told_how(http: httpx2.AsyncClient, kind: str | None) -> None:
    headers = {"Content-Type": kind} if kind else {}
    answer = await http.post("/api/runs", content=b'{"workflow": "gate"}', headers=headers)
    assert "Content-Type: application/json" in problem(answer, 422)["detail"]


class TestBodies:
    @pytest.fixture
    def settings(self) -> Settings:
        return Settings(max_body_bytes=2000)

    @pytest.mark.parametrize(
        "path", ["/api/runs", "/api/workflows", "/api/runs/{id}/cancel", "/api/approvals/{id}/approve"]
    )
    async def test_a_body_that_is_too_large_is_refused_announced_or_not(
        self, http: httpx2.AsyncClient, path: str
    ) -> None:
        path = path.replace("{id}", str(uuid4()))
        body = b'{"workflow": "gate", "input": {"x": "' + b"x" * 2000 + b'"}}'
        headers = {"content-type": "application/json"}
        assert problem(await http.post(path, content=body, headers=headers), 413)["code"] == "BODY_TOO_LARGE"

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 100):
                yield body[start : start + 100]

        assert problem(await http.post(path, content=chunks(), headers=headers), 413)["code"] == "BODY_TOO_LARGE"

    async def test_a_body_just_within_the_limit_is_taken(self, http: httpx2.AsyncClient) -> None:
        body = b'{"workflow": "gate", "input": {"x": "' + b"x" * 1960 + b'"}}'
        assert len(body) <= 2000

        async def chunks() -> AsyncIterator[bytes]:
            yield body[:1000]
            yield body[1000:]

        headers = {"content-type": "application/json"}
        assert (await http.post("/api/runs", content=body, headers=headers)).status_code == 201
        assert (await http.post("/api/runs", content=chunks(), headers=headers)).status_code == 201
