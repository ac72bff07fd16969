"""Relay of checkpoints from nodes to the operator, message by message; nothing is stored here.

A pull opens one `RelayedUpload` for each checkpoint of a set. The node's next heartbeat response carries an upload
order with a ticket. The node answers with an `UploadCheckpoint` call, and the relay joins the two calls. All nodes of a
set get their orders at the same time. A node keeps the files open once it has answered; a node that was asked later
could have deleted its checkpoint. At most a few messages are buffered, so the slower side sets the pace. Every wait has
a deadline. If one side ends, the other side receives the reason.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from atoll.coordinator.controller import Controller
from atoll.coordinator.runs import checkpoints
from atoll.coordinator.sanitize import clean
from atoll.coordinator.store.records import MAX_INTEGER, SHA256_BYTES, Checkpoint
from atoll.core.errors import AtollError, Busy, DeadlineExceeded, NotFound, PeerMisbehaved, Unreachable, first_error
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

MAX_CONCURRENT_PULLS = 8
MAX_CONCURRENT_PARTS = 8  # uploads of one pull at a time; others of its set wait
MAX_FILES = 16
MAX_MESSAGE_BYTES = 1 << 20
OPENING_SECONDS = 30.0  # from the order to the node's answer
MESSAGE_SECONDS = 60.0  # between two messages, and until the operator accepts one
MAX_BUFFERED_MESSAGES = 4
_POLL_SECONDS = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class RelayedUpload:
    """One checkpoint, from one node to one operator."""

    def __init__(self, peer_id: str, round_number: int) -> None:
        self.ticket = secrets.token_bytes(16)
        self.peer_id = peer_id
        self.round = round_number
        self.node_answered = False
        self._messages: deque[mb.CheckpointUpload] = deque()
        self._ended = False
        self._failure: AtollError | None = None
        self._has_room = asyncio.Event()
        self._has_message = asyncio.Event()

    def end(self, failure: AtollError | None = None) -> None:
        """End the transfer; the other side raises `failure`. Later calls keep the first failure."""
        if not self._ended:
            self._ended, self._failure = True, failure
        self._has_room.set()
        self._has_message.set()

    async def put(self, message: mb.CheckpointUpload) -> None:
        """Append a message once there is room. Raises `DeadlineExceeded`, or the error that ended the other side."""
        self._check_end()
        if len(self._messages) >= MAX_BUFFERED_MESSAGES:
            self._has_room.clear()
            await _in_time(
                self._has_room, MESSAGE_SECONDS, f"the operator accepted no message for {MESSAGE_SECONDS:.0f} s"
            )
            self._check_end()
        self._messages.append(message)
        self._has_message.set()

    async def get(self) -> mb.CheckpointUpload | None:
        """The next message; None after the last. Raises `DeadlineExceeded`, or the error that ended the transfer."""
        while not self._messages:
            if self._ended:
                if self._failure is not None:
                    raise self._failure
                return None
            self._has_message.clear()
            await _in_time(self._has_message, MESSAGE_SECONDS, f"the node sent nothing for {MESSAGE_SECONDS:.0f} s")
        self._has_room.set()
        return self._messages.popleft()

    async def wait_for_message(self, seconds: float) -> bool:
        """True once a message or the end has arrived; False after `seconds`."""
        if not (self._messages or self._ended):
            self._has_message.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._has_message.wait()
            except TimeoutError:
                return False
        return True

    def _check_end(self) -> None:
        if self._ended:
            raise self._failure or Unreachable("the operator cancelled the download")


class CheckpointRelay:
    """All transfers under way."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._open: dict[bytes, RelayedUpload] = {}
        self._pulls = 0

    def pending_orders(self, peer_id: str) -> list[mb.UploadOrder]:
        """Uploads that a node should start and has not started yet."""
        return [
            mb.UploadOrder(ticket=upload.ticket, round=upload.round)
            for upload in self._open.values()
            if upload.peer_id == peer_id and not upload.node_answered
        ]

    async def pull(
        self,
        wanted: Sequence[Checkpoint],
        check: Callable[[Checkpoint, manifest_pb2.CommittedManifest], None],
        write: Callable[[mb.CheckpointUpload], Awaitable[None]],
    ) -> None:
        """Relay all `wanted` checkpoints, message by message, in turn.

        `check` raises for a manifest that must not be relayed. Raises `Busy`, the errors of `first_message`, and the
        error that ended an upload.
        """
        if self._pulls >= MAX_CONCURRENT_PULLS:
            raise Busy(f"{MAX_CONCURRENT_PULLS} checkpoints are being pulled already", "try again when one is done")
        places, writing = asyncio.Semaphore(MAX_CONCURRENT_PARTS), asyncio.Lock()

        async def fetch(part: int, item: Checkpoint) -> None:
            async with places:
                with self._open_upload(item) as upload:
                    first = await self.first_message(upload)
                    check(item, first.opening.manifest)
                    first.opening.parts = len(wanted)
                    message: mb.CheckpointUpload | None = first
                    while message is not None:
                        message.part = part
                        async with writing:
                            await write(message)
                        message = await upload.get()

        self._pulls += 1
        try:
            async with asyncio.TaskGroup() as tasks:
                for part, item in enumerate(wanted):
                    tasks.create_task(fetch(part, item))
        except ExceptionGroup as group:
            raise first_error(group) from group
        finally:
            self._pulls -= 1

    @contextmanager
    def _open_upload(self, wanted: Checkpoint) -> Iterator[RelayedUpload]:
        """Order an upload from the node; at exit, end it on both sides."""
        upload = RelayedUpload(wanted.peer_id, wanted.round)
        self._open[upload.ticket] = upload
        self._controller.notify()
        try:
            yield upload
        finally:
            del self._open[upload.ticket]
            upload.end()

    async def first_message(self, upload: RelayedUpload) -> mb.CheckpointUpload:
        """The node's first message.

        Raises `Unreachable` when the node disconnects, `DeadlineExceeded`, and `NotFound` when it refuses.
        """
        node = self._controller.state.nodes.get(upload.peer_id)
        name = node.name if node is not None else upload.peer_id
        for _ in range(int(OPENING_SECONDS / _POLL_SECONDS)):
            if await upload.wait_for_message(_POLL_SECONDS):
                break
            if not checkpoints.connected(self._controller.state, upload.peer_id):
                raise Unreachable(
                    f"{name} disconnected before it sent the checkpoint", "try again, or name another --node"
                )
        else:
            raise DeadlineExceeded(
                f"{name} sent nothing for {OPENING_SECONDS:.0f} s",
                "try again, or name another --node",
            )
        first = await upload.get()
        if first is None:
            raise Unreachable(f"{name} ended the transfer before it sent anything", "try again")
        if first.opening.refusal:
            refusal = clean(first.opening.refusal)
            raise NotFound(f"{name} refused to send the checkpoint: {refusal}", "see `atollctl checkpoint list`")
        return first

    async def receive_upload(self, peer_id: str, messages: AsyncIterator[mb.CheckpointUpload]) -> None:
        """Receive a node's upload, from the opening to the last byte.

        Raises `NotFound`, `PeerMisbehaved`, `Unreachable`, `DeadlineExceeded`.
        """
        opening = (await _next(messages)).opening
        upload = self._open.get(opening.ticket)
        if upload is None or upload.peer_id != peer_id or upload.node_answered:
            raise NotFound("no operator waits for this checkpoint from this node")
        upload.node_answered = True
        try:
            await _forward(upload, opening, messages)
        except AtollError as error:
            upload.end(error)
            raise
        except BaseException:
            upload.end(Unreachable("the node disconnected while it sent the checkpoint", "try again"))
            raise
        upload.end()


