"""Pieces: the units of state that a fetch verifies. One piece is one layer's anchor or momentum, with its digest.

`fetch_scheduler` cuts pieces into chunks, one per request; a `Workspace` collects their bytes.
"""

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
Allocate = Callable[[int], Tensor]  # creates an uninitialised fp32 vector of so many elements

_EMPTY = sha256(b"").digest()


@dataclass(frozen=True)
class Piece:
    """One layer's part of one vector: the smallest unit with a digest. Bounds are elements of the vector."""

    kind: Kind
    layer: int
    start: int
    end: int
    digest: bytes

    @property
    def elements(self) -> int:
        """The number of fp32 values."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"the {self.kind} of layer {self.layer}"


def pieces_of(layers: Sequence[manifest_pb2.LayerState], offsets: Sequence[int]) -> tuple[Piece, ...]:
    """All pieces of a state with these layer digests; layers without parameters have none.

    Raises `CheckpointCorrupt` when the layers do not fit a model with these offsets.
    """
    if [item.layer for item in layers] != list(range(len(offsets) - 1)):
        raise CheckpointCorrupt(
            f"a manifest lists {len(layers)} layers, which are not layers 0 to {len(offsets) - 2} of this model"
        )
    pieces: list[Piece] = []
    for item, (start, end) in zip(layers, pairwise(offsets), strict=True):
        pieces.append(Piece("anchor", item.layer, start, end, item.anchor_digest))
        pieces.append(Piece("momentum", item.layer, start, end, item.momentum_digest))
    if any(piece.digest != _EMPTY for piece in pieces if not piece.elements):
        raise CheckpointCorrupt("a manifest has digests of values for layers that have no parameters in this model")
    return tuple(piece for piece in pieces if piece.elements)


class Workspace:
    """Elements [start, end) of both vectors, filled piece by piece, with a record of the verified pieces."""

    def __init__(self, start: int, end: int, allocate: Allocate = torch.empty) -> None:
        self._start = start
        self.vectors: dict[Kind, Tensor] = {"anchor": allocate(end - start), "momentum": allocate(end - start)}
        self._verified: dict[tuple[Kind, int], bytes] = {}

    def copy_matching(self, start: int, anchor_E: Tensor, momentum_E: Tensor, pieces: Iterable[Piece]) -> None:
        """Copy those of `pieces` whose values in these vectors match their digest.

        The vectors begin with element `start` and must cover all `pieces`. Hashes every piece that is missing.
        """
        sources: dict[Kind, Tensor] = {"anchor": anchor_E, "momentum": momentum_E}
        for piece in pieces:
            values_E = sources[piece.kind][piece.start - start : piece.end - start]
            if not self.has(piece) and digest(values_E.contiguous()) == piece.digest:
                self._values(piece.kind, piece.start, piece.end).copy_(values_E)
                self.mark_verified(piece)

    def has(self, piece: Piece) -> bool:
        """Whether the workspace has the piece, verified."""
        return self._verified.get((piece.kind, piece.layer)) == piece.digest

    def mark_verified(self, piece: Piece) -> None:
        """Record that the values match the piece's digest."""
        self._verified[piece.kind, piece.layer] = piece.digest

    def mark_unverified(self, piece: Piece) -> None:
        """Record that the piece's values are about to be overwritten."""
        self._verified.pop((piece.kind, piece.layer), None)

    def bytes_of(self, kind: Kind, start: int, end: int) -> memoryview:
        """The memory of elements [start, end), to write or hash."""
        return self._values(kind, start, end).numpy().data.cast("B")

    def digest_of(self, kind: Kind, start: int, end: int) -> bytes:
        """SHA-256 of elements [start, end)."""
        return sha256(self.bytes_of(kind, start, end)).digest()

    def _values(self, kind: Kind, start: int, end: int) -> Tensor:
        return self.vectors[kind][start - self._start : end - self._start]
