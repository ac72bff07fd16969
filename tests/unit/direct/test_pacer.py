"""The pacer on simulated connections with made-up TCP_INFO."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace

import pytest

from atoll.core.clock import SystemClock
from atoll.node.direct import pacer, tcp
from atoll.node.direct.pacer import SAMPLES_PER_WINDOW, Pacer
from atoll.node.direct.rates import BEST_WINDOWS, MEMORY_WINDOWS, MIN_BYTES_PER_SECOND, UplinkEstimate

SECONDS, SEGMENT = 0.32, 1400
STILL = tcp.TcpInfo(0, SEGMENT, 0, 0.08, 0.0)


@dataclass(eq=False)
class Wire:
    """A connection and its socket in one; time that passes delivers bytes."""

    peer_id: str
    rate: float = 0.0  # bytes per second that get through
    backlog: bool = False
    receiver_stops: bool = False
    figures: tcp.TcpInfo = STILL
    paced: float = math.inf

    @property
    def sock(self) -> Wire:
        return self

    def pass_time(self, seconds: float) -> None:
        now = self.figures
        self.figures = replace(
            now,
            delivered_segments=now.delivered_segments + int(self.rate * seconds / SEGMENT),
            unsent_bytes=100_000 if self.backlog else 0,
            receiver_limited_seconds=now.receiver_limited_seconds + (seconds if self.receiver_stops else 0.0),
        )


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> list[Wire]:
    monkeypatch.setattr(tcp, "PACING_SUPPORTED", False)  # no task: windows are cut here
    monkeypatch.setattr(tcp, "info", lambda wire: wire.figures)
    monkeypatch.setattr(tcp, "set_pacing_rate", lambda wire, rate: setattr(wire, "paced", rate))
    return [Wire("ann", 4e6), Wire("bob", 4e6), Wire("cleo", 4e6)]


def pass_windows(made: Pacer, wires: list[Wire], count: int) -> None:
    for _ in range(count):
        for _ in range(SAMPLES_PER_WINDOW):
            for wire in wires:
                wire.pass_time(SECONDS / SAMPLES_PER_WINDOW)
            made._sample(SECONDS / SAMPLES_PER_WINDOW)


async def started(wires: list[Wire]) -> Pacer:
    """Let all connections send as much as they can, until the uplink is known."""
    made = Pacer(SystemClock())
    for wire in wires:
        wire.backlog = True
        made.add(wire)  # type: ignore[arg-type]
    pass_windows(made, wires, 12)
    assert made.uplink.bytes_per_second == pytest.approx(12e6, rel=0.02)
    return made


@pytest.mark.parametrize("receiver_stops", [True, False])
async def test_one_slow_peer_says_nothing_about_our_uplink(wires: list[Wire], receiver_stops: bool) -> None:
    made = await started(wires)
    for wire in wires[1:]:
        wire.backlog, wire.rate = False, 0.0
    wires[0].rate, wires[0].receiver_stops = 100.0, receiver_stops
    pass_windows(made, wires, 3 * MEMORY_WINDOWS)
    assert made.uplink.bytes_per_second == pytest.approx(12e6, rel=0.02)
    assert all(wire.paced >= 4e6 for wire in wires[1:])  # they may begin as before


async def test_a_connection_that_is_done_leaves_its_share_to_the_others_at_once(wires: list[Wire]) -> None:
    made = await started(wires)
    assert all(wire.paced < 4.7e6 for wire in wires)  # a third of the link, and of a probe of it
    wires[0].backlog = False  # its last bytes are still acknowledged
    for wire in wires:
        wire.pass_time(SECONDS / SAMPLES_PER_WINDOW)
    made._sample(SECONDS / SAMPLES_PER_WINDOW)
    assert all(wire.paced >= 5.6e6 for wire in wires[1:])


async def test_the_only_peer_counts_even_if_it_is_slow(wires: list[Wire]) -> None:
    made = await started([wires[0], Wire("ann", 8e6)])
    for one in made._watched:
        one.rate = 1e6  # type: ignore[attr-defined]
    pass_windows(made, list(made._watched), 3 * MEMORY_WINDOWS)  # type: ignore[arg-type]
    assert made.uplink.bytes_per_second == pytest.approx(2e6, rel=0.05)


async def test_no_idle_connection_is_left_at_a_rate_near_zero(wires: list[Wire]) -> None:
    made = await started(wires)
    for wire in wires:
        wire.rate = 50.0  # all of them: the link is as good as down
    idle = Wire("dan")
    made.add(idle)  # type: ignore[arg-type]
    pass_windows(made, [*wires, idle], 3 * MEMORY_WINDOWS)
    assert made.uplink.bytes_per_second < 1000
    assert all(wire.paced >= MIN_BYTES_PER_SECOND for wire in (*wires, idle))


async def test_a_change_of_segment_size_does_not_change_earlier_bytes(wires: list[Wire]) -> None:
    made = await started(wires)
    for wire in wires:
        wire.figures = replace(wire.figures, delivered_segments=2**32 - 5, segment_bytes=SEGMENT + 60)
        made._watched[wire].last_info = wire.figures  # type: ignore[index]
        wire.figures = replace(wire.figures, delivered_segments=20)  # it began again
    assert all(wire.figures.delivered_since(made._watched[wire].last_info) == 25 * (SEGMENT + 60) for wire in wires)  # type: ignore[arg-type,index]


@pytest.mark.parametrize(
    ("round_trip", "rate", "seconds"),
    [
        (0.005, 100e6, 0.08),
        (0.02, 100e6, 0.08),
        (0.06, 100e6, 0.24),
        (1.0, 100e6, 2.0),
        (0.02, 20e6, 0.157),  # longer where less would be little
        (0.02, 64e3, 0.24),
        (0.02, 0.0, 0.24),  # nothing came through for long
        (0.02, None, 0.08),  # nothing is known yet
    ],
)
async def test_windows_are_of_some_round_trips_and_some_bytes(
    wires: list[Wire], round_trip: float, rate: float | None, seconds: float
) -> None:
    made = await started(wires)
    made.uplink = UplinkEstimate() if rate is None else UplinkEstimate(recent=(rate,) * BEST_WINDOWS, started=True)
    for wire in wires:
        wire.figures = replace(wire.figures, min_rtt_seconds=round_trip)
        made._watched[wire].last_info = wire.figures  # type: ignore[index]
    assert made._window_seconds() == pytest.approx(seconds, rel=0.03)


async def test_an_error_in_the_pacer_unpaces_all_connections(
    wires: list[Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "PACING_SUPPORTED", True)
    monkeypatch.setattr(pacer, "_AFTER_A_FAULT", 0.01)
    monkeypatch.setattr(pacer, "MIN_WINDOW_SECONDS", 0.01)
    made = Pacer(SystemClock())
    for wire in wires:
        wire.paced = 1.0
        made.add(wire)  # type: ignore[arg-type]
    looks = 0

    def broken(wire: Wire) -> tcp.TcpInfo:
        nonlocal looks
        looks += 1
        raise RuntimeError("a bug")

    monkeypatch.setattr(tcp, "info", broken)
    made.wake()
    async with asyncio.timeout(60):
        while looks < 1 or any(wire.paced != math.inf for wire in wires):
            await asyncio.sleep(0.01)
        made.wake()
        while looks < 2:  # it goes on
            await asyncio.sleep(0.01)
    await made.close()


@dataclass(eq=False)
class Late(Wire):
    """A wire whose bytes are acknowledged one sample later."""

    under_way: float = 0.0  # bytes

    def send(self, size: float) -> None:
        self.figures = replace(
            self.figures,
            delivered_segments=self.figures.delivered_segments + int(self.under_way / SEGMENT),
            unsent_bytes=100_000 if self.backlog else 0,
        )
        self.under_way = size


def look_on(made: Pacer, wires: list[Late], looks: int, link: float = 12e6) -> None:
    """Let all wires send at their pacing rate over a link of `link` bytes per second."""
    for _ in range(looks):
        paces = [min(wire.paced, link) if wire.backlog else 0.0 for wire in wires]
        fits = min(1.0, link / max(sum(paces), 1.0))
        for wire, pace in zip(wires, paces, strict=True):
            wire.send(pace * fits * SECONDS / SAMPLES_PER_WINDOW)
        made._sample(SECONDS / SAMPLES_PER_WINDOW)


def late_wires(made: Pacer, *peers: str) -> list[Late]:
    found = [Late(peer) for peer in peers]
    for wire in found:
        made.add(wire)  # type: ignore[arg-type]
    return found


async def test_a_connection_that_turns_out_to_be_local_leaves_its_share(wires: list[Wire]) -> None:
    made = await started(wires)
    wires[0].figures = replace(wires[0].figures, min_rtt_seconds=0.0015)
    pass_windows(made, wires, 1)
    assert all(wire.paced > 4.9e6 for wire in wires[1:])


@pytest.mark.parametrize("sending", [7, 9, 14])
async def test_exchanges_of_a_few_windows_do_not_make_the_link_look_slower(wires: list[Wire], sending: int) -> None:
    """Each connection starts with a round trip without acknowledgements."""
    made = Pacer(SystemClock())
    late = late_wires(made, "ann", "bob", "cleo")
    for _ in range(40):
        for backlog, looks in ((True, sending), (False, 6)):
            for wire in late:
                wire.backlog = backlog
            look_on(made, late, looks)
    assert made.uplink.bytes_per_second == pytest.approx(12e6, rel=0.04)


@pytest.mark.parametrize(("sending", "pause"), [(1, 4), (1, 5), (2, 6), (3, 7), (5, 4)])
async def test_a_start_grows_in_bursts_too(wires: list[Wire], sending: int, pause: int) -> None:
    """A pipeline stage may send like this: never for a whole window."""
    made = Pacer(SystemClock())
    late = late_wires(made, "ann")
    look_on(made, late, 2)
    for _ in range(60):
        for backlog, looks in ((True, sending), (False, pause)):
            late[0].backlog = backlog
            look_on(made, late, looks, link=100e6)
    assert made.uplink.budget_bytes_per_second > 50e6


async def test_a_connection_that_starts_while_others_send_is_not_taken_for_limited(wires: list[Wire]) -> None:
    """Its share has changed since it started, and its first bytes are not acknowledged yet."""
    made = Pacer(SystemClock())
    first, later = (late_wires(made, "ann", "bob", "cleo") for _ in range(2))
    for wire in first:
        wire.backlog = True
    look_on(made, first + later, 60)
    for _ in range(10):
        for wire in later:
            wire.backlog = True
        look_on(made, first + later, 5)
        for wire in first:
            wire.backlog = False
        look_on(made, first + later, 4)
        for wire in first + later:
            wire.backlog = wire in first
        look_on(made, first + later, 5)
    assert made.path_limits_bytes_per_second() == {}
    assert made.uplink.bytes_per_second == pytest.approx(12e6, rel=0.05)


async def test_one_slow_peer_with_a_connection_of_p2pd_s_beside_ours_says_nothing_about_our_uplink(
    wires: list[Wire],
) -> None:
    made = await started(wires)
    for wire in wires[1:]:
        wire.backlog, wire.rate = False, 0.0
    slow = [wires[0], Wire("11.0.0.1", backlog=True)]
    made.add(slow[1])
    for wire in slow:
        wire.rate = 50_000.0
    pass_windows(made, [*wires, slow[1]], 3 * MEMORY_WINDOWS)
    assert made.uplink.bytes_per_second == pytest.approx(12e6, rel=0.02)


async def test_with_one_peer_that_p2pd_leads_to_as_well_the_uplink_is_learnt(wires: list[Wire]) -> None:
    made = Pacer(SystemClock())
    only, beside = wires[0], Wire("11.0.0.1")
    only.rate, only.backlog = 12e6, True
    for wire in (only, beside):
        made.add(wire)
    pass_windows(made, [only, beside], 12)
    assert made.uplink.bytes_per_second == pytest.approx(12e6, rel=0.05)


def test_a_rate_to_a_peer_is_infinite_if_it_is_near_and_0_if_it_is_unknown(wires: list[Wire]) -> None:
    made = Pacer(SystemClock())
    ann, bob, cleo = wires
    for wire in wires:
        made.add(wire)
    assert [made.bytes_per_second_to(name) for name in ("ann", "dan")] == [0.0, 0.0]
    cleo.figures = replace(STILL, min_rtt_seconds=0.0002)
    ann.backlog = bob.backlog = True
    ann.rate, bob.rate = 4e6, 0.4e6
    pass_windows(made, wires, 12)
    assert math.isinf(made.bytes_per_second_to("cleo"))
    assert made.bytes_per_second_to("dan") == made.uplink_bytes_per_second > 0
    assert (
        0.3e6
        < made.bytes_per_second_to("bob")
        < 0.6e6
        < made.bytes_per_second_to("ann")
        == made.uplink_bytes_per_second
    )
    bob.backlog, bob.rate = False, 0.05e6
    pass_windows(made, wires, 3)
    assert made.bytes_per_second_to("bob") > 4 * bob.rate  # what passes now says nothing of what could
    cleo.figures = STILL
    pass_windows(made, wires, 1)
    assert made.bytes_per_second_to("cleo") == made.uplink_bytes_per_second
