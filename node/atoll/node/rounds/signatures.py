"""Votes and commits with real signatures: the round machine's `VoteSigner` in a swarm."""

from __future__ import annotations

from atoll.core.identity import Identity
from atoll.core.manifest import (
    Head,
    parse_and_verify_head,
    require_quorum,
    sign_attestation,
    sign_vote,
    verify_attestation,
    verify_vote,
)
from atoll.core.quorum import Ballot, Electorate
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2


class IdentityVoteSigner:
    """Signs with this node's identity. Checks signatures of members and of the operator."""

    def __init__(self, identity: Identity, run_id: str, operator_key: bytes) -> None:
        self._identity = identity
        self._run_id = run_id
        self._operator_key = operator_key

    def vote(self, payload: bytes, ballot: Ballot) -> pb.Signed:
        """Our own vote."""
        return sign_vote(self._identity, payload, ballot)

    def check_vote(self, payload: bytes, ballot: Ballot, signature: pb.Signed, peer: str) -> None:
        """Raise `SignatureInvalid` unless `peer` cast this vote."""
        verify_vote(payload, ballot, signature, peer)

    def attest(self, payload: bytes) -> pb.Signed:
        """Our own attestation, as a holder, of this result."""
        return sign_attestation(self._identity, payload)

    def attested_by(self, payload: bytes, attestation: pb.Signed) -> str:
        """The peer that made this attestation. Raises `SignatureInvalid`."""
        return verify_attestation(payload, attestation)

    def check_commit(self, committed: manifest_pb2.CommittedManifest, electorate: Electorate) -> Head:
        """The head, if its votes are a quorum. Raises `SignatureInvalid`, `PeerMisbehaved`, `ProtocolMismatch`."""
        head = parse_and_verify_head(committed, self._run_id)
        require_quorum(head, electorate, self._operator_key)
        return head
