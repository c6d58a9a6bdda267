"""The page of the audit log: newest first, the sealed position, and whether the log verifies."""

import re

from tests.console.pages import HOSTILE, Browser, SignIn, text_of
from tests.rig import Rig

from interlock.ids import uuid7
from interlock.store.queries import STATEMENTS

ASK = "name: ask\nsteps: [{id: ok, approval: {tier: low}}]"


async def runs_of(rig: Rig, count: int) -> list[str]:
    await rig.apply(ASK)
    made = []
    for _ in range(count):
        run = await rig.start("ask")
        await rig.cancel(run)
        made.append(str(run))
    await rig.prove()
    return made


def positions(page: str) -> list[int]:
    return [
        int(found.replace(",", "")) for found in re.findall(r'<td class="num" data-label="no.">([0-9,]+)</td>', page)
    ]


async def test_without_entries_the_page_says_what_will_be_here(admin: Browser) -> None:
    page = text_of(await admin.get("/audit"))
    assert "Nothing is sealed yet" in page and "Last checkpoint none yet" in page


async def test_entries_are_listed_newest_first_with_the_state_of_the_chain(rig: Rig, viewer: Browser) -> None:
    one, two = await runs_of(rig, 2)
    page = await viewer.get("/audit")
    [last] = await rig.sql("SELECT max(position) AS position FROM interlock.audit_link")
    assert positions(page) == list(range(last["position"], 0, -1))
    [checkpoint] = await rig.sql("SELECT * FROM interlock.checkpoint ORDER BY number DESC LIMIT 1")
    assert checkpoint["key_id"] in page and checkpoint["head"].hex() in page
    assert one in page and two in page and "run completed" in page
    await rig.start("ask")
    waiting = await rig.database.value("count_unsealed", rig.admin.tenant_id)
    assert waiting and f"Waiting for the sealer {waiting} " in text_of(await viewer.get("/audit"))


async def test_entries_of_one_run_are_found(rig: Rig, viewer: Browser) -> None:
    one, two = await runs_of(rig, 2)
    page = await viewer.get(f"/audit?run={one}")
    assert f"/runs/{one}" in page and f"/runs/{two}" not in page
    assert "no run" in await viewer.get("/audit?run=nonsense", 404)
    assert "no run" in await viewer.get(f"/audit?run={uuid7()}", 404)
    fresh = await rig.start("ask")
    assert "Nothing of this run is sealed yet" in await viewer.get(f"/audit?run={fresh}")


async def test_the_chain_is_verified_and_a_break_is_named(rig: Rig, viewer: Browser) -> None:
    one, _ = await runs_of(rig, 2)
    assert "The chain holds." in await viewer.post("/audit/verify")
    async with rig.database.pool.acquire() as connection, connection.transaction():
        await connection.execute("ALTER TABLE interlock.journal_entry DISABLE TRIGGER USER")
        await connection.execute(
            "UPDATE interlock.journal_entry SET actor = 'nobody' WHERE run_id = $1 AND seq = 2", one
        )
        await connection.execute("ALTER TABLE interlock.journal_entry ENABLE TRIGGER USER")
    page = text_of(await viewer.post("/audit/verify"))
    assert "The chain is broken." in page and f"run {one} , entry 2" in page
    bare = await viewer.client.post("/audit/verify", data={})
    assert bare.status_code == 403


async def test_a_key_of_a_workspace_sees_entries_of_its_own_runs_only(rig: Rig, sign_in: SignIn) -> None:
    [foreign] = await runs_of(rig, 1)
    neighbour = await sign_in("viewer", workspace_id="east")
    page = await neighbour.get("/audit")
    assert "The chain is of all workspaces" in page and foreign not in page
    await neighbour.get(f"/audit?run={foreign}", 404)
    own = await rig.start("ask")
    await rig.sql("UPDATE interlock.run SET workspace_id = 'east' WHERE id = $1", own)
    await rig.prove()
    assert f"/runs/{own}" in await neighbour.get(f"/audit?run={own}")


async def test_another_tenant_sees_nothing(rig: Rig, sign_in: SignIn) -> None:
    [foreign] = await runs_of(rig, 1)
    other = await rig.tenant("other")
    stranger = await sign_in(tenant_id=other.tenant_id)
    page = await stranger.get("/audit")
    assert foreign not in page and "Nothing is sealed yet" in page
    await stranger.get(f"/audit?run={foreign}", 404)


async def test_pages_are_turned_by_position_and_stay_small(rig: Rig, admin: Browser) -> None:
    await runs_of(rig, 1)
    tenant = rig.admin.tenant_id
    [last] = await rig.sql("SELECT max(position) AS position FROM interlock.audit_link")
    # As after retention: the log contains the entries, the journal does not. One entry has hostile names.
    await rig.sql(
        "INSERT INTO interlock.audit_link (tenant_id, position, run_id, seq, link)"
        " SELECT $1, $2 + n, gen_random_uuid(), 1, sha256('x') FROM generate_series(1, 250) AS n",
        tenant, last["position"],
    )  # fmt: skip
    fresh = await rig.start("ask")
    await rig.sql(
        "INSERT INTO interlock.journal_entry (run_id, seq, tenant_id, at, type, token, actor, step) "
        "VALUES ($1, 1000, $2, now(), 'orphan_detected', 7, $3, $3)", fresh, tenant, HOSTILE,
    )  # fmt: skip
    await rig.sql(
        "INSERT INTO interlock.audit_link (tenant_id, position, run_id, seq, link)"
        " VALUES ($1, $2 + 251, $3, 1000, sha256('y'))",
        tenant, last["position"], fresh,
    )  # fmt: skip
    seen: list[int] = []
    path: str | None = "/audit"
    while path:
        page = await admin.get(path)
        seen += positions(page)
        following = re.search(r'href="(/audit\?[^"]*cursor=[^"]+)"', page)
        path = following[1].replace("&amp;", "&") if following else None
    assert seen == list(range(last["position"] + 251, 0, -1))
    assert "no longer in the journal" in await admin.get("/audit")
    assert "not one of ours" in await admin.get("/audit?cursor=eHg", 422)


async def test_the_list_walks_its_index(rig: Rig) -> None:
    await rig.sql(
        "INSERT INTO interlock.audit_link (tenant_id, position, run_id, seq, link)"
        " SELECT $1, n, gen_random_uuid(), 1, sha256('x') FROM generate_series(1, 20000) AS n",
        rig.admin.tenant_id,
    )  # fmt: skip
    await rig.sql("ANALYZE interlock.audit_link")
    rows = await rig.sql("EXPLAIN " + STATEMENTS["newest_sealed"].text, rig.admin.tenant_id, 15000, 101)
    plan = "\n".join(row[0] for row in rows)
    assert "Index Scan Backward using audit_link_pkey" in plan and "Seq Scan on audit_link" not in plan
