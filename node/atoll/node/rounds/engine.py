"""Carries out the actions of the round machine with network, trainer and disk.

Three queues keep the order. The machine processes one event at a time; a peer that sends events faster has to wait
(event_queue.py). Orders to the trainer (freeze, discard, install, catch up) run one after another (trainer_orders.py).
Pledges are written to disk before they are sent (outbox.py). Everything else (exchanges, repairs, questions to others)
runs in background tasks. Training never waits for any of these.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from datetime import timedelta

from atoll.core import log
from atoll.core.clock import unix_ms
from atoll.core.errors import first_error
from atoll.core.fragments import Fragment
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.quorum import MARK_BYTES, Promised
from atoll.core.round_id import RoundId
from atoll.node.exchange.exchange_server import ExchangeServer
from atoll.node.rounds import types as rt
from atoll.node.rounds.callbacks import RoundCallbacks, RoundCounters
from atoll.node.rounds.catching_up import CatchingUp
from atoll.node.rounds.evaluation import Evaluation
from atoll.node.rounds.event_queue import EventQueue
from atoll.node.rounds.installed_state import InstalledState
from atoll.node.rounds.installer import Installer
from atoll.node.rounds.machine import RoundMachine
from atoll.node.rounds.member_streams import RoundLinks
from atoll.node.rounds.outbox import Outbox
from atoll.node.rounds.own_progress import OwnProgress
from atoll.node.rounds.run_member import RunMember
from atoll.node.rounds.signatures import IdentityVoteSigner
from atoll.node.rounds.staged_results import RoundResults
from atoll.node.rounds.trainer_orders import TrainerOrders
from atoll.node.rounds.training_audits import TrainingAudits
from atoll.node.state.vote_store import VoteStore
from atoll.node.system.background_tasks import BackgroundTasks
from atoll.node.trainer.trainer import Trainer
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import membership_pb2 as mb

_TICK_SECONDS = 0.05

_log = log.get("rounds")


class AveragingEngine:
    """Runs the outer rounds of one node."""

    def __init__(
        self,
        member: RunMember,
        policies: rt.PolicyOf,
        trainer: Trainer,
        installed: InstalledState,
        plan: Plan,
        *,
        votes: VoteStore,
        exchanges: ExchangeServer,
        counters: RoundCounters,
        callbacks: RoundCallbacks,
        told: Promised | None = None,
    ) -> None:
        """`told`: the newest promise that an earlier process of this node reported to the coordinator."""
        me = member.peer_id
        self.finished = asyncio.Event()
        self._clock, self._callbacks, self._installed = member.clock, callbacks, installed
        self._machine = machine = RoundMachine(
            me,
            policies,
            IdentityVoteSigner(member.identity, member.spec.run.name, member.operator_key),
            installed.head,
            plan,
            member.clock.monotonic(),
            votes.load(),
            installed.manifests.newest(),
            draw_mark=lambda: secrets.token_bytes(MARK_BYTES),
            told=told,
        )
        self._events = EventQueue()
        self._orders = orders = TrainerOrders()
        self._background = background = BackgroundTasks()
        self._outbox = Outbox(me, votes, member.clock, callbacks.plan_newer_than, self._events.put)
        self._results = results = RoundResults(
            member, machine, installed.state, exchanges, background, self._events.put, counters
        )
        audits = TrainingAudits(member, trainer, installed.manifests, background, orders.put, callbacks.audited)
        self._progress = progress = OwnProgress(me, trainer, machine, installed, audits)
        self._catching_up = catching_up = CatchingUp(
            member, machine, installed, results, progress, orders, background, self._arrived
        )
        evaluation = Evaluation(me, trainer, member.clock, background, lambda: self.head, callbacks.evaluated)
        self._installer = Installer(
            me, machine, installed, results, progress, evaluation, counters, catching_up.begin, self.finished
        )
        installed.tell(catching_up.head_moved, callbacks.committed)
        self._abstains = False  # the value that was last logged
        self._head_is_new = False  # report the progress that remains after the commit at once

    @property
    def head(self) -> Head:
        """The newest head whose state is installed."""
        return self._installed.head

    @property
    def moving(self) -> bool:
        """Whether the state is being changed. It must not be served meanwhile."""
        return self._installed.moving

    @property
    def plan(self) -> Plan:
        """The plan that rounds run under now."""
        return self._machine.plan

    @property
    def turns(self) -> int:
        """The number of rounds in which every layer is averaged once."""
        return len(self._machine.policy.fragments)

    def leave(self) -> None:
        """Make the next round this node's last, and ask for it to open now."""
        self._events.put(rt.Leave())

    async def receive(self, peer: str, message: dp.RoundMessage) -> None:
        """Process a round message from a member. Returns when the event queue has room for it."""
        if message.HasField("plan"):
            self._callbacks.plan_shared(message.plan)
        elif not self._catching_up.active or message.HasField("open"):  # followed once this node has caught up
            await self._events.put_from(peer, rt.Received(peer, message))

    async def lost(self, peer: str) -> None:
        """Report to the machine that a member's connection broke."""
        await self._events.put_from(peer, rt.Lost(peer))

    def plan_received(self, plan: Plan) -> None:
        """Give the machine a newer plan, which it adopts between rounds."""
        self._events.put(rt.PlanReceived(plan))

    async def rest(self, timeout: timedelta) -> None:
        """Wait until no round runs here and all committed rounds are installed, or until the timeout.

        A staged result of a round that is not decided yet is lost when this engine ends.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout.total_seconds()):
                await self._orders.join()
                while self._machine.phase is not rt.Phase.IDLE:
                    await asyncio.sleep(_TICK_SECONDS)
                    await self._orders.join()

    async def run(self, links: RoundLinks) -> None:
        """Take part in rounds until cancelled or `finished`. Raises the errors of the trainer and the disk."""
        self._outbox.links = links
        if self._machine.finished:
            self.finished.set()
        try:
            await self._results.require_equal_bits()
            async with asyncio.TaskGroup() as tasks:
                loops = self._orders.run(), self._outbox.carry_out_pledges(), self._feed()
                working = [tasks.create_task(loop) for loop in loops]
                await self.finished.wait()
                await self._orders.join()
                for task in working:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            self._events.close()
            await self._background.stop()
            self._results.close()

    # --- events to the machine -----------------------------------------------------------------------

    async def _feed(self) -> None:
        """Pass events to the machine as they come.

        Send a tick at every new head and at a fixed interval, also under load.
        """
        next_tick = self._clock.monotonic() + _TICK_SECONDS
        while True:
            try:
                async with asyncio.timeout(max(0.0, next_tick - self._clock.monotonic())):
                    self._step(await self._events.get())
            except TimeoutError:
                pass  # no event came; only the tick is due
            if self._head_is_new or self._clock.monotonic() >= next_tick:
                self._head_is_new = False
                next_tick = self._clock.monotonic() + _TICK_SECONDS
                self._tick()
                await asyncio.sleep(0)  # lets other tasks run while many events come in

    def _tick(self) -> None:
        if self._catching_up.active:
            return  # the machine's head is out of date during a catch-up
        self._step(self._progress.report())
        self._step(rt.Tick())
        self._catching_up.look_if_quiet()

    def _step(self, event: rt.Event) -> None:
        before = self._machine.plan
        for action in self._machine.step(event, self._clock.monotonic(), unix_ms(self._clock)):
            self._perform(action)
        self._tell_abstention()
        if self._machine.plan is not before and self._progress.begins_to_drive(before):
            self._orders.put(self._progress.drive)

    def _arrived(self, head: Head) -> None:
        """Move the machine to `head` after a catch-up."""
        self._step(rt.HeadMoved(head))
        self._tick()  # so that others learn at once that this node is at the head
        if self._machine.finished:
            self.finished.set()

    def _tell_abstention(self) -> None:
        """Log once that this seat does not vote. The other seats decide meanwhile."""
        abstains = self._machine.abstains
        if abstains and not self._abstains:
            _log.warning(
                "this seat does not vote until a round counts it: its record of votes is not the newest",
                cause="the data directory was restored or copied, or its file of votes is lost",
                round=self._machine.round_id.number,
            )
        self._abstains = abstains

    # --- actions of the machine ----------------------------------------------------------------------

    def _perform(self, action: rt.Action) -> None:
        match action:
            case rt.Send(peer, message):
                self._outbox.send(peer, message)
            case rt.Pledge():
                self._outbox.pledge(action)
            case rt.SharePlan(peer):
                self._outbox.share_plan(peer, self._machine.plan.version)
            case rt.Freeze(round_id, fragment):
                self._orders.put(lambda: self._freeze(round_id, fragment))
            case rt.RunExchange(_, start, seconds, fragment):
                self._results.begin(start, seconds, fragment, self._progress.pseudo_gradient(fragment), self.head)
            case rt.Complete(round_id, settle, seconds):
                self._results.complete(round_id, settle, seconds)
            case rt.AskCoordinator(round_id, proposal):
                self._background.begin(self._ask_coordinator(round_id, proposal))
            case rt.Release(round_id, thaw):
                self._results.abandon(round_id)
                if thaw:
                    self._orders.put(self._progress.thaw)
            case rt.Install(head, opened_here, counted):
                self._head_is_new = True
                share = self._progress.account(head, counted)
                self._orders.put(lambda: self._installer.install(head, opened_here, share))
            case rt.CatchUp(reason):
                self._catching_up.look(reason)
            case rt.ContributorsMissing(round_id, peer, contributors):
                _log.info("missing in sums", round=str(round_id), said_by=peer, contributors=contributors)
            case rt.Report():
                self._report(action)

    async def _freeze(self, round_id: RoundId, fragment: Fragment) -> None:
        await self._results.ended()
        if self._machine.is_freezing(round_id):  # the attempt still needs the snapshot
            self._events.put(await self._progress.freeze(round_id, fragment))

    async def _ask_coordinator(self, round_id: RoundId, proposal: bytes) -> None:
        self._events.put(await self._callbacks.ask_coordinator(round_id, proposal))

    def _report(self, action: rt.Report) -> None:
        self._callbacks.report(
            mb.RoundReport(
                round=action.round_id.to_proto(),
                committed=action.manifest is not None,
                reason=action.reason,
                manifest=action.manifest,
                seconds=action.seconds,
            )
        )
        if action.manifest is None:
            _log.warning("round abandoned by its opener", round=str(action.round_id), reason=action.reason)
