"""One attempt as a member lives it, from the opener's Open until it waits for the Commit. Pure; machine.py feeds it.

Whoever holds the round's layers exchanges, and attests to the result. Who does not is its witness, and brings nothing.
Apart from that, whoever has a seat votes for what the opener proposes, if enough holders attest to it.

Its steps raise `PeerMisbehaved` when the opener asks for what no honest opener would.
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

_SETTLE_FLOORS = 4  # of the opener's slack, after the exchange's time, until Settle is overdue


@dataclass
class Follower:
    """`out` collects messages (peer, message) and actions; the machine takes them after every call."""

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
    coordinator_seconds: float  # what the opener may need to hear the coordinator
    deadline: float
    phase: Phase = Phase.FREEZING
    out: list[tuple[str, dp.RoundMessage] | Action] = field(default_factory=list)
    commit: manifest_pb2.CommittedManifest | None = None  # it came before our own result was staged
    brings: bool = False  # the head's snapshot is what it brings
    _ready: dp.Ready | None = None
    _parts: tuple[bytes, ...] = ()  # what we reported to hold
    _verdicts: tuple[manifest_pb2.Verdict, ...] = ()  # what we reported of our sums
    _nonce: bytes = b""  # what we told with it
    _start: dp.Start | None = None
    _settle: dp.Settle | None = None
    _payload: bytes = b""  # of the result that was computed here
    _proposal: dp.Proposal | None = None  # the one of this attempt

    @property
    def fragment(self) -> Fragment:
        """What the round averages."""
        return self.policy.fragment_of(self.round_id.number)

    @property
    def is_witness(self) -> bool:
        """Whether we hold nothing of that."""
        return self.me not in self.plan.holders(self.fragment.layers)

    @property
    def votes(self) -> bool:
        """Whether we have a seat, and know all that we ever promised."""
        return self.promises.votes and self.me in self.plan.seats(self.head)

    def freeze(self) -> None:
        """Ask the trainer for the head's snapshot."""
        self.out.append(Freeze(self.round_id, self.fragment))

    def promise(self, frozen: Frozen, *, leaving: bool, brings: bool = True) -> None:
        """Ready: we bring that many tokens, and with a seat will not vote in earlier attempts."""
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
        """Ready, without a promise, because we could not write one down; then others must decide the next round too."""
        assert self._ready is not None
        ready = dp.Ready()
        ready.CopyFrom(self._ready)
        ready.ClearField("accepted")
        ready.ClearField("mark")
        ready.voter, ready.leaving = False, True
        self._ready = ready
        self.out.append((self.opener, dp.RoundMessage(ready=ready)))

    def start(self, message: dp.Start, now: float) -> None:
        """Exchange: from here on the snapshot is seen by others."""
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
        if len(message.partition) > 1:  # else nothing says how long it would take over links
            self.paces.codec.begin(message.codec, now)
        self.out.append(RunExchange(self.round_id, message, seconds, self.fragment))

    def exchange_done(self, event: ExchangeDone, now: float) -> None:
        """Our exchange is over: report the parts."""
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
        """Which parts are the round's; the first word counts. It may come before our own exchange is over."""
        if self._settle is None:
            assert self._start is not None
            check_nonces(self._start, message, self.opener)
            check_settle(self._start, message, holds_parts=not (message.as_reported or self.is_witness))
            self._settle = dp.Settle()
            self._settle.CopyFrom(message)  # an opener that follows itself sends the same message to others
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
        """The payload of the state that was computed here."""
        assert self._start is not None
        assert self._settle is not None
        return manifest_payload(self.policy, self.plan, self.head, self._start, self._settle, layers)

    def attest(self, payload: bytes) -> None:
        """Digest: this is what we computed, and we hold it."""
        self._payload = payload
        self.phase = Phase.AWAITING_COMMIT
        digest = dp.Digest(round=self.round_id.to_proto(), payload=payload, attestation=self.signer.attest(payload))
        self.out.append((self.opener, dp.RoundMessage(digest=digest)))
        if self._proposal is not None and self._proposal.payload == payload:
            self._vote(self._proposal)  # it came before

    def propose(self, message: dp.Propose, now: float) -> None:
        """Vote for the proposed result, if it can be this attempt's, or an earlier one's, and enough attest to it.

        A holder votes for this attempt's result once it holds that, too, so most results are safe with many. Where it
        computes another result it does not vote.
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
        if self.phase is Phase.READY:  # of an earlier attempt: there is nothing else to do
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
        """Raise `PeerMisbehaved` where we know better what an earlier attempt came to."""
        made = RoundId.from_proto(manifest.round)
        if self.earlier.contradicts(self.me, made, manifest.contributions):
            raise PeerMisbehaved("a proposal names members, or weights, that an earlier attempt did not have")
        for held in self.promises.held:
            if held != payload and RoundId.from_proto(manifest_pb2.Manifest.FromString(held).round) == made:
                raise PeerMisbehaved("a proposal names another result of an earlier attempt than we computed")

    def _is_left_out(self, manifest: manifest_pb2.Manifest) -> bool:
        """Whether this attempt would take our seat though we told what we have, and do not leave: that gets no vote.

        Of an earlier attempt we do: our word may have come too late then, and the result may be committed.
        """
        told = self._settle is not None and self.phase in (Phase.STAGING, Phase.AWAITING_COMMIT)
        if not told or self._ready is None or self._ready.leaving:
            return False
        return any(item.peer_id == self.me and not item.present for item in manifest.contributions)

    def _promise(self, message: dp.RoundMessage) -> None:
        """Send what binds a seat once it is on disk; without one, too, as only who can write may get one."""
        self.out.append(Pledge(self.promises.pledge(self.round_id.ballot), self.opener, message))
