"""Every page and form of the console × rows of another workspace and of another tenant."""

import pytest

from interlock.wire import Role
from tests.matrix.pages import EXPECTED_PAGES, Console, routes
from tests.matrix.test_matrix import looking_first
from tests.matrix.world import furnish
from tests.rig import Rig


def test_every_page_has_an_expectation() -> None:
    for page in sorted(routes() - EXPECTED_PAGES.keys()):
        pytest.fail(f"{page} has no entry in tests/matrix/pages.py. Say there whose rows it reaches (see Reach).")
    assert EXPECTED_PAGES.keys() == routes(), "an entry of tests/matrix/pages.py names no page any more"


async def test_no_page_or_form_reaches_rows_of_another_workspace_or_tenant(rig: Rig) -> None:
    rig.mount_console()
    world = await furnish(rig)
    console = await Console(world, rig.http("")).sign_in(await rig.key("ada", Role.ADMIN, world.tenant_id, "blue"))
    for place in (world.neighbour, world.rival, world.own):
        for page in looking_first(EXPECTED_PAGES):
            if console.asks(page, place):
                await console.ask(page, place)
    assert not console.faults, "\n".join(console.faults)
