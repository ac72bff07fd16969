"""Services and settings that a training session and its helpers share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.node.control.coordinator_link import CoordinatorLink
from atoll.node.control.directives import Directives
from atoll.node.rounds.run_member import RunMember
from atoll.node.run.local_state import StateSources
from atoll.node.run.status import LiveStatus
from atoll.node.state.checkpoint_writer import CheckpointWriter
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.vote_store import VoteStore
from atoll.node.trainer.preload import TrainerPreload
from atoll.node.trainer.trainer import TrainerConfig
from atoll.node.wire.traffic import Traffic


@dataclass(frozen=True)
class NodeContext(RunMember):
    """This member with the services and settings of its session. The daemon builds it once."""

    trainer_config: TrainerConfig
    directives: Directives
    link: CoordinatorLink
    manifests: ManifestStore
    votes: VoteStore
    checkpoints: CheckpointWriter
    status: LiveStatus
    traffic: Traffic
    run_dir: Path
    preload: TrainerPreload | None  # the first trainer, started with `trainer_config`

    def state_sources(self) -> StateSources:
        """The services from which the committed state is read and to which it is written."""
        return StateSources(
            self.network,
            self.spec.run.name,
            self.run_dir,
            self.operator_key,
            self.manifests,
            self.checkpoints,
            self.directives,
            self.link.send_heartbeat_now,
        )
