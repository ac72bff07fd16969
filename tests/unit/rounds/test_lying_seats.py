"""A seat that opens and votes twice: it can fork a run, its votes prove it, and a recovery from either side ends it."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.machine_invariants import InvariantChecker
from support.machine_plans import make_plan
from support.machine_votes import Acceptor
from support.machine_world import World

from atoll.core.identity import Identity
from atoll.core.manifest import Head
from atoll.core.plan import Base, Plan
from atoll.core.proofs import double_votes, verify_proof
from atoll.core.quorum import Ballot, next_seats
from atoll.core.round_id import RoundId
from atoll.node.rounds import types as rt
from atoll.node.rounds.signatures import IdentityVoteSigner
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

SIZE = 7
FIRST_LIE = 4  # number of the round
KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([place]) * 32) for place in range(SIZE)]
IDENTITIES = sorted(map(Identity, KEYS), key=lambda it: it.peer_id)
NAMES = [it.peer_id for it in IDENTITIES]
LIAR = IDENTITIES[3]


class ForkedLedger(InvariantChecker):
    """Lets one side keep a second result, which is what the liar is after."""

    def __init__(self, peers: Sequence[str]) -> None:
        super().__init__(peers)
        self.second: dict[str, Head] = {}  # by who holds it

    def install(self, peer: str, head: Head, plan: Plan) -> None:
        known = self.committed.get(head.round)
        if known is not None and known.hash != head.hash and plan.accepts(head):
            self.second[peer] = head
            return
        super().install(peer, head, plan)


class TwoStories(World):
    """The liar opens. From some round on it tells half of the others another `Settle`, and lets both halves commit."""

    def __init__(self, seed: int) -> None:
        self._signers = {it.peer_id: IdentityVoteSigner(it, "r", b"") for it in IDENTITIES}
        super().__init__(SIZE, seed, names=NAMES, first=[LIAR.peer_id])
        self.ledger: ForkedLedger = ForkedLedger(self.peers)
        others = [peer for peer in self.peers if peer != LIAR.peer_id]
        self.rng.shuffle(others)
        self.fooled = set(others[:3])
        self._starts: dict[RoundId, dp.Start] = {}
        self._words: dict[bytes, dict[str, object]] = {}  # attestations of the second result, by payload
        self._second: dict[RoundId, dp.Proposal] = {}
        self._proposed: dict[RoundId, dp.Propose] = {}
        self._votes: dict[RoundId, list[object]] = {}  # for the second result
        self._committed: set[str] = set()

    def signer_of(self, peer: str) -> rt.VoteSigner:
        return self._signers[peer]

    def _send(self, sender: str, to: str, message: dp.RoundMessage) -> None:
        if sender == LIAR.peer_id:
            kind = message.WhichOneof("body")
            body = getattr(message, kind)
            round_id = RoundId.from_proto(body.round) if kind != "plan" else None
            if kind == "start":
                self._starts[round_id] = body
            if to in self.fooled and round_id is not None and round_id.number >= FIRST_LIE:
                if kind == "settle":
                    message = self._another_settle(message, self._starts[round_id])
                elif kind == "propose":
                    self._proposed[round_id] = body
                    self._propose_second(round_id)
                    return
                elif kind == "commit":
                    return
            if kind == "commit" and round_id.number >= FIRST_LIE:
                self._told("first")
        super()._send(sender, to, message)

    def _told(self, which: str) -> None:
        """It has what it wanted once both results committed; then it hides."""
        self._committed.add(which)
        if len(self._committed) == 2:
            self.at(0.0, self.kill, LIAR.peer_id)

    def _propose_second(self, round_id: RoundId) -> None:
        """Once it has the words for the second result, and the votes on the first are asked for."""
        if round_id in self._second and round_id in self._proposed and round_id not in self._votes:
            self._votes[round_id] = []
            told = self._proposed[round_id]
            propose = dp.Propose(round=told.round, proposal=self._second[round_id], deadline_ms=told.deadline_ms)
            for peer in self.fooled:
                super()._send(LIAR.peer_id, peer, dp.RoundMessage(propose=propose))

    def _another_settle(self, message: dp.RoundMessage, start: dp.Start) -> dp.RoundMessage:
        """The same but for a verdict of the liar's own sums, which nobody else can contradict."""
        told = dp.RoundMessage()
        told.CopyFrom(message)
        places = [item.peer_id for item in start.contributions]
        mine = places.index(LIAR.peer_id)
        other = next(place for place, item in enumerate(start.contributions) if item.weight and place != mine)
        verdicts = [it for it in told.settle.verdicts if (it.reducer, it.contributor) != (mine, other)]
        verdicts.append(manifest_pb2.Verdict(reducer=mine, contributor=other, parts_scaled=1))
        del told.settle.verdicts[:]
        told.settle.verdicts.extend(sorted(verdicts, key=lambda it: (it.reducer, it.contributor)))
        return told

    def _arrive(self, sender: str, to: str, message: dp.RoundMessage) -> None:
        if to == LIAR.peer_id and sender in self.fooled:
            if message.HasField("digest") and message.digest.round.number >= FIRST_LIE:
                self._take_digest(sender, message.digest)
                return
            if message.HasField("vote") and message.vote.round.number >= FIRST_LIE:
                self._take_vote(sender, message.vote)
                return
        super()._arrive(sender, to, message)

    def _take_digest(self, sender: str, digest: dp.Digest) -> None:
        words = self._words.setdefault(digest.payload, {})
        words[sender] = digest.attestation
        if len(words) == len(self.fooled):
            words[LIAR.peer_id] = self._signers[LIAR.peer_id].attest(digest.payload)
            round_id = RoundId.from_proto(digest.round)
            self._second[round_id] = dp.Proposal(
                payload=digest.payload, attestations=[words[peer] for peer in sorted(words)]
            )
            self._propose_second(round_id)

    def _take_vote(self, sender: str, vote: dp.Vote) -> None:
        round_id = RoundId.from_proto(vote.round)
        votes = self._votes[round_id]
        votes.append(vote.signature)
        if len(votes) == len(self.fooled):
            payload, ballot = self._second[round_id].payload, Ballot(round_id.plan_version, round_id.attempt)
            committed = manifest_pb2.CommittedManifest(
                payload=payload,
                signatures=[*votes, self._signers[LIAR.peer_id].vote(payload, ballot)],
                ballot_plan_version=ballot.plan_version,
                ballot_attempt=ballot.attempt,
            )
            commit = dp.RoundMessage(commit=dp.Commit(round=vote.round, manifest=committed))
            for peer in self.fooled:
                super()._send(LIAR.peer_id, peer, commit)
            self._told("second")

    def go_on_without_the_liar(self, head: Head) -> None:
        """As the coordinator does, which takes one of the two results."""
        honest = [peer for peer in self.peers if peer != LIAR.peer_id]
        self.ledger.recover(head.round - 1)
        self.ledger.committed[head.round] = head
        self.acceptor = Acceptor(True, 2)
        base = Base(head.hash, next_seats((), honest, honest), head.round, 2)
        self.issue(make_plan(honest, 2, base))


