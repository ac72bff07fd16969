"""Audits of training with real trainers: honest contributions gain on their own samples, copies of others do not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from datetime import timedelta
from statistics import fmean

import pytest
import torch
from integration.node.test_engine import members
from support.memory_network import no_fault

from atoll.core.errors import AtollError
from atoll.core.training_audits import draw
from atoll.node.exchange.contribution_copies import ContributionCopies
from atoll.node.rounds import training_audits
from atoll.v1 import membership_pb2 as mb


@pytest.fixture(autouse=True)
def audits_of_short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds here are too short for audits to be cheap."""
    monkeypatch.setattr(training_audits, "_SHARE_OF_ROUND", 4.0)
    monkeypatch.setattr(training_audits, "_SHARE_OF_ALL", 4.0)
    monkeypatch.setattr(training_audits, "_MOST_OF_ROUND", 4.0)


def is_given(audit: mb.TrainingAudit) -> bool:
    """A busy machine begins the next round before a contribution is fetched."""
    return audit.given


async def audits_of(made, count: int, wanted: Callable[[mb.TrainingAudit], bool] = is_given) -> list[mb.TrainingAudit]:
    """What all members reported, once there are so many audits that are `wanted`."""

    def enough() -> bool:
        return sum(wanted(audit) for member in made for audit in member.audits) >= count

    async with asyncio.timeout(600):
        while not enough():
            for member in made:
                if member.running.done():
                    member.running.result()
            await asyncio.sleep(0.05)
    return sorted((audit for member in made for audit in member.audits), key=lambda audit: audit.round)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("fragments", "count"), [(1, 16), (2, 4)])
async def test_the_drawn_member_audits_the_drawn_contribution_and_finds_that_it_was_trained(tmp_path, fragments, count):
    async with members(tmp_path, 3, no_fault, round_tokens=6000, fragments=fragments) as made:
        audits = await audits_of(made, count)
        manifests = {head.round: head.manifest for member in made for head in member.heads}
        for member in made:
            for audit in member.audits:
                drawn = draw(manifests[audit.round])
                assert drawn is not None
                assert (drawn.contributor, drawn.auditor) == (audit.contributor, member.identity.peer_id)
        assert all(manifest.fragments == fragments for manifest in manifests.values() if manifest.round.number)
        given = [audit for audit in audits if audit.given]
        if len(given) >= 16:  # fewer say little
            usual, deviation = 1.2, 1 / math.sqrt(len(given))
            assert fmean(audit.score for audit in given) > usual - 5 * deviation


@pytest.mark.timeout(900)
async def test_another_contribution_than_was_summed_is_not_audited(tmp_path, monkeypatch):
    """A member sends its auditor something else than its sketches are of: as a copy that scores better might be."""
    async with members(tmp_path, 3, no_fault, round_tokens=6000) as made:
        liar = made[1].identity.peer_id
        give = ContributionCopies.give_to

        def lie(copies, peer):
            if copies._streams.me == liar:
                other_E = -copies._contribution()
                copies._contribution = lambda: other_E
            give(copies, peer)

        monkeypatch.setattr(ContributionCopies, "give_to", lie)

        def is_found(audit: mb.TrainingAudit) -> bool:
            return "another contribution" in audit.reason

        await audits_of(made, 6)
        audits = await audits_of(made, 1, is_found)
        assert not any(audit.given for audit in audits if audit.contributor == liar)
        assert {audit.contributor for audit in audits if is_found(audit)} == {liar}


@pytest.mark.timeout(900)
async def test_only_the_auditor_gets_a_contribution_and_only_until_the_next_snapshot(tmp_path):
    async with members(tmp_path, 3, no_fault, round_tokens=6000) as made:
        await audits_of(made, 2)
        await made[0].rounds(4)
        exchange = made[0].engine._results.served
        out_E = torch.empty_like(made[1].trainer.pseudo_gradient)
        await made[0].engine._progress.audits.stop()
        for peer in (made[1], made[2]):
            asking = peer.engine._results.served
            with pytest.raises(AtollError):
                await asking.copies.fetch(made[0].identity.peer_id, out_E, timedelta(seconds=5))
        assert exchange is not None
