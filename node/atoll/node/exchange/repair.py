"""Repair: members fetch parts that a reducer sent to some members but not to them.

Before a repair, the members agree on the digest of every part, so a holder need not be trusted. When its bytes do not
match the digest, the next holder is asked, and the liar is not asked again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from atoll.core.errors import AtollError, PartInvalid, PeerMisbehaved, RoundAbandoned, first_error
from atoll.core.frames import FrameKind
from atoll.node.exchange.averaged_parts import Average
from atoll.node.exchange.exchange_streams import ExchangeStreams
from atoll.node.exchange.peer_deadlines import next_frame
from atoll.node.wire.peer_slots import PeerSlots
from atoll.node.wire.transport import Stream

MAX_PARTS_PER_REQUEST = 256
_MAX_STREAMS = 2  # requests of one member that are served at once

SourcesOfPart = Callable[[int], Sequence[str]]  # a part's index → members that hold it


class RepairServer:
    """Sends parts to members that lack them."""

    def __init__(self, average: Average) -> None:
        self._average = average
        self._active_requests = PeerSlots[str](_MAX_STREAMS)

    async def answer(self, stream: Stream, indices: Sequence[int]) -> None:
        """Send one frame per requested part, with an empty body for a part missing here. Raises `PeerMisbehaved`."""
        if (
            len(indices) > MAX_PARTS_PER_REQUEST
            or len(set(indices)) < len(indices)
            or max(indices) >= len(self._average)
        ):
            raise PeerMisbehaved(
                f"peer {stream.peer_id} sent a repair request with {len(indices)} indices up to {max(indices)}; "
                f"allowed are {MAX_PARTS_PER_REQUEST} different ones below {len(self._average)}"
            )
        with self._active_requests.hold(stream.peer_id, "repair requests"):
            for index in indices:
                body = self._average.body(index) or b""
                await stream.send(FrameKind.PART, self._average.header(index), body)


class RepairClient:
    """Fetches parts by digest, from all their holders at once."""

    def __init__(
        self,
        average: Average,
        streams: ExchangeStreams,
        frame_timeout: timedelta,
    ) -> None:
        self._average = average
        self._streams = streams
        self._frame_timeout = frame_timeout  # for a holder's next frame

    async def fetch(self, wanted: Mapping[int, bytes], sources: SourcesOfPart, timeout: timedelta) -> None:
        """Fetch the bytes with these digests. Raises `RoundAbandoned` if no source sends one of them in time."""
        self._wanted = dict(wanted)
        self._sources = {index: [peer for peer in sources(index) if peer != self._streams.me] for index in wanted}
        self._last_failure = "nobody is said to hold it"
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                while self._wanted:
                    await self._request_all(self._assign_to_holders())
        except TimeoutError:
            raise self._failure(min(self._wanted), "the time is up") from None

    def _failure(self, index: int, why: str) -> RoundAbandoned:
        """The error for a part that could not be fetched."""
        return RoundAbandoned(f"part {index} of {len(self._average)} cannot be repaired: {why}")

    def _assign_to_holders(self) -> dict[str, list[int]]:
        """Divide the wanted parts evenly among their holders: peer → part indices."""
        requests: defaultdict[str, list[int]] = defaultdict(list)
        for index in sorted(self._wanted):
            if not self._sources[index]:
                raise self._failure(index, self._last_failure)
            requests[min(self._sources[index], key=lambda peer: len(requests[peer]))].append(index)
        return requests

    async def _request_all(self, requests: Mapping[str, Sequence[int]]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for peer, indices in requests.items():
                    tasks.create_task(self._request_parts(peer, indices))
        except ExceptionGroup as group:
            raise first_error(group) from group

    async def _request_parts(self, peer: str, indices: Sequence[int]) -> None:
        """Fetch parts from `peer`. The next turn requests the parts that it does not deliver from other holders."""
        try:
            for start in range(0, len(indices), MAX_PARTS_PER_REQUEST):
                await self._request_batch(peer, indices[start : start + MAX_PARTS_PER_REQUEST])
        except AtollError as error:
            self._last_failure = str(error)
            if isinstance(error, PeerMisbehaved):
                self._streams.fault(peer, str(error))
            for sources in self._sources.values():
                if peer in sources:
                    sources.remove(peer)

    async def _request_batch(self, peer: str, indices: Sequence[int]) -> None:
        async with self._streams.request(peer, self._frame_timeout, repair=indices) as stream:
            for index in indices:
                frame = await next_frame(stream, self._frame_timeout)
                factors = self._average.check(frame, index, peer)
                if frame.body:
                    await self._put(peer, index, frame.body, factors)
                else:
                    self._last_failure = f"peer {peer} does not have it"
                    self._sources[index].remove(peer)

    async def _put(self, peer: str, index: int, body: bytes | memoryview, factors: tuple[float, ...]) -> None:
        try:
            await self._average.put(index, body, self._wanted[index], factors)
        except PartInvalid as error:
            raise PartInvalid(f"peer {peer} sent wrong bytes for part {index}: {error}") from error
        del self._wanted[index]
