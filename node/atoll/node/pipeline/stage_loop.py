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
from atoll.node.pipeline.flush_machine import Compute, Runner
from atoll.node.pipeline.inbox import Place
from atoll.node.pipeline.link_codec import NARROW
from atoll.node.pipeline.message_codec import Channel
from atoll.node.pipeline.sharded_stage import LedStage, part_of_stage
from atoll.node.pipeline.stage import Room, Stage
from atoll.node.pipeline.stage_io import Arrived, Attached, CableEnd, Detached, RouteEvent, Spoiled
from atoll.node.training.corpus import Corpus
from atoll.node.training.device import working_precision
from atoll.node.training.device_group import DeviceGroup
from atoll.node.training.learning_rate import learning_rate
from atoll.node.training.loader import Batch, Loader
from atoll.node.training.replica import Replica, StepResult
from atoll.node.training.sample_feed import SampleNumbers

PATIENCE_FLOOR_SECONDS = 5.0
PATIENCE_CEILING_SECONDS = 300.0  # a flush of many micro-batches on slow nodes; orders wait for its end
STALE_SECONDS = 450.0  # a flush that the driver should have ended long ago: others end it then
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
        cable: CableEnd,
        run: RunModel | None = None,
        group: DeviceGroup | None = None,
    ) -> None:
        """`group`: of the processes that each have a part of the span; this is the first of them.

        Raises `InvalidRequest` for layers that the model does not have, `ConfigError` for a precision.
        """
        self.corpus, self.span, self.clock = corpus, span, clock
        self.flushes_aborted = 0
        self.trouble = ""  # why the route does not work at present, for people
        self.run = run or run_model(spec, corpus.tokenizer.vocabulary)
        self.stage: Stage
        compute: Compute
        if group is None:
            self.stage = compute = whole_stage(spec, self.run, span, device)
        else:
            self.stage = part = part_of_stage(spec, self.run, span, group)
            compute = LedStage(part, group.send_to_ranks)
        self._tied = self.stage.model.span_definition.tie is not None
        self._table = self.run.table
        self._runner = Runner(Place(0, 1), compute, spec.optimizer.clip_norm)
        self._cable = cable
        cable.codec = CODECS[NARROW if spec.pipeline.codec == "auto" else spec.pipeline.codec]
        self._attached = 0  # the incarnation; 0: none
        self._waiting = True
        self._patience = LearnedDeadline(PATIENCE_FLOOR_SECONDS, PATIENCE_CEILING_SECONDS)
        self._batch: Batch | None = None  # of the flush under way, or of one that was aborted
        self._fed_at: float | None = None  # when the flush under way began; None: none is, here
        self._idle_at = clock.monotonic()  # when no flush was under way here the last time
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
        self._runner.forget()
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
        return super().has_data if self.span.first == 0 else self._attached > 0

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
            or (stage == 0) != span_definition.first
            or (stage == stages - 1) != span_definition.last
        ):
            raise InvalidRequest(f"{self.span} cannot be stage {stage} of {stages}")
        self._lose(InvalidTransition("the plan has another route"))
        micro_batches = self.spec.samples_per_flush // self.spec.optimizer.micro_batch_samples
        self._runner.place = Place(stage, stages, self._tied, self.spec.pipeline.ahead, micro_batches)
        self._cable.enter(Channel.of(self.spec, self._table, plan_version, route))

    def pause(self) -> None:
        """Let go of the route, so that nobody begins a flush that would wait here; the driver just begins none."""
        self._give_up_evaluation(InvalidTransition("the driver was paused"))
        if self._attached and not self._runner.place.first:
            self._break(InvalidTransition(f"stage {self._runner.place.stage} is paused"))

    def leave(self, why: AtollError) -> None:
        """End the incarnation, for everybody, in the middle of a flush, too."""
        if self._attached:
            self._break(why)

    def evaluate(self, done: Callable[[Outcome], None]) -> None:
        """The held-out loss of the anchor, when its flushes are over.

        `done` gets `InvalidTransition` when a stage stands at another anchor or this one moves on, or why the route
        broke. Raises `InvalidTransition` where it cannot begin.
        """
        if not self._runner.place.first or not self.ready or self._evaluation is not None:
            raise InvalidTransition("only the driver of a route that is ready evaluates, one anchor at a time")
        samples = self.spec.optimizer.micro_batch_samples
        self._evaluation = Evaluation(self.corpus, samples, self.committed_tokens, done)

    @property
    def ready(self) -> bool:
        """Whether the route can flush, as far as this stage knows."""
        return self._attached > 0 and self._runner.ready

    @property
    def between_steps(self) -> bool:
        """Whether no flush is under way here."""
        return self._fed_at is None and self._runner.idle

    @property
    def has_work(self) -> bool:
        """Whether `work` would do something."""
        return self._attached > 0 and (not self._waiting or self._may_feed or self._overdue or self._stale)

    def work(self) -> StepResult | None:
        """The next action of the flush under way, or of a new one; what was trained when it ended one."""
        self._look_whether_idle()
        if self._overdue:
            seconds = self._patience.timeout_seconds
            self._patience.observe_miss(seconds, failed=True)
            self._break(DeadlineExceeded(f"a flush took longer than {seconds:.0f} s"))
            return None
        if self._stale:
            self._break(DeadlineExceeded(f"the driver of the route did not end a flush in {STALE_SECONDS:.0f} s"))
            return None
        if self._may_feed:
            self._feed()
        sent = self._runner.advance()
        self._waiting = sent is None
        self._evaluated()
        for receiver, message in sent or ():
            self._cable.send(receiver, message)
        return self._count()

    def take(self, event: RouteEvent) -> None:
        """What came over the cable."""
        self._look_whether_idle()
        if isinstance(event, Arrived):
            self._cable.taken()
        match event:
            case Attached(incarnation):
                self._lose(InvalidTransition("the route begins anew"))
                self._attached, self._waiting, self._idle_at = incarnation, False, self.clock.monotonic()
                self._cable.begin(incarnation)
                self._runner.begin(incarnation)
            case _ if event.incarnation != self._attached:
                pass  # of what is over
            case Detached(error=error):
                self._lose(error)
            case Spoiled(error=error):
                self._break(error)
            case Arrived(sender=sender, message=message):
                self._waiting = False
                try:
                    self._runner.deliver(sender, message)
                except PeerMisbehaved as error:
                    self._break(error)
                self._count()

    # --- flushes ------------------------------------------------------------------------------------

    @property
    def _may_feed(self) -> bool:
        wanted = self.has_data or self._evaluation is not None
        return self._runner.place.first and self.ready and self.between_steps and wanted

    @property
    def _overdue(self) -> bool:
        return self._fed_at is not None and self.clock.monotonic() - self._fed_at > self._patience.timeout_seconds

    @property
    def _stale(self) -> bool:
        """Whether a driver that cannot or will not end its flush holds up what this stage was told to do."""
        return not self.between_steps and self.clock.monotonic() - self._idle_at > STALE_SECONDS

    def _look_whether_idle(self) -> None:
        """Before each action and message: between two flushes there is always one."""
        if self.between_steps:
            self._idle_at = self.clock.monotonic()

    def _feed(self) -> None:
        self._fed_at = self.clock.monotonic()
        if self._evaluation is not None:
            windows = self._evaluation.next(self._runner.most_evaluated)
            self._runner.feed(_pairs(windows), self._evaluation.anchor)
            return
        self._batch = self._batch or self._loader.next()
        tokens = torch.split(self._batch.tokens_BT, self.spec.optimizer.micro_batch_samples)
        self._runner.feed(_pairs(tokens))

    def _evaluated(self) -> None:
        """Take what a flush of an evaluation found."""
        evaluation, found = self._evaluation, self._runner.finished
        if evaluation is None or self._fed_at is None or found is None:
            return
        self._fed_at = None
        if not found.agreed:
            self._give_up_evaluation(InvalidTransition("a stage of the route stands at another anchor"))
        elif evaluation.add(found.loss):
            self._evaluation = None

    def _give_up_evaluation(self, error: AtollError) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            evaluation.give_up(error)

    def _count(self) -> StepResult | None:
        """Make progress of what was stepped since the last time."""
        tokens, self._counted = self.stage.tokens - self._counted, self.stage.tokens
        if not tokens:
            return None
        taken, loss = _NOTHING, 0.0
        if self._batch is not None and self._fed_at is not None and self._runner.finished is not None:
            taken, loss = self._batch.taken, self._runner.finished.loss
            self._patience.observe(self.clock.monotonic() - self._fed_at)
            self._batch = self._fed_at = None
        self.trouble = ""
        self.progress.add(tokens, taken)
        return StepResult(loss, tokens, len(taken.samples))

    def _break(self, error: AtollError) -> None:
        """End the incarnation for everybody."""
        self._cable.break_off(error)
        self._lose(error)

    def _lose(self, error: AtollError) -> None:
        """The route broke: what was under way counts nothing, or will, if it was decided and we did not hear."""
        if self._attached:
            self.trouble = str(error)
        self.flushes_aborted += self._fed_at is not None and self._evaluation is None
        self._give_up_evaluation(error)
        self._attached, self._fed_at = 0, None
        self._runner.cut_off()


def whole_stage(spec: RunSpec, run: RunModel, span: Span, device: torch.device) -> Stage:
    """The span in memory. Raises `InvalidRequest`, `ConfigError`."""
    precision = working_precision(spec.optimizer.precision, device)
    if precision == "fp16":
        raise ConfigError(
            f"{device} would train in fp16, which needs a loss scale that stages of a route do not share",
            'set precision = "fp32", or "bf16" on devices that have it',
        )
    room = Room(spec.optimizer.micro_batch_samples, spec.data.sequence_length)
    return Stage(allocate_span(run, span, device), spec.optimizer, room, precision)


def _pairs(tokens: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets [B,T] of tokens [B,T+1]."""
    return [(tokens_BT[:, :-1], tokens_BT[:, 1:]) for tokens_BT in tokens]
