"""Round messages of very many entries: refused unread, and their sender is not heard for a while."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta

import pytest
from support.memory_network import MemoryHub
from support.virtual_time import run_virtually

from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.frames import MAX_HEADER_BYTES, FrameKind
from atoll.core.quorum import MAX_SEATS
from atoll.node.rounds import member_streams
from atoll.node.rounds.member_streams import PROTOCOL, RoundLinks
from atoll.node.rounds.message_bounds import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    MAX_OTHERS,
    MAX_PARTS,
    MAX_REMEMBERED,
    MAX_VERDICTS,
    Pauses,
    parse_round_message,
)
from atoll.node.rounds.settlement import MAX_HOLDERS
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

SOON = timedelta(seconds=10)
MANY = 500_000
FLOODS = {
    "Settle.digests": dp.RoundMessage(settle=dp.Settle(digests=[b""] * MANY)),
    "Settle.repairs": dp.RoundMessage(settle=dp.Settle(repairs=[dp.PartHolders()] * MANY)),
    "Settle.repairs.members": dp.RoundMessage(settle=dp.Settle(repairs=[dp.PartHolders(members=[1] * MANY)])),
    "Settle.verdicts": dp.RoundMessage(settle=dp.Settle(verdicts=[manifest_pb2.Verdict()] * MANY)),
    "Settle.present": dp.RoundMessage(settle=dp.Settle(present=[""] * MANY)),
    "Settle.whole": dp.RoundMessage(settle=dp.Settle(whole=[1] * MANY)),
    "Parts.digests": dp.RoundMessage(parts=dp.Parts(digests=[b""] * MANY)),
    "Start.contributions": dp.RoundMessage(start=dp.Start(contributions=[manifest_pb2.Contribution()] * MANY)),
    "Start.partition": dp.RoundMessage(start=dp.Start(partition=[dp.PartRange()] * MANY)),
    "Ready.holds": dp.RoundMessage(ready=dp.Ready(holds=[b""] * MANY)),
    "Proposal.attestations": dp.RoundMessage(
        propose=dp.Propose(proposal=dp.Proposal(attestations=[pb.Signed()] * MANY))
    ),
    "CommittedManifest.signatures": dp.RoundMessage(
        commit=dp.Commit(manifest=manifest_pb2.CommittedManifest(signatures=[pb.Signed()] * MANY))
    ),
}
MANIFEST = manifest_pb2.Manifest(contributions=[manifest_pb2.Contribution()] * (MANY - 10)).SerializeToString()
RANGES = manifest_pb2.Manifest(
    data=manifest_pb2.DataPosition(holdings=[manifest_pb2.DataHolding(ranges=[pb.SampleRange()] * (MANY - 10))])
).SerializeToString()
PAYLOADS = {
    "Digest of ranges": dp.RoundMessage(digest=dp.Digest(payload=RANGES)),
    "Digest": dp.RoundMessage(digest=dp.Digest(payload=MANIFEST)),
    "Propose": dp.RoundMessage(propose=dp.Propose(proposal=dp.Proposal(payload=MANIFEST))),
    "Commit": dp.RoundMessage(commit=dp.Commit(manifest=manifest_pb2.CommittedManifest(payload=MANIFEST))),
    "Ready": dp.RoundMessage(ready=dp.Ready(accepted=dp.Accepted(proposal=dp.Proposal(payload=MANIFEST)))),
}
HONEST = dp.RoundMessage(report=dp.TokenReport(tokens=7))


@pytest.mark.parametrize("name", FLOODS)
def test_a_list_without_end_is_refused_by_name(name: str) -> None:
    data = FLOODS[name].SerializeToString()
    assert len(data) <= MAX_HEADER_BYTES  # a frame takes it
    with pytest.raises(PeerMisbehaved, match=f"{name} has {MANY} entries; the limit is"):
        parse_round_message(data)


@pytest.mark.parametrize("name", PAYLOADS)
def test_so_is_a_manifest_with_one(name: str) -> None:
    data = PAYLOADS[name].SerializeToString()
    assert len(data) <= MAX_HEADER_BYTES
    with pytest.raises(PeerMisbehaved, match=r"(contributions|holdings\.ranges) has 499990 entries; the limit is"):
        parse_round_message(data)


def test_what_honest_members_send_is_taken() -> None:
    verdict = manifest_pb2.Verdict(reducer=63, contributor=63, parts_left_out=9)
    repair = dp.PartHolders(part=9, members=range(MAX_HOLDERS))
    for message in (
        dp.Settle(digests=[b"d" * 32] * 30_000),
        dp.Settle(
            digests=[b""] * 20_000, repairs=[repair] * 20_000, verdicts=[verdict] * 64**2, present=["p" * 52] * 64
        ),
        dp.Settle(whole=range(1000)),
        dp.Parts(digests=[b""] * 30_000, verdicts=[verdict] * 64),
        dp.Propose(proposal=dp.Proposal(attestations=[pb.Signed(signature=b"s" * 64)] * 64)),
        dp.Commit(manifest=manifest_pb2.CommittedManifest(signatures=[pb.Signed()] * MAX_SEATS)),
    ):
        field = type(message).DESCRIPTOR.name.lower()
        whole = dp.RoundMessage(**{field: message})
        assert whole.ByteSize() <= MAX_HEADER_BYTES
        assert parse_round_message(whole.SerializeToString()) == whole
    assert MAX_OTHERS < MAX_PARTS < MAX_VERDICTS


@pytest.mark.parametrize("flood", [FLOODS["Settle.digests"].SerializeToString(), b"\x0a\xff"], ids=["list", "rubbish"])
def test_a_member_that_floods_is_heard_rarely_and_others_as_ever(flood: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    real = member_streams.parse_round_message

    def counted(data: bytes) -> dp.RoundMessage:
        parsed.append(len(data))
        return real(data)

    monkeypatch.setattr(member_streams, "parse_round_message", counted)

    async def scene() -> None:
        hub, heard = MemoryHub(), list[str]()

        async def hear(peer: str, _message: dp.RoundMessage) -> None:
            heard.append(peer)

        us, liar, honest = (hub.join(peer) for peer in ("us", "liar", "honest"))
        links, sending = RoundLinks(us, hear), RoundLinks(honest, hear)

        async def say(data: bytes) -> None:
            stream = await liar.open("us", PROTOCOL, SOON)
            with suppress(AtollError):
                await stream.send(FrameKind.MESSAGE, data)
                await stream.receive(SOON)
            await stream.close()

        async def flood_without_pause() -> None:
            while True:
                await say(flood)
                await asyncio.sleep(0.1)

        flooding = asyncio.create_task(flood_without_pause())
        for number in range(60):
            sending.send("us", HONEST)
            await asyncio.sleep(1)
            assert heard == ["honest"] * (number + 1)
        assert sum(size == len(flood) for size in parsed) <= 4  # pauses of 10, 20 and 40 s
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        for _ in range(10):  # streams that it left behind are read, too
            await asyncio.sleep(LONGEST_PAUSE_SECONDS)
        await say(HONEST.SerializeToString())
        assert heard[-1] == "liar"  # it is heard again
        await sending.close()
        await links.close()
        await hub.close()

    run_virtually(scene())


def test_pauses_grow_and_are_forgotten() -> None:
    pauses, now, lengths = Pauses(), 100.0, list[float]()
    assert pauses.seconds_left("liar", now) == 0
    for _ in range(9):
        pauses.begin("liar", now)
        lengths.append(pauses.seconds_left("liar", now))
        now += lengths[-1]
    assert lengths[:3] == [FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS, 4 * FIRST_PAUSE_SECONDS]
    assert lengths[-1] == LONGEST_PAUSE_SECONDS
    now += LONGEST_PAUSE_SECONDS + 1
    pauses.begin("liar", now)
    assert pauses.seconds_left("liar", now) == FIRST_PAUSE_SECONDS
    for number in range(2 * MAX_REMEMBERED):
        pauses.begin(f"liar-{number}", now)
    assert len(pauses._pauses) == MAX_REMEMBERED
