"""The lab's page shows a topology that works, every built-in topology, and every field."""

import re
from dataclasses import fields
from pathlib import Path

from atoll.lab.wan.topology import Host, Route, built_in_names, parse_topology

PAGE = (Path(__file__).parents[4] / "docs/guide/lab.md").read_text()


def rows(head: str) -> set[str]:
    """The names in the first column of the table that begins so."""
    table = PAGE.split(head, 1)[1].split("\n\n", 1)[0]
    return set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE))


def test_the_example_is_a_topology():
    [text] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    topology = parse_topology(text, "example")
    assert topology.route(topology.host("ann"), topology.host("rack-1")).rtt_ms == 90


def test_every_topology_and_every_field_is_listed():
    assert rows("| Name | Hosts |") == set(built_in_names())
    assert rows("| `[[host]]` |") == {item.name for item in fields(Host)}
    assert rows("| `[[route]]` |") == {"between", *(item.name for item in fields(Route))}
