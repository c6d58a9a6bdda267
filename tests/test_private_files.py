"""Only the user that runs Interlock can read its data files: evidence and logs were world-readable (L3, L12)."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlock.engine.access.key_store import Salts, Signing
from interlock.integrations.artifacts import Artifacts
from interlock.settings import Settings, logs_dir, private_directory
from interlock.worker import supervisor


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_evidence_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    store = Artifacts((tmp_path / "artifacts").as_uri())
    await store.put("evidence/run.json", b"{}")
    assert (mode(tmp_path / "artifacts"), mode(tmp_path / "artifacts/evidence/run.json")) == (0o700, 0o600)
    assert await store.get("evidence/run.json") == b"{}"


def test_a_workers_log_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    path = private_directory(logs_dir(settings)) / "worker-1.log"
    with supervisor._own_log(path) as output:
        output.write(b"a line")
    assert (mode(path.parent), mode(path)) == (0o700, 0o600)


def test_key_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    Signing(settings).make()
    Salts(settings).make()
    assert mode(settings.data_dir) == 0o700
    keys = [path for path in settings.data_dir.iterdir() if "key" in path.name]
    assert {path.name: mode(path) for path in keys} == {path.name: 0o600 for path in keys}
    assert len(keys) >= 3
