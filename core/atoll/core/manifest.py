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
from atoll.core.quorum import Ballot, Electorate
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2

VOTE_CONTEXT = "manifest"
TIE_BREAK_CONTEXT = "tie-break"
ATTESTATION_CONTEXT = "attestation"
MAX_MEMBERS = 4096  # of one round


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

    @cached_property
    def round(self) -> int:
        """The round number; 0 is genesis."""
        return self.manifest.round.number

    @cached_property
    def committed_tokens(self) -> int:
        """Tokens of the whole run up to here."""
        return self.manifest.committed_tokens

    @cached_property
    def data(self) -> DataPosition:
        """Where the data stand."""
        return DataPosition.from_proto(self.manifest.data)

    @property
    def ballot(self) -> Ballot:
        """The attempt in which it was voted for."""
        return Ballot(self.committed.ballot_plan_version, self.committed.ballot_attempt)

    @cached_property
    def electorate(self) -> Electorate:
        """The members that decide the next round."""
        return Electorate(frozenset(item.peer_id for item in self.manifest.contributions if item.present))

    @cached_property
    def signers(self) -> frozenset[str]:
        """Peer ids whose signatures stand on it."""
        return frozenset(peer_id_of(item.public_key) for item in self.committed.signatures)


def changed_layers(manifest: manifest_pb2.Manifest) -> range:
    """The consecutive layers that its round changed: all at genesis. Raises `PeerMisbehaved` when they are not."""
    changed = [place for place, layer in enumerate(manifest.layers) if layer.round == manifest.round.number]
    if not changed or changed != list(range(changed[0], changed[-1] + 1)):
        raise PeerMisbehaved("a manifest does not change consecutive layers")
    return range(changed[0], changed[-1] + 1)


def manifest_hash(payload: bytes) -> bytes:
    """SHA-256 of a serialised manifest."""
    return hashlib.sha256(payload).digest()


def sign_vote(identity: Identity, payload: bytes, ballot: Ballot) -> pb.Signed:
    """A vote in `ballot`: I hold exactly this state. The payload itself is left out."""
    return pb.Signed(
        signature=identity.sign(VOTE_CONTEXT, _ballot_bytes(payload, ballot)), public_key=identity.public_key
    )


def verify_vote(payload: bytes, ballot: Ballot, signature: pb.Signed, expected_peer: str) -> None:
    """Raise `SignatureInvalid` unless `expected_peer` cast this vote."""
    if peer_id_of(signature.public_key) != expected_peer:
        raise SignatureInvalid("a vote was signed by another key than its sender's")
    verify(VOTE_CONTEXT, _ballot_bytes(payload, ballot), signature.signature, signature.public_key)


def sign_attestation(identity: Identity, payload: bytes, ballot: Ballot) -> pb.Signed:
    """Of a member that holds the layers: I computed this. It decides nothing. The payload itself is left out."""
    return pb.Signed(
        signature=identity.sign(ATTESTATION_CONTEXT, _ballot_bytes(payload, ballot)), public_key=identity.public_key
    )


def verify_attestation(payload: bytes, ballot: Ballot, signature: pb.Signed, expected_peer: str) -> None:
    """Raise `SignatureInvalid` unless `expected_peer` attested to this."""
    if peer_id_of(signature.public_key) != expected_peer:
        raise SignatureInvalid(f"an attestation was signed by another key than that of {expected_peer}")
    verify(ATTESTATION_CONTEXT, _ballot_bytes(payload, ballot), signature.signature, signature.public_key)


def sign_tie_break(operator: Identity, payload: bytes, ballot: Ballot) -> pb.Signed:
    """The coordinator's vote. The payload itself is left out."""
    return pb.Signed(
        signature=operator.sign(TIE_BREAK_CONTEXT, _ballot_bytes(payload, ballot)), public_key=operator.public_key
    )


