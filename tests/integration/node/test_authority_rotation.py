"""A new certificate authority: members move to it over the link that they have, and the old one ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from integration.coordinator.lab import SECONDS, Coordinator, admin_channel, coordinator, error_of

from atoll.coordinator import backup
from atoll.core.authority_list import issue_authority_list
from atoll.core.certs import CertificateAuthority, split_pem
from atoll.core.clock import SystemClock
from atoll.core.errors import AuthorityReplaced, SignatureInvalid
from atoll.core.identity import Identity
from atoll.core.tokens import JoinToken, parse_join_token
from atoll.node.control.coordinator_link import CoordinatorLink
from atoll.node.control.credentials import Credentials
from atoll.node.control.enrol import enrol
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import admin_pb2_grpc
from atoll.v1 import membership_pb2 as mb

CLOCK = SystemClock()
HOUR = 3600


@dataclass
class Member:
    """The link of a real daemon, with what it does on a change of authorities; keeps its credentials like a disk."""

    identity: Identity
    credentials: Credentials
    link: CoordinatorLink | None = None

    def start(self) -> CoordinatorLink:
        def heard(response: mb.HeartbeatResponse) -> None:
            if response.HasField("authorities"):
                self.credentials = link.credentials = link.credentials.with_authorities(response.authorities)

        link = CoordinatorLink(
            self.credentials,
            self.identity,
            CLOCK,
            build_heartbeat=lambda _: mb.HeartbeatRequest(status=mb.NodeStatus(state=mb.NODE_STATE_READY)),
            on_response=heard,
            on_renewed=lambda renewed: setattr(self, "credentials", renewed),
        )
        self.link = link
        return link


async def member(home: Coordinator, name: str) -> Member:
    identity = Identity.generate()
    return Member(identity, await enrol(await token_of(home), identity, name, CLOCK))


@asynccontextmanager
async def running(*members: Member) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Their links."""
    tasks = [asyncio.create_task(item.start().run()) for item in members]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.02)


async def connected(*members: Member) -> None:
    await until(lambda: all(item.link is not None and item.link.connected for item in members))


async def ask(home: Coordinator, call: str, request: object) -> Any:
    """As `atollctl` does: with the credential that is in the directory now."""
    async with admin_channel(home.data_dir / "admin", home.endpoints.local) as channel:
        return await getattr(admin_pb2_grpc.AdminStub(channel), call)(request, timeout=SECONDS)


async def token_of(home: Coordinator) -> JoinToken:
    made = await ask(home, "CreateToken", admin.CreateTokenRequest(uses=5, ttl_seconds=600))
    return parse_join_token(made.token)


async def shown(home: Coordinator) -> admin.AuthoritiesView:
    return await ask(home, "GetAuthorities", admin.GetAuthoritiesRequest())  # type: ignore[no-any-return]


async def rotate(home: Coordinator, seconds: int = HOUR) -> admin.AuthoritiesView:
    request = admin.RotateAuthorityRequest(overlap_seconds=seconds)
    return await ask(home, "RotateAuthority", request)  # type: ignore[no-any-return]


async def retire(home: Coordinator, *, force: bool = False) -> admin.AuthoritiesView:
    return await ask(home, "RetireAuthority", admin.RetireAuthorityRequest(force=force))  # type: ignore[no-any-return]


async def moved(home: Coordinator) -> None:
    """Wait until nobody has a certificate of the old authority."""
    async with asyncio.timeout(SECONDS):
        while (await shown(home)).waiting:
            await asyncio.sleep(0.05)


