"""/api/runs over HTTP: start, read, approve, cancel, retry."""

import asyncio
import contextlib
from typing import Any
from uuid import UUID

import httpx2
import pytest
from tests.rig import Hold, Rig

from interlock.api import app
from interlock.api import runs as api_runs
from interlock.api.dependencies import principal
from interlock.errors import Conflict
from interlock.wire import Page, Run

ECHO = "{name: echo, steps: [{id: a, tool: t.echo, input: {value: '${input.x}'}}]}"
GATE = "{name: gate, steps: [{id: ask, approval: {}}, {id: a, tool: t.echo, input: {value: 1}}]}"
HOLD = "{name: hold, steps: [{id: a, tool: t.hold}]}"
FAIL = """
name: fail
steps:
  - {id: a, tool: t.echo, input: {value: "${input.x}"}}
  - {id: ask, approval: {}}
  - {id: b, tool: t.flaky, retry: {max_attempts: 1}}
"""


@pytest.fixture
async def http(rig: Rig) -> httpx2.AsyncClient:
    for source in (ECHO, GATE, HOLD, FAIL):
        await rig.apply(source)
    return rig.http()


@pytest.fixture
def seen(rig: Rig) -> list[Any]:
    seen: list[Any] = []

    @rig.tool("t.echo")
    async def echo(value: Any) -> Any:
        seen.append(value)
        return value

    return seen


@pytest.fixture
def hold(rig: Rig) -> Hold:
    hold = Hold()

    @rig.tool("t.hold")
    async def stay() -> None:
        await hold()

    return hold


async def start(http: httpx2.AsyncClient, workflow: str, **body: Any) -> dict[str, Any]:
    answer = await http.post("/api/runs", json={"workflow": workflow, **body})
    assert answer.status_code == 201, answer.text
    return Run.model_validate(answer.json()).model_dump(mode="json") | {"raw": answer.json()}


async def post(http: httpx2.AsyncClient, path: str, expect: int = 200, **body: Any) -> dict[str, Any]:
    answer = await http.post(path, json=body or None)
    assert answer.status_code == expect, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def journal(rig: Rig, run: dict[str, Any]) -> list[str]:
    return await rig.journal(UUID(run["id"]))


# ---------------------------------------------------------------- start and look


async def test_a_run_goes_from_a_request_to_its_result(rig: Rig, http: httpx2.AsyncClient, seen: list[Any]) -> None:
    run = await start(http, "echo", input={"x": {"deep": [1, None, "ü"]}}, trigger={"source": "cli", "ref": "r1"})
    assert (run["status"], run["workflow_version"]) == ("pending", 1)
    assert run["raw"]["trigger"] == {
        "source": "cli", "ref": "r1", "initiator": "user", "user": "admin", "metadata": {}, "external_event": None,
    }  # fmt: skip
    assert [step["key"] for step in run["steps"]] == ["a"]
    async with rig.worker():
        answer = await http.get(f"/api/runs/{run['id']}", params={"wait": 20})
    done = Run.model_validate(answer.json())
    assert (done.status, done.reason, done.result) == ("succeeded", "completed", {"deep": [1, None, "ü"]})
    assert done.duration_ms is not None and done.started_at is not None and done.completed_at is not None
    assert seen == [{"deep": [1, None, "ü"]}]


async def test_a_new_run_looks_the_same_when_it_is_asked_for(http: httpx2.AsyncClient) -> None:
    for workflow in ("echo", "gate"):
        run = await start(http, workflow, input={"x": 1})
        assert (await http.get(f"/api/runs/{run['id']}")).json() == run["raw"]


async def test_every_id_is_of_version_7_and_a_steps_stays_its_own(rig: Rig, http: httpx2.AsyncClient) -> None:
    run = await start(http, "fail", input={"x": 1})
    ids = [run["id"], run["tenant_id"], *(step["id"] for step in run["steps"])]
    assert {UUID(each).version for each in ids} == {7}
    assert len(set(ids)) == 5
    again = (await http.get(f"/api/runs/{run['id']}")).json()
    other = await start(http, "fail", input={"x": 1})
    assert [step["id"] for step in again["steps"]] == ids[2:]
    assert not {step["id"] for step in other["steps"]} & set(ids)


