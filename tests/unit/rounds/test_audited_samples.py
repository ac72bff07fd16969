"""Which samples an audit of training measures: those that the contribution was trained on, and no others."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machine_plans import make_plan

from atoll.core.data_position import DataPosition, advance
from atoll.core.manifest import Head
from atoll.core.training_audits import Drawn
from atoll.node.rounds.decide import position_at
from atoll.node.rounds.training_audits import InstalledRound, trained_samples
from atoll.v1 import manifest_pb2

MEMBERS = ("ann", "bob", "cid")
PLAN = make_plan(MEMBERS)
LEASE, LENGTH = 200, 32


def head(manifest: manifest_pb2.Manifest) -> Head:
    return Head(manifest_pb2.CommittedManifest(payload=manifest.SerializeToString()))


class Chain:
    """Committed rounds, and what each member consumed in each."""

    def __init__(self) -> None:
        genesis = manifest_pb2.Manifest()
        genesis.data.CopyFrom(DataPosition().to_proto())
        self.heads = [head(genesis)]
        self.consumed = dict[str, list[list[int]]]({peer: [] for peer in MEMBERS})

    def commit(self, fragments: int, samples: dict[str, int], since_load: dict[str, int]) -> None:
        """A round in which members consumed `samples`; their contributions hold `since_load` of all."""
        before, number = self.heads[-1], len(self.heads)
        position = position_at(before, PLAN, LEASE)
        made = manifest_pb2.Manifest(fragments=fragments, previous_hash=before.hash)
        made.round.number = number
        for peer, count in samples.items():
            held = chain.from_iterable(range(*piece) for piece in position.holdings.get(peer, ()))
            self.consumed[peer].append([*held][:count])
            made.contributions.add(peer_id=peer, weight=LENGTH * since_load[peer], samples=count, present=True)
        made.data.CopyFrom(advance(position, MEMBERS, samples, LEASE, 1, 0).to_proto())
        self.heads.append(head(made))

    def audited(self, contributor: str, compared: str, kept_from: int = 0) -> list[list[int]]:
        installed = InstalledRound(self.heads[-1], self.heads[-2], PLAN, LEASE, None, (0, 1))  # type: ignore[arg-type]

        def get(number: int) -> manifest_pb2.CommittedManifest | None:
            return self.heads[number].committed if kept_from <= number < len(self.heads) else None

        return trained_samples(installed, Drawn(contributor, "cid", compared), get, LENGTH)


def steady(made: Chain, fragments: int, rounds: int, samples: int = 10, **since_load: int) -> None:
    for _ in range(rounds):
        turn = samples * min(fragments, len(made.heads))
        made.commit(fragments, dict.fromkeys(MEMBERS, samples), {**dict.fromkeys(MEMBERS, turn), **since_load})


@given(st.integers(1, 5), st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=6, max_size=14))
def test_a_contribution_is_measured_on_what_was_consumed_in_a_turn(fragments: int, counts: list[list[int]]) -> None:
    made = Chain()
    for number, row in enumerate(counts):
        samples = dict(zip(MEMBERS, row, strict=True))
        trained = {
            peer: samples[peer] + sum(map(len, made.consumed[peer][max(0, number + 1 - fragments) :]))
            for peer in MEMBERS
        }
        made.commit(fragments, samples, trained)
    for told, peer in zip(made.audited("ann", "bob"), ("ann", "bob"), strict=True):
        assert sorted(told) == sorted(chain.from_iterable(made.consumed[peer][-fragments:]))


@pytest.mark.parametrize("rounds_ago", [1, 2, 3])
def test_who_began_anew_is_measured_on_what_it_trained_since(rounds_ago: int) -> None:
    made = Chain()
    steady(made, 4, 8)
    steady(made, 4, 1, ann=10 * rounds_ago)
    own, other = made.audited("ann", "bob")
    assert sorted(own) == sorted(chain.from_iterable(made.consumed["ann"][-rounds_ago:]))
    assert len(other) == 40


def test_who_began_anew_within_a_round_is_measured_on_its_newest_samples() -> None:
    made = Chain()
    steady(made, 1, 3, ann=4)
    assert made.audited("ann", "bob")[0] == made.consumed["ann"][-1][-4:]


def test_rounds_of_other_fragments_and_rounds_that_are_not_kept_are_left_out() -> None:
    made = Chain()
    steady(made, 2, 6)
    steady(made, 4, 2)
    assert sorted(made.audited("ann", "bob")[0]) == sorted(chain.from_iterable(made.consumed["ann"][-2:]))
    steady(made, 4, 4)
    assert sorted(made.audited("ann", "bob")[0]) == sorted(chain.from_iterable(made.consumed["ann"][-4:]))
    assert sorted(made.audited("ann", "bob", kept_from=len(made.heads) - 4)[0]) == sorted(
        chain.from_iterable(made.consumed["ann"][-3:])
    )
