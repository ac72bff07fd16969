"""Exchange of the run's corpus among members: this node serves its blocks, and fetches blocks for its trainer.

A seed with `--data` serves a whole corpus, so a run needs no other mirror. A node serves what it fetched or has in a
directory. Its trainer processes read over a private socket (`data/peer_socket.py`) from their start; before the node
has joined, the socket answers that nothing is available yet. Members are known from the seeds and the plan, and before
the first plan from the DHT.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, ConfigError
from atoll.core.files import make_private_dir
from atoll.core.run_spec import RunSpec
from atoll.node.control.directives import Directives
from atoll.node.data.block_client import BlockClient, KnownMembers
from atoll.node.data.block_files import BlockFiles
from atoll.node.data.block_server import BlockServer
from atoll.node.data.peer_socket import PeerSocket
from atoll.node.swarm.addresses import readable_seeds
from atoll.node.swarm.host import SwarmHost

SOCKET_NAME = "corpus.sock"
_LOOK_UP_INTERVAL = timedelta(seconds=20)  # before the first plan

_log = log.get("corpus")


class CorpusSharing:
    """The server, the client and the socket of one run's corpus. Call `start`, `join` and at the end `close`."""

    def __init__(
        self, spec: RunSpec, directory: Path | None, cache: Path, sockets: Path, clock: Clock, *, is_seed: bool
    ) -> None:
        """`directory`: the owner's own corpus. `cache`: the folder of all corpora that trainers fetched.

        `sockets`: the folder of the socket.
        """
        assert spec.data.corpus is not None
        self.socket_path = sockets / SOCKET_NAME
        self._run_id, self._clock, self._directory = spec.run.name, clock, directory
        self._is_seed = is_seed
        self._files = BlockFiles(spec.data.corpus, directory, cache / spec.data.corpus)
        self._socket = PeerSocket(self.socket_path)
        self._server: BlockServer | None = None
        self._client: BlockClient | None = None
        self._found: tuple[str, ...] = ()  # members whose addresses are in the DHT

    async def start(self) -> None:
        """Start the socket for the node's own trainer. A seed first checks its directory, and raises `CorpusError`."""
        if self._directory is not None and self._is_seed:
            has = await self._files.in_thread(self._files.require_directory)
            _log.info("corpus_shared", directory=str(self._directory), has=has)
        make_private_dir(self.socket_path.parent)
        await self._socket.start()

    def join(
        self,
        host: SwarmHost,
        directives: Directives,
        seeds: Callable[[], Sequence[str]],
        may_share: Callable[[], bool],
    ) -> None:
        """Serve other members and read from them. `seeds` returns the addresses of the run's seeds."""

        read, known = seeds(), tuple(readable_seeds(seeds()))

        def members() -> KnownMembers:
            nonlocal read, known
            if seeds() is not read:
                read = seeds()
                with suppress(ConfigError):  # no address of the new seeds parses: keep the old ones
                    known = tuple(readable_seeds(read))
            plan = directives.plan
            return KnownMembers(known, plan.members if plan is not None else self._found)

        self._server = BlockServer(host, self._run_id, self._files, may_share)
        self._client = self._socket.client = BlockClient(host, self._run_id, self._files, members, self._clock)

    async def look_up(self, host: SwarmHost, directives: Directives) -> None:
        """Find members in the DHT until a plan names them."""
        while directives.plan is None:
            try:
                self._found = tuple(await host.lookup_addresses())
            except AtollError as error:
                _log.warning("DHT lookup failed", reason=str(error))
            await asyncio.sleep(_LOOK_UP_INTERVAL.total_seconds())

    def status_json(self) -> dict[str, int]:
        """Return the rows of `atoll status`."""
        return {
            "corpus_bytes_to_members": self._server.bytes_sent if self._server is not None else 0,
            "corpus_bytes_from_members": self._client.bytes_received if self._client is not None else 0,
        }

    async def close(self) -> None:
        """End all reads."""
        await self._socket.close()
        if self._client is not None:
            await self._client.close()
