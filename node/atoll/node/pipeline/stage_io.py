"""The trainer's end of the stage socket: passes incoming messages to a callback and sends queued ones.

Two threads read and write, so that decoding and encoding overlap computing. Incoming messages are decoded and passed to
the callback. At most `WAITING_MESSAGES` of them may be unhandled. Then the socket and the stream fill up, and the
neighbour waits. Outgoing messages are encoded only when they are sent.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from atoll.core.errors import AtollError, FlushAborted, PeerMisbehaved
from atoll.node.exchange.codecs import CODECS, Codec
from atoll.node.pipeline.message_codec import LinkFormat, pack, read_header, unpack
from atoll.node.pipeline.messages import Message
from atoll.node.pipeline.stage_socket import (
    BODY_BYTES,
    PREFIX,
    WINDOW_FRAMES,
    FrameType,
    decode_error,
    encode_error,
    pack_prefix,
)
from atoll.v1 import pipeline_pb2 as pb

WAITING_MESSAGES = 64  # posted but not handled; the credits keep honest neighbours far below


@dataclass(frozen=True)
class IncarnationBegan:
    """A new incarnation of the route began."""

    incarnation: int


@dataclass(frozen=True)
class IncarnationEnded:
    """The incarnation is over. `error` is the reason."""

    incarnation: int
    error: AtollError


@dataclass(frozen=True)
class MessageReceived:
    """A neighbour's message. Its receiver calls `StageIO.message_handled`."""

    incarnation: int
    sender: int
    message: Message


@dataclass(frozen=True)
class MessageInvalid:
    """A neighbour sent bytes that do not decode as a message of this route."""

    incarnation: int
    error: AtollError


RouteEvent = IncarnationBegan | IncarnationEnded | MessageReceived | MessageInvalid
FrameParts = tuple[bytes, bytes | memoryview]


@dataclass
class _Outbox:
    """Messages that wait for one neighbour."""

    messages: deque[Message] = field(default_factory=deque)
    frames: Iterator[FrameParts] | None = None  # remaining frames of the message that is being sent
    window: int = WINDOW_FRAMES  # frames that may still be sent before a `SENT`

    @property
    def can_go(self) -> bool:
        return self.window > 0 and (self.frames is not None or bool(self.messages))


