"""Votes in a simulated run: how members sign them, and the coordinator's part (a Paxos acceptor)."""

import hashlib
from dataclasses import dataclass, field

from atoll.core.errors import SignatureInvalid
from atoll.core.manifest import Head
from atoll.core.quorum import COORDINATOR, Ballot, Electorate, LastVote
from atoll.core.round_id import RoundId
from atoll.node.rounds.types import CoordinatorVote
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2


class FakeVoteSigner:
    """Signatures that name their maker: cheap, and checked as strictly as real ones."""

    def __init__(self, me: str) -> None:
        self._me = me

    def vote(self, payload: bytes, ballot: Ballot) -> pb.Signed:
        return pb.Signed(signature=_stamp(payload, ballot), public_key=self._me.encode())

    def check_vote(self, payload: bytes, ballot: Ballot, signature: pb.Signed, peer: str) -> None:
        if (signature.signature, signature.public_key) != (_stamp(payload, ballot), peer.encode()):
            raise SignatureInvalid("not this peer's vote")

    def attest(self, payload: bytes) -> pb.Signed:
        return pb.Signed(signature=_word(payload), public_key=self._me.encode())

    def attested_by(self, payload: bytes, attestation: pb.Signed) -> str:
        if attestation.signature != _word(payload):
            raise SignatureInvalid("nobody's word")
        return attestation.public_key.decode(errors="replace")

    def check_commit(self, committed: manifest_pb2.CommittedManifest, electorate: Electorate) -> Head:
        stamp = _stamp(committed.payload, Ballot(committed.ballot_plan_version, committed.ballot_attempt))
        if any(item.signature != stamp for item in committed.signatures):
            raise SignatureInvalid("a vote of another ballot")
        if not electorate.decides(item.public_key.decode(errors="replace") for item in committed.signatures):
            raise SignatureInvalid("not enough votes")
        return Head(committed)


def _stamp(payload: bytes, ballot: Ballot) -> bytes:
    return hashlib.sha256(f"{ballot.plan_version}/{ballot.attempt}/".encode() + payload).digest()[:16]


def _word(payload: bytes) -> bytes:
    return b"attest" + hashlib.sha256(payload).digest()[:16]


@dataclass
class Acceptor:
    """The coordinator's seat."""

    up: bool = True
    since_version: int = 1  # of the base: older ballots are void
    promised: dict[int, Ballot] = field(default_factory=dict)
    voted: dict[int, LastVote] = field(default_factory=dict)

    def doubt(self, number: int) -> bytes:
        """What it voted for in that round."""
        return self.voted[number].payload if number in self.voted else b""

    def ask(self, round_id: RoundId, proposal: bytes) -> CoordinatorVote:
        if not self.up:
            return CoordinatorVote(round_id, proposal, False, None, None, "the coordinator cannot be reached")
        number, ballot = round_id.number, round_id.ballot
        before = self.voted.get(number)
        promised = self.promised.get(number)
        late = promised is not None and (ballot < promised or (ballot == promised and not proposal))
        if ballot.plan_version < self.since_version or late:
            return CoordinatorVote(round_id, proposal, False, before, None, "promised otherwise")
        self.promised[number] = ballot
        if not proposal:
            return CoordinatorVote(round_id, proposal, True, before, None, "")
        if before is not None and before.ballot == ballot and before.proposal != proposal:
            return CoordinatorVote(round_id, proposal, False, before, None, "voted otherwise")
        self.voted[number] = LastVote(ballot, proposal)
        vote = pb.Signed(signature=_stamp(self.voted[number].payload, ballot), public_key=COORDINATOR.encode())
        return CoordinatorVote(round_id, proposal, True, before, vote, "")
