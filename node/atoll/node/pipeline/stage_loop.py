"""The trainer of one span: takes part in its route's flushes and drives them where the span begins the model.

What outer rounds do to the span's weights stands in `training/replica.py`. The session calls `work` while there is
some, one action at a time, and `take` for everything that comes over the cable. Progress is counted when a flush is
stepped; one that was aborted leaves no trace, and its samples are fed again. Whatever breaks a route, this keeps what
it has, and goes on when the route is attached again, with whomever.
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
from atoll.node.exchange.codecs import CODECS
from atoll.node.model.run_model import RunModel, allocate_span, initialise_into, run_model
from atoll.node.model.span import Span
from atoll.node.pipeline.evaluation import Evaluation, Outcome
from atoll.node.pipeline.flush_machine import FlushMachine, StageCompute
from atoll.node.pipeline.inbox import StagePosition
from atoll.node.pipeline.link_codec import NARROW_CODEC
from atoll.node.pipeline.message_codec import LinkFormat
from atoll.node.pipeline.sharded_stage import LeaderStage, build_sharded_stage
from atoll.node.pipeline.stage import MicroBatchShape, Stage
from atoll.node.pipeline.stage_io import (
    IncarnationBegan,
    IncarnationEnded,
    MessageInvalid,
    MessageReceived,
    RouteEvent,
    StageIO,
)
from atoll.node.training.corpus import Corpus
from atoll.node.training.device import working_precision
from atoll.node.training.device_group import DeviceGroup
from atoll.node.training.learning_rate import learning_rate
from atoll.node.training.loader import Batch, Loader
from atoll.node.training.replica import Replica, StepResult
from atoll.node.training.sample_feed import SampleNumbers

MIN_FLUSH_DEADLINE_SECONDS = 5.0
MAX_FLUSH_DEADLINE_SECONDS = 300.0  # a flush of many micro-batches on slow nodes; orders wait for its end
STALLED_DRIVER_SECONDS = 450.0  # a flush that the driver should have ended long ago: others end it then
_NOTHING = SampleNumbers((), 0)


class StageLoop(Replica):
    """One span in memory, on no route yet."""

    def __init__(
        self,
        spec: RunSpec,
        corpus: Corpus,
        span: Span,
        device: torch.device,
        clock: Clock,
        cable: StageIO,
        run: RunModel | None = None,
        group: DeviceGroup | None = None,
    ) -> None:
        """`group`: of the processes that each have a part of the span; this is the first of them.

        Raises `InvalidRequest` for layers that the model does not have, `ConfigError` for a precision.
        """
        self.corpus, self.span, self.clock = corpus, span, clock
        self.flushes_aborted = 0
        self.route_problem = ""  # why the route does not work at present, for people
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
        self._cable = cable
        cable.codec = CODECS[NARROW_CODEC if spec.pipeline.codec == "auto" else spec.pipeline.codec]
        self._incarnation = 0  # the incarnation; 0: none
        self._waiting = True
        self._flush_deadline = LearnedDeadline(MIN_FLUSH_DEADLINE_SECONDS, MAX_FLUSH_DEADLINE_SECONDS)
        self._batch: Batch | None = None  # of the flush under way, or of one that was aborted
        self._flush_began_at: float | None = None  # when the flush under way began; None: none is, here
        self._last_idle_at = clock.monotonic()  # when no flush was under way here the last time
        self._evaluation: Evaluation | None = None
        self._counted = 0  # tokens of the stage that are progress
        loader = Loader(corpus, spec.run.seed, spec.samples_per_flush, clock, pin=device.type == "cuda")
        super().__init__(spec, self.stage.model.weights, loader)
        self.stage.anchor = self._anchor

    # --- rounds -------------------------------------------------------------------------------------

    def initialise_into(self, anchor_E: Tensor) -> None:
        """Genesis: write the run's initial parameters of the span."""
        initialise_into(self.run, self.stage.model, anchor_E)

    def load(self, anchor_E: Tensor, *, ranges: Sequence[SampleRange] = (), committed_tokens: int = 0) -> None:
        self._machine.drop_undecided()
        self._batch = None
        super().load(anchor_E, ranges=ranges, committed_tokens=committed_tokens)

    def set_ranges(self, ranges: Sequence[SampleRange]) -> None:
        self._batch = None  # it is not consumed, so the new ranges hold it if anybody's do
        super().set_ranges(ranges)

    def set_committed_tokens(self, committed_tokens: int) -> None:
        super().set_committed_tokens(committed_tokens)
        self.stage.set_learning_rate(learning_rate(self.spec, committed_tokens))
        self.stage.anchor_tokens = committed_tokens
        if self._evaluation is not None and self._evaluation.anchor != committed_tokens:
            self._give_up_evaluation(InvalidTransition("the anchor changed while it was evaluated"))

    @property
    def has_data(self) -> bool:
        """Whether there is something to train: ranges, or a driver that has them."""
        return super().has_data if self.span.first == 0 else self._incarnation > 0

    @property
    def skipped_steps(self) -> int:
        """Flushes whose gradient was not finite."""
        return self.stage.skipped_steps

    # --- a route ------------------------------------------------------------------------------------

    def enter_route(self, plan_version: int, route: int, stage: int, stages: int) -> None:
        """The place that this span has from now on. Raises `InvalidRequest` for one that does not fit it."""
        span_definition = self.stage.model.span_definition
        if (
            not 0 <= stage < stages
            or (stage == 0) != span_definition.is_first
            or (stage == stages - 1) != span_definition.is_last
        ):
            raise InvalidRequest(f"{self.span} cannot be stage {stage} of {stages}")
        self._on_route_lost(InvalidTransition("the plan has another route"))
        micro_batches = self.spec.samples_per_flush // self.spec.optimizer.micro_batch_samples
        self._machine.place = StagePosition(stage, stages, self._tied, self.spec.pipeline.ahead, micro_batches)
        self._cable.enter(LinkFormat.of(self.spec, self._table, plan_version, route))

    def pause(self) -> None:
        """Let go of the route, so that nobody begins a flush that would wait here; the driver just begins none."""
        self._give_up_evaluation(InvalidTransition("the driver was paused"))
        if self._incarnation and not self._machine.place.first:
            self._break(InvalidTransition(f"stage {self._machine.place.stage} is paused"))

    def leave(self, why: AtollError) -> None:
        """End the incarnation, for everybody, in the middle of a flush, too."""
        if self._incarnation:
            self._break(why)

    def evaluate(self, done: Callable[[Outcome], None]) -> None:
        """The held-out loss of the anchor, when its flushes are over.

        `done` gets `InvalidTransition` when a stage stands at another anchor or this one moves on, or why the route
        broke. Raises `InvalidTransition` where it cannot begin.
        """
        if not self._machine.place.first or not self.ready or self._evaluation is not None:
            raise InvalidTransition("only the driver of a route that is ready evaluates, one anchor at a time")
        samples = self.spec.optimizer.micro_batch_samples
        self._evaluation = Evaluation(self.corpus, samples, self.committed_tokens, done)

    @property
    def ready(self) -> bool:
        """Whether the route can flush, as far as this stage knows."""
        return self._incarnation > 0 and self._machine.ready

    @property
    def between_steps(self) -> bool:
        """Whether no flush is under way here."""
        return self._flush_began_at is None and self._machine.idle

    @property
    def has_work(self) -> bool:
        """Whether `work` would do something."""
        return self._incarnation > 0 and (
            not self._waiting or self._can_begin_flush or self._overdue or self._driver_stalled
        )

    def work(self) -> StepResult | None:
        """The next action of the flush under way, or of a new one; what was trained when it ended one."""
        self._note_if_idle()
        if self._overdue:
            seconds = self._flush_deadline.timeout_seconds
            self._flush_deadline.observe_miss(seconds, failed=True)
            self._break(DeadlineExceeded(f"a flush took longer than {seconds:.0f} s"))
            return None
        if self._driver_stalled:
            self._break(
                DeadlineExceeded(f"the driver of the route did not end a flush in {STALLED_DRIVER_SECONDS:.0f} s")
            )
            return None
        if self._can_begin_flush:
            self._begin_flush()
        sent = self._machine.advance()
        self._waiting = sent is None
        self._collect_evaluation()
        for receiver, message in sent or ():
            self._cable.send(receiver, message)
        return self._count()

    def take(self, event: RouteEvent) -> None:
        """What came over the cable."""
        self._note_if_idle()
        if isinstance(event, MessageReceived):
            self._cable.taken()
        match event:
            case IncarnationBegan(incarnation):
                self._on_route_lost(InvalidTransition("the route begins anew"))
                self._incarnation, self._waiting, self._last_idle_at = incarnation, False, self.clock.monotonic()
                self._cable.begin(incarnation)
                self._machine.begin(incarnation)
            case _ if event.incarnation != self._incarnation:
                pass  # of what is over
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
        """Whether a driver that cannot or will not end its flush holds up what this stage was told to do."""
        return not self.between_steps and self.clock.monotonic() - self._last_idle_at > STALLED_DRIVER_SECONDS

    def _note_if_idle(self) -> None:
        """Before each action and message: between two flushes there is always one."""
        if self.between_steps:
            self._last_idle_at = self.clock.monotonic()

    def _begin_flush(self) -> None:
        self._flush_began_at = self.clock.monotonic()
        if self._evaluation is not None:
            windows = self._evaluation.next(self._machine.max_evaluation_micro_batches)
            self._machine.feed(_pairs(windows), self._evaluation.anchor)
            return
        self._batch = self._batch or self._loader.next()
        tokens = torch.split(self._batch.tokens_BT, self.spec.optimizer.micro_batch_samples)
        self._machine.feed(_pairs(tokens))

    def _collect_evaluation(self) -> None:
        """Take what a flush of an evaluation found."""
        evaluation, found = self._evaluation, self._machine.last_result
        if evaluation is None or self._flush_began_at is None or found is None:
            return
        self._flush_began_at = None
        if not found.at_same_anchor:
            self._give_up_evaluation(InvalidTransition("a stage of the route stands at another anchor"))
        elif evaluation.add(found.loss):
            self._evaluation = None

    def _give_up_evaluation(self, error: AtollError) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            evaluation.fail(error)

    def _count(self) -> StepResult | None:
        """Make progress of what was stepped since the last time."""
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
        """End the incarnation for everybody."""
        self._cable.break_off(error)
        self._on_route_lost(error)

    def _on_route_lost(self, error: AtollError) -> None:
        """The route broke: what was under way counts nothing, or will, if it was decided and we did not hear."""
        if self._incarnation:
            self.route_problem = str(error)
        self.flushes_aborted += self._flush_began_at is not None and self._evaluation is None
        self._give_up_evaluation(error)
        self._incarnation, self._flush_began_at = 0, None
        self._machine.disconnect()


def build_stage(spec: RunSpec, run: RunModel, span: Span, device: torch.device) -> Stage:
    """The span in memory. Raises `InvalidRequest`, `ConfigError`."""
    precision = working_precision(spec.optimizer.precision, device)
    if precision == "fp16":
        raise ConfigError(
            f"{device} would train in fp16, which needs a loss scale that stages of a route do not share",
            'set precision = "fp32", or "bf16" on devices that have it',
        )
    room = MicroBatchShape(spec.optimizer.micro_batch_samples, spec.data.sequence_length)
    return Stage(allocate_span(run, span, device), spec.optimizer, room, precision)


def _pairs(tokens: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets [B,T] of tokens [B,T+1]."""
    return [(tokens_BT[:, :-1], tokens_BT[:, 1:]) for tokens_BT in tokens]
