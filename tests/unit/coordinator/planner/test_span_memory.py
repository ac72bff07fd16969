"""Spans that fit a node's memory are those of the planner's tables and of the trainer."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.coordinator.planner.worlds import LAYERS, TRAINING, machine, swarm
from unit.coordinator.world import spec_toml

from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.problem import Wishes
from atoll.coordinator.planner.problem_from_nodes import problem_from_nodes
from atoll.coordinator.planner.question import PlannerNode
from atoll.coordinator.planner.span_memory import SpanMemory, span_memory
from atoll.core.document_masks import mask_memory
from atoll.core.run_spec import parse_run_spec
from atoll.node.model.memory_estimate import StageTraffic, stage_trainer_memory_bytes
from atoll.node.model.span import Span
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import plan_pb2

ROOM = SpanMemory(LAYERS, TRAINING)
WHOLE = int(ROOM.device_bytes(0, len(LAYERS) - 1))


def profile(device_bytes: int, host_bytes: int = 1 << 40, device: str = "cuda:0", whole: int = 0) -> mb.NodeProfile:
    return mb.NodeProfile(
        device=device,
        device_memory_bytes=device_bytes,
        host_memory_bytes=host_bytes,
        whole_model_bytes=whole,
        tokens_per_second=1e3,
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
    fitting = CostTables(swarm([same])).fits(0)
    start, end = np.nonzero(fitting)
    assert ROOM.most_layers(told) == int((end - start).max(initial=0))
    assert ROOM.holds_all(told) == bool(fitting[0, len(LAYERS)])
    assert all(ROOM.fits(told, int(a), int(b) - 1) for a, b in zip(start, end, strict=True))


@settings(deadline=None)
@given(
    st.integers(1, 12),
    st.sampled_from([64, 256, 1024]),
    st.integers(1, 8),
    st.sampled_from([64, 512]),
    st.sampled_from(["own head", "tied", "adapters"]),
    st.booleans(),
    st.data(),
)
def test_no_span_is_planned_that_its_trainer_would_refuse(
    blocks: int, width: int, micro_batches: int, sequence_length: int, kind: str, masks: bool, data: st.DataObject
) -> None:
    """Nodes estimate what a stage takes, too: never more than the planner does."""
    spec = parse_run_spec(
        f'version = 1\n[run]\nname = "reef"\nstop_tokens = 1\n[data]\npath = "x"\nsequence_length = {sequence_length}\n'
        f"document_masks = {str(masks).lower()}\n[pipeline]\nmicro_batches = {micro_batches}\n"
        "[sync]\nround_tokens = 1000\n"
    )
    parameters, vocabulary, tied = 12 * width * width, 512, kind == "tied"
    flops = 2.0 * parameters + 2.0 * width * sequence_length
    table = plan_pb2.LayerTable(
        layers=[
            plan_pb2.LayerInfo(
                name="embedding", kind="embedding", parameters=vocabulary * width, activation_bytes_per_token=4 * width
            ),
            *(
                plan_pb2.LayerInfo(
                    name=f"block.{number}",
                    kind="block",
                    parameters=parameters,
                    flops_per_token_forward=flops,
                    activation_bytes_per_token=4 * width,
                    masked_bytes_per_token=7 * width if masks else 0,  # of heads that share keys and values
                )
                for number in range(blocks)
            ),
            plan_pb2.LayerInfo(
                name="head",
                kind="head",
                parameters=width if tied else width + vocabulary * width,
                flops_per_token_forward=2.0 * vocabulary * width,
                activation_bytes_per_token=4 * vocabulary,
                tied_to=["embedding"] if tied else [],
            ),
        ]
    )
    if kind == "adapters":
        for row in table.layers:
            row.frozen_parameters = row.parameters
            row.parameters = 64 * width if row.kind == "block" else 0
    first = data.draw(st.integers(0, blocks + 1))
    last = data.draw(st.integers(first, blocks if first == 0 else blocks + 1))
    planned = span_memory(table.SerializeToString(), spec)
    assert planned is not None
    ahead = spec.pipeline.ahead
    most = min(micro_batches, (1 + ahead) * (blocks + 1 - first) + 1)  # credits of a stage, before one stage a layer
    traffic = StageTraffic(4 * sequence_length, sequence_length, most, mask_memory(spec, table.layers, 4))
    needed = stage_trainer_memory_bytes(table, Span(first, last), traffic)
    assert planned.device_bytes(first, last) >= 0.97 * needed
    assert planned.device_bytes(first, last) <= 1.1 * needed


def test_a_node_without_a_memory_report_counts_as_holding_all_layers() -> None:
    assert ROOM.holds_all(mb.NodeProfile())


def test_a_nodes_report_about_the_whole_model_counts() -> None:
    for told, holds in ((profile(WHOLE // 2, whole=WHOLE // 3), True), (profile(2 * WHOLE, whole=3 * WHOLE), False)):
        assert ROOM.holds_all(told) is holds
        node = PlannerNode("peer", "ann", told, mb.NodeStatus(), (), {})
        fits = CostTables(problem_from_nodes([node], LAYERS, parse_run_spec(spec_toml()), Wishes()).problem).fits(0)
        assert fits[0, len(LAYERS)] == holds
