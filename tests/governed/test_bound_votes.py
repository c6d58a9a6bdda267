"""A vote is about the exact action that the approver read, on every way to decide.

security M2 (the digest was optional, and a batch, a run decision or a Slack command could not send it) and agents 9
(an edited call in a session took a third person).
"""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from tests.governed.conftest import Person, Shop
from tests.rig import Rig

POLICY = """
@id("reads") permit (principal, action in Action::"read", resource);
@id("mail") @decision("needs_approval") @tier("med") permit (principal, action == Action::"shop.mail", resource);
"""
WORKFLOW = """
name: mail
steps:
  - {id: send, tool: shop.mail, input: {to: "${input.to}", text: "${input.text}"}}
"""


@dataclass
class Edited:
    """A mail that one person proposed and another one edited, and a third person who votes."""

    shop: Shop
    run_id: UUID
    proposed: Any
    now: Any
    voter: Person

    @property
    def id(self) -> str:
        return str(self.now["id"])

    @property
    def digest(self) -> str:
        return str(self.now["action"]["digest"])

    @property
    def stale(self) -> str:
        return str(self.proposed["action"]["digest"])


@pytest.fixture
async def edited(shop: Shop, rig: Rig) -> Edited:
    @rig.tool("shop.mail", writes=True, risk="med", key="mail:{to}:{fields_hash}", target="{to}")
    async def mail(to: str, text: str) -> str:
        shop.done.append(f"mail {to}: {text}")
        return "sent"

    await rig.apply(WORKFLOW)
    assert (await shop.admin.publish(POLICY))[0] == 200
    run_id = await shop.start(shop.admin, "mail", to="ada", text="hi")
    proposed = await shop.held(run_id)
    status, now = await (await shop.person("quinn")).approve(proposed["id"], patch={"to": "attacker\nto: ada"})
    assert (status, now["status"], now["votes"]) == (200, "requested", [])
    return Edited(shop, run_id, proposed, now, await shop.person("pat"))


async def _single(edited: Edited, digest: str | None) -> Any:
    body = {"digest": digest} if digest else None
    return (await edited.voter.post(f"/api/approvals/{edited.id}/approve", body))[1]


async def _batch(edited: Edited, digest: str | None) -> Any:
    body: dict[str, Any] = {"ids": [edited.id], "decision": "approve"}
    if digest:
        body["digests"] = {edited.id: digest}
    [item] = (await edited.voter.post("/api/approvals/decide", body))[1]["items"]
    return item.get("problem", item)


async def _run(edited: Edited, digest: str | None) -> Any:
    body = {"digest": digest} if digest else None
    return (await edited.voter.post(f"/api/runs/{edited.run_id}/approve", body))[1]


async def _edit(edited: Edited, digest: str | None) -> Any:
    """The last editor of an action is responsible for all of it."""
    body: dict[str, Any] = {"patch": {"text": "hello"}}
    return (
        await edited.voter.post(f"/api/approvals/{edited.id}/approve", body | ({"digest": digest} if digest else {}))
    )[1]


@pytest.mark.parametrize("vote", [_single, _batch, _run, _edit])
async def test_a_yes_to_an_edited_action_needs_its_digest(edited: Edited, vote: Any) -> None:
    refused = await vote(edited, None)
    assert (refused["status"], refused["code"]) == (409, "ACTION_DIGEST_REQUIRED")
    assert refused["digest"] == edited.digest
    assert refused["edited_by"] == ["quinn"]
    assert refused["changes"] == [{"field": "to", "before": "ada", "after": "attacker\nto: ada"}]
    assert refused["edited_at"] == edited.now["edited_at"] is not None
    assert "quinn changed the action at " in refused["detail"]
    assert '(to: "ada" → "attacker\\nto: ada")' in refused["detail"], "no value can forge a second field"

    stale = await vote(edited, edited.stale)
    assert (stale["status"], stale["code"], stale["digest"]) == (409, "ACTION_DIGEST_MISMATCH", edited.digest)
    assert stale["changes"] == refused["changes"]
    question = await edited.shop.question(edited.run_id)
    assert (question["votes"], question["action"]) == ([], edited.now["action"])
    assert edited.shop.done == []

    said = await vote(edited, edited.digest)
    assert said.get("code") is None, said
    if vote is not _edit:
        assert (await edited.shop.ended(edited.run_id))["status"] == "succeeded"
        assert edited.shop.done == ["mail attacker\nto: ada: hi"]


@pytest.mark.parametrize("way", ["single", "batch"])
async def test_a_no_to_an_edited_action_needs_no_digest(edited: Edited, way: str) -> None:
    if way == "single":
        assert (await edited.voter.reject(edited.id))[0] == 200
    else:
        body = {"ids": [edited.id], "decision": "reject"}
        [item] = (await edited.voter.post("/api/approvals/decide", body))[1]["items"]
        assert item["ok"], item
    assert (await edited.shop.ended(edited.run_id))["status"] == "failed"
    assert edited.shop.done == []


async def test_a_batch_refuses_a_digest_for_an_approval_that_it_does_not_name(edited: Edited) -> None:
    other = "01990000-0000-7000-8000-000000000000"
    body = {"ids": [edited.id], "decision": "approve", "digests": {other: edited.digest}}
    status, refused = await edited.voter.post("/api/approvals/decide", body)
    assert (status, refused["code"]) == (422, "INVALID_REQUEST")
    assert other in refused["detail"]


async def test_a_run_is_approved_by_digest_only_where_the_digest_names_its_action(shop: Shop, rig: Rig) -> None:
    await rig.apply("""
name: gates
steps:
  - {id: one, approval: {summary: first}}
  - {id: two, approval: {summary: second}, needs: []}
""")
    run_id = await shop.start(shop.admin, "gates")
    asked = (await shop.admin.get("/api/approvals", run_id=str(run_id)))["items"]
    by_step = {question["step_key"]: question for question in asked}
    assert set(by_step) == {"one", "two"}
    voter = await shop.person("pat")
    status, _ = await voter.post(f"/api/runs/{run_id}/approve", {"digest": by_step["one"]["action"]["digest"]})
    assert status == 200
    assert (await shop.question(run_id))["step_key"] == "two"
    status, refused = await voter.post(f"/api/runs/{run_id}/approve", {"digest": by_step["one"]["action"]["digest"]})
    assert (status, refused["code"]) == (409, "ACTION_DIGEST_MISMATCH")


async def test_the_first_of_two_votes_says_how_many_are_missing(shop: Shop, rig: Rig) -> None:
    """new-user 14: the answer read like a rejection."""
    await rig.apply("name: both\nsteps: [{id: ask, approval: {two_person: true}}]")
    run_id = await shop.start(shop.admin, "both")
    question = await shop.question(run_id)
    assert (question["approvers_needed"], question["voted"]) == (2, False)
    one, two = await shop.person("one"), await shop.person("two")
    status, body = await one.approve(question["id"])
    assert (status, body["status"], body["approvers_needed"], body["voted"]) == (200, "requested", 1, True)
    status, body = await one.approve(question["id"])
    assert (status, body["code"]) == (409, "ALREADY_VOTED")
    assert body["detail"] == "Your vote is already recorded. One more approver is needed."
    body = await two.get(f"/api/approvals/{question['id']}")
    assert (body["approvers_needed"], body["voted"]) == (1, False)
    status, body = await two.approve(question["id"])
    assert (body["status"], body["approvers_needed"]) == ("approved", 0)
