"""A checkpoint is found whole or not at all, whatever happened to the power, the disk and its bytes."""

import errno
import hashlib
import os
import random
import resource
import shutil
import subprocess

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.power_cut import FailingDisk, RecordingDisk, leave_after
from support.small_state import LAYERS, SPEC, of_vectors, state_of

from atoll.core.disk import OS_DISK
from atoll.core.errors import CheckpointCorrupt, DataDirUnusable, DeadlineExceeded
from atoll.node.state.checkpoint import (
    ANCHOR,
    MANIFEST,
    MOMENTUM,
    SUMS,
    CheckpointStore,
    read_checkpoint,
)
from atoll.node.state.checkpoint import (
    SPEC as SPEC_FILE,
)
from atoll.node.state.tensor_file import LayerLayout

FILES = (ANCHOR, MOMENTUM, MANIFEST, SPEC_FILE, SUMS)


def open_store(directory, *, keep=2, disk=OS_DISK) -> CheckpointStore:
    return CheckpointStore(directory, SPEC, keep=keep, disk=disk)


def assert_is(found, number: int, salt: float = 0.0) -> None:
    expected = state_of(number, salt)
    assert found.head.round == number
    assert torch.equal(found.anchor_E, expected.anchor_E)
    assert torch.equal(found.momentum_E, expected.momentum_E)
    assert found.spec == SPEC


def assert_whole(path) -> None:
    """Also of one that is not the newest: half a checkpoint never stands under a checkpoint's name."""
    assert path.name == f"{read_checkpoint(path).head.round:09d}"


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_is_written_is_read_and_the_last_few_are_kept(tmp_path):
    store = open_store(tmp_path)
    for number in (1, 4, 9):
        assert store.write(state_of(number)) == store.path(number)
    assert names(tmp_path) == ["000000004", "000000009"]
    assert_is(store.newest(LAYERS), 9)
    newest, older = store.held()
    assert (newest.round, newest.committed_tokens, older.round) == (9, 900, 4)
    assert newest.bytes == sum(path.stat().st_size for path in store.path(9).iterdir())
    assert newest.manifest_hash == state_of(9).head.hash


