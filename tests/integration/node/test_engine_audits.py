"""Engines with real trainers, and one member that lies: its lies reach no state, and rounds go on without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from integration.node.test_engine import ROUND, Member, members
from support.eventually import eventually
from support.lying_members import LIES, is_sketches, lie_in_sums, turned_sketches
from support.memory_network import FrameInTransit

from atoll.core.frames import Frame, FrameKind
from atoll.v1 import dataplane_pb2 as dp

MEMBERS = 4
ROUNDS = 4
UNTRAINED = 5.7  # nats per byte; a lie that got in makes it worse
SECONDS = 480.0


class Starts:
    """Every `Start` that was sent, as a fault that changes nothing else."""

    def __init__(self, change: Callable[[FrameInTransit], Frame]) -> None:
        self.seen: list[dp.Start] = []
        self._change = change

    async def __call__(self, passage: FrameInTransit) -> Frame:
        if passage.protocol == ROUND and passage.frame.kind is FrameKind.MESSAGE:
            message = dp.RoundMessage.FromString(passage.frame.header)
            if message.HasField("start"):
                self.seen.append(message.start)
        return self._change(passage)

    def reducing(self) -> list[set[str]]:
        """Who reduced in each."""
        return [{piece.reducer for piece in start.partition} for start in self.seen]


async def honest_go_on(made: list[Member], liar: str) -> None:
    """Honest members commit rounds, have one model, and it is no worse than an untrained one."""
    honest = [member for member in made if member.identity.peer_id != liar]
    await eventually(lambda: all(len(it.heads) >= ROUNDS or it.running.done() for it in honest), SECONDS)
    for member in honest:
        assert not member.running.done() or member.running.result()
        assert bool(torch.isfinite(member.state.anchor_E).all())
    assert len({member.heads[ROUNDS - 1].hash for member in honest}) == 1
    assert (await honest[0].trainer.evaluate()).value < UNTRAINED


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lie", ["ten times, turned", "1e38"])
async def test_no_member_applies_what_a_lying_reducer_sends_and_it_reduces_no_more(tmp_path, monkeypatch, lie):
    liar: list[str] = []
    lie_in_sums(monkeypatch, lambda peer: peer in liar, LIES[lie])
    starts = Starts(lambda passage: passage.frame)
    async with members(tmp_path, MEMBERS, starts) as made:
        liar.append(sorted(member.identity.peer_id for member in made)[-1])
        await honest_go_on(made, liar[0])
        assert liar[0] in starts.reducing()[0]
        assert liar[0] not in starts.reducing()[-1]


@pytest.mark.timeout(900)
async def test_rounds_go_on_without_a_contributor_that_tells_other_sketches_than_it_sent(tmp_path):
    liar: list[str] = []

    def change(passage: FrameInTransit) -> Frame:
        lies = passage.sender in liar and is_sketches(passage.protocol, passage.frame)
        return turned_sketches(passage.frame) if lies else passage.frame

    starts = Starts(change)
    async with members(tmp_path, MEMBERS, starts) as made:
        liar.append(sorted(member.identity.peer_id for member in made)[-1])
        await honest_go_on(made, liar[0])
        honest = next(member for member in made if member.identity.peer_id not in liar)
        assert liar[0] not in {item.peer_id for item in honest.heads[-1].manifest.contributions}
