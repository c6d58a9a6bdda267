"""No tenant or low role can block the API or a worker with an expensive computation: security H2 and H3.

The test times another tenant's `GET /healthz` and run of one step during the attack. Everything is in this process,
so a computation that blocks one event loop blocks theirs.
"""

import asyncio
import time
from typing import Any

import orjson
import pytest

from interlock.compute import pool
from interlock.definition.workflow import MOST_NEEDS
from interlock.engine.queueing.leases import WorkerIdentity
from interlock.policy.policy import check_policy
from interlock.wire import Role
from interlock.worker.worker import Worker
from tests.attacks.neighbour import Neighbour
from tests.rig import Rig

RULES = "\n".join(
    f'@id("r{n}") permit (principal, action, resource) when {{ context.hour > {n % 24} && context.workflow == "w{n}" '
    f'&& context.step == "{"s" * 40}" && principal.tenant == "t{n}" }};'
    for n in range(990)
)


@pytest.fixture
async def neighbour(rig: Rig) -> Neighbour:
    """Another tenant with a workflow of one step. A worker runs during the test."""

    @rig.tool("t.ping", writes=False)
    async def ping() -> str:
        return "pong"

    @rig.tool("t.send", risk="low")
    async def send(to: str) -> str:
        return to

    other = await rig.tenant("other")
    key = await rig.key("starter", Role.OPERATOR, other.tenant_id)
    await rig.apply("name: ping\nsteps: [{id: a, tool: t.ping}]", other)
    client = rig.http(key)

    async def healthz() -> None:
        assert (await client.get("/healthz")).status_code == 200

    async def run() -> None:
        answer = await client.post("/api/runs", json={"workflow": "ping"}, params={"wait": 30})
        assert (answer.status_code, answer.json()["status"]) == (201, "succeeded")

    # A child takes a second to start; a server starts one at its own start.
    await pool.warm(_nothing)
    return Neighbour({"healthz": healthz, "a run of one step": run})


def _nothing() -> None:
    import interlock.engine.policies  # noqa: F401


async def test_990_policy_rules_from_a_viewer_key(rig: Rig, neighbour: Neighbour) -> None:
    viewer = rig.http(await rig.key("viewer", Role.VIEWER))
    body = {"tool": "t.send", "input": {"to": "a"}, "policy": RULES}
    async with rig.worker():
        await neighbour.rest()
        async with neighbour.watching():
            alone = await viewer.post("/api/policy/evaluate", json=body)
            assert alone.status_code == 200, alone.text
            answers = await asyncio.gather(*(viewer.post("/api/policy/evaluate", json=body) for _ in range(5)))
            assert {answer.status_code for answer in answers} == {200}
            assert (await viewer.post("/api/policy/backtest", json={"policy": RULES})).status_code == 200
        neighbour.notices_nothing()
        crowd = await asyncio.gather(*(viewer.post("/api/policy/evaluate", json=body) for _ in range(30)))
    refused = [answer for answer in crowd if answer.status_code == 429]
    assert refused and refused[0].json()["code"] == "TOO_MANY_COMPUTATIONS"
    assert int(refused[0].headers["Retry-After"]) > 0
    assert {answer.status_code for answer in crowd} == {200, 429}


async def test_a_policy_of_990_rules_in_force_holds_up_no_other_tenant(rig: Rig, neighbour: Neighbour) -> None:
    writes = "name: writes\nsteps: [{id: a, tool: t.send, input: {to: x}}]"
    await rig.apply(writes)
    async with rig.worker():
        await neighbour.rest()
        async with neighbour.watching():
            published = await rig.http().put("/api/policy", content=RULES)
            assert published.status_code == 200, published.text
            run_id = await rig.start("writes")
            assert (await rig.until(run_id))["reason"] == "policy_denied"
        neighbour.notices_nothing()


