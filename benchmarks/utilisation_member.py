"""One member of the utilisation benchmark, in a lab's host: the engine that nodes run, around a device that pretends.

{"contacts": [...]}   where the others are, as far as known        →  {"contact": ...}
{"begin": {...}}      elements, step_seconds, copy_seconds, inner_steps, codec   →  {"begun": true}
{"look": true}        →  {"at": …, "steps": …, "rounds": …, "abandoned": …, "codec": …, "sent": …, "cpu_seconds": …}

The device takes `step_seconds` a step whatever this machine's cores do, as a GPU does with its queue, and stands still
while it copies: a vector out for a snapshot, one in for a new anchor, for `copy_seconds` (assumed). It does not
evaluate. Codecs, sums, outer step, digests, votes, disk and network are the shipped ones.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from atoll.core import protocol
from atoll.core.clock import SystemClock
from atoll.core.data_position import SampleRange
from atoll.core.files import make_private_dir
from atoll.core.identity import Identity
from atoll.core.manifest import Head
from atoll.core.plan import Assignment, Base, Plan
from atoll.core.quorum import next_seats
from atoll.core.round_id import RoundId
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.exchange.codecs import BY_NUMBER
from atoll.node.exchange.exchange_server import ExchangeServer
from atoll.node.rounds import types as rt
from atoll.node.rounds.callbacks import RoundCallbacks, RoundCounters
from atoll.node.rounds.engine import AveragingEngine
from atoll.node.rounds.installed_state import InstalledState
from atoll.node.rounds.member_streams import RoundLinks
from atoll.node.rounds.policy import policies
from atoll.node.rounds.run_member import RunMember
from atoll.node.start import use_huge_pages
from atoll.node.state.anchor import AnchorState
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.state_server import StateServer
from atoll.node.state.vote_store import VoteStore
from atoll.node.swarm.host import SwarmHost
from atoll.node.trainer.messages import Loss, TrainerStatus
from atoll.node.trainer.trainer import Trainer
from atoll.node.training.progress import Progress, Snapshot
from atoll.v1 import manifest_pb2
from benchmarks.json_lines import serve
from benchmarks.member_host import OPERATOR_KEY, greet_all, peer_of, start_member

STEP_TOKENS = 512
LAYERS = 14
_RUN = "utilisation"
_START = timedelta(seconds=60)

SPEC = """
version = 1
[run]
name = "utilisation"
min_nodes = {members}
stop_tokens = 1000000000000
[model]
preset = "nano"
[data]
path = "nowhere.txt"
sequence_length = 64
[optimizer]
micro_batch_samples = 8
[sync]
round_tokens = {round_tokens}
round_growth = 1000000.0
round_max_seconds = 600
exchange_share = 1.0  # H is given
fragments = 1  # as a round of the others is
codec = "{codec}"
"""


class Device:
    """Stands in for a trainer process and its GPU."""

    def __init__(self, elements: int, step_seconds: float, copy_seconds: float, seed: int) -> None:
        self.anchor = torch.zeros(elements)
        self.pseudo_gradient = torch.randn(elements, generator=torch.Generator().manual_seed(seed)).mul_(1e-3)
        self.pseudo_gradient.add_(1e-3)  # members agree in part, as when they train
        self._step_seconds = step_seconds
        self._copy_seconds = copy_seconds
        self._progress = Progress()
        self._lock = threading.Lock()
        self._busy_until = 0.0  # when the step under way ends
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        """Train from now on."""
        self._busy_until = time.monotonic() + self._step_seconds
        self._thread.start()

    @property
    def status(self) -> TrainerStatus:
        """As a trainer pushes it."""
        with self._lock:
            return TrainerStatus(
                steps=self._progress.steps_total,
                tokens=self._progress.tokens_total,
                step_seconds=self._step_seconds,
                training=True,
                progress_tokens=self._progress.tokens,
            )

    async def snapshot(self, start: int, end: int) -> Snapshot:
        """At the end of the step under way; the device then copies these elements out."""
        await asyncio.sleep(max(0.0, self._busy_until - time.monotonic()))
        with self._lock:
            self._busy_until += self._copy_seconds * (end - start) / len(self.anchor)
            return self._progress.mark_snapshot(start, end)

    async def apply(
        self, *, ranges: Sequence[SampleRange], committed_tokens: int, moved: SampleRange | None = None
    ) -> None:
        """The device copies in what `moved` (all)."""
        with self._lock:
            self._progress.commit_snapshot()
            self._busy_until += self._share(moved) * self._copy_seconds

    async def rebase(
        self,
        *,
        ranges: Sequence[SampleRange],
        committed_tokens: int,
        consumed_samples: int = 0,
        moved: SampleRange | None = None,
    ) -> None:
        """The device copies in what `moved` (all)."""
        with self._lock:
            self._progress.discard_snapshot()
            self._progress.subtract_consumed(consumed_samples)
            self._busy_until += self._share(moved) * self._copy_seconds

    async def load(self, *, ranges: Sequence[SampleRange], committed_tokens: int) -> None:
        """The device copies in."""
        with self._lock:
            self._progress.reset()
            self._busy_until += self._copy_seconds

    async def set_ranges(self, ranges: Sequence[SampleRange]) -> None:
        """Nothing to copy."""

    async def discard(self) -> None:
        """Nothing to copy."""
        with self._lock:
            self._progress.discard_snapshot()

    async def evaluate(self) -> Loss:
        """Nothing is learnt here."""
        return Loss(0.0)

    def _share(self, moved: SampleRange | None) -> float:
        return (moved[1] - moved[0]) / len(self.anchor) if moved else 1.0

    def _run(self) -> None:
        while not self._over.wait(max(0.0, self._busy_until - time.monotonic())):
            with self._lock:
                now = time.monotonic()
                while self._busy_until <= now:  # the next step was queued while this one ran
                    self._busy_until = max(self._busy_until, now - self._step_seconds) + self._step_seconds
                    self._progress.steps += 1
                    self._progress.steps_total += 1
                    self._progress.tokens += STEP_TOKENS
                    self._progress.tokens_total += STEP_TOKENS


class Member:
    """What answers the benchmark."""

    def __init__(self, index: int, address: str, directory: Path) -> None:
        self._index, self._address, self._directory = index, address, directory
        self._host: SwarmHost | None = None
        self._contacts: list[Any] = []
        self._counters = RoundCounters()
        self._rounds = 0
        self._family: list[psutil.Process] = []
        self._committed: dict[str, Any] = {}  # where we stood then
        self._running: asyncio.Task[None] | None = None

    async def connect(self, contacts: list[Any]) -> Any:
        """Start, or learn where the others are; returns where we are."""
        if self._host is None:
            self._host = await start_member(
                self._directory, self._index, contacts, run_id=_RUN, address=self._address, direct=True
            )
            return self._host.multiaddrs()
        self._contacts = contacts
        await greet_all(self._host, contacts)
        return None

    def begin(self, elements: int, step_seconds: float, copy_seconds: float, inner_steps: int, codec: str) -> None:
        """Train, in rounds of `inner_steps` of every member."""
        assert self._host is not None
        count = len(self._contacts)
        text = SPEC.format(members=count, round_tokens=inner_steps * count * STEP_TOKENS, codec=codec)
        spec = parse_run_spec(text)
        self._device = Device(elements, step_seconds, copy_seconds, self._index)
        state = AnchorState(self._device.anchor, [elements * layer // LAYERS for layer in range(LAYERS + 1)])
        head = genesis(state)
        plan = plan_of(sorted(map(peer_of, self._contacts)), head, spec)
        place = make_private_dir(self._directory / f"state-{self._index}")
        manifests, votes = ManifestStore(place / "manifests", _RUN), VoteStore(place)
        votes.begin()
        operator = Identity.load_or_create(self._directory / OPERATOR_KEY)
        engine = AveragingEngine(
            RunMember(
                Identity.load_or_create(self._directory / f"member-{self._index}.key"),
                spec,
                operator.public_key,
                self._host,
                SystemClock(),
            ),
            policies(spec, state.offsets),
            cast("Trainer", self._device),
            InstalledState(head, state, manifests),
            plan,
            votes=votes,
            exchanges=ExchangeServer(self._host, _START),
            counters=self._counters,
            callbacks=RoundCallbacks(
                committed=self._moved,
                report=lambda report: None,
                evaluated=lambda report: None,
                audited=lambda report: None,
                ask_coordinator=_nobody,
                plan_newer_than=lambda version: None,
                plan_shared=lambda sealed: None,
            ),
        )
        StateServer(self._host, _RUN, manifests, lambda: None if engine.moving else (engine.head, state))
        self._running = asyncio.create_task(engine.run(RoundLinks(self._host, engine.receive, engine.lost)))
        me = psutil.Process()
        self._family = [me, *me.children(recursive=True)]
        self._committed = self._stands("")
        self._device.begin()

    def look(self) -> dict[str, Any]:
        """Where this member stood when it committed its last round. Raises what ended its engine."""
        assert self._host is not None
        if self._running is not None and self._running.done():
            self._running.result()
        return self._committed | {"abandoned": self._counters.abandoned}

    def _stands(self, codec: str) -> dict[str, Any]:
        times = [process.cpu_times() for process in self._family]
        return {
            "at": time.monotonic(),
            "steps": self._device.status.steps,
            "rounds": self._rounds,
            "codec": codec,
            "sent": psutil.net_io_counters(pernic=False).bytes_sent,
            "cpu_seconds": sum(it.user + it.system for it in times),
        }

    async def close(self) -> None:
        """Leave nothing."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._host is not None:
            await self._host.close(timedelta(seconds=5))

    def _moved(self, head: Head) -> None:
        self._rounds += 1
        self._committed = self._stands(BY_NUMBER[head.manifest.codec].name)


