"""What a long run takes of disks, and of the coordinator's memory.

    python -m benchmarks.retention

Writes 100,000 rounds of 64 members through the shipped stores: manifests of real size through a node's
`ManifestStore`, and rounds, losses and events through the coordinator's rules into its `SqlStore` on SQLite. Then the
coordinator starts again from that database. Each store has a process of its own. Signatures are random bytes, because
neither store checks them when it writes. The node's disk does not sync, and the coordinator writes 256 rounds in a
transaction: both change the seconds and not the bytes. Bytes are what the file system has allocated. Memory is the
resident memory of the process.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unit.coordinator.world import RUN, World

from atoll.coordinator.rounds import reports
from atoll.coordinator.runs import restart
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.snapshot import StepTime
from atoll.coordinator.store.records import Change, Evaluation, Round
from atoll.coordinator.store.sql import SqlStore
from atoll.core import protocol
from atoll.core.disk import File, OsDisk
from atoll.core.identity import Identity
from atoll.core.manifest import Head
from atoll.core.quorum import MAX_SEATS
from atoll.node.state.manifests import ManifestStore
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2
from benchmarks.common import Report

ROUNDS, MEMBERS, LAYERS = 100_000, 64, 26
NODE_MB, COORDINATOR_MB, GROWTH_MB = 200, 300, 20
_EARLY = 0.2  # of all rounds: memory is measured here, and at the end
_TRANSACTION_ROUNDS = 256
_MB = 1e6


@dataclass(frozen=True)
class Measured:
    """One process."""

    disk_mb: float
    early_mb: float  # resident after a fifth of the rounds
    peak_mb: float
    seconds: float
    kept: int  # rounds on disk
    restart_seconds: float = 0.0  # until the state is read again


class UnsyncedDisk(OsDisk):
    """Writes the same bytes, and leaves to the system when they reach the disk."""

    def create(self, path: Path, mode: int = 0o644) -> File:
        file = super().create(path, mode)
        file.sync = lambda: None  # type: ignore[method-assign]
        return file

    def sync_directory(self, path: Path) -> None:
        return


class Manifests:
    """Manifests of real size: built once, then numbered."""

    def __init__(self, peers: list[str]) -> None:
        self._peers = peers
        self._manifest = manifest_pb2.Manifest(
            protocol=protocol.ours(),
            round=pb.RoundId(run_id=RUN, plan_version=1),
            previous_hash=os.urandom(32),
            contributions=[
                manifest_pb2.Contribution(peer_id=peer, tokens=81_920, weight=81_920, samples=160, present=True)
                for peer in peers
            ],
            layers=[
                manifest_pb2.LayerState(layer=layer, anchor_digest=os.urandom(32), momentum_digest=os.urandom(32))
                for layer in range(LAYERS)
            ],
            codec=pb.CODEC_INT4,
            parts_total=512,
            committed_unix_ms=1_700_000_000_000,
            fragments=1,
            seats=range(MAX_SEATS),
            epoch=1,
        )
        for place, peer in enumerate(peers):
            span = pb.SampleRange(start=10**7 + 1000 * place, end=10**7 + 1000 * place + 640)
            self._manifest.data.holdings.append(manifest_pb2.DataHolding(peer_id=peer, ranges=[span]))
        self._votes = [
            pb.Signed(signature=os.urandom(64), public_key=os.urandom(32)) for _ in range(MAX_SEATS // 2 + 1)
        ]

    def of_round(self, number: int) -> Head:
        """The manifest of that round; another member is absent in every round, so that few rounds share a set."""
        for place, item in enumerate(self._manifest.contributions):
            item.present = place < MAX_SEATS or place != number % len(self._peers)
        self._manifest.round.number = number
        self._manifest.committed_tokens = number * 81_920 * len(self._peers)
        for layer in self._manifest.layers:
            layer.round = number
        payload = self._manifest.SerializeToString()
        return Head(manifest_pb2.CommittedManifest(payload=payload, signatures=self._votes, ballot_plan_version=1))


def write_node(rounds: int, members: int, folder: str) -> Measured:
    """All rounds through a node's store."""
    manifests = Manifests([Identity.generate().peer_id for _ in range(members)])
    store, early, start = ManifestStore(Path(folder), RUN, UnsyncedDisk()), 0.0, time.perf_counter()
    for number in range(1, rounds + 1):
        store.append(manifests.of_round(number))
        early = _resident_mb() if number == int(_EARLY * rounds) else early
    return Measured(_disk_mb(folder), early, _peak_mb(), time.perf_counter() - start, len(os.listdir(folder)))


