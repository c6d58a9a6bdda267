"""GitHub's webhooks: each event starts one run, however often GitHub delivers it."""

import asyncio
import hashlib
import hmac
import random
from collections import Counter
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

import orjson
import pytest

from interlock.engine.access import secrets, tenants
from interlock.engine.ingress import idempotency, triggers
from interlock.engine.queueing import sweeps
from interlock.settings import Settings
from interlock.store.pool import Database
from interlock.telemetry import metrics
from tests.rig import Rig
from tests.triggers.conftest import Apply
from tests.triggers.senders import GITHUB, SECRET, from_github, sample

HOOK: dict[str, Any] = {"github": {"secret": "gh"}}


async def runs(rig: Rig) -> list[Any]:
    return await rig.sql("SELECT * FROM interlock.run ORDER BY id")


async def test_events_told_five_times_at_once_and_again_after_a_restart_are_one_run_each(
    rig: Rig, apply: Apply
) -> None:
    await apply(**HOOK, input={"event": "${event.type}", "who": "${payload.sender.login}"})
    told = {}
    for event in GITHUB:
        delivery = str(uuid4())
        answers = await asyncio.gather(*(from_github(rig, event, delivery=delivery) for _ in range(5)))
        assert {answer.status_code for answer in answers} == {202}
        assert len({answer.content for answer in answers}) == 1
        assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
        told[event, delivery] = answers[0]
    # Another process that knows only the database, after every other way to recognize the repetition has expired.
    rig.clock.advance(3600)
    async with restarted(rig) as again:
        for (event, delivery), first in told.items():
            late = await from_github(again, event, delivery=delivery)
            assert (late.status_code, late.content) == (202, first.content)
    found = {str(run["id"]): orjson.loads(run["input"]) for run in await runs(rig)}
    assert found == {
        answer.json()["run_id"]: {"event": event.partition(".")[0], "who": "ada"} for (event, _), answer in told.items()
    }
    assert {answer.json()["outcome"] for answer in told.values()} == {"started"}


class restarted:  # noqa: N801 - a context manager
    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    async def __aenter__(self) -> Rig:
        self._database = await Database(self._rig.database.url, self._rig.settings, clock=self._rig.clock).open()
        return Rig(self._database, self._rig.settings, self._rig.clock)

    async def __aexit__(self, *_: object) -> None:
        await self._database.close()


class TestImpatient:
    @pytest.fixture
    def settings(self, monkeypatch: pytest.MonkeyPatch) -> Settings:
        monkeypatch.setattr(triggers, "_PATIENCE_SECONDS", 0.05)
        return Settings(lock_timeout_seconds=0.05, database_patience_seconds=0.1)

    async def test_a_delivery_whose_twin_is_still_under_way_is_to_be_sent_again(self, rig: Rig, apply: Apply) -> None:
        await apply(**HOOK)
        async with rig.database.transaction() as other:
            first = idempotency.Request(rig.admin.tenant_id, "github:d1:hook", "github", b"")
            assert await idempotency.begin(other, rig.database, first) is None
            answer = await from_github(rig, "push", delivery="d1")
        assert (answer.status_code, answer.json()["code"]) == (409, "IDEMPOTENCY_CONFLICT")
        assert answer.headers["retry-after"] == "1"

    @pytest.mark.parametrize("table", ["run", "idempotency_record"])
    async def test_a_delivery_that_any_other_lock_stops_is_to_be_sent_again(
        self, rig: Rig, apply: Apply, table: str
    ) -> None:
        await apply(**HOOK)
        async with rig.database.transaction() as migration:
            await migration.connection.execute(f"LOCK TABLE interlock.{table} IN ACCESS EXCLUSIVE MODE")
            answer = await from_github(rig, "push", delivery="d1")
        assert (answer.status_code, answer.json()["code"]) == (503, "UNAVAILABLE")
        again = await from_github(rig, "push", delivery="d1")
        assert (again.status_code, again.json()["outcome"]) == (202, "started")
        assert len(await runs(rig)) == 1


