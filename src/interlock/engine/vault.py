"""The vault: text that stands in the database as ciphertext only, and the key that opens it.

Every ciphertext is bound to its place: moved to another row, it does not open. Rows that were written under an earlier
key open as long as that key follows the new one; `encrypt_anew` brings them under the new one.
"""

import secrets as randomness
from typing import NamedTuple
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from interlock.engine.keyfiles import SecretsKey
from interlock.errors import Conflict, Terminal
from interlock.settings import Settings
from interlock.store.pool import Database, Row, Tx


class Sealed(NamedTuple):
    nonce: bytes
    ciphertext: bytes


def place_of_secret(tenant_id: UUID, name: str) -> str:
    return f"interlock secret {tenant_id} {name}"


def place_of_webhook(tenant_id: UUID, webhook_id: UUID) -> str:
    return f"interlock webhook {tenant_id} {webhook_id}"


def encrypt(settings: Settings, place: str, text: str) -> Sealed:
    """Under the newest key, which is made now if there is none."""
    nonce = randomness.token_bytes(12)
    return Sealed(nonce, AESGCM(SecretsKey(settings).make()).encrypt(nonce, text.encode(), place.encode()))


def decrypt(settings: Settings, place: str, sealed: Sealed, what: str) -> str:
    """Terminal, with `what` could not be opened, if the key is not here or is another."""
    try:
        keys = SecretsKey(settings).read()
    except Conflict as error:
        raise Terminal(f"{what} cannot be opened: {error.detail}") from None
    if not keys:
        raise Terminal(f"{what} cannot be opened here: this process has no INTERLOCK_SECRETS_KEY")
    for key in keys:
        try:
            return AESGCM(key).decrypt(sealed.nonce, sealed.ciphertext, place.encode()).decode()
        except InvalidTag:
            continue
    raise Terminal(f"{what} was encrypted with another key; give every process the same INTERLOCK_SECRETS_KEY")


async def encrypt_anew(database: Database) -> int:
    """Everything under the newest key. Returns how many there were.

    Stopped half-way it loses nothing: what was not reached still opens with the key it has. A row that was changed
    meanwhile is left alone, for whoever changed it used the newest key.
    """

    async def work(tx: Tx) -> int:
        kept = await tx.fetch("all_secrets")
        for row in kept:
            place = place_of_secret(row["tenant_id"], row["name"])
            sealed = _anew(database.settings, place, row, f"secret {row['name']}")
            await tx.fetch("reseal_secret", row["tenant_id"], row["name"], row["nonce"], *sealed)
        webhooks = await tx.fetch("all_webhook_secrets")
        for row in webhooks:
            place = place_of_webhook(row["tenant_id"], row["id"])
            sealed = _anew(database.settings, place, row, f"the secret of webhook {row['id']}")
            await tx.fetch("reseal_webhook", row["id"], *sealed)
        return len(kept) + len(webhooks)

    return await database.command(work)


def _anew(settings: Settings, place: str, row: Row, what: str) -> Sealed:
    try:
        return encrypt(settings, place, decrypt(settings, place, Sealed(row["nonce"], row["ciphertext"]), what))
    except Terminal as error:
        raise Conflict(str(error), code="SECRETS_KEY_INVALID") from None