async def test_a_pattern_of_a_policy_that_compares_for_minutes_denies(rig: Rig, neighbour: Neighbour) -> None:
    pattern = "*" + "ab" * 60_000 + "c"
    text = (
        '@id("p") permit (principal, action == Action::"t.send", resource) '
        f'when {{ context.input.to like "{pattern}" }};'
    )
    assert check_policy(text, rig.policies.facts())
    await rig.apply("name: writes\nsteps: [{id: a, tool: t.send, input: {to: '${input.to}'}}]")
    async with rig.worker():
        await neighbour.rest()
        async with neighbour.watching():
            published = await rig.http().put("/api/policy", content=text)
            assert published.status_code == 200, published.text[:500]
            run_id = await rig.start("writes", {"to": "ab" * 400_000})
            run = await rig.until(run_id, seconds=60)
        neighbour.notices_nothing()
    assert (run["status"], run["reason"]) == ("failed", "policy_denied")
    assert "took more than" in run["error"]["message"]


# ---------------------------------------------------------------- definitions


def waiting_for_all(steps: int) -> bytes:
    return orjson.dumps({
        "name": "wide", "steps": [
            {"id": f"s{n}", "tool": "t.ping", "needs": [f"s{m}" for m in range(n)]} for n in range(steps)
        ],
    })  # fmt: skip


async def test_450_steps_that_each_need_all_before(rig: Rig, neighbour: Neighbour) -> None:
    author = rig.http(await rig.key("author", Role.OPERATOR))
    async with rig.worker():
        await neighbour.rest()
        async with neighbour.watching():
            answer = await author.post("/api/workflows", content=waiting_for_all(450))
        neighbour.notices_nothing()
    assert (answer.status_code, answer.json()["code"]) == (422, "DEFINITION_INVALID")
    assert f"all `needs` together may have {MOST_NEEDS:,} entries, found 101,025" in answer.json()["detail"]


async def test_a_workflow_at_the_limit_is_applied_read_once_and_run(rig: Rig, neighbour: Neighbour) -> None:
    author = rig.http(await rig.key("author", Role.OPERATOR))
    async with rig.worker():
        await neighbour.rest()
        async with neighbour.watching():
            assert (await author.post("/api/workflows", content=waiting_for_all(140))).status_code == 201
            first = await author.post("/api/runs", json={"workflow": "wide"})
            assert first.status_code == 201
            began = time.process_time()
            assert (await author.post("/api/runs", json={"workflow": "wide"})).status_code == 201
            assert time.process_time() - began < 0.5, "the plan is not read again"
            run = await rig.until(first.json()["id"], seconds=60)
        neighbour.notices_nothing()
    assert run["status"] == "succeeded"


async def test_a_definition_that_takes_too_long_to_check_is_refused(
    rig: Rig, neighbour: Neighbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "cpu_seconds", 0.2)
    many: dict[str, Any] = {
        "id": "a",
        "tool": "t.send",
        "input": {f"k{n}": f"${{input.a{n} + 1}}" for n in range(20_000)},
    }
    async with rig.worker():
        await neighbour.rest()
        async with neighbour.watching():
            answer = await rig.http().post("/api/workflows", json={"name": "many", "steps": [many]})
        neighbour.notices_nothing()
    assert (answer.status_code, answer.json()["code"]) == (422, "COMPUTATION_STOPPED")


# ---------------------------------------------------------------- expressions


async def test_a_trigger_test_with_a_long_match_from_a_viewer_key(rig: Rig, neighbour: Neighbour) -> None:
    await rig.apply("name: target\nsteps: [{id: a, tool: t.ping}]")
    await rig.http().put("/api/secrets/hook", json={"value": "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz", "tools": ["*"]})
    trigger = {
        "name": "evil", "webhook": {"secret": "hook"}, "workflow": "target",
        "when": "payload.s.matches(payload.re) && payload.l.all(a, payload.l.all(b, b >= 0))",
    }  # fmt: skip
    applied = await rig.http().post("/api/triggers", json=trigger)
    assert applied.status_code == 201, applied.text
    viewer = rig.http(await rig.key("viewer", Role.VIEWER))
    many = list(range(9_000))
    async with rig.worker():
        await neighbour.rest()
        async with neighbour.watching():
            for pattern in ("(((a{30}){30}){30})", "(a|b|c){30}d", "(.*a){20}b"):
                payload = {"s": "a" * 200_000, "re": pattern, "l": many}
                tried = await viewer.post("/api/triggers/evil/test", json={"payload": payload})
                assert (tried.status_code, tried.json()["starts"]) == (200, False), tried.text
            payload = {"s": "a", "re": "a", "l": many}
            tried = await viewer.post("/api/triggers/evil/test", json={"payload": payload})
            assert (tried.status_code, tried.json()["outcome"]) == (200, "refused")
        neighbour.notices_nothing()


