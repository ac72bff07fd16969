"""Network namespaces of labs: creation, settings, and removal even after a lab was killed.

A lab locks a file as long as its process lives; the kernel releases the lock however the process ends. A token whose
lock is free belongs to a lab that was killed. The next start removes everything with that token: processes,
namespaces, memory groups, files. Names of another form, and tokens whose lock is held, are never touched.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from atoll.core.files import make_private_dir
from atoll.lab.wan import memory
from atoll.lab.wan.errors import LabBroken, LabUnavailable
from atoll.lab.wan.hub import DEVICE
from atoll.lab.wan.topology import Host

NAMESPACES = Path("/run/netns")  # directory of iproute2
LABS = Path("/run/atoll-lab")
COMMAND_TIMEOUT = timedelta(seconds=20)
MTU = 1500
_QUEUE_PACKETS = 4000  # kernel queue while the hub waits for a CPU
_BURST_SECONDS = 0.002  # uplink time of one offloaded packet; at this size queues fill like real ones
_BURST_BYTES = (3000, 65536)
_SYSTEM_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
_TOKEN = re.compile(r"[0-9a-f]{8}")
_ENDING = timedelta(seconds=5)


def why_unavailable() -> LabUnavailable | None:
    """Return the error that names what this user or machine lacks; None if a lab can be built."""
    if not sys.platform.startswith("linux"):
        return LabUnavailable("the WAN lab needs Linux network namespaces", "run it on Linux or in a Linux VM")
    if os.geteuid() != 0:
        return LabUnavailable(
            "the WAN lab needs root, because it creates network namespaces",
            "run it as root in its own VM or container",
        )
    if _ip_program() is None:
        return LabUnavailable("the program `ip` is not installed", "install iproute2")
    if not Path("/dev/net/tun").exists():
        return LabUnavailable(
            "/dev/net/tun is missing",
            "run `modprobe tun`; in a container add --device /dev/net/tun --cap-add NET_ADMIN",
        )
    return None


@dataclass(frozen=True)
class Claim:
    """A lab's token, which this process holds by a locked file."""

    token: str
    lock: int  # a descriptor

    @property
    def directory(self) -> Path:
        """Directory for sockets and logs."""
        return LABS / self.token

    def name(self, host: str) -> str:
        """Return the name of a host's namespace."""
        return f"atoll-{self.token}-{host}"

    def path(self, host: str) -> Path:
        """Return the path of a host's namespace, to enter it."""
        return NAMESPACES / self.name(host)

    def release(self) -> None:
        """Remove everything with this token, processes first."""
        _remove(self.token)
        os.close(self.lock)


def claim() -> Claim:
    """Claim a new token. Raises `LabUnavailable`."""
    problem = why_unavailable()
    if problem is not None:
        raise problem
    try:
        LABS.mkdir(mode=0o700, exist_ok=True)
        while True:
            token = secrets.token_hex(4)
            lock = os.open(_lock_path(token), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            if _lock(lock) and os.fstat(lock).st_nlink:  # otherwise a concurrent sweep has just removed the file
                make_private_dir(LABS / token)
                return Claim(token, lock)
            os.close(lock)
    except OSError as error:
        raise LabUnavailable(f"cannot write to {LABS}: {error.strerror}") from error


def remove_leftovers() -> list[str]:
    """Remove the leftovers of killed labs and return their tokens."""
    swept = []
    for path in sorted(LABS.glob("*.lock")):
        if not _TOKEN.fullmatch(path.stem):
            continue
        with suppress(FileNotFoundError):  # another process sweeps, too
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _lock(lock) and os.fstat(lock).st_nlink:
                    _remove(path.stem)
                    swept.append(path.stem)
            finally:
                os.close(lock)
    return swept


def add(claimed: Claim, hosts: Iterable[Host]) -> None:
    """Create an empty namespace for each host. Raises `LabUnavailable`: many containers refuse it."""
    for host in hosts:
        try:
            ip("netns", "add", claimed.name(host.name))
        except LabBroken as error:
            raise LabUnavailable(
                f"cannot create a network namespace: {error}", "in a container add --privileged, or --cap-add SYS_ADMIN"
            ) from error


def configure(claimed: Claim, host: Host, address: str, congestion: str) -> None:
    """Set address, default route and limits of the device that the hub created for the host. Raises `LabBroken`.

    The route sets the congestion control, because some kernels refuse to change a namespace's default. It is verified.
    """
    name = claimed.name(host.name)
    ip(
        "-n", name, "-batch", "-",
        stdin="\n".join((
            "link set lo up",
            f"addr add {address}/32 dev {DEVICE}",
            f"link set {DEVICE} mtu {MTU} txqueuelen {_QUEUE_PACKETS} gso_max_size {burst_bytes(host.uplink_mbit)} up",
            f"route add default dev {DEVICE} congctl {congestion}",
        )),
    )  # fmt: skip
    in_force = ip("-n", name, "route", "show", "default").strip()
    if f"congctl {congestion}" not in in_force:
        raise LabBroken(
            f"the kernel did not set congestion control {congestion} on {host.name}: {in_force}",
            f"load it with `modprobe tcp_{congestion}`, or choose another in the topology",
        )


def set_burst(claimed: Claim, host: str, uplink_mbit: float) -> None:
    """Adapt the burst size to a changed uplink. Raises `LabBroken`."""
    ip("-n", claimed.name(host), "link", "set", DEVICE, "gso_max_size", str(burst_bytes(uplink_mbit)))


def burst_bytes(uplink_mbit: float) -> int:
    """Return the largest packet that the kernel may hand to the hub."""
    low, high = _BURST_BYTES
    return int(min(high, max(low, uplink_mbit * 1e6 / 8 * _BURST_SECONDS)))


def processes_in(namespaces: Iterable[Path]) -> set[int]:
    """Return the ids of processes in these namespaces."""
    inodes = set()
    for path in namespaces:
        with suppress(OSError):
            inodes.add(path.stat().st_ino)
    found = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "ns/net").stat().st_ino in inodes:
                found.add(int(entry.name))
    return found


def ip(*arguments: str, stdin: str = "") -> str:
    """Run iproute2's `ip` and return its output. Raises `LabBroken` with its message."""
    program = _ip_program()
    if program is None:
        raise LabBroken("the program `ip` is not installed any more")
    try:
        done = subprocess.run(
            [program, *arguments], input=stdin, capture_output=True, text=True, timeout=COMMAND_TIMEOUT.total_seconds()
        )
    except subprocess.TimeoutExpired as error:
        raise LabBroken(
            f"`ip {' '.join(arguments)}` did not end within {COMMAND_TIMEOUT.total_seconds():.0f} s"
        ) from error
    if done.returncode:
        raise LabBroken(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout


def _ip_program() -> str | None:
    return shutil.which("ip") or shutil.which("ip", path=_SYSTEM_PATH)


def _lock_path(token: str) -> Path:
    return LABS / f"{token}.lock"


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(token: str) -> None:
    paths = sorted(NAMESPACES.glob(f"atoll-{token}-*"))
    _kill_processes(paths)
    for path in paths:
        with suppress(LabBroken):  # it was removed by hand
            ip("netns", "delete", path.name)
    memory.remove(token)
    shutil.rmtree(LABS / token, ignore_errors=True)
    _lock_path(token).unlink(missing_ok=True)


def _kill_processes(namespaces: Sequence[Path]) -> None:
    """Kill the remaining processes in these namespaces; all of them are the lab's."""
    deadline = time.monotonic() + _ENDING.total_seconds()
    while (left := processes_in(namespaces)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
