"""Loading of a trainer process: run spec, tokenizer, memory check, corpus, model, so that cheap checks fail first.

`load_trainer_state` returns a `TrainerState`. Its `loop` is an `InnerLoop` for the whole model, a `StageLoop` for a
span on a node's first device, and a `RankStage` for a span on its other devices. A node that cannot hold the whole
model and has no span yet gets no loop: it measures its layer times and waits for a plan that gives it a span.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.core import log
from atoll.core.built_in_shape import FP32_BYTES
from atoll.core.clock import Clock
from atoll.core.errors import CorpusError
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.data.corpus import load_corpus
from atoll.node.data.fetcher import OnTrouble, no_trouble_callback
from atoll.node.data.heartbeat import heartbeat
from atoll.node.data.open_corpus import CacheFolder, OpenedCorpus, open_corpus
from atoll.node.data.peer_mirror import PeerMirror
from atoll.node.data.sharded_corpus import ShardedCorpus, TrainingCorpus
from atoll.node.data.tokenise import OnProgress, no_progress_callback
from atoll.node.model.run_model import RunModel, run_model
from atoll.node.model.span import Span
from atoll.node.model.tokenizer import Tokenizer, load_tokenizer
from atoll.node.pipeline.rank_stage import RankStage
from atoll.node.pipeline.stage_io import StageIO
from atoll.node.pipeline.stage_loop import StageLoop
from atoll.node.trainer import messages
from atoll.node.trainer.device_room import check_stage_fits, has_room, usable_facts, whole_model_bytes
from atoll.node.trainer.layer_times import LayerTimes, time_single_layers
from atoll.node.trainer.layer_times_cache import LayerTimesCache, key_of
from atoll.node.training.device import (
    DeviceFacts,
    check_fits,
    device_facts,
    limit_host_memory,
    model_too_large,
    warm_up,
    working_precision,
)
from atoll.node.training.device_group import DeviceGroup, Rendezvous
from atoll.node.training.loop import InnerLoop


@dataclass
class TrainerState:
    """The loaded parts of a trainer process."""

    spec: RunSpec
    run: RunModel
    corpus: TrainingCorpus
    clock: Clock
    facts: DeviceFacts
    devices: Sequence[torch.device]  # of all processes of this trainer, by rank
    device: torch.device  # of this process
    times: LayerTimes
    loop: InnerLoop | StageLoop | RankStage | None  # None: no layers

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last held layer; None without layers."""
        if isinstance(self.loop, StageLoop):
            return self.loop.span.first, self.loop.span.last
        return None if self.loop is None else (0, self.run.architecture.layers - 1)

    @property
    def elements(self) -> int:
        """Elements of the held layers."""
        if isinstance(self.loop, InnerLoop):
            return self.loop.layout.elements
        return 0 if self.loop is None else self.loop.stage.model.trained_layout.elements

    def check_fits(self, facts: DeviceFacts) -> None:
        """Raise `ModelTooLarge` if the held layers do not fit devices with these facts."""
        facts = usable_facts(facts, self.spec, self.run, len(self.devices))
        if isinstance(self.loop, InnerLoop):
            check_fits(whole_model_bytes(self.spec, self.run, self.devices), facts)
        elif self.loop is not None:
            check_stage_fits(self.spec, self.run, self.loop.span, facts)

    def ready_message(self, tokens_per_second: float) -> messages.Ready:
        """Build the first answer to the daemon. `tokens_per_second` comes from `probe`."""
        whole = isinstance(self.loop, InnerLoop)
        return messages.Ready(
            layer_table_hex=self.run.table.SerializeToString().hex(),
            corpus_digest=self.corpus.digest,
            corpus_samples=self.corpus.training_samples,
            device=self.facts.device,
            device_name=self.facts.name,
            device_memory_bytes=self.facts.memory_bytes,
            device_uuid=self.facts.uuid,
            tokens_per_step=self.spec.tokens_per_step if whole else self.spec.tokens_per_flush,
            tokens_per_second=tokens_per_second,
            layer_times=self.times,
            span=self.span,
            whole_model_bytes=whole_model_bytes(self.spec, self.run, self.devices),
            **_text_facts(self.corpus),
        )

    def probe(self, scratch_E: Tensor, minimum_step_seconds: float, compute_share: float = 1.0) -> float:
        """Measure tokens per second with the held layers. Raises `ModelTooLarge` on lack of memory.

        `scratch_E` has the initial parameters of a whole model; it is zero afterwards.
        """
        if isinstance(self.loop, InnerLoop):
            try:
                return self.loop.probe(minimum_step_seconds, compute_share, scratch_E)
            except torch.OutOfMemoryError as error:
                raise model_too_large("ran out of memory in its first step", self.facts) from error
        if not isinstance(self.loop, StageLoop):
            return 0.0
        seconds = self._seconds_per_token(self.loop.span) / compute_share
        return 1 / max(seconds, minimum_step_seconds / self.spec.tokens_per_flush, 1e-12)

    def _seconds_per_token(self, span: Span) -> float:
        """Compute time of a stage: forward, backward, and a second forward (recompute) on all stages but the last."""
        times = 1 if span.last == len(self.run.table.layers) - 1 else 2
        seconds = {kind: times * forward + backward for kind, forward, backward in self.times}
        return sum(seconds[row.kind] for row in self.run.table.layers[span.first : span.last + 1])


