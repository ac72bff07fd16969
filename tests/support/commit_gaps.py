"""How long a simulated run goes without a commit though it could: the figure that tells whether rounds are live.

A *quorum* here is a least majority of the seats at the newest head whose members, all the time,

- are awake, stand at that head under one plan, and are not fetching a state;
- know what they promised, and can write to their disks;
- can talk to each other, in both directions;
- hold all layers of the next round among them, and the state of every result that one of them voted for.

The clock of a quorum starts when all of that holds, and begins anew with each commit. All others may die, freeze, be
deaf to some, or fetch, and disturb the quorum with attempts of their own.
"""

import os
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from multiprocessing import get_context

from support.machine_node import Node
from support.machine_plans import OFFSETS, POLICY, make_plan, state_of
from support.machine_world import TICK, World

from atoll.core.fragments import split_into_fragments
from atoll.core.manifest import Head
from atoll.core.quorum import COORDINATOR

CHUNK = 20
TROUBLE_SECONDS = 200.0
FETCH_SECONDS = (1.0, 30.0)  # of a state: as long as several rounds


@dataclass(frozen=True)
class Gap:
    """The longest time without a commit in one schedule."""

    seconds: float
    seed: int
    ended: float  # in virtual time
    rounds: int


class GapMeter:
    """Watches a world; `longest` is the longest such time, in seconds."""

    def __init__(self, world: World) -> None:
        self.longest = 0.0
        self.ended = 0.0  # when the longest did
        self._world = world
        self._since: dict[frozenset[str], float] = {}
        self._rounds = -1
        world.at(TICK, self._look)

    def _look(self) -> None:
        world = self._world
        world.at(TICK, self._look)
        if world.rounds() != self._rounds:
            self._rounds, self._since = world.rounds(), {}
        able = set(self._quorums())
        self._since = {quorum: self._since.get(quorum, world.now) for quorum in able}
        longest = max((world.now - since for since in self._since.values()), default=0.0)
        if longest > self.longest:
            self.longest, self.ended = longest, world.now

    def _quorums(self) -> Iterable[frozenset[str]]:
        world = self._world
        head = world.committed[world.rounds()] if world.rounds() else None
        nodes = {node.peer: node for node in world.nodes.values() if self._is_able(node, head)}
        if not nodes:
            return
        any_head = next(iter(nodes.values())).machine.head
        seats = world.plan.seats(any_head)
        there = [seat for seat in seats if seat in nodes or (seat == COORDINATOR and world.acceptor.up)]
        for chosen in combinations(there, len(seats) // 2 + 1):
            members = [nodes[seat] for seat in chosen if seat != COORDINATOR]
            if self._can_commit(members, coordinator=COORDINATOR in chosen):
                yield frozenset(chosen)

    def _is_able(self, node: Node, head: Head | None) -> bool:
        machine, world = node.machine, self._world
        at_head = machine.head.round == world.rounds() and (head is None or machine.head.hash == head.hash)
        ready = node.alive and not node.catching_up and not node.leaving and not node.disk.full
        return ready and at_head and machine.votes and machine.plan.version == world.plan.version

    def _can_commit(self, members: list[Node], *, coordinator: bool) -> bool:
        world = self._world
        if not all(world.network.answers(a.peer, b.peer) for a, b in combinations(members, 2)):
            return False
        plan, number = world.plan, world.rounds() + 1
        layers = world.policy_of(plan).fragment_of(number).layers
        if not any(node.peer in plan.holders(layers) for node in members):
            return False
        doubts = {node.machine.in_doubt for node in members} - {b""}
        if coordinator:
            doubts |= {world.acceptor.doubt(number)} - {b""}
        kept = set().union(*(node.staged for node in members))
        return all(state_of(doubt) in kept for doubt in doubts)


def lasting_faults(seed: int) -> Gap:
    """Minutes of faults that last: kills, freezes, one-way links, slow fetches, a coordinator that comes and goes."""
    size = random.Random(seed).choice([1, 2, 3, 3, 4, 5, 5, 7, 8])
    world = World(size, seed, policy=replace(POLICY, fragments=split_into_fragments(OFFSETS, 1 + seed % 3)))
    rng, meter, version = world.rng, GapMeter(world), 1
    world.network.delay = rng.choice([(0.01, 0.05), (0.05, 0.4)])
    world.fetch_seconds = lambda: world.rng.uniform(*FETCH_SECONDS)
    while world.now < TROUBLE_SECONDS:
        world.run(rng.uniform(1, 30))
        peer = rng.choice(world.peers)
        match rng.randrange(10):
            case 0 | 1:
                world.kill(peer)
            case 2 | 3:
                world.restart(peer)
            case 4:
                world.freeze(peer)
            case 5:
                world.thaw(peer)
            case 6 if size > 1:
                world.network.deaf |= {tuple(rng.sample(world.peers, 2)) for _ in range(rng.randint(1, size))}
            case 7:
                world.network.deaf = set()
            case 8:
                world.acceptor.up = not world.acceptor.up
            case 9:
                version += 1
                world.issue(make_plan(world.peers, version, world.plan.base))
    return Gap(meter.longest, seed, meter.ended, world.rounds())


def _longest(seeds: range) -> tuple[Gap, int]:
    gaps = [lasting_faults(seed) for seed in seeds]
    return max(gaps, key=lambda gap: gap.seconds), sum(gap.rounds for gap in gaps)


def longest_gaps(first: int, count: int) -> Iterator[tuple[int, Gap, int]]:
    """`count` schedules on all cores, a chunk more each time: how many ran, their longest gap, their rounds."""
    seeds, done, longest, rounds = range(first, first + count), 0, Gap(-1.0, 0, 0.0, 0), 0
    chunks = [seeds[i : i + CHUNK] for i in range(0, count, CHUNK)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as workers:
        for chunk, (gap, made) in zip(chunks, workers.map(_longest, chunks), strict=True):
            done, rounds = done + len(chunk), rounds + made
            longest = max(longest, gap, key=lambda one: one.seconds)
            yield done, longest, rounds
