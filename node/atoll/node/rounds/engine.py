"""The shell around the round machine: it carries out actions over network, trainer and disk.

Three queues keep order. Events enter the machine one by one; a peer that sends them faster waits. Orders to the
trainer (freeze, discard, apply, evaluate) run one after another, so that a round's snapshot never overtakes the commit
before it. Pledges are on disk before they are sent. Everything else (exchanges, repairs, questions to others) runs
beside, and training never waits for any of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from datetime import timedelta

from atoll.core import log
from atoll.core.clock import Clock, unix_ms
from atoll.core.data_position import goes_on
from atoll.core.errors import AtollError, MessageTooLarge, first_error
from atoll.core.fragments import Fragment
from atoll.core.identity import Identity
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.quorum import MARK_BYTES, Promised
from atoll.core.round_id import RoundId
from atoll.core.run_spec import RunSpec
from atoll.node.exchange.exchange_server import ExchangeServer
from atoll.node.rounds import types as rt
from atoll.node.rounds.callbacks import RoundCallbacks, RoundCounters
from atoll.node.rounds.decide import is_witness, position_at
from atoll.node.rounds.evaluation import Evaluation
from atoll.node.rounds.event_queue import EventQueue
from atoll.node.rounds.lookout import Lookout
from atoll.node.rounds.machine import RoundMachine
from atoll.node.rounds.member_streams import RoundLinks
from atoll.node.rounds.outer_schedule import is_stale
from atoll.node.rounds.signatures import IdentityVoteSigner
from atoll.node.rounds.snapshot_ledger import CountedShare
from atoll.node.rounds.staged_results import RoundResults
from atoll.node.rounds.token_account import TokenAccount
from atoll.node.rounds.training_audits import InstalledRound, TrainingAudits
from atoll.node.state.anchor import AnchorState
from atoll.node.state.catchup import catch_up
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.vote_store import VoteStore
from atoll.node.system.background_tasks import BackgroundTasks
from atoll.node.trainer.trainer import Trainer
from atoll.node.wire.transport import Network
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

_TICK_SECONDS = 0.05
_LOOK_AHEAD_SECONDS = 30.0  # at least, and two maximal rounds, without a commit
_CATCH_UP_PAUSE = 1.0  # seconds, after one that failed
_PLAN_AGAIN_SECONDS = 5.0  # to a member that still reports an older one

_log = log.get("rounds")


class AveragingEngine:
    """Outer rounds on one node."""

    def __init__(
        self,
        *,
        identity: Identity,
        operator_key: bytes,
        spec: RunSpec,
        policies: rt.PolicyOf,
        trainer: Trainer,
        state: AnchorState,
        manifests: ManifestStore,
        votes: VoteStore,
        network: Network,
        exchanges: ExchangeServer,
        head: Head,
        plan: Plan,
        clock: Clock,
        counters: RoundCounters,
        callbacks: RoundCallbacks,
        told: Promised | None = None,
    ) -> None:
        """`told`: the newest promise that an earlier process of this node told the coordinator."""
        self.head = head  # what `state` holds
        self._spec = spec
        self._trainer = trainer
        self._state = state
        self._manifests = manifests
        self._votes = votes
        self._operator_key = operator_key
        self._network = network
        self._clock = clock
        self._counters = counters
        self._callbacks = callbacks
        self._given = position_at(head, plan, policies(plan).round_samples).holdings.get(identity.peer_id, ())
        self._me = identity.peer_id
        self._machine = RoundMachine(
            self._me,
            policies,
            IdentityVoteSigner(identity, spec.run.name, operator_key),
            head,
            plan,
            clock.monotonic(),
            votes.load(),
            manifests.newest(),
            draw_mark=lambda: secrets.token_bytes(MARK_BYTES),
            told=told,
        )
        self._events = EventQueue()
        self._orders: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._pledges: asyncio.Queue[rt.Pledge] = asyncio.Queue()
        self._background = BackgroundTasks()
        self._results = RoundResults(
            spec,
            self._machine,
            state,
            network,
            exchanges,
            self._background,
            self._events.put,
            clock=clock,
            counters=counters,
        )
        self._token_account = TokenAccount(trainer.status.tokens, head.round)
        self._lookout = Lookout(network, operator_key, clock, self._background, lambda: self.head, self._begin_catch_up)
        self._evaluation = Evaluation(
            self._me, trainer, clock, self._background, lambda: self.head, callbacks.evaluated
        )
        self._training_audits = TrainingAudits(
            self._me,
            trainer,
            manifests,
            spec.data.sequence_length,
            self._background,
            self._orders.put_nowait,
            callbacks.audited,
        )
        self._catching_up = False
        self._plans_sent: dict[str, float] = {}  # peer → when it was told our plan
        self._accounted = (
            b"",
            CountedShare(rt.Counted.UNKNOWN),
        )  # the head before the last commit; what that holds of ours
        self._abstains = False  # as it was last told
        self._unsent: dp.RoundMessage | None = None  # the last message that was too large
        self._head_is_new = False  # what it leaves of our progress shall be reported at once
        self.moving = False  # the state is changing; it must not be served
        self.finished = asyncio.Event()

    @property
    def plan(self) -> Plan:
        """The plan that rounds run under now."""
        return self._machine.plan

    @property
    def turns(self) -> int:
        """In how many rounds every layer has its turn."""
        return len(self._machine.policy.fragments)

    def leave(self) -> None:
        """The next round is this node's last; it shall open now."""
        self._events.put(rt.Leave())

    async def receive(self, peer: str, message: dp.RoundMessage) -> None:
        """A round message from a member; returns when there is room for it."""
        if message.HasField("plan"):
            self._callbacks.plan_shared(message.plan)
        elif not self._catching_up or message.HasField("open"):  # it may be followed when we are there
            await self._events.put_from(peer, rt.Received(peer, message))

    async def lost(self, peer: str) -> None:
        """A member's connection broke."""
        await self._events.put_from(peer, rt.Lost(peer))

    def plan_received(self, plan: Plan) -> None:
        """A newer plan; adopted between rounds."""
        self._events.put(rt.PlanReceived(plan))

    async def rest(self, timeout: timedelta) -> None:
        """Wait until no round is under way here and what was committed is installed, or the time is up.

        What is staged for a round that is not decided yet would be lost with this engine.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout.total_seconds()):
                await self._orders.join()
                while self._machine.phase is not rt.Phase.IDLE:
                    await asyncio.sleep(_TICK_SECONDS)
                    await self._orders.join()

    async def run(self, links: RoundLinks) -> None:
        """Take part in rounds until cancelled or `finished`. Raises what the trainer or the disk raise."""
        self._links = links
        if self._machine.finished:
            self.finished.set()
        try:
            await self._results.require_equal_bits()
            async with asyncio.TaskGroup() as tasks:
                ordering = tasks.create_task(self._carry_out_orders())
                pledging = tasks.create_task(self._carry_out_pledges())
                ticking = tasks.create_task(self._feed())
                await self.finished.wait()
                await self._orders.join()
                ordering.cancel()
                pledging.cancel()
                ticking.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            self._events.close()
            await self._background.stop()
            self._results.close()

    async def _feed(self) -> None:
        """Events as they come, and a tick at every new head, and every so often however many events come."""
        next_tick = self._clock.monotonic() + _TICK_SECONDS
        while True:
            try:
                async with asyncio.timeout(max(0.0, next_tick - self._clock.monotonic())):
                    self._step(await self._events.get())
            except TimeoutError:
                pass  # nothing came: only the tick
            if self._head_is_new or self._clock.monotonic() >= next_tick:
                self._head_is_new = False
                next_tick = self._clock.monotonic() + _TICK_SECONDS
                self._tick()
                await asyncio.sleep(0)  # a flood of events must not keep others from running

    def _tick(self) -> None:
        if self._catching_up:
            return  # what the machine believes is out of date
        status = self._trainer.status
        tokens, tokens_since_snapshot = (
            self._token_account.unreported(status.tokens),
            self._token_account.tokens_since_snapshot(status.tokens),
        )
        self._step(rt.Progress(tokens, status.step_seconds, tokens_since_snapshot))
        self._step(rt.Tick())
        if self._lookout.quiet_seconds >= max(_LOOK_AHEAD_SECONDS, 2 * self._machine.policy.round_max.total_seconds()):
            self._look("nothing was committed for long")

    def _step(self, event: rt.Event) -> None:
        before = self._machine.plan
        for action in self._machine.step(event, self._clock.monotonic(), unix_ms(self._clock)):
            self._perform(action)
        self._tell_abstention()
        plan = self._machine.plan
        if plan is not before and self._me in plan.drivers:
            moved = self._ranges(self.head, plan) != self._ranges(self.head, before)
            if moved or self._me not in before.drivers:
                self._orders.put_nowait(self._drive)

    def _tell_abstention(self) -> None:
        """Say it once: others decide as long as it lasts."""
        abstains = self._me in self._machine.openers and not self._machine.votes
        if abstains and not self._abstains:
            _log.warning(
                "this seat does not vote until a round counts it: its record of votes is not the newest",
                cause="the data directory was restored or copied, or its file of votes is lost",
                round=self._machine.round_id.number,
            )
        self._abstains = abstains

    async def _drive(self) -> None:
        """This node drives a route, with the layers that it has, on other samples than before, or for the first time.

        If it drove before, others may have its snapshot, and commit it.
        """
        self._given = self._ranges(self.head)
        await self._trainer.set_ranges(self._given)

    def _perform(self, action: rt.Action) -> None:
        match action:
            case rt.Send(peer, message):
                self._send(peer, message)
            case rt.Pledge():
                self._pledges.put_nowait(action)
            case rt.SharePlan(peer):
                self._share_plan(peer)
            case rt.Freeze(round_id, fragment):
                self._orders.put_nowait(lambda: self._freeze(round_id, fragment))
            case rt.RunExchange(_, start, seconds, fragment):
                self._begin_exchange(start, seconds, fragment)
            case rt.Complete(round_id, settle, seconds):
                self._results.complete(round_id, settle, seconds)
            case rt.AskCoordinator(round_id, proposal):
                self._background.begin(self._ask_coordinator(round_id, proposal))
            case rt.Release(round_id, thaw):
                self._release(round_id, thaw)
            case rt.Install(head, opened_here, counted):
                share = CountedShare.of(self._me, head.manifest, counted)
                self._account(head, share)
                self._orders.put_nowait(lambda: self._install(head, opened_here, share))
            case rt.CatchUp(reason):
                self._look(reason)
            case rt.ContributorsMissing(round_id, peer, contributors):
                _log.info("missing in sums", round=str(round_id), said_by=peer, contributors=contributors)
            case rt.Report():
                self._report(action)

    # --- what binds us: on disk first ------------------------------------------------------------------

    async def _carry_out_pledges(self) -> None:
        while True:
            pledge = await self._pledges.get()
            try:
                await asyncio.to_thread(self._votes.save, pledge.record)
            except AtollError as error:  # a full disk
                _log.error("cannot vote", reason=str(error))
                self._events.put(rt.PledgeFailed(pledge.message))
                continue
            if pledge.peer == self._me:
                self._events.put(rt.Received(self._me, pledge.message))
            else:
                self._send(pledge.peer, pledge.message)

    def _send(self, peer: str, message: dp.RoundMessage) -> None:
        try:
            self._links.send(peer, message)
        except MessageTooLarge as error:
            if message is not self._unsent:  # the same message for every member: one line says it
                _log.error("message not sent", reason=str(error))
                self._events.put(rt.SendFailed(message, str(error)))
            self._unsent = message

    def _share_plan(self, peer: str) -> None:
        now = self._clock.monotonic()
        sealed = self._callbacks.plan_newer_than(self._machine.plan.version - 1)
        if sealed is not None and now - self._plans_sent.get(peer, float("-inf")) >= _PLAN_AGAIN_SECONDS:
            self._plans_sent[peer] = now
            self._send(peer, dp.RoundMessage(plan=sealed))

    # --- orders to the trainer, one after another ----------------------------------------------------

    async def _carry_out_orders(self) -> None:
        while True:
            order = await self._orders.get()
            try:
                await order()
            finally:
                self._orders.task_done()

    async def _freeze(self, round_id: RoundId, fragment: Fragment) -> None:
        await self._results.ended()
        if not self._machine.is_freezing(round_id):
            return  # given up while other orders were carried out
        await self._training_audits.stop()
        own = self._state.slice(fragment.start, fragment.end)
        snapshot = await self._trainer.snapshot(own.start, own.stop)
        self._token_account.freeze(snapshot.tokens, self._trainer.status.tokens)
        self._events.put(rt.Frozen(round_id, snapshot.fragment_tokens, snapshot.samples))

    def _account(self, head: Head, share: CountedShare) -> None:
        """What a round holds of ours is not reported again, while its state is still being written."""
        self._head_is_new = True
        self._accounted = (head.manifest.previous_hash, share)
        if is_witness(self._machine.plan, self._me, head.committed.payload):
            self._token_account.pass_by(self._trainer.status.tokens)
        elif share.counted is rt.Counted.SNAPSHOT:
            self._token_account.count(head.round)
        elif share.counted is rt.Counted.UNKNOWN:
            self._token_account.begin_anew(self._trainer.status.tokens)

    async def _install(self, head: Head, opened_here: bool, share: CountedShare) -> None:
        if head.round <= self.head.round:
            return  # we caught up with a later one meanwhile
        if is_witness(self._machine.plan, self._me, head.committed.payload):
            await self._witness(head, opened_here, share)
            return
        staged = self._results.of_layers(head.manifest.layers)
        if staged is None or head.manifest.previous_hash != self.head.hash:  # a fragment is only good where it was made
            self._begin_catch_up(f"the state of round {head.round} is not kept here any more", share)
            return
        before = self.head
        await asyncio.to_thread(self._manifests.try_append, head)
        await self._move(head, self._state.commit, staged)
        self._results.forget()
        self._counters.committed += 1
        own = self._state.slice(staged.start, staged.start + len(staged.anchor_E))
        moved = own.start, own.stop
        await self._take_anchor(head, share, moved)
        _log.info("round committed", round=head.round, tokens=head.committed_tokens)
        self._look_at_verdicts(head.manifest)
        await self._audit_training(head, before, moved)
        await self._end_turn(head, opened_here)

    async def _audit_training(self, head: Head, before: Head, moved: tuple[int, int]) -> None:
        """Only where members train the whole model."""
        await self._training_audits.stop()
        if self._results.served is not None and self._state.is_whole:
            plan, lease = self._machine.plan, self._machine.policy.round_samples
            self._training_audits.begin(InstalledRound(head, before, plan, lease, self._results.served, moved))

    async def _take_anchor(self, head: Head, share: CountedShare, moved: tuple[int, int] | None = None) -> None:
        """Go on from `head`, with the progress that is not part of it: with none, where that cannot be told.

        With none either, where others got the samples of it: the node began under a plan that the round did not know,
        or no round counted it for long.
        """
        before, ranges, committed_tokens = self._given, self._ranges(head), head.committed_tokens
        self._given = ranges
        counted = share.counted
        if not goes_on(before, share.samples, ranges):
            _log.info("training dropped: its samples were given to others", round=head.round)
            counted = rt.Counted.UNKNOWN
        match counted:
            case rt.Counted.NOTHING:
                consumed_samples = share.samples
                await self._trainer.rebase(
                    ranges=ranges, committed_tokens=committed_tokens, consumed_samples=consumed_samples, moved=moved
                )
            case rt.Counted.SNAPSHOT:
                await self._trainer.apply(ranges=ranges, committed_tokens=committed_tokens, moved=moved)
            case rt.Counted.UNKNOWN:
                await self._trainer.load(ranges=ranges, committed_tokens=committed_tokens)
                self._token_account.begin_anew(self._trainer.status.tokens)

    async def _witness(self, head: Head, opened_here: bool, share: CountedShare) -> None:
        """A round of layers that are not held here: what we trained of ours goes on."""
        if head.manifest.previous_hash != self.head.hash:
            self._begin_catch_up(f"round {head.round} does not follow our state")
            return
        await asyncio.to_thread(self._manifests.try_append, head)
        await self._move(head, lambda: None)
        self._results.forget()
        self._counters.witnessed += 1
        await self._take_anchor(head, CountedShare(rt.Counted.NOTHING, share.samples), moved=(0, 0))
        _log.info("round committed by others", round=head.round, tokens=head.committed_tokens)
        await self._end_turn(head, opened_here)

    async def _end_turn(self, head: Head, opened_here: bool) -> None:
        """Perhaps every layer had its round now, or it was the run's last round."""
        over = self._machine.finished and head is self._machine.head
        await self._evaluation.end_turn(
            head, self._machine.plan, opened_here=opened_here, holds_all=self._state.is_whole, last=over
        )
        if over:
            self.finished.set()

    def _look_at_verdicts(self, manifest: manifest_pb2.Manifest) -> None:
        """The owner of a node whose update others do not take should hear of it: its hardware may compute wrongly."""
        place = next((place for place, item in enumerate(manifest.contributions) if item.peer_id == self._me), None)
        parts = sum(verdict.parts_left_out for verdict in manifest.verdicts if verdict.contributor == place)
        if parts:
            self._counters.left_out += 1
            _log.warning(
                "our update was left out of sums",
                round=manifest.round.number,
                parts=parts,
                parts_total=manifest.parts_total,
            )

    async def _move(self, head: Head, change: Callable[..., None], *arguments: object) -> None:
        """Change the state to that of `head`, off the event loop; nobody is served a mixture meanwhile.

        State and head change together even when this is cancelled in between.
        """
        self.moving = True
        changing = asyncio.create_task(asyncio.to_thread(change, *arguments))
        try:
            await asyncio.shield(changing)
        finally:
            await asyncio.wait([changing])
            changing.result()
            self.head = head
            self.moving = False
            self._lookout.head_moved()
            self._callbacks.committed(head)

    # --- beside --------------------------------------------------------------------------------------

    def _begin_exchange(self, start: dp.Start, seconds: float, fragment: Fragment) -> None:
        members = len(start.partition)
        self._counters.joined += 1
        self._counters.bytes_fp32 += 2 * 4 * fragment.elements * (members - 1) // members
        own_E = self._trainer.pseudo_gradient[self._state.slice(fragment.start, fragment.end)]
        self._results.begin(start, seconds, fragment, own_E, self.head)

    async def _ask_coordinator(self, round_id: RoundId, proposal: bytes) -> None:
        self._events.put(await self._callbacks.ask_coordinator(round_id, proposal))

    def _release(self, round_id: RoundId, thaw: bool) -> None:
        self._counters.abandoned += 1
        _log.warning("round abandoned", round=str(round_id))
        self._results.end_exchange()
        if thaw:
            self._orders.put_nowait(self._trainer.discard)

    def _look(self, reason: str) -> None:
        if not self._catching_up:
            self._lookout.look(reason, self._machine.plan)

    def _begin_catch_up(self, reason: str, share: CountedShare | None = None) -> None:
        """Fetch the head that the others agree on. `share` is of the round after ours, where that is known."""
        if self._catching_up:
            return
        self._catching_up = True
        _log.warning("behind", reason=reason)
        self._orders.put_nowait(lambda: self._catch_up(share))

    async def _catch_up(self, share: CountedShare | None) -> None:
        plan, before = self._machine.plan, self.head
        await self._training_audits.stop()
        try:
            try:
                fetched = await catch_up(self._network, plan, self._state, before, operator_key=self._operator_key)
                if fetched is None:
                    return
                head = fetched.head
                share = share or await self._share_after(before, head)
                await asyncio.to_thread(self._manifests.try_append, head)
            except AtollError as error:
                _log.warning("catch-up failed", reason=str(error))
                await asyncio.sleep(_CATCH_UP_PAUSE)  # the next message from ahead tries again
                return
            await self._move(head, self._state.load_fetched, fetched)
            self._results.forget()
            await self._keep_progress(before, head, share)
            self._catching_up = False  # it may not be the end of it
            self._step(rt.HeadMoved(head))
            self._tick()  # so that others hear at once that we are there
            if self._machine.finished:
                self.finished.set()
        finally:
            self._catching_up = False

    async def _share_after(self, before: Head, head: Head) -> CountedShare:
        """What the round after `before`, on the way to `head`, holds of ours: only that one can.

        The machine may have committed that round itself since we began to catch up, and forgotten what it brought.
        """
        after = head if head.round == before.round + 1 else await self._lookout.round_after(self._machine.plan, before)
        previous_hash, share = self._accounted
        if previous_hash == before.hash:
            return share
        if after is None or after.manifest.previous_hash != before.hash:
            return CountedShare(rt.Counted.UNKNOWN)
        return CountedShare.of(self._me, after.manifest, self._machine.counted(after.manifest))

    async def _keep_progress(self, before: Head, head: Head, share: CountedShare) -> None:
        """What was trained and not counted enters the next round, on the new anchor, unless it is stale."""
        usual_tokens, was_counted = self._token_account.usual_tokens, share.counted is rt.Counted.SNAPSHOT
        if was_counted:
            self._token_account.count(before.round + 1)
        tokens = self._token_account.uncounted(self._trainer.status.tokens)
        missed = head.round - before.round - was_counted
        whole_turn = missed >= self.turns  # before that, most of it is of fragments that nobody moved
        stale = whole_turn and is_stale(tokens, usual_tokens, missed)
        await self._take_anchor(head, CountedShare(rt.Counted.UNKNOWN) if stale else share)

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

    # --- small words -----------------------------------------------------------------------------------

    def _ranges(self, head: Head, plan: Plan | None = None) -> tuple[tuple[int, int], ...]:
        """Our samples at `head`, under the plan that rounds run under now, or another one."""
        lease = self._machine.policy.round_samples
        return position_at(head, plan or self.plan, lease).holdings.get(self._me, ())