async def test_members_move_to_the_new_authority_and_the_old_one_is_refused(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        ann, bob = await member(home, "ann"), await member(home, "bob")
        stolen = ann.credentials
        async with running(ann, bob):
            await connected(ann, bob)
            old = (await shown(home)).trusted[0].sha256
            view = await rotate(home)
            new = view.trusted[0].sha256
            assert [item.sha256 for item in view.trusted] == [new, old]
            await moved(home)
            view = await shown(home)
            assert [item.members for item in view.trusted] == [2, 0]
            assert not ann.credentials.is_of_older_authority
            assert len(split_pem(ann.credentials.ca_pem.encode())) == 2
            cid = await member(home, "cid")  # its token names the old one, its certificate is of the new one
            assert not cid.credentials.is_of_older_authority
            view = await retire(home)
            assert [(item.sha256, item.members) for item in view.trusted] == [(new, 3)]
            await until(lambda: len(split_pem(ann.credentials.ca_pem.encode())) == 1)
        async with running(ann, bob, cid, Member(ann.identity, stolen)) as tasks:
            await connected(ann, bob, cid)
            with pytest.raises(AuthorityReplaced, match="while this node was away"):
                await asyncio.wait_for(tasks[-1], SECONDS)
        with pytest.raises(grpc.aio.AioRpcError) as refused:  # on a connection from before
            await home.admin.ListNodes(admin.ListNodesRequest(), timeout=SECONDS)
        assert error_of(refused.value).reason == "AuthorityReplaced"
        async with admin_channel(home.data_dir / "admin", home.endpoints.local) as channel:
            listed = admin_pb2_grpc.AdminStub(channel).Events(admin.EventsRequest(), timeout=SECONDS)
            events = [event.kind async for event in listed]  # type: ignore[attr-defined]
        assert (events.count("ca.rotated"), events.count("ca.retired")) == (1, 1)


async def test_a_node_that_was_away_joins_again_with_its_identity(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        ann = await member(home, "ann")
        token = await token_of(home)
        for _ in range(2):  # it may miss several
            await rotate(home)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await retire(home)
            assert "ann" in str(refused.value.details())
            view = await retire(home, force=True)
            assert ([item.members for item in view.trusted], list(view.waiting)) == ([0], [])
        async with running(ann) as tasks:
            with pytest.raises(AuthorityReplaced) as ended:
                await asyncio.wait_for(tasks[0], SECONDS)
        assert "atoll join" in ended.value.remedy
        with pytest.raises(AuthorityReplaced, match="since it created this token"):
            await enrol(token, ann.identity, "ann", CLOCK)
        back = Member(ann.identity, await enrol(await token_of(home), ann.identity, "ann", CLOCK))
        async with running(back):
            await connected(back)
        listed = await ask(home, "ListNodes", admin.ListNodesRequest())
        assert [(node.name, node.peer_id) for node in listed.nodes] == [("ann", ann.identity.peer_id)]


async def test_a_node_that_comes_back_in_the_overlap_moves_and_one_retires_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.coordinator.services.authority_changes.CHECK_SECONDS", 0.05)
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        ann = await member(home, "ann")
        view = await rotate(home)
        assert abs(view.until_unix_ms / 1000 - CLOCK.unix() - HOUR) < HOUR / 2
        assert view.waiting == ["ann"]
        async with running(ann):
            await connected(ann)
            await moved(home)
            authorities = home.keys.authorities
            authorities.now = replace(authorities.now, until_ms=1)  # the overlap ends
            async with asyncio.timeout(SECONDS):
                while len((await shown(home)).trusted) > 1:
                    await asyncio.sleep(0.1)
            await until(lambda: len(split_pem(ann.credentials.ca_pem.encode())) == 1)
        async with running(ann):
            await connected(ann)


@pytest.mark.parametrize("stop_after", ["rotate", "move", "retire"])
async def test_a_coordinator_that_starts_again_goes_on(tmp_path: Path, stop_after: str) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        ann = await member(home, "ann")
        before = [it.sha256 for it in (await rotate(home)).trusted]
        if stop_after != "rotate":
            async with running(ann):
                await moved(home)
        if stop_after == "retire":
            await retire(home)
        port = home.endpoints.local.rpartition(":")[2]
    async with coordinator(tmp_path / "c", member_port=int(port)) as home:
        view = await shown(home)
        assert [it.sha256 for it in view.trusted] == (before[:1] if stop_after == "retire" else before)
        async with running(ann):
            await connected(ann)
            await moved(home)
            if stop_after != "retire":
                await retire(home)
            await until(lambda: len(split_pem(ann.credentials.ca_pem.encode())) == 1)
            await connected(ann)


async def test_a_second_rotation_waits_for_the_first(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await retire(home)
        assert error_of(refused.value).reason == "InvalidTransition"
        for seconds in (0, 367 * 24 * HOUR):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rotate(home, seconds)
            assert error_of(refused.value).reason == "InvalidRequest"
        await rotate(home)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rotate(home)
        assert error_of(refused.value).reason == "InvalidTransition"


async def test_an_older_list_and_that_of_another_operator_change_nothing(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        ann = await member(home, "ann")
        (tmp_path / "ann").mkdir()
        ann.credentials.save(tmp_path / "ann")
        path = tmp_path / "ann" / "credentials.json"
        plain = json.loads(path.read_text())
        del plain["authorities"]  # as an earlier release wrote it
        path.write_text(json.dumps(plain))
        assert Credentials.load(tmp_path / "ann") == ann.credentials
        pems = [CertificateAuthority.generate(CLOCK.unix()).pem for _ in range(2)]
        newer = ann.credentials.with_authorities(issue_authority_list(home.keys.operator, 2, pems))
        assert newer.ca_pem.encode() == b"".join(pems)
        assert newer.with_authorities(issue_authority_list(home.keys.operator, 1, pems[:1])) == newer
        with pytest.raises(SignatureInvalid):
            newer.with_authorities(issue_authority_list(Identity.generate(), 3, pems[:1]))


@pytest.mark.parametrize("retired", [False, True])
async def test_a_backup_has_both_authorities(tmp_path: Path, retired: bool) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        ann = await member(home, "ann")
        await rotate(home)
        async with running(ann):
            await moved(home)
            if retired:
                await retire(home)
                await until(lambda: len(split_pem(ann.credentials.ca_pem.encode())) == 1)
        now_ms = int(1000 * CLOCK.unix())
        backup.write(tmp_path / "c", f"sqlite:///{tmp_path / 'c/coordinator.db'}", tmp_path / "backup", now_ms)
        port = home.endpoints.local.rpartition(":")[2]
        before = [it.sha256 for it in home.keys.authorities.now.all]
    backup.restore(tmp_path / "backup", tmp_path / "restored", "", now_ms)
    async with coordinator(tmp_path / "restored", member_port=int(port)) as home:
        assert [it.sha256 for it in home.keys.authorities.now.all] == before
        async with running(ann):
            await connected(ann)


async def test_the_open_stream_of_an_old_certificate_ends(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        ann = await (await home.node("ann")).connect()  # it hears of the new authority, and does not renew
        await ann.acknowledged(1)
        await rotate(home)
        await ann.hear(lambda response: response.HasField("authorities"))
        await ann.acknowledged(await ann.say())
        await retire(home, force=True)
        assert error_of(await ann.ended()).reason == "AuthorityReplaced"
        await ann.close()


async def test_a_command_that_is_interrupted_still_tells_the_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = asyncio.Event(), asyncio.Event()

    async def slow(_: str, __: int) -> None:
        begun.set()
        await may_go_on.wait()

    monkeypatch.setattr("atoll.coordinator.server.handshake", slow)
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        ann = await (await home.node("ann")).connect()
        await ann.acknowledged(1)
        interrupted = home.admin.RotateAuthority(admin.RotateAuthorityRequest(overlap_seconds=HOUR))
        sent = asyncio.ensure_future(interrupted)
        await begun.wait()
        interrupted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sent
        await home.admin.ListNodes(admin.ListNodesRequest(), timeout=SECONDS)  # it comes after the interruption
        may_go_on.set()
        await ann.say()
        await ann.hear(lambda response: response.HasField("authorities"))
        await ann.close()
