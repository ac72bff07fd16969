"""Rounds are as long as their exchanges let them be: what is trained meanwhile comes late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from statistics import mean, median

import pytest
from support.machine_node import Node
from support.machine_plans import GENESIS, POLICY, make_plan
from support.machine_world import World

from atoll.core import protocol
from atoll.core.fragments import split_into_fragments
from atoll.core.manifest import Head
from atoll.core.plan import Base
from atoll.core.quorum import COORDINATOR, next_seats
from atoll.core.round_id import RoundId
from atoll.node.exchange.codecs import BY_NUMBER
from atoll.node.rounds import types as rt
from atoll.node.rounds.codec_choice import AUTO
from atoll.node.rounds.round_trigger import RoundTrigger
from atoll.node.rounds.types import RoundPolicy
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

OFFSETS = (0, 256, 512, 1024)


class Watched(World):
    """Exchanges in it take 0.2 to 1.0 s, and 0.6 s of training are enough for a round."""

    def __init__(self, policy: RoundPolicy) -> None:
        self.began: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        super().__init__(4, seed=1, policy=policy)

    def _perform(self, node: Node, action: rt.Action) -> None:
        if isinstance(action, rt.RunExchange):
            self.began.setdefault(action.round_id.number, self.now)
        if isinstance(action, rt.Install):
            self.ended.setdefault(action.head.round, self.now)
        super()._perform(node, action)

    def share(self, first: int = 6) -> float:
        """Of the time from the begin of an exchange to the next one's, from round `first` on."""
        numbers = sorted(number for number in self.ended if number >= first)
        took = [self.ended[number] - self.began[number] for number in numbers]
        rounds = [self.began[after] - self.began[before] for before, after in pairwise(numbers)]
        return mean(took[:-1]) / mean(rounds)


def policy(share: float, fragments: int = 1, **changes) -> RoundPolicy:
    return replace(POLICY, exchange_share=share, fragments=split_into_fragments(OFFSETS, fragments), **changes)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_rounds_last_as_long_as_exchanges_want(share):
    world = Watched(policy(share))
    assert world.run(600, until=lambda: world.rounds() >= 40)
    assert 0.6 * share < world.share() < 1.1 * share


class Opened(Watched):
    """Knows when members opened rounds, heard of tokens, and came to a new head."""

    def __init__(self, policy: RoundPolicy) -> None:
        self.opened: set[tuple[str, float]] = set()
        self.heard: set[tuple[str, float]] = set()
        self.moved: set[tuple[str, float]] = set()
        super().__init__(policy)

    def feed(self, peer: str, event: rt.Event) -> None:
        if isinstance(event, rt.Received) and event.message.HasField("report"):
            self.heard.add((peer, self.now))
        super().feed(peer, event)

    def _perform(self, node: Node, action: rt.Action) -> None:
        if isinstance(action, rt.Send) and action.message.HasField("open"):
            self.opened.add((node.peer, self.now))
        if isinstance(action, rt.Install):
            self.moved.add((node.peer, self.now))
        super()._perform(node, action)


def test_the_report_that_makes_a_round_due_opens_it():
    world = Opened(policy(1.0, due_tokens=lambda committed, members: 300))  # more than are trained in an exchange
    assert world.run(600, until=lambda: world.rounds() >= 40)
    assert 2 * len(world.opened & world.heard) > len(world.opened)  # else the opener's own tokens were the last


def test_where_tokens_suffice_the_next_round_opens_as_soon_as_its_opener_knows_of_the_last():
    world = Opened(policy(1.0, due_tokens=lambda committed, members: 1))
    assert world.run(600, until=lambda: world.rounds() >= 40)
    assert 4 * len(world.opened & world.moved) > len(world.opened)  # in others it waits for those who voted last
    assert len(world.opened & (world.moved | world.heard)) > 0.8 * len(world.opened)


