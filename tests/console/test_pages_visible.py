"""Text for approvers shows control, bidi and zero-width characters (security review, forged values).

Finding 13 too: the badge counts the approvals that a key may decide.
"""

import re

import pytest
from tests.console.pages import SignIn, text_of
from tests.rig import Rig

from interlock.console import badge
from interlock.console.filters import shown, source, typed
from interlock.wire import Role

HIDDEN = "100\u202e0.1\u200b\u2066 CHF\x1b[2K"
SEEN = "100\\u202e0.1\\u200b\\u2066 CHF\\x1b[2K"
INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\x00-\x08\x0b-\x1f\x7f]")


async def test_no_page_shows_a_character_that_cannot_be_seen(rig: Rig, sign_in: SignIn) -> None:
    asked: dict[str, str] = {"amount": HIDDEN, "to": f"ann{HIDDEN}"}

    @rig.tool("shop.pay", writes=True, risk="med", target="{to}")
    async def pay(amount: str, to: str) -> None: ...

    await rig.apply(
        "{name: pay, steps: [{id: pay, tool: shop.pay, input: {amount: '${input.amount}', to: '${input.to}'}}]}"
    )
    await rig.apply("{name: gate, steps: [{id: ask, approval: {tier: low, summary: 'pay ${input.amount}'}}]}")
    async with rig.worker():
        who = await rig.person(f"mira{HIDDEN}", Role.OPERATOR)
        run_id = await rig.start("pay", asked, who, trigger={"source": "api", "ref": HIDDEN})
        await rig.until(run_id, "waiting_approval")
        gate = await rig.start("gate", asked, who)
        ada = await sign_in("admin", name="ada")
        [approval] = (await rig.http().get(f"/api/approvals?run_id={run_id}")).json()["items"]
        pages = ["/inbox", f"/runs/{run_id}", f"/approvals/{approval['id']}", "/runs", f"/runs/{gate}"]
        for path in pages:
            page = await ada.get(path)
            assert INVISIBLE.search(page) is None, (path, INVISIBLE.search(page))
        assert SEEN in text_of(await ada.get("/inbox")) and f"on ann{SEEN}" in text_of(await ada.get("/inbox"))
        await ada.post(f"/approvals/{approval['id']}/reject", reason=f"no{HIDDEN}")
        await rig.until(run_id, "failed")
        for path in pages:
            assert INVISIBLE.search(await ada.get(path)) is None, path
        assert f"no{SEEN}" in text_of(await ada.get(f"/approvals/{approval['id']}"))


async def test_the_script_gets_an_answer_without_invisible_characters(rig: Rig, sign_in: SignIn) -> None:
    await rig.apply("{name: gate, steps: [{id: ask, approval: {tier: low, summary: 'pay ${input.amount}'}}]}")
    run_id = await rig.start("gate", {"amount": HIDDEN}, await rig.person("mira", Role.OPERATOR))
    ada = await sign_in("admin", name="ada")
    [approval] = (await rig.http().get(f"/api/approvals?run_id={run_id}")).json()["items"]
    path, headers = f"/approvals/{approval['id']}/approve", {"Accept": "application/json"}
    refused = await ada.client.post(path, data={"csrf": ada.csrf, "digest": "0" * 64}, headers=headers)
    assert (refused.status_code, refused.headers["content-type"]) == (409, "application/json")
    assert refused.json()["detail"]
    answer = await ada.client.post(path, data={"csrf": ada.csrf}, headers=headers)
    assert answer.json() == {"message": f"Approved: pay {SEEN}", "status": "approved"}
    ada.client.cookies.clear()
    signed_out = await ada.client.post(path, data={"csrf": ada.csrf}, headers=headers)
    assert (signed_out.status_code, "sign-in has ended" in signed_out.json()["detail"]) == (401, True)


def test_what_is_typed_comes_back_as_it_was_and_sources_keep_their_tabs() -> None:
    assert shown(HIDDEN) == SEEN and shown("a\nb") == "a\nb" and shown("a\tb") == "a\\tb"
    assert typed(f"<{HIDDEN}") == f"&lt;{HIDDEN}"
    assert source("a\tb\u202e\n<") == "a\tb\\u202e\n&lt;"


async def test_the_badge_counts_what_this_key_may_approve(
    rig: Rig, sign_in: SignIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(page: str) -> str:
        found = re.search(r'id="badge" data-part( hidden)?>([^<]*)<', page)
        assert found is not None
        return found[2]

    ada, bob, vera = await sign_in("admin", name="ada"), await sign_in("approver", name="bob"), await sign_in("viewer")
    await rig.apply("{name: pair, steps: [{id: ask, approval: {tier: low, two_person: true, summary: both}}]}")
    mira = await rig.person("mira", Role.OPERATOR)
    runs = [await rig.start("pair", {}, mira) for _ in range(5)]
    assert [count(await each.get("/runs")) for each in (ada, bob, vera)] == ["5", "5", ""]
    [approval] = (await rig.http().get(f"/api/approvals?run_id={runs[0]}")).json()["items"]
    await bob.post(f"/approvals/{approval['id']}/approve")
    assert [count(await each.get("/runs")) for each in (ada, bob)] == ["5", "4"]
    for name, number in {"_MOST": 4, "_WINDOW": 2}.items():
        monkeypatch.setattr(badge, name, number)
    assert count(await ada.get("/runs")) == "3+"
    monkeypatch.setattr(badge, "_MOST", 9)
    assert count(await bob.get("/runs")) == "4"
