"""Keys: the Ed25519 keys that sign checkpoints and evidence, and the public keys that verify them."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from interlock.errors import Invalid


class KeyInvalid(Invalid):
    title, code = "The key cannot be used", "KEY_INVALID"


@dataclass(frozen=True)
class VerifyKey:
    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != 32:
            raise KeyInvalid(f"an Ed25519 public key has 32 bytes, not {len(self.raw)}")

    @classmethod
    def from_pem(cls, pem: str | bytes) -> "VerifyKey":
        """Read a public key.

        A private key is accepted too, and its public half is used, in case the wrong file was given.
        """
        if b"PRIVATE KEY" in _bytes(pem):
            return SigningKey.from_pem(pem).verify_key
        try:
            key = load_pem_public_key(_bytes(pem))
        except (ValueError, UnsupportedAlgorithm) as error:
            raise KeyInvalid(f"this is not a public key in PEM form: {error}") from error
        if not isinstance(key, Ed25519PublicKey):
            raise KeyInvalid("this is a public key, but not an Ed25519 one")
        return cls(key.public_bytes_raw())

    def to_pem(self) -> str:
        return self._key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

    @cached_property
    def _key(self) -> Ed25519PublicKey:
        return Ed25519PublicKey.from_public_bytes(self.raw)

    @cached_property
    def key_id(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()[:16]

    def verifies(self, message: bytes, signature: bytes) -> bool:
        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


class SigningKey:
    """The private half of a key. Its repr reveals nothing, so that no log can show it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.verify_key = VerifyKey(key.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> "SigningKey":
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, pem: str | bytes) -> "SigningKey":
        try:
            key = load_pem_private_key(_bytes(pem), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise KeyInvalid("this is not a private key in PEM form without a password") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise KeyInvalid("this is a private key, but not an Ed25519 one")
        return cls(key)

    def to_pem(self) -> str:
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()

    @property
    def key_id(self) -> str:
        return self.verify_key.key_id

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"SigningKey({self.key_id})"


class Keyring:
    """The trusted public keys. A rotated key stays here, because its old signatures stay valid."""

    def __init__(self, keys: Iterable[VerifyKey] = ()) -> None:
        self._keys = {key.key_id: key for key in keys}

    @classmethod
    def from_pem(cls, *texts: str | bytes) -> "Keyring":
        """Read keys from texts that may each contain several PEM blocks."""
        return cls(VerifyKey.from_pem(block) for text in texts for block in pem_blocks(text))

    def get(self, key_id: str) -> VerifyKey | None:
        return self._keys.get(key_id)

    def __contains__(self, key_id: str) -> bool:
        return key_id in self._keys

    def __iter__(self) -> Iterator[VerifyKey]:
        return iter(self._keys.values())

    def __len__(self) -> int:
        return len(self._keys)

    def __or__(self, other: "Keyring") -> "Keyring":
        return Keyring([*self, *other])


def _bytes(pem: str | bytes) -> bytes:
    return pem.encode() if isinstance(pem, str) else pem


def pem_blocks(text: str | bytes) -> list[bytes]:
    end = b"-----END "
    parts = _bytes(text).split(end)
    heads, tails = parts[:-1], [part.partition(b"\n") for part in parts[1:]]
    if not heads:
        raise KeyInvalid("there is no key in PEM form in it")
    begins = [heads[0], *(rest for _, _, rest in tails[:-1])]
    return [begin + end + last + b"\n" for begin, (last, _, _) in zip(begins, tails, strict=True)]
