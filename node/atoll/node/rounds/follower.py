"""One attempt as a member lives it, from the opener's Open to our own vote. Pure; machine.py feeds it.

Who does not hold the round's layers is its witness: it brings nothing, exchanges nothing, and votes for what enough
holders attest to. So all members decide about one history, whatever each of them holds.

Its steps raise `PeerMisbehaved` when the opener asks for what no honest opener would.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.fragments import Fragment
from atoll.core.manifest import Head, changed_layers, manifest_hash
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.core.verdicts import strip_unknown_verdict_fields
from atoll.node.rounds.decide import (
    check_payload,
    check_settle,
    check_start,
    is_attested,
    is_witness,
    manifest_payload,
)
from atoll.node.rounds.opener import StageDeadlines
from atoll.node.rounds.promises import Promises
from atoll.node.rounds.types import (
    Action,
    Complete,
    ExchangeDone,
    Freeze,
    Frozen,
    Obtain,
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
    tie_seconds: float  # what the opener may need to hear the coordinator
    deadline: float
    phase: Phase = Phase.FREEZING
    out: list[tuple[str, dp.RoundMessage] | Action] = field(default_factory=list)
    commit: manifest_pb2.CommittedManifest | None = None  # it came before our own result was staged
    brings: bool = False  # the head's snapshot is what it brings
    _ready: dp.Ready | None = None
    _parts: tuple[bytes, ...] = ()  # what we reported to hold
    _verdicts: tuple[manifest_pb2.Verdict, ...] = ()  # what we reported of our sums
    _start: dp.Start | None = None
    _settle: dp.Settle | None = None
    _adopting: bytes = b""  # the earlier result that this attempt is to commit

    @property
    def fragment(self) -> Fragment:
        """What the round averages."""
        return self.policy.fragment_of(self.round_id.number)

    @property
    def is_witness(self) -> bool:
        """Whether we hold nothing of that."""
        return self.me not in self.plan.holders(self.fragment.layers)

    def freeze(self) -> None:
        """Ask the trainer for the head's snapshot."""
        self.out.append(Freeze(self.round_id, self.fragment))

    def promise(self, frozen: Frozen, *, leaving: bool, brings: bool = True) -> None:
        """Ready: we bring that many tokens, and will not vote in earlier attempts."""
        self.brings = brings
        accepted = None
        if self.promises.voted is not None:
            ballot, payload = self.promises.voted.ballot, self.promises.voted.payload
            named = replace(self.round_id, plan_version=ballot.plan_version, attempt=ballot.attempt)
            signature = self.signer.vote(payload, ballot)
            accepted = dp.Accepted(ballot=named.to_proto(), payload=payload, signature=signature)
        self._ready = dp.Ready(
            round=self.round_id.to_proto(),
            tokens=frozen.tokens,
            samples=frozen.samples,
            accepted=accepted,
            voter=self.promises.votes,
            holds=sorted(
                manifest_hash(held) for held in self.promises.held if not is_witness(self.plan, self.me, held)
            ),
            leaving=leaving,
        )
        self.phase = Phase.READY
        self._pledge(dp.RoundMessage(ready=self._ready))

    def abstain(self) -> None:
        """Ready, without a promise, because we could not write one down; then others must decide the next round too."""
        assert self._ready is not None
        ready = dp.Ready()
        ready.CopyFrom(self._ready)
        ready.ClearField("accepted")
        ready.voter, ready.leaving = False, True
        self._ready = ready
        self.out.append((self.opener, dp.RoundMessage(ready=ready)))

    def start(self, message: dp.Start, now: float) -> None:
        """Exchange: from here on the snapshot is seen by others."""
        assert self._ready is not None
        check_start(self.policy, self.plan, self.round_id, self._ready, self.me, message)
        seconds = min(message.deadline_ms / 1000, self.paces.exchange_ceiling)
        self._start = message
        self.deadline = now + seconds + _SETTLE_FLOORS * self.paces.decision.floor_seconds
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
        self._parts, self._verdicts = event.digests, event.verdicts
        parts = dp.Parts(
            round=self.round_id.to_proto(), digests=event.digests, partial=event.partial, verdicts=event.verdicts
        )
        self.out.append((self.opener, dp.RoundMessage(parts=parts)))
        if self._settle is not None:
            self._complete(now)

    def settle(self, message: dp.Settle, now: float) -> None:
        """Which parts are the round's; the first word counts. It may come before our own exchange is over."""
        if self._settle is None:
            self._settle = message
            if self.phase is Phase.AWAITING_SETTLE:
                self._complete(now)

    def _complete(self, now: float) -> None:
        assert self._start is not None
        assert self._settle is not None
        check_settle(self._start, self._settle)
        seconds = min(self._settle.deadline_ms / 1000, self.paces.decision.ceiling_seconds)
        self.deadline = now + seconds + self.tie_seconds
        if self.is_witness:
            self.phase = Phase.STAGING  # until holders attest to a result
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
        self.phase = Phase.STAGING
        self.out.append(Complete(self.round_id, self._settle, seconds))

    def staged(self, layers: tuple[manifest_pb2.LayerState, ...]) -> bytes:
        """The payload of the state that was computed here."""
        assert self._start is not None
        assert self._settle is not None
        return manifest_payload(self.policy, self.plan, self.head, self._start, self._settle, layers)

    def adopt(self, message: dp.Adopt, now: float) -> None:
        """An earlier attempt's result may have been committed: fetch it, unless we hold it, or hold nothing of it."""
        check_payload(self.policy, self.plan, self.head, message.payload)
        self._adopting = message.payload
        seconds = min(message.deadline_ms / 1000, self.paces.exchange_ceiling)
        self.deadline = now + seconds + self.tie_seconds
        if is_witness(self.plan, self.me, message.payload):
            self.phase = Phase.STAGING  # until holders attest to it
        elif message.payload not in self.promises.held:
            self.phase = Phase.STAGING
            holders = tuple(sorted((set(message.holders) & set(self.plan.members)) - {self.me}))
            self.out.append(Obtain(self.round_id, message.payload, holders, seconds))

    def attest(self, message: dp.Adopt) -> None:
        """As a witness: take the result that enough holders attest to in this attempt."""
        check_payload(self.policy, self.plan, self.head, message.payload)
        if not is_witness(self.plan, self.me, message.payload):
            raise PeerMisbehaved("Adopt asks a holder to believe others about its own layers")
        if message.payload != self._due(message.payload):
            raise PeerMisbehaved("Adopt names another result than this attempt can have")
        manifest = manifest_pb2.Manifest.FromString(message.payload)
        said = {item.peer_id: item.signature for item in message.attestations}
        if not said.keys() <= self.plan.holders(changed_layers(manifest)):
            raise PeerMisbehaved("Adopt shows the word of members that do not hold the layers")
        if not is_attested(self.plan, self.plan.electorate(self.head), message.payload, said.keys()):
            raise PeerMisbehaved("Adopt shows the word of too few who hold the layers")
        try:
            for peer, signature in said.items():
                self.signer.check_attestation(message.payload, self.round_id.ballot, signature, peer)
        except AtollError as error:
            raise PeerMisbehaved(f"Adopt shows a word that nobody gave: {error}") from error

    def _due(self, payload: bytes) -> bytes:
        """What the attempt comes to when its layers become those of `payload`: the one way it can have ended."""
        if self._start is None or self._settle is None:
            return self._adopting
        layers = tuple(manifest_pb2.Manifest.FromString(payload).layers)
        return manifest_payload(self.policy, self.plan, self.head, self._start, self._settle, layers)

    def vote(self, payload: bytes) -> None:
        """Digest: we hold this result, or are its witness. Nobody votes for one that takes its voice away."""
        self.phase = Phase.VOTED
        said_so = self._ready is not None and self._ready.leaving
        left_out = self._settle is not None and self.me not in self._settle.present and not said_so
        attests = len(self.plan.cuts) > 0 and not is_witness(self.plan, self.me, payload)
        attestation = self.signer.attest(payload, self.round_id.ballot) if attests else None
        digest = dp.Digest(round=self.round_id.to_proto(), payload=payload, attestation=attestation)
        if not self.promises.votes or left_out:
            if attests:
                self.out.append((self.opener, dp.RoundMessage(digest=digest)))
            return
        digest.signature.CopyFrom(self.signer.vote(payload, self.round_id.ballot))
        self._pledge(dp.RoundMessage(digest=digest), payload)

    def _pledge(self, message: dp.RoundMessage, payload: bytes | None = None) -> None:
        """Send what binds us, once it is on disk."""
        if self.promises.votes:
            self.out.append(Pledge(self.promises.pledge(self.round_id.ballot, payload), self.opener, message))
        else:
            self.out.append((self.opener, message))
