"""The line to the coordinator: heartbeats up, plans and orders down, certificates renewed in time.

The line may break for hours; training does not notice. Reports wait here until the coordinator says that
they are durable, so nothing acknowledged is ever lost and nothing is counted twice (reports are idempotent).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from atoll.core import log
from atoll.core.certs import LEAF_LIFETIME, SERVER_NAME, new_tls_key_and_csr, not_after
from atoll.core.clock import Clock
from atoll.core.errors import Banned, CertificateInvalid, CorpusError, ProtocolMismatch, Unreachable
from atoll.core.grpc_errors import from_rpc_error
from atoll.core.identity import Identity
from atoll.core.membership import CERTIFICATE_LIFETIME, RENEW_AT_FRACTION
from atoll.node.control.checkpoint_upload import upload
from atoll.node.control.clock_offset import ClockOffset
from atoll.node.control.credentials import Credentials
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import membership_pb2_grpc

BEAT = timedelta(seconds=1)
CALL_TIMEOUT = timedelta(seconds=10)
VOTE_TIMEOUT = timedelta(seconds=8)
MAX_REPORTS = 200  # in one heartbeat, and bytes: the rest goes with the next one
MAX_REPORT_BYTES = 1 << 20
_SILENCE = timedelta(seconds=30)  # the coordinator answers every heartbeat
_CLOCK_OFF_SECONDS = 5.0  # people should know; nothing stops
_BACKOFF = (timedelta(milliseconds=500), timedelta(seconds=15))
_SPARE_DESCRIPTORS = 16  # a new channel takes about six
_FINAL = (Banned, CorpusError, ProtocolMismatch)  # trying again cannot help

if TYPE_CHECKING:  # generic only in its stubs
    Call = grpc.aio.StreamStreamCall[mb.HeartbeatRequest, mb.HeartbeatResponse]

_log = log.get("coordinator")


@dataclass
class Outgoing:
    """Reports on their way: `pending` not sent yet, `sent` by the sequence of the heartbeat that carried them."""

    pending: list[mb.RoundReport | mb.EvaluationReport] = field(default_factory=list)
    sent: dict[int, list[mb.RoundReport | mb.EvaluationReport]] = field(default_factory=dict)

    def take(self, sequence: int) -> list[mb.RoundReport | mb.EvaluationReport]:
        """The oldest of what waits, now travelling with `sequence`; no more than one heartbeat may carry."""
        size = count = 0
        for report in self.pending[:MAX_REPORTS]:
            size += report.ByteSize()
            if size > MAX_REPORT_BYTES and count:
                break
            count += 1
        batch, self.pending = self.pending[:count], self.pending[count:]
        if batch:
            self.sent[sequence] = batch
        return batch

    def acknowledged(self, sequence: int) -> None:
        """Reports up to that heartbeat are durable."""
        for number in [number for number in self.sent if number <= sequence]:
            del self.sent[number]

    def again(self) -> None:
        """The line broke: what was not acknowledged travels again."""
        self.pending = [report for number in sorted(self.sent) for report in self.sent[number]] + self.pending
        self.sent = {}


class CoordinatorLink:
    """One member's line to the coordinator."""

    def __init__(
        self,
        credentials: Credentials,
        identity: Identity,
        clock: Clock,
        *,
        describe: Callable[[bool], mb.HeartbeatRequest],
        received: Callable[[mb.HeartbeatResponse], None],
        renewed: Callable[[Credentials], None],
    ) -> None:
        self.credentials = credentials
        self.connected = False
        self._missed = False  # it was said that it does not answer
        self.clock_offset = ClockOffset()
        self._told_clock = False  # that it is far off
        self._identity = identity
        self._clock = clock
        self._describe = describe  # True: with the static facts
        self._received = received
        self._renewed = renewed
        self._outgoing = Outgoing()
        self._sequence = 0
        self._hurry = asyncio.Event()

    def report(self, report: mb.RoundReport | mb.EvaluationReport) -> None:
        """Tell the coordinator, now or when it is back."""
        self._outgoing.pending.append(report)
        self._hurry.set()

    def hurry(self) -> None:
        """Send a heartbeat now: something changed that others wait for."""
        self._hurry.set()

    async def run(self) -> None:
        """Keep the line up until cancelled. Raises `Banned` and its like: there trying again is no use."""
        backoff = _BACKOFF[0]
        while True:
            try:
                await self._renew_if_due()
                await self._converse()
            except grpc.aio.AioRpcError as error:
                problem = from_rpc_error(error, f"the coordinator at {self.credentials.coordinator}")
                if isinstance(problem, _FINAL):
                    raise problem from error
                self._miss(str(problem), backoff)
            except Unreachable as problem:
                self._miss(str(problem), backoff)
            except TimeoutError:
                self._miss("it fell silent", backoff)
            backoff = _BACKOFF[0] if self.connected else backoff
            self.connected = False
            self._outgoing.again()
            await asyncio.sleep(backoff.total_seconds())
            backoff = min(backoff * 2, _BACKOFF[1])

    def _miss(self, reason: str, backoff: timedelta) -> None:
        self._missed = True
        _log.warning("coordinator out of reach", reason=reason, retry_seconds=backoff.total_seconds())

    async def leave(self, reason: str) -> None:
        """Say goodbye. A coordinator that does not answer will notice by itself."""
        try:
            async with self._channel() as channel:
                stub = membership_pb2_grpc.MembershipServiceStub(channel)
                await stub.Leave(mb.LeaveRequest(reason=reason), timeout=CALL_TIMEOUT.total_seconds())
        except grpc.aio.AioRpcError as error:
            _log.warning("could not say goodbye", reason=str(from_rpc_error(error, "the coordinator")))
        except Unreachable as error:
            _log.warning("could not say goodbye", reason=str(error))

    async def vote(self, request: mb.VoteRequest) -> mb.VoteResponse:
        """Ask the coordinator to break a tie. Raises what it answers, `Unreachable` when it does not."""
        async with self._channel() as channel:
            stub = membership_pb2_grpc.MembershipServiceStub(channel)
            try:
                return await stub.Vote(request, timeout=VOTE_TIMEOUT.total_seconds())
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, f"the coordinator at {self.credentials.coordinator}") from error

    async def upload(self, order: mb.UploadOrder, directory: Path) -> None:
        """Answer an upload order with the checkpoint in `directory`. Raises as `vote`."""
        async with self._channel() as channel:
            await upload(membership_pb2_grpc.MembershipServiceStub(channel), order, directory)

    async def flush(self, timeout: timedelta) -> bool:
        """Wait until every report is durable; False when the time is over."""
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                while self._outgoing.pending or self._outgoing.sent:
                    self._hurry.set()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return False
        return True

    # --- one connection ------------------------------------------------------------------------------

    async def _converse(self) -> None:
        async with self._channel() as channel:
            call = membership_pb2_grpc.MembershipServiceStub(channel).Heartbeat()  # type: ignore[call-arg]  # written to below
            sending = asyncio.create_task(self._send(call))
            try:
                while await self._take_answer(call) and not self._renewal_due():
                    pass
            finally:
                call.cancel()
                sending.cancel()  # before what was under way is queued again: nobody else may take it
                await asyncio.gather(sending, return_exceptions=True)

    async def _take_answer(self, call: Call) -> bool:
        """Act on one answer; False when the coordinator has ended the stream."""
        async with asyncio.timeout(_SILENCE.total_seconds()):
            response = await call.read()
        if not isinstance(response, mb.HeartbeatResponse):
            return False
        if self._missed:
            _log.info("the coordinator answers again")
        self.connected, self._missed = True, False
        self._outgoing.acknowledged(response.acknowledged_sequence)
        self._compare_clocks(response)
        self._received(response)
        return True

    def _compare_clocks(self, answer: mb.HeartbeatResponse) -> None:
        self.clock_offset.answered(answer.acknowledged_sequence, answer.unix_ms / 1000, self._clock.unix())
        ahead = self.clock_offset.seconds or 0.0
        off = abs(ahead) >= _CLOCK_OFF_SECONDS
        if off and not self._told_clock:
            _log.warning("this machine's clock is not the coordinator's", ahead_seconds=round(ahead, 1))
        self._told_clock = off

    async def _send(self, call: Call) -> None:
        """Heartbeats, one a beat and whenever there is a hurry, until cancelled or the call is over."""
        first = True
        while not call.done():
            self._hurry.clear()
            self._sequence += 1
            request = self._describe(first)
            request.sequence = self._sequence
            for report in self._outgoing.take(self._sequence):
                if isinstance(report, mb.RoundReport):
                    request.rounds.append(report)
                else:
                    request.evaluations.append(report)
            self.clock_offset.sent(self._sequence, self._clock.unix())
            try:
                await call.write(request)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reading side says why
            first = False
            if self._outgoing.pending:
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT.total_seconds()):
                    await self._hurry.wait()

    # --- certificates ----------------------------------------------------------------------------------

    def _renewal_due(self) -> bool:
        left = not_after(self.credentials.tls_chain_pem.encode()) - self._clock.unix()
        if left <= 0:
            raise CertificateInvalid(
                "this node was away from its coordinator for so long that its certificate has expired",
                "ask your operator for a new token, then: atoll join",
            )
        return left < LEAF_LIFETIME.total_seconds() - CERTIFICATE_LIFETIME.total_seconds() * RENEW_AT_FRACTION

    async def _renew_if_due(self) -> None:
        if not self._renewal_due():
            return
        key_pem, csr_der = new_tls_key_and_csr()
        request = mb.RenewRequest(csr_der=csr_der, csr_signature=self._identity.sign("csr", csr_der))
        async with self._channel() as channel:
            stub = membership_pb2_grpc.MembershipServiceStub(channel)
            response = await stub.Renew(request, timeout=CALL_TIMEOUT.total_seconds())
        self.credentials = self.credentials.renewed(
            tls_key_pem=key_pem,
            chain_pem=response.certificate_chain_pem,
            membership=response.membership,
            deny_list=response.deny_list,
        )
        self._renewed(self.credentials)
        _log.info("certificate renewed")

    def _channel(self) -> grpc.aio.Channel:
        """Raises `Unreachable` when there are no descriptors for one: gRPC would end the process."""
        if not _are_free(_SPARE_DESCRIPTORS):
            raise Unreachable("the coordinator cannot be dialled: this node has no file descriptors left")
        return self._dial()

    def _dial(self) -> grpc.aio.Channel:
        tls = self.credentials.tls
        channel_credentials = grpc.ssl_channel_credentials(tls.ca_pem, tls.key_pem, tls.chain_pem)
        options = [
            ("grpc.ssl_target_name_override", SERVER_NAME),
            ("grpc.keepalive_time_ms", 15_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ]
        return grpc.aio.secure_channel(self.credentials.coordinator, channel_credentials, options)


def _are_free(descriptors: int) -> bool:
    """Whether this process may open so many more files."""
    taken: list[int] = []
    try:
        for _ in range(descriptors):
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    finally:
        for descriptor in taken:
            os.close(descriptor)
    return True