async def test_a_run_says_which_states_it_went_through(rig: Rig, http: httpx2.AsyncClient, seen: list[Any]) -> None:
    run = await start(http, "gate")
    [held] = run["raw"]["state_history"]
    assert (held["from_state"], held["event"], held["to_state"]) == ("pending", "hold", "waiting_approval")
    await post(http, f"/api/runs/{run['id']}/approve")
    async with rig.worker():
        done = (await http.get(f"/api/runs/{run['id']}", params={"wait": 20})).json()
    history = done["state_history"]
    assert [change["to_state"] for change in history] == ["waiting_approval", "running", "succeeded"]
    assert (history[-1]["reason"], history[-1]["at"]) == ("completed", done["completed_at"])
    assert history[-1]["by"].startswith("worker:")


async def test_wait_on_a_start_answers_when_the_run_has_ended(
    rig: Rig, http: httpx2.AsyncClient, seen: list[Any]
) -> None:
    async with rig.worker():
        answer = await http.post("/api/runs", params={"wait": 20}, json={"workflow": "echo", "input": {"x": 5}})
    assert (answer.status_code, answer.json()["status"], answer.json()["result"]) == (201, "succeeded", 5)


async def test_wait_on_a_start_that_was_made_before_answers_at_once(
    rig: Rig, http: httpx2.AsyncClient, seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_runs, "_POLL_SECONDS", 60.0)
    body, key = {"workflow": "echo", "input": {"x": 5}}, {"Idempotency-Key": "k"}
    async with rig.worker():
        await http.post("/api/runs", params={"wait": 20}, json=body, headers=key)
    async with asyncio.timeout(5):
        answer = await http.post("/api/runs", params={"wait": 20}, json=body, headers=key)
    assert (answer.json()["status"], answer.headers["Idempotency-Replayed"]) == ("succeeded", "true")


async def test_wait_answers_when_a_person_is_needed_and_when_the_time_is_over(
    rig: Rig, http: httpx2.AsyncClient, hold: Hold, seen: list[Any]
) -> None:
    answer = await http.post("/api/runs", params={"wait": 20}, json={"workflow": "gate"})
    assert answer.json()["status"] == "waiting_approval"
    answer = await http.get(f"/api/runs/{answer.json()['id']}", params={"wait": 20})
    assert answer.json()["status"] == "waiting_approval"
    async with rig.worker():
        answer = await http.post("/api/runs", params={"wait": 0.05}, json={"workflow": "hold"})
        assert (answer.status_code, answer.json()["status"] in ("pending", "running")) == (201, True)
        await hold.inside()
        answer = await http.get(f"/api/runs/{answer.json()['id']}", params={"wait": 0.05})
        assert answer.json()["status"] == "running"
        hold.release.set()


def flat(pages: list[list[str]]) -> list[str]:
    return [item for page in pages for item in page]


async def test_paging_over_many_runs_gives_each_once_newest_first(rig: Rig, http: httpx2.AsyncClient) -> None:
    ids = [(await start(http, "echo" if n % 5 else "gate", input={"x": n}))["id"] for n in range(25)]

    async def pages(**params: Any) -> list[list[str]]:
        found: list[list[str]] = []
        cursor = None
        while True:
            answer = await http.get("/api/runs", params={**params, **({"cursor": cursor} if cursor else {})})
            page = Page[Run].model_validate(answer.json())
            found.append([run.id for run in page.items])
            if (cursor := page.next_cursor) is None:
                return found

    assert [len(page) for page in await pages(limit=10)] == [10, 10, 5]
    assert flat(await pages(limit=10)) == ids[::-1]
    assert [len(page) for page in await pages(limit=25)] == [25]
    gates = ids[::5][::-1]
    assert flat(await pages(limit=2, workflow="gate")) == gates
    assert flat(await pages(limit=2, status="waiting_approval")) == gates
    assert flat(await pages(limit=7, status="pending", workflow="echo")) == [i for i in ids[::-1] if i not in gates]
    assert await pages(status="failed") == [[]]
    assert await pages(workflow="nope") == [[]]
    # A run that starts between two page requests does not shift the second page.
    first = (await http.get("/api/runs", params={"limit": 10})).json()
    await start(http, "echo", input={"x": 99})
    second = (await http.get("/api/runs", params={"limit": 10, "cursor": first["next_cursor"]})).json()
    assert [run["id"] for run in second["items"]] == ids[::-1][10:20]


