"""The coordinator's vote over real mutual TLS: signed, durable, and only for the opener."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from integration.coordinator.lab import SECONDS, Node, coordinator
from integration.coordinator.test_membership import close, training
from unit.coordinator.world import genesis_report, hash_of, round_report

from atoll.core.identity import peer_id_of
from atoll.core.manifest import sign_attestation, sign_vote, verify_vote
from atoll.core.round_id import RoundId
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import membership_pb2 as mb


def attempt_of(node: Node, nodes: list[Node], number: int) -> RoundId:
    peers = sorted(item.identity.peer_id for item in nodes)  # the seats after genesis
    tries = (RoundId("reef", 1, 0, number, count) for count in range(len(nodes)))
    return next(item for item in tries if item.opener(peers) == node.identity.peer_id)


async def ask(node: Node, round_id: RoundId, proposal: bytes = b"") -> mb.VoteResponse:
    return await node.stub.Vote(mb.VoteRequest(round=round_id.to_proto(), proposal=proposal), timeout=SECONDS)


async def test_one_of_two_commits_with_the_coordinators_vote_that_survives_a_restart(tmp_path: Path) -> None:
    data_dir = tmp_path / "c"
    async with training(data_dir, "ann", "bob") as (home, nodes):
        ann, operator_key = nodes[0], home.keys.operator.public_key
        mine = attempt_of(ann, nodes, 1)
        genesis = hash_of(genesis_report(ann.identity))
        report = round_report(1, genesis, [ann.identity], attempt=mine.attempt)
        payload = report.manifest.payload
        words = [sign_attestation(ann.identity, payload)]
        proposal = dp.Proposal(payload=payload, attestations=words).SerializeToString()
        assert (await ask(ann, mine)).granted
        answer = await ask(ann, mine, proposal)
        assert answer.granted
        verify_vote(payload, mine.ballot, answer.vote, peer_id_of(operator_key))
        report.manifest.signatures[0].CopyFrom(sign_vote(ann.identity, payload, mine.ballot))
        report.manifest.signatures.append(answer.vote)
    async with coordinator(data_dir, lost_after_seconds=600.0) as home:
        for node in nodes:
            node.home = home
            await node.connect(mb.NODE_STATE_TRAINING)
        again = await ask(ann, mine)
        assert (again.accepted_proposal, again.accepted_ballot.attempt) == (proposal, mine.attempt)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await ask(nodes[1], mine)  # not the opener
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await ann.acknowledged(await ann.say(rounds=[report]))
        assert (await home.admin.GetRun(admin.RunRequest(), timeout=SECONDS)).head_round == 1
        late = await ask(ann, mine)
        assert (late.granted, late.accepted_proposal) == (False, b"")
        await close(nodes)