def _text_facts(corpus: TrainingCorpus) -> dict[str, Any]:
    """Return the fields of `Ready` that describe the training text."""
    if not isinstance(corpus, ShardedCorpus):
        return {"text_left_out": corpus.report.left_out()}
    return {
        "sample_tokens": corpus.sequence_length,
        "sources": corpus.sources,
        "mixture": tuple((stage.start, stage.weights) for stage in corpus.mixture),
    }


def measure_layer_times(spec: RunSpec, run: RunModel, facts: DeviceFacts, clock: Clock) -> LayerTimes:
    """Measure one layer of each kind, with only one layer in memory at a time.

    Raises `ModelTooLarge`, `UnsupportedModel`.
    """
    precision = working_precision(spec.optimizer.precision, torch.device(facts.device))
    size = spec.optimizer.micro_batch_samples, spec.data.sequence_length
    tokens_BT = torch.zeros(size, dtype=torch.int64, device=facts.device)
    kinds: dict[str, int] = {}
    sizes = {row.name: row.parameters for row in run.table.layers}
    for number, row in enumerate(run.table.layers):
        if row.kind not in kinds:
            own = row.parameters + sum(sizes[name] for name in row.tied_to)
            check_fits(FP32_BYTES * (2 * own + row.frozen_parameters), facts, f" for a single layer, {row.name}")
            kinds[row.kind] = number

    try:
        return time_single_layers(run.architecture, kinds, tokens_BT, clock, precision)
    except torch.OutOfMemoryError as error:
        raise model_too_large("ran out of memory with a single layer", facts) from error


def _layer_times(
    config: messages.TrainerConfig, spec: RunSpec, run: RunModel, device: torch.device, clock: Clock, devices: int
) -> LayerTimes:
    """Layer times of all devices together: the times of one device, divided by the number of devices.

    This assumes perfect scaling. `NodeStatus.computed` reports the real pace during training.
    """
    if config.rank:
        return ()  # rank 0 measures
    times = _cached_layer_times(
        config, spec, run, device_facts(device, config.vram_fraction, config.memory_bytes), clock
    )
    return tuple((kind, forward / devices, backward / devices) for kind, forward, backward in times)


def _cached_layer_times(
    config: messages.TrainerConfig, spec: RunSpec, run: RunModel, facts: DeviceFacts, clock: Clock
) -> LayerTimes:
    if config.layer_times_path is None:
        return measure_layer_times(spec, run, facts, clock)
    file, key = LayerTimesCache(Path(config.layer_times_path), clock), key_of(spec, run, facts, config.cpu_threads)
    times = file.recall(key, {row.kind for row in run.table.layers})
    if not times:
        times = measure_layer_times(spec, run, facts, clock)
        file.keep(key, times)
    return times


