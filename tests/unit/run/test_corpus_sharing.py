"""The wiring of a run's corpus among members: who is asked before and after the first plan, and what a seed checks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio
from support.corpus_swarm import CorpusSwarm

from atoll.core.clock import SystemClock
from atoll.core.errors import CorpusError, Unreachable
from atoll.core.run_spec import RunSpec
from atoll.node.control.directives import Directives
from atoll.node.data.blocks import BLOCK_BYTES
from atoll.node.data.mirrors import BlockAbsent
from atoll.node.data.peer_mirror import PeerMirror
from atoll.node.run.corpus_sharing import CorpusSharing
from atoll.node.swarm.host import SwarmHost

WEB = "web/000000.tokens"
SEED = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


@pytest_asyncio.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[CorpusSwarm]:
    swarm = CorpusSwarm(tmp_path)
    yield swarm
    await swarm.hub.close()


def sharing(swarm: CorpusSwarm, name: str, directory: Path | None = None, *, is_seed: bool = False) -> CorpusSharing:
    spec = cast(RunSpec, SimpleNamespace(data=SimpleNamespace(corpus=swarm.digest), run=SimpleNamespace(name="r")))
    sockets = swarm.root / name / "run"
    sockets.parent.mkdir(parents=True)
    return CorpusSharing(spec, directory, swarm.root / name / "corpora", sockets, SystemClock(), is_seed=is_seed)


def host_of(swarm: CorpusSwarm, name: str, found: Sequence[str] = ()) -> SwarmHost:
    network: Any = swarm.hub.join(name)

    async def lookup_addresses() -> dict[str, tuple[str, ...]]:
        if not found:
            raise Unreachable("no seed answers")
        return dict.fromkeys(found, ())

    network.lookup_addresses = lookup_addresses
    return cast(SwarmHost, network)


def directives(plan: object = None) -> Directives:
    return cast(Directives, SimpleNamespace(plan=plan))


def read(sharing_: CorpusSharing) -> bytes:
    mirror = PeerMirror(sharing_.socket_path)
    try:
        return mirror.read(WEB, 0, BLOCK_BYTES, lambda: False)
    finally:
        mirror.close()


@pytest.mark.parametrize("known_from", ["seed", "plan", "directory"])
async def test_members_are_known_from_seeds_the_plan_or_the_dht(swarm: CorpusSwarm, known_from: str) -> None:
    holder = {"seed": SEED, "plan": "planned", "directory": "found"}[known_from]
    giver = sharing(swarm, "giver", swarm.corpus, is_seed=True)
    await giver.start()
    giver.join(host_of(swarm, holder), directives(), tuple, lambda: True)
    reader = sharing(swarm, "reader")
    await reader.start()
    with pytest.raises(BlockAbsent, match="not joined"):
        await asyncio.to_thread(read, reader)
    host = host_of(swarm, "me", ["found", "me"] if known_from == "directory" else ())
    seeds = (f"/ip4/127.0.0.1/tcp/1/p2p/{SEED}",) if known_from == "seed" else ()
    known = directives(SimpleNamespace(members=("planned", "me")) if known_from == "plan" else None)
    reader.join(host, known, lambda: seeds, lambda: True)
    looking = asyncio.create_task(reader.look_up(host, known))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        assert await asyncio.to_thread(read, reader) == swarm.truth[WEB][:BLOCK_BYTES]
    assert reader.status_json()["corpus_bytes_from_members"] > BLOCK_BYTES
    assert giver.status_json()["corpus_bytes_to_members"] > BLOCK_BYTES
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    await reader.close()
    await giver.close()


async def test_seeds_that_change_are_asked_and_wrong_addresses_change_nothing(swarm: CorpusSwarm) -> None:
    giver, reader = sharing(swarm, "giver", swarm.corpus), sharing(swarm, "reader")
    giver.join(host_of(swarm, SEED), directives(), tuple, lambda: True)
    await reader.start()
    seeds: list[tuple[str, ...]] = [()]  # the newest last
    reader.join(host_of(swarm, "me"), directives(), lambda: seeds[-1], lambda: True)
    with pytest.raises(BlockAbsent, match="no member is left"):
        await asyncio.to_thread(read, reader)
    for changed in ((f"/ip4/127.0.0.1/tcp/1/p2p/{SEED}",), ("nonsense",)):
        seeds.append(changed)
        assert await asyncio.to_thread(read, reader) == swarm.truth[WEB][:BLOCK_BYTES]
    await reader.close()


async def test_a_seed_demands_the_runs_corpus_and_a_node_does_not(swarm: CorpusSwarm, tmp_path: Path) -> None:
    seed = sharing(swarm, "seed", tmp_path, is_seed=True)
    with pytest.raises(CorpusError, match="there is no corpus in"):
        await seed.start()
    await seed.close()
    node = sharing(swarm, "node", tmp_path)
    await node.start()
    await node.close()
