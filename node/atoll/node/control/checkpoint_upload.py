"""Sending a checkpoint to the operator who asked for it, through the coordinator.

An order comes down the heartbeat stream, again and again until it is answered. The files are opened before anything
is said, so a checkpoint that is removed meanwhile still arrives whole; one that is not here is refused in a sentence.
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
from atoll.node.state.checkpoint import MANIFEST, SUMMED, SUMS, read_sums
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

CHUNK_BYTES = 1 << 20
MESSAGE_TIMEOUT = timedelta(seconds=90)  # the coordinator gives up after 60
MAX_CONCURRENT_UPLOADS = 2
_REMEMBERED = 256  # tickets

if TYPE_CHECKING:  # exist, or are generic, only in stubs
    from atoll.v1.membership_pb2_grpc import MembershipServiceAsyncStub

    Call = grpc.aio.StreamUnaryCall[mb.CheckpointUpload, mb.CheckpointUploadResponse]

_log = log.get("upload")


class CheckpointUploads:
    """Answers each order once. `send` carries one out; it logs its own failures."""

    def __init__(self, send: Callable[[mb.UploadOrder], Coroutine[Any, Any, None]]) -> None:
        self._send = send
        self._seen: deque[bytes] = deque(maxlen=_REMEMBERED)
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_UPLOADS)

    def take(self, orders: Iterable[mb.UploadOrder]) -> None:
        """Orders from a heartbeat's answer."""
        for order in orders:
            if order.ticket not in self._seen:
                self._seen.append(order.ticket)
                task = asyncio.create_task(self._send_when_free(order))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Break off what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send_when_free(self, order: mb.UploadOrder) -> None:
        async with self._slots:
            await self._send(order)


async def upload(stub: MembershipServiceAsyncStub, order: mb.UploadOrder, directory: Path) -> None:
    """Send the checkpoint in `directory`, or refuse. What fails is logged: it is the operator who is told."""
    call = stub.UploadCheckpoint()  # type: ignore[call-arg]  # written to below
    try:
        await _answer(call, order, directory)
        async with asyncio.timeout(MESSAGE_TIMEOUT.total_seconds()):
            await call
    except asyncio.InvalidStateError:  # the call ended while we wrote; why, it says itself
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


async def _answer(call: Call, order: mb.UploadOrder, directory: Path) -> None:
    opening = mb.CheckpointOpening(ticket=order.ticket, round=order.round)
    with ExitStack() as exit_stack:
        try:
            manifest, files = await asyncio.to_thread(_open, directory, exit_stack)
        except (AtollError, OSError, DecodeError) as error:
            _log.warning("checkpoint refused", round=order.round, reason=str(error))
            opening.refusal = f"the checkpoint of round {order.round} is not held here, or not whole"
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
                    raise OSError(f"{file.name} ended too early")
                left -= len(piece)
                await _write(call, mb.CheckpointUpload(data=piece))
    await call.done_writing()


async def _write(call: Call, message: mb.CheckpointUpload) -> None:
    try:
        async with asyncio.timeout(MESSAGE_TIMEOUT.total_seconds()):
            await call.write(message)
    except TimeoutError as error:
        raise DeadlineExceeded("the coordinator does not take the checkpoint") from error


@dataclass(frozen=True)
class _File:
    name: str
    size: int
    sha256: bytes
    source: BinaryIO


def _open(directory: Path, exit_stack: ExitStack) -> tuple[manifest_pb2.CommittedManifest, list[_File]]:
    """The manifest and all files, open. Raises `CheckpointCorrupt`, `OSError`, `DecodeError`."""
    sums = {name: bytes.fromhex(digest) for name, digest in read_sums(directory).items()}
    sums[SUMS] = hashlib.sha256((directory / SUMS).read_bytes()).digest()
    files = [
        _File(
            name, (directory / name).stat().st_size, sums[name], exit_stack.enter_context((directory / name).open("rb"))
        )
        for name in (*SUMMED, SUMS)
    ]
    return manifest_pb2.CommittedManifest.FromString((directory / MANIFEST).read_bytes()), files