def write_coordinator(rounds: int, members: int, folder: str) -> Measured:
    """All rounds through the coordinator's rules and its store."""
    world = World()
    names = [f"node-{number}" for number in range(members)]
    world.train(*names, stop_tokens=10**15)
    manifests = Manifests([world.identities[name].peer_id for name in names])
    store, early, start = SqlStore(f"sqlite:///{folder}/coordinator.db"), 0.0, time.perf_counter()
    changes: list[Change] = [*world.records]
    world.records.clear()
    for number in range(1, rounds + 1):
        head = manifests.of_round(number)
        changes += _round_changes(world, head)
        if number % _TRANSACTION_ROUNDS == 0 or number == rounds:
            store.apply(changes)
            changes = []
        early = _resident_mb() if number == int(_EARLY * rounds) else early
    peak, seconds = _peak_mb(), time.perf_counter() - start
    start = time.perf_counter()
    restart.restore(store.load(), tuple(world.plans), None, world.now, world.operator.public_key)
    restart_seconds = time.perf_counter() - start
    kept = len(store.rounds(RUN, 0, rounds))
    store.close()
    return Measured(_disk_mb(folder), early, peak, seconds, kept, restart_seconds)


def _round_changes(world: World, head: Head) -> list[Change]:
    """What one round makes durable: its row, its event, its loss, the run's row, and orders to thin."""
    world.now = StepTime(world.now.unix_ms + 1000, world.now.monotonic + 1.0)
    draft = Draft(world.state, world.now)
    present = tuple(sorted(head.present))
    row = Round(
        run_id=RUN,
        number=head.round,
        plan_version=1,
        fragment=0,
        attempt=0,
        committed=True,
        reason="",
        opener=present[head.round % len(present)],
        seconds=2.5,
        reported_ms=world.now.unix_ms,
        wire_bytes=10**9,
        tokens=81_920 * len(present),
        committed_tokens=head.committed_tokens,
        members=len(present),
        manifest_hash=head.hash,
        manifest=head.committed.SerializeToString(),
        previous_hash=head.manifest.previous_hash,
        made_under=1,
        present=present,
        seats=head.seats,
        codec="int4",
    )
    reports.append_round(draft, row)
    draft.log(Evaluation(RUN, head.round, 3.5, head.committed_tokens))
    step = draft.done(None)
    world.state = step.state
    return list(step.records)


def _resident_mb() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MB


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MB


def _disk_mb(folder: str) -> float:
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder)) / _MB


@contextmanager
def _own_process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--members", type=int, default=MEMBERS)
    options = parser.parse_args()
    report, found = Report("retention"), {}
    for name, write in (("node", write_node), ("coordinator", write_coordinator)):
        with _own_process() as pool, tempfile.TemporaryDirectory() as folder:
            found[name] = it = pool.submit(write, options.rounds, options.members, folder).result()
        report.cell(
            program=name,
            rounds=options.rounds,
            members=options.members,
            rounds_kept=it.kept,
            disk_mb=round(it.disk_mb, 1),
            memory_mb_at_a_fifth=round(it.early_mb, 1),
            peak_memory_mb=round(it.peak_mb, 1),
            write_seconds=round(it.seconds, 1),
            restart_seconds=round(it.restart_seconds, 2),
        )
    node, coordinator = found["node"], found["coordinator"]
    for name, value, most in (
        ("node: MB on disk", node.disk_mb, NODE_MB),
        ("coordinator: MB on disk", coordinator.disk_mb, COORDINATOR_MB),
        (
            "coordinator: MB of memory that the last four fifths add",
            coordinator.peak_mb - coordinator.early_mb,
            GROWTH_MB,
        ),
    ):
        report.accept(name, target=f"≤ {most}", value=round(value, 1), holds=value <= most)
    manifest = Manifests(["x" * 52] * options.members).of_round(options.rounds)
    report.finish(f"a manifest has {manifest.committed.ByteSize():,} bytes")


if __name__ == "__main__":
    main()
