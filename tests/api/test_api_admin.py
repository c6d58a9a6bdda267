"""Workflows over HTTP, health, metrics, and the description of the API itself."""

import json
import re
from typing import Any

import httpx2
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from tests.rig import Rig

from interlock import wire
from interlock.engine.proof import audit
from interlock.lifecycle import RUN, STEP
from interlock.telemetry import Metrics, Names, metrics
from interlock.wire import Page, Problem, WorkerView, Workflow

YAML = """
name: refund
steps:
  - id: lookup
    tool: shop.lookup
  - id: review
    approval: {tier: high}
"""
JSON = {
    "name": "refund",
    "steps": [{"id": "lookup", "tool": "shop.lookup"}, {"id": "review", "approval": {"tier": "high"}}],
}


async def apply(http: httpx2.AsyncClient, source: str | dict[str, Any]) -> httpx2.Response:
    if isinstance(source, dict):
        return await http.post("/api/workflows", json=source)
    return await http.post("/api/workflows", content=source.encode(), headers={"content-type": "application/yaml"})


# ---------------------------------------------------------------- workflows


async def test_the_same_content_is_the_same_version_in_yaml_and_in_json(rig: Rig) -> None:
    http = rig.http()
    first = await apply(http, YAML)
    assert (first.status_code, first.json()["name"], first.json()["version"]) == (201, "refund", 1)
    for again in (YAML, "# a comment\n" + YAML, JSON):
        assert (await apply(http, again)).json() == first.json()
    changed = (await apply(http, YAML.replace("high", "low"))).json()
    assert (changed["version"], changed["digest"] != first.json()["digest"]) == (2, True)
    # Applying earlier content again returns to its version.
    assert (await apply(http, YAML)).json()["version"] == 1


async def test_versions_stay_as_they_were(rig: Rig) -> None:
    http = rig.http()
    await apply(http, YAML)
    await apply(http, YAML.replace("high", "low"))
    newest, first = [
        Workflow.model_validate((await http.get(f"/api/workflows/refund{v}")).json()) for v in ("", "?version=1")
    ]
    assert (newest.version, newest.source["steps"][1]["approval"]["tier"]) == (2, "low")
    assert (first.version, first.source) == (1, JSON)


async def test_workflows_are_listed_newest_version_of_each_page_by_page(rig: Rig) -> None:
    http = rig.http()
    for name in "edcba":
        await apply(http, YAML.replace("refund", name))
    await apply(http, YAML.replace("refund", "c").replace("high", "low"))
    first = (await http.get("/api/workflows", params={"limit": 3})).json()
    second = (await http.get("/api/workflows", params={"limit": 3, "cursor": first["next_cursor"]})).json()
    found = Page[Workflow].model_validate(first).items + Page[Workflow].model_validate(second).items
    assert [(w.name, w.version) for w in found] == [("a", 1), ("b", 1), ("c", 2), ("d", 1), ("e", 1)]
    assert second["next_cursor"] is None


async def test_every_fault_of_a_workflow_is_listed_with_its_line(rig: Rig) -> None:
    answer = await apply(
        rig.http(),
        "name: Refund\nsteps:\n  - {id: a, tool: shop.x, retri: {}}\n  - {id: a, approval: {tier: huge}}\n",
    )
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    problem = Problem.model_validate(answer.json())
    assert problem.code == "DEFINITION_INVALID"
    errors = answer.json()["errors"]
    assert [error["line"] for error in errors] == sorted(error["line"] for error in errors)
    assert {error["line"] for error in errors} == {1, 3, 4}
    assert all(error["message"] and "path" in error for error in errors)
    assert (await rig.http().get("/api/workflows")).json()["items"] == []


@pytest.mark.parametrize("source", ["", "- a", "name: [", "just text", "name: w\nsteps: []", "\x00", "&a [*a, *a]"])
async def test_what_is_no_workflow_is_refused(rig: Rig, source: str) -> None:
    answer = await apply(rig.http(), source)
    assert (answer.status_code, answer.json()["code"]) == (422, "DEFINITION_INVALID")


async def test_the_file_name_is_in_the_faults_of_whoever_says_it(rig: Rig) -> None:
    headers = {"content-type": "application/yaml", "X-File-Name": "refund.yaml"}
    answer = await rig.http().post("/api/workflows", content=b"name: w\nsteps: []", headers=headers)
    assert answer.json()["detail"].startswith("refund.yaml:2")


# ---------------------------------------------------------------- health and metrics


