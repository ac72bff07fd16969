"""What a node finds on its disk when it is to write the genesis of a fork, and what it reports of former runs."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_state import LAYERS, SPEC, state_of

from atoll.core.errors import DataDirUnusable
from atoll.core.run_spec import ForkSection
from atoll.node.state import fork_anchor
from atoll.node.state.checkpoint import ANCHOR, MOMENTUM, CheckpointState, CheckpointStore
from atoll.node.state.fork_anchor import ForkAnchor, Refusal, read_fork_anchor
from atoll.node.state.former_checkpoints import (
    MAX_FORMER_CHECKPOINTS,
    checkpoint_directory,
    former_checkpoints,
)
from atoll.node.state.tensor_file import LayerLayout
from atoll.v1 import membership_pb2 as mb

RUN = SPEC.run.name


def fork_from(number):
    return ForkSection(run=RUN, round=number, manifest=state_of(number).head.hash.hex())


@pytest.fixture
def runs(tmp_path):
    store = CheckpointStore(tmp_path / RUN / "checkpoints", SPEC, keep=9)
    for number in (1, 4):
        store.write(state_of(number))
    return tmp_path


def room():
    return torch.zeros(LAYERS.elements)


def refusal(runs, fork, layers=LAYERS):
    found = read_fork_anchor(
        runs, fork, layers, lambda: pytest.fail("nothing is allocated for a checkpoint that does not fit")
    )
    assert isinstance(found, Refusal)
    assert str(runs) not in found.detail  # paths of this machine stay here
    return found.why, found.detail


def test_the_anchor_of_the_source_is_read_with_its_manifest(runs):
    found = read_fork_anchor(runs, fork_from(4), LAYERS, room)
    assert isinstance(found, ForkAnchor)
    assert torch.equal(found.anchor_E, state_of(4).anchor_E)
    assert found.manifest == state_of(4).head.committed.payload


def test_the_anchor_goes_into_the_given_memory_and_takes_no_other_of_its_size(runs, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("can't allocate memory")

    given_E = room()
    monkeypatch.setattr(torch, "empty", full)
    monkeypatch.setattr(torch, "zeros", full)
    found = read_fork_anchor(runs, fork_from(4), LAYERS, lambda: given_E)
    assert isinstance(found, ForkAnchor)
    assert found.anchor_E is given_E
    assert given_E.tolist() == state_of(4).anchor_E.tolist()


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't allocate memory\n  at c10"), OSError(28, "No space left on device")]
)
def test_a_node_without_memory_or_disk_for_the_weights_says_so(runs, error):
    def full():
        raise error

    found = read_fork_anchor(runs, fork_from(4), LAYERS, full)
    assert isinstance(found, Refusal)
    assert found.why == mb.FORK_REFUSAL_RESOURCES
    assert type(error).__name__ in found.detail
    assert "\n" not in found.detail


def test_a_directory_that_may_not_be_read_is_no_damage(runs, monkeypatch):
    def forbidden(directory):
        raise DataDirUnusable(f"{directory} cannot be read: permission denied")

    monkeypatch.setattr(fork_anchor, "scan_checkpoint", forbidden)
    why, detail = refusal(runs, fork_from(4))
    assert why == mb.FORK_REFUSAL_RESOURCES
    assert "permission denied" in detail


def test_a_file_that_changes_after_it_was_checked_is_refused(runs):
    path = checkpoint_directory(runs, RUN, 4) / ANCHOR

    def change():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return room()

    found = read_fork_anchor(runs, fork_from(4), LAYERS, change)
    assert isinstance(found, Refusal)
    assert found.why == mb.FORK_REFUSAL_DAMAGED


def test_a_missing_checkpoint_is_refused_as_missing(runs):
    why, detail = refusal(runs, ForkSection(run=RUN, round=2, manifest="07" * 32))
    assert why == mb.FORK_REFUSAL_MISSING
    assert f"{RUN}/checkpoints/000000002" in detail


@pytest.mark.parametrize("name", [ANCHOR, MOMENTUM, "run.toml", "SHA256SUMS"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_checkpoint_is_refused_and_left_as_it_is(runs, name, how):
    path = checkpoint_directory(runs, RUN, 4) / name
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.unlink()
    if how != "gone":
        path.write_bytes(data if how == "flipped" else data[: len(data) // 2])
    why, _ = refusal(runs, fork_from(4))
    assert why == mb.FORK_REFUSAL_DAMAGED
    assert path.parent.is_dir()


def test_a_checkpoint_with_another_manifest_is_refused(runs):
    why, _ = refusal(runs, ForkSection(run=RUN, round=4, manifest="07" * 32))
    assert why == mb.FORK_REFUSAL_OTHER_MANIFEST


def test_a_model_with_other_layers_is_refused_and_the_first_that_differs_is_named(runs):
    wider = LayerLayout(LAYERS.names, (0, *(offset + 1 for offset in LAYERS.offsets[1:])))
    why, detail = refusal(runs, fork_from(4), wider)
    assert why == mb.FORK_REFUSAL_OTHER_LAYERS
    assert LAYERS.names[0] in detail
    fewer = LayerLayout(LAYERS.names[:-1], LAYERS.offsets[:-1])
    assert refusal(runs, fork_from(4), fewer)[0] == mb.FORK_REFUSAL_OTHER_LAYERS


def test_a_checkpoint_of_some_layers_is_refused(tmp_path):
    whole, part = state_of(4), LAYERS.part(slice(0, 1))
    size = part.elements
    some = CheckpointState(whole.head, part, whole.anchor_E[:size].clone(), whole.momentum_E[:size].clone())
    CheckpointStore(tmp_path / RUN / "checkpoints", SPEC, keep=9).write(some)
    assert refusal(tmp_path, fork_from(4))[0] == mb.FORK_REFUSAL_SOME_LAYERS


def test_checkpoints_of_other_runs_are_reported_the_source_of_a_fork_first(runs):
    (checkpoint_directory(runs, RUN, 4) / "manifest").touch()
    fork = fork_from(1)
    found = former_checkpoints(runs, "kelp", fork)
    assert [(it.run_id, it.checkpoint.round) for it in found] == [(RUN, 1), (RUN, 4)]
    assert found[0].checkpoint.manifest_hash.hex() == fork.manifest
    assert [it.checkpoint.round for it in former_checkpoints(runs, "kelp", None)] == [4, 1]
    assert former_checkpoints(runs, RUN, None) == ()
    assert former_checkpoints(runs / "nowhere", "kelp", None) == ()


def test_what_cannot_be_read_is_not_reported_and_the_report_is_bounded(runs):
    (checkpoint_directory(runs, RUN, 4) / "manifest").write_bytes(b"\xff")
    (runs / "a file").touch()
    (runs / RUN / "checkpoints" / "000000007.corrupt").mkdir()
    assert [it.checkpoint.round for it in former_checkpoints(runs, "kelp", None)] == [1]
    shutil.rmtree(checkpoint_directory(runs, RUN, 4))
    for number in range(MAX_FORMER_CHECKPOINTS + 6):
        shutil.copytree(checkpoint_directory(runs, RUN, 1), checkpoint_directory(runs, f"old-{number}", 1))
    assert len(former_checkpoints(runs, "kelp", fork_from(1))) == MAX_FORMER_CHECKPOINTS
    assert former_checkpoints(runs, "kelp", fork_from(1))[0].run_id == RUN


def names(folder):
    return sorted(int(path.name) for path in folder.iterdir())


def test_the_round_of_a_fork_stays_in_the_place_of_a_newer_one_so_the_disk_holds_no_more(tmp_path):
    store = CheckpointStore(tmp_path, SPEC, keep=2)
    for number in range(1, 6):
        store.write(state_of(number), kept_rounds=(2,))
    assert names(tmp_path) == [2, 5]
    store.write(state_of(6))
    assert names(tmp_path) == [5, 6]


@given(st.integers(1, 5), st.sets(st.integers(1, 12)), st.sets(st.integers(1, 12)))
@settings(max_examples=25, deadline=None)
def test_a_node_never_keeps_more_than_its_owner_allows_and_always_the_newest(keep, kept, extra):
    with TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder), SPEC, keep=keep)
        for number in range(1, 13):
            store.write(state_of(number), extra_rounds=extra, kept_rounds=kept)
            held = names(Path(folder))
            assert number in held
            assert len([it for it in held if it not in extra]) <= keep
            assert len(held) <= keep + 2
            if keep > len(kept):
                assert {it for it in kept if it <= number} <= set(held)
