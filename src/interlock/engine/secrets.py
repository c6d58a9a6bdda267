"""Secrets: values by name, kept encrypted, and opened only for the tool that is about to be called.

A stored secret is the tenant's own. Tenant `default` may also have them in the environment of its workers, as
INTERLOCK_SECRET_STRIPE_KEY for `${secrets.stripe_key}`; a stored one of the same name comes first.
"""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from interlock.engine import vault
from interlock.engine.principal import DEFAULT_TENANT, Principal
from interlock.engine.vault import Sealed
from interlock.errors import Invalid, NotFound, Terminal
from interlock.governance.redact import SHORTEST_SECRET, Scrubber
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log

LONGEST = 64 * 1024
_ENVIRONMENT = "INTERLOCK_SECRET_"
# How long a changed secret may still be used by a worker that had it in hand.
_KEEP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Opened:
    """Some secrets of a tenant, in the clear. It has no useful repr, so that no log can show them."""

    values: Mapping[str, str] = field(repr=False)
    scrubber: Scrubber = field(repr=False)


# ---------------------------------------------------------------- keeping them


async def put(tx: Tx, database: Database, principal: Principal, name: str, value: str) -> Row:
    principal.require_whole_tenant("secrets are")
    _check(value)
    sealed = vault.encrypt(database.settings, vault.place_of_secret(principal.tenant_id, name), value)
    row = await tx.row("set_secret", database.clock(), principal.tenant_id, name, *sealed, principal.actor)
    assert row is not None
    log.info("secret_set", name=name, version=row["version"], tenant=principal.tenant, by=principal.actor)
    return row


async def delete(tx: Tx, principal: Principal, name: str) -> Row:
    principal.require_whole_tenant("secrets are")
    row = await tx.row("delete_secret", principal.tenant_id, name)
    if row is None:
        raise NotFound(f"no secret {name}", code="SECRET_NOT_FOUND")
    log.info("secret_deleted", name=name, tenant=principal.tenant, by=principal.actor)
    return row


async def listed(database: Database, principal: Principal, cursor: str | None, limit: int) -> list[Row]:
    return await database.fetch("list_secrets", principal.tenant_id, cursor, limit)


def _check(value: str) -> None:
    """What is refused is not repeated, not even its length."""
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        raise Invalid("a secret is text in UTF-8") from None
    if len(value) < SHORTEST_SECRET:
        raise Invalid(f"a secret has at least {SHORTEST_SECRET} characters; a shorter one would be found everywhere")
    if len(raw) > LONGEST:
        raise Invalid(f"a secret has at most {LONGEST:,} bytes")


# ---------------------------------------------------------------- using them


class Secrets:
    """What workers open secrets with. What was opened is kept for a moment: runs that ask come in crowds."""

    _MOST = 1000

    def __init__(self, database: Database) -> None:
        self._database = database
        self._opened: dict[tuple[UUID, frozenset[str]], tuple[float, Opened]] = {}

    async def open(self, tenant_id: UUID, names: Iterable[str]) -> Opened:
        """All of them, or Terminal with the name of one that there is not."""
        wanted = frozenset(names)
        at, opened = self._opened.get((tenant_id, wanted), (float("-inf"), None))
        if opened is not None and time.monotonic() - at < _KEEP_SECONDS:
            return opened
        opened = await self._open(tenant_id, wanted)
        if len(self._opened) >= self._MOST:
            self._opened.clear()
        self._opened[tenant_id, wanted] = time.monotonic(), opened
        return opened

    async def _open(self, tenant_id: UUID, names: frozenset[str]) -> Opened:
        rows = await self._database.fetch("sealed_secrets", tenant_id, list(names))
        stored = {row["name"]: row for row in rows}
        is_default = any(row["tenant"] == DEFAULT_TENANT for row in rows)
        values = {
            name: self._unsealed(tenant_id, stored[name]) if name in stored else _from_environment(name, is_default)
            for name in sorted(names)
        }
        return Opened(values, Scrubber(values.values()))

    def _unsealed(self, tenant_id: UUID, row: Row) -> str:
        name, sealed = row["name"], Sealed(row["nonce"], row["ciphertext"])
        return vault.decrypt(self._database.settings, vault.place_of_secret(tenant_id, name), sealed, f"secret {name}")


def _from_environment(name: str, is_default: bool) -> str:
    value = os.environ.get(_ENVIRONMENT + name.upper(), "") if is_default else ""
    if not value:
        raise Terminal(f"no secret {name}; set it with `interlock secret set {name}`")
    if len(value) < SHORTEST_SECRET:
        raise Terminal(f"secret {name} is too short to be kept out of logs: {SHORTEST_SECRET} characters at least")
    return value
