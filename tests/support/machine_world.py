"""A little world for round machines: virtual time, a network that can misbehave, no sockets, no torch.

The machines are the shipped ones. "Exchanging" is replaced by a function from the Start message to digests.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from atoll.core import protocol
from atoll.core.identity import Identity
from atoll.core.manifest import Head, sign_manifest
from atoll.core.plan import Assignment, Plan
from atoll.node.averaging import round_types as rt
from atoll.node.averaging.round import RoundMachine
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2

POLICY = rt.RoundPolicy(
    run_id="r",
    fragment=0,
    layers=2,
    elements=1000,
    part_elements=256,
    codec="int4",
    due_tokens=lambda committed, members: 100,
    round_max=timedelta(seconds=60),
    stop_tokens=10**9,
    minimum_lease=8,
)


def genesis() -> Head:
    payload = manifest_pb2.Manifest(
        protocol=protocol.ours(),
        round=pb.RoundId(run_id="r"),
        layers=[manifest_pb2.LayerState(layer=i) for i in (0, 1)],
    ).SerializeToString()
    return Head(manifest_pb2.CommittedManifest(payload=payload))


def make_plan(members: list[str], version: int = 1) -> Plan:
    assignments = tuple(
        Assignment(peer, 0, 1, ((i * 64, (i + 1) * 64),), 10_000, 1) for i, peer in enumerate(sorted(members))
    )
    return Plan("r", version, assignments, tuple((peer,) for peer in sorted(members)), genesis().hash)


def honest_digests(start) -> tuple[manifest_pb2.LayerState, ...]:
    seed = hashlib.sha256(start.SerializeToString()).digest()
    number = start.round.number
    return tuple(
        manifest_pb2.LayerState(layer=i, round=number, anchor_digest=seed, momentum_digest=seed) for i in (0, 1)
    )


@dataclass
class World:
    """N nodes on a virtual clock. `drop(sender, receiver, message)` decides what gets lost."""

    identities: list[Identity]
    now: float = 0.0
    policy: rt.RoundPolicy = POLICY
    drop: Callable[[str, str, object], bool] = lambda *_: False
    digests: dict[str, Callable] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    committed: dict[str, list[Head]] = field(default_factory=dict)
    reports: list[rt.Report] = field(default_factory=list)
    caught_up: list[tuple[str, str]] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.peers = [identity.peer_id for identity in self.identities]
        self.plan = make_plan(self.peers)
        self.machines = {
            identity.peer_id: RoundMachine(
                identity.peer_id,
                self.policy,
                lambda payload, identity=identity: sign_manifest(identity, payload),
                genesis(),
                self.plan,
                0.0,
            )
            for identity in self.identities
        }
        self.committed = {peer: [] for peer in self.peers}
        self.tokens = dict.fromkeys(self.peers, 0)
        self.queue: list[tuple[float, str, rt.Event]] = []

    def feed(self, peer: str, event: rt.Event) -> None:
        if peer in self.dead:
            return
        for action in self.machines[peer].step(event, self.now, 1_000):
            self._perform(peer, action)

    def _perform(self, peer: str, action: rt.Action) -> None:
        later = self.now + 0.05
        match action:
            case rt.Send(to, message):
                if not self.drop(peer, to, message):
                    self.queue.append((later, to, rt.Received(peer, message)))
            case rt.Freeze(round_id):
                tokens = self.tokens[peer]
                self.queue.append((later, peer, rt.Frozen(round_id, tokens, tokens // 10)))
            case rt.RunExchange(round_id, start):
                layers = self.digests.get(peer, honest_digests)(start)
                self.queue.append((later, peer, rt.Exchanged(round_id, layers)))
            case rt.Install(_, head, _):
                self.committed[peer].append(head)
                self.tokens[peer] = 0
            case rt.Resolve(round_id, peers):
                known = [
                    h for p in peers if p not in self.dead for h in self.committed[p] if h.round == round_id.number
                ]
                found = known[0].committed if known else None
                self.queue.append((later, peer, rt.Resolved(round_id, found)))
            case rt.Report():
                self.reports.append(action)
            case rt.CatchUp(reason):
                self.caught_up.append((peer, reason))
            case rt.Release():
                pass

    def run(self, seconds: float, train: bool = True) -> None:
        """Let time pass: every node trains 10 tokens and ticks every 0.2 s."""
        end = self.now + seconds
        while self.now < end:
            self.now = round(self.now + 0.05, 6)
            due = [item for item in self.queue if item[0] <= self.now]
            self.queue = [item for item in self.queue if item[0] > self.now]
            for _, peer, event in due:
                self.feed(peer, event)
            if int(self.now / 0.05) % 4 == 0:
                for peer in self.peers:
                    if train:
                        self.tokens[peer] += 10
                    self.feed(peer, rt.Progress(self.tokens[peer]))
                    self.feed(peer, rt.Tick())

    def heads(self) -> set[tuple[int, bytes]]:
        return {(m.head.round, m.head.hash) for p, m in self.machines.items() if p not in self.dead}
