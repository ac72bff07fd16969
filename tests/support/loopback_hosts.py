"""A small swarm on loopback, in one process: an operator, and hosts that each own a p2pd."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
from support.certificates import certificate_of
from support.direct_pair import unhurried_dialling

from atoll.core.clock import SystemClock
from atoll.core.identity import Identity
from atoll.core.membership import EMPTY_DENY_LIST, DenyList, MembershipVerifier
from atoll.node.direct.dial_policy import DialPolicy
from atoll.node.direct.direct_path import DirectConfig
from atoll.node.direct.protocol import BULK_PROTOCOLS
from atoll.node.swarm import dht, hello, p2p, p2pd_control, stream_acceptor
from atoll.node.swarm.host import SwarmConfig, SwarmHost
from atoll.node.wire.transport import Stream
from atoll.v1 import common_pb2 as pb

ANY_PORT = ("/ip4/127.0.0.1/tcp/0",)
DIRECT = DirectConfig(("127.0.0.1",), protocols=BULK_PROTOCOLS | {"/echo/1", "/swallow/1"})
ON_LOOPBACK = DialPolicy(loopback=True, local=True)
START = timedelta(seconds=120)
SOON = timedelta(seconds=60)


@dataclass
class Lab:
    """Starts hosts of one run and closes what is left of them."""

    directory: Path
    operator: Identity = field(default_factory=Identity.generate)
    hosts: list[SwarmHost] = field(default_factory=list)
    clock: SystemClock = field(default_factory=SystemClock)

    @property
    def authority(self) -> MembershipVerifier:
        return MembershipVerifier(self.operator.public_key, "reef")

    def identity(self, name: str) -> Identity:
        return Identity.load_or_create(self.directory / f"{name}.key")

    def certificate(self, name: str, run_id: str = "reef") -> pb.Signed:
        return certificate_of(self.identity(name), self.operator, self.clock.unix(), run_id=run_id, name=name)

    def runtime_dir(self, name: str) -> Path:
        return self.directory / name

    async def start(
        self,
        name: str,
        *,
        seeds: tuple[str, ...] = (),
        listen: tuple[str, ...] = ANY_PORT,
        relay_service: bool = False,
        membership: pb.Signed | None = None,
        authority: MembershipVerifier | None = None,
        deny: DenyList = EMPTY_DENY_LIST,
        direct: DirectConfig | None = DIRECT,
        dial: DialPolicy = ON_LOOPBACK,
    ) -> SwarmHost:
        identity = self.identity(name)
        host = await SwarmHost.start(
            SwarmConfig(
                identity_path=self.directory / f"{name}.key",
                runtime_dir=self.runtime_dir(name),
                listen=listen,
                announce=(),
                seeds=seeds,
                relay_service=relay_service,
                dial=dial,
                direct=direct,
            ),
            identity=identity,
            authority=authority or self.authority,
            membership=membership or self.certificate(name),
            deny=deny,
            clock=self.clock,
            timeout=START,
        )
        self.hosts.append(host)
        return host

    async def close(self) -> None:
        """Close every host and check that no p2pd and no socket is left."""
        for host in self.hosts:
            await host.close(timedelta(seconds=5))  # then p2pd is killed
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        """No daemon and no socket of ours."""
        assert not [host.p2pd_pid for host in self.hosts if Path(f"/proc/{host.p2pd_pid}").exists()]
        assert not list(self.directory.rglob("*.sock"))


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose sockets' paths stay below the kernel's limit."""
    path = Path(tempfile.mkdtemp(prefix="atoll-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def lab(short_dir: Path) -> AsyncIterator[Lab]:
    """The lab that a test starts its hosts in."""
    made = Lab(short_dir)
    with unhurried_dialling(), unhurried_answers():
        yield made
        await made.close()


@contextmanager
def unhurried_answers() -> Iterator[None]:
    """Longer timeouts, so that a process that pauses is not taken for a peer or a daemon that does not answer."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RPC_TIMEOUT", "STORE_TIMEOUT", "LOOKUP_TIMEOUT", "SLOW_SEED_GRACE"):
            patch.setattr(dht, name, SOON)
        for module in (p2p, p2pd_control, stream_acceptor):
            patch.setattr(module, "CONTROL_TIMEOUT", SOON)
        patch.setattr(hello, "HELLO_TIMEOUT", SOON)
        patch.setattr(p2p, "UNARY_TIMEOUT", SOON)
        yield


async def echo(stream: Stream) -> None:
    """A handler that sends everything back."""
    while True:
        frame = await stream.receive(SOON)
        await stream.send(frame.kind, frame.header, frame.body)
