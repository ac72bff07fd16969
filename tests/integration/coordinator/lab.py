"""A coordinator in this process on free ports of loopback, and nodes that speak the real protocol to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from unit.coordinator.world import CORPUS, spec_toml

from atoll.coordinator.addresses import Endpoints
from atoll.coordinator.ca import CoordinatorKeys, write_admin_credential
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.controller import Controller
from atoll.coordinator.server import Systemd, background_tasks, open_state, running_servers
from atoll.core import protocol
from atoll.core.certs import SERVER_NAME
from atoll.core.clock import SystemClock, unix_ms
from atoll.core.files import make_private_dir
from atoll.core.identity import Identity
from atoll.core.tokens import JoinToken, parse_join_token
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import admin_pb2_grpc, enrolment_pb2_grpc, membership_pb2_grpc, plan_pb2
from atoll.v1 import common_pb2 as pb
from atoll.v1 import enrolment_pb2 as enrolment
from atoll.v1 import membership_pb2 as mb

SECONDS = 90.0  # deadline of everything that a test waits for
_OPTIONS = (("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.use_local_subchannel_pool", 1))


@dataclass
class Coordinator:
    """One that runs."""

    controller: Controller
    keys: CoordinatorKeys
    endpoints: Endpoints
    admin: admin_pb2_grpc.AdminAsyncStub
    data_dir: Path

    async def token(self, **fields: object) -> JoinToken:
        """Fresh, good for one node."""
        request = admin.CreateTokenRequest(**{"uses": 1, "ttl_seconds": 600, **fields})  # type: ignore[arg-type]
        return parse_join_token((await self.admin.CreateToken(request, timeout=SECONDS)).token)

    async def create_run(self, *, start: bool = True, **spec: int) -> admin.RunView:
        """A run."""
        text = spec_toml(**spec)  # type: ignore[arg-type]
        return await self.admin.CreateRun(admin.CreateRunRequest(spec_toml=text, start=start), timeout=SECONDS)

    async def node(self, name: str, **fields: object) -> Node:
        """Enrolled, not connected."""
        return await Node(self, Identity.generate(), name).enrol(await self.token(**fields))


@asynccontextmanager
async def coordinator(data_dir: Path, **settings: object) -> AsyncIterator[Coordinator]:
    """Start one on `data_dir`; leave to stop it. Starting again on the same directory is a restart."""
    ports = {"listen": "127.0.0.1", "enrol_port": 0, "member_port": 0, "http_port": 0}
    quick = {
        "lost_after_seconds": 1.0,
        "plan_debounce_seconds": 0.1,
        "plan_interval_seconds": 0.1,
        "drain_seconds": 2.0,
    }
    patient = {"silence_seconds": 120.0}  # nodes here speak when a test says so
    config = CoordinatorConfig.model_validate({"data_dir": data_dir, **ports, **quick, **patient, **settings})
    clock = SystemClock()
    make_private_dir(data_dir)
    keys, controller = open_state(config, clock)
    stopping = asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.callback(controller.close)
        endpoints = await stack.enter_async_context(running_servers(config, controller, keys, stopping))
        await stack.enter_async_context(background_tasks(controller, keys, config, endpoints, Systemd()))
        write_admin_credential(keys, data_dir / "admin", endpoints.local, clock.unix())
        endpoints.write(data_dir / "endpoints.json")
        channel = await stack.enter_async_context(admin_channel(data_dir / "admin", endpoints.local))
        try:
            yield Coordinator(controller, keys, endpoints, admin_pb2_grpc.AdminStub(channel), data_dir)  # type: ignore[arg-type]
        finally:
            stopping.set()
            controller.notify()


def http_client(home: Coordinator) -> httpx.AsyncClient:
    """A browser on the coordinator's page."""
    return httpx.AsyncClient(base_url=f"http://{home.endpoints.http}", timeout=SECONDS)


def admin_channel(credential: Path, endpoint: str) -> grpc.aio.Channel:
    """As `atollctl` opens it."""
    parts = [(credential / name).read_bytes() for name in ("ca.crt", "admin.key", "admin.crt")]
    return grpc.aio.secure_channel(endpoint, grpc.ssl_channel_credentials(*parts), _OPTIONS)


def tls_request(identity: Identity) -> tuple[bytes, bytes, bytes]:
    """A fresh P-256 key (PEM), its CSR (DER), and the identity's signature over that."""
    key = ec.generate_private_key(ec.SECP256R1())
    csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    der = csr.public_bytes(serialization.Encoding.DER)
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return pem, der, identity.sign("csr", der)


