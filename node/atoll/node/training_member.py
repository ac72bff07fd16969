"""TrainingMember: the parts of a node that a seed lacks: checkpoints, the trainer's process and the session.

The daemon builds it for a node and calls it in this order: `preload` → `join` → `limit` … → `close`. A seed imports
nothing of this file, and so no torch (docs/adr/0017-seeds-without-torch.md).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import AtollError
from atoll.core.identity import Identity
from atoll.core.run_spec import RunSpec
from atoll.node.config import CORPORA, NodeConfig
from atoll.node.control.coordinator_link import CoordinatorLink
from atoll.node.control.credentials import Credentials
from atoll.node.control.directives import Directives
from atoll.node.run.node_context import NodeContext
from atoll.node.run.own_trainer import LOAD_TIMEOUT
from atoll.node.run.status import LiveStatus
from atoll.node.session import TrainingSession
from atoll.node.state.checkpoint import CheckpointStore
from atoll.node.state.checkpoint_writer import CheckpointWriter
from atoll.node.state.former_checkpoints import former_checkpoints
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.vote_store import VoteStore
from atoll.node.trainer.preload import TrainerPreload, span_to_hold
from atoll.node.trainer.trainer import TrainerConfig
from atoll.node.trainer.trainer_process import TrainerProcess
from atoll.node.wire.traffic import Traffic
from atoll.node.wire.transport import Network

SAVE_TIMEOUT = timedelta(seconds=60)
KEEP_TIMEOUT = timedelta(seconds=60)  # for the optimiser's state

_log = log.get("daemon")


@dataclass(frozen=True)
class MemberParts:
    """Parts of the daemon that training uses."""

    config: NodeConfig  # with the limits at the start
    identity: Identity
    credentials: Credentials  # at the start
    spec: RunSpec
    run_dir: Path
    status: LiveStatus
    directives: Directives
    manifests: ManifestStore
    votes: VoteStore
    corpus_socket: Path | None  # on which the trainer reads blocks from other members
    clock: Clock


class TrainingMember:
    """The training part of a node's daemon."""

    def __init__(self, parts: MemberParts, child: TrainerProcess) -> None:
        """`child` becomes the trainer's process; its creator ends it if it was not used."""
        config, directory = parts.config, parts.run_dir / "checkpoints"
        self.checkpoints = CheckpointWriter(
            CheckpointStore(directory, parts.spec, keep=config.checkpoint_keep),
            timedelta(seconds=config.checkpoint_interval_seconds),
            parts.clock,
            kept_rounds=lambda: parts.directives.kept_rounds,
        )
        self.former_checkpoints = former_checkpoints(parts.run_dir.parent, parts.spec.run.name, parts.spec.fork)
        self.session: TrainingSession | None = None
        self._parts = parts
        self._child = child
        self._trainer_config = self._trainer_config_of(config)
        self._preload: TrainerPreload | None = None

    def preload(self) -> None:
        """Begin to load the layers of the saved plan, or the whole model if there is no plan."""
        plan = self._parts.directives.plan
        span = span_to_hold(plan, plan.span(self._parts.identity.peer_id) if plan is not None else range(0))
        config = replace(self._trainer_config, span=span)
        self._preload = TrainerPreload(self._child, config, LOAD_TIMEOUT, self._parts.status.show_loading_progress)

    def join(self, network: Network, traffic: Traffic, link: CoordinatorLink) -> TrainingSession:
        """Create the session, once the node has joined the swarm."""
        parts = self._parts
        self.session = TrainingSession(
            NodeContext(
                identity=parts.identity,
                spec=parts.spec,
                trainer_config=self._trainer_config,
                network=network,
                directives=parts.directives,
                link=link,
                manifests=parts.manifests,
                votes=parts.votes,
                checkpoints=self.checkpoints,
                operator_key=parts.credentials.operator_key,
                status=parts.status,
                traffic=traffic,
                run_dir=parts.run_dir,
                preload=self._preload,
                clock=parts.clock,
            )
        )
        return self.session

    async def limit(self, config: NodeConfig) -> None:
        """Apply the owner's limits to training. Raises `ModelTooLarge` without changing anything."""
        if self.session is not None:
            await self.session.limit(self._trainer_config_of(config))

    async def close(self, stop_by: float) -> None:
        """Save the state and end the trainer. The optimiser's state is kept if there is time until `stop_by`."""
        if self.session is not None:
            await self._save_state(self.session)  # first, because it matters more if time or disk space runs out
            left = stop_by - self._parts.clock.monotonic()
            if left > 0:
                await self.session.keep_optimizer(timedelta(seconds=min(KEEP_TIMEOUT.total_seconds(), left)))
            await self.session.stop_trainer()
        if self._preload is not None:
            await self._preload.abandon()

    async def _save_state(self, session: TrainingSession) -> None:
        """Write a checkpoint from which the next start of this node, or of the whole swarm, continues."""
        try:
            await session.save(SAVE_TIMEOUT)
        except AtollError as error:
            _log.warning("state not saved; the next start uses the last checkpoint", reason=str(error))
        await self.checkpoints.close()

    def _trainer_config_of(self, config: NodeConfig) -> TrainerConfig:
        corpus_socket = self._parts.corpus_socket
        return TrainerConfig(
            run_spec_toml=self._parts.credentials.run_spec_toml,
            corpus_path=str(Path(config.data).resolve()) if config.data else None,
            base_path=str(Path(config.base).resolve()) if config.base else None,
            layer_times_path=str(config.path("layer-times.json").resolve()),
            cache_path=str(config.path(CORPORA).resolve()),
            cache_bytes=int(config.disk_gigabytes * 1e9),
            peers_path=str(corpus_socket.resolve()) if corpus_socket is not None else None,
            device=config.device,
            cpu_threads=config.cpu_threads or os.cpu_count() or 1,
            minimum_step_seconds=config.minimum_step_seconds,
            compute_share=config.compute_share,
            vram_fraction=config.vram_fraction,
            memory_bytes=int(config.memory_megabytes * 1e6),
        )