@pytest.mark.parametrize(("share", "fragments"), [(1.0, 1), (0.5, 2)], ids=["whole", "fragments"])
def test_who_was_away_takes_part_again_soon_though_rounds_follow_at_once(share, fragments):
    """Else it would fetch one state while the next is made."""
    seconds = []
    for seed in range(8):
        world = World(5, seed, policy=policy(share, fragments))
        world.run(60, until=lambda world=world: world.rounds() >= 6)
        away = world.peers[seed % 5]
        world.kill(away)
        world.run(10)
        world.restart(away)
        back = world.now
        assert world.run(60, until=lambda world=world, away=away: world.nodes[away].spent > 0)
        seconds.append(world.now - back)
    assert median(seconds) < 7  # a few rounds


PEERS = ["p0", "p1", "p2", "p3"]


def head_of(number: int, members: Sequence[str]) -> Head:
    manifest = manifest_pb2.Manifest(protocol=protocol.ours(), round=pb.RoundId(run_id="r", number=number))
    for peer in members:
        manifest.contributions.add(peer_id=peer, present=True, weight=1, tokens=1)
    seats = next_seats(members, members, ())
    manifest.seats.extend(members.index(peer) for peer in seats if peer != COORDINATOR)
    manifest.coordinator_seat = COORDINATOR in seats
    return Head(manifest_pb2.CommittedManifest(payload=manifest.SerializeToString()))


def test_who_dies_after_its_vote_is_not_counted_on_at_the_next_head():
    turns, next_round = RoundTrigger("p0", POLICY, GENESIS, make_plan(PEERS), 0.0), RoundId("r", 1, 0, 2, 0)
    for peer in PEERS[1:]:
        turns.expect(peer, next_round, dp.TokenReport(round=next_round.to_proto(), tokens=200), 10.0)
    turns.lose("p3")
    turns.move(head_of(1, PEERS), make_plan(PEERS), 10.5)
    assert turns.heard_recently(10.5) == {"p0", "p1", "p2"}


@pytest.mark.parametrize(
    ("what", "waits"),
    [("came late", True), ("was there before", False), ("was lost since", False), ("is not in the plan", False)],
)
def test_who_came_late_is_waited_for_and_nobody_else(what, waits):
    plan, others = make_plan(PEERS), PEERS[:3]
    turns = RoundTrigger("p0", POLICY, head_of(0, PEERS), plan, 0.0)
    turns.begin_exchange(0.0)
    turns.move(head_of(1, PEERS), plan, 10.0)  # an exchange takes ten seconds
    report = dp.TokenReport(tokens=200)
    if what == "was there before":
        turns.hear("p3", report, 11.0)
    turns.begin_attempt(12.0)
    turns.begin_exchange(12.0)
    if what != "was there before":
        turns.hear("p3", report, 15.0)
    turns.move(head_of(2, others), plan, 22.0)
    if what == "was lost since":
        turns.lose("p3")
    if what == "is not in the plan":
        turns.begin(head_of(2, others), plan := make_plan(others, 2), 22.0)
    attempt = RoundId("r", plan.version, 0, 3, plan.openers(head_of(2, others)).index("p0"))

    def opens(now: float) -> bool:
        for peer in others[1:]:
            turns.hear(peer, report, now)
        turns.hear_self(200, leaving=False, step_seconds=0.1, now=now)
        return turns.attempt_to_open(attempt, now) is not None

    assert opens(22.2) is not waits
    assert opens(43.0)  # two exchanges later, at the latest


def test_where_an_exchange_may_take_all_of_a_round_nobody_rests():
    world = Watched(policy(1.0))
    assert world.run(600, until=lambda: world.rounds() >= 40)
    assert world.share() > 0.6


def test_that_a_round_is_overdue_does_not_shorten_the_rest():
    world = Watched(policy(0.25, round_max=timedelta(seconds=0.5), due_tokens=lambda committed, members: 10**9))
    assert world.run(600, until=lambda: world.rounds() >= 40)
    assert world.share() < 0.28


def test_fragments_take_turns_so_that_each_of_them_rests():
    world = Watched(policy(0.25, fragments=2))
    assert world.run(600, until=lambda: world.rounds() >= 40)
    assert 0.3 < world.share() < 0.55


