"""Execution of orders on the model of a trainer process.

Rank 0 executes the daemon's orders (`session.py`); the other ranks execute the same orders, which rank 0 forwards
(`rank_process.py`).
"""

from __future__ import annotations

from pathlib import Path

import torch

from atoll.core import log
from atoll.core.errors import InvalidTransition, ModelTooLarge
from atoll.node.data.held_out import HeldOutLoss
from atoll.node.pipeline.rank_stage import RankStage
from atoll.node.pipeline.stage_loop import StageLoop
from atoll.node.system.shared_vectors import allocate_vector, map_vector
from atoll.node.trainer import messages
from atoll.node.trainer.loading import TrainerState
from atoll.node.training import optimizer_file
from atoll.node.training.device import limit_device_memory, lock_host_pages
from atoll.node.training.device_group import combined_facts
from atoll.node.training.loop import InnerLoop
from atoll.node.training.progress import Snapshot


class ModelOrders:
    """The model of this process and the shared vectors of the held elements."""

    def __init__(self, state: TrainerState, config: messages.TrainerConfig, anchor_fd: int, gradient_fd: int) -> None:
        """Allocate and map the vectors behind the two descriptors. Raises `ModelTooLarge`."""
        self.state = state
        self.anchor_loaded = False
        self._has_snapshot, self._memory_bytes = False, config.memory_bytes
        for descriptor in (anchor_fd, gradient_fd):
            allocate_vector(descriptor, state.elements)
        self.anchor_E, self.gradient_E = (map_vector(fd, state.elements) for fd in (anchor_fd, gradient_fd))
        for vector in (self.anchor_E, self.gradient_E):
            if state.device.type == "cuda" and state.elements and not lock_host_pages(vector, state.device):
                log.get("trainer").info("host_pages_not_locked", bytes=vector.nbytes)

    def execute(self, order: messages.ModelOrder) -> messages.Answer:
        """Execute an order. Raises `InvalidTransition`, `ModelTooLarge`."""
        match order:
            case messages.Evaluate():
                whole = self._whole_model("or the driver of a route evaluates")
                return loss_message(whole.held_out_loss(self.anchor_E))
            case messages.Audit(own, other, start, end):
                check_allowed(self.anchor_loaded, "audit an update before an anchor was loaded")
                check_allowed(not self._has_snapshot, "audit an update in the place of its own")
                whole = self._whole_model("audits updates")
                found = whole.audit(self.anchor_E, self.gradient_E, own, other, slice(start, end))
                return messages.AuditGains(*found)
            case messages.Generate(prompt, tokens, seed):
                whole = self._whole_model("generates text")
                return messages.Text(whole.generate(self.anchor_E, prompt.encode(), tokens, seed))
            case messages.TakeSnapshot(start, end):
                return self._take_snapshot(self.require_model(), slice(start, end))
            case messages.SetLimits():
                self._limit(order)
            case _:
                self._execute_round_order(self.require_model(), order)
        return messages.Done()

    def _execute_round_order(self, loop: InnerLoop | StageLoop | RankStage, order: messages.ModelOrder) -> None:
        match order:
            case messages.Load(ranges, committed_tokens):
                loop.load(self.anchor_E, ranges=ranges, committed_tokens=committed_tokens)
                self.anchor_loaded, self._has_snapshot = True, False
            case messages.Apply(ranges, committed_tokens, moved):
                check_allowed(self._has_snapshot, "apply an anchor without a snapshot")
                loop.apply(self.anchor_E, ranges=ranges, committed_tokens=committed_tokens, moved=slice(*moved))
                self._has_snapshot = False
            case messages.Rebase(ranges, committed_tokens, moved, consumed_samples):
                check_allowed(self.anchor_loaded, "rebase before an anchor was loaded")
                loop.rebase(
                    self.anchor_E,
                    ranges=ranges,
                    committed_tokens=committed_tokens,
                    consumed_samples=consumed_samples,
                    moved=slice(*moved),
                )
                self._has_snapshot = False
            case messages.SetRanges(ranges):
                check_allowed(self.anchor_loaded, "take ranges before an anchor was loaded")
                loop.set_ranges(ranges)
            case messages.Discard():
                loop.discard()
                self._has_snapshot = False

    def _take_snapshot(self, loop: InnerLoop | StageLoop | RankStage, part: slice) -> Snapshot:
        check_allowed(self.anchor_loaded, "take a snapshot before an anchor was loaded")
        snapshot = loop.snapshot(part)
        loop.pseudo_gradient_into(self.gradient_E)
        self._has_snapshot = True
        return snapshot

    def move_optimizer(self, order: messages.KeptOptimizer) -> None:
        """Write the inner optimiser's state to a file, or read it.

        Raises the errors of `training/optimizer_file.py`.
        """
        loop, spec = self.require_model(), self.state.spec
        optimizer = loop.optimizer if isinstance(loop, InnerLoop | StageLoop) else None
        if optimizer is None:
            raise InvalidTransition("a trainer with several devices does not keep its optimiser's state")
        owner = {
            "run": spec.run.name,
            "model": spec.model_hash(),
            "layers": str(self.state.span),
            "optimizer": spec.optimizer.name,
        }
        move = optimizer_file.keep if isinstance(order, messages.KeepOptimizer) else optimizer_file.restore
        move(optimizer, owner, Path(order.path))

    def _limit(self, limit: messages.SetLimits) -> None:
        facts = combined_facts(self.state.devices, limit.vram_fraction, self._memory_bytes)
        self.state.check_fits(facts)
        limit_device_memory(self.state.device, facts, limit.vram_fraction)
        self.state.facts = facts
        torch.set_num_threads(max(1, limit.cpu_threads // len(self.state.devices)))

    def require_model(self) -> InnerLoop | StageLoop | RankStage:
        """The loop with the held layers. Raises `ModelTooLarge` when the trainer holds none."""
        if self.state.loop is None:
            raise ModelTooLarge(
                "this trainer holds no layers: the model is too large for its device",
                "wait for a plan that gives this node a span",
            )
        return self.state.loop

    def _whole_model(self, does: str) -> InnerLoop:
        if not isinstance(self.state.loop, InnerLoop):
            raise InvalidTransition(f"only a trainer with the whole model {does}")
        return self.state.loop


def loss_message(found: HeldOutLoss) -> messages.Loss:
    """Convert a held-out loss to an answer."""
    return messages.Loss(found.value, tuple((part.name, part.loss, part.windows) for part in found.sources))


def check_allowed(holds: bool, what: str) -> None:
    """Raise `InvalidTransition` unless the condition holds."""
    if not holds:
        raise InvalidTransition(f"the trainer was told to {what}")
