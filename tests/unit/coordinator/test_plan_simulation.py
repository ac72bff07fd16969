"""Nodes come, go, die, drain, shrink, grow and are pinned, in any order and while the planner thinks: plans stay true.

Run as a program it goes on for longer and prints what moved: `python -m unit.coordinator.test_plan_simulation 1000`.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from unit.coordinator.routed import LAYERS, RoutedWorld, card, covers, model
from unit.coordinator.world import ELIGIBLE_STATES, RUN

from atoll.coordinator.live import pinning
from atoll.coordinator.live.attendance import attendance_of
from atoll.coordinator.planner.plan_builder import routes_of
from atoll.coordinator.planner.question import Answer, Question
from atoll.coordinator.runs import departure
from atoll.coordinator.state import deciding
from atoll.coordinator.state.draft import Step
from atoll.core.errors import PlanInputInvalid
from atoll.core.identity import Identity
from atoll.core.plan import Plan
from atoll.v1 import membership_pb2 as mb

SIZES = (3, 4, 4, 6, 6, 8, 12)
MOST_NODES = 9


@dataclass
class StormyWorld(RoutedWorld):
    """Every plan is checked as it is issued; answers come late."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    pending: list[tuple[float, Question, Answer]] = field(default_factory=list)
    kept_layers: int = 0  # of members that stayed in the plan, over all changes
    moved_layers: int = 0  # that they had to fetch

    def new_identity(self, name: str) -> Identity:
        """Derive the identity from the name, so that a run can be replayed."""
        return Identity(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest()))

    def take(self, step: Step[object]) -> object:
        for plan in step.plans:
            self.check(plan, step)
        return super().take(step)

    def tick_done(self) -> None:
        """The planner answers after up to three seconds."""
        question = self.state.memory[RUN].question if RUN in self.state.memory else None
        if question is not None and all(waiting is not question for _, waiting, _ in self.pending):
            self.pending.append((self.now.monotonic + self.rng.uniform(0, 3), question, self.find(question)))
        due = [item for item in self.pending if item[0] <= self.now.monotonic]
        self.pending = [item for item in self.pending if item not in due]
        for _, question, found in due:
            self.bring(question, found)
        if self.rng.random() < 0.3:
            self.fetch_told()

    def check(self, plan: Plan, step: Step[object]) -> None:
        """Check that every plan is valid."""
        before = self.plans[-1] if self.plans else None
        assert plan.version == (before.version + 1 if before else 1)
        assert plan.reason
        routes = routes_of(plan)
        assert all(covers(route) for route in routes)
        placed = [part.peer_id for route in routes for part in route]
        assert Counter([*placed, *plan.standbys]) == Counter(plan.members)
        stages = {range(part.first, part.last + 1) for route in routes if len(route) > 1 for part in route}
        electorate = deciding.next_electorate(step.state, RUN)
        assert electorate is not None
        assert deciding.decides(step.state, RUN, electorate, plan.members)
        decided = deciding.decides(step.state, RUN, electorate, plan.stages)
        voters = set() if decided else electorate.members & set(plan.standbys)  # some may stay only to vote
        standing = [plan.span(peer) for peer in plan.standbys if peer not in voters]
        assert set(standing) <= stages
        assert len(set(standing)) == len(standing)
        drivers = {route[0].peer_id for route in routes}
        dealt = [piece for item in plan.assignments for piece in item.data_ranges]
        assert len({start for start, _ in dealt}) == len(dealt)
        for item in plan.assignments:
            node, live = step.state.nodes[item.peer_id], step.state.live[item.peer_id]
            assert bool(item.data_ranges) == (item.peer_id in drivers)
            assert model().fits(live.profile, item.first_layer, item.last_layer), (self.name_of(item.peer_id), item)
            pinned_elsewhere = node.pin not in ("", f"{item.first_layer}-{item.last_layer}")
            assert not pinned_elsewhere or item.peer_id in plan.standbys  # it only votes, with the layers that it has
            assert not any((node.banned, node.left, live.counted_as_lost))
        if before:
            self.count(before, plan)

    def count(self, before: Plan, after: Plan) -> None:
        """Count kept and moved layers of members that stay."""
        for item in after.assignments:
            old = before.assignment(item.peer_id)
            if old is not None:
                held = range(old.first_layer, old.last_layer + 1)
                new = range(item.first_layer, item.last_layer + 1)
                self.kept_layers += len(set(new) & set(held))
                self.moved_layers += len(set(new) - set(held))


