"""Who is missing in sums: only those who sum are heard, about those who are due there, and each by name."""

from __future__ import annotations

import pytest
from support.machine_node import Node
from support.machine_plans import POLICY, make_plan
from support.machine_world import World

from atoll.core.errors import PeerMisbehaved
from atoll.core.round_id import RoundId
from atoll.core.verdicts import screened_out
from atoll.node.exchange.codecs import CODECS
from atoll.node.rounds import types as rt
from atoll.node.rounds.decide import build_start, check_verdicts
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

PEERS = ["p0", "p1", "p2", "p3"]
ROUTES = [[(peer, 0, POLICY.layers - 1)] for peer in PEERS[:3]]  # p3 stands by: it holds all and sums nothing
NUMBER = RoundId("r", 1, 0, 1, 0)


def started() -> dp.Start:
    ready = {peer: dp.Ready(round=NUMBER.to_proto(), tokens=100, samples=10) for peer in PEERS}
    plan = make_plan(PEERS, routes=ROUTES)
    return build_start(POLICY, plan, NUMBER, ready, codec=CODECS["int4"], unix_ms=0, exchange_seconds=5)


def missing(reducer: int, contributor: int, parts: int = 1) -> manifest_pb2.Verdict:
    return manifest_pb2.Verdict(reducer=reducer, contributor=contributor, parts_missing=parts)


def place(start: dp.Start, peer: str) -> int:
    return [item.peer_id for item in start.contributions].index(peer)


@pytest.mark.parametrize(
    ("said_by", "reducer", "contributor"),
    [("p3", "p3", "p0"), ("p0", "p0", "p0"), ("p0", "p0", "p3"), ("p0", "p1", "p2")],
    ids=["it sums nothing", "itself", "it contributes nothing", "another's sums"],
)
def test_who_cannot_miss_somebody_in_its_sums_is_not_heard(said_by: str, reducer: str, contributor: str) -> None:
    start = started()
    with pytest.raises(PeerMisbehaved):
        check_verdicts(start, [missing(place(start, reducer), place(start, contributor))], said_by)


def test_a_reducer_may_miss_anybody_who_contributes() -> None:
    start = started()
    others = sorted(place(start, peer) for peer in ("p1", "p2"))
    check_verdicts(start, [missing(place(start, "p0"), other) for other in others], "p0")


class Listening(World):
    """Every member's rounds, and what openers say to have heard. `liar` misses all others in its sums."""

    def __init__(self, liar: str) -> None:
        super().__init__(4, routes=ROUTES)
        self.missed: list[rt.ContributorsMissing] = []
        self.liar = liar
        self.network.drop = self._lie

    def _lie(self, sender: str, to: str, message: dp.RoundMessage) -> bool:
        if message.WhichOneof("body") == "start":
            self.start = message.start
        if sender == self.liar and message.WhichOneof("body") == "parts":
            parts = sum(piece.reducer == sender for piece in self.start.partition)
            others = sorted(place(self.start, peer) for peer in PEERS[:3] if peer != sender)
            del message.parts.verdicts[:]
            message.parts.verdicts.extend(missing(place(self.start, sender), it, max(1, parts)) for it in others)
        return False

    def _perform(self, node: Node, action: rt.Action) -> None:
        if isinstance(action, rt.ContributorsMissing):
            self.missed.append(action)
        super()._perform(node, action)

    def lost(self) -> set[str]:
        """Whose tokens did not count in some round."""
        return {
            item.peer_id
            for head in self.committed.values()
            for place, item in enumerate(head.manifest.contributions)
            if item.weight and not item.tokens and place not in screened_out(head.manifest)
        }


def test_who_sums_nothing_takes_nobodys_tokens() -> None:
    w = Listening("p3")
    assert w.run(300, until=lambda: w.rounds() >= 8)
    assert not w.lost()
    assert not w.missed


def test_a_reducer_that_misses_others_in_its_share_is_named_and_takes_nobodys_tokens() -> None:
    w = Listening("p1")
    assert w.run(300, until=lambda: w.rounds() >= 8)
    assert not w.lost()
    assert {(it.reducer, frozenset(it.contributors)) for it in w.missed} == {("p1", frozenset({"p0", "p2"}))}
