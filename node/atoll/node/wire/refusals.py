"""Errors across a stream: the tree goes out as a `Refusal` frame and comes back as the same class,
but for what is wrong with the peer itself.

Also the supervision boundary around every handler, whichever network runs it: an error of ours is told to
the peer by name, anything else is logged and told as an internal error, and the stream ends either way.
What a peer wrote is shown to people only after unprintable characters are gone and the length is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from google.protobuf.message import DecodeError

from atoll.core import log
from atoll.core.errors import (
    AtollError,
    ChildDied,
    ConfigError,
    FrameInvalid,
    PortInUse,
    StateError,
    Unreachable,
    UsageError,
    error_class,
)
from atoll.core.frames import Frame, FrameKind
from atoll.node.wire.transport import Handler, Stream
from atoll.v1 import dataplane_pb2 as wire

MAX_SENTENCE_CHARACTERS = 500
REFUSAL_LINGER = timedelta(seconds=1)  # for a refused peer to read why and close

_PEER_LOCAL_ERRORS = (ChildDied, StateError, ConfigError, UsageError, PortInUse)

_log = log.get("swarm")


def refusal_header(error: AtollError) -> bytes:
    """The header of the `REFUSAL` frame that tells `error` to a peer."""
    sentence = str(error)[:MAX_SENTENCE_CHARACTERS]
    return wire.Refusal(reason=error.reason, message=sentence).SerializeToString()


def error_from_refusal(frame: Frame, peer_id: str) -> AtollError:
    """The error that a `REFUSAL` frame from `peer_id` stands for; `FrameInvalid` if it does not parse.

    What is wrong with a peer's own processes, files and settings is nothing of ours: such a peer is out of reach.
    """
    try:
        refusal = wire.Refusal.FromString(frame.header)
    except DecodeError:
        return FrameInvalid(f"peer {peer_id} refused with a message that does not parse")
    kind = error_class(refusal.reason)
    if issubclass(kind, _PEER_LOCAL_ERRORS):
        kind = Unreachable
    return kind(f"peer {peer_id}: {printable(refusal.message)}")


def printable(text: str) -> str:
    """A peer's words, safe to show: one line, bounded, no control characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_SENTENCE_CHARACTERS])


async def raise_if_refusal(stream: Stream, frame: Frame) -> Frame:
    """Pass a frame on, or end the stream and raise what a refusal says."""
    if frame.kind is not FrameKind.REFUSAL:
        return frame
    await stream.close()
    raise error_from_refusal(frame, stream.peer_id)


async def run_handler(protocol: str, stream: Stream, handler: Handler, on_crash: Callable[[], None]) -> None:
    """Run one handler to its end; whatever happens, the peer is told and the stream is closed."""
    try:
        await handler(stream)
    except Unreachable as error:
        _log.debug("stream ended", protocol=protocol, peer=stream.peer_id, error=str(error))
    except AtollError as error:
        _log.info("refused", protocol=protocol, peer=stream.peer_id, reason=error.reason, error=str(error))
        await _tell(stream, error)
    except Exception:
        # Supervision boundary: one broken handler must not take the node down.
        on_crash()
        _log.exception("handler crashed", protocol=protocol, peer=stream.peer_id)
        await _tell(stream, AtollError("internal error"))
    finally:
        await stream.close()


async def _tell(stream: Stream, error: AtollError) -> None:
    """Send the refusal, then discard what still comes: closing on unread data would lose it on the way."""
    with suppress(AtollError, TimeoutError):
        async with asyncio.timeout(REFUSAL_LINGER.total_seconds()):
            await stream.send(FrameKind.REFUSAL, refusal_header(error))
            while True:
                await stream.receive(REFUSAL_LINGER)
