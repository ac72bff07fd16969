"""A node that is assigned to another run, over the real protocol."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.coordinator.lab import SECONDS, Coordinator, coordinator
from unit.coordinator.world import spec_toml

from atoll.core.clock import SystemClock
from atoll.core.errors import CertificateInvalid, ProtocolMismatch
from atoll.core.identity import Identity
from atoll.node.control.channel import dial
from atoll.node.control.credentials import Credentials
from atoll.node.control.enrol import enrol
from atoll.node.run.begin_membership import begin_membership
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import membership_pb2_grpc

CLOCK = SystemClock()


async def assign_to_kelp(home: Coordinator) -> None:
    created = admin.CreateRunRequest(spec_toml=spec_toml(name="kelp"), start=True)
    await home.admin.CreateRun(created, timeout=SECONDS)
    await home.admin.AssignNode(admin.AssignNodeRequest(node="ann", run_id="kelp"), timeout=SECONDS)


async def ask(credentials: Credentials) -> mb.MoveToRunResponse:
    async with dial(credentials) as channel:
        stub = membership_pb2_grpc.MembershipServiceStub(channel)
        return await stub.MoveToRun(mb.MoveToRunRequest(), timeout=SECONDS)


async def test_the_answer_makes_a_member_of_the_other_run_and_a_lost_one_is_sent_again(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "home") as home:
        await home.create_run()
        identity, data_dir = Identity.generate(), tmp_path / "ann"
        before = await enrol(await home.token(), identity, "ann", CLOCK)
        data_dir.mkdir()
        begin_membership(data_dir, before)
        await home.admin.CreateRun(
            admin.CreateRunRequest(spec_toml=spec_toml(name="kelp"), start=True), timeout=SECONDS
        )
        await home.admin.AssignNode(admin.AssignNodeRequest(node="ann", run_id="kelp"), timeout=SECONDS)

        await ask(before)  # this answer is lost
        answer = await ask(before)
        after = before.moved(answer, identity.peer_id, CLOCK.unix())
        begin_membership(data_dir, after)
        loaded = Credentials.load(data_dir)
        assert loaded is not None
        assert (loaded.run_id, loaded.tls_chain_pem) == ("kelp", before.tls_chain_pem)
        member = loaded.authority.verify_membership(loaded.signed_membership(), CLOCK.unix())
        assert (member.run_id, member.node_name) == ("kelp", "ann")
        assert (await ask(loaded)).run_id == "kelp"
        assert {it.name for it in (data_dir / "runs").iterdir()} == {"reef", "kelp"}


async def test_a_node_that_missed_its_move_is_told_and_its_words_about_the_old_run_do_not_count(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "home") as home:
        await home.create_run()
        ann = await home.node("ann")
        await ann.connect(run_id="reef")
        await home.admin.CreateRun(
            admin.CreateRunRequest(spec_toml=spec_toml(name="kelp"), start=True), timeout=SECONDS
        )
        await home.admin.AssignNode(admin.AssignNodeRequest(node="ann", run_id="kelp"), timeout=SECONDS)
        await ann.hear(lambda response: response.order == mb.ORDER_MOVE)
        async with ann.channel() as channel:
            await ann.stub_on(channel).MoveToRun(mb.MoveToRunRequest(), timeout=SECONDS)
        await ann.ended()  # the stream is of the old run

        await ann.connect(run_id="reef")
        told = await ann.hear(lambda response: response.order == mb.ORDER_MOVE)
        assert not told.HasField("plan")
        view = await home.admin.GetNode(admin.GetNodeRequest(node="ann"), timeout=SECONDS)
        assert (view.run_id, view.connected, view.status.state) == ("kelp", True, mb.NODE_STATE_UNSPECIFIED)
        await ann.close()

        await ann.connect(run_id="kelp")
        await ann.acknowledged(await ann.say(mb.NODE_STATE_READY))
        view = await home.admin.GetNode(admin.GetNodeRequest(node="ann"), timeout=SECONDS)
        assert view.status.state == mb.NODE_STATE_READY
        await ann.close()


async def test_an_answer_that_is_not_of_one_run_and_this_operator_changes_nothing(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "home") as home, coordinator(tmp_path / "other") as other:
        for it in (home, other):
            await it.create_run()
        identity = Identity.generate()
        mine = await enrol(await home.token(), identity, "ann", CLOCK)
        theirs = await ask(await enrol(await other.token(), identity, "ann", CLOCK))
        with pytest.raises(CertificateInvalid):
            mine.moved(theirs, identity.peer_id, CLOCK.unix())
        answer = await ask(mine)
        answer.run_id = "kelp"
        with pytest.raises(ProtocolMismatch):
            mine.moved(answer, identity.peer_id, CLOCK.unix())
