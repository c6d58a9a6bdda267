"""The demo and the example: the README's output is the real output."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from interlock.definition import parse
from interlock.store import embedded

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "interlock", "demo"]


@pytest.fixture
def environment(server: embedded.Joined, tmp_path: Path) -> dict[str, str]:
    """The demo creates a separate database on the tests' server."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
    return plain | {"INTERLOCK_DATABASE_URL": server.url, "INTERLOCK_DATA_DIR": str(tmp_path / "data")}


def books(environment: dict[str, str]) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(
        (Path(environment["INTERLOCK_DATA_DIR"]) / "demo" / "shop.json").read_text()
    )
    return found


def test_without_a_terminal_it_approves_by_itself_and_ends(environment: dict[str, str], tmp_path: Path) -> None:
    # Twice: an earlier demo must not block the second, which runs outside of the source.
    for encoding, folder in (("utf-8", Path.cwd()), ("ascii", tmp_path)):
        played = subprocess.run(
            DEMO, env=environment | {"PYTHONIOENCODING": encoding, "INTERLOCK_PORT": "8765"}, cwd=folder,
            stdin=subprocess.DEVNULL, capture_output=True, encoding=encoding, timeout=60, check=False,
        )  # fmt: skip
        assert (played.returncode, played.stderr) == (0, "")
        assert "the demo approves as you" in played.stdout
        assert "403 FORBIDDEN" in played.stdout
        assert "succeeded" in played.stdout
        assert "open http://127.0.0.1:8765/inbox" in played.stdout and ":8420" not in played.stdout
        assert "\x1b" not in played.stdout
        # What it says to try starts a run before it approves one.
        applied = re.search(r"workflow apply (\S+)", played.stdout)
        assert applied is not None and (folder / applied[1]).is_file()
        assert "run start refund" in played.stdout.partition("workflow apply")[2].partition("run approve")[0]
        assert max(len(line) for line in played.stdout.split("Try next")[0].splitlines()) <= 80
        assert books(environment)["refunds"] == {"shop:refund:ch_1042": {"charge": "ch_1042", "amount": 349}}


@pytest.mark.parametrize(
    ("answer", "said", "refunded"),
    [
        ("y", "succeeded", 349),
        ("maybe\nn", "reason rejected", 0),
        pytest.param("\x04", "no money", 0, marks=pytest.mark.chaos),
    ],
)
def test_at_a_terminal_the_person_decides(environment: dict[str, str], answer: str, said: str, refunded: int) -> None:
    shown, code = at_a_terminal(environment, answer)
    assert code == 0
    assert said in shown
    charges = books(environment)["charges"]
    assert isinstance(charge := charges["ch_1042"], dict) and charge["refunded"] == refunded


@pytest.mark.chaos
def test_ctrl_c_at_the_question_ends_it(environment: dict[str, str]) -> None:
    shown, code = at_a_terminal(environment, "\x03")
    assert code == 130, shown
    assert "Traceback" not in shown


def test_a_database_that_cannot_be_made_is_one_clear_line(environment: dict[str, str]) -> None:
    played = subprocess.run(
        DEMO, env=environment | {"INTERLOCK_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert played.returncode == 1
    assert "the demo cannot make a database of its own" in played.stderr
    assert len(played.stderr.splitlines()) == 1


def test_the_example_is_what_the_demo_plays() -> None:
    for name in ("tools.py", "refund.yaml"):
        packaged = ROOT / "src" / "interlock" / "demo" / name
        assert (ROOT / "examples" / "refund" / name).read_text() == packaged.read_text(), f"copy {packaged}"


def test_the_example_can_be_loaded_and_is_valid() -> None:
    tools = subprocess.run(
        [sys.executable, "-m", "interlock", "tools", "--json"], cwd=ROOT, capture_output=True, text=True, check=True,
        env=os.environ | {"INTERLOCK_TOOLS": "examples/refund/tools.py"},
    )  # fmt: skip
    known = {tool["name"] for tool in json.loads(tools.stdout)["items"]}
    assert set(parse((ROOT / "examples/refund/refund.yaml").read_text()).tools) == known


def at_a_terminal(environment: dict[str, str], answer: str) -> tuple[str, int]:
    """Play the demo on a pseudo-terminal and type the answer at its prompt."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        DEMO, env=environment | {"COLUMNS": "80", "TERM": "xterm-256color"}, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=_take_terminal,
    )  # fmt: skip
    os.close(theirs)
    shown, answered, deadline = b"", False, time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([ours], [], [], 1)[0]:
            continue
        try:
            read = os.read(ours, 65536)
        except OSError:  # the other end was closed
            break
        if not read:
            break
        shown += read
        if not answered and b"[y/n]" in shown:
            answered = True
            os.write(ours, answer.encode() + (b"" if answer in ("\x03", "\x04") else b"\n"))
    os.close(ours)
    return shown.decode(), process.wait(30)


def _take_terminal() -> None:
    """Make the pseudo-terminal the controlling one, so that Ctrl-C is a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
