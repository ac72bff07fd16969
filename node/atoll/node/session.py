"""A run on one node, read top-down: load → restore or genesis → synchronise → train in rounds → finish.

The plan says which layers the node holds; when it says others, the trainer is loaded anew with those, and what was held
before is given out for as long as nobody else may have it.

The session owns the trainer and the committed state. It follows the coordinator's directives but needs the
coordinator for none of its steps once it has a plan. If the trainer dies, the session starts another one
from the anchor; the membership does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, ChildDied, InvalidTransition, ModelTooLarge
from atoll.core.identity import Identity
from atoll.core.manifest import Head, changed_layers
from atoll.core.plan import Plan
from atoll.core.quorum import Ballot, LastVote
from atoll.core.round_id import RoundId
from atoll.core.run_spec import RunSpec
from atoll.node.control.coordinator_link import CoordinatorLink
from atoll.node.control.directives import Directives
from atoll.node.exchange.allreduce import ExchangeServer
from atoll.node.genesis import write_genesis
from atoll.node.local_state import LocalState, StateSources
from atoll.node.rounds import types as rt
from atoll.node.rounds.decide import position_at
from atoll.node.rounds.engine import AveragingEngine, RoundCallbacks
from atoll.node.rounds.member_streams import RoundLinks
from atoll.node.rounds.policy import minimum_lease_samples, policies
from atoll.node.route_membership import RouteMembership
from atoll.node.state.checkpoint import ANCHOR
from atoll.node.state.checkpoint_writer import CheckpointWriter
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.vote_store import VoteStore
from atoll.node.status import LiveStatus
from atoll.node.trainer.preload import TrainerPreload, span_to_hold
from atoll.node.trainer.trainer import Trainer, TrainerConfig
from atoll.node.trainer.trainer_process import LOG_NAME, TrainerProcess
from atoll.node.wire.transport import Network
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import membership_pb2 as mb

LOAD_TIMEOUT = timedelta(minutes=10)  # in which a trainer that loads must get on
STOP_TIMEOUT = timedelta(seconds=5)
LAST_EVALUATION_TIMEOUT = timedelta(seconds=60)  # of the driver, in which its route must stand
ROUND_END_TIMEOUT = timedelta(seconds=30)  # for a round to end before the engine does
FINISH_TIMEOUT = timedelta(minutes=10)  # to write the last checkpoint
_EARLY_STREAM_TIMEOUT = timedelta(seconds=15)
_RETRY = timedelta(seconds=1)
_TRAINER_RESTARTS = 5  # in a row, with no committed round between them

T = TypeVar("T")

_log = log.get("session")


@dataclass(frozen=True)
class NodeContext:
    """What the session works with; made once by the daemon."""

    identity: Identity
    spec: RunSpec
    trainer: TrainerConfig
    network: Network
    directives: Directives
    link: CoordinatorLink
    manifests: ManifestStore
    votes: VoteStore
    checkpoints: CheckpointWriter
    operator_key: bytes
    status: LiveStatus
    run_dir: Path  # of the trainer's log
    ahead: TrainerPreload | None  # the first trainer, begun with `trainer`
    clock: Clock


class TrainingSession:
    """One run on this node, from loading to the final anchor."""

    def __init__(self, context: NodeContext) -> None:
        self.genesis: mb.GenesisReport | None = None  # while the coordinator does not know it yet
        self.finished = asyncio.Event()
        self._context = context
        self._reloading = False  # the trainer, with other layers
        self._preload: TrainerPreload | None = context.ahead
        self._trainer: Trainer | None = None
        self._engine: AveragingEngine | None = None
        self._pause_reason = ""  # why this node does not train, for people; empty: it does
        self._trainer_config = context.trainer
        self._first_evaluation: mb.EvaluationReport | None = None
        self._links = RoundLinks(context.network, self._receive, self._on_peer_lost)
        self._exchanges = ExchangeServer(context.network, _EARLY_STREAM_TIMEOUT)
        self._route = RouteMembership(
            context.network, context.spec, context.identity.peer_id, context.clock, context.link.send_heartbeat_now
        )
        context.status.route = self._route
        self._local_state = LocalState(
            StateSources(
                context.network,
                context.spec.run.name,
                context.run_dir,
                context.operator_key,
                context.manifests,
                context.checkpoints,
                context.directives,
                context.link.send_heartbeat_now,
            )
        )
        context.status.holdings = self._local_state

    # --- the main path -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the run is finished. Raises what makes this node useless: a corpus or model it cannot load."""
        restarts, last_round = 0, -1
        prefetching = asyncio.create_task(self._prepare())
        try:
            while not self.finished.is_set():
                if self._reloading:
                    self._context.status.enter(mb.NODE_STATE_CATCHING_UP, "loading the layers that the plan gives it")
                else:
                    self._context.status.enter(mb.NODE_STATE_JOINING, "loading the model and the corpus")
                try:
                    self._reloading = False
                    trainer = await self._load()
                    await self._train_through(trainer)
                except ModelTooLarge as error:
                    if self._in_plan() or not self._planned_layers():
                        raise
                    _log.error("the layers of the next plan do not fit here", reason=str(error))
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
                    await asyncio.sleep(_RETRY.total_seconds() * restarts)
        finally:
            prefetching.cancel()
            await asyncio.gather(prefetching, return_exceptions=True)
            await self._route.leave()
            await self._links.close()
            await self.stop_trainer()

    async def _prepare(self) -> None:
        """The node trains without it: what it did not fetch before, it fetches when the plan is there."""
        try:
            await self._local_state.prefetcher.run()
        except Exception as error:
            _log.error("layers of plans to come are not fetched any more", reason=repr(error))

    async def _load(self) -> Trainer:
        """A trainer with its layers and the corpus loaded; the anchor survives in our memory if it had one."""
        context = self._context
        await self.stop_trainer()
        limits, span = context.trainer, span_to_hold(context.directives.plan, self._planned_layers())
        ahead, self._preload = self._preload, None
        trainer = await ahead.take(span) if ahead is not None else None
        if trainer is None:
            limits = self._trainer_config
            known = context.status.facts.layer_times if context.status.facts is not None else ()
            config = replace(limits, span=span, layer_times=known)
            child = await TrainerProcess.start(context.run_dir / LOG_NAME)
            trainer = await Trainer.take(
                child, config, timeout=LOAD_TIMEOUT, on_progress=context.status.show_loading_progress
            )
        self._trainer = trainer
        if self._trainer_config != limits:  # changed while it loaded
            await trainer.limit(self._trainer_config)
        context.status.facts, context.status.trainer = trainer.facts, trainer
        await self._local_state.hold(trainer)
        if self._local_state.head is not None:
            self._on_head_moved(self._local_state.head)
        whole = span is None and span_to_hold(context.directives.plan, self._planned_layers()) is None
        if self._in_plan() and whole and trainer.facts.span is None:
            raise ModelTooLarge(
                "the plan gives this node the whole model, which it cannot hold", "pin it to some layers"
            )
        return trainer

    def _planned_layers(self) -> range:
        """The layers that the plan gives this node; where it gives none, those that the next one may."""
        plan, prepare = self._context.directives.plan, self._context.directives.prepare
        mine = plan.span(self._context.identity.peer_id) if plan is not None else range(0)
        return mine or (range(0) if prepare == self._local_state.prefetcher.refused else prepare)

    def _needs_reload(self, trainer: Trainer) -> bool:
        """Whether the trainer has to be loaded anew."""
        wanted = self._planned_layers()
        return len(wanted) > 0 and trainer.facts.held_layers != wanted

    async def _train_through(self, trainer: Trainer) -> None:
        while not self.finished.is_set():
            self._wait_state()
            await self._unless_trainer_dies(trainer, self._context.directives.until(self._has_work))
            if self._context.directives.order == mb.ORDER_WRITE_GENESIS and self.genesis is None:
                await self._write_genesis(trainer)
            if self._needs_reload(trainer) and not self._pause_reason:
                self._reloading = True  # still part of the plan, or of the next
                return
            if self._in_plan() and not self._pause_reason:
                await self._follow_plan(trainer)

    async def _follow_plan(self, trainer: Trainer) -> None:
        """Synchronise with the others, then train in rounds until finished or no longer in the plan."""
        context, plan = self._context, self._plan()
        try:
            head = await self._unless_trainer_dies(trainer, self._synchronise(plan))
        except ChildDied:
            raise
        except AtollError as error:
            _log.warning("cannot synchronise yet", reason=str(error))
            await asyncio.sleep(_RETRY.total_seconds())
            return
        ranges = position_at(head, plan, minimum_lease_samples(context.spec)).holdings.get(context.identity.peer_id, ())
        await trainer.load(ranges=ranges, committed_tokens=head.committed_tokens)
        self._on_head_moved(head)
        if self._first_evaluation is not None:  # told after genesis, which it is an evaluation of
            self._on_evaluation(self._first_evaluation)
            self._first_evaluation = None
        await self._unless_trainer_dies(trainer, self._join_route(plan, trainer))
        engine = self._make_engine(trainer, head, plan)
        running = asyncio.create_task(engine.run(self._links))
        self._engine = self._local_state.engine = engine
        following = asyncio.create_task(self._follow_directives(trainer, engine))
        try:
            await self._wait_any_or_trainer_death(trainer, running, following)
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
        """Pass on plans, pauses and resumes; returns when a plan goes on without this node or gives it other layers."""
        context = self._context
        training: bool | None = None
        followed = engine.plan.version
        while self._in_plan() and not self._needs_reload(trainer):
            plan = self._plan()
            if not trainer.facts.holds_all and not plan.accepts(engine.head):
                break  # an earlier round of these layers is in our own checkpoints, maybe in nobody else's
            if plan.version > followed:
                engine.plan_received(plan)
                await self._join_route(plan, trainer)
                followed = plan.version
                if training is not None:
                    self._publish_state(plan, training=training)
            wanted = self._may_train()
            if wanted is not training:
                await (trainer.train() if wanted else trainer.pause())
                training = wanted
                self._publish_state(plan, training=wanted)
            await context.directives.until(partial(self._changed_since, plan.version, wanted))
        await engine.rest(ROUND_END_TIMEOUT)

    def _publish_state(self, plan: Plan, *, training: bool) -> None:
        """What this node does under `plan` from now on."""
        context = self._context
        if not training:
            context.status.enter(mb.NODE_STATE_PAUSED, self._why_paused())
        elif context.identity.peer_id in plan.stages:
            context.status.enter(mb.NODE_STATE_TRAINING, "training")
        else:
            span = plan.span(context.identity.peer_id)
            context.status.enter(mb.NODE_STATE_READY, f"stands by with layers {span.start} to {span.stop - 1}")
        context.link.send_heartbeat_now()

    async def _join_route(self, plan: Plan, trainer: Trainer) -> None:
        """The node takes part in rounds even where it cannot stand on its route."""
        try:
            await self._route.follow(plan, trainer)
        except ChildDied:
            raise
        except AtollError as error:
            _log.error("this node cannot stand on its route", reason=str(error))

    async def _finish(self, trainer: Trainer) -> None:
        """Write the state of the last common round and say so."""
        context = self._context
        await trainer.pause()
        assert self._local_state.head is not None
        try:
            path = await self.save(FINISH_TIMEOUT)
        except AtollError as error:  # the others have it, and we still serve it from memory
            told = f"but its state could not be written: {error}"
        else:
            context.status.anchor_path = str(path / ANCHOR) if path is not None else ""
            told = f"checkpoint at {path}"
        context.status.enter(mb.NODE_STATE_FINISHED, f"finished at round {self._local_state.head.round}; {told}")
        _log.info("run finished; still serving until told to stop", round=self._local_state.head.round, outcome=told)
        context.link.send_heartbeat_now()
        self.finished.set()

    # --- getting to a common state ---------------------------------------------------------------------

    async def _write_genesis(self, trainer: Trainer) -> None:
        """Initialise the model here and sign round 0; the others fetch it by digest."""
        context = self._context
        context.status.enter(mb.NODE_STATE_CATCHING_UP, "writing the genesis anchor")
        head, state = await write_genesis(
            trainer, context.identity, context.spec.run.name, context.run_dir, context.clock
        )
        self._local_state.begin(head, state)
        self._on_head_moved(head)
        if trainer.facts.holds_all:
            self._first_evaluation = mb.EvaluationReport(round=0, loss=await trainer.evaluate(), committed_tokens=0)
        self.genesis = mb.GenesisReport(layers=trainer.facts.layers, manifest=head.committed)
        context.link.send_heartbeat_now()

    async def _synchronise(self, plan: Plan) -> Head:
        self._context.status.enter(mb.NODE_STATE_CATCHING_UP, "fetching anchor and momentum")
        return await self._local_state.synchronise(plan)

    def _make_engine(self, trainer: Trainer, head: Head, plan: Plan) -> AveragingEngine:
        context = self._context
        assert self._local_state.state is not None
        return AveragingEngine(
            identity=context.identity,
            operator_key=context.operator_key,
            spec=context.spec,
            policies=policies(context.spec, trainer.facts.layer_offsets),
            trainer=trainer,
            state=self._local_state.state,
            manifests=context.manifests,
            votes=context.votes,
            network=context.network,
            exchanges=self._exchanges,
            head=head,
            plan=plan,
            clock=context.clock,
            counters=context.status.counters,
            callbacks=RoundCallbacks(
                committed=self._on_head_moved,
                report=context.link.report,
                evaluated=self._on_evaluation,
                ask_coordinator=self._ask_coordinator,
                plan_newer_than=context.directives.plan_newer_than,
                plan_shared=context.directives.accept_plan,
            ),
        )

    # --- orders from the owner -------------------------------------------------------------------------

    def pause(self, reason: str) -> None:
        """The owner, or a limit, wants the machine back; `reason` tells people.

        Progress since the last round is given up if a plan goes on without us.
        """
        self._pause_reason = reason
        if self._context.status.state == mb.NODE_STATE_PAUSED:
            self._context.status.detail = reason
        self._context.directives.wake()

    def resume(self) -> None:
        """Train again."""
        self._pause_reason = ""
        self._context.directives.wake()

    async def limit(self, limits: TrainerConfig) -> None:
        """What this trainer, and those after it, may take. Raises `ModelTooLarge`; nothing changes then."""
        if self._trainer is not None:
            with contextlib.suppress(ChildDied):  # the next one is started with them
                await self._trainer.limit(limits)
        self._trainer_config = limits

    async def next_round(self, timeout: timedelta) -> bool:
        """Wait for our last rounds, one of every fragment, so that no progress is lost by leaving; False if none came.

        Who is left behind by the others does not wait: the plan's members cannot commit a round any more.
        """
        start = self._context.status.head_round
        engine = self._engine
        if engine is None or self._pause_reason:
            return False
        engine.leave()

        def moved(rounds: int) -> bool:
            return self._context.status.head_round >= start + rounds

        def over() -> bool:
            plan = self._context.directives.plan
            stuck = plan is not None and not plan.can_decide(engine.head)
            return moved(engine.turns) or self.finished.is_set() or stuck

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout.total_seconds()):
                await self._context.directives.until(over)
        return moved(1)

    async def generate(self, prompt: str, tokens: int) -> str:
        """Text from the committed anchor. Raises `InvalidTransition` before there is one.

        A finished session has given the device back; it borrows it again for this.
        """
        if self._local_state.head is None or (self._trainer is None and not self.finished.is_set()):
            raise InvalidTransition("there is no anchor to generate from yet")
        trainer = self._trainer or await self._load()
        try:
            return await trainer.generate(prompt, tokens)
        finally:
            if self.finished.is_set():
                await self.stop_trainer()

    async def save(self, timeout: timedelta) -> Path | None:
        """A checkpoint of the head, while nothing moves it; None when there is no head yet.

        Raises `DeadlineExceeded`, `DataDirUnusable`.
        """
        state = self._local_state.checkpoint_state()
        return await self._context.checkpoints.flush(state, timeout) if state is not None else None

    async def stop_trainer(self) -> None:
        """End the trainer process, if there is one."""
        if self._trainer is not None:
            trainer, self._trainer = self._trainer, None
            await trainer.stop(STOP_TIMEOUT)

    # --- small words -----------------------------------------------------------------------------------

    async def _receive(self, peer: str, message: dp.RoundMessage) -> None:
        if self._engine is not None:
            await self._engine.receive(peer, message)

    async def _on_peer_lost(self, peer: str) -> None:
        if self._engine is not None:
            await self._engine.lost(peer)

    async def _ask_coordinator(self, round_id: RoundId, payload: bytes) -> rt.TieBreak:
        """The coordinator's promise or vote; not granted when it cannot be asked."""
        try:
            answer = await self._context.link.vote(mb.VoteRequest(round=round_id.to_proto(), payload=payload))
        except AtollError as error:
            return rt.TieBreak(round_id, payload, granted=False, voted=None, vote=None, reason=str(error))
        ballot = answer.accepted_ballot
        voted = LastVote(Ballot(ballot.plan_version, ballot.attempt), answer.accepted_payload)
        return rt.TieBreak(
            round_id,
            payload,
            granted=answer.granted,
            voted=voted if answer.HasField("accepted_ballot") else None,
            vote=answer.vote if answer.HasField("vote") else None,
            reason=answer.reason,
        )

    def _on_head_moved(self, head: Head) -> None:
        status = self._context.status
        self._local_state.moved(head)
        status.head_round, status.head_hash, status.committed_tokens = head.round, head.hash, head.committed_tokens
        state = self._local_state.checkpoint_state()
        if state is not None and head.round > 0:
            self._context.checkpoints.offer(state, only_copy=self._is_only_holder(head))
        self._context.directives.wake()

    def _is_only_holder(self, head: Head) -> bool:
        """Whether nobody else took part in its round of some of these layers, on a route."""
        plan, me = self._context.directives.plan, self._context.identity.peer_id
        if plan is None or plan.is_replica(me):
            return False
        mine, changed = plan.span(me), changed_layers(head.manifest)
        layers = range(max(mine.start, changed.start), min(mine.stop, changed.stop))
        there = head.electorate.members | {me}
        return any(plan.holders(range(layer, layer + 1)) & there == {me} for layer in layers)

    def _on_evaluation(self, report: mb.EvaluationReport) -> None:
        self._context.status.validation_loss = report.loss
        self._context.link.report(report)

    def _plan(self) -> Plan:
        assert self._context.directives.plan is not None
        plan = self._context.directives.plan
        self._context.status.plan_version, self._context.status.members = plan.version, len(plan.members)
        self.genesis = None  # a plan is the proof that the coordinator has it
        return plan

    def _in_plan(self) -> bool:
        plan = self._context.directives.plan
        return plan is not None and self._context.identity.peer_id in plan.members

    def _may_train(self) -> bool:
        return not self._pause_reason and self._context.directives.run_state != mb.RUN_STATE_PAUSED

    def _changed_since(self, plan_version: int, training: bool) -> bool:
        if not self._in_plan():
            return True
        return (self._plan().version, self._may_train()) != (plan_version, training)

    def _why_paused(self) -> str:
        return self._pause_reason or "the operator paused the run"

    def _why_waiting(self) -> str:
        context, needed = self._context, self._context.spec.run.min_nodes
        if context.directives.notice:
            return f"ready, but {context.directives.notice}"
        begins = f" (the run begins with {needed} nodes)" if context.directives.plan is None and needed > 1 else ""
        return f"ready; waiting for a plan{begins}"

    def _wait_state(self) -> None:
        if self._pause_reason:
            self._context.status.enter(mb.NODE_STATE_PAUSED, self._why_paused())
        else:
            self._context.status.enter(mb.NODE_STATE_READY, self._why_waiting())
        self._context.link.send_heartbeat_now()

    def _has_work(self) -> bool:
        waiting_for_genesis = self._context.directives.order == mb.ORDER_WRITE_GENESIS and self.genesis is None
        changed = bool(self._pause_reason) != (self._context.status.state == mb.NODE_STATE_PAUSED)
        changed |= (
            self._context.status.state == mb.NODE_STATE_READY and self._context.status.detail != self._why_waiting()
        )
        loads = self._trainer is not None and self._needs_reload(self._trainer)
        return waiting_for_genesis or changed or ((self._in_plan() or loads) and not self._pause_reason)

    async def _unless_trainer_dies(self, trainer: Trainer, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        await self._wait_any_or_trainer_death(trainer, task)
        return task.result()

    async def _wait_any_or_trainer_death(self, trainer: Trainer, *tasks: asyncio.Future[Any]) -> None:
        """Wait for one of the tasks; raise what it raised, or `ChildDied` when the trainer went first."""
        try:
            waiting: list[asyncio.Future[Any]] = [*tasks, trainer.died]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if trainer.died.done():
                raise ChildDied(f"the trainer ended: {trainer.died.result()}")
            for task in tasks:
                if task.done():
                    task.result()
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