def load_trainer_state(
    config: messages.TrainerConfig,
    facts: DeviceFacts,
    stage_io: StageIO | None,
    clock: Clock,
    rendezvous: Rendezvous | None = None,
    on_progress: OnProgress = no_progress_callback,
    on_trouble: OnTrouble = no_trouble_callback,
) -> TrainerState:
    """Load everything that `config` names. `facts` describe all devices together.

    Raises `RunSpecError`, `UnsupportedModel`, `ModelTooLarge`, `PretrainedWeightsUnusable`, `CorpusError`,
    `InvalidRequest`, `ConfigError`, `DataDirUnusable`, `ChildDied`.
    """
    devices = rendezvous.devices if rendezvous is not None else [torch.device(facts.device)]
    device = devices[config.rank]
    spec = parse_run_spec(config.run_spec_toml)
    os.environ["RAYON_NUM_THREADS"] = str(max(1, config.cpu_threads))  # threads of the tokenizers library
    with heartbeat(partial(on_progress, 0)):  # loading the tokenizer may download it
        opened = _open_corpus(config, spec, clock, on_trouble) if spec.data.source == "corpus" else None
        tokenizer = load_tokenizer(spec.data.tokenizer) if opened is None else opened.tokenizer
    run = run_model(spec, tokenizer.vocabulary, Path(config.base_path) if config.base_path else None)
    span = Span(*config.span) if config.span is not None else None
    facts = usable_facts(facts, spec, run, len(devices))
    holds = has_room(spec, run, span, facts, devices)
    torch.set_num_threads(max(1, config.cpu_threads // len(devices)))
    times = config.layer_times or _layer_times(config, spec, run, device, clock, len(devices))
    warm_up()
    on_progress(0)
    run.check(span, partial(on_progress, 0))
    corpus = _load_corpus(config, spec, opened, tokenizer, on_progress)
    if device.type == "cpu" and config.memory_bytes:
        limit_host_memory(config.memory_bytes // len(devices))
    loop: InnerLoop | StageLoop | RankStage | None = None
    group = DeviceGroup.connect(rendezvous) if holds and rendezvous is not None else None
    if group is not None and not group.matches_rank_zero(corpus.digest):
        raise CorpusError(
            f"{config.corpus_path or spec.data.path} changed while it was read: devices of this node got other text",
            "start the node again",
        )
    if span is not None:
        try:
            if group is not None and config.rank:
                loop = RankStage(spec, corpus, span, run, group, clock)
            else:
                assert stage_io is not None
                loop = StageLoop(spec, corpus, span, device, clock, stage_io, run, group)
        except torch.OutOfMemoryError as error:
            raise model_too_large(
                f"ran out of memory with {span}: other allocations on the device leave too little", facts
            ) from error
    elif holds:
        loop = InnerLoop(spec, corpus, device, clock=clock, run=run, group=group)
    return TrainerState(spec, run, corpus, clock, facts, devices, device, times, loop)


def _open_corpus(config: messages.TrainerConfig, spec: RunSpec, clock: Clock, on_trouble: OnTrouble) -> OpenedCorpus:
    cache = CacheFolder(Path(config.cache_path), config.cache_bytes) if config.cache_path is not None else None
    peers = PeerMirror(Path(config.peers_path)) if config.peers_path is not None else None
    return open_corpus(spec.data, config.corpus_path, cache, clock, on_trouble, peers)


def _load_corpus(
    config: messages.TrainerConfig,
    spec: RunSpec,
    opened: OpenedCorpus | None,
    tokenizer: Tokenizer,
    on_progress: OnProgress,
) -> TrainingCorpus:
    """Load the run's training text: from the corpus in `opened`, or from this node's own files."""
    if opened is not None:
        corpus: TrainingCorpus = opened.for_training(spec, partial(on_progress, opened.card.tokens))
    else:
        cache = Path(config.cache_path) if config.cache_path is not None else None
        corpus = load_corpus(spec, config.corpus_path, tokenizer, on_progress, cache, config.cpu_threads)
    if isinstance(corpus, ShardedCorpus):
        facts: dict[str, int] = {"tokens": corpus.card.tokens, "sources": len(corpus.card.sources)}
    else:
        facts = {
            "tokens": len(corpus.tokens),
            "files": corpus.report.files,
            "skipped_files": corpus.report.skipped_files,
            "skipped_rows": corpus.report.skipped_rows,
        }
    log.get("trainer").info("corpus_loaded", samples=corpus.training_samples, digest=corpus.digest, **facts)
    return corpus
