"""Check of a WAN network: rates of every host and round trips of every pair, measured from inside the hosts.

A rate is that of one TCP connection to or from the coordinator's host. The measurement itself must not be the limit.
So loss and jitter are off during it, a host whose buffer is too short for its distance is moved nearer, and only as
many hosts are measured at the same time as this machine can carry. Small datagrams measure loss and jitter.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

from atoll.core.errors import DeadlineExceeded
from atoll.lab.wan.errors import LabBroken
from atoll.lab.wan.network import WanNetwork, wan_network
from atoll.lab.wan.topology import COORDINATOR, Host, Topology, end_to_end
from atoll.node.system import child_processes

PAYLOAD_SHARE = 1448 / 1500  # payload of a full packet; the rest is headers
RATE_TOLERANCE = (0.92, 1.01)  # of the rate without headers
RTT_TOLERANCE_MS = 1.0
RTT_TOLERANCE_SHARE = 0.01
LOSS_SIGMAS = 4.0

_PROBE = Path(__file__).parent / "probe.py"
_PORT = 5000
_MAX_CONCURRENT_MBIT = 600.0  # of concurrent measurements; well below the capacity of a core
_MAX_CONCURRENT_PAIRS = 3
_PING = {"task": "ping", "count": 20, "interval": 0.02}
_PING_MANY = {"task": "ping", "count": 3000, "interval": 0.001}
_PING_BYTES = 32  # IP packet size
_CALL_SECONDS = 1.0
_ANSWER_TIMEOUT = timedelta(seconds=90)
_STOP = timedelta(seconds=2)

ReportProgress = Callable[[str], None]


@dataclass(frozen=True)
class Measurement:
    """One measurement: the setting, the measured value and its tolerance, in the quantity's unit."""

    quantity: str  # uplink_mbit, downlink_mbit, rtt_ms, jitter_ms, loss, inbound_calls
    host: str
    peer: str
    set: float
    measured: float
    low: float
    high: float

    @property
    def ok(self) -> bool:
        """Whether the measured value is within tolerance."""
        return self.low <= self.measured <= self.high


@dataclass(frozen=True)
class CheckResult:
    """All measurements of a topology, and the load of the hub."""

    topology: str
    congestion: str  # read from the measured connections
    hub_cpu_share: float  # of one core, over the whole check
    hub_late: int  # times that a packet was delivered more than 2 ms late
    measurements: tuple[Measurement, ...]

    @property
    def ok(self) -> bool:
        """Whether every measurement is within tolerance."""
        return all(row.ok for row in self.measurements)

    def to_json(self) -> dict[str, Any]:
        """Convert to the object that `atoll lab check --output json` prints."""
        rows = [{**asdict(row), "ok": row.ok} for row in self.measurements]
        return {**asdict(self), "ok": self.ok, "measurements": rows}


async def check_topology(topology: Topology, seconds: float, report_progress: ReportProgress) -> CheckResult:
    """Build a topology, measure each rate for `seconds`, remove it. Raises `LabUnavailable`, `LabBroken`."""
    report_progress(f"building {len(topology.hosts)} hosts")
    async with wan_network(topology) as network:
        return await check_network(network, seconds, report_progress)


async def check_network(network: WanNetwork, seconds: float, report_progress: ReportProgress) -> CheckResult:
    """Measure a running network without other traffic. Its settings are the topology's again afterwards."""
    before = network.counters()
    async with _servers(network):
        report_progress("round trips, jitter and loss of every pair")
        apart = await _pairs(network)
        closed = [await _nat_rejects_inbound(network, host) for host in network.topology.trainers if host.nat]
        _suspend_impairments(network, True)
        try:
            rates, congestion = await _rates(network, seconds, report_progress)
        finally:
            _suspend_impairments(network, False)
    after = network.counters()
    share = (after.cpu_seconds - before.cpu_seconds) / (after.seconds - before.seconds)
    return CheckResult(network.topology.name, congestion, share, after.late - before.late, (*rates, *apart, *closed))


# --- distances -------------------------------------------------------------------------------------------


async def _pairs(network: WanNetwork) -> list[Measurement]:
    """Measure all pairs except pairs of hosts behind NAT, which cannot reach each other."""
    some = asyncio.Semaphore(_MAX_CONCURRENT_PAIRS)

    async def measure(one: Host, other: Host) -> list[Measurement]:
        asks, answers = (other, one) if one.is_public or other.nat else (one, other)
        async with some:
            return await _pair(network, asks, answers)

    pairs = [pair for pair in combinations(network.topology.hosts, 2) if not (pair[0].nat and pair[1].nat)]
    return [row for rows in await asyncio.gather(*(measure(*pair) for pair in pairs)) for row in rows]


