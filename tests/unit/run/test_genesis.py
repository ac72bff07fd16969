"""The genesis that a node writes for a fork: in bounded memory, or with the reason why it cannot."""

import hashlib
from types import SimpleNamespace

import pytest
import torch
from support.small_state import ANN, LAYERS, SPEC, state_of

from atoll.core.clock import SystemClock
from atoll.core.run_spec import ForkSection
from atoll.node.run import genesis
from atoll.node.run.genesis import Genesis, write_genesis
from atoll.node.run.session_status import SessionStatus
from atoll.node.run.status import LiveStatus
from atoll.node.state.checkpoint import CheckpointStore
from atoll.node.state.fork_anchor import Refusal
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import plan_pb2

SOURCE = state_of(4)
ROWS = zip(LAYERS.names, LAYERS.offsets[:-1], LAYERS.offsets[1:], strict=True)
TABLE = plan_pb2.LayerTable(layers=[plan_pb2.LayerInfo(name=name, parameters=end - at) for name, at, end in ROWS])


@pytest.fixture
def run_dir(tmp_path):
    CheckpointStore(tmp_path / "reef" / "checkpoints", SPEC, keep=9).write(SOURCE)
    (tmp_path / "kelp").mkdir()
    return tmp_path / "kelp"


def trainer(*, holds_all):
    elements = LAYERS.elements if holds_all else 5
    facts = SimpleNamespace(
        holds_all=holds_all,
        layers=TABLE,
        layer_offsets=LAYERS.offsets,
        elements=LAYERS.elements,
        corpus_digest="ab" * 32,
        corpus_samples=10,
    )
    return SimpleNamespace(facts=facts, anchor=torch.zeros(elements))


async def write(run_dir, *, holds_all):
    fork = ForkSection(run="reef", round=4, manifest=SOURCE.head.hash.hex())
    run = SPEC.run.model_copy(update={"name": "kelp"})
    spec = SPEC.model_copy(update={"fork": fork, "run": run})
    return await write_genesis(trainer(holds_all=holds_all), ANN, spec, run_dir, SystemClock())


@pytest.mark.parametrize("holds_all", [True, False])
async def test_a_fork_begins_with_the_weights_of_its_source_and_without_momentum(run_dir, holds_all):
    made = await write(run_dir, holds_all=holds_all)
    assert isinstance(made, Genesis)
    assert torch.equal(made.state.anchor_E, SOURCE.anchor_E)
    assert made.source_manifest == SOURCE.head.committed.payload
    for layer, before, row in zip(made.head.manifest.layers, SOURCE.head.manifest.layers, TABLE.layers, strict=True):
        assert layer.anchor_digest == before.anchor_digest
        assert layer.momentum_digest == hashlib.sha256(bytes(4 * row.parameters)).digest()
    assert list(run_dir.iterdir()) == []  # what is mapped is unlinked


async def test_a_node_that_lacks_layers_maps_both_vectors_and_takes_no_memory_for_them(run_dir, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch, "zeros_like", full)
    assert isinstance(await write(run_dir, holds_all=False), Genesis)


async def test_a_node_without_memory_for_the_momentum_refuses_instead_of_ending(run_dir, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch, "zeros_like", full)
    made = await write(run_dir, holds_all=True)
    assert made == Refusal(mb.FORK_REFUSAL_RESOURCES, "RuntimeError: can't allocate memory")


async def test_a_node_without_disk_for_the_weights_refuses_and_leaves_no_file(run_dir, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(genesis.os, "posix_fallocate", full)
    made = await write(run_dir, holds_all=False)
    assert isinstance(made, Refusal)
    assert made.why == mb.FORK_REFUSAL_RESOURCES
    assert list(run_dir.iterdir()) == []


def test_a_node_that_refused_and_is_asked_again_tries_again():
    directives = SimpleNamespace(order=mb.ORDER_WRITE_GENESIS)
    status = LiveStatus(genesis_report=mb.GenesisReport(refusal=mb.FORK_REFUSAL_RESOURCES))
    session = SessionStatus(SimpleNamespace(directives=directives, status=status))
    assert not session.must_write_genesis  # the coordinator may not have it yet
    status.forget_refusal()  # a response without the order
    assert session.must_write_genesis


def test_a_genesis_that_was_written_is_reported_until_a_plan_comes():
    status = LiveStatus(genesis_report=mb.GenesisReport(source_manifest=b"x"))
    status.forget_refusal()
    assert status.genesis_report is not None
