"""Random schedules of trouble for `World`, each from one seed, and what must hold after every one of them."""

import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from support.machine_plans import OFFSETS, POLICY, make_plan, random_routes, state_of
from support.machine_world import World

from atoll.core.fragments import split_into_fragments
from atoll.core.quorum import COORDINATOR
from atoll.node.rounds.machine import RoundMachine

CHUNK = 250
TROUBLE_SECONDS = 24.0
QUIET_SECONDS = 90.0


@dataclass(frozen=True)
class Outcome:
    """What one schedule came to."""

    rounds: int
    kills: int
    rollbacks: int
    recovered: str  # why it took an operator to go on; empty: it did not


def run_schedule(seed: int, machine: Callable[..., RoundMachine] = RoundMachine) -> Outcome:
    """Trouble for a while, then peace. Raises `Violation`, or AssertionError when peace does not bring progress."""
    size = _size(seed)
    policy = replace(POLICY, fragments=split_into_fragments(OFFSETS, 1 + seed % 3))
    world = World(size, seed, machine, policy)
    rng = world.rng
    if cut := seed % 4 == 3:  # every fourth run is of routes, whose cuts change with every plan
        world = World(size, seed, machine, policy, random_routes(world.peers, rng))
        rng = world.rng
    world.network.loss, world.network.duplicate = rng.choice([(0, 0), (0.02, 0.05), (0.15, 0.1)])
    world.network.delay = rng.choice([(0.01, 0.05), (0.05, 0.4), (0.01, 1.5)])
    world.crash_probability = rng.choice([0.0, 0.0, 0.003, 0.02])
    world.checkpoint_probability = rng.choice([1.0, 0.5, 0.0])
    if rng.random() < 0.3:  # of a state that takes as long as several rounds
        world.fetch_seconds = lambda: world.rng.uniform(1.0, 12.0)
    version = 1
    while world.now < TROUBLE_SECONDS:
        world.run(rng.uniform(0.05, 3.0))
        peer = rng.choice(world.peers)
        world.back_up(rng.choice(world.peers))
        match rng.randrange(15):
            case 0 | 1:
                world.kill(peer)
            case 2 | 3:
                _restart(world, rng.choice(world.peers), rng.random() < 0.85)
            case 4:
                world.freeze(peer)
            case 5:
                world.thaw(rng.choice(world.peers))
            case 6:
                left = rng.sample(world.peers, rng.randrange(size + 1))
                world.network.part(left, [other for other in world.peers if other not in left])
            case 7:
                world.network.cut, world.network.deaf = set(), set()
            case 13:
                if size > 1:
                    world.network.deaf |= {tuple(rng.sample(world.peers, 2)) for _ in range(rng.randint(1, size))}
            case 8:
                world.acceptor.up = not world.acceptor.up
            case 11:
                if size > 1:
                    world.drop_connection(*rng.sample(world.peers, 2))
            case 10:
                world.leave(peer)
            case 12:
                world.fill_disk(peer, full=rng.random() < 0.7)
            case 14:
                world.kill(peer)
                world.roll_back(peer, rng.randrange(3))
            case 9:
                version += 1
                members = [other for other in world.peers if rng.random() < 0.8] or [peer]
                routes = random_routes(members, rng) if cut else None
                world.issue(
                    make_plan(members, version, world.plan.base, routes, _strangers(members, rng, cut=cut)),
                    rng.sample(world.peers, rng.randrange(size + 1)),
                )
    return _quiet_period(world, version, cut=cut)


def _size(seed: int) -> int:
    """Mostly up to five members, now and then a dozen, and seldom up to 64."""
    if seed % 200 == 31:
        return random.Random(seed).choice([24, 33, 64])
    if seed % 40 == 5:
        return random.Random(seed).choice([7, 8, 9, 12, 16])
    return 1 + seed % 5 if seed % 7 else 3


