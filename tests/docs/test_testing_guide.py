"""The example of the testing guide is a project that somebody could have, and its tests pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

import interlock

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "testing.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILES = ("refund.yaml", "shop.py", "conftest.py", "test_refund.py")


def test_the_guides_example_passes(tmp_path: Path) -> None:
    blocks = [text for _, text in _BLOCK.findall(GUIDE.read_text(encoding="utf-8"))]
    for name, text in zip(_FILES, blocks, strict=True):
        (tmp_path / name).write_text(text)
    source = str(Path(interlock.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--rootdir", "."],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{tmp_path}"}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for promise in (
        "test_a_refund_waits_for_two_people_and_survives_a_bad_minute",
        "test_nobody_is_refunded_when_nobody_decides",
    ):
        assert f"PASSED test_refund.py::{promise}" in ran.stdout
