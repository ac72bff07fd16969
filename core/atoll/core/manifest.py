"""Manifests: the decision of each outer round, hash-linked from genesis and signed by the seats that voted for it.

This module makes and verifies two kinds of signatures, and checks manifests from peers and disk:

- a vote, over payload and ballot: a majority of the seats' votes commits the manifest. The coordinator's vote is signed
  with the operator's key;
- an attestation, over the payload: a member computed this result and holds it. Seats require attestations before they
  vote; an attestation is no vote.

Each kind has its own signature context, so one cannot be used as the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import cached_property

from google.protobuf.message import DecodeError

from atoll.core import protocol
from atoll.core.data_position import DataPosition
from atoll.core.errors import PeerMisbehaved, SignatureInvalid
from atoll.core.identity import Identity, peer_id_of, verify
from atoll.core.quorum import COORDINATOR, Ballot, Electorate
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2

VOTE_CONTEXT = "manifest"
ATTESTATION_CONTEXT = "attestation"
MAX_MEMBERS = 4096  # in one round


@dataclass(frozen=True)
class Head:
    """A verified committed manifest. A run's head is its newest one."""

    committed: manifest_pb2.CommittedManifest

    @cached_property
    def manifest(self) -> manifest_pb2.Manifest:
        """Parsed payload."""
        return manifest_pb2.Manifest.FromString(self.committed.payload)

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of the payload. The next manifest and the DHT name this manifest by it."""
        return manifest_hash(self.committed.payload)

    @cached_property
    def round(self) -> int:
        """Round number; 0 is genesis."""
        return self.manifest.round.number

    @cached_property
    def committed_tokens(self) -> int:
        """Tokens of the whole run, this round included."""
        return self.manifest.committed_tokens

    @cached_property
    def data(self) -> DataPosition:
        """Data position of the run after this round."""
        return DataPosition.from_proto(self.manifest.data)

    @property
    def ballot(self) -> Ballot:
        """Attempt in which the members voted for it."""
        return Ballot(self.committed.ballot_plan_version, self.committed.ballot_attempt)

    @cached_property
    def present(self) -> frozenset[str]:
        """Members that reported their parts at the round's end and stay."""
        return frozenset(item.peer_id for item in self.manifest.contributions if item.present)

    @cached_property
    def seats(self) -> tuple[str, ...]:
        """The seats of the next round, in the order of opening.

        Raises `PeerMisbehaved` if a seat is not a contributor.
        """
        made = self.manifest.contributions
        if any(place >= len(made) for place in self.manifest.seats):
            raise PeerMisbehaved("a manifest gives a seat to somebody who did not take part")
        members = tuple(made[place].peer_id for place in self.manifest.seats)
        return (*members, COORDINATOR) if self.manifest.coordinator_seat else members

    @cached_property
    def electorate(self) -> Electorate:
        """The seats that decide the next round."""
        return Electorate(frozenset(self.seats))

    @cached_property
    def signers(self) -> frozenset[str]:
        """Peer ids of its signatures."""
        return frozenset(peer_id_of(item.public_key) for item in self.committed.signatures)


def changed_layers(manifest: manifest_pb2.Manifest) -> range:
    """Return the layers that the round changed (genesis: all). Raises `PeerMisbehaved` if they are not consecutive."""
    changed = [place for place, layer in enumerate(manifest.layers) if layer.round == manifest.round.number]
    if not changed or changed != list(range(changed[0], changed[-1] + 1)):
        raise PeerMisbehaved("the layers that a manifest changes are not consecutive")
    return range(changed[0], changed[-1] + 1)


def manifest_hash(payload: bytes) -> bytes:
    """SHA-256 of a serialised manifest."""
    return hashlib.sha256(payload).digest()


def sign_vote(identity: Identity, payload: bytes, ballot: Ballot) -> pb.Signed:
    """Sign a vote for `payload` in `ballot`. The result omits the payload."""
    signature = identity.sign(VOTE_CONTEXT, _ballot_bytes(payload, ballot))
    return pb.Signed(signature=signature, public_key=identity.public_key)


def verify_vote(payload: bytes, ballot: Ballot, signature: pb.Signed, expected_peer: str) -> None:
    """Raise `SignatureInvalid` unless `expected_peer` signed this vote."""
    if (signer := peer_id_of(signature.public_key)) != expected_peer:
        raise SignatureInvalid(f"the vote is signed by {signer}, not by its sender {expected_peer}")
    verify(VOTE_CONTEXT, _ballot_bytes(payload, ballot), signature.signature, signature.public_key)


def sign_attestation(identity: Identity, payload: bytes) -> pb.Signed:
    """Sign an attestation: this holder of the layers computed this result. The result omits the payload."""
    return pb.Signed(signature=identity.sign(ATTESTATION_CONTEXT, payload), public_key=identity.public_key)


