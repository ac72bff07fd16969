"""Control protocol of a running hub: one JSON line per request and per answer, over a Unix socket.

The socket is in the lab's private directory. The hub answers at once, because none of its operations block.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from atoll.lab.wan.errors import LabBroken, TopologyError
from atoll.lab.wan.shaper import LinkCounters
from atoll.lab.wan.topology import check_number

TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True)
class SetHost:
    """Change a host's link: `uplink_mbit`, `downlink_mbit`, `queue_ms`, `jitter_ms`, `loss`."""

    host: str
    values: dict[str, float]


@dataclass(frozen=True)
class SetRoute:
    """Change the route between two hosts: `rtt_ms`, `jitter_ms`, `loss`."""

    one: str
    other: str
    values: dict[str, float]


@dataclass(frozen=True)
class Cut:
    """Drop all packets to and from a host."""

    host: str


@dataclass(frozen=True)
class Restore:
    """Undo `Cut`."""

    host: str


@dataclass(frozen=True)
class Partition:
    """Split the network: only hosts of one group reach each other. Hosts in no group form one more group."""

    groups: list[list[str]]


@dataclass(frozen=True)
class Heal:
    """Undo `Partition`."""


@dataclass(frozen=True)
class ReadCounters:
    """Read the counters of hosts and pairs, and the hub's CPU time."""


Request = SetHost | SetRoute | Cut | Restore | Partition | Heal | ReadCounters
_KINDS: dict[str, type[Request]] = {
    kind.__name__: kind for kind in (SetHost, SetRoute, Cut, Restore, Partition, Heal, ReadCounters)
}
_FORMS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("host", "one", "other"), lambda it: isinstance(it, str)),
    "values": lambda it: isinstance(it, dict),
    "groups": lambda it: isinstance(it, list) and all(isinstance(name, str) for group in it for name in group),
}
_HOST_KEYS = ("uplink_mbit", "downlink_mbit", "queue_ms", "jitter_ms", "loss")
_ROUTE_KEYS = ("rtt_ms", "jitter_ms", "loss")


@dataclass(frozen=True)
class HubCounters:
    """One reading of a hub's counters."""

    seconds: float  # since the hub started
    cpu_seconds: float
    late: int  # times that the hub woke more than 2 ms after a packet's time
    latest_seconds: float  # the longest such delay
    hosts: dict[str, LinkCounters]
    pairs: dict[tuple[str, str], LinkCounters]


def encode(request: Request) -> bytes:
    """Encode a request as one line."""
    return json.dumps({"kind": type(request).__name__, **asdict(request)}).encode() + b"\n"


def decode(line: bytes) -> Request:
    """Parse a request. Raises `TopologyError` for another form or a value out of bounds."""
    try:
        document = json.loads(line)
        request = _KINDS[document.pop("kind")](**document)
        well_formed = all(_FORMS[key](value) for key, value in asdict(request).items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TopologyError(f"not a request of the hub: {line[:80]!r}") from error
    if not well_formed:
        raise TopologyError(f"not a request of the hub: {line[:80]!r}")
    if isinstance(request, SetHost | SetRoute):
        _check_values(request.values, _HOST_KEYS if isinstance(request, SetHost) else _ROUTE_KEYS)
    return request


def _check_values(values: Mapping[str, float], known: Collection[str]) -> None:
    for key, value in values.items():
        if key not in known:
            raise TopologyError(f"{key!r} cannot be changed while the lab runs", f"change one of {', '.join(known)}")
        check_number(key, value)


class HubControl:
    """A client of a hub. Calls block for at most `TIMEOUT`. Use it from one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(TIMEOUT.total_seconds())
        self._rest = b""
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise LabBroken(f"the hub does not answer: {error}") from error

    def close(self) -> None:
        """Close the connection; the hub continues to run."""
        self._socket.close()

    def ask(self, request: Request) -> dict[str, Any]:
        """Send a request and return the answer. Raises the hub's `TopologyError`, or `LabBroken`."""
        try:
            self._socket.sendall(encode(request))
            while b"\n" not in self._rest:
                received = self._socket.recv(1 << 16)
                if not received:
                    raise LabBroken("the hub has ended")
                self._rest += received
        except OSError as error:
            raise LabBroken(f"the hub does not answer: {error}") from error
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise TopologyError(answer["error"], answer["remedy"])
        return answer

    def counters(self) -> HubCounters:
        """Read the counters."""
        answer = self.ask(ReadCounters())
        return HubCounters(
            answer["seconds"],
            answer["cpu_seconds"],
            answer["late"],
            answer["latest_seconds"],
            {name: LinkCounters(**seen) for name, seen in answer["hosts"].items()},
            {(one, other): LinkCounters(**seen) for one, other, seen in answer["pairs"]},
        )
