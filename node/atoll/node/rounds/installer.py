"""Installs committed rounds: the staged state, or only the manifest if the round changes no layer held here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.core import log
from atoll.core.manifest import Head
from atoll.node.rounds import types as rt
from atoll.node.rounds.callbacks import RoundCounters
from atoll.node.rounds.decide import is_witness
from atoll.node.rounds.evaluation import Evaluation
from atoll.node.rounds.installed_state import InstalledState
from atoll.node.rounds.machine import RoundMachine
from atoll.node.rounds.own_progress import OwnProgress
from atoll.node.rounds.snapshot_ledger import CountedShare
from atoll.node.rounds.staged_results import RoundResults
from atoll.node.rounds.training_audits import InstalledRound
from atoll.v1 import manifest_pb2

_log = log.get("rounds")


class Installer:
    """`install` is an order to the trainer."""

    def __init__(
        self,
        me: str,
        machine: RoundMachine,
        installed: InstalledState,
        results: RoundResults,
        progress: OwnProgress,
        evaluation: Evaluation,
        counters: RoundCounters,
        behind: Callable[[str, CountedShare | None], None],
        finished: asyncio.Event,
    ) -> None:
        """`behind` is called with the reason for a catch-up. `finished` is set after the run's last round."""
        self._me = me
        self._machine = machine
        self._installed = installed
        self._results = results
        self._progress = progress
        self._evaluation = evaluation
        self._counters = counters
        self._behind = behind
        self._finished = finished

    async def install(self, head: Head, opened_here: bool, share: CountedShare) -> None:
        """Install the round of `head`. `share` says what the round counts of this node."""
        if head.round <= self._installed.head.round:
            return  # a catch-up has installed a later round meanwhile
        if is_witness(self._machine.plan, self._me, head.committed.payload):
            await self._witness(head, opened_here, share)
            return
        before, state = self._installed.head, self._installed.state
        staged = self._results.of_layers(head.manifest.layers)
        # a staged fragment fits only the state on which it was made
        if staged is None or head.manifest.previous_hash != before.hash:
            self._behind(f"the state of round {head.round} is not kept here any more", share)
            return
        await self._installed.record(head)
        await self._installed.move(head, state.commit, staged)
        self._results.forget()
        self._counters.committed += 1
        own = state.slice(staged.start, staged.start + len(staged.anchor_E))
        moved = own.start, own.stop
        await self._progress.take_anchor(head, share, moved)
        _log.info("round committed", round=head.round, tokens=head.committed_tokens)
        self._look_at_verdicts(head.manifest)
        await self._audit_training(head, before, moved)
        await self._end_turn(head, opened_here)

    async def _witness(self, head: Head, opened_here: bool, share: CountedShare) -> None:
        """Record a round of layers that are not held here. This node keeps its training."""
        if head.manifest.previous_hash != self._installed.head.hash:
            self._behind(f"round {head.round} does not follow our state", None)
            return
        await self._installed.record(head)
        await self._installed.move(head, lambda: None)
        self._results.forget()
        self._counters.witnessed += 1
        await self._progress.take_anchor(head, CountedShare(rt.Counted.NOTHING, share.samples), moved=(0, 0))
        _log.info("round committed by others", round=head.round, tokens=head.committed_tokens)
        await self._end_turn(head, opened_here)

    async def _audit_training(self, head: Head, before: Head, moved: tuple[int, int]) -> None:
        """Start the audit of training, if this node holds the whole model."""
        await self._progress.audits.stop()
        if self._results.served is not None and self._installed.state.is_whole:
            plan, lease = self._machine.plan, self._machine.policy.round_samples
            self._progress.audits.begin(InstalledRound(head, before, plan, lease, self._results.served, moved))

    async def _end_turn(self, head: Head, opened_here: bool) -> None:
        """Evaluate if the round completed a turn or the run, and set `finished` after the run's last round."""
        over = self._machine.finished and head is self._machine.head
        await self._evaluation.end_turn(
            head, self._machine.plan, opened_here=opened_here, holds_all=self._installed.state.is_whole, last=over
        )
        if over:
            self._finished.set()

    def _look_at_verdicts(self, manifest: manifest_pb2.Manifest) -> None:
        """Warn the owner if reducers left out this node's update. Its hardware may compute wrongly."""
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
