"""After settling, every present member can become equal, nothing that is held is lost, and order does not matter."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import PeerMisbehaved
from atoll.core.frames import MAX_HEADER_BYTES
from atoll.core.identity import Identity
from atoll.node.rounds.settlement import MAX_HOLDERS, RepairSources, Settlement, check_report, settle
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2


@dataclass(frozen=True)
class Report:
    digests: tuple[bytes, ...]


def digest(byte: int) -> bytes:
    return bytes([byte]) * 32


@st.composite
def swarms(draw: st.DrawFn) -> dict[str, Report]:
    members = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True))
    total = draw(st.integers(0, 6))
    digests = st.sampled_from([b"", digest(1), digest(2), digest(3)])
    lists = st.lists(digests, min_size=total, max_size=total).map(tuple)
    return {peer: Report(draw(lists)) for peer in members}


def sources(settled: Settlement, order: list[str], part: int) -> tuple[str, ...]:
    """Whom a member asks, after the messages that carry it."""
    start = dp.Start(contributions=[manifest_pb2.Contribution(peer_id=peer) for peer in order])
    return RepairSources(start, message(settled, order))(part)


def message(settled: Settlement, order: list[str]) -> dp.Settle:
    place = {peer: index for index, peer in enumerate(order)}
    return dp.Settle(
        present=order,
        digests=settled.digests,
        whole=[place[peer] for peer in settled.whole],
        repairs=[
            dp.PartHolders(part=part, members=[place[peer] for peer in peers])
            for part, peers in settled.holders.items()
        ],
    )


@given(swarms())
def test_every_present_member_can_become_equal_and_nothing_held_is_zeroed(reports: dict[str, Report]) -> None:
    order = list(reports)
    settled = settle(reports, order)
    lacking = False
    for index, digest in enumerate(settled.digests):
        held = [reports[peer].digests[index] for peer in reports]
        assert bool(digest) == any(held)
        assert all(held.count(digest) >= held.count(other) for other in held if other)
        in_need = [peer for peer in reports if digest and reports[peer].digests[index] != digest]
        givers = {peer for peer in reports if reports[peer].digests[index] == digest}
        asked = sources(settled, order, index)
        assert set(asked) <= givers or not digest
        assert len(set(asked)) >= min(MAX_HOLDERS, len(givers)) or not in_need  # so that one may die
        lacking |= bool(in_need) or not digest
    assert settled.is_complete is not lacking


@pytest.mark.parametrize("lacking", ["nobody", "one member", "every member another part", "every member most parts"])
def test_settle_fits_into_one_message_of_a_thousand_members_and_ten_thousand_parts(lacking: str) -> None:
    members, parts = 1_000, 10_000
    order = [Identity.generate().peer_id if place == 0 else f"{place:052d}" for place in range(members)]
    full = tuple(part.to_bytes(32, "big") for part in range(1, parts + 1))
    mine = {peer: list(full) for peer in order}
    rng = random.Random(1)
    for place, peer in enumerate(order):
        if lacking == "every member another part":
            mine[peer][place] = b""
        elif lacking == "every member most parts":
            kept = set(rng.sample(range(parts), parts // 100))
            mine[peer] = [digest if part in kept else b"" for part, digest in enumerate(full)]
    if lacking == "one member":
        mine[order[7]] = [b""] * parts
    settled = settle({peer: Report(tuple(digests)) for peer, digests in mine.items()}, order)
    said = dp.RoundMessage(settle=message(settled, order))
    assert said.ByteSize() < MAX_HEADER_BYTES


@given(swarms(), st.randoms(use_true_random=False))
def test_the_order_of_the_mapping_does_not_matter(reports: dict[str, Report], random: st.RandomModule) -> None:
    order = sorted(reports)
    shuffled = list(reports.items())
    random.shuffle(shuffled)
    assert settle(reports, order) == settle(dict(shuffled), order)


def test_most_members_win_and_ties_go_to_the_lowest_digest() -> None:
    reports = {
        "a": Report((digest(9), digest(2), b"")),
        "b": Report((digest(9), digest(1), b"")),
        "c": Report((digest(1), b"", b"")),
    }
    settled = settle(reports, ["c", "b", "a"])
    assert settled.digests == (digest(9), digest(1), b"")
    assert settled.whole == ("b",)
    assert settled.holders == {0: ("a",)}


def test_what_members_on_probation_hold_does_not_count_while_there_are_others() -> None:
    strangers = {f"s{number}" for number in range(50)}
    reports = {peer: Report((digest(9), digest(8), digest(7))) for peer in sorted(strangers)}
    reports |= {"a": Report((digest(1), b"", b"")), "b": Report((digest(1), digest(2), b""))}
    settled = settle(reports, sorted(reports), strangers)
    assert settled.digests == (digest(1), digest(2), b"")
    assert (settled.whole, settled.holders) == (("b",), {0: ("a",)})
    assert settle({peer: reports[peer] for peer in strangers}, sorted(strangers), strangers).digests[2] == digest(7)
    reports["a"] = reports["b"] = Report((digest(1), digest(2), digest(3)))
    assert settle(reports, sorted(reports), strangers).sources == ("a", "b")


@pytest.mark.parametrize(("whole", "listed"), [(7, {0: ("y",)}), (8, {})])
def test_other_holders_are_listed_where_fewer_than_eight_hold_everything(
    whole: int, listed: dict[int, tuple[str, ...]]
) -> None:
    reports = {f"w{number}": Report((digest(1), digest(2))) for number in range(whole)}
    reports |= {"x": Report((b"", b"")), "y": Report((digest(1), b""))}
    assert settle(reports, list(reports)).holders == listed


def test_only_parts_that_somebody_lacks_are_listed() -> None:
    reports = {
        "a": Report((digest(1), b"", digest(3))),
        "b": Report((b"", digest(2), digest(3))),
        "c": Report((digest(1), b"", digest(3))),
    }
    settled = settle(reports, ["a", "b", "c"])
    assert (settled.whole, settled.holders) == ((), {0: ("a", "c"), 1: ("b",)})


def test_three_holders_of_a_part_are_listed_and_other_ones_for_the_next_part() -> None:
    both = (digest(1), digest(2))
    reports = {
        peer: Report((*both, b"" if peer in "ab" else digest(3), digest(4) if peer in "ab" else b""))
        for peer in "abcde"
    }
    reports["x"] = Report((b"", b"", b"", b""))
    settled = settle(reports, list(reports))
    assert settled.whole == ()
    assert settled.holders == {0: ("a", "b", "c"), 1: ("b", "c", "d"), 2: ("e", "c", "d"), 3: ("b", "a")}


def test_each_part_is_asked_from_another_member_first() -> None:
    start = dp.Start(contributions=[manifest_pb2.Contribution(peer_id=peer) for peer in "abcd"])
    sources = RepairSources(start, dp.Settle(whole=[0, 2, 3], repairs=[dp.PartHolders(part=1, members=[1])]))
    assert [sources(part) for part in range(4)] == [
        ("a", "c", "d"),
        ("b", "c", "d", "a"),
        ("d", "a", "c"),
        ("a", "c", "d"),
    ]
    nobody_is_whole = RepairSources(start, dp.Settle(repairs=[dp.PartHolders(part=1, members=[1])]))
    assert [nobody_is_whole(part) for part in range(2)] == [(), ("b",)]


def test_who_is_not_present_is_not_asked() -> None:
    reports = {"a": Report((b"",)), "b": Report((digest(1),))}
    assert settle(reports, ["a"]) == Settlement((b"",), ("a",), ("a",), {}, is_complete=False)


def test_messages_are_reports() -> None:
    reports = {"a": dp.Parts(digests=[digest(1)]), "b": dp.Parts(digests=[b""])}
    assert settle(reports, ["a", "b"]) == Settlement((digest(1),), ("a",), ("a",), {}, is_complete=False)


@pytest.mark.parametrize("digests", [(), (digest(1),) * 3, (b"", b"x"), (b"", b"x" * 33)])
def test_a_report_that_does_not_fit_names_its_sender(digests: tuple[bytes, ...]) -> None:
    good = Report((b"", digest(1)))
    check_report("a", good, 2)
    with pytest.raises(PeerMisbehaved, match="b reports"):
        check_report("b", Report(digests), 2)
    with pytest.raises(PeerMisbehaved, match="b reports"):
        settle({"a": good, "b": Report(digests)}, ["a", "b"])
