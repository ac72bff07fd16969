"""Topologies: hosts of a lab, their links, and the routes between them, parsed from TOML. Pure.

Every host is in a region. A route is given between two regions (or within one region), and between two hosts if they
differ from their regions. The coordinator and the seed are on hosts of their own, `coordinator` and `seed`, whose links
do not limit a run. `docs/guide/lab.md` lists every field.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from atoll.lab.wan.errors import TopologyError

COORDINATOR = "coordinator"
SEED = "seed"
PUBLIC_HOSTS = (COORDINATOR, SEED)
MAX_HOSTS = 64
CONGESTION_CONTROLS = ("cubic", "bbr", "reno")
BUILT_IN = Path(__file__).parent / "topologies"

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_BOUNDS: dict[str, tuple[float, float]] = {
    "uplink_mbit": (0.1, 10_000),
    "downlink_mbit": (0.1, 10_000),
    "queue_ms": (5, 10_000),
    "jitter_ms": (0, 1_000),
    "loss": (0, 0.5),
    "speed": (0.01, 1),
    "memory_mib": (0, 2**20),
    "rtt_ms": (0, 10_000),
}
_LINK = ("uplink_mbit", "downlink_mbit", "queue_ms", "jitter_ms", "loss")
_FLAGS = ("nat", "hole_punching")
_COMPUTER = (*_FLAGS, "speed", "memory_mib")
_PAGE = "docs/guide/lab.md lists every field"


@dataclass(frozen=True)
class Host:
    """One machine and its access link. Loss is the fraction of packets lost, in each direction."""

    name: str
    region: str
    uplink_mbit: float = 100.0
    downlink_mbit: float = 100.0
    queue_ms: float = 100.0  # size of each of the link's two buffers, as time at the link's rate
    jitter_ms: float = 0.0  # maximum extra delay, each way
    loss: float = 0.0
    nat: bool = False  # receives only flows that it opened
    hole_punching: bool = True  # behind NAT: whether two hosts that call each other at the same time connect
    speed: float = 1.0  # relative compute speed; 0.5: half as fast. `atoll lab run` turns it into a pace
    memory_mib: int = 0  # limit for all its programs together; 0: no limit

    @property
    def is_public(self) -> bool:
        """Whether the host is the coordinator's or the seed's, so it does not train."""
        return self.name in PUBLIC_HOSTS


@dataclass(frozen=True)
class Route:
    """The path between two hosts, without their access links."""

    rtt_ms: float
    jitter_ms: float = 0.0  # maximum extra delay, each way
    loss: float = 0.0  # fraction of packets, each way


def end_to_end(one: Host, other: Host, route: Route) -> Route:
    """Combine the route with both access links: jitters add up, loss rates apply one after the other."""
    kept = (1 - one.loss) * (1 - other.loss) * (1 - route.loss)
    return Route(route.rtt_ms, one.jitter_ms + other.jitter_ms + route.jitter_ms, 1 - kept)


@dataclass(frozen=True)
class Topology:
    """A checked topology. Every pair of hosts has a route."""

    name: str
    description: str
    congestion: str
    hosts: tuple[Host, ...]  # public hosts first
    routes: Mapping[frozenset[str], Route]  # by two regions, one region, or two hosts

    @property
    def trainers(self) -> tuple[Host, ...]:
        """Hosts that train."""
        return tuple(host for host in self.hosts if not host.is_public)

    def host(self, name: str) -> Host:
        """Return the host with that name. Raises `TopologyError` for an unknown name."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise TopologyError(
            f"{self.name} has no host {name!r}", f"its hosts: {', '.join(it.name for it in self.hosts)}"
        )

    def route(self, one: Host, other: Host) -> Route:
        """Return the route between two hosts: their own, or else their regions' route."""
        own = self.routes.get(frozenset((one.name, other.name)))
        return own or self.routes[frozenset((one.region, other.region))]

    def to_document(self) -> dict[str, Any]:
        """Convert to the form of the file with all defaults, which `read_topology` accepts."""
        public = asdict(self.hosts[0])
        return {
            "description": self.description,
            "congestion": self.congestion,
            "public": {key: public[key] for key in ("region", *_LINK)},
            "host": [asdict(host) for host in self.trainers],
            "route": [{"between": [min(ends), max(ends)], **asdict(it)} for ends, it in self.routes.items()],
        }


def built_in_names() -> tuple[str, ...]:
    """Return the names of the built-in topologies."""
    return tuple(sorted(path.stem for path in BUILT_IN.glob("*.toml")))


