"""GatedP2P: hivemind's `P2P` with the gate in front; the DHT runs on it.

Unary calls (DHT RPCs only) are refused before they are parsed unless the gate has admitted the caller. Requests and
responses are checked before hivemind deserialises them. Outgoing calls say hello first, and again if the peer has lost
its table. Every call has a deadline, because p2pd never answers a call whose response is too long. hivemind's own
stream handlers cannot be registered: `stream_acceptor.py` takes all incoming streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from google.protobuf.message import DecodeError, Message
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.utils.multiaddr import Multiaddr

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import (
    DeadlineExceeded,
    HelloRequired,
    MessageTooLarge,
    NotPermitted,
    PeerMisbehaved,
    Unreachable,
)
from atoll.node.direct.dial_policy import DialPolicy
from atoll.node.swarm.addresses import AddressBook
from atoll.node.swarm.dht_messages import check_dht_message
from atoll.node.swarm.hello import Introductions
from atoll.node.swarm.name_resolution import NameResolution
from atoll.node.swarm.p2pd import P2pdConfig
from atoll.node.swarm.p2pd_control import CONTROL_TIMEOUT, P2pdControl
from atoll.node.wire.gate import Gate
from atoll.node.wire.traffic import Traffic

UNARY_TIMEOUT = timedelta(seconds=10)
MAX_UNARY_BYTES = 1024 * 1024  # four pages of some 340 records each; p2pd's own 4 MiB would parse to 100 MiB and more
_TOO_LARGE_LOG_SECONDS = 60.0  # between two log lines about too large messages
DHT_TRAFFIC = "dht"  # the name under which unary bytes are counted

_log = log.get("dht")

Reply = TypeVar("Reply", bound=Message)
UnaryHandler = Callable[[Any, P2PContext], Awaitable[Message]]


class GatedP2P(P2P):  # type: ignore[misc]
    """Dials peers through the address book and exchanges unary messages with members only."""

    _log_too_large_from: float  # monotonic
    control: P2pdControl
    introductions: Introductions
    traffic: Traffic

    @classmethod
    async def attach(cls, config: P2pdConfig, gate: Gate, dial: DialPolicy, clock: Clock) -> GatedP2P:
        """Connect to a running p2pd as `P2P.replicate` does, with our own control client. Raises `Unreachable`."""
        self = cls()
        self._alive = True
        self._daemon_listen_maddr = Multiaddr(f"/unix{config.control_socket}")
        self._client_listen_maddr = Multiaddr(f"/unix{config.stream_socket}")
        self._client = await P2pdControl.attach(config.control_socket, config.stream_socket)
        self.control = self._client.control
        self.gate = gate
        self.book = AddressBook(clock, dial)
        self._names = NameResolution(dial)
        self.traffic = Traffic(clock)
        self.introductions = Introductions(
            gate, self.open_socket, self.traffic, clock, is_on_record=lambda peer: bool(self.book.known(peer))
        )
        self._clock = clock
        self._log_too_large_from = 0.0
        try:
            await self._ping_daemon()
        except BaseException:
            await self.shutdown()
            raise
        return self

    def __del__(self) -> None:
        """Do nothing: hivemind's version removes a socket path that may belong to another host at that time."""

    async def detach(self) -> None:
        """Close the connections to p2pd."""
        await self.introductions.close()
        self._names.close()
        await self.shutdown()
        await self.control.drain_tasks()

    @property
    def listen_multiaddrs(self) -> tuple[str, ...]:
        """The multiaddrs that p2pd listens on or announces, without a peer id."""
        return tuple(str(address) for address in self._visible_maddrs)

    async def refresh_multiaddrs(self) -> None:
        """Ask p2pd for its addresses again, since relays and port mappings change. Raises `Unreachable`."""
        _, self._visible_maddrs = await self.control.identify()

    async def open_socket(
        self, peer_id: str, protocol: str, timeout: timedelta
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a raw stream without the gate; dial by the address book. Raises `Unreachable`, `DeadlineExceeded`."""
        peer = PeerID.from_base58(peer_id)
        dialled = () if self.gate.is_admitted(peer_id) else self.book.known(peer_id)
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                try:
                    if dialled:
                        await self._connect(peer, dialled, timeout)
                    return await self.control.open_stream(peer, protocol, timeout)
                except Unreachable:
                    found = await self.book.find(peer_id)
                    if not found or found == dialled:
                        raise
                await self._connect(peer, found, timeout)
                return await self.control.open_stream(peer, protocol, timeout)
        except TimeoutError as error:
            raise DeadlineExceeded(f"peer {peer_id} did not answer within {timeout}") from error
        except Unreachable as error:
            raise Unreachable(f"peer {peer_id} does not answer: {error}") from error

    async def _connect(self, peer: PeerID, addresses: tuple[Multiaddr, ...], timeout: timedelta) -> None:
        """Let p2pd dial a peer at these addresses, names resolved. Raises `Unreachable`, `DeadlineExceeded`."""
        resolved = await self._names.resolve(peer.to_base58(), addresses)
        if addresses and not resolved:
            raise Unreachable("its host names do not resolve to addresses that this node may dial")
        await self.control.connect(peer, resolved, timeout)

    async def _add_protobuf_unary_handler(
        self, handle_name: str, handler: UnaryHandler, input_protobuf_type: type[Message], balanced: bool = False
    ) -> None:
        async def serve(request: bytes, remote_id: PeerID) -> bytes:
            peer_id: str = remote_id.to_base58()
            self.gate.require(peer_id)
            self.traffic.received[DHT_TRAFFIC] += len(request)
            message = self._parse(request, input_protobuf_type, peer_id)
            context = P2PContext(handle_name=handle_name, local_id=self.peer_id, remote_id=remote_id)
            async with asyncio.timeout(UNARY_TIMEOUT.total_seconds()):
                response = await handler(message, context)
            reply = response.SerializeToString()
            if len(reply) > MAX_UNARY_BYTES:
                raise self._too_large("answer", handle_name, len(reply))
            self.traffic.sent[DHT_TRAFFIC] += len(reply)
            return reply

        await self._client.add_unary_handler(handle_name, serve, balanced=balanced)

    async def _call_unary_protobuf_handler(
        self, peer_id: PeerID, handle_name: str, input: Message, output_protobuf_type: type[Reply]
    ) -> Reply:
        name: str = peer_id.to_base58()
        request = input.SerializeToString()
        if len(request) > MAX_UNARY_BYTES:
            raise self._too_large("request", handle_name, len(request))
        try:
            async with asyncio.timeout(UNARY_TIMEOUT.total_seconds()):
                await self.introductions.ensure_admitted(name)
                response = await self._call_introduced(peer_id, handle_name, request)
                self.traffic.received[DHT_TRAFFIC] += len(response)
        except TimeoutError as error:
            raise DeadlineExceeded(f"peer {name} did not answer {handle_name} within {UNARY_TIMEOUT}") from error
        return self._parse(response, output_protobuf_type, name)

    async def _call_introduced(self, peer_id: PeerID, handle_name: str, request: bytes) -> bytes:
        self.traffic.sent[DHT_TRAFFIC] += len(request)
        try:
            return await self.control.call_unary_handler(peer_id, handle_name, request)
        except P2PHandlerError as error:
            if not str(error).startswith(HelloRequired.__name__):
                raise
            await self.introductions.say_hello(peer_id.to_base58())
        except P2PDaemonError:
            # p2pd could not dial: it may have forgotten the peer's addresses.
            await self._connect(peer_id, await self.book.find(peer_id.to_base58()), CONTROL_TIMEOUT)
        return await self.control.call_unary_handler(peer_id, handle_name, request)

    def _too_large(self, what: str, handle_name: str, size: int) -> MessageTooLarge:
        """Return the error for a message that this node cannot send.

        It is logged here, because hivemind does not report it.
        """
        error = MessageTooLarge(f"the {what} of {handle_name} has {size} bytes; the cap is {MAX_UNARY_BYTES}")
        if (now := self._clock.monotonic()) >= self._log_too_large_from:  # a peer may ask again and again
            self._log_too_large_from = now + _TOO_LARGE_LOG_SECONDS
            _log.error("DHT message cannot be sent", reason=str(error))
        return error

    def _parse(self, data: bytes, kind: type[Reply], peer_id: str) -> Reply:
        if len(data) > MAX_UNARY_BYTES:
            raise PeerMisbehaved(f"peer {peer_id} sent {len(data)} bytes; the cap is {MAX_UNARY_BYTES}")
        try:
            message = kind.FromString(data)
        except DecodeError as error:
            raise PeerMisbehaved(f"peer {peer_id} sent a {kind.__name__} that does not parse") from error
        check_dht_message(message, peer_id, self._clock.unix())
        return message

    async def add_binary_stream_handler(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise NotPermitted("GatedP2P has no stream handlers; register them with StreamAcceptor.handle")

    async def call_binary_stream_handler(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise NotPermitted("GatedP2P opens no streams for hivemind; use SwarmHost.open")
