"""A span on another device than the first of a node: it has no route, and does its part of what the first one does."""

from __future__ import annotations

from atoll.core.clock import Clock
from atoll.core.run_spec import RunSpec
from atoll.node.model.run_model import RunModel
from atoll.node.model.span import Span
from atoll.node.pipeline.sharded_stage import ShardedStage, build_sharded_stage
from atoll.node.training.corpus import Corpus
from atoll.node.training.device_group import DeviceGroup
from atoll.node.training.learning_rate import learning_rate
from atoll.node.training.loader import Loader
from atoll.node.training.replica import Replica


class RankStage(Replica):
    """Weights and rounds as those of `StageLoop`; data and flushes are the first device's."""

    def __init__(
        self, spec: RunSpec, corpus: Corpus, span: Span, run: RunModel, group: DeviceGroup, clock: Clock
    ) -> None:
        """Raises `InvalidRequest`, `ConfigError`."""
        self.span, self.run = span, run
        self.stage: ShardedStage = build_sharded_stage(spec, run, span, group)
        super().__init__(spec, self.stage.model.weights, Loader(corpus, spec.run.seed, 1, clock))
        self.stage.anchor = self._anchor

    def set_committed_tokens(self, committed_tokens: int) -> None:
        super().set_committed_tokens(committed_tokens)
        self.stage.set_learning_rate(learning_rate(self.spec, committed_tokens))
        self.stage.anchor_tokens = committed_tokens
