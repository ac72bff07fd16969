"""The hub: the process that forwards every packet between the hosts of a lab, and serves the control socket.

`network.py` starts it as root with a JSON document on standard input: the topology, every host's namespace and
address, and the path of the control socket. The hub opens a TUN device in each namespace, prints `ready`, and runs
until a signal or the end of its parent ends it. `Shaper` and `FlowTable` make all decisions; this module moves bytes.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import ipaddress
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from atoll.lab.wan import control
from atoll.lab.wan.errors import TopologyError
from atoll.lab.wan.nat import FlowTable
from atoll.lab.wan.packets import flow_of, opens_connection, read_packet, target_of
from atoll.lab.wan.shaper import Drop, Shaper
from atoll.lab.wan.topology import read_topology

DEVICE = "wan0"

_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_OFFLOAD_CHECKSUM, _OFFLOAD_TCP4, _OFFLOAD_ECN = 1, 2, 8
_CLONE_NEWNET = 0x40000000
_SET_TIMER_SLACK = 29  # prctl
_TIMER_SLACK_NANOSECONDS = 1000  # the default of 50 µs is visible in a LAN's round trips
_NICE = -15
_LATE_SECONDS = 0.002  # a packet delivered this long after its time counts as late: the machine was too busy
_READ_BYTES = 1 << 17
_READS_PER_TURN = 16
_LONGEST_WAIT_SECONDS = 1.0
_CLIENT_TIMEOUT_SECONDS = 1.0  # packets wait while the hub writes an answer
_SETTINGS = {  # in each namespace; socket buffers never limit a link
    "net/ipv4/tcp_rmem": "4096 131072 67108864",
    "net/ipv4/tcp_wmem": "4096 65536 67108864",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
}


@dataclass(frozen=True)
class HostNamespace:
    """A host's network namespace and address."""

    host: str
    namespace: str  # path
    address: str


