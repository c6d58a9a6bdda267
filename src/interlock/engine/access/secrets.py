"""Secrets: values by name, stored encrypted, and decrypted only for the tool that a worker is about to call.

A stored secret belongs to the tenant and names the tools that may use it. Otherwise the author of a workflow could
pass any secret to a tool that sends it away. Tenant `default` may also have secrets in the environment of its
workers: INTERLOCK_SECRET_STRIPE_KEY for `${secrets.stripe_key}`. Only runs without a workspace may use those. A
stored secret of the same name has priority.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from uuid import UUID

from interlock.audit.redact import SHORTEST_SECRET, Scrubber
from interlock.engine.access import encryption
from interlock.engine.access.encryption import EncryptedValue
from interlock.engine.access.principal import DEFAULT_TENANT, Principal
from interlock.errors import Invalid, NotFound, Terminal
from interlock.ids import TenantId
from interlock.store.pool import Database, Row, Tx
from interlock.telemetry import log

LONGEST = 64 * 1024
_ENVIRONMENT = "INTERLOCK_SECRET_"
# How long a worker may use its cached value of a changed secret.
_KEEP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a secret: a call of a tool, or the signatures of a trigger, in one workspace."""

    workspace_id: str | None
    tool: str | None = None


@dataclass(frozen=True, slots=True)
class Binding:
    """What a secret may be used for."""

    tools: tuple[str, ...]
    # None: the whole tenant. Empty: only runs and triggers without a workspace.
    workspaces: tuple[str, ...] | None

    def why_not(self, name: str, use: Use) -> str | None:
        """Return why the secret may not be used so, as a sentence for the authors of the step; None if it may."""
        if use.tool is not None and not any(fnmatchcase(use.tool, pattern) for pattern in self.tools):
            return (
                f"Secret {name} is not for tool {use.tool}. An admin can set it again with "
                f"`interlock secret set {name} --tool {use.tool}`."
            )
        if self.workspaces is not None and use.workspace_id not in (self.workspaces or (None,)):
            where = f"workspace {use.workspace_id}" if use.workspace_id else "what is of no workspace"
            return f"Secret {name} is not for {where}. An admin can store it for that with `interlock secret set`."
        return None


# Every tool may use a variable of the worker, but no workspace may.
_OF_THE_ENVIRONMENT = Binding(("*",), ())


@dataclass(frozen=True, slots=True)
class DecryptedSecret:
    """Some secrets of a tenant, in the clear. Its repr shows nothing, so that no log can contain them."""

    values: Mapping[str, str] = field(repr=False)
    scrubber: Scrubber = field(repr=False)
    bindings: Mapping[str, Binding] = field(repr=False)

    def require(self, use: Use) -> None:
        for name, binding in self.bindings.items():
            if (why := binding.why_not(name, use)) is not None:
                raise Terminal(why)


# ---------------------------------------------------------------- storage


async def put(
    tx: Tx, database: Database, principal: Principal, name: str, value: str, *,
    tools: Sequence[str], workspaces: Sequence[str] | None = None,
) -> Row:  # fmt: skip
    principal.require_whole_tenant("secrets are")
    _check(value)
    sealed = encryption.encrypt(database.settings, encryption.place_of_secret(principal.tenant_id, name), value)
    row = await tx.row(
        "set_secret", principal.tenant_id, name, *sealed, principal.actor, list(tools),
        None if workspaces is None else list(workspaces),
    )  # fmt: skip
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
    """Raise if the value is invalid. The error contains neither the value nor its length."""
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        raise Invalid("a secret is text in UTF-8") from None
    if len(value) < SHORTEST_SECRET:
        raise Invalid(f"a secret has at least {SHORTEST_SECRET} characters; a shorter one would be found everywhere")
    if len(raw) > LONGEST:
        raise Invalid(f"a secret has at most {LONGEST:,} bytes")


# ---------------------------------------------------------------- use


class Secrets:
    """Decrypts secrets for workers. Values are cached for a moment, because many runs ask for the same ones at once."""

    _MOST = 1000

    def __init__(self, database: Database) -> None:
        self._database = database
        self._opened: dict[tuple[UUID, frozenset[str]], tuple[float, DecryptedSecret]] = {}

    async def open(self, tenant_id: TenantId, names: Iterable[str], use: Use) -> DecryptedSecret:
        """Return all of them. Raise Terminal, naming the secret, if one does not exist or may not be used so."""
        opened = await self._lately_opened(tenant_id, frozenset(names))
        opened.require(use)
        return opened

    async def _lately_opened(self, tenant_id: TenantId, wanted: frozenset[str]) -> DecryptedSecret:
        at, opened = self._opened.get((tenant_id, wanted), (float("-inf"), None))
        if opened is not None and time.monotonic() - at < _KEEP_SECONDS:
            return opened
        opened = await self._open(tenant_id, wanted)
        if len(self._opened) >= self._MOST:
            self._opened.clear()
        self._opened[tenant_id, wanted] = time.monotonic(), opened
        return opened

    async def _open(self, tenant_id: TenantId, names: frozenset[str]) -> DecryptedSecret:
        rows = await self._database.fetch("sealed_secrets", tenant_id, list(names))
        stored = {row["name"]: row for row in rows}
        is_default = any(row["tenant"] == DEFAULT_TENANT for row in rows)
        values = {
            name: self._unsealed(tenant_id, stored[name]) if name in stored else _from_environment(name, is_default)
            for name in sorted(names)
        }
        bindings = {
            name: _bound(stored[name]) if name in stored else _OF_THE_ENVIRONMENT for name in sorted(names)
        }  # fmt: skip
        return DecryptedSecret(values, Scrubber(values.values()), bindings)

    def _unsealed(self, tenant_id: TenantId, row: Row) -> str:
        name, sealed = row["name"], EncryptedValue(row["nonce"], row["ciphertext"])
        return encryption.decrypt(
            self._database.settings, encryption.place_of_secret(tenant_id, name), sealed, f"secret {name}"
        )


def _bound(row: Row) -> Binding:
    return Binding(tuple(row["tools"]), None if row["workspaces"] is None else tuple(row["workspaces"]))


def _from_environment(name: str, is_default: bool) -> str:
    value = os.environ.get(_ENVIRONMENT + name.upper(), "") if is_default else ""
    if not value:
        raise Terminal(
            f"There is no secret {name}. Set it with `interlock secret set {name} --tool TOOL`,"
            " or with `--no-tool` if only triggers use it."
        )
    if len(value) < SHORTEST_SECRET:
        raise Terminal(f"secret {name} is too short to be kept out of logs: {SHORTEST_SECRET} characters at least")
    return value