async def test_a_match_of_900_kilobytes_in_a_worker(rig: Rig, neighbour: Neighbour) -> None:
    match = "input.s.matches(input.re)"
    await rig.apply(f"name: evil\nsteps: [{{id: a, when: '{match} && {match} && {match}', tool: t.ping}}]")
    async with rig.worker() as worker:
        await neighbour.rest()
        async with neighbour.watching():
            me, ends = worker.me, []
            for pattern in ("(((a{30}){30}){30})", "(.*a){300}b", "^a+$"):
                run_id = await rig.start("evil", {"s": "a" * 900_000, "re": pattern})
                ping = neighbour.probes["a run of one step"]()
                ends.append((await asyncio.gather(rig.until(run_id, seconds=60), ping))[0])
        neighbour.notices_nothing()
        await _same_worker_served_all(rig, worker, me)
    assert [run["status"] for run in ends] == ["failed", "failed", "succeeded"]
    assert "not a valid regex" in ends[0]["error"]["message"]
    assert "matches too long a text" in ends[1]["error"]["message"]


async def _same_worker_served_all(rig: Rig, worker: Worker, me: WorkerIdentity) -> None:
    """The worker was never lost, no run of it was reclaimed, and it did the neighbour's runs between the attacks."""
    assert worker.me == me
    assert [dict(row) for row in await rig.sql("SELECT id, status FROM interlock.worker")] == [
        {"id": me.id, "status": "running"}
    ]
    assert await rig.sql("SELECT FROM interlock.journal_entry WHERE event = 'reclaim'") == []
    served = await rig.sql(
        "SELECT FROM interlock.run WHERE workflow = 'ping' AND status = 'succeeded' AND completed_at BETWEEN "
        "(SELECT min(created_at) FROM interlock.run WHERE workflow = 'evil') AND "
        "(SELECT max(completed_at) FROM interlock.run WHERE workflow = 'evil')"
    )
    assert served != []


async def test_an_expression_that_takes_too_long_fails_its_step_and_nothing_else(
    rig: Rig, neighbour: Neighbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "cpu_seconds", 1.0)
    nested = "${input.l.all(a, input.l.all(b, b.n >= 0))}"
    await rig.apply(
        f"name: evil\nsteps:\n- {{id: go, approval: {{summary: 'is it? {nested}'}}}}\n"
        f"- {{id: a, needs: [], tool: t.send, input: {{to: '{nested}'}}}}\n"
    )
    given = {"l": [{"n": n} for n in range(3500)]}
    async with rig.worker():
        await neighbour.rest()
        async with neighbour.watching():
            runs = [await rig.start("evil", given) for _ in range(3)]
            ends = [await rig.until(run_id, seconds=60) for run_id in runs]
        neighbour.notices_nothing()
    assert {(run["status"], run["reason"]) for run in ends} == {("failed", "terminal_error")}
    said = [run["error"]["message"] for run in ends]
    assert all("took more than 1 seconds" in each for each in said), said


async def test_what_takes_long_and_ends_gives_its_value_everywhere(rig: Rig) -> None:
    """A condition, a summary, a secret input and a reversal's input, over a list that is too long for an event loop."""
    sent: list[str] = []

    @rig.tool("t.pay", risk="low")
    async def pay(count: int, token: str) -> int:
        sent.append(f"{count} {token}")
        return count

    await rig.http().put("/api/secrets/token", json={"value": "hush-hush-hush", "tools": ["*"]})
    size = "${input.l.filter(n, n > 0).size()}"
    await rig.apply(
        "name: long\nsteps:\n"
        "- {id: ask, when: 'input.l.exists(n, n == 499)', approval: {summary: 'all "
        + size
        + "?'}}\n- {id: pay, tool: t.pay, input: {count: '"
        + size
        + "', token: '${secrets.token}'}}\n"
    )
    async with rig.worker():
        run_id = await rig.start("long", {"l": list(range(500))})
        await rig.until(run_id, "waiting_approval")
        (asked,) = (await rig.http().get("/api/approvals")).json()["items"]
        assert asked["summary"] == "all 499?"
        await rig.approve(run_id)
        assert (await rig.until(run_id))["status"] == "succeeded"
    assert sent == ["499 hush-hush-hush"]
