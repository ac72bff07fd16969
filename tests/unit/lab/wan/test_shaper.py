"""The shaper on a virtual clock: rates are never exceeded, order is kept, and only the set share is lost."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.lab.wan.packets import Packet
from atoll.lab.wan.shaper import Drop, JitterProcess, Shaper
from atoll.lab.wan.topology import Host, Route, Topology

NAMES = ("a", "b", "c")


def world(rtt_ms=20.0, jitter_ms=0.0, loss=0.0, **host) -> Topology:
    hosts = tuple(Host(name, "here", **host) for name in NAMES)
    return Topology("test", "", "cubic", hosts, {frozenset(("here",)): Route(rtt_ms, jitter_ms, loss)})


def packet(size=1500, number=0) -> Packet:
    return Packet(number.to_bytes(8), 1, size, size)


def drain(shaper: Shaper):
    """Every arrival as (time, source, target, packet), in the order of the clock."""
    arrived = []
    while math.isfinite(at := shaper.next_event_at()):
        arrived += [(at, *item) for item in shaper.pop_arrived(at)]
    return arrived


def test_one_packet_takes_both_links_and_half_the_round_trip():
    shaper = Shaper(world(uplink_mbit=12, downlink_mbit=24))
    shaper.send("a", "b", packet(1500), 5.0)
    [(at, source, target, _)] = drain(shaper)
    assert (source, target) == ("a", "b")
    assert at == pytest.approx(5.0 + 0.001 + 0.010 + 0.0005)


def test_a_packet_of_many_segments_is_forwarded_while_it_arrives():
    shaper = Shaper(world(uplink_mbit=12, downlink_mbit=12))
    shaper.send("a", "b", Packet(b"", 40, 60_000, 1500), 0.0)
    [(at, *_)] = drain(shaper)
    assert at == pytest.approx(0.040 + 0.010 + 0.001)  # not twice 40 ms


sends = st.lists(
    st.tuples(
        st.floats(0, 0.02),  # after the one before
        st.sampled_from([(a, b) for a in NAMES for b in NAMES if a != b]),
        st.integers(40, 1500),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(sends, st.floats(0.5, 200), st.floats(0.5, 200), st.floats(5, 300), st.floats(0, 30))
def test_rates_order_and_accounts(plan, uplink, downlink, queue, jitter):
    shaper = Shaper(world(uplink_mbit=uplink, downlink_mbit=downlink, queue_ms=queue, jitter_ms=jitter))
    now, sent, arrived = 0.0, {}, []
    for number, (gap, (source, target), size, segments) in enumerate(plan):
        now += gap
        while shaper.next_event_at() <= now:
            at = shaper.next_event_at()
            arrived += [(at, *item) for item in shaper.pop_arrived(at)]
        item = Packet(number.to_bytes(8), segments, size * segments, size)
        sent[item.data] = now
        shaper.send(source, target, item, now)
    arrived += drain(shaper)
    # every packet arrived or is accounted for
    lost = sum(sum(seen.dropped_segments.values()) for seen in shaper.pairs.values())
    assert sum(item.segments for *_, item in arrived) + lost == sum(segments for *_, segments in plan)
    for pair in shaper.pairs:
        numbers = [int.from_bytes(item.data) for _, source, target, item in arrived if (source, target) == pair]
        assert numbers == sorted(numbers)
    for name in NAMES:
        # what a downlink delivered in any stretch of time fits its rate
        mine = [(at, item) for at, _, target, item in arrived if target == name]
        for (_, first), (start, end) in zip(mine, _stretches(mine), strict=True):
            carried = sum(item.wire_bytes for at, item in mine if start <= at <= end) - first.wire_bytes
            assert carried <= (end - start) * downlink * 125_000 + 1e-3
    for at, _, _, item in arrived:
        least = item.wire_bytes / (min(uplink, downlink) * 125_000) + 0.010
        most = (2 * queue + 3 * jitter) / 1000 + 2 * item.wire_bytes / (min(uplink, downlink) * 125_000) + 0.010
        backlog = 2 * 60_000 / (uplink * 125_000)  # an order kept: what the packet before still needed
        assert least - 1e-9 <= at - sent[item.data] <= most + backlog + 1e-6


def _stretches(arrivals):
    return [(at, arrivals[-1][0]) for at, _ in arrivals]


def test_a_full_uplink_drops_new_packets():
    shaper = Shaper(world(uplink_mbit=12, queue_ms=50.5))
    for number in range(100):
        shaper.send("a", "b", packet(1500, number), 0.0)
    assert len(drain(shaper)) == 51  # 50 ms of waiting at 1 ms each, and the one that is being sent
    assert shaper.pairs["a", "b"].dropped_segments == {Drop.UPLINK_FULL: 49}
    assert shaper.hosts["a"].dropped_segments == {Drop.UPLINK_FULL: 49}


def test_a_downlink_with_two_senders_drops_at_the_receiver():
    shaper = Shaper(world(uplink_mbit=120, downlink_mbit=12, queue_ms=20))
    for number in range(100):
        shaper.send("a", "c", packet(1500, number), number * 1e-4)
        shaper.send("b", "c", packet(1500, number), number * 1e-4)
    arrived = drain(shaper)
    assert shaper.hosts["c"].dropped_segments[Drop.DOWNLINK_FULL] == 200 - len(arrived)
    assert 25 <= len(arrived) <= 35  # 10 ms of sending and 20 ms of buffer, 1 ms each


@pytest.mark.parametrize("loss", [0.005, 0.05, 0.3])
def test_loss_is_as_set(loss):
    shaper = Shaper(world(loss=loss, queue_ms=10_000, uplink_mbit=10_000, downlink_mbit=10_000), seed=1)
    for number in range(int(200 / loss)):
        shaper.send("a", "b", packet(100), number * 1e-5)
    lost = shaper.pairs["a", "b"].dropped_segments[Drop.LOST]
    assert len(drain(shaper)) == int(200 / loss) - lost
    assert abs(lost - 200) <= 4 * math.sqrt(200)


def test_losses_of_host_path_and_host_add_up():
    shaper = Shaper(
        replace(world(loss=0.5), hosts=tuple(Host(name, "here", loss=0.5, queue_ms=9999) for name in NAMES))
    )
    for number in range(4000):
        shaper.send("a", "b", packet(100), number * 1e-3)
    assert len(drain(shaper)) == pytest.approx(4000 / 8, abs=150)


def test_a_cut_host_neither_sends_nor_receives_and_loses_packets_in_flight():
    shaper = Shaper(world())
    shaper.send("a", "b", packet(), 0.0)
    shaper.cut("b")
    shaper.send("b", "c", packet(), 0.0)
    assert drain(shaper) == []
    shaper.restore("b")
    shaper.send("a", "b", packet(), 1.0)
    assert len(drain(shaper)) == 1
    assert shaper.pairs["a", "b"].dropped_segments == {Drop.CUT: 1}


def test_a_partition_lets_only_its_groups_talk_until_it_heals():
    shaper = Shaper(world())
    shaper.partition([["a"]])  # b and c are named nowhere: together
    shaper.send("a", "b", packet(), 0.0)
    shaper.send("b", "c", packet(), 0.0)
    assert [(source, target) for _, source, target, _ in drain(shaper)] == [("b", "c")]
    shaper.heal()
    shaper.send("a", "b", packet(), 1.0)
    assert len(drain(shaper)) == 1


def test_changes_apply_to_later_packets():
    shaper = Shaper(world(rtt_ms=200, uplink_mbit=12, downlink_mbit=1200))
    shaper.send("a", "b", packet(number=0), 0.0)
    shaper.set_route("b", "a", {"rtt_ms": 20})
    shaper.set_host("a", {"uplink_mbit": 120})
    shaper.send("a", "c", packet(number=1), 0.1)
    shaper.send("a", "b", packet(number=2), 0.2)
    times = {int.from_bytes(item.data): at for at, _, _, item in drain(shaper)}
    assert times[0] == pytest.approx(0.101, abs=1e-4)
    assert times[1] == pytest.approx(0.2001, abs=1e-4)  # to c as far as before
    assert times[2] == pytest.approx(0.2101, abs=1e-4)


def test_a_nearer_path_does_not_overtake():
    shaper = Shaper(world(rtt_ms=200))
    shaper.send("a", "b", packet(number=0), 0.0)
    shaper.set_route("a", "b", {"rtt_ms": 2})
    shaper.send("a", "b", packet(number=1), 0.0)
    assert [int.from_bytes(item.data) for *_, item in drain(shaper)] == [0, 1]


@given(st.lists(st.floats(0, 0.2), min_size=2, max_size=200), st.integers(0, 99))
def test_jitter_wanders_within_its_bounds_and_without_leaps(gaps, seed):
    import random

    wander, now, before = JitterProcess(0.01, random.Random(seed)), 0.0, None
    for gap in gaps:
        now += gap
        value = wander.at(now)
        assert 0 <= value <= 0.01
        if before is not None and gap < 0.005:
            assert abs(value - before) <= 0.01 * gap / 0.05 * 2 + 1e-12
        before = value
