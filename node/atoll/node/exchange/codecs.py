"""Codecs: encode a part of the flat vector as bytes, and decode it to the same bits on every member.

`int8` and `int4` are uniform in blocks of 128 elements, with one bf16 scale per block (fp16 scales lose blocks below
1e-7). A part is encoded once, so its rounding may depend on the machine. It is decoded on every member and must give
the same bits everywhere: decoding is one conversion and one separately rounded multiplication. Layout: all scales
(little-endian bf16), then all codes. int4 packs two codes per byte, low nibble first; int2 packs four, lowest bits
first. A last block that is not full is padded with zeros before packing.

`int2` has the four levels with the least error for a normal distribution (Max 1960, Quantizing for minimum
distortion), in units of the block's root mean square. For normal values the error has 0.34 of their norm, and the
decoded vector has 0.88 of their norm. int2 has no zero: in a block with other values, zeros become small values with
alternating signs.

`open` checks received bytes: it raises `PartInvalid` for a wrong size or a value that is not finite, before the part
enters a sum. For block codecs the scales alone tell whether all values are finite. A checked part is decoded in
pieces, so short that a piece and its intermediate values stay in the processor's cache.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from atoll.core.errors import PartInvalid
from atoll.core.frames import Buffer
from atoll.node.exchange.partition import BLOCK_ELEMENTS
from atoll.v1 import common_pb2 as pb

PIECE_ELEMENTS = 2**17  # elements encoded or decoded at a time: whole blocks
_SCALE_BYTES = 2
_INT2_LEVELS = torch.tensor([-1.510, -0.4528, 0.4528, 1.510])  # of codes 0 to 3
# the four values of each byte
_INT2_DECODE_TABLE = torch.stack([_INT2_LEVELS[(torch.arange(256) >> shift) & 3] for shift in (0, 2, 4, 6)], dim=1)
_INT2_BETWEEN = 0.9816  # the boundary between the two levels of one sign
_INT2_MIDDLE = torch.tensor([-1e-45, 0.0]).repeat(BLOCK_ELEMENTS // 2)  # larger values are positive: zeros alternate
_INT2_LARGEST = 2.0**127  # the largest scale whose product with the largest level is finite

Fields = tuple[Tensor, ...]


class Codec(ABC):
    """A named way to turn fp32 values into bytes and back, with a size formula."""

    def __init__(self, name: str, number: pb.Codec) -> None:
        self.name = name
        self.number = number

    def encode(self, values_E: Tensor) -> memoryview:
        """Encode a 1-D fp32 tensor. Raises `PartInvalid` if a value is not finite."""
        encoded = PartEncoder(self, values_E.numel())
        for first in range(0, values_E.numel(), PIECE_ELEMENTS):
            encoded.put(first, values_E[first : first + PIECE_ELEMENTS])
        return encoded.body()

    def open(self, body: Buffer, elements: int) -> CheckedPart:
        """Check the size and the values of received bytes. Raises `PartInvalid`."""
        expected = self.encoded_bytes(elements)
        if len(body) != expected:
            raise PartInvalid(f"a part has {len(body)} bytes; {elements} elements in {self.name} have {expected}")
        part = CheckedPart(self, self._fields(_raw(body), elements), elements)
        if not self._is_finite(part):
            raise PartInvalid(f"a part in {self.name} has NaN or infinite values")
        return part

    def decode(self, body: Buffer, elements: int) -> Tensor:
        """Check and decode a whole part as a 1-D fp32 tensor. Raises `PartInvalid`."""
        part, values_E = self.open(body, elements), torch.empty(elements)
        for first in range(0, elements, PIECE_ELEMENTS):
            part.decode_into(first, values_E[first : first + PIECE_ELEMENTS])
        return values_E

    @abstractmethod
    def encoded_bytes(self, elements: int) -> int:
        """The size of an encoded part of `elements` elements."""

    @abstractmethod
    def _fields(self, raw: Tensor, elements: int) -> Fields:
        """Views of the encoded bytes, one per field of the layout."""

    @abstractmethod
    def _encode_range(self, fields: Fields, first: int, values_C: Tensor) -> bool:
        """Encode `values_C` from element `first` on; returns whether they are finite."""

    @abstractmethod
    def _decode_range(self, fields: Fields, first: int, values_C: Tensor) -> None:
        """Decode elements from `first` on until `values_C` is full."""

    @abstractmethod
    def _is_finite(self, part: CheckedPart) -> bool:
        """Whether all values of a part of the right size are finite."""

    def _usual_error(self, fields: Fields) -> float:
        return math.inf


class PartEncoder:
    """Encodes a part piece by piece. A piece has at most `PIECE_ELEMENTS` and begins at a multiple of them."""

    def __init__(self, codec: Codec, elements: int) -> None:
        self._codec = codec
        self._raw = torch.empty(codec.encoded_bytes(elements), dtype=torch.uint8)
        self._fields = codec._fields(self._raw, elements)
        self._finite = True

    def put(self, first: int, values_C: Tensor) -> None:
        """Encode the fp32 values from element `first` on."""
        self._finite &= self._codec._encode_range(self._fields, first, values_C)

    def body(self) -> memoryview:
        """The encoded part, not copied. Raises `PartInvalid` if a value was not finite."""
        if not self._finite:
            raise PartInvalid("this node's own update has NaN or infinite values; it was not sent")
        return self._raw.numpy().data


class CheckedPart:
    """A part's encoded bytes after `Codec.open` checked them; they must not change."""

    def __init__(self, codec: Codec, fields: Fields, elements: int) -> None:
        self.codec = codec
        self.fields = fields
        self.elements = elements

    def decode_into(self, first: int, values_C: Tensor) -> None:
        """Decode values from element `first` on into fp32 [C], C ≤ `PIECE_ELEMENTS`. `first` must begin a block."""
        self.codec._decode_range(self.fields, first, values_C)

    def decode_pieces(self, take: Callable[[int, Tensor], object]) -> None:
        """Decode all values in pieces. `take` gets each piece's first element and its values, in reused memory."""
        values_C = torch.empty(min(PIECE_ELEMENTS, self.elements))
        for first in range(0, self.elements, PIECE_ELEMENTS):
            piece_C = values_C[: self.elements - first]
            self.decode_into(first, piece_C)
            take(first, piece_C)

    def usual_error(self) -> float:
        """The usual norm of a part's rounding errors, derived from its scales; infinite if the codec cannot tell."""
        return self.codec._usual_error(self.fields)


