"""Network and Stream: the interface through which all parts of the node use the network.

A node serves named protocols and opens streams to members. A stream is bidirectional, ordered and framed; it is never
half-closed. `swarm/host.py` implements this over gated libp2p streams and direct connections. The tests' memory network
(`tests/support/memory_network.py`) implements it within one process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Protocol

from atoll.core.frames import Buffer, Frame, FrameKind


class Stream(Protocol):
    """A framed stream with one authenticated member."""

    @property
    def peer_id(self) -> str:
        """The peer at the other end, as the handshake proved it."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the socket so far, frame prefixes included."""
        ...

    @property
    def has_own_connection(self) -> bool:
        """Whether no other stream shares its connection. A new stream would then need a new, slow connection."""
        ...

    async def send(self, kind: FrameKind, header: Buffer, body: Buffer = b"") -> None:
        """Write one frame; return when the socket's buffer has room again.

        Raises `Unreachable`. Raises `Busy` for a frame with a body, here and in `receive`, once the owner's monthly
        traffic allowance is spent.
        """
        ...

    async def receive(self, timeout: timedelta) -> Frame:
        """Return the next frame.

        Raises `DeadlineExceeded`, `FrameInvalid`, `Unreachable` at the end of the stream, and the peer's error (by its
        class) when the frame is a refusal.
        """
        ...

    async def close(self) -> None:
        """End the stream in both directions. Never raises; closing twice is fine."""
        ...


Handler = Callable[[Stream], Awaitable[None]]


class Network(Protocol):
    """Streams between this node and the members of its run."""

    @property
    def peer_id(self) -> str:
        """This node's own peer id."""
        ...

    def handle(self, protocol: str, handler: Handler) -> None:
        """Serve `protocol` (for example "/atoll/round/1") to members of the run, one task a stream.

        The stream closes when the handler returns. An `AtollError` from the handler goes to the peer as a refusal.
        Any other exception is logged, counted, and sent as an internal error.
        """
        ...

    async def open(self, peer_id: str, protocol: str, timeout: timedelta) -> Stream:
        """Open a stream to a member; say hello first if needed. Raises `Unreachable`, `Rejected`."""
        ...

    def bytes_per_second_to(self, peer_id: str) -> float:
        """Measured rate to a member, at most the upload limit.

        Infinite for a member on the local network. 0: unknown.
        """
        ...
