"""The policy page: users can try another policy, and publish it only after they have seen its effect."""

import re
from html import unescape
from typing import Any

import pytest
from tests.console.pages import HOSTILE, Browser, SignIn, text_of
from tests.rig import Rig

from interlock.engine import policies
from interlock.policy.policy import DEFAULT_POLICY, compile_policy

STRICT = DEFAULT_POLICY + '\n@id("no-mail")\nforbid (principal, action == Action::"mail.send", resource);\n'
NOTIFY = "name: notify\nsteps: [{id: send, tool: mail.send, input: {to: '${input.to}'}}]"


@pytest.fixture(autouse=True)
def tools(rig: Rig) -> None:
    @rig.tool("mail.send", writes=True, risk="low", target="{to}")
    async def send(to: str) -> dict[str, Any]:
        """Send a mail."""
        return {}

    @rig.tool("shop.look")
    async def look(charge: str) -> dict[str, Any]:
        return {}


async def publish(rig: Rig, text: str, who: Any = None) -> None:
    compiled = compile_policy(text, rig.policies.facts())
    await rig.database.run_in_transaction(lambda tx: policies.publish(tx, who or rig.admin, text, compiled.digest))


async def versions(rig: Rig) -> list[int]:
    return [row["version"] for row in await rig.sql("SELECT version FROM interlock.policy ORDER BY version")]


def proof_in(page: str) -> str | None:
    found = re.search(r'name="tried" value="([0-9a-f]{64})"', page)
    return found[1] if found else None


async def test_the_policy_in_force_is_shown_with_who_and_when(rig: Rig, admin: Browser, viewer: Browser) -> None:
    page = await admin.get("/policy")
    assert "Nobody has published one" in page and "low-writes" in page and 'name="text"' in page
    await publish(rig, STRICT)
    page = await admin.get("/policy")
    assert "published by admin" in text_of(page) and "no-mail" in page
    [row] = await rig.sql("SELECT digest FROM interlock.policy")
    assert row["digest"] in page
    reading = await viewer.get("/policy")
    assert "no-mail" in reading and 'name="text"' not in reading and "takes an admin" in reading


async def test_mistakes_are_shown_with_their_lines(admin: Browser) -> None:
    wrong = DEFAULT_POLICY.replace('@tier("med")', '@teir("med")')
    line = wrong[: wrong.index("@teir")].count("\n") + 1
    page = await admin.post("/policy", 422, do="check", edits="yes", text=wrong.replace("\n", "\r\n"))
    assert f"line {line} medium-writes @teir: no such annotation; did you mean `tier`?" in text_of(page)
    assert wrong in unescape(page)  # the user's input is kept
    assert "no mistakes" in text_of(await admin.post("/policy", do="check", edits="yes", text=DEFAULT_POLICY))
    # An emptied text is an empty policy, not the one in force.
    assert "an empty policy denies everything" in await admin.post("/policy", 422, do="check", edits="yes", text="")


async def test_an_action_is_evaluated_by_the_text_or_by_the_policy_in_force(admin: Browser, viewer: Browser) -> None:
    asked = {"do": "evaluate", "tool": "mail.send", "input": '{"to": "ada"}', "role": "operator", "hour": "3"}
    page = text_of(await admin.post("/policy", edits="yes", text=STRICT, **asked))
    assert "deny" in page and "no-mail" in page and "the text above" in page
    page = text_of(await viewer.post("/policy", **asked))
    assert "allow" in page and "low-writes" in page and "the policy in force" in page
    ops = '@id("ops") permit (principal in Group::"ops", action, resource);'
    for groups, answer in (("dba, ops", "allow"), ("dba", "deny")):
        page = text_of(await admin.post("/policy", edits="yes", text=ops, groups=groups, **asked))
        assert f"Evaluate {answer}" in page, page
    for wrong, says in (
        ({"input": "{"}, "not JSON"), ({"input": "{}"}, "to: Field required"), ({"hour": "77"}, "from 0 to 23"),
        ({"tool": "mail.x"}, "no tool mail.x"), ({"role": "king"}, "role"), ({"input": "[]"}, "input"),
    ):  # fmt: skip
        page = await viewer.post("/policy", 422, **{**asked, **wrong})
        assert says in text_of(page)


