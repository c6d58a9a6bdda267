"""Every page, light and dark, on a desktop and on a phone. `make pictures` keeps some for the README and the guides."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.browser.conftest import Site

from interlock.definition.agent import parse_agent
from interlock.engine import policies, workflows
from interlock.engine.ingress import schedules
from interlock.errors import Retryable
from interlock.policy.policy import compile_policy
from interlock.tools import Context
from interlock.wire import NewSchedule, Role

IMAGES = Path(__file__).parents[2] / "docs" / "images"
KEPT = {"inbox", "inbox-dark", "inbox-phone", "run", "session", "policy", "usage"}
DESK, PHONE = {"width": 1280, "height": 860}, {"width": 360, "height": 740}

REFUND = """
name: refund
steps:
  - id: find_charge
    tool: shop.find_charge
    input: {charge: "${input.charge}"}
  - id: ask_bank
    tool: bank.status
    needs: [find_charge]
    input: {charge: "${input.charge}"}
    retry: {max_attempts: 4, base_delay: 0.1s}
  - id: check_risk
    tool: risk.score
    needs: [find_charge]
    input: {charge: "${input.charge}"}
  - id: refund
    tool: shop.refund
    needs: [ask_bank, check_risk]
    input: {charge: "${input.charge}", amount: "${input.amount}", reason: "${input.reason}"}
  - id: tell_customer
    tool: mail.send
    needs: [refund]
    input: {to: "${steps.find_charge.output.email}", template: refund_done}
"""
POLICY = """\
@id("reads") permit(principal, action in Action::"read", resource);

@id("mail") @decision("allow") permit(principal, action == Action::"mail.send", resource);

@id("small-refunds") @decision("needs_approval") @tier("med") @reason("refunds need somebody else to look at them")
permit(principal, action == Action::"shop.refund", resource) when { context.input.amount <= 500 };

@id("large-refunds") @decision("needs_approval") @tier("high") @two_person("true")
@reason("refunds over 500 need two people")
permit(principal, action == Action::"shop.refund", resource) when { context.input.amount > 500 };

@id("freeze") @reason("nothing is refunded while the books are closed")
forbid(principal, action == Action::"shop.refund", resource) when { context.hour >= 22 };
"""
SUPPORT = """
name: support
model: scripted
instructions: You help people with their charges.
tools: [shop.*, bank.*]
script:
  - match: 'charged'
    turns:
      - say: Let me look at that charge.
        calls: [{tool: shop.find_charge, args: {charge: ch_2291}}]
      - say: It was taken twice on the same day, so one of the two should go back. I have asked for a refund of 84.
        calls: [{tool: shop.refund, args: {charge: ch_2291, amount: 84, reason: charged twice}}]
      - say: The refund is on its way.
