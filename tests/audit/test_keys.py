"""Keys: creation, encoding, decoding and rotation."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from interlock.audit.keys import KeyInvalid, Keyring, SigningKey, VerifyKey


def test_a_key_survives_being_written_down() -> None:
    key = SigningKey.generate()
    again = SigningKey.from_pem(key.to_pem())
    public = VerifyKey.from_pem(key.verify_key.to_pem())
    assert again.key_id == key.key_id == public.key_id and len(key.key_id) == 16
    assert public.verifies(b"word", again.sign(b"word"))


def test_only_the_signed_words_verify() -> None:
    key = SigningKey.generate()
    signature = key.sign(b"word")
    assert not key.verify_key.verifies(b"work", signature)
    assert not key.verify_key.verifies(b"word", signature[:-1] + bytes([signature[-1] ^ 1]))
    assert not key.verify_key.verifies(b"word", b"")
    assert not SigningKey.generate().verify_key.verifies(b"word", signature)


def test_the_public_half_of_a_private_key_file_is_taken() -> None:
    key = SigningKey.generate()
    assert VerifyKey.from_pem(key.to_pem()) == key.verify_key


def test_a_keyring_holds_old_and_new_keys_also_from_one_file() -> None:
    old, new = SigningKey.generate(), SigningKey.generate()
    ring = Keyring.from_pem(old.verify_key.to_pem() + "\n" + new.verify_key.to_pem())
    assert len(ring) == 2 and old.key_id in ring and ring.get(new.key_id) == new.verify_key
    assert ring.get("0" * 16) is None
    assert len(Keyring([old.verify_key]) | Keyring([old.verify_key, new.verify_key])) == 2


def test_what_is_no_key_is_refused() -> None:
    foreign = X25519PrivateKey.generate()
    for pem in (
        "",
        "hello",
        "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        foreign.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        foreign.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    ):
        with pytest.raises(KeyInvalid):
            VerifyKey.from_pem(pem)
        with pytest.raises(KeyInvalid):
            SigningKey.from_pem(pem)
        with pytest.raises(KeyInvalid):
            Keyring.from_pem(pem)
    with pytest.raises(KeyInvalid):
        VerifyKey(b"short")


def test_a_private_key_does_not_show_itself() -> None:
    key = SigningKey.generate()
    assert repr(key) == f"SigningKey({key.key_id})"