async def test_cases_are_run_against_the_text(admin: Browser) -> None:
    cases = "- {name: nobody mails, tool: mail.send, input: {to: x}, expect: deny}\n- {tool: shop.look, expect: deny}\n"
    page = text_of(await admin.post("/policy", do="test", edits="yes", text=STRICT, cases=cases))
    assert "1 of 2 pass" in page and "fail case 2 expected deny; it says allow" in page
    page = text_of(await admin.post("/policy", 422, do="test", edits="yes", text=STRICT, cases="- {tool: mail.sent}"))
    assert "no tool is called `mail.sent`; did you mean `mail.send`?" in page
    assert "write cases first" in await admin.post("/policy", 422, do="test", edits="yes", text=STRICT)


async def test_a_policy_is_published_after_a_backtest_of_exactly_its_text(rig: Rig, admin: Browser) -> None:
    await rig.apply(NOTIFY)
    await rig.work_until(await rig.start("notify", {"to": "ada"}), "succeeded")
    page = await admin.post("/policy", do="backtest", edits="yes", text=STRICT, over="0")
    text = text_of(page)
    assert "1 of 1 recorded decisions would have been others" in text
    assert "allow" in text and "deny" in text and "forbidden by no-mail" in text
    assert '<span class="add">+@id(&#34;no-mail&#34;)</span>' in page
    proof = proof_in(page)
    assert proof is not None and "Publish version 1" in page
    # With one changed character, without a proof, or with a proof of another text, the server publishes nothing.
    form = {"do": "publish", "edits": "yes", "over": "0"}
    for wrong in (
        {"text": STRICT + " ", "tried": proof}, {"text": STRICT}, {"text": STRICT, "tried": "0" * 64},
        {"text": STRICT, "tried": admin.csrf},
    ):  # fmt: skip
        assert "was not backtested" in text_of(await admin.post("/policy", 422, **form, **wrong))
    assert await versions(rig) == []
    assert "Version 1 is in force." in await admin.post("/policy", **form, text=STRICT, tried=proof)
    assert await versions(rig) == [1]
    [row] = await rig.sql("SELECT text FROM interlock.policy")
    assert row["text"] == STRICT
    assert (await rig.policies.current(rig.admin.tenant_id)).digest is not None


async def test_a_policy_that_lets_more_pass_says_so_and_is_published_only_by_the_button_that_says_so(
    rig: Rig, admin: Browser
) -> None:
    await publish(rig, STRICT)
    form = {"edits": "yes", "over": "1", "text": DEFAULT_POLICY}
    page = await admin.post("/policy", do="backtest", **form)
    assert "It lets more pass" in text_of(page) and "mail.send" in page
    assert "Publish version 2, which lets more pass" in page and 'value="publish"' not in page
    proof = proof_in(page)
    assert proof is not None
    refused = await admin.post("/policy", 422, do="publish", tried=proof, **form)
    assert "was not backtested" in text_of(refused) and await versions(rig) == [1]
    assert "Version 2 is in force." in await admin.post("/policy", do="publish-looser", tried=proof, **form)


async def test_a_backtest_shows_every_change_in_what_is_asked_of_approvers(rig: Rig, admin: Browser) -> None:
    """new-user 3: a rule that asked less of approvers looked as before."""
    asks = '@id("mail") @decision("needs_approval") {} permit (principal, action, resource);'
    await publish(rig, asks.format('@approvers("ops") @reason_required("true") @expires_in("2h")'))
    await rig.apply(NOTIFY)
    await rig.work_until(await rig.start("notify", {"to": "ada"}), "waiting_approval")
    text = asks.format('@approvers("ops") @expires_in("90m") @escalate_to("boss") @escalate_after("10m")')
    page = text_of(await admin.post("/policy", do="backtest", edits="yes", text=text, over="1"))
    assert "needs approval low by ops with a reason within 2h" in page
    assert "needs approval low by ops within 1h30m then by boss after 10m" in page


async def test_a_proof_is_of_one_session(rig: Rig, sign_in: SignIn) -> None:
    one, two = await sign_in("admin"), await sign_in("admin", name="bob")
    proof = proof_in(await one.post("/policy", do="backtest", edits="yes", text=STRICT))
    page = await two.post("/policy", 422, do="publish", edits="yes", text=STRICT, tried=proof)
    assert "was not backtested" in text_of(page)
    assert await versions(rig) == []