"""


async def furnish(site: Site) -> dict[str, UUID]:
    """A shop in the middle of its day."""
    rig = site.rig
    _tools(site)
    await rig.apply(REFUND)
    await rig.apply(REFUND.replace("max_attempts: 4", "max_attempts: 5"))
    compiled = compile_policy(POLICY, rig.policies.facts())
    await rig.database.run_in_transaction(lambda tx: policies.publish(tx, rig.admin, POLICY, compiled.digest))
    agent = parse_agent(SUPPORT.encode(), file="support")
    await rig.database.run_in_transaction(lambda tx: workflows.apply(tx, rig.database, rig.admin, agent))
    cron = schedules.read_cron("30 6 * * 1-5", "Europe/Berlin")
    nightly = NewSchedule(
        name="morning-refunds",
        cron="30 6 * * 1-5",
        timezone="Europe/Berlin",
        workflow="refund",
        input={"charge": "ch_1"},
    )
    await rig.database.run_in_transaction(lambda tx: schedules.add(tx, rig.database, rig.admin, nightly, cron))
    ops, boss = await rig.person("mira", Role.OPERATOR), await rig.person("jonas", Role.APPROVER)
    found: dict[str, UUID] = {}
    async with rig.worker(), _sweeping(site):
        for number, (amount, end) in enumerate([(40, "yes"), (120, "yes"), (75, "no"), (61, "yes"), (19, "yes")]):
            run_id = await _refund(site, ops, f"ch_10{number}", amount)
            await rig.decide(run_id, approves=end == "yes", who=boss, reason=None if end == "yes" else "paid already")
            await rig.until(run_id, "succeeded", "failed")
            found["run"] = run_id
        found["held"] = await _refund(site, ops, "ch_2207", 240)
        found["large"] = await _refund(site, ops, "ch_2290", 980)
        await rig.decide(found["large"], approves=True, who=boss)
        found["session"] = await _talk(site)
    await rig.prove()
    await rig.database.pool.execute(_HOUR, rig.admin.tenant_id)
    return found


@asynccontextmanager
async def _sweeping(site: Site) -> AsyncIterator[None]:
    """Retries come due in real time here."""

    async def forever() -> None:
        while True:
            await site.rig.sweep()
            await asyncio.sleep(0.1)

    task = asyncio.create_task(forever())
    yield
    task.cancel()


def _tools(site: Site) -> None:
    rig = site.rig

    @rig.tool("shop.find_charge", writes=False)
    async def find_charge(charge: str) -> dict[str, Any]:
        """A charge, by its id."""
        await _work(0.18)
        return {"id": charge, "customer": "Ada Byron", "email": "ada@example.com", "amount": 240}

    @rig.tool("bank.status", writes=False)
    async def status(ctx: Context, charge: str) -> dict[str, Any]:
        """What the bank says about a charge."""
        await _work(0.25)
        if ctx.attempt < 3:
            raise Retryable("the bank answered 503")
        return {"status": "settled"}

    @rig.tool("risk.score", writes=False)
    async def score(charge: str) -> dict[str, Any]:
        """How likely it is that somebody cheats."""
        await _work(0.4)
        return {"score": 0.04}

    @rig.tool("mail.send", writes=True, risk="low", key="mail:{to}:{template}")
    async def send(to: str, template: str) -> dict[str, Any]:
        """Send a mail to a customer."""
        return {"queued": True}

    @rig.tool("shop.refund", writes=True, risk="high", key="shop:refund:{charge}", target="{charge}")
    async def refund(charge: str, amount: int, reason: str = "") -> dict[str, Any]:
        """Give money back."""
        return {"id": f"re_{charge}", "amount": amount}


async def _work(seconds: float) -> None:
    """Without a duration the picture would show empty bars."""
    await asyncio.sleep(seconds if os.environ.get("KEEP_PICTURES") else 0)


async def _refund(site: Site, who: Any, charge: str, amount: int) -> UUID:
    given = {"charge": charge, "amount": amount, "reason": "the parcel never came"}
    run_id = await site.rig.start("refund", given, who, trigger={"source": "api", "ref": None})
    await site.rig.until(run_id, "waiting_approval")
    return run_id


async def _talk(site: Site) -> UUID:
    http = site.rig.http()
    said = "I think I was charged twice for order 2291."
    sent = (await http.post("/api/messages", json={"content": said, "agent": "support"})).json()
    await site.rig.until(UUID(sent["run_id"]), "waiting_approval")
    return UUID(sent["session_id"])


# Give an hour plausible times: the test itself took seconds.
_HOUR = """
INSERT INTO interlock.run_stats_minute (tenant_id, minute, status, bucket, runs)
SELECT $1, date_trunc('minute', now()) - n * interval '1 minute', ended.status, ended.bucket,
       greatest(1, (ended.runs * (1 + 0.6 * sin(n / 9.0)) + n % 3)::int)
  FROM generate_series(2, 59) AS n
 CROSS JOIN (VALUES ('succeeded', 8, 14), ('succeeded', 9, 9), ('succeeded', 11, 3), ('failed', 12, 1),
                    ('canceled', 10, 1)) AS ended (status, bucket, runs)
 WHERE ended.status = 'succeeded' OR n % 7 = 0
ON CONFLICT DO NOTHING
"""


@pytest.mark.chaos  # takes ten seconds; `make pictures` shows the result
async def test_every_page_light_and_dark_on_a_desk_and_on_a_phone(site: Site) -> None:
    found = await furnish(site)
    pages = {
        "inbox": "/inbox", "runs": "/runs", "run": f"/runs/{found['large']}", "ended": f"/runs/{found['run']}",
        "sessions": "/sessions", "session": f"/sessions/{found['session']}", "jobs": "/jobs", "workers": "/workers",
        "workflows": "/workflows", "workflow": "/workflows/refund", "schedules": "/schedules", "policy": "/policy",
        "tools": "/tools", "audit": "/audit", "usage": "/usage",
    }  # fmt: skip
    key = await site.rig.key("lena", Role.ADMIN)
    keeps, looks = os.environ.get("KEEP_PICTURES") == "yes", os.environ.get("ALL_PICTURES_IN")
    looks_at = [("light", DESK, ""), ("dark", PHONE, "-phone-dark")]
    if keeps or looks:
        looks_at += [("dark", DESK, "-dark"), ("light", PHONE, "-phone")]
    for scheme, size, suffix in looks_at:
        page = await site.visit(key=key, color_scheme=scheme, viewport=size)
        for name, path in pages.items():
            await page.goto(site.address + path)
            wide = await page.evaluate("document.documentElement.scrollWidth")
            assert wide <= size["width"], f"{path} is {wide} wide on a screen of {size['width']}"
            if f"{name}{suffix}" in KEPT and keeps:
                await page.screenshot(path=IMAGES / f"console-{name}{suffix}.png")
            elif looks is not None:
                await page.screenshot(path=Path(looks) / f"{name}{suffix}.png", full_page=True)
