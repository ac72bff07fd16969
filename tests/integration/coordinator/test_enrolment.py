"""Enrolment over real TLS: what a stranger with a token gets, and what strangers without one do not."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import grpc
import pytest
from integration.coordinator.lab import SECONDS, Coordinator, Node, coordinator, error_of
from support.eventually import eventually

from atoll.coordinator import grpc_server, server
from atoll.coordinator.services.enrolment import MAX_CONCURRENT_ENROLMENTS
from atoll.core import certs
from atoll.core.certs import SERVER_NAME
from atoll.core.clock import SystemClock
from atoll.core.errors import TokenUsedUp
from atoll.core.identity import Identity
from atoll.core.membership import MembershipVerifier
from atoll.core.tokens import parse_join_token, split_endpoint
from atoll.node.control.enrol import preview
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import common_pb2 as pb
from atoll.v1 import enrolment_pb2 as enrolment


async def refused(node: Node, request: enrolment.EnrolRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await node.try_enrol(request)
    return failure.value.code(), error_of(failure.value).reason


async def test_a_token_buys_everything_a_member_needs(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        token = await home.token()
        assert token.ca_sha256 == certs.certificate_sha256(home.keys.ca.pem)
        assert token.endpoint == home.endpoints.enrolment
        node = await Node(home, Identity.generate(), "ann").enrol(token)
        got = node.enrolled
        assert certs.subject_uri(got.certificate_chain_pem) == f"atoll://node/{node.identity.peer_id}"
        assert got.certificate_chain_pem.endswith(home.keys.ca.pem)
        authority = MembershipVerifier(got.operator_public_key, got.run_id)
        member = authority.verify_membership(got.membership, SystemClock().unix())
        assert (member.node_name, member.roles, member.epoch) == ("ann", {"node"}, 1)
        assert authority.verify_deny_list(got.deny_list).number == 0
        assert 'name = "reef"' in got.run_spec_toml
        assert got.membership_endpoint == ":" + home.endpoints.local.split(":")[1]


async def test_a_preview_tells_what_the_run_needs_and_spends_nothing(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        token, ann = await home.token(), Node(home, Identity.generate(), "ann")
        for _ in range(3):
            told = await preview(token, ann.identity, "ann", SystemClock())
            assert (told.run_id, told.roles, told.trains, told.corpus_digest) == ("reef", {"node"}, True, "")
            assert (told.spec.data.path, told.layers, told.coordinator) == ("corpus", None, token.endpoint)
        assert home.controller.state.nodes == {}
        await ann.enrol(token)
        await preview(token, ann.identity, "ann", SystemClock())  # the answer of the enrolment may have been lost
        with pytest.raises(TokenUsedUp):
            await preview(token, Identity.generate(), "bob", SystemClock())


async def test_a_used_token_is_refused_after_a_restart_too(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        token = await home.token()
        await Node(home, Identity.generate(), "ann").enrol(token)
    async with coordinator(tmp_path / "c") as home:
        late = Node(home, Identity.generate(), "bob")
        assert await refused(late, late.enrol_request(token)) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "TokenUsedUp",
        )


async def test_every_wrong_request_gets_its_own_reason(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        token = await home.token()
        node = Node(home, Identity.generate(), "ann")
        good = node.enrol_request(token)

        def spoiled(**fields: object) -> enrolment.EnrolRequest:
            request = enrolment.EnrolRequest()
            request.CopyFrom(good)
            request.MergeFrom(enrolment.EnrolRequest(**fields))  # type: ignore[arg-type]
            return request

        other = Identity.generate()
        cases = {
            "TokenUnknown": spoiled(token_secret="0" * 48),
            "ProtocolMismatch": spoiled(protocol=pb.ProtocolVersion(major=9)),
            "ClockSkew": spoiled(node_unix_ms=good.node_unix_ms - 6 * 60 * 1000),
            "InvalidRequest": spoiled(node_name="Not A Name"),
            "SignatureInvalid": spoiled(identity_public_key=other.public_key),
            "CertificateInvalid": spoiled(csr_der=b"rubbish", csr_signature=node.identity.sign("csr", b"rubbish")),
        }
        for reason, request in cases.items():
            assert (await refused(node, request))[1] == reason
        await node.try_enrol(good)  # none of them spent the token


async def test_a_revoked_token_is_refused(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        token = await home.token()
        await home.admin.RevokeToken(admin.RevokeTokenRequest(id=token.token_id))
        node = Node(home, Identity.generate(), "ann")
        assert await refused(node, node.enrol_request(token)) == (grpc.StatusCode.UNAUTHENTICATED, "TokenRevoked")


async def test_another_authority_is_noticed_before_anything_is_sent(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "a") as home, coordinator(tmp_path / "b") as stranger:
        await home.create_run()
        node = Node(stranger, Identity.generate(), "ann")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await node.try_enrol(node.enrol_request(await home.token()), ca_pem=home.keys.ca.pem)
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_secret_is_stored_only_as_a_hash(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        token = await home.token()
    stored = b"".join(path.read_bytes() for path in (tmp_path / "c").glob("coordinator.db*"))
    assert token.token_id.encode() in stored
    assert token.secret.encode() not in stored


async def test_tokens_contain_the_public_endpoint(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c", public_endpoint="swarm.example.org:17700") as home:
        await home.create_run()
        assert (await home.token()).endpoint == "swarm.example.org:17700"
        assert isinstance(home, Coordinator)


async def test_tokens_parse_as_nodes_will_parse_them(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        made = await home.admin.CreateToken(admin.CreateTokenRequest(uses=1, ttl_seconds=60))
        assert parse_join_token(made.token).token_id == made.view.id


def strangers_channel(home: Coordinator) -> grpc.aio.Channel:
    """A connection of its own, by somebody who has neither token nor certificate."""
    options = (("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.use_local_subchannel_pool", 1))
    trusted = grpc.ssl_channel_credentials(home.keys.ca.pem)
    return grpc.aio.secure_channel(home.endpoints.enrolment, trusted, options)


async def test_unfinished_calls_exclude_no_node_and_end_within_seconds(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home, AsyncExitStack() as strangers:
        await home.create_run()
        unfinished = []
        for _ in range(2 * MAX_CONCURRENT_ENROLMENTS // 8):
            channel = await strangers.enter_async_context(strangers_channel(home))
            for _ in range(8):  # as many as one connection may have
                call = channel.stream_unary("/atoll.v1.Enrolment/Enrol")()  # its message never comes
                await call.wait_for_connection()
                unfinished.append(call)
        async with asyncio.timeout(2 * SECONDS):
            assert (await home.node("ann")).enrolled.run_id == "reef"
            await asyncio.gather(*(call.code() for call in unfinished))


async def test_connections_that_say_nothing_are_closed_within_seconds(tmp_path: Path) -> None:
    """Each takes a file descriptor: a thousand of them used to shut the coordinator for two minutes."""
    async with coordinator(tmp_path / "c") as home:
        silent = [
            await asyncio.open_connection(*split_endpoint(endpoint))
            for endpoint in (home.endpoints.enrolment, home.endpoints.local)
        ]
        async with asyncio.timeout(2 * SECONDS):
            for reader, writer in silent:
                await reader.read()  # to its end
                writer.close()


async def test_connections_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8,000 idle ones, churned, used to take half a gigabyte that stayed."""
    few, many = 16, 80
    monkeypatch.setattr(server, "MAX_ENROLMENT_CONNECTIONS", few)
    monkeypatch.setattr(server, "MAX_MEMBER_CONNECTIONS", few)
    patient = tuple(item for item in grpc_server._OPTIONS if item[0] != "grpc.server_handshake_timeout_ms")
    monkeypatch.setattr(grpc_server, "_OPTIONS", (*patient, ("grpc.server_handshake_timeout_ms", 600_000)))
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        token = await home.token()
        endpoints = (home.endpoints.enrolment, home.endpoints.local)
        held = [await hold(endpoint, many) for endpoint in endpoints]
        for ended in held:
            await eventually(lambda ended=ended: sum(task.done() for task, _ in ended) >= many - few)  # type: ignore[misc]
        for task, writer in (one for ended in held for one in ended):
            writer.transport.abort()
            await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(2 * SECONDS):
            node = Node(home, Identity.generate(), "ann")
            while node.enrolled.run_id != "reef":  # gRPC notices the ends in its own time
                with suppress(grpc.aio.AioRpcError):
                    await node.enrol(token)


async def hold(endpoint: str, count: int) -> list[tuple[asyncio.Task[bytes], asyncio.StreamWriter]]:
    """Silent connections, each with a task that ends when the server closes it."""
    made = [await asyncio.open_connection(*split_endpoint(endpoint)) for _ in range(count)]
    return [(asyncio.create_task(reader.read()), writer) for reader, writer in made]


async def test_excess_concurrent_enrolments_are_asked_to_retry(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        token = await home.token(uses=MAX_CONCURRENT_ENROLMENTS)
        stuck = threading.Event()
        home.controller._thread.submit(stuck.wait, SECONDS)  # a disk that takes its time
        nodes = [Node(home, Identity.generate(), f"n{number}") for number in range(MAX_CONCURRENT_ENROLMENTS + 1)]
        calls = [asyncio.create_task(node.enrol(token)) for node in nodes]
        async with asyncio.timeout(2 * SECONDS):
            (refused_one,), _ = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            failure = refused_one.exception()
            assert isinstance(failure, grpc.aio.AioRpcError)
            assert error_of(failure).reason == "Busy"
            stuck.set()
            results = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(result, Node) for result in results) == MAX_CONCURRENT_ENROLMENTS
