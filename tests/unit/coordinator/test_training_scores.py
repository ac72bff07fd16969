"""Audits of training at the coordinator: who may report them, whom they make doubted, and whom never."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest
from unit.coordinator.world import RUN, World, commit, round_report

from atoll.coordinator.rounds.training_scores import KEPT_SCORES, compare
from atoll.coordinator.services.views import node_view
from atoll.coordinator.state.run_memory import TrainingScore
from atoll.coordinator.store.records import Event
from atoll.core.round_id import RoundId
from atoll.core.training_audits import Drawn, audit_seed, draw
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

ALL = ("ann", "bob", "cid", "dan", "eve")
Scores = dict[str, tuple[TrainingScore, ...]]


def audited_rounds(world: World, count: int) -> list[Drawn]:
    """Commit rounds whose manifests draw audits; who is drawn in each."""
    drawn = []
    for _ in range(count):
        number, members = world.run.head_round + 1, [world.identities[name] for name in ALL]
        before = world.state.memory[RUN].committed[number - 1]
        report = round_report(number, before.manifest_hash, members, committed_before=world.run.committed_tokens)
        manifest = manifest_pb2.Manifest.FromString(report.manifest.payload)
        for item in manifest.contributions:
            item.samples = 10
        manifest.audit_seed = audit_seed(RoundId(RUN, 1, 0, number, 0), [bytes([number])])
        report.manifest.CopyFrom(commit(manifest.SerializeToString(), members))
        world.say(world.opener_of(report), rounds=[report])
        assert world.run.head_round == number
        found = draw(manifest)
        assert found is not None
        drawn.append(found)
    return drawn


def audit(world: World, number: int, drawn: Drawn, score: float, by: str | None = None) -> None:
    told = mb.TrainingAudit(round=number, contributor=drawn.contributor, given=True, score=score, samples=20)
    world.say(by or world.name_of(drawn.auditor), training_audits=[told])


def events(world: World, kind: str) -> list[str]:
    return [row.message for row in world.records if isinstance(row, Event) and row.kind == kind]


@pytest.fixture
def world() -> World:
    world = World()
    world.train(*ALL, stop_tokens=10**12)
    return world


def test_who_trains_less_than_it_claims_is_doubted_and_shown(world: World) -> None:
    rng, cheat = random.Random(1), world.identities["cid"].peer_id
    for number in range(1, 91):
        (drawn,) = audited_rounds(world, 1)
        audit(world, number, drawn, rng.gauss(0.4 if drawn.contributor == cheat else 4.0, 1.1))
    (message,) = events(world, "node.training-doubted")
    assert message.startswith("cid seems to train less than it claims")
    views = {name: node_view(world.state, world.state.nodes[world.identities[name].peer_id], 0, 0.0) for name in ALL}
    assert [name for name in ALL if views[name].training_doubted] == ["cid"]
    assert views["cid"].training_score < 2 < views["ann"].training_score
    assert all(0 < view.training_audits <= KEPT_SCORES for view in views.values())


def test_only_the_drawn_auditor_is_heard_and_once(world: World) -> None:
    (drawn,) = audited_rounds(world, 1)
    others = [name for name in ALL if world.identities[name].peer_id != drawn.auditor]
    for name in others:
        audit(world, 1, drawn, -50.0, by=name)
    assert world.state.memory[RUN].training_scores == {}
    assert len(events(world, "audit.rejected")) == len(others)
    audit(world, 1, drawn, 4.0)
    audit(world, 1, drawn, -50.0)
    assert [it.score for it in world.state.memory[RUN].training_scores[drawn.contributor]] == [4.0]
    audit(world, 9, drawn, 4.0)  # a round that is not known: it comes again
    assert len(events(world, "audit.rejected")) == len(others)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 101.0])
def test_impossible_figures_are_refused(world: World, score: float) -> None:
    (drawn,) = audited_rounds(world, 1)
    audit(world, 1, drawn, score)
    assert world.state.memory[RUN].training_scores == {}


def scores_of(tell: Callable[[str, str, int], float | None], members: int = 8, audits: int = KEPT_SCORES) -> Scores:
    """Audits of all members by all others in turn; `tell` gives the score that an auditor reports of a contributor."""
    names = [f"m{place}" for place in range(members)]
    return {
        name: tuple(
            TrainingScore(number, by := names[(place + 1 + number % (members - 1)) % members], tell(name, by, number))
            for number in range(audits)
        )
        for place, name in enumerate(names)
    }


def doubted(scores: Scores) -> set[str]:
    return {peer for peer, it in compare(scores).items() if it.doubted}


def test_no_honest_member_is_doubted_in_10000_audits() -> None:
    rng = random.Random(7)
    for typical in (1.2, 2.5, 4.0, 8.0):
        for audits in (5, 8, 16):
            for _ in range(10_000 // (8 * 3 * 4)):
                assert not doubted(scores_of(lambda *_: rng.gauss(typical, 1.2), audits=audits))  # noqa: B023


@pytest.mark.parametrize(("honest", "tenth"), [(4.0, 0.4), (6.0, 0.6), (8.0, 2.0)])
def test_a_tenth_of_the_training_is_doubted_after_a_few_audits(honest: float, tenth: float) -> None:
    rng, found = random.Random(8), 0
    for _ in range(200):
        told = scores_of(lambda name, *_: rng.gauss(tenth if name == "m3" else honest, 1.2), audits=8)
        found += doubted(told) == {"m3"}
    assert found >= 190


def test_one_lying_auditor_makes_nobody_doubted_and_clears_nobody() -> None:
    rng = random.Random(9)
    for _ in range(100):
        for lie in (-100.0, 100.0):
            lies = scores_of(lambda _, by, __: lie if by == "m0" else rng.gauss(4.0, 1.2))  # noqa: B023
            assert not doubted(lies)
            lies = scores_of(
                lambda name, by, _: lie if by == "m0" else rng.gauss(0.2 if name == "m3" else 5.0, 1.2)  # noqa: B023
            )
            assert doubted(lies) == {"m3"}


def test_what_was_not_given_says_nothing() -> None:
    assert doubted(scores_of(lambda name, *_: None if name == "m1" else 4.0)) == set()
    assert compare({}) == {}


def test_where_audits_tell_nothing_nobody_is_doubted() -> None:
    rng = random.Random(10)
    assert not doubted(scores_of(lambda name, *_: rng.gauss(-3.0 if name == "m1" else 0.3, 1.2)))
    assert not doubted(scores_of(lambda name, *_: 0.0 if name == "m1" else 5.0, members=2))


@pytest.mark.parametrize(
    "means", [(8, 2, 2, 5), (10, 1, 1, 6), (9, 1), (6, 6, 6, 0), (0, 6, 6, 0), (3.65, 0.3, 1.3, 2.5)]
)
def test_fragments_of_which_updates_say_little_make_no_honest_member_doubted_and_hide_no_cheat(
    means: tuple[float, ...],
) -> None:
    """Five audits may all be of such fragments."""
    rng = random.Random(11)
    accused = caught = 0
    for number in range(60):
        share = 0.1 if number % 2 else 1.0  # of what it claims, that m3 trains
        told: Scores = {}
        for name, found in scores_of(lambda *_: 0.0).items():
            fragments = [rng.randrange(len(means)) for _ in found]
            of = [means[fragment] * (share if name == "m3" else 1.0) for fragment in fragments]
            told[name] = tuple(
                replace(it, score=rng.gauss(mean, 1.2), fragment=fragment)
                for it, mean, fragment in zip(found, of, fragments, strict=True)
            )
        accused += len(doubted(told) - ({"m3"} if number % 2 else set()))
        caught += number % 2 and "m3" in doubted(told)
    assert accused == 0
    assert caught >= 25 or fmean(means) < 3.5
