"""The time limit itself: a test that waits for ever fails, and later tests run, for every way to start pytest."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
STUCK = """
import asyncio, threading

async def test_waits_in_the_loop(): await asyncio.Event().wait()
def test_waits_in_a_thread(): threading.Event().wait()
async def test_works(): pass
"""


def test_a_test_that_waits_for_ever_fails_and_the_rest_runs(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.time_limit import pytest_addoption, pytest_runtest_protocol\n")
    (tmp_path / "test_stuck.py").write_text(STUCK)
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", f"--rootdir={tmp_path}",
        "-c", "/dev/null", "--time-limit=1", "-rA", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    for name in ("test_waits_in_the_loop", "test_waits_in_a_thread"):
        assert f"::{name} took longer than 1 s (--time-limit)" in done.stdout, done.stdout + done.stderr
    assert "2 failed, 1 passed" in done.stdout