async def test_a_run_stays_with_the_version_it_was_started_on(
    rig: Rig, http: httpx2.AsyncClient, seen: list[Any]
) -> None:
    old = await start(http, "gate")
    await rig.apply(GATE.replace("value: 1", "value: 2"))
    new, pinned = await start(http, "gate"), await start(http, "gate", version=1)
    assert [run["workflow_version"] for run in (old, new, pinned)] == [1, 2, 1]
    async with rig.worker():
        for run in (old, new, pinned):
            await post(http, f"/api/runs/{run['id']}/approve")
        results = [
            (await http.get(f"/api/runs/{run['id']}", params={"wait": 20})).json()["result"]
            for run in (old, new, pinned)
        ]
    assert results == [1, 2, 1]


async def test_a_deadline_can_be_asked_for(rig: Rig, http: httpx2.AsyncClient) -> None:
    rig.clock.freeze()
    run = await start(http, "gate", deadline_seconds=30)
    rig.clock.advance(30)
    await rig.sweep()
    found = (await http.get(f"/api/runs/{run['id']}")).json()
    assert (found["status"], found["reason"]) == ("failed", "timed_out")


# ---------------------------------------------------------------- approve


async def test_a_run_with_an_approval_waits_for_it_and_goes_on(
    rig: Rig, http: httpx2.AsyncClient, seen: list[Any]
) -> None:
    run = await start(http, "gate")
    assert (run["status"], run["steps"][0]["status"]) == ("waiting_approval", "waiting_approval")
    approved = await post(http, f"/api/runs/{run['id']}/approve", reason="fine")
    assert (approved["status"], approved["steps"][0]["status"]) == ("running", "succeeded")
    async with rig.worker():
        done = (await http.get(f"/api/runs/{run['id']}", params={"wait": 20})).json()
    assert done["status"] == "succeeded"


async def test_approving_twice_changes_the_state_once(rig: Rig, http: httpx2.AsyncClient) -> None:
    run = await start(http, "gate")
    first = await post(http, f"/api/runs/{run['id']}/approve")
    lines = await journal(rig, run)
    second = await post(http, f"/api/runs/{run['id']}/approve")
    assert first == second
    assert await journal(rig, run) == lines
    assert lines.count("ask: waiting_approval -grant-> succeeded") == 1
    assert len(await rig.sql("SELECT * FROM interlock.vote")) == 1


async def test_approving_many_times_at_once_changes_the_state_once(rig: Rig, http: httpx2.AsyncClient) -> None:
    run = await start(http, "gate")
    answers = await asyncio.gather(*(http.post(f"/api/runs/{run['id']}/approve") for _ in range(10)))
    assert {answer.status_code for answer in answers} == {200}
    lines = await journal(rig, run)
    assert lines.count("ask: waiting_approval -grant-> succeeded") == 1
    assert lines.count("run: waiting_approval -resume-> running") == 1
    assert len(await rig.sql("SELECT * FROM interlock.ready_run")) == 1


async def test_approving_a_run_that_waits_for_nobody_is_refused_and_changes_nothing(
    rig: Rig, http: httpx2.AsyncClient, hold: Hold
) -> None:
    """new-user 15 and the specification's remark on ended runs: the answer was the run, as if approved."""
    pending = await start(http, "echo", input={"x": 1})
    before = await journal(rig, pending)
    refused = await post(http, f"/api/runs/{pending['id']}/approve", 409)
    assert (refused["code"], refused["state"]) == ("NOTHING_TO_APPROVE", "pending")
    assert refused["detail"] == "The run is pending: it waits for no approval."
    assert await journal(rig, pending) == before
    assert len(await rig.sql("SELECT * FROM interlock.ready_run")) == 1
    await post(http, f"/api/runs/{pending['id']}/cancel")
    running = await start(http, "hold")
    async with rig.worker():
        await hold.inside()
        before = await journal(rig, running)
        refused = await post(http, f"/api/runs/{running['id']}/approve", 409)
        assert (refused["code"], refused["state"]) == ("NOTHING_TO_APPROVE", "running")
        assert await journal(rig, running) == before
        assert await rig.sql("SELECT * FROM interlock.run_command") == []
        hold.release.set()
        await http.get(f"/api/runs/{running['id']}", params={"wait": 20})
    for ended in (pending, running):
        before = await journal(rig, ended)
        refused = await post(http, f"/api/runs/{ended['id']}/approve", 409)
        assert refused["code"] == "RUN_TERMINAL_STATE"
        assert await journal(rig, ended) == before


