"""A world for round machines: virtual time, a network, disks, trainers and a coordinator that can all misbehave.

The machines are the shipped ones; nothing here sleeps, opens a socket or needs torch, and everything follows from a
seed. What it stands in for: the exchange (a function from who was there to digests), the trainer (a counter of tokens),
the disk, catch-up (the newest head of whoever can be reached) and the coordinator (a Paxos acceptor). It raises
`Violation` at once when an invariant of the ledger breaks, and when a node installs a state that it does not hold, is
wrong about whether a round holds its snapshot, or hangs in an attempt.
"""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from support.machine_clock import VirtualClock
from support.machine_exchange import Exchanges, nonce_of, outer_step
from support.machine_invariants import InvariantChecker, Violation
from support.machine_network import Network
from support.machine_node import Disk, Node, Snapshot
from support.machine_plans import (
    GENESIS,
    OFFSETS,
    POLICY,
    Routes,
    layers_after,
    longest_attempt,
    make_plan,
    policies,
    routes_of,
    state_of,
)
from support.machine_votes import Acceptor, FakeVoteSigner

from atoll.core.fragments import Fragment
from atoll.core.frames import MAX_HEADER_BYTES
from atoll.core.manifest import Head, changed_layers
from atoll.core.plan import Base, Plan
from atoll.core.quorum import MARK_BYTES, VoteRecord, next_seats
from atoll.core.round_id import RoundId
from atoll.node.rounds import types as rt
from atoll.node.rounds.machine import RoundMachine
from atoll.node.rounds.settlement import RepairSources
from atoll.v1 import dataplane_pb2 as dp

TICK = 0.25
TICKED = rt.Tick()
STEP_SECONDS = 0.3
TOKENS_PER_TICK = 10
LOOK_SECONDS = 60.0  # without another head, after which a member asks others for theirs