def forked(seed: int) -> tuple[TwoStories, Head, Head]:
    """A run as soon as two results of one round are installed, and these. The attack does not always succeed."""
    for attempt in range(10):
        world = TwoStories(100 * attempt + seed)
        if world.run(60, until=lambda world=world: bool(world.ledger.second)):
            second = next(iter(world.ledger.second.values()))
            return world, world.committed[second.round], second
    pytest.fail("the liar forked no run")


@pytest.mark.parametrize("seed", range(20))
def test_its_votes_convict_it_and_nobody_else(seed: int) -> None:
    _, first, second = forked(seed)
    assert first.hash != second.hash
    (proof,) = double_votes(first, second)
    breach = verify_proof(proof)
    assert (breach.culprit, breach.round) == (LIAR.peer_id, first.round)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("which", [0, 1])
def test_a_recovery_from_either_result_ends_the_fork(seed: int, which: int) -> None:
    world, *results = forked(seed)
    kept, void = results[which], results[1 - which]
    world.go_on_without_the_liar(kept)
    wanted = kept.round + 5
    assert world.run(120, until=lambda: all(node.machine.head.round >= wanted for node in world.live()))
    assert void.hash not in {head.hash for head in world.committed.values()}
    chain = [world.committed[number] for number in range(kept.round, wanted + 1)]
    assert chain[0].hash == kept.hash
    for before, after in pairwise(chain):
        assert after.manifest.previous_hash == before.hash
    assert len(world.live()) == SIZE - 1