async def test_only_the_person_who_approved_a_run_may_repeat_it(rig: Rig, http: httpx2.AsyncClient) -> None:
    run = await start(http, "gate")
    await post(http, f"/api/runs/{run['id']}/approve")
    other = rig.http(await rig.key("other", "approver"))
    refused = await post(other, f"/api/runs/{run['id']}/approve", 409)
    assert (refused["code"], refused["state"]) == ("NOTHING_TO_APPROVE", "running")
    assert (await post(http, f"/api/runs/{run['id']}/approve"))["status"] == "running"


async def test_a_run_takes_a_digest_and_no_other_action(rig: Rig, http: httpx2.AsyncClient) -> None:
    run = await start(http, "gate")
    refused = await post(http, f"/api/runs/{run['id']}/approve", 422, patch={"amount": 1})
    assert "patch" in refused["detail"]
    refused = await post(http, f"/api/runs/{run['id']}/approve", 409, digest="another")
    assert refused["code"] == "ACTION_DIGEST_MISMATCH"
    [approval] = (await http.get("/api/approvals")).json()["items"]
    assert (approval["status"], approval["votes"]) == ("requested", [])
    assert refused["digest"] == approval["action"]["digest"]
    await post(http, f"/api/runs/{run['id']}/approve", digest=refused["digest"])


# ---------------------------------------------------------------- cancel


async def test_cancel_of_a_pending_run_is_done_at_once(rig: Rig, http: httpx2.AsyncClient) -> None:
    run = await start(http, "echo", input={"x": 1})
    canceled = await post(http, f"/api/runs/{run['id']}/cancel", reason="never mind")
    assert (canceled["status"], canceled["reason"]) == ("canceled", "canceled_by_user")
    [change] = canceled["state_history"]
    assert (change["from_state"], change["event"], change["to_state"]) == ("pending", "cancel", "canceled")
    assert (change["by"], change["reason"], change["at"]) == (
        rig.admin.actor, "never mind", canceled["completed_at"],
    )  # fmt: skip
    events = (await http.get(f"/api/runs/{run['id']}/events")).json()["items"]
    assert events[-1]["data"]["said"] == "never mind"
    assert events[-1]["data"]["actor"].startswith("admin:")


async def test_cancel_of_a_waiting_run_is_done_at_once(rig: Rig, http: httpx2.AsyncClient) -> None:
    run = await start(http, "gate")
    canceled = await post(http, f"/api/runs/{run['id']}/cancel")
    assert (canceled["status"], [s["status"] for s in canceled["steps"]]) == ("canceled", ["canceled", "canceled"])
    [approval] = (await http.get("/api/approvals", params={"run_id": run["id"]})).json()["items"]
    assert approval["status"] == "canceled"


async def test_cancel_of_a_running_run_interrupts_its_tool(rig: Rig, http: httpx2.AsyncClient, hold: Hold) -> None:
    run = await start(http, "hold")
    async with rig.worker():
        await hold.inside()
        canceling = await post(http, f"/api/runs/{run['id']}/cancel")
        assert canceling["status"] == "canceling"
        done = (await http.get(f"/api/runs/{run['id']}", params={"wait": 20})).json()
    assert hold.interrupted
    assert (done["status"], done["reason"], done["steps"][0]["status"]) == ("canceled", "canceled_by_user", "canceled")
    assert (await journal(rig, run))[-2:] == ["run: running -cancel-> canceling", "run: canceling -stopped-> canceled"]


