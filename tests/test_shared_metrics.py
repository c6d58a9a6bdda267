"""The metrics of a server and its workers are shown together, without those of other servers."""

import os
from pathlib import Path

import pytest
from prometheus_client import values
from prometheus_client.parser import text_string_to_metric_families

from interlock.settings import share_metrics
from interlock.telemetry import exposition, forget_process


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")  # so that these settings end with the test
    return tmp_path


def shared() -> Path:
    return Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])


def count(pid: int, value: float, *, kind: str = "counter") -> None:
    """Write metrics like a process with that id."""
    write = values.MultiProcessValue(lambda: pid)
    mode = {} if kind == "counter" else {"multiprocess_mode": "livesum"}
    write(kind, f"a_{kind}", f"a_{kind}", (), (), "for a test", **mode).inc(value)


def shown() -> dict[str, float]:
    return {s.name: s.value for family in text_string_to_metric_families(exposition().decode()) for s in family.samples}


def test_a_second_server_on_the_same_data_takes_no_number_of_the_first(data: Path) -> None:
    """This includes a server that ends at once because its port is taken."""
    share_metrics(data)
    first = shared()
    count(1, 5)
    share_metrics(data)
    assert (shared() != first, shown()) == (True, {})
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(first)
    assert shown() == {"a_counter": 5}


def test_what_a_server_left_is_cleared_away_by_the_next(data: Path) -> None:
    left = data / "metrics" / "of-a-server-that-is-gone"
    left.mkdir(parents=True)
    (left / "counter_1.db").touch()
    share_metrics(data)
    assert list((data / "metrics").iterdir()) == [shared()]


def test_a_process_that_is_gone_holds_nothing_any_more_and_has_done_what_it_did(data: Path) -> None:
    share_metrics(data)
    count(1, 2, kind="gauge")
    count(1, 7)
    count(2, 1, kind="gauge")
    forget_process(1)
    assert shown() == {"a_gauge": 1, "a_counter": 7}
