"""Training session: one run on one node. Load → restore or genesis → synchronise → train in rounds → finish.

The plan says which layers the node holds. When the plan names other layers, the session loads a new trainer with those.
It serves the earlier layers while other members may lack them.

The session owns the trainer and the committed state. It follows the coordinator's directives, but once it has a plan,
no step needs the coordinator. If the trainer dies, the session starts another one from the anchor. The node stays a
member meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from functools import partial
from pathlib import Path

from atoll.core import log
from atoll.core.errors import AtollError, ChildDied, InvalidTransition, ModelTooLarge
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.node.exchange.exchange_server import ExchangeServer
from atoll.node.rounds.decide import position_at
from atoll.node.rounds.engine import AveragingEngine
from atoll.node.rounds.evaluation import evaluation_report
from atoll.node.rounds.member_streams import RoundLinks
from atoll.node.rounds.policy import round_samples
from atoll.node.run.genesis import write_genesis
from atoll.node.run.local_state import LocalState
from atoll.node.run.lost_members import LostMembers
from atoll.node.run.node_context import NodeContext
from atoll.node.run.own_trainer import OwnTrainer, unless_trainer_dies, wait_any_or_trainer_death
from atoll.node.run.round_metrics import RoundMetrics
from atoll.node.run.route_membership import RouteMembership
from atoll.node.run.session_rounds import is_only_holder, make_engine
from atoll.node.run.session_status import SessionStatus
from atoll.node.state.checkpoint_files import ANCHOR
from atoll.node.state.fork_anchor import Refusal
from atoll.node.trainer.preload import span_to_hold
from atoll.node.trainer.trainer import Trainer, TrainerConfig
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import membership_pb2 as mb

LAST_EVALUATION_TIMEOUT = timedelta(seconds=60)  # for which the route stays connected, for the driver's last evaluation
ROUND_END_TIMEOUT = timedelta(seconds=30)  # for a round in progress to end before the engine stops
FINISH_TIMEOUT = timedelta(minutes=10)  # for writing the last checkpoint
_EARLY_STREAM_TIMEOUT = timedelta(seconds=15)
_RETRY = timedelta(seconds=1)
_TRAINER_RESTARTS = 5  # in a row, without a committed round in between

_log = log.get("session")


class TrainingSession:
    """One run on this node, from loading to the final anchor.

    It has many methods because the steps of one life cycle, the owner's orders and the callbacks of rounds meet here.
    """

    def __init__(self, context: NodeContext) -> None:
        self.finished = asyncio.Event()
        self._context = context
        self._reloading = False  # another trainer is being loaded, with other layers
        self._own_trainer = OwnTrainer(context)
        self._engine: AveragingEngine | None = None
        self._lost = LostMembers(context.clock)
        self._status = SessionStatus(context)
        self._first_evaluation: mb.EvaluationReport | None = None
        self._links = RoundLinks(context.network, self._receive, self._on_peer_lost)
        self._exchanges = ExchangeServer(context.network, _EARLY_STREAM_TIMEOUT)
        self._route = RouteMembership(
            context.network, context.spec, context.identity.peer_id, context.clock, context.link.send_heartbeat_now
        )
        context.status.route = self._route
        self._local_state = LocalState(context.state_sources())
        context.status.local_state = self._local_state
        self._round_metrics = RoundMetrics(context.spec, context.status, context.traffic, context.clock)

    # --- the main path -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train until the run is finished. Raises errors with which this node cannot train, such as `CorpusError`.

        If this call ends before the run is finished, the caller must call `stop_trainer`.
        """
        restarts, last_round, died = 0, -1, ""
        prefetching = asyncio.create_task(self._prefetch())
        try:
            while not self.finished.is_set():
                self._status.enter_loading(died, reloading=self._reloading)
                try:
                    self._reloading = False
                    trainer = await self._load()
                    died = ""
                    await self._train_through(trainer)
                except ModelTooLarge as error:
                    if self._status.in_plan or not self._planned_layers():
                        raise
                    _log.error("layers of the next plan do not fit", reason=str(error))
                    self._local_state.prefetcher.refuse()
                    self._context.link.send_heartbeat_now()
                except ChildDied as error:
                    head_round = self._local_state.head.round if self._local_state.head else -1
                    restarts = restarts + 1 if head_round == last_round else 1
                    last_round = head_round
                    self._context.status.trainer_restarts += 1
                    _log.error("trainer died", reason=str(error), restart=restarts)
                    if restarts > _TRAINER_RESTARTS:
                        raise
                    died = f"{error}; start {restarts} of {_TRAINER_RESTARTS}"
                    self._status.enter_loading(died, reloading=self._reloading)
                    self._context.link.send_heartbeat_now()
                    await asyncio.sleep(_RETRY.total_seconds() * restarts)
        finally:
            prefetching.cancel()
            await asyncio.gather(prefetching, return_exceptions=True)
            await self._route.leave()
            await self._links.close()
            if self.finished.is_set():  # otherwise `keep_optimizer` comes first
                await self.stop_trainer()

    async def _prefetch(self) -> None:
        """Fetch layers of later plans. If this fails, the node fetches them once their plan is in force."""
        try:
            await self._local_state.prefetcher.run()
        except Exception as error:
            _log.error("layer prefetch stopped", reason=repr(error))

    async def _load(self) -> Trainer:
        """Start a trainer that has loaded its layers and the corpus. The anchor of the previous trainer is kept."""
        context = self._context
        await self._own_trainer.stop()
        span = span_to_hold(context.directives.plan, self._planned_layers())
        trainer = await self._own_trainer.start(span)
        await self._local_state.hold(trainer)
        if self._local_state.head is not None:
            self._on_head_moved(self._local_state.head)
        whole = span is None and span_to_hold(context.directives.plan, self._planned_layers()) is None
        if self._status.in_plan and whole and trainer.facts.span is None:
            raise ModelTooLarge(
                "the plan gives this node the whole model, but it can hold only some layers",
                "ask the operator to pin it to some layers",
            )
        return trainer

    def _planned_layers(self) -> range:
        """Layers that the plan gives this node. If it gives none: those that the next plan may give."""
        plan, prepare = self._context.directives.plan, self._context.directives.prepare
        mine = plan.span(self._context.identity.peer_id) if plan is not None else range(0)
        return mine or (range(0) if prepare == self._local_state.prefetcher.refused else prepare)

    def _needs_reload(self, trainer: Trainer) -> bool:
        """Report whether a trainer with other layers must be loaded."""
        wanted = self._planned_layers()
        return len(wanted) > 0 and trainer.facts.held_layers != wanted

    async def _train_through(self, trainer: Trainer) -> None:
        while not self.finished.is_set():
            self._status.enter_waiting()
            await unless_trainer_dies(trainer, self._context.directives.until(self._has_work))
            if self._status.must_write_genesis:
                await self._write_genesis(trainer)
            if self._needs_reload(trainer) and not self._status.rests:
                self._reloading = True  # the node is still in the plan, or will be in the next one
                return
            if self._follows_plan(trainer):
                await self._follow_plan(trainer)

    def _follows_plan(self, trainer: Trainer) -> bool:
        """Report whether this node takes part in rounds.

        While paused, it takes part only to vote, with the layers it has.
        """
        if self._status.rests:
            return self._status.only_votes and not self._needs_reload(trainer)
        return self._status.in_plan

    async def _follow_plan(self, trainer: Trainer) -> None:
        """Synchronise with the other members, then train in rounds until the run ends or the plan omits this node."""
        context, plan = self._context, self._status.adopt_plan()
        try:
            head = await unless_trainer_dies(trainer, self._synchronise(plan))
        except ChildDied:
            raise
        except AtollError as error:
            _log.warning("cannot synchronise yet", reason=str(error))
            await asyncio.sleep(_RETRY.total_seconds())
            return
        ranges = position_at(head, plan, round_samples(context.spec)).holdings.get(context.identity.peer_id, ())
        await trainer.load(ranges=ranges, committed_tokens=head.committed_tokens)
        await self._own_trainer.restore_optimizer(trainer)
        self._on_head_moved(head)
        if self._first_evaluation is not None:  # reported only now, after the genesis that it evaluates
            self._on_evaluation(self._first_evaluation)
            self._first_evaluation = None
        await unless_trainer_dies(trainer, self._join_route(plan, trainer))
        assert self._local_state.state is not None
        engine = make_engine(
            context,
            trainer,
            self._local_state.state,
            self._exchanges,
            head,
            plan,
            on_head_moved=self._on_head_moved,
            on_evaluation=self._on_evaluation,
        )
        running = asyncio.create_task(engine.run(self._links))
        self._engine = self._local_state.engine = engine
        following = asyncio.create_task(self._follow_directives(trainer, engine))
        try:
            await wait_any_or_trainer_death(trainer, running, following)
        finally:
            for task in (running, following):
                task.cancel()
            await asyncio.gather(running, following, return_exceptions=True)
            self._engine = self._local_state.engine = None
            if engine.finished.is_set():
                await self._route.until_driver_leaves(LAST_EVALUATION_TIMEOUT)
            await self._route.leave()
        if engine.finished.is_set():
            await self._finish(trainer)
        else:
            await trainer.pause()
            await trainer.discard()

    async def _follow_directives(self, trainer: Trainer, engine: AveragingEngine) -> None:
        """Pass on plans, pauses and resumes, until a plan leaves this node out or gives it other layers.

        A node that is paused stops training at once and asks for a last round. That round counts what the node trained,
        and gives it no seat in the next electorate. It still votes until a plan leaves it out. `engine.leave` cannot be
        undone, so a node that resumes gets a new engine.
        """
        context = self._context
        training: bool | None = None
        resting = False
        followed = engine.plan.version
        while self._status.in_plan and not self._needs_reload(trainer):
            plan = self._status.adopt_plan()
            if not trainer.facts.holds_all and not plan.accepts(engine.head):
                break  # `synchronise` returns to an earlier round, which may be only in this node's own checkpoints
            if plan.version > followed:
                engine.plan_received(plan)
                await self._join_route(plan, trainer)
                followed = plan.version
                if training is not None:
                    self._status.enter_following(plan, training=training)
            if self._status.rests and not resting:
                resting = True
                engine.leave()
            elif resting and not self._status.rests:
                break
            wanted = self._status.may_train
            if wanted is not training:
                await (trainer.train() if wanted else trainer.pause())
                training = wanted
                self._status.enter_following(plan, training=wanted)
            await context.directives.until(partial(self._status.changed_since, plan.version, wanted, resting))
        if self._status.in_plan:
            self._status.adopt_plan()  # record that a plan was received even if it gives this node other layers
        await engine.rest(ROUND_END_TIMEOUT)

    async def _join_route(self, plan: Plan, trainer: Trainer) -> None:
        """Join the route of `plan`, if it has one for this node. On failure the node still takes part in rounds."""
        try:
            await self._route.follow(plan, trainer)
        except ChildDied:
            raise
        except AtollError as error:
            _log.error("cannot join route", reason=str(error))

    async def _finish(self, trainer: Trainer) -> None:
        """Write the last checkpoint and report that the run is finished."""
        context = self._context
        await trainer.pause()
        assert self._local_state.head is not None
        try:
            path = await self.save(FINISH_TIMEOUT)
        except AtollError as error:  # other members have the state, and this node still serves it from memory
            outcome = f"its checkpoint was not written: {error}"
        else:
            context.status.anchor_path = str(path / ANCHOR) if path is not None else ""
            outcome = f"checkpoint at {path}"
        told = f"finished at round {self._local_state.head.round}; {outcome}"
        context.status.enter(mb.NODE_STATE_FINISHED, told, mb.NODE_REASON_UNSPECIFIED)
        _log.info("run finished; serving its state until stopped", round=self._local_state.head.round, outcome=outcome)
        context.link.send_heartbeat_now()
        self.finished.set()

    # --- reaching a common state -----------------------------------------------------------------------

    async def _write_genesis(self, trainer: Trainer) -> None:
        """Initialise the model and sign round 0, or report a refusal. The other members fetch genesis by digest."""
        context = self._context
        context.status.enter(mb.NODE_STATE_CATCHING_UP, "writing the genesis anchor", mb.NODE_REASON_FETCHING_STATE)
        made = await write_genesis(trainer, context.identity, context.spec, context.run_dir, context.clock)
        if isinstance(made, Refusal):
            _log.error("cannot write genesis", reason=made.detail)
            context.status.genesis_report = mb.GenesisReport(refusal=made.why, refusal_detail=made.detail)
        else:
            self._local_state.begin(made.head, made.state)
            self._on_head_moved(made.head)
            if trainer.facts.holds_all:
                self._first_evaluation = await evaluation_report(trainer, made.head)
            context.status.genesis_report = mb.GenesisReport(
                layers=trainer.facts.layers, manifest=made.head.committed, source_manifest=made.source_manifest
            )
        context.link.send_heartbeat_now()

    def _has_work(self) -> bool:
        """Report whether a waiting session must act: update its status, write genesis, load layers or train."""
        if self._status.must_write_genesis or self._status.waiting_is_outdated():
            return True
        trainer = self._own_trainer.current
        if trainer is None:
            return self._status.in_plan and not self._status.rests
        return self._follows_plan(trainer) or (self._needs_reload(trainer) and not self._status.rests)

    async def _synchronise(self, plan: Plan) -> Head:
        if not self._status.rests:
            fetching = "fetching anchor and momentum"
            self._context.status.enter(mb.NODE_STATE_CATCHING_UP, fetching, mb.NODE_REASON_FETCHING_STATE)
        return await self._local_state.synchronise(plan)

    # --- orders from the owner -------------------------------------------------------------------------

    def pause(self, reason: str, why: mb.NodeReason) -> None:
        """Pause training for the owner or a limit; `reason` is for people.

        The node asks for a last round. What was trained since the last round is lost in two cases: a plan without this
        node comes before another round commits, or training resumes before that.
        """
        self._status.pause(reason, why)
        self._context.directives.wake()

    def resume(self) -> None:
        """Resume training."""
        self._status.pause_reason = ""
        self._context.directives.wake()

    async def limit(self, trainer_config: TrainerConfig) -> None:
        """Apply limits to this trainer and later ones. Raises `ModelTooLarge` without changing anything."""
        await self._own_trainer.limit(trainer_config)

    async def next_round(self, timeout: timedelta) -> bool:
        """Wait for this node's last rounds, one of every fragment, so that no training is lost when it leaves.

        Returns False if no round was committed. Does not wait if the remaining members can no longer commit a round.
        """
        start = self._context.status.head_round
        engine = self._engine
        if engine is None or self._status.pause_reason:
            return False
        engine.leave()

        def moved(rounds: int) -> bool:
            return self._context.status.head_round >= start + rounds

        def over() -> bool:
            plan = self._context.directives.plan
            may_decide = plan is None or self._lost.others_can_decide(plan, engine.head)
            return moved(engine.turns) or self.finished.is_set() or not may_decide

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout.total_seconds()):
                while not over():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_RETRY.total_seconds()):
                            await self._context.directives.until(over)
        return moved(1)

    async def generate(self, prompt: str, tokens: int) -> str:
        """Generate text from the committed anchor. Raises `InvalidTransition` if there is no anchor yet.

        A finished session has stopped its trainer, so it starts one for this call.
        """
        if self._local_state.head is None or (self._own_trainer.current is None and not self.finished.is_set()):
            raise InvalidTransition("there is no anchor to generate from yet", "try again after the next round")
        trainer = self._own_trainer.current or await self._load()
        try:
            return await trainer.generate(prompt, tokens)
        finally:
            if self.finished.is_set():
                await self.stop_trainer()

    async def save(self, timeout: timedelta) -> Path | None:
        """Write a checkpoint of the head; return its directory, or None if there is no head yet.

        Must not be called while a round changes the state.

        Raises `DeadlineExceeded`, `DataDirUnusable`.
        """
        state = self._local_state.checkpoint_state()
        return await self._context.checkpoints.flush(state, timeout) if state is not None else None

    def follow_checkpoint_order(self) -> None:
        """Write a checkpoint now or at a later round, if the operator ordered one."""
        state = self._local_state.checkpoint_state()
        present = state if state is not None and state.head.round > 0 else None
        self._context.checkpoints.order(self._context.directives.checkpoint_round, present)

    async def stop_trainer(self) -> None:
        """End the trainer process, if there is one."""
        await self._own_trainer.stop()

    async def keep_optimizer(self, timeout: timedelta) -> None:
        """Write the inner optimiser's state for the next start of this node, unless the run is over."""
        over = self.finished.is_set() or self._context.directives.run_state == mb.RUN_STATE_STOPPED
        if not over:
            await self._own_trainer.keep_optimizer(timeout)

    # --- callbacks of rounds ---------------------------------------------------------------------------

    async def _receive(self, peer: str, message: dp.RoundMessage) -> None:
        self._lost.hear(peer)
        if self._engine is not None:
            await self._engine.receive(peer, message)

    async def _on_peer_lost(self, peer: str) -> None:
        self._lost.lose(peer)
        if self._engine is not None:
            await self._engine.lost(peer)

    def _on_head_moved(self, head: Head) -> None:
        status = self._context.status
        self._local_state.moved(head)
        status.head_round, status.head_hash, status.committed_tokens = head.round, head.hash, head.committed_tokens
        status.data_position = head.data
        metrics = self._round_metrics.head_moved(head)
        if metrics is not None:
            self._context.link.report(metrics)
        state = self._local_state.checkpoint_state()
        if state is not None and head.round > 0:
            only_copy = is_only_holder(self._context.directives.plan, self._context.identity.peer_id, head)
            self._context.checkpoints.offer(state, only_copy=only_copy)
        self._context.directives.wake()

    def _on_evaluation(self, report: mb.EvaluationReport) -> None:
        self._context.status.validation_loss = report.loss
        self._context.status.source_losses = {source.name: source.loss for source in report.sources}
        self._context.link.report(report)
