"""Codecs: how a part of the flat vector becomes bytes, and exactly how it becomes numbers again.

`int8` and `int4` are uniform in blocks of 128 elements: one bf16 scale a block (fp16 scales lose blocks
below 1e-7), then the codes. Encoding happens once per part, so it may round as the machine likes; decoding
happens on every member and must give the same bits everywhere, so it is one conversion and one separately
rounded multiplication. Layout: all scales (little-endian bf16), then all codes; int4 packs two codes a byte, low
nibble first, int2 four, lowest bits first. A last block that is not full is padded with zeros before packing.

`int2` has the four levels that lose least of a normal distribution (Max 1960, Quantizing for minimum distortion), in
units of the block's root mean square: of such values an error of 0.34 of their norm stays, and 0.88 of their length.
There is no zero: in a block with other values zeros become small ones, up and down in turn.

`open` is the ingress check: a body of the wrong size, or one that holds a value that is not finite, raises
`PartInvalid` before it can touch a sum. Of blocks that follows from their scales alone. What was opened is decoded
piece by piece where it is needed, each so short that it and what is in between stay in the processor's cache.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from atoll.core.errors import PartInvalid
from atoll.core.frames import Buffer
from atoll.v1 import common_pb2 as pb

BLOCK_ELEMENTS = 128
PIECE_ELEMENTS = 2**17  # elements that are coded at a time: whole blocks
_SCALE_BYTES = 2
_INT2_LEVELS = torch.tensor([-1.510, -0.4528, 0.4528, 1.510])  # of codes 0 to 3
_INT2_DECODE_TABLE = torch.stack(
    [_INT2_LEVELS[(torch.arange(256) >> shift) & 3] for shift in (0, 2, 4, 6)], dim=1
)  # by byte
_INT2_BETWEEN = 0.9816  # the two levels of a sign
_INT2_MIDDLE = torch.tensor([-1e-45, 0.0]).repeat(BLOCK_ELEMENTS // 2)  # what is more is up; so zeros take turns
_INT2_LARGEST = 2.0**127  # scale that times the largest level is finite


Fields = tuple[Tensor, ...]


class Codec(ABC):
    """A named way to turn fp32 values into bytes and back, with a size formula."""

    def __init__(self, name: str, number: pb.Codec) -> None:
        self.name = name
        self.number = number

    def encode(self, values_E: Tensor) -> memoryview:
        """Bytes of a 1-D fp32 tensor. Raises `PartInvalid` if a value is not finite."""
        encoded = PartEncoder(self, values_E.numel())
        for first in range(0, values_E.numel(), PIECE_ELEMENTS):
            encoded.put(first, values_E[first : first + PIECE_ELEMENTS])
        return encoded.body()

    def open(self, body: Buffer, elements: int) -> CheckedPart:
        """Somebody's bytes, checked: what the peer's size and values have to be. Raises `PartInvalid`."""
        expected = self.encoded_bytes(elements)
        if len(body) != expected:
            raise PartInvalid(
                f"a part of {elements} elements in {self.name} has {expected} bytes, this one {len(body)}"
            )
        opened = CheckedPart(self, self._fields(_raw(body), elements), elements)
        if not self._is_finite(opened):
            raise PartInvalid(f"a part in {self.name} holds values that are not finite")
        return opened

    def decode(self, body: Buffer, elements: int) -> Tensor:
        """The 1-D fp32 tensor that every member gets from these bytes. Raises `PartInvalid`."""
        opened, values_E = self.open(body, elements), torch.empty(elements)
        for first in range(0, elements, PIECE_ELEMENTS):
            opened.decode_into(first, values_E[first : first + PIECE_ELEMENTS])
        return values_E

    @abstractmethod
    def encoded_bytes(self, elements: int) -> int:
        """Of so many elements."""

    @abstractmethod
    def _fields(self, raw: Tensor, elements: int) -> Fields:
        """What the bytes consist of, as views of them."""

    @abstractmethod
    def _encode_range(self, fields: Fields, first: int, values_C: Tensor) -> bool:
        """Encode values from element `first` on. Whether they are finite."""

    @abstractmethod
    def _decode_range(self, fields: Fields, first: int, values_C: Tensor) -> None:
        """Decode as many elements as `values_C` has, from `first` on."""

    @abstractmethod
    def _is_finite(self, opened: CheckedPart) -> bool:
        """Whether all values that were encoded are; their number is right."""


class PartEncoder:
    """Encodes a part piece by piece. A piece has at most `PIECE_ELEMENTS` and begins at a multiple of them."""

    def __init__(self, codec: Codec, elements: int) -> None:
        self._codec = codec
        self._raw = torch.empty(codec.encoded_bytes(elements), dtype=torch.uint8)
        self._fields = codec._fields(self._raw, elements)
        self._finite = True

    def put(self, first: int, values_C: Tensor) -> None:
        """The fp32 values from element `first` on."""
        self._finite &= self._codec._encode_range(self._fields, first, values_C)

    def body(self) -> memoryview:
        """What was put, not copied. Raises `PartInvalid` if a value was not finite."""
        if not self._finite:
            raise PartInvalid("this node's own update holds values that are not finite; it was not sent")
        return self._raw.numpy().data


class CheckedPart:
    """A part's bytes that were checked, and that nobody changes any more."""

    def __init__(self, codec: Codec, fields: Fields, elements: int) -> None:
        self.codec = codec
        self.fields = fields
        self.elements = elements

    def decode_into(self, first: int, values_C: Tensor) -> None:
        """Write the values from element `first` on, at a whole block, into fp32 [C], up to `PIECE_ELEMENTS` of them."""
        self.codec._decode_range(self.fields, first, values_C)


