"""Link to a coordinator that ends streams: no report is lost, whenever it breaks."""

import asyncio
import os
import resource
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from atoll.core.clock import SystemClock
from atoll.core.errors import IdentityInUse, Unreachable
from atoll.core.grpc_errors import status_of, trailing_metadata
from atoll.core.identity import Identity
from atoll.node.control.coordinator_link import CoordinatorLink
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import membership_pb2_grpc


class Flaky(membership_pb2_grpc.MembershipServiceServicer):
    """Ends every second stream without an acknowledgement; records the reports that it acknowledged."""

    def __init__(self):
        self.streams = 0
        self.durable = []

    async def Heartbeat(self, request_iterator, context):
        self.streams += 1
        lossy = self.streams % 2 == 1
        async for request in request_iterator:
            if lossy and request.evaluations:
                return
            self.durable += [report.round for report in request.evaluations]
            yield mb.HeartbeatResponse(acknowledged_sequence=request.sequence)


class PlainLink(CoordinatorLink):
    """The shipped link on a channel without TLS and without certificates to renew."""

    def _dial(self):
        return grpc.aio.insecure_channel(self.address)

    def _renewal_due(self):
        return False


@asynccontextmanager
async def serving(service):
    """A running link to that service."""
    server = grpc.aio.server()
    membership_pb2_grpc.add_MembershipServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = plain_link(f"127.0.0.1:{port}")
    running = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0)


def plain_link(address):
    link = PlainLink(
        None, Identity.generate(), SystemClock(), build_heartbeat=lambda first: mb.HeartbeatRequest(),
        on_response=lambda response: None, on_renewed=lambda credentials: None,
    )  # fmt: skip
    link.address = address
    return link


class Early(membership_pb2_grpc.MembershipServiceServicer):
    """A coordinator whose clock is behind by `seconds` and whose first answers are slow."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.answers = 0

    async def Heartbeat(self, request_iterator, context):
        async for request in request_iterator:
            now = time.time() - self.seconds
            self.answers += 1
            await asyncio.sleep(0.5 if self.answers < 3 else 0)
            yield mb.HeartbeatResponse(acknowledged_sequence=request.sequence, unix_ms=round(1000 * now))


@pytest.mark.parametrize("seconds", [300.0, -300.0])
async def test_a_node_measures_its_clock_offset(seconds):
    service = Early(seconds)
    async with serving(service) as link:
        async with asyncio.timeout(120):  # answers that come late on a busy machine are outdone by quick ones
            while service.answers < 6 or link.clock_offset.ahead_seconds != pytest.approx(seconds, abs=0.1):
                link.send_heartbeat_now()
                await asyncio.sleep(0.05)


async def test_reports_survive_every_broken_stream():
    service = Flaky()
    async with serving(service) as link:
        for number in range(5):
            link.report(mb.EvaluationReport(round=number))
            async with asyncio.timeout(120):
                while number not in service.durable:
                    await asyncio.sleep(0.02)
        assert service.streams >= 2
        assert await link.flush(timedelta(seconds=60))
        assert set(service.durable) == set(range(5))


class Challenging(membership_pb2_grpc.MembershipServiceServicer):
    """Another process claims the node's identity; the second stream is refused."""

    def __init__(self):
        self.requests = []

    async def Heartbeat(self, request_iterator, context):
        if self.requests:
            error = IdentityInUse("another process runs with the identity of this node")
            await context.abort(status_of(error), str(error), trailing_metadata(error))
        async for request in request_iterator:
            self.requests.append(request)
            yield mb.HeartbeatResponse(acknowledged_sequence=request.sequence, challenge=b"live?")
            if request.challenge_answer:
                return


async def test_a_node_answers_a_challenge_at_once_and_ends_when_it_is_refused(monkeypatch):
    monkeypatch.setattr("atoll.node.control.coordinator_link.HEARTBEAT_INTERVAL", timedelta(hours=1))
    service = Challenging()
    server = grpc.aio.server()
    membership_pb2_grpc.add_MembershipServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = plain_link(f"127.0.0.1:{port}")
    link.credentials = SimpleNamespace(coordinator="here")
    try:
        async with asyncio.timeout(120):
            with pytest.raises(IdentityInUse):
                await link.run()
            await link.first_answer()
    finally:
        await server.stop(0)
    assert [request.challenge_answer for request in service.requests] == [b"", b"live?"]
    assert [len(instance) for instance in {request.instance for request in service.requests}] == [16]


async def starve():
    """Runs in its own process, because gRPC aborts a process without free descriptors."""
    link = plain_link("127.0.0.1:1")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/proc/self/fd"))
    for spare in range(12):
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + spare, limits[1]))
        with pytest.raises(Unreachable, match="no file descriptors left"):
            await link.vote(mb.VoteRequest())
        await link.leave("no descriptors", mb.NODE_REASON_STOPPED)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    async with link._channel():  # as soon as there are some
        pass


def test_without_descriptors_the_link_waits_and_the_node_lives():
    program = [sys.executable, "-c", "import asyncio, test_coordinator_link as it; asyncio.run(it.starve())"]
    subprocess.run(program, cwd=Path(__file__).parent, check=True, timeout=120)