async def test_health_and_readiness_need_no_key(rig: Rig) -> None:
    http = rig.http("")
    assert ((await http.get("/healthz")).status_code, (await http.get("/healthz")).json()) == (200, {"status": "ok"})
    assert (await http.get("/readyz")).json() == {"status": "ready"}


async def test_readiness_says_when_the_database_is_away(rig: Rig) -> None:
    rig.database.pool.terminate()
    http = rig.http("")
    answer = await http.get("/readyz")
    assert (answer.status_code, answer.json()["code"], answer.headers["retry-after"]) == (503, "UNAVAILABLE", "1")
    assert (await http.get("/healthz")).status_code == 200
    rig.settings.metrics_token = SecretStr("a token for Prometheus")
    assert (await rig.http("a token for Prometheus").get("/metrics")).status_code == 200


async def test_metrics_are_for_the_operators_of_all_tenants(rig: Rig) -> None:
    """Security M7: without a key, metrics were public and named the workflows of all tenants."""
    other = await rig.tenant("other")
    strangers = [
        ("", 401), ("nope", 401), (await rig.key("x", "admin", other.tenant_id), 403),
        (await rig.key("x", "admin", workspace_id="blue"), 403), (await rig.key("prometheus", "viewer"), 200),
    ]  # fmt: skip
    for key, status in strangers:
        answer = await rig.http(key).get("/metrics")
        assert (answer.status_code, "interlock_run_active" in answer.text) == (status, status == 200), key
    token = "0123456789abcdef"
    assert (await rig.http(token).get("/metrics")).status_code == 401
    rig.settings.metrics_token = SecretStr(token)
    assert (await rig.http(token).get("/metrics")).status_code == 200
    assert (await rig.http(token + "x").get("/metrics")).status_code == 401
    assert (await rig.http(token).get("/api/runs")).status_code == 401


def test_names_that_callers_choose_are_bounded_labels() -> None:
    """Security M7: 150 workflows made 3,300 lines. Names over the limit share one label."""
    some = Metrics()
    for number in range(3 * Metrics.MOST_NAMES):
        some.run_took(f"workflow-{number}", "succeeded").observe(1)
        some.step_took(f"tool-{number}", "done").observe(1)
    text = generate_latest(some.registry).decode()
    for label, metric in (("workflow", "interlock_run_duration_seconds"), ("tool", "interlock_step_duration_seconds")):
        counts = {
            s.labels[label]: s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
            if s.name == f"{metric}_count"
        }
        assert (len(counts), counts["other"]) == (Metrics.MOST_NAMES + 1, 2 * Metrics.MOST_NAMES)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_show_what_is_not_proven_yet(rig: Rig) -> None:
    @rig.tool("t.one")
    async def one() -> None: ...

    await rig.apply("{name: one, steps: [{id: a, tool: t.one}]}")
    await rig.work_until(await rig.start("one"))
    names = ("interlock_audit_unsealed_entries", "interlock_evidence_due_runs")
    before = samples((await rig.http().get("/metrics")).text)
    (written,) = await rig.sql("SELECT count(*) FROM interlock.journal_entry")
    assert [before[name, ()] for name in names] == [written["count"], 0]
    rig.notary.signing.make()
    await audit.seal_all(rig.database, rig.notary.signing)
    sealed = samples((await rig.http().get("/metrics")).text)
    assert [sealed[name, ()] for name in names] == [0, 1]
    await rig.prove()
    proven = samples((await rig.http().get("/metrics")).text)
    assert [proven[name, ()] for name in names] == [0, 0]


