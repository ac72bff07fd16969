"""One member as a contributor: it sends its encoded parts to the other reducers and reads their averages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from torch import Tensor

from atoll.core import log
from atoll.core.errors import AtollError, PeerMisbehaved, Unreachable, first_error
from atoll.core.frames import FrameKind
from atoll.node.exchange.averaged_parts import Average
from atoll.node.exchange.exchange_streams import ExchangeStreams
from atoll.node.exchange.partition import ReducerShare
from atoll.node.exchange.peer_deadlines import next_frame
from atoll.node.wire.transport import Stream

_REDUCER_TIMEOUT_STALLS = 2.5  # in units of `stall`
_RECONNECT_INTERVAL = timedelta(seconds=1)

_log = log.get("exchange")


class Contributor:
    """This node's streams to the other reducers of one exchange."""

    def __init__(
        self,
        average: Average,
        streams: ExchangeStreams,
        contribution: Callable[[], Tensor] | None,
        stall: timedelta,
        is_silent: Callable[[str], bool],
    ) -> None:
        """`contribution`: this node's own, fp32 [E]; None if it has no weight.

        `stall`: how long a reducer waits for the next frame. `is_silent`: peer → whether this node's sums dropped it.
        """
        self.from_reducers: dict[int, bytes] = {}  # part → digest of what its reducer itself sent
        self._average = average
        self._streams = streams
        self._contribution = contribution
        self._stall = stall
        self._is_silent = is_silent

    async def exchange(self, share: ReducerShare) -> None:
        """Exchange a reducer's share with it. Raises no error: if it fails, its remaining parts are missing."""
        try:
            stream = await self._open(share.reducer)
            with self._streams.track(stream):
                async with asyncio.TaskGroup() as tasks:
                    sending = tasks.create_task(self._send_contribution(stream, share))
                    await self._receive_averages(stream, share)
                    sending.cancel()
        except AtollError as error:
            self._reducer_lost(share, error)
        except ExceptionGroup as group:
            first = first_error(group)
            self._reducer_lost(share, first if isinstance(first, AtollError) else _crashed(first))
        except Exception as error:  # a bug here must not end the exchange with the other reducers
            self._reducer_lost(share, _crashed(error))

    async def _open(self, reducer: str) -> Stream:
        """Connect, and retry while the reducer waits for us: behind NAT it is reachable only once it has a relay."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._stall.total_seconds()
        while True:
            try:
                return await self._streams.open(reducer, self._stall * _REDUCER_TIMEOUT_STALLS)
            except Unreachable:
                if loop.time() + _RECONNECT_INTERVAL.total_seconds() >= until:
                    raise
            await asyncio.sleep(_RECONNECT_INTERVAL.total_seconds())

    async def _send_contribution(self, stream: Stream, share: ReducerShare) -> None:
        await stream.send(FrameKind.MESSAGE, self._streams.header())
        if self._contribution is None:
            return
        for part in share.parts:
            encode = self._average.codec.encode  # no local for the values: tracebacks would keep the contribution
            body = await self._average.compute(encode, self._contribution()[part.start : part.end])
            header_bytes = self._average.header(share.first + part.index, part.index, averaged=False)
            await stream.send(FrameKind.PART, header_bytes, body)

    async def _receive_averages(self, stream: Stream, share: ReducerShare) -> None:
        for part in share.parts:
            frame = await next_frame(
                stream, self._stall * _REDUCER_TIMEOUT_STALLS, lambda: self._is_silent(share.reducer)
            )
            index = share.first + part.index
            factors = self._average.check(frame, index, share.reducer, number_in_stream=part.index)
            if frame.body:  # empty: the part has no average
                await self._average.put(index, frame.body, factors=factors)
                self.from_reducers[index] = self._average.digest(index)

    def _reducer_lost(self, share: ReducerShare, error: AtollError) -> None:
        _log.info("reducer dropped", peer=share.reducer, reason=str(error))
        if isinstance(error, PeerMisbehaved):
            self._streams.fault(share.reducer, str(error))


def _crashed(error: BaseException) -> Unreachable:
    _log.error("stream to a reducer failed", error=repr(error))
    return Unreachable(f"the stream to the reducer failed: {error!r}")