def is_finite(values_E: Tensor) -> bool:
    """Whether all values are finite. One pass without a temporary: NaN propagates into minimum and maximum."""
    if values_E.numel() == 0:
        return True
    low, high = torch.aminmax(values_E)
    return math.isfinite(low) and math.isfinite(high)


def _raw(body: Buffer) -> Tensor:
    """The buffer as a uint8 tensor. Copies a read-only buffer, because torch requires a writable one."""
    if not body:
        return torch.empty(0, dtype=torch.uint8)
    writable = isinstance(body, bytearray) or (isinstance(body, memoryview) and not body.readonly)
    return torch.frombuffer(body if writable else bytearray(body), dtype=torch.uint8)


class _Scratch(threading.local):
    """One thread's memory for intermediate values: reused, so that it stays in the cache."""

    def __init__(self) -> None:
        self.values = torch.empty(PIECE_ELEMENTS)  # fp32
        self.pairs = torch.empty(PIECE_ELEMENTS // 2, dtype=torch.int16)
        self.others = torch.empty(PIECE_ELEMENTS // 2, dtype=torch.int16)


_scratch = _Scratch()


class _Cast(Codec):
    """Each value becomes the nearest finite value of another floating-point type."""

    def __init__(self, name: str, number: pb.Codec, dtype: torch.dtype) -> None:
        super().__init__(name, number)
        self._dtype = dtype
        self._limit = torch.finfo(dtype).max

    def encoded_bytes(self, elements: int) -> int:
        return self._dtype.itemsize * elements

    def _fields(self, raw: Tensor, elements: int) -> Fields:
        return (raw.view(self._dtype),)

    def _encode_range(self, fields: Fields, first: int, values_C: Tensor) -> bool:
        low, high = (float(end) for end in torch.aminmax(values_C))
        if max(-low, high) > self._limit:
            values_C = torch.clamp(values_C, -self._limit, self._limit, out=_scratch.values[: len(values_C)])
        fields[0][first : first + len(values_C)] = values_C
        return math.isfinite(low) and math.isfinite(high)

    def _decode_range(self, fields: Fields, first: int, values_C: Tensor) -> None:
        values_C.copy_(fields[0][first : first + len(values_C)])

    def _is_finite(self, part: CheckedPart) -> bool:
        return is_finite(part.fields[0])


class _Blockwise(Codec):
    """Blocks with one scale each. Layout: all scales, then all codes."""

    _code_bytes: ClassVar[int]  # per block
    _largest: ClassVar[float]  # the largest code or level

    def encoded_bytes(self, elements: int) -> int:
        return _blocks(elements) * (_SCALE_BYTES + self._code_bytes)

    @abstractmethod
    def _encode_blocks(self, values: Tensor, elements: int, scales: Tensor, packed: Tensor) -> bool:
        """Encode fp32 [blocks, BLOCK], padded after the first `elements`; returns whether all are finite."""

    @abstractmethod
    def _decode_blocks(self, packed: Tensor, values: Tensor) -> None:
        """Decode the codes into fp32 [blocks, BLOCK], without their scales."""

    def _fields(self, raw: Tensor, elements: int) -> Fields:
        """Scales (bf16) and codes (uint8), one row per block."""
        scale_bytes = _blocks(elements) * _SCALE_BYTES
        return raw[:scale_bytes].view(torch.bfloat16), raw[scale_bytes:].view(-1, self._code_bytes)

    def _encode_range(self, fields: Fields, first: int, values_C: Tensor) -> bool:
        scales, packed = (field[first // BLOCK_ELEMENTS : _blocks(first + len(values_C))] for field in fields)
        padding = -len(values_C) % BLOCK_ELEMENTS
        values = torch.nn.functional.pad(values_C, (0, padding)) if padding else values_C
        return self._encode_blocks(values.view(-1, BLOCK_ELEMENTS), len(values_C), scales, packed)

    def _decode_range(self, fields: Fields, first: int, values_C: Tensor) -> None:
        scales, packed = (field[first // BLOCK_ELEMENTS : _blocks(first + len(values_C))] for field in fields)
        whole = len(values_C) % BLOCK_ELEMENTS == 0
        values = (values_C if whole else _scratch.values[: len(scales) * BLOCK_ELEMENTS]).view(-1, BLOCK_ELEMENTS)
        self._decode_blocks(packed, values)
        values.mul_(scales.to(torch.float32).unsqueeze(1))
        if not whole:
            values_C.copy_(values.view(-1)[: len(values_C)])

    def _is_finite(self, part: CheckedPart) -> bool:
        if not part.elements:
            return True
        low, high = (float(end) for end in torch.aminmax(part.fields[0]))
        largest = max(-low, high)
        if not math.isfinite(low + high) or largest <= torch.finfo(torch.float32).max / self._largest:
            return math.isfinite(low + high)
        # only a hostile part has scales this large: decode it to see whether a value overflows
        values_C = torch.empty(PIECE_ELEMENTS)
        return all(
            is_finite(self._decode_piece(part, first, values_C)) for first in range(0, part.elements, PIECE_ELEMENTS)
        )

    def _decode_piece(self, part: CheckedPart, first: int, values_C: Tensor) -> Tensor:
        piece_C = values_C[: part.elements - first]
        part.decode_into(first, piece_C)
        return piece_C


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK_ELEMENTS)


def _quantise(values: Tensor, levels: int, scales: Tensor) -> tuple[Tensor, bool]:
    """Set `scales`; returns integers in [-levels, levels] as fp32 [blocks, BLOCK] in scratch, and if all are finite."""
    whole = _scratch.values[: values.numel()].view(-1, BLOCK_ELEMENTS)
    scales.copy_(torch.abs(values, out=whole).amax(dim=1).div_(levels))
    divisor = scales.to(torch.float32)
    finite = math.isfinite(divisor.amax())
    divisor.masked_fill_(divisor == 0, 1.0)  # all values of that block are zero or round to zero
    return torch.div(values, divisor.unsqueeze(1), out=whole).round_().clamp_(-levels, levels), finite


class _Uniform(_Blockwise):
    """Equal steps of one scale: errors are spread evenly over one step."""

    def _usual_error(self, fields: Fields) -> float:
        return float(torch.linalg.vector_norm(fields[0].to(torch.float32))) * math.sqrt(BLOCK_ELEMENTS / 12)


class _Int8(_Uniform):
    _code_bytes = BLOCK_ELEMENTS
    _largest = 128.0

    def _encode_blocks(self, values: Tensor, elements: int, scales: Tensor, packed: Tensor) -> bool:
        whole, finite = _quantise(values, 127, scales)
        packed.view(torch.int8).copy_(whole)
        return finite

    def _decode_blocks(self, packed: Tensor, values: Tensor) -> None:
        values.copy_(packed.view(torch.int8))


class _Int4(_Uniform):
    _code_bytes = BLOCK_ELEMENTS // 2
    _largest = 8.0

    def _encode_blocks(self, values: Tensor, elements: int, scales: Tensor, packed: Tensor) -> bool:
        whole, finite = _quantise(values, 7, scales)
        pairs, high = (kept[: whole.numel() // 2] for kept in (_scratch.pairs, _scratch.others))
        pairs.view(torch.int8).copy_(whole.add_(8.0).view(-1))  # not negative; a cast to uint8 takes 5× as long
        packed.view(-1).copy_(pairs.bitwise_or_(torch.bitwise_right_shift(pairs, 4, out=high)))  # the low byte of each
        return finite

    def _decode_blocks(self, packed: Tensor, values: Tensor) -> None:
        pairs, high = (kept[: packed.numel()] for kept in (_scratch.pairs, _scratch.others))
        pairs.copy_(packed.view(-1))
        pairs.bitwise_or_(torch.bitwise_left_shift(pairs, 4, out=high)).bitwise_and_(0x0F0F)  # one nibble per byte
        values.view(-1).copy_(pairs.view(torch.int8).sub_(8))


class _Int2(_Blockwise):
    _code_bytes = BLOCK_ELEMENTS // 4
    _largest = 2.0

    def _encode_blocks(self, values: Tensor, elements: int, scales: Tensor, packed: Tensor) -> bool:
        filled = (elements - torch.arange(0, elements, BLOCK_ELEMENTS)).clamp(max=BLOCK_ELEMENTS)
        norms = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64)
        scales.copy_((norms / filled.sqrt()).clamp_(max=_INT2_LARGEST))
        limit = scales.to(torch.float32).unsqueeze(1) * _INT2_BETWEEN
        codes = (values > -limit).view(torch.uint8)
        codes += (values > _INT2_MIDDLE).view(torch.uint8)
        codes += (values >= limit).view(torch.uint8)
        fours = codes.view(torch.int32)
        fours |= fours >> 6
        packed.copy_(fours | (fours >> 12))  # keep the low byte of each four
        return math.isfinite(norms.amax())

    def _decode_blocks(self, packed: Tensor, values: Tensor) -> None:
        torch.index_select(_INT2_DECODE_TABLE, 0, packed.view(-1).to(torch.int32), out=values.view(-1, 4))


_ALL: tuple[Codec, ...] = (
    _Cast("fp32", pb.CODEC_FP32, torch.float32),
    _Cast("bf16", pb.CODEC_BF16, torch.bfloat16),
    _Cast("fp16", pb.CODEC_FP16, torch.float16),
    _Int8("int8", pb.CODEC_INT8),
    _Int4("int4", pb.CODEC_INT4),
    _Int2("int2", pb.CODEC_INT2),
)
CODECS = {codec.name: codec for codec in _ALL}
BY_NUMBER = {codec.number: codec for codec in _ALL}