async def test_metrics_count_what_happened(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "workflows", Names(1))  # earlier tests of this process may have used up the names

    @rig.tool("t.echo")
    async def echo() -> None: ...

    http = rig.http()
    before = samples((await http.get("/metrics")).text)
    await rig.apply("{name: counted, steps: [{id: a, tool: t.echo}, {id: ask, approval: {}}]}")
    await rig.apply("{name: waits, steps: [{id: ask, approval: {}}]}")
    headers = {"Idempotency-Key": "k"}
    run = (await http.post("/api/runs", json={"workflow": "counted"}, headers=headers)).json()
    await http.post("/api/runs", json={"workflow": "counted"}, headers=headers)
    await http.post("/api/runs", json={"workflow": "waits"})
    async with rig.worker():
        await http.get(f"/api/runs/{run['id']}", params={"wait": 20})
        await http.post(f"/api/runs/{run['id']}/approve")
    await http.post(f"/api/runs/{run['id']}/cancel")
    after = samples((await http.get("/metrics")).text)

    def grew(name: str, **labels: str) -> float:
        key = (f"interlock_{name}", tuple(sorted(labels.items())))
        return after.get(key, 0) - before.get(key, 0)

    assert grew("run_transitions_total", from_state="pending", to_state="running") == 1
    assert grew("run_transitions_total", from_state="running", to_state="waiting_approval") == 1
    assert grew("run_transitions_total", from_state="waiting_approval", to_state="succeeded") == 1
    assert grew("step_transitions_total", from_state="running", to_state="succeeded") == 1
    assert grew("approval_transitions_total", from_state="requested", to_state="approved") == 1
    assert grew("run_duration_seconds_count", workflow="counted", status="succeeded") == 1
    assert grew("idempotency_hits_total", source="api", result="miss") == 1
    assert grew("idempotency_hits_total", source="api", result="hit") == 1
    assert grew("refused_transitions_total", machine="run", state="succeeded", event="cancel") == 1
    active = {
        dict(labels)["status"]: value for (name, labels), value in after.items() if name == "interlock_run_active"
    }
    assert active == {str(state): float(state == "waiting_approval") for state in RUN.open}
    # The label values are exactly the words of the tables.
    for machine, name in ((RUN, "run"), (STEP, "step")):
        pairs = {(str(t.source), str(t.target)) for t in machine.transitions()}
        for (metric, labels), _ in after.items():
            if metric == f"interlock_{name}_transitions_total":
                assert tuple(value for _, value in labels) in pairs


async def test_workers_are_listed(rig: Rig) -> None:
    http = rig.http()
    async with rig.worker(7):
        while True:  # until the worker has registered
            items = (await http.get("/api/workers")).json()["items"]
            if items and items[0]["status"] == "running":
                break
        [found] = Page[WorkerView].model_validate({"items": items}).items
        assert (found.capacity, found.stopped_at) == (7, None)
    [gone] = (await http.get("/api/workers")).json()["items"]
    assert (gone["status"], gone["reason"], gone["holds"]) == ("completed", "drained", 0)


# ---------------------------------------------------------------- the description


async def test_the_description_of_the_api_is_valid_and_complete(rig: Rig) -> None:
    document = (await rig.http("").get("/api/openapi.json")).json()
    assert document["openapi"].startswith("3.")
    text = json.dumps(document)
    for reference in set(re.findall(r'"\$ref": "#/([^"]+)"', text)):
        found: Any = document
        for part in reference.split("/"):
            found = found[part.replace("~1", "/").replace("~0", "~")]
    promised = {
        ("post", "/api/tenants"), ("post", "/api/keys"), ("post", "/api/workflows"), ("post", "/api/runs"),
        ("get", "/api/runs"), ("get", "/api/runs/{}"), ("get", "/api/runs/{}/events"),
        ("post", "/api/runs/{}/approve"), ("post", "/api/runs/{}/cancel"), ("post", "/api/runs/{}/interrupt"),
        ("post", "/api/runs/{}/retry"), ("get", "/api/approvals"), ("get", "/api/approvals/{}"),
        ("post", "/api/approvals/{}/approve"), ("post", "/api/approvals/{}/reject"),
    }  # fmt: skip
    described = {
        (method, re.sub(r"\{\w+\}", "{}", path)) for path, methods in document["paths"].items() for method in methods
    }
    assert promised <= described
    ids = [op["operationId"] for methods in document["paths"].values() for op in methods.values()]
    assert len(ids) == len(set(ids))
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            good = [code for code in operation["responses"] if code.startswith("2")]
            assert good, (method, path)
            schema = operation["responses"][good[0]]["content"]["application/json"]["schema"]
            assert schema, (method, path)
            said = {
                code: list(answer["content"]) for code, answer in operation["responses"].items() if code not in good
            }
            assert said == {"default": ["application/problem+json"]}, (method, path)
            for parameter in re.findall(r"\{(\w+)\}", path):
                assert parameter in [p["name"] for p in operation["parameters"] if p["in"] == "path"]
    schemas = document["components"]["schemas"]
    assert schemas["RunState"]["enum"] == [str(state) for state in RUN.table]
    assert schemas["StepState"]["enum"] == [str(state) for state in STEP.table]