class Storm:
    """Random events."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = StormyWorld(rng=self.rng)
        self.count = 0
        self.happened: Counter[str] = Counter()
        self.world.begin(a=6, b=6, c=8)
        self.world.wait(5)

    def run(self, steps: int) -> None:
        """So many things."""
        things: tuple[Callable[[], None], ...] = (
            *(self.join, self.join, self.die, self.leave, self.come_back, self.come_back),
            *(self.drain, self.resize, self.pin, self.unpin, self.blink, self.restart),
        )
        for _ in range(steps):
            thing = self.rng.choice(things)
            thing()
            self.happened[thing.__name__] += 1
            self.world.wait(self.rng.choice((0.2, 0.6, 1.4, 4.0, 25.0)))

    def settle(self) -> None:
        """Long enough for whatever is due."""
        self.world.wait(60)

    def here(self) -> list[str]:
        return [name for name, it in sorted(self.world.identities.items()) if it.peer_id in self.world.sessions]

    def away(self) -> list[str]:
        nodes = self.world.state.nodes
        return [name for name in sorted(self.world.identities) if name not in self.here() and self._id(name) in nodes]

    def join(self) -> None:
        if len(self.here()) < MOST_NODES:
            self.count += 1
            self.world.cards(**{f"n{self.count}": self.rng.choice(SIZES)})

    def die(self) -> None:
        if len(self.here()) > 1:
            self.world.hang_up(self.rng.choice(self.here()))

    def leave(self) -> None:
        if len(self.here()) > 1:
            name = self.rng.choice(self.here())
            self.world.take(departure.leave(self.world.state, self.world.now, self._id(name), ""))
            self.world.hang_up(name)

    def come_back(self) -> None:
        away = [name for name in self.away() if not self.world.state.nodes[self._id(name)].draining]
        if away and len(self.here()) < MOST_NODES:
            self.world.connect(self.rng.choice(away), self.rng.choice((ELIGIBLE_STATES, mb.NODE_STATE_TRAINING)))

    def drain(self) -> None:
        if len(self.here()) > 2:
            name = self.rng.choice(self.here())
            self.world.take(departure.drain(self.world.state, self.world.now, name))
            if self.rng.random() < 0.7:
                self.world.say(name, mb.NODE_STATE_DRAINING)

    def resize(self) -> None:
        name = self.rng.choice(self.here())
        self.world.profiles[name] = card(self.rng.choice(SIZES))
        self.world.say(name, ELIGIBLE_STATES)

    def pin(self) -> None:
        name, first = self.rng.choice(self.here()), self.rng.randrange(LAYERS)
        span = None if self.rng.random() < 0.3 else (first, self.rng.randrange(first, LAYERS))
        with suppress(PlanInputInvalid):
            self.world.take(pinning.pin(self.world.state, self.world.now, name, span))

    def unpin(self) -> None:
        for name in sorted(self.world.identities):
            if self.rng.random() < 0.6:
                self.world.take(pinning.unpin(self.world.state, self.world.now, name))

    def blink(self) -> None:
        name = self.rng.choice(self.here())
        self.world.hang_up(name)
        self.world.wait(self.rng.uniform(0, 15))
        self.world.connect(name, mb.NODE_STATE_TRAINING)

    def restart(self) -> None:
        """The coordinator's, in which nodes come back one by one, most of them."""
        if self.rng.random() < 0.8:
            return
        names = self.here()
        self.world.restart()
        self.world.pending.clear()
        for name in names:
            if self.rng.random() < 0.9:
                self.world.connect(name, mb.NODE_STATE_TRAINING)
                self.world.wait(self.rng.uniform(0, 2))

    def _id(self, name: str) -> str:
        return self.world.identities[name].peer_id


def check_settled(storm: Storm) -> None:
    """Everybody in the plan is there and can, or the run says what is missing."""
    world = storm.world
    state, memory = world.state, world.state.memory[RUN]
    electorate = deciding.next_electorate(state, RUN)
    assert electorate is not None
    voters = {peer for peer in electorate.members if deciding.can_vote(state, RUN, peer)} & set(world.plan.standbys)
    members = [peer for peer in world.plan.members if peer not in voters]
    gone = [peer for peer in members if not state.live[peer].connected or state.nodes[peer].draining]
    nobody = not attendance_of(state, RUN, world.now.monotonic).members
    assert bool(memory.no_plan_reason or memory.undecidable_reason) or nobody or not gone
    assert not memory.no_plan_reason or memory.no_plan_reason.startswith(
        ("needs ", "no route covers", "no machine may hold")
    )
    assert memory.question is None


@pytest.mark.parametrize("seed", range(1, 5))
def test_plans_stay_valid_under_random_events(seed: int) -> None:
    storm = Storm(seed)
    for _ in range(3):
        storm.run(8)
        storm.settle()
        check_settled(storm)
    assert storm.world.plan.version > 1


def main() -> None:
    """Storms of a hundred things each, and what moved in all."""
    wanted = int(sys.argv[1])
    kept = moved = plans = asked = 0
    happened: Counter[str] = Counter()
    for seed in range(wanted // 100):
        storm = Storm(1000 + seed)
        for _ in range(10):
            storm.run(10)
            storm.settle()
            check_settled(storm)
        kept, moved = kept + storm.world.kept_layers, moved + storm.world.moved_layers
        plans, asked = plans + storm.world.plan.version, asked + len(storm.world.asked)
        happened += storm.happened
    print(f"{sum(happened.values())} things: {dict(happened)}")
    print(f"{plans} plans, {asked} questions; those who stayed kept {kept} layers and fetched {moved} new ones")


if __name__ == "__main__":
    main()
