"""A node's copy of the model, whole or a span, and the operations of outer rounds on it.

    load(anchor) → … → snapshot() → … → apply(new anchor) | rebase(new anchor) | discard()

`snapshot` fixes the pseudo-gradient (anchor − weights); training continues while peers average it. `apply` takes the
new anchor and adds the progress made meanwhile ("carry"). `rebase` moves all progress to an anchor that others made.
`discard` forgets an abandoned round and keeps all progress (docs/explain/architecture.md).

`training/loop.py` (all layers) and `pipeline/stage_loop.py` (a span) train the weights. All vectors are fp32 and
contain the held layers. Pseudo-gradient and carry use only elementwise operations that are rounded one by one, as does
everything that other nodes see. On a node with several devices each device has its shards (`model/local_weights.py`).

Shape suffix: E all elements of the held layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.data_position import SampleRange
from atoll.core.errors import WeightsNotFinite
from atoll.core.model_memory import CHUNK_ELEMENTS
from atoll.core.run_spec import RunSpec
from atoll.node.data.data_report import DataReport
from atoll.node.exchange.codecs import is_finite
from atoll.node.model.local_weights import ALL, Weights
from atoll.node.training.loader import Loader
from atoll.node.training.progress import Progress, Snapshot
from atoll.node.training.sample_feed import SampleFeed


@dataclass(frozen=True)
class StepResult:
    """The result of one inner step. `samples` includes repeated ones."""

    loss: float  # nats per token, before the step; 0 on a stage that does not compute it
    tokens: int
    samples: int


class Replica:
    """Weights, anchor, snapshot, progress and data of one node. Call `close` at the end: the loader owns a thread."""

    def __init__(self, spec: RunSpec, weights: Weights, loader: Loader) -> None:
        self.spec, self.weights, self._loader = spec, weights, loader
        self.progress = Progress()
        self.committed_tokens = 0
        self._anchor = torch.zeros(weights.elements, device=weights.device)  # elements on this device
        self._snapshot: Tensor | None = None
        self._snapshot_part = ALL

    def load(self, anchor_E: Tensor, *, ranges: Sequence[SampleRange] = (), committed_tokens: int = 0) -> None:
        """Set the weights to an anchor and reset progress. The optimiser's state is kept if it exists."""
        self._anchor.copy_(self.weights.local_values(anchor_E))
        with self.weights.modify() as weights:
            weights.copy_(self._anchor)
        self._snapshot = None
        self.progress.reset()
        self._loader.restart(SampleFeed(ranges))
        self.set_committed_tokens(committed_tokens)

    def snapshot(self, part: slice = ALL) -> Snapshot:
        """Fix the progress since the anchor, in `part` of the elements.

        A second snapshot replaces the first.
        """
        self._snapshot, self._snapshot_part = self.weights.read(part), part
        return self.progress.mark_snapshot(part.start, part.stop)

    def pseudo_gradient_into(self, out_E: Tensor) -> None:
        """Write anchor − weights as of the snapshot into the snapshot's part of a host vector.

        It works in chunks: the device has no memory for one more copy (`FLAT_COPIES`). Raises `WeightsNotFinite`; such
        weights do not recover, so the node must start again from the anchor.
        """
        snapshot, done = self._require_snapshot(), 0
        start, end, _ = self._snapshot_part.indices(len(out_E))
        for first in range(start, end, CHUNK_ELEMENTS):
            chunk = slice(first, min(first + CHUNK_ELEMENTS, end))
            anchor = self._anchor_of(chunk)
            difference = torch.sub(anchor, snapshot[done : done + len(anchor)])
            if not is_finite(difference):
                raise WeightsNotFinite(
                    "the weights contain NaN or infinity: the hardware made an error, or the run diverged"
                )
            self.weights.write_to(difference, out_E, chunk)
            del difference  # before the next one
            done += len(anchor)

    def apply(
        self,
        new_anchor_E: Tensor,
        *,
        ranges: Sequence[SampleRange] | None = None,
        committed_tokens: int | None = None,
        moved: slice = ALL,
    ) -> None:
        """Carry: weights := new anchor + (weights − weights at the snapshot); progress since then stays.

        `ranges` are those not consumed as of the snapshot; samples trained since are skipped. None keeps the feed.
        `moved` contains the snapshot's part and all other elements in which the new anchor differs; the latter are
        rebased.
        """
        self._anchor_of(self._snapshot_part).copy_(self._require_snapshot())
        self._rebase_onto(new_anchor_E, moved)
        self._snapshot = None
        self.progress.commit_snapshot()
        if ranges is not None:
            self.set_ranges(ranges)
        if committed_tokens is not None:
            self.set_committed_tokens(committed_tokens)

    def rebase(
        self,
        new_anchor_E: Tensor,
        *,
        ranges: Sequence[SampleRange],
        committed_tokens: int,
        consumed_samples: int = 0,
        moved: slice = ALL,
    ) -> None:
        """Rebase: weights := new anchor + (weights − old anchor); all progress stays.

        This follows a round that was committed without this node; the progress enters the next round as a
        pseudo-gradient. `ranges` are those not consumed as of the old anchor. They lack the `consumed_samples` samples
        that this node contributed to the round before it restarted. `moved` contains the elements in which the new
        anchor differs.
        """
        self._rebase_onto(new_anchor_E, moved)
        self.discard()
        self.progress.subtract_consumed(consumed_samples)
        self.set_ranges(ranges)
        self.set_committed_tokens(committed_tokens)

    def discard(self) -> None:
        """Forget the snapshot of an abandoned round and keep all progress."""
        self._snapshot = None
        self.progress.discard_snapshot()

    def _rebase_onto(self, new_anchor_E: Tensor, moved: slice) -> None:
        """Move the weights with the anchor, so that their difference stays the same."""
        anchor = self._anchor_of(moved)
        with self.weights.modify(moved) as weights:
            weights.sub_(anchor)
            anchor.copy_(self.weights.local_values(new_anchor_E, moved))
            weights.add_(anchor)

    def set_ranges(self, ranges: Sequence[SampleRange]) -> None:
        """Set new ranges, as of the last applied snapshot: fresh samples consumed since then are skipped."""
        self._loader.restart(SampleFeed(ranges, skip=self.progress.samples))

    def set_committed_tokens(self, committed_tokens: int) -> None:
        """Set the run's committed tokens, which the learning rate follows."""
        self.committed_tokens = committed_tokens

    @property
    def has_data(self) -> bool:
        """True if the node has ranges to train."""
        return not self._loader.empty

    @property
    def data_stall_seconds(self) -> float:
        """Seconds that steps waited for data."""
        return self._loader.stall_seconds

    @property
    def data_report(self) -> DataReport:
        """Counts of the training text that was read, by place."""
        return self._loader.report

    @property
    def data_trouble(self) -> str:
        """Why the next batch is late; empty while batches arrive."""
        return self._loader.trouble

    def await_data(self, seconds: float) -> bool:
        """Wait for the next batch, and return whether it has arrived."""
        return self._loader.wait(seconds)

    def close(self) -> None:
        """End the loader's thread."""
        self._loader.close()

    def _anchor_of(self, part: slice) -> Tensor:
        return self._anchor[self.weights.local_slice(part)]

    def _require_snapshot(self) -> Tensor:
        if self._snapshot is None:
            raise ValueError("there is no snapshot; call `snapshot` first")
        return self._snapshot
