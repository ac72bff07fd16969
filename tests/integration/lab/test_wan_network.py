"""The WAN lab with real namespaces: rates, distances, trouble, NAT and limits, as programs inside it meet them."""

import asyncio
import signal
import sys

import pytest
from support.wan import PING_TRIES, PINGS, PROBE, ask, needs_wan, output, parts, reaches, serving, small

from atoll.lab.wan.check import check_network, check_topology
from atoll.lab.wan.errors import LabBroken, LabUnavailable, TopologyError
from atoll.lab.wan.network import wan_network
from atoll.lab.wan.topology import parse_topology

pytestmark = [*needs_wan, pytest.mark.timeout(600)]
LOOKS = 10  # a machine that stops for a moment carries less, or what waited at once
PYTHON = [sys.executable, "-I", "-S", "-c"]
RECEIVE = """
import hashlib, socket
server = socket.create_server(("", 6000))
print("ready", flush=True)
connection, _ = server.accept()
digest = hashlib.sha256()
while data := connection.recv(65536):
    digest.update(data)
print(digest.hexdigest())
"""
CALL_TOGETHER = """
import socket, sys
for attempt in range(int(sys.argv[2])):
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        caller.bind(("", 6000))
        caller.settimeout(0.5)
        try:
            caller.connect((sys.argv[1], 6000))
            caller.sendall(b"x")
            if caller.recv(1):
                print("met")
                break
        except OSError:
            pass
else:
    print("alone")
"""
SEND = """
import hashlib, os, socket, sys
data = os.urandom(int(sys.argv[2]))
with socket.create_connection((sys.argv[1], 6000), timeout=120) as connection:
    connection.sendall(data)
print(hashlib.sha256(data).hexdigest())
"""


async def test_a_check_finds_what_was_set():
    for _ in range(LOOKS):
        result = await check_topology(small(jitter_ms=2), 1.5, lambda _: None)
        wrong = [row for row in result.measurements if not row.ok]
        if not wrong or result.hub_late:
            break
    assert wrong == [] or result.hub_late, wrong
    assert result.congestion == "cubic"
    assert {row.quantity for row in result.measurements} == {"uplink_mbit", "downlink_mbit", "rtt_ms", "jitter_ms"}
    assert sum(row.quantity == "rtt_ms" for row in result.measurements) == 6


async def test_a_check_says_when_the_network_is_not_what_was_set():
    async with wan_network(small()) as network:
        network.set_host("h0", uplink_mbit=20)
        network.set_route("h0", "h1", rtt_ms=60)
        result = await check_network(network, 1.0, lambda _: None)
    assert not result.ok
    wrong = {(row.quantity, row.host, row.peer) for row in result.measurements if not row.ok}
    assert {("uplink_mbit", "h0", "coordinator"), ("rtt_ms", "h0", "h1")} <= wrong


async def test_streams_arrive_whole_over_a_link_that_loses_one_packet_in_a_hundred():
    async with wan_network(small(rtt_ms=10, loss=0.005)) as network:
        receiver = await network.exec("h1", [*PYTHON, RECEIVE], stdout=asyncio.subprocess.PIPE)
        assert await receiver.stdout.readline() == b"ready\n"
        sent = await output(network, "h0", *PYTHON, SEND, network.addresses["h1"], str(24 * 2**20))
        assert (await asyncio.wait_for(receiver.stdout.readline(), 180)).decode() == sent
        seen = network.counters().pairs["h0", "h1"]
    assert seen.sent_bytes > 24 * 2**20
    assert 0.005 < seen.dropped_segments["lost"] / seen.sent_segments < 0.02


async def test_what_is_cut_or_partitioned_is_not_reached_until_it_is_back():
    async with wan_network(small(4)) as network, serving(network, "h1", "h2"):
        assert await reaches(network, "h0", "h1")
        network.cut("h1")
        assert not await reaches(network, "h0", "h1")
        assert await reaches(network, "h0", "h2")
        network.restore("h1")
        network.partition(["h0", "h1"], ["h2", "h3"])
        assert await reaches(network, "h0", "h1")
        assert await reaches(network, "h3", "h2")
        assert not await reaches(network, "h0", "h2")
        network.heal()
        assert await reaches(network, "h0", "h2")
        assert network.counters().hosts["h0"].dropped_segments["cut"] == 2 * PINGS * PING_TRIES
        with pytest.raises(TopologyError, match="no host 'nobody'"):
            network.cut("nobody")


