"""Key files: the keys for signing and hashing, from the data directory of this machine or from the environment.

    signing.key      the private key; any process that can read it can seal the chain and make evidence
    signing.keys     the current and all earlier public keys, so that old signatures can be verified
    redaction.key    the secret behind the hashes in metadata; without it there are no hashes
    secrets.key      the key that encrypts stored secrets; every server and worker needs the same

Every call reads the files again, because another process may have rotated the key.
"""

import base64
import binascii
import contextlib
import fcntl
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

from interlock.audit.keys import Keyring, SigningKey, VerifyKey, pem_blocks
from interlock.audit.redact import tenant_salt
from interlock.errors import Conflict
from interlock.ids import TenantId
from interlock.settings import Settings, private_directory

_PEM = "-----BEGIN "
_LOOK_SECONDS = 1.0
_SHORTEST_REDACTION_KEY = 16


class Signing:
    """INTERLOCK_SIGNING_KEY is a file, or the key itself. Public keys that follow it are earlier ones."""

    def __init__(self, settings: Settings) -> None:
        given = settings.signing_key.get_secret_value().replace("\\n", "\n").strip() if settings.signing_key else ""
        self._text = given if given.startswith(_PEM) else None
        self._path = Path(given) if given and self._text is None else settings.data_dir / "signing.key"
        self._ring_path = settings.data_dir / "signing.keys"

    def key(self) -> SigningKey | None:
        """Return the signing key, or None if this process may not sign."""
        text = self._text or _read(self._path)
        return SigningKey.from_pem(_private(text)) if text is not None else None

    def make(self) -> SigningKey:
        """Return the key, and create it if it does not exist. Of many concurrent callers, one creates it for all."""
        key = self.key()
        if key is None:
            _write_once(self._path, SigningKey.generate().to_pem())
            key = self.key()
            assert key is not None
        self._remember(key.verify_key)
        return key

    def trusted(self) -> Keyring:
        texts = filter(None, (self._text or _read(self._path), _read(self._ring_path)))
        return Keyring.from_pem(*texts)

    def rotate(self) -> SigningKey:
        """Create a new key. Running processes use it without a restart; signatures of the old key stay valid."""
        if self._text is not None:
            raise Conflict(
                "the key stands in INTERLOCK_SIGNING_KEY; put a new one there, followed by the public key of the old",
                code="KEY_NOT_IN_A_FILE",
            )
        with self._locked():
            new = SigningKey.generate()
            # Add the public keys first, so that every signature can be verified at any moment.
            for key in filter(None, (self.key(), new)):
                self._add(key.verify_key)
            with _temporary(self._path, new.to_pem()) as written:
                os.replace(written, self._path)
            return new

    def _remember(self, key: VerifyKey) -> None:
        with contextlib.suppress(PermissionError), self._locked():
            self._add(key)

    def _add(self, key: VerifyKey) -> None:
        text = _read(self._ring_path) or ""
        if text and key.key_id in Keyring.from_pem(text):
            return
        with _temporary(self._ring_path, text + key.to_pem()) as written:
            os.replace(written, self._ring_path)

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        return _locked(self._ring_path.parent / "signing.lock")


class Salts:
    """Each tenant's salt, derived from one secret; None while this machine has no secret."""

    def __init__(self, settings: Settings) -> None:
        given = settings.redaction_key
        self._path = settings.data_dir / "redaction.key"
        self._master = given.get_secret_value().encode() if given else None
        self._salts: dict[UUID, bytes] = {}
        self._next_look = 0.0

    def make(self) -> None:
        if self._master is None:
            _write_once(self._path, secrets.token_hex(32))
            self._next_look = 0.0

    def __call__(self, tenant_id: TenantId) -> bytes | None:
        salt = self._salts.get(tenant_id)
        if salt is None and (master := self._read_master()) is not None:
            salt = self._salts[tenant_id] = tenant_salt(master, tenant_id)
        return salt

    def _read_master(self) -> bytes | None:
        # The file may appear at any time, but checking at every write would be too expensive.
        if self._master is None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            text = (_read(self._path) or "").strip()
            self._master = text.encode() if len(text) >= _SHORTEST_REDACTION_KEY else None
        return self._master


class SecretsKey:
    """INTERLOCK_SECRETS_KEY, or a file: 32 bytes in base64, followed by earlier keys."""

    def __init__(self, settings: Settings) -> None:
        self._given = settings.secrets_key.get_secret_value() if settings.secrets_key else None
        self._path = settings.data_dir / "secrets.key"

    def read(self) -> list[bytes]:
        """Return the keys, newest first; empty if there is no key here."""
        return [_secrets_key(text) for text in (self._given or _read(self._path) or "").split()]

    def make(self) -> bytes:
        """Return the newest key, and create it if there is none."""
        if self._given is None:
            _write_once(self._path, _new_secrets_key())
        keys = self.read()
        if not keys:
            raise Conflict(f"{self._path} cannot be read", code="SECRETS_KEY_INVALID")
        return keys[0]

    def rotate(self) -> None:
        """Put a new key before the existing ones. Keys in the environment are left to the operator."""
        if self._given is not None:
            return
        self.make()
        with _locked(self._path.parent / "secrets.lock"):
            keys = [_new_secrets_key(), *(base64.b64encode(key).decode() for key in self.read())]
            with _temporary(self._path, "\n".join(keys)) as written:
                os.replace(written, self._path)


def _new_secrets_key() -> str:
    return base64.b64encode(secrets.token_bytes(32)).decode()


def _secrets_key(text: str) -> bytes:
    with contextlib.suppress(binascii.Error, ValueError):
        key = base64.b64decode(text, validate=True)
        if len(key) == 32:
            return key
    # The message contains neither the text nor its length, because the text is a key, if a broken one.
    raise Conflict("INTERLOCK_SECRETS_KEY or secrets.key is not 32 bytes in base64", code="SECRETS_KEY_INVALID")


def _private(text: str) -> bytes:
    return next((block for block in pem_blocks(text) if b"PRIVATE KEY" in block), text.encode())


def _read(path: Path) -> str | None:
    """Return the content, or None if there is no file or another user owns it: we must not use that one."""
    try:
        return path.read_text() or None
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    private_directory(path.parent)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_once(path: Path, content: str) -> None:
    """Create the file unless it exists. No reader ever sees a partial file."""
    with _temporary(path, content) as written, contextlib.suppress(FileExistsError):
        os.link(written, path)


@contextlib.contextmanager
def _temporary(path: Path, content: str) -> Iterator[str]:
    """Write the content to disk under another name, readable only by its owner."""
    private_directory(path.parent)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
