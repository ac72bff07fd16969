"""Layers that a plan to come may give this node: fetched while the present plan is followed, and kept at its head.

That plan may be minutes away, as when a node shall stand by, or never come: a stage has a second copy of a neighbour's
layers in case that one is gone. They lie on disk, because memory may be needed for what the node holds now. Once the
plan is there they are taken over from here; what was averaged since, and nothing else, is fetched then.
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

POLL = timedelta(seconds=2)  # of one that does not hear of rounds itself
_RETRY = timedelta(seconds=2)
_LOAD_TIMEOUT = timedelta(minutes=10)  # for who loads what a plan gave us to take it: as long as a trainer may load
_MOST_ASIDE = 4  # states: of two spans
_SET_ASIDE_TIME = timedelta(minutes=5)  # that what is wanted no more is kept, as it may be wanted again

_log = log.get("prepare")

HeadAndState = tuple[Head, AnchorState]


@dataclass(frozen=True)
class CurrentLayers:
    """What the node has now."""

    offsets: Sequence[int]  # of all layers of the model; empty: not known yet
    layers: range = range(0)  # that follow the rounds here
    head: Head | None = None  # of those


class Directives(Protocol):
    """The part of `control.directives` that prefetching follows."""

    plan: Plan | None
    prepare: range

    def wake(self) -> None: ...
    async def until(self, condition: Callable[[], bool]) -> None: ...


class LayerPrefetcher:
    """Follows `Directives.prepare` for as long as the session lives."""

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
        """`local_states` are states that may have some of what is wanted; they are not changed while they are read."""
        self.held: tuple[HeadAndState, ...] = ()
        self._refused = range(0)  # not to be fetched: there is no room to train them
        self._span = range(0)  # all of its layers are here: some are followed anyway, the others in `held`
        self._round = 0  # of which they are
        self._of = range(0)  # what `held` was fetched for
        self._began_under_plan: Plan | None = None  # the plan under which that began
        self.set_aside: tuple[HeadAndState, ...] = ()  # what was wanted before: some of it may be wanted again
        self._forgetting: asyncio.TimerHandle | None = None
        self._generation = 0  # of `held`: grows when it is taken or dropped
        self._network = network
        self._directives = directives
        self._operator_key = operator_key
        self._folder = folder
        self._present = present
        self._ready = ready
        self._on_head = on_head
        self._others = local_states

    @property
    def span(self) -> range:
        """What is wanted and here; empty: not all of it is."""
        return self._span if self._span == self._wanted else range(0)

    @property
    def round(self) -> int:
        """The round that `span` is of."""
        return self._round

    @property
    def refused(self) -> range:
        """What this node was told to fetch and has no room for; empty: nothing, or it is told something else by now."""
        return self._refused if self._refused == self._directives.prepare else range(0)

    def refuse(self) -> None:
        """There is no room to train what this node was told to fetch."""
        self._refused = self._directives.prepare

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._directives.until(self._is_wanted)
            span = self._wanted
            if span != self._of:
                if self._awaiting_load():
                    await self._wait_until_taken()
                    continue
                self._set_held_aside()
                self._of, self._began_under_plan = span, self._plan()
            try:
                await self._follow(span)
            except (AtollError, OSError) as error:  # what is here stays
                _log.warning("cannot fetch layers of the next plan yet", reason=str(error))
                await asyncio.sleep(_RETRY.total_seconds())
            if not self._wanted and not self._awaiting_load():
                self._set_held_aside()

    def take(self) -> tuple[HeadAndState, ...]:
        """What was fetched, for whoever has a use for it now; it is not followed any more."""
        held, self.set_aside = (*self._drop(), *self.set_aside), ()
        return held

    def _drop(self) -> tuple[HeadAndState, ...]:
        held, self.held = self.held, ()
        self._span, self._of, self._began_under_plan = range(0), range(0), None
        self._generation += 1
        self._directives.wake()
        return held

    def _awaiting_load(self) -> bool:
        """Whether a later plan gave us some of what is here, and who loads it has not taken it yet."""
        plan, me = self._plan(), self._network.peer_id
        if self._began_under_plan is None or plan.version <= self._began_under_plan.version:
            return False
        given = set(plan.span(me)) - set(self._began_under_plan.span(me))
        return any(given.intersection(state.layers) for _, state in self.held)

    async def _wait_until_taken(self) -> None:
        """Nobody else may have what is here, so that it stays until then."""
        try:
            async with asyncio.timeout(_LOAD_TIMEOUT.total_seconds()):
                await self._directives.until(lambda: not self._awaiting_load())
        except TimeoutError:
            _log.warning(
                "layers that the plan gives this node wait to be loaded", seconds=_LOAD_TIMEOUT.total_seconds()
            )

    def _set_held_aside(self) -> None:
        """What is here is wanted no more, for now."""
        held = self._drop()
        if held:
            self.set_aside = (*held, *self.set_aside)[:_MOST_ASIDE]
            if self._forgetting is not None:
                self._forgetting.cancel()
            self._forgetting = asyncio.get_running_loop().call_later(_SET_ASIDE_TIME.total_seconds(), self._forget)

    def _forget(self) -> None:
        self.set_aside = ()

    async def _follow(self, span: range) -> None:
        """Fetch what is lacking of `span`, then what changed of it, until something else is wanted.

        Raises what `catch_up` raises, and `DataDirUnusable`.
        """
        generation = self._generation
        while self._wanted == span and self._generation == generation:
            present = self._present()
            gaps = missing_ranges(span, present.layers or self._plan().span(self._network.peer_id))
            held = tuple([await self._fetch(gap, present) for gap in gaps])
            if generation != self._generation:
                return  # the plan came, and did not wait for this
            self.held = held
            self.set_aside = tuple(item for item in self.set_aside if not _is_among(item[1].layers, held))
            was, self._round = self._round, min([head.round for head, _ in held] or [_round(present.head)])
            came, self._span = self._span != span, span
            if came or self._round != was:
                self._ready()
            if came:
                _log.info("the layers of the next plan are here", first=span.start, last=span.stop - 1)
            await self._wait_for_change(span, present)

    async def _fetch(self, layers: range, present: CurrentLayers) -> HeadAndState:
        before, offsets = next((item for item in self.held if item[1].layers == layers), None), present.offsets
        if before is not None and present.head is not None and is_current_at(before, present.head):
            return present.head, before[1]  # that round was of other layers
        head, state = before if before is not None else (None, _nothing(offsets, layers))
        fetched = await catch_up(
            self._network,
            self._plan(),
            state,
            head,
            operator_key=self._operator_key,
            on_head=self._on_head,
            allocate=partial(mapped_vector, self._folder),
            local_states=lambda: (*self.held, *self.set_aside, *self._others()),
        )
        if fetched is None:
            assert before is not None
            return before
        return fetched.head, AnchorState(fetched.anchor_E, offsets, layers, fetched.momentum_E)

    async def _wait_for_change(self, span: range, then: CurrentLayers) -> None:
        """Wait until something else is wanted, or there may be a newer head."""
        generation = self._generation

        def changed() -> bool:
            now = self._present()
            moved = now.layers != then.layers or _hash(now.head) != _hash(then.head)
            return self._wanted != span or moved or self._generation != generation

        behind = then.head is None or any(head.round < then.head.round for head, _ in self.held)
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
        return bool(missing_ranges(span, plan.span(self._network.peer_id)))  # else it is loaded anyway

    def _plan(self) -> Plan:
        assert self._directives.plan is not None
        return self._directives.plan


def _hash(head: Head | None) -> bytes:
    return head.hash if head is not None else b""


def is_current_at(held: HeadAndState, now: Head) -> bool:
    """Whether all layers of a state are at `now` as they were at its head, or earlier than that."""
    then, state = held
    return then.round <= now.round and unchanged_layers(then, now, set(state.layers)) == set(state.layers)


def _round(head: Head | None) -> int:
    return head.round if head is not None else 0


def _is_among(layers: range, held: Sequence[HeadAndState]) -> bool:
    return set(layers) <= {layer for _, state in held for layer in state.layers}


def _nothing(offsets: Sequence[int], layers: range) -> AnchorState:
    """Zeros that take no room."""
    zeros_E = torch.zeros(1).expand(offsets[layers.stop] - offsets[layers.start])
    return AnchorState(zeros_E, offsets, layers, zeros_E)


def missing_ranges(span: range, held: range) -> tuple[range, ...]:
    """What of `span` is outside `held`: at most two ranges."""
    if not held or held.stop <= span.start or span.stop <= held.start:
        return (span,)
    sides = range(span.start, max(span.start, held.start)), range(min(span.stop, held.stop), span.stop)
    return tuple(side for side in sides if side)
