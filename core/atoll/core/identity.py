"""A node's Ed25519 identity: one key gives the libp2p peer id and signs messages.

The peer id is the base58 text of the identity multihash of the key's libp2p protobuf
(https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md): two bytes of multihash header, four of
protobuf, then the 32 key bytes. The key file is the same protobuf of the private key. p2pd reads that format,
so both use one file.

Every signature has a context, so that a signature for a record is never valid for a manifest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from atoll.core.errors import KeyFileCorrupt, SignatureInvalid
from atoll.core.files import read_private, write_private
from atoll.v1 import common_pb2 as pb

_PUBLIC_PREFIX = bytes([0x08, 0x01, 0x12, 0x20])  # libp2p PublicKey{Type: Ed25519, Data: 32 bytes}
_PRIVATE_PREFIX = bytes([0x08, 0x01, 0x12, 0x40])  # libp2p PrivateKey{Type: Ed25519, Data: seed ‖ public}
_MULTIHASH_PREFIX = bytes([0x00, 0x24])  # identity hash of 36 bytes


class Identity:
    """A private identity key. It stays in one process; other processes get signatures, not the key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key: bytes = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.peer_id: str = peer_id_of(self.public_key)

    @classmethod
    def generate(cls) -> Identity:
        """Create a new identity."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key at `path`, or create it with mode 0600. Raises `KeyFileCorrupt`, `DataDirUnusable`."""
        if not path.exists():
            fresh = cls.generate()
            write_private(path, fresh._to_libp2p())
            return fresh
        return cls.load(path)

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read the key at `path`. Raises `KeyFileCorrupt`."""
        data = read_private(path)
        seed, public = data[4:36], data[36:]
        if len(data) == 68 and data.startswith(_PRIVATE_PREFIX):
            identity = cls(Ed25519PrivateKey.from_private_bytes(seed))
            if identity.public_key == public:
                return identity
        raise KeyFileCorrupt(
            f"{path} is not an Ed25519 identity key that atoll wrote",
            "restore it from a backup, or move it away and join with a new token as a new node",
        )

    def _to_libp2p(self) -> bytes:
        seed = self._key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        return _PRIVATE_PREFIX + seed + self.public_key

    def sign(self, context: str, payload: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature of the payload for `context`."""
        return self._key.sign(_with_context(context, payload))

    def sign_message(self, context: str, payload: bytes) -> pb.Signed:
        """Return the payload with this identity's signature and public key."""
        return pb.Signed(payload=payload, signature=self.sign(context, payload), public_key=self.public_key)


def peer_id_of(public_key: bytes) -> str:
    """Return the libp2p peer id (base58) of a raw 32-byte Ed25519 public key. Raises `SignatureInvalid`."""
    if len(public_key) != 32:
        raise SignatureInvalid(f"an Ed25519 public key has {len(public_key)} bytes; it must have 32")
    return base58.b58encode(_MULTIHASH_PREFIX + _PUBLIC_PREFIX + public_key).decode()


def verify(context: str, payload: bytes, signature: bytes, public_key: bytes) -> None:
    """Raise `SignatureInvalid` unless `public_key` signed `payload` for `context`."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _with_context(context, payload))
    except (InvalidSignature, ValueError) as error:
        raise SignatureInvalid(f"the {context} signature does not verify") from error


def verify_signed(context: str, signed: pb.Signed, public_key: bytes) -> bytes:
    """Return the payload if `public_key` signed it for `context`; else raise `SignatureInvalid`."""
    if signed.public_key != public_key:
        raise SignatureInvalid(f"the {context} is signed by a key that is not the expected one")
    verify(context, signed.payload, signed.signature, public_key)
    return signed.payload


def fingerprint(public_key: bytes) -> str:
    """Hex SHA-256 of a public key; certificates name the operator by it."""
    return hashlib.sha256(public_key).hexdigest()


def _with_context(context: str, payload: bytes) -> bytes:
    return b"atoll/" + context.encode() + b"/1\0" + payload
