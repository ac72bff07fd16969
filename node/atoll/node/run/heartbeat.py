"""Heartbeats to the coordinator: build each request from the node's status, its machine and its network.

Facts that seldom change (layer table, paths, checkpoints) are sent with the first heartbeat of a stream, and again when
they change.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING

from atoll.core.clock import Clock
from atoll.core.quorum import Promised
from atoll.node.config import NodeConfig
from atoll.node.run.status import LiveStatus
from atoll.node.swarm.host import SwarmHost
from atoll.node.swarm.rtt_probe import PathProber
from atoll.v1 import common_pb2 as pb
from atoll.v1 import membership_pb2 as mb

if TYPE_CHECKING:  # a seed sends heartbeats too, and has no torch
    from atoll.node.trainer.trainer import TrainerFacts

AVERAGING_PROTOCOLS = ("/atoll/average/1", "/atoll/round/1")


class HeartbeatBuilder:
    """Builds heartbeats and remembers which facts the coordinator already has."""

    def __init__(
        self,
        status: LiveStatus,
        clock: Clock,
        *,
        run_id: str,
        checkpoints: Callable[[], tuple[mb.CheckpointInfo, ...]],
        former_checkpoints: Callable[[], tuple[mb.FormerCheckpoint, ...]],
        config: Callable[[], NodeConfig],
        clock_ahead_seconds: Callable[[], float | None],
        newer_deny_list: Callable[[], pb.Signed | None],
        manifest_answer: Callable[[], mb.ManifestAnswer | None],
        promised: Callable[[], Promised | None],
    ) -> None:
        """Arguments are functions that return the current values.

        `checkpoints`: those on disk; the same tuple object until they change. `former_checkpoints`: those of other
        runs, as at the start. `config`: the limits in force. `newer_deny_list`: a list that the coordinator lacks, if
        any. `manifest_answer`: the answer to the coordinator's request for rounds, once. `promised`: the newest promise
        on disk.
        """
        self.host: SwarmHost | None = None  # set once the node has joined the swarm
        self.prober: PathProber | None = None
        self._status = status
        self._checkpoints = checkpoints
        self._former_checkpoints = former_checkpoints
        self._clock = clock
        self._run_id = run_id
        self._config = config
        self._clock_ahead_seconds = clock_ahead_seconds
        self._newer_deny_list = newer_deny_list
        self._manifest_answer = manifest_answer
        self._promised = promised
        self._checkpoints_sent: tuple[mb.CheckpointInfo, ...] = ()
        self._layers_sent = False
        self._paths_sent_monotonic = float("-inf")

    def build(self, first: bool) -> mb.HeartbeatRequest:
        """Build the next heartbeat. The first one of a stream repeats all facts."""
        status, facts = self._status, self._status.facts
        request = mb.HeartbeatRequest(status=status.to_proto(*bytes_sent(self.host)))
        if first:
            request.run_id, request.stays_in_run = self._run_id, self._config().stay_in_run
            request.former_checkpoints.extend(self._former_checkpoints())
        if facts is not None:
            request.corpus_digest = facts.corpus_digest
            request.profile.CopyFrom(_profile(facts, self._config()))
        ahead_seconds = self._clock_ahead_seconds()
        if ahead_seconds is not None:
            request.status.clock_offset_seconds = ahead_seconds
        if self.host is not None:
            request.multiaddrs.extend(self.host.multiaddrs())
            request.status.uplink_bytes_per_second = self.host.uplink_bytes_per_second
            request.status.downlink_bytes_per_second = self.host.traffic.downlink_bytes_per_second
        request.paths.extend(self._new_paths(first))
        self._layers_sent = self._layers_sent and not first
        if facts is not None and not self._layers_sent:
            self._layers_sent = True
            request.layers.CopyFrom(facts.layers)
        if status.genesis_report is not None:
            request.genesis.CopyFrom(status.genesis_report)
        deny_list = self._newer_deny_list()
        if deny_list is not None:
            request.deny_list.CopyFrom(deny_list)
        if (promised := self._promised()) is not None:
            number, (plan_version, attempt), voted = promised
            request.promised.CopyFrom(mb.Promise(round=number, plan_version=plan_version, attempt=attempt, voted=voted))
        manifests = self._manifest_answer()
        if manifests is not None:
            request.manifests.CopyFrom(manifests)
        checkpoints = self._checkpoints()
        if first or checkpoints is not self._checkpoints_sent:
            self._checkpoints_sent = checkpoints
            request.checkpoints_changed = True
            request.checkpoints.extend(checkpoints)
        return request

    def _new_paths(self, first: bool) -> list[mb.PeerPath]:
        """Paths measured since the last heartbeat; all paths in the first heartbeat of a stream."""
        if self.prober is None or self.host is None:
            return []
        since = float("-inf") if first else self._paths_sent_monotonic
        self._paths_sent_monotonic = self._clock.monotonic()
        limits = self.host.path_limits_bytes_per_second()
        return [
            mb.PeerPath(peer_id=peer, rtt_seconds=time.rtt_seconds, bytes_per_second=limits.get(peer, 0.0))
            for peer, time in self.prober.rtts.items()
            if time.at >= since
        ]


def bytes_sent(host: SwarmHost | None) -> tuple[int, int]:
    """Bytes sent to peers: for averaging, and for everything else."""
    if host is None:
        return 0, 0
    averaging = sum(host.bytes_sent(name) for name in AVERAGING_PROTOCOLS)
    return averaging, host.bytes_sent_total() - averaging


def _profile(facts: TrainerFacts, config: NodeConfig) -> mb.NodeProfile:
    share = config.compute_share  # a device that computes half of the time takes twice as long
    return mb.NodeProfile(
        device=facts.device,
        device_name=facts.device_name,
        device_memory_bytes=facts.device_memory_bytes,
        cpu_threads=config.cpu_threads or os.cpu_count() or 1,
        host_memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        atoll_version=version("atoll"),
        tokens_per_second=facts.tokens_per_second,
        layer_times=[
            mb.LayerTime(
                kind=kind,
                forward_seconds_per_token=forward / share,
                backward_seconds_per_token=backward / share,
            )
            for kind, forward, backward in facts.layer_times
        ],
        price_per_hour=config.price_per_hour,
        minimum_step_seconds=config.minimum_step_seconds,
        whole_model_bytes=facts.whole_model_bytes,
    )
