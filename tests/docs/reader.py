"""A reader of the documents: types their commands, in order, against a server on this machine."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from unittest.mock import patch

import httpx2

from tests.cli import stub

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)", re.MULTILINE)
# What a command prints, and the word in capital letters that stands for it in later commands.
_PRINTED = {
    "KEY": re.compile(r"^key +(il_\S+)", re.MULTILINE),
    "RUN": re.compile(r'^run +([0-9a-f-]{36})|^{"id":"([0-9a-f-]{36})"', re.MULTILINE),
    "APPROVAL": re.compile(r"interlock approval approve ([0-9a-f-]{36})"),
    "WEBHOOK": re.compile(r"^id +([0-9a-f-]{36})", re.MULTILINE),
    "SECRET": re.compile(r"(whsec_\S+)"),
}


def blocks(page: Path, language: str) -> list[str]:
    return [text for written_in, text in _BLOCK.findall(page.read_text(encoding="utf-8")) if written_in == language]


def commands(page: Path) -> list[str]:
    """Return the commands that a document says to type."""
    return [command for block in blocks(page, "console") for command in _COMMAND.findall(block)]


class Reader:
    """Types commands in a directory. `said` replaces what the documents say, such as the address of the server."""

    def __init__(self, folder: Path, environment: dict[str, str], said: dict[str, str]) -> None:
        self._folder, self._said = folder, said
        path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        self._environment = environment | {"PATH": path, "COLUMNS": "200"}
        self.known: dict[str, str] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    def types(self, command: str, *, exits_with: int = 0) -> str:
        """Run the command and return what it printed."""
        for word, value in (self._said | self.known).items():
            command = re.sub(rf"\b{word}\b", value, command)
        if command.endswith("&"):
            self._begin(command.removesuffix("&"))
            return ""
        run = self._in_this_process if command.startswith("interlock ") else self._in_a_shell
        code, printed = run(command)
        assert code == exits_with, f"{command}\n{printed}"
        for word, pattern in _PRINTED.items():
            if found := pattern.search(printed):
                self.known[word] = next(group for group in found.groups() if group)
        return printed

    def _in_this_process(self, command: str) -> tuple[int, str]:
        """Starting a process takes longer than most commands."""
        with chdir(self._folder), patch.dict(os.environ, self._environment):
            result = stub.run(*shlex.split(command, comments=True)[1:])
        return result.exit_code, result.output

    def _in_a_shell(self, command: str) -> tuple[int, str]:
        ran = subprocess.run(
            command, shell=True, cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
        )  # fmt: skip
        return ran.returncode, ran.stdout

    def _begin(self, command: str) -> None:
        process = subprocess.Popen(
            f"exec env {command}", shell=True, cwd=self._folder, env=self._environment, stdout=subprocess.PIPE
        )
        self._started.append(process)
        assert process.stdout is not None and process.stdout.readline(), f"{command} ended"

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@contextmanager
def serving(folder: Path, environment: dict[str, str], *options: str) -> Iterator[str]:
    """Run `interlock up` in the directory, as the documents say, and yield its address."""
    data_dir = Path(environment["INTERLOCK_DATA_DIR"])
    with (folder / "up.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "interlock", "up", *options], cwd=folder, env=environment,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        yield _address(process, folder / "up.log", data_dir / "url")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def _address(process: "subprocess.Popen[bytes]", log: Path, announced: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if announced.exists():
            address = announced.read_text()
            try:
                if httpx2.get(f"{address}/readyz").status_code == 200:
                    return address
            except httpx2.HTTPError:
                pass
        time.sleep(0.1)
    raise AssertionError(log.read_text())
