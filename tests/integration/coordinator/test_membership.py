"""Heartbeats over real mutual TLS: genesis, plans, reports, bans, restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from integration.coordinator.lab import SECONDS, Coordinator, Node, coordinator, error_of, tls_request
from unit.coordinator.world import abandoned_report, genesis_report, hash_of, round_report

from atoll.core.certs import subject_uri
from atoll.core.clock import SystemClock
from atoll.core.membership import MembershipVerifier
from atoll.core.plan import Plan, verify_plan
from atoll.core.round_id import RoundId
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import common_pb2 as pb
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import membership_pb2_grpc


def plan_in(response: mb.HeartbeatResponse, home: Coordinator) -> Plan:
    return verify_plan(response.plan, home.keys.operator.public_key, "reef")


async def begin(home: Coordinator, *names: str, **spec: int) -> list[Node]:
    """A run that trains with these nodes, in the order of the plan."""
    await home.create_run(min_nodes=len(names), **spec)
    nodes = [await (await home.node(name)).connect() for name in names]
    nodes.sort(key=lambda node: node.identity.peer_id)
    await nodes[0].hear(lambda response: response.order == mb.ORDER_WRITE_GENESIS)
    await nodes[0].say(mb.NODE_STATE_READY, genesis=genesis_report(nodes[0].identity))
    for node in nodes:
        response = await node.plan(1)
        assert plan_in(response, home).members == tuple(item.identity.peer_id for item in nodes)
        assert len(response.layers.layers) == 3
        assert response.genesis.payload
        await node.say(mb.NODE_STATE_TRAINING)
    return nodes


async def close(nodes: list[Node]) -> None:
    for node in nodes:
        await node.close()


@asynccontextmanager
async def training(data_dir: Path, *names: str, **spec: int) -> AsyncIterator[tuple[Coordinator, list[Node]]]:
    async with coordinator(data_dir) as home:
        nodes = await begin(home, *names, **spec)
        yield home, nodes
        await close(nodes)


async def test_from_enrolment_over_genesis_to_a_plan_with_data(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        response = await nodes[1].plan(1)
        plan = plan_in(response, home)
        assert [item.data_ranges for item in plan.assignments] == [((0, 32),), ((32, 64),)]
        assert plan.routes == tuple((peer,) for peer in plan.members)
        assert response.run_state == mb.RUN_STATE_TRAINING


async def test_a_late_joiner_and_a_leaver_make_new_plans(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        late = await (await home.node("cid")).connect()
        second = plan_in(await nodes[0].plan(2), home)
        assert set(second.members) == {node.identity.peer_id for node in (*nodes, late)}
        assert second.reason == "cid joins"
        assert all(item.data_ranges for item in second.assignments)  # no round has committed yet
        await late.stub.Leave(mb.LeaveRequest(reason="bedtime"), timeout=SECONDS)
        third = plan_in(await nodes[0].plan(3), home)
        assert late.identity.peer_id not in third.members
        assert third.reason == "cid left"
        await late.close()


async def test_a_killed_node_leaves_the_plan_after_the_grace(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        await nodes[1].close()
        plan = plan_in(await nodes[0].plan(2), home)
        assert plan.members == (nodes[0].identity.peer_id,)
        assert "was lost" in plan.reason


async def test_reports_are_durable_when_acknowledged_and_resending_is_harmless(tmp_path: Path) -> None:
    data_dir = tmp_path / "c"
    async with training(data_dir, "ann", "bob") as (home, nodes):
        ann, identities = nodes[0], [node.identity for node in nodes]
        first = round_report(1, hash_of(genesis_report(ann.identity)), identities)
        loss = mb.EvaluationReport(round=1, loss=4.25, committed_tokens=1000)
        tries = (abandoned_report(2, attempt=attempt) for attempt in range(2))
        peers = [identity.peer_id for identity in identities]
        abandoned = next(item for item in tries if RoundId.from_proto(item.round).opener(peers) == ann.identity.peer_id)
        for _ in range(2):
            sequence = await ann.say(rounds=[first, abandoned], evaluations=[loss])
        await ann.acknowledged(sequence)
    async with coordinator(data_dir) as home:
        run = await home.admin.GetRun(admin.RunRequest(), timeout=SECONDS)
        assert (run.head_round, run.committed_tokens, run.rounds_opened, run.rounds_committed) == (1, 1000, 2, 1)
        assert [item.loss for item in run.evaluations] == [4.25]
        rounds = (await home.admin.ListRounds(admin.ListRoundsRequest(), timeout=SECONDS)).rounds
        assert [(item.round.number, item.committed, item.members) for item in rounds] == [(1, True, 2), (2, False, 0)]


async def test_metrics_survive_a_restart_and_are_read_in_pages(tmp_path: Path) -> None:
    data_dir = tmp_path / "c"
    async with training(data_dir, "ann", "bob") as (home, nodes):
        for node in nodes:
            told = [mb.NodeMetrics(round=number, train_loss=5.0 - number, tokens=8) for number in (1, 2, 3)]
            await node.acknowledged(await node.say(metrics=told))
        async with asyncio.timeout(SECONDS):
            while len((await home.admin.ListMetrics(admin.ListMetricsRequest(), timeout=SECONDS)).rows) < 6:
                await asyncio.sleep(0.05)
    async with coordinator(data_dir) as home:
        request, found = admin.ListMetricsRequest(limit=4), []
        while rows := (await home.admin.ListMetrics(request, timeout=SECONDS)).rows:
            found += [(row.metrics.round, row.name, row.metrics.train_loss) for row in rows]
            request.since_round, request.after_peer_id = rows[-1].metrics.round, rows[-1].peer_id
        names = ["ann", "bob"] if nodes[0].name == "ann" else ["bob", "ann"]  # in the order of peer ids
        assert found == [(number, name, 5.0 - number) for number in (1, 2, 3) for name in names]
        of_bob = admin.ListMetricsRequest(node="bob", limit=2, newest=True)
        rows = (await home.admin.ListMetrics(of_bob, timeout=SECONDS)).rows
        assert [(row.name, row.metrics.round) for row in rows] == [("bob", 2), ("bob", 3)]
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await home.admin.ListMetrics(admin.ListMetricsRequest(node="nobody"), timeout=SECONDS)
        assert error_of(failure.value).reason == "NotFound"


async def test_events_are_filtered_before_they_are_sent_and_followed(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):

        async def kinds(**wanted: Any) -> list[tuple[str, str]]:
            stream = home.admin.Events(admin.EventsRequest(**wanted), timeout=SECONDS)
            return [(event.kind, event.subject) async for event in stream]

        everything, bob = await kinds(), next(node for node in nodes if node.name == "bob").identity.peer_id
        assert await kinds(tail=2) == everything[-2:]
        assert await kinds(tail=10**6) == everything
        assert await kinds(since_seconds=3600, run_id="reef") == everything
        assert await kinds(since_seconds=2**63) == everything
        of_bob = [it for it in everything if it[1] == bob]
        assert of_bob[0] == ("node.enrolled", bob)
        assert await kinds(node="bob") == of_bob
        assert await kinds(node="bob", kind="node", tail=1) == [it for it in of_bob if it[0].startswith("node.")][-1:]
        for wrong in ({"run_id": "no such"}, {"node": "nobody"}):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await kinds(**wrong)
            assert error_of(failure.value).reason == "NotFound"
        follow = home.admin.Events(admin.EventsRequest(kind="node.left", tail=3, follow=True), timeout=SECONDS)
        await nodes[1].stub.Leave(mb.LeaveRequest(reason="bedtime"), timeout=SECONDS)
        found = await follow.read()
        assert isinstance(found, admin.Event)
        assert found.subject == nodes[1].identity.peer_id
        follow.cancel()


async def test_rounds_that_no_opener_reported_are_asked_for_on_the_stream(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob", stop_tokens=2000) as (_, nodes):
        identities, bob = [node.identity for node in nodes], nodes[1]
        first = round_report(1, hash_of(genesis_report(nodes[0].identity)), identities)
        second = round_report(2, hash_of(first), identities, committed_before=1000)
        bob.head = (2, hash_of(second))
        asked = asyncio.create_task(bob.hear(lambda response: response.HasField("manifests")))
        while not asked.done():
            await bob.say()
            await asyncio.sleep(0.1)
        question = asked.result()
        assert (question.manifests.first, question.known_round) == (1, 0)
        answer = mb.ManifestAnswer(first=1, manifests=[first.manifest, second.manifest])
        await bob.say(manifests=answer)
        told = await bob.hear(lambda response: response.known_round == 2)
        assert told.run_state == mb.RUN_STATE_FINISHED
        assert sum(response.HasField("manifests") for response in bob.heard) == 1


async def test_the_run_finishes_when_its_tokens_are_committed(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob", stop_tokens=1000) as (_, nodes):
        identities = [node.identity for node in nodes]
        await nodes[0].say(rounds=[round_report(1, hash_of(genesis_report(nodes[0].identity)), identities)])
        for node in nodes:
            await node.hear(lambda response: response.run_state == mb.RUN_STATE_FINISHED)


async def test_a_restart_changes_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    data_dir = tmp_path / "c"
    async with training(data_dir, "ann", "bob") as (home, nodes):
        ca, before = home.keys.ca.pem, (await home.admin.GetPlan(admin.GetPlanRequest(), timeout=SECONDS)).signed
    async with coordinator(data_dir, lost_after_seconds=600.0) as home:
        assert home.keys.ca.pem == ca
        for node in nodes:
            node.home = home
            await node.connect(mb.NODE_STATE_TRAINING)
        for node in nodes:
            response = await node.hear(lambda response: response.run_state == mb.RUN_STATE_TRAINING)
            assert not response.HasField("plan")  # it has that one
        after = await home.admin.GetPlan(admin.GetPlanRequest(), timeout=SECONDS)
        assert after.signed == before
        await close(nodes)


async def test_a_ban_ends_the_stream_reaches_everyone_and_survives(tmp_path: Path) -> None:
    data_dir = tmp_path / "c"
    async with training(data_dir, "ann", "bob") as (home, nodes):
        good, bad = nodes
        await home.admin.BanNode(admin.BanNodeRequest(node=bad.identity.peer_id, reason="garbage"), timeout=SECONDS)
        failure = await bad.ended()
        assert (failure.code(), error_of(failure).reason) == (grpc.StatusCode.PERMISSION_DENIED, "Banned")
        await good.hear(lambda response: _number(response, home) == 1)
        assert plan_in(await good.plan(2), home).members == (good.identity.peer_id,)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await bad.stub.Renew(mb.RenewRequest(csr_der=bad.csr, csr_signature=bad.csr_signature), timeout=SECONDS)
        assert error_of(refused.value).reason == "Banned"
        again = Node(home, bad.identity, "bob")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await again.enrol(await home.token())
        assert error_of(refused.value).reason == "Banned"
    async with coordinator(data_dir) as home:
        assert home.controller.state.deny.number == 1
        assert bad.identity.peer_id in home.controller.state.deny.peer_ids


async def test_drain_is_an_order_and_ends_with_leave(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, nodes):
        await home.admin.DrainNode(admin.DrainNodeRequest(node=nodes[1].name), timeout=SECONDS)
        await nodes[1].hear(lambda response: response.order == mb.ORDER_DRAIN)
        await nodes[1].say(mb.NODE_STATE_DRAINING)  # its last round is done
        assert plan_in(await nodes[0].plan(2), home).members == (nodes[0].identity.peer_id,)
        await nodes[1].stub.Leave(mb.LeaveRequest(), timeout=SECONDS)


async def test_pause_start_and_stop_reach_the_nodes(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann") as (home, nodes):
        await home.admin.PauseRun(admin.RunRequest(), timeout=SECONDS)
        await nodes[0].hear(lambda response: response.run_state == mb.RUN_STATE_PAUSED)
        await home.admin.StartRun(admin.RunRequest(), timeout=SECONDS)
        nodes[0].heard.clear()
        await nodes[0].say()
        await nodes[0].hear(lambda response: response.run_state == mb.RUN_STATE_TRAINING)
        await home.admin.StopRun(admin.RunRequest(), timeout=SECONDS)
        await nodes[0].hear(lambda response: response.run_state == mb.RUN_STATE_STOPPED)


async def test_a_node_with_another_corpus_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (home, _):
        stray = await (await home.node("cid")).connect(corpus="cd" * 32)
        failure = await stray.ended()
        assert error_of(failure).reason == "CorpusDiffers"
        assert "is not the run's" in str(failure.details())
        await stray.close()


async def test_renewal_keeps_the_peer_and_raises_the_epoch(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann") as (home, nodes):
        ann = nodes[0]
        ann.key_pem, ann.csr, ann.csr_signature = tls_request(ann.identity)
        request = mb.RenewRequest(csr_der=ann.csr, csr_signature=ann.csr_signature)
        fresh = await ann.stub.Renew(request, timeout=SECONDS)
        assert subject_uri(fresh.certificate_chain_pem) == f"atoll://node/{ann.identity.peer_id}"
        member = MembershipVerifier(home.keys.operator.public_key, "reef").verify_membership(
            fresh.membership, SystemClock().unix()
        )
        assert member.epoch == 2
        ann.enrolled.certificate_chain_pem = fresh.certificate_chain_pem
        async with ann.channel() as channel:  # the new key and chain are good for a call
            await membership_pb2_grpc.MembershipServiceStub(channel).Renew(request, timeout=SECONDS)  # type: ignore[misc]


async def test_renewal_needs_the_identitys_own_signature(tmp_path: Path) -> None:
    async with training(tmp_path / "c", "ann", "bob") as (_, nodes):
        ann, bob = nodes
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ann.stub.Renew(mb.RenewRequest(csr_der=bob.csr, csr_signature=bob.csr_signature), timeout=SECONDS)
        assert error_of(refused.value).reason == "SignatureInvalid"


async def drained(call: grpc.aio.StreamStreamCall[mb.HeartbeatRequest, mb.HeartbeatResponse]) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_second_stream_of_a_peer_ends_the_first(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        ann = await home.node("ann")
        await ann.connect()
        old = ann.call
        await ann.connect()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await drained(old)
        assert error_of(ended.value).reason == "InvalidTransition"
        await ann.close()


async def test_a_silent_stream_ends(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c", silence_seconds=0.3) as home:
        await home.create_run()
        ann = await (await home.node("ann")).connect()
        assert error_of(await ann.ended()).reason == "InvalidTransition"
        await ann.close()


async def test_seeds_are_handed_to_nodes_and_never_planned(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run(min_nodes=1)
        seed = await home.node("seed", roles=[pb.ROLE_SEED])
        await seed.connect(multiaddrs=["/ip4/127.0.0.1/tcp/4009"])
        expected = [f"/ip4/127.0.0.1/tcp/4009/p2p/{seed.identity.peer_id}"]
        await seed.hear(lambda response: list(response.seeds) == expected)
        ann = await (await home.node("ann")).connect()
        assert list(ann.enrolled.seeds) == expected
        await ann.hear(lambda response: response.order == mb.ORDER_WRITE_GENESIS)
        await ann.say(mb.NODE_STATE_READY, genesis=genesis_report(ann.identity))
        assert plan_in(await ann.plan(1), home).members == (ann.identity.peer_id,)
        await close([ann, seed])


def _number(response: mb.HeartbeatResponse, home: Coordinator) -> int:
    if not response.HasField("deny_list"):
        return -1
    return MembershipVerifier(home.keys.operator.public_key, "reef").verify_deny_list(response.deny_list).number
