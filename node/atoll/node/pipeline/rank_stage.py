"""A rank's part of a span, on a node's second or later device. It has no route: rank 0 sends `RankOrder`s."""

from __future__ import annotations

from atoll.core.clock import Clock
from atoll.core.run_spec import RunSpec
from atoll.node.data.sharded_corpus import TrainingCorpus
from atoll.node.model.run_model import RunModel
from atoll.node.model.span import Span
from atoll.node.pipeline.sharded_stage import ShardedStage, build_sharded_stage
from atoll.node.training.device_group import DeviceGroup
from atoll.node.training.learning_rate import learning_rate
from atoll.node.training.loader import Loader
from atoll.node.training.replica import Replica


class RankStage(Replica):
    """Weights and outer rounds as in `StageLoop`. Only rank 0 has the data and the flushes."""

    def __init__(
        self, spec: RunSpec, corpus: TrainingCorpus, span: Span, run: RunModel, group: DeviceGroup, clock: Clock
    ) -> None:
        """Load this device's part of the span. Raises `InvalidRequest`, `ConfigError`."""
        self.span, self.run = span, run
        self.stage: ShardedStage = build_sharded_stage(spec, run, span, group)
        super().__init__(spec, self.stage.model.weights, Loader(corpus, 1, clock))
        self.stage.anchor = self._anchor

    def set_committed_tokens(self, committed_tokens: int) -> None:
        super().set_committed_tokens(committed_tokens)
        self.stage.set_learning_rate(learning_rate(self.spec, committed_tokens))
        self.stage.anchor_tokens = committed_tokens