async def test_what_was_published_meanwhile_is_not_overwritten(rig: Rig, admin: Browser) -> None:
    proof = proof_in(await admin.post("/policy", do="backtest", edits="yes", text=STRICT, over="0"))
    await publish(rig, DEFAULT_POLICY)
    page = await admin.post("/policy", 422, do="publish", edits="yes", text=STRICT, tried=proof, over="0")
    assert "another version was published meanwhile" in text_of(page)
    assert "no-mail" in page and 'name="over" value="1"' in page  # the page keeps the user's text, over the new version
    assert await versions(rig) == [1]


async def test_of_two_who_publish_at_the_same_moment_one_is_told(
    rig: Rig, admin: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = proof_in(await admin.post("/policy", do="backtest", edits="yes", text=STRICT))
    command = rig.database.run_in_transaction

    async def just_before(work: Any, *options: Any) -> Any:
        monkeypatch.undo()
        await publish(rig, DEFAULT_POLICY)
        return await command(work, *options)

    monkeypatch.setattr(rig.database, "run_in_transaction", just_before)
    page = await admin.post("/policy", 422, do="publish", edits="yes", text=STRICT, tried=proof)
    assert "another version was published meanwhile" in text_of(page)
    assert await versions(rig) == [1]


async def test_history_is_shown_with_what_changed(rig: Rig, admin: Browser) -> None:
    await publish(rig, STRICT)
    await publish(rig, STRICT.replace("no-mail", "never-mail"))
    assert 'href="/policy?version=1"' in await admin.get("/policy")
    page = await admin.get("/policy?version=2")
    assert "From version 1 to 2" in page and '<span class="add">+@id(&#34;never-mail&#34;)</span>' in page
    page = await admin.get("/policy?version=2&against=0")
    assert "From version 0 to 2" in page
    assert "no version 9" in await admin.get("/policy?version=9", 404)


async def test_a_viewer_cannot_publish(rig: Rig, viewer: Browser, sign_in: SignIn) -> None:
    for who in (viewer, await sign_in("operator"), await sign_in("approver")):
        page = await who.get("/policy")
        assert 'value="publish"' not in page and 'value="backtest"' not in page
        await who.refused("/policy", do="publish", edits="yes", text=STRICT)
    bare = await viewer.client.post("/policy", data={"do": "check"})
    assert bare.status_code == 403
    assert await versions(rig) == []


async def test_an_admin_of_a_workspace_cannot_publish(rig: Rig, sign_in: SignIn) -> None:
    eva = await sign_in(workspace_id="east", name="eva")
    page = await eva.post("/policy", do="backtest", edits="yes", text=STRICT)
    assert 'value="backtest"' in page and 'value="publish"' not in page
    await eva.refused("/policy", do="publish", edits="yes", text=STRICT, over="0", tried=proof_in(page))
    assert await versions(rig) == []


async def test_a_backtest_is_of_ones_own_tenant_and_workspace(rig: Rig, sign_in: SignIn) -> None:
    await rig.apply(NOTIFY)
    await rig.work_until(await rig.start("notify", {"to": "mira@shop"}), "succeeded")
    other = await rig.tenant("other")
    for stranger in (await sign_in(tenant_id=other.tenant_id), await sign_in(workspace_id="east", name="eva")):
        page = await stranger.post("/policy", do="backtest", edits="yes", text=STRICT)
        assert "Nothing was decided yet" in page and "mira@shop" not in page
    await publish(rig, STRICT)
    stranger = await sign_in(tenant_id=other.tenant_id)
    assert "no-mail" not in await stranger.get("/policy")
    await stranger.get("/policy?version=1", 404)


async def test_pages_stay_small_and_harmless(rig: Rig, admin: Browser) -> None:
    rules = "".join(
        f'@id("r{n}") @reason("{HOSTILE} & {HOSTILE}") forbid (principal, action, resource) when {{ false }};\n'
        for n in range(900)
    )
    await publish(rig, rules)
    page = await admin.get("/policy")
    assert "too long to be edited here" in page and "more characters" in page
    await publish(rig, DEFAULT_POLICY)
    await admin.get("/policy?version=2")
    await admin.get("/policy?version=1")
    await admin.post("/policy", 422, do="check", edits="yes", text=HOSTILE)
    page = await admin.post(
        "/policy", 422, do="evaluate", edits="yes", text=DEFAULT_POLICY, tool=HOSTILE, input=HOSTILE, role=HOSTILE,
        hour=HOSTILE, cases=HOSTILE,
    )  # fmt: skip
    assert HOSTILE in unescape(page)
    await admin.get(f"/policy?tool={HOSTILE}")
