"""Tenants and keys: which exist, and how a key is checked."""

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from interlock.engine.access.principal import DEFAULT_TENANT, OURS, Principal
from interlock.errors import Conflict, Invalid, NotFound, Unauthorized
from interlock.ids import KeyId, TenantId, uuid7
from interlock.store.pool import Database, Row, Tx
from interlock.wire import Role


def _hash(key: str) -> bytes:
    # Keys are 256 random bits: a fast hash is as good as a slow one, and each request pays for it.
    return hashlib.sha256(key.encode()).digest()


def new_key() -> str:
    return "il_" + secrets.token_urlsafe(32)


class Principals:
    """A short-lived cache from keys to principals. A notification about a revoked key removes it at once."""

    _SECONDS, _MOST = 5.0, 10_000

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[bytes, tuple[Principal, float]] = {}
        self._right: set[bytes] = set()

    def forget(self, _: str = "") -> None:
        self._known.clear()

    def was_right(self, key: str) -> bool:
        """Return whether the key was valid at some time. Then it is not a guess, even if it was revoked since."""
        return _hash(key) in self._right

    def known(self, key: str) -> Principal | None:
        """Return the principal of a key, if it was looked up a moment ago."""
        known = self._known.get(_hash(key))
        return known[0] if known is not None and known[1] > time.monotonic() else None

    async def behind(self, key: str) -> Principal:
        digest = _hash(key)
        if (known := self.known(key)) is not None:
            return known
        principal = await authenticate(self._database, key)
        if len(self._known) >= self._MOST:
            self._known.clear()
        if len(self._right) >= self._MOST:
            self._right.clear()
        self._right.add(digest)
        self._known[digest] = (principal, time.monotonic() + self._SECONDS)
        return principal


async def authenticate(database: Database, key: str) -> Principal:
    row = await database.row("key_by_hash", _hash(key))
    if row is None:
        raise Unauthorized("this API key is not known or was revoked")
    return principal_of(row)


def principal_of(row: Row) -> Principal:
    """Return the principal of a key's row with its tenant's name."""
    return Principal(
        row["id"],
        row["tenant_id"],
        row["tenant"],
        row["name"],
        Role(row["role"]),
        row["workspace_id"],
        tuple(row["groups"]),
    )


async def bootstrap(database: Database, wanted: str | None) -> str | None:
    """Create the default tenant, and its admin key if there are no keys yet. Return the new key."""

    async def work(tx: Tx) -> str | None:
        await create_tenant(tx, DEFAULT_TENANT, exist_ok=True)
        if await tx.value("any_key"):
            return None
        tenant = await tx.row("tenant_named", DEFAULT_TENANT)
        assert tenant is not None
        key = wanted or new_key()
        await add_key(tx, tenant["id"], "admin", Role.ADMIN, key=key)
        return key

    return await database.run_in_transaction(work)


async def create_tenant(
    tx: Tx,
    name: str,
    *,
    max_concurrency: int | None = None,
    weight: float = 1.0,
    max_runs_per_min: int | None = None,
    max_writes_per_run: int | None = None,
    exist_ok: bool = False,
) -> Row:
    made = await tx.value("create_tenant", uuid7(), name, max_concurrency, weight, max_runs_per_min, max_writes_per_run)
    if made is None and not exist_ok:
        raise Conflict(f"tenant {name} exists already", code="TENANT_EXISTS")
    row = await tx.row("tenant_named", name)
    assert row is not None
    return row


async def add_key(
    tx: Tx,
    tenant_id: TenantId,
    name: str,
    role: Role,
    *,
    workspace_id: str | None = None,
    groups: Sequence[str] = (),
    key: str | None = None,
) -> tuple[Row, str]:
    """Add a key and return its row and the key itself. The key is shown this once and stored only as a hash."""
    if name.partition(":")[0] in OURS:
        raise Invalid(
            f"{name} is reserved for the engine itself ({', '.join(OURS)}). Choose another name for the key.",
            code="KEY_NAME_TAKEN",
        )
    key = key or new_key()
    row = await tx.row("create_key", uuid7(), tenant_id, workspace_id, name, role, _hash(key), groups)
    if row is None:
        raise Conflict("this key is in use already", code="KEY_EXISTS")
    return row, key


async def revoke_key(tx: Tx, principal: Principal, key_id: KeyId) -> Row:
    if key_id == principal.key_id:
        raise Conflict("a key cannot revoke itself; use another admin key", code="KEY_IN_USE")
    row = await tx.row("revoke_key", principal.tenant_id, key_id, principal.workspace_id)
    if row is None:
        raise NotFound(f"no key {key_id}")
    return row


async def update_tenant(tx: Tx, name: str, changes: Mapping[str, Any]) -> Row:
    """Change only the named values. None removes a cap."""
    caps = ("max_concurrency", "max_runs_per_min", "max_writes_per_run")
    asked = [part for cap in caps for part in (cap in changes, changes.get(cap))]
    row = await tx.row("update_tenant", name, *asked, changes.get("weight"))
    if row is None:
        raise NotFound(f"no tenant {name}", code="TENANT_NOT_FOUND")
    return row


async def usage(
    database: Database, tenant_id: TenantId | None, cursor: UUID | None = None, limit: int = 1
) -> list[Row]:
    """Return the usage of one tenant, or of all."""
    return await database.fetch("usage", tenant_id, cursor, limit)


async def tenants(database: Database, cursor: UUID | None, limit: int) -> list[Row]:
    return await database.fetch("list_tenants", cursor, limit)


async def keys(database: Database, principal: Principal, cursor: UUID | None, limit: int) -> list[Any]:
    return await database.fetch("list_keys", principal.tenant_id, cursor, limit, principal.workspace_id)
