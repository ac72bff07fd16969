"""Copies of contributions for audits of training: give one's own to the auditor that was drawn, or fetch another.

This happens after the commit. A contribution is encoded anew, part by part, so no memory is needed for it; it may
change at the next snapshot, and is given to nobody from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch import Tensor

from atoll.core.errors import RoundAbandoned
from atoll.core.frames import Buffer, FrameKind
from atoll.node.exchange.auditor import Auditor
from atoll.node.exchange.averaged_parts import Average
from atoll.node.exchange.exchange_streams import ExchangeStreams
from atoll.node.exchange.partition import Part
from atoll.node.exchange.peer_deadlines import next_frame
from atoll.node.wire.peer_slots import PeerSlots
from atoll.node.wire.transport import Stream

_MAX_BEGUN = 2  # copies of one contribution
_MAX_STREAMS = 2  # of one member: a new one may come before the last has ended


class ContributionCopies:
    """Gives this node's contribution to one exchange away, and fetches those of others."""

    def __init__(
        self,
        average: Average,
        streams: ExchangeStreams,
        contribution: Callable[[], Tensor],
        auditor: Auditor,
    ) -> None:
        """`contribution`: this node's own, fp32 [E]."""
        self._average = average
        self._streams = streams
        self._contribution = contribution
        self._auditor = auditor
        self._reader = ""  # peer id of the member that audits the contribution
        self._begun = 0
        self._slots = PeerSlots[str](_MAX_STREAMS)

    def give_to(self, peer: str) -> None:
        """Let this member fetch the contribution."""
        self._reader = peer

    def withhold(self) -> None:
        """The contribution is about to change: nobody gets it any more."""
        self._reader = ""

    async def answer(self, stream: Stream) -> None:
        """Send the contribution, one frame per part. Raises `RoundAbandoned`, `PeerMisbehaved`."""
        with self._slots.hold(stream.peer_id, "requests for a contribution"):
            self._require_reader(stream.peer_id)
            self._begun += 1
            if self._begun > _MAX_BEGUN:
                raise RoundAbandoned(f"this node has given its contribution {_MAX_BEGUN} times")
            for index in range(len(self._average)):
                part = self._average.part(index)
                values_E = self._contribution()[part.start : part.end]
                body = await self._average.compute(self._average.codec.encode, values_E)
                self._require_reader(stream.peer_id)  # else it may have changed meanwhile
                await stream.send(FrameKind.PART, self._average.header(index, averaged=False), body)
                self._require_reader(stream.peer_id)

    def _require_reader(self, peer: str) -> None:
        if self._reader != peer:
            raise RoundAbandoned(
                f"this node gives its contribution to round {self._streams.round_id} to nobody else now"
            )

    async def fetch(self, peer: str, out_E: Tensor, frame_timeout: timedelta) -> None:
        """Write the contribution of `peer`, as a sum would have it, to `out_E`, fp32 [E].

        Checks it against the sketches that `peer` sent for the audit of sums. Raises `PeerMisbehaved` for another
        contribution, and other errors if it is not sent in time.
        """
        self._auditor.require_sketches_of(peer)
        async with self._streams.request(peer, frame_timeout, contribution=True) as stream:
            for index in range(len(self._average)):
                frame = await next_frame(stream, frame_timeout)
                self._average.check(frame, index, peer)
                await self._average.compute(self._decode_into, frame.body, self._average.part(index), out_E)
        await self._average.compute(self._auditor.check_contribution, peer, out_E)

    def _decode_into(self, body: Buffer, part: Part, out_E: Tensor) -> None:
        def take(first: int, values_C: Tensor) -> None:
            start = part.start + first
            out_E[start : start + len(values_C)] = values_C

        self._average.codec.open(body, part.elements).decode_pieces(take)
