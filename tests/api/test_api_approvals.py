"""/api/approvals over HTTP: the permitted voters, the time limits, and the exact action of a vote."""

import asyncio
from typing import Any

import httpx2
import pytest
from tests.rig import Hold, Rig

from interlock.wire import Approval, Page, Problem

WORKFLOWS = {
    tier: "{name: TIER, steps: [{id: ask, approval: {tier: TIER, expires_in: 1h, summary: 'Pay ${input.n}'}}]}".replace(
        "TIER", tier
    )
    for tier in ("low", "med", "high")
} | {"both": "{name: both, steps: [{id: ask, approval: {tier: low, two_person: true}}]}"}


@pytest.fixture
async def asker(rig: Rig) -> httpx2.AsyncClient:
    for source in WORKFLOWS.values():
        await rig.apply(source)
    return rig.http(await rig.key("asker", "admin"))


@pytest.fixture
async def ann(rig: Rig) -> httpx2.AsyncClient:
    return rig.http(await rig.key("ann", "approver"))


@pytest.fixture
async def bob(rig: Rig) -> httpx2.AsyncClient:
    return rig.http(await rig.key("bob:ops", "approver"))


async def ask(http: httpx2.AsyncClient, workflow: str) -> dict[str, Any]:
    run = await http.post("/api/runs", json={"workflow": workflow, "input": {"n": 5}})
    assert run.json()["status"] == "waiting_approval", run.text
    page = (await http.get("/api/approvals", params={"run_id": run.json()["id"]})).json()
    [approval] = Page[Approval].model_validate(page).items
    return approval.model_dump(mode="json")


async def decide(http: httpx2.AsyncClient, approval: dict[str, Any], verb: str = "approve", **body: Any) -> Any:
    return await http.post(f"/api/approvals/{approval['id']}/{verb}", json=body or None)


