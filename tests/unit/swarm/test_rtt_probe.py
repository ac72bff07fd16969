"""Round-trip times: which members are measured, and the effect of members that lie or do not answer."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory_network import MemoryHub
from support.virtual_time import LoopClock, run_virtually

from atoll.core.errors import PeerMisbehaved
from atoll.core.frames import FrameKind
from atoll.node.swarm import rtt_probe
from atoll.node.swarm.rtt_probe import PROTOCOL, PathProber, next_peer, peers_to_measure

NAMES = st.sets(st.text("abcdef0123456789", min_size=1, max_size=6), min_size=1, max_size=60)


@given(NAMES, st.integers(1, 8))
def test_every_node_measures_a_few_and_never_itself(members, most):
    for me in members:
        own = peers_to_measure(me, members, most)
        assert me not in own
        assert len(own) == min(most, len(members) - 1)
        assert set(own) <= members
        assert own == peers_to_measure(me, sorted(members, reverse=True), most)


def test_in_a_large_swarm_every_node_is_measured():
    members = [f"peer-{number}" for number in range(400)]
    times = dict.fromkeys(members, 0)
    for me in members:
        for peer in peers_to_measure(me, members):
            times[peer] += 1
    assert min(times.values()) >= 3
    assert max(times.values()) <= 60


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(0, 1000)), st.floats(0, 1000))
def test_the_peer_that_waited_longest_is_measured_next(tried, now):
    chosen = next_peer("abcd", tried, now)
    fresh = rtt_probe.REMEASURE_AFTER.total_seconds()
    waiting = {peer for peer in "abcd" if peer not in tried or now - tried[peer] >= fresh}
    assert (chosen is None) == (not waiting)
    if chosen is not None:
        assert chosen in waiting
        assert all(tried.get(chosen, -1.0) <= tried.get(peer, -1.0) for peer in waiting)


def measured(delays: dict[str, float], lies: str = "") -> dict[str, float]:
    """Run a prober named "me"; frames take half of the given round trip each way. Return what it measured."""

    async def scene() -> dict[str, float]:
        async def fault(passage):
            other = passage.receiver if passage.sender == "me" else passage.sender
            await asyncio.sleep(delays[other] / 2)
            if passage.sender == lies:
                return replace(passage.frame, header=bytes(rtt_probe.ECHO_BYTES))
            return passage.frame

        hub = MemoryHub(fault)
        mine = PathProber(hub.join("me"), lambda: ("me", *delays), LoopClock())
        theirs = [PathProber(hub.join(peer), tuple, LoopClock()) for peer in delays]
        assert theirs
        running = asyncio.create_task(mine.run())
        await asyncio.sleep(60.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await hub.close()
        return {peer: time.rtt_seconds for peer, time in mine.rtts.items()}

    return run_virtually(scene())


def test_round_trips_are_those_of_the_path():
    found = measured({"near": 0.02, "far": 0.2})
    assert found == pytest.approx({"near": 0.02, "far": 0.2}, rel=0.05)


def test_a_wrong_or_missing_answer_is_not_measured():
    found = measured({"near": 0.02, "liar": 0.05, "dead": 1000.0}, lies="liar")
    assert set(found) == {"near"}


@pytest.mark.parametrize("question", [bytes(rtt_probe.ECHO_BYTES + 1), b""])
def test_a_probe_of_another_size_is_refused(question):
    async def scene() -> None:
        hub = MemoryHub()
        PathProber(hub.join("server"), tuple, LoopClock())
        wait = timedelta(seconds=1)
        stream = await hub.join("caller").open("server", PROTOCOL, wait)
        await stream.send(FrameKind.MESSAGE, question)
        with pytest.raises(PeerMisbehaved):
            await stream.receive(wait)
        await hub.close()

    run_virtually(scene())
