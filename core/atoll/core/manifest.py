"""Manifests: what each outer round decided, hash-linked from genesis, signed by those who hold the result."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from google.protobuf.message import DecodeError

from atoll.core import protocol
from atoll.core.data_position import DataPosition
from atoll.core.errors import PeerMisbehaved, SignatureInvalid
from atoll.core.identity import Identity, peer_id_of, verify
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2

CONTEXT = "manifest"


@dataclass(frozen=True)
class Head:
    """A committed manifest, verified: where a run stands."""

    committed: manifest_pb2.CommittedManifest

    @cached_property
    def manifest(self) -> manifest_pb2.Manifest:
        """The parsed payload."""
        return manifest_pb2.Manifest.FromString(self.committed.payload)

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of the payload: how the next manifest and the DHT name this one."""
        return manifest_hash(self.committed.payload)

    @property
    def round(self) -> int:
        """The round number; 0 is genesis."""
        return self.manifest.round.number

    @property
    def committed_tokens(self) -> int:
        """Tokens of the whole run up to here."""
        return self.manifest.committed_tokens

    @cached_property
    def data(self) -> DataPosition:
        """Where the data stand."""
        return DataPosition.from_proto(self.manifest.data)

    @property
    def signers(self) -> frozenset[str]:
        """Peer ids whose signatures stand on it."""
        return frozenset(peer_id_of(item.public_key) for item in self.committed.signatures)


def manifest_hash(payload: bytes) -> bytes:
    """SHA-256 of a serialised manifest."""
    return hashlib.sha256(payload).digest()


def sign_manifest(identity: Identity, payload: bytes) -> pb.Signed:
    """A signature that says: I hold exactly this state. The payload itself is left out."""
    return pb.Signed(signature=identity.sign(CONTEXT, payload), public_key=identity.public_key)


def verify_signature(payload: bytes, signature: pb.Signed, expected_peer: str) -> None:
    """Raise `SignatureInvalid` unless `expected_peer` signed this payload."""
    if peer_id_of(signature.public_key) != expected_peer:
        raise SignatureInvalid("a manifest signature was made by another key than its sender's")
    verify(CONTEXT, payload, signature.signature, signature.public_key)


def read_head(committed: manifest_pb2.CommittedManifest, run_id: str) -> Head:
    """Parse a manifest from a peer or from disk and check every signature on it.

    Who *must* have signed is the caller's question (`require_signers`). Raises `PeerMisbehaved`,
    `SignatureInvalid`, `ProtocolMismatch`.
    """
    head = Head(committed)
    try:
        manifest = head.manifest
    except DecodeError as error:
        raise PeerMisbehaved("a manifest does not parse") from error
    protocol.check(manifest.protocol, "the manifest's writer")
    if manifest.round.run_id != run_id:
        raise PeerMisbehaved(f"the manifest is of run {manifest.round.run_id!r}, not {run_id!r}")
    _ = head.data  # its ranges are checked on reading
    for signature in committed.signatures:
        verify(CONTEXT, committed.payload, signature.signature, signature.public_key)
    return head


def require_signers(head: Head, peers: Iterable[str]) -> None:
    """Raise `SignatureInvalid` unless every one of `peers` signed."""
    missing = sorted(set(peers) - head.signers)
    if missing:
        raise SignatureInvalid(f"round {head.round}: the manifest lacks the signature of {', '.join(missing)}")


def contributors(head: Head) -> tuple[str, ...]:
    """The members of the round, in the order of the sum."""
    return tuple(item.peer_id for item in head.manifest.contributions)
