"""After settling, every present member can become equal, nothing that is held is lost, and order does not matter."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import PeerMisbehaved
from atoll.node.rounds.settlement import check_report, settle
from atoll.v1 import dataplane_pb2 as dp


@dataclass(frozen=True)
class Report:
    digests: tuple[bytes, ...]
    partial: tuple[str, ...] = ()


def digest(byte: int) -> bytes:
    return bytes([byte]) * 32


@st.composite
def swarms(draw: st.DrawFn) -> dict[str, Report]:
    members = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True))
    total = draw(st.integers(0, 6))
    digests = st.sampled_from([b"", digest(1), digest(2), digest(3)])
    lists = st.lists(digests, min_size=total, max_size=total).map(tuple)
    names = st.lists(st.sampled_from("abcdefgh"), max_size=3).map(tuple)
    return {peer: Report(draw(lists), draw(names)) for peer in members}


@given(swarms())
def test_every_present_member_can_become_equal_and_nothing_held_is_zeroed(reports: dict[str, Report]) -> None:
    digests, holders, partial = settle(reports, list(reports))
    for index, settled in enumerate(digests):
        held = [reports[peer].digests[index] for peer in reports]
        assert bool(settled) == any(held)
        in_need = [peer for peer in reports if settled and reports[peer].digests[index] != settled]
        givers = [peer for peer in reports if reports[peer].digests[index] == settled]
        assert holders.get(index, ()) == (tuple(givers) if in_need else ())
        assert bool(givers) or not in_need
        assert all(held.count(settled) >= held.count(other) for other in held if other)
    assert partial == tuple(sorted({name for report in reports.values() for name in report.partial}))


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
    digests, holders, _ = settle(reports, ["c", "b", "a"])
    assert digests == (digest(9), digest(1), b"")
    assert holders == {0: ("b", "a"), 1: ("b",)}


def test_who_is_not_present_is_not_asked() -> None:
    reports = {"a": Report((b"",)), "b": Report((digest(1),), ("z",))}
    assert settle(reports, ["a"]) == ((b"",), {}, ())


def test_messages_are_reports() -> None:
    reports = {"a": dp.Parts(digests=[digest(1)], partial=["b"]), "b": dp.Parts(digests=[b""])}
    assert settle(reports, ["a", "b"]) == ((digest(1),), {0: ("a",)}, ("b",))


@pytest.mark.parametrize("digests", [(), (digest(1),) * 3, (b"", b"x"), (b"", b"x" * 33)])
def test_a_report_that_does_not_fit_names_its_sender(digests: tuple[bytes, ...]) -> None:
    good = Report((b"", digest(1)))
    check_report("a", good, 2)
    with pytest.raises(PeerMisbehaved, match="b reports"):
        check_report("b", Report(digests), 2)
    with pytest.raises(PeerMisbehaved, match="b reports"):
        settle({"a": good, "b": Report(digests)}, ["a", "b"])
