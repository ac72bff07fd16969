"""Audits of training with real trainers: honest contributions gain on their own samples, copies of others do not."""

from __future__ import annotations

import asyncio
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


async def audits_of(made, count: int, contributor: str = "") -> list[mb.TrainingAudit]:
    """What all members reported, once there are so many audits, and some of this contributor."""

    def enough() -> bool:
        there = [audit for member in made for audit in member.audits]
        return len(there) >= count and (not contributor or any(it.contributor == contributor for it in there))

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
        assert len(given) >= count / 2  # a busy machine begins the next round before a contribution is fetched
        if len(given) >= 8:  # fewer say little
            assert fmean(audit.score for audit in given) > 0  # some 1.2 is usual, with a deviation of 1 for each


@pytest.mark.timeout(900)
async def test_another_contribution_than_was_summed_is_not_audited(tmp_path, monkeypatch):
    """A member sends its auditor something else than its sketches are of: as a copy that scores better might be."""
    async with members(tmp_path, 3, no_fault, round_tokens=6000) as made:
        liar = made[1].identity.peer_id
        give = ContributionCopies.give_to

        def lie(copies, peer):
            if copies._network.peer_id == liar:
                other_E = -copies._contribution()
                copies._contribution = lambda: other_E
            give(copies, peer)

        monkeypatch.setattr(ContributionCopies, "give_to", lie)
        audits = await audits_of(made, 8, contributor=liar)
        of_liar = [audit for audit in audits if audit.contributor == liar]
        assert not any(audit.given for audit in of_liar)
        assert "another contribution" in of_liar[-1].reason
        assert all(audit.given for audit in audits if audit.contributor != liar)


@pytest.mark.timeout(900)
async def test_only_the_auditor_gets_a_contribution_and_only_until_the_next_snapshot(tmp_path):
    async with members(tmp_path, 3, no_fault, round_tokens=6000) as made:
        await audits_of(made, 2)
        await made[0].rounds(4)
        exchange = made[0].engine._results.served
        out_E = torch.empty_like(made[1].trainer.pseudo_gradient)
        await made[0].engine._training_audits.stop()
        for peer in (made[1], made[2]):
            asking = peer.engine._results.served
            with pytest.raises(AtollError):
                await asking.copies.fetch(made[0].identity.peer_id, out_E, timedelta(seconds=5))
        assert exchange is not None
