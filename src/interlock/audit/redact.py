"""Redaction: metadata for values that must not be stored, and removal of secrets from values that are.

Metadata keeps a request's shape and not its values: `{"amount": 250, "note": "ring twice"}` becomes

    {"amount": {"type": "number", "hash": "91c2…"}, "note": {"type": "string", "size": 10, "hash": "5f0b…"}}

Fields that a tool names as harmless stay as they are.
"""

import base64
import hashlib
import hmac
import html
import json
import re
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus

from interlock.audit.canonical import canonical

T = TypeVar("T")

MARK = "[secret]"
# Shorter ones would match everywhere; the secret store rejects them.
SHORTEST_SECRET = 4

_DEEPEST = 8
_MOST_FIELDS = 64
_MOST_ITEMS = 5
_MOST_NODES = 1000
_LARGEST_KEPT = 2000


# ---------------------------------------------------------------- metadata


def metadata(
    value: Any, allow: Collection[str] = (), secrets: "Collection[str] | Scrubber" = (), salt: bytes | None = None
) -> Any:
    """Return the value's shape, sizes and hashes.

    `allow` has dotted names ("customer.country"); list indexes are not part of a name.

    Hashes show whether two values are equal. Plain hashes could be reversed by trying all amounts or postcodes. They
    are therefore keyed with a `salt` that readers of the metadata do not have. Each tenant has another salt, so that
    hashes of tenants cannot be compared. Without a salt there are no hashes.
    """
    return _Describer(frozenset(allow), Scrubber.of(secrets), salt).describe(value, (), 0)


def tenant_salt(master: bytes, tenant_id: object) -> bytes:
    """Derive a tenant's salt from the installation's master secret.

    The salt need not be stored, and is useless for any other tenant.
    """
    return hmac.digest(master, f"interlock metadata {tenant_id}".encode(), "sha256")


