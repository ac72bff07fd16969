"""What this node is doing, for its owner, the coordinator, and logs: one object, filled in as things happen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from atoll.node.local_state import LocalState
from atoll.node.rounds.engine import RoundCounters
from atoll.node.route_membership import RouteMembership
from atoll.node.trainer.messages import Loading
from atoll.node.trainer.trainer import Trainer, TrainerFacts
from atoll.v1 import membership_pb2 as mb

STATE_NAMES = {
    number: name.removeprefix("NODE_STATE_").lower().replace("_", "-") for name, number in mb.NodeState.items()
}


@dataclass
class LiveStatus:
    """Mutable on purpose: the session writes, heartbeats and the local API read."""

    state: mb.NodeState = mb.NODE_STATE_JOINING
    detail: str = "starting"
    facts: TrainerFacts | None = None
    trainer: Trainer | None = None  # the newest, also after it was stopped
    counters: RoundCounters = field(default_factory=RoundCounters)
    head_round: int = 0
    head_hash: bytes = b""
    committed_tokens: int = 0
    plan_version: int = 0
    members: int = 0
    validation_loss: float | None = None
    anchor_path: str = ""
    trainer_restarts: int = 0
    route: RouteMembership | None = None
    holdings: LocalState | None = None

    def enter(self, state: mb.NodeState, detail: str) -> None:
        """Move on, and say why in one sentence."""
        self.state, self.detail = state, detail

    def show_loading_progress(self, so_far: Loading) -> None:
        """How far a trainer is that loads."""
        if so_far.tokens and self.state in (mb.NODE_STATE_JOINING, mb.NODE_STATE_CATCHING_UP):
            self.detail = f"reading the corpus: {so_far.tokens:,} tokens so far"

    def to_proto(self, averaging_bytes: int, other_bytes: int) -> mb.NodeStatus:
        """What goes into a heartbeat."""
        training = self.trainer.status if self.trainer else None
        status = mb.NodeStatus(
            state=self.state,
            steps=training.steps if training else 0,
            tokens=training.tokens if training else 0,
            tokens_per_second=training.tokens_per_second if training else 0.0,
            step_seconds=training.step_seconds if training else 0.0,
            train_loss=training.train_loss if training else 0.0,
            data_stall_seconds=training.data_stall_seconds if training else 0.0,
            samples_repeated=training.samples_repeated if training else 0,
            head_round=self.head_round,
            head_hash=self.head_hash,
            plan_version=self.plan_version,
            averaging_bytes_sent=averaging_bytes,
            averaging_bytes_fp32=self.counters.bytes_fp32,
            other_bytes_sent=other_bytes,
            rounds_joined=self.counters.joined,
            detail=self.detail,
        )
        if training and training.busy_seconds_per_token and self.facts is not None and self.facts.span is not None:
            status.computed.layers.first, status.computed.layers.last = self.facts.span
            status.computed.seconds_per_token = training.busy_seconds_per_token
        status.missing_stage = self.route.unreachable_neighbour if self.route is not None else ""
        prepared = self.holdings.prefetcher.span if self.holdings is not None else range(0)
        refused = self.holdings.prefetcher.refused if self.holdings is not None else range(0)
        status.lost_layers.extend(sorted(self.holdings.lost) if self.holdings is not None else ())
        if prepared:
            status.prepared.first, status.prepared.last = prepared.start, prepared.stop - 1
            status.prepared_round = self.holdings.prefetcher.round if self.holdings is not None else 0
        if refused:
            status.refused.first, status.refused.last = refused.start, refused.stop - 1
        return status

    def to_json(self, averaging_bytes: int, other_bytes: int) -> dict[str, Any]:
        """What `atoll status --output json` prints."""
        message = self.to_proto(averaging_bytes, other_bytes)
        return {
            "state": STATE_NAMES[message.state],
            "detail": self.detail,
            "device": self.facts.device_name if self.facts else "",
            "steps": message.steps,
            "tokens": message.tokens,
            "tokens_per_second": round(message.tokens_per_second, 1),
            "step_seconds": round(message.step_seconds, 4),
            "train_loss": round(message.train_loss, 4),
            "validation_loss": self.validation_loss,
            "data_stall_seconds": round(message.data_stall_seconds, 3),
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

    def _route_json(self) -> dict[str, Any]:
        """The layers that are held, and the route that they are a stage of."""
        place = self.route.place if self.route is not None else None
        training = self.trainer.status if self.trainer else None
        return {
            "layers": list(self.facts.span) if self.facts is not None and self.facts.span is not None else None,
            "route": self.route.number if self.route is not None else None,
            "stage": place.stage if place is not None else None,
            "stages": place.stages if place is not None else None,
            "route_ready": training.route_ready if training else False,
            "route_trouble": training.route_trouble if training else "",
            "route_incarnations": self.route.incarnations if self.route is not None else 0,
            "flushes_aborted": training.flushes_aborted if training else 0,
        }
