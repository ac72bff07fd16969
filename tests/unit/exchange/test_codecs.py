"""Codecs: what a member gets back is close to what was sent, has the right size, and cannot be poisoned."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import PartInvalid
from atoll.node.exchange.codecs import CODECS, PIECE_ELEMENTS

# largest error relative to the largest magnitude in a block of 128
TOLERANCE = {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-10, "int8": 0.55 / 127, "int4": 0.55 / 7, "int2": 0.87}
names = st.sampled_from(sorted(CODECS))


@given(names, st.integers(1, 700), st.integers(0, 2**31), st.floats(-5, 4))
def test_error_stays_within_half_a_step_of_the_block(name, elements, seed, log_scale):
    values = torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * 10**log_scale
    codec = CODECS[name]
    body = codec.encode(values)
    assert len(body) == codec.encoded_bytes(elements)
    decoded = codec.decode(body, elements)
    for start in range(0, elements, 128):
        block, back = values[start : start + 128], decoded[start : start + 128]
        limit = TOLERANCE[name] * float(block.abs().max()) * 1.01 + 1e-7
        assert float((block - back).abs().max()) <= limit


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_tiny_updates_survive_block_scales(name):
    values = torch.full((256,), 3e-9)
    assert torch.allclose(CODECS[name].decode(CODECS[name].encode(values), 256), values, rtol=0.02)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_zeros_stay_zeros(name):
    assert not CODECS[name].decode(CODECS[name].encode(torch.zeros(300)), 300).any()


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_own_nonfinite_values_are_not_sent(name, value):
    values = torch.ones(200)
    values[77] = value
    with pytest.raises(PartInvalid):
        CODECS[name].encode(values)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_peers_nonfinite_body_is_refused(name):
    body = bytearray(CODECS[name].encode(torch.ones(256)))
    body[:4] = b"\xff\xff\xff\xff"  # NaN as fp32, fp16, bf16 and as a bf16 scale
    with pytest.raises(PartInvalid):
        CODECS[name].decode(body, 256)


@given(names, st.integers(0, 600), st.integers(-40, 40))
def test_a_body_of_another_size_is_refused(name, elements, difference):
    codec = CODECS[name]
    size = max(0, codec.encoded_bytes(elements) + difference)
    if size == codec.encoded_bytes(elements):
        return
    with pytest.raises(PartInvalid):
        codec.decode(bytes(size), elements)


def test_int2_keeps_signs_and_most_of_a_normal_distribution():
    values = torch.randn(128_000, generator=torch.Generator().manual_seed(0))
    decoded = CODECS["int2"].decode(CODECS["int2"].encode(values), len(values))
    assert torch.equal(decoded.sign(), values.sign())
    assert (decoded - values).norm() / values.norm() < 0.35  # 0.343 is the least that four levels can leave
    assert decoded.mean().abs() < 0.01


@pytest.mark.parametrize("elements", [1, 5, 32, 127, 129])
def test_int2_does_not_shrink_a_last_block_that_is_not_full(elements):
    values = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    last = elements % 128
    decoded = CODECS["int2"].decode(CODECS["int2"].encode(values), elements)
    assert decoded[-last:].norm() > 0.45 * values[-last:].norm()


def test_int2_moves_zeros_neither_up_nor_down_and_keeps_what_is_all_zero():
    values = torch.zeros(256)
    values[:128:4] = values[1:128:4] = torch.tensor([1.0, -1.0] * 16)
    decoded = CODECS["int2"].decode(CODECS["int2"].encode(values), 256)
    assert decoded[values == 0].sum().abs() < 0.5 * decoded.abs().max()
    assert not decoded[128:].any()


def test_int2_takes_the_largest_values_there_are():
    values = torch.full((128,), 3e38)
    assert torch.isfinite(CODECS["int2"].decode(CODECS["int2"].encode(values), 128)).all()


def test_int2_costs_a_fifteenth():
    assert 4 * 1_000_000 / CODECS["int2"].encoded_bytes(1_000_000) > 15


def test_int4_costs_an_eighth():
    assert 4 * 1_000_000 / CODECS["int4"].encoded_bytes(1_000_000) > 7.7


def plainly(name: str, body: bytes, elements: int) -> np.ndarray:
    """What the layout says that the bytes are, number by number."""
    if name in ("fp32", "fp16"):
        return np.frombuffer(body, "<f4" if name == "fp32" else "<f2").astype(np.float32)
    if name == "bf16":
        return (np.frombuffer(body, "<u2").astype(np.uint32) << 16).view(np.float32)
    blocks = -(-elements // 128)
    scales = (np.frombuffer(body[: 2 * blocks], "<u2").astype(np.uint32) << 16).view(np.float32)
    packed = np.frombuffer(body[2 * blocks :], np.uint8)
    if name == "int8":
        levels = packed.view(np.int8).astype(np.float32)
    elif name == "int4":
        levels = np.stack([packed & 15, packed >> 4], axis=1).astype(np.float32).ravel() - np.float32(8)
    else:
        four = np.array([-1.510, -0.4528, 0.4528, 1.510], np.float32)
        levels = four[np.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1).ravel()]
    return (levels.reshape(blocks, 128) * scales[:, None]).ravel()[:elements]


@given(
    names,
    st.integers(1, 1000)
    | st.sampled_from([PIECE_ELEMENTS - 1, PIECE_ELEMENTS, PIECE_ELEMENTS + 1, 2 * PIECE_ELEMENTS + 300]),
    st.data(),
)
def test_decoding_gives_the_bits_that_the_layout_says(name, elements, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    body = bytearray(rng.bytes(CODECS[name].encoded_bytes(elements)))  # any codes, also those that nobody sends
    if name in ("int8", "int4", "int2"):
        blocks = -(-elements // 128)
        scales = (rng.standard_normal(blocks) * 10.0 ** rng.integers(-30, 30)).astype(np.float32)
        body[: 2 * blocks] = (scales.view(np.uint32) >> 16).astype("<u2").tobytes()
    expected = plainly(name, bytes(body), elements)
    if not np.isfinite(expected).all():
        with pytest.raises(PartInvalid):
            CODECS[name].decode(body, elements)
        return
    decoded = CODECS[name].decode(body, elements)
    assert decoded.numpy().tobytes() == expected.tobytes()


@given(names, st.integers(1, 3 * PIECE_ELEMENTS), st.integers(0, 2))
def test_pieces_are_what_the_whole_is(name, elements, piece):
    values = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    codec = CODECS[name]
    body = codec.encode(values)
    first = piece * PIECE_ELEMENTS
    if first < elements:
        some = torch.empty(min(PIECE_ELEMENTS, elements - first))
        codec.open(body, elements).decode_into(first, some)
        assert torch.equal(some, codec.decode(body, elements)[first : first + len(some)])


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
@pytest.mark.parametrize("scale", [0x7F80, 0xFF80, 0x7FC1, 0x7F7F, 0xFF7F])  # infinities, no number, the largest
def test_a_scale_that_makes_values_infinite_is_refused(name, scale):
    body = bytearray(CODECS[name].encode(torch.ones(300)))
    body[2:4] = scale.to_bytes(2, "little")
    with pytest.raises(PartInvalid):
        CODECS[name].open(body, 300)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_huge_scale_with_small_codes_is_finite_and_taken(name):
    body = bytearray(CODECS[name].encode(torch.zeros(300)))
    body[2:4] = (0x7F7F).to_bytes(2, "little")
    assert torch.isfinite(CODECS[name].decode(body, 300)).all()
