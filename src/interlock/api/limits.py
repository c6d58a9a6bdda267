"""Limits per key, tenant and address: the requests in progress at a time, and the wrong keys tried.

A request counts before the key is looked up, under its bearer key or cookie, and again for the tenant when the key is
known. Only concurrency is limited, not the rate: a key that starts thousands of runs a second over many connections is
not slowed.
"""

import hashlib
import ipaddress
from collections import Counter
from dataclasses import dataclass
from secrets import token_bytes
from time import monotonic
from typing import Any, TypeVar
from uuid import UUID

from starlette.requests import HTTPConnection

from interlock.errors import RateLimited
from interlock.ids import TenantId
from interlock.settings import Settings

K = TypeVar("K")

_RETRY_AFTER_SECONDS = 1
_MINUTE = 60.0
# Addresses share this many buckets, so that memory does not grow with the number of attackers.
_PLACES = 65_536
# The cookie of a console session.
COOKIE = "interlock_session"


class TooManyRequests(RateLimited):
    title, code = "Too many requests at a time", "TOO_MANY_REQUESTS"


class TooManyStreams(RateLimited):
    title, code = "Too many streams", "TOO_MANY_STREAMS"


class TooManyFailures(RateLimited):
    title, code = "Too many wrong keys", "TOO_MANY_FAILED_SIGN_INS"


@dataclass(frozen=True, slots=True)
class LimitedRequest:
    """A request as the limits see it: its credentials, its size in bytes, and whether it is a stream."""

    signed_with: tuple[str, ...]
    size: int
    is_stream: bool


def limited_request(scope: Any, most_bytes: int) -> LimitedRequest | None:
    """Return what the limits count of a request, or None for one without a key, which is rejected at once.

    The API reads only the key and the console only the cookie. A request that has both counts under each, so that
    neither hides the other.
    """
    request = HTTPConnection(scope)
    headers = request.headers
    key = bearer_key(headers.get("authorization", ""))
    cookie = request.cookies.get(COOKIE, "") if "cookie" in headers else ""
    if not key and not cookie:
        return None
    length, size = headers.get("content-length", ""), 0
    if "transfer-encoding" in headers:
        size = most_bytes  # a body of unannounced length
    elif length.isdigit():
        size = min(int(length[:12]), most_bytes)
    is_stream = "text/event-stream" in headers.get("accept", "") or scope["path"].startswith("/live/")
    return LimitedRequest(tuple(found for found in (key, cookie) if found), size, is_stream)


def bearer_key(authorization: str) -> str:
    """Return the key of an Authorization header, or "" if it has none.

    The code that looks a key up also reads it here.
    """
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


