"""Copies of contributions for audits of training: give this node's own to the drawn auditor, or fetch another.

This happens after the commit. The contribution is encoded again part by part, so it needs no extra memory. It may
change at the next snapshot, and no member gets it from then on.
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

_MAX_BEGUN = 2  # times that one contribution is sent
_MAX_STREAMS = 2  # of one member; a new one may open before the last has ended


class ContributionCopies:
    """Sends this node's contribution to one exchange to its auditor, and fetches those of others."""

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
        """Stop sending the contribution, because it is about to change."""
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
                self._require_reader(stream.peer_id)  # otherwise it may have changed meanwhile
                await stream.send(FrameKind.PART, self._average.header(index, averaged=False), body)
                self._require_reader(stream.peer_id)

    def _require_reader(self, peer: str) -> None:
        if self._reader != peer:
            raise RoundAbandoned(
                f"this node gives its contribution to round {self._streams.round_id} to nobody else now"
            )

    async def fetch(self, peer: str, out_E: Tensor, frame_timeout: timedelta) -> None:
        """Write the decoded contribution of `peer` to `out_E`, fp32 [E].

        Checks it against the sketches that `peer` sent for the audit of sums. Raises `PeerMisbehaved` if it does not
        match, and other errors if it does not arrive in time.
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
