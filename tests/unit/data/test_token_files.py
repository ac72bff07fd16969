"""Files of tokens are mapped as they are; what is not a whole file of tokens of this tokenizer is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import CorpusError
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.data import corpus as corpus_module
from atoll.node.data.corpus import load_corpus
from atoll.node.data.inputs import InputSpec, plan_units

TEXT = b"The quick brown fox jumps over the lazy dog. " * 40
TYPES = {"u1": 1, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8, "<f4": 7}


def spec_for(path: Path | str, source: str) -> RunSpec:
    return parse_run_spec(
        f'version = 1\n[run]\nname = "t"\nstop_tokens = 1000\n[data]\npath = {json.dumps(str(path))}\n'
        f'source = "{source}"\nsequence_length = 16\nvalidation_samples = 4\n[sync]\nround_tokens = 100\n'
    )


def index_of(lengths: list[int], code: int, /, **changed: Any) -> bytes:
    """The index that Megatron writes for documents of one sequence each; `changed` replaces one of its parts."""
    size = {1: 1, 3: 2, 4: 4, 5: 8, 8: 2, 7: 4}[code]
    positions = [sum(lengths[:at]) * size for at in range(len(lengths))]
    parts = {"magic": b"MMIDIDX\0\0", "version": 1, "code": code, "positions": positions, "lengths": lengths} | changed
    count = len(lengths)
    return b"".join(
        (
            parts["magic"],
            struct.pack("<QBQQ", parts["version"], parts["code"], changed.get("sequences", count), count + 1),
            np.asarray(parts["lengths"], "<i4").tobytes(),
            np.asarray(parts["positions"], "<i8").tobytes(),
            np.arange(count + 1, dtype="<i8").tobytes(),
        )
    )


def write_megatron(folder: Path, kind: str = "<u2", tokens: bytes = TEXT, **changed: Any) -> None:
    (folder / "a.bin").write_bytes(np.frombuffer(tokens, np.uint8).astype(kind).tobytes())
    (folder / "a.idx").write_bytes(index_of([100, 0, len(tokens) - 100], TYPES[kind], **changed))


def text_digest(folder: Path) -> str:
    """The digest of the same tokens, read as text; the byte tokenizer adds a separator."""
    (folder / "same.txt").write_bytes(TEXT[:-1])
    return load_corpus(spec_for(folder / "same.txt", "text")).digest


TOKENS = TEXT[:-1] + b"\0"


@pytest.mark.parametrize("kind", ["u1", "<u2", ">u2", "<i4", "<i8"])
def test_npy_is_mapped_and_has_the_digest_of_its_tokens(tmp_path: Path, kind: str) -> None:
    np.save(tmp_path / "a.npy", np.frombuffer(TOKENS, np.uint8).astype(kind))
    for path in (tmp_path, tmp_path / "a.npy"):
        corpus = load_corpus(spec_for(path, "npy"))
        assert isinstance(corpus.tokens, np.memmap)
        assert corpus.digest == text_digest(tmp_path)
        assert bytes(corpus.windows([1])[0].astype(np.uint8)) == TEXT[16:33]
        assert corpus.report.documents == 1


@pytest.mark.parametrize("kind", ["u1", "<u2", "<i2", "<i4", "<i8"])
@pytest.mark.parametrize("name", ["", "a", "a.bin", "a.idx"])
def test_megatron_is_mapped_and_has_the_digest_of_its_tokens(tmp_path: Path, kind: str, name: str) -> None:
    write_megatron(tmp_path, kind, TOKENS)
    corpus = load_corpus(spec_for(tmp_path / name, "megatron"))
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.digest == text_digest(tmp_path)
    assert corpus.report.documents == 3


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"magic": b"MMIDIDX\0\1"}, "is not a Megatron index"),
        ({"version": 2}, "is not a Megatron index"),
        ({"code": 9}, "is not a Megatron index"),
        ({"code": 4}, "do not follow each other"),
        ({"sequences": 1 << 60}, "is cut short"),
        ({"sequences": 4}, "is cut short"),
        ({"sequences": 0}, "names no sequence"),
        ({"positions": [0, 202, 200]}, "do not follow each other"),
        ({"positions": [2, 200, 200]}, "do not follow each other"),
        ({"positions": [0, 200, 1 << 62]}, "do not follow each other"),
        ({"lengths": [100, -1, 1]}, "do not follow each other"),
        ({"lengths": [100, 0, 1]}, r"a\.bin has 3,600 bytes; its index says 202"),
        ({"lengths": [100, 0, 2**31 - 1]}, r"a\.bin has 3,600 bytes; its index says"),
    ],
)
def test_an_index_that_does_not_fit_its_data_is_refused(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    write_megatron(tmp_path, **changed)
    with pytest.raises(CorpusError, match=words):
        load_corpus(spec_for(tmp_path, "megatron"))


@pytest.mark.parametrize("kept", [0, 5, 33, 40, 90])
def test_a_cut_index_is_refused(tmp_path: Path, kept: int) -> None:
    write_megatron(tmp_path)
    whole = (tmp_path / "a.idx").read_bytes()
    assert len(whole) > 90
    (tmp_path / "a.idx").write_bytes(whole[:kept])
    with pytest.raises(CorpusError, match=r"not a Megatron index|cut short"):
        load_corpus(spec_for(tmp_path, "megatron"))


def test_floats_are_no_tokens(tmp_path: Path) -> None:
    write_megatron(tmp_path, "<f4")
    with pytest.raises(CorpusError, match="holds float32, not whole numbers"):
        load_corpus(spec_for(tmp_path, "megatron"))


@pytest.mark.parametrize("source", ["npy", "megatron"])
def test_missing_files_are_named(tmp_path: Path, source: str) -> None:
    with pytest.raises(CorpusError, match="no tokens at"):
        load_corpus(spec_for(tmp_path / "none", source))
    write_megatron(tmp_path)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(CorpusError, match=r"no tokens at|cannot read .*No such file"):
        load_corpus(spec_for(tmp_path, source))


def test_several_files_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.zeros(9, np.uint8))
    with pytest.raises(CorpusError, match=r"holds 2 \.npy files"):
        load_corpus(spec_for(tmp_path, "npy"))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((4, 4), np.uint16), "one dimension"),
        (np.zeros(0, np.uint16), "too small: 0 tokens"),
        (np.zeros(40), "holds float64"),
        (np.array(["a"]), "not whole numbers"),
        (np.array([{}], dtype=object), "cannot be read as .npy"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, array: Any, words: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(CorpusError, match=words):
        load_corpus(spec_for(tmp_path, "npy"))


def test_a_cut_npy_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(4000, np.uint16))
    whole = (tmp_path / "a.npy").read_bytes()
    for kept in (0, 5, 60, len(whole) - 1):
        (tmp_path / "a.npy").write_bytes(whole[:kept])
        with pytest.raises(CorpusError, match=r"cannot be read as \.npy"):
            load_corpus(spec_for(tmp_path, "npy"))


@pytest.mark.parametrize("bad", [256, -1, 1 << 40])
@pytest.mark.parametrize("at", [0, 5, 2999])
def test_the_first_token_beyond_the_vocabulary_is_named(
    tmp_path: Path, bad: int, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "_HASHED_TOKENS", 1000)
    tokens = np.full(3000, 255)
    tokens[at] = tokens[-1] = bad
    np.save(tmp_path / "a.npy", tokens)
    with pytest.raises(CorpusError, match=rf"token {at:,} of .* is {bad}, but tokenizer 'bytes' has 256 tokens"):
        load_corpus(spec_for(tmp_path, "npy"))


def test_tokens_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="holds tokens, not text"):
        plan_units(InputSpec("npy", str(tmp_path)))
