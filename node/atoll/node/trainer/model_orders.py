"""What orders do to the model that a trainer's process holds, whoever gives them: the daemon, or the first process."""

from __future__ import annotations

import torch

from atoll.core.errors import InvalidTransition, ModelTooLarge
from atoll.node.pipeline.rank_stage import FollowingStage
from atoll.node.pipeline.stage_loop import StageLoop
from atoll.node.system.shared_vectors import allocate_vector, map_vector
from atoll.node.trainer import messages as ms
from atoll.node.trainer.loading import Loaded
from atoll.node.training.device import limit_memory
from atoll.node.training.device_group import facts_of
from atoll.node.training.loop import InnerLoop

OF_THE_MODEL = (
    ms.Load,
    ms.TakeSnapshot,
    ms.Apply,
    ms.Rebase,
    ms.SetRanges,
    ms.Discard,
    ms.Evaluate,
    ms.Generate,
    ms.Limit,
)


class ModelOrders:
    """The model, and the shared vectors of the elements that the node holds."""

    def __init__(self, here: Loaded, config: ms.TrainerConfig, anchor_fd: int, gradient_fd: int) -> None:
        """Raises `ModelTooLarge`."""
        self.here = here
        self.loaded = False  # an anchor was
        self._snapped, self._memory_bytes = False, config.memory_bytes
        for descriptor in (anchor_fd, gradient_fd):
            allocate_vector(descriptor, here.elements)
        self.anchor_E, self.gradient_E = (map_vector(fd, here.elements) for fd in (anchor_fd, gradient_fd))

    def carry_out(self, order: ms.Message) -> ms.Answer:
        """One of `OF_THE_MODEL`. Raises `InvalidTransition`, `ModelTooLarge`."""
        match order:
            case ms.Evaluate():
                return ms.Loss(self._whole_model("or the driver of a route evaluates").evaluate(self.anchor_E))
            case ms.Generate(prompt, tokens, seed):
                whole = self._whole_model("generates text")
                return ms.Text(whole.generate(self.anchor_E, prompt.encode(), tokens, seed))
            case ms.Limit():
                self._limit(order)
            case _:
                return self._carry_out_of_rounds(self.model, order)
        return ms.Done()

    def _carry_out_of_rounds(self, loop: InnerLoop | StageLoop | FollowingStage, order: ms.Message) -> ms.Answer:
        match order:
            case ms.Load(ranges, committed_tokens):
                loop.load(self.anchor_E, ranges=ranges, committed_tokens=committed_tokens)
                self.loaded, self._snapped = True, False
            case ms.TakeSnapshot(start, end):
                require(self.loaded, "take a snapshot before an anchor was loaded")
                return self._take_snapshot(loop, slice(start, end))
            case ms.Apply(ranges, committed_tokens, moved):
                require(self._snapped, "apply an anchor without a snapshot")
                loop.apply(self.anchor_E, ranges=ranges, committed_tokens=committed_tokens, moved=slice(*moved))
                self._snapped = False
            case ms.Rebase(ranges, committed_tokens, moved, spent):
                require(self.loaded, "rebase before an anchor was loaded")
                part = slice(*moved)
                loop.rebase(self.anchor_E, ranges=ranges, committed_tokens=committed_tokens, spent=spent, moved=part)
                self._snapped = False
            case ms.SetRanges(ranges):
                require(self.loaded, "take ranges before an anchor was loaded")
                loop.set_ranges(ranges)
            case ms.Discard():
                loop.discard()
                self._snapped = False
            case _:
                raise InvalidTransition(f"the trainer has no order {type(order).__name__}")
        return ms.Done()

    def _take_snapshot(self, loop: InnerLoop | StageLoop | FollowingStage, part: slice) -> ms.Taken:
        snapshot = loop.snapshot(part)
        loop.pseudo_gradient_into(self.gradient_E)
        self._snapped = True
        return ms.Taken(snapshot.tokens, snapshot.samples, snapshot.steps, snapshot.fragment_tokens)

    def _limit(self, limit: ms.Limit) -> None:
        facts = facts_of(self.here.devices, limit.vram_fraction, self._memory_bytes)
        self.here.check_fits(facts)
        limit_memory(self.here.device, facts, limit.vram_fraction)
        self.here.facts = facts
        torch.set_num_threads(max(1, limit.cpu_threads // len(self.here.devices)))

    @property
    def model(self) -> InnerLoop | StageLoop | FollowingStage:
        """Raises `ModelTooLarge` where no layers are held."""
        if self.here.loop is None:
            raise ModelTooLarge("this trainer holds no layers: the model is too large for it", "give it a span")
        return self.here.loop

    def _whole_model(self, does: str) -> InnerLoop:
        if not isinstance(self.here.loop, InnerLoop):
            raise InvalidTransition(f"only a trainer with the whole model {does}")
        return self.here.loop


def require(holds: bool, what: str) -> None:
    """Raises `InvalidTransition`."""
    if not holds:
        raise InvalidTransition(f"the trainer was told to {what}")
