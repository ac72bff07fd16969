"""Event files: what TensorBoard's reader finds in them, and what a reader of our own finds."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.cli.tensorboard_files import (
    FILE_NAME,
    crc32c,
    directory_name,
    event_files,
    record,
    scalars_event,
    version_event,
)
from atoll.core.errors import ConfigError, PeerMisbehaved

ROWS = [
    ("reef/ann", 1_700_000_000.25, 1, {"train_loss": 4.5, "bytes_sent": 2.0**40}),
    ("reef/bob", 1_700_000_001.0, 1, {"train_loss": 4.25}),
    ("reef/ann", 1_700_000_030.0, 2**40, {"train_loss": 4.125, "learning_rate": 1e-4}),
    ("reef", 1_700_000_030.0, 2, {"validation_loss": 4.0}),
]
READER = """
import json, sys
from pathlib import Path
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
found = []
for path in sorted(Path(sys.argv[1]).rglob("*tfevents*")):
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            scalar = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
            found.append([str(path.parent.relative_to(sys.argv[1])), event.wall_time, event.step, value.tag, scalar])
print(json.dumps(found))
"""


def slow_crc32c(data: bytes) -> int:
    """The definition, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def messages() -> tuple[type, type]:
    """`Event` and `Summary` as TensorFlow declares them, as far as scalars need them."""
    file = descriptor_pb2.FileDescriptorProto(name="event_for_test.proto", package="test", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    event, summary = file.message_type.add(name="Event"), file.message_type.add(name="Summary")
    value = summary.nested_type.add(name="Value")
    for message, name, number, kind in (
        (event, "wall_time", 1, kinds.TYPE_DOUBLE),
        (event, "step", 2, kinds.TYPE_INT64),
        (event, "file_version", 3, kinds.TYPE_STRING),
        (value, "tag", 1, kinds.TYPE_STRING),
        (value, "simple_value", 2, kinds.TYPE_FLOAT),
    ):
        message.field.add(name=name, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
    event.field.add(
        name="summary", number=5, type=kinds.TYPE_MESSAGE, type_name=".test.Summary", label=kinds.LABEL_OPTIONAL
    )
    summary.field.add(
        name="value", number=1, type=kinds.TYPE_MESSAGE, type_name=".test.Summary.Value", label=kinds.LABEL_REPEATED
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = ("test.Event", "test.Summary")
    found = [message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names]
    return found[0], found[1]


EVENT, _ = messages()


def records(data: bytes) -> Iterator[bytes]:
    """Messages of a file, with both checksums checked."""
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + length]
        for part, checksum in ((data[:8], data[8:12]), (body, data[12 + length : 16 + length])):
            crc = slow_crc32c(part)
            assert struct.unpack("<I", checksum)[0] == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
        yield body
        data = data[16 + length :]


def write(directory: Path, *more: Any) -> None:
    with event_files(directory) as files:
        for row in (*ROWS, *more):
            files.add(*row)


def expected() -> list[tuple[str, float, int, str, float]]:
    return sorted(
        (name, at, step, tag, struct.unpack("<f", struct.pack("<f", value))[0])
        for name, at, step, values in ROWS
        for tag, value in values.items()
    )


def test_the_checksum_is_that_of_rfc_3720() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


@given(st.binary(max_size=200))
def test_a_record_is_read_as_it_was_written(data: bytes) -> None:
    assert list(records(record(data) * 2)) == [data, data]


@given(
    at=st.floats(0, 1e12),
    step=st.integers(0, 2**62),
    values=st.dictionaries(st.text(max_size=200), st.floats(width=32, allow_nan=False), max_size=20),
)
def test_an_event_is_what_protobuf_reads(at: float, step: int, values: dict[str, float]) -> None:
    event = EVENT.FromString(scalars_event(at, step, values))
    assert (event.wall_time, event.step) == (at, step)
    assert {value.tag: value.simple_value for value in event.summary.value} == values
    version = EVENT.FromString(version_event(at))
    assert (version.wall_time, version.file_version) == (at, "brain.Event:2")


def test_files_have_what_was_added_and_a_second_call_replaces_them(tmp_path: Path) -> None:
    for _ in range(2):
        write(tmp_path / "runs")
    found = []
    for name in ("reef", "reef/ann", "reef/bob"):
        first, *events = map(EVENT.FromString, records((tmp_path / "runs" / name / FILE_NAME).read_bytes()))
        assert first.file_version == "brain.Event:2"
        found += [
            (name, event.wall_time, event.step, value.tag, value.simple_value)
            for event in events
            for value in event.summary.value
        ]
    assert sorted(found) == expected()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["reef"]


def test_files_that_cannot_be_finished_leave_the_earlier_ones(tmp_path: Path) -> None:
    write(tmp_path)
    before = (tmp_path / "reef/ann" / FILE_NAME).read_bytes()
    with pytest.raises(struct.error):
        write(tmp_path, ("reef/ann", 1.0, 1, {"train_loss": "no number"}))
    assert (tmp_path / "reef/ann" / FILE_NAME).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reef"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write event files into"):
        write(tmp_path / "file" / "runs")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\n", "a\0", "é", "x" * 129])
def test_a_name_that_could_be_a_path_is_refused(name: str) -> None:
    with pytest.raises(PeerMisbehaved):
        directory_name(name)


def test_tensorboard_reads_the_files(tmp_path: Path) -> None:
    """`ATOLL_TENSORBOARD_PYTHON` names the interpreter of an environment that has it: it is no dependency of Atoll."""
    python = os.environ.get("ATOLL_TENSORBOARD_PYTHON", "")
    if not python and importlib.util.find_spec("tensorboard") is None:
        pytest.skip("TensorBoard is not installed: `pip install tensorboard`, or set ATOLL_TENSORBOARD_PYTHON")
    write(tmp_path)
    done = subprocess.run(
        [python or sys.executable, "-c", READER, tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = sorted(map(tuple, json.loads(done.stdout)))
    assert [row[:4] for row in found] == [row[:4] for row in expected()]
    assert all(math.isclose(row[4], other[4]) for row, other in zip(found, expected(), strict=True))