async def test_interrupt_is_a_cancel_by_another_name(rig: Rig, http: httpx2.AsyncClient) -> None:
    run = await start(http, "gate")
    assert (await post(http, f"/api/runs/{run['id']}/interrupt"))["reason"] == "interrupted"


async def test_cancel_of_an_ended_run(rig: Rig, http: httpx2.AsyncClient, seen: list[Any]) -> None:
    """Canceling again gives the same answer; a succeeded or failed run can no longer be canceled."""
    run = await start(http, "gate")
    first = await post(http, f"/api/runs/{run['id']}/cancel")
    assert await post(http, f"/api/runs/{run['id']}/cancel") == first
    done = await start(http, "echo", input={"x": 1})
    async with rig.worker():
        await http.get(f"/api/runs/{done['id']}", params={"wait": 20})
    before = await journal(rig, done)
    problem = await post(http, f"/api/runs/{done['id']}/cancel", 409)
    assert (problem["code"], problem["state"], problem["allowed"]) == ("RUN_TERMINAL_STATE", "succeeded", [])
    assert await journal(rig, done) == before


# ---------------------------------------------------------------- retry


async def test_a_retry_goes_on_where_the_failed_run_had_got_to(
    rig: Rig, http: httpx2.AsyncClient, seen: list[Any]
) -> None:
    works = False

    @rig.tool("t.flaky")
    async def flaky() -> str:
        if not works:
            raise ValueError("not yet")
        return "now"

    run = await start(http, "fail", input={"x": 7})
    async with rig.worker():
        assert (await http.get(f"/api/runs/{run['id']}", params={"wait": 20})).json()["status"] == "waiting_approval"
        await post(http, f"/api/runs/{run['id']}/approve")
        failed = (await http.get(f"/api/runs/{run['id']}", params={"wait": 20})).json()
    assert (failed["status"], failed["reason"]) == ("failed", "attempts_exhausted")
    works = True
    again = await post(http, f"/api/runs/{run['id']}/retry", 201)
    assert (again["id"] != run["id"], again["resumed_from"], again["resume_count"]) == (True, run["id"], 1)
    assert [s["status"] for s in again["steps"]] == ["succeeded", "succeeded", "pending"]
    assert (again["input"], again["steps"][0]["output"]) == ({"x": 7}, 7)
    async with rig.worker():
        done = (await http.get(f"/api/runs/{again['id']}", params={"wait": 20})).json()
    assert (done["status"], done["result"], seen) == ("succeeded", "now", [7])  # `a` did not run again
    assert (await http.get(f"/api/runs/{run['id']}")).json() == failed
    lines = await journal(rig, again)
    assert lines.count("a: running -succeed-> succeeded") == 1


async def test_a_rejected_run_that_is_retried_asks_again(rig: Rig, http: httpx2.AsyncClient) -> None:
    run = await start(http, "gate")
    [approval] = (await http.get("/api/approvals")).json()["items"]
    await post(http, f"/api/approvals/{approval['id']}/reject")
    again = await post(http, f"/api/runs/{run['id']}/retry", 201)
    assert again["status"] == "waiting_approval"
    found = (await http.get("/api/approvals", params={"status": "requested"})).json()["items"]
    assert [a["run_id"] for a in found] == [again["id"]]


async def test_only_a_failed_or_canceled_run_can_be_retried(rig: Rig, http: httpx2.AsyncClient) -> None:
    run = await start(http, "gate")
    problem = await post(http, f"/api/runs/{run['id']}/retry", 409)
    assert (problem["code"], problem["state"]) == ("RUN_INVALID_TRANSITION", "waiting_approval")
    assert problem["detail"] == "Only a run that failed or was canceled can be retried. This run is waiting_approval."
    await post(http, f"/api/runs/{run['id']}/cancel")
    assert (await post(http, f"/api/runs/{run['id']}/retry", 201))["status"] == "waiting_approval"