class KeyUsage:
    """Counts the requests in progress by key, and the wrong keys by address."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self.failures = Failures(settings.max_failed_sign_ins)
        self.tenants = TenantLimits(settings)

    def begin(self, request: LimitedRequest) -> None:
        """Count a request. Raises TooManyRequests or TooManyStreams without counting it."""
        for key in request.signed_with:
            self._check(key, request)
        for key in request.signed_with:
            self._requests[key] += 1
            if request.size:
                self._bytes[key] += request.size
            if request.is_stream:
                self._streams[key] += 1

    def end(self, request: LimitedRequest) -> None:
        for key in request.signed_with:
            _less(self._requests, key, 1)
            if request.size:
                _less(self._bytes, key, request.size)
            if request.is_stream:
                _less(self._streams, key, 1)

    def _check(self, key: str, request: LimitedRequest) -> None:
        settings = self._settings
        if self._requests[key] >= settings.max_requests_per_key:
            raise TooManyRequests(
                f"This key has {settings.max_requests_per_key:,} requests under way (INTERLOCK_MAX_REQUESTS_PER_KEY). "
                "Wait for some of them.", retry_after=_RETRY_AFTER_SECONDS,
            )  # fmt: skip
        if request.size and self._bytes[key] + request.size > settings.max_bytes_per_key:
            raise TooManyRequests(
                f"The requests of this key that are under way have {settings.max_bytes_per_key:,} bytes "
                "(INTERLOCK_MAX_BYTES_PER_KEY). Wait for some of them.", retry_after=_RETRY_AFTER_SECONDS,
            )  # fmt: skip
        if request.is_stream and self._streams[key] >= settings.max_streams_per_key:
            raise TooManyStreams(
                f"This key has {settings.max_streams_per_key:,} streams open (INTERLOCK_MAX_STREAMS_PER_KEY). "
                "Close some of them.", retry_after=_RETRY_AFTER_SECONDS,
            )  # fmt: skip


class TenantLimits:
    """Counts the requests in progress by tenant, so that many keys of one tenant do not multiply the limit."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._requests: Counter[UUID] = Counter()
        self._bytes: Counter[UUID] = Counter()
        self._streams: Counter[UUID] = Counter()

    def expect(self, scope: Any, request: LimitedRequest) -> None:
        """Register a request whose tenant is not known yet."""
        scope[_UNCOUNTED] = request

    def begin(self, scope: Any, tenant_id: TenantId) -> None:
        """Count a request once. Raises TooManyRequests or TooManyStreams without counting it."""
        request: LimitedRequest | None = scope.pop(_UNCOUNTED, None)
        if request is None:
            return
        settings = self._settings
        if self._requests[tenant_id] >= settings.max_requests_per_tenant:
            raise TooManyRequests(
                f"The keys of this tenant have {settings.max_requests_per_tenant:,} requests under way "
                "(INTERLOCK_MAX_REQUESTS_PER_TENANT). Wait for some of them.", retry_after=_RETRY_AFTER_SECONDS,
            )  # fmt: skip
        if request.size and self._bytes[tenant_id] + request.size > settings.max_bytes_per_tenant:
            raise TooManyRequests(
                f"The requests of this tenant that are under way have {settings.max_bytes_per_tenant:,} bytes "
                "(INTERLOCK_MAX_BYTES_PER_TENANT). Wait for some of them.", retry_after=_RETRY_AFTER_SECONDS,
            )  # fmt: skip
        if request.is_stream and self._streams[tenant_id] >= settings.max_streams_per_tenant:
            raise TooManyStreams(
                f"The keys of this tenant have {settings.max_streams_per_tenant:,} streams open "
                "(INTERLOCK_MAX_STREAMS_PER_TENANT). Close some of them.", retry_after=_RETRY_AFTER_SECONDS,
            )  # fmt: skip
        scope[_COUNTED] = tenant_id
        self._requests[tenant_id] += 1
        if request.size:
            self._bytes[tenant_id] += request.size
        if request.is_stream:
            self._streams[tenant_id] += 1

    def end(self, scope: Any, request: LimitedRequest) -> None:
        tenant_id: TenantId | None = scope.pop(_COUNTED, None)
        if tenant_id is None:
            return
        _less(self._requests, tenant_id, 1)
        if request.size:
            _less(self._bytes, tenant_id, request.size)
        if request.is_stream:
            _less(self._streams, tenant_id, 1)


# Where a request carries its counted size and kind, and the tenant for which they were counted.
_UNCOUNTED, _COUNTED = "interlock.uncounted", "interlock.tenant"


def _less(counts: "Counter[K]", key: K, by: int) -> None:
    counts[key] -= by
    if counts[key] <= 0:
        del counts[key]


class Failures:
    """How many wrong keys each address has tried lately. Failures are forgotten at an even pace."""

    def __init__(self, most_per_minute: int) -> None:
        self._most = most_per_minute
        self._counts = [0.0] * _PLACES
        self._at = [0.0] * _PLACES

    def check(self, address: str) -> None:
        """Raise TooManyFailures if this address has tried too many wrong keys, before another key is looked up."""
        if self._count(_place(address)) >= self._most:
            raise TooManyFailures(
                f"This address has tried {self._most} wrong keys within a minute. Wait a minute, and check the key.",
                retry_after=int(_MINUTE / self._most) + 1,
            )

    def add(self, address: str) -> None:
        place = _place(address)
        self._counts[place], self._at[place] = self._count(place) + 1, monotonic()

    def _count(self, place: int) -> float:
        passed = monotonic() - self._at[place]
        return max(self._counts[place] - passed * self._most / _MINUTE, 0.0)


# A secret seed, so that an attacker cannot compute which addresses share a bucket.
_SALT = token_bytes(16)


def _place(address: str) -> int:
    """Return the bucket of an address. The whole IPv6 network of one customer counts as one address."""
    try:
        parsed = ipaddress.ip_address(address)
        whole = parsed.packed[:8] if parsed.version == 6 else parsed.packed
    except ValueError:
        whole = address.encode()
    return int.from_bytes(hashlib.blake2b(whole, digest_size=8, key=_SALT).digest(), "big") % _PLACES
