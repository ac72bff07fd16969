"""What one may ask of a running hub, as JSON lines over a Unix socket: typed requests in, a document out.

The socket lies in the lab's private directory. Answers come at once: the hub does nothing that waits.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from atoll.lab.wan.errors import LabBroken, TopologyError
from atoll.lab.wan.topology import check_number

TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True)
class SetHost:
    """Change a link: `uplink_mbit`, `downlink_mbit`, `queue_ms`, `jitter_ms`, `loss`."""

    host: str
    values: dict[str, float]


@dataclass(frozen=True)
class SetRoute:
    """Change what lies between two hosts: `rtt_ms`, `jitter_ms`, `loss`."""

    one: str
    other: str
    values: dict[str, float]


@dataclass(frozen=True)
class Cut:
    """Nothing reaches or leaves the host."""

    host: str


@dataclass(frozen=True)
class Restore:
    """The host is back."""

    host: str


@dataclass(frozen=True)
class Partition:
    """Only hosts of one group reach each other; who is named in none is in one more group."""

    groups: list[list[str]]


@dataclass(frozen=True)
class Heal:
    """All groups are one again."""


@dataclass(frozen=True)
class ReadCounters:
    """What hosts and pairs sent, received and lost; the hub's own CPU time."""


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
class LinkCounters:
    """What a host, or a directed pair, saw so far. Bytes are those of IP packets of at most 1500 bytes."""

    sent_bytes: int = 0
    sent_segments: int = 0
    received_bytes: int = 0
    received_segments: int = 0
    dropped_segments: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HubCounters:
    """One reading of a hub."""

    seconds: float  # since it started
    cpu_seconds: float
    late: int  # times that it got to run more than 2 ms after a packet's time
    latest_seconds: float  # the worst of them
    hosts: dict[str, LinkCounters]
    pairs: dict[tuple[str, str], LinkCounters]


def encode(request: Request) -> bytes:
    """One line."""
    return json.dumps({"kind": type(request).__name__, **asdict(request)}).encode() + b"\n"


def decode(line: bytes) -> Request:
    """Raises `TopologyError` for what is no request, or has a value out of bounds."""
    try:
        document = json.loads(line)
        request = _KINDS[document.pop("kind")](**document)
        well_formed = all(_FORMS[key](value) for key, value in asdict(request).items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TopologyError(f"no request that a hub knows: {line[:80]!r}") from error
    if not well_formed:
        raise TopologyError(f"no request that a hub knows: {line[:80]!r}")
    if isinstance(request, SetHost | SetRoute):
        known = _HOST_KEYS if isinstance(request, SetHost) else _ROUTE_KEYS
        for key, value in request.values.items():
            if key not in known:
                raise TopologyError(f"{key!r} cannot be changed while the lab runs", f"what can: {', '.join(known)}")
            check_number(key, value)
    return request


class HubControl:
    """A connection to a hub. Calls block for at most `TIMEOUT`; use it from one thread at a time."""

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
        """The hub goes on."""
        self._socket.close()

    def ask(self, request: Request) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises `TopologyError` as the hub says it, `LabBroken`."""
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
        """What was sent, received and lost until now."""
        answer = self.ask(ReadCounters())
        return HubCounters(
            answer["seconds"],
            answer["cpu_seconds"],
            answer["late"],
            answer["latest_seconds"],
            {name: LinkCounters(**seen) for name, seen in answer["hosts"].items()},
            {(one, other): LinkCounters(**seen) for one, other, seen in answer["pairs"]},
        )
