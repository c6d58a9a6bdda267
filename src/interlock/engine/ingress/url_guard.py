"""Decide to which addresses a webhook may connect: never into the network that Interlock itself runs in.

This module resolves the name and checks each of its addresses, and the caller connects to a checked address. A name
that resolves to another address a moment later changes nothing.
"""

import asyncio
import ipaddress
import socket
from urllib.parse import SplitResult, urlsplit

from interlock.errors import Invalid
from interlock.telemetry import log

IP = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# This range contains every IPv6 address that is routed over the internet.
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
# Special ranges of the IANA registries that some supported Python versions call global: relays of 6to4, and addresses
# for documentation.
_NOT_HOSTS = [ipaddress.ip_network(network) for network in ("192.88.99.0/24", "3fff::/20")]
_LOOKUP_SECONDS = 5.0


class Refused(Invalid):
    code = "WEBHOOK_URL_REFUSED"


class Unresolved(Exception):
    """The name has no address, at least not now."""


def is_public(address: IP) -> bool:
    """Return whether the address is a single public host. An IPv4 address inside an IPv6 one is judged as itself."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address not in _GLOBAL_UNICAST or address.teredo is not None:
            return False
    if any(address in network for network in _NOT_HOSTS):
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
    """Return the addresses to connect to, all of them checked. One that is not public refuses the name altogether.

    Tenants read the error. A name that only this network knows gets the same error as an unknown name, or tenants
    could map the network by its names. The log has the reason.
    """
    parts = check_url(url)
    host = parts.hostname
    assert host is not None
    try:
        async with asyncio.timeout(_LOOKUP_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(
                host, parts.port or (443 if parts.scheme == "https" else 80), type=socket.SOCK_STREAM
            )
    except (OSError, UnicodeError, TimeoutError) as error:
        raise _no_address(host, str(error) or "no answer in time", allow_private) from error
    addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
    if not addresses:
        raise _no_address(host, "no address", allow_private)
    if not allow_private and (inside := [a for a in addresses if not is_public(ipaddress.ip_address(a))]):
        raise _no_address(host, ", ".join(inside), allow_private)
    return sorted(addresses, key=lambda address: ":" in address)


def _no_address(host: str, why: str, allow_private: bool) -> Exception:
    log.info("webhook_host_refused", host=host, reason=why)
    if allow_private:
        return Unresolved(f"{host} has no address: {why}")
    return Refused(
        f"{host} has no public address. Check the name. If webhooks may call into this network, the server needs "
        "INTERLOCK_WEBHOOK_ALLOW_PRIVATE=true."
    )
