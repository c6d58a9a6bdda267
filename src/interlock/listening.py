"""Sockets: taking a server's port, before the server itself is loaded."""

import socket
from typing import Any

from interlock.errors import Invalid


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        # Listen now and not when serving: until a socket listens, a second server could bind the port too.
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise Invalid(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port") from None
    listening.set_inheritable(False)
    return listening


def address_of(bound: tuple[Any, ...]) -> str:
    """Return the URL of a server that listens on this address."""
    host, port = bound[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
