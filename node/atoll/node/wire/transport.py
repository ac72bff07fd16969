"""The one way in which the node's parts see the network: named protocols, streams, frames.

`swarm/` implements it over gated libp2p streams; `transport_memory.py` within one process, for tests and
simulations. A stream is bidirectional, ordered and framed; it is never half-closed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Protocol

from atoll.core.frames import Buffer, Frame, FrameKind


class Stream(Protocol):
    """One conversation with one authenticated member."""

    @property
    def peer_id(self) -> str:
        """The other side, as the handshake proved it."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the socket so far, frame prefixes included."""
        ...

    @property
    def bytes_received(self) -> int:
        """Bytes taken from the socket so far."""
        ...

    @property
    def has_own_connection(self) -> bool:
        """Whether no other stream shares its connection, so that another one would have to begin slowly."""
        ...

    async def send(self, kind: FrameKind, header: Buffer, body: Buffer = b"") -> None:
        """Write one frame; returns when the socket's buffer has room again. Raises `Unreachable`, and
        `Busy` for a body, here and in `receive`, once the owner's month is spent."""
        ...

    async def receive(self, timeout: timedelta) -> Frame:
        """The next frame. Raises `DeadlineExceeded`, `Unreachable` at the end of the stream, `FrameInvalid`,
        and the peer's own error (by its class) when the frame is a `Refusal`."""
        ...

    async def close(self) -> None:
        """End the stream in both directions. Never raises; closing twice is fine."""
        ...


Handler = Callable[[Stream], Awaitable[None]]


class Network(Protocol):
    """What a node can do with its neighbours."""

    @property
    def peer_id(self) -> str:
        """Our own peer id."""
        ...

    def handle(self, protocol: str, handler: Handler) -> None:
        """Serve `protocol` (for example "/atoll/round/1") to members of the run, one task a stream.

        The stream is closed when the handler returns. An `AtollError` that the handler raises goes to the
        peer as a `Refusal`; anything else is logged, counted, and told as an internal error.
        """
        ...

    async def open(self, peer_id: str, protocol: str, timeout: timedelta) -> Stream:
        """Dial a member (hello first, where there was none). Raises `Unreachable`, `Rejected`."""
        ...

    def bytes_per_second_to(self, peer_id: str) -> float:
        """Bytes per second to a member, as measured, or our limit; infinite: it is near, 0: nothing is known."""
        ...