class World(VirtualClock):
    """`size` nodes on a virtual clock, quiet unless told otherwise."""

    def __init__(
        self,
        size: int,
        seed: int = 0,
        machine: Callable[..., RoundMachine] = RoundMachine,
        policy=POLICY,
        routes: Routes | None = None,
        first: Sequence[str] = (),
        names: Sequence[str] = (),
        offsets: Sequence[int] = OFFSETS,
        strangers: Collection[str] = (),
    ) -> None:
        """`strangers` are on probation; `first` have the first seats, in this order.

        `names` replace p0, p1, …; `offsets` are of the layers.
        """
        super().__init__()
        self.rng = random.Random(seed)
        self._mark_rng = random.Random(f"marks {seed}")
        self.policy_of = policies(policy, offsets)
        self.make_machine = machine
        self.peers = list(names) or [f"p{i}" for i in range(size)]
        seats = next_seats(first, self.peers, [peer for peer in self.peers if peer not in strangers])
        self.plan = make_plan(self.peers, base=Base(GENESIS.hash, seats), routes=routes, strangers=strangers)
        self.acceptor = Acceptor()
        self.network = Network(self.rng)
        self.crash_probability = 0.0  # per action of any node
        self.max_message_bytes = MAX_HEADER_BYTES
        self.step_seconds: dict[str, float] = {}  # of an inner step: a snapshot waits for its end
        self.exchange_seconds: Callable[[dp.Start], float] = lambda start: self.rng.uniform(0.2, 1.0)
        self.fetch_seconds: Callable[[], float] = lambda: self.rng.uniform(0.1, 1.5)  # of a state, in catch-up
        self.checkpoint_probability = 1.0
        self.layers_of: Callable[[str, bytes], bytes] = lambda peer, digest: digest
        self.reports: list[rt.Report] = []
        self.caught_up: list[tuple[str, str]] = []
        self.killed: list[str] = []
        self.rolled_back: list[str] = []
        self.ledger = InvariantChecker(self.peers)
        self._exchanges = Exchanges(self._reachable)
        self._made: set[bytes] = set()  # states that somebody computed
        self._too_long = 3 * longest_attempt(policy)
        self.nodes = {peer: self._born(peer, Disk(), GENESIS) for peer in self.peers}
        for i, peer in enumerate(self.peers):
            self.at(TICK * (1 + i / size), self._tick, peer, 0)

    def signer_of(self, peer: str) -> rt.VoteSigner:
        """What `peer` signs and checks votes with."""
        return FakeVoteSigner(peer)

    @property
    def committed(self) -> dict[int, Head]:
        """The history that counts."""
        return self.ledger.committed

    def rounds(self) -> int:
        return len(self.committed)  # each follows the one before

    def live(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    def heads(self) -> set[tuple[int, bytes]]:
        return {(node.machine.head.round, node.machine.head.hash) for node in self.live()}

    # --- shaping the world -----------------------------------------------------------------------------

    def kill(self, peer: str) -> None:
        node = self.nodes[peer]
        if node.up:
            node.up, node.frozen = False, False
            node.incarnation += 1
            self.killed.append(peer)
            for other in self.peers:
                if other != peer and self.rng.random() < 0.8:
                    self.at(self.network.latency(), self._hear_of_loss, other, peer)

    def restart(self, peer: str, *, disk: bool = True) -> None:
        """Start again, with what the disk holds or with nothing but the identity, at the newest reachable head."""
        old = self.nodes[peer]
        if old.up:
            return
        kept = old.disk if disk else Disk(record=None)
        kept.full = False  # a daemon does not start on a full disk
        # a machine at an older head than the checkpoint would not start: catch-up never goes back
        head = max([self.newest_reachable(peer), kept.checkpoint], key=lambda item: item.round)
        kept.knows(head)  # what is fetched is on disk first
        node = self._born(peer, kept, head, before=old)
        self.nodes[peer] = node
        self.at(TICK, self._tick, peer, node.incarnation)

    def back_up(self, peer: str) -> None:
        """A snapshot of its data directory, as of now."""
        node = self.nodes[peer]
        node.disk.backups = [*node.disk.backups[-3:], replace(node.disk, backups=[], full=False)]

    def roll_back(self, peer: str, age: int = 0) -> bool:
        """Start again with a backup; False where nobody can show that it is old (docs/explain/rounds.md).

        That is the window which marks leave: of the round that it took part in last, at least one later is needed.
        """
        old = self.nodes[peer]
        for backup in list(reversed(old.disk.backups))[age:]:
            reached = self.newest_reachable(peer).round
            if old.up or (backup.record is not None and reached <= backup.record.number):
                continue
            old.disk = replace(backup, backups=old.disk.backups)
            self.restart(peer)
            self.rolled_back.append(peer)
            return True
        return False

    def fill_disk(self, peer: str, *, full: bool = True) -> None:
        """Nothing new can be written, until there is room again."""
        self.nodes[peer].disk.full = full

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
            self.at(0.0, work, *arguments)

    def heal(self) -> None:
        self.network.heal()
        self.crash_probability = 0.0
        self.acceptor.up = True

    def issue(self, plan: Plan, to: list[str] | None = None) -> None:
        """The coordinator's newest plan; those in `to` hear of it at once."""
        self.plan = plan
        for peer in to if to is not None else self.peers:
            self.at(self.network.latency(), self._hear_plan, peer, plan)

    def recover(self) -> int:
        """The operator goes on from the newest state that anyone holds; what came after it is void."""
        head = max((node.machine.head for node in self.live()), key=lambda item: item.round)
        version = self.plan.version + 1
        self.ledger.recover(head.round)
        self.acceptor = Acceptor(self.acceptor.up, version)
        base = Base(head.hash, next_seats(self.peers, self.peers, ()), head.round, version)
        self.issue(make_plan(self.peers, version, base, routes_of(self.plan)))
        return head.round

    # --- a node's shell --------------------------------------------------------------------------------

    def _born(self, peer: str, disk: Disk, head: Head, plan: Plan | None = None, *, before: Node | None = None) -> Node:
        """`before` was its last life: a monotonic clock goes on where it was."""
        skew = self.rng.uniform(-1000, 1000) if before is None else before.skew
        machine = self.make_machine(
            peer,
            self.policy_of,
            self.signer_of(peer),
            head,
            plan or self.plan,
            self.now + skew,
            disk.record,
            disk.known,
            draw_mark=lambda: self._mark_rng.randbytes(MARK_BYTES),
        )
        return Node(peer, machine, disk, skew, 0 if before is None else before.incarnation, looked_at=self.now)

    def _tick(self, peer: str, incarnation: int) -> None:
        node = self.nodes[peer]
        if node.incarnation != incarnation or not node.up:
            return
        self.at(TICK, self._tick, peer, incarnation)
        if node.frozen:
            return
        node.trained += TOKENS_PER_TICK
        self._tell_time(node)
        if self.now - node.looked_at >= LOOK_SECONDS:
            self._begin_catch_up(node, "nothing was committed for long")
        if node.busy_for(self.now) > self._too_long and not node.catching_up:
            raise Violation(f"{node.peer} hangs in phase {node.machine.phase}")

    def _tell_time(self, node: Node) -> None:
        """So often, and at every new head, as the engine does."""
        if not node.catching_up:
            tokens_since_snapshot = node.trained - node.frozen_at
            step_seconds = self.step_seconds.get(node.peer, STEP_SECONDS)
            self.feed(node.peer, rt.Progress(node.trained - node.spent, step_seconds, tokens_since_snapshot))
            self.feed(node.peer, TICKED)

    def feed(self, peer: str, event: rt.Event) -> None:
        """Take one event and carry out what the machine wants, unless the node dies in between."""
        node = self.nodes[peer]
        if not node.up:
            return
        for action in node.machine.step(event, self.now + node.skew, 1_000):
            if self._crashes(node):
                return
            self._perform(node, action)

    def _crashes(self, node: Node) -> bool:
        if self.crash_probability and self.rng.random() < self.crash_probability:
            self.kill(node.peer)
            return True
        return False

    def _later(self, delay: float, node: Node, work: Callable[..., None], *arguments) -> None:
        """Do `work` in this life of the node, when it is awake."""
        self.at(delay, self._in_life, node.peer, node.incarnation, work, arguments)

    def _in_life(self, peer: str, incarnation: int, work: Callable[..., None], arguments: tuple) -> None:
        node = self.nodes[peer]
        if node.incarnation != incarnation or not node.up:
            return
        if node.frozen:
            node.backlog.append((self._in_life, (peer, incarnation, work, arguments)))
        else:
            work(node, *arguments)

    def _take(self, node: Node, event: rt.Event) -> None:
        self.feed(node.peer, event)

    def _perform(self, node: Node, action: rt.Action) -> None:
        match action:
            case rt.Send(to, message):
                self._send(node.peer, to, message)
            case rt.Pledge(record, to, message):
                self._pledge(node, record, to, message)
            case rt.SharePlan(to):
                if self.network.connects(node.peer, to):
                    self.at(self.network.latency(), self._hear_plan, to, node.machine.plan)
            case rt.Freeze(round_id, fragment):
                delay = self.rng.uniform(0.0, self.step_seconds.get(node.peer, STEP_SECONDS))
                self._later(delay, node, self._freeze_snapshot, round_id, fragment)
            case rt.RunExchange(round_id, start, seconds, fragment):
                self._run_exchange(node, round_id, start, seconds, fragment)
            case rt.Complete(round_id, settle, _):
                self._later(self.rng.uniform(0.01, 0.3), node, self._complete, round_id, settle)
            case rt.AskCoordinator(round_id, proposal):
                self.at(self.network.latency(), self._ask, node, round_id, proposal)
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

    def _pledge(self, node: Node, record: VoteRecord, to: str, message: dp.RoundMessage) -> None:
        if node.disk.full:
            self._later(0.002, node, self._take, rt.PledgeFailed(message))
            return
        self.ledger.pledge(node.peer, record)
        node.disk.record = record
        if self._crashes(node):
            return
        if to == node.peer:
            self._later(0.002, node, self._take, rt.Received(to, message))
        else:
            self._send(node.peer, to, message)

    def _freeze_snapshot(self, node: Node, round_id: RoundId, fragment: Fragment) -> None:
        if not node.machine.is_freezing(round_id):
            return  # given up meanwhile, as in the engine
        start = max(node.counted.get(layer, 0) for layer in fragment.layers)
        node.snapshot = Snapshot(fragment.layers, start, node.trained)
        node.frozen_at = node.trained
        tokens = node.trained - node.snapshot.start
        self.feed(node.peer, rt.Frozen(round_id, tokens, (node.trained - node.spent) // 10))

    def _run_exchange(self, node: Node, round_id: RoundId, start: dp.Start, seconds: float, fragment: Fragment) -> None:
        snapshot = node.snapshot
        assert snapshot is not None, "an exchange needs a snapshot"
        if snapshot.layers == fragment.layers:
            self.ledger.contribute(round_id, node.peer, node.incarnation, (snapshot.start, snapshot.end))
        elif any(item.weight for item in start.contributions if item.peer_id == node.peer):
            raise Violation(f"{node.peer} brings the snapshot of other layers")
        self._exchanges.join(round_id, node.peer)
        self._later(min(seconds, self.exchange_seconds(start)), node, self._end_exchange, round_id, start)

    def _end_exchange(self, node: Node, round_id: RoundId, start: dp.Start) -> None:
        digests, verdicts = self._exchanges.parts(round_id, node.peer, start)
        node.parts[round_id], node.starts[round_id] = digests, start
        self.feed(node.peer, rt.ExchangeDone(round_id, digests, verdicts, nonce_of(round_id, node.peer)))

    def _complete(self, node: Node, round_id: RoundId, settle: dp.Settle) -> None:
        if round_id not in node.parts:
            return  # it caught up meanwhile
        sources = RepairSources(node.starts[round_id], settle)
        for part, (mine, digest) in enumerate(zip(node.parts[round_id], settle.digests, strict=True)):
            have = not digest or mine == digest
            if not have and not any(self._reachable(node.peer, peer) for peer in sources(part)):
                self.feed(node.peer, rt.Failed(round_id, f"part {part} cannot be repaired"))
                return
        result = outer_step(round_id, settle.digests)
        node.staged.add(result)
        self._made.add(result)
        told = self.layers_of(node.peer, result)
        policy = self.policy_of(node.machine.plan)
        self.feed(node.peer, rt.Staged(round_id, layers_after(policy, node.machine.head, told)))

    # --- commits and catch-up ------------------------------------------------------------------------------

    def _install(self, node: Node, head: Head, counted: rt.Counted) -> None:
        mine = set(node.machine.plan.span(node.peer)) or set(range(POLICY.layers))
        if mine & set(changed_layers(head.manifest)) and state_of(head.committed.payload) not in node.staged:
            raise Violation(f"{node.peer} installs round {head.round} without its state")
        if head.round not in self.committed and not self._was_held(state_of(head.committed.payload)):
            raise Violation(f"round {head.round} was committed, and nobody ever held its state")
        self.ledger.install(node.peer, head, self.plan)
        node.disk.knows(head)
        if self.rng.random() < self.checkpoint_probability:
            node.disk.save(head)
        node.settle(counted)
        held = self.ledger.holds_snapshot(head, node.peer, node.incarnation)
        if held is not None and held is (counted is rt.Counted.NOTHING):
            raise Violation(f"{node.peer} is wrong about whether round {head.round} holds its snapshot")
        node.move()
        node.looked_at = self.now
        if node.leaving:
            self.kill(node.peer)
        self._later(0.0, node, self._tell_time)

    def _was_held(self, state: bytes) -> bool:
        return state in self._made or any(state in node.staged for node in self.nodes.values())

    def _begin_catch_up(self, node: Node, reason: str) -> None:
        self.caught_up.append((node.peer, reason))
        node.looked_at = self.now
        if not node.catching_up:
            node.catching_up = True
            self._later(self.fetch_seconds(), node, self._catch_up)

    def _catch_up(self, node: Node) -> None:
        node.catching_up = False
        machine = node.machine
        head = self.newest_reachable(node.peer, machine.plan)
        if not machine.plan.accepts(head) or (head.round <= machine.head.round and not machine.void):
            return  # nobody has anything newer: as the engine, it tries again when it hears of it
        after = self.committed.get(machine.head.round + 1)
        if after is not None:
            node.settle(machine.counted(after.manifest))
        node.disk.knows(head)
        node.disk.save(head)
        node.move()
        node.looked_at = self.now
        self.ledger.installed[node.peer].append(head)
        self.feed(node.peer, rt.HeadMoved(head))
        self._tell_time(node)

    def newest_reachable(self, peer: str, plan: Plan | None = None) -> Head:
        """The newest head that somebody else has, of the history that `plan` goes on from."""
        others = [node for node in self.nodes.values() if node.peer != peer and self._reachable(peer, node.peer)]
        heads = [node.machine.head for node in others if plan is None or plan.accepts(node.machine.head)]
        return max(heads, key=lambda head: head.round, default=GENESIS)

    # --- what travels ------------------------------------------------------------------------------------------

    def _reachable(self, a: str, b: str) -> bool:
        """Whether `a` can fetch something from `b`."""
        return self.nodes[b].alive and self.network.answers(a, b)

    def _send(self, sender: str, to: str, message: dp.RoundMessage) -> None:
        if message.ByteSize() > self.max_message_bytes:
            self._later(0.0, self.nodes[sender], self._take, rt.SendFailed(message, "too large"))
            return
        if to in self.nodes:
            for delay, copy in self.network.copies(sender, to, message):
                self.at(delay, self._arrive, sender, to, copy)

    def _arrive(self, sender: str, to: str, message: dp.RoundMessage) -> None:
        node = self.nodes[to]
        away = node.catching_up and not message.HasField("open")
        if not node.up or away or not self.network.connects(sender, to):
            return
        if node.frozen:
            node.backlog.append((self._arrive, (sender, to, message)))
        else:
            self.feed(to, rt.Received(sender, message))

    def _hear_of_loss(self, peer: str, lost: str) -> None:
        if self.nodes[peer].alive:
            self.feed(peer, rt.Lost(lost))

    def _hear_plan(self, peer: str, plan: Plan) -> None:
        node = self.nodes[peer]
        if not node.up or plan.version < node.heard:  # a daemon keeps the newest
            return
        node.heard = plan.version
        if plan.version > node.machine.plan.version and plan.span(peer) != node.machine.plan.span(peer):
            self._respan(node, plan)
        else:
            self.feed(peer, rt.PlanReceived(plan))

    def _respan(self, node: Node, plan: Plan) -> None:
        """It holds other layers from now on: it fetches those, and its rounds begin anew."""
        head = max([self.newest_reachable(node.peer), node.machine.head], key=lambda item: item.round)
        node.disk.knows(head)
        again = self._born(node.peer, node.disk, head, plan, before=node)
        again.incarnation, again.leaving, again.frozen = node.incarnation + 1, node.leaving, node.frozen
        again.heard = plan.version
        self.nodes[node.peer] = again
        self.at(TICK, self._tick, node.peer, again.incarnation)

    def _ask(self, node: Node, round_id: RoundId, proposal: bytes) -> None:
        answer = self.acceptor.ask(round_id, proposal)
        if not self.network.loses():
            self._later(self.network.latency(), node, self._take, answer)
