"""One attempt of a member that follows it, from the opener's Open to the Commit. Pure; machine.py feeds it.

A holder of the round's layers takes part in the exchange and attests to the result. Any other member is a witness and
contributes nothing. Every seat votes for what the opener proposes, if enough holders attest to it.

Steps raise `PeerMisbehaved` when the opener asks for something that no honest opener would ask.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from atoll.core.errors import PeerMisbehaved
from atoll.core.fragments import Fragment
from atoll.core.manifest import Head, manifest_hash
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.core.verdicts import strip_unknown_verdict_fields
from atoll.node.rounds.decide import (
    check_attested,
    check_nonces,
    check_payload,
    check_settle,
    check_start,
    is_witness,
    manifest_payload,
)
from atoll.node.rounds.earlier_attempts import EarlierAttempts
from atoll.node.rounds.promises import Promises
from atoll.node.rounds.stage_deadlines import StageDeadlines
from atoll.node.rounds.types import (
    Action,
    Complete,
    ExchangeDone,
    Freeze,
    Frozen,
    Phase,
    Pledge,
    RoundPolicy,
    RunExchange,
    VoteSigner,
)
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

_SETTLE_FLOORS = 4  # multiple of the opener's slack after the exchange's time; then Settle is overdue


@dataclass
class Follower:
    """`out` collects messages (peer, message) and actions. The machine takes them after every call."""

    me: str
    opener: str
    round_id: RoundId
    plan: Plan  # the attempt ends under the plan it began with
    head: Head
    policy: RoundPolicy
    paces: StageDeadlines
    signer: VoteSigner
    promises: Promises
    earlier: EarlierAttempts
    coordinator_seconds: float  # seconds that the opener may wait for the coordinator's answer
    deadline: float
    phase: Phase = Phase.FREEZING
    out: list[tuple[str, dp.RoundMessage] | Action] = field(default_factory=list)
    commit: manifest_pb2.CommittedManifest | None = None  # the Commit, if it came before our own result was staged
    brings: bool = False  # this node contributes the head's snapshot
    _ready: dp.Ready | None = None
    _parts: tuple[bytes, ...] = ()  # digests of the parts that we reported
    _verdicts: tuple[manifest_pb2.Verdict, ...] = ()  # the verdicts that we reported
    _nonce: bytes = b""  # the nonce that we reported
    _start: dp.Start | None = None
    _settle: dp.Settle | None = None
    _payload: bytes = b""  # of the result that was computed here
    _proposal: dp.Proposal | None = None  # the proposal of this attempt

    @property
    def fragment(self) -> Fragment:
        """The fragment that the round averages."""
        return self.policy.fragment_of(self.round_id.number)

    @property
    def is_witness(self) -> bool:
        """Whether this node holds no layer of that fragment."""
        return self.me not in self.plan.holders(self.fragment.layers)

    @property
    def votes(self) -> bool:
        """Whether this node has a seat and knows all its earlier promises."""
        return self.promises.votes and self.me in self.plan.seats(self.head)

    def freeze(self) -> None:
        """Ask the trainer for the head's snapshot."""
        self.out.append(Freeze(self.round_id, self.fragment))

    def promise(self, frozen: Frozen, *, leaving: bool, brings: bool = True) -> None:
        """Send Ready: the tokens that we contribute and, with a seat, the promise not to vote in earlier attempts."""
        self.brings = brings
        accepted = None
        if self.votes and (voted := self.promises.voted) is not None:
            named = replace(self.round_id, plan_version=voted.ballot.plan_version, attempt=voted.ballot.attempt)
            accepted = dp.Accepted(
                ballot=named.to_proto(),
                signature=self.signer.vote(voted.payload, voted.ballot),
                proposal=dp.Proposal.FromString(voted.proposal),
            )
        self._ready = dp.Ready(
            round=self.round_id.to_proto(),
            tokens=frozen.tokens,
            samples=frozen.samples,
            accepted=accepted,
            voter=self.votes,
            holds=sorted(
                manifest_hash(held) for held in self.promises.held if not is_witness(self.plan, self.me, held)
            ),
            leaving=leaving,
            mark=self.promises.mark,
        )
        self.phase = Phase.READY
        self.earlier.promised(self.round_id)
        self._promise(dp.RoundMessage(ready=self._ready))

    def abstain(self) -> None:
        """Send Ready without a promise, because it could not be written to disk.

        Others then decide the next round too.
        """
        assert self._ready is not None
        ready = dp.Ready()
        ready.CopyFrom(self._ready)
        ready.ClearField("accepted")
        ready.ClearField("mark")
        ready.voter, ready.leaving = False, True
        self._ready = ready
        self.out.append((self.opener, dp.RoundMessage(ready=ready)))

    def start(self, message: dp.Start, now: float) -> None:
        """Check Start. A holder begins its exchange, so others see the snapshot; a witness reports no parts."""
        assert self._ready is not None
        check_start(self.policy, self.plan, self.round_id, self._ready, self.me, message)
        seconds = min(message.deadline_ms / 1000, self.paces.exchange_ceiling)
        self._start = message
        self.earlier.took_part(self.round_id, message.contributions)
        self.paces.exchange(message.codec).suggest(seconds)
        self.deadline = now + seconds + _SETTLE_FLOORS * self.paces.result.floor_seconds
        if self.is_witness:
            self.phase = Phase.AWAITING_SETTLE
            self.out.append((self.opener, dp.RoundMessage(parts=dp.Parts(round=self.round_id.to_proto()))))
            return
        self.phase = Phase.EXCHANGING
        if len(message.partition) > 1:  # a partition with one member does not measure any link
            self.paces.codec.begin(message.codec, now)
        self.out.append(RunExchange(self.round_id, message, seconds, self.fragment))

    def exchange_done(self, event: ExchangeDone, now: float) -> None:
        """Report the parts of our finished exchange."""
        assert self._start is not None
        self.phase = Phase.AWAITING_SETTLE
        if len(self._start.partition) > 1:
            self.paces.codec.end(now, complete=all(event.digests))
        self._parts, self._verdicts, self._nonce = event.digests, event.verdicts, event.nonce
        parts = dp.Parts(
            round=self.round_id.to_proto(),
            digests=event.digests,
            verdicts=event.verdicts,
            nonce=event.nonce,
        )
        self.out.append((self.opener, dp.RoundMessage(parts=parts)))
        if self._settle is not None:
            self._complete(now)

    def settle(self, message: dp.Settle, now: float) -> None:
        """Take the opener's decision on the parts. Only the first counts.

        It may come before our own exchange is over.
        """
        if self._settle is None:
            assert self._start is not None
            check_nonces(self._start, message, self.opener)
            check_settle(self._start, message, holds_parts=not (message.as_reported or self.is_witness))
            self._settle = dp.Settle()
            self._settle.CopyFrom(message)  # the opener sends the same object to others
            if self.phase is Phase.AWAITING_SETTLE:
                self._complete(now)

    def _complete(self, now: float) -> None:
        assert self._start is not None
        assert self._settle is not None
        if self._settle.as_reported:
            del self._settle.digests[:], self._settle.repairs[:], self._settle.whole[:]
            self._settle.digests.extend(self._parts)
        check_settle(self._start, self._settle, holds_parts=not self.is_witness)
        seconds = min(self._settle.deadline_ms / 1000, self.paces.result.ceiling_seconds)
        self.paces.result.suggest(seconds)
        self.deadline = now + 2 * seconds + self.coordinator_seconds
        if self.is_witness:
            self.phase = Phase.AWAITING_COMMIT
            return
        settled = zip(self._parts, self._settle.digests, strict=True)
        if self.me in self._settle.present and any(held and not given for held, given in settled):
            raise PeerMisbehaved("Settle gives up a part that we reported to hold")
        place = [item.peer_id for item in self._start.contributions].index(self.me)
        ours = tuple(
            strip_unknown_verdict_fields(verdict for verdict in self._settle.verdicts if verdict.reducer == place)
        )
        if ours != self._verdicts and (ours or self.me in self._settle.present):
            raise PeerMisbehaved("Settle does not repeat the verdicts that we reported")
        nonce = b"".join(self._settle.nonces[place : place + 1])
        if self.me != self.opener and nonce != self._nonce and (nonce or self.me in self._settle.present):
            raise PeerMisbehaved("Settle does not repeat the nonce that we reported")
        self.phase = Phase.STAGING
        self.out.append(Complete(self.round_id, self._settle, seconds))

    def staged(self, layers: tuple[manifest_pb2.LayerState, ...]) -> bytes:
        """The manifest payload of the state that was computed here."""
        assert self._start is not None
        assert self._settle is not None
        return manifest_payload(self.policy, self.plan, self.head, self._start, self._settle, layers)

    def attest(self, payload: bytes) -> None:
        """Send Digest: our attestation that we computed this result and hold it."""
        self._payload = payload
        self.phase = Phase.AWAITING_COMMIT
        digest = dp.Digest(round=self.round_id.to_proto(), payload=payload, attestation=self.signer.attest(payload))
        self.out.append((self.opener, dp.RoundMessage(digest=digest)))
        if self._proposal is not None and self._proposal.payload == payload:
            self._vote(self._proposal)  # the proposal came before our result

    def propose(self, message: dp.Propose, now: float) -> None:
        """Vote for the proposed result, if this or an earlier attempt can have it and enough holders attest to it.

        For a result of this attempt, a holder votes only once it has computed the same result. So most committed
        results have many holders.
        """
        payload, ballot, voted = message.proposal.payload, self.round_id.ballot, self.promises.voted
        second = self._proposal is not None and self._proposal.payload != payload
        second |= voted is not None and voted.ballot == ballot and voted.payload != payload
        if self.phase is Phase.FREEZING or second:
            raise PeerMisbehaved("a second proposal in one attempt, or one before our promise")
        check_payload(self.policy, self.plan, self.head, payload)
        check_attested(self.plan, self.signer, message.proposal)
        manifest = manifest_pb2.Manifest.FromString(payload)
        if manifest.round == self.round_id.to_proto():
            if self._start is None or self._settle is None or payload != self.staged(tuple(manifest.layers)):
                raise PeerMisbehaved("a proposal names another result than this attempt can have")
            if self._payload not in (b"", payload):
                raise PeerMisbehaved("a proposal names another result than we computed")
        else:
            self._check_earlier(manifest, payload)
        seconds = min(message.deadline_ms / 1000, self.paces.exchange_ceiling)
        self.paces.vote.suggest(seconds)
        self.deadline = max(self.deadline, now + seconds + self.coordinator_seconds)
        earlier = manifest.round != self.round_id.to_proto()
        self._proposal = message.proposal
        if earlier or self.is_witness or self._payload:
            self._vote(message.proposal)
        if self.phase is Phase.READY:  # a result of an earlier attempt: nothing else is left to do
            self.phase = Phase.AWAITING_COMMIT

    def _vote(self, proposal: dp.Proposal) -> None:
        manifest = manifest_pb2.Manifest.FromString(proposal.payload)
        if not self.votes or (manifest.round == self.round_id.to_proto() and self._is_left_out(manifest)):
            return
        ballot = self.round_id.ballot
        vote = dp.Vote(round=self.round_id.to_proto(), signature=self.signer.vote(proposal.payload, ballot))
        record = self.promises.pledge(ballot, proposal.SerializeToString(deterministic=True))
        self.out.append(Pledge(record, self.opener, dp.RoundMessage(vote=vote)))

    def _check_earlier(self, manifest: manifest_pb2.Manifest, payload: bytes) -> None:
        """Raise `PeerMisbehaved` if our own records contradict this result of an earlier attempt."""
        made = RoundId.from_proto(manifest.round)
        if self.earlier.contradicts(self.me, made, manifest.contributions):
            raise PeerMisbehaved("a proposal names members, or weights, that an earlier attempt did not have")
        for held in self.promises.held:
            if held != payload and RoundId.from_proto(manifest_pb2.Manifest.FromString(held).round) == made:
                raise PeerMisbehaved("a proposal names another result of an earlier attempt than we computed")

    def _is_left_out(self, manifest: manifest_pb2.Manifest) -> bool:
        """Whether this attempt would take our seat although we reported our parts and do not leave.

        Then we do not vote. For a result of an earlier attempt we vote all the same: our report may have come too late,
        and the result may be committed.
        """
        told = self._settle is not None and self.phase in (Phase.STAGING, Phase.AWAITING_COMMIT)
        if not told or self._ready is None or self._ready.leaving:
            return False
        return any(item.peer_id == self.me and not item.present for item in manifest.contributions)

    def _promise(self, message: dp.RoundMessage) -> None:
        """Send Ready after the promise is on disk.

        A node without a seat writes one too: only a node that can write gets a seat.
        """
        self.out.append(Pledge(self.promises.pledge(self.round_id.ballot), self.opener, message))
