"""A transaction needs one connection: waiting for a second could deadlock with other transactions that do the same."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.rig import Rig

from interlock.engine.approvals import approvals
from interlock.engine.policies import Policies
from interlock.engine.runs import runs
from interlock.engine.workflows import Plans
from interlock.store.pool import Database

GATED = "{name: gated, steps: [{id: ask, approval: {summary: Shall we?}}, {id: a, tool: t.write, input: {value: 1}}]}"
HELD = "{name: held, steps: [{id: a, tool: t.write, input: {value: 1}}]}"


@pytest.fixture
async def narrow(rig: Rig) -> AsyncIterator[Database]:
    """The same database for a process with a single connection and empty caches."""
    database = await Database(rig.database.url, rig.settings, clock=rig.clock, size=1).open()
    yield database
    await database.close()


async def test_a_decision_and_a_cancel_read_the_definition_on_their_own(rig: Rig, narrow: Database) -> None:
    await rig.apply(GATED)
    decided, canceled = await rig.start("gated"), await rig.start("gated")
    async with asyncio.timeout(5):
        await narrow.run_in_transaction(lambda tx: approvals.approve_run(tx, Plans(narrow), rig.admin, decided))
        await narrow.run_in_transaction(lambda tx: runs.cancel(tx, Plans(narrow), rig.admin, canceled))
    assert (await rig.run(decided))["step"]["ask"]["status"] == "succeeded"
    assert (await rig.run(canceled))["status"] == "canceled"


async def test_an_edit_reads_the_policy_on_its_own(rig: Rig, narrow: Database) -> None:
    @rig.tool("t.write", writes=True, risk="med")
    async def write(value: int) -> int:
        return value

    await rig.apply(HELD)
    run_id = await rig.start("held")
    await rig.work_until(run_id, "waiting_approval")
    [question] = await approvals.list_approvals(rig.database, rig.admin, run_id=run_id)
    editor = await rig.person("editor", "approver")
    policies = Policies(narrow, rig.tools)
    async with asyncio.timeout(5):
        edited = await narrow.run_in_transaction(
            lambda tx: approvals.edit(tx, Plans(narrow), policies, editor, question["id"], patch={"value": 2})
        )
    assert edited["edited_by"] == [editor.actor]
