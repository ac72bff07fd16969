"""Hosts in a peer's multiaddrs, for direct dialling."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.direct.hosts import hosts_in


def test_each_host_counts_once_and_relays_do_not() -> None:
    addresses = [
        "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWA",
        "/ip4/192.0.2.7/tcp/4002",
        "/ip6/2001:db8::1/tcp/4001",
        "/dns4/node.example/tcp/4001",
        "/ip4/198.51.100.1/tcp/4001/p2p/12D3KooWRelay/p2p-circuit",
        "/ip4/192.0.2.9/udp/4001/quic-v1",
        "/ip4/10.0.0.2/tcp/4001",
    ]
    assert hosts_in(addresses, 8) == ("192.0.2.7", "2001:db8::1", "node.example", "10.0.0.2")
    assert hosts_in(addresses, 2) == ("192.0.2.7", "2001:db8::1")


@given(st.lists(st.text(alphabet="/ip46tcdnsa.:1", max_size=30), max_size=20), st.integers(0, 8))
def test_any_text_gives_a_bounded_answer(addresses: list[str], limit: int) -> None:
    found = hosts_in(addresses, limit)
    assert len(found) <= limit
    assert len(set(found)) == len(found)
    assert all(found)
