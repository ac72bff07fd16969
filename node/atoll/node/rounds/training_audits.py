"""Audits of training on one node: give its own contribution to its auditor, or audit another one.

core/training_audits.py says who is drawn and what is measured. An audit uses the memory of this node's own
pseudo-gradient, which is free from the commit of a round to the next snapshot. What is not done by then is dropped. Its
forward passes are few beside the steps of a round: where rounds are too short for enough samples, nothing is audited.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, islice

from torch import Tensor

from atoll.core import log
from atoll.core.data_position import SampleRange
from atoll.core.errors import AtollError, DataDirUnusable, PeerMisbehaved
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.core.training_audits import MIN_SAMPLES, Drawn, draw, draw_samples
from atoll.node.exchange.allreduce import Exchange
from atoll.node.rounds.decide import position_at
from atoll.node.state.manifests import ManifestStore
from atoll.node.system.background_tasks import BackgroundTasks
from atoll.node.trainer.trainer import Trainer
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

_FRAME_TIMEOUT = timedelta(seconds=30)
_ATTEMPTS = 15  # the contributor may install the round a little later
_AGAIN_SECONDS = 2.0
_MOST_SAMPLES = 2**12  # of which some are drawn
_SHARE_OF_ROUND = 0.05  # of the auditor's compute time in a round: it delays its next step by so much
_SHARE_OF_ALL = 0.01  # of the compute time of all
_FORWARD = 1 / 3  # of the time of a step on a sample
_PASSES = 4  # forward passes for each sample of a kind: two kinds, with and without the contribution

_log = log.get("audit")


@dataclass(frozen=True)
class InstalledRound:
    """A round that this node has just installed."""

    head: Head
    before: Head
    plan: Plan  # from which the next round follows
    lease: int  # samples of a first lease
    exchange: Exchange  # the last one served; perhaps not this round's
    moved: tuple[int, int]  # the elements that the round averaged


class TrainingAudits:
    """The audit that this node has to do with since the last commit."""

    def __init__(
        self,
        me: str,
        trainer: Trainer,
        manifests: ManifestStore,
        background: BackgroundTasks,
        order: Callable[[Callable[[], Awaitable[None]]], None],
        report: Callable[[mb.TrainingAudit], None],
    ) -> None:
        """`order` queues an order to the trainer. `report` tells the coordinator."""
        self._me = me
        self._trainer = trainer
        self._manifests = manifests
        self._background = background
        self._order = order
        self._report = report
        self._given: Exchange | None = None
        self._auditing: asyncio.Task[None] | None = None
        self._open = object()  # replaced when the memory is needed otherwise

    def begin(self, installed: InstalledRound) -> None:
        """Give the contribution of that round to its auditor, or audit another one, if this node was drawn."""
        manifest, exchange = installed.head.manifest, installed.exchange
        drawn = draw(manifest)
        if drawn is None or exchange.round_id != RoundId.from_proto(manifest.round):
            return
        if self._me == drawn.contributor:
            self._given = exchange
            exchange.copies.give_to(drawn.auditor)
        elif self._me == drawn.auditor:
            self._auditing = self._background.begin(self._audit(installed, drawn))

    async def stop(self) -> None:
        """End it: the pseudo-gradient is about to change."""
        self._open = object()
        if self._given is not None:
            self._given.copies.withhold()
            self._given = None
        if self._auditing is not None:
            self._auditing.cancel()
            await asyncio.wait([self._auditing])
            self._auditing = None

    async def _audit(self, installed: InstalledRound, drawn: Drawn) -> None:
        round_number, exchange, moved = installed.head.round, installed.exchange, installed.moved
        update_E, still_open = self._trainer.pseudo_gradient[slice(*moved)], self._open
        own, other = await asyncio.to_thread(self._samples, installed, drawn)
        if min(len(own), len(other)) < MIN_SAMPLES:
            return
        reason = await self._fetch(drawn.contributor, exchange, update_E)
        audit = mb.TrainingAudit(round=round_number, contributor=drawn.contributor, given=not reason, reason=reason)
        if reason:
            _log.info("contribution not given", peer=drawn.contributor, round=round_number, reason=reason)
            self._report(audit)
            return

        async def measure() -> None:
            if self._open is not still_open:
                return
            try:
                found = await self._trainer.audit(own, other, moved)
            except AtollError as error:  # it is paused for another model, or on several devices
                _log.info("contribution not audited", round=round_number, reason=str(error))
                return
            audit.score, audit.own_gain, audit.other_gain = found.score, found.own, found.other
            audit.samples = found.samples
            self._report(audit)

        self._order(measure)

    def _samples(self, installed: InstalledRound, drawn: Drawn) -> list[list[int]]:
        """Those of the contributor, and those of whom it is compared with: as many as this node may measure.

        A fragment's update is of all samples since its last round, as far as this node knows the rounds between.
        """
        manifest, rounds = installed.head.manifest, [installed.head, installed.before]  # the newest first
        with contextlib.suppress(DataDirUnusable):
            for number in range(installed.before.round - 1, installed.head.round - 1 - max(manifest.fragments, 1), -1):
                kept = self._manifests.get(number)
                if kept is None or Head(kept).hash != rounds[-1].manifest.previous_hash:
                    break
                rounds.append(Head(kept))
        positions = [position_at(installed.before, installed.plan, installed.lease), *(it.data for it in rounds[2:])]
        each = _MOST_SAMPLES // len(positions)
        return [
            draw_samples(
                manifest.audit_seed,
                [
                    sample
                    for head, position in zip(rounds, positions, strict=False)
                    for sample in _consumed(head.manifest, peer, position.holdings.get(peer, ()), each)
                ],
            )[: _affordable(manifest, self._me)]
            for peer in (drawn.contributor, drawn.compared)
        ]

    async def _fetch(self, peer: str, exchange: Exchange, update_E: Tensor) -> str:
        """Why the contribution of `peer` could not be fetched; empty if it was."""
        reason = ""
        for _ in range(_ATTEMPTS):
            try:
                await exchange.copies.fetch(peer, update_E, _FRAME_TIMEOUT)
                return ""
            except PeerMisbehaved as error:
                return str(error)
            except AtollError as error:
                reason = str(error)
            await asyncio.sleep(_AGAIN_SECONDS)
        return reason


def _affordable(manifest: manifest_pb2.Manifest, me: str) -> int:
    """How many samples of each kind this node may measure. One in as many rounds as there are fragments is audited."""
    there = [item for item in manifest.contributions if item.weight]
    own = next(item.samples for item in there if item.peer_id == me)
    trained = own * max(manifest.fragments, 1)
    return int(min(_SHARE_OF_ROUND, _SHARE_OF_ALL * len(there)) * trained / (_FORWARD * _PASSES))


def _consumed(manifest: manifest_pb2.Manifest, peer: str, ranges: Sequence[SampleRange], most: int) -> list[int]:
    """Sample numbers that a contribution is said to be trained on: the first ones of the member's ranges."""
    count = next((item.samples for item in manifest.contributions if item.peer_id == peer), 0)
    return list(islice(chain.from_iterable(range(*held) for held in ranges), min(count, most)))
