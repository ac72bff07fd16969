"""Whatever frames a member sends in an exchange, as contributor and as reducer: the others end in time, and equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exchange_swarm import STALL, Swarm
from support.memory_network import FrameInTransit
from support.mutation import CASES, Mutator, cases, seeds
from support.virtual_time import run_virtually

from atoll.core.frames import Frame, FrameKind
from atoll.v1 import dataplane_pb2 as dp


@pytest.mark.parametrize("examples", CASES)
def test_whatever_frames_a_member_sends(examples: int) -> None:
    """b changes, repeats and swallows frames; a and c settle on the same bits, and blame nobody but b."""

    @cases(examples)
    @given(seeds, st.sampled_from([0.05, 0.3, 1.0]), st.sampled_from(["fp32", "fp16", "int8", "int4"]))
    def exchange(seed: int, often: float, codec: str) -> None:
        async def scene() -> None:
            mutator = Mutator(seed)
            before: list[Frame] = []

            async def change(passage: FrameInTransit) -> Frame | None:
                frame, rng = passage.frame, mutator.rng
                if passage.sender != "b" or rng.random() >= often:
                    return frame
                before.append(frame)
                what = rng.random()
                if what < 0.1:
                    return None
                if what < 0.2:
                    return rng.choice(before)
                message = {FrameKind.MESSAGE: dp.ExchangeHeader, FrameKind.PART: dp.PartHeader}.get(frame.kind)
                return mutator.frame(frame, message)

            swarm = Swarm({"a": 3, "b": 5, "c": 7}, codec, fault=change)
            await swarm.run()
            assert swarm.seconds <= 10 * STALL.total_seconds()
            await swarm.settle_and_repair(["a", "c"])
            assert bool((swarm.averages["a"] == swarm.averages["c"]).all())
            assert bool(swarm.averages["a"].isfinite().all())
            swarm.assert_nobody_blamed_but("b")
            await swarm.close()

        run_virtually(scene())

    exchange()
