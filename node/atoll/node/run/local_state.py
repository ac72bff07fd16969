"""Committed state that this node holds of a run: its layers now, layers of earlier plans, layers prefetched for a plan.

Other members can fetch all of it (`/atoll/state/1`). The session determines for which layers the trainer has memory.
Their state comes from layers held earlier or prefetched, otherwise from the last checkpoint or from other members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import Unreachable
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.node.control.directives import Directives
from atoll.node.rounds.engine import AveragingEngine
from atoll.node.state.anchor import AnchorState
from atoll.node.state.catchup import catch_up
from atoll.node.state.checkpoint import CheckpointState
from atoll.node.state.checkpoint_writer import CheckpointWriter
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.prefetch import CurrentLayers, LayerPrefetcher, is_current_at
from atoll.node.state.previous_spans import PreviousSpans
from atoll.node.state.state_server import StateServer
from atoll.node.state.tensor_file import LayerLayout
from atoll.node.trainer.trainer import Trainer, TrainerFacts
from atoll.node.wire.transport import Network


@dataclass(frozen=True)
class StateSources:
    """Services from which a run's state is read and to which it is written."""

    network: Network
    run_id: str
    run_dir: Path
    operator_key: bytes
    manifests: ManifestStore
    checkpoints: CheckpointWriter
    directives: Directives
    send_heartbeat_now: Callable[[], None]


