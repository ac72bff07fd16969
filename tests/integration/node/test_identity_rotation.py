"""`atoll identity rotate` against a coordinator: nothing that ends it at any moment leaves a node without identity."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from integration.coordinator.lab import SECONDS, Coordinator, Node, coordinator, error_of

from atoll.core.certs import new_tls_key_and_csr
from atoll.core.clock import SystemClock
from atoll.core.disk import OsDisk
from atoll.core.errors import Banned, ExitCode, IdentityReplaced, Unreachable
from atoll.core.files import make_private_dir
from atoll.core.identity import Identity
from atoll.core.membership import MembershipVerifier
from atoll.core.tokens import JoinToken
from atoll.node.control import identity_rotation
from atoll.node.control.channel import dial
from atoll.node.control.credentials import Credentials
from atoll.node.control.enrol import enrol
from atoll.node.control.identity_rotation import finish_rotation, rotate_identity
from atoll.node.system.data_dir_lock import data_dir_lock
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import membership_pb2_grpc

CLOCK = SystemClock()
FILES = {"credentials.json", "identity.key"}


class Killed(BaseException):
    """The process ends here."""


async def member(home: Coordinator, directory: Path, token: JoinToken | None = None) -> str:
    """A node's directory as `atoll join` makes it; its peer id."""
    make_private_dir(directory)
    identity = Identity.load_or_create(directory / "identity.key")
    credentials = await enrol(token or await home.token(), identity, directory.name, CLOCK)
    credentials.save(directory)
    return identity.peer_id


def killed(*_: object, **__: object) -> None:
    """In place of a function: the process ends before it."""
    raise Killed


async def accepted_as(directory: Path) -> str:
    """Renew the certificate as a daemon does, which needs both files; the peer id that the coordinator gave it to."""
    identity, credentials = Identity.load(directory / "identity.key"), Credentials.load(directory)
    assert credentials is not None
    credentials.authority.verify_membership(
        credentials.signed_membership(), CLOCK.unix(), expect_peer_id=identity.peer_id
    )
    _, csr = new_tls_key_and_csr()
    async with dial(credentials) as channel:
        stub = membership_pb2_grpc.MembershipServiceStub(channel)
        await stub.Renew(mb.RenewRequest(csr_der=csr, csr_signature=identity.sign("csr", csr)), timeout=SECONDS)
    return identity.peer_id


async def nodes(home: Coordinator) -> dict[str, str]:
    listed = await home.admin.ListNodes(admin.ListNodesRequest(), timeout=SECONDS)
    return {node.name: node.peer_id for node in listed.nodes}


async def test_a_kill_at_any_step_on_disk_leaves_one_identity_and_another_try_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 0

    def counted(name: str) -> None:
        real = getattr(OsDisk, name)

        def step(self: OsDisk, *arguments: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return real(self, *arguments)

        monkeypatch.setattr(OsDisk, name, step)

    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        token = await home.token(uses=50)
        left = 10**9
        for name in ("create", "rename", "unlink", "sync_directory"):
            counted(name)
        for steps in range(50):
            directory = tmp_path / f"n{steps}"
            left = 10**9
            old = await member(home, directory, token)
            left = steps
            try:
                new = await rotate_identity(directory, CLOCK)
            except Killed:
                left = 10**9
                finish_rotation(directory)  # the daemon starts
                if (await nodes(home))[directory.name] == old:
                    assert await accepted_as(directory) == old
                new = now(directory) if now(directory) != old else await rotate_identity(directory, CLOCK)
                ended = False
            else:
                left, ended = 10**9, True
            assert new != old
            assert await accepted_as(directory) == new == (await nodes(home))[directory.name]
            assert {path.name for path in directory.rglob("*") if path.is_file()} == FILES
            assert stat.S_IMODE((directory / "identity.key").stat().st_mode) == 0o600
            if ended:
                break
        assert steps > 8
        assert ended


def now(directory: Path) -> str:
    """The identity that is in force on disk."""
    return Identity.load(directory / "identity.key").peer_id


@pytest.mark.parametrize("restart", [False, True])
async def test_a_lost_answer_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: bool) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        old = await member(home, tmp_path / "ann")
        with monkeypatch.context() as cut:
            cut.setattr(Credentials, "renewed", killed)
            with pytest.raises(Killed):
                await rotate_identity(tmp_path / "ann", CLOCK)
        assert now(tmp_path / "ann") == old
        moved = (await nodes(home))["ann"]
        assert moved != old
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await accepted_as(tmp_path / "ann")
        assert error_of(refused.value).reason == "IdentityReplaced"
        assert "atoll identity rotate" in error_of(refused.value).remedy
        if not restart:
            assert await rotate_identity(tmp_path / "ann", CLOCK) == moved == await accepted_as(tmp_path / "ann")
    if restart:
        async with coordinator(tmp_path / "c") as home:
            credentials = Credentials.load(tmp_path / "ann")
            assert credentials is not None
            replace(credentials, coordinator=home.endpoints.local).save(tmp_path / "ann")
            assert await rotate_identity(tmp_path / "ann", CLOCK) == moved == await accepted_as(tmp_path / "ann")


