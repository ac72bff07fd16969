"""Checkpoints on their way from nodes to an operator: passed on message by message, never kept here.

An operator's pull opens an `RelayedUpload` for every checkpoint of a set; the node's next heartbeat answer carries the
order with its ticket; the node answers with a call of its own, and the two calls meet here. Nodes keep the files open
from then on, so all are asked at the same time: one that waited for its turn could have dropped its checkpoint. A few
messages lie between them at most, so whoever is slower sets the pace. Every wait has a deadline, and whichever side
ends first, the other is told why.
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
from atoll.coordinator.store.records import Checkpoint
from atoll.core.errors import AtollError, Busy, DeadlineExceeded, NotFound, PeerMisbehaved, Unreachable, first_error
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

MAX_CONCURRENT_PULLS = 8  # pulls
MAX_CONCURRENT_PARTS = 8  # uploads of one pull; a set of more begins the next when one is done
MAX_FILES = 16
MAX_MESSAGE_BYTES = 1 << 20
OPENING_SECONDS = 30.0  # from the order to the node's answer
MESSAGE_SECONDS = 60.0  # between two messages, and for an operator to take one
MAX_BUFFERED_MESSAGES = 4  # messages
_POLL_SECONDS = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST_BYTES = 32
_MAX = 2**62


class RelayedUpload:
    """One checkpoint, from one node to one operator."""

    def __init__(self, peer_id: str, round_number: int) -> None:
        self.ticket = secrets.token_bytes(16)
        self.peer_id = peer_id
        self.round = round_number
        self.node_answered = False  # the node answered
        self._messages: deque[mb.CheckpointUpload] = deque()
        self._ended = False
        self._failure: AtollError | None = None
        self._has_room = asyncio.Event()
        self._has_message = asyncio.Event()

    def end(self, failure: AtollError | None = None) -> None:
        """Nothing comes any more; the other side is told `failure`. The first end stands."""
        if not self._ended:
            self._ended, self._failure = True, failure
        self._has_room.set()
        self._has_message.set()

    async def put(self, message: mb.CheckpointUpload) -> None:
        """Pass one message on, when there is room. Raises what ended it on the other side, `DeadlineExceeded`."""
        self._check_end()
        if len(self._messages) >= MAX_BUFFERED_MESSAGES:
            self._has_room.clear()
            await _in_time(self._has_room, MESSAGE_SECONDS, "the operator does not take what the node sends")
            self._check_end()
        self._messages.append(message)
        self._has_message.set()

    async def get(self) -> mb.CheckpointUpload | None:
        """The next message; None after the last. Raises what ended it, `DeadlineExceeded`."""
        while not self._messages:
            if self._ended:
                if self._failure is not None:
                    raise self._failure
                return None
            self._has_message.clear()
            await _in_time(self._has_message, MESSAGE_SECONDS, "the node stopped sending the checkpoint")
        self._has_room.set()
        return self._messages.popleft()

    async def wait_for_message(self, seconds: float) -> bool:
        """Whether anything has come, or the end, within that time."""
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
            raise self._failure or Unreachable("the operator does not want the checkpoint any more")


class CheckpointRelay:
    """All that are under way."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._open: dict[bytes, RelayedUpload] = {}
        self._pulls = 0

    def pending_orders(self, peer_id: str) -> list[mb.UploadOrder]:
        """What a node shall send and did not begin to."""
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
        """Pass all of them on, a message of each in turn. `check` raises for a manifest that must not be passed on.

        Raises `Busy`, what `first_message` raises, and what ends an upload.
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
        """Ask the node; at the end it is told that nobody waits any more."""
        upload = RelayedUpload(wanted.peer_id, wanted.round)
        self._open[upload.ticket] = upload
        self._controller.notify()
        try:
            yield upload
        finally:
            del self._open[upload.ticket]
            upload.end()

    async def first_message(self, upload: RelayedUpload) -> mb.CheckpointUpload:
        """The node's first message. Raises `Unreachable` when it goes, `DeadlineExceeded`, and its refusal."""
        name = self._controller.state.nodes[upload.peer_id].name
        for _ in range(int(OPENING_SECONDS / _POLL_SECONDS)):
            if await upload.wait_for_message(_POLL_SECONDS):
                break
            if not checkpoints.connected(self._controller.state, upload.peer_id):
                raise Unreachable(
                    f"{name} went away before it sent the checkpoint", "try again, or name another --node"
                )
        else:
            raise DeadlineExceeded(f"{name} did not begin to send the checkpoint", "try again, or name another --node")
        first = await upload.get()
        if first is None:
            raise Unreachable(f"{name} ended before it sent anything", "try again")
        if first.opening.refusal:
            refusal = clean(first.opening.refusal)
            raise NotFound(f"{name} does not send it: {refusal}", "see `atollctl checkpoint list`")
        return first

    async def receive_upload(self, peer_id: str, messages: AsyncIterator[mb.CheckpointUpload]) -> None:
        """The node's side: from the opening to the last byte. Raises `NotFound`, `PeerMisbehaved`, `Unreachable`."""
        opening = (await _next(messages)).opening
        upload = self._open.get(opening.ticket)
        if upload is None or upload.peer_id != peer_id or upload.node_answered:
            raise NotFound("nobody waits for this checkpoint, or not from this node")
        upload.node_answered = True
        try:
            await _forward(upload, opening, messages)
        except AtollError as error:
            upload.end(error)
            raise
        except BaseException:
            upload.end(Unreachable("the node went away while it sent the checkpoint", "try again"))
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
            raise PeerMisbehaved("the node sent more than it announced, or nothing, or too much at once")
        left -= len(message.data)
        await upload.put(message)


def _announced_bytes(upload: RelayedUpload, opening: mb.CheckpointOpening) -> int:
    """Bytes that must come. Raises `PeerMisbehaved` for an opening that no operator should see."""
    names = [item.name for item in opening.files]
    total = sum(item.bytes for item in opening.files)
    if opening.round != upload.round or not 1 <= len(names) <= MAX_FILES or len(set(names)) != len(names):
        raise PeerMisbehaved("the node opened another checkpoint than was asked for")
    if not all(_NAME.fullmatch(name) for name in names) or total > _MAX:
        raise PeerMisbehaved("the node sends files with names or sizes that cannot be")
    if any(len(item.sha256) != _DIGEST_BYTES for item in opening.files):
        raise PeerMisbehaved("the node sends files without digests")
    return total


async def _next(messages: AsyncIterator[mb.CheckpointUpload]) -> mb.CheckpointUpload:
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            return await anext(messages)
    except StopAsyncIteration as error:
        raise Unreachable("the node went away before all of it had come", "try again") from error
    except TimeoutError as error:
        raise DeadlineExceeded("the node stopped sending the checkpoint", "try again") from error


async def _in_time(event: asyncio.Event, seconds: float, otherwise: str) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError as error:
        raise DeadlineExceeded(otherwise, "try again") from error
