"""The trainer's end of the stage_socket: what is on its way to a slow neighbour is bounded, and nobody waits for it."""

from __future__ import annotations

import asyncio
import queue
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import torch

from atoll.core.errors import PeerMisbehaved
from atoll.node.exchange.codecs import CODECS
from atoll.node.pipeline.message_codec import LinkFormat, pack
from atoll.node.pipeline.messages import Begin, Gradient
from atoll.node.pipeline.stage_io import (
    IncarnationBegan,
    IncarnationEnded,
    MessageInvalid,
    MessageReceived,
    RouteEvent,
    StageIO,
)
from atoll.node.pipeline.stage_socket import (
    PREFIX,
    WINDOW_FRAMES,
    FrameType,
    SocketFrame,
    StageSocket,
    decode_error,
    pack_prefix,
)
from atoll.v1 import pipeline_pb2 as pb

LINK_FORMAT = LinkFormat(1, 0, samples=2, tokens=4, dimension=8, vocabulary=16)


class Pair:
    """The end under test, and the swarm process's side as plain bytes."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.events: queue.SimpleQueue[RouteEvent] = queue.SimpleQueue()
        self.end = StageIO(far, self.events.put)
        self.end.link_format, self.end.codec = LINK_FORMAT, CODECS["fp32"]
        self.near = near
        near.settimeout(60)

    def send(self, frame_type: FrameType, stage: int, incarnation: int, payload: bytes = b"") -> None:
        self.near.sendall(pack_prefix(frame_type, stage, incarnation, len(payload)) + payload)

    def receive(self) -> SocketFrame:
        frame_type, stage, incarnation, size = PREFIX.unpack(self._exactly(PREFIX.size))
        return SocketFrame(FrameType(frame_type), stage, incarnation, self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += self.near.recv(size - len(data))
        return data

    def nothing_comes(self) -> bool:
        self.near.settimeout(0.05)
        try:
            return not self.near.recv(1)
        except TimeoutError:
            return True
        finally:
            self.near.settimeout(60)


@contextmanager
def joined() -> Iterator[Pair]:
    near, far = socket.socketpair()
    pair = Pair(near, far)
    yield pair
    near.close()
    while not isinstance(pair.events.get(timeout=60), IncarnationEnded):
        pass


def test_a_neighbour_that_takes_nothing_has_two_frames_and_holds_nobody_up() -> None:
    with joined() as pair:
        pair.end.begin(3)
        for number in range(1, 9):
            pair.end.send(1, Begin(number, 1))
        for _ in range(WINDOW_FRAMES):
            assert pair.receive().stage == 1
        pair.end.send(2, Begin(1, 1))
        assert pair.receive().stage == 2
        assert pair.nothing_comes()
        pair.send(FrameType.SENT, 1, 2)  # of another incarnation
        assert pair.nothing_comes()
        pair.send(FrameType.SENT, 1, 3)
        frame = pair.receive()
        assert pb.StageMessage.FromString(frame.payload).flush == WINDOW_FRAMES + 1
        pair.end.begin(4)  # what waited is of no use any more
        pair.end.send(1, Begin(1, 1))
        assert pair.receive().incarnation == 4
        assert pair.nothing_comes()


def test_a_link_is_coded_as_the_swarm_process_says_until_the_stage_has_another_place() -> None:
    def codec_to(receiver: int) -> int:
        pair.end.send(receiver, Gradient(1, 0, torch.ones(2, 4, 8)))
        header = pb.StageMessage.FromString(pair.receive().payload)
        assert len(pair.receive().payload) == header.body_bytes
        for _ in range(WINDOW_FRAMES):
            pair.send(FrameType.SENT, receiver, 3)
        return header.gradient.codec

    with joined() as pair:
        pair.end.begin(3)
        pair.send(FrameType.CODEC, 1, 0, b"bf16")
        pair.send(FrameType.ATTACH, 0, 3)
        assert pair.events.get(timeout=60) == IncarnationBegan(3)  # so what was said before it was heard
        assert (codec_to(1), codec_to(2)) == (CODECS["bf16"].number, CODECS["fp32"].number)
        pair.end.enter(LINK_FORMAT)
        assert codec_to(1) == CODECS["fp32"].number


def test_what_comes_from_several_neighbours_at_once_is_put_together() -> None:
    message = Gradient(1, 0, torch.arange(64.0).view(2, 4, 8))
    header, body = pack(message, LinkFormat(1, 0, 2, 4, 8, 16, incarnation=3))
    with joined() as pair:
        pair.send(FrameType.ATTACH, 0, 3)
        for frame_type, payload in (
            (FrameType.HEADER, header.SerializeToString()),
            (FrameType.BODY, body[:100]),
            (FrameType.BODY, body[100:]),
        ):
            for sender in (1, 2):
                pair.send(frame_type, sender, 3, payload)
        assert pair.events.get(timeout=60) == IncarnationBegan(3)
        for sender in (1, 2):
            event = pair.events.get(timeout=60)
            assert isinstance(event, MessageReceived)
            assert event.sender == sender
            assert isinstance(event.message, Gradient)
            assert torch.equal(event.message.gradient_BTD, message.gradient_BTD)


def test_bytes_that_are_no_message_are_an_event_and_the_next_one_arrives() -> None:
    link_format = LinkFormat(1, 0, 2, 4, 8, 16, incarnation=3)
    header, body = pack(Gradient(1, 0, torch.zeros(2, 4, 8)), link_format)
    with joined() as pair:
        pair.send(FrameType.HEADER, 1, 3, b"\xff\xff")
        pair.send(FrameType.BODY, 1, 3, body)  # of that
        pair.send(FrameType.HEADER, 1, 3, header.SerializeToString())
        pair.send(FrameType.BODY, 1, 3, b"\xff" * len(body))
        pair.send(FrameType.HEADER, 1, 3, pack(Begin(1, 2), link_format)[0].SerializeToString())
        for _ in range(2):
            event = pair.events.get(timeout=60)
            assert isinstance(event, MessageInvalid)
            assert isinstance(event.error, PeerMisbehaved)
        assert pair.events.get(timeout=60) == MessageReceived(3, 1, Begin(1, 2))


def test_a_break_overtakes_what_waits() -> None:
    with joined() as pair:
        pair.end.begin(3)
        for number in range(1, 9):
            pair.end.send(1, Begin(number, 1))
        for _ in range(WINDOW_FRAMES):
            pair.receive()
        pair.end.break_off(PeerMisbehaved("it sent nonsense"))
        frame = pair.receive()
        assert (frame.type, frame.incarnation) == (FrameType.BREAK, 3)
        error = decode_error(frame.payload)
        assert isinstance(error, PeerMisbehaved)
        assert str(error) == "it sent nonsense"


async def test_nothing_of_no_bytes_is_given_to_the_transport() -> None:
    """asyncio of Python 3.12 and 3.13 tries to send that for ever."""
    given: list[bytes] = []

    class Writer:
        transport = SimpleNamespace(set_write_buffer_limits=lambda high: None)

        def write(self, data: bytes) -> None:
            given.append(bytes(data))

        def writelines(self, lines: Iterable[bytes]) -> None:
            given.extend(map(bytes, lines))

    stage_socket = StageSocket(asyncio.StreamReader(), cast("asyncio.StreamWriter", Writer()))
    stage_socket.send_nowait(FrameType.SENT, 1, 1)
    stage_socket.send_nowait(FrameType.BODY, 1, 1, b"abc")
    assert b"".join(given) == pack_prefix(FrameType.SENT, 1, 1, 0) + pack_prefix(FrameType.BODY, 1, 1, 3) + b"abc"
    assert all(given)