async def test_without_a_coordinator_the_old_identity_stays(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        old = await member(home, tmp_path / "ann")
    with pytest.raises(Unreachable):
        await rotate_identity(tmp_path / "ann", CLOCK)
    assert finish_rotation(tmp_path / "ann") is None
    assert now(tmp_path / "ann") == old
    async with coordinator(tmp_path / "c") as home:
        node = Node(home, Identity.load(tmp_path / "ann" / "identity.key"), "ann")
        assert (await nodes(home)) == {"ann": node.identity.peer_id}


async def test_the_thief_of_a_key_is_thrown_out_and_stays_out(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        owner = await home.node("ann")
        bob = await (await home.node("bob")).connect()
        await owner.connect(instance=b"t" * 16)  # the thief runs a copy of the directory
        await owner.acknowledged(1)
        directory = tmp_path / "ann"
        directory.mkdir()
        await copied(home, owner, directory)
        new = await rotate_identity(directory, CLOCK)
        assert error_of(await owner.ended()).reason == "IdentityReplaced"
        response = await bob.hear(lambda response: owner.identity.peer_id in denied(home, response))
        assert new not in denied(home, response)
        stolen = tmp_path / "stolen"
        stolen.mkdir()
        await copied(home, owner, stolen)
        with pytest.raises(IdentityReplaced, match=new):
            await rotate_identity(stolen, CLOCK)  # to a key of the thief's own
        assert (await nodes(home))["ann"] == new
        await owner.close()
        await bob.close()


def denied(home: Coordinator, response: mb.HeartbeatResponse) -> frozenset[str]:
    if not response.HasField("deny_list"):
        return frozenset()
    return MembershipVerifier(home.keys.operator.public_key, "reef").verify_deny_list(response.deny_list).peer_ids


async def copied(home: Coordinator, node: Node, directory: Path) -> None:
    """The data directory of a scripted node."""
    Identity.load_or_create(directory / "identity.key")
    (directory / "identity.key").write_bytes(node.identity._to_libp2p())
    answer = node.enrolled
    Credentials(
        run_id="reef",
        coordinator=home.endpoints.local,
        tls_key_pem=node.key_pem.decode(),
        tls_chain_pem=answer.certificate_chain_pem.decode(),
        ca_pem=home.keys.ca.pem.decode(),
        operator_key=answer.operator_public_key,
        membership=answer.membership.SerializeToString(),
        deny_list=answer.deny_list.SerializeToString(),
        seeds=(),
        run_spec_toml=answer.run_spec_toml,
    ).save(directory)


async def test_a_banned_node_gets_no_new_identity(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        old = await member(home, tmp_path / "ann")
        await home.admin.BanNode(admin.BanNodeRequest(node="ann"), timeout=SECONDS)
        with pytest.raises(Banned):
            await rotate_identity(tmp_path / "ann", CLOCK)
        assert (await nodes(home)) == {"ann": old}


async def test_a_statement_without_the_new_key_or_of_another_node_is_refused(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        ann, bob = await home.node("ann"), await home.node("bob")
        fresh, other = Identity.generate(), Identity.generate()
        operator = home.keys.operator.public_key
        sign = identity_rotation.sign_rotation
        good = sign(ann.identity, fresh, operator)
        unsigned = type(good)(statement=good.statement, old_signature=good.old_signature)
        for rotation, csr_key, reason in (
            (unsigned, fresh, "SignatureInvalid"),
            (good, other, "SignatureInvalid"),
            (sign(bob.identity, fresh, operator), fresh, "NotPermitted"),
            (sign(ann.identity, bob.identity, operator), bob.identity, "AlreadyExists"),
        ):
            request = mb.RotateIdentityRequest(
                rotation=rotation, csr_der=ann.csr, csr_signature=csr_key.sign("csr", ann.csr)
            )
            async with ann.channel() as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await ann.stub_on(channel).RotateIdentity(request, timeout=SECONDS)
            assert error_of(refused.value).reason == reason
        assert (await nodes(home)) == {"ann": ann.identity.peer_id, "bob": bob.identity.peer_id}


async def atoll(*words: str) -> tuple[int | None, str]:
    program = Path(sys.executable).parent / "atoll"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(program, *words, stderr=pipe, stdout=pipe, env=environment)
    out, err = await child.communicate()
    return child.returncode, (out + err).decode()


async def test_the_command_refuses_a_running_node_and_a_directory_that_never_joined(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        old = await member(home, tmp_path / "ann")
        words = ("identity", "rotate", "--data-dir", str(tmp_path / "ann"))
        with data_dir_lock(tmp_path / "ann"):
            code, told = await atoll(*words)
        assert (code, "another atoll daemon" in told) == (ExitCode.RETRY, True)
        assert now(tmp_path / "ann") == old
        code, told = await atoll(*words)
        assert code == 0, told
        assert now(tmp_path / "ann") == (await nodes(home))["ann"] != old
        assert now(tmp_path / "ann") in told
        code, told = await atoll(*words)
        assert (code, "got a new identity" in told) == (ExitCode.RETRY, True)
        code, told = await atoll("identity", "rotate", "--data-dir", str(tmp_path / "nobody"))
        assert (code, "has not joined" in told) == (ExitCode.USAGE, True)
        assert not (tmp_path / "nobody").exists()
