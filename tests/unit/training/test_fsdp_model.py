"""Shards, samples and memory of a node with several devices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.built_in_shape import ModelShape
from atoll.core.clock import SystemClock
from atoll.core.errors import ConfigError
from atoll.core.run_spec import parse_run_spec
from atoll.node.model.built_in import BuiltInArchitecture
from atoll.node.model.flat_layout import FlatLayout
from atoll.node.model.local_weights import ALL, ShardedWeights, ShardSlices, WholeWeights
from atoll.node.model.memory_estimate import usable_bytes
from atoll.node.model.run_model import run_model
from atoll.node.model.span import Span
from atoll.node.model.span_model import layout_of
from atoll.node.trainer.device_room import stage_bytes, usable_facts
from atoll.node.trainer.loading import load_trainer_state
from atoll.node.trainer.messages import TrainerConfig
from atoll.node.training.device import DeviceFacts
from atoll.node.training.device_group import DeviceGroup, Rendezvous, choose_devices, combined_facts, no_other_ranks
from atoll.node.training.device_names import parse_device_names

CPU = torch.device("cpu")
SHAPES = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 3)), max_size=5)  # none: all is frozen


def layout_with(shapes: list[tuple[int, int]]) -> FlatLayout:
    return FlatLayout.of_layers({f"p{number}": torch.empty(shape)} for number, shape in enumerate(shapes))


def weights_of(layout: FlatLayout, rank: int, size: int, values_E: torch.Tensor) -> ShardedWeights:
    pieces = ShardSlices.of(layout, rank, size)
    return ShardedWeights(pieces, [values_E[it].clone() for it in pieces.slices], CPU)


@given(shapes=SHAPES, size=st.integers(1, 5), data=st.data())
def test_shards_of_all_devices_make_the_whole_vector(shapes, size, data):
    layout = layout_with(shapes)
    values_E = torch.arange(layout.elements, dtype=torch.float32)
    start = data.draw(st.integers(0, layout.elements))
    part = slice(start, data.draw(st.integers(start, layout.elements)))
    gathered_E, moved_E = torch.full_like(values_E, -1), torch.zeros_like(values_E)
    for rank in range(size):
        its = weights_of(layout, rank, size, values_E)
        assert torch.equal(its.local_values(values_E), its.read())
        assert torch.equal(its.read()[its.local_slice(part)], its.read(part))
        its.write_to(its.read(part), gathered_E, part)
        with its.modify(part) as values:
            values.add_(1)
        its.write_to(its.read(), moved_E)
        before = its.read()
        its.fill(values_E * 3)
        assert torch.equal(its.read(), its.local_values(values_E * 3))
        its.restore(before)
        assert torch.equal(its.read(), before)
    assert torch.equal(gathered_E[part], values_E[part])
    assert torch.all(gathered_E[: part.start] == -1)
    assert torch.all(gathered_E[part.stop :] == -1)
    whole = WholeWeights(values_E)
    with whole.modify(part) as values:
        values.add_(1)
    assert torch.equal(moved_E, values_E)


@given(shapes=SHAPES, size=st.integers(1, 5))
def test_parameters_are_split_where_torch_splits_them(shapes, size):
    layout = layout_with(shapes)
    values_E = torch.arange(layout.elements)
    for rank in range(size):
        for (_, view), it in zip(layout.views(values_E), ShardSlices.of(layout, rank, size).slices, strict=True):
            chunks = torch.chunk(view, size)
            expected = chunks[rank] if rank < len(chunks) else view[:0]
            assert torch.equal(values_E[it], expected.flatten())


@given(rows=st.integers(1, 20), size=st.integers(1, 5), at_most=st.integers(1, 6))
def test_every_sample_counts_once_and_all_devices_compute_equally_many_micro_batches(rows, size, at_most):
    batch_BT = torch.arange(rows).view(rows, 1).expand(rows, 2)
    weights, turns = torch.zeros(rows), set()
    for rank in range(size):
        shares = list(DeviceGroup(rank, size, CPU, None, no_other_ranks).rank_micro_batches(batch_BT, at_most))  # type: ignore[arg-type]
        turns.add(len(shares))
        for share_BT, times in shares:
            assert 1 <= len(share_BT) <= -(-at_most // size)
            for row in share_BT[:, 0].tolist():  # a mean over the rows, over `times`
                weights[row] += 1 / len(share_BT) / times
    assert len(turns) == 1
    torch.testing.assert_close(weights, torch.full((rows,), 1 / rows))


def test_local_slices_of_a_shard_follow_the_layer_offsets():
    layout = layout_of(BuiltInArchitecture(ModelShape(11, 8, 2, 2, 2, 12)).span_definition(Span(0, 3)))
    for rank in range(3):
        its = weights_of(layout, rank, 3, torch.zeros(layout.elements))
        offsets = [its.local_slice(slice(0, end)).stop for end in layout.layer_offsets]
        assert offsets[-1] == its.elements == its.local_values(torch.zeros(layout.elements), ALL).numel()
        assert offsets == sorted(offsets)


@pytest.mark.parametrize(
    "name", ["cpu,", "cpu,auto", "auto,auto", "cpu,cuda:0", "mps,mps", "cuda:0,cuda:0", "cuda,cuda:0"]
)
def test_device_lists_that_cannot_work_together_are_refused(name):
    with pytest.raises(ConfigError, match=r"several GPUs of one kind|at a comma"):
        parse_device_names(name)
    with pytest.raises(ConfigError):
        choose_devices(name)


@pytest.mark.parametrize("name", ["cpu", "cuda:3", "cuda", "cpu,cpu", "cuda:0, cuda:1"])
def test_device_lists_that_can_work_together_are_accepted(name):
    assert len(parse_device_names(name)) == name.count(",") + 1


def test_the_memory_of_several_gpus_is_that_of_the_smallest_times_their_number(monkeypatch):
    sizes = {0: 24 * 10**9, 1: 8 * 10**9}

    def facts(device, *_):
        return DeviceFacts(str(device), "card", sizes[device.index], f"GPU-{device.index}")

    monkeypatch.setattr("atoll.node.training.device_group.device_facts", facts)
    together = combined_facts([torch.device("cuda", 0), torch.device("cuda", 1)])
    assert together == DeviceFacts("cuda:0,cuda:1", "2 × card", 16 * 10**9, "GPU-0,GPU-1")


def test_cpu_devices_share_one_memory():
    alone, both = combined_facts([CPU], memory_bytes=10**9), combined_facts([CPU, CPU], memory_bytes=10**9)
    assert both.memory_bytes == alone.memory_bytes
    assert both.device == "cpu,cpu"
    assert both.name == f"2 × {alone.name}"


# --- memory -------------------------------------------------------------------------------------------

MODEL = """
version = 1
[run]
name = "t"
stop_tokens = 1000
[model]
dimension = 64
layers = {layers}
heads = 4
kv_heads = 4
hidden_dimension = 128
[data]
path = "nowhere"
sequence_length = 64
[optimizer]
name = "adamw"
micro_batch_samples = {samples}
[sync]
round_tokens = 1000
"""
HAS = DeviceFacts("cpu,cpu", "card", 10**9)


def usable_by(devices: int, layers: int = 4, samples: int = 4) -> int:
    spec = parse_run_spec(MODEL.format(layers=layers, samples=samples))
    return usable_facts(HAS, spec, run_model(spec, 256), devices).memory_bytes


def test_the_extra_memory_of_several_devices_does_not_grow_with_depth():
    assert usable_by(1) == HAS.memory_bytes
    assert HAS.memory_bytes > usable_by(2) > 0.99 * HAS.memory_bytes
    assert usable_by(2, layers=4) == usable_by(2, layers=64)
    assert usable_by(4) < usable_by(2)


def test_a_sample_that_cannot_be_divided_costs_memory_on_each_device():
    assert usable_by(2, samples=1) < 0.9 * usable_by(2, samples=2)
    assert usable_by(3, samples=4) < 0.95 * usable_by(4, samples=4)


def test_frozen_parameters_are_whole_on_each_device():
    spec = parse_run_spec(MODEL.format(layers=4, samples=4))
    table = run_model(spec, 256).table
    plain = usable_bytes(table, 10**9, 2, 1.0)
    table.layers[1].frozen_parameters = 10**6
    assert usable_bytes(table, 10**9, 2, 1.0) == pytest.approx(plain / 2, abs=1)
    assert usable_bytes(table, 1000, 2, 1.0) == 0


def test_rows_that_do_not_divide_make_one_device_the_largest():
    layout = layout_with([(4, 100), (3, 1)])
    assert ShardSlices.largest_share_ratio(layout, 1) == 1.0
    assert ShardSlices.largest_share_ratio(layout, 3) == pytest.approx(3 * (200 + 1) / 403)
    most = max(ShardSlices.of(layout, rank, 3).offsets[-1] for rank in range(3))
    assert ShardSlices.largest_share_ratio(layout, 3) == pytest.approx(3 * most / 403)


def test_layer_times_divide_by_the_number_of_devices(monkeypatch, tmp_path):
    measured = (("embedding", 1.0, 2.0), ("block", 3.0, 4.0), ("head", 5.0, 6.0))
    monkeypatch.setattr("atoll.node.trainer.loading.measure_layer_times", lambda *_: measured)
    toml = MODEL.format(layers=4, samples=4).replace("nowhere", str(tmp_path / "text.txt"))
    (tmp_path / "text.txt").write_text("a reef is a ring of islands; " * 400)
    small = DeviceFacts("cpu", "card", usable_for_a_layer(toml))  # it holds nothing, and meets nobody
    several = Rendezvous((CPU, CPU), 0, -1)
    loaded = load_trainer_state(TrainerConfig(toml, device="cpu,cpu"), small, None, SystemClock(), several)
    assert loaded.loop is None
    assert loaded.times == tuple((kind, there / 2, back / 2) for kind, there, back in measured)


def usable_for_a_layer(toml: str) -> int:
    """Of two devices: enough for a layer, not for all."""
    spec = parse_run_spec(toml)
    run = run_model(spec, 256)
    taken = 10**9 - usable_facts(HAS, spec, run, 2).memory_bytes
    return taken + max(stage_bytes(spec, run, Span(layer, layer)) for layer in range(6))
