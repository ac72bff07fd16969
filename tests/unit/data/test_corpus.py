"""Text on disk becomes tokens, windows and a digest; unusable text is refused with the reason."""

from __future__ import annotations

import importlib.util
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import numpy as np
import pytest

from atoll.core.errors import ConfigError, CorpusError
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.data.corpus import load_corpus, pack
from atoll.node.model.tokenizer import ByteTokenizer, load_tokenizer

TEXT = ("The quick brown fox jumps over the lazy dog. " * 40).encode()


def spec_for(path: Path | str, **data: str | int) -> RunSpec:
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in data.items())
    return parse_run_spec(
        f'version = 1\n[run]\nname = "t"\nstop_tokens = 1000\n[data]\npath = {json.dumps(str(path))}\n'
        f"sequence_length = 16\nvalidation_samples = 4\n{lines}\n[sync]\nround_tokens = 100\n"
    )


def test_windows_tile_the_text_and_the_last_are_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)
    corpus = load_corpus(spec_for(tmp_path / "a.txt"))
    assert len(corpus.tokens) == len(TEXT) + 1
    assert corpus.training_samples == len(TEXT) // 16 - 4
    rows = corpus.windows([0, 1])
    assert rows.shape == (2, 17)
    assert bytes(rows[0].astype(np.uint8)) == TEXT[:17]
    assert rows[0][-1] == rows[1][0]
    assert list(corpus.validation_windows()) == list(range(corpus.training_samples, corpus.training_samples + 4))


def test_a_directory_is_read_in_sorted_order_without_binary_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.md").write_bytes(TEXT)
    (tmp_path / "a.py").write_bytes(b"first")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "image.png").write_bytes(b"not looked at")
    for pruned in ("__pycache__", ".git", "site-packages"):
        (tmp_path / pruned).mkdir()
        (tmp_path / pruned / "x.py").write_bytes(b"not looked at")
    corpus = load_corpus(spec_for(tmp_path))
    assert bytes(corpus.tokens) == b"first\0" + TEXT + b"\0"
    assert (corpus.report.files, corpus.report.skipped_files) == (3, 1)


def test_a_glob_and_an_override_of_the_path_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(TEXT)
    (tmp_path / "b.log").write_bytes(b"more")
    assert bytes(load_corpus(spec_for("nowhere"), str(tmp_path / "*.log")).tokens) == TEXT + b"\0more\0"


def test_jsonl_reads_the_named_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": TEXT.decode()}) + "\n\n" + json.dumps({"body": "end"}))
    corpus = load_corpus(spec_for(tmp_path, source="jsonl", field="body"))
    assert bytes(corpus.tokens) == TEXT + b"\0end\0"
    with pytest.raises(CorpusError, match=r"line 1 of .*under 'text'"):
        load_corpus(spec_for(tmp_path, source="jsonl"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"short", "too small"),
        (b"\x7fELF\x00\x00" + TEXT, "is not text"),
        (b"\xff\xfe" + TEXT, "is not text"),
    ],
)
def test_an_unusable_file_is_refused_with_the_reason(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(CorpusError, match=words) as caught:
        load_corpus(spec_for(tmp_path / "a.txt"))
    assert caught.value.remedy


@pytest.mark.parametrize("where", ["missing.txt", ".", "*.txt"])
def test_a_path_without_text_is_refused_with_the_reason(tmp_path: Path, where: str) -> None:
    with pytest.raises(CorpusError, match="no training text"):
        load_corpus(spec_for(tmp_path / where))


def test_the_digest_depends_on_text_tokenizer_and_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "same.txt").write_bytes(TEXT)
    (tmp_path / "other.txt").write_bytes(TEXT[:-1] + b"!")
    digest = load_corpus(spec_for(tmp_path / "a.txt")).digest
    assert digest == load_corpus(spec_for(tmp_path / "same.txt")).digest
    assert digest != load_corpus(spec_for(tmp_path / "other.txt")).digest
    longer = spec_for(tmp_path / "a.txt").model_copy(
        update={"data": spec_for(tmp_path / "a.txt").data.model_copy(update={"sequence_length": 32})}
    )
    assert digest != load_corpus(longer).digest


def test_progress_is_reported_for_every_document_and_every_hashed_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(TEXT)
    heard: list[int] = []
    digest = load_corpus(spec_for(tmp_path)).digest
    monkeypatch.setattr("atoll.node.data.corpus.repeated", nullcontext)  # no repetition on a slow machine
    monkeypatch.setattr("atoll.node.data.corpus.heartbeat", lambda _: nullcontext())
    monkeypatch.setattr("atoll.node.data.corpus._HASHED_TOKENS", len(TEXT))
    assert load_corpus(spec_for(tmp_path), on_progress=heard.append).digest == digest
    assert heard == [len(TEXT) + 1, *4 * [2 * (len(TEXT) + 1)]]


