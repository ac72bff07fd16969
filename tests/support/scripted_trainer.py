"""A trainer without a model: its weights walk at random, and it keeps the books that a real one keeps."""

import asyncio
from dataclasses import dataclass

import torch

from atoll.core.data_position import SampleRange, drop_samples
from atoll.core.errors import InvalidTransition
from atoll.node.trainer.messages import Loss, TrainerStatus
from atoll.node.training.progress import Progress, Snapshot
from atoll.node.training.sample_feed import SampleNumbers

STEP_TOKENS, STEP_SAMPLES = 100, 2


@dataclass(frozen=True)
class Facts:
    layer_offsets: tuple[int, ...]


class ScriptedTrainer:
    """Holds `layers` of a model with these offsets. A step every hundredth of a second."""

    def __init__(self, offsets: tuple[int, ...], layers: range, seed: int) -> None:
        elements = offsets[layers.stop] - offsets[layers.start]
        self.facts = Facts(offsets)
        self.anchor, self.pseudo_gradient = torch.zeros(elements), torch.zeros(elements)
        self.weights_E, self.ranges = torch.zeros(elements), ()
        self._known_E, self._snapshot_E, self._part = torch.zeros(elements), torch.zeros(0), slice(0, 0)
        self._random = torch.Generator().manual_seed(seed)
        self._progress = Progress()
        self._snapped = False
        self._stepping: asyncio.Task[None] | None = None

    @property
    def status(self) -> TrainerStatus:
        return TrainerStatus(tokens=self._progress.tokens_total, step_seconds=0.01, training=True)

    @property
    def ahead(self) -> tuple[SampleRange, ...]:
        """The samples that it trains next."""
        return drop_samples(self.ranges, self._progress.samples)

    async def load(self, *, ranges, committed_tokens) -> None:
        for vector_E in (self.weights_E, self._known_E):
            vector_E.copy_(self.anchor)
        self.ranges, self._snapped = ranges, False
        self._progress.reset()

    async def train(self) -> None:
        self._stepping = asyncio.create_task(self._walk())

    async def _walk(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self.weights_E += 1e-3 * torch.randn(self.weights_E.shape, generator=self._random)
            fresh = STEP_SAMPLES if self.ranges else 0
            self._progress.add(STEP_TOKENS, SampleNumbers((), fresh))

    async def snapshot(self, start: int, end: int) -> Snapshot:
        self._part, self._snapped = slice(start, end), True
        self._snapshot_E = self.weights_E[self._part].clone()
        self.pseudo_gradient[self._part] = self._known_E[self._part] - self._snapshot_E
        return self._progress.mark_snapshot(start, end)

    async def apply(self, *, ranges, committed_tokens, moved=None) -> None:
        if not self._snapped:
            raise InvalidTransition("the trainer was told to apply an anchor without a snapshot")
        self._known_E[self._part] = self._snapshot_E
        self._move(moved)
        self._progress.commit_snapshot()
        self.ranges, self._snapped = ranges, False

    async def rebase(self, *, ranges, committed_tokens, consumed_samples=0, moved=None) -> None:
        self._move(moved)
        self._progress.discard_snapshot()
        self._progress.subtract_consumed(consumed_samples)
        self.ranges, self._snapped = ranges, False

    def _move(self, moved) -> None:
        part = slice(*moved) if moved is not None else slice(None)
        self.weights_E[part] += self.anchor[part] - self._known_E[part]
        self._known_E[part] = self.anchor[part]

    async def set_ranges(self, ranges) -> None:
        self.ranges = ranges

    async def discard(self) -> None:
        self._snapped = False
        self._progress.discard_snapshot()

    async def evaluate(self) -> Loss:
        return Loss(0.0)

    async def stop(self) -> None:
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)