def code(answer: httpx2.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = Problem.model_validate(answer.json())
    assert problem.status == status and problem.detail
    return problem.code


async def barred(http: httpx2.AsyncClient, approval: dict[str, Any]) -> tuple[str | None, bool]:
    shown = (await http.get(f"/api/approvals/{approval['id']}")).json()
    listed = (await http.get("/api/approvals", params={"run_id": approval["run_id"]})).json()["items"]
    assert [shown] == listed
    return shown["barred"], shown["may_reject"]


async def test_an_approval_says_why_whoever_looks_cannot_approve_it(
    rig: Rig, asker: httpx2.AsyncClient, ann: httpx2.AsyncClient
) -> None:
    low, high, both = [await ask(asker, workflow) for workflow in ("low", "high", "both")]
    assert await barred(asker, low) == await barred(ann, high) == await barred(ann, both) == (None, True)
    for own in (high, both):
        assert await barred(asker, own) == ("you asked for it, so another person must approve it", True)
        assert own["excluded"] == ["asker"]
    assert low["excluded"] == []
    assert (await decide(ann, both)).json()["barred"] == "Your vote is already recorded. One more approver is needed."
    assert (await decide(ann, low)).json()["barred"] is None and await barred(ann, low) == (None, False)
    low = await ask(asker, "low")
    role = "your key's role is viewer; deciding takes approver or admin"
    assert await barred(rig.http(await rig.key("vi", "viewer")), low) == (role, False)
    assert await barred(rig.http(await rig.key("bot", "agent")), low) == ("an agent never approves", False)


async def status_of(http: httpx2.AsyncClient, approval: dict[str, Any]) -> str:
    status: str = (await http.get(f"/api/runs/{approval['run_id']}")).json()["status"]
    return status


async def test_an_approval_says_what_is_asked_and_why(asker: httpx2.AsyncClient) -> None:
    approval = await ask(asker, "high")
    assert (approval["status"], approval["tier"], approval["two_person"]) == ("requested", "high", False)
    assert (approval["step_key"], approval["summary"], approval["votes"]) == ("ask", "Pay 5", [])
    assert approval["requested_by"] == "asker"
    assert approval["action"]["digest"] and approval["rationale"]["reason"]
    assert approval["action"]["fields"] == {"workflow": "high", "step": "ask", "summary": "Pay 5"}
    assert (await asker.get(f"/api/approvals/{approval['id']}")).json()["action"]["digest"] == (
        approval["action"]["digest"]
    )
    # A gate without a sentence is named by its step, and so is the action in the context of its transitions.
    unnamed = await ask(asker, "both")
    events = (await asker.get(f"/api/runs/{unnamed['run_id']}/events")).json()["items"]
    assert (unnamed["summary"], events[-1]["data"]["context"]["approval"]["action"]) == ("ask", "ask")


async def test_an_approval_moves_its_run_in_the_same_moment(asker: httpx2.AsyncClient, ann: httpx2.AsyncClient) -> None:
    approval = await ask(asker, "high")
    answer = await decide(ann, approval, reason="checked")
    decided = Approval.model_validate(answer.json())
    assert (decided.status, decided.resolved_at is not None) == ("approved", True)
    [vote] = decided.votes
    assert (vote.by, vote.decision, vote.reason) == ("ann", "approved", "checked")
    assert await status_of(asker, approval) == "succeeded"


async def test_a_rejection_fails_the_run(asker: httpx2.AsyncClient, ann: httpx2.AsyncClient) -> None:
    approval = await ask(asker, "med")
    assert (await decide(ann, approval, "reject", reason="too much")).json()["status"] == "rejected"
    run = (await asker.get(f"/api/runs/{approval['run_id']}")).json()
    assert (run["status"], run["reason"], run["error"]["message"]) == ("failed", "rejected", "too much")


async def test_the_same_vote_again_changes_nothing_and_another_comes_too_late(
    asker: httpx2.AsyncClient, ann: httpx2.AsyncClient, bob: httpx2.AsyncClient
) -> None:
    for verb in ("approve", "reject"):
        approval = await ask(asker, "med")
        first = (await decide(ann, approval, verb)).json()
        assert (await decide(ann, approval, verb)).json() == first
        assert code(await decide(bob, approval, verb), 409) == "APPROVAL_DECIDED"
        assert (await asker.get(f"/api/approvals/{approval['id']}")).json() == first
        assert len(first["votes"]) == 1


async def test_a_late_decision_is_refused_and_told_the_state(
    rig: Rig, asker: httpx2.AsyncClient, ann: httpx2.AsyncClient
) -> None:
    approved, rejected, canceled = [await ask(asker, "med") for _ in range(3)]
    await decide(ann, approved)
    await decide(ann, rejected, "reject")
    await asker.post(f"/api/runs/{canceled['run_id']}/cancel")
    for approval, verb, state in (
        (approved, "reject", "approved"),
        (rejected, "approve", "rejected"),
        (canceled, "approve", "canceled"),
        (canceled, "reject", "canceled"),
    ):
        answer = await decide(ann, approval, verb)
        assert code(answer, 409) == "APPROVAL_DECIDED"
        assert answer.json()["state"] == state


async def test_after_its_time_nobody_decides_even_before_the_sweep(
    rig: Rig, asker: httpx2.AsyncClient, ann: httpx2.AsyncClient
) -> None:
    rig.clock.freeze()
    approval = await ask(asker, "med")
    rig.clock.advance(3600)
    assert code(await decide(ann, approval), 409) == "APPROVAL_EXPIRED"
    await rig.sweep()
    answer = await decide(ann, approval)
    assert (code(answer, 409), answer.json()["state"]) == ("APPROVAL_EXPIRED", "expired")
    assert await status_of(asker, approval) == "failed"


async def test_a_decision_can_be_bound_to_what_was_looked_at(
    asker: httpx2.AsyncClient, ann: httpx2.AsyncClient
) -> None:
    approval, other = await ask(asker, "med"), await ask(asker, "med")
    assert approval["action"]["digest"] != other["action"]["digest"]  # one run, one action
    answer = await decide(ann, approval, digest=other["action"]["digest"])
    assert code(answer, 409) == "ACTION_DIGEST_MISMATCH"
    assert answer.json()["digest"] == approval["action"]["digest"]
    assert await status_of(asker, approval) == "waiting_approval"
    assert (await decide(ann, approval, digest=approval["action"]["digest"])).json()["status"] == "approved"


async def test_two_people_are_two_people(
    rig: Rig, asker: httpx2.AsyncClient, ann: httpx2.AsyncClient, bob: httpx2.AsyncClient
) -> None:
    approval = await ask(asker, "both")
    assert (await decide(ann, approval)).json()["status"] == "requested"
    assert await status_of(asker, approval) == "waiting_approval"
    assert code(await decide(ann, approval), 409) == "ALREADY_VOTED"
    decided = (await decide(bob, approval)).json()
    assert (decided["status"], [v["by"] for v in decided["votes"]]) == ("approved", ["ann", "bob:ops"])
    assert await status_of(asker, approval) == "succeeded"
    events = (await asker.get(f"/api/runs/{approval['run_id']}/events")).json()["items"]
    assert [e["type"] for e in events if e["type"].startswith("approval")] == [
        "approval_requested", "approval_vote", "approval_resolved",
    ]  # fmt: skip


async def test_one_no_is_enough_even_after_a_yes(
    asker: httpx2.AsyncClient, ann: httpx2.AsyncClient, bob: httpx2.AsyncClient
) -> None:
    approval = await ask(asker, "both")
    await decide(ann, approval)
    assert (await decide(bob, approval, "reject")).json()["status"] == "rejected"
    assert await status_of(asker, approval) == "failed"


async def test_a_person_may_take_back_their_yes_while_it_is_open(
    asker: httpx2.AsyncClient, ann: httpx2.AsyncClient
) -> None:
    approval = await ask(asker, "both")
    await decide(ann, approval)
    decided = (await decide(ann, approval, "reject")).json()
    assert decided["status"] == "rejected"
    assert [(v["by"], v["decision"]) for v in decided["votes"]] == [("ann", "rejected")]


async def test_two_votes_at_once_decide_once(
    rig: Rig, asker: httpx2.AsyncClient, ann: httpx2.AsyncClient, bob: httpx2.AsyncClient
) -> None:
    approval = await ask(asker, "both")
    answers = await asyncio.gather(*(decide(who, approval) for who in (ann, bob) for _ in range(4)))
    assert sorted({answer.status_code for answer in answers}) in ([200], [200, 409])
    assert await status_of(asker, approval) == "succeeded"
    lines = await rig.journal(approval["run_id"])
    assert lines.count("ask: waiting_approval -grant-> succeeded") == 1


@pytest.mark.parametrize("workflow", ["high", "both"])
async def test_who_asked_cannot_approve_it(asker: httpx2.AsyncClient, ann: httpx2.AsyncClient, workflow: str) -> None:
    approval = await ask(asker, workflow)
    assert code(await decide(asker, approval), 403) == "SELF_APPROVAL"
    assert code(await asker.post(f"/api/runs/{approval['run_id']}/approve"), 403) == "SELF_APPROVAL"
    assert await status_of(asker, approval) == "waiting_approval"
    # Requesters may always reject their own request.
    assert (await decide(asker, approval, "reject")).json()["status"] == "rejected"


@pytest.mark.parametrize("workflow", ["low", "med"])
async def test_who_asked_may_approve_what_is_not_high(asker: httpx2.AsyncClient, workflow: str) -> None:
    approval = await ask(asker, workflow)
    assert (await decide(asker, approval)).json()["status"] == "approved"


async def test_the_retry_of_a_run_is_asked_for_by_who_retried_it(
    rig: Rig, asker: httpx2.AsyncClient, ann: httpx2.AsyncClient
) -> None:
    approval = await ask(asker, "high")
    await decide(ann, approval, "reject")
    retrier = rig.http(await rig.key("retrier", "admin"))
    again = (await retrier.post(f"/api/runs/{approval['run_id']}/retry")).json()
    [second] = (await asker.get("/api/approvals", params={"run_id": again["id"]})).json()["items"]
    assert code(await decide(retrier, second), 403) == "SELF_APPROVAL"


async def test_a_vote_that_is_not_enough_reaches_a_run_in_flight(
    rig: Rig, asker: httpx2.AsyncClient, ann: httpx2.AsyncClient, bob: httpx2.AsyncClient
) -> None:
    hold = Hold()

    @rig.tool("t.hold")
    async def stay() -> None:
        await hold()

    await rig.apply(
        "{name: beside, steps: [{id: a, needs: [], tool: t.hold}, {id: ask, needs: [], approval: {two_person: true}}]}"
    )
    run = (await asker.post("/api/runs", json={"workflow": "beside"})).json()
    async with rig.worker():
        await hold.inside()
        await rig.until_journal(run["id"], "ask: pending -open-> waiting_approval")
        [approval] = (await asker.get("/api/approvals", params={"run_id": run["id"]})).json()["items"]
        await decide(ann, approval)
        assert (await decide(bob, approval)).json()["status"] == "approved"
        await rig.until_journal(run["id"], "ask: waiting_approval -grant-> succeeded")
        hold.release.set()
        assert (await rig.until(run["id"]))["status"] == "succeeded"


async def test_approvals_are_listed_newest_first_page_by_page(asker: httpx2.AsyncClient) -> None:
    asked = [(await ask(asker, "low"))["id"] for _ in range(7)]
    await decide(asker, {"id": asked[0]})
    first = (await asker.get("/api/approvals", params={"status": "requested", "limit": 4})).json()
    assert [a["id"] for a in first["items"]] == asked[:2:-1]
    params = {"status": "requested", "limit": 4, "cursor": first["next_cursor"]}
    second = (await asker.get("/api/approvals", params=params)).json()
    assert ([a["id"] for a in second["items"]], second["next_cursor"]) == ([asked[2], asked[1]], None)
    approved = (await asker.get("/api/approvals", params={"status": "approved"})).json()["items"]
    assert [(a["id"], len(a["votes"])) for a in approved] == [(asked[0], 1)]
