"""Checks that this process computes the same bits as all members. Runs once, before a node takes part in rounds.

Members hold equal models because each of them decodes the same bytes and takes the same outer step. That needs IEEE 754
arithmetic in fp32: round to nearest, subnormal numbers kept, no multiply-add contracted. A library that sets
flush-to-zero for its own speed sets it for the whole thread, and then digests differ after some rounds. So this module
decodes known bytes with every codec, takes the weighted mean and the outer step, and compares one digest. It encodes
nothing: only a reducer encodes, and machines may differ there.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from atoll.core.errors import ArithmeticDiffers
from atoll.node.exchange.codecs import CODECS, Codec
from atoll.node.exchange.partition import BLOCK_ELEMENTS
from atoll.node.exchange.weighted_sum import weighted_mean
from atoll.node.state.outer_step import digest, outer_step

_ELEMENTS = 4096
_SMALLEST_NORMAL = 2.0**-126
EXPECTED = "cb75a1305a90af3170e2c191a67c2ae035c81a3aaa9dcebd49e1e3795b9dbe34"
_REMEDY = "find the library that sets flush-to-zero or fast math in this process, or use another build of PyTorch"


def known_vector(seed: int) -> Tensor:
    """Return fp32 [4096] made of SHA-256, the same on every machine: values in ±1e-3, some of them subnormal."""
    words = b"".join(hashlib.sha256(b"%d/%d" % (seed, block)).digest() for block in range(_ELEMENTS * 4 // 32))
    integers_E = torch.frombuffer(bytearray(words), dtype=torch.int32)
    is_subnormal_E = integers_E % 16 == 0
    is_subnormal_E[:256] = True  # whole blocks, so that scales are subnormal too
    subnormal_E = torch.bitwise_and(integers_E, 2**23 - 1).view(torch.float32)
    return torch.where(is_subnormal_E, subnormal_E, integers_E.to(torch.float32) * 2.0**-41)


def known_body(codec: Codec) -> bytes:
    """Return encoded bytes of 4096 finite values, made of the bits of a known vector without rounding."""
    bits_E = known_vector(3).view(torch.int32)
    bf16_E = (bits_E >> 16).to(torch.int16)
    match codec.name:
        case "fp32":
            return bits_E.numpy().tobytes()
        case "bf16":
            return bf16_E.numpy().tobytes()
        case "fp16":
            return torch.bitwise_and(bits_E, 0xBBFF - 2**16).to(torch.int16).numpy().tobytes()
    scales = torch.bitwise_and(bf16_E[::BLOCK_ELEMENTS], 0x7FFF).numpy().tobytes()
    codes = bits_E.numpy().tobytes()[: codec.encoded_bytes(_ELEMENTS) - len(scales)]
    return scales + codes


def computed_digest() -> str:
    """SHA-256 of the results of every codec, the mean and three outer steps on known bytes."""
    anchor_E, momentum_E = known_vector(1), known_vector(2)
    total = hashlib.sha256()
    for name, codec in sorted(CODECS.items()):
        average_E = codec.decode(known_body(codec), _ELEMENTS)
        for _ in range(3):
            anchor_E, momentum_E = outer_step(anchor_E, momentum_E, average_E, 0.7, 0.9)
        total.update(name.encode() + digest(average_E) + digest(anchor_E) + digest(momentum_E))
    total.update(digest(weighted_mean([anchor_E, momentum_E, known_vector(4)], [3, 7, 11])))
    return total.hexdigest()


def require_equal_bits() -> None:
    """Raise `ArithmeticDiffers` unless this thread computes the same bits as all members."""
    half = torch.tensor([_SMALLEST_NORMAL]) * 0.5
    if not half.item():
        raise ArithmeticDiffers(
            "subnormal numbers are flushed to zero in this process, so its model would differ from other nodes' models",
            _REMEDY,
        )
    if computed_digest() != EXPECTED:
        raise ArithmeticDiffers(
            "a known vector gives other bits here than on other nodes, so this node's model would differ from theirs",
            _REMEDY,
        )
