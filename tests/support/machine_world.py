"""A world for round machines: virtual time, a network, disks, trainers and a coordinator that can all misbehave.

The machines are the shipped ones; nothing here sleeps, opens a socket or needs torch, and everything follows from a
seed. What the world stands in for: the exchange (a function from who was there to digests), the trainer (a counter of
tokens), the disk (what a node keeps when it is killed), catch-up (the newest head of whoever can be reached) and the
coordinator (a Paxos acceptor). It keeps a ledger of all that was ever committed and raises `Violation` at once when an
invariant breaks:

- one manifest per round: no two members ever install different results for one number;
- votes: nobody votes for two results in one ballot, or in a ballot below its promise;
- no contribution counts twice: snapshots of one node in committed rounds never overlap;
- nobody installs a state that it does not hold.
"""

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from atoll.core import protocol
from atoll.core.errors import SignatureInvalid
from atoll.core.manifest import Head
from atoll.core.plan import Assignment, Base, Plan
from atoll.core.quorum import Ballot, Voted
from atoll.core.round_id import RoundId
from atoll.node.averaging import round_types as rt
from atoll.node.averaging.round import Phase, RoundMachine
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2

TICK = 0.25
POLICY = rt.RoundPolicy(
    run_id="r",
    fragment=0,
    layers=1,
    elements=1024,
    part_elements=256,
    codec="int4",
    due_tokens=lambda committed, members: 100,
    round_max=timedelta(seconds=60),
    stop_tokens=10**9,
    minimum_lease=8,
    ready_timeout=timedelta(seconds=4),
    exchange_timeout=timedelta(seconds=4),
    decision_timeout=timedelta(seconds=4),
)
OPERATOR = b"operator"


class Violation(AssertionError):
    """An invariant of the protocol is broken."""


def genesis() -> Head:
    payload = manifest_pb2.Manifest(
        protocol=protocol.ours(), round=pb.RoundId(run_id="r"), layers=[manifest_pb2.LayerState(layer=0)]
    ).SerializeToString()
    return Head(manifest_pb2.CommittedManifest(payload=payload))


GENESIS = genesis()


def make_plan(members: list[str], version: int = 1, base: Base | None = None) -> Plan:
    ordered = sorted(members)
    assignments = tuple(Assignment(peer, 0, 0, ((i * 64, (i + 1) * 64),), 10_000, 1) for i, peer in enumerate(ordered))
    routes = tuple((peer,) for peer in ordered)
    return Plan("r", version, assignments, routes, base or Base(GENESIS.hash, tuple(ordered)))


class FakeSeals:
    """Signatures that name their maker: cheap, and checked as strictly as real ones."""

    def __init__(self, me: str) -> None:
        self._me = me

    def vote(self, payload: bytes, ballot: Ballot) -> pb.Signed:
        return pb.Signed(signature=_stamp(payload, ballot), public_key=self._me.encode())

    def check_vote(self, payload: bytes, ballot: Ballot, signature: pb.Signed, peer: str) -> None:
        if (signature.signature, signature.public_key) != (_stamp(payload, ballot), peer.encode()):
            raise SignatureInvalid("not this peer's vote")

    def check_commit(self, committed, electorate) -> Head:
        ballot = Ballot(committed.ballot_plan_version, committed.ballot_attempt)
        if any(item.signature != _stamp(committed.payload, ballot) for item in committed.signatures):
            raise SignatureInvalid("a vote of another ballot")
        signers = {item.public_key.decode(errors="replace") for item in committed.signatures}
        tie = committed.HasField("tie_break") and committed.tie_break.signature == _stamp(committed.payload, ballot)
        if not electorate.decides(signers, tie):
            raise SignatureInvalid("not enough votes")
        return Head(committed)


def _stamp(payload: bytes, ballot: Ballot) -> bytes:
    return hashlib.sha256(f"{ballot.plan_version}/{ballot.attempt}/".encode() + payload).digest()[:16]


BLANK = rt.VoteRecord(0, b"", Ballot(0, 0))  # of a node that got its identity just now


@dataclass
class Disk:
    """What survives SIGKILL."""

    record: rt.VoteRecord | None = BLANK  # None: it was lost
    known: Head = GENESIS
    checkpoint: Head = GENESIS


