"""A message that is too large for a frame is never dropped in silence: the attempt ends, and its reason is reported."""

import pytest
from support.machine_world import World
from support.memory_network import MemoryHub

from atoll.core.errors import MessageTooLarge
from atoll.core.frames import MAX_HEADER_BYTES
from atoll.node.rounds.member_streams import RoundLinks
from atoll.v1 import dataplane_pb2 as dp


async def ignore(peer: str, message: dp.RoundMessage) -> None:
    """Nobody sends anything here."""


async def test_the_sender_is_told_the_kind_and_the_size():
    links = RoundLinks(MemoryHub().join("ann"), ignore)
    fits = dp.RoundMessage(abandon=dp.Abandon(reason="x" * (MAX_HEADER_BYTES - 100)))
    links.send("bob", fits)
    too_large = dp.RoundMessage(settle=dp.Settle(digests=[bytes(32)] * 40_000))
    with pytest.raises(MessageTooLarge, match=f"settle has {too_large.ByteSize()} bytes.*at most {MAX_HEADER_BYTES}"):
        links.send("bob", too_large)
    await links.close()


@pytest.mark.parametrize("kind", ["open", "start", "settle", "parts", "digest"])
def test_an_attempt_whose_message_is_too_large_ends_with_that_reason_and_later_ones_commit(kind):
    world = World(3)
    assert world.run(60, until=lambda: world.rounds() >= 2)
    sizes = []

    def note(sender, to, message):
        if message.WhichOneof("body") == kind:
            sizes.append(message.ByteSize())
        return False

    world.network.drop = note
    assert world.run(60, until=lambda: len(sizes) >= 3)
    world.network.drop = lambda *_: False
    world.max_message_bytes, reports = min(sizes) - 1, len(world.reports)
    before = world.rounds()
    world.run(40)
    failed = [report for report in world.reports[reports:] if report.manifest is None]
    assert any("too large" in report.reason for report in failed)
    world.max_message_bytes = MAX_HEADER_BYTES
    assert world.run(120, until=lambda: world.rounds() >= before + 2)


def test_settle_has_digests_only_for_members_that_reported_others():
    world = World(5, seed=1)
    sizes: dict[bool, list[int]] = {True: [], False: []}  # as reported → digests

    def watch(sender: str, to: str, message: dp.RoundMessage) -> bool:
        if message.WhichOneof("body") == "settle":
            sizes[message.settle.as_reported].append(len(message.settle.digests))
        return False

    world.network.drop = watch
    assert world.run(60, until=lambda: world.rounds() >= 5)
    assert sizes[True]
    assert not any(sizes[True])
