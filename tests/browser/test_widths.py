"""Pages on screens between phone and desktop width (console review 20)."""

from typing import Any

import pytest
from tests.browser.conftest import Site
from tests.browser.test_pictures import furnish

from interlock.wire import Role

# Words that break with a single letter on a line, though the word would fit on one line.
BROKEN = """
() => {
  const broken = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (node.parentElement.closest("code, pre, .id, svg, .unseen, dialog, [hidden]")) continue;
    for (const match of node.data.matchAll(/[A-Za-z]{3,20}/g)) {
      const range = document.createRange();
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) broken.push(match[0]);
    }
  }
  return broken;
}
"""


@pytest.mark.chaos  # takes twenty seconds
async def test_no_page_scrolls_sideways_and_no_word_is_broken(site: Site) -> None:
    found = await furnish(site)
    await site.rig.http().post("/api/jobs", json={"task_description": "refund the outage", "workflow": "refund"})
    page: Any = await site.visit()
    wrong = []
    async with site.rig.worker():
        for path in (
            "/inbox", "/runs", f"/runs/{found['large']}", f"/runs/{found['run']}", "/sessions",
            f"/sessions/{found['session']}", "/jobs", "/workers", "/workflows", "/workflows/refund", "/schedules",
            "/policy", "/tools", "/tools/shop.refund", "/audit", "/usage",
        ):  # fmt: skip
            await page.goto(site.address + path)
            for width in (768, 1024, 1280):
                await page.set_viewport_size({"width": width, "height": 900})
                wide = await page.evaluate("document.documentElement.scrollWidth")
                if wide > width or (broken := await page.evaluate(BROKEN)):
                    wrong.append((path, width, wide, broken if wide <= width else []))
    assert wrong == []


@pytest.mark.parametrize("width", [1040, 1280, 1440])
async def test_a_long_workflow_name_leaves_the_other_columns_whole(site: Site, width: int) -> None:
    """console 22: ids and names of keys broke in the middle of a word."""
    name = "-".join(["refund-all-orders-of-the-last-outage"] * 2)
    await site.rig.apply(f"{{name: {name}, steps: [{{id: ask, approval: {{}}}}]}}")
    await site.rig.start(name, {}, await site.rig.person("magdalena", Role.OPERATOR))
    page: Any = await site.visit("/runs", viewport={"width": width, "height": 900})
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    [[short, lines]] = await page.locator("tr[data-row] .id").evaluate_all(
        "ids => ids.map(id => [id.textContent, id.getClientRects().length])"
    )
    assert (len(short), lines) == (8, 1)
    tops = await page.locator(".filters label, .filters button").evaluate_all(
        "all => all.map(one => Math.round(one.getBoundingClientRect().top))"
    )
    assert width < 1280 or max(tops) - min(tops) < 10, "the filters are one line where there is room"
    assert await page.evaluate(BROKEN) == []


async def test_the_policy_editor_numbers_the_lines_that_there_are(site: Site) -> None:
    """console 24: the gutter had more numbers than the text has lines."""
    page: Any = await site.visit("/policy")
    text = page.get_by_label("The policy, in Cedar")
    gutter = page.locator(".editor pre")

    async def numbers() -> list[str]:
        return str(await gutter.inner_text()).split()

    async def lines() -> list[str]:
        return [str(n) for n in range(1, len((await text.input_value()).removesuffix("\n").split("\n")) + 1)]

    assert len(await numbers()) > 10
    assert await numbers() == await lines()
    await text.press("ControlOrMeta+End")
    await page.keyboard.type("// one\n// two\n// three")
    assert await numbers() == await lines()
    await text.fill("// all gone")
    assert await numbers() == ["1"]
