"""Any frame instead of any frame: no crash, no hang, no wrong bit; the others settle and are right."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.exchange_swarm import ROUND, STALL, Swarm
from support.memory_network import FrameInTransit
from support.virtual_time import run_virtually

from atoll.core.frames import Frame, FrameKind
from atoll.v1 import dataplane_pb2 as dp

FRAMES = 24  # at least as many as b sends
CODEC = "int8"

uint32 = st.integers(0, 2**32 - 1) | st.integers(0, 20)
headers = (
    st.binary(max_size=40)
    | st.builds(
        lambda index, elements, codec: dp.PartHeader(index=index, elements=elements, codec=codec).SerializeToString(),
        uint32,
        uint32 | st.just(512),
        st.integers(0, 9),
    )
    | st.builds(
        lambda repair, known: dp.ExchangeHeader(
            round=ROUND.to_proto() if known else None, repair=repair
        ).SerializeToString(),
        st.lists(uint32, max_size=300),
        st.booleans(),
    )
    | st.builds(
        lambda reason, message: dp.Refusal(reason=reason, message=message).SerializeToString(),
        st.sampled_from(["PartInvalid", "DeadlineExceeded", "FrameInvalid", "Banned", "?", "UsageError"]),
        st.text(max_size=20),
    )
)


@settings(max_examples=150, deadline=None)
@given(
    nth=st.integers(0, FRAMES),
    kind=st.none() | st.sampled_from(FrameKind),
    header=st.none() | headers,
    body=st.none() | st.binary(max_size=100),
)
def test_any_frame_instead_of_any_frame(
    nth: int, kind: FrameKind | None, header: bytes | None, body: bytes | None
) -> None:
    async def scene() -> None:
        passed = 0

        async def replace(passage: FrameInTransit) -> Frame:
            nonlocal passed
            frame = passage.frame
            passed += passage.sender == "b"
            if passage.sender != "b" or passed != nth + 1:
                return frame
            return Frame(
                frame.kind if kind is None else kind,
                frame.header if header is None else header,
                frame.body if body is None else body,
            )

        swarm = Swarm({"a": 3, "b": 5, "c": 7}, CODEC, fault=replace)
        await swarm.run()
        assert swarm.seconds <= 4 * STALL.total_seconds()
        await swarm.settle_and_repair(["a", "c"])
        swarm.assert_true(["a", "c"])
        swarm.assert_nobody_blamed_but("b")
        await swarm.close()

    run_virtually(scene())