def is_finite(values_E: Tensor) -> bool:
    """Whether all of them are; in one pass, without a temporary: not-a-number propagates into both ends."""
    if values_E.numel() == 0:
        return True
    low, high = torch.aminmax(values_E)
    return math.isfinite(low) and math.isfinite(high)


def _raw(body: Buffer) -> Tensor:
    """As uint8; without a copy where the buffer may be written to, as torch wants it."""
    if not body:
        return torch.empty(0, dtype=torch.uint8)
    writable = isinstance(body, bytearray) or (isinstance(body, memoryview) and not body.readonly)
    return torch.frombuffer(body if writable else bytearray(body), dtype=torch.uint8)


class _Scratch(threading.local):
    """What is in between, of one thread: memory that is in its cache and was not fetched from the system just now."""

    def __init__(self) -> None:
        self.values = torch.empty(PIECE_ELEMENTS)  # fp32
        self.pairs = torch.empty(PIECE_ELEMENTS // 2, dtype=torch.int16)
        self.others = torch.empty(PIECE_ELEMENTS // 2, dtype=torch.int16)


_scratch = _Scratch()


class _Cast(Codec):
    """Every value as another floating-point number, the nearest that is finite."""

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

    def _is_finite(self, opened: CheckedPart) -> bool:
        return is_finite(opened.fields[0])


class _Blockwise(Codec):
    """Blocks with a scale each: all scales, then all codes."""

    _code_bytes: ClassVar[int]  # of a block
    _largest: ClassVar[float]  # code or level

    def encoded_bytes(self, elements: int) -> int:
        return _blocks(elements) * (_SCALE_BYTES + self._code_bytes)

    @abstractmethod
    def _encode_blocks(self, values: Tensor, elements: int, scales: Tensor, packed: Tensor) -> bool:
        """From fp32 [blocks, BLOCK], of which so many elements are no padding. Whether they are finite."""

    @abstractmethod
    def _decode_blocks(self, packed: Tensor, values: Tensor) -> None:
        """The codes as fp32 [blocks, BLOCK], not scaled yet."""

    def _fields(self, raw: Tensor, elements: int) -> Fields:
        """Scales (bf16) and codes (uint8), a row each block."""
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

    def _is_finite(self, opened: CheckedPart) -> bool:
        if not opened.elements:
            return True
        low, high = (float(end) for end in torch.aminmax(opened.fields[0]))
        largest = max(-low, high)
        if not math.isfinite(low + high) or largest <= torch.finfo(torch.float32).max / self._largest:
            return math.isfinite(low + high)
        values_C = torch.empty(PIECE_ELEMENTS)  # nobody honest comes here
        return all(
            is_finite(self._some(opened, first, values_C)) for first in range(0, opened.elements, PIECE_ELEMENTS)
        )

    def _some(self, opened: CheckedPart, first: int, values_C: Tensor) -> Tensor:
        some_C = values_C[: opened.elements - first]
        opened.decode_into(first, some_C)
        return some_C


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK_ELEMENTS)


def _quantise(values: Tensor, levels: int, scales: Tensor) -> tuple[Tensor, bool]:
    """Whole numbers in [-levels, levels] as fp32 [blocks, BLOCK] in scratch; whether all was finite. Sets scales."""
    whole = _scratch.values[: values.numel()].view(-1, BLOCK_ELEMENTS)
    scales.copy_(torch.abs(values, out=whole).amax(dim=1).div_(levels))
    divisor = scales.to(torch.float32)
    finite = math.isfinite(divisor.amax())
    divisor.masked_fill_(divisor == 0, 1.0)  # then all values are zero, or round to it
    return torch.div(values, divisor.unsqueeze(1), out=whole).round_().clamp_(-levels, levels), finite


class _Int8(_Blockwise):
    _code_bytes = BLOCK_ELEMENTS
    _largest = 128.0

    def _encode_blocks(self, values: Tensor, elements: int, scales: Tensor, packed: Tensor) -> bool:
        whole, finite = _quantise(values, 127, scales)
        packed.view(torch.int8).copy_(whole)
        return finite

    def _decode_blocks(self, packed: Tensor, values: Tensor) -> None:
        values.copy_(packed.view(torch.int8))


class _Int4(_Blockwise):
    _code_bytes = BLOCK_ELEMENTS // 2
    _largest = 8.0

    def _encode_blocks(self, values: Tensor, elements: int, scales: Tensor, packed: Tensor) -> bool:
        whole, finite = _quantise(values, 7, scales)
        pairs, high = (kept[: whole.numel() // 2] for kept in (_scratch.pairs, _scratch.others))
        pairs.view(torch.int8).copy_(whole.add_(8.0).view(-1))  # none negative; to uint8 takes five times as long
        packed.view(-1).copy_(pairs.bitwise_or_(torch.bitwise_right_shift(pairs, 4, out=high)))  # the low byte of each
        return finite

    def _decode_blocks(self, packed: Tensor, values: Tensor) -> None:
        pairs, high = (kept[: packed.numel()] for kept in (_scratch.pairs, _scratch.others))
        pairs.copy_(packed.view(-1))
        pairs.bitwise_or_(torch.bitwise_left_shift(pairs, 4, out=high)).bitwise_and_(0x0F0F)  # a nibble a byte
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
        packed.copy_(fours | (fours >> 12))  # the low byte of each
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
