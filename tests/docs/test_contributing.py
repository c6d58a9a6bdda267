"""CONTRIBUTING and the contributor kit: the test that it shows passes, and what it names exists."""

import re
import tomllib
from typing import Any

import yaml

from tests.docs.reader import ROOT, blocks
from tests.rig import Rig

PAGE = ROOT / "CONTRIBUTING.md"
_PLACE = re.compile(r"`((?:[a-z_]+/)*[a-z_0-9]+\.(?:py|sql))`")


async def test_the_test_that_it_shows_passes(rig: Rig) -> None:
    shown: dict[str, Any] = {}
    exec(blocks(PAGE, "python")[0], shown)
    [promise] = [value for name, value in shown.items() if name.startswith("test_")]
    await promise(rig)


def test_every_file_of_where_things_are_exists() -> None:
    table = PAGE.read_text().partition("## Where things are")[2].partition("\n## ")[0]
    for row in table.splitlines()[4:]:
        folder = ""
        for place in _PLACE.findall(row):
            # A name without a directory is beside the one before it.
            place = place if "/" in place else f"{folder}/{place}"
            folder = place.rpartition("/")[0]
            assert (ROOT / "src" / "interlock" / place).is_file(), place


def test_the_workflows_call_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            called |= {name for step in job["steps"] for name in re.findall(r"\bmake ([a-z]+)", step.get("run", ""))}
    assert {"check", "test"} <= called <= targets
    assert set(re.findall(r"^make ([a-z]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)) <= called


def test_every_supported_version_is_tested() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={matrix['python'][0]}"
    assert (matrix["postgres"][0], matrix["postgres"][-1]) == ("15", "18")
