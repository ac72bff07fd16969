"""Rounds of 64 and 100 members with models of 1 B and 7 B parameters, in the simulated swarm of the tests.

The round machine, its messages, signatures and frame limit are the shipped ones; the exchange and time are simulated.
In every round 4 % of the members, one at least, end their exchange without any part that others summed. The opener's
bytes are those that it sends in round messages; the exchange itself comes on top. Nothing is sent over a network.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

from support.machine_exchange import nonce_of
from support.machine_node import Node
from support.machine_plans import POLICY
from support.machine_world import World

from atoll.core.fragments import split_into_fragments
from atoll.core.identity import Identity
from atoll.core.round_id import RoundId
from atoll.node.exchange.codecs import CODECS
from atoll.node.rounds import types as rt
from atoll.node.rounds.signatures import IdentityVoteSigner
from atoll.v1 import dataplane_pb2 as dp
from benchmarks.common import Report

SIZES = ((64, 10**9), (100, 10**9), (64, 7 * 10**9), (100, 7 * 10**9))
ROUNDS = 25
LACKING = 0.04
CODEC = "int4"
LINK_BYTES_PER_SECOND = 100e6 / 8
ROUND_SECONDS = 60.0
TOKENS_PER_SECOND = 40  # of a simulated member
MAX_OPENER_MB = 10.0
LEAST_SHARE = 0.99


class SizedSwarm(World):
    """Members with real identities, of which some lack parts; counts what each of them sends."""

    def __init__(self, members: int, elements: int, seed: int = 1) -> None:
        drawn = random.Random(seed)
        made = [Identity.generate() for _ in range(members)]
        self.identities = {identity.peer_id: identity for identity in made}
        self.lacking: dict[str, set[str]] = {}
        self.sent: dict[int, Counter[str]] = defaultdict(Counter)  # round → sender → bytes
        self.largest: Counter[str] = Counter()  # kind → bytes
        self._drawn = drawn
        bytes_each = 2 * CODECS[CODEC].encoded_bytes(elements)
        seconds = bytes_each / LINK_BYTES_PER_SECOND
        offsets = (0, elements // 3 // 128 * 128, 2 * elements // 3 // 128 * 128, elements)
        policy = replace(
            POLICY,
            fragments=split_into_fragments(offsets, 1),
            part_elements=2**20,
            codecs=(CODEC,),
            due_tokens=lambda _, count: int(count * ROUND_SECONDS * TOKENS_PER_SECOND),
            round_max=timedelta(seconds=10 * ROUND_SECONDS),
            ready_timeout=timedelta(seconds=15),
            exchange_timeout=timedelta(seconds=60 + 2 * seconds),
            decision_timeout=timedelta(seconds=20 + seconds),
        )
        super().__init__(members, seed, policy=policy, names=list(self.identities), offsets=offsets)
        self.network.delay = (0.025, 0.1)
        self.exchange_seconds = lambda start: self.rng.uniform(1.0, 1.2) * seconds

    def signer_of(self, peer: str) -> rt.VoteSigner:
        return IdentityVoteSigner(self.identities[peer], "r", bytes(32))

    def _send(self, sender: str, to: str, message: dp.RoundMessage) -> None:
        kind, size = str(message.WhichOneof("body")), message.ByteSize()
        self.sent[self.rounds()][sender] += size
        self.largest[kind] = max(self.largest[kind], size)
        super()._send(sender, to, message)

    def _end_exchange(self, node: Node, round_id: RoundId, start: dp.Start) -> None:
        key = str(round_id)
        if key not in self.lacking:
            self.lacking[key] = set(self._drawn.sample(self.peers, max(1, int(LACKING * len(self.peers)))))
        digests, verdicts = self._exchanges.parts(round_id, node.peer, start)
        if node.peer in self.lacking[key]:
            digests = tuple(
                digest if reducer == node.peer else b""
                for digest, reducer in zip(digests, reducers_of(start), strict=True)
            )
        node.parts[round_id], node.starts[round_id] = digests, start
        self.feed(node.peer, rt.ExchangeDone(round_id, digests, verdicts, nonce_of(round_id, node.peer)))


def reducers_of(start: dp.Start) -> Iterator[str]:
    """The reducer of every part."""
    for piece in start.partition:
        yield from [piece.reducer] * -(-(piece.end - piece.start) // start.part_elements)


def main() -> None:
    report = Report("rounds_at_size")
    for members, elements in SIZES:
        began = time.perf_counter()
        swarm = SizedSwarm(members, elements)
        swarm.run(ROUNDS * 20 * ROUND_SECONDS, until=lambda swarm=swarm: swarm.rounds() >= ROUNDS)
        attempts = len(swarm.reports)
        share = swarm.rounds() / max(1, attempts)
        openers = [max(sent.values()) / 1e6 for number, sent in swarm.sent.items() if 2 <= number < swarm.rounds()]
        kind, largest = swarm.largest.most_common(1)[0]
        opener_mb = statistics.median(openers)
        report.cell(
            members=members,
            parameters=f"{elements / 1e9:g} B",
            attempts=attempts,
            committed=swarm.rounds(),
            caught_up=len(swarm.caught_up),
            seconds_a_round=swarm.now / max(1, swarm.rounds()),
            opener_mb=opener_mb,
            largest_kb=largest / 1e3,
            largest=kind,
            real_seconds=time.perf_counter() - began,
        )
        name = f"{members} members, {elements / 1e9:g} B"
        report.accept(
            f"{name}: attempts that commit", target=f"≥ {LEAST_SHARE}", value=share, holds=share >= LEAST_SHARE
        )
        if members == 100:
            report.accept(
                f"{name}: MB that the opener sends", target=f"≤ {MAX_OPENER_MB:g}", value=opener_mb,
                holds=opener_mb <= MAX_OPENER_MB,
            )  # fmt: skip
    report.finish(
        f"{ROUNDS} rounds each, {CODEC}, 100 Mbit/s; {LACKING:.0%} of the members lack all parts of others in every "
        "round; seconds are virtual; opener_mb: median over rounds of the most that one member sends in a round"
    )


if __name__ == "__main__":
    main()
