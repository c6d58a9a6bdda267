"""The connection: the server that a command talks to, and the key that it uses.

`interlock up` writes its address and its first admin key into the data directory, so that other commands on the same
machine find both.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import typer

if TYPE_CHECKING:
    from interlock.client import Client

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class Flags:
    """Values given as an option or in the environment."""

    url: str | None = None
    key: str | None = None


def connect(ctx: typer.Context) -> "Client":
    from interlock.client import DEFAULT_URL, Client

    flags: Flags = ctx.obj
    if flags.key == "":  # from an unset variable: the local admin key would be used instead
        raise typer.BadParameter("it is empty", param_hint="--key")
    local_url = _left_by_server("url")
    url = flags.url or local_url or DEFAULT_URL
    # The local admin key is for the local server; it must not be sent to any other server that --url names.
    is_local = url == local_url or _host_of(url) in _LOOPBACK
    return Client(url, flags.key or (_left_by_server("admin.key") if is_local else None))


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:  # the client reports it with its own message
        return None


def _left_by_server(name: str) -> str | None:
    path = Path(os.environ.get("INTERLOCK_DATA_DIR") or ".interlock") / name
    try:
        return path.read_text().strip() or None
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
