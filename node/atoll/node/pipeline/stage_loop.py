"""Training loop of one span: takes part in the flushes of its route, and drives them if it is the first stage.

`Replica` has the operations of outer rounds on the span's weights. The session (`trainer/session.py`) calls `work`
while `has_work`, one action at a time, and `on_route_event` for each event from the stage socket.

A flush counts as progress when it steps. An aborted flush has no effect, and its samples are trained again. When the
route breaks, the loop keeps weights and progress. It continues in the route's next incarnation, with the same or other
neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from atoll.core.clock import Clock
from atoll.core.data_position import SampleRange
from atoll.core.errors import (
    AtollError,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    InvalidTransition,
    PeerMisbehaved,
)
from atoll.core.learned_deadline import LearnedDeadline
from atoll.core.run_spec import RunSpec
from atoll.node.data.sharded_corpus import TrainingCorpus
from atoll.node.exchange.codecs import CODECS
from atoll.node.model.run_model import RunModel, allocate_span, initialise_into, run_model
from atoll.node.model.span import Span
from atoll.node.model.span_model import SpanModel
from atoll.node.pipeline.evaluation import Evaluation, Outcome
from atoll.node.pipeline.flush_machine import FlushMachine, StageCompute
from atoll.node.pipeline.inbox import StagePosition
from atoll.node.pipeline.link_codec import NARROW_CODEC
from atoll.node.pipeline.message_codec import LinkFormat
from atoll.node.pipeline.messages import MicroBatch
from atoll.node.pipeline.sharded_stage import LeaderStage, build_sharded_stage
from atoll.node.pipeline.stage import Stage
from atoll.node.pipeline.stage_checks import MicroBatchShape
from atoll.node.pipeline.stage_io import (
    IncarnationBegan,
    IncarnationEnded,
    MessageInvalid,
    MessageReceived,
    RouteEvent,
    StageIO,
)
from atoll.node.training.device import working_precision
from atoll.node.training.device_group import DeviceGroup
from atoll.node.training.inner_optimizer import InnerOptimizer
from atoll.node.training.learning_rate import learning_rate
from atoll.node.training.loader import Batch, Loader
from atoll.node.training.replica import Replica, StepResult
from atoll.node.training.sample_feed import SampleNumbers
from atoll.node.training.targets import document_starts, inputs_and_targets

MIN_FLUSH_DEADLINE_SECONDS = 5.0
MAX_FLUSH_DEADLINE_SECONDS = 300.0  # enough for many micro-batches on slow nodes; orders wait until a flush ends
DATA_WAIT_SECONDS = 0.5  # for the text of a flush, before orders are processed again
STALLED_DRIVER_SECONDS = 450.0  # above the driver's own deadline; after it the other stages end the flush
_NOTHING = SampleNumbers((), 0)


class StageLoop(Replica):
    """One span in memory. `enter_route` makes it a stage of a route.

    It has more than 15 attributes and 20 methods: it joins a `Replica`, a `FlushMachine` and the trainer's I/O.
    """

    def __init__(
        self,
        spec: RunSpec,
        corpus: TrainingCorpus,
        span: Span,
        device: torch.device,
        clock: Clock,
        stage_io: StageIO,
        run: RunModel | None = None,
        group: DeviceGroup | None = None,
    ) -> None:
        """Load the span. `group`: the ranks that share the span on several devices; this process is rank 0.

        Raises `InvalidRequest` for layers that the model does not have, `ConfigError` for an unsupported precision.
        """
        self.corpus, self.span, self.clock = corpus, span, clock
        self.flushes_aborted = 0
        self.route_problem = ""  # why the route does not work at present; empty: it works
        self.run = run or run_model(spec, corpus.tokenizer.vocabulary)
        self.stage: Stage
        compute: StageCompute
        if group is None:
            self.stage = compute = build_stage(spec, self.run, span, device)
        else:
            self.stage = part = build_sharded_stage(spec, self.run, span, group)
            compute = LeaderStage(part, group.send_to_ranks)
        self._tied = self.stage.model.span_definition.tie is not None
        self._table = self.run.table
        self._machine = FlushMachine(StagePosition(0, 1), compute, spec.optimizer.clip_norm)
        self._stage_io = stage_io
        stage_io.codec = CODECS[NARROW_CODEC if spec.pipeline.codec == "auto" else spec.pipeline.codec]
        self._incarnation = 0  # under way; 0: none
        self._waiting = True  # the machine waits for a message
        self._flush_deadline = LearnedDeadline(MIN_FLUSH_DEADLINE_SECONDS, MAX_FLUSH_DEADLINE_SECONDS)
        self._batch: Batch | None = None  # of the current flush or of an aborted one
        self._flush_began_at: float | None = None  # driver: start of the current flush; None if there is none
        self._last_idle_at = clock.monotonic()  # when no flush was in progress here for the last time
        self._evaluation: Evaluation | None = None
        self._counted = 0  # tokens of `stage.tokens` already counted as progress
        loader = Loader(corpus, spec.samples_per_flush, clock, pin=device.type == "cuda")
        super().__init__(spec, self.stage.model.weights, loader)
        self.stage.anchor = self._anchor

    # --- rounds -------------------------------------------------------------------------------------

    def initialise_into(self, anchor_E: Tensor) -> None:
        """Genesis: write the run's initial parameters of the span to `anchor_E`."""
        initialise_into(self.run, self.stage.model, anchor_E)

    def load(self, anchor_E: Tensor, *, ranges: Sequence[SampleRange] = (), committed_tokens: int = 0) -> None:
        self._machine.drop_undecided()
        self._batch = None
        super().load(anchor_E, ranges=ranges, committed_tokens=committed_tokens)

    def set_ranges(self, ranges: Sequence[SampleRange]) -> None:
        self._batch = None  # its samples are not consumed, so some node's new ranges contain them
        super().set_ranges(ranges)

    def set_committed_tokens(self, committed_tokens: int) -> None:
        super().set_committed_tokens(committed_tokens)
        self.stage.set_learning_rate(learning_rate(self.spec, committed_tokens))
        self.stage.anchor_tokens = committed_tokens
        if self._evaluation is not None and self._evaluation.anchor != committed_tokens:
            self._give_up_evaluation(InvalidTransition("the anchor changed while it was evaluated"))

    @property
    def has_data(self) -> bool:
        """True if there is something to train: data ranges on the driver, an incarnation on other stages."""
        return super().has_data if self.span.first == 0 else self._incarnation > 0

    @property
    def skipped_steps(self) -> int:
        """Number of flushes whose gradient was not finite."""
        return self.stage.skipped_steps

    # --- a route ------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> InnerOptimizer | None:
        """The inner optimiser; None if its state is sharded over several devices."""
        return self.stage.optimizer if isinstance(self.stage.model, SpanModel) else None

    def enter_route(self, plan_version: int, route: int, stage: int, stages: int) -> None:
        """Make the span this stage of a route. Raises `InvalidRequest` for a stage that does not fit the span."""
        span_definition = self.stage.model.span_definition
        if (
            not 0 <= stage < stages
            or (stage == 0) != span_definition.is_first
            or (stage == stages - 1) != span_definition.is_last
        ):
            raise InvalidRequest(
                f"{self.span} cannot be stage {stage} of {stages}: the first stage must have the model's first layer, "
                "the last stage its last layer"
            )
        self._on_route_lost(InvalidTransition("the plan gave this stage another route"))
        micro_batches = self.spec.samples_per_flush // self.spec.optimizer.micro_batch_samples
        self._machine.place = StagePosition(stage, stages, self._tied, self.spec.pipeline.ahead, micro_batches)
        self._stage_io.enter(LinkFormat.of(self.spec, self._table, plan_version, route))

    def pause(self) -> None:
        """Leave the incarnation, so that no flush starts and waits for this stage. The driver only starts no flush."""
        self._give_up_evaluation(InvalidTransition("the driver was paused"))
        if self._incarnation and not self._machine.place.first:
            self._break(InvalidTransition(f"stage {self._machine.place.stage} is paused"))

    def leave(self, why: AtollError) -> None:
        """End the incarnation on all stages, even during a flush."""
        if self._incarnation:
            self._break(why)

    def evaluate(self, done: Callable[[Outcome], None]) -> None:
        """Compute the held-out loss of the anchor over the route. `done` receives the loss or an error.

        The error is `InvalidTransition` if a stage has another anchor or this anchor changes, or the reason why the
        route broke. Raises `InvalidTransition` if the evaluation cannot begin.
        """
        if not self._machine.place.first or not self.ready or self._evaluation is not None:
            raise InvalidTransition(
                "no evaluation can begin: this stage is not the driver, its route is not ready, or another evaluation "
                "is under way"
            )
        samples = self.spec.optimizer.micro_batch_samples
        self._evaluation = Evaluation(self.corpus, samples, self.committed_tokens, done)

    @property
    def ready(self) -> bool:
        """True if the route can flush, as far as this stage knows."""
        return self._incarnation > 0 and self._machine.ready

    @property
    def between_steps(self) -> bool:
        """True if no flush is under way on this stage."""
        return self._flush_began_at is None and self._machine.idle

    @property
    def has_work(self) -> bool:
        """True if `work` has something to do."""
        return self._incarnation > 0 and (
            not self._waiting or self._can_begin_flush or self._overdue or self._driver_stalled
        )

    def work(self) -> StepResult | None:
        """Execute the next action of the flush, or begin a new flush. Returns the result of a flush that stepped."""
        self._note_if_idle()
        if self._overdue:
            seconds = self._flush_deadline.timeout_seconds
            self._flush_deadline.observe_miss(seconds, failed=True)
            self._break(DeadlineExceeded(f"a flush took longer than its deadline of {seconds:.0f} s"))
            return None
        if self._driver_stalled:
            self._break(
                DeadlineExceeded(f"the driver of the route did not end a flush within {STALLED_DRIVER_SECONDS:.0f} s")
            )
            return None
        if self._can_begin_flush:
            self._begin_flush()
        sent = self._machine.advance()
        self._waiting = sent is None
        self._collect_evaluation()
        for receiver, message in sent or ():
            self._stage_io.send(receiver, message)
        return self._count()

    def on_route_event(self, event: RouteEvent) -> None:
        """Handle an event from the stage socket."""
        self._note_if_idle()
        if isinstance(event, MessageReceived):
            self._stage_io.message_handled()
        match event:
            case IncarnationBegan(incarnation):
                self._on_route_lost(InvalidTransition("the route begins anew"))
                self._incarnation, self._waiting, self._last_idle_at = incarnation, False, self.clock.monotonic()
                self._stage_io.begin(incarnation)
                self._machine.begin(incarnation)
            case _ if event.incarnation != self._incarnation:
                pass  # of an earlier incarnation
            case IncarnationEnded(error=error):
                self._on_route_lost(error)
            case MessageInvalid(error=error):
                self._break(error)
            case MessageReceived(sender=sender, message=message):
                self._waiting = False
                try:
                    self._machine.deliver(sender, message)
                except PeerMisbehaved as error:
                    self._break(error)
                self._count()

    # --- flushes ------------------------------------------------------------------------------------

    @property
    def _can_begin_flush(self) -> bool:
        wanted = self.has_data or self._evaluation is not None
        return self._machine.place.first and self.ready and self.between_steps and wanted

    @property
    def _overdue(self) -> bool:
        return (
            self._flush_began_at is not None
            and self.clock.monotonic() - self._flush_began_at > self._flush_deadline.timeout_seconds
        )

    @property
    def _driver_stalled(self) -> bool:
        """True if the driver has not ended its flush in time. Orders to this stage wait until the flush ends."""
        return not self.between_steps and self.clock.monotonic() - self._last_idle_at > STALLED_DRIVER_SECONDS

    def _note_if_idle(self) -> None:
        """Record the time if no flush is under way. Called before each action and each message."""
        if self.between_steps:
            self._last_idle_at = self.clock.monotonic()

    def _begin_flush(self) -> None:
        if self._evaluation is None and self._batch is None and not self.await_data(DATA_WAIT_SECONDS):
            return  # the text is being fetched; orders are processed meanwhile
        self._flush_began_at = self.clock.monotonic()
        if self._evaluation is not None:
            windows = self._evaluation.next(self._machine.max_evaluation_micro_batches)
            self._machine.begin_flush(micro_batches(windows, self.spec.data.document_masks), self._evaluation.anchor)
            return
        self._batch = self._batch or self._loader.next()
        tokens = torch.split(self._batch.tokens_BT, self.spec.optimizer.micro_batch_samples)
        self._machine.begin_flush(micro_batches(tokens, self.spec.data.document_masks))

    def _collect_evaluation(self) -> None:
        """Record the result of an evaluation's flush."""
        evaluation, found = self._evaluation, self._machine.last_result
        if evaluation is None or self._flush_began_at is None or found is None:
            return
        self._flush_began_at = None
        if not found.at_same_anchor:
            self._give_up_evaluation(InvalidTransition("a stage of the route has another anchor"))
        elif evaluation.add(found.loss):
            self._evaluation = None

    def _give_up_evaluation(self, error: AtollError) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            evaluation.fail(error)

    def _count(self) -> StepResult | None:
        """Count tokens that stepped since the last call as progress."""
        tokens, self._counted = self.stage.tokens - self._counted, self.stage.tokens
        if not tokens:
            return None
        taken, loss = _NOTHING, 0.0
        if self._batch is not None and self._flush_began_at is not None and self._machine.last_result is not None:
            taken, loss = self._batch.taken, self._machine.last_result.loss
            self._flush_deadline.observe(self.clock.monotonic() - self._flush_began_at)
            self._batch = self._flush_began_at = None
        self.route_problem = ""
        self.progress.add(tokens, taken)
        return StepResult(loss, tokens, len(taken.samples))

    def _break(self, error: AtollError) -> None:
        """End the incarnation on all stages."""
        self._stage_io.break_off(error)
        self._on_route_lost(error)

    def _on_route_lost(self, error: AtollError) -> None:
        """Drop the current flush after the route broke. The machine keeps a flush that may have been decided."""
        if self._incarnation:
            self.route_problem = str(error)
        self.flushes_aborted += self._flush_began_at is not None and self._evaluation is None
        self._give_up_evaluation(error)
        self._incarnation, self._flush_began_at = 0, None
        self._machine.disconnect()


def build_stage(spec: RunSpec, run: RunModel, span: Span, device: torch.device) -> Stage:
    """Load a span on one device. Raises `InvalidRequest`, `ConfigError`."""
    precision = working_precision(spec.optimizer.precision, device)
    if precision == "fp16":
        raise ConfigError(
            f"{device} would train in fp16, which needs a loss scale; stages of a route do not share one",
            'set precision = "fp32" in the run spec, or "bf16" on devices that support it',
        )
    return Stage(allocate_span(run, span, device), spec.optimizer, MicroBatchShape.of(spec), precision)


def micro_batches(windows: Sequence[Tensor], document_masks: bool = False) -> list[MicroBatch]:
    """Return inputs, targets and, with `document_masks`, document starts of tokens [B,T+1]."""
    return [
        MicroBatch(*inputs_and_targets(tokens_BT), document_starts(tokens_BT) if document_masks else None)
        for tokens_BT in windows
    ]