@dataclass
class Node:
    """One member: a machine and what stands around it."""

    peer: str
    machine: RoundMachine
    disk: Disk
    skew: float
    incarnation: int = 0
    up: bool = True
    frozen: bool = False  # SIGSTOP
    leaving: bool = False
    catching_up: bool = False
    trained: int = 0  # tokens of this incarnation
    spent: int = 0  # of them, counted in committed rounds or given up
    snapshot: tuple[int, int] | None = None
    parts: dict[RoundId, tuple[bytes, ...]] = field(default_factory=dict)
    staging: dict[RoundId, bytes] = field(default_factory=dict)
    staged: set[bytes] = field(default_factory=set)  # digests of states that it holds beside its head
    backlog: list = field(default_factory=list)  # what came while it was frozen
    busy_since: float | None = None


@dataclass
class Acceptor:
    """The coordinator's part."""

    up: bool = True
    since_version: int = 1  # of the base: older ballots are void
    promised: dict[int, Ballot] = field(default_factory=dict)
    voted: dict[int, Voted] = field(default_factory=dict)

    def doubt(self, number: int) -> bytes:
        """What it voted for in that round."""
        return self.voted[number].payload if number in self.voted else b""

    def ask(self, round_id: RoundId, payload: bytes) -> rt.TieBreak:
        number, ballot = round_id.number, round_id.ballot
        before = self.voted.get(number)
        if ballot.plan_version < self.since_version or ballot < self.promised.get(number, ballot):
            return rt.TieBreak(round_id, payload, False, before, None, "promised otherwise")
        self.promised[number] = ballot
        if not payload:
            return rt.TieBreak(round_id, payload, True, before, None, "")
        if before is not None and before.ballot == ballot and before.payload != payload:
            return rt.TieBreak(round_id, payload, False, before, None, "voted otherwise")
        self.voted[number] = Voted(ballot, payload)
        vote = pb.Signed(signature=_stamp(payload, ballot), public_key=OPERATOR)
        return rt.TieBreak(round_id, payload, True, before, vote, "")