def load_topology(name_or_path: str) -> Topology:
    """Load a built-in topology by its name, or else a file. Raises `TopologyError`."""
    is_name = name_or_path in built_in_names()
    path = BUILT_IN / f"{name_or_path}.toml" if is_name else Path(name_or_path)
    try:
        return parse_topology(path.read_text(encoding="utf-8"), path.stem)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        close = difflib.get_close_matches(name_or_path, built_in_names(), n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise TopologyError(
            f"cannot read the topology {name_or_path}: {reason}",
            f"{meant}built-in topologies: {', '.join(built_in_names())}",
        ) from error


def parse_topology(text: str, name: str) -> Topology:
    """Parse and check TOML text. Raises `TopologyError`, which names the field."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"topology {name} is not TOML: {error}") from error
    return read_topology(document, name)


def read_topology(document: Mapping[str, Any], name: str) -> Topology:
    """Check a parsed document. Raises `TopologyError`, which names the field."""
    top = _Table(document, f"topology {name}", "")
    top.only("description", "congestion", "defaults", "public", "host", "route")
    congestion = top.text("congestion", "cubic")
    if congestion not in CONGESTION_CONTROLS:
        raise top.wrong("congestion", f"is {congestion!r}; it must be one of {', '.join(CONGESTION_CONTROLS)}")
    defaults = _host_values(top.table("defaults"), *_LINK, *_COMPUTER)
    trainers = tuple(_host(table, defaults) for table in top.tables("host"))
    _check_names(top, trainers)
    ample = {"uplink_mbit": 1000.0, "downlink_mbit": 1000.0}
    stands = top.table("public")
    public = Host(COORDINATOR, stands.text("region"), **{**ample, **_host_values(stands, "region", *_LINK)})
    hosts = (public, replace(public, name=SEED), *trainers)
    routes = dict(_route(table, hosts) for table in top.tables("route"))
    topology = Topology(name, top.text("description", ""), congestion, hosts, routes)
    for one, other in combinations(hosts, 2):
        names = frozenset((one.name, other.name))
        if names not in routes and frozenset((one.region, other.region)) not in routes:
            raise top.wrong("route", f"has no entry for {one.name} ({one.region}) and {other.name} ({other.region})")
    return topology


def check_number(key: str, value: object, where: str = "") -> float:
    """Return the value as a float if it is within the field's bounds. Raises `TopologyError`."""
    low, high = _BOUNDS[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise TopologyError(f"{where}{key} must be a number from {low:g} to {high:g}", _PAGE)
    return float(value)


def _host(table: _Table, defaults: Mapping[str, Any]) -> Host:
    own = _host_values(table, "name", "region", *_LINK, *_COMPUTER)
    return Host(table.text("name"), table.text("region"), **{**defaults, **own})


def _host_values(table: _Table, *known: str) -> dict[str, Any]:
    """Return the table's values for a link and a computer. `known` are the fields that it may have."""
    table.only(*known)
    values: dict[str, Any] = {key: table.number(key) for key in known if key in _BOUNDS and table.has(key)}
    if "memory_mib" in values:
        values["memory_mib"] = int(values["memory_mib"])
    return {**values, **{key: table.flag(key) for key in _FLAGS if table.has(key)}}


def _route(table: _Table, hosts: tuple[Host, ...]) -> tuple[frozenset[str], Route]:
    table.only("between", "rtt_ms", "jitter_ms", "loss")
    ends = table.pair("between")
    regions, names = {host.region for host in hosts}, {host.name for host in hosts}
    if not (set(ends) <= regions or (set(ends) <= names and ends[0] != ends[1])):
        raise table.wrong("between", f"has {ends[0]!r} and {ends[1]!r}, which are neither two regions nor two hosts")
    values = {key: table.number(key) for key in ("jitter_ms", "loss") if table.has(key)}
    return frozenset(ends), Route(table.number("rtt_ms"), **values)


def _check_names(top: _Table, trainers: tuple[Host, ...]) -> None:
    names = [host.name for host in trainers]
    regions = {host.region for host in trainers}
    if not trainers:
        raise top.wrong("host", "is missing: a topology has at least one host")
    if len(trainers) > MAX_HOSTS:
        raise top.wrong("host", f"appears {len(trainers)} times; the maximum is {MAX_HOSTS}")
    for name in sorted({*names, *regions}):
        if not _NAME.fullmatch(name):
            raise top.wrong("host", f"has an invalid name {name!r}: use a-z, 0-9 and dashes, at most 31 characters")
    twice = next((name for name in names if names.count(name) > 1), None)
    taken = twice or next((name for name in names if name in PUBLIC_HOSTS or name in regions), None)
    if taken is not None:
        raise top.wrong("host.name", f"{taken!r} is already used, by a host, a region or a public host")


@dataclass(frozen=True)
class _Table:
    """A table of the file with its location, for messages."""

    values: Mapping[str, Any]
    where: str
    place: str

    def wrong(self, key: str, problem: str) -> TopologyError:
        return TopologyError(f"{self.where}: {self.place}{key} {problem}", _PAGE)

    def only(self, *keys: str) -> None:
        for key in self.values:
            if key not in keys:
                raise self.wrong(key, "is not a known field")

    def has(self, key: str) -> bool:
        return key in self.values

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if value is None:
            raise self.wrong(key, "is missing")
        if not isinstance(value, str):
            raise self.wrong(key, "must be text")
        return value

    def flag(self, key: str) -> bool:
        value = self.values[key]
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def number(self, key: str) -> float:
        if key not in self.values:
            raise self.wrong(key, "is missing")
        return check_number(key, self.values[key], f"{self.where}: {self.place}")

    def pair(self, key: str) -> tuple[str, str]:
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) != 2 or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "must be two names")
        return value[0], value[1]

    def table(self, key: str) -> _Table:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "must be a table")
        return _Table(value, self.where, f"{self.place}{key}.")

    def tables(self, key: str) -> Iterable[_Table]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.wrong(key, f"must be written as [[{key}]]")
        return [_Table(item, self.where, f"{self.place}{key}[{number}].") for number, item in enumerate(value)]
