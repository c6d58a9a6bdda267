"""The inbox lists the approvals that the user can decide first, however many wait for others."""

import pytest
from tests.console.pages import SignIn, text_of
from tests.rig import Rig

from interlock.console import approvals
from interlock.engine.access.tenants import principal_of

SOON = "{name: soon, steps: [{id: ask, approval: {tier: high, expires_in: 1h, summary: 'own ${input.n}'}}]}"
LATE = "{name: late, steps: [{id: ask, approval: {tier: low, expires_in: 9h, summary: 'asked ${input.n}'}}]}"


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {"_SHOWN": 3, "_OTHERS": 2, "_LOOKED_AT": 2}.items():
        monkeypatch.setattr(approvals, name, number)


async def test_what_one_can_decide_is_not_hidden_behind_what_waits_for_others(rig: Rig, sign_in: SignIn) -> None:
    ada, vera = await sign_in("admin", name="ada"), await sign_in("viewer", name="vera")
    [row] = await rig.sql("SELECT api_key.*, 'default' AS tenant FROM interlock.api_key WHERE name = 'ada'")
    await rig.apply(SOON)
    await rig.apply(LATE)
    for n in range(5):
        await rig.start("soon", {"n": n}, who=principal_of(row))
    await rig.start("late", {"n": 1})
    page = text_of(await ada.get("/inbox"))
    assert "asked 1" in page and page.index("asked 1") < page.index("own 0")
    assert page.count("you asked for it") == 2
    assert "and 3 more that wait for others" in page
    assert text_of(await vera.get("/inbox")).count("You cannot decide this: your key's role is viewer") == 2

    for n in range(2, 6):
        await rig.start("late", {"n": n})
    page = await ada.get("/inbox")
    assert page.count('class="card ask low"') == 3
    assert "and 5 more, of which some wait for you" in text_of(page)
    assert page.count('class="card ask high"') == 2

    page = await vera.get("/inbox")
    assert (page.count('class="card ask'), "and 8 more that wait for others" in text_of(page)) == (2, True)


async def test_who_asked_cannot_approve_and_can_say_no(rig: Rig, sign_in: SignIn) -> None:
    ada = await sign_in("admin", name="ada")
    [row] = await rig.sql("SELECT api_key.*, 'default' AS tenant FROM interlock.api_key WHERE name = 'ada'")
    await rig.apply(SOON)
    run_id = await rig.start("soon", {"n": 1}, who=principal_of(row))
    page = await ada.get("/inbox")
    assert "You cannot approve this: you asked for it" in text_of(page)
    [asked] = await rig.sql("SELECT id FROM interlock.approval WHERE run_id = $1", run_id)
    assert f"/approvals/{asked['id']}/reject" in page and f"/approvals/{asked['id']}/approve" not in page
    await ada.post(f"/approvals/{asked['id']}/reject", reason="not needed any more")
    assert (await rig.run(run_id))["reason"] == "rejected"
