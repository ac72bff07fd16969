"""Services and settings that a training session and its helpers share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.core.clock import Clock
from atoll.core.identity import Identity
from atoll.core.run_spec import RunSpec
from atoll.node.control.coordinator_link import CoordinatorLink
from atoll.node.control.directives import Directives
from atoll.node.run.status import LiveStatus
from atoll.node.state.checkpoint_writer import CheckpointWriter
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.vote_store import VoteStore
from atoll.node.trainer.preload import TrainerPreload
from atoll.node.trainer.trainer import TrainerConfig
from atoll.node.wire.traffic import Traffic
from atoll.node.wire.transport import Network


@dataclass(frozen=True)
class NodeContext:
    """Services and settings of a session; the daemon builds it once."""

    identity: Identity
    spec: RunSpec
    trainer_config: TrainerConfig
    network: Network
    directives: Directives
    link: CoordinatorLink
    manifests: ManifestStore
    votes: VoteStore
    checkpoints: CheckpointWriter
    operator_key: bytes
    status: LiveStatus
    traffic: Traffic
    run_dir: Path
    preload: TrainerPreload | None  # the first trainer, started with `trainer_config`
    clock: Clock