class StageIO:
    """The stage socket in the trainer process, created once. Its threads end with the socket."""

    link_format: LinkFormat | None = None  # of the route; set before the first incarnation begins
    codec: Codec = CODECS["int8"]  # for links without a `CODEC` frame

    def __init__(self, sock: socket.socket, on_event: Callable[[RouteEvent], None]) -> None:
        self._sock, self._on_event = sock, on_event
        self._room = threading.Semaphore(WAITING_MESSAGES)
        self._changed = threading.Condition()
        self._incarnation = 0
        self._outboxes: dict[int, _Outbox] = {}
        self._codes: dict[int, Codec] = {}  # by receiver
        self._breaks: deque[bytes] = deque()
        self._closed = False
        self._incoming: dict[int, tuple[pb.StageMessage, bytearray]] = {}  # incomplete messages, by sender
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"stage-io{work.__name__}", daemon=True).start()

    # --- the session's thread -----------------------------------------------------------------------

    def enter(self, link_format: LinkFormat) -> None:
        """Enter another route: set its format and forget the codecs of the previous links."""
        self.link_format, self._codes = link_format, {}

    def begin(self, incarnation: int) -> None:
        """Begin an incarnation; drop messages of earlier ones."""
        with self._changed:
            self._incarnation, self._outboxes = incarnation, {}

    def send(self, receiver: int, message: Message) -> None:
        """Queue a message. The schedule bounds the number of waiting messages."""
        with self._changed:
            self._outboxes.setdefault(receiver, _Outbox()).messages.append(message)
            self._changed.notify_all()

    def break_off(self, error: AtollError) -> None:
        """End the incarnation on all stages of the route."""
        payload = encode_error(error)
        with self._changed:
            self._outboxes = {}
            self._breaks.append(pack_prefix(FrameType.BREAK, 0, self._incarnation, len(payload)) + payload)
            self._changed.notify_all()

    def message_handled(self) -> None:
        """Note that the receiver has handled one posted message."""
        self._room.release()

    # --- reading ------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            with self._sock, self._sock.makefile("rb") as file:
                while len(start := file.read(PREFIX.size)) == PREFIX.size:
                    frame_type, stage, incarnation, size = PREFIX.unpack(start)
                    payload = file.read(size)
                    if len(payload) < size:
                        break
                    self._handle(FrameType(frame_type), stage, incarnation, payload)
        except OSError:
            pass
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._on_event(IncarnationEnded(self._incarnation, FlushAborted("the daemon closed the stage socket")))

    def _handle(self, frame_type: FrameType, stage: int, incarnation: int, payload: bytes) -> None:
        match frame_type:
            case FrameType.ATTACH:
                self._incoming.clear()
                self._on_event(IncarnationBegan(incarnation))
            case FrameType.DETACH:
                self._on_event(IncarnationEnded(incarnation, decode_error(payload)))
            case FrameType.CODEC:
                self._codes[stage] = CODECS[payload.decode()]
            case FrameType.SENT:
                self._widen(stage, incarnation)
            case FrameType.HEADER | FrameType.BODY:
                try:
                    self._assemble(frame_type, stage, incarnation, payload)
                except PeerMisbehaved as error:
                    self._incoming.pop(stage, None)
                    self._on_event(MessageInvalid(incarnation, error))

    def _widen(self, stage: int, incarnation: int) -> None:
        with self._changed:
            if incarnation == self._incarnation and stage in self._outboxes:
                self._outboxes[stage].window += 1
                self._changed.notify_all()

    def _assemble(self, frame_type: FrameType, sender: int, incarnation: int, payload: bytes) -> None:
        if frame_type is FrameType.HEADER:
            assert self.link_format is not None
            link_format = replace(self.link_format, incarnation=incarnation)
            self._incoming[sender] = read_header(payload, link_format), bytearray()
        elif sender in self._incoming:  # missing if its header was invalid
            self._incoming[sender][1].extend(payload)
        header, body = self._incoming.get(sender, (None, b""))
        if header is not None and len(body) >= header.body_bytes:
            del self._incoming[sender]
            assert self.link_format is not None
            message = unpack(header, body, self.link_format)
            self._room.acquire()
            self._on_event(MessageReceived(incarnation, sender, message))

    # --- writing ------------------------------------------------------------------------------------

    def _write(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._breaks or self._sendable())
                    if self._closed:
                        return
                    frame: FrameParts | None = (self._breaks.popleft(), b"") if self._breaks else None
                    outbox, incarnation = self._sendable(), self._incarnation
                if frame is None and outbox is not None:
                    frame = self._next_frame(*outbox, incarnation)
                for piece in frame or ():
                    self._sock.sendall(piece)
        except OSError:  # the daemon has ended; the control link_format ends this process
            pass

    def _sendable(self) -> tuple[int, _Outbox] | None:
        return next(((receiver, outbox) for receiver, outbox in self._outboxes.items() if outbox.can_go), None)

    def _next_frame(self, receiver: int, outbox: _Outbox, incarnation: int) -> FrameParts | None:
        """Next frame of the outbox's message; None at its end."""
        if outbox.frames is None:
            outbox.frames = self._frames(receiver, incarnation, outbox.messages.popleft())
        frame = next(outbox.frames, None)
        with self._changed:
            if frame is None:
                outbox.frames = None
            else:
                outbox.window -= 1
        return frame

    def _frames(self, receiver: int, incarnation: int, message: Message) -> Iterator[FrameParts]:
        assert self.link_format is not None
        codec = self._codes.get(receiver, self.codec)
        header, body = pack(message, replace(self.link_format, incarnation=incarnation), codec)
        data = header.SerializeToString()
        yield pack_prefix(FrameType.HEADER, receiver, incarnation, len(data)), data
        for start in range(0, len(body), BODY_BYTES):
            part = memoryview(body)[start : start + BODY_BYTES]
            yield pack_prefix(FrameType.BODY, receiver, incarnation, len(part)), part
