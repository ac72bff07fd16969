"""Live status of this node, as `atoll status` and heartbeats report it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atoll.core.data_position import DataPosition
from atoll.core.node_reasons import reason_words
from atoll.node.data.data_report import BlockCounts, MirrorReport
from atoll.node.rounds.callbacks import RoundCounters
from atoll.node.trainer.messages import Loading, TrainerStatus
from atoll.v1 import membership_pb2 as mb

if TYPE_CHECKING:  # a seed has a status too, and no torch
    from atoll.node.run.local_state import LocalState
    from atoll.node.run.route_membership import RouteMembership
    from atoll.node.trainer.trainer import Trainer, TrainerFacts

SLOW_TEXT_SHARE = 0.1  # of the training time: a node that waits so much for text lags
STATE_NAMES = {
    number: name.removeprefix("NODE_STATE_").lower().replace("_", "-") for name, number in mb.NodeState.items()
}


@dataclass
class LiveStatus:
    """Current state and figures. Mutable: the session writes, heartbeats and the local API read.

    Its attributes are the rows of one report, so there are many.
    """

    state: mb.NodeState = mb.NODE_STATE_JOINING
    detail: str = "starting"
    reason: mb.NodeReason = mb.NODE_REASON_LOADING
    facts: TrainerFacts | None = None
    trainer: Trainer | None = None  # the newest trainer, even after it has stopped
    counters: RoundCounters = field(default_factory=RoundCounters)
    head_round: int = 0
    head_hash: bytes = b""
    committed_tokens: int = 0
    plan_version: int = 0
    data_position: DataPosition | None = None  # of the head
    members: int = 0
    validation_loss: float | None = None
    source_losses: Mapping[str, float] = field(default_factory=dict)
    anchor_path: str = ""
    trainer_restarts: int = 0
    route: RouteMembership | None = None
    local_state: LocalState | None = None
    # kept until a plan shows that the coordinator has it; may be a refusal
    genesis_report: mb.GenesisReport | None = None

    def forget_refusal(self) -> None:
        """Forget a refusal to write genesis once the coordinator has it, so that the node can try again when asked."""
        if self.genesis_report is not None and self.genesis_report.refusal:
            self.genesis_report = None

    def enter(self, state: mb.NodeState, detail: str, reason: mb.NodeReason) -> None:
        """Set the state, with a detail for people and a typed reason why the node does not train."""
        self.state, self.detail, self.reason = state, detail, reason

    def show_loading_progress(self, so_far: Loading) -> None:
        """Report how far a loading trainer is."""
        if self.state not in (mb.NODE_STATE_JOINING, mb.NODE_STATE_CATCHING_UP):
            return
        if so_far.trouble:
            self.detail, self.reason = f"waits for training text: {so_far.trouble}", mb.NODE_REASON_WAITS_FOR_TEXT
        elif so_far.tokens:
            self.detail, self.reason = f"reading the corpus: {so_far.tokens:,} tokens so far", mb.NODE_REASON_LOADING

    def to_proto(self, averaging_bytes: int, other_bytes: int) -> mb.NodeStatus:
        """Build the status of a heartbeat."""
        training = self.training
        status = mb.NodeStatus(
            state=self.state,
            steps=training.steps,
            tokens=training.tokens,
            tokens_per_second=training.tokens_per_second,
            step_seconds=training.step_seconds,
            train_loss=training.train_loss,
            data_stall_seconds=training.data_stall_seconds,
            data_stall_share=training.data_stall_share,
            data_bytes_fetched=training.data_bytes_fetched,
            data_bytes_trained=training.data_bytes_trained,
            samples_repeated=training.samples_repeated,
            head_round=self.head_round,
            head_hash=self.head_hash,
            plan_version=self.plan_version,
            averaging_bytes_sent=averaging_bytes,
            averaging_bytes_fp32=self.counters.bytes_fp32,
            other_bytes_sent=other_bytes,
            rounds_joined=self.counters.joined,
            detail=f"waits for training text: {training.data_trouble}" if training.data_trouble else self.detail,
        )
        if training.busy_seconds_per_token and self.facts is not None and self.facts.span is not None:
            status.computed.layers.first, status.computed.layers.last = self.facts.span
            status.computed.seconds_per_token = training.busy_seconds_per_token
        status.missing_stage = self.route.unreachable_neighbour if self.route is not None else ""
        status.reason = self._reason(status)
        if self.local_state is not None:
            _report_layers(status, self.local_state)
        return status

    def _reason(self, status: mb.NodeStatus) -> mb.NodeReason:
        """The reason why the node does not train or is slow."""
        if self.state == mb.NODE_STATE_TRAINING:
            if self.training.data_trouble:
                return mb.NODE_REASON_WAITS_FOR_TEXT
            if status.missing_stage:
                return mb.NODE_REASON_WAITS_FOR_STAGE
            if status.data_stall_share >= SLOW_TEXT_SHARE:
                return mb.NODE_REASON_SLOW_TEXT
        return self.reason

    @property
    def training(self) -> TrainerStatus:
        """The last status of the newest trainer; zeros if there was no trainer."""
        return self.trainer.status if self.trainer else TrainerStatus()

    def to_json(self, averaging_bytes: int, other_bytes: int) -> dict[str, Any]:
        """Build the part of `atoll status --output json` that is about training."""
        message = self.to_proto(averaging_bytes, other_bytes)
        return {
            "state": STATE_NAMES[message.state],
            "detail": message.detail,
            "reason": reason_words(message.reason),
            "device": self.facts.device_name if self.facts else "",
            "steps": message.steps,
            "tokens": message.tokens,
            "tokens_per_second": round(message.tokens_per_second, 1),
            "step_seconds": round(message.step_seconds, 4),
            "train_loss": round(message.train_loss, 4),
            "validation_loss": self.validation_loss,
            "data_stall_seconds": round(message.data_stall_seconds, 3),
            **self._data_json(),
            "samples_repeated": message.samples_repeated,
            "round": self.head_round,
            "committed_tokens": self.committed_tokens,
            "plan_version": self.plan_version,
            "members": self.members,
            "rounds_joined": self.counters.joined,
            "rounds_committed": self.counters.committed,
            "rounds_witnessed": self.counters.witnessed,
            "rounds_abandoned": self.counters.abandoned,
            "rounds_left_out": self.counters.left_out,
            "averaging_bytes_sent": averaging_bytes,
            "averaging_bytes_fp32": self.counters.bytes_fp32,
            "other_bytes_sent": other_bytes,
            "trainer_restarts": self.trainer_restarts,
            "anchor": self.anchor_path,
            **self._route_json(),
        }

    def _data_json(self) -> dict[str, Any]:
        """Rows about the training text: how much was fetched, and from where."""
        training = self.training
        fetched, trained = training.data_bytes_fetched, training.data_bytes_trained
        return {
            "data_stall_share": round(training.data_stall_share, 4),
            "data_bytes_fetched": fetched,
            "data_bytes_trained": trained,
            "data_fetched_per_trained": round(fetched / trained, 3) if trained else None,
            "data_blocks": BlockCounts(*training.data_blocks)._asdict(),
            "sources": self._source_rows(),
            "data_mirrors": [MirrorReport(*row)._asdict() for row in training.data_mirrors],
        }

    def _source_rows(self) -> list[dict[str, Any]]:
        """One row per source: tokens that the run trained up to the head, and this node's held-out loss on it."""
        progress = self.facts.mixture_progress if self.facts is not None else None
        trained = progress.at(self.data_position) if progress is not None and self.data_position is not None else ()
        rows: dict[str, dict[str, Any]] = {row.name: row._asdict() for row in trained}
        for name, loss in self.source_losses.items():
            rows.setdefault(name, {"name": name})["validation_loss"] = loss
        return list(rows.values())

    @property
    def warnings(self) -> list[str]:
        """Warnings for the owner."""
        left_out = self.facts.text_left_out if self.facts is not None else ""
        return [f"training text: {left_out}"] if left_out else []

    def _route_json(self) -> dict[str, Any]:
        """Rows about the layers that this node holds and the route of which they are a stage."""
        place, training = self.route.place if self.route is not None else None, self.training
        return {
            "layers": list(self.facts.span) if self.facts is not None and self.facts.span is not None else None,
            "route": self.route.route_index if self.route is not None else None,
            "stage": place.stage if place is not None else None,
            "stages": place.stages if place is not None else None,
            "route_ready": training.route_ready,
            "route_trouble": training.route_trouble,
            "route_incarnations": self.route.incarnations if self.route is not None else 0,
            "flushes_aborted": training.flushes_aborted,
        }


def _report_layers(status: mb.NodeStatus, local_state: LocalState) -> None:
    """Add the layers that are prefetched, refused and lost."""
    prefetcher = local_state.prefetcher
    status.lost_layers.extend(sorted(local_state.lost))
    if prefetcher.span:
        status.prepared.first, status.prepared.last = prefetcher.span.start, prefetcher.span.stop - 1
        status.prepared_round = prefetcher.round
    if prefetcher.refused:
        status.refused.first, status.refused.last = prefetcher.refused.start, prefetcher.refused.stop - 1
