"""Round messages between members: one stream kept open per peer and direction, messages in order.

A message that cannot be delivered is dropped and counted; the deadlines of every round cover this case. A member that
sends a message with too many entries loses its stream, and nothing is read from it for a while (`message_bounds.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any

from atoll.core import log
from atoll.core.errors import AtollError, DeadlineExceeded, MessageTooLarge, PeerMisbehaved, Unreachable
from atoll.core.frames import MAX_HEADER_BYTES, FrameKind
from atoll.node.rounds.message_bounds import Pauses, parse_round_message
from atoll.node.wire.transport import Network, Stream
from atoll.v1 import dataplane_pb2 as dp

PROTOCOL = "/atoll/round/1"
_OPEN_TIMEOUT = timedelta(seconds=10)
_IDLE_TIMEOUT = timedelta(minutes=10)  # a member reports tokens far more often than that
_QUEUE = 256

_log = log.get("rounds")


async def _ignore(peer: str) -> None:
    """Default for `lost`: do nothing."""


class RoundLinks:
    """Sends messages to any member, and passes received messages to one callback."""

    def __init__(
        self,
        network: Network,
        receive: Callable[[str, dp.RoundMessage], Awaitable[None]],
        lost: Callable[[str], Awaitable[None]] = _ignore,
    ) -> None:
        """While `receive` waits, nothing more is read from that stream, so its sender waits too."""
        self._network = network
        self._receive = receive
        self._lost = lost  # called when a member's stream breaks; the member is probably dead
        self._queues: dict[str, asyncio.Queue[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.dropped = 0
        self._pauses = Pauses()
        self._last_message: dp.RoundMessage | None = None
        self._last_payload = b""
        network.handle(PROTOCOL, self._serve)

    def send(self, peer: str, message: dp.RoundMessage) -> None:
        """Queue a message. Never blocks; a full queue (the peer is long gone) drops the message.

        Raises `MessageTooLarge`, which names the kind of the message and its size.
        """
        if message is not self._last_message:  # the same message for many peers is serialised once
            self._last_message, self._last_payload = message, message.SerializeToString()
        payload = self._last_payload
        if len(payload) > MAX_HEADER_BYTES:
            kind = message.WhichOneof("body")
            raise MessageTooLarge(
                f"{kind} has {len(payload)} bytes; a message between members has at most {MAX_HEADER_BYTES}"
            )
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = asyncio.Queue(_QUEUE)
            self._keep(self._deliver(peer, queue))
        try:
            queue.put_nowait(payload)
        except asyncio.QueueFull:
            self.dropped += 1

    async def close(self) -> None:
        """Stop sending."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, stream: Stream) -> None:
        while True:
            await self._sit_out_pause(stream.peer_id)
            try:
                frame = await stream.receive(_IDLE_TIMEOUT)
            except DeadlineExceeded:
                return  # the sender opens another stream for its next message
            except Unreachable:
                await self._lost(stream.peer_id)
                return
            try:
                message = parse_round_message(frame.header)
            except PeerMisbehaved:
                self._pauses.begin(stream.peer_id, asyncio.get_running_loop().time())
                raise
            await self._receive(stream.peer_id, message)

    async def _sit_out_pause(self, peer: str) -> None:
        """Wait until this member's pause is over. Its other streams may extend the pause meanwhile."""
        now = asyncio.get_running_loop().time
        while (seconds := self._pauses.seconds_left(peer, now())) > 0:  # noqa: ASYNC110 - it waits for a time
            await asyncio.sleep(seconds)

    async def _deliver(self, peer: str, queue: asyncio.Queue[bytes]) -> None:
        stream: Stream | None = None
        watch: asyncio.Task[None] | None = None
        try:
            while True:
                payload = await queue.get()
                if stream is not None and watch is not None and watch.done():
                    await stream.close()
                    stream = None
                for _ in range(2):
                    try:
                        if stream is None:
                            stream = await self._network.open(peer, PROTOCOL, _OPEN_TIMEOUT)
                            watch = self._keep(_until_end(stream))
                        await stream.send(FrameKind.MESSAGE, payload)
                        break
                    except AtollError as error:
                        _log.debug("round message not delivered", peer=peer, reason=str(error))
                        if stream is not None:
                            await stream.close()
                        stream = None
                else:
                    self.dropped += 1
        finally:
            if stream is not None:
                await stream.close()

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _until_end(stream: Stream) -> None:
    """Return when the other side closes the stream or refuses it. It sends nothing else on this stream."""
    while True:
        try:
            await stream.receive(_IDLE_TIMEOUT)
        except DeadlineExceeded:
            continue  # silence is normal on this stream
        except AtollError:
            return
