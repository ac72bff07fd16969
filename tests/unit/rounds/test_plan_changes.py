"""A thousand plan changes among faults: no committed round has members of two versions, and all follow the newest."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.fault_schedules import why_stuck
from support.machine_exchange import Exchanges
from support.machine_plans import make_plan, random_routes
from support.machine_world import World

from atoll.core.manifest import Head
from atoll.core.round_id import RoundId
from atoll.node.rounds.attendance import Attendance

CHANGES = 50  # of one world
WORLDS = 20


class Watch:
    """Under which versions every member took part in every round, and what committed."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = world
        self.taken: dict[tuple[str, int, int], set[int]] = {}  # life of a peer, round → versions
        join = Exchanges.join

        def watched(exchanges: Exchanges, round_id: RoundId, peer: str) -> None:
            node = world.nodes[peer]
            assert node.machine.plan.version == round_id.plan_version, f"{peer} joins {round_id} under another plan"
            key = (peer, node.incarnation, round_id.number)
            self.taken.setdefault(key, set()).add(round_id.plan_version)
            join(exchanges, round_id, peer)

        monkeypatch.setattr(Exchanges, "join", watched)

    def check(self, head: Head) -> None:
        """Who is present in a committed round took part under the version that it was committed under."""
        version = head.manifest.round.plan_version
        for item in head.manifest.contributions:
            if item.present and item.weight:
                lives = [self.taken[key] for key in self.taken if key[0] == item.peer_id and key[2] == head.round]
                assert any(version in versions for versions in lives), f"{item.peer_id} was not in {head.round}"


def change(world: World, rng: random.Random, version: int) -> None:
    """Who is in it and who holds what is drawn anew; not everybody hears of it at once."""
    members = [peer for peer in world.peers if rng.random() < 0.9] or world.peers
    routes = random_routes(members, rng) if rng.random() < 0.7 else None
    plan = make_plan(members, version, world.plan.base, routes)
    world.issue(plan, rng.sample(world.peers, rng.randint(1, len(world.peers))))


FAULTS = {"kill": 2, "restart": 4, "freeze": 1, "thaw": 3, "part": 1, "heal": 3, "coordinator": 1}


def trouble(world: World, rng: random.Random) -> str:
    """One fault, or the end of one."""
    peer, what = rng.choice(world.peers), rng.choices(list(FAULTS), list(FAULTS.values()))[0]
    match what:
        case "kill":
            world.kill(peer)
        case "restart":
            world.restart(peer)
        case "freeze":
            world.freeze(peer)
        case "thaw":
            world.thaw(peer)
        case "part":
            left = rng.sample(world.peers, rng.randrange(len(world.peers)))
            world.network.part(left, [other for other in world.peers if other not in left])
        case "heal":
            world.network.cut = set()
        case "coordinator":
            world.acceptor.up = not world.acceptor.up
    return what


def live(seed: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Fifty plans among faults, then peace under one more; what happened."""
    world = World(3 + seed % 4, seed=seed)
    rng, watch, happened = world.rng, Watch(world, monkeypatch), Counter[str]()
    world.network.loss, world.network.duplicate = rng.choice([(0, 0), (0.05, 0.05)])
    world.crash_probability = rng.choice([0.0, 0.002])
    for version in range(2, CHANGES + 2):
        change(world, rng, version)
        for _ in range(rng.randrange(3)):
            world.run(rng.uniform(0.0, 3.0))
            happened[trouble(world, rng)] += 1
        world.run(rng.uniform(0.0, 6.0))
    world.heal()
    for peer in world.peers:
        world.thaw(peer)
        world.restart(peer)
    newest = CHANGES + 2
    world.issue(make_plan(world.peers, newest, world.plan.base))

    def agreed() -> bool:
        last = world.committed.get(world.rounds())
        return last is not None and last.manifest.round.plan_version >= newest and len(world.heads()) == 1

    if not world.run(90, until=agreed):
        assert why_stuck(world), f"seed {seed}: nothing was lost, and nothing is committed"
        world.recover()
        assert world.run(90, until=agreed), f"seed {seed}: not all follow the newest plan"
        happened["recovered"] += 1
    for head in world.committed.values():
        watch.check(head)
    happened["rounds"] = world.rounds()
    happened["versions that committed"] = len({head.manifest.round.plan_version for head in world.committed.values()})
    happened["tried under several versions"] = sum(len(versions) > 1 for versions in watch.taken.values())
    return happened


def test_no_round_has_members_of_two_versions(monkeypatch: pytest.MonkeyPatch, record_property) -> None:
    happened = Counter[str]()
    for seed in range(WORLDS):
        with monkeypatch.context() as patch:
            happened += live(seed, patch)
    record_property("happened", dict(happened))
    assert happened["versions that committed"] > WORLDS * CHANGES / 10
    assert happened["tried under several versions"] > 0  # plans did change in the middle of rounds
    assert happened["recovered"] < 0.75 * WORLDS  # 34 of 60 lose the state of a result in doubt with its holders


def test_who_would_follow_an_older_plan_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Attendance._refusal

    def lenient(attendance: Attendance, peer: str, round_id: RoundId) -> str:
        return "" if round_id.plan_version < attendance._at.plan.version else refusal(attendance, peer, round_id)

    monkeypatch.setattr(Attendance, "_refusal", lenient)
    with pytest.raises(AssertionError, match="under another plan"):
        any(not live(seed, monkeypatch) for seed in range(WORLDS))
