"""The page of one run: it can be looked at whatever it is at."""

from tests.console.pages import Browser, text_of
from tests.rig import Rig


async def test_a_run_that_waits_for_an_event_says_for_which(rig: Rig, admin: Browser) -> None:
    await rig.apply("name: w\nsteps: [{id: paid, wait: {event: bank.paid, correlation: ch_1, timeout: 2d}}]")
    run_id = await rig.start("w")
    assert "Waits for bank.paid of ch_1 ; times out in 48 h ." in text_of(await admin.get(f"/runs/{run_id}"))
    await rig.apply("name: w\nsteps: [{id: paid, wait: {event: bank.paid, correlation: 7}}]")
    assert "Waits for bank.paid of 7 ." in text_of(await admin.get(f"/runs/{await rig.start('w')}"))
