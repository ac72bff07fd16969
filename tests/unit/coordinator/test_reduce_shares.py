"""Shares of reducing: as good as any others, fair where nothing is known, nothing for whom nobody can dial."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.coordinator.world import spec_toml

from atoll.coordinator.planner.plan_builder import most_round_tokens
from atoll.coordinator.planner.reduce_shares import (
    MAX_SHARE_FACTOR,
    MIN_RESHARE_SPEEDUP,
    NodeLink,
    best_shares,
    exchange_seconds_per_byte,
    needs_relay,
    reshare_speedup,
)
from atoll.core.run_spec import parse_run_spec

rates = st.floats(1e3, 1e9) | st.sampled_from([0.0, 5e-324, 1e-12, 1.0, 1e12])
swarms = st.dictionaries(
    st.integers(0, 50).map(str), st.builds(NodeLink, uplink=rates, outbound_only=st.booleans()), min_size=1, max_size=9
)


@given(swarms)
def test_shares_sum_to_one_and_no_fast_uplink_gets_all(links: dict[str, NodeLink]) -> None:
    shares = best_shares(links)
    assert shares.keys() == links.keys()
    assert math.isclose(sum(shares.values()), 1)
    dialable = [peer for peer, link in links.items() if not link.outbound_only] or list(links)
    assert all(0 <= share <= max(MAX_SHARE_FACTOR / len(links), 1 / len(dialable)) + 1e-9 for share in shares.values())
    assert not any(shares[peer] for peer in links.keys() - set(dialable))


@given(swarms, st.data())
def test_no_other_shares_within_the_bounds_end_sooner(links: dict[str, NodeLink], data: st.DataObject) -> None:
    """Moving some of a share from one member to another never helps; the problem is convex, so that is enough."""
    shares = best_shares(links)
    best = exchange_seconds_per_byte(links, shares)
    giver, taker = (data.draw(st.sampled_from(sorted(links))) for _ in range(2))
    moved = dict(shares)
    amount = data.draw(st.floats(0, 1)) * shares[giver]
    moved[giver] -= amount
    moved[taker] += amount
    dialable = [peer for peer, link in links.items() if not link.outbound_only] or list(links)
    if moved[taker] <= max(MAX_SHARE_FACTOR / len(links), 1 / len(dialable)):
        assert exchange_seconds_per_byte(links, moved) >= best * (1 - 1e-9)


@given(st.integers(1, 9), st.floats(0, 1e9))
def test_equal_links_have_equal_shares(count: int, uplink: float) -> None:
    shares = best_shares({str(i): NodeLink(uplink) for i in range(count)})
    assert all(math.isclose(share, 1 / count, rel_tol=1e-6) for share in shares.values())


def test_a_slow_uplink_reduces_nothing_and_a_fast_one_more() -> None:
    """Bytes in units of the vector: at 20, 100 and 500 Mbit/s, the slowest is busy with its own vector for 0.4 s/MB."""
    shares = best_shares(
        {"slow": NodeLink(2.5e6), "middle": NodeLink(12.5e6), "fast": NodeLink(62.5e6), "also": NodeLink(12.5e6)}
    )
    assert shares["slow"] == pytest.approx(0, abs=1e-6)
    assert shares["fast"] == pytest.approx(MAX_SHARE_FACTOR / 4)
    assert shares["middle"] == pytest.approx(0.25)


@given(swarms)
def test_a_plan_with_the_best_shares_is_not_worth_another(links: dict[str, NodeLink]) -> None:
    planned = {peer: round(share * 1e9) for peer, share in best_shares(links).items()}
    assert reshare_speedup(links, planned) <= MIN_RESHARE_SPEEDUP


def test_noise_is_not_worth_a_plan_but_nat_and_thin_links_are() -> None:
    equal = dict.fromkeys("abcd", 125_000_000)
    assert (
        reshare_speedup({peer: NodeLink(1e7 * (1 + 0.05 * i)) for i, peer in enumerate("abcd")}, equal)
        <= MIN_RESHARE_SPEEDUP
    )
    assert reshare_speedup(dict.fromkeys("abcd", NodeLink()), equal) <= MIN_RESHARE_SPEEDUP
    assert reshare_speedup({**dict.fromkeys("abc", NodeLink(1e7)), "d": NodeLink(4e6)}, equal) > MIN_RESHARE_SPEEDUP
    assert (
        reshare_speedup({**dict.fromkeys("abc", NodeLink(1e7)), "d": NodeLink(1e7, outbound_only=True)}, equal)
        > MIN_RESHARE_SPEEDUP
    )
    assert reshare_speedup(dict.fromkeys("abcd", NodeLink(1e7, outbound_only=True)), equal) <= MIN_RESHARE_SPEEDUP


@given(swarms)
def test_a_gain_is_a_number_and_at_least_one(links: dict[str, NodeLink]) -> None:
    assert reshare_speedup(links, dict.fromkeys(links, 1)) >= 1 - 1e-6  # false for NaN


@pytest.mark.parametrize("slow", [5e-324, 1.0, 1e3])
def test_a_node_slow_with_its_own_vector_does_not_change_the_shares_of_others(slow: float) -> None:
    links = {**dict.fromkeys("abc", NodeLink(5e7)), **dict.fromkeys("def", NodeLink(1e6))}
    planned = dict.fromkeys("abcdef", 1) | {"x": 0}
    assert reshare_speedup(links, planned) > MIN_RESHARE_SPEEDUP
    assert reshare_speedup({**links, "x": NodeLink(slow)}, planned) > MIN_RESHARE_SPEEDUP
    assert best_shares({**links, "x": NodeLink(slow)})["a"] > 3 * best_shares({**links, "x": NodeLink(slow)})["d"]


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ([], False),
        (["/ip4/192.168.1.7/tcp/4001"], False),
        (["/ip4/192.168.1.7/tcp/4001", "/ip4/1.2.3.4/tcp/4001/p2p/S/p2p-circuit"], True),
        (["/ip6/fe80::1/tcp/4001", "/ip4/100.64.0.3/tcp/1", "/ip4/1.2.3.4/tcp/4001/p2p/S/p2p-circuit"], True),
        (["/ip4/9.8.7.6/tcp/4001", "/ip4/1.2.3.4/tcp/4001/p2p/S/p2p-circuit"], False),
        (["/dns4/box.example.org/tcp/4001", "/ip4/1.2.3.4/tcp/4001/p2p/S/p2p-circuit"], False),
        (["/", "/ip4", "/ip4/what/tcp/1"], False),
    ],
)
def test_a_node_with_only_relay_and_private_addresses_cannot_be_dialled(addresses: list[str], expected: bool) -> None:
    assert needs_relay(addresses) is expected


@given(st.integers(2, 64), st.integers(1, 20), st.integers(1, 50))
def test_the_token_cap_allows_for_each_fragments_round_being_a_step_late(fragments, members, steps):
    """One member does all the work: over a turn it trains every round's due tokens, and one step of its own in each."""
    spec = parse_run_spec(spec_toml(fragments=fragments))
    step = spec.tokens_per_step
    spec = spec.model_copy(update={"sync": spec.sync.model_copy(update={"round_tokens": steps * step})})
    due = max(min(members * step, spec.sync.round_tokens), spec.sync.round_tokens // fragments)
    assert fragments * (due + step) <= most_round_tokens(spec, members)


def test_without_fragments_the_token_cap_is_the_round_size():
    spec = parse_run_spec(spec_toml(round_tokens=4321))
    assert most_round_tokens(spec, 5) == 4321
