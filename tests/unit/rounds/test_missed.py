"""Who is missing in sums: only those who sum are heard, about those who are due there, and each by name."""

from __future__ import annotations

import pytest
from support.machine_node import Node
from support.machine_plans import POLICY, make_plan
from support.machine_world import World

from atoll.core.errors import PeerMisbehaved
from atoll.core.round_id import RoundId
from atoll.node.exchange.codecs import CODECS
from atoll.node.rounds import types as rt
from atoll.node.rounds.decide import build_start, check_partial
from atoll.v1 import dataplane_pb2 as dp

PEERS = ["p0", "p1", "p2", "p3"]
ROUTES = [[(peer, 0, POLICY.layers - 1)] for peer in PEERS[:3]]  # p3 stands by: it holds all and sums nothing
NUMBER = RoundId("r", 1, 0, 1, 0)


def started() -> dp.Start:
    ready = {peer: dp.Ready(round=NUMBER.to_proto(), tokens=100, samples=10) for peer in PEERS}
    plan = make_plan(PEERS, routes=ROUTES)
    return build_start(POLICY, plan, NUMBER, ready, codec=CODECS["int4"], unix_ms=0, exchange_seconds=5)


@pytest.mark.parametrize(
    ("said_by", "partial"), [("p3", ["p0"]), ("p9", ["p0"]), ("p0", ["p0"]), ("p0", ["p3"]), ("p0", ["p9"])]
)
def test_who_cannot_miss_somebody_in_its_sums_is_not_heard(said_by: str, partial: list[str]) -> None:
    with pytest.raises(PeerMisbehaved, match=said_by):
        check_partial(started(), partial, said_by)


@pytest.mark.parametrize(("said_by", "partial"), [("p0", ["p1", "p2"]), ("p0", []), ("p3", [])])
def test_a_reducer_may_miss_anybody_who_contributes(said_by: str, partial: list[str]) -> None:
    check_partial(started(), partial, said_by)


class Listening(World):
    """Every member's rounds, and what openers say to have heard. `liar` misses all others in its sums."""

    def __init__(self, liar: str) -> None:
        super().__init__(4, routes=ROUTES)
        self.missed: list[rt.ContributorsMissing] = []
        self.liar = liar
        self.network.drop = self._lie

    def _lie(self, sender: str, to: str, message: dp.RoundMessage) -> bool:
        if sender == self.liar and message.WhichOneof("body") == "parts":
            message.parts.partial[:] = 2 * [peer for peer in PEERS[:3] if peer != sender]
        return False

    def _perform(self, node: Node, action: rt.Action) -> None:
        if isinstance(action, rt.ContributorsMissing):
            self.missed.append(action)
        super()._perform(node, action)

    def lost(self) -> set[str]:
        """Whose tokens did not count in some round."""
        contributions = [item for head in self.committed.values() for item in head.manifest.contributions]
        return {item.peer_id for item in contributions if item.partial}


def test_who_sums_nothing_takes_nobodys_tokens() -> None:
    w = Listening("p3")
    assert w.run(300, until=lambda: w.rounds() >= 8)
    assert not w.lost()
    assert not w.missed


def test_a_reducer_that_misses_others_is_believed_and_named() -> None:
    w = Listening("p1")
    assert w.run(300, until=lambda: w.rounds() >= 8)
    assert w.lost() == {"p0", "p2"}
    assert {(it.reducer, it.contributors) for it in w.missed} == {("p1", ("p0", "p2"))}
