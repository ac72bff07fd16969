"""Small checkpoints, made here by the letter of the safetensors format, and the manifests that go with them."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass

from unit.coordinator.world import LAYERS, RUN, commit, round_report

from atoll.core import protocol
from atoll.core.identity import Identity
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb


def tensors(seed: int, elements: int = 300) -> dict[str, bytes]:
    """A flat fp32 tensor for every layer, unlike each other."""
    return {
        name: struct.pack(f"<{elements}f", *(seed + index + number / 7 for number in range(elements)))
        for index, name in enumerate(LAYERS)
    }


def safetensors(values: dict[str, bytes], dtype: str = "F32") -> bytes:
    """The file."""
    header: dict[str, object] = {"__metadata__": {"atoll": "{}"}}
    offset = 0
    for name, data in values.items():
        header[name] = {"dtype": dtype, "shape": [len(data) // 4], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(values.values())


@dataclass
class Files:
    """What a node would send."""

    round: int
    manifest: manifest_pb2.CommittedManifest
    files: dict[str, bytes]
    span: tuple[int, int] = (0, len(LAYERS) - 1)

    @property
    def name(self) -> pb.RoundId:
        """Of the round."""
        return manifest_pb2.Manifest.FromString(self.manifest.payload).round

    def part(self, first: int, last: int) -> Files:
        """Of a node that holds some of the layers."""
        named = {
            name: safetensors({layer: _values(data, layer) for layer in LAYERS[first : last + 1]})
            for name, data in self.files.items()
            if name.endswith(".safetensors")
        }
        return Files(self.round, self.manifest, {**self.files, **named}, (first, last))

    def opening(self, ticket: bytes = b"") -> mb.CheckpointOpening:
        """The first message."""
        files = [
            mb.CheckpointFile(name=name, bytes=len(data), sha256=hashlib.sha256(data).digest())
            for name, data in self.files.items()
        ]
        return mb.CheckpointOpening(ticket=ticket, round=self.round, manifest=self.manifest, files=files)

    def messages(self, ticket: bytes = b"", size: int = 1000) -> list[mb.CheckpointUpload]:
        """All of them."""
        data = b"".join(self.files.values())
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        return [
            mb.CheckpointUpload(opening=self.opening(ticket)),
            *(mb.CheckpointUpload(data=piece) for piece in pieces),
        ]

    def info(self) -> mb.CheckpointInfo:
        """As a heartbeat tells it."""
        return mb.CheckpointInfo(
            round=self.round,
            manifest_hash=hashlib.sha256(self.manifest.payload).digest(),
            bytes=sum(map(len, self.files.values())),
            written_unix_ms=1_700_000_000_000,
            committed_tokens=1000,
            layers=plan_pb2.Span(first=self.span[0], last=self.span[1]),
        )


def _values(data: bytes, layer: str) -> bytes:
    """Of one layer in a file."""
    begin = 8 + int.from_bytes(data[:8], "little")
    start, end = json.loads(data[8:begin])[layer]["data_offsets"]
    return data[begin + start : begin + end]


def checkpoint(signer: Identity, number: int = 5, elements: int = 300) -> Files:
    """A true one."""
    anchor, momentum = tensors(number, elements), tensors(-number, elements)
    manifest = manifest_pb2.Manifest(
        protocol=protocol.ours(),
        round=pb.RoundId(run_id=RUN, plan_version=1, number=number),
        layers=digests(anchor, momentum),
        committed_tokens=1000,
    )
    return _files(commit(manifest.SerializeToString(), [signer]), anchor, momentum)


def committed_checkpoint(previous: bytes, members: list[Identity], elements: int = 300) -> Files:
    """A true one of round 1, as these members decided it."""
    anchor, momentum = tensors(1, elements), tensors(-1, elements)
    manifest = manifest_pb2.Manifest.FromString(round_report(1, previous, members).manifest.payload)
    del manifest.layers[:]
    manifest.layers.extend(digests(anchor, momentum))
    return _files(commit(manifest.SerializeToString(), members), anchor, momentum)


def digests(anchor: dict[str, bytes], momentum: dict[str, bytes]) -> list[manifest_pb2.LayerState]:
    """What the manifest says of the layers."""
    return [
        manifest_pb2.LayerState(
            layer=index,
            anchor_digest=hashlib.sha256(anchor[name]).digest(),
            momentum_digest=hashlib.sha256(momentum[name]).digest(),
        )
        for index, name in enumerate(LAYERS)
    ]


def _files(committed: manifest_pb2.CommittedManifest, anchor: dict[str, bytes], momentum: dict[str, bytes]) -> Files:
    files = {
        "anchor.safetensors": safetensors(anchor),
        "momentum.safetensors": safetensors(momentum),
        "manifest": committed.SerializeToString(),
        "run.toml": b"version = 1\n",
    }
    return Files(manifest_pb2.Manifest.FromString(committed.payload).round.number, committed, files)
