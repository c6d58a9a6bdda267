"""A Slack user acts with a key only if the same person holds both; a Slack team belongs to one tenant (security H5)."""

from tests.integrations.people import TEAM, join, link, send, share, typed, waiting
from tests.rig import Rig


async def say(rig: Rig, text: str, user_id: str, team_id: str = TEAM) -> str:
    answer = await send(rig, "commands", typed(text, user_id) | {"team_id": team_id})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text"])


async def code_of(rig: Rig, key: str) -> str:
    answer = await rig.http(key).post("/api/slack/link-codes")
    assert answer.status_code == 201, answer.text
    return str(answer.json()["code"])


async def test_the_holder_of_a_key_links_their_own_slack_user(rig: Rig) -> None:
    key = await rig.key("ada", "approver")
    code = await code_of(rig, key)
    assert "act as *ada* (approver) in tenant default" in await say(rig, f"link {code.lower()}", "U1")
    _, approval = await waiting(rig)
    assert await say(rig, f"approve {approval['id']} {approval['digest']}", "U1") == "Approved."


async def test_a_code_works_once_and_for_ten_minutes(rig: Rig) -> None:
    key = await rig.key("ada", "approver")
    code = await code_of(rig, key)
    assert "act as" in await say(rig, f"link {code}", "U1")
    assert "SLACK_CODE_INVALID" in await say(rig, f"link {code}", "U2")
    late = await code_of(rig, key)
    rig.clock.advance(660)
    assert "SLACK_CODE_INVALID" in await say(rig, f"link {late}", "U2")
    assert "SLACK_CODE_INVALID" in await say(rig, "link AAAA-BBBB-CCCC-DDDD", "U2")


async def test_an_admin_cannot_link_a_slack_user_with_the_key_of_another_person(rig: Rig) -> None:
    """An admin mapped their own Slack user to another person's key, and the vote was recorded as that person's."""
    ada = await rig.person("ada", "approver")
    body = {"team_id": TEAM, "user_id": "UMALLORY", "key_id": str(ada.key_id)}
    assert (await rig.http().post("/api/slack/users", json=body)).status_code == 405
    assert await rig.sql("SELECT * FROM interlock.slack_user") == []


async def test_another_tenant_cannot_take_over_what_a_slack_user_types(rig: Rig) -> None:
    """Another tenant's admin mapped the victim, whose commands and secrets then went to the rival tenant."""
    await join(rig, "ada", "U1")
    rival = await rig.tenant("rival")
    code = await code_of(rig, await rig.key("spy", "admin", rival.tenant_id))
    said = await say(rig, f"link {code}", "U1")
    assert "SLACK_TEAM_OF_ANOTHER_TENANT" in said and "default" not in said
    assert "Nothing waits" in await say(rig, "approvals", "U1")


async def test_a_team_is_shared_only_if_admins_of_both_tenants_agree(rig: Rig) -> None:
    other = await rig.tenant("other")
    key = await rig.key("olga", "operator", other.tenant_id)
    admin, theirs = rig.http(), rig.http(await rig.key("boss", "admin", other.tenant_id))
    # They cannot take the team over without an offer, and an offer alone changes nothing.
    assert (await theirs.post(f"/api/slack/teams/{TEAM}/accept")).status_code == 404
    assert (await theirs.post(f"/api/slack/teams/{TEAM}/offers", json={"tenant": "other"})).status_code == 404
    assert (await admin.post(f"/api/slack/teams/{TEAM}/offers", json={"tenant": "other"})).status_code == 200
    assert "SLACK_TEAM_OF_ANOTHER_TENANT" in await say(rig, f"link {await code_of(rig, key)}", "U2")
    assert (await theirs.get("/api/slack/teams")).json()["items"] == [
        {"team_id": TEAM, "is_member": False, "tenants": []}
    ]
    joined = (await theirs.post(f"/api/slack/teams/{TEAM}/accept")).json()
    assert joined == {"team_id": TEAM, "is_member": True, "tenants": ["default", "other"]}
    assert "act as *olga*" in await say(rig, f"link {await code_of(rig, key)}", "U2")
    # After a tenant leaves, its people can no longer act from the team.
    assert (await theirs.delete(f"/api/slack/teams/{TEAM}")).status_code == 200
    assert "does not know you yet" in await say(rig, "approvals", "U2")


async def test_an_offer_does_not_tell_which_tenants_exist(rig: Rig) -> None:
    admin = rig.http()
    await rig.tenant("known")
    known = await admin.post(f"/api/slack/teams/{TEAM}/offers", json={"tenant": "known"})
    unknown = await admin.post("/api/slack/teams/T2/offers", json={"tenant": "unknown"})
    assert (known.status_code, unknown.status_code) == (200, 200)


async def test_the_installation_can_give_a_team_to_another_tenant(rig: Rig) -> None:
    other = await rig.tenant("other")
    await join(rig, "ada", "U1")
    await share(rig, other)
    assert (await rig.http().delete(f"/api/slack/teams/{TEAM}")).status_code == 200
    assert "does not know you yet" in await say(rig, "approvals", "U1")
    olga = await rig.person("olga", "operator", tenant_id=other.tenant_id)
    await link(rig, olga, "U2")
    assert "Nothing waits" in await say(rig, "approvals", "U2")


async def test_a_workspaces_admin_has_no_say_about_teams(rig: Rig) -> None:
    inside = rig.http(await rig.key("wes", "admin", workspace_id="blue"))
    assert (await inside.post(f"/api/slack/teams/{TEAM}/offers", json={"tenant": "x"})).status_code == 403
    assert (await inside.get("/api/slack/teams")).status_code == 403


async def test_a_user_unlinks_themselves(rig: Rig) -> None:
    await join(rig, "ada", "U1")
    assert "do not act as ada any more" in await say(rig, "unlink", "U1")
    assert "does not know you yet" in await say(rig, "approvals", "U1")


async def test_a_wrong_team_id_is_refused(rig: Rig) -> None:
    answer = await rig.http().post("/api/slack/teams/not a team/accept")
    assert answer.status_code == 422
