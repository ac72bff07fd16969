"""Hosts on loopback: streams and addresses between members."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from pathlib import Path

import pytest
from hivemind.dht.routing import DHTID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.multiaddr import Multiaddr
from support.certificates import certificate_of
from support.loopback_hosts import DIRECT, SOON, Lab, echo

from atoll.core.errors import ConfigError, Unreachable
from atoll.core.frames import FrameKind
from atoll.core.identity import Identity
from atoll.core.records import build_address_record, page_key

LIFETIME = timedelta(minutes=5)


async def test_members_find_each_other_and_talk(lab: Lab) -> None:
    seed = await lab.start("seed", relay_service=True)
    a = await lab.start("a", seeds=seed.multiaddrs())
    b = await lab.start("b", seeds=seed.multiaddrs())
    b.handle("/echo/1", echo)
    await b.publish_address(LIFETIME)
    await a.publish_address(LIFETIME)
    addresses = await a.lookup_addresses()
    assert addresses == {a.peer_id: a.multiaddrs(), b.peer_id: b.multiaddrs()}

    stream = await a.open(b.peer_id, "/echo/1", SOON)
    body = bytes(range(256)) * 4096 * 4
    await stream.send(FrameKind.PART, b"header", body)
    frame = await stream.receive(SOON)
    assert (frame.kind, frame.header, bytes(frame.body)) == (FrameKind.PART, b"header", body)
    assert a.bytes_sent("/echo/1") == 16 + 6 + len(body) == stream.bytes_sent
    assert a.bytes_sent("dht") > 0 < a.bytes_sent("/atoll/hello/1")
    await stream.close()


async def test_members_in_directories_with_long_paths_talk_too(tmp_path: Path) -> None:
    deep = tmp_path / ("deep" * 20) / ("deeper" * 10)
    deep.mkdir(parents=True)
    lab = Lab(deep)
    try:
        seed = await lab.start("seed", relay_service=True)
        seed.handle("/echo/1", echo)
        await seed.ready()
        for name, direct in (("a", None), ("b", DIRECT)):
            host = await lab.start(name, seeds=seed.multiaddrs(), direct=direct)
            stream = await host.open(seed.peer_id, "/echo/1", SOON)
            await stream.send(FrameKind.PART, b"header", b"body")
            frame = await stream.receive(SOON)
            assert (frame.kind, frame.header, bytes(frame.body)) == (FrameKind.PART, b"header", b"body")
    finally:
        await lab.close()
    links = [Path(f"/proc/self/fd/{it}") for it in os.listdir("/proc/self/fd")]
    assert not [link for link in links if link.is_symlink() and deep in (there := link.readlink(), *there.parents)]


async def test_a_host_that_is_gone_removes_no_other_s_socket(tmp_path: Path) -> None:
    deep, other = tmp_path / ("deep" * 20) / ("deeper" * 10), tmp_path / "other"
    deep.mkdir(parents=True)
    other.mkdir()
    (other / "streams.sock").touch()
    lab = Lab(deep)
    host = await lab.start("a")
    removed = host._p2p._client_listen_maddr["unix"]
    await lab.close()
    descriptor = os.open(other, os.O_RDONLY)  # as another host of this process opens it, most likely at the same number
    try:
        host._p2p._client_listen_maddr = Multiaddr(f"/unix/proc/self/fd/{descriptor}/{os.path.basename(removed)}")
        host._p2p.__del__()  # as the garbage collector does, sooner or later
        assert os.listdir(other) == ["streams.sock"]
    finally:
        os.close(descriptor)


async def test_members_that_began_without_a_seed_meet_through_one_that_came_later(lab: Lab) -> None:
    a, b = await lab.start("a"), await lab.start("b")
    seed = await lab.start("seed", relay_service=True)
    for host in (a, b):
        host.set_seeds(seed.multiaddrs())
        await host.publish_address(LIFETIME)
    for host in (a, b):
        assert await host.lookup_addresses() == {a.peer_id: a.multiaddrs(), b.peer_id: b.multiaddrs()}


async def test_thousands_of_members_are_found(lab: Lab) -> None:
    seed = await lab.start("seed", relay_service=True)
    addresses = tuple(f"/ip4/192.0.2.{last}/tcp/4001" for last in (1, 2, 3))
    storage, until = seed._directory._joined_node().protocol.storage, lab.clock.unix() + 300
    others = [Identity.generate() for _ in range(3000)]
    for other in others:
        certificate = certificate_of(other, lab.operator, lab.clock.unix())
        record = build_address_record(other, certificate, "reef", until, addresses)
        key = DHTID.generate(source=page_key("reef", other.peer_id))
        assert storage.store_subkey(key, other.peer_id, MSGPackSerializer.dumps(record), until)
    node = await lab.start("node", seeds=seed.multiaddrs())
    await node.publish_address(LIFETIME)
    everyone = await node.lookup_addresses()
    assert everyone == {node.peer_id: node.multiaddrs(), **dict.fromkeys((it.peer_id for it in others), addresses)}
    received, last = node.traffic.received["dht"], others[-1].peer_id
    assert (await node.lookup_addresses([last]))[last] == addresses
    assert node.traffic.received["dht"] - received < 3000 * len(record) / 10  # one page of sixteen
    assert await node._p2p.book.find(last)


async def test_a_seed_is_found_at_any_of_its_addresses(lab: Lab) -> None:
    seed = await lab.start("seed", relay_service=True)
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{seed.peer_id}"
    told = (*seed.multiaddrs(), dead, "/ip4/127.0.0.1/tcp/1/p2p/0OIl")
    node = await lab.start("node", seeds=told)
    await node.publish_address(LIFETIME)
    node.set_seeds(told)
    with pytest.raises(ConfigError):
        node.set_seeds(("nonsense",))
    await node.publish_address(LIFETIME)
    assert await seed.lookup_addresses() == {node.peer_id: node.multiaddrs()}


async def test_a_protocol_that_p2pd_did_not_take_is_offered_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = await lab.start("seed", relay_service=True)
    node = await lab.start("node", seeds=seed.multiaddrs())
    serve, failed = seed._p2p.control.serve_streams, list[str]()

    async def busy_once(protocol: str) -> None:
        if protocol not in failed:
            failed.append(protocol)
            raise Unreachable("p2pd did not answer")
        await serve(protocol)

    monkeypatch.setattr(seed._p2p.control, "serve_streams", busy_once)
    for protocol in ("/echo/1", "/echo/2"):
        seed.handle(protocol, echo)
    with pytest.raises(Unreachable, match="did not answer"):
        await seed.ready()
    await seed.ready()
    assert failed == ["/echo/1", "/echo/2"]
    for protocol in failed:
        stream = await node.open(seed.peer_id, protocol, SOON)
        await stream.close()


async def test_the_owners_limit_bounds_the_reported_rate_to_a_member(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    host = await lab.start("ann")
    assert host.bytes_per_second_to("nobody") == 0.0
    monkeypatch.setattr(host._pacer, "bytes_per_second_to", lambda peer: math.inf)
    assert math.isinf(host.bytes_per_second_to("bob"))
    host.traffic.up.set_rate(1e6)
    assert host.bytes_per_second_to("bob") == 1e6
