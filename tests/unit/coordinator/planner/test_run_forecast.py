"""What is said of a run before it exists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.planner.placement_forecast import Candidate, NodesForecast, forecast_nodes
from atoll.coordinator.planner.question import PlannerNode
from atoll.coordinator.planner.run_forecast import (
    KnownRun,
    Model,
    exchanged_vectors,
    forecast_rounds,
    forecast_traffic,
    known_kinds,
    known_model,
)
from atoll.core.clock import SystemClock
from atoll.core.errors import UnsupportedModel
from atoll.core.round_schedule import due_tokens, rounds_until
from atoll.core.run_spec import RunSpec, SyncSection, parse_run_spec
from atoll.node.exchange.codecs import CODECS
from atoll.node.model.run_model import run_model
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import plan_pb2

CODEC_NAMES = ["fp32", "bf16", "fp16", "int8", "int4", "int2"]


def spec_of(
    model: str = 'preset = "micro"', data: str = "", sync: str = "", optimizer: str = "", stop: int = 10**9
) -> RunSpec:
    return parse_run_spec(
        f'version = 1\n[run]\nname = "t"\nstop_tokens = {stop}\n[model]\n{model}\n[data]\npath = "x"\n{data}\n'
        f"[optimizer]\n{optimizer}\n[sync]\nround_tokens = 1000000\n{sync}\n"
    )


def model_of(spec: RunSpec) -> Model:
    found = known_model(spec)
    assert found is not None
    return found


def no_layers(run_id: str, spec: RunSpec) -> KnownRun:
    return KnownRun(run_id, spec, plan_pb2.LayerTable())


# --- beside what a node makes of the same spec -----------------------------------------------------


@pytest.mark.parametrize("optimizer", ["", 'precision = "bf16"\nactivation_checkpointing = true', 'name = "adamw"'])
@pytest.mark.parametrize("preset", ["nano", "125m", "7b"])
def test_size_and_memory_are_those_that_a_node_computes(preset: str, optimizer: str) -> None:
    spec = spec_of(f'preset = "{preset}"', optimizer=optimizer)
    told, there = model_of(spec), run_model(spec, 256)
    assert told.table == there.table
    assert sum(kind.parameters for kind in known_kinds(spec, told)) == told.parameters
    for cuda in (False, True):
        assert told.memory_bytes(spec, cuda=cuda) == there.whole_model_bytes(4, cuda=cuda)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_bytes_are_those_of_the_codec(codec: str) -> None:
    spec = spec_of(sync=f'codec = "{codec}"')
    model, rounds = model_of(spec), forecast_rounds(spec, 10, 2)
    traffic = forecast_traffic(spec, model, rounds, 2)
    assert traffic.round_bytes * rounds.fragments == pytest.approx(
        CODECS[codec].encoded_bytes(model.parameters), rel=1e-4
    )
    assert traffic.run_bytes == pytest.approx(traffic.round_bytes * rounds.total)
    assert traffic.day_bytes is None


# --- rounds ----------------------------------------------------------------------------------------

SYNC = st.builds(
    SyncSection, round_tokens=st.integers(1, 10**7), round_growth=st.floats(1e-6, 10), fragments=st.integers(1, 64)
)


@given(SYNC, st.integers(1, 10**9), st.integers(1, 10**6), st.integers(1, 64))
def test_rounds_of_full_size_are_a_lower_bound(sync: SyncSection, stop: int, first: int, fragments: int) -> None:
    longest = due_tokens(sync, stop, first, fragments)
    assert rounds_until(sync, stop, first, fragments) * longest >= stop


@given(st.integers(1, 10**5), st.floats(0.1, 10), st.integers(1, 10**6), st.integers(1, 10**4), st.integers(1, 64))
def test_rounds_are_those_of_the_schedule_one_by_one(
    round_tokens: int, growth: float, stop: int, first: int, fragments: int
) -> None:
    sync = SyncSection(round_tokens=round_tokens, round_growth=growth)
    committed = count = 0
    while committed < stop and count < 2000:
        committed, count = committed + due_tokens(sync, committed, first, fragments), count + 1
    if committed >= stop:
        assert rounds_until(sync, stop, first, fragments) == count


@given(SYNC, st.integers(1, 10**9), st.integers(1, 10**5), st.integers(2, 50))
def test_more_members_need_no_more_rounds(sync: SyncSection, stop: int, first: int, times: int) -> None:
    few, many = rounds_until(sync, stop, first), rounds_until(sync, stop, first * times)
    assert many <= few * 1.002 + 1


@given(st.floats(1, 1e7))
def test_a_slow_pace_makes_more_rounds(pace: float) -> None:
    spec = spec_of()
    slow, usual = forecast_rounds(spec, 10, 4, pace=pace), forecast_rounds(spec, 10, 4)
    assert slow.total >= usual.total
    assert slow.tokens <= usual.tokens


@given(st.floats(1e3, 1e7), st.floats(0, 1e4), st.sampled_from([0, 2]), st.integers(2, 50))
def test_figures_of_a_day_a_run_and_a_round_agree(pace: float, busy: float, cuts: int, members: int) -> None:
    spec = spec_of()
    rounds, model = forecast_rounds(spec, 10, members, cuts, pace, busy), model_of(spec)
    seconds = spec.run.stop_tokens / pace
    traffic = forecast_traffic(spec, model, rounds, members, seconds)
    assert traffic.day_bytes == pytest.approx(traffic.run_bytes * min(1, 86400 / seconds))
    step = spec.tokens_per_flush if cuts else spec.tokens_per_step
    assert rounds.steps * members == pytest.approx(rounds.tokens / step)
    assert rounds.tokens >= min(step, spec.sync.round_tokens // rounds.fragments, spec.run.stop_tokens)


@given(st.integers(1, 10_000))
def test_a_node_sends_less_than_two_vectors_and_never_less_with_more_holders(holders: int) -> None:
    assert exchanged_vectors(holders) <= exchanged_vectors(holders + 1) < 2


# --- what is not known -----------------------------------------------------------------------------


def test_a_vocabulary_is_unknown_until_the_spec_or_a_run_of_the_same_model_tells_it() -> None:
    spec = spec_of(data='tokenizer = "some/tokenizer"')
    assert known_model(spec) is None
    assert [(kind.kind, kind.layers) for kind in known_kinds(spec, None)] == [("block", 8)]
    longer = spec_of(data='tokenizer = "some/tokenizer"\nsequence_length = 64')
    table = run_model(longer, 5000).table
    found = known_model(spec, [KnownRun("reef", longer, table)])
    assert found is not None
    assert (found.origin, found.table) == ("reef", run_model(spec, 5000).table)
    other = spec_of(data='tokenizer = "another/tokenizer"')
    assert known_model(other, [KnownRun("reef", longer, table)]) is None


def test_a_hugging_face_model_is_known_from_a_run_with_the_same_model_and_length() -> None:
    section = 'architecture = "huggingface"\n[model.config]\nmodel_type = "llama"\nvocab_size = 256'
    spec, longer = spec_of(section), spec_of(section, data="sequence_length = 64")
    rows = [plan_pb2.LayerInfo(name="embedding", kind="embedding", parameters=7, activation_bytes_per_token=4)]
    run = KnownRun("reef", spec, plan_pb2.LayerTable(layers=rows, model_hash=spec.model_hash()))
    assert (known_model(spec), known_kinds(spec, None)) == (None, ())
    found = known_model(spec, [run])
    assert found is not None
    assert (found.origin, found.parameters) == ("reef", 7)
    assert known_model(longer, [run]) is None


def test_impossible_shapes_are_refused() -> None:
    for numbers, words in (("heads = 3", "not a multiple of heads"), ("layers = 1000000000", "too many")):
        with pytest.raises(UnsupportedModel, match=words):
            known_model(spec_of(numbers))


# --- nodes -----------------------------------------------------------------------------------------


def candidate(name: str, run: KnownRun, gigabytes: float = 8.0, trained: float = 0.0, times: float = 1e-4) -> Candidate:
    """A node that measured each layer of its run with `times` seconds a token."""
    profile = mb.NodeProfile(
        device="cpu",
        device_memory_bytes=int(gigabytes * 1e9),
        host_memory_bytes=int(gigabytes * 1e9),
        layer_times=[
            mb.LayerTime(kind=kind, forward_seconds_per_token=times, backward_seconds_per_token=2 * times)
            for kind in ("embedding", "block", "head")
        ],
    )
    status = mb.NodeStatus(uplink_bytes_per_second=1e8, tokens_per_second=trained)
    return Candidate(PlannerNode(name, name, profile, status, ("/ip4/8.8.8.8/tcp/1",), {}), run)


def forecast(spec: RunSpec, *candidates: Candidate) -> NodesForecast:
    return forecast_nodes(spec, model_of(spec), candidates, SystemClock())


def pace(told: NodesForecast) -> float:
    assert told.placement is not None, told.missing
    return told.placement.tokens_per_second


def test_the_same_model_is_predicted_as_fast_as_the_node_trains_it() -> None:
    spec = spec_of()
    run, layers = no_layers("reef", spec), len(model_of(spec).table.layers)
    trained = 1 / (3e-4 * layers) / 2  # half of what its profile says
    told = forecast(spec, candidate("ann", run, trained=trained))
    assert pace(told) == pytest.approx(trained, rel=0.02)
    assert told.measured == {"reef": "measured with this model"}


def test_another_model_is_scaled_by_its_flops() -> None:
    spec, wide = spec_of(), spec_of('preset = "micro"\nlayers = 16')
    run = no_layers("reef", spec)
    one, other = pace(forecast(spec, candidate("ann", run))), forecast(wide, candidate("ann", run))
    assert pace(other) == pytest.approx(one * 10 / 18, rel=0.02)  # layers of equal times
    assert "scaled by FLOPs" in other.measured["reef"]


def test_more_nodes_are_predicted_to_be_faster() -> None:
    spec = spec_of()
    run = no_layers("reef", spec)
    paces = [pace(forecast(spec, *(candidate(f"n{it}", run) for it in range(count)))) for count in (1, 2, 4)]
    assert paces == sorted(paces)
    assert paces[-1] > 3 * paces[0]


def test_a_precision_is_never_scaled_to_another() -> None:
    run = no_layers("reef", spec_of())
    told = forecast(spec_of(optimizer='precision = "bf16"'), candidate("ann", run))
    assert told.placement is None
    assert told.nodes[0].unknown_speed == "it measured fp32, and this spec trains in bf16"
    assert told.nodes[0].most_layers == 10


def test_small_nodes_become_stages_and_too_small_ones_are_told_what_is_missing() -> None:
    spec = spec_of('preset = "350m"')
    needed = model_of(spec).memory_bytes(spec, cuda=False) / 1e9
    run = no_layers("reef", spec)
    several = forecast(spec, *(candidate(f"n{it}", run, gigabytes=needed * 0.7) for it in range(3)))
    assert several.placement is not None
    assert several.placement.cuts
    assert all(0 < node.most_layers < 26 for node in several.nodes)
    tiny = forecast(spec, candidate("ann", run, gigabytes=needed * 0.2))
    assert tiny.placement is None
    assert "more memory" in tiny.missing


def test_what_nodes_report_cannot_break_the_forecast() -> None:
    spec = spec_of()
    evil = candidate("eve", no_layers("reef", spec), trained=1e300, times=1e300)
    evil.node.status.uplink_bytes_per_second = 1e308
    told = forecast(spec, evil)
    assert told.missing or pace(told) >= 0
    assert forecast(spec).missing == "no node is connected"
