"""What state consists of when it travels: pieces that a digest vouches for, cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from atoll.core.errors import CheckpointCorrupt
from atoll.node.state.outer_step import digest
from atoll.v1 import manifest_pb2

Kind = Literal["anchor", "momentum"]
Allocate = Callable[[int], Tensor]  # an fp32 vector of so many elements, whatever they are

_EMPTY = sha256(b"").digest()


@dataclass(frozen=True)
class Piece:
    """One layer's part of one vector: the smallest thing that can be verified. Bounds are elements of the vector."""

    kind: Kind
    layer: int
    start: int
    end: int
    digest: bytes

    @property
    def elements(self) -> int:
        """How many fp32 values."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"the {self.kind} of layer {self.layer}"


def pieces_of(layers: Sequence[manifest_pb2.LayerState], offsets: Sequence[int]) -> tuple[Piece, ...]:
    """Every piece of a state with these digests; layers without parameters have none.

    Raises `CheckpointCorrupt` when the layers are not those of a model with these offsets.
    """
    if [item.layer for item in layers] != list(range(len(offsets) - 1)):
        raise CheckpointCorrupt(f"a manifest lists {len(layers)} layers that are not this model's {len(offsets) - 1}")
    pieces: list[Piece] = []
    for item, (start, end) in zip(layers, pairwise(offsets), strict=True):
        pieces.append(Piece("anchor", item.layer, start, end, item.anchor_digest))
        pieces.append(Piece("momentum", item.layer, start, end, item.momentum_digest))
    if any(piece.digest != _EMPTY for piece in pieces if not piece.elements):
        raise CheckpointCorrupt("a manifest has digests of layers that are empty in this model")
    return tuple(piece for piece in pieces if piece.elements)


class Workspace:
    """The elements [start, end) of two vectors, filled piece by piece, and what of them is known to be true."""

    def __init__(self, start: int, end: int, allocate: Allocate = torch.empty) -> None:
        self._start = start
        self.vectors: dict[Kind, Tensor] = {"anchor": allocate(end - start), "momentum": allocate(end - start)}
        self._true: dict[tuple[Kind, int], bytes] = {}

    def copy_matching(self, start: int, anchor_E: Tensor, momentum_E: Tensor, pieces: Iterable[Piece]) -> None:
        """Copy the pieces that these vectors, which begin with element `start` and hold them all, have already.

        Hashes what they have of them.
        """
        sources: dict[Kind, Tensor] = {"anchor": anchor_E, "momentum": momentum_E}
        for piece in pieces:
            values_E = sources[piece.kind][piece.start - start : piece.end - start]
            if not self.has(piece) and digest(values_E.contiguous()) == piece.digest:
                self._values(piece.kind, piece.start, piece.end).copy_(values_E)
                self.mark_verified(piece)

    def has(self, piece: Piece) -> bool:
        """Whether the piece lies here, verified."""
        return self._true.get((piece.kind, piece.layer)) == piece.digest

    def mark_verified(self, piece: Piece) -> None:
        """The piece was verified."""
        self._true[piece.kind, piece.layer] = piece.digest

    def mark_unverified(self, piece: Piece) -> None:
        """What lies in its place is to be written over: nothing there is known to be true."""
        self._true.pop((piece.kind, piece.layer), None)

    def bytes_of(self, kind: Kind, start: int, end: int) -> memoryview:
        """The memory of some elements, to be written or hashed."""
        return self._values(kind, start, end).numpy().data.cast("B")

    def digest_of(self, kind: Kind, start: int, end: int) -> bytes:
        """SHA-256 of some elements."""
        return sha256(self.bytes_of(kind, start, end)).digest()

    def _values(self, kind: Kind, start: int, end: int) -> Tensor:
        return self.vectors[kind][start - self._start : end - self._start]
