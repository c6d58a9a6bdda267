"""The same request twice, over HTTP: one effect, equal answers."""

import asyncio
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
import httpx2
import orjson
import pytest
import structlog
from tests.rig import Rig

from interlock.engine.ingress import idempotency
from interlock.engine.ingress.idempotency import Request
from interlock.engine.queueing import sweeps
from interlock.settings import Settings
from interlock.telemetry import metrics

ECHO = "{name: echo, steps: [{id: a, tool: t.echo}]}"
GATE = "{name: gate, steps: [{id: ask, approval: {}}]}"


@pytest.fixture
async def http(rig: Rig) -> httpx2.AsyncClient:
    await rig.apply(ECHO)
    await rig.apply(GATE)
    return rig.http()


async def runs(rig: Rig) -> int:
    [row] = await rig.sql("SELECT count(*) AS n FROM interlock.run")
    n: int = row["n"]
    return n


@pytest.mark.parametrize("workflow", ["echo", "gate"])
async def test_the_same_key_twice_is_one_run(rig: Rig, http: httpx2.AsyncClient, workflow: str) -> None:
    body, headers = {"workflow": workflow, "input": {"x": 1}}, {"Idempotency-Key": "k1"}
    first = await http.post("/api/runs", json=body, headers=headers)
    second = await http.post("/api/runs", json=body, headers=headers)
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert ("idempotency-replayed" in first.headers, second.headers["idempotency-replayed"]) == (False, "true")
    assert await runs(rig) == 1


async def test_a_run_says_under_which_key_it_was_asked_for(rig: Rig, http: httpx2.AsyncClient) -> None:
    for workflow in ("echo", "gate"):
        with structlog.testing.capture_logs() as logs:
            for _ in range(2):
                headers = {"Idempotency-Key": workflow}
                answer = await http.post("/api/runs", json={"workflow": workflow}, headers=headers)
        run = answer.json()
        key = f"api:{rig.admin.key_id}:{workflow}"
        assert run["trigger"]["idempotency_key"] == key
        told = {line["event"]: line for line in logs}
        assert told["run_created"]["idempotency_key"] == told["idempotency_hit"]["key"] == key
        created = (await http.get(f"/api/runs/{run['id']}/events")).json()["items"][0]
        assert created["data"]["trigger"]["idempotency_key"] == key
    await http.post(f"/api/runs/{run['id']}/cancel")
    retried = (await http.post(f"/api/runs/{run['id']}/retry", headers={"Idempotency-Key": "again"})).json()
    assert "idempotency_key" not in retried["trigger"]
    assert "idempotency_key" not in (await http.post("/api/runs", json={"workflow": "gate"})).json()["trigger"]


