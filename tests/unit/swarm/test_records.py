"""DHT records: readers get what the owner signed, and every other record is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.certificates import certificate_of

from atoll.core.errors import AtollError, InvalidRequest
from atoll.core.identity import Identity
from atoll.core.membership import MembershipVerifier
from atoll.core.records import (
    RecordLocation,
    build_address_record,
    page_key,
    page_keys,
    verify_record,
)

NOW = 1_700_000_000.0
OPERATOR, OWNER, OTHER = Identity.generate(), Identity.generate(), Identity.generate()
AUTHORITY = MembershipVerifier(OPERATOR.public_key, "reef")
ADDRESSES = ("/ip4/192.0.2.1/tcp/4001",)


certificate = partial(certificate_of, operator=OPERATOR, now=NOW)
PLACE = RecordLocation(page_key("reef", OWNER.peer_id), OWNER.peer_id, NOW + 60)
GOOD = build_address_record(OWNER, certificate(OWNER), "reef", NOW + 60, ADDRESSES)


def test_addresses_round_trip() -> None:
    record = verify_record(GOOD, PLACE, AUTHORITY, NOW)
    assert (record.multiaddrs, record.owner.peer_id) == (ADDRESSES, OWNER.peer_id)


@pytest.mark.parametrize(
    "place",
    [
        replace(PLACE, subkey=OTHER.peer_id),
        replace(PLACE, key=page_key("other", OWNER.peer_id)),
        *(replace(PLACE, key=key) for key in page_keys("reef") if key != PLACE.key),
        replace(PLACE, expires=NOW + 62),
        replace(PLACE, expires=1e300),
        replace(PLACE, expires=float("inf")),
        replace(PLACE, expires=float("nan")),
    ],
)
def test_a_record_cannot_be_moved_or_kept_alive(place: RecordLocation) -> None:
    with pytest.raises(AtollError):
        verify_record(GOOD, place, AUTHORITY, NOW)


@pytest.mark.parametrize(
    "build",
    [
        lambda: build_address_record(
            OTHER, certificate(OWNER), "reef", NOW + 60, ADDRESSES
        ),  # with another's certificate
        lambda: build_address_record(
            OWNER, certificate(OWNER, operator=OWNER), "reef", NOW + 60, ADDRESSES
        ),  # self-signed
        lambda: build_address_record(
            OWNER, certificate(OWNER, now=NOW - 97 * 3600), "reef", NOW + 60, ADDRESSES
        ),  # expired
        lambda: build_address_record(OWNER, certificate(OWNER), "other", NOW + 60, ADDRESSES),  # of another run
        lambda: b"x" * 5000,
        lambda: b"\xff",
    ],
)
def test_records_that_no_storer_takes(build: Callable[[], bytes]) -> None:
    with pytest.raises(AtollError):
        verify_record(build(), PLACE, AUTHORITY, NOW)


def test_life_is_at_most_ten_minutes() -> None:
    data = build_address_record(OWNER, certificate(OWNER), "reef", NOW + 601, ADDRESSES)
    with pytest.raises(AtollError, match="lives at most"):
        verify_record(data, replace(PLACE, expires=NOW + 601), AUTHORITY, NOW)


@pytest.mark.parametrize("multiaddrs", [[], ["/ip4/192.0.2.1/tcp/1"] * 17, ["x" * 257], ["/dns/" + "x" * 240] * 16])
def test_too_many_or_too_long_addresses_are_not_published(multiaddrs: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        build_address_record(OWNER, certificate(OWNER), "reef", NOW + 60, multiaddrs)


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_any_flipped_byte_is_noticed(position: int, mask: int) -> None:
    damaged = bytearray(GOOD)
    damaged[position] ^= mask
    try:
        record = verify_record(bytes(damaged), PLACE, AUTHORITY, NOW)
    except AtollError:
        return
    assert record.multiaddrs == ADDRESSES  # a byte that protobuf does not look at
