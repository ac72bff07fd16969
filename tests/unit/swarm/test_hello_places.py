"""Places for hellos: strangers cannot hold them against newcomers, and cost little."""

from __future__ import annotations

import pytest

from atoll.core.clock import ManualClock
from atoll.node.swarm.hello_places import (
    BURST,
    HELLOS_PER_SECOND,
    MAX_AT_ONCE,
    MAX_AT_ONCE_PER_PEER,
    PAUSE_SECONDS,
    HelloPlaces,
    Place,
    host_of,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def places(clock: ManualClock) -> HelloPlaces:
    return HelloPlaces(clock)


def address(host: int, port: int = 4001) -> bytes:
    return bytes([4, 192, 0, 2, host, 6]) + port.to_bytes(2, "big")


class Outsiders:
    """Peers that take places, say nothing, and record who lost one."""

    def __init__(self, places: HelloPlaces) -> None:
        self.places = places
        self.lost: list[str] = []

    def take(self, peer_id: str, host: int = 1) -> Place | None:
        def abort() -> None:
            self.lost.append(peer_id)

        return self.places.take(peer_id, address(host), known=False, abort=abort)

    def fill(self, host: int = 1) -> None:
        for number in range(MAX_AT_ONCE):
            assert self.take(f"out-{number}", host)


def test_one_peer_has_few_places(places: HelloPlaces) -> None:
    outsiders = Outsiders(places)
    taken = [outsiders.take("p") for _ in range(MAX_AT_ONCE_PER_PEER + 1)]
    assert taken[-1] is None
    assert taken[0] is not None
    places.leave(taken[0])
    assert outsiders.take("p")


def test_a_newcomer_takes_the_place_of_the_oldest(places: HelloPlaces) -> None:
    outsiders = Outsiders(places)
    outsiders.fill()
    assert outsiders.take("new")
    assert outsiders.take("newer")
    assert outsiders.lost == ["out-0", "out-1"]


def test_a_peer_that_lost_its_place_waits_while_places_are_short(places: HelloPlaces, clock: ManualClock) -> None:
    outsiders = Outsiders(places)
    outsiders.fill()
    new = outsiders.take("new")
    assert outsiders.take("out-0") is None
    clock.advance(PAUSE_SECONDS)
    assert outsiders.take("out-0")
    assert new
    assert "new" not in outsiders.lost


def test_the_address_with_the_most_places_loses_one(places: HelloPlaces) -> None:
    outsiders = Outsiders(places)
    newcomers = [outsiders.take(f"new-{host}", host) for host in range(2, 10)]
    for number in range(3 * MAX_AT_ONCE):
        outsiders.take(f"out-{number}")
    assert all(newcomers)
    assert not [peer for peer in outsiders.lost if peer.startswith("new")]


def test_an_admitted_peer_keeps_its_place(places: HelloPlaces) -> None:
    outsiders = Outsiders(places)
    new = outsiders.take("new")
    assert new
    places.admitted(new)
    outsiders.fill()
    assert outsiders.take("newer")
    assert outsiders.lost == ["out-0"]
    places.leave(new)
    assert outsiders.take("new")  # it failed at nothing


def test_members_take_no_place(places: HelloPlaces) -> None:
    outsiders = Outsiders(places)
    outsiders.fill()
    for number in range(MAX_AT_ONCE):
        member = places.take(f"member-{number}", address(1), known=True, abort=lambda: None)
        assert member
        assert places.may_verify(member)
    assert not outsiders.lost


def test_no_more_hellos_are_verified_than_allowed(places: HelloPlaces, clock: ManualClock) -> None:
    outsiders = Outsiders(places)

    def verified() -> int:
        count = 0
        while (place := outsiders.take(f"p-{clock.monotonic()}-{count}")) and places.may_verify(place):
            places.leave(place)
            count += 1
        return count

    assert verified() == BURST
    clock.advance(10.5 / HELLOS_PER_SECOND)
    assert verified() == 10


def test_a_peer_whose_hello_was_wrong_is_refused_first(places: HelloPlaces, clock: ManualClock) -> None:
    outsiders = Outsiders(places)
    served = 0
    while (place := outsiders.take("bad")) and places.may_verify(place):
        places.leave(place)
        served += 1
    assert served <= BURST / 2 + 1
    new = outsiders.take("new")
    assert new
    assert places.may_verify(new)


def test_what_is_remembered_is_bounded(places: HelloPlaces) -> None:
    outsiders = Outsiders(places)
    for number in range(10_000):
        place = outsiders.take(f"p-{number}")
        assert place
        places.leave(place)
    assert len(places._lost) <= 4096
    assert not places._by_peer
    assert not places._by_host


def test_hosts_are_told_apart_by_their_address_only() -> None:
    assert host_of(address(7, 1)) == host_of(address(7, 2))
    assert host_of(address(7)) != host_of(address(8))
    six = bytes([0x29, *range(16), 6, 0, 1])
    assert host_of(six) == host_of(bytes([0x29, *range(8), *b"\xff" * 8, 6, 0, 2]))
    assert host_of(b"\x36\x01a") == b"\x36\x01a"
    assert host_of(b"") == b""
