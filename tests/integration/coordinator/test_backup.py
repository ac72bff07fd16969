"""A coordinator backed up while it works, lost, and restored elsewhere: nodes that enrolled before go on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from integration.coordinator.lab import SECONDS, Coordinator, Node, coordinator, error_of
from integration.coordinator.test_membership import begin, close, plan_in
from typer.testing import CliRunner
from unit.coordinator.world import genesis_report, hash_of, round_report

from atoll.coordinator.cli import serve
from atoll.core.membership import MembershipVerifier
from atoll.core.round_id import RoundId
from atoll.core.tokens import JoinToken
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import common_pb2 as pb
from atoll.v1 import membership_pb2 as mb


async def run(*arguments: str) -> None:
    result = await asyncio.to_thread(CliRunner().invoke, serve.app, list(arguments))
    assert result.exit_code == 0, result.output


async def make_tokens(home: Coordinator, made: list[tuple[float, JoinToken]], warm: asyncio.Event) -> None:
    """Load, until cancelled: every token with the time at which it was acknowledged."""
    while True:
        token = await home.token()
        made.append((time.monotonic(), token))
        if len(made) == 20:
            warm.set()


async def ask(node: Node, plan: int, number: int, nodes: list[Node]) -> mb.VoteResponse:
    peers = [item.identity.peer_id for item in nodes]
    tries = (RoundId("reef", plan, 0, number, count) for count in range(len(nodes)))
    mine = next(item for item in tries if item.opener(peers) == node.identity.peer_id)
    return await node.stub.Vote(mb.VoteRequest(round=mine.to_proto()), timeout=SECONDS)


async def test_backed_up_under_load_and_restored_elsewhere(tmp_path: Path) -> None:
    first, second, archive = tmp_path / "first", tmp_path / "second", tmp_path / "backup.tar"
    made: list[tuple[float, JoinToken]] = []
    async with coordinator(first) as home:
        nodes = await begin(home, "ann", "bob")
        identities = [node.identity for node in nodes]
        fingerprint = home.keys.ca.sha256
        report = round_report(1, hash_of(genesis_report(identities[0])), identities)
        await nodes[0].acknowledged(await nodes[0].say(rounds=[report]))
        warm = asyncio.Event()
        load = asyncio.create_task(make_tokens(home, made, warm))
        await asyncio.wait_for(warm.wait(), SECONDS)
        begun = time.monotonic()
        await run("backup", str(archive), "--data-dir", str(first))
        load.cancel()
        late = await home.node("cid")  # enrols, and is banned, after the backup
        await home.admin.BanNode(admin.BanNodeRequest(node="cid"), timeout=SECONDS)
        banning = await nodes[0].hear(lambda response: response.HasField("deny_list") and number(response.deny_list))
        await close(nodes)
    await run("restore", str(archive), "--data-dir", str(second))
    async with coordinator(second, lost_after_seconds=600.0) as home:
        assert home.keys.ca.sha256 == fingerprint
        listed = (await home.admin.ListTokens(admin.ListTokensRequest(), timeout=SECONDS)).tokens
        known = {token.id for token in listed}
        assert {token.token_id for when, token in made if when < begun} <= known
        assert all(token.revoked for token in listed)
        for node in nodes:
            node.home = home
            await node.connect(mb.NODE_STATE_TRAINING)
        above = plan_in(await nodes[0].plan(1001), home)  # nodes follow no plan that they could have had before
        assert above.version > 1001
        assert set(above.members) == {node.identity.peer_id for node in nodes}
        assert not (await ask(nodes[0], above.version, 2, nodes)).granted
        second_round = round_report(2, hash_of(report), identities, plan_version=above.version, committed_before=1000)
        await nodes[0].acknowledged(await nodes[0].say(rounds=[second_round]))
        assert (await ask(nodes[0], above.version, 3, nodes)).granted
        await nodes[0].say(deny_list=banning.deny_list)  # it was shown an older one
        told = await nodes[1].hear(lambda response: response.HasField("deny_list") and number(response.deny_list) > 1)
        deny = MembershipVerifier(home.keys.operator.public_key, "reef").verify_deny_list(told.deny_list)
        assert deny.peer_ids == {late.identity.peer_id}
        assert deny.number > 1000
        late.home = home
        await late.connect()
        assert error_of(await late.ended()).reason == "Banned"  # its row is lost, its ban is not
        await close(nodes)
        await late.close()


def number(sealed: pb.Signed) -> int:
    return pb.DenyList.FromString(sealed.payload).number