async def _forward(
    upload: RelayedUpload, opening: mb.CheckpointOpening, messages: AsyncIterator[mb.CheckpointUpload]
) -> None:
    if opening.refusal:
        await upload.put(mb.CheckpointUpload(opening=opening))
        return
    left = _announced_bytes(upload, opening)
    await upload.put(mb.CheckpointUpload(opening=opening))
    while left:
        message = await _next(messages)
        if not 0 < len(message.data) <= min(left, MAX_MESSAGE_BYTES):
            raise PeerMisbehaved(
                f"the node sent a message of {len(message.data)} bytes; must be 1 to {min(left, MAX_MESSAGE_BYTES)}"
            )
        left -= len(message.data)
        await upload.put(message)


def _announced_bytes(upload: RelayedUpload, opening: mb.CheckpointOpening) -> int:
    """Bytes that must follow the opening. Raises `PeerMisbehaved` for an opening that is not valid."""
    names = [item.name for item in opening.files]
    total = sum(item.bytes for item in opening.files)
    if opening.round != upload.round or not 1 <= len(names) <= MAX_FILES or len(set(names)) != len(names):
        raise PeerMisbehaved(
            f"the node opened round {opening.round} with {len(names)} files; "
            f"must be round {upload.round} with 1 to {MAX_FILES} files of different names"
        )
    if bad := [name for name in names if not _NAME.fullmatch(name)]:
        raise PeerMisbehaved(f"the node announced a file name that is not allowed: {clean(bad[0], 64)!r}")
    if total > MAX_INTEGER:
        raise PeerMisbehaved(f"the node announced {total} bytes; must be at most {MAX_INTEGER}")
    if any(len(item.sha256) != SHA256_BYTES for item in opening.files):
        raise PeerMisbehaved(f"the node announced a file whose SHA-256 does not have {SHA256_BYTES} bytes")
    return total


async def _next(messages: AsyncIterator[mb.CheckpointUpload]) -> mb.CheckpointUpload:
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            return await anext(messages)
    except StopAsyncIteration as error:
        raise Unreachable("the node disconnected before the checkpoint was complete", "try again") from error
    except TimeoutError as error:
        raise DeadlineExceeded(f"the node sent nothing for {MESSAGE_SECONDS:.0f} s", "try again") from error


async def _in_time(event: asyncio.Event, seconds: float, otherwise: str) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError as error:
        raise DeadlineExceeded(otherwise, "try again") from error