def _restart(world: World, peer: str, disk: bool) -> None:
    node = world.nodes[peer]
    if node.up:
        return
    if not disk and not any(other.peer != peer for other in world.live()):
        disk = True  # genesis is fetched from somebody; a node that nobody can help cannot begin again from nothing
    world.restart(peer, disk=disk)


def _strangers(members: Sequence[str], rng: random.Random, *, cut: bool) -> list[str]:
    """Who is on probation: often nobody. A coordinator puts whole routes there, so none where plans have cuts."""
    if cut or rng.random() < 0.5:
        return []
    return rng.sample(list(members), rng.randrange(len(members) + 1))


def _quiet_period(world: World, version: int, *, cut: bool) -> Outcome:
    """Everyone is back, nothing is lost any more: all must agree and go on, if need be after a recovery."""
    world.heal()
    world.network.delay = (0.01, 0.05)
    for peer in world.peers:
        world.thaw(peer)
        world.fill_disk(peer, full=False)
        if world.nodes[peer].leaving:
            world.kill(peer)
        world.restart(peer)
    routes = random_routes(world.peers, world.rng) if cut else None
    strangers = _strangers(world.peers, world.rng, cut=cut)
    world.issue(make_plan(world.peers, version + 1, world.plan.base, routes, strangers))
    world.run(3.0)
    before = world.rounds()

    def agreed() -> bool:
        return world.rounds() >= before + 2 and len(world.heads()) == 1 and len(world.live()) == len(world.peers)

    stuck = ""
    if not world.run(QUIET_SECONDS, until=agreed):
        stuck = why_stuck(world)
        assert stuck, f"no progress after peace: {_standing(world)}"
        before = world.recover()
        assert world.run(QUIET_SECONDS, until=agreed), f"no progress after the recovery: {_standing(world)}"
    return Outcome(world.rounds(), len(world.killed), len(world.rolled_back), stuck)


def _standing(world: World) -> str:
    heads = sorted(node.machine.head.round for node in world.live())
    return f"heads {heads}, last reports {[report.reason for report in world.reports[-3:]]}"


def why_stuck(world: World) -> str:
    """Why nothing can go on without an operator; empty when it could."""
    newest = max((node.machine.head for node in world.live()), key=lambda head: head.round)
    if newest.round < max(node.disk.known.round for node in world.nodes.values()):
        return "nobody holds the newest committed round"
    electorate = world.plan.electorate(newest)
    voters = {node.peer for node in world.live() if node.machine.head.round != newest.round or node.machine.votes}
    if not electorate.decides({*voters, COORDINATOR}):
        return "too many voters forgot what they voted for"
    doubts = {node.machine.in_doubt for node in world.live()} | {world.acceptor.doubt(newest.round + 1)}
    kept = set().union(*(node.staged for node in world.live()))
    return "the state of a result in doubt is lost" if any(d and state_of(d) not in kept for d in doubts) else ""


def run_chunk(seeds: range) -> list[Outcome]:
    """These schedules, in order; a failure names its seed."""
    outcomes = []
    for seed in seeds:
        try:
            outcomes.append(run_schedule(seed))
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
    return outcomes


def running_totals(first: int, count: int) -> Iterator[Counter[str]]:
    """`count` schedules on all cores: what the first of them came to, a chunk more each time."""
    seeds = range(first, first + count)
    totals: Counter[str] = Counter()
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as workers:
        for outcomes in workers.map(run_chunk, (seeds[i : i + CHUNK] for i in range(0, count, CHUNK))):
            for outcome in outcomes:
                totals["schedules"] += 1
                totals["rounds"] += outcome.rounds
                totals["kills"] += outcome.kills
                totals["rollbacks"] += outcome.rollbacks
                totals[outcome.recovered or "went on by itself"] += 1
            yield totals


def run_all(first: int, count: int) -> Counter[str]:
    """`count` schedules on all cores: what they came to."""
    return deque(running_totals(first, count), maxlen=1).pop()
