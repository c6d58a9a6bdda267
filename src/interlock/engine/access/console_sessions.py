"""Console sessions: a person signs in with a key, and a cookie then represents the key for some hours."""

import hashlib
import secrets

from interlock.engine.access.principal import Principal
from interlock.engine.access.tenants import authenticate, principal_of
from interlock.errors import Unauthorized
from interlock.store.pool import Database

# A working day. Revoking the key ends its sessions at once.
SECONDS = 12 * 3600
# Each session may have as many open requests as a key, so the number of sessions per key is limited.
MOST_PER_KEY = 20


async def begin(database: Database, key: str) -> str:
    """Start a session and return its token. Only the hash of the token is stored."""
    if not key:
        raise Unauthorized("paste an API key: it begins with il_")
    principal = await authenticate(database, key)
    token = secrets.token_urlsafe(32)
    await database.fetch("begin_signin", _hash(token), principal.key_id, float(SECONDS), MOST_PER_KEY)
    return token


async def behind(database: Database, token: str) -> Principal | None:
    row = await database.row("signed_in", _hash(token))
    return principal_of(row) if row else None


async def end(database: Database, token: str) -> None:
    await database.fetch("end_signin", _hash(token))


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
