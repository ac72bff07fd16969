"""Audits of training on one node: give its own contribution to its auditor, or audit another one.

core/training_audits.py draws the members and defines the measurement. An audit uses the memory of this node's own
pseudo-gradient, which is free from the commit of a round to the next snapshot. An audit that is not finished at the
next snapshot is dropped. An audit has few forward passes compared with a round's steps. If rounds are too short for
enough samples, there is no audit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, islice

from torch import Tensor

from atoll.core import log
from atoll.core.data_position import DataPosition
from atoll.core.errors import AtollError, DataDirUnusable, PeerMisbehaved
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.core.training_audits import MIN_SAMPLES, Drawn, draw, draw_samples
from atoll.node.exchange.allreduce import Exchange
from atoll.node.rounds.decide import position_at
from atoll.node.rounds.run_member import RunMember
from atoll.node.rounds.trainer_orders import Order
from atoll.node.state.manifests import ManifestStore
from atoll.node.system.background_tasks import BackgroundTasks
from atoll.node.trainer.trainer import Trainer
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

_FRAME_TIMEOUT = timedelta(seconds=30)
_ATTEMPTS = 15  # the contributor may install the round a little later than the auditor
_AGAIN_SECONDS = 2.0
_MOST_SAMPLES = 2**12  # of which some are drawn
_SHARE_OF_ROUND = 0.05  # of the auditor's compute time in all rounds between two audits
_SHARE_OF_ALL = 0.01  # likewise, of the compute time of all
_MOST_OF_ROUND = 0.2  # of its compute time in the audited round: the delay of its next step
_FORWARD = 1 / 3  # of the time of a step on a sample
_PASSES = 4  # of the time of a training step per sample

_log = log.get("audit")


@dataclass(frozen=True)
class InstalledRound:
    """A round that this node has just installed."""

    head: Head
    before: Head
    plan: Plan  # the plan under which the next round follows
    lease: int  # number of samples in a first lease
    exchange: Exchange  # the last one served, possibly of another round
    moved: tuple[int, int]  # the elements that the round averaged


class TrainingAudits:
    """This node's role in the audit of the last committed round."""

    def __init__(
        self,
        member: RunMember,
        trainer: Trainer,
        manifests: ManifestStore,
        background: BackgroundTasks,
        order: Callable[[Order], None],
        report: Callable[[mb.TrainingAudit], None],
    ) -> None:
        """`order` queues an order to the trainer. `report` sends the result to the coordinator."""
        self._me = member.peer_id
        self._trainer = trainer
        self._manifests = manifests
        self._sequence_length = member.spec.data.sequence_length
        self._background = background
        self._order = order
        self._report = report
        self._given: Exchange | None = None
        self._auditing: asyncio.Task[None] | None = None
        self._open = object()  # replaced when the memory is needed again

    def begin(self, installed: InstalledRound) -> None:
        """If this node was drawn, give its contribution to the auditor, or audit another member's contribution."""
        manifest, exchange = installed.head.manifest, installed.exchange
        drawn = draw(manifest)
        if drawn is None or exchange.round_id != RoundId.from_proto(manifest.round):
            return
        whole = all(map(installed.plan.is_replica, (drawn.contributor, drawn.auditor)))
        if not whole or installed.moved[0] == installed.moved[1]:
            return
        if self._me == drawn.contributor:
            self._given = exchange
            exchange.copies.give_to(drawn.auditor)
        elif self._me == drawn.auditor:
            self._auditing = self._background.begin(self._audit(installed, drawn))

    async def stop(self) -> None:
        """End the audit, because the pseudo-gradient is about to change."""
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
        manifest, get = installed.head.manifest, self._manifests.get
        own, other = [
            draw_samples(manifest.audit_seed, told)[: _affordable(manifest, self._me)]
            for told in await asyncio.to_thread(trained_samples, installed, drawn, get, self._sequence_length)
        ]
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
            except AtollError as error:  # the trainer is paused, has another model, or uses several devices
                _log.info("contribution not audited", round=round_number, reason=str(error))
                return
            audit.score, audit.own_gain, audit.other_gain = found.score, found.own, found.other
            audit.samples = found.samples
            self._report(audit)

        self._order(measure)

    async def _fetch(self, peer: str, exchange: Exchange, update_E: Tensor) -> str:
        """Fetch the contribution of `peer` into `update_E`. Returns why it failed; empty if it did not."""
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


def trained_samples(
    installed: InstalledRound,
    drawn: Drawn,
    get: Callable[[int], manifest_pb2.CommittedManifest | None],
    sequence_length: int,
) -> list[list[int]]:
    """Sample numbers on which the audited and the compared contribution were trained, according to the manifests.

    A contribution to a fragment is trained on what its member consumed since the fragment's previous round. If the
    member began again since then, it is trained on the newest samples only, as many as its tokens make. `get` reads
    manifests.
    """
    manifest, rounds = installed.head.manifest, [installed.head, installed.before]  # the newest first
    with contextlib.suppress(DataDirUnusable):
        for number in range(installed.before.round - 1, installed.head.round - 1 - max(manifest.fragments, 1), -1):
            if rounds[-1].manifest.fragments != manifest.fragments:
                break
            kept = get(number)
            if kept is None or Head(kept).hash != rounds[-1].manifest.previous_hash:
                break
            rounds.append(Head(kept))
    positions = [position_at(installed.before, installed.plan, installed.lease), *(it.data for it in rounds[2:])]
    return [
        _newest(peer, [it.manifest for it in rounds], positions, sequence_length)
        for peer in (drawn.contributor, drawn.compared)
    ]


def _newest(
    peer: str, manifests: Sequence[manifest_pb2.Manifest], positions: Sequence[DataPosition], sequence_length: int
) -> list[int]:
    """Samples of the contribution in `manifests[0]`; `positions` are those before each manifest."""
    found, there = list[int](), [_contribution(manifest, peer) for manifest in manifests]
    left = max(there[0].weight, there[0].judged_tokens) // sequence_length
    for contribution, position in zip(there, positions, strict=False):
        held = position.holdings.get(peer, ())
        consumed = min(contribution.samples, sum(end - start for start, end in held))  # the first ones of its ranges
        first = max(0, consumed - min(left, _MOST_SAMPLES // len(positions)))
        found += islice(chain.from_iterable(range(*piece) for piece in held), first, consumed)
        left = max(0, left - consumed)
    return found


def _contribution(manifest: manifest_pb2.Manifest, peer: str) -> manifest_pb2.Contribution:
    found = (item for item in manifest.contributions if item.peer_id == peer)
    return next(found, manifest_pb2.Contribution())


def _affordable(manifest: manifest_pb2.Manifest, me: str) -> int:
    """How many samples of each kind this node may measure. One round in a turn of the fragments is audited."""
    members, fragments = sum(bool(item.weight) for item in manifest.contributions), max(manifest.fragments, 1)
    share = min(_MOST_OF_ROUND, fragments * min(_SHARE_OF_ROUND, _SHARE_OF_ALL * members))
    return int(share * _contribution(manifest, me).samples / (_FORWARD * _PASSES))