async def test_what_starts_with_a_gate_is_started_once_too(rig: Rig, apply: Apply) -> None:
    await apply(**HOOK, workflow="gate")
    delivery = str(uuid4())
    answers = await asyncio.gather(*(from_github(rig, "push", delivery=delivery) for _ in range(5)))
    assert len({answer.content for answer in answers}) == 1
    assert [run["status"] for run in await runs(rig)] == ["waiting_approval"]


@pytest.mark.parametrize(
    "headers",
    [
        {"x-hub-signature-256": "sha256=" + "0" * 64},
        {"x-hub-signature-256": ""},
        {"x-hub-signature-256": "ü"},
        {"x-hub-signature-256": "sha1=2fd4e1c67a2d28fced849ee1bb76e7391b93eb12"},
    ],
)
async def test_a_bad_signature_is_refused(rig: Rig, apply: Apply, headers: dict[str, str]) -> None:
    await apply(**HOOK)
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = await from_github(rig, "push", headers=raw)  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["code"]) == (401, "SIGNATURE_INVALID")
    assert (await runs(rig), await rig.sql("SELECT * FROM interlock.idempotency_record WHERE source = 'github'")) == (
        [],
        [],
    )


async def test_a_signature_with_another_secret_is_refused(rig: Rig, apply: Apply) -> None:
    await apply(**HOOK)
    assert (await from_github(rig, "push", secret="guessed it")).status_code == 401


