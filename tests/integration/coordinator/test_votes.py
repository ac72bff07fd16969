"""The coordinator's vote over real mutual TLS: signed, durable, and only for the opener."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from integration.coordinator.lab import SECONDS, Node, coordinator
from integration.coordinator.test_membership import close, training
from unit.coordinator.world import genesis_report, hash_of, round_report

from atoll.core.manifest import sign_vote, verify_tie_break
from atoll.core.round_id import RoundId
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import membership_pb2 as mb


def attempt_of(node: Node, nodes: list[Node], number: int) -> RoundId:
    peers = [item.identity.peer_id for item in nodes]
    tries = (RoundId("reef", 1, 0, number, count) for count in range(len(nodes)))
    return next(item for item in tries if item.opener(peers) == node.identity.peer_id)


async def ask(node: Node, round_id: RoundId, payload: bytes = b"") -> mb.VoteResponse:
    return await node.stub.Vote(mb.VoteRequest(round=round_id.to_proto(), payload=payload), timeout=SECONDS)


async def test_one_of_two_commits_with_the_coordinators_vote_that_survives_a_restart(tmp_path: Path) -> None:
    data_dir = tmp_path / "c"
    async with training(data_dir, "ann", "bob") as (home, nodes):
        ann, operator_key = nodes[0], home.keys.operator.public_key
        mine = attempt_of(ann, nodes, 1)
        genesis = hash_of(genesis_report(ann.identity))
        report = round_report(1, genesis, [ann.identity], attempt=mine.attempt)
        payload = report.manifest.payload
        assert (await ask(ann, mine)).granted
        answer = await ask(ann, mine, payload)
        assert answer.granted
        verify_tie_break(payload, mine.ballot, answer.vote, operator_key)
        report.manifest.signatures[0].CopyFrom(sign_vote(ann.identity, payload, mine.ballot))
        report.manifest.tie_break.CopyFrom(answer.vote)
    async with coordinator(data_dir, lost_after_seconds=10.0) as home:
        for node in nodes:
            node.home = home
            await node.connect(mb.NODE_STATE_TRAINING)
        again = await ask(ann, mine)
        assert (again.accepted_payload, again.accepted_ballot.attempt) == (payload, mine.attempt)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await ask(nodes[1], mine)  # not the opener
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await ann.acknowledged(await ann.say(rounds=[report]))
        assert (await home.admin.GetRun(admin.RunRequest(), timeout=SECONDS)).head_round == 1
        late = await ask(ann, mine)
        assert (late.granted, late.accepted_payload) == (False, b"")
        await close(nodes)