def test_nobody_trains_on_for_what_would_not_be_counted():
    """A member's tokens reach what it may claim in a round: it is due."""
    world = Watched(policy(0.05))
    plan = make_plan(world.peers, 2, Base(GENESIS.hash, tuple(world.peers)))
    capped = tuple(replace(item, max_round_tokens=40) for item in plan.assignments)  # about a second's
    world.issue(replace(plan, assignments=capped))
    assert world.run(600, until=lambda: world.rounds() >= 40)
    assert world.share() > 0.2
    weights = [item.weight for head in world.committed.values() for item in head.manifest.contributions]
    assert max(weights[20:]) <= 40


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_member_s_cap_is_of_a_turn(fragments):
    """It is reached after 10 s of all fragments' rounds."""
    world = Watched(policy(0.01, fragments))
    capped = tuple(replace(item, max_round_tokens=400) for item in world.plan.assignments)
    world.issue(replace(world.plan, version=2, assignments=capped))
    assert world.run(900, until=lambda: world.rounds() >= 40)
    began = [world.began[number] for number in range(10, 40)]
    assert mean(after - before for before, after in pairwise(began)) < 1.4 * 10 / fragments


def test_the_last_round_does_not_rest():
    world = Watched(policy(0.02, stop_tokens=3000))
    assert world.run(900, until=lambda: all(node.machine.finished for node in world.nodes.values()))
    assert world.committed[world.rounds()].committed_tokens < 3200


def test_after_a_failed_attempt_the_codec_is_chosen_anew():
    world = Watched(policy(0.5, codecs=AUTO, due_tokens=lambda committed, members: 4000))
    world.exchange_seconds = lambda start: 0.2 * BY_NUMBER[start.codec].encoded_bytes(2**20) / 2**20
    assert world.run(900, until=lambda: world.rounds() >= 12)
    usual = world.committed[world.rounds()].manifest.codec
    number = world.rounds() + 1
    world.network.drop = lambda sender, to, message: (
        message.WhichOneof("body") == "settle"
        and message.settle.round.number == number
        and message.settle.round.attempt == 0
    )
    assert world.run(900, until=lambda: world.rounds() >= number)
    assert world.committed[number].manifest.round.attempt > 0
    assert BY_NUMBER[usual].name != "int2"
    assert BY_NUMBER[world.committed[number].manifest.codec].name != "int2"


def test_a_round_that_waited_for_the_dead_does_not_put_off_the_next():
    world = Watched(policy(0.25))
    assert world.run(600, until=lambda: world.rounds() >= 10)
    victim = world.peers[2]
    assert world.run(60, until=lambda: world.nodes[victim].machine.phase is rt.Phase.EXCHANGING)
    number = world.rounds() + 1
    world.kill(victim)
    assert world.run(60, until=lambda: world.rounds() >= number + 2)
    usual = median(world.began[n + 1] - world.began[n] for n in range(4, number - 1))
    assert world.began[number + 1] - world.ended[number] < 2 * usual


def test_codes_become_coarser_before_rounds_become_longer():
    world = Watched(policy(0.25, codecs=AUTO))
    world.exchange_seconds = lambda start: BY_NUMBER[start.codec].encoded_bytes(2**20) / 2**20
    assert world.run(600, until=lambda: world.rounds() >= 40)
    used = [BY_NUMBER[world.committed[number].manifest.codec].name for number in range(10, 40)]
    assert set(used) == {AUTO[-1]}
    assert world.share() < 0.3


def test_who_leaves_is_not_kept_for_the_rest():
    world = Watched(policy(0.02))
    assert world.run(600, until=lambda: world.rounds() >= 6)
    number = world.rounds() + 1
    leaver = world.nodes[world.peers[1]].machine
    assert world.run(60, until=lambda: leaver.head.round == number - 1)
    began = world.now
    world.leave(world.peers[1])
    assert world.run(60, until=lambda: world.rounds() >= number)
    assert world.now - began < 5
