"""Messages survive the wire, bytes from a peer are checked, and int8 links train like fp32 ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.routes import RouteStages, layer_weights
from torch import Tensor

from atoll.core.built_in_shape import ModelShape
from atoll.core.clock import SystemClock
from atoll.core.errors import PeerMisbehaved
from atoll.core.run_spec import OptimizerSection, parse_run_spec
from atoll.node.data.corpus import load_corpus
from atoll.node.exchange.codecs import CODECS
from atoll.node.model.built_in import BuiltInArchitecture
from atoll.node.pipeline import messages
from atoll.node.pipeline.message_codec import FP32_BYTES, LinkFormat, pack, read_header, unpack
from atoll.node.pipeline.stage_checks import MicroBatchShape
from atoll.node.training.loader import Loader
from atoll.node.training.loop import InnerLoop
from atoll.node.training.sample_feed import SampleFeed
from atoll.v1 import common_pb2
from atoll.v1 import pipeline_pb2 as pb

LINK_FORMAT = LinkFormat(plan_version=3, route=1, samples=2, tokens=5, dimension=8, vocabulary=11, incarnation=9)


def carried(link_format: LinkFormat, codec: str) -> Callable[[messages.Message], messages.Message]:
    """There and back again."""

    def carry(message: messages.Message) -> messages.Message:
        header, body = pack(message, link_format, CODECS[codec])
        return unpack(read_header(header.SerializeToString(), link_format), body, link_format)

    return carry


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


MESSAGES: list[messages.Message] = [
    messages.Begin(7, 3),
    messages.Begin(7, 3, 0),
    messages.Report(7, (), 3.25, at_same_anchor=False),
    messages.Activation(7, 2, random(2, 5, 8), torch.arange(10).view(2, 5)),
    messages.Gradient(7, 1, random(1, 5, 8)),
    messages.Report(7, (0.1, 2.0), 3.25),
    messages.Verdict(7, 0.123456789),
    messages.Verdict(7, None),
    messages.Join(),
    messages.Join(messages.Decision(5, 4, 0.5)),
    messages.Join(messages.Decision(5, 4, None)),
    messages.Ready(),
    messages.TiedGradient(7, random(11, 8)),
    messages.TiedWeights(7, random(11, 8)),
    messages.Begin(7, 3, None, 0),
    messages.Begin(7, 3, 12, 345),
]
by_kind = pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)


def same(one: messages.Message, other: messages.Message, tolerance: float = 0.0) -> bool:
    pairs = list(zip(vars(one).values(), vars(other).values(), strict=True))
    return type(one) is type(other) and all(
        (left.shape == right.shape and bool((left - right).abs().max() <= tolerance))
        if isinstance(left, Tensor)
        else repr(left) == repr(right)  # a decision's factor, too, which makes no difference to who it is
        for left, right in pairs
    )


@by_kind
@pytest.mark.parametrize(("codec", "tolerance"), [("fp32", 0.0), ("bf16", 0.02), ("int8", 0.02)])
def test_every_message_arrives(message: messages.Message, codec: str, tolerance: float) -> None:
    assert same(carried(LINK_FORMAT, codec)(message), message, tolerance)


def test_int8_takes_a_quarter_of_the_bytes() -> None:
    link_format = LinkFormat(1, 0, 2, 64, 128, 11)
    message = messages.Gradient(1, 0, random(2, 64, 128))
    plain, coded = (len(pack(message, link_format, CODECS[name])[1]) for name in ("fp32", "int8"))
    assert coded == plain // 4 + 2 * plain // 4 // 128


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_arrives_as_that(value: float) -> None:
    broken_BTD = random(2, 5, 8)
    broken_BTD[1, 2, 3] = value
    arrived = carried(LINK_FORMAT, "int8")(messages.Gradient(1, 0, broken_BTD))
    assert isinstance(arrived, messages.Gradient)
    assert arrived.gradient_BTD.shape == broken_BTD.shape
    assert bool(arrived.gradient_BTD.isnan().all())
    assert arrived.gradient_BTD.untyped_storage().nbytes() == FP32_BYTES  # a header costs its reader no tensor


@pytest.mark.parametrize("broken_layer", [0, 2, 4], ids=["tied matrix", "activations", "gradients"])
def test_what_is_not_finite_costs_a_route_over_the_wire_a_step_and_not_the_weights(broken_layer: int) -> None:
    shape, room = ModelShape(48, 16, 3, 2, 1, 24, tie_embeddings=True), MicroBatchShape(samples=2, tokens=6)
    link_format = LinkFormat(plan_version=3, route=1, samples=2, tokens=6, dimension=16, vocabulary=48)
    route_stages = RouteStages(
        BuiltInArchitecture(shape),
        3,
        OptimizerSection(name="adamw", learning_rate=2e-3, weight_decay=0.1),
        room,
        carry=carried(link_format, "int8"),
    )
    route_stages.load(random(shape.parameters) * 0.1)
    before_E, tokens = route_stages.weights(), [torch.arange(14).view(2, 7) + number for number in range(2)]
    broken = next(
        layer_weights(each, broken_layer)[:1]
        for each in route_stages.models
        if broken_layer in each.span_definition.span
    )
    whole = broken.clone()
    broken.fill_(torch.nan)
    assert route_stages.route.flush(tokens).verdict.factor is None
    broken.copy_(whole)
    assert torch.equal(route_stages.weights(), before_E)
    assert route_stages.route.flush(tokens).verdict.factor is not None
    assert bool(route_stages.weights().isfinite().all())


def changed(**fields: object) -> pb.StageMessage:
    header, _ = pack(MESSAGES[3], LINK_FORMAT)
    for name, value in fields.items():
        part = header.activation if hasattr(header.activation, name) else header
        if name == "shape":
            del header.activation.shape[:]
            header.activation.shape.extend(value)  # type: ignore[arg-type]
        else:
            setattr(part, name, value)
    return header


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"plan_version": 2}, "plan 2"),
        ({"route": 0}, "route 0"),
        ({"incarnation": 8}, "incarnation 8"),
        ({"body_bytes": 2**60}, "header announces"),
        ({"not_finite": True}, "header announces"),
        ({"shape": [2**31, 5, 8]}, "not allowed on this route"),
        ({"shape": [0, 5, 8]}, "not allowed on this route"),
        ({"shape": [2, 5]}, "not allowed on this route"),
        ({"shape": [1] * 10_000}, "not allowed on this route"),
        ({"codec": common_pb2.CODEC_INT4}, "not allowed on this route"),
        ({"codec": 77}, "not allowed on this route"),
    ],
)
def test_a_header_out_of_bounds_is_refused_before_its_body_is_read(fields: dict[str, object], words: str) -> None:
    with pytest.raises(PeerMisbehaved, match=words):
        read_header(changed(**fields).SerializeToString(), LINK_FORMAT)


def test_truncated_bodies_and_invalid_verdicts_are_refused() -> None:
    header, body = pack(MESSAGES[3], LINK_FORMAT)
    with pytest.raises(PeerMisbehaved, match="body bytes arrived"):
        unpack(header, body[:-1], LINK_FORMAT)
    with pytest.raises(PeerMisbehaved, match="NaN or infinite"):
        unpack(header, b"\xff" * len(body), LINK_FORMAT)
    for verdict in (pb.FlushVerdict(), pb.FlushVerdict(factor=1.5), pb.FlushVerdict(factor=torch.nan)):
        empty = pb.StageMessage(plan_version=3, route=1, incarnation=9, flush=1, verdict=verdict)
        with pytest.raises(PeerMisbehaved, match="a verdict"):
            unpack(read_header(empty.SerializeToString(), LINK_FORMAT), b"", LINK_FORMAT)
    with pytest.raises(PeerMisbehaved, match="no content field"):
        read_header(pb.StageMessage(plan_version=3, route=1, incarnation=9).SerializeToString(), LINK_FORMAT)


@given(st.sampled_from(MESSAGES), st.integers(0, 2**32), st.binary(max_size=8), st.binary(max_size=80))
def test_damaged_bytes_raise_our_error_or_make_a_message_that_fits(
    message: messages.Message, place: int, noise: bytes, other: bytes
) -> None:
    header, body = pack(message, LINK_FORMAT, CODECS["int8"])
    data = bytearray(header.SerializeToString())
    data[place % len(data) : place % len(data) + len(noise)] = noise
    for raw in (bytes(data), other):
        try:
            read = read_header(raw, LINK_FORMAT)
            assert read.body_bytes <= 11 * 8 * 4
            unpack(read, bytes(body).ljust(read.body_bytes, b"\1")[: read.body_bytes], LINK_FORMAT)
        except PeerMisbehaved:
            pass


# --- training -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
def test_int8_both_ways_over_four_stages_learns_what_fp32_does(tmp_path: Path) -> None:
    words = ["a reef", "is a ring", "of islands", "the lagoon", "lies within", "waves break", "on coral"]
    order = torch.randint(0, 7, (4000,), generator=torch.Generator().manual_seed(1)).tolist()
    (tmp_path / "text.txt").write_text("; ".join(words[index] for index in order))
    spec = parse_run_spec(
        'version = 1\n[run]\nname = "t"\nstop_tokens = 100000\n[model]\n'
        "dimension = 64\nlayers = 2\nheads = 4\nkv_heads = 2\nhidden_dimension = 128\n"
        f'[data]\npath = "{tmp_path}"\nsequence_length = 32\nvalidation_samples = 32\n'
        "[optimizer]\nlearning_rate = 0.004\n[sync]\nround_tokens = 1000\n"
    )
    corpus = load_corpus(spec)
    loop = InnerLoop(spec, corpus, "cpu")
    initial_E = torch.empty(loop.layout.elements)
    loop.initialise_into(initial_E)
    found = {}
    link_format = LinkFormat(1, 0, 4, 32, 64, 256)
    try:
        for codec in ("fp32", "int8"):
            route_stages = RouteStages(
                loop.run.architecture, 4, spec.optimizer, MicroBatchShape(4, 32), carry=carried(link_format, codec)
            )
            route_stages.load(initial_E)
            loader = Loader(corpus, 8, SystemClock())
            loader.restart(SampleFeed(((0, 10_000),)))
            for _ in range(90):
                route_stages.route.flush(list(torch.split(loader.next().tokens_BT, 4)))
            loader.close()
            found[codec] = loop.evaluate(route_stages.weights())
        before = loop.evaluate(initial_E)
    finally:
        loop.close()
    assert found["fp32"] < 0.5 * before
    assert found["int8"] == pytest.approx(found["fp32"], rel=0.03)  # bf16 and chance differ by one
