"""Fixtures: a yard on the test's own database."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlock.settings import Settings
from tests.chaos import processes
from tests.chaos.processes import Yard
from tests.fixed_time import machine_time as _fixed_time  # noqa: F401
from tests.rig import Rig


@pytest.fixture
def settings() -> Settings:
    return processes.settings()


@pytest.fixture
def base() -> Iterator[Path]:
    """Not tmp_path: every pytest that starts on this machine makes it private, also from PostgreSQL's user."""
    base = Path(tempfile.mkdtemp(prefix="interlock-chaos-"))
    yield base
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def yard(base: Path, url: str, rig: Rig) -> Iterator[Yard]:
    """Processes that work on the rig's database. The fixture stops all of them at the end."""
    yard = Yard(base, url)
    yield yard
    yard.close()