async def test_a_retry_of_a_run_whose_steps_are_all_done_succeeds(rig: Rig, http: httpx2.AsyncClient) -> None:
    """The run was canceled, but its last step did not stop."""
    hold = Hold()

    @rig.tool("t.hold")
    async def stubborn() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await hold()
        return "sent"

    run = await start(http, "hold")
    async with rig.worker():
        await hold.inside()
        await post(http, f"/api/runs/{run['id']}/cancel")
        canceled = (await http.get(f"/api/runs/{run['id']}", params={"wait": 20})).json()
        assert (canceled["status"], canceled["steps"][0]["status"]) == ("canceled", "succeeded")
        again = await post(http, f"/api/runs/{run['id']}/retry", 201)
        done = (await http.get(f"/api/runs/{again['id']}", params={"wait": 20})).json()
    assert (done["status"], done["result"], hold.entries) == ("succeeded", "sent", 1)


async def test_a_retry_stays_in_the_workspace_of_the_run_it_continues(rig: Rig, http: httpx2.AsyncClient) -> None:
    inside = rig.http(await rig.key("inside", "operator", workspace_id="blue"))
    run = await start(inside, "gate")
    await post(inside, f"/api/runs/{run['id']}/cancel")
    again = await post(http, f"/api/runs/{run['id']}/retry", 201)
    assert again["workspace_id"] == "blue"
    assert (await inside.get(f"/api/runs/{again['id']}")).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"workflow": "one"}', b'{"workflow": "one", "input": {"n": 1e3}, "request_id": "r"}', b'{"workflow": "none"}',
        b'{"workflow": 5}', b"{", b"", b"[]", b'{"workflow": "one", "input": {"n": NaN}}', b'{"workflow": "\\ud800"}',
        b'{"workflow": "one", "surprise": 1}', b'{"workflow": "one", "version": 7}',
    ],
    ids=str,
)  # fmt: skip
async def test_the_short_way_in_answers_like_the_ordinary_one(rig: Rig, body: bytes) -> None:
    @rig.tool("t.one")
    async def one() -> None: ...

    await rig.apply("{name: one, steps: [{id: a, tool: t.one}]}")
    ordinary_only = "application/json; charset=utf-8"
    found = []
    for content_type in ("application/json", ordinary_only):
        async with rig.http(rig.admin_key) as http:
            answer = await http.post("/api/runs", content=body, headers={"Content-Type": content_type})
        own = ("id", "created_at", "updated_at", "steps")
        found.append((answer.status_code, {k: v for k, v in answer.json().items() if k not in own}))
    assert found[0] == found[1]


SHORT, ORDINARY = "application/json", "application/json; charset=utf-8"
START_ECHO = b'{"workflow": "echo", "input": {"x": 1}}'


async def count_runs(rig: Rig) -> int:
    [row] = await rig.sql("SELECT count(*) AS n FROM interlock.run")
    n: int = row["n"]
    return n


async def test_an_ordinary_start_takes_the_short_way(rig: Rig, http: httpx2.AsyncClient) -> None:
    def on_the_ordinary_way() -> None:
        raise Conflict("solved")

    rig.app.dependency_overrides[principal] = on_the_ordinary_way
    answers = [
        await http.post(f"/api/runs{query}", content=START_ECHO, headers={"Content-Type": kind})
        for query in ("", "?wait=0", "?over_cap=wait")
        for kind in (SHORT, ORDINARY)
    ]
    assert [answer.status_code for answer in answers] == [201, 409, 201, 409, 409, 409]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", None])
async def test_what_is_not_said_to_be_json_starts_nothing(rig: Rig, http: httpx2.AsyncClient, kind: str | None) -> None:
    answer = await http.post("/api/runs", content=START_ECHO, headers={"Content-Type": kind} if kind else {})
    assert (answer.status_code, await count_runs(rig)) == (422, 0)


@pytest.mark.parametrize("kind", [SHORT, ORDINARY])
@pytest.mark.parametrize(
    "query",
    ["wait=61", "wait=100", "wait=-1", "wait=nan", "wait=x", "wait=", "over_cap=never", "wait=1&over_cap=never"],
)
async def test_a_start_with_a_query_that_cannot_be_starts_nothing(
    rig: Rig, http: httpx2.AsyncClient, kind: str, query: str
) -> None:
    answer = await http.post(f"/api/runs?{query}", content=START_ECHO, headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["code"]) == (422, "INVALID_REQUEST")
    assert await count_runs(rig) == 0


