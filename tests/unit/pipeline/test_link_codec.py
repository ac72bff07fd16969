"""Where links of a route have room for bf16, and what their trainer is told."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from atoll.core.clock import SystemClock
from atoll.core.run_spec import parse_run_spec
from atoll.node.pipeline.link_codec import NARROW_ABOVE, NARROW_CODEC, WIDE_CODEC, WIDEN_BELOW, LinkCodecs, choose_codec
from atoll.node.pipeline.route import RoutePlace
from atoll.node.pipeline.stage_socket import FrameType, StageSocket
from atoll.node.run.route_membership import RouteMembership
from atoll.node.trainer.messages import TrainerStatus
from atoll.node.trainer.trainer import Trainer
from atoll.node.wire.transport import Network
from atoll.v1 import plan_pb2

SPEC = """
version = 1
[run]
name = "t"
stop_tokens = 1000000
[model]
preset = "nano"
[data]
path = "nowhere"
sequence_length = 32
[optimizer]
name = "adamw"
micro_batch_samples = 3
[sync]
round_tokens = 1000
[pipeline]
codec = "{codec}"
"""
RATES = st.floats(min_value=1.0, max_value=1e12)


@given(st.sampled_from((NARROW_CODEC, WIDE_CODEC)), RATES, RATES)
def test_bf16_is_where_it_takes_little_of_the_link_and_stays_while_it_takes_no_more_than_most(
    before: str, wanted: float, rate: float
) -> None:
    chosen = choose_codec(before, wanted, rate)
    assert choose_codec(chosen, wanted, rate) == chosen  # nobody goes to and fro
    if wanted <= WIDEN_BELOW * rate:
        assert chosen == WIDE_CODEC
    elif wanted > NARROW_ABOVE * rate:
        assert chosen == NARROW_CODEC
    else:
        assert chosen == before


@given(st.sampled_from((NARROW_CODEC, WIDE_CODEC)), RATES)
def test_what_is_not_known_is_int8_unless_the_other_side_is_near(before: str, known: float) -> None:
    assert (
        choose_codec(before, 0.0, known)
        == choose_codec(before, known, 0.0)
        == choose_codec(before, 0.0, 0.0)
        == NARROW_CODEC
    )
    assert choose_codec(before, 0.0, math.inf) == choose_codec(before, known, math.inf) == WIDE_CODEC


class Told:
    """A stage socket that records frames."""

    def __init__(self) -> None:
        self.frames: list[tuple[FrameType, int, bytes]] = []

    def send_nowait(self, frame_type: FrameType, stage: int, incarnation: int, payload: bytes) -> None:
        self.frames.append((frame_type, stage, payload))


def codes_at(stage: int, rates: dict[str, float], seconds: list[float], told: Told) -> LinkCodecs:
    place = RoutePlace(1, 0, ("ann", "bob", "cleo"), stage)
    return LinkCodecs(cast("StageSocket", told), place, 500_000, lambda: seconds[0], lambda peer: rates[peer])


def test_a_trainer_is_told_of_each_link_when_its_code_changes() -> None:
    told, rates, seconds = Told(), {"ann": 50e6, "cleo": 1e6}, [0.0]
    codecs = codes_at(1, rates, seconds, told)
    codecs.update()
    assert told.frames == []  # nobody knows how long computing takes
    seconds[0] = 0.1  # 10 MB/s in bf16
    codecs.update()
    codecs.update()
    assert told.frames == [(FrameType.CODEC, 0, b"bf16")]
    rates["cleo"], rates["ann"] = math.inf, 15e6
    codecs.update()
    assert told.frames[1:] == [(FrameType.CODEC, 0, b"int8"), (FrameType.CODEC, 2, b"bf16")]


async def test_whatever_it_was_told_before_a_trainer_hears_the_codes_of_its_links_at_first() -> None:
    told = Told()
    running = asyncio.create_task(codes_at(1, {"ann": math.inf, "cleo": 0.0}, [0.1], told).run())
    await asyncio.sleep(0)
    running.cancel()
    assert told.frames == [(FrameType.CODEC, 0, b"int8"), (FrameType.CODEC, 2, b"int8"), (FrameType.CODEC, 0, b"bf16")]


def test_a_link_wants_what_a_micro_batch_takes_in_the_time_that_the_stage_computes_it() -> None:
    spec = parse_run_spec(SPEC.format(codec="auto"))
    table = plan_pb2.LayerTable(layers=[plan_pb2.LayerInfo(activation_bytes_per_token=4 * 64)] * 2)
    status = TrainerStatus(busy_seconds_per_token=0.001)
    trainer = SimpleNamespace(facts=SimpleNamespace(layers=table), status=status)
    network = SimpleNamespace(handle=lambda protocol, handler: None, bytes_per_second_to=lambda peer: rates[peer])
    on_route = RouteMembership(cast("Network", network), spec, "ann", SystemClock())
    told = Told()
    place, socket = RoutePlace(1, 0, ("ann", "bob"), 0), cast("StageSocket", told)
    codecs = on_route._link_codec_choice(place, socket, cast("Trainer", trainer))
    assert codecs is not None
    wanted = 2 * 64 / 0.001  # bytes of a token in bf16, and how long it is computed: 128 kB/s
    rates = {"bob": 0.99 * wanted / WIDEN_BELOW}
    codecs.update()
    assert told.frames == []
    rates["bob"] = 1.01 * wanted / WIDEN_BELOW
    codecs.update()
    assert told.frames == [(FrameType.CODEC, 1, b"bf16")]
    fixed = RouteMembership(cast("Network", network), parse_run_spec(SPEC.format(codec="int8")), "ann", SystemClock())
    assert fixed._link_codec_choice(place, socket, cast("Trainer", trainer)) is None


def test_the_ends_of_a_route_have_one_link() -> None:
    for stage, neighbour in ((0, 1), (2, 1)):
        told = Told()
        codes_at(stage, {"bob": math.inf}, [0.1], told).update()
        assert told.frames == [(FrameType.CODEC, neighbour, b"bf16")]