def test_a_large_corpus_is_in_a_file_and_reads_the_same() -> None:
    texts = [b"one", b"", b"two", b"three"]
    small, large = pack(texts, ByteTokenizer()), pack(texts, ByteTokenizer(), in_memory_bytes=5)
    assert isinstance(large, np.memmap)
    assert not isinstance(small, np.memmap)
    assert bytes(small) == bytes(large) == b"one\0two\0three\0"


def test_bytes_round_trip_through_the_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    text = "naïve – ∑ 🙂"
    assert tokenizer.decode([int(t) for t in tokenizer.encode(text.encode())]) == text


@pytest.mark.parametrize(
    ("data", "library"),
    [({"source": "parquet"}, "pyarrow"), ({"source": "huggingface"}, "datasets")],
)
def test_a_source_whose_library_is_missing_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, str], library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=library) as caught:
        load_corpus(spec_for(tmp_path / "a.parquet", **data))
    assert "hf" in caught.value.remedy


def test_a_tokenizer_whose_library_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="transformers"):
        load_tokenizer("gpt2")


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_parquet_reads_the_named_column(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = pyarrow.table({"text": [TEXT.decode(), None, "end"], "number": [1, 2, 3]})
    parquet.write_table(rows, tmp_path / "a.parquet")
    assert bytes(load_corpus(spec_for(tmp_path, source="parquet")).tokens) == TEXT + b"\0end\0"
    for field in ("number", "absent"):
        with pytest.raises(CorpusError, match=field):
            load_corpus(spec_for(tmp_path, source="parquet", field=field))
    (tmp_path / "a.parquet").write_bytes(b"not Parquet at all")
    with pytest.raises(CorpusError, match="cannot be read as Parquet"):
        load_corpus(spec_for(tmp_path, source="parquet"))


class FakeRows(list[dict[str, object]]):
    """What `datasets.load_dataset` returns, as far as we use it."""

    column_names = ("text", "number")

    def __getitem__(self, rows: slice) -> dict[str, list[object]]:  # type: ignore[override]
        taken = super().__getitem__(rows)
        return {name: [row[name] for row in taken] for name in taken[0]}

    def select_columns(self, names: list[str]) -> FakeRows:
        return FakeRows({name: row[name] for name in names} for row in self)


class FakeAutoTokenizer:
    """A tokenizer of words, in the interface of `transformers.AutoTokenizer`."""

    eos_token_id = 70_000

    @classmethod
    def from_pretrained(cls, name: str, trust_remote_code: bool) -> FakeAutoTokenizer:
        assert not trust_remote_code
        if name == "unknown":
            raise OSError("unknown is not a local folder\nand more")
        return cls()

    def __len__(self) -> int:
        return 70_001

    def encode(self, text: str, add_special_tokens: bool, split_special_tokens: bool = False) -> list[int]:
        assert not add_special_tokens
        assert split_special_tokens
        return [len(word) + 65_536 for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return " ".join("x" * (token - 65_536) for token in tokens)


def fake_library(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_a_hugging_face_data_set_is_read_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, subset: str | None, split: str) -> FakeRows:
        if name == "missing":
            raise FileNotFoundError("Dataset 'missing' doesn't exist on the Hub")
        assert (name, subset, split) == ("stories", "en", "validation")
        return FakeRows([{"text": TEXT.decode(), "number": 1}, {"text": None, "number": 2}])

    fake_library(monkeypatch, "datasets", load_dataset=load_dataset)
    where = {"source": "huggingface", "subset": "en", "split": "validation"}
    assert bytes(load_corpus(spec_for("stories", **where)).tokens) == TEXT + b"\0"
    for name, field, words in (("missing", "text", "doesn't exist"), ("stories", "x", "no column 'x'")):
        with pytest.raises(CorpusError, match=words):
            load_corpus(spec_for(name, field=field, **where))
    with pytest.raises(CorpusError, match="holds a number under 'number', not text"):
        load_corpus(spec_for("stories", field="number", **where))


def test_a_data_set_whose_files_are_gone_is_a_problem_of_the_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(FakeRows):
        def __getitem__(self, rows: object) -> NoReturn:
            raise OSError(5, "Input/output error")

        def select_columns(self, names: list[str]) -> Gone:
            return self

    fake_library(monkeypatch, "datasets", load_dataset=lambda *_, **__: Gone([{"text": "a"}]))
    with pytest.raises(CorpusError, match=r"data set 'stories' cannot be read after row 0: .*Input/output"):
        load_corpus(spec_for("stories", source="huggingface"))


def test_a_hugging_face_tokenizer_with_a_large_vocabulary_gets_wide_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_library(monkeypatch, "transformers", AutoTokenizer=FakeAutoTokenizer)
    (tmp_path / "a.txt").write_bytes(TEXT)
    corpus = load_corpus(spec_for(tmp_path, tokenizer="words"))
    assert corpus.tokens.dtype == np.uint32
    assert list(corpus.tokens[:3]) == [65_539, 65_541, 65_541]
    assert corpus.tokens[-1] == 70_000
    assert corpus.tokenizer.decode([65_539]) == "xxx"
    with pytest.raises(ConfigError, match=r"unknown is not a local folder$"):
        load_tokenizer("unknown")