async def _pair(network: WanNetwork, asks: Host, answers: Host) -> list[Measurement]:
    met = end_to_end(asks, answers, network.topology.route(asks, answers))
    pings = await _ask(network, asks, answers, **(_PING_MANY if met.loss else _PING))
    trips = pings["trips_ms"]
    if not trips:
        raise LabBroken(f"no packet from {asks.name} to {answers.name} was answered")
    sending = sum(
        _PING_BYTES * 8e-3 / rate for host in (asks, answers) for rate in (host.uplink_mbit, host.downlink_mbit)
    )
    least, both_ways = met.rtt_ms + sending, 2 * met.jitter_ms
    tolerance = RTT_TOLERANCE_MS + RTT_TOLERANCE_SHARE * least
    names = asks.name, answers.name
    rows = [Measurement("rtt_ms", *names, met.rtt_ms, trips[0], least - 0.1, least + tolerance + both_ways)]
    if met.jitter_ms:
        spread = trips[len(trips) * 9 // 10] - trips[0]
        rows.append(
            Measurement("jitter_ms", *names, met.jitter_ms, spread / 2, 0.05 * met.jitter_ms, met.jitter_ms + 1)
        )
    if met.loss:
        count, lost = _PING_MANY["count"], 1 - (1 - met.loss) ** 2  # in either direction
        assert isinstance(count, int)
        allowed = LOSS_SIGMAS * math.sqrt(lost * (1 - lost) / count) + 1 / count
        found = 1 - math.sqrt(1 - pings["lost"] / count)
        rows.append(Measurement("loss", *names, met.loss, found, met.loss - allowed / 2, met.loss + allowed / 2))
    return rows


async def _nat_rejects_inbound(network: WanNetwork, host: Host) -> Measurement:
    """Measure whether a host behind NAT admits a connection from outside, which it must not."""
    call = await _ask(network, network.topology.host(COORDINATOR), host, task="call", seconds=_CALL_SECONDS)
    return Measurement("inbound_calls", host.name, COORDINATOR, 0, float(call["connected"]), 0, 0)


# --- rates -----------------------------------------------------------------------------------------------


async def _rates(network: WanNetwork, seconds: float, report_progress: ReportProgress) -> tuple[list[Measurement], str]:
    rows: list[Measurement] = []
    congestion: set[str] = set()
    public = network.topology.host(COORDINATOR)

    async def measure(host: Host, quantity: str, rate: float) -> None:
        distance = _distance_ms(network.topology, host)
        task = {"task": quantity.removesuffix("link_mbit") + "load", "seconds": seconds}
        found = await _ask(network, host, public, **task, warm_up=1.5 + 0.015 * distance)
        # Data that waits behind a lost segment at the start or end of the interval falsifies the rate.
        held = (max(host.queue_ms, public.queue_ms) + distance) / 1000 / seconds
        low, high = RATE_TOLERANCE[0] - held, RATE_TOLERANCE[1] + held
        full = PAYLOAD_SHARE * rate
        rows.append(Measurement(quantity, host.name, COORDINATOR, rate, found["mbit"], low * full, high * full))
        congestion.add(found["congestion"])

    for quantity, limit in (("uplink_mbit", public.downlink_mbit), ("downlink_mbit", public.uplink_mbit)):
        wanted = [(host, min(limit, float(getattr(host, quantity)))) for host in network.topology.trainers]
        for together in _batches(wanted):
            report_progress(f"{quantity.removesuffix('_mbit')} of {', '.join(host.name for host, _ in together)}")
            await asyncio.gather(*(measure(host, quantity, rate) for host, rate in together))
    return rows, "+".join(sorted(congestion))


def _batches(wanted: Iterable[tuple[Host, float]]) -> Iterator[list[tuple[Host, float]]]:
    """Yield groups of hosts that can be measured at the same time."""
    batch: list[tuple[Host, float]] = []
    for host, rate in wanted:
        if batch and sum(item[1] for item in batch) + rate > _MAX_CONCURRENT_MBIT:
            yield batch
            batch = []
        batch.append((host, rate))
    yield batch


def _distance_ms(topology: Topology, host: Host) -> float:
    """Return the RTT for rate measurements: one connection fills a link only if the buffer holds half of it."""
    public = topology.host(COORDINATOR)
    return min(topology.route(host, public).rtt_ms, 2 * host.queue_ms, 2 * public.queue_ms)


def _suspend_impairments(network: WanNetwork, wanted: bool) -> None:
    """Remove loss, jitter and excess distance if `wanted`; restore them otherwise."""
    topology = network.topology
    for host in topology.hosts:
        silent = {"loss": 0.0, "jitter_ms": 0.0}
        network.set_host(host.name, **(silent if wanted else {"loss": host.loss, "jitter_ms": host.jitter_ms}))
    for host in topology.trainers:
        route = asdict(topology.route(host, topology.host(COORDINATOR)))
        near = {"rtt_ms": _distance_ms(topology, host), "loss": 0.0, "jitter_ms": 0.0}
        network.set_route(host.name, COORDINATOR, **(near if wanted else route))


# --- probes ----------------------------------------------------------------------------------------------


def _probe(*arguments: str) -> Sequence[str]:
    return [sys.executable, "-I", "-S", str(_PROBE), *arguments]


@asynccontextmanager
async def _servers(network: WanNetwork) -> AsyncIterator[None]:
    servers = []
    try:
        for host in network.topology.hosts:
            server = await network.exec(host.name, _probe("serve", str(_PORT)), stdout=asyncio.subprocess.PIPE)
            servers.append(server)
        async with asyncio.timeout(_ANSWER_TIMEOUT.total_seconds()):
            for server in servers:
                assert server.stdout is not None
                if not await server.stdout.readline():
                    raise LabBroken("a probe did not start")
        yield
    finally:
        await asyncio.gather(*(child_processes.stop(server, _STOP) for server in servers))


async def _ask(network: WanNetwork, asks: Host, answers: Host, **request: object) -> dict[str, Any]:
    document = {"address": network.addresses[answers.name], "port": _PORT, **request}
    pipe = asyncio.subprocess.PIPE
    child = await network.exec(asks.name, _probe("ask", json.dumps(document)), stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT.total_seconds()):
            printed, problems = await child.communicate()
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"the probe on {asks.name} did not end within {_ANSWER_TIMEOUT.total_seconds():.0f} s: {document}"
        ) from error
    if child.returncode:
        last = problems.decode(errors="replace").strip().rpartition("\n")[2]
        raise LabBroken(f"the probe on {asks.name} failed against {answers.name}: {last}")
    answer: dict[str, Any] = json.loads(printed)
    return answer