class Hub:
    """Event loop over TUN devices and control connections, with a shaper in between."""

    def __init__(self, shaper: Shaper, devices: dict[int, HostNamespace], listener: socket.socket) -> None:
        self._shaper = shaper
        self._hosts = {descriptor: seat.host for descriptor, seat in devices.items()}
        self._descriptors = {seat.host: descriptor for descriptor, seat in devices.items()}
        self._addresses = {ipaddress.IPv4Address(seat.address).packed: seat.host for seat in devices.values()}
        self._flows = {name: FlowTable() for name in self._descriptors if shaper.host(name).nat}
        self._never_meet = {name for name in self._flows if not shaper.host(name).hole_punching}
        self._listener = listener
        self._clients: dict[int, tuple[socket.socket, bytearray]] = {}
        self._started = time.monotonic()
        self._late = 0
        self._latest = 0.0
        self._poll = select.epoll()
        for descriptor in (*devices, listener.fileno()):
            self._poll.register(descriptor, select.EPOLLIN)

    def run(self) -> NoReturn:
        """Run until a signal ends the process."""
        while True:
            wait = min(_LONGEST_WAIT_SECONDS, self._shaper.next_event_at() - time.monotonic())
            # epoll has a resolution of milliseconds, select of microseconds: select waits for epoll.
            if wait <= 0 or select.select((self._poll,), (), (), wait)[0]:
                for descriptor, _ in self._poll.poll(0):
                    self._ready(descriptor)
            self._deliver()

    # --- packets -------------------------------------------------------------------------------------

    def _ready(self, descriptor: int) -> None:
        if descriptor in self._hosts:
            self._collect(descriptor, self._hosts[descriptor])
        elif descriptor == self._listener.fileno():
            connection, _ = self._listener.accept()
            connection.settimeout(_CLIENT_TIMEOUT_SECONDS)
            self._clients[connection.fileno()] = connection, bytearray()
            self._poll.register(connection, select.EPOLLIN)
        else:
            self._serve(descriptor)

    def _collect(self, descriptor: int, source: str) -> None:
        """Read packets from a host's device and pass them to the shaper."""
        flows = self._flows.get(source)
        for _ in range(_READS_PER_TURN):
            try:
                packet = read_packet(os.read(descriptor, _READ_BYTES))
            except BlockingIOError:
                return
            target = self._addresses.get(target_of(packet.data)) if packet else None
            if packet is None or target is None:  # the kernel's own packets, or an unknown address
                continue
            now = time.monotonic()
            if flows is not None:
                flows.sent(flow_of(packet.data), now)
            self._shaper.send(source, target, packet, now)

    def _deliver(self) -> None:
        now = time.monotonic()
        late = now - self._shaper.next_event_at()
        if late > _LATE_SECONDS:
            self._late += 1
            self._latest = max(self._latest, late)
        for source, target, packet in self._shaper.pop_arrived(now):
            if target in self._flows and not self._admits(source, target, packet.data, now):
                self._shaper.refused(source, target, packet, Drop.NAT)
                continue
            try:
                os.write(self._descriptors[target], packet.data)
            except OSError:  # the receive queue is full, or the device is down
                self._shaper.refused(source, target, packet, Drop.DEVICE_FULL)
            else:
                self._shaper.count_received(source, target, packet)

    def _admits(self, source: str, target: str, data: bytes, now: float) -> bool:
        """Return whether a host behind NAT admits the packet."""
        if not self._flows[target].admits(flow_of(data), now):
            return False
        return not (opens_connection(data) and (source in self._never_meet or target in self._never_meet))

    # --- control -------------------------------------------------------------------------------------

    def _serve(self, descriptor: int) -> None:
        connection, rest = self._clients[descriptor]
        try:
            received = connection.recv(_READ_BYTES)
            rest += received
            while b"\n" in rest:
                line, _, left = bytes(rest).partition(b"\n")
                rest[:] = left
                connection.sendall(json.dumps(self._answer(line)).encode() + b"\n")
        except OSError:
            received = b""
        if not received or len(rest) > _READ_BYTES:
            self._poll.unregister(descriptor)
            del self._clients[descriptor]
            connection.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            return self._apply(control.decode(line))
        except TopologyError as error:
            return {"error": str(error), "remedy": error.remedy}

    def _apply(self, request: control.Request) -> dict[str, Any]:
        match request:
            case control.SetHost(host, values):
                self._shaper.set_host(host, values)
            case control.SetRoute(one, other, values):
                self._shaper.set_route(one, other, values)
            case control.Cut(host):
                self._shaper.cut(host)
            case control.Restore(host):
                self._shaper.restore(host)
            case control.Partition(groups):
                self._shaper.partition(groups)
            case control.Heal():
                self._shaper.heal()
            case control.ReadCounters():
                return self._counters()
        return {}

    def _counters(self) -> dict[str, Any]:
        return {
            "seconds": time.monotonic() - self._started,
            "cpu_seconds": time.process_time(),
            "late": self._late,
            "latest_seconds": self._latest,
            "hosts": {name: asdict(seen) for name, seen in self._shaper.hosts.items()},
            "pairs": [(*pair, asdict(seen)) for pair, seen in self._shaper.pairs.items()],
        }


def enter_namespace(path: Path) -> None:
    """Move this thread into a network namespace. Raises `OSError`."""
    kernel = ctypes.CDLL(None, use_errno=True)
    with path.open() as handle:
        if kernel.setns(handle.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")


def open_device(namespace: str) -> int:
    """Enter a namespace, set it up, create its TUN device and return its descriptor. Raises `OSError`."""
    enter_namespace(Path(namespace))
    for name, value in _SETTINGS.items():
        with suppress(FileNotFoundError):  # a kernel without IPv6
            Path("/proc/sys", name).write_text(value)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
    fcntl.ioctl(descriptor, _TUNSETIFF, request)
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM | _OFFLOAD_TCP4 | _OFFLOAD_ECN)
    return descriptor


def _raise_priority() -> None:
    """Raise the scheduling priority, because a hub that waits for a CPU delays packets.

    Without permission, continue.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except OSError:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)


def main() -> None:
    """Entry point of the process."""
    document = json.loads(sys.stdin.readline())
    topology = read_topology(document["topology"], document["name"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    devices = {open_device(seat["namespace"]): HostNamespace(**seat) for seat in document["seats"]}
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(document["control"])
    listener.listen()
    _raise_priority()
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, _TIMER_SLACK_NANOSECONDS, 0, 0, 0)
    hub = Hub(Shaper(topology, document["seed"]), devices, listener)
    gc.freeze()
    gc.disable()  # the hub creates no reference cycles, and a pause would be jitter
    print("ready", flush=True)
    hub.run()


if __name__ == "__main__":
    main()
