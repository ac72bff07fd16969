"""A node that is assigned to another run, over the real protocol."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from integration.coordinator.lab import SECONDS, Coordinator, coordinator
from unit.coordinator.world import spec_toml

from atoll.core.certs import new_tls_key_and_csr
from atoll.core.clock import SystemClock
from atoll.core.errors import CertificateInvalid, DataDirUnusable, ProtocolMismatch
from atoll.core.files import make_private_dir
from atoll.core.identity import Identity
from atoll.node.control.begin_membership import begin_membership
from atoll.node.control.channel import dial
from atoll.node.control.credentials import Credentials
from atoll.node.control.enrol import enrol
from atoll.node.control.identity_rotation import rotate_identity
from atoll.node.state.vote_store import VoteStore
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
        await assign_to_kelp(home)

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
        await assign_to_kelp(home)
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


async def test_a_certificate_that_is_renewed_before_the_node_knows_of_its_move_keeps_it_usable(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "home") as home:
        await home.create_run()
        identity = Identity.generate()
        before = await enrol(await home.token(), identity, "ann", CLOCK)
        await assign_to_kelp(home)
        await ask(before)  # this answer is lost
        key_pem, csr = new_tls_key_and_csr()
        async with dial(before) as channel:
            stub = membership_pb2_grpc.MembershipServiceStub(channel)
            request = mb.RenewRequest(csr_der=csr, csr_signature=identity.sign("csr", csr))
            answer = await stub.Renew(request, timeout=SECONDS)
        renewed = before.renewed(
            tls_key_pem=key_pem,
            chain_pem=answer.certificate_chain_pem,
            membership=answer.membership,
            deny_list=answer.deny_list,
        )
        assert renewed.member(CLOCK.unix()).run_id == "reef"  # a daemon can start, and is told to move
        moved = renewed.moved(await ask(renewed), identity.peer_id, CLOCK.unix())
        assert moved.member(CLOCK.unix()).run_id == "kelp"


async def test_a_new_identity_is_for_the_run_where_the_node_was_moved_while_it_was_away(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "home") as home:
        await home.create_run()
        data_dir = make_private_dir(tmp_path / "ann")
        identity = Identity.load_or_create(data_dir / "identity.key")
        before = await enrol(await home.token(), identity, "ann", CLOCK)
        begin_membership(data_dir, before)
        await assign_to_kelp(home)
        await ask(before)  # this answer is lost
        peer_id = await rotate_identity(data_dir, CLOCK)
        after = Credentials.load(data_dir)
        assert after is not None
        member = after.member(CLOCK.unix())
        assert (member.run_id, member.peer_id) == ("kelp", peer_id)
        assert peer_id != identity.peer_id


@pytest.mark.parametrize("left", ["nothing", "an empty directory"])
def test_a_membership_that_could_not_be_begun_begins_anew(
    tmp_path: Path, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = SimpleNamespace(run_id="kelp", run_created_unix_ms=0, save=lambda directory: None)

    def full(self: VoteStore) -> None:
        raise DataDirUnusable("no space left on device") if left == "nothing" else KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(VoteStore, "begin", full)
        with pytest.raises((DataDirUnusable, KeyboardInterrupt)):
            begin_membership(tmp_path, credentials)  # type: ignore[arg-type]
    begin_membership(tmp_path, credentials)  # type: ignore[arg-type]
    assert VoteStore(tmp_path / "runs" / "kelp").load() is not None