@pytest.mark.parametrize(
    "name", ["ann\n", "ann\nbob", " ann", "ann ", "an\tn", "a\u202enn", "a\u200bnn", "\u00a0ann", "a\u3164nn"]
)
async def test_a_keys_name_is_what_people_see_of_it(rig: Rig, name: str) -> None:
    """security L11: approvers recognize each other by key names."""
    for body in ({"name": name}, {"name": "ann", "groups": ["a", name]}, {"name": "ann", "workspace_id": name}):
        refused = await rig.http().post("/api/keys", json={"role": "viewer", **body})
        assert refused.status_code == 422, refused.text
        assert "blank" in refused.json()["detail"] or "cannot see" in refused.json()["detail"]
    for fine in ("Ann O'Neil", "Zoë", "安娜"):
        made = await rig.http().post("/api/keys", json={"name": fine, "role": "viewer"})
        assert (made.status_code, made.json()["name"]) == (201, fine)


async def test_every_answer_is_what_the_wire_says(rig: Rig) -> None:
    """Strictly: an answer has each field of its model, and no value that the model would have to coerce."""

    @rig.tool("t.echo")
    async def echo() -> dict[str, int]:
        return {"n": 1}

    http = rig.http()
    await apply(http, "name: w\nsteps: [{id: a, tool: t.echo}, {id: ask, approval: {}}]")
    run = (await http.post("/api/runs", json={"workflow": "w"})).json()
    async with rig.worker():
        await http.get(f"/api/runs/{run['id']}", params={"wait": 20})
        approval = (await http.get("/api/approvals")).json()["items"][0]
        key = (await http.post("/api/keys", json={"name": "k", "role": "agent"})).json()
        await apply(http, "name: gate\nsteps: [{id: ask, approval: {}}]")
        gate = (await http.post("/api/runs", json={"workflow": "gate"})).json()
        answers: list[tuple[Any, Any]] = [
            (wire.Run, run),
            (wire.Run, (await http.get(f"/api/runs/{run['id']}")).json()),
            (wire.Page[wire.Run], (await http.get("/api/runs")).json()),
            (wire.Page[wire.Event], (await http.get(f"/api/runs/{run['id']}/events")).json()),
            (wire.Approval, approval),
            (wire.Approval, (await http.post(f"/api/approvals/{approval['id']}/approve")).json()),
            (wire.Page[wire.Approval], (await http.get("/api/approvals")).json()),
            (wire.Run, (await http.post(f"/api/runs/{gate['id']}/approve")).json()),
            (wire.Page[wire.Workflow], (await http.get("/api/workflows")).json()),
            (wire.Workflow, (await http.get("/api/workflows/w")).json()),
            (wire.Key, key),
            (wire.Page[wire.Key], (await http.get("/api/keys")).json()),
            (wire.Key, (await http.delete(f"/api/keys/{key['id']}")).json()),
            (wire.Tenant, (await http.post("/api/tenants", json={"name": "acme"})).json()),
            (wire.Page[wire.Tenant], (await http.get("/api/tenants")).json()),
            (wire.Page[wire.WorkerView], (await http.get("/api/workers")).json()),
            (wire.Page[wire.Tool], (await http.get("/api/tools")).json()),
            (wire.SentEvent, (await http.post("/api/events", json={"type": "e", "correlation": "c"})).json()),
            (wire.Page[wire.ReceivedEvent], (await http.get("/api/events")).json()),
            (wire.Health, (await http.get("/healthz")).json()),
        ]
    for model, answer in answers:
        model.model_validate_json(json.dumps(answer), strict=False)
        for field, given in model.model_fields.items():
            optional = {"key", "source", "steps"}  # only shown once, or only for a single resource
            assert field in answer or field in optional, (model.__name__, field, given)
    names = {
        "id", "tenant_id", "workspace_id", "workflow", "workflow_version", "status", "reason", "input", "result",
        "error", "trigger", "session_id", "job_id", "parent_run_id", "resumed_from", "resume_count", "cost_usd",
        "created_at", "started_at", "completed_at", "duration_ms", "steps", "last_heartbeat_at", "compensation",
    }  # fmt: skip
    steps = {
        "id", "key", "index", "kind", "tool", "status", "attempt", "max_attempts", "next_run_at", "last_error",
        "idempotency_key", "output", "cost_usd", "started_at", "completed_at", "needs", "waits_for", "resumable",
        "idempotent", "tokens", "duration_ms", "runs_on",
    }  # fmt: skip
    shown = answers[1][1]
    assert names <= set(shown) and all(steps <= set(step) for step in shown["steps"])
    assert {"id", "run_id", "step_key", "session_id", "status", "tier", "two_person", "action", "rationale", "votes",
            "requested_at", "expires_at", "resolved_at"} <= set(approval)  # fmt: skip
    assert {"tool", "connector", "operation", "target", "fields", "digest"} <= set(approval["action"])
