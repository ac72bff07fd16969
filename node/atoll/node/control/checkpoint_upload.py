"""Upload of a checkpoint through the coordinator, for an operator who asked for it.

Heartbeat answers repeat an upload order until the node carries it out. The node opens all files first, so a checkpoint
that is deleted during the upload still arrives whole. If the checkpoint is missing or damaged, the node refuses with a
reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import grpc
from google.protobuf.message import DecodeError

from atoll.core import log
from atoll.core.errors import AtollError, DeadlineExceeded
from atoll.core.grpc_errors import from_rpc_error
from atoll.node.state.checkpoint_files import MANIFEST, SUMMED, SUMS, read_sums
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

CHUNK_BYTES = 1 << 20
MESSAGE_TIMEOUT = timedelta(seconds=90)  # the coordinator's own timeout is 60 s
MAX_CONCURRENT_UPLOADS = 2
_TICKETS_REMEMBERED = 256

if TYPE_CHECKING:  # these exist, or are generic, only in type stubs
    from atoll.v1.membership_pb2_grpc import MembershipServiceAsyncStub

    Call = grpc.aio.StreamUnaryCall[mb.CheckpointUpload, mb.CheckpointUploadResponse]

_log = log.get("upload")


class CheckpointUploads:
    """Carries out each upload order once. `send` uploads one checkpoint and logs its own failures."""

    def __init__(self, send: Callable[[mb.UploadOrder], Coroutine[Any, Any, None]]) -> None:
        self._send = send
        self._seen: deque[bytes] = deque(maxlen=_TICKETS_REMEMBERED)
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_UPLOADS)

    def take(self, orders: Iterable[mb.UploadOrder]) -> None:
        """Start the uploads of those orders that are new."""
        for order in orders:
            if order.ticket not in self._seen:
                self._seen.append(order.ticket)
                task = asyncio.create_task(self._send_when_free(order))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel the uploads under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send_when_free(self, order: mb.UploadOrder) -> None:
        async with self._slots:
            await self._send(order)


async def upload(stub: MembershipServiceAsyncStub, order: mb.UploadOrder, directory: Path) -> None:
    """Send the checkpoint in `directory`, or refuse.

    Failures are only logged: the coordinator reports them to the operator.
    """
    call = stub.UploadCheckpoint()  # type: ignore[call-arg]  # written to below
    try:
        await _send_or_refuse(call, order, directory)
        async with asyncio.timeout(MESSAGE_TIMEOUT.total_seconds()):
            await call
    except asyncio.InvalidStateError:  # the call ended during a write; `details` has the reason
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call
        _log.warning("checkpoint not sent", round=order.round, reason=await call.details())
    except grpc.aio.AioRpcError as error:
        _log.warning("checkpoint not sent", round=order.round, reason=str(from_rpc_error(error, "the coordinator")))
    except (AtollError, OSError, TimeoutError) as error:
        _log.warning("checkpoint not sent", round=order.round, reason=str(error))
    else:
        _log.info("checkpoint sent", round=order.round)
    finally:
        call.cancel()


async def _send_or_refuse(call: Call, order: mb.UploadOrder, directory: Path) -> None:
    opening = mb.CheckpointOpening(ticket=order.ticket, round=order.round)
    with ExitStack() as exit_stack:
        try:
            manifest, files = await asyncio.to_thread(_open, directory, exit_stack)
        except (AtollError, OSError, DecodeError) as error:
            _log.warning("checkpoint refused", round=order.round, reason=str(error))
            opening.refusal = f"the checkpoint of round {order.round} is missing or damaged on this node"
            await _write(call, mb.CheckpointUpload(opening=opening))
            await call.done_writing()
            return
        opening.manifest.CopyFrom(manifest)
        opening.files.extend(mb.CheckpointFile(name=file.name, bytes=file.size, sha256=file.sha256) for file in files)
        await _write(call, mb.CheckpointUpload(opening=opening))
        for file in files:
            left = file.size
            while left:
                piece = await asyncio.to_thread(file.source.read, min(left, CHUNK_BYTES))
                if not piece:
                    raise OSError(f"{file.name} is {left} bytes shorter than {file.size}")
                left -= len(piece)
                await _write(call, mb.CheckpointUpload(data=piece))
    await call.done_writing()


async def _write(call: Call, message: mb.CheckpointUpload) -> None:
    try:
        async with asyncio.timeout(MESSAGE_TIMEOUT.total_seconds()):
            await call.write(message)
    except TimeoutError as error:
        seconds = MESSAGE_TIMEOUT.total_seconds()
        raise DeadlineExceeded(f"the coordinator accepted no part of the checkpoint for {seconds:.0f} s") from error


@dataclass(frozen=True)
class _File:
    name: str
    size: int
    sha256: bytes
    source: BinaryIO


def _open(directory: Path, exit_stack: ExitStack) -> tuple[manifest_pb2.CommittedManifest, list[_File]]:
    """Open all files and read the manifest. Raises `CheckpointCorrupt`, `OSError`, `DecodeError`."""
    sums = {name: bytes.fromhex(digest) for name, digest in read_sums(directory).items()}
    sums[SUMS] = hashlib.sha256((directory / SUMS).read_bytes()).digest()
    files = [
        _File(
            name, (directory / name).stat().st_size, sums[name], exit_stack.enter_context((directory / name).open("rb"))
        )
        for name in (*SUMMED, SUMS)
    ]
    return manifest_pb2.CommittedManifest.FromString((directory / MANIFEST).read_bytes()), files
