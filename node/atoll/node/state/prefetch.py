"""Prefetch layers that a later plan may give this node, and keep them current under the present plan.

The later plan may come in minutes, as for a standby, or never: a stage keeps a second copy of a neighbour's layers in
case the neighbour fails. Prefetched layers are on disk, because the node may need its memory for its present layers.
When the plan arrives, the node loads them from here and fetches only what was averaged since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from atoll.core import log
from atoll.core.errors import AtollError
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.node.state.anchor import AnchorState
from atoll.node.state.catchup import catch_up
from atoll.node.state.mapped_vectors import mapped_vector
from atoll.node.state.previous_spans import unchanged_layers
from atoll.node.wire.transport import Network

POLL = timedelta(seconds=2)  # between checks for a newer head, on a node without rounds of its own
_RETRY = timedelta(seconds=2)
# for the session to take layers that a plan assigned; equals the load timeout of a trainer
_LOAD_TIMEOUT = timedelta(minutes=10)
_MAX_SET_ASIDE = 4  # states: those of two spans
_SET_ASIDE_TIME = timedelta(minutes=5)  # for layers that are no longer wanted but may be wanted again

_log = log.get("prepare")

HeadAndState = tuple[Head, AnchorState]


@dataclass(frozen=True)
class CurrentLayers:
    """The layers that this node holds now."""

    offsets: Sequence[int]  # element offsets of all layers of the model; empty: not known yet
    layers: range = range(0)  # the layers that take part in rounds here
    head: Head | None = None  # of `layers`


class Directives(Protocol):
    """The part of `control.directives` that prefetching uses."""

    plan: Plan | None
    prepare: range

    def wake(self) -> None: ...
    async def until(self, condition: Callable[[], bool]) -> None: ...


class LayerPrefetcher:
    """Fetches the layers of `Directives.prepare` and keeps them current, for the lifetime of the session.

    It has more than 15 attributes: eight are arguments; the others record what it holds, for which span and plan.
    """

    def __init__(
        self,
        network: Network,
        directives: Directives,
        operator_key: bytes,
        folder: Path,
        present: Callable[[], CurrentLayers],
        ready: Callable[[], None] = lambda: None,
        on_head: Callable[[Head], None] = lambda head: None,
        local_states: Callable[[], Sequence[HeadAndState]] = tuple,
    ) -> None:
        """`local_states` returns states that may have some wanted layers. They must not change while they are read."""
        self.held: tuple[HeadAndState, ...] = ()
        self._refused = range(0)  # not fetched, because there is no memory to train these layers
        self._span = range(0)  # all its layers are on this node: in `held`, or among those that it trains
        self._round = 0  # the round of `_span`
        self._fetched_for = range(0)  # the span that `held` was fetched for
        self._began_under_plan: Plan | None = None  # the plan at the start of that fetch
        self.set_aside: tuple[HeadAndState, ...] = ()  # layers wanted earlier: they may be wanted again
        self._set_aside_timer: asyncio.TimerHandle | None = None
        self._generation = 0  # of `held`: grows when `held` is taken or dropped
        self._network = network
        self._directives = directives
        self._operator_key = operator_key
        self._folder = folder
        self._present = present
        self._ready = ready
        self._on_head = on_head
        self._local_states = local_states

    @property
    def span(self) -> range:
        """The wanted span, if all its layers are on this node; otherwise empty."""
        return self._span if self._span == self._wanted else range(0)

    @property
    def round(self) -> int:
        """The round of the layers of `span`."""
        return self._round

    @property
    def refused(self) -> range:
        """The span that this node should fetch but has no memory for; empty: none, or the directive changed."""
        return self._refused if self._refused == self._directives.prepare else range(0)

    def refuse(self) -> None:
        """Refuse the current directive, because this node has no memory to train its layers."""
        self._refused = self._directives.prepare

    async def run(self) -> None:
        """Follow the directives until cancelled."""
        while True:
            await self._directives.until(self._is_wanted)
            span = self._wanted
            if span != self._fetched_for:
                if self._awaiting_load():
                    await self._wait_until_taken()
                    continue
                self._set_held_aside()
                self._fetched_for, self._began_under_plan = span, self._plan()
            try:
                await self._follow(span)
            except (AtollError, OSError) as error:  # keep the layers fetched so far
                _log.warning("prefetch failed", reason=str(error), retry_seconds=_RETRY.total_seconds())
                await asyncio.sleep(_RETRY.total_seconds())
            if not self._wanted and not self._awaiting_load():
                self._set_held_aside()

    def take(self) -> tuple[HeadAndState, ...]:
        """Hand over the fetched layers and those set aside. They are no longer updated."""
        held, self.set_aside = (*self._drop(), *self.set_aside), ()
        return held

    def _drop(self) -> tuple[HeadAndState, ...]:
        held, self.held = self.held, ()
        self._span, self._fetched_for, self._began_under_plan = range(0), range(0), None
        self._generation += 1
        self._directives.wake()
        return held

    def _awaiting_load(self) -> bool:
        """Whether a later plan assigned fetched layers to this node, and the session has not taken them yet."""
        plan, me = self._plan(), self._network.peer_id
        if self._began_under_plan is None or plan.version <= self._began_under_plan.version:
            return False
        assigned = set(plan.span(me)) - set(self._began_under_plan.span(me))
        return any(assigned.intersection(state.layers) for _, state in self.held)

    async def _wait_until_taken(self) -> None:
        """Keep the layers until the session takes them, because they may be the only copy."""
        try:
            async with asyncio.timeout(_LOAD_TIMEOUT.total_seconds()):
                await self._directives.until(lambda: not self._awaiting_load())
        except TimeoutError:
            _log.warning("prefetched layers still not loaded", seconds=_LOAD_TIMEOUT.total_seconds())

    def _set_held_aside(self) -> None:
        """Keep the fetched layers for `_SET_ASIDE_TIME`, because they are not wanted for now."""
        held = self._drop()
        if held:
            self.set_aside = (*held, *self.set_aside)[:_MAX_SET_ASIDE]
            if self._set_aside_timer is not None:
                self._set_aside_timer.cancel()
            self._set_aside_timer = asyncio.get_running_loop().call_later(
                _SET_ASIDE_TIME.total_seconds(), self._drop_set_aside
            )

    def _drop_set_aside(self) -> None:
        self.set_aside = ()

    async def _follow(self, span: range) -> None:
        """Fetch the missing layers of `span`, then their changes, until another span is wanted.

        Raises what `catch_up` raises, and `DataDirUnusable`.
        """
        generation = self._generation
        while self._wanted == span and self._generation == generation:
            present = self._present()
            gaps = missing_ranges(span, present.layers or self._plan().span(self._network.peer_id))
            held = tuple([await self._fetch(gap, present) for gap in gaps])
            if generation != self._generation:
                return  # the plan arrived during the fetch, and its layers were taken
            self.held = held
            self.set_aside = tuple(item for item in self.set_aside if not _is_among(item[1].layers, held))
            previous_round, self._round = self._round, min([head.round for head, _ in held] or [_round(present.head)])
            completed, self._span = self._span != span, span
            if completed or self._round != previous_round:
                self._ready()
            if completed:
                _log.info("layers of the next plan fetched", first=span.start, last=span.stop - 1)
            await self._wait_for_change(span, present)

    async def _fetch(self, layers: range, present: CurrentLayers) -> HeadAndState:
        before, offsets = next((item for item in self.held if item[1].layers == layers), None), present.offsets
        if before is not None and present.head is not None and is_current_at(before, present.head):
            return present.head, before[1]  # the rounds since then averaged other layers
        head, state = before if before is not None else (None, _zero_state(offsets, layers))
        fetched = await catch_up(
            self._network,
            self._plan(),
            state,
            head,
            operator_key=self._operator_key,
            on_head=self._on_head,
            allocate=partial(mapped_vector, self._folder),
            local_states=lambda: (*self.held, *self.set_aside, *self._local_states()),
        )
        if fetched is None:
            assert before is not None
            return before
        return fetched.head, AnchorState(fetched.anchor_E, offsets, layers, fetched.momentum_E)

    async def _wait_for_change(self, span: range, before: CurrentLayers) -> None:
        """Wait until another span is wanted, or until there may be a newer head."""
        generation = self._generation

        def changed() -> bool:
            now = self._present()
            moved = now.layers != before.layers or _hash(now.head) != _hash(before.head)
            return self._wanted != span or moved or self._generation != generation

        behind = before.head is None or any(head.round < before.head.round for head, _ in self.held)
        try:
            async with asyncio.timeout(POLL.total_seconds() if behind else None):
                await self._directives.until(changed)
        except TimeoutError:
            return

    @property
    def _wanted(self) -> range:
        prepare = self._directives.prepare
        return range(0) if prepare == self._refused else prepare

    def _is_wanted(self) -> bool:
        span, plan = self._wanted, self._directives.plan
        if not span or plan is None or span.stop >= len(self._present().offsets):
            return False
        # the session loads the node's own span anyway
        return bool(missing_ranges(span, plan.span(self._network.peer_id)))

    def _plan(self) -> Plan:
        assert self._directives.plan is not None
        return self._directives.plan


def _hash(head: Head | None) -> bytes:
    return head.hash if head is not None else b""


def is_current_at(held: HeadAndState, now: Head) -> bool:
    """Whether `held` is not newer than `now` and none of its layers has changed since `held`."""
    then, state = held
    return then.round <= now.round and unchanged_layers(then, now, set(state.layers)) == set(state.layers)


def _round(head: Head | None) -> int:
    return head.round if head is not None else 0


def _is_among(layers: range, held: Sequence[HeadAndState]) -> bool:
    return set(layers) <= {layer for _, state in held for layer in state.layers}


def _zero_state(offsets: Sequence[int], layers: range) -> AnchorState:
    """A state of zeros that takes no memory: its vectors repeat one element."""
    zeros_E = torch.zeros(1).expand(offsets[layers.stop] - offsets[layers.start])
    return AnchorState(zeros_E, offsets, layers, zeros_E)


def missing_ranges(span: range, held: range) -> tuple[range, ...]:
    """The layers of `span` outside `held`: at most two ranges."""
    if not held or held.stop <= span.start or span.stop <= held.start:
        return (span,)
    sides = range(span.start, max(span.start, held.start)), range(min(span.stop, held.stop), span.stop)
    return tuple(side for side in sides if side)