def verify_tie_break(payload: bytes, ballot: Ballot, signature: pb.Signed, operator_key: bytes) -> None:
    """Raise `SignatureInvalid` unless the operator's key cast this vote."""
    if signature.public_key != operator_key:
        raise SignatureInvalid("a tie-break was signed by another key than the operator's")
    verify(TIE_BREAK_CONTEXT, _ballot_bytes(payload, ballot), signature.signature, operator_key)


def parse_and_verify_head(committed: manifest_pb2.CommittedManifest, run_id: str) -> Head:
    """Parse a manifest from a peer or from disk and check every vote on it.

    Whose votes are *enough* is the caller's question (`require_quorum`). Raises `PeerMisbehaved`,
    `SignatureInvalid`, `ProtocolMismatch`.
    """
    head = parse_head(committed, run_id)
    verify_votes(head)
    return head


def parse_head(committed: manifest_pb2.CommittedManifest, run_id: str, max_signatures: int = MAX_MEMBERS) -> Head:
    """What `parse_and_verify_head` checks without any cryptography: who signed is only a claim until `verify_votes`.

    A key signs once, and `max_signatures` keys at most: else a few bytes could cost minutes of verifying. Raises the
    same.
    """
    head = Head(committed)
    try:
        manifest = head.manifest
    except DecodeError as error:
        raise PeerMisbehaved("a manifest does not parse") from error
    protocol.check(manifest.protocol, "the manifest's writer")
    if manifest.round.run_id != run_id:
        raise PeerMisbehaved(f"the manifest is of run {manifest.round.run_id!r}, not {run_id!r}")
    if head.ballot < Ballot(manifest.round.plan_version, manifest.round.attempt):
        raise PeerMisbehaved("the manifest was voted for before it was made")
    if len(committed.signatures) > max_signatures:
        raise PeerMisbehaved(
            f"the manifest carries {len(committed.signatures)} signatures; {max_signatures} could sign"
        )
    if len({item.public_key for item in committed.signatures}) != len(committed.signatures):
        raise PeerMisbehaved("the manifest carries two signatures of one member")
    _ = head.data, head.signers  # their form is checked on reading
    return head


def verify_votes(head: Head) -> None:
    """Raise `SignatureInvalid` unless every signature on `head` is genuine."""
    for signature in head.committed.signatures:
        verify(
            VOTE_CONTEXT, _ballot_bytes(head.committed.payload, head.ballot), signature.signature, signature.public_key
        )


def strip_unknown_manifest_fields(committed: manifest_pb2.CommittedManifest) -> manifest_pb2.CommittedManifest:
    """The manifest and its votes, and nothing that somebody hung on to them."""
    kept = manifest_pb2.CommittedManifest(
        payload=committed.payload,
        signatures=[_bare(item) for item in committed.signatures],
        ballot_plan_version=committed.ballot_plan_version,
        ballot_attempt=committed.ballot_attempt,
    )
    if committed.HasField("tie_break"):
        kept.tie_break.CopyFrom(_bare(committed.tie_break))
    return kept


def require_quorum(head: Head, electorate: Electorate, operator_key: bytes) -> None:
    """Raise `SignatureInvalid` unless the votes on `head` commit it, given who decides its round."""
    committed = head.committed
    tie_break = committed.HasField("tie_break")
    if tie_break:
        verify_tie_break(committed.payload, head.ballot, committed.tie_break, operator_key)
    if not electorate.decides(head.signers, tie_break):
        votes = len(electorate.members & head.signers)
        raise SignatureInvalid(f"round {head.round} has {votes} of {len(electorate.members)} votes: not enough")


def require_signers(head: Head, peers: Iterable[str]) -> None:
    """Raise `SignatureInvalid` unless every one of `peers` signed."""
    missing = sorted(set(peers) - head.signers)
    if missing:
        raise SignatureInvalid(f"round {head.round}: the manifest lacks the signature of {', '.join(missing)}")


def _bare(signature: pb.Signed) -> pb.Signed:
    return pb.Signed(signature=signature.signature, public_key=signature.public_key)


def _ballot_bytes(payload: bytes, ballot: Ballot) -> bytes:
    return f"{ballot.plan_version}/{ballot.attempt}\0".encode() + payload
