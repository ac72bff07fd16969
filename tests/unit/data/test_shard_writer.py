"""Shards have the tokens of a group in its order, and hashes by which any block can be verified."""

from __future__ import annotations

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import DataDirUnusable
from atoll.node.data.blocks import CHUNK_BYTES, check_chunk_digests, chunk_digests_range
from atoll.node.data.shard_writer import Group, lay_out, runs_of, write_shard
from atoll.node.data.source_report import SourceReport
from atoll.node.data.spill import open_spill, write_spill

U2 = np.dtype("<u2")


def group_of(directory: Path, units: list[list[int]], seed: int | None, shard_tokens: int) -> Group:
    """A group of spill files with documents of these lengths; every token is another number."""
    token, spills = 0, []
    for number, lengths in enumerate(units):
        parts = []
        for length in lengths:
            parts.append((np.arange(token, token + length, dtype=U2), True))
            token += length
        spills.append(write_spill(directory / f"{number}.spill", parts, SourceReport()))
    return Group("web", 0, tuple(spills), seed, U2, shard_tokens)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=5),
    st.none() | st.integers(0, 9),
    st.integers(1, 20),
)
def test_shards_are_the_documents_back_to_back(units: list[list[int]], seed: int | None, shard_tokens: int) -> None:
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "web").mkdir()
        group = group_of(directory, units, seed, shard_tokens)
        shards = [write_shard(group, number, 3, directory) for number in range(group.shards)]
        tokens = [np.fromfile(directory / f"web/{3 + number:06d}.tokens", U2) for number in range(group.shards)]
        together = np.concatenate([*tokens, np.zeros(0, U2)])
        lengths = [length for unit in units for length in unit]
        assert sorted(together.tolist()) == list(range(sum(lengths)))
        assert [len(part) for part in tokens] == [shard.tokens for shard in shards]
        assert all(len(part) == shard_tokens for part in tokens[:-1])
        starts = np.flatnonzero(np.isin(together, np.cumsum([0, *lengths])))
        assert len(starts) == len(lengths)
        ends, offset = [], 0
        for number, shard in enumerate(shards):
            found = np.fromfile(directory / f"web/{3 + number:06d}.documents", "<u8").tolist()
            assert len(found) == shard.documents
            ends += [offset + end for end in found]
            offset += shard.tokens
        assert ends == [*starts[1:].tolist(), *([len(together)] if lengths else [])]
        if seed is None:
            assert together.tolist() == sorted(together.tolist())


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    group = group_of(tmp_path, [[60_000], [5_000]], None, 1 << 20)
    shard = write_shard(group, 0, 0, tmp_path)
    data = (tmp_path / "web/000000.tokens").read_bytes()
    assert shard.sha256 == hashlib.sha256(data).hexdigest()
    digests = (tmp_path / "web/000000.digests").read_bytes()
    start, stop = chunk_digests_range(len(data))
    check_chunk_digests(len(data), shard.root, digests[start:stop])
    ends = (tmp_path / "web/000000.documents").read_bytes()
    assert shard.documents_sha256 == hashlib.sha256(ends).hexdigest()
    assert np.frombuffer(ends, "<u8").tolist() == [60_000, 65_000]


def test_neighbours_are_read_at_once(tmp_path: Path) -> None:
    layout = lay_out(group_of(tmp_path, [[5, 5, 5], [4, 4]], None, 100))
    assert [(run.spill, run.start, run.tokens) for run in runs_of(layout, 3, 20)] == [(0, 3, 12), (1, 0, 5)]


def test_a_shard_of_several_chunks(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    part = (np.arange(1 << 16, dtype=U2), False)
    spill = write_spill(tmp_path / "0.spill", [part] * 40, SourceReport())
    assert spill.documents == 0, "it has no end yet"
    spill = write_spill(tmp_path / "0.spill", [*[part] * 40, (np.zeros(0, U2), True)], SourceReport())
    assert (spill.tokens, spill.documents) == (40 << 16, 1)
    group = Group("web", 0, (spill,), 7, U2, CHUNK_BYTES)  # shards of two chunks
    for number in range(group.shards):
        write_shard(group, number, 0, tmp_path)
    data = b"".join((tmp_path / f"web/{number:06d}.tokens").read_bytes() for number in range(group.shards))
    assert data == np.tile(np.arange(1 << 16, dtype=U2), 40).tobytes()


def test_a_spill_file_says_what_it_has(tmp_path: Path) -> None:
    report = SourceReport(files=1, documents=2, bad_lines=3, first_bad_line="line 4", first_bad_why="it is cut")
    parts = [(np.arange(5, dtype=U2), True), (np.zeros(0, U2), True), (np.arange(2, dtype=U2), True)]
    written = write_spill(tmp_path / "0.spill", parts, report)
    assert (written.tokens, written.documents) == (7, 2)
    assert open_spill(tmp_path / "0.spill") == written


def test_a_lost_or_cut_spill_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    group = group_of(tmp_path, [[100]], None, 100)
    whole = (tmp_path / "0.spill").read_bytes()
    (tmp_path / "0.spill").write_bytes(whole[:50])
    with pytest.raises(DataDirUnusable, match=r"0\.spill"):
        write_shard(group, 0, 0, tmp_path)
    (tmp_path / "0.spill").unlink()
    with pytest.raises(DataDirUnusable, match="cannot read"):
        write_shard(group, 0, 0, tmp_path)
    assert not list((tmp_path / "web").iterdir())
