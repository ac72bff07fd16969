"""One inner loop by itself: a node alone, or with a K-fold batch synchronous data parallelism among K nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.run_spec import RunSpec
from atoll.node.data.corpus import Corpus
from atoll.node.training.loop import InnerLoop


def train_alone(spec: RunSpec, corpus: Corpus, steps: int) -> float:
    """One inner loop for `steps` steps; held-out loss. With a K-fold batch this *is* synchronous DDP:
    the mean gradient of K equal batches is the gradient of their union."""
    loop = InnerLoop(spec, corpus, "cpu")
    train_on(loop, steps)
    loss = loop.evaluate(loop.weights_E)
    loop.close()
    return loss


def train_on(loop: InnerLoop, steps: int, weights_E: Tensor | None = None) -> None:
    """`steps` steps from `weights_E`, or from where a run begins."""
    spec = loop.spec
    if weights_E is None:
        weights_E = torch.empty(loop.layout.elements)
        loop.initialise_into(weights_E)
    samples = steps * spec.optimizer.micro_batch_samples * spec.optimizer.accumulate
    loop.load(weights_E, ranges=((0, samples),))
    for _ in range(steps):
        loop.step()
        loop.set_committed_tokens(loop.progress.tokens_total)