def genesis(state: AnchorState) -> Head:
    """Round 0: everybody's anchor is zero."""
    manifest = manifest_pb2.Manifest(
        protocol=protocol.ours(), round=RoundId(_RUN, 0, 0, 0, 0).to_proto(), layers=state.layer_states(0)
    )
    return Head(manifest_pb2.CommittedManifest(payload=manifest.SerializeToString(deterministic=True)))


def plan_of(peers: Sequence[str], head: Head, spec: RunSpec) -> Plan:
    """All members hold all layers and reduce alike."""
    lease = 10**6
    assignments = tuple(
        Assignment(peer, 0, LAYERS - 1, ((i * lease, (i + 1) * lease),), spec.sync.round_tokens, 1)
        for i, peer in enumerate(peers)
    )
    return Plan(_RUN, 1, assignments, tuple((peer,) for peer in peers), Base(head.hash, next_seats(peers, peers, ())))


async def _nobody(round_id: RoundId, proposal: bytes) -> rt.CoordinatorVote:
    return rt.CoordinatorVote(
        round_id, proposal, granted=False, voted=None, vote=None, reason="there is no coordinator"
    )


async def serve_requests(index: int, address: str, directory: Path) -> None:
    """Until the input ends."""
    member = Member(index, address, directory)

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "contacts" in request:
            return {"contact": await member.connect(request["contacts"])}
        if "begin" in request:
            member.begin(**request["begin"])
            return {"begun": True}
        return member.look()

    try:
        await serve(answer)
    finally:
        await member.close()


if __name__ == "__main__":
    use_huge_pages()
    torch.set_num_threads(1)
    asyncio.run(serve_requests(int(sys.argv[2]), sys.argv[4], Path(sys.argv[5])))
