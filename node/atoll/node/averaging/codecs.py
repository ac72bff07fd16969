"""Codecs: how a part of the flat vector becomes bytes, and exactly how it becomes numbers again.

`int8` and `int4` are uniform in blocks of 128 elements: one bf16 scale a block (fp16 scales lose blocks
below 1e-7), then the codes. Encoding happens once per part, so it may round as the machine likes; decoding
happens on every member and must give the same bits everywhere, so it is one conversion and one separately
rounded multiplication. Layout: all scales (little-endian bf16), then all codes; int4 packs two codes a byte, low
nibble first, int2 four, lowest bits first. A last block that is not full is padded with zeros before packing.

`int2` has the four levels that lose least of a normal distribution (Max 1960, Quantizing for minimum distortion), in
units of the block's root mean square: of such values an error of 0.34 of their norm stays, and 0.88 of their length.
There is no zero: in a block with other values zeros become small ones, up and down in turn.

`decode` is also the ingress check: a body of the wrong size, or one that holds a value that is not finite,
raises `PartInvalid` before it can touch a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.errors import PartInvalid
from atoll.core.frames import Buffer
from atoll.v1 import common_pb2 as pb

BLOCK = 128
_SCALE_BYTES = 2
_CACHED_BLOCKS = 2**11  # coded at a time, so that what is in between stays in the cache
_INT2_LEVELS = torch.tensor([-1.510, -0.4528, 0.4528, 1.510])  # of codes 0 to 3
_INT2_FOURS = torch.stack([_INT2_LEVELS[(torch.arange(256) >> shift) & 3] for shift in (0, 2, 4, 6)], dim=1)  # by byte
_INT2_BETWEEN = 0.9816  # the two levels of a sign
_INT2_MIDDLE = torch.tensor([-1e-45, 0.0]).repeat(BLOCK // 2)  # what is more is up; so zeros take turns
_INT2_LARGEST = 2.0**127  # scale that times the largest level is finite


@dataclass(frozen=True)
class Codec:
    """A named pair of functions with a size formula."""

    name: str
    number: pb.Codec
    encoded_bytes: Callable[[int], int]  # of n elements
    _encode: Callable[[Tensor], bytes]
    _decode: Callable[[Tensor, int], Tensor]

    def encode(self, values_E: Tensor) -> bytes:
        """Bytes of a 1-D fp32 tensor. Raises `PartInvalid` if a value is not finite."""
        if not is_finite(values_E):
            raise PartInvalid("this node's own update holds values that are not finite; it was not sent")
        return self._encode(values_E)

    def decode(self, body: Buffer, elements: int) -> Tensor:
        """The 1-D fp32 tensor that every member gets from these bytes. Raises `PartInvalid`."""
        expected = self.encoded_bytes(elements)
        if len(body) != expected:
            raise PartInvalid(
                f"a part of {elements} elements in {self.name} has {expected} bytes, this one {len(body)}"
            )
        if elements == 0:
            return torch.empty(0)
        raw = torch.frombuffer(body if isinstance(body, bytearray) else bytearray(body), dtype=torch.uint8)
        values_E = self._decode(raw, elements)
        if not is_finite(values_E):
            raise PartInvalid(f"a part in {self.name} holds values that are not finite")
        return values_E


def is_finite(values_E: Tensor) -> bool:
    """Whether all of them are; in one pass, without a temporary: not-a-number propagates into both ends."""
    if values_E.numel() == 0:
        return True
    low, high = torch.aminmax(values_E)
    return math.isfinite(low) and math.isfinite(high)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _encode_half(dtype: torch.dtype) -> Callable[[Tensor], bytes]:
    limit = torch.finfo(dtype).max
    return lambda values_E: _bytes_of(values_E.clamp(-limit, limit).to(dtype))


def _decode_as(dtype: torch.dtype) -> Callable[[Tensor, int], Tensor]:
    return lambda raw, elements: raw.view(dtype)[:elements].to(torch.float32)


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _in_blocks(values_E: Tensor) -> Tensor:
    blocks = _blocks(values_E.numel())
    return torch.nn.functional.pad(values_E, (0, blocks * BLOCK - values_E.numel())).view(blocks, BLOCK)


def _in_pieces(code_bytes: int, code: Callable[[Tensor, int, Tensor, Tensor], None]) -> Callable[[Tensor], bytes]:
    """`code` turns fp32 [blocks, BLOCK], of which so many elements are no padding, into scales and packed codes."""

    def encode(values_E: Tensor) -> bytes:
        blocks = _blocks(values_E.numel())
        encoded = torch.empty(blocks * (_SCALE_BYTES + code_bytes), dtype=torch.uint8)
        scales = encoded[: blocks * _SCALE_BYTES].view(torch.bfloat16)
        packed = encoded[blocks * _SCALE_BYTES :].view(blocks, code_bytes)
        for start in range(0, blocks, _CACHED_BLOCKS):
            end = start + _CACHED_BLOCKS
            piece_E = values_E[start * BLOCK : end * BLOCK]
            code(_in_blocks(piece_E), piece_E.numel(), scales[start:end], packed[start:end])
        return _bytes_of(encoded)

    return encode


def _quantise(values: Tensor, levels: int, scales: Tensor) -> Tensor:
    """Whole numbers in [-levels, levels] as fp32 [blocks, BLOCK]; sets the scales."""
    scales.copy_(values.abs().amax(dim=1).div_(levels))
    divisor = scales.to(torch.float32)
    divisor[divisor == 0] = 1.0  # then all values are zero, or round to it
    return torch.div(values, divisor.unsqueeze(1)).round_().clamp_(-levels, levels)


def _code_int8(values: Tensor, elements: int, scales: Tensor, packed: Tensor) -> None:
    packed.view(torch.int8).copy_(_quantise(values, 127, scales))


def _decode_int8(raw: Tensor, elements: int) -> Tensor:
    blocks = _blocks(elements)
    scales = raw[: blocks * _SCALE_BYTES].view(torch.bfloat16).to(torch.float32)
    codes = raw[blocks * _SCALE_BYTES :].view(torch.int8).view(blocks, BLOCK).to(torch.float32)
    return torch.mul(codes, scales.unsqueeze(1)).view(-1)[:elements]


def _code_int4(values: Tensor, elements: int, scales: Tensor, packed: Tensor) -> None:
    pairs = _quantise(values, 7, scales).add_(8.0).to(torch.uint8).view(torch.int16)
    packed.copy_(pairs | (pairs >> 4))  # the low byte of each


def _decode_int4(raw: Tensor, elements: int) -> Tensor:
    blocks = _blocks(elements)
    scales = raw[: blocks * _SCALE_BYTES].view(torch.bfloat16).to(torch.float32)
    packed = raw[blocks * _SCALE_BYTES :]
    nibbles = torch.stack((packed & 0x0F, packed >> 4), dim=1).view(blocks, BLOCK)
    codes = torch.sub(nibbles.to(torch.float32), 8.0)
    return torch.mul(codes, scales.unsqueeze(1)).view(-1)[:elements]


def _code_int2(values: Tensor, elements: int, scales: Tensor, packed: Tensor) -> None:
    filled = (elements - torch.arange(0, elements, BLOCK)).clamp(max=BLOCK)
    norms = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64)
    scales.copy_((norms / filled.sqrt()).clamp_(max=_INT2_LARGEST))
    limit = scales.to(torch.float32).unsqueeze(1) * _INT2_BETWEEN
    codes = (values > -limit).view(torch.uint8)
    codes += (values > _INT2_MIDDLE).view(torch.uint8)
    codes += (values >= limit).view(torch.uint8)
    fours = codes.view(torch.int32)
    fours |= fours >> 6
    packed.copy_(fours | (fours >> 12))  # the low byte of each


def _decode_int2(raw: Tensor, elements: int) -> Tensor:
    blocks = _blocks(elements)
    scales = raw[: blocks * _SCALE_BYTES].view(torch.bfloat16).to(torch.float32)
    packed = raw[blocks * _SCALE_BYTES :].to(torch.int32)
    levels = _INT2_FOURS.index_select(0, packed).view(blocks, BLOCK)
    return levels.mul_(scales.unsqueeze(1)).view(-1)[:elements]


def _blockwise(
    name: str,
    number: pb.Codec,
    code_bytes: int,
    code: Callable[[Tensor, int, Tensor, Tensor], None],
    decode: Callable[[Tensor, int], Tensor],
) -> Codec:
    block_bytes = _SCALE_BYTES + code_bytes
    return Codec(name, number, lambda n: _blocks(n) * block_bytes, _in_pieces(code_bytes, code), decode)


_ALL = (
    Codec("fp32", pb.CODEC_FP32, lambda n: 4 * n, _bytes_of, _decode_as(torch.float32)),
    Codec("bf16", pb.CODEC_BF16, lambda n: 2 * n, _encode_half(torch.bfloat16), _decode_as(torch.bfloat16)),
    Codec("fp16", pb.CODEC_FP16, lambda n: 2 * n, _encode_half(torch.float16), _decode_as(torch.float16)),
    _blockwise("int8", pb.CODEC_INT8, BLOCK, _code_int8, _decode_int8),
    _blockwise("int4", pb.CODEC_INT4, BLOCK // 2, _code_int4, _decode_int4),
    _blockwise("int2", pb.CODEC_INT2, BLOCK // 4, _code_int2, _decode_int2),
)
CODECS = {codec.name: codec for codec in _ALL}
BY_NUMBER = {codec.number: codec for codec in _ALL}
