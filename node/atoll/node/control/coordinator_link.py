"""Link to the coordinator: sends heartbeats, receives plans and orders, renews the certificate in time.

The link may be down for hours; training continues. Reports are kept until the coordinator acknowledges that they are
durable, and sent again after a broken connection. No report counts twice (reports are idempotent). The coordinator
ignores the report of a round while it lacks the round before; the report is kept until then. A node keeps a bounded
number of reports. The coordinator learns older rounds from manifests on disk (`manifest_answers.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from atoll.core import log
from atoll.core.certs import LEAF_LIFETIME, new_tls_key_and_csr, not_after
from atoll.core.clock import Clock
from atoll.core.errors import (
    AuthorityReplaced,
    Banned,
    CertificateInvalid,
    CorpusError,
    Forgotten,
    IdentityInUse,
    IdentityReplaced,
    ProtocolMismatch,
    Unreachable,
)
from atoll.core.grpc_errors import from_rpc_error
from atoll.core.identity import Identity
from atoll.core.membership import CERTIFICATE_LIFETIME, RENEW_AT_FRACTION
from atoll.node.control.announce_end import INSTANCE_BYTES, announce_end, announcement
from atoll.node.control.channel import dial, refuse_replaced_authority
from atoll.node.control.checkpoint_upload import upload
from atoll.node.control.clock_offset import ClockOffset
from atoll.node.control.credentials import Credentials
from atoll.node.control.report_queue import Report, ReportQueue
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import membership_pb2_grpc

HEARTBEAT_INTERVAL = timedelta(seconds=1)
CALL_TIMEOUT = timedelta(seconds=10)
VOTE_TIMEOUT = timedelta(seconds=8)
_ANSWER_TIMEOUT = timedelta(seconds=30)  # the coordinator answers every heartbeat
_FIRST_ANSWER_TIMEOUT = timedelta(seconds=5)  # after this time the node works without the coordinator
_CLOCK_WARNING_SECONDS = 5.0  # a larger offset is only logged
_BACKOFF = (timedelta(milliseconds=500), timedelta(seconds=15))  # first and longest pause between attempts
_SPARE_DESCRIPTORS = 16  # a new channel takes about six
_NOT_RETRIED = (
    AuthorityReplaced,
    Banned,
    CorpusError,
    Forgotten,
    IdentityInUse,
    IdentityReplaced,
    ProtocolMismatch,
)  # errors for which a retry gets the same answer

if TYPE_CHECKING:  # generic only in its type stubs
    Call = grpc.aio.StreamStreamCall[mb.HeartbeatRequest, mb.HeartbeatResponse]

_log = log.get("coordinator")


class CoordinatorLink:
    """One member's link to the coordinator.

    It has more than 15 attributes: its parts, and the state of its connection and of the clock comparison.
    """

    def __init__(
        self,
        credentials: Credentials,
        identity: Identity,
        clock: Clock,
        *,
        build_heartbeat: Callable[[bool], mb.HeartbeatRequest],
        on_response: Callable[[mb.HeartbeatResponse], None],
        on_renewed: Callable[[Credentials], None],
    ) -> None:
        """`build_heartbeat` is called with True for the first heartbeat of a stream, which has the static facts."""
        self.credentials = credentials
        self.connected = False
        self._unreachable_logged = False
        self.clock_offset = ClockOffset()
        self._clock_warning_logged = False
        self._identity = identity
        self._clock = clock
        self._build_heartbeat = build_heartbeat
        self._on_response = on_response
        self._on_renewed = on_renewed
        self._reports = ReportQueue()
        self._sequence = 0
        self._instance = secrets.token_bytes(INSTANCE_BYTES)
        self._challenge = b""  # the latest challenge of this stream
        self._renewed_in_vain = False
        # set when the coordinator has answered this process, or is known to be unreachable
        self._tried = asyncio.Event()
        self._heartbeat_due = asyncio.Event()

    def report(self, report: Report) -> None:
        """Queue a report and send it as soon as the coordinator can be reached."""
        self._reports.add(report)
        self._heartbeat_due.set()

    def send_heartbeat_now(self) -> None:
        """Send the next heartbeat at once, because it contains a change that other nodes wait for."""
        self._heartbeat_due.set()

    async def run(self) -> None:
        """Keep the link up until cancelled. Raises errors that a retry cannot cure, such as `Banned`."""
        backoff = _BACKOFF[0]
        while True:
            try:
                await self._renew_if_due()
                await self._run_heartbeat_stream()
            except grpc.aio.AioRpcError as error:
                problem = from_rpc_error(error, f"the coordinator at {self.credentials.coordinator}")
                if isinstance(problem, _NOT_RETRIED):
                    raise problem from error
                if isinstance(problem, Unreachable) and not self.connected:
                    await refuse_replaced_authority(self.credentials)
                self._log_unreachable(str(problem), backoff)
            except Unreachable as problem:
                self._log_unreachable(str(problem), backoff)
            except TimeoutError:
                self._log_unreachable(f"no heartbeat answer for {_ANSWER_TIMEOUT.total_seconds():.0f} s", backoff)
            backoff = _BACKOFF[0] if self.connected else backoff
            self.connected = False
            self._reports.requeue_unacknowledged()
            await asyncio.sleep(backoff.total_seconds())
            backoff = min(backoff * 2, _BACKOFF[1])

    def _log_unreachable(self, reason: str, backoff: timedelta) -> None:
        self._unreachable_logged = True
        self._tried.set()
        _log.warning("coordinator out of reach", reason=reason, retry_seconds=backoff.total_seconds())

    async def first_answer(self) -> None:
        """Wait, at most a few seconds, until the coordinator has answered this process or is found unreachable."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_ANSWER_TIMEOUT.total_seconds()):
                await self._tried.wait()

    async def leave(self, reason: str, why: mb.NodeReason) -> None:
        """Announce that this node leaves. If that fails, the coordinator notices the missing heartbeats."""
        await announce_end(self._channel, mb.LeaveRequest(reason=reason, instance=self._instance, why=why))

    async def announce_failure(self, error: BaseException) -> None:
        """Announce that this node ends because of an error."""
        request = announcement(error, self._instance)
        if request is not None:
            await announce_end(self._channel, request)

    async def move_to_run(self) -> Credentials:
        """Return the credentials for the run that the operator assigned this node to.

        Raises the error in the coordinator's answer, `Unreachable`, and the errors of `Credentials.moved`.
        """
        async with self._channel() as channel:
            stub = membership_pb2_grpc.MembershipServiceStub(channel)
            try:
                request = mb.MoveToRunRequest(instance=self._instance)
                answer = await stub.MoveToRun(request, timeout=CALL_TIMEOUT.total_seconds())
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, f"the coordinator at {self.credentials.coordinator}") from error
        return self.credentials.moved(answer, self._identity.peer_id, self._clock.unix())

    async def vote(self, request: mb.VoteRequest) -> mb.VoteResponse:
        """Ask the coordinator for a promise or a vote. Raises the error in its answer, or `Unreachable`."""
        async with self._channel() as channel:
            stub = membership_pb2_grpc.MembershipServiceStub(channel)
            try:
                return await stub.Vote(request, timeout=VOTE_TIMEOUT.total_seconds())
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, f"the coordinator at {self.credentials.coordinator}") from error

    async def upload(self, order: mb.UploadOrder, directory: Path) -> None:
        """Answer an upload order with the checkpoint in `directory`. Raises the errors of `vote`."""
        async with self._channel() as channel:
            await upload(membership_pb2_grpc.MembershipServiceStub(channel), order, directory)

    async def flush(self, timeout: timedelta) -> bool:
        """Wait until every report is durable; return False on a timeout."""
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                while self._reports.pending or self._reports.sent:
                    self._heartbeat_due.set()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return False
        return True

    # --- one connection ------------------------------------------------------------------------------

    async def _run_heartbeat_stream(self) -> None:
        self._challenge = b""
        async with self._channel() as channel:
            call = membership_pb2_grpc.MembershipServiceStub(channel).Heartbeat()  # type: ignore[call-arg]  # written to below
            sending = asyncio.create_task(self._send(call))
            try:
                while await self._read_response(call) and not self._renewal_due():
                    pass
            finally:
                call.cancel()
                sending.cancel()  # before unacknowledged reports are queued again: the old sender must not take them
                await asyncio.gather(sending, return_exceptions=True)

    async def _read_response(self, call: Call) -> bool:
        """Read and handle one answer; return False if the coordinator ended the stream."""
        async with asyncio.timeout(_ANSWER_TIMEOUT.total_seconds()):
            response = await call.read()
        if not isinstance(response, mb.HeartbeatResponse):
            return False
        if self._unreachable_logged:
            _log.info("coordinator answers again")
        self.connected, self._unreachable_logged = True, False
        self._tried.set()
        known_round = response.known_round if response.HasField("known_round") else None
        self._reports.acknowledged(response.acknowledged_sequence, known_round)
        self._compare_clocks(response)
        if response.challenge:
            self._challenge = response.challenge
            self.send_heartbeat_now()
        self._on_response(response)
        return True

    def _compare_clocks(self, answer: mb.HeartbeatResponse) -> None:
        self.clock_offset.heartbeat_answered(answer.acknowledged_sequence, answer.unix_ms / 1000, self._clock.unix())
        ahead_seconds = self.clock_offset.ahead_seconds or 0.0
        wrong = abs(ahead_seconds) >= _CLOCK_WARNING_SECONDS
        if wrong and not self._clock_warning_logged:
            _log.warning("clock differs from the coordinator's", ahead_seconds=round(ahead_seconds, 1))
        self._clock_warning_logged = wrong

    async def _send(self, call: Call) -> None:
        """Send heartbeats, one per interval and one at once when needed, until cancelled or the call ends."""
        first = True
        while not call.done():
            self._heartbeat_due.clear()
            self._sequence += 1
            request = self._build_heartbeat(first)
            request.sequence, request.instance = self._sequence, self._instance
            request.challenge_answer = self._challenge
            for report in self._reports.take(self._sequence):
                if isinstance(report, mb.RoundReport):
                    request.rounds.append(report)
                elif isinstance(report, mb.TrainingAudit):
                    request.training_audits.append(report)
                elif isinstance(report, mb.NodeMetrics):
                    request.metrics.append(report)
                else:
                    request.evaluations.append(report)
            self.clock_offset.heartbeat_sent(self._sequence, self._clock.unix())
            try:
                await call.write(request)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader of the stream gets the reason
            first = False
            if self._reports.pending:
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_INTERVAL.total_seconds()):
                    await self._heartbeat_due.wait()

    # --- certificates ----------------------------------------------------------------------------------

    def _renewal_due(self) -> bool:
        left = not_after(self.credentials.tls_chain_pem.encode()) - self._clock.unix()
        if left <= 0:
            raise CertificateInvalid(
                "this node did not reach its coordinator in time to renew its certificate, which has expired",
                "ask your operator for a new token, then: atoll join",
            )
        if self.credentials.is_of_older_authority and not self._renewed_in_vain:
            return True
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
        # only one attempt, because the coordinator may have been restored from a backup with the older CA
        self._renewed_in_vain = self.credentials.is_of_older_authority
        self._on_renewed(self.credentials)
        _log.info("certificate renewed")

    def _channel(self) -> grpc.aio.Channel:
        """Dial the coordinator.

        Raises `Unreachable` if file descriptors are short, since gRPC would end the process.
        """
        if not _descriptors_available(_SPARE_DESCRIPTORS):
            raise Unreachable(
                "the coordinator cannot be dialled: this node has no file descriptors left",
                "raise the limit of open files (`ulimit -n`)",
            )
        return self._dial()

    def _dial(self) -> grpc.aio.Channel:
        return dial(self.credentials)


def _descriptors_available(descriptors: int) -> bool:
    """Return whether this process can open `descriptors` more files."""
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