async def test_a_replay_with_another_body_is_refused(rig: Rig, apply: Apply) -> None:
    await apply(**HOOK)
    delivery = str(uuid4())
    await from_github(rig, "push", delivery=delivery)
    answer = await from_github(rig, "push", sample("push", ref="refs/heads/evil"), delivery=delivery)
    assert (answer.status_code, answer.json()["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")
    assert len(await runs(rig)) == 1


@pytest.mark.parametrize(
    ("event", "pull_request"),
    [("pull_request.opened", "https://github.com/acme/shop/pull/7"), ("push", None)],
)
async def test_a_run_says_which_repository_and_pull_request_it_is_about(
    rig: Rig, apply: Apply, event: str, pull_request: str | None
) -> None:
    await apply(**HOOK)
    run_id = (await from_github(rig, event)).json()["run_id"]
    run = (await rig.http().get(f"/api/runs/{run_id}")).json()
    assert (run["repository"], run["pull_request"]) == ("acme/shop", pull_request)


async def test_the_same_event_of_a_pull_request_under_two_ids_is_one_run_for_five_seconds(
    rig: Rig, apply: Apply
) -> None:
    def counted(result: str) -> float:
        return metrics.idempotency_hits.labels("github", result)._value.get()  # type: ignore[no-any-return]

    await apply(**HOOK)
    rig.clock.freeze()
    before = counted("miss"), counted("hit")
    first, second = await asyncio.gather(*(from_github(rig, "pull_request.synchronize") for _ in range(2)))
    assert (counted("miss"), counted("hit")) == (before[0] + 1, before[1] + 1)
    assert first.json()["run_id"] == second.json()["run_id"]
    rig.clock.advance(4.9)
    assert (await from_github(rig, "pull_request.synchronize")).content == first.content
    rig.clock.advance(0.2)
    later = await from_github(rig, "pull_request.synchronize")
    assert later.json()["run_id"] != first.json()["run_id"]
    assert len(await runs(rig)) == 2


@pytest.mark.parametrize(
    ("event", "payload"),
    [
        ("pull_request.opened", sample("pull_request.opened")),
        ("pull_request.synchronize", sample("pull_request.synchronize", 8)),
        ("pull_request.synchronize", {**sample("pull_request.synchronize"), "pull_request": {
            **GITHUB["push"], "number": 7, "head": {"sha": "another commit"}}}),
        ("issue_comment.created", sample("issue_comment.created")),
        ("pull_request.synchronize", sample("pull_request.synchronize", changes={"title": {"from": "Refund"}})),
        ("pull_request.synchronize", sample("pull_request.synchronize", thread={"node_id": "PRRT_2"})),
        ("pull_request.synchronize", {**sample("pull_request.synchronize"), "pull_request": {
            **GITHUB["pull_request.opened"]["pull_request"], "updated_at": "2026-11-16T09:20:19Z"}}),
    ],
    ids=[
        "another action", "another pull request", "another commit", "another event", "another change",
        "another thread", "another time",
    ],
)  # fmt: skip
async def test_what_only_looks_alike_is_another_event(
    rig: Rig, apply: Apply, event: str, payload: dict[str, Any]
) -> None:
    await apply(**HOOK)
    rig.clock.freeze()
    await from_github(rig, "pull_request.synchronize")
    assert (await from_github(rig, event, payload)).status_code == 202
    assert len(await runs(rig)) == 2


async def test_two_comments_at_once_are_two_events(rig: Rig, apply: Apply) -> None:
    await apply(**HOOK)
    rig.clock.freeze()
    for number in (1, 2):
        await from_github(rig, "issue_comment.created", sample("issue_comment.created", comment={"id": number}))
    assert len(await runs(rig)) == 2


async def test_one_delivery_to_two_triggers_starts_both(rig: Rig, apply: Apply) -> None:
    await apply(**HOOK)
    await apply(**HOOK, name="other")
    delivery = str(uuid4())
    first = await from_github(rig, "pull_request.opened", delivery=delivery)
    second = await from_github(rig, "pull_request.opened", delivery=delivery, to="other")
    assert first.json()["run_id"] != second.json()["run_id"]


async def test_an_event_that_nobody_asked_for_starts_nothing(rig: Rig, apply: Apply) -> None:
    await apply(github={"secret": "gh", "events": ["push", "pull_request.opened"]}, when='payload.ref != "x"')
    delivery = str(uuid4())
    answer = await from_github(rig, "pull_request.synchronize", delivery=delivery)
    assert answer.json()["reason"] == "it is about push, pull_request.opened, not pull_request.synchronize"
    answer = await from_github(rig, "push", sample("push", ref="x"), delivery=delivery)
    assert answer.json() == {
        "outcome": "ignored", "run_id": None, "workflow": None, "reason": '`payload.ref != "x"` is false',
    }  # fmt: skip
    assert await runs(rig) == []
    # It left no trace: GitHub can repeat the delivery after the trigger was changed.
    await apply(**HOOK)
    answer = await from_github(rig, "push", sample("push", ref="x"), delivery=delivery)
    assert answer.json()["outcome"] == "started"


async def test_a_delivery_that_fails_is_tried_again_until_it_failed_five_times(rig: Rig, apply: Apply) -> None:
    await apply(**HOOK, input={"x": "${payload.nowhere.x}"})
    rig.clock.freeze()
    delivery = str(uuid4())
    answers = [await from_github(rig, "push", delivery=delivery) for _ in range(6)]
    assert [a.json()["code"] for a in answers] == ["TRIGGER_UNFIT"] * 5 + ["IDEMPOTENCY_EXHAUSTED"]
    assert "no such key: nowhere" in answers[0].json()["detail"] and "5 times" in answers[5].json()["detail"]
    await apply(**HOOK)
    assert (await from_github(rig, "push", delivery=delivery)).status_code == 409
    rig.clock.advance(3601)
    assert (await from_github(rig, "push", delivery=delivery)).json()["outcome"] == "started"
    [record] = await rig.sql("SELECT * FROM interlock.idempotency_record WHERE source = 'github'")
    assert (record["status"], record["attempts"], record["error"]) == ("completed", 1, None)


async def test_a_delivery_that_failed_goes_well_when_its_trigger_was_mended(rig: Rig, apply: Apply) -> None:
    await apply(**HOOK, when="payload.ref")
    delivery = str(uuid4())
    answer = await from_github(rig, "push", delivery=delivery)
    assert (answer.status_code, answer.json()["code"]) == (422, "TRIGGER_UNFIT")
    await apply(**HOOK)
    first, second = [await from_github(rig, "push", delivery=delivery) for _ in range(2)]
    assert (first.json()["outcome"], first.content == second.content) == ("started", True)
    [record] = await rig.sql("SELECT * FROM interlock.idempotency_record WHERE source = 'github'")
    assert (record["status"], record["attempts"]) == ("completed", 2)


async def test_a_redelivery_after_a_day_is_refused_and_not_done_twice(rig: Rig, apply: Apply) -> None:
    await apply(**HOOK)
    rig.clock.freeze()
    delivery = str(uuid4())
    first = await from_github(rig, "push", delivery=delivery)
    rig.clock.advance(3 * 86400)
    await sweeps.forget_keys(rig.database)
    answer = await from_github(rig, "push", delivery=delivery)
    assert (answer.status_code, answer.json()["code"]) == (409, "IDEMPOTENCY_EXPIRED")
    assert answer.json()["run_id"] == first.json()["run_id"]
    assert len(await runs(rig)) == 1
    rig.clock.advance(6 * 86400)
    assert await sweeps.forget_keys(rig.database) > 0
    assert await rig.sql("SELECT * FROM interlock.idempotency_record") == []


async def test_a_run_says_how_it_came_to_be(rig: Rig, apply: Apply) -> None:
    await apply(**HOOK)
    delivery = str(uuid4())
    run_id = (await from_github(rig, "pull_request.opened", delivery=delivery)).json()["run_id"]
    run = (await rig.http().get(f"/api/runs/{run_id}")).json()
    assert run["trigger"] == {
        "source": "github", "ref": delivery, "initiator": "webhook", "user": "ada",
        "metadata": {
            "trigger": "hook", "repository": "acme/shop", "number": 7,
            "pull_request": "https://github.com/acme/shop/pull/7",
        },
        "external_event": {"event_type": "pull_request.opened", "source": "github", "event_id": delivery},
        "idempotency_key": f"github:{delivery}:hook",
    }  # fmt: skip
    [created] = (await rig.http().get(f"/api/runs/{run_id}/events")).json()["items"]
    assert created["data"]["trigger"] == run["trigger"]
    assert run["input"]["pull_request"]["title"] == "Refund in full"


async def test_a_trigger_acts_for_whoever_applied_it_until_the_key_is_revoked(rig: Rig, apply: Apply) -> None:
    await apply(**HOOK)
    key = await rig.key("grace", "operator")
    await rig.http(key).post("/api/triggers", json={"name": "hook", "workflow": "work"} | HOOK)
    run_id = (await from_github(rig, "push")).json()["run_id"]
    [run] = await runs(rig)
    assert (str(run["id"]), run["requested_by"].partition(":")[0]) == (run_id, "grace")
    [row] = await rig.sql("SELECT id FROM interlock.api_key WHERE name = 'grace'")
    await rig.database.run_in_transaction(lambda tx: tenants.revoke_key(tx, rig.admin, row["id"]))
    answer = await from_github(rig, "push")
    assert (answer.status_code, answer.json()["code"]) == (409, "TRIGGER_KEY_REVOKED")
    assert len(await runs(rig)) == 1


async def test_another_tenants_trigger_has_its_own_address_and_secret(rig: Rig, apply: Apply) -> None:
    await apply(**HOOK)
    other = await rig.tenant("other")
    await rig.apply("{name: work, steps: [{id: a, tool: t.echo}]}", other)
    await rig.database.run_in_transaction(
        lambda tx: secrets.put(tx, rig.database, other, "gh", "the others' secret", tools=[])
    )
    key = await rig.key("op", "operator", other.tenant_id)
    made = await rig.http(key).post("/api/triggers", json={"name": "hook", "workflow": "work"} | HOOK)
    assert made.json()["path"] == "/api/hooks/github/hook?tenant=other"
    assert (await from_github(rig, "push", tenant="other")).status_code == 401
    assert (await from_github(rig, "push", tenant="other", secret="the others' secret")).status_code == 202
    assert (await from_github(rig, "push", tenant="nobody")).status_code == 401
    [run] = await runs(rig)
    assert run["tenant_id"] == other.tenant_id


async def test_a_delivery_without_its_headers_or_json_says_what_is_missing(rig: Rig, apply: Apply) -> None:
    await apply(**HOOK)
    assert (await from_github(rig, "push", headers={"x-github-delivery": ""})).status_code == 422
    http = rig.http("")
    answer = await http.post("/api/hooks/github/nowhere", content=b"{}")
    assert (answer.status_code, answer.json()["code"]) == (401, "SIGNATURE_INVALID")


@pytest.mark.parametrize("form", [True, False], ids=["a form", "JSON that says it is one"])
async def test_a_form_is_read_as_github_sends_it(rig: Rig, apply: Apply, form: bool) -> None:
    await apply(**HOOK, input={"ref": "${payload.ref}"})
    body = orjson.dumps(sample("push"))
    if form:
        body = urlencode({"payload": body.decode()}).encode()
    headers = {
        "content-type": "application/x-www-form-urlencoded", "x-github-event": "push", "x-github-delivery": "d1",
        "x-hub-signature-256": "sha256=" + hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest(),
    }  # fmt: skip
    answer = await rig.http("").post("/api/hooks/github/hook", content=body, headers=headers)
    assert answer.status_code == 202
    assert orjson.loads((await runs(rig))[0]["input"]) == {"ref": "refs/heads/main"}


async def test_a_form_without_a_payload_is_the_senders_mistake(rig: Rig, apply: Apply) -> None:
    await apply(**HOOK)
    for body in (b"payload=", b"payload=&x=1", b"payload=%FF"):
        headers = {
            "content-type": "application/x-www-form-urlencoded", "x-github-event": "push", "x-github-delivery": "d1",
            "x-hub-signature-256": "sha256=" + hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest(),
        }  # fmt: skip
        answer = await rig.http("").post("/api/hooks/github/hook", content=body, headers=headers)
        assert (answer.status_code, answer.json()["detail"][:20]) == (422, "the body is not JSON"), body


async def test_an_event_is_not_lost_when_its_first_delivery_is_rolled_back(
    rig: Rig, apply: Apply, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remark of the specification review: 004 §4.1 would answer the second delivery with 202."""
    monkeypatch.setattr(triggers, "_PATIENCE_SECONDS", 0.05)
    await apply(**HOOK)
    async with rig.database.transaction() as tx:
        await tx.fetch("begin_requests", rig.admin.tenant_id, ["github:d1:hook"], "github", [b"x"], 60.0, None, 60.0)
        answer = await from_github(rig, "push", delivery="d1")
        assert (answer.status_code, answer.json()["code"]) == (409, "IDEMPOTENCY_CONFLICT")
        await tx.connection.execute("DELETE FROM interlock.idempotency_record")
    assert await runs(rig) == []
    answer = await from_github(rig, "push", delivery="d1")
    assert (answer.status_code, answer.json()["outcome"], len(await runs(rig))) == (202, "started", 1)


async def mixed(rig: Rig, apply: Apply, count: int, at_once: int) -> None:
    await apply(**HOOK, input={"n": "${payload.n}"})
    rng = random.Random(7)
    distinct = [
        (name, sample(name, number, n=number) if name.startswith("pull") else sample(name, n=number), str(uuid4()))
        for number in range(count * 3 // 5)
        for name in [rng.choice(["push", "pull_request.opened", "issues.opened", "release.published"])]
    ]
    told = [*distinct, *(rng.choice(distinct) for _ in range(count - len(distinct)))]
    rng.shuffle(told)
    room, http = asyncio.Semaphore(at_once), rig.http("")
    seen: dict[str, set[str]] = {}

    async def tell(name: str, payload: Any, delivery: str) -> int:
        async with room:
            answer = await from_github(rig, name, payload, delivery=delivery, http=http)
            while answer.status_code == 409:  # on a machine that stood still
                answer = await from_github(rig, name, payload, delivery=delivery, http=http)
        seen.setdefault(delivery, set()).add(answer.json()["run_id"])
        return answer.status_code

    statuses = Counter(await asyncio.gather(*(tell(*event) for event in told)))
    assert statuses == {202: count}
    assert all(len(ids) == 1 for ids in seen.values())
    started = sorted(orjson.loads(run["input"])["n"] for run in await runs(rig))
    assert started == list(range(len(distinct)))


async def test_five_hundred_mixed_deliveries_start_exactly_the_distinct_ones(rig: Rig, apply: Apply) -> None:
    await mixed(rig, apply, 500, at_once=16)


@pytest.mark.chaos
async def test_ten_thousand_mixed_deliveries_start_exactly_the_distinct_ones(rig: Rig, apply: Apply) -> None:
    await mixed(rig, apply, 10_000, at_once=32)


async def test_every_event_of_a_run_says_who_or_what_made_it_happen(rig: Rig, apply: Apply) -> None:
    await apply(**HOOK, workflow="gate")
    run_id = (await from_github(rig, "issues.opened")).json()["run_id"]
    approver = rig.http(await rig.key("grace", "approver"))
    assert (await approver.post(f"/api/runs/{run_id}/approve", json={"reason": "fine"})).status_code == 200
    events = (await rig.http().get(f"/api/runs/{run_id}/events")).json()["items"]
    context = {event["type"]: event["data"]["context"] for event in events}
    created = context["run_created"]
    assert (created["initiator"], created["user"], created["external_event"]["event_type"]) == (
        "webhook", "ada", "issues.opened",
    )  # fmt: skip
    asked, decided = context["approval_requested"], context["approval_resolved"]
    assert (asked["initiator"], asked["approval"]["id"]) == ("system", decided["approval"]["id"])
    assert (decided["initiator"], decided["user"]) == ("approval", "grace")
    assert {name: decided["approval"][name] for name in ("decision", "decided_by", "reason")} == {
        "decision": "approved", "decided_by": "grace", "reason": "fine",
    }  # fmt: skip
    late = (await from_github(rig, "issues.opened")).json()["run_id"]
    rig.clock.advance(30 * 86400)
    await rig.sweep()
    events = (await rig.http().get(f"/api/runs/{late}/events")).json()["items"]
    assert {"timeout"} == {e["data"]["context"]["initiator"] for e in events if e["type"] == "approval_resolved"}


async def test_a_delivery_that_is_cut_off_in_the_middle_leaves_nothing_and_can_come_again(
    rig: Rig, apply: Apply, monkeypatch: pytest.MonkeyPatch
) -> None:
    await apply(**HOOK)
    real, inside = idempotency.complete, asyncio.Event()

    async def stuck(*_: Any) -> None:
        inside.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(idempotency, "complete", stuck)
    first = asyncio.create_task(from_github(rig, "pull_request.opened", delivery="d1"))
    await asyncio.wait_for(inside.wait(), 10)
    monkeypatch.setattr(idempotency, "complete", real)
    second = asyncio.create_task(from_github(rig, "pull_request.opened", delivery="d1"))
    await rig_waits_for_a_lock(rig)
    first.cancel()  # as if its process had died: its connection and its uncommitted work are gone
    answer = await asyncio.wait_for(second, 10)
    assert (answer.status_code, answer.json()["outcome"]) == (202, "started")
    [run] = await runs(rig)
    assert str(run["id"]) == answer.json()["run_id"]


async def rig_waits_for_a_lock(rig: Rig) -> None:
    waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with asyncio.timeout(10):
        while not await rig.sql(waiting):
            pass


DEEP = b'{"x": ' + b"[" * 1000 + b"]" * 1000 + b"}"


@pytest.mark.parametrize("payload", [b'{"x": "\\u0000"}', DEEP], ids=["NUL", "deep"])
async def test_a_payload_that_cannot_be_kept_is_refused(rig: Rig, apply: Apply, payload: bytes) -> None:
    await apply(**HOOK, when="payload.x != 1")
    answer = await from_github(rig, "push", orjson.Fragment(payload))
    assert (answer.status_code, await runs(rig)) == (422, [])