class World:
    """`size` nodes on a virtual clock, quiet unless told otherwise."""

    def __init__(
        self, size: int, seed: int = 0, machine: Callable[..., RoundMachine] = RoundMachine, policy=POLICY
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.policy = policy
        self.make_machine = machine
        self.peers = [f"p{i}" for i in range(size)]
        self.plan = make_plan(self.peers)
        self.acceptor = Acceptor()
        self.cut: set[frozenset[str]] = set()  # pairs that cannot talk
        self.loss = self.duplicate = 0.0
        self.delay = (0.01, 0.08)
        self.drop: Callable[[str, str, object], bool] = lambda *_: False
        self.crash_probability = 0.0  # per action of any node
        self.step_seconds: dict[str, float] = {}  # of an inner step: a snapshot waits for its end
        self.checkpoint_probability = 1.0
        self.layers_of: Callable[[str, bytes], bytes] = lambda peer, digest: digest
        self.events: list = []
        self.sequence = 0
        self.reports: list[rt.Report] = []
        self.caught_up: list[tuple[str, str]] = []
        self.killed: list[str] = []
        # the ledger
        self.committed: dict[int, Head] = {}
        self.installed: dict[str, list[Head]] = {peer: [] for peer in self.peers}
        self.contributed: dict[tuple[RoundId, str], tuple[int, int, int]] = {}  # → incarnation, from, to
        self.counted: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self.votes: dict[tuple[str, int, Ballot], bytes] = {}
        self.promises: dict[tuple[str, int], Ballot] = {}
        self.sums: dict[tuple[RoundId, int], tuple[bytes, frozenset[str]]] = {}
        self.exchanging: dict[RoundId, set[str]] = {}
        self.nodes = {peer: self._born(peer, Disk(), GENESIS, self.plan) for peer in self.peers}
        for i, peer in enumerate(self.peers):
            self._at(TICK * (1 + i / size), self._tick, peer, 0)

    # --- shaping the world -----------------------------------------------------------------------------

    def kill(self, peer: str) -> None:
        node = self.nodes[peer]
        if node.up:
            node.up, node.frozen = False, False
            node.incarnation += 1
            self.killed.append(peer)
            for other in self.peers:
                if other != peer and self.rng.random() < 0.8:
                    self._at(self._latency(), self._hear_of_loss, other, peer)

    def restart(self, peer: str, *, disk: bool = True) -> None:
        """Start again, with what the disk holds or with nothing but the identity, at the newest reachable head."""
        old = self.nodes[peer]
        if old.up:
            return
        kept = old.disk if disk else Disk(record=None)
        # a machine at an older head than the checkpoint would not start: catch-up never goes back
        head = max([self.newest_reachable(peer), kept.checkpoint], key=lambda item: item.round)
        kept.known = max(kept.known, head, key=lambda item: item.round)  # what is fetched is on disk first
        node = self._born(peer, kept, head, self.plan)
        node.incarnation, node.skew = old.incarnation, old.skew
        self.nodes[peer] = node
        self._at(TICK, self._tick, peer, node.incarnation)

    def leave(self, peer: str) -> None:
        """In order: after its next round it is gone."""
        self.nodes[peer].leaving = True
        self.feed(peer, rt.Leave())

    def drop_connection(self, peer: str, other: str) -> None:
        """Both live, and dial again."""
        self._hear_of_loss(peer, other)
        self._hear_of_loss(other, peer)

    def freeze(self, peer: str) -> None:
        self.nodes[peer].frozen = True

    def thaw(self, peer: str) -> None:
        node = self.nodes[peer]
        if not node.frozen:
            return
        node.frozen = False
        backlog, node.backlog = node.backlog, []
        for work, arguments in backlog:
            self._at(0.0, work, *arguments)

    def part(self, *groups: list[str]) -> None:
        """Only peers of one group can talk."""
        self.cut = {
            frozenset((a, b)) for one in groups for other in groups if one is not other for a in one for b in other
        }

    def heal(self) -> None:
        self.cut, self.loss, self.duplicate, self.crash_probability = set(), 0.0, 0.0, 0.0
        self.acceptor.up = True

    def issue(self, plan: Plan, to: list[str] | None = None) -> None:
        """The coordinator's newest plan; those in `to` hear of it at once."""
        self.plan = plan
        for peer in to if to is not None else self.peers:
            self._at(self._latency(), self._hear_plan, peer, plan)

    def recover(self) -> int:
        """The operator goes on from the newest state that anyone holds; what came after it is void."""
        head = max((node.machine.head for node in self.live()), key=lambda item: item.round)
        version = self.plan.version + 1
        base = Base(head.hash, tuple(sorted(self.peers)), head.round, version)
        kept = [self.committed[number] for number in sorted(self.committed) if number <= head.round]
        self.committed, self.counted = {}, {}
        for item in kept:
            self.committed[item.round] = item
            self._count(item)
        self.promises, self.votes = {}, {}  # of ballots that are void
        self.acceptor = Acceptor(self.acceptor.up, version)
        self.issue(make_plan(self.peers, version, base))
        return head.round

    # --- time ------------------------------------------------------------------------------------------

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass; True as soon as `until` holds."""
        end = self.now + seconds
        while self.events and self.events[0][0] <= end:
            self.now, _, work, arguments = heapq.heappop(self.events)
            work(*arguments)
            if until():
                return True
        self.now = end
        return until()

    def _at(self, delay: float, work: Callable[..., None], *arguments) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + delay, self.sequence, work, arguments))

    def _latency(self) -> float:
        return self.rng.uniform(*self.delay)

    def _tick(self, peer: str, incarnation: int) -> None:
        node = self.nodes[peer]
        if node.incarnation != incarnation or not node.up:
            return
        self._at(TICK, self._tick, peer, incarnation)
        if node.frozen:
            return
        node.trained += 10
        if not node.catching_up:
            self.feed(peer, rt.Progress(node.trained - node.spent, self.step_seconds.get(peer, 0.3)))
            self.feed(peer, rt.Tick())
        self._check_deadline(node)

    # --- a node's shell --------------------------------------------------------------------------------

    def _born(self, peer: str, disk: Disk, head: Head, plan: Plan) -> Node:
        skew = self.rng.uniform(-1000, 1000)
        machine = self.make_machine(
            peer, self.policy, FakeSeals(peer), head, plan, self.now + skew, disk.record, disk.known
        )
        return Node(peer, machine, disk, skew)

    def feed(self, peer: str, event: rt.Event) -> None:
        """Take one event and carry out what the machine wants, unless the node dies in between."""
        node = self.nodes[peer]
        if not node.up:
            return
        for action in node.machine.step(event, self.now + node.skew, 1_000):
            if self.crash_probability and self.rng.random() < self.crash_probability:
                self.kill(peer)
                return
            self._perform(node, action)

    def _later(self, delay: float, node: Node, event: rt.Event) -> None:
        self._at(delay, self._deliver, node.peer, node.incarnation, event)

    def _deliver(self, peer: str, incarnation: int, event: rt.Event) -> None:
        node = self.nodes[peer]
        if node.incarnation != incarnation or not node.up:
            return
        if node.frozen:
            node.backlog.append((self._deliver, (peer, incarnation, event)))
        else:
            self.feed(peer, event)

    def _perform(self, node: Node, action: rt.Action) -> None:
        match action:
            case rt.Send(to, message):
                self._send(node.peer, to, message)
            case rt.Pledge(record, to, message):
                self._pledge(node, record)
                if self.crash_probability and self.rng.random() < self.crash_probability:
                    self.kill(node.peer)
                elif to == node.peer:
                    self._later(0.002, node, rt.Received(to, message))
                else:
                    self._send(node.peer, to, message)
            case rt.SharePlan(to):
                if self._can_talk(node.peer, to):
                    self._at(self._latency(), self._hear_plan, to, node.machine.plan)
            case rt.Freeze(round_id):
                delay = self.rng.uniform(0.0, self.step_seconds.get(node.peer, 0.3))
                self._at(delay, self._freeze_snapshot, node, node.incarnation, round_id)
            case rt.RunExchange(round_id, start, seconds):
                self._run_exchange(node, round_id, start, seconds)
            case rt.Complete(round_id, settle, _):
                self._at(self.rng.uniform(0.01, 0.3), self._complete, node, node.incarnation, round_id, settle)
            case rt.Obtain(round_id, payload, holders, _):
                self._at(self.rng.uniform(0.05, 1.0), self._obtain, node, node.incarnation, round_id, payload, holders)
            case rt.AskCoordinator(round_id, payload):
                self._at(self._latency(), self._ask, node, node.incarnation, round_id, payload)
            case rt.Release(round_id, thaw):
                node.parts.pop(round_id, None)
                if thaw:
                    node.snapshot = None
            case rt.Install(head, _, counted):
                self._install(node, head, counted)
            case rt.CatchUp(reason):
                self._begin_catch_up(node, reason)
            case rt.Report():
                self.reports.append(action)

    def _send(self, sender: str, to: str, message) -> None:
        if self.drop(sender, to, message) or not self._can_talk(sender, to) or to not in self.nodes:
            return
        for _ in range(2 if self.rng.random() < self.duplicate else 1):
            if self.rng.random() >= self.loss:
                copy = type(message).FromString(message.SerializeToString())
                self._at(self._latency(), self._arrive, sender, to, copy)

    def _arrive(self, sender: str, to: str, message) -> None:
        node = self.nodes[to]
        if not node.up or node.catching_up or not self._can_talk(sender, to):
            return
        if node.frozen:
            node.backlog.append((self._arrive, (sender, to, message)))
        else:
            self.feed(to, rt.Received(sender, message))

    def _hear_of_loss(self, peer: str, lost: str) -> None:
        node = self.nodes[peer]
        if node.up and not node.frozen:
            self.feed(peer, rt.Lost(lost))

    def _hear_plan(self, peer: str, plan: Plan) -> None:
        if self.nodes[peer].up:
            self.feed(peer, rt.PlanReceived(plan))

    def _pledge(self, node: Node, record: rt.VoteRecord) -> None:
        key = (node.peer, record.number)
        if record.promised < self.promises.get(key, record.promised):
            raise Violation(f"{node.peer} went back on its promise for round {record.number}")
        self.promises[key] = record.promised
        if record.voted is not None:
            cast = self.votes.setdefault((node.peer, record.number, record.voted.ballot), record.voted.payload)
            if cast != record.voted.payload:
                raise Violation(f"{node.peer} voted twice in round {record.number}")
        node.disk.record = record

    def _freeze_snapshot(self, node: Node, incarnation: int, round_id: RoundId) -> None:
        if node.incarnation != incarnation:
            return
        if node.frozen:
            node.backlog.append((self._freeze_snapshot, (node, incarnation, round_id)))
            return
        node.snapshot = (node.spent, node.trained)
        tokens = node.trained - node.spent
        self.feed(node.peer, rt.Frozen(round_id, tokens, tokens // 10))

    # --- the exchange, as a function of who was there -----------------------------------------------------

    def _run_exchange(self, node: Node, round_id: RoundId, start, seconds: float) -> None:
        assert node.snapshot is not None, "an exchange needs a snapshot"
        self.contributed[round_id, node.peer] = (node.incarnation, *node.snapshot)
        self.exchanging.setdefault(round_id, set()).add(node.peer)
        duration = min(seconds, self.rng.uniform(0.2, 1.0))
        self._at(duration, self._end_exchange, node, node.incarnation, round_id, start)

    def _end_exchange(self, node: Node, incarnation: int, round_id: RoundId, start) -> None:
        if node.incarnation != incarnation or not node.up:
            return
        if node.frozen:
            node.backlog.append((self._end_exchange, (node, incarnation, round_id, start)))
            return
        digests, partial = [], set()
        for i, piece in enumerate(start.partition):
            summed = self._sum(node, round_id, start, i, piece.reducer)
            count = -(-(piece.end - piece.start) // start.part_elements)
            digests += [hashlib.sha256(summed[0] + bytes([k])).digest() if summed else b"" for k in range(count)]
            if piece.reducer == node.peer and summed is not None:
                partial |= {item.peer_id for item in start.contributions if item.weight} - summed[1]
        node.parts[round_id] = tuple(digests)
        self.feed(node.peer, rt.Parted(round_id, tuple(digests), tuple(sorted(partial))))

    def _sum(self, node: Node, round_id: RoundId, start, index: int, reducer: str):
        """The reducer's average as `node` has it: the same for all, or nothing."""
        there = self.exchanging[round_id]
        reachable = reducer == node.peer or (self._alive(reducer) and self._can_talk(reducer, node.peer))
        if reducer not in there or not reachable:
            return None
        if (round_id, index) not in self.sums:
            who = frozenset(
                item.peer_id
                for item in start.contributions
                if item.weight
                and item.peer_id in there
                and (item.peer_id == reducer or (self._alive(item.peer_id) and self._can_talk(item.peer_id, reducer)))
            )
            name = f"{round_id}/{index}/{sorted(who)}".encode()
            self.sums[round_id, index] = (hashlib.sha256(name).digest(), who)
        return self.sums[round_id, index]

    def _complete(self, node: Node, incarnation: int, round_id: RoundId, settle) -> None:
        if node.incarnation != incarnation or not node.up:
            return
        if node.frozen:
            node.backlog.append((self._complete, (node, incarnation, round_id, settle)))
            return
        if round_id not in node.parts:
            return  # it caught up meanwhile
        holders = {item.part: list(item.peer_ids) for item in settle.repairs}
        mine = node.parts[round_id]
        for part, digest in enumerate(settle.digests):
            have = not digest or mine[part] == digest
            if not have and not any(self._reachable(node.peer, peer) for peer in holders.get(part, [])):
                self.feed(node.peer, rt.Failed(round_id, f"part {part} cannot be repaired"))
                return
        result = hashlib.sha256(round_id.key.encode() + b"".join(settle.digests)).digest()
        node.staging[round_id] = result
        node.staged.add(result)
        told = self.layers_of(node.peer, result)
        layer = manifest_pb2.LayerState(layer=0, round=round_id.number, anchor_digest=told, momentum_digest=told)
        self.feed(node.peer, rt.Staged(round_id, (layer,)))

    def _obtain(self, node: Node, incarnation: int, round_id: RoundId, payload: bytes, holders) -> None:
        if node.incarnation != incarnation or not node.up:
            return
        if node.frozen:
            node.backlog.append((self._obtain, (node, incarnation, round_id, payload, holders)))
            return
        state = state_of(payload)
        if any(self._reachable(node.peer, peer) and state in self.nodes[peer].staged for peer in holders):
            node.staged.add(state)
            self.feed(node.peer, rt.Obtained(round_id, payload))
        else:
            self.feed(node.peer, rt.Failed(round_id, "no holder answers"))

    # --- coordinator, commits, catch-up ---------------------------------------------------------------------

    def _ask(self, node: Node, incarnation: int, round_id: RoundId, payload: bytes) -> None:
        if self.acceptor.up:
            answer = self.acceptor.ask(round_id, payload)
        else:
            answer = rt.TieBreak(round_id, payload, False, None, None, "the coordinator cannot be reached")
        if self.rng.random() >= self.loss:
            self._later(self._latency(), node, answer)

    def _install(self, node: Node, head: Head, counted: bool) -> None:
        if state_of(head.committed.payload) not in node.staged:
            raise Violation(f"{node.peer} installs round {head.round} without its state")
        first = self.committed.setdefault(head.round, head) if self.plan.accepts(head) else head
        if first.hash != head.hash:
            raise Violation(f"two results for round {head.round}")
        if first is head and self.plan.accepts(head):
            self._count(head)
        self.installed[node.peer].append(head)
        node.disk.known = max(node.disk.known, head, key=lambda item: item.round)
        if self.rng.random() < self.checkpoint_probability:
            node.disk.checkpoint = head
        if counted:
            assert node.snapshot is not None
            node.spent = node.snapshot[1]
        if counted is not self._holds_snapshot(node, head):
            raise Violation(f"{node.peer} is wrong about whether round {head.round} holds its snapshot")
        self._moved(node)
        if node.leaving:
            self.kill(node.peer)

    def _holds_snapshot(self, node: Node, head: Head) -> bool:
        made = self.contributed.get((RoundId.from_proto(head.manifest.round), node.peer))
        listed = node.peer in {item.peer_id for item in head.manifest.contributions}
        return listed and made is not None and made[0] == node.incarnation

    def _count(self, head: Head) -> None:
        """Enter a newly committed round into the ledger."""
        previous = self.committed.get(head.round - 1, GENESIS)
        if head.round > 1 and head.manifest.previous_hash != previous.hash:
            raise Violation(f"round {head.round} does not follow round {head.round - 1}")
        round_id = RoundId.from_proto(head.manifest.round)
        for item in head.manifest.contributions:
            made = self.contributed.get((round_id, item.peer_id))
            if made is None or not item.weight:
                continue
            incarnation, start, end = made
            spans = self.counted.setdefault((item.peer_id, incarnation), [])
            if any(start < other_end and other_start < end for other_start, other_end in spans):
                raise Violation(f"round {head.round} counts tokens of {item.peer_id} twice")
            spans.append((start, end))

    def _moved(self, node: Node) -> None:
        node.snapshot = None
        node.parts, node.staging, node.staged = {}, {}, set()

    def _begin_catch_up(self, node: Node, reason: str) -> None:
        self.caught_up.append((node.peer, reason))
        if not node.catching_up:
            node.catching_up = True
            self._at(self.rng.uniform(0.1, 1.5), self._catch_up, node, node.incarnation)

    def _catch_up(self, node: Node, incarnation: int) -> None:
        if node.incarnation != incarnation or not node.up:
            return
        if node.frozen:
            node.backlog.append((self._catch_up, (node, incarnation)))
            return
        node.catching_up = False
        head = self.newest_reachable(node.peer)
        old = node.machine.head
        void = not node.machine.plan.accepts(old)
        if head.round <= old.round and not void:
            return
        after = self.committed.get(old.round + 1)
        if after is not None and node.machine.counts(after.manifest):
            assert node.snapshot is not None
            node.spent = node.snapshot[1]
        node.disk.known = max(node.disk.known, head, key=lambda item: item.round)
        node.disk.checkpoint = head
        self._moved(node)
        self.installed[node.peer].append(head)
        self.feed(node.peer, rt.HeadMoved(head))

    def newest_reachable(self, peer: str) -> Head:
        heads = (
            [
                other.machine.head
                for other in self.nodes.values()
                if other.peer != peer and self._reachable(peer, other.peer)
            ]
            if hasattr(self, "nodes")
            else []
        )
        return max(heads, key=lambda head: head.round, default=GENESIS)

    def _check_deadline(self, node: Node) -> None:
        """Every attempt ends: no phase lasts longer than all its deadlines together."""
        if node.machine.phase is Phase.IDLE:
            node.busy_since = None
            return
        node.busy_since = self.now if node.busy_since is None else node.busy_since
        if self.now - node.busy_since > LONGEST_ATTEMPT * 3 and not node.catching_up:
            raise Violation(f"{node.peer} hangs in phase {node.machine.phase}")

    # --- small words ------------------------------------------------------------------------------------------

    def _can_talk(self, a: str, b: str) -> bool:
        return frozenset((a, b)) not in self.cut

    def _alive(self, peer: str) -> bool:
        return self.nodes[peer].up and not self.nodes[peer].frozen

    def _reachable(self, a: str, b: str) -> bool:
        return self._alive(b) and self._can_talk(a, b)

    def live(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.up and not node.frozen]

    def heads(self) -> set[tuple[int, bytes]]:
        return {(node.machine.head.round, node.machine.head.hash) for node in self.live()}

    def rounds(self) -> int:
        return max(self.committed, default=0)


def state_of(payload: bytes) -> bytes:
    """The state that a manifest names."""
    return manifest_pb2.Manifest.FromString(payload).layers[0].anchor_digest


def _seconds(policy: rt.RoundPolicy) -> float:
    parts = (policy.ready_timeout, policy.exchange_timeout, policy.decision_timeout)
    return sum(part.total_seconds() for part in parts) * 2 + 30


LONGEST_ATTEMPT = _seconds(POLICY)
