"""The chain on disk survives power cuts and damage: what is not whole counts as not held."""

import errno
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.power_cut import FailingDisk, RecordingDisk, leave_after
from support.small_state import state_of

from atoll.core.disk import OS_DISK
from atoll.core.errors import DataDirUnusable
from atoll.core.manifest import Head
from atoll.node.state import manifests
from atoll.node.state.manifests import ManifestStore


def open_store(directory, disk=OS_DISK) -> ManifestStore:
    return ManifestStore(directory, "reef", disk)


def test_what_was_appended_is_held(tmp_path):
    store = open_store(tmp_path)
    for number in (1, 2, 10):
        store.append(state_of(number).head)
    assert store.newest().hash == state_of(10).head.hash
    assert store.get(2) == state_of(2).head.committed
    assert store.get(3) is None
    assert ManifestStore(tmp_path, "lagoon").newest() is None  # another run's


def test_consecutive_rounds_are_read_up_to_a_missing_one_and_to_a_size(tmp_path):
    store = open_store(tmp_path)
    for number in (1, 2, 3, 5):
        store.append(state_of(number).head)
    size = state_of(1).head.committed.ByteSize()

    def rounds(first, count, most_bytes):
        return [Head(committed).round for committed in store.consecutive(first, count, most_bytes)]

    assert rounds(1, 9, 1 << 20) == [1, 2, 3]
    assert rounds(2, 1, 1 << 20) == [2]
    assert rounds(4, 9, 1 << 20) == []
    assert rounds(1, 9, 2 * size + 8) == [1, 2]
    assert rounds(1, 9, 1) == [1]  # the first one is sent whatever its size


def kept(directory):
    return sorted(int(path.name.partition(".")[0]) for path in directory.iterdir())


def test_only_the_newest_rounds_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "KEPT_MANIFESTS", 5)
    store = open_store(tmp_path)
    for number in range(1, 9):
        store.append(state_of(number).head)
    assert kept(tmp_path) == [4, 5, 6, 7, 8]
    store.append(state_of(3).head)  # an older one, as of a checkpoint, removes nothing
    assert kept(tmp_path) == [3, 4, 5, 6, 7, 8]
    store = open_store(tmp_path)
    store.append(state_of(100).head)  # after a long absence
    assert kept(tmp_path) == [100]


def test_a_directory_full_of_old_rounds_is_emptied_a_few_at_a_time(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    for number in range(1, 41):
        store.append(state_of(number).head)
    monkeypatch.setattr(manifests, "KEPT_MANIFESTS", 5)
    store, left = open_store(tmp_path), []
    for number in range(41, 45):
        store.append(state_of(number).head)
        left.append(len(kept(tmp_path)))
    assert left == [25, 10, 5, 5]


def test_manifests_that_a_checkpoint_needs_stay_as_long_as_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "KEPT_MANIFESTS", 3)
    checkpoints = [4]
    store = ManifestStore(tmp_path, "reef", checkpointed=lambda: checkpoints)
    for number in range(1, 10):
        store.append(state_of(number).head)
    assert kept(tmp_path) == [3, 4, 7, 8, 9]  # 3 names the electorate of 4
    checkpoints[:] = [9]
    store.append(state_of(10).head)
    assert kept(tmp_path) == [8, 9, 10]


def test_a_disk_that_removes_nothing_still_takes_new_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "KEPT_MANIFESTS", 3)

    class Stuck(type(OS_DISK)):
        def unlink(self, path):
            raise OSError(errno.EIO, "no")

    store = open_store(tmp_path, Stuck())
    for number in range(1, 9):
        store.append(state_of(number).head)
    assert store.newest().round == 8


@pytest.mark.parametrize("kind", ["killed", "nothing unsynced survives", *range(4)])
def test_a_cut_at_every_operation_loses_nothing_acknowledged(tmp_path, kind):
    disk = RecordingDisk(tmp_path / "run")
    store = open_store(disk.root, disk)
    acknowledged = []
    for number in (1, 2, 3):
        store.append(state_of(number).head)
        acknowledged.append(len(disk.ops))
    for cut in range(len(disk.ops) + 1):
        after = tmp_path / str(cut)
        after.mkdir()
        leave_after(
            disk.ops[:cut],
            after,
            random.Random(cut * 100 + kind) if isinstance(kind, int) else None,
            cut=kind != "killed",
        )
        done = sum(number <= cut for number in acknowledged)
        store = open_store(after)
        store.sweep()
        newest = store.newest()
        assert (newest.round if newest else 0) in (done, done + 1)
        assert all(store.get(number) == state_of(number).head.committed for number in range(1, done + 1))
        assert not list(after.glob(".*"))


def test_one_cut_at_any_offset_is_skipped_for_the_one_before(tmp_path):
    store = open_store(tmp_path)
    store.append(state_of(1).head)
    store.append(state_of(2).head)
    path = tmp_path / "000000002.manifest"
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert store.get(2) is None
    assert store.newest().round == 1


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_single_byte_may_change(tmp_path, data):
    store = open_store(tmp_path)
    path = tmp_path / "000000002.manifest"
    if not path.exists():
        store.append(state_of(2).head)
        (tmp_path / "good").write_bytes(path.read_bytes())
    good = (tmp_path / "good").read_bytes()
    offset = data.draw(st.integers(0, len(good) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != good[offset]))
    path.write_bytes(good[:offset] + bytes([byte]) + good[offset + 1 :])
    assert store.newest() is None


def test_one_under_another_rounds_name_is_not_held(tmp_path):
    store = open_store(tmp_path)
    store.append(state_of(1).head)
    (tmp_path / "000000001.manifest").rename(tmp_path / "000000005.manifest")
    assert store.newest() is None


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EMFILE])
def test_a_failing_disk_is_a_typed_error_and_the_chain_stays(tmp_path, error):
    open_store(tmp_path).append(state_of(1).head)
    for fails_at in range(5):
        with pytest.raises(DataDirUnusable):
            open_store(tmp_path, FailingDisk(fails_at, error, for_good=True)).append(state_of(2).head)
        assert open_store(tmp_path).newest().round in (1, 2)
        assert open_store(tmp_path).get(1) == state_of(1).head.committed
