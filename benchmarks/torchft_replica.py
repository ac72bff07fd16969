"""One torchft replica in a lab's host: lighthouse, store, process group over gloo, manager."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

PATIENCE = timedelta(minutes=10)  # for everything that waits: no round is cut short
_LIGHTHOUSE_PORT = 29510
_JOIN_MS = 60_000
_SILENCE_MS = 30_000  # heartbeats wait behind the vectors that fill the link


class Replica:
    """Alone in its replica group, as a node is; the first replica of all keeps the lighthouse."""

    def __init__(self, index: int, members: int, address: str) -> None:
        self._index = index
        self._members = members
        self._address = address
        self._lighthouse: LighthouseServer | None = None
        self._store: TCPStore | None = None
        self._manager: Manager | None = None

    def lighthouse(self) -> str | None:
        """Start it, where it belongs; its URL there."""
        if self._index == 0 and self._lighthouse is None:
            self._lighthouse = LighthouseServer(
                bind=f"[::]:{_LIGHTHOUSE_PORT}",
                min_replicas=self._members,
                join_timeout_ms=_JOIN_MS,
                heartbeat_timeout_ms=_SILENCE_MS,
            )
        return f"http://{self._address}:{_LIGHTHOUSE_PORT}" if self._index == 0 else None

    def manager(self, lighthouse: str, devices: int = 1) -> Manager:
        """Start it, with the one network device named `devices` times. Its quorum is synchronous, as DiLoCo demands."""
        os.environ["GLOO_SOCKET_IFNAME"] = ",".join([interface_of(self._address)] * devices)
        self._store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=self._members,
            use_async_quorum=False,
            timeout=PATIENCE,
            quorum_timeout=PATIENCE,
            connect_timeout=timedelta(seconds=30),
            rank=0,
            world_size=1,
            store_addr=self._address,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica_{self._index}",
            hostname=self._address,
            init_sync=False,
        )
        return self._manager

    def close(self) -> None:
        """Leave nothing."""
        if self._manager is not None:
            self._manager.shutdown(wait=False)
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


def interface_of(address: str) -> str:
    """The network device that has it."""
    for name, held in psutil.net_if_addrs().items():
        if any(it.family == socket.AF_INET and it.address == address for it in held):
            return name
    raise RuntimeError(f"no network device has {address}")
