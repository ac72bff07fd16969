"""The shell around the round machine: it carries out actions over network, trainer and disk.

Two queues keep order. Events enter the machine one by one. Orders to the trainer (freeze, discard, apply,
evaluate) run one after another, so that a round's snapshot never overtakes the commit before it. Everything
else (exchanges, questions to others) runs beside, and training never waits for any of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from atoll.core import log
from atoll.core.clock import Clock, unix_ms
from atoll.core.errors import AtollError, RoundAbandoned, first_error
from atoll.core.identity import Identity
from atoll.core.manifest import Head, sign_manifest
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.core.run_spec import RunSpec
from atoll.node.averaging import round_types as rt
from atoll.node.averaging.allreduce import Exchange, ExchangeServer
from atoll.node.averaging.decide import position_at
from atoll.node.averaging.links import RoundLinks
from atoll.node.averaging.outer import due_tokens, outer_schedule
from atoll.node.averaging.round import RoundMachine
from atoll.node.state.anchor import AnchorState, Staged
from atoll.node.state.catchup import catch_up, find_manifest, newest_round
from atoll.node.state.manifests import ManifestStore
from atoll.node.training.trainer import Trainer
from atoll.node.transport import Network
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import membership_pb2 as mb

_TICK_SECONDS = 0.2
_LOOK_AHEAD_SECONDS = 30.0  # at least, and two maximal rounds, without a commit
_CATCH_UP_PAUSE = 1.0  # seconds, after one that failed
_RESOLVE_TIMEOUT = timedelta(seconds=20)

_log = log.get("rounds")


@dataclass
class RoundCounters:
    """What the rounds of this process cost."""

    joined: int = 0  # exchanges started
    committed: int = 0
    abandoned: int = 0
    bytes_fp32: int = 0  # what the joined exchanges would have sent in fp32


@dataclass(frozen=True)
class Listener:
    """Whom the engine tells. Called in the event loop; must not block."""

    committed: Callable[[Head], None]
    report: Callable[[mb.RoundReport], None]
    evaluated: Callable[[mb.EvaluationReport], None]


class AveragingEngine:
    """Outer rounds of one fragment (all layers) on one node."""

    def __init__(
        self,
        *,
        identity: Identity,
        spec: RunSpec,
        policy: rt.RoundPolicy,
        trainer: Trainer,
        state: AnchorState,
        manifests: ManifestStore,
        network: Network,
        exchanges: ExchangeServer,
        head: Head,
        plan: Plan,
        clock: Clock,
        counters: RoundCounters,
        listener: Listener,
    ) -> None:
        self.head = head  # what `state` holds
        self._spec = spec
        self._policy = policy
        self._trainer = trainer
        self._state = state
        self._manifests = manifests
        self._network = network
        self._exchanges = exchanges
        self._clock = clock
        self._counters = counters
        self._listener = listener
        self._me = identity.peer_id
        self._machine = RoundMachine(
            self._me, policy, lambda payload: sign_manifest(identity, payload), head, plan, clock.monotonic()
        )
        self._events: asyncio.Queue[rt.Event] = asyncio.Queue()
        self._orders: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._exchange: asyncio.Task[None] | None = None
        self._asides: set[asyncio.Task[None]] = set()
        self._catching_up = False
        self._counted_from = trainer.status.tokens
        self._frozen_tokens = 0
        self._staged: Staged | None = None  # of the round that is being held
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="codec")
        self._last_look = clock.monotonic()
        self.moving = False  # the state is changing; it must not be served
        self.finished = asyncio.Event()

    @property
    def plan(self) -> Plan:
        """The plan that rounds run under now."""
        return self._machine.plan

    @property
    def catching_up(self) -> bool:
        """Whether others are ahead and their state is being fetched."""
        return self._catching_up

    def receive(self, peer: str, message: dp.RoundMessage) -> None:
        """A round message from a member."""
        if not self._catching_up:
            self._events.put_nowait(rt.Received(peer, message))

    def plan_received(self, plan: Plan) -> None:
        """A newer plan; adopted between rounds."""
        self._events.put_nowait(rt.PlanReceived(plan))

    async def run(self, links: RoundLinks) -> None:
        """Take part in rounds until cancelled or `finished`. Raises what the trainer or the disk raise."""
        self._links = links
        if self._machine.finished:
            self.finished.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                ordering = tasks.create_task(self._carry_out_orders())
                ticking = tasks.create_task(self._feed())
                await self.finished.wait()
                await self._orders.join()
                ordering.cancel()
                ticking.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            await self._stop_asides()
            self._executor.shutdown(wait=False, cancel_futures=True)

    async def _feed(self) -> None:
        """Events as they come, and a tick every so often however many events come."""
        next_tick = self._clock.monotonic() + _TICK_SECONDS
        while True:
            try:
                async with asyncio.timeout(max(0.0, next_tick - self._clock.monotonic())):
                    self._step(await self._events.get())
            except TimeoutError:
                pass  # nothing came: only the tick
            if self._clock.monotonic() >= next_tick:
                next_tick = self._clock.monotonic() + _TICK_SECONDS
                self._tick()
                await asyncio.sleep(0)  # a flood of events must not keep others from running

    def _tick(self) -> None:
        if self._catching_up:
            return  # what the machine believes is out of date
        self._step(rt.Progress(max(0, self._trainer.status.tokens - self._counted_from)))
        self._step(rt.Tick())
        quiet = self._clock.monotonic() - self._last_look
        if quiet >= max(_LOOK_AHEAD_SECONDS, 2 * self._policy.round_max.total_seconds()):
            self._last_look = self._clock.monotonic()
            self._aside(self._look_ahead())

    def _step(self, event: rt.Event) -> None:
        for action in self._machine.step(event, self._clock.monotonic(), unix_ms(self._clock)):
            self._perform(action)

    def _perform(self, action: rt.Action) -> None:
        match action:
            case rt.Send(peer, message):
                self._links.send(peer, message)
            case rt.Freeze(round_id):
                self._orders.put_nowait(lambda: self._freeze(round_id))
            case rt.RunExchange(round_id, start):
                self._exchange = self._aside(self._run_exchange(round_id, start))
            case rt.Release(round_id):
                self._release(round_id)
            case rt.Install(round_id, head, opened_here):
                self._orders.put_nowait(lambda: self._install(head, opened_here))
            case rt.Resolve(round_id, peers):
                self._aside(self._resolve(round_id, peers))
            case rt.CatchUp(reason):
                self._begin_catch_up(reason)
            case rt.Report():
                self._report(action)

    # --- orders to the trainer, one after another ----------------------------------------------------

    async def _carry_out_orders(self) -> None:
        while True:
            order = await self._orders.get()
            try:
                await order()
            finally:
                self._orders.task_done()

    async def _freeze(self, round_id: RoundId) -> None:
        snapshot = await self._trainer.snapshot()
        self._frozen_tokens = snapshot.tokens
        self._events.put_nowait(rt.Frozen(round_id, snapshot.tokens, snapshot.samples))

    async def _install(self, head: Head, opened_here: bool) -> None:
        assert self._staged is not None, "only a held round is installed"
        staged, self._staged = self._staged, None
        await asyncio.to_thread(self._manifests.append, head)
        await self._move(head, self._state.commit, staged)
        self._counted_from += self._frozen_tokens
        self._counters.committed += 1
        await self._trainer.apply(ranges=self._ranges(head), committed_tokens=head.committed_tokens)
        _log.info("round committed", round=head.round, tokens=head.committed_tokens)
        if opened_here:
            await self._evaluate(head)
        if self._machine.finished and head is self._machine.head:
            self.finished.set()

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
            self._last_look = self._clock.monotonic()
            self._listener.committed(head)

    async def _evaluate(self, head: Head) -> None:
        loss = await self._trainer.evaluate()
        self._listener.evaluated(
            mb.EvaluationReport(round=head.round, loss=loss, committed_tokens=head.committed_tokens)
        )

    async def _discard(self) -> None:
        await self._trainer.discard()
        self._staged = None

    # --- beside --------------------------------------------------------------------------------------

    async def _run_exchange(self, round_id: RoundId, start: dp.Start) -> None:
        members = len(start.contributions)
        self._counters.joined += 1
        self._counters.bytes_fp32 += 2 * 4 * self._policy.elements * (members - 1) // members
        average_E = torch.empty_like(self._state.anchor_E)  # its own: a cancelled exchange may still write
        exchange = Exchange(
            start,
            self._network,
            self._trainer.pseudo_gradient,
            average_E,
            self._executor,
            self._policy.exchange_timeout,
        )
        try:
            self._exchanges.begin(exchange)
            await exchange.run()
            schedule = outer_schedule(self._spec.sync, self.head.committed_tokens)
            self._staged = await asyncio.get_running_loop().run_in_executor(
                self._executor,
                self._state.stage,
                average_E,
                *schedule,
                round_id.number,
            )
        except RoundAbandoned as error:
            self._events.put_nowait(rt.Failed(round_id, str(error)))
        else:
            self._events.put_nowait(rt.Exchanged(round_id, self._staged.layers))
        finally:
            self._exchanges.end(round_id)

    def _release(self, round_id: RoundId) -> None:
        self._counters.abandoned += 1
        _log.warning("round abandoned", round=str(round_id))
        if self._exchange is not None:
            self._exchange.cancel()
            self._exchange = None
        self._orders.put_nowait(self._discard)

    async def _resolve(self, round_id: RoundId, peers: tuple[str, ...]) -> None:
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT.total_seconds()):
                head = await find_manifest(self._network, peers, self._policy.run_id, round_id)
        except TimeoutError:
            head = None
        _log.warning("round in doubt", round=str(round_id), outcome="committed" if head else "nobody has it")
        self._events.put_nowait(rt.Resolved(round_id, head.committed if head else None))

    async def _look_ahead(self) -> None:
        """Nothing was committed for long: perhaps others went on and their words were lost."""
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT.total_seconds()):
                ahead = await newest_round(self._network, self._machine.plan, self.head)
        except TimeoutError:
            return
        if ahead > self.head.round:
            self._begin_catch_up(f"others are at round {ahead}")

    def _begin_catch_up(self, reason: str) -> None:
        if self._catching_up:
            return
        self._catching_up = True
        _log.warning("behind", reason=reason)
        self._orders.put_nowait(self._catch_up)

    async def _catch_up(self) -> None:
        try:
            plan = self._machine.plan
            fetched = await catch_up(self._network, plan, self._state, self.head)
            if fetched is not None:
                head = fetched.head
                await asyncio.to_thread(self._manifests.append, head)
                await self._move(head, self._state.adopt, fetched)
                await self._trainer.load(ranges=self._ranges(head), committed_tokens=head.committed_tokens)
                self._counted_from = self._trainer.status.tokens
                self._step(rt.HeadMoved(head))
                if self._machine.finished:
                    self.finished.set()
        except AtollError as error:
            _log.warning("catch-up failed", reason=str(error))
            await asyncio.sleep(_CATCH_UP_PAUSE)  # the next message from ahead tries again
        finally:
            self._catching_up = False

    def _report(self, action: rt.Report) -> None:
        self._listener.report(
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

    def _ranges(self, head: Head) -> tuple[tuple[int, int], ...]:
        return position_at(head, self._machine.plan).holdings.get(self._me, ())

    def _aside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)
        return task

    async def _stop_asides(self) -> None:
        for task in list(self._asides):
            task.cancel()
        await asyncio.gather(*self._asides, return_exceptions=True)


def policy_of(spec: RunSpec, *, layers: int, elements: int) -> rt.RoundPolicy:
    """The round policy that a run spec and a layer table say."""
    samples_per_round = -(-spec.sync.round_tokens // spec.data.sequence_length)
    return rt.RoundPolicy(
        run_id=spec.run.name,
        fragment=0,
        layers=layers,
        elements=elements,
        part_elements=spec.sync.part_elements,
        codec=spec.sync.codec,
        due_tokens=lambda committed, members: due_tokens(spec.sync, committed, members * spec.tokens_per_step),
        round_max=spec.sync.round_max_seconds,
        stop_tokens=spec.run.stop_tokens,
        minimum_lease=samples_per_round,
    )