def verify_attestation(payload: bytes, attestation: pb.Signed) -> str:
    """Return the peer id that attests to this result. Raises `SignatureInvalid`."""
    verify(ATTESTATION_CONTEXT, payload, attestation.signature, attestation.public_key)
    return peer_id_of(attestation.public_key)


def half_attest(contributions: Iterable[manifest_pb2.Contribution], said: Set[str]) -> bool:
    """Return whether attestations come from contributors only, and from at least half of those with a weight.

    This rule is for results whose holders are unknown: every contributor counts as a holder. Members on probation may
    attest but do not count.
    """
    contributions = list(contributions)
    counted = {item.peer_id: item.weight > 0 for item in contributions if not item.on_probation}
    attesting = said & counted.keys()
    known = said <= {item.peer_id for item in contributions}
    return bool(attesting) and known and 2 * len(attesting) >= sum(counted.values())


def parse_and_verify_head(committed: manifest_pb2.CommittedManifest, run_id: str) -> Head:
    """Parse a manifest from a peer or from disk and verify every vote on it.

    It does not check that the votes suffice; `require_quorum` does. Raises `PeerMisbehaved`,
    `SignatureInvalid`, `ProtocolMismatch`.
    """
    head = parse_head(committed, run_id)
    verify_votes(head)
    return head


def parse_head(committed: manifest_pb2.CommittedManifest, run_id: str, max_signatures: int = MAX_MEMBERS) -> Head:
    """Parse a manifest and check its form. Its signers are only claims until `verify_votes`.

    A key may sign once, and at most `max_signatures` keys may sign. Without that limit a small message could cost
    minutes of verifying. Raises `PeerMisbehaved`, `SignatureInvalid`, `ProtocolMismatch`.
    """
    head = Head(committed)
    try:
        manifest = head.manifest
    except DecodeError as error:
        raise PeerMisbehaved("a manifest does not parse") from error
    protocol.check(manifest.protocol, "the manifest's writer")
    if manifest.round.run_id != run_id:
        raise PeerMisbehaved(f"the manifest is of run {manifest.round.run_id!r}, not {run_id!r}")
    if head.ballot < (made := Ballot(manifest.round.plan_version, manifest.round.attempt)):
        raise PeerMisbehaved(
            f"the votes are for attempt {head.ballot.attempt} of plan {head.ballot.plan_version}, earlier than the "
            f"manifest's own attempt {made.attempt} of plan {made.plan_version}"
        )
    if len(committed.signatures) > max_signatures:
        raise PeerMisbehaved(
            f"the manifest has {len(committed.signatures)} signatures; at most {max_signatures} members can sign"
        )
    if len({item.public_key for item in committed.signatures}) != len(committed.signatures):
        raise PeerMisbehaved("the manifest has two signatures of one member")
    _ = head.data, head.signers, head.seats  # these properties check their form
    return head


def verify_votes(head: Head) -> None:
    """Raise `SignatureInvalid` unless every vote on `head` verifies."""
    for signature in head.committed.signatures:
        verify(
            VOTE_CONTEXT, _ballot_bytes(head.committed.payload, head.ballot), signature.signature, signature.public_key
        )


def strip_unknown_manifest_fields(committed: manifest_pb2.CommittedManifest) -> manifest_pb2.CommittedManifest:
    """Return the manifest and its votes without unknown fields and payloads in votes, which no signature covers."""
    kept = manifest_pb2.CommittedManifest()
    kept.CopyFrom(committed)
    kept.DiscardUnknownFields()
    for signature in kept.signatures:
        signature.ClearField("payload")
    return kept


def require_quorum(head: Head, electorate: Electorate, operator_key: bytes) -> None:
    """Raise `SignatureInvalid` unless the votes on `head` are a quorum of `electorate`, which decides its round."""
    votes = head.signers
    if operator_key and peer_id_of(operator_key) in votes:
        votes |= {COORDINATOR}
    if not electorate.decides(votes):
        count = len(electorate.members & votes)
        raise SignatureInvalid(
            f"round {head.round} has the votes of {count} of {len(electorate.members)} seats, which is not a majority"
        )


def require_signers(head: Head, peers: Iterable[str]) -> None:
    """Raise `SignatureInvalid` unless all of `peers` signed."""
    missing = sorted(set(peers) - head.signers)
    if missing:
        raise SignatureInvalid(f"round {head.round}: the manifest lacks the signature of {', '.join(missing)}")


def _ballot_bytes(payload: bytes, ballot: Ballot) -> bytes:
    return f"{ballot.plan_version}/{ballot.attempt}\0".encode() + payload
