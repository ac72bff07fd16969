"""Event files that TensorBoard reads, written without its library: TFRecords of `Event` messages with scalars.

A record is its length, a checksum of that, the message, and a checksum of it. Checksums are CRC-32C, masked. Messages
are encoded by hand, because four fields are all that scalars need (tensorflow/core/util/event.proto).
"""

from __future__ import annotations

import re
import shutil
import struct
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from atoll.core.errors import ConfigError, PeerMisbehaved

FILE_NAME = "events.out.tfevents.atoll"
_NAME = re.compile(r"[A-Za-z0-9-][A-Za-z0-9._-]{0,127}")  # a safe name of a directory
_FLUSH_BYTES = 4 << 20
_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
_MASK_DELTA = 0xA282EAD8


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = tuple(map(_table_entry, range(256)))


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """One TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + _masked(crc32c(length)) + data + _masked(crc32c(data))


def version_event(unix_seconds: float) -> bytes:
    """The event with which every file begins."""
    return _wall_time(unix_seconds) + _bytes_field(3, b"brain.Event:2")


def scalars_event(unix_seconds: float, step: int, values: Mapping[str, float]) -> bytes:
    """Values of one step by their tags."""
    summary = b"".join(
        _bytes_field(1, _bytes_field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
        for tag, value in values.items()
    )
    return _wall_time(unix_seconds) + b"\x10" + _varint(step) + _bytes_field(5, summary)


class EventFiles:
    """Event files that are being written, one for each directory. Few bytes are in memory, and no file stays open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pending: dict[str, list[bytes]] = defaultdict(list)
        self._pending_bytes = 0
        self.names: set[str] = set()  # of the directories, relative

    def add(self, name: str, unix_seconds: float, step: int, values: Mapping[str, float]) -> None:
        """Add values to the file of the directory `name`, whose parts are checked names."""
        if name not in self.names:
            self.names.add(name)
            self._pending[name].append(record(version_event(unix_seconds)))
        self._pending[name].append(record(scalars_event(unix_seconds, step, values)))
        self._pending_bytes += len(self._pending[name][-1])
        if self._pending_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered bytes."""
        for name, records in self._pending.items():
            path = self._directory / name / FILE_NAME
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.writelines(records)
        self._pending.clear()
        self._pending_bytes = 0


@contextmanager
def event_files(directory: Path) -> Iterator[EventFiles]:
    """Yield files that at the end replace, all together, those of an earlier call. Raises `ConfigError`."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".atoll-", dir=directory))
        try:
            files = EventFiles(unfinished)
            yield files
            files.flush()
            _move(files.names, unfinished, directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write event files into {directory}: {error.strerror}", "name a directory of yours with free space"
        ) from error


def directory_name(text: str) -> str:
    """Return a directory name for a run or node. Raises `PeerMisbehaved` for a name that could be a path."""
    if not _NAME.fullmatch(text):
        raise PeerMisbehaved(f"the coordinator sent {text!r}, which cannot be the name of a directory")
    return text


def _move(names: Iterable[str], source: Path, target: Path) -> None:
    for name in names:
        (target / name).mkdir(parents=True, exist_ok=True)
        (source / name / FILE_NAME).replace(target / name / FILE_NAME)


def _masked(crc: int) -> bytes:
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def _wall_time(unix_seconds: float) -> bytes:
    return b"\x09" + struct.pack("<d", unix_seconds)


def _bytes_field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
