"""Checks of a machine before it joins, and the sizes that they and the question to the owner are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.coordinator.world import spec_toml

from atoll.core.built_in_shape import layer_table, resolve_shape
from atoll.core.errors import DataDirUnusable, InvalidTransition, ModelTooLarge, PeerMisbehaved
from atoll.core.model_size import ModelSize, model_size
from atoll.core.run_spec import parse_run_spec
from atoll.node.cli.consent import consent_lines
from atoll.node.config import NodeConfig
from atoll.node.control.run_needs import RunNeeds
from atoll.node.preflight.machine import check_free_space
from atoll.node.preflight.run_checks import check_disk
from atoll.v1 import common_pb2 as pb
from atoll.v1 import enrolment_pb2, plan_pb2
from atoll.v1 import membership_pb2 as mb

SPEC = spec_toml()
RESPONSE = enrolment_pb2.PreviewResponse(
    run_id="reef",
    run_spec_toml=SPEC,
    roles=[pb.ROLE_NODE],
    operator_public_key=bytes(32),
    run_state=mb.RUN_STATE_WAITING,
)


def needs(**changes: object) -> RunNeeds:
    return replace(RunNeeds.from_preview(RESPONSE, "swarm.example.org:7700"), **changes)


def preview(**changes: object) -> enrolment_pb2.PreviewResponse:
    response = enrolment_pb2.PreviewResponse()
    response.CopyFrom(RESPONSE)
    response.MergeFrom(enrolment_pb2.PreviewResponse(**changes))
    return response


def test_a_coordinator_that_contradicts_itself_is_refused() -> None:
    one = plan_pb2.LayerInfo(name="head", parameters=1)
    for wrong in (
        preview(corpus_digest="no digest"),
        preview(layers=plan_pb2.LayerTable()),
        preview(layers=plan_pb2.LayerTable(layers=[one, one])),
        preview(layers=plan_pb2.LayerTable(layers=[plan_pb2.LayerInfo(name="head", tied_to=["embedding"])])),
    ):
        with pytest.raises(PeerMisbehaved):
            RunNeeds.from_preview(wrong, "host:1")
    with pytest.raises(InvalidTransition, match="stopped"):
        RunNeeds.from_preview(preview(run_state=mb.RUN_STATE_STOPPED), "host:1")


@given(st.integers(0, 1 << 45))
def test_memory_fits_all_layers_or_some_or_is_refused(memory_bytes: int) -> None:
    size = ModelSize(parameters=10**9, largest_layer_bytes=10**9, training_bytes=24 * 10**9)
    if memory_bytes < size.largest_layer_bytes:
        with pytest.raises(ModelTooLarge):
            size.share_that_fits(memory_bytes)
    else:
        share = size.share_that_fits(memory_bytes)
        assert (share == 1) == (memory_bytes >= size.training_bytes)
        assert size.checkpoint_bytes(share) <= size.checkpoint_bytes()


def test_the_size_from_the_spec_alone_is_that_of_the_runs_layer_table() -> None:
    spec = parse_run_spec(SPEC)
    table = layer_table(spec, resolve_shape(spec.model, 256))
    assert model_size(spec, table) == model_size(spec, None)


def test_a_disk_needs_room_for_two_checkpoints_less_those_that_are_there(tmp_path: Path) -> None:
    config = NodeConfig(data_dir=tmp_path)
    check_disk(config, needs())
    with pytest.raises(DataDirUnusable, match="of free space"):
        check_free_space(config, 1 << 60)
    large = needs(spec=parse_run_spec(SPEC + "[model]\ndimension = 1048576\nlayers = 1000\nheads = 8\nkv_heads = 8\n"))
    with pytest.raises(DataDirUnusable, match="a node of the run reef needs"):
        check_disk(config, large)
    check_disk(config, large, share=1e-9)
    check_disk(config, replace(large, roles=frozenset({"seed"})))


def test_checkpoints_of_a_deleted_run_make_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[int] = []
    monkeypatch.setattr("atoll.node.preflight.run_checks.LEAST_FREE_BYTES", 0)
    monkeypatch.setattr("atoll.node.preflight.run_checks.check_free_space", lambda _, size, what: wanted.append(size))
    for name in ("none", "reef.1700000000000", "reef"):
        checkpoint = tmp_path / "runs" / name / "checkpoints" / "000000001"
        checkpoint.mkdir(parents=True)
        (checkpoint / "anchor").write_bytes(bytes(1000 if name != "none" else 0))
        check_disk(NodeConfig(data_dir=tmp_path), needs())
    assert wanted[0] == wanted[1] == wanted[2] + 1000


def test_the_owner_is_told_run_operator_model_download_disk_and_router(tmp_path: Path) -> None:
    told = "\n".join(consent_lines(NodeConfig(data_dir=tmp_path, port=7710), needs(head_round=3)))
    for words in (
        "Run reef, coordinator swarm.example.org:7700. Its operator has the key 6668 7aad f862 bd77.",
        "Model: nano, 951.42 k trained parameters",
        "of the model's state; updates in every round.",
        "at most 4 checkpoints of",
        "Peers reach it on every address, port 7710. It may ask your router to forward that port (UPnP, NAT-PMP).",
    ):
        assert words in told, told
    corpus = needs(spec=parse_run_spec(spec_toml(data=f'source = "corpus"\ncorpus = "{"cd" * 32}"')))
    told = "\n".join(consent_lines(NodeConfig(data_dir=tmp_path, listen="127.0.0.1"), corpus))
    assert "no model: the run has not begun; training text as it is needed, of which it keeps 20 GB at most" in told
    assert "router" not in told
    seed = "\n".join(consent_lines(NodeConfig(data_dir=tmp_path), needs(roles=frozenset({"seed"}))))
    assert "is a seed" in seed
    assert "Model" not in seed
