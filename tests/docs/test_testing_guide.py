"""The testing guide's example is a realistic project, and its tests pass as written.

new-user 11: they needed `asyncio_mode = auto`, which the guide did not say.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import interlock

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "testing.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILES = {"yaml": ["refund.yaml"], "python": ["shop.py", "conftest.py", "test_refund.py", "test_real_tools.py"]}


def test_the_guides_example_passes(tmp_path: Path) -> None:
    blocks = _BLOCK.findall(GUIDE.read_text(encoding="utf-8"))
    for language, names in _FILES.items():
        texts = [text for written_in, text in blocks if written_in == language]
        for name, text in zip(names, texts, strict=True):
            (tmp_path / name).write_text(text)
    source = str(Path(interlock.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--rootdir", "."],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": source}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for promise in (
        "test_a_refund_waits_for_two_people_and_survives_a_bad_minute",
        "test_without_a_decision_nothing_is_refunded",
    ):
        assert f"PASSED test_refund.py::{promise}" in ran.stdout
    for promise in ("test_with_the_real_lookup", "test_with_the_real_lookup_too"):
        assert f"PASSED test_real_tools.py::{promise}\n" in ran.stdout
