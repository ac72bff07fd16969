"""The gate between running hosts: versions, bans, restarts, renewals, dead daemons, bad addresses."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from datetime import timedelta

import pytest
from support.loopback_hosts import SOON, Lab, echo

from atoll.core.errors import Banned, ConfigError, DeadlineExceeded, PortInUse, ProtocolMismatch, Unreachable
from atoll.core.frames import FrameKind
from atoll.core.membership import DenyList
from atoll.node.swarm import dht
from atoll.node.wire.transport import Stream

LIFETIME = timedelta(minutes=5)


async def test_another_major_version_is_refused_with_a_sentence(lab: Lab) -> None:
    old = await lab.start("old", relay_service=True)
    new = await lab.start("new", relay_service=True)
    new.learn_addresses(old.peer_id, old.multiaddrs())
    hello = new.gate.hello()
    ours = hello.protocol.major
    hello.protocol.major += 1
    new.gate.hello = lambda: hello  # type: ignore[method-assign]
    with pytest.raises(
        ProtocolMismatch, match=rf"speaks protocol {ours + 1}\.0, which is newer than ours \({ours}\.0\)"
    ):
        await new.open(old.peer_id, "/echo/1", SOON)


async def test_a_banned_peers_streams_are_cut_and_it_stays_out(lab: Lab) -> None:
    seed = await lab.start("seed", relay_service=True)
    bad = await lab.start("bad", seeds=seed.multiaddrs())
    seed.handle("/echo/1", echo)
    await seed.ready()
    await bad.publish_address(LIFETIME)
    stream = await bad.open(seed.peer_id, "/echo/1", SOON)
    seed.gate.set_deny_list(DenyList(1, frozenset({bad.peer_id})))
    with pytest.raises(Unreachable, match="ended the stream"):
        await stream.receive(SOON)
    with pytest.raises(Banned):
        await bad.open(seed.peer_id, "/echo/1", SOON)
    assert await seed.lookup_addresses() == {}
    await stream.close()


async def test_after_a_restart_the_dialler_says_hello_again(lab: Lab) -> None:
    seed = await lab.start("seed", relay_service=True)
    node = await lab.start("node", seeds=seed.multiaddrs())
    address = seed.multiaddrs()[0].partition("/p2p/")[0]
    await seed.close(SOON)
    again = await lab.start("seed", relay_service=True, listen=(address,))
    assert again.multiaddrs() == seed.multiaddrs()
    again.handle("/echo/1", echo)
    await again.ready()
    assert node.gate.is_admitted(again.peer_id)
    assert not again.gate.is_admitted(node.peer_id)
    stream = await node.open(again.peer_id, "/echo/1", SOON)
    await stream.send(FrameKind.MESSAGE, b"still here")
    assert (await stream.receive(SOON)).header == b"still here"
    await stream.close()
    again.gate.evict(node.peer_id)
    await node.publish_address(LIFETIME)  # a unary call does the same
    assert await again.lookup_addresses() == {node.peer_id: node.multiaddrs()}


async def test_an_unknown_peer_is_found_through_a_seed(lab: Lab) -> None:
    seed = await lab.start("seed", relay_service=True)
    b = await lab.start("b", seeds=seed.multiaddrs())
    b.handle("/echo/1", echo)
    await b.publish_address(LIFETIME)
    a = await lab.start("a", seeds=seed.multiaddrs())
    stream = await a.open(b.peer_id, "/echo/1", SOON)
    assert stream.peer_id == b.peer_id
    await stream.close()


async def test_a_frozen_seed_does_not_delay_the_lookup_of_an_address(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would end the wait for its answer before libp2p gives its connection up, after about 45 s."""
    monkeypatch.setattr(dht, "SLOW_SEED_GRACE", timedelta(seconds=2))
    seeds = [await lab.start(name, relay_service=True) for name in ("seed", "frozen")]
    addresses = tuple(address for seed in seeds for address in seed.multiaddrs())
    b = await lab.start("b", seeds=addresses)
    b.handle("/echo/1", echo)
    await b.publish_address(LIFETIME)
    a = await lab.start("a", seeds=addresses)
    await a.ready()
    os.kill(seeds[1].p2pd_pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(30):
            stream = await a.open(b.peer_id, "/echo/1", SOON)
        assert stream.peer_id == b.peer_id
        await stream.close()
    finally:
        os.kill(seeds[1].p2pd_pid, signal.SIGCONT)


async def test_a_killed_p2pd_is_reported_and_nothing_hangs(lab: Lab) -> None:
    seed = await lab.start("seed", relay_service=True)
    node = await lab.start("node", seeds=seed.multiaddrs(), direct=None)  # a direct stream would live on
    seed.handle("/echo/1", echo)
    await seed.ready()
    stream = await node.open(seed.peer_id, "/echo/1", SOON)
    os.kill(node.p2pd_pid, signal.SIGKILL)
    died = await asyncio.wait_for(node.died, SOON.total_seconds())
    assert "p2pd ended by itself" in str(died)
    with pytest.raises(Unreachable):
        await stream.receive(SOON)
    with pytest.raises(Unreachable) as failed:
        await node.open(seed.peer_id, "/echo/1", SOON)
    assert not isinstance(failed.value, DeadlineExceeded), "it waited for answers of a p2pd that is gone"
    await stream.close()


async def test_start_fails_with_the_reason_and_leaves_nothing(lab: Lab) -> None:
    dead_seed = f"/ip4/127.0.0.1/tcp/1/p2p/{lab.identity('seed').peer_id}"
    with pytest.raises(Unreachable, match=f"none of the seeds answers: {dead_seed}"):
        await lab.start("a", seeds=(dead_seed,))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortInUse, match="Address already in use"):
        await lab.start("a", listen=(f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}",))
    with pytest.raises(ConfigError, match="not a TCP multiaddr"):
        await lab.start("a", listen=("/ip4/127.0.0.1/udp/1/quic",))
    with pytest.raises(ConfigError, match="does not name a seed"):
        await lab.start("a", seeds=("/ip4/127.0.0.1/tcp/1",))
    lab.assert_nothing_left()


async def test_a_handler_that_crashes_is_counted_and_the_next_stream_is_served(lab: Lab) -> None:
    async def crash_once(stream: Stream) -> None:
        if not seed.handler_crashes:
            raise ZeroDivisionError
        await echo(stream)

    seed = await lab.start("seed", relay_service=True)
    node = await lab.start("node", seeds=seed.multiaddrs())
    seed.handle("/echo/1", crash_once)
    await seed.ready()
    with pytest.raises(Exception, match="internal error"):
        await (await node.open(seed.peer_id, "/echo/1", SOON)).receive(SOON)
    stream = await node.open(seed.peer_id, "/echo/1", SOON)
    await stream.send(FrameKind.MESSAGE, b"again")
    assert (await stream.receive(SOON)).header == b"again"
    await stream.close()