@pytest.mark.parametrize("workflow", ["echo", "gate"])
async def test_the_same_key_fifty_times_at_once_is_one_run(rig: Rig, http: httpx2.AsyncClient, workflow: str) -> None:
    body, headers = {"workflow": workflow}, {"Idempotency-Key": "k1"}
    answers = await asyncio.gather(*(http.post("/api/runs", json=body, headers=headers) for _ in range(50)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
    assert (await runs(rig), len(await rig.sql("SELECT * FROM interlock.ready_run"))) == (1, int(workflow == "echo"))


async def test_the_same_key_with_another_request_is_refused(rig: Rig, http: httpx2.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k1"}
    run = (await http.post("/api/runs", json={"workflow": "gate", "input": {"x": 1}}, headers=headers)).json()
    for path, body in (
        ("/api/runs", {"workflow": "gate", "input": {"x": 2}}),
        (f"/api/runs/{run['id']}/cancel", {}),
    ):
        answer = await http.post(path, json=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")
        assert answer.headers["content-type"] == "application/problem+json"
    assert await runs(rig) == 1
    # Requests are equal by meaning, not by spelling.
    answer = await http.post(
        "/api/runs", content=b' {"input":{"x":1},\n "workflow": "gate"}',
        headers=headers | {"content-type": "application/json"},
    )  # fmt: skip
    assert (answer.status_code, answer.json()["id"]) == (201, run["id"])


@pytest.mark.parametrize("how", ["Idempotency-Key", "X-Idempotency-Key", "X-Request-ID", "body"])
async def test_a_key_can_be_given_in_four_ways(rig: Rig, http: httpx2.AsyncClient, how: str) -> None:
    body: dict[str, Any] = {"workflow": "gate"}
    headers = {} if how == "body" else {how: "k1"}
    if how == "body":
        body["request_id"] = "k1"
    first, second = [await http.post("/api/runs", json=body, headers=headers) for _ in range(2)]
    assert (first.status_code, first.content == second.content, await runs(rig)) == (201, True, 1)


async def test_the_refusal_of_an_invalid_request_is_replayed(http: httpx2.AsyncClient) -> None:
    body, headers = {"tenants": ["nobody"]}, {"Idempotency-Key": "k1"}
    first, second = [await http.post("/api/workers", json=body, headers=headers) for _ in range(2)]
    assert (first.status_code, first.json()["code"]) == (422, "TENANT_NOT_FOUND")
    assert (second.status_code, second.json()) == (422, first.json())
    assert second.headers["idempotency-replayed"] == "true"
    assert second.headers["content-type"] == "application/problem+json"


async def _run_that_failed_later(rig: Rig, http: httpx2.AsyncClient) -> tuple[str, Any]:
    """A run that has not ended and therefore cannot be retried."""
    run = (await http.post("/api/runs", json={"workflow": "gate"})).json()

    async def fail() -> None:
        await http.post(f"/api/runs/{run['id']}/cancel")

    return f"/api/runs/{run['id']}/retry", fail


async def _worker_that_runs_later(rig: Rig, http: httpx2.AsyncClient) -> tuple[str, Any]:
    worker = (await http.post("/api/workers")).json()

    async def run() -> None:
        await rig.sql("UPDATE interlock.worker SET status = 'running' WHERE id = $1", UUID(worker["id"]))

    return f"/api/supervisor/workers/{worker['id']}/pause", run


async def _schedule_whose_name_is_free_later(rig: Rig, http: httpx2.AsyncClient) -> tuple[str, Any]:
    body = {"name": "s", "cron": "0 4 * * *", "workflow": "gate"}
    assert (await http.post("/api/schedules", json=body)).status_code == 201

    async def free() -> None:
        await http.delete("/api/schedules/s")

    return "/api/schedules", free


@pytest.mark.parametrize(
    ("made", "body"),
    [
        (_run_that_failed_later, None),
        (_worker_that_runs_later, None),
        (_schedule_whose_name_is_free_later, {"name": "s", "cron": "0 4 * * *", "workflow": "gate"}),
    ],
)
async def test_a_conflict_is_not_replayed_once_the_request_is_possible(
    rig: Rig, http: httpx2.AsyncClient, made: Any, body: Any
) -> None:
    """specification DEV-6: a 409 reports the state at that time; it is not the stored answer to the key (004 §4.1)."""
    path, becomes_possible = await made(rig, http)
    headers = {"Idempotency-Key": "k1"}
    for _ in range(7):  # more often than the retry limit of a failed attempt
        refused = await http.post(path, json=body, headers=headers)
        assert (refused.status_code, "idempotency-replayed" in refused.headers) == (409, False)
    await becomes_possible()
    first, second = [await http.post(path, json=body, headers=headers) for _ in range(2)]
    assert (first.is_success, first.content == second.content) == (True, True), first.text
    assert second.headers["idempotency-replayed"] == "true"


async def test_every_call_that_changes_something_can_be_repeated(rig: Rig, http: httpx2.AsyncClient) -> None:
    run = (await http.post("/api/runs", json={"workflow": "gate"})).json()
    [approval] = (await http.get("/api/approvals")).json()["items"]
    calls: list[tuple[str, str, Any]] = [
        ("POST", "/api/workflows", {"name": "w", "steps": [{"id": "a", "tool": "t.x"}]}),
        ("POST", f"/api/approvals/{approval['id']}/reject", {"reason": "no"}),
        ("POST", f"/api/runs/{run['id']}/retry", None),
    ]
    for number, (method, path, body) in enumerate(calls):
        headers = {"Idempotency-Key": f"k{number}"}
        first, second = [await http.request(method, path, json=body, headers=headers) for _ in range(2)]
        assert (first.is_success, first.content == second.content) == (True, True), (path, first.text, second.text)
        assert second.headers["idempotency-replayed"] == "true"
    assert await runs(rig) == 2


async def test_keys_of_two_callers_are_two_keys(rig: Rig, http: httpx2.AsyncClient) -> None:
    other = rig.http(await rig.key("other", "operator"))
    headers = {"Idempotency-Key": "k1"}
    first = await http.post("/api/runs", json={"workflow": "gate"}, headers=headers)
    second = await other.post("/api/runs", json={"workflow": "gate"}, headers=headers)
    assert (first.json()["id"] != second.json()["id"], await runs(rig)) == (True, 2)


async def test_a_key_is_forgotten_after_a_day(rig: Rig, http: httpx2.AsyncClient) -> None:
    rig.clock.freeze()
    headers = {"Idempotency-Key": "k1"}
    first = await http.post("/api/runs", json={"workflow": "gate"}, headers=headers)
    rig.clock.advance(24 * 3600 - 1)
    again = await http.post("/api/runs", json={"workflow": "gate"}, headers=headers)
    rig.clock.advance(2)
    later = await http.post("/api/runs", json={"workflow": "echo"}, headers=headers)
    assert (again.json()["id"], later.status_code) == (first.json()["id"], 201)
    assert await runs(rig) == 2


async def test_a_key_that_is_empty_is_refused(rig: Rig, http: httpx2.AsyncClient) -> None:
    """An empty key is an unset variable: the next request with it would start a second run."""
    for header in ("Idempotency-Key", "X-Idempotency-Key"):
        for empty in ("", "  "):
            answer = await http.post("/api/runs", json={"workflow": "echo"}, headers={header: empty})
            assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST")
    assert await runs(rig) == 0
    # Proxies set this header for themselves.
    assert (await http.post("/api/runs", json={"workflow": "echo"}, headers={"X-Request-ID": ""})).status_code == 201


async def test_a_key_that_is_too_long_is_refused(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/api/runs", json={"workflow": "gate"}, headers={"Idempotency-Key": "k" * 256})
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST")


class TestImpatient:
    @pytest.fixture
    def settings(self) -> Settings:
        return Settings(lock_timeout_seconds=0.05, database_patience_seconds=0.1)

    async def test_a_request_whose_twin_is_still_under_way_is_told_so(
        self, rig: Rig, http: httpx2.AsyncClient, url: str
    ) -> None:
        other: Any = await asyncpg.connect(url)
        transaction = other.transaction()
        await transaction.start()
        await other.execute(
            "INSERT INTO interlock.idempotency_record (tenant_id, key, source, status, request_hash, created_at,"
            " expires_at, lock_expires_at)"
            " VALUES ($1, $2, 'api', 'processing', '', now(), now() + interval '1 day', now())",
            rig.admin.tenant_id, f"api:{rig.admin.key_id}:k1",
        )  # fmt: skip
        answer = await http.post("/api/runs", json={"workflow": "gate"}, headers={"Idempotency-Key": "k1"})
        assert (answer.status_code, answer.json()["code"]) == (409, "IDEMPOTENCY_CONFLICT")
        await transaction.rollback()
        await other.close()
        answer = await http.post("/api/runs", json={"workflow": "gate"}, headers={"Idempotency-Key": "k1"})
        assert answer.status_code == 201

    async def test_a_request_that_any_other_lock_stops_is_not_told_of_a_twin(
        self, rig: Rig, http: httpx2.AsyncClient
    ) -> None:
        async with rig.database.transaction() as migration:
            await migration.connection.execute("LOCK TABLE interlock.run IN ACCESS EXCLUSIVE MODE")
            answer = await http.post("/api/runs", json={"workflow": "echo"}, headers={"Idempotency-Key": "k1"})
        assert answer.status_code == 503


@pytest.mark.parametrize(
    ("path", "body"), [("/api/keys", {"name": "k", "role": "viewer"}), ("/api/tenants", {"name": "acme"})]
)
async def test_a_secret_is_shown_once_and_never_kept(rig: Rig, path: str, body: dict[str, Any]) -> None:
    http, headers = rig.http(), {"Idempotency-Key": "k"}
    first, second = [await http.post(path, json=body, headers=headers) for _ in range(2)]
    secret = first.json()["key"]
    assert secret.startswith("il_")
    assert second.json() == {**first.json(), "key": None}
    [kept] = await rig.sql("SELECT response_body FROM interlock.idempotency_record")
    assert secret.encode() not in kept["response_body"]


async def test_a_start_takes_the_newest_version_though_an_older_one_is_remembered(
    rig: Rig, http: httpx2.AsyncClient
) -> None:
    async def start(key: str) -> httpx2.Response:
        return await http.post("/api/runs", json={"workflow": "echo"}, headers={"Idempotency-Key": key})

    first = await start("a")
    await rig.apply("{name: echo, steps: [{id: a, tool: t.echo}, {id: b, tool: t.echo}]}")
    second, again = await start("b"), await start("a")
    assert (first.json()["workflow_version"], second.json()["workflow_version"]) == (1, 2)
    assert again.content == first.content
    assert await runs(rig) == 2


async def test_an_answer_has_the_time_that_its_run_has(rig: Rig, http: httpx2.AsyncClient) -> None:
    for headers in ({}, {"Idempotency-Key": "x"}):
        answer = (await http.post("/api/runs", json={"workflow": "echo"}, headers=headers)).json()
        shown = (await http.get(f"/api/runs/{answer['id']}")).json()
        assert datetime.fromisoformat(answer["created_at"]) == datetime.fromisoformat(shown["created_at"])


# ---------------------------------------------------------------- the record


async def leave(rig: Rig, status: str, key: str = "k1", *, body: Any, **more: str) -> None:
    """Insert a record that an earlier process left behind."""
    digest = Request.hash_of("POST", "/api/runs", orjson.dumps(body, option=orjson.OPT_SORT_KEYS))
    columns = {"status": f"'{status}'", "created_at": "now()", "expires_at": "now() + interval '1 hour'"} | more
    await rig.sql(
        f"INSERT INTO interlock.idempotency_record (tenant_id, key, source, request_hash, {', '.join(columns)})"
        f" VALUES ($1, $2, 'api', $3, {', '.join(columns.values())})",
        rig.admin.tenant_id, f"api:{rig.admin.key_id}:{key}", digest,
    )  # fmt: skip


BODY = {"workflow": "gate"}


async def test_a_request_that_nobody_answered_is_made_again_when_its_lock_ran_out(
    rig: Rig, http: httpx2.AsyncClient
) -> None:
    await leave(rig, "processing", body=BODY, lock_expires_at="now() + interval '5 minutes'")
    headers = {"Idempotency-Key": "k1"}
    answer = await http.post("/api/runs", json=BODY, headers=headers)
    assert (answer.status_code, answer.json()["code"], await runs(rig)) == (409, "IDEMPOTENCY_CONFLICT", 0)
    rig.clock.advance(301)
    answers = await asyncio.gather(*(http.post("/api/runs", json=BODY, headers=headers) for _ in range(5)))
    assert ({a.status_code for a in answers}, len({a.content for a in answers}), await runs(rig)) == ({201}, 1, 1)
    [record] = await rig.sql("SELECT * FROM interlock.idempotency_record")
    assert (record["status"], record["attempts"], record["lock_expires_at"]) == ("completed", 2, None)


@pytest.mark.parametrize("over", [False, True])
async def test_a_request_that_failed_is_made_again(rig: Rig, http: httpx2.AsyncClient, over: bool) -> None:
    await leave(rig, "failed", body=BODY, error="'boom'", attempts="4")
    again = metrics.transition("idempotency", "failed", "processing")
    before = again._value.get()
    if over:
        rig.clock.advance(3601)
    other = await http.post("/api/runs", json={"workflow": "echo"}, headers={"Idempotency-Key": "k1"})
    assert other.status_code == (201 if over else 422)
    answer = await http.post("/api/runs", json=BODY, headers={"Idempotency-Key": "k1"})
    assert answer.status_code == (422 if over else 201)
    [record] = await rig.sql("SELECT * FROM interlock.idempotency_record")
    assert (record["status"], record["attempts"], record["error"]) == ("completed", 1 if over else 5, None)
    assert again._value.get() - before == (0 if over else 1)


async def test_a_request_that_failed_too_often_says_why(rig: Rig, http: httpx2.AsyncClient) -> None:
    await leave(rig, "failed", body=BODY, error="'boom'", attempts="5")
    answer = await http.post("/api/runs", json=BODY, headers={"Idempotency-Key": "k1"})
    assert (answer.status_code, answer.json()["code"]) == (409, "IDEMPOTENCY_EXHAUSTED")
    assert "5 times" in answer.json()["detail"] and "boom" in answer.json()["detail"]


async def test_a_bug_leaves_a_failure_behind_and_no_half_of_an_effect(
    rig: Rig, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = idempotency.complete

    async def broken(*_: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(idempotency, "complete", broken)
    headers = {"Idempotency-Key": "k1"}
    answers = [await http.post("/api/workflows", json=WORKFLOW, headers=headers) for _ in range(2)]
    assert {answer.status_code for answer in answers} == {500}
    [record] = await rig.sql("SELECT * FROM interlock.idempotency_record")
    assert (record["status"], record["attempts"], record["error"]) == ("failed", 2, "boom")
    assert await rig.sql("SELECT * FROM interlock.workflow WHERE name = 'w'") == []
    monkeypatch.setattr(idempotency, "complete", real)
    assert (await http.post("/api/workflows", json=WORKFLOW, headers=headers)).status_code == 201


WORKFLOW = {"name": "w", "steps": [{"id": "a", "tool": "t.x"}]}


async def test_records_are_forgotten_in_batches_when_their_time_is_over(
    rig: Rig, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "_FORGET_BATCH", 7)
    await rig.sql(
        "INSERT INTO interlock.idempotency_record (tenant_id, key, source, status, request_hash, response_status,"
        " response_body, created_at, expires_at) SELECT $1, 'api:' || n, 'api', 'completed', '', 201, '', now(),"
        " now() + make_interval(hours => CASE WHEN n <= 20 THEN -1 ELSE 1 END) FROM generate_series(1, 30) AS n",
        rig.admin.tenant_id,
    )
    assert await sweeps.forget_keys(rig.database) == 20
    assert len(await rig.sql("SELECT * FROM interlock.idempotency_record")) == 10


async def test_hits_and_misses_are_counted_by_source(rig: Rig, http: httpx2.AsyncClient) -> None:
    def counted(result: str) -> float:
        found = metrics.registry.get_sample_value(
            "interlock_idempotency_hits_total", {"source": "api", "result": result}
        )  # fmt: skip
        return found or 0.0

    answered = metrics.transition("idempotency", "processing", "completed")._value
    moves, before = answered.get(), {result: counted(result) for result in ("miss", "hit", "conflict")}
    for body in (BODY, BODY, {"workflow": "echo"}):
        await http.post("/api/runs", json=body, headers={"Idempotency-Key": "k1"})
    assert {result: counted(result) - was for result, was in before.items()} == {"miss": 1, "hit": 1, "conflict": 1}
    assert answered.get() == moves + 1


# These requests change nothing.
ONLY_LOOKING = {"/api/policy/evaluate", "/api/policy/backtest", "/api/audit/verify", "/api/triggers/{name}/test"}


def test_every_body_that_changes_something_may_have_a_request_id(rig: Rig) -> None:
    description = rig.app.openapi()
    without = []
    for path, methods in description["paths"].items():
        for method, call in methods.items():
            schema = call.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            named = [s["$ref"].rpartition("/")[2] for s in (schema, *schema.get("anyOf", ())) if "$ref" in s]
            without += [
                f"{method.upper()} {path}"
                for name in named
                if path not in ONLY_LOOKING
                and "request_id" not in description["components"]["schemas"][name]["properties"]
            ]
    assert without == []
