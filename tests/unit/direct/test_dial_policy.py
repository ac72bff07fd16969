"""What a node dials: global addresses, those of the kind of its swarm, and those that its owner allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import ConfigError
from atoll.node.direct.dial_policy import DialPolicy, parse_ranges

STRICT = DialPolicy(loopback=False, local=False)
LAN = DialPolicy(loopback=False, local=True)
LAB = DialPolicy(loopback=True, local=True)
GLOBAL = ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8"]
PRIVATE = ["10.0.0.2", "172.16.3.4", "192.168.1.1", "100.64.0.1", "fd12::1", "192.0.2.7", "::ffff:10.0.0.2"]
MORE_PRIVATE = ["64:ff9b::10.0.0.2", "2002:a00:2::1"]  # 10.0.0.2 through NAT64 and 6to4
LOOPBACK = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"]
NEVER = [
    *("0.0.0.0", "::", "169.254.169.254", "169.254.1.1", "fe80::1", "fe80::1%eth0", "224.0.0.1", "ff02::1"),
    *("255.255.255.255", "240.0.0.1", "100.100.100.200", "168.63.129.16", "fd00:ec2::254"),
    *("::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe"),
    *("2130706433", "0x7f.1", "127.1", "localhost", "peer.example", ""),
]
RELAYED = "/p2p/12D3KooWRelay/p2p-circuit"


@pytest.mark.parametrize("host", GLOBAL)
def test_global_addresses_are_dialled_by_all(host: str) -> None:
    assert all(policy.allows_host(host) for policy in (STRICT, LAN, LAB))


@pytest.mark.parametrize("host", PRIVATE + MORE_PRIVATE)
def test_private_addresses_are_dialled_in_a_local_swarm(host: str) -> None:
    assert [policy.allows_host(host) for policy in (STRICT, LAN, LAB)] == [False, True, True]


@pytest.mark.parametrize("host", LOOPBACK)
def test_this_machine_is_dialled_in_a_swarm_on_this_machine(host: str) -> None:
    assert [policy.allows_host(host) for policy in (STRICT, LAN, LAB)] == [False, False, True]


@pytest.mark.parametrize("host", NEVER)
def test_some_addresses_no_peer_has(host: str) -> None:
    assert not any(policy.allows_host(host) for policy in (STRICT, LAN, LAB))


def test_an_owner_allows_ranges() -> None:
    policy = DialPolicy(loopback=False, local=False, ranges=parse_ranges("192.168.1.0/24, fd00::/8"))
    assert policy.allows_host("192.168.1.9")
    assert policy.allows_host("fd12::1")
    assert not policy.allows_host("192.168.2.9")
    assert not policy.allows_host("fd00:ec2::254")  # a metadata service
    with pytest.raises(ConfigError, match="not a list of address ranges"):
        parse_ranges("192.168.1.1/24")


@pytest.mark.parametrize(
    ("coordinator", "seeds", "expected"),
    [
        (["203.0.114.5"], ["/ip4/203.0.114.6/tcp/4001"], (False, False)),
        (["203.0.114.5"], ["/ip4/203.0.114.6/tcp/4001", "/ip4/10.0.0.2/tcp/4001"], (False, False)),
        (["203.0.114.5"], ["/ip4/10.0.0.2/tcp/4001"], (False, True)),
        (["203.0.114.5"], ["/ip4/10.0.0.2/tcp/4001", "/dns4/seed.example/tcp/4001"], (False, False)),
        (["203.0.114.5"], [], (False, False)),
        ([], [], (False, False)),
        (["192.168.1.2"], ["/ip4/203.0.114.6/tcp/4001"], (False, True)),
        (["127.0.0.1"], ["/ip4/127.0.0.1/tcp/4001"], (True, True)),
        (["::1", "127.0.0.1"], [], (True, True)),
    ],
)
def test_the_swarm_shows_what_is_dialled(coordinator: list[str], seeds: list[str], expected: tuple[bool, bool]) -> None:
    policy = DialPolicy.for_swarm(coordinator, seeds, (), ())
    assert (policy.loopback, policy.local) == expected


def test_low_ports_are_dialled_only_if_seeds_or_the_owner_use_them() -> None:
    seeds = ["/ip4/203.0.114.6/tcp/443/p2p/12D3KooWSeed", "/ip4/203.0.114.7/tcp/4001"]
    policy = DialPolicy.for_swarm(["203.0.114.5"], seeds, (), (80, 0))
    assert [policy.allows_port(port) for port in (22, 80, 443, 0, 1023, 1024, 65535, 65536)] == [
        *(False, True, True, False, False, True, True, False)
    ]
    assert policy.allows("/ip4/8.8.8.8/tcp/443")
    assert not STRICT.allows("/ip4/8.8.8.8/tcp/443")


@pytest.mark.parametrize(
    ("multiaddr", "allowed"),
    [
        ("/ip4/8.8.8.8/tcp/4001", True),
        ("/ip4/8.8.8.8/tcp/4001/p2p/12D3KooWPeer", True),
        ("/ip4/8.8.8.8/tcp/4001" + RELAYED, True),
        ("/ip4/8.8.8.8/tcp/4001" + RELAYED + "/p2p/12D3KooWPeer", True),
        ("/ip4/10.0.0.1/tcp/4001" + RELAYED, False),
        ("/dns4/peer.example/tcp/4001", True),  # once it is resolved, by what it resolves to
        ("/dnsaddr/peer.example", False),
        ("/ip4/8.8.8.8/udp/4001", False),
        ("/ip4/8.8.8.8/tcp/4001" + RELAYED + "/ip4/127.0.0.1/tcp/6379", False),
        ("/ip4/8.8.8.8/tcp/4001/ip4/127.0.0.1/tcp/6379", False),
        ("/ip4/8.8.8.8/tcp/+4001", False),
        ("/ip4/8.8.8.8/tcp/22", False),
        ("/unix/run/docker.sock", False),
        ("ip4/8.8.8.8/tcp/4001", False),
        ("", False),
    ],
)
def test_which_multiaddrs_are_dialled(multiaddr: str, allowed: bool) -> None:
    assert STRICT.allows(multiaddr) is allowed


@given(st.text(alphabet="/ip46tcdnsa.:1", max_size=40))
def test_any_text_gets_an_answer(text: str) -> None:
    assert STRICT.allows(text) in (True, False)
    assert STRICT.allows_host(text) in (True, False)