@pytest.mark.parametrize("kind", [SHORT, ORDINARY])
async def test_nobody_starts_a_run_without_a_key_or_the_role(rig: Rig, http: httpx2.AsyncClient, kind: str) -> None:
    viewer = f"Bearer {await rig.key('me', 'viewer')}"
    stranger, key = rig.http(""), rig.admin_key
    for said, status in (
        (None, 401), ("", 401), (key, 401), (f"Basic {key}", 401), ("Bearer", 401), ("Bearer nope", 401), (viewer, 403),
    ):  # fmt: skip
        headers = {"Content-Type": kind} | ({"Authorization": said} if said is not None else {})
        answer = await stranger.post("/api/runs", content=START_ECHO, headers=headers)
        assert answer.status_code == status, (said, answer.text)
    assert await count_runs(rig) == 0


@pytest.mark.parametrize("kind", [SHORT, ORDINARY])
async def test_a_start_waits_for_as_long_as_it_was_told(
    http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    waited: list[float] = []
    real = api_runs._until_settled

    async def noted(found: Any, who: Any, run_id: UUID, wait: float, news: asyncio.Event) -> Any:
        waited.append(wait)
        return await real(found, who, run_id, 0, news)

    monkeypatch.setattr(api_runs, "_until_settled", noted)
    for wait in ("0", "1", "10", "59", "60", "2.5", "007"):
        answer = await http.post(f"/api/runs?wait={wait}", content=START_ECHO, headers={"Content-Type": kind})
        assert answer.status_code == 201
    assert waited == [1, 10, 59, 60, 2.5, 7]


@pytest.mark.parametrize("kind", [SHORT, ORDINARY])
async def test_a_start_that_is_repeated_waits_for_the_run_that_there_is(
    rig: Rig, http: httpx2.AsyncClient, seen: list[Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_runs, "_POLL_SECONDS", 60.0)
    headers = {"Content-Type": kind, "Idempotency-Key": "k1"}
    first = await http.post("/api/runs", content=START_ECHO, headers=headers)
    async with rig.worker(), asyncio.timeout(10):
        second = await http.post("/api/runs?wait=20", content=START_ECHO, headers=headers)
    assert (second.status_code, second.json()["id"]) == (201, first.json()["id"])
    assert (second.json()["status"], second.json()["result"], seen) == ("succeeded", 1, [1])
    assert ("idempotency-replayed" in first.headers, second.headers["idempotency-replayed"]) == (False, "true")


@pytest.mark.parametrize("kind", [SHORT, ORDINARY])
async def test_of_a_field_said_twice_the_last_counts_and_the_key_with_it(
    rig: Rig, http: httpx2.AsyncClient, kind: str
) -> None:
    twice = b'{"workflow": "none", "request_id": "a", "workflow": "echo", "request_id": "b"}'
    once = b'{"workflow": "echo", "request_id": "b"}'
    answers = [await http.post("/api/runs", content=body, headers={"Content-Type": kind}) for body in (twice, once)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert (answers[0].json()["id"], await count_runs(rig)) == (answers[1].json()["id"], 1)


@pytest.mark.parametrize("kind", [SHORT, ORDINARY])
async def test_who_leaves_in_the_middle_of_a_body_starts_nothing_and_is_no_bug(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    logged: list[Any] = []
    monkeypatch.setattr(app.log, "error", lambda *args, **_: logged.append(args))
    parts = iter([{"type": "http.request", "body": START_ECHO, "more_body": True}, {"type": "http.disconnect"}])
    headers = [(b"content-type", kind.encode()), (b"authorization", f"Bearer {rig.admin_key}".encode())]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/api/runs", "raw_path": b"/api/runs", "query_string": b"", "root_path": "", "headers": headers,
        "client": ("test", 1), "server": ("test", 80),
    }  # fmt: skip

    async def receive() -> Any:
        return next(parts)

    async def send(_: Any) -> None: ...

    await rig.app(scope, receive, send)
    assert (logged, await count_runs(rig)) == ([], 0)
