"""The address book: the addresses that it parses, and one resolver call for concurrent lookups."""

from __future__ import annotations

import asyncio

import base58
import pytest
from structlog.testing import capture_logs
from unit.coordinator.world import World

from atoll.core.clock import ManualClock
from atoll.core.errors import ConfigError
from atoll.core.identity import Identity
from atoll.node.direct.dial_policy import DialPolicy
from atoll.node.swarm.addresses import (
    MAX_ANNOUNCED_MULTIADDRS,
    AddressBook,
    announceable_multiaddrs,
    parse,
    peer_id_of,
    readable_seeds,
)
from atoll.node.swarm.name_resolution import NameResolution

PEER = Identity.generate().peer_id
ANY = DialPolicy(loopback=True, local=True)
STRICT = DialPolicy(loopback=False, local=False)


def test_learns_what_it_can_read_and_keeps_relays_whole() -> None:
    book = AddressBook(ManualClock(), ANY)
    relayed = f"/ip4/192.0.2.1/tcp/4001/p2p/{Identity.generate().peer_id}/p2p-circuit"
    book.learn(PEER, [f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}", "nonsense", f"{relayed}/p2p/{PEER}"])
    assert [str(address) for address in book.known(PEER)] == ["/ip4/192.0.2.7/tcp/4001", relayed]
    book.learn(PEER, ["nonsense"])
    assert len(book.known(PEER)) == 2


async def test_asks_the_resolver_once_for_all_on_a_page_and_not_again_at_once() -> None:
    clock, asked, elsewhere = ManualClock(), list[str](), Identity.generate().peer_id
    book = AddressBook(clock, ANY)

    async def resolve(page: str) -> None:
        asked.append(page)
        await asyncio.sleep(0)
        if asked.count(page) == 2:
            book.learn(PEER, ["/ip4/192.0.2.7/tcp/4001"])

    book.set_resolver(resolve, lambda peer: "2" if peer == elsewhere else "1")
    assert await asyncio.gather(*(book.find(PEER) for _ in range(3))) == [(), (), ()]
    assert await book.find(PEER) == ()
    assert asked == ["1"]
    assert await book.find(elsewhere) == ()  # another page is asked for at once
    assert asked == ["1", "2"]
    clock.advance(3)
    assert [str(address) for address in await book.find(PEER)] == ["/ip4/192.0.2.7/tcp/4001"]
    await book.find(PEER)
    assert asked == ["1", "2", "1"]


async def test_a_known_peer_is_resolved_again_because_addresses_change() -> None:
    book = AddressBook(ManualClock(100.0), ANY)
    book.learn(PEER, ["/ip4/192.0.2.7/tcp/4001"])

    async def resolve(page: str) -> None:
        assert page == "1"
        assert [str(address) for address in await book.find(PEER)] == ["/ip4/192.0.2.7/tcp/4001"]  # it may dial, too
        book.learn(PEER, ["/ip4/192.0.2.7/tcp/4002"])

    book.set_resolver(resolve, lambda _: "1")
    async with asyncio.timeout(60):
        assert [str(address) for address in await book.find(PEER)] == ["/ip4/192.0.2.7/tcp/4002"]


def test_a_relayed_address_is_written_as_p2pd_reads_it() -> None:
    relay = Identity.generate().peer_id
    parsed = parse(f"/ip4/192.0.2.1/tcp/4001/p2p/{relay}/p2p-circuit/p2p/{PEER}", PEER)
    identity = base58.b58decode(relay)  # a multihash, not the CID that hivemind writes
    assert parsed is not None
    assert parsed.to_bytes() == bytes.fromhex("04c0000201060fa1a503") + bytes([38]) + identity + bytes.fromhex("a202")


def test_a_seed_names_its_peer() -> None:
    assert peer_id_of(f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}") == PEER
    for wrong in ("/ip4/192.0.2.7/tcp/4001", "seed.example:4001", "/ip4/192.0.2.7/tcp/4001/p2p/"):
        with pytest.raises(ConfigError):
            peer_id_of(wrong)


def test_all_addresses_of_a_seed_are_kept_and_an_unreadable_one_affects_no_other() -> None:
    other = Identity.generate().peer_id
    ways = tuple(f"/ip4/192.0.2.{number}/tcp/4001/p2p/{PEER}" for number in (7, 8))
    bad = (f"/foo/p2p/{PEER}", "/ip4/192.0.2.9/tcp/4001/p2p/0OIl", "/ip4/192.0.2.9/tcp/4001")
    relayed = f"/ip4/192.0.2.1/tcp/4001/p2p/{PEER}/p2p-circuit/p2p/{other}"
    assert readable_seeds([ways[0], *bad, relayed, ways[1]]) == {PEER: ways, other: (relayed,)}
    assert readable_seeds([]) == {}
    for lone in bad:
        with pytest.raises(ConfigError, match="does not name a seed"):
            readable_seeds([lone])


def test_loopback_is_told_only_when_there_is_nothing_else() -> None:
    loopback, lan = "/ip4/127.0.0.1/tcp/4001", "/ip4/192.0.2.7/tcp/4001"
    assert announceable_multiaddrs([loopback, lan]) == (lan,)
    assert announceable_multiaddrs([loopback]) == (loopback,)


def test_announced_addresses_are_at_most_as_many_as_the_coordinator_takes() -> None:
    """Fixed bug: the coordinator refused the whole heartbeat, and the node never came back."""
    many = announceable_multiaddrs(f"/ip4/192.0.2.{number}/tcp/4001" for number in range(200))
    world = World()
    world.train("ann", "bob")
    world.say("ann", multiaddrs=many)
    assert world.state.nodes[world.identities["ann"].peer_id].multiaddrs == many


def test_addresses_that_may_not_be_dialled_are_left_out_and_logged_once() -> None:
    book = AddressBook(ManualClock(), STRICT)
    with capture_logs() as lines:
        for _ in range(3):
            book.learn(PEER, ["/ip4/8.8.8.8/tcp/4001", "/ip4/127.0.0.1/tcp/6379", "/ip4/169.254.169.254/tcp/80"])
    assert [str(address) for address in book.known(PEER)] == ["/ip4/8.8.8.8/tcp/4001"]
    (line,) = [line for line in lines if line["event"] == "addresses not dialled"]
    assert (line["peer"], line["refused"], line["left"]) == (PEER, 2, 1)


def test_one_peer_has_a_bounded_number_of_addresses() -> None:
    book = AddressBook(ManualClock(), ANY)
    book.learn(PEER, (f"/ip4/192.0.2.7/tcp/{port}" for port in range(2000, 60_000)))
    assert len(book.known(PEER)) == MAX_ANNOUNCED_MULTIADDRS


async def test_names_are_resolved_here_and_checked() -> None:
    names = NameResolution(STRICT)
    book = AddressBook(ManualClock(), STRICT)
    book.learn(PEER, ["/dns4/localhost/tcp/6379", "/ip4/8.8.8.8/tcp/4001"])
    assert len(book.known(PEER)) == 2
    assert [str(address) for address in await names.resolve(PEER, book.known(PEER))] == ["/ip4/8.8.8.8/tcp/4001"]
    names.close()
    names = NameResolution(ANY)
    found = await names.resolve(PEER, book.known(PEER))
    assert [str(address) for address in found] == ["/ip4/8.8.8.8/tcp/4001", "/ip4/127.0.0.1/tcp/6379"]
    names.close()
