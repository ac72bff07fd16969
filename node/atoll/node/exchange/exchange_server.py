"""Passes the streams of other members to the exchange of their round."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from google.protobuf.message import DecodeError

from atoll.core.errors import PeerMisbehaved, RoundAbandoned
from atoll.core.round_id import RoundId
from atoll.node.exchange.allreduce import Exchange
from atoll.node.exchange.exchange_streams import PROTOCOL
from atoll.node.wire.peer_slots import PeerSlots
from atoll.node.wire.transport import Network, Stream
from atoll.v1 import dataplane_pb2 as dp

_MAX_EARLY_STREAMS_PER_PEER = 4  # for rounds that this node has not started


class ExchangeServer:
    """Passes incoming averaging streams to their exchange; a stream may arrive before its exchange begins."""

    def __init__(self, network: Network, timeout: timedelta) -> None:
        self._timeout = timeout
        self._exchanges: dict[RoundId, Exchange] = {}
        self._early = PeerSlots[str](_MAX_EARLY_STREAMS_PER_PEER)  # streams whose exchange has not begun here
        self._begun = asyncio.Event()  # replaced by every `begin`
        network.handle(PROTOCOL, self._handle)

    def begin(self, exchange: Exchange) -> None:
        """Pass streams for this round to `exchange` from now on."""
        self._exchanges[exchange.round_id] = exchange
        begun, self._begun = self._begun, asyncio.Event()
        begun.set()

    def end(self, round_id: RoundId) -> None:
        """End the round's exchange and its streams; later streams for it are refused."""
        exchange = self._exchanges.pop(round_id, None)
        if exchange is not None:
            exchange.end()

    async def _handle(self, stream: Stream) -> None:
        frame = await stream.receive(self._timeout)
        try:
            header = dp.ExchangeHeader.FromString(frame.header)
        except DecodeError as error:
            raise PeerMisbehaved("an averaging stream must begin with an ExchangeHeader") from error
        round_id = RoundId.from_proto(header.round)
        if header.repair or header.audit_seed or header.contribution:
            if round_id not in self._exchanges:
                raise RoundAbandoned(f"round {round_id} is not kept on this node, so it has nothing of it to send")
            exchange = self._exchanges[round_id]
            if header.contribution:
                await exchange.serve_contribution(stream)
            elif header.audit_seed:
                await exchange.serve_audit(stream, header.audit_seed)
            else:
                await exchange.serve_repair(stream, header.repair)
        else:
            await (await self._wait_for_exchange(stream.peer_id, round_id)).serve(stream)

    async def _wait_for_exchange(self, peer: str, round_id: RoundId) -> Exchange:
        """Wait for the exchange of that round to begin here: Start may reach other members first."""
        with self._early.hold(peer, "streams for rounds that have not started here"):
            try:
                async with asyncio.timeout(self._timeout.total_seconds()):
                    while round_id not in self._exchanges:
                        await self._begun.wait()
            except TimeoutError as error:
                raise RoundAbandoned(f"round {round_id} is not running on this node") from error
        return self._exchanges[round_id]
