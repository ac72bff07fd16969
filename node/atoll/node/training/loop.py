"""The inner loop of a node that holds the whole model: batch → loss → backward → clip → step.

`InnerLoop` adds training, evaluation and sampling to `replica.py`, which has the operations of outer rounds. The
trainer process calls it for the daemon's orders; benchmarks call it directly. All vectors are fp32.

Shape suffixes: B batch, T sequence, V vocabulary, E all elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from atoll.core.clock import Clock, SystemClock
from atoll.core.errors import InvalidTransition
from atoll.core.run_spec import RunSpec
from atoll.core.training_audits import MIN_SAMPLES, Gains, gains
from atoll.node.data.held_out import HeldOutLoss, SourceLoss, held_out_sets
from atoll.node.data.sharded_corpus import TrainingCorpus
from atoll.node.model.generate import generate
from atoll.node.model.local_weights import ALL
from atoll.node.model.run_model import RunModel, allocate_span, initialise_into, run_model
from atoll.node.model.span import Span
from atoll.node.model.span_model import Run, SpanModule, TrainableModel
from atoll.node.training.device import autocast, choose_device, device_facts, model_too_large, working_precision
from atoll.node.training.device_group import DeviceGroup
from atoll.node.training.fsdp_model import shard_model
from atoll.node.training.inner_optimizer import InnerOptimizer, Stepper
from atoll.node.training.learning_rate import learning_rate
from atoll.node.training.loader import Loader
from atoll.node.training.progress import Progress
from atoll.node.training.replica import Replica, StepResult
from atoll.node.training.targets import count_targets, cross_entropy, divisor, document_starts, inputs_and_targets

PROBE_STEPS = 8


class InnerLoop(Replica):
    """A model, its optimiser and its data on one device. Call `close` at the end: it owns a thread.

    It has more than 20 methods: it trains, evaluates, audits and generates with the same weights.
    """

    def __init__(
        self,
        spec: RunSpec,
        corpus: TrainingCorpus,
        device: str | torch.device = "auto",
        clock: Clock | None = None,
        run: RunModel | None = None,
        group: DeviceGroup | None = None,
    ) -> None:
        """Build the model and start the loader.

        `run`: the spec's model, if the caller has it already. `group`: processes that each have a shard of the model.
        Raises `ConfigError` if a group cannot train this model, and `ModelTooLarge`.
        """
        self.corpus, self.clock = corpus, clock or SystemClock()
        self.device, self._group = choose_device(str(device)) if group is None else group.device, group
        self.precision = working_precision(spec.optimizer.precision, self.device)
        self.run = run or run_model(spec, corpus.tokenizer.vocabulary)
        self.stepper: Stepper | None = None
        samples = spec.optimizer.micro_batch_samples * spec.optimizer.accumulate
        try:
            self._build(spec)
            loader = Loader(corpus, samples, self.clock, pin=self.device.type == "cuda")
            super().__init__(spec, self.model.weights, loader)
        except torch.OutOfMemoryError as error:
            raise model_too_large(
                "does not fit into the memory that other allocations leave", device_facts(self.device)
            ) from error

    def _build(self, spec: RunSpec) -> None:
        """Allocate the model and its gradients."""
        whole, section = Span(0, self.run.architecture.layers - 1), spec.optimizer
        compiles = section.compile and self.device.type == "cuda"
        self.model: TrainableModel
        if self._group is None:
            model = allocate_span(self.run, whole, self.device, section.activation_checkpointing)
            self.model, self.weights_E = model, model.weights_E
            self._forward = torch.compile(self.model.run) if compiles else self.model.run
        else:
            self.model = shard_model(
                self.run, whole, self._group, section, checkpointing=section.activation_checkpointing
            )
            self._forward = self.model.run
        self.layout = self.model.trained_layout

    # --- training ---------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Do one inner step: `accumulate` micro-batches, one optimiser step. Needs `load` with ranges first."""
        stepper = self._ready_stepper()
        batch = self._loader.next()
        loss_sum = torch.zeros((), device=self.device)
        for tokens_BT, times in self._micro_batches(batch.tokens_BT):
            loss = self.loss(tokens_BT) / times
            stepper.backward(loss)
            loss_sum += loss.detach()
        # copied by the time that `step` has waited for the norms
        mean = self._sum(loss_sum).to("cpu", non_blocking=True)
        stepper.step()
        tokens = len(batch.taken.samples) * self.corpus.sequence_length
        self.progress.add(tokens, batch.taken)
        return StepResult(float(mean), tokens, len(batch.taken.samples))

    def _micro_batches(self, batch_BT: Tensor) -> Iterator[tuple[Tensor, float]]:
        """Yield this process's micro-batches of a batch, each with its divisor.

        A micro-batch's mean loss divided by its divisor is its part of the mean over the batch's targets.
        """
        at_most = self.spec.optimizer.micro_batch_samples
        if self._group is not None:
            return self._group.rank_micro_batches(batch_BT, at_most)
        targets = count_targets(batch_BT)
        return ((part_BT, divisor(targets, count_targets(part_BT))) for part_BT in torch.split(batch_BT, at_most))

    def _sum(self, mine: Tensor) -> Tensor:
        """Sum over all processes, so that their parts make the whole mean."""
        return mine if self._group is None else self._group.all_reduce_sum(mine)

    work = step  # the name in the session's interface
    between_steps = True  # always true: a step cannot be interrupted

    @property
    def has_work(self) -> bool:
        """True if there is data to train on."""
        return self.has_data

    def loss(self, tokens_BT: Tensor) -> Tensor:
        """Compute the mean cross-entropy over the targets of [B, T+1] tokens, nats per token; 0 without any."""
        with autocast(self.device, self.precision):
            logits_BTV, targets_BT = self._logits_and_targets(self._forward, tokens_BT)
        return cross_entropy(logits_BTV, targets_BT)

    def _logits_and_targets(self, logits_of: Run, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B,T,V] and targets [B,T] of [B, T+1] tokens, the same for steps, evaluations and audits."""
        tokens_BT = tokens_BT.to(self.device, non_blocking=True)
        inputs_BT, targets_BT = inputs_and_targets(tokens_BT)
        starts_BT = document_starts(tokens_BT) if self.spec.data.document_masks else None
        return logits_of(inputs_BT, starts_BT), targets_BT

    def initialise_into(self, anchor_E: Tensor) -> None:
        """Write the run's initial parameters into `anchor_E`, for genesis."""
        initialise_into(self.run, self.model, anchor_E)

    def set_committed_tokens(self, committed_tokens: int) -> None:
        super().set_committed_tokens(committed_tokens)
        if self.stepper is not None:
            self.stepper.set_learning_rate(learning_rate(self.spec, committed_tokens))

    # --- evaluation -------------------------------------------------------------------------------

    def evaluate(self, flat_E: Tensor) -> float:
        """Compute the held-out loss of any parameters, nats per token. Weights, optimiser and data do not change."""
        return self.held_out_loss(flat_E).value

    def held_out_loss(self, flat_E: Tensor) -> HeldOutLoss:
        """Compute the held-out loss of any parameters, also for each source."""
        with self._with_parameters(flat_E) as logits_of:
            return HeldOutLoss.of(
                [self._loss_of(name, windows, logits_of) for name, windows in held_out_sets(self.corpus)]
            )

    def _loss_of(self, name: str, windows: Sequence[int], logits_of: Run) -> SourceLoss:
        """Compute the mean loss over the held-out windows of a source."""
        size = self.spec.optimizer.micro_batch_samples
        total, weights = torch.zeros((), dtype=torch.float64, device=self.device), 0.0
        for start in range(0, len(windows), size):
            batch_BT = torch.from_numpy(self.corpus.windows(windows[start : start + size], soon=True))
            weight = count_targets(batch_BT) / self.corpus.sequence_length  # in samples
            for share_BT, times in self._micro_batches(batch_BT):
                loss = cross_entropy(*self._logits_and_targets(logits_of, share_BT))
                total += loss.double() / times * weight
            weights += weight
        return SourceLoss.of(name, float(self._sum(total)), weights, len(windows))

    def audit(
        self, anchor_E: Tensor, update_E: Tensor, own: Sequence[int], other: Sequence[int], part: slice = ALL
    ) -> Gains:
        """Measure how much an update lowers the loss on `own` and on `other` samples: anchor against anchor − update.

        The update covers `part` of the elements. Samples without a target are ignored. Overwrites all of `update_E`.
        Raises `InvalidTransition` if the model is on several devices, or too few samples have a target.
        """
        if self._group is not None:
            raise InvalidTransition("a model on several devices cannot audit updates")
        before = self._sample_losses(anchor_E, (*own, *other))
        start, end, _ = part.indices(len(update_E))
        torch.sub(anchor_E[start:end], update_E[start:end], out=update_E[start:end])
        for rest in (slice(start), slice(end, None)):
            update_E[rest] = anchor_E[rest]
        after = self._sample_losses(update_E, (*own, *other))
        pairs = list(zip(before, after, strict=True))
        kinds = pairs[: len(own)], pairs[len(own) :]
        gained = [[first - second for first, second in kind if first or second] for kind in kinds]
        if sum(map(len, gained)) < len(pairs) and min(map(len, gained)) < MIN_SAMPLES:
            raise InvalidTransition("too few of the audit's samples have a target")
        return gains(*gained)

    def _sample_losses(self, flat_E: Tensor, samples: Sequence[int]) -> list[float]:
        """The loss of each sample with any parameters, nats per token."""
        losses = list[float]()
        size = self.spec.optimizer.micro_batch_samples
        with self._with_parameters(flat_E) as logits_of:
            for start in range(0, len(samples), size):
                windows = [self.corpus.window(sample) for sample in samples[start : start + size]]
                tokens_BT = torch.from_numpy(self.corpus.windows(windows, soon=True))
                logits_BTV, targets_BT = self._logits_and_targets(logits_of, tokens_BT)
                losses += [float(cross_entropy(*sample)) for sample in zip(logits_BTV, targets_BT, strict=True)]
        return losses

    def generate(self, flat_E: Tensor, prompt: bytes, tokens: int, seed: int = 0) -> str:
        """Sample `tokens` tokens that follow `prompt`, with any parameters."""
        tokenizer = self.corpus.tokenizer
        begin = [int(token) for token in tokenizer.encode(prompt)] or list(tokenizer.separator) or [0]
        with self._with_parameters(flat_E) as logits_of:
            return tokenizer.decode(generate(logits_of, begin, tokens, self.corpus.sequence_length, seed, self.device))

    @contextmanager
    def _with_parameters(self, flat_E: Tensor) -> Iterator[Run]:
        """Yield the model with other parameters, as a function of tokens [B,T] to logits [B,T,V]."""
        if self._group is None:
            with _WithParameters(self, flat_E) as logits_of:
                yield logits_of
            return
        trained = self.weights.read()
        self.weights.fill(flat_E)
        try:
            yield self._logits
        finally:
            self.weights.restore(trained)

    @torch.no_grad()
    def _logits(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        with autocast(self.device, self.precision):
            return self.model.run(x, starts_BT)

    def probe(
        self, minimum_step_seconds: float = 0.0, compute_share: float = 1.0, scratch_E: Tensor | None = None
    ) -> float:
        """Measure tokens per second over a few real steps within the current limits, and reset all state.

        Call it before the first `load`: it starts from fresh weights and drops its optimiser. `scratch_E`: initial
        parameters if the caller has them; it is zeroed.
        """
        if scratch_E is None:
            scratch_E = torch.empty(self.layout.elements)
            self.initialise_into(scratch_E)
        self.load(scratch_E, ranges=((0, self._samples_per_step),))
        self.step()  # warms up kernels, allocator and compilation
        started = self.clock.monotonic()
        tokens = sum(self.step().tokens for _ in range(PROBE_STEPS))
        computed = (self.clock.monotonic() - started) / compute_share
        seconds = max(computed, PROBE_STEPS * minimum_step_seconds, 1e-9)
        self.stepper = None
        self.load(scratch_E.zero_())
        self.progress = Progress()
        self._loader.stall_seconds = 0.0
        return tokens / seconds

    # --- helpers ----------------------------------------------------------------------------------

    @property
    def optimizer(self) -> InnerOptimizer | None:
        """The inner optimiser; None if its state is spread over several devices."""
        return self._ready_stepper().optimizer if self._group is None else None

    @property
    def skipped_steps(self) -> int:
        """Number of steps whose gradient was not finite."""
        return self.stepper.skipped_steps if self.stepper else 0

    @property
    def _samples_per_step(self) -> int:
        return self.spec.optimizer.micro_batch_samples * self.spec.optimizer.accumulate

    def _ready_stepper(self) -> Stepper:
        if self.stepper is None:
            self.stepper = Stepper(self.model, self.spec.optimizer, self.precision)
            self.stepper.set_learning_rate(learning_rate(self.spec, self.committed_tokens))
        return self.stepper


class _WithParameters:
    """The model with other parameters inside a `with` block: tokens [B,T] → logits [B,T,V]."""

    def __init__(self, loop: InnerLoop, flat_E: Tensor) -> None:
        self._loop, tie = loop, loop.model.span_definition.tie
        parameters = dict(loop.layout.views(flat_E.to(loop.device)))
        if tie is not None:
            parameters[tie.borrower] = parameters[tie.owner]
        self._parameters = {f"module.{name}": values for name, values in parameters.items()}
        self._whole = SpanModule(loop.model.span_definition)

    def __enter__(self) -> _WithParameters:
        self._whole.eval()
        return self

    def __exit__(self, *_: object) -> None:
        self._whole.train()

    @torch.no_grad()
    def __call__(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        with autocast(self._loop.device, self._loop.precision):
            logits: Tensor = torch.func.functional_call(self._whole, self._parameters, (x, starts_BT))
        return logits