class LocalState:
    """The newest head known here, and the state of this node's layers.

    `state` belongs to `head`, except while layers are missing or the round engine moves it.
    """

    def __init__(self, sources: StateSources) -> None:
        self.head: Head | None = None
        self.state: AnchorState | None = None
        self.engine: AveragingEngine | None = None  # the engine that moves the state now
        self._missing_layers: frozenset[int] = frozenset()  # layers of the state that must be fetched
        self.lost: frozenset[int] = frozenset()  # missing layers that no member that answered has at the head
        self._base_without_checkpoint = b""  # manifest hash of a base without a checkpoint here
        self._previous_spans = PreviousSpans()  # layers held under earlier plans
        self._facts: TrainerFacts | None = None
        self._sources = sources
        self._server = StateServer(sources.network, sources.run_id, sources.manifests, self._current, self._idle_states)
        self.prefetcher = LayerPrefetcher(
            sources.network,
            sources.directives,
            sources.operator_key,
            sources.run_dir,
            self._followed_layers,
            ready=sources.send_heartbeat_now,
            on_head=self._server.remember_head,
            local_states=self._states_not_moving,
        )

    async def hold(self, trainer: Trainer) -> None:
        """Copy the committed state of the trainer's layers into its memory, as far as this node has it."""
        self._facts = trainer.facts
        layers, before = trainer.facts.held_layers, self.state
        if not layers:
            return
        if before is not None and before.layers == layers:
            trainer.anchor.copy_(before.anchor_E)
            before.anchor_E = trainer.anchor
            return
        if before is not None and self.head is not None and not self._missing_layers:
            self._previous_spans.add(self.head, before)
        self._missing_layers, self.lost = frozenset(layers), frozenset()
        self.state = AnchorState(trainer.anchor, trainer.facts.layer_offsets, layers)
        if before is None:
            await self._restore(trainer.facts)
        await self._fill_missing()

    def begin(self, head: Head, state: AnchorState) -> None:
        """Take the state of the genesis that this node wrote. It has all layers, possibly more than the node trains."""
        self._sources.manifests.append(head)
        self.state, self._missing_layers = state, frozenset()
        self.moved(head)

    async def synchronise(self, plan: Plan) -> Head:
        """Bring the state to the head on which the members of `plan` agree. Raises what `catch_up` raises."""
        sources = self._sources
        assert self.state is not None
        if self.head is not None and self.head.round == 0 and not plan.accepts(self.head):
            self.head = None  # a genesis that the coordinator did not choose
        await self._take_prefetched()
        if self.head is not None and not plan.accepts(self.head):
            await self._return_to_base(plan)
        head_seen = False

        def on_head(head: Head) -> None:
            nonlocal head_seen
            head_seen = True
            self._server.remember_head(head)

        def on_lost_layers(layers: frozenset[int]) -> None:
            self.lost = layers

        try:
            fetched = await catch_up(
                sources.network,
                plan,
                self.state,
                self.head,
                operator_key=sources.operator_key,
                incomplete=bool(self._missing_layers),
                on_head=on_head,
                local_states=lambda: self._previous_spans.held,
                on_lost_layers=on_lost_layers,
            )
        except Unreachable:
            self.lost = self.lost if head_seen else frozenset()  # no answer does not prove that layers are lost
            if self.lost or self._missing_layers or self.head is None or not plan.accepts(self.head):
                raise
            return self.head  # no other member has state: this node wrote genesis, or is alone
        if fetched is None:
            assert self.head is not None
            return self.head
        await asyncio.to_thread(sources.manifests.try_append, fetched.head)
        await asyncio.to_thread(self.state.load_fetched, fetched)
        self._missing_layers = self.lost = frozenset()
        self._drop_unneeded(fetched.head)
        return fetched.head

    def moved(self, head: Head) -> None:
        """Record that the state now belongs to `head`."""
        self.head = head
        self._drop_unneeded(head)

    def checkpoint_state(self) -> CheckpointState | None:
        """Return the state for a checkpoint; None while this node has no head or lacks some of its layers."""
        if self.head is None or self.state is None or self._facts is None or self._missing_layers:
            return None
        layers = LayerLayout.of(self._facts.layers, self.state.layers)
        return CheckpointState(self.head, layers, self.state.anchor_E, self.state.momentum_E)

    # --- sources of state ------------------------------------------------------------------------------

    async def _restore(self, facts: TrainerFacts) -> None:
        """Load the newest checkpoint of this node, whichever layers it holds; catch-up brings it to the head."""
        await asyncio.to_thread(self._sources.manifests.sweep)
        found = await self._sources.checkpoints.restore(LayerLayout.of(facts.layers))
        if found is None:
            return
        numbers = found.layers.numbers
        layers = range(numbers.start, numbers.stop)
        self._previous_spans.add(found.head, AnchorState(found.anchor_E, facts.layer_offsets, layers, found.momentum_E))
        await asyncio.to_thread(self._sources.manifests.append, found.head)
        self.moved(found.head)

    async def _return_to_base(self, plan: Plan) -> None:
        """Return to the run's base, an earlier round: load its checkpoint. Missing layers are fetched later."""
        assert self._facts is not None
        assert self.state is not None
        if self._base_without_checkpoint == plan.base.manifest_hash:
            return
        found = await self._sources.checkpoints.of_round(plan.base.round, LayerLayout.of(self._facts.layers))
        if found is None or found.head.hash != plan.base.manifest_hash:
            self._base_without_checkpoint = plan.base.manifest_hash
            return
        numbers = found.layers.numbers
        layers = range(numbers.start, numbers.stop)
        former = AnchorState(found.anchor_E, self._facts.layer_offsets, layers, found.momentum_E)
        self._previous_spans.add(found.head, former)
        self.head, self._missing_layers = found.head, frozenset(self.state.layers)
        await self._fill_missing()

    async def _take_prefetched(self) -> None:
        """Use the layers that were prefetched for the plan that is now followed."""
        prefetched = self.prefetcher.take()
        for head, state in prefetched:
            self._previous_spans.add(head, state)
        newest = max((head for head, _ in prefetched), key=lambda head: head.round, default=None)
        if newest is not None and self.head is None:
            await asyncio.to_thread(self._sources.manifests.append, newest)
            self.head = newest
        if prefetched and self._missing_layers:
            await self._fill_missing()

    async def _fill_missing(self) -> None:
        assert self.state is not None
        self._missing_layers = await asyncio.to_thread(self._previous_spans.fill, self.state, self.head)

    def _drop_unneeded(self, head: Head) -> None:
        if self.state is not None and not self._missing_layers:
            self._previous_spans.prune(head, self.state.layers)

    # --- state served to other members -----------------------------------------------------------------

    def _current(self) -> tuple[Head, AnchorState] | None:
        if self._missing_layers or (self.engine is not None and self.engine.moving):
            return None
        head = self.engine.head if self.engine is not None else self.head
        return (head, self.state) if head is not None and self.state is not None else None

    def _followed_layers(self) -> CurrentLayers:
        offsets = self._facts.layer_offsets if self._facts is not None else ()
        if self.state is None or self._missing_layers or self.engine is None:
            return CurrentLayers(offsets)  # no layer here takes part in rounds
        return CurrentLayers(offsets, self.state.layers, self.engine.head)

    def _idle_states(self) -> tuple[tuple[Head, AnchorState], ...]:
        """States that do not change: of earlier plans, or prefetched for a later plan.

        Prefetched state is served only if it is current, because outdated layers would hide that their newest version
        is lost.
        """
        head = self.engine.head if self.engine is not None else self.head
        fetched = (*self.prefetcher.held, *self.prefetcher.set_aside)
        return (*self._previous_spans.held, *(item for item in fetched if head is None or is_current_at(item, head)))

    def _states_not_moving(self) -> tuple[tuple[Head, AnchorState], ...]:
        """States that no engine changes, including the current one if there is no engine."""
        if self.state is None or self.head is None or self._missing_layers or self.engine is not None:
            return self._previous_spans.held
        return (*self._previous_spans.held, (self.head, self.state))