async def test_a_connection_lives_through_a_cut():
    async with wan_network(small()) as network:
        receiver = await network.exec("h1", [*PYTHON, RECEIVE], stdout=asyncio.subprocess.PIPE)
        await receiver.stdout.readline()
        sending = asyncio.create_task(output(network, "h0", *PYTHON, SEND, network.addresses["h1"], str(20 * 2**20)))
        while network.counters().hosts["h1"].received_bytes < 2**20:
            await asyncio.sleep(0.01)
        network.cut("h0")
        before = network.counters().hosts["h1"].received_bytes
        while "cut" not in network.counters().hosts["h0"].dropped_segments:
            await asyncio.sleep(0.01)
        assert network.counters().hosts["h1"].received_bytes == before
        network.restore("h0")
        assert (await asyncio.wait_for(receiver.stdout.readline(), 180)).decode() == await sending


async def test_behind_nat_only_own_calls_work():
    async with wan_network(small(2, nat=True)) as network, serving(network, "h0", "h1", "seed"):
        for caller in ("seed", "h1"):
            assert not (await ask(network, caller, "h0", task="call", seconds=1.0))["connected"]
        assert (await ask(network, "h0", "seed", task="call", seconds=60.0))["connected"]
        for _ in range(LOOKS):
            found = await ask(network, "h0", "seed", task="download", warm_up=1.0, seconds=3.0)
            if found["mbit"] > 30:
                break
        assert found["mbit"] > 30
        assert network.counters().hosts["h0"].dropped_segments["nat"] >= 2


@pytest.mark.parametrize("punching", [True, False])
async def test_two_behind_nat_that_call_each_other_meet_unless_one_never_can(punching):
    text = parts(nat=True, hole_punching=True)
    text = text if punching else text.replace('name = "h1"', 'name = "h1"\nhole_punching = false')
    async with wan_network(parse_topology(text, "small")) as network:
        calls = []
        for host, peer in (("h0", "h1"), ("h1", "h0")):
            address = network.addresses[peer]
            calls.append(output(network, host, *PYTHON, CALL_TOGETHER, address, "100" if punching else "20"))
        assert set(await asyncio.gather(*calls)) == {"met\n" if punching else "alone\n"}


async def test_a_changed_rate_holds_at_once():
    async with wan_network(small()) as network, serving(network, "h1"):
        for uplink, least, most in ((50, 40, 51), (10, 8, 10.5)):
            network.set_host("h0", uplink_mbit=uplink)
            for _ in range(LOOKS):
                found = await ask(network, "h0", "h1", task="upload", warm_up=1.0, seconds=3.0)
                if least < found["mbit"] < most:
                    break
            assert least < found["mbit"] < most


async def test_a_memory_limit_is_of_the_whole_host():
    eat = "import sys; held = bytearray(b'x') * (int(sys.argv[1]) << 20); print(len(held) >> 20, flush=True); input()"
    async with wan_network(small(2, memory_mib=200)) as network:
        if network.memory["h0"].group is None:
            pytest.skip("no memory control group here: limits are per program")
        pipe = asyncio.subprocess.PIPE

        async def eater(host):
            child = await network.exec(host, [*PYTHON, eat, "120"], stdin=pipe, stdout=pipe)
            await asyncio.wait_for(child.stdout.readline(), 120)
            return child

        first, neighbour = await eater("h0"), await eater("h1")
        assert first.returncode is None
        second = await eater("h0")  # 240 MiB in 200: the kernel ends one of the two
        both = [asyncio.create_task(child.wait()) for child in (first, second)]
        ended, other = await asyncio.wait(both, timeout=120, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in ended] == [-signal.SIGKILL]
        assert neighbour.returncode is None
    await asyncio.wait(other)


async def test_without_a_group_each_program_is_limited(monkeypatch):
    from atoll.lab.wan import memory

    monkeypatch.setattr(memory, "_bases", list)
    eat = "import sys; held = bytearray(int(sys.argv[1]) << 20)"
    async with wan_network(small(1, memory_mib=200)) as network:
        assert network.memory["h0"].data_bytes == 200 << 20
        child = await network.exec("h0", [*PYTHON, eat, "300"], stderr=asyncio.subprocess.PIPE)
        _, problems = await asyncio.wait_for(child.communicate(), 120)
        assert b"MemoryError" in problems
        await output(network, "h0", *PYTHON, eat, "100")


async def test_a_hub_that_died_is_said_so():
    async with wan_network(small()) as network:
        network._hub.kill()
        await network._hub.wait()
        with pytest.raises(LabBroken, match="the hub ended"):
            network.cut("h0")


async def test_a_program_that_fails_and_a_host_that_is_not_there_are_seen():
    async with wan_network(small()) as network, serving(network, "h1"):
        child = await network.exec("h0", [*PROBE, "ask", "{}"], stderr=asyncio.subprocess.PIPE)
        _, problems = await child.communicate()
        assert b"KeyError" in problems
        with pytest.raises(TopologyError, match="no host 'h9'"):
            await network.exec("h9", [*PROBE, "serve", "1"])


async def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(LabUnavailable, match="needs root") as refused:
        await check_topology(small(), 1.0, lambda _: None)
    assert "run it as root" in refused.value.remedy
