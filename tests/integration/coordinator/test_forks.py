"""A fork over the wire: heartbeats show it, the member that voted twice is gone, and the proof outlives a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from integration.coordinator.lab import SECONDS, Node, coordinator, error_of
from integration.coordinator.test_membership import close, training
from unit.coordinator.world import genesis_report, hash_of, round_report

from atoll.core.proofs import verify_proof
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import plan_pb2


async def answer(node: Node, manifests: list[mb.RoundReport]) -> None:
    """Say heartbeats until this node is asked for rounds, and send them."""
    asked = asyncio.create_task(node.hear(lambda response: response.HasField("manifests")))
    while not asked.done():
        await node.say()
        await asyncio.sleep(0.1)
    first = asked.result().manifests.first
    await node.say(manifests=mb.ManifestAnswer(first=first, manifests=[it.manifest for it in manifests]))


async def test_a_member_that_voted_twice_is_proved_and_gone(tmp_path: Path) -> None:
    data_dir = tmp_path / "c"
    async with training(data_dir, "ann", "bob", "cid", stop_tokens=10**9) as (home, nodes):
        ann, bob, cid = sorted(nodes, key=lambda node: node.name)
        start = hash_of(genesis_report(nodes[0].identity))
        one = round_report(1, start, [ann.identity, bob.identity], seats=[bob.identity])  # so ann decides nothing alone
        other = round_report(1, start, [bob.identity, cid.identity])
        ann.head = bob.head = (1, hash_of(one))
        cid.head = (1, hash_of(other))
        await ann.acknowledged(await ann.say(rounds=[one]))
        await bob.say()
        await answer(cid, [other])
        failure = await bob.ended()
        assert error_of(failure).reason == "Banned"

        plan = plan_pb2.Plan.FromString((await cid.plan(2)).plan.payload)
        assert (plan.base.round, plan.base.manifest_hash) == (1, hash_of(one))
        assert {it.peer_id for it in plan.assignments} == {ann.identity.peer_id, cid.identity.peer_id}
        (listed,) = (await home.admin.ListProofs(admin.ListProofsRequest(), timeout=SECONDS)).proofs
        assert (listed.culprit, listed.culprit_name, listed.banned) == (bob.identity.peer_id, "bob", True)

    async with coordinator(data_dir) as home:
        view = await home.admin.GetProof(admin.GetProofRequest(id=listed.id[:6]), timeout=SECONDS)
        assert verify_proof(view.proof).culprit == bob.identity.peer_id
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await home.admin.GetProof(admin.GetProofRequest(id="x"), timeout=SECONDS)
        assert error_of(missing.value).reason == "NotFound"
        await home.admin.UnbanNode(admin.UnbanNodeRequest(node="bob"), timeout=SECONDS)
        bob.home = home
        await bob.connect()
        await bob.hear(lambda response: response.run_state == mb.RUN_STATE_TRAINING)
        (listed,) = (await home.admin.ListProofs(admin.ListProofsRequest(), timeout=SECONDS)).proofs
        assert not listed.banned
        await close(nodes)
