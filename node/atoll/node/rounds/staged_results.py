"""The current attempt's exchange, and the states that may still be committed.

An exchange gives the digests of the average (`ExchangeDone`). With the opener's Settle it gives a state (`Staged`). The
state is kept while the machine holds its payload, because a commit may come late or in another attempt.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from atoll.core import log
from atoll.core.errors import AtollError, RoundAbandoned
from atoll.core.fragments import Fragment
from atoll.core.manifest import Head
from atoll.core.round_id import RoundId
from atoll.node.exchange.allreduce import Exchange
from atoll.node.exchange.arithmetic_check import require_equal_bits
from atoll.node.exchange.auditor import Dispute
from atoll.node.exchange.exchange_server import ExchangeServer
from atoll.node.rounds import types as rt
from atoll.node.rounds.callbacks import RoundCounters
from atoll.node.rounds.machine import RoundMachine
from atoll.node.rounds.outer_schedule import outer_schedule
from atoll.node.rounds.run_member import RunMember
from atoll.node.rounds.settlement import NONCE_BYTES, RepairSources
from atoll.node.state.anchor import AnchorState, OuterStepBuilder, Staged
from atoll.node.system.background_tasks import BackgroundTasks
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

_STALL = 0.25  # of an exchange's time without a due frame; then the peer is given up
_AUDIT = 0.2  # of the time for a result: wait for contributors' answers
_MOST_THREADS = 8
_ENDING_SECONDS = 5.0  # for a cancelled exchange

_log = log.get("rounds")


@dataclass
class _Running:
    """The exchange of the attempt that this node takes part in."""

    start: dp.Start
    exchange: Exchange
    before: Head
    staging: OuterStepBuilder  # its own, because a cancelled exchange may still write
    task: asyncio.Task[None]
    making: asyncio.Task[None] | None = None  # builds `made`, started before the opener's Settle
    made: Staged | None = None  # the state, if the opener settles on what was received


class RoundResults:
    """`post_event` gets the events for the round machine."""

    def __init__(
        self,
        member: RunMember,
        machine: RoundMachine,
        state: AnchorState,
        exchanges: ExchangeServer,
        background: BackgroundTasks,
        post_event: Callable[[rt.Event], None],
        counters: RoundCounters,
    ) -> None:
        self._member, self._machine, self._state, self._exchanges = member, machine, state, exchanges
        self._background, self._post_event, self._counters = background, post_event, counters
        self._running: _Running | None = None
        self._ending: asyncio.Task[None] | None = None  # the last exchange that was ended
        self.served: Exchange | None = None  # the exchange whose parts others may ask for
        self._staged: dict[bytes, Staged] = {}  # key: digests of the layers; newest last
        self._executor = ThreadPoolExecutor(  # of threads that make no teams of torch's own
            threads(os.cpu_count() or 1), "codec", initializer=torch.set_num_threads, initargs=(1,)
        )

        self._audit_executor = ThreadPoolExecutor(1, "audit", initializer=torch.set_num_threads, initargs=(1,))

    async def require_equal_bits(self) -> None:
        """Check the arithmetic of the threads that compute rounds, of both kinds. Raises `ArithmeticDiffers`."""
        for executor in (self._executor, None):
            await asyncio.get_running_loop().run_in_executor(executor, require_equal_bits)

    def of_layers(self, layers: Iterable[manifest_pb2.LayerState]) -> Staged | None:
        """The staged state with these layers, if it may still be committed."""
        return self._staged.get(_key_of(layers))

    def begin(self, start: dp.Start, seconds: float, fragment: Fragment, own_E: Tensor, head: Head) -> None:
        """Exchange `own_E`, this node's pseudo-gradient of the fragment, on the state of `head`."""
        policy, members = self._machine.policy, len(start.partition)
        self._counters.joined += 1
        self._counters.bytes_fp32 += 2 * 4 * fragment.elements * (members - 1) // members
        staging = self._state.staging(fragment, *outer_schedule(self._member.spec.sync, head.committed_tokens))
        exchange = Exchange(
            start,
            self._member.network,
            own_E,
            staging.take,
            self._executor,
            timedelta(seconds=seconds),
            max(policy.stall, timedelta(seconds=seconds * _STALL)),
            screen=policy.screen,
            audit_executor=self._audit_executor,
        )
        self.end_exchange()
        if self.served is not None:
            self._exchanges.end(self.served.round_id)
        self.served = exchange
        self._exchanges.begin(exchange)
        self._background.begin(self._measure(own_E))
        self._running = _Running(start, exchange, head, staging, self._background.begin(self._run(exchange)))

    def complete(self, round_id: RoundId, settle: dp.Settle, seconds: float) -> None:
        """Repair parts that are missing or differ from the opener's digests, then build the state."""
        self._background.begin(self._complete(round_id, settle, seconds))

    def forget(self) -> None:
        """Drop the staged states, because the head moved."""
        self._staged.clear()
        self.end_exchange()

    def end_exchange(self) -> None:
        """End our exchange. Its parts are served until the next begins, because others may still repair theirs."""
        running, self._running = self._running, None
        if running is not None:
            running.task.cancel()
            running.exchange.drop_sink()
            self._ending = running.task

    def abandon(self, round_id: RoundId) -> None:
        """End the exchange of an attempt that failed."""
        self._counters.abandoned += 1
        _log.warning("round abandoned", round=str(round_id))
        self.end_exchange()

    async def ended(self) -> None:
        """Wait, for a few seconds at most, until an ended exchange no longer reads the pseudo-gradient."""
        if self._ending is not None:
            await asyncio.wait([self._ending], timeout=_ENDING_SECONDS)

    def close(self) -> None:
        """Release threads and exchanges, after all background tasks were stopped."""
        if self.served is not None:
            self._exchanges.end(self.served.round_id)
        for executor in (self._executor, self._audit_executor):
            executor.shutdown(wait=False, cancel_futures=True)

    async def _measure(self, own_E: Tensor) -> None:
        """Measure the update's norm: one pass over the fragment's memory, in parallel to the exchange."""
        norm = await asyncio.get_running_loop().run_in_executor(self._audit_executor, torch.linalg.vector_norm, own_E)
        self._counters.update_norm = norm.item()

    async def _run(self, exchange: Exchange) -> None:
        began = self._member.clock.monotonic()
        try:
            held = await exchange.run()
        except RoundAbandoned as error:  # our own update is invalid
            self._post_event(rt.Failed(exchange.round_id, str(error)))
            return
        finally:
            self._counters.exchange_seconds += self._member.clock.monotonic() - began
        nonce = os.urandom(NONCE_BYTES)  # drawn only after all averages that this node gets are fixed
        self._post_event(rt.ExchangeDone(exchange.round_id, held.digests, held.verdicts, nonce))
        running = self._running
        if all(held.digests) and running is not None and running.exchange is exchange:
            running.making = self._background.begin(self._make(running))

    async def _make(self, running: _Running) -> None:
        """Build the state before the opener's Settle arrives, because Settle seldom changes the average."""
        running.made = await self._finish(running)

    async def _finish(self, running: _Running) -> Staged:
        return await asyncio.to_thread(running.staging.finish, running.before, self._executor.map)

    async def _complete(self, round_id: RoundId, settle: dp.Settle, seconds: float) -> None:
        running = self._running
        if running is None or running.exchange.round_id != round_id:
            return  # the exchange was ended meanwhile
        try:
            sources = RepairSources(running.start, settle)
            changed = await running.exchange.repair(tuple(settle.digests), sources, timedelta(seconds=seconds))
        except RoundAbandoned as error:
            reducers = {piece.reducer for piece in running.start.partition}
            faults = running.exchange.faults.items()  # possibly nobody else has the parts of those reducers
            disputes = tuple(Dispute(peer, None, reason) for peer, reason in faults if peer in reducers)
            self._post_event(rt.Failed(round_id, str(error), disputes))
            return
        staged, sums_fit = await asyncio.gather(self._result(running, changed), self._audit(running, settle, seconds))
        if self._running is running and sums_fit:
            self._keep(staged)
            self._post_event(rt.Staged(round_id, staged.layers))

    async def _result(self, running: _Running, changed: bool) -> Staged:
        """The state of the settled average. `changed`: repair changed the average that `making` used."""
        if running.making is not None and not changed:
            await asyncio.wait([running.making])
        return running.made if running.made is not None and not changed else await self._finish(running)

    async def _audit(self, running: _Running, settle: dp.Settle, seconds: float) -> bool:
        """Whether the settled averages can be the sums of the contributions that members report.

        If not, the attempt fails.
        """
        exchange = running.exchange
        seed = hashlib.sha256(str(exchange.round_id).encode() + b"".join([*settle.digests, *settle.nonces])).digest()
        opener = exchange.round_id.opener(self._machine.plan.openers(running.before))  # it has no nonce
        present = {*settle.present, opener}
        asked = [
            item.peer_id
            for item, nonce in zip(running.start.contributions, settle.nonces, strict=True)
            if item.weight and (nonce or item.peer_id in present)
        ]
        try:
            disputes = await exchange.audit(
                seed, asked, settle, timedelta(seconds=seconds * _AUDIT), timedelta(seconds=seconds)
            )
        except AtollError as error:  # the exchange ended here
            self._post_event(rt.Failed(exchange.round_id, str(error)))
            return False
        for dispute in disputes:
            _log.error(
                "sums are wrong", reducer=dispute.reducer, contributor=dispute.contributor, reason=dispute.reason
            )
        if disputes:
            named = "; ".join(f"reducer {it.reducer}: {it.reason}" for it in disputes)
            self._post_event(rt.Failed(exchange.round_id, f"the audit failed: {named}", disputes))
        return not disputes

    def _keep(self, staged: Staged) -> None:
        """Keep `staged`, and drop the states that the machine no longer holds."""
        kept = {_key_of(manifest_pb2.Manifest.FromString(payload).layers) for payload in self._machine.held}
        self._staged = {key: held for key, held in self._staged.items() if key in kept}
        self._staged[_key_of(staged.layers)] = staged


def threads(cores: int) -> int:
    """Number of threads for codecs, sums and digests: half of the cores, because others use the machine too."""
    return min(max(2, cores // 2), _MOST_THREADS)


def _key_of(layers: Iterable[manifest_pb2.LayerState]) -> bytes:
    return b"".join(layer.anchor_digest + layer.momentum_digest for layer in layers)