class _Describer:
    def __init__(self, allow: frozenset[str], scrubber: "Scrubber", salt: bytes | None) -> None:
        self._allow, self._scrubber, self._salt = allow, scrubber, salt
        self._nodes = 0

    def describe(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        self._nodes += 1
        if path and ".".join(path) in self._allow and (kept := self._kept(value)) is not None:
            return kept[0]
        if isinstance(value, Mapping):
            return self._object(value, path, depth)
        if isinstance(value, list | tuple | Set):
            return self._array(list(value), path, depth)
        return self._leaf(value)

    def _kept(self, value: Any) -> tuple[Any] | None:
        scrubbed = self._scrubber.scrub(value)
        return (scrubbed,) if len(canonical(scrubbed)) <= _LARGEST_KEPT else None

    def _object(self, value: Mapping[Any, Any], path: tuple[str, ...], depth: int) -> Any:
        if depth >= _DEEPEST or self._nodes >= _MOST_NODES:
            return {"type": "object", "size": len(value), **self._hash(value)}
        shown = list(value.items())[:_MOST_FIELDS]
        described = {
            self._scrubber.scrub(str(name)): self.describe(member, (*path, str(name)), depth + 1)
            for name, member in shown
        }
        return described | ({"…": {"more": len(value) - len(shown)}} if len(value) > len(shown) else {})

    def _array(self, value: list[Any], path: tuple[str, ...], depth: int) -> Any:
        whole = {"type": "array", "length": len(value)}
        if depth >= _DEEPEST or self._nodes >= _MOST_NODES:
            return {**whole, **self._hash(value)}
        items = [self.describe(item, path, depth + 1) for item in value[:_MOST_ITEMS]]
        rest = self._hash(value) if len(value) > len(items) else {}
        return {**whole, "items": items, **rest}

    def _leaf(self, value: Any) -> dict[str, Any]:
        match value:
            case None:
                return {"type": "null"}
            case bool():
                return {"type": "boolean"}
            case _ if self._scrubber.finds(value):
                # Omit even its length.
                return {"type": "secret"}
            case int() | float():
                return {"type": "number", **self._hash(value)}
            case bytes():
                return {"type": "bytes", "size": len(value), **self._hash(value)}
            case str():
                return {"type": "string", "size": len(value.encode(errors="surrogatepass")), **self._hash(value)}
            case _:
                return {"type": type(value).__name__, **self._hash(value)}

    def _hash(self, value: Any) -> dict[str, str]:
        if self._salt is None or self._scrubber.finds(value):
            return {}
        return {"hash": hmac.new(self._salt, canonical(value), hashlib.sha256).hexdigest()[:16]}


# ---------------------------------------------------------------- secrets


def scrub(value: T, secrets: "Collection[str] | Scrubber") -> T:
    """Return the value with every secret replaced, in any encoding. A number that is a secret becomes the mark."""
    return Scrubber.of(secrets).scrub(value)


class Scrubber:
    """Replaces the same secrets in many values. Building a scrubber takes longer than using it."""

    @classmethod
    def of(cls, secrets: "Collection[str] | Scrubber") -> "Scrubber":
        return secrets if isinstance(secrets, Scrubber) else cls(secrets)

    def __init__(self, secrets: Collection[str]) -> None:
        known = {secret for secret in secrets if len(secret) >= SHORTEST_SECRET}
        whole = {form for secret in known for form in _forms(secret)}
        parts = {part for secret in known for part in _inside_base64(secret.encode(errors="surrogatepass"))}
        # Longest first, so that a part is not replaced inside the whole.
        words = [re.escape(word) for word in sorted(whole | parts, key=lambda word: (-len(word), word))]
        # The characters next to a part contain bits of it too. Searching for those as well takes twenty times as long,
        # so it is done only where there is something to replace.
        partial = {re.escape(part) for part in parts}
        edges = [rf"[\w+/-]?{word}[\w+/-]?={{0,2}}" if word in partial else word for word in words]
        self._found = re.compile("|".join(words)) if words else None
        self._text = re.compile("|".join(edges), re.ASCII) if words else None

    def scrub(self, value: T) -> T:
        if self._found is None:
            return value
        scrubbed: T = self._scrub(value)
        return scrubbed

    def finds(self, value: Any) -> bool:
        if self._found is None:
            return False
        match value:
            case None | bool():
                return False
            case Mapping():
                return any(self.finds(name) or self.finds(member) for name, member in value.items())
            case list() | tuple() | Set():
                return any(self.finds(item) for item in value)
            case bytes():
                return self._found.search(_as_text(value)) is not None
            case _:
                return self._found.search(str(value)) is not None

    def _scrub(self, value: Any) -> Any:
        match value:
            case str():
                return self._replace(value)
            case bytes():
                return _as_bytes(self._replace(_as_text(value))) if self.finds(value) else value
            case None | bool():
                return value
            case int() | float():
                return MARK if self.finds(value) else value
            case Mapping():
                return {self._scrub(name): self._scrub(member) for name, member in value.items()}
            case list() | tuple() | set() | frozenset():
                return type(value)(self._scrub(item) for item in value)
            case BaseException():
                # Return its text: an exception of the same type may not accept one argument.
                return self._replace(str(value))
            case _:
                return value

    def _replace(self, text: str) -> str:
        if self._text is None or self._found is None or self._found.search(text) is None:
            return text
        return self._text.sub(MARK, text)


def _as_text(raw: bytes) -> str:
    return raw.decode(errors="surrogateescape")


def _as_bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _forms(secret: str) -> Iterable[str]:
    stripped = secret.strip()
    # Key files are often displayed line by line.
    lines = [line for line in secret.splitlines() if len(line) >= 16]
    for text in {secret, stripped if len(stripped) >= SHORTEST_SECRET else secret, *lines}:
        raw = text.encode(errors="surrogatepass")
        for escaped in (text, quote(raw), quote(raw, safe=""), quote_plus(raw), html.escape(text), repr(text)[1:-1]):
            yield escaped
            yield re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), escaped)
        for ascii_only in (True, False):
            once = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
            yield from (once, once.replace("/", "\\/"), json.dumps(once, ensure_ascii=ascii_only)[1:-1])
        for encoded in (base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()):
            yield from (encoded, encoded.rstrip("="), quote(encoded, safe=""))
        yield from (raw.hex(), raw.hex().upper())


def _inside_base64(raw: bytes) -> Iterable[str]:
    """Yield the secret's base64 inside a longer text, such as "Basic base64(user:secret)", for each of three offsets.

    The characters at either end contain bits of the neighbours too. These are the characters between, which do not
    depend on them.
    """
    for offset in range(3):
        encoded = base64.b64encode(bytes(offset) + raw)
        own = encoded[-(-offset * 8 // 6) : (offset + len(raw)) * 8 // 6].decode()
        # Fewer characters would match by chance. A secret this short is found only where it is encoded alone.
        if len(own) >= 8:
            yield from (own, own.translate(str.maketrans("+/", "-_")))
