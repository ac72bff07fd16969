"""Who counts as holding everything, and how much the others hold: as the planner's own tables have it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.coordinator.planner.worlds import LAYERS, TRAINING, machine, swarm

from atoll.coordinator.planner.capacity import Room
from atoll.coordinator.planner.tables import Tables
from atoll.v1 import membership_pb2 as mb

ROOM = Room(LAYERS, TRAINING)
WHOLE = int(ROOM.whole_device_bytes)


def profile(device_bytes: int, host_bytes: int = 1 << 40, device: str = "cuda:0", whole: int = 0) -> mb.NodeProfile:
    return mb.NodeProfile(
        device=device, device_memory_bytes=device_bytes, host_memory_bytes=host_bytes, whole_model_bytes=whole
    )


@settings(deadline=None)
@given(st.integers(1, 60 << 30), st.integers(1, 60 << 30), st.sampled_from(["cpu", "cuda:0"]))
def test_what_fits_is_what_the_planner_may_place(device_bytes: int, host_bytes: int, device: str) -> None:
    told = profile(device_bytes, host_bytes, device)
    same = machine(
        "ann",
        device_memory_bytes=float(device_bytes),
        host_memory_bytes=float(host_bytes),
        shares_memory=device == "cpu",
    )
    fitting = Tables(swarm([same])).fits(0)
    start, end = np.nonzero(fitting)
    assert ROOM.most_layers(told) == int((end - start).max(initial=0))
    assert ROOM.holds_all(told) == bool(fitting[0, len(LAYERS)])
    assert all(ROOM.fits(told, int(a), int(b) - 1) for a, b in zip(start, end, strict=True))


def test_who_tells_no_memory_counts_as_holding_everything() -> None:
    assert ROOM.holds_all(mb.NodeProfile())


def test_the_word_of_a_node_about_the_whole_model_counts() -> None:
    assert ROOM.holds_all(profile(WHOLE // 2, whole=WHOLE // 3))
    assert not ROOM.holds_all(profile(2 * WHOLE, whole=3 * WHOLE))
    assert ROOM.lent_bytes(profile(2 * WHOLE, whole=3 * WHOLE)) < ROOM.whole_device_bytes
    assert ROOM.lent_bytes(profile(2 * WHOLE)) == 2 * WHOLE
