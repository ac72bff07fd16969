"""Refusals: errors that cross a stream, and the supervision boundary around every handler.

An `AtollError` leaves as a `REFUSAL` frame and arrives as the same class. The exceptions are errors about the peer's
own processes, files and settings, which arrive as `Unreachable`.

`run_handler` runs every handler, on any network. It sends an `AtollError` to the peer by name. It logs any other
exception and sends it as an internal error. The stream ends in both cases. Text from a peer is shown to people only
after its length is bounded and its unprintable characters are replaced.
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
from atoll.v1 import dataplane_pb2 as dp

MAX_SENTENCE_CHARACTERS = 500
REFUSAL_LINGER = timedelta(seconds=1)  # time for a refused peer to read the reason and to close

_PEER_LOCAL_ERRORS = (ChildDied, StateError, ConfigError, UsageError, PortInUse)

_log = log.get("swarm")


def refusal_header(error: AtollError) -> bytes:
    """Build the header of the `REFUSAL` frame that carries `error` to a peer."""
    sentence = str(error)[:MAX_SENTENCE_CHARACTERS]
    return dp.Refusal(reason=error.reason, message=sentence).SerializeToString()


def error_from_refusal(frame: Frame, peer_id: str) -> AtollError:
    """Build the error that a `REFUSAL` frame from `peer_id` carries; `FrameInvalid` if it does not parse.

    An error about the peer's own processes, files or settings becomes `Unreachable`: here it only means that the peer
    cannot serve.
    """
    try:
        refusal = dp.Refusal.FromString(frame.header)
    except DecodeError:
        return FrameInvalid(f"peer {peer_id} sent a refusal that does not parse")
    kind = error_class(refusal.reason)
    if issubclass(kind, _PEER_LOCAL_ERRORS):
        kind = Unreachable
    return kind(f"peer {peer_id}: {printable(refusal.message)}")


def printable(text: str) -> str:
    """Make a peer's text safe to show: one line, bounded length, no control characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_SENTENCE_CHARACTERS])


async def raise_if_refusal(stream: Stream, frame: Frame) -> Frame:
    """Return the frame, or end the stream and raise the error that a refusal carries."""
    if frame.kind is not FrameKind.REFUSAL:
        return frame
    await stream.close()
    raise error_from_refusal(frame, stream.peer_id)


async def run_handler(protocol: str, stream: Stream, handler: Handler, on_crash: Callable[[], None]) -> None:
    """Run one handler to its end. On any error, send a refusal to the peer; always close the stream."""
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
    """Send the refusal, then read and discard: closing a socket with unread data would lose the refusal."""
    with suppress(AtollError, TimeoutError):
        async with asyncio.timeout(REFUSAL_LINGER.total_seconds()):
            await stream.send(FrameKind.REFUSAL, refusal_header(error))
            while True:
                await stream.receive(REFUSAL_LINGER)
