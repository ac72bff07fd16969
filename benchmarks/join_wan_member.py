"""One host of the benchmark of joining: a donor, or the newcomer, which is the last of them.

{"contacts": [...]}   where the others are, as far as known                        →  {"contact": ...}
{"arrive": true}      the newcomer starts, with a direct path or libp2p alone     →  {"contact": ...}
{"greet": [...]}      a donor hears of the newcomer and dials it                  →  {"greeted": true}
{"fetch": [...]}      the newcomer fetches from these donors, and goes            →  {"seconds": …, "direct": …}

The newcomer is new each time: a p2pd of its own and no connection to anybody but the first donor, its seed. It knows
where donors are, as nodes do from the directory; and they hear of it when it hears of them, as from a plan.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from atoll.core.identity import Identity
from atoll.node.direct.direct_path import DirectConfig
from atoll.node.state.anchor import AnchorState
from atoll.node.state.catchup import catch_up
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.state_server import StateServer
from atoll.node.swarm.host import SwarmHost
from benchmarks.join_state import RUN, mapped, plan_of, read_head
from benchmarks.json_lines import serve
from benchmarks.member_host import OPERATOR_KEY, greet_all, peer_of, start_host, start_member

_END = timedelta(seconds=5)


class Donor:
    """Serves what lies on the disk."""

    def __init__(self, index: int, address: str, directory: Path) -> None:
        self._index, self._address, self._directory = index, address, directory
        self._host: SwarmHost | None = None

    async def connect(self, contacts: list[Any]) -> Any:
        """Start once; returns where we are."""
        if self._host is None:
            store = ManifestStore(self._directory / f"manifests-{self._index}", RUN)
            for name in ("genesis", "head"):
                head = read_head(self._directory / f"{name}.manifest")
                store.append(head)
            state = mapped(self._directory / "state")
            self._host = await start_member(
                self._directory, self._index, contacts, run_id=RUN, address=self._address, direct=True
            )
            StateServer(self._host, RUN, store, lambda: (head, state))
            await self._host.ready()
        return self._host.multiaddrs()

    async def greet(self, contact: list[str]) -> None:
        """Dial the newcomer."""
        assert self._host is not None
        await greet_all(self._host, [contact])

    async def close(self) -> None:
        """Leave nothing."""
        if self._host is not None:
            await self._host.close(_END)


class Newcomer:
    """Comes, fetches, goes."""

    def __init__(self, address: str, directory: Path) -> None:
        self._address, self._directory = address, directory
        self._came = 0  # each time somebody else
        self._contacts: list[list[str]] = []
        self._host: SwarmHost | None = None

    async def connect(self, contacts: list[Any]) -> Any:
        """Learn where donors are."""
        self._contacts = [contact for contact in contacts if contact is not None]

    async def arrive(self, direct: bool) -> Any:
        """Start; returns where we are."""
        self._came += 1
        self._host = await start_host(
            self._directory,
            f"newcomer-{self._came}",
            tuple(self._contacts[0]),
            run_id=RUN,
            relay_service=False,
            address=self._address,
            direct=DirectConfig((self._address,)) if direct else None,
        )
        await self._host.ready()
        return self._host.multiaddrs()

    async def fetch(self, donors: Sequence[int]) -> dict[str, Any]:
        """From no connection to the whole state, verified. Raises as `catch_up`."""
        assert self._host is not None
        try:
            return await self._fetch(self._host, [self._contacts[donor] for donor in donors])
        finally:
            await self.close()

    async def close(self) -> None:
        """Leave nothing."""
        if self._host is not None:
            await self._host.close(_END)
            self._host = None

    async def _fetch(self, host: SwarmHost, donors: Sequence[list[str]]) -> dict[str, Any]:
        for addresses in donors:
            host.learn_addresses(peer_of(addresses), addresses)
        genesis, head = (read_head(self._directory / f"{name}.manifest") for name in ("genesis", "head"))
        offsets = mapped(self._directory / "state").offsets
        voters = [peer_of(contact) for contact in self._contacts]
        plan = plan_of([host.peer_id, *map(peer_of, donors)], voters, genesis.hash, len(offsets) - 1)
        operator = Identity.load_or_create(self._directory / OPERATOR_KEY)
        state = AnchorState(torch.zeros(offsets[-1]), offsets)
        began = time.monotonic()
        fetched = await catch_up(host, plan, state, None, operator_key=operator.public_key)
        seconds = time.monotonic() - began
        assert fetched is not None
        assert fetched.head.hash == head.hash
        return {"seconds": seconds, "direct": len(host.direct_peers())}


async def serve_requests(index: int, count: int, address: str, directory: Path) -> None:
    """Until the input ends."""
    member = Newcomer(address, directory) if index == count - 1 else Donor(index, address, directory)

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        match request, member:
            case {"contacts": contacts}, _:
                return {"contact": await member.connect(contacts)}
            case {"greet": contact}, Donor():
                await member.greet(contact)
                return {"greeted": True}
            case {"arrive": direct}, Newcomer():
                return {"contact": await member.arrive(direct)}
            case {"fetch": donors}, Newcomer():
                return await member.fetch(donors)
        raise ValueError(f"not a request to this member: {request}")

    try:
        await serve(answer)
    finally:
        await member.close()


if __name__ == "__main__":
    _, _, index, count, address, directory = sys.argv
    torch.set_num_threads(1)
    asyncio.run(serve_requests(int(index), int(count), address, Path(directory)))
