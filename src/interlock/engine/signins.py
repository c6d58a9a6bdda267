"""Sign-ins: somebody showed their key to the console, and for some hours a cookie stands for it."""

import hashlib
import secrets

from interlock.engine.principal import Principal
from interlock.engine.tenants import authenticate, principal_of
from interlock.errors import Unauthorized
from interlock.store.pool import Database

# A working day; and a key that is revoked ends its sign-ins at once.
SECONDS = 12 * 3600


async def begin(database: Database, key: str) -> str:
    """The token of a new sign-in; only its hash is stored."""
    if not key:
        raise Unauthorized("paste an API key: it begins with il_")
    principal = await authenticate(database, key)
    token = secrets.token_urlsafe(32)
    await database.fetch("begin_signin", database.clock(), _hash(token), principal.key_id, float(SECONDS))
    return token


async def behind(database: Database, token: str) -> Principal | None:
    row = await database.row("signed_in", database.clock(), _hash(token))
    return principal_of(row) if row else None


async def end(database: Database, token: str) -> None:
    await database.fetch("end_signin", _hash(token))


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
