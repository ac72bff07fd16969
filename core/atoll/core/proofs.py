"""Proofs of misbehaviour: evidence that anybody can check, which names one member. No I/O.

So far there is one kind. If seats vote twice in one ballot, two results of one round can commit, which is a *fork*
(docs/explain/rounds.md). Both votes have the seat's signature. So two committed manifests of one round and ballot
convict every key that signed both. An honest seat never votes twice in a ballot, even after a crash or a restore,
because its vote is on disk before it is sent.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from atoll.core import protocol
from atoll.core.errors import PeerMisbehaved, SignatureInvalid
from atoll.core.identity import peer_id_of
from atoll.core.manifest import Head, manifest_hash, verify_vote
from atoll.core.quorum import Ballot
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2
from atoll.v1 import proofs_pb2 as wire

MAX_PROOF_BYTES = (4 << 20) + (64 << 10)  # two manifests, each of 2 MiB at most
DOUBLE_VOTE = "double-vote"


@dataclass(frozen=True)
class Breach:
    """The content of a verified proof."""

    culprit: str  # peer id
    kind: str
    run_id: str
    round: int
    sentence: str  # for people


def double_votes(first: Head, second: Head) -> tuple[bytes, ...]:
    """Serialised proofs against all signers of both committed manifests, if the manifests contradict each other.

    Empty if they have different rounds or ballots, or are equal. The signatures must have been verified before.
    """
    same_place = (_place(first.manifest), first.ballot) == (_place(second.manifest), second.ballot)
    if not same_place or first.hash == second.hash:
        return ()
    again = {item.public_key: item.signature for item in second.committed.signatures}
    return tuple(
        wire.Proof(
            protocol=protocol.ours(),
            double_vote=wire.DoubleVote(
                public_key=item.public_key,
                ballot_plan_version=first.ballot.plan_version,
                ballot_attempt=first.ballot.attempt,
                first_payload=first.committed.payload,
                first_signature=item.signature,
                second_payload=second.committed.payload,
                second_signature=again[item.public_key],
            ),
        ).SerializeToString(deterministic=True)
        for item in first.committed.signatures
        if item.public_key in again
    )


def verify_proof(data: bytes) -> Breach:
    """The content of a proof. Raises `PeerMisbehaved`, `ProtocolMismatch`, `SignatureInvalid` if it proves nothing."""
    if len(data) > MAX_PROOF_BYTES:
        raise PeerMisbehaved(f"a proof has at most {MAX_PROOF_BYTES} bytes; this one has {len(data)}")
    try:
        proof = wire.Proof.FromString(data)
    except DecodeError as error:
        raise PeerMisbehaved("a proof does not parse") from error
    protocol.check(proof.protocol, "the proof's writer")
    if proof.WhichOneof("breach") != "double_vote":
        raise PeerMisbehaved("the proof is of no kind that this release knows")
    return _verify_double_vote(proof.double_vote)


def proof_id(data: bytes) -> str:
    """Short name of a proof: the first 16 hex digits of its SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def _place(manifest: manifest_pb2.Manifest) -> tuple[object, ...]:
    """The fields that two results must share to contradict each other.

    Another run or epoch may decide a round again.
    """
    return manifest.round.run_id, manifest.round.number, manifest.previous_hash, manifest.epoch


def _verify_double_vote(votes: wire.DoubleVote) -> Breach:
    culprit, ballot = peer_id_of(votes.public_key), Ballot(votes.ballot_plan_version, votes.ballot_attempt)
    first, second = votes.first_payload, votes.second_payload
    for payload, signature in ((first, votes.first_signature), (second, votes.second_signature)):
        verify_vote(payload, ballot, pb.Signed(public_key=votes.public_key, signature=signature), culprit)
    named = _round_of_two_results(first, second)
    sentence = (
        f"it voted for two results of round {named.number} in attempt {ballot.attempt} under plan "
        f"{ballot.plan_version}: {manifest_hash(first).hex()[:12]}… and {manifest_hash(second).hex()[:12]}…"
    )
    return Breach(culprit, DOUBLE_VOTE, named.run_id, named.number, sentence)


def _round_of_two_results(first: bytes, second: bytes) -> pb.RoundId:
    """The round of both manifests. Raises an error if one node may vote for both."""
    try:
        one, other = (manifest_pb2.Manifest.FromString(payload) for payload in (first, second))
    except DecodeError as error:
        raise PeerMisbehaved("a proof holds a manifest that does not parse") from error
    if _place(one) != _place(other):
        raise SignatureInvalid("the two votes of the proof are of different rounds or histories, which is allowed")
    if one.round.number < 1 or not one.previous_hash:
        raise SignatureInvalid("the two signatures of the proof are of genesis, which nobody votes for")
    if manifest_hash(first) == manifest_hash(second):
        raise SignatureInvalid("the two votes of the proof are for one result, which is allowed")
    return one.round
