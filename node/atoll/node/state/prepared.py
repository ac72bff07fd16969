"""Layers that a plan to come may give this node: fetched while the present plan is followed, and kept at its head.

They lie on disk, because memory may be needed for what the node holds now. Once the plan is there they are taken over
from here; what was averaged since, and nothing else, is fetched then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from atoll.core import log
from atoll.core.errors import AtollError
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.node.control.directives import Directives
from atoll.node.state.anchor import AnchorState
from atoll.node.state.catchup import catch_up
from atoll.node.state.mapped import mapped_vector
from atoll.node.transport import Network

POLL = timedelta(seconds=2)  # of one that does not hear of rounds itself
_RETRY = timedelta(seconds=2)

_log = log.get("prepare")

Held = tuple[Head, AnchorState]


@dataclass(frozen=True)
class Present:
    """What the node has now."""

    offsets: Sequence[int]  # of all layers of the model; empty: not known yet
    layers: range  # that it holds, all of the head
    head: Head | None  # None: it has none


class Preparing:
    """Follows `Directives.prepare` for as long as the session lives."""

    def __init__(
        self,
        network: Network,
        directives: Directives,
        operator_key: bytes,
        folder: Path,
        present: Callable[[], Present],
        ready: Callable[[], None] = lambda: None,
        believed: Callable[[Head], None] = lambda head: None,
    ) -> None:
        self.span = range(0)  # all of its layers are here: some are held, the others in `held`
        self.held: tuple[Held, ...] = ()
        self._network = network
        self._directives = directives
        self._operator_key = operator_key
        self._folder = folder
        self._present = present
        self._ready = ready
        self._believed = believed

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._directives.until(self._is_wanted)
            version = self._plan().version
            try:
                await self._follow(self._directives.prepare, self._present())
            except AtollError as error:
                _log.warning("cannot fetch layers of the next plan yet", reason=str(error))
                await asyncio.sleep(_RETRY.total_seconds())
            if self._directives.prepare or self._plan().version == version:  # the plan was given up, or another comes
                self.take()

    def take(self) -> tuple[Held, ...]:
        """What was fetched, for whoever has a use for it now; it is not followed any more."""
        held, self.held, self.span = self.held, (), range(0)
        return held

    async def _follow(self, span: range, present: Present) -> None:
        """Fetch what is lacking of `span`, then what changed of it, until something else is wanted.

        Raises what `catch_up` raises, and `DataDirUnusable`.
        """
        gaps = lacking(span, present.layers)
        while self._directives.prepare == span and lacking(span, self._present().layers) == gaps:
            head = self._present().head
            self.held = tuple([await self._fetch(gap) for gap in gaps])
            if self.span != span:
                self.span = span
                self._ready()
                _log.info("the layers of the next plan are here", first=span.start, last=span.stop - 1)
            await self._change(span, head)

    async def _fetch(self, layers: range) -> Held:
        plan, offsets = self._plan(), self._present().offsets
        before = next((item for item in self.held if item[1].layers == layers), None)
        head, state = before if before is not None else (None, None)
        fetched = await catch_up(
            self._network,
            plan,
            state or self._nothing(offsets, layers),
            head,
            operator_key=self._operator_key,
            believed=self._believed,
            allocate=partial(mapped_vector, self._folder),
        )
        if fetched is None:
            assert before is not None
            return before
        return fetched.head, AnchorState(fetched.anchor_E, offsets, layers, fetched.momentum_E)

    async def _change(self, span: range, head: Head | None) -> None:
        """Wait until something else is wanted, or there may be a newer head."""

        def changed() -> bool:
            now = self._present().head
            return self._directives.prepare != span or (now is not None and (head is None or now.hash != head.hash))

        try:
            async with asyncio.timeout(POLL.total_seconds() if head is None else None):
                await self._directives.until(changed)
        except TimeoutError:
            return

    def _is_wanted(self) -> bool:
        span, present = self._directives.prepare, self._present()
        return bool(span) and span.stop < len(present.offsets) and self._directives.plan is not None

    def _plan(self) -> Plan:
        assert self._directives.plan is not None
        return self._directives.plan

    def _nothing(self, offsets: Sequence[int], layers: range) -> AnchorState:
        elements = offsets[layers.stop] - offsets[layers.start]
        anchor_E, momentum_E = (mapped_vector(self._folder, elements) for _ in range(2))
        return AnchorState(anchor_E, offsets, layers, momentum_E)


def lacking(span: range, held: range) -> tuple[range, ...]:
    """What of `span` is outside `held`: at most two ranges."""
    if not held or held.stop <= span.start or span.stop <= held.start:
        return (span,)
    sides = range(span.start, max(span.start, held.start)), range(min(span.stop, held.stop), span.stop)
    return tuple(side for side in sides if side)
