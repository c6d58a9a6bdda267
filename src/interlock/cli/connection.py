"""The connection: which server a command talks to, and as whom.

`interlock up` leaves its address and its first admin key in the data directory, so that on one machine the other
commands find both without being told.
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
    """What was given as an option or in the environment."""

    url: str | None = None
    key: str | None = None


def connect(ctx: typer.Context) -> "Client":
    from interlock.client import DEFAULT_URL, Client

    flags: Flags = ctx.obj
    if flags.key == "":  # of a variable that is not set: the local admin key would act in its place
        raise typer.BadParameter("it is empty", param_hint="--key")
    local_url = _left_by_server("url")
    url = flags.url or local_url or DEFAULT_URL
    # The local admin key is for the local server; it must not travel to whatever --url names.
    is_local = url == local_url or _host_of(url) in _LOOPBACK
    return Client(url, flags.key or (_left_by_server("admin.key") if is_local else None))


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:  # which the client says in its own words
        return None


def _left_by_server(name: str) -> str | None:
    path = Path(os.environ.get("INTERLOCK_DATA_DIR") or ".interlock") / name
    try:
        return path.read_text().strip() or None
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
