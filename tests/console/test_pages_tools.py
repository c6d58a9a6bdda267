"""The pages of tools: each tool's declaration, and the policy's answer for it."""

from typing import Annotated, Any, Literal

from tests.console.pages import HOSTILE, Browser, text_of
from tests.rig import Rig

from interlock.engine import policies
from interlock.policy.policy import DEFAULT_POLICY, compile_policy
from interlock.tools import Secret


def add_tools(rig: Rig) -> None:
    @rig.tool("shop.refund", writes=True, risk="high", key="shop:{charge}", target="{charge}", undo="shop.back")
    async def refund(
        charge: str, amount: int, mode: Literal["full", "part"] = "full", pin: Annotated[str, Secret] = ""
    ) -> Any:
        """Give money back."""

    @rig.tool("shop.back", writes=True, risk="low", idempotent=True)
    async def back(charge: str) -> Any:
        """Take it back."""

    @rig.tool("shop.look")
    async def look(charge: str) -> Any:
        """Look it up."""

    @rig.tool("shop.draw", idempotent=False)
    async def draw() -> Any:
        """Draw the next number."""

    @rig.flow("greet", version="7")
    async def greet(ctx: Any) -> None:
        """Say hello."""


def row_of(page: str, tool: str) -> str:
    return text_of(page[page.index(f'href="/tools/{tool}"') :].partition("</tr>")[0])


async def test_without_tools_the_page_says_what_to_do(admin: Browser) -> None:
    assert "INTERLOCK_TOOLS=" in await admin.get("/tools")
    assert "no tool shop.refund here" in await admin.get("/tools/shop.refund", 404)


async def test_tools_are_listed_with_what_the_policy_in_force_says(rig: Rig, viewer: Browser) -> None:
    add_tools(rig)
    page = await viewer.get("/tools")
    assert "writes not idempotent, can be undone high asks people high two people" in row_of(page, "shop.refund")
    assert "writes idempotent low allowed" in row_of(page, "shop.back")
    assert "reads low allowed" in row_of(page, "shop.look")
    assert "reads not idempotent low allowed" in row_of(page, "shop.draw")
    assert "never by itself: after a crash its run fails" in text_of(await viewer.get("/tools/shop.draw"))
    assert "greet" in page and "Say hello." in page and "current" in page
    found = await viewer.get("/tools?q=money")
    assert "shop.refund" in found and "shop.look" not in found
    assert "No tool is like that" in await viewer.get(f"/tools?q={HOSTILE}")


async def test_it_is_said_on_what_the_answer_depends(rig: Rig, viewer: Browser) -> None:
    add_tools(rig)
    text = DEFAULT_POLICY + (
        '@id("large") forbid (principal, action == Action::"shop.refund", resource)'
        " when { context.input.amount > 9 };\n"
        '@id("night") forbid (principal, action in Action::"read", resource) when { context.hour > 22 };\n'
    )
    compiled = compile_policy(text, rig.policies.facts())
    await rig.database.run_in_transaction(lambda tx: policies.publish(tx, rig.admin, text, compiled.digest))
    rig.policies.forget("")
    page = await viewer.get("/tools")
    assert "may depend on its input" in row_of(page, "shop.refund")
    assert "may depend on the time" in row_of(page, "shop.look")
    assert "depend" not in row_of(page, "shop.back")


async def test_a_tool_is_shown_with_its_parameters_and_schema(rig: Rig, viewer: Browser) -> None:
    add_tools(rig)
    text = text_of(await viewer.get("/tools/shop.refund"))
    assert "amount integer required" in text and 'mode full or part "full"' in text and "pin secret" in text
    assert "shop:{charge}" in text and "Undo shop.back" in text and "two people have to approve it high-writes" in text
    assert '"additionalProperties": false' in text
    assert "harmless" in text_of(await viewer.get("/tools/shop.back"))


async def test_pages_stay_small_and_harmless(rig: Rig, admin: Browser) -> None:
    def make(number: int, fields: int) -> None:
        code = ", ".join(f"a{field}: str = '{HOSTILE}'" for field in range(fields))
        scope: dict[str, Any] = {}
        exec(f"async def work({code}): ...", scope)
        scope["work"].__doc__ = HOSTILE * 200
        rig.tool(f"many.tool{number:03}", writes=True, risk="low", key=HOSTILE)(scope["work"])

    make(0, 400)
    for number in range(1, 62):
        make(number, 1)
    page = await admin.get("/tools")
    assert 'rel="next"' in page
    await admin.get("/tools/many.tool000")
