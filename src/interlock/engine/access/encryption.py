"""Encrypt text that the database stores only as ciphertext, and decrypt it.

Every ciphertext is bound to its row: moved to another row, it cannot be decrypted. Rows that were written under an
earlier key can be read as long as that key follows the new one; `encrypt_anew` re-encrypts them under the new one.
"""

import secrets as randomness
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from interlock.engine.access.key_store import SecretsKey
from interlock.errors import Conflict, Terminal
from interlock.ids import TargetId, TenantId
from interlock.settings import Settings
from interlock.store.pool import Database, Row, Tx


class EncryptedValue(NamedTuple):
    nonce: bytes
    ciphertext: bytes


def place_of_secret(tenant_id: TenantId, name: str) -> str:
    return f"interlock secret {tenant_id} {name}"


def place_of_webhook(tenant_id: TenantId, webhook_id: TargetId) -> str:
    return f"interlock webhook {tenant_id} {webhook_id}"


def encrypt(settings: Settings, place: str, text: str) -> EncryptedValue:
    """Encrypt under the newest key. Create a key if there is none."""
    nonce = randomness.token_bytes(12)
    return EncryptedValue(nonce, AESGCM(SecretsKey(settings).make()).encrypt(nonce, text.encode(), place.encode()))


def decrypt(settings: Settings, place: str, sealed: EncryptedValue, what: str) -> str:
    """Return the plaintext. Raise Terminal, naming `what`, if the key is missing or is another one."""
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
    """Re-encrypt all values under the newest key and return how many there were.

    An interruption loses nothing: the remaining values can still be read with their old key. A row that changed at
    the same time is skipped, because the change already used the newest key.
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

    return await database.run_in_transaction(work)


def _anew(settings: Settings, place: str, row: Row, what: str) -> EncryptedValue:
    try:
        return encrypt(settings, place, decrypt(settings, place, EncryptedValue(row["nonce"], row["ciphertext"]), what))
    except Terminal as error:
        raise Conflict(str(error), code="SECRETS_KEY_INVALID") from None