class Node:
    """Says what a node daemon says."""

    def __init__(self, home: Coordinator, identity: Identity, name: str) -> None:
        self.home = home
        self.identity = identity
        self.name = name
        self.key_pem, self.csr, self.csr_signature = tls_request(identity)
        self.enrolled = enrolment.EnrolResponse()
        self.heard: list[mb.HeartbeatResponse] = []
        self.plan_version = 0  # the newest heard of
        self.head: tuple[int, bytes] = (0, b"")  # what it says it holds
        self._stack = AsyncExitStack()
        self._sequence = 0

    def enrol_request(self, token: JoinToken) -> enrolment.EnrolRequest:
        """As it should be; tests spoil it."""
        return enrolment.EnrolRequest(
            protocol=protocol.ours(),
            token_id=token.token_id,
            token_secret=token.secret,
            csr_der=self.csr,
            identity_public_key=self.identity.public_key,
            csr_signature=self.csr_signature,
            node_name=self.name,
            node_unix_ms=unix_ms(SystemClock()),
        )

    async def enrol(self, token: JoinToken) -> Node:
        """Trade the token."""
        self.enrolled = await self.try_enrol(self.enrol_request(token))
        return self

    async def try_enrol(self, request: enrolment.EnrolRequest, ca_pem: bytes | None = None) -> enrolment.EnrolResponse:
        """Send any request over the strangers' port."""
        trusted = grpc.ssl_channel_credentials(ca_pem or self.home.keys.ca.pem)
        async with grpc.aio.secure_channel(self.home.endpoints.enrolment, trusted, _OPTIONS) as channel:
            return await enrolment_pb2_grpc.EnrolmentStub(channel).Enrol(request, timeout=SECONDS)  # type: ignore[misc]

    def channel(self) -> grpc.aio.Channel:
        """With this node's certificate, to wherever the coordinator is now."""
        chain = self.enrolled.certificate_chain_pem
        credentials = grpc.ssl_channel_credentials(self.home.keys.ca.pem, self.key_pem, chain)
        return grpc.aio.secure_channel(self.home.endpoints.local, credentials, _OPTIONS)

    def stub_on(self, channel: grpc.aio.Channel) -> membership_pb2_grpc.MembershipServiceStub:
        """The members' calls on a channel of this node."""
        return membership_pb2_grpc.MembershipServiceStub(channel)

    async def connect(self, state: mb.NodeState = mb.NODE_STATE_READY, corpus: str = CORPUS, **more: object) -> Node:
        """Open the heartbeat stream and send the first message; forgets what earlier streams said."""
        self.heard.clear()
        channel = await self._stack.enter_async_context(self.channel())
        self.stub = self.stub_on(channel)
        self.call = self.stub.Heartbeat()
        self._stack.callback(self.call.cancel)
        first = {"profile": mb.NodeProfile(device="cpu"), "multiaddrs": ["/ip4/127.0.0.1/tcp/4001"], **more}
        with suppress(grpc.aio.AioRpcError):  # it was turned away before this was written: `ended` tells why
            await self.say(state, corpus_digest=corpus, **first)
        return self

    async def say(self, state: mb.NodeState = mb.NODE_STATE_TRAINING, **more: object) -> int:
        """One heartbeat; its sequence number."""
        self._sequence += 1
        number, digest = self.head
        status = mb.NodeStatus(state=state, plan_version=self.plan_version, head_round=number, head_hash=digest)
        await self.call.write(mb.HeartbeatRequest(sequence=self._sequence, status=status, **more))  # type: ignore[arg-type]
        return self._sequence

    async def hear(self, wanted: Callable[[mb.HeartbeatResponse], bool]) -> mb.HeartbeatResponse:
        """Read responses until one is `wanted` (those heard already count)."""
        for response in self.heard:
            if wanted(response):
                return response
        async with asyncio.timeout(SECONDS):
            while True:
                response = await self.call.read()
                assert response is not grpc.aio.EOF, "the coordinator ended the stream"
                self.heard.append(response)
                self.plan_version = max(self.plan_version, _version(response))
                if wanted(response):
                    return response

    async def acknowledged(self, sequence: int) -> None:
        """Wait until the coordinator said that this is durable."""
        await self.hear(lambda response: response.acknowledged_sequence >= sequence)

    async def ended(self) -> grpc.aio.AioRpcError:
        """How the coordinator ends the stream."""
        try:
            await self.hear(lambda _: False)
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError("the stream goes on")

    async def plan(self, version: int) -> mb.HeartbeatResponse:
        """The response that brought this plan, or a later one."""
        return await self.hear(lambda response: _version(response) >= version)

    async def close(self) -> None:
        """Cut the stream and the channel."""
        await self._stack.aclose()


def _version(response: mb.HeartbeatResponse) -> int:
    return plan_pb2.Plan.FromString(response.plan.payload).version if response.HasField("plan") else 0


def error_of(error: grpc.aio.AioRpcError) -> pb.ErrorDetail:
    """The detail that came with a failed call."""
    for key, value in error.trailing_metadata() or ():
        if key == "atoll-error-bin":
            return pb.ErrorDetail.FromString(value)  # type: ignore[arg-type]
    raise AssertionError(f"no detail: {error.code()} {error.details()}")
