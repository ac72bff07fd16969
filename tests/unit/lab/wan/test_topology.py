"""Topology files: built-in ones are complete, and errors name the field."""

import json

import pytest

from atoll.lab.wan.errors import TopologyError
from atoll.lab.wan.topology import Route, built_in_names, load_topology, parse_topology, read_topology

SMALL = """
[public]
region = "centre"
[[host]]
name = "ann"
region = "north"
[[host]]
name = "ben"
region = "north"
uplink_mbit = 20
nat = true
[[route]]
between = ["centre", "centre"]
rtt_ms = 1
[[route]]
between = ["centre", "north"]
rtt_ms = 30
[[route]]
between = ["north", "north"]
rtt_ms = 10
"""


def test_built_in_topologies_match_their_names():
    assert built_in_names() == ("home-4", "lan-wan-mix", "nat-4", "three-continents-8", "two-regions-8")
    for name in built_in_names():
        topology = load_topology(name)
        assert topology.description
        assert len(topology.trainers) == int(name[-1]) if name[-1].isdigit() else 6
    home = load_topology("home-4")
    assert {(host.downlink_mbit, host.uplink_mbit) for host in home.trainers} == {(100, 40)}
    between = {home.route(a, b).rtt_ms for a in home.trainers for b in home.trainers if a != b}
    assert (min(between), max(between)) == (30, 120)
    assert sum(host.nat for host in load_topology("nat-4").trainers) == 3


def test_a_host_overrides_the_defaults():
    topology = parse_topology("[defaults]\nuplink_mbit = 7\nspeed = 0.5\n" + SMALL, "small")
    ann, ben = topology.trainers
    assert (ann.uplink_mbit, ann.speed, ann.nat) == (7, 0.5, False)
    assert (ben.uplink_mbit, ben.speed, ben.nat) == (20, 0.5, True)
    assert [host.name for host in topology.hosts] == ["coordinator", "seed", "ann", "ben"]
    assert topology.host("seed").uplink_mbit == 1000


def test_a_route_of_two_hosts_precedes_the_one_of_their_regions():
    text = SMALL + '[[route]]\nbetween = ["ben", "ann"]\nrtt_ms = 77\nloss = 0.01\n'
    topology = parse_topology(text, "small")
    ann, ben = topology.trainers
    assert topology.route(ann, ben) == topology.route(ben, ann) == Route(77, 0, 0.01)
    assert topology.route(ann, topology.host("seed")).rtt_ms == 30


@pytest.mark.parametrize("name", built_in_names())
def test_a_topology_survives_its_document(name):
    topology = load_topology(name)
    assert read_topology(json.loads(json.dumps(topology.to_document())), name) == topology


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "ben"', 'name = "ann"', ["host.name", "'ann'"]),
        ('name = "ben"', 'name = "seed"', ["host.name", "'seed'"]),
        ('name = "ben"', 'name = "north"', ["host.name", "'north'"]),
        ('name = "ben"', 'name = "../x"', ["host", "'../x'"]),
        ('name = "ben"', "", ["host[1].name is missing"]),
        ("uplink_mbit = 20", "uplink_mbit = -1", ["host[1].uplink_mbit", "0.1 to 10000"]),
        ("uplink_mbit = 20", "uplink_mbit = nan", ["host[1].uplink_mbit"]),
        ("uplink_mbit = 20", "uplink_mbit = true", ["host[1].uplink_mbit"]),
        ("uplink_mbit = 20", "uplink_mbits = 20", ["host[1].uplink_mbits is not a known field"]),
        ("nat = true", 'nat = "yes"', ["host[1].nat must be true or false"]),
        ("nat = true", "loss = 0.9", ["host[1].loss"]),
        ("rtt_ms = 30", "", ["route[1].rtt_ms is missing"]),
        ('["centre", "north"]', '["centre"]', ["route[1].between must be two names"]),
        ('["centre", "north"]', '["centre", "ann"]', ["route[1].between", "'ann'"]),
        ('["north", "north"]', '["centre", "north"]', ["route has no entry for ann (north) and ben (north)"]),
        ('region = "centre"', "", ["public.region is missing"]),
        ('region = "centre"', 'region = "centre"\nnat = true', ["public.nat is not a known field"]),
        ("[public]", 'congestion = "vegas"\n[public]', ["congestion is 'vegas'; it must be one of cubic, bbr, reno"]),
        ("[public]", "host = 3\n[public]", ["not TOML"]),
    ],
)  # fmt: skip
def test_errors_name_the_field(old, new, words):
    assert SMALL.count(old) >= 1
    with pytest.raises(TopologyError) as refused:
        parse_topology(SMALL.replace(old, new, 1), "small")
    assert "topology small" in str(refused.value)
    assert [word for word in words if word not in str(refused.value)] == []


def test_an_unknown_topology_lists_the_built_in_ones():
    with pytest.raises(TopologyError, match="cannot read the topology nowhere") as refused:
        load_topology("nowhere")
    assert "home-4" in refused.value.remedy
