"""Addresses: where a webhook may connect to. Never into the network that Interlock itself runs in.

A name is looked up here, every address it has is checked, and the caller connects to an address that was checked: a
name that resolves to something else a moment later changes nothing.
"""

import asyncio
import ipaddress
import socket
from urllib.parse import SplitResult, urlsplit

from interlock.errors import Invalid

IP = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_LOOKUP_SECONDS = 5.0


class Refused(Invalid):
    code = "WEBHOOK_URL_REFUSED"


class Unresolved(Exception):
    """The name has no address, at least not now."""


def is_public(address: IP) -> bool:
    """Reachable over the internet and a single host. An IPv4 address inside an IPv6 one is judged as itself."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def check_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise Refused(f"this is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Refused("a webhook's URL begins with https:// or http:// and names a host")
    if parts.username is not None or parts.password is not None:
        raise Refused("a webhook's URL must not contain a user or a password; verify the signature instead")
    if port == 0:
        raise Refused("port 0 cannot be connected to")
    return parts


async def resolve(url: str, *, allow_private: bool) -> list[str]:
    """The addresses to connect to, all of them checked. One that is not public refuses the name altogether."""
    parts = check_url(url)
    host = parts.hostname
    assert host is not None
    try:
        async with asyncio.timeout(_LOOKUP_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(
                host, parts.port or (443 if parts.scheme == "https" else 80), type=socket.SOCK_STREAM
            )
    except (OSError, UnicodeError, TimeoutError) as error:
        raise Unresolved(f"{host} has no address: {error or 'no answer in time'}") from error
    addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
    if not addresses:
        raise Unresolved(f"{host} has no address")
    for address in addresses:
        if not allow_private and not is_public(ipaddress.ip_address(address)):
            raise Refused(
                f"{host} is at {address}, which is not a public address; "
                "set INTERLOCK_WEBHOOK_ALLOW_PRIVATE=true if webhooks may call into this network"
            )
    return sorted(addresses, key=lambda address: ":" in address)