def test_the_files_are_what_they_say_they_are(tmp_path):
    path = open_store(tmp_path).write(state_of(3))
    assert names(path) == sorted(FILES)
    loaded = load_file(path / ANCHOR)
    assert list(loaded) == list(LAYERS.names) or set(loaded) == set(LAYERS.names)
    assert torch.equal(torch.cat([loaded[name] for name in LAYERS.names]), state_of(3).anchor_E)
    done = subprocess.run(["sha256sum", "--strict", "-c", SUMS], cwd=path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_equal_states_are_equal_files(tmp_path):
    first = open_store(tmp_path / "a").write(state_of(3))
    second = open_store(tmp_path / "b").write(state_of(3))
    for name in (ANCHOR, MOMENTUM):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_a_model_of_real_size_takes_several_pieces(tmp_path):
    layers = LayerLayout(("embedding", "head"), (0, 3_000_000, 3_000_001))
    anchor_E = torch.rand(layers.elements)
    store = open_store(tmp_path)
    store.write(of_vectors(1, anchor_E, anchor_E * 2, layers))
    assert torch.equal(store.newest(layers).momentum_E, anchor_E * 2)


def test_a_state_that_is_not_its_manifests_is_never_written(tmp_path):
    store = open_store(tmp_path)
    state = state_of(2)
    state.anchor_E[7] += 1.0
    with pytest.raises(CheckpointCorrupt):
        store.write(state)
    assert names(tmp_path) == []


def test_writing_again_changes_nothing_and_another_history_replaces_it(tmp_path):
    store = open_store(tmp_path, keep=3)
    for number in (1, 2, 3):
        store.write(state_of(number))
    before = store.path(3).stat()
    store.write(state_of(3))
    now = store.path(3).stat()  # reading changes the time of access
    assert (now.st_ino, now.st_mtime_ns, now.st_ctime_ns) == (before.st_ino, before.st_mtime_ns, before.st_ctime_ns)
    store.write(state_of(2, salt=0.5))  # the run was taken back to round 1 and went on from there
    assert_is(store.newest(LAYERS), 2, salt=0.5)
    assert names(tmp_path) == ["000000001", "000000002", "000000002.void", "000000003.void"]


# --- power cuts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Every operation of five checkpoints (the last one takes round 3 back), and when each was acknowledged."""
    root = tmp_path_factory.mktemp("story")
    disk = RecordingDisk(root)
    store = open_store(root, disk=disk)
    written = [(1, 0.0), (2, 0.0), (3, 0.0), (4, 0.0), (3, 0.5)]
    acknowledged = []
    for number, salt in written:
        store.write(state_of(number, salt))
        acknowledged.append(len(disk.ops))
    return disk.ops, acknowledged, written


@pytest.mark.parametrize("kind", ["killed", "nothing unsynced survives", *range(4)])
def test_a_cut_at_every_operation_leaves_the_old_or_the_new(story, tmp_path, kind):
    ops, acknowledged, written = story
    assert len(ops) > 80
    for cut in range(len(ops) + 1):
        after = tmp_path / str(cut)
        after.mkdir()
        chance = random.Random(1000 * kind + cut) if isinstance(kind, int) else None
        leave_after(ops[:cut], after, chance, cut=kind != "killed")
        done = sum(number <= cut for number in acknowledged)
        allowed = [state_of(*item).head.hash for item in written[max(0, done - 1) : done + 1]]
        store = open_store(after)
        store.sweep()
        found = store.newest(LAYERS)
        if found is None:
            assert done == 0, f"{ops[cut - 1]} lost what was acknowledged"
        else:
            assert found.head.hash in allowed, ops[cut - 1]
            assert_is(
                found,
                found.head.round,
                next(salt for n, salt in written if state_of(n, salt).head.hash == found.head.hash),
            )
        for name in names(after):
            if not name.endswith(".void"):
                assert_whole(after / name)
        if cut % 10 == 0:  # and life goes on
            store.write(state_of(9))
            assert_is(store.newest(LAYERS), 9)
        shutil.rmtree(after)


def test_a_cut_while_another_history_takes_the_newest_ones_place_leaves_one_or_the_one_before(tmp_path):
    (tmp_path / "run").mkdir()
    disk = RecordingDisk(tmp_path / "run")
    store = open_store(disk.root, disk=disk)
    for number, salt in ((1, 0.0), (2, 0.0), (2, 0.5)):
        begun = len(disk.ops)
        store.write(state_of(number, salt))
    for cut in range(begun, len(disk.ops) + 1):
        after = tmp_path / str(cut)
        after.mkdir()
        leave_after(disk.ops[:cut], after, None)
        assert open_store(after).newest(LAYERS) is not None
    assert_is(open_store(after).newest(LAYERS), 2, salt=0.5)


# --- disks that fail -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("for_good", [False, True])
def test_a_failing_disk_is_a_typed_error_and_costs_no_good_checkpoint(tmp_path, error, for_good):
    failures = 0
    for fails_at in range(100):
        directory = tmp_path / str(fails_at)
        open_store(directory, keep=1).write(state_of(1))
        disk = FailingDisk(fails_at, error, for_good=for_good)
        store = open_store(directory, keep=1, disk=disk)
        try:
            store.write(state_of(2))
        except DataDirUnusable:
            failures += 1
        if disk.seen <= fails_at:
            break
        assert open_store(directory).newest(LAYERS).head.round in (1, 2)
        store = open_store(directory, keep=1)
        store.sweep()
        store.write(state_of(3))
        assert names(directory) == ["000000003"]
    else:
        pytest.fail("the writer never got to its end")
    assert failures >= 20


def test_out_of_file_descriptors(tmp_path):
    store = open_store(tmp_path)
    store.write(state_of(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.open(os.devnull, os.O_RDONLY)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, hard))
        while True:
            try:
                os.dup(taken)
            except OSError:
                break
        with pytest.raises(DataDirUnusable):
            store.write(state_of(2))
        with pytest.raises(DataDirUnusable):
            store.newest(LAYERS)  # which must not take a whole checkpoint for a corrupt one
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.closerange(taken, taken + 1)
    assert_is(store.newest(LAYERS), 1)


def test_giving_up_between_two_pieces_leaves_nothing(tmp_path):
    store = open_store(tmp_path)
    store.write(state_of(1))

    def give_up() -> None:
        raise DeadlineExceeded("no time left")

    with pytest.raises(DeadlineExceeded):
        store.write(state_of(2), give_up)
    assert names(tmp_path) == ["000000001"]


# --- damage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_at_any_offset_is_not_loaded_and_the_one_before_is(tmp_path, name):
    good = open_store(tmp_path / "good").write(state_of(2)) / name
    data = good.read_bytes()
    store = open_store(tmp_path / "run")
    store.write(state_of(1))
    damaged = store.write(state_of(2)) / name
    for length in range(len(data)):
        damaged.write_bytes(data[:length])
        with pytest.raises(CheckpointCorrupt):
            read_checkpoint(damaged.parent)
    assert_is(store.newest(LAYERS), 1)
    assert names(tmp_path / "run") == ["000000001", "000000002.corrupt"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_a_directory_in_its_place_and_a_longer_one(tmp_path, name):
    store = open_store(tmp_path, keep=9)
    store.write(state_of(1))
    (store.write(state_of(2)) / name).unlink()
    swapped = store.write(state_of(3)) / name
    swapped.unlink()
    swapped.mkdir()
    longer = store.write(state_of(4)) / name
    longer.write_bytes(longer.read_bytes() + b"\0")
    assert_is(store.newest(LAYERS), 1)
    assert names(tmp_path) == ["000000001", *(f"00000000{number}.corrupt" for number in (2, 3, 4))]


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_single_byte_may_change(tmp_path, data):
    store = open_store(tmp_path)
    path = store.path(2) if store.path(2).exists() else store.write(state_of(2))
    name = data.draw(st.sampled_from(FILES))
    good = (path / name).read_bytes()
    offset = data.draw(st.integers(0, len(good) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != good[offset]))
    (path / name).write_bytes(good[:offset] + bytes([byte]) + good[offset + 1 :])
    try:
        with pytest.raises(CheckpointCorrupt):
            read_checkpoint(path)
    finally:
        (path / name).write_bytes(good)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(name=st.sampled_from(FILES), junk=st.binary(max_size=200), resum=st.booleans())
def test_junk_in_a_file_is_a_typed_error_even_with_a_true_sum(tmp_path, name, junk, resum):
    path = tmp_path / "000000002"
    if not path.exists():
        open_store(tmp_path).write(state_of(2))
    good, sums = (path / name).read_bytes(), (path / SUMS).read_text()
    (path / name).write_bytes(junk)
    if resum and name != SUMS:
        new = hashlib.sha256(junk).hexdigest()
        (path / SUMS).write_text(sums.replace(hashlib.sha256(good).hexdigest(), new))
    try:
        with pytest.raises(CheckpointCorrupt):
            read_checkpoint(path)
    finally:
        (path / name).write_bytes(good)
        (path / SUMS).write_text(sums)


def test_another_models_checkpoint_and_one_under_a_wrong_name_are_not_loaded(tmp_path):
    open_store(tmp_path).write(state_of(1))
    other = LayerLayout(("embedding", "block.0", "tail"), LAYERS.offsets)
    open_store(tmp_path).write(state_of(2, layers=other))
    shutil.copytree(tmp_path / "000000001", tmp_path / "000000007")
    assert_is(open_store(tmp_path).newest(LAYERS), 1)
    assert names(tmp_path) == ["000000001", "000000002.corrupt", "000000007.corrupt"]
