"""Training text is tokenised once and mapped afterwards; whatever changes or breaks an entry makes it new."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import ChildDied, ConfigError, CorpusError, DataDirUnusable
from atoll.core.file_lock import lock_file
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.data import corpus as corpus_module
from atoll.node.data import corpus_tokenizer, digest_records, token_cache
from atoll.node.data.corpus import Corpus, load_corpus
from atoll.node.data.heartbeat import heartbeat, repeated
from atoll.node.data.inputs import InputSpec, SourceReport, plan_units
from atoll.node.data.token_cache import CachedTokens, TokenCache
from atoll.node.data.unit_workers import tokenised_units
from atoll.node.model.tokenizer import HuggingFaceTokenizer

TEXT = "The quick brown fox jumps over the lazy dog. " * 40
BYTE = np.dtype("u1")


def spec_for(path: Path, **data: str | int) -> RunSpec:
    keys = {"path": str(path), "sequence_length": 16, "validation_samples": 4, **data}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    return parse_run_spec(
        f'version = 1\n[run]\nname = "t"\nstop_tokens = 1000\n[data]\n{lines}\n[sync]\nround_tokens = 100\n'
    )


class Text:
    """A folder of text, a cache beside it, and how often text was read."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.cache, self.times_read = path / "text", path / "corpora", 0
        self.path.mkdir()
        (self.path / "a.txt").write_text(TEXT)
        tokenise_all = corpus_module._tokenise_all

        def counted(*arguments: Any) -> SourceReport:
            self.times_read += 1
            return tokenise_all(*arguments)

        monkeypatch.setattr(corpus_module, "_tokenise_all", counted)

    def load(self, **data: str | int) -> Corpus:
        return load_corpus(spec_for(self.path, **data), cache_path=self.cache)

    def names(self, suffix: str) -> list[str]:
        return sorted(path.name for path in self.cache.glob(f"*{suffix}"))


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Text:
    return Text(tmp_path, monkeypatch)


def test_the_second_start_maps_the_tokens_without_reading_the_text(text: Text) -> None:
    (text.path / "b.txt").write_bytes(b"\xff")
    without = load_corpus(spec_for(text.path))
    for _ in range(2):
        corpus = text.load()
        assert isinstance(corpus.tokens, np.memmap)
        assert bytes(corpus.tokens) == bytes(without.tokens)
        assert (corpus.digest, corpus.report) == (without.digest, without.report)
        assert corpus.report.skipped_files == 1
    assert text.times_read == 1
    assert oct((text.cache / text.names(".tokens")[0]).stat().st_mode & 0o777) == "0o600"


def test_another_cut_uses_the_same_tokens(text: Text) -> None:
    corpus, longer = text.load(), text.load(sequence_length=32)
    assert text.times_read == 1
    assert corpus.digest != longer.digest == load_corpus(spec_for(text.path, sequence_length=32)).digest


def _touch(text: Text) -> None:
    os.utime(text.path / "a.txt", ns=(1, 1))


def _replace(text: Text) -> None:
    found = (text.path / "a.txt").stat()
    (text.path / "new").write_text(TEXT)
    os.utime(text.path / "new", ns=(found.st_atime_ns, found.st_mtime_ns))
    (text.path / "new").rename(text.path / "a.txt")


def _grow(text: Text) -> None:
    found = (text.path / "a.txt").stat()
    with (text.path / "a.txt").open("a") as file:
        file.write("x")
    os.utime(text.path / "a.txt", ns=(found.st_atime_ns, found.st_mtime_ns))


def _add(text: Text) -> None:
    (text.path / "b.txt").write_text("more")


@pytest.mark.parametrize("change", [_touch, _replace, _grow, _add])
def test_a_change_of_the_files_makes_new_tokens(text: Text, change: Callable[[Text], None]) -> None:
    text.load()
    change(text)
    assert text.load().digest == load_corpus(spec_for(text.path)).digest
    assert text.times_read == 2


def test_another_field_makes_new_tokens(text: Text) -> None:
    rows = [{"a": f"first {number} ", "b": f"second {number} "} for number in range(100)]
    (text.path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    first, second = (bytes(text.load(source="jsonl", field=field).tokens) for field in "ab")
    assert first.startswith(b"first 0 \0first 1")
    assert second.startswith(b"second 0 \0second 1")


def test_another_tokenizer_of_the_same_name_makes_new_tokens(text: Text, tmp_path: Path) -> None:
    save_words(tmp_path / "words", {"fox": 0, "dog.": 1, "<end>": 2, "?": 3})
    first = text.load(tokenizer=str(tmp_path / "words"))
    assert text.load(tokenizer=str(tmp_path / "words")).digest == first.digest
    assert text.times_read == 1
    save_words(tmp_path / "words", {"fox": 1, "dog.": 0, "<end>": 2, "?": 3})
    second = text.load(tokenizer=str(tmp_path / "words"))
    assert text.times_read == 2
    assert second.tokens.tolist() == [{0: 1, 1: 0}.get(token, token) for token in first.tokens.tolist()]


def _shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("suffix", [".tokens", ".json"])
@pytest.mark.parametrize("damage", [_shorten, _flip, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_entry_is_never_used(text: Text, suffix: str, damage: Callable[[Path], object]) -> None:
    digest = text.load().digest
    damage(text.cache / text.names(suffix)[0])
    assert text.load().digest == digest
    assert text.times_read == 2
    assert text.load().digest == digest
    assert text.times_read == 2


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens were read each time that all were."""
    found: list[int] = []
    digest_of = corpus_module._digest

    def counted(tokens: Any, *arguments: Any) -> tuple[str, int]:
        found.append(len(tokens))
        return digest_of(tokens, *arguments)

    monkeypatch.setattr(corpus_module, "_digest", counted)
    return found


def test_a_second_start_reads_no_token_before_it_trains(text: Text, readings: list[int]) -> None:
    first = text.load()
    assert len(readings) == 1
    for _ in range(3):
        assert text.load().digest == first.digest
    assert len(readings) == 1
    assert text.load(sequence_length=8).digest != first.digest
    assert len(readings) == 2
    (text.cache / "digests").write_text("[")
    assert text.load().digest == first.digest
    assert len(readings) == 3


def test_a_file_of_tokens_is_read_whole_only_when_it_has_changed(
    tmp_path: Path, readings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens.npy"

    def load(tokens: int, first: int = 0) -> str:
        if not path.exists() or np.load(path).tolist() != [*range(first, first + tokens)]:
            np.save(path, np.arange(first, first + tokens, dtype=np.uint16))
        return load_corpus(spec_for(path, source="npy"), cache_path=tmp_path / "cache").digest

    load(200)
    load(200)
    assert readings == [200, 200]  # somebody may still be writing it
    monkeypatch.setattr(digest_records, "QUIET_SECONDS", -60.0)
    first, again, other = load(200), load(200), load(220)
    assert first == again != other
    assert readings == [200] * 3 + [220]
    found = path.stat()
    same_size = load(220, first=1)
    assert path.stat().st_size == found.st_size
    assert same_size != other
    assert readings == [200] * 3 + [220] * 2
    for number in range(digest_records.RECORDS + 3):
        load(180 - number)
    assert len(json.loads((tmp_path / "cache" / "digests").read_bytes())) == digest_records.RECORDS


def test_the_record_of_a_file_is_that_of_its_cut(tmp_path: Path) -> None:
    """Another file may say how the bytes are cut into tokens, as Megatron's index does."""
    (tmp_path / "a.bin").write_bytes(bytes(64))

    def record(dtype: str, offset: int = 0, what: bytes = b"") -> digest_records.DigestRecord:
        tokens = np.memmap(tmp_path / "a.bin", dtype=dtype, mode="r", offset=offset)
        return digest_records.DigestRecord(tmp_path, tokens, what, own=True)

    record("u2").write("a digest")
    assert record("u2").read() == "a digest"
    assert [record("u1").read(), record("u2", 2).read(), record("u2", what=b"other").read()] == [None] * 3


def test_text_that_changes_while_it_is_read_is_refused(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = corpus_module._tokenise_all

    def slowly(*arguments: Any) -> SourceReport:
        report = counted(*arguments)
        _grow(text)
        return report

    monkeypatch.setattr(corpus_module, "_tokenise_all", slowly)
    with pytest.raises(CorpusError, match="changed while it was read"):
        text.load()
    assert [path.name for path in text.cache.iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "is empty"), (b"short", "too small"), (b"\xff", r"the only file left out .*not UTF-8")],
)
def test_unusable_text_is_refused_alike_with_and_without_a_cache(text: Text, content: bytes, words: str) -> None:
    (text.path / "a.txt").write_bytes(content)
    for cache in (text.cache, None):
        with pytest.raises(CorpusError, match=words):
            load_corpus(spec_for(text.path), cache_path=cache)


# --- the folder -----------------------------------------------------------------------------------------


def build_of(data: bytes) -> Callable[..., SourceReport]:
    def build(write: Callable[[bytes], object], folder: Path) -> SourceReport:
        assert not [*folder.iterdir()]
        (folder / "part").write_bytes(data)
        for at in range(len(data)):
            write(data[at : at + 1])
        return SourceReport(documents=1)

    return build


def opened(cache: TokenCache, key: str, data: bytes) -> CachedTokens:
    found = cache.open_or_build(key, BYTE, build_of(data), lambda _: None)
    assert bytes(found.tokens) == data
    return found


def test_only_the_newest_entries_stay_and_none_in_use_goes(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path / "corpora", entries=2)
    in_use = opened(cache, "a", b"a")
    os.utime(tmp_path / "corpora" / "a.json", (0, 0))
    for at, key in enumerate("bcde", start=1):
        opened(cache, key, key.encode())
        os.utime(tmp_path / "corpora" / f"{key}.json", (at, at))
    assert {path.stem for path in (tmp_path / "corpora").glob("*.tokens")} == {"a", "d", "e"}
    assert bytes(in_use.tokens) == b"a"
    del in_use
    opened(cache, "f", b"f")
    assert {path.stem for path in (tmp_path / "corpora").iterdir()} == {"e", "f", "lock"}


def test_a_corpus_without_tokens_is_an_entry_like_others(tmp_path: Path) -> None:
    opened(TokenCache(tmp_path / "corpora"), "a", b"")


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path / "corpora")
    (tmp_path / "corpora" / "parts").mkdir()
    (tmp_path / "corpora" / "parts" / "7.tokens").write_bytes(b"x")
    (tmp_path / "corpora" / "new.tokens").write_bytes(b"y")
    (tmp_path / "corpora" / "a.tokens").write_bytes(b"without a description")
    opened(cache, "b", b"bbb")
    assert {path.name for path in (tmp_path / "corpora").iterdir()} == {"b.json", "b.tokens", "lock"}


def test_a_second_process_waits_for_the_first_and_maps_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "_WAIT_SECONDS", 0.0)
    cache = TokenCache(tmp_path / "corpora")
    opened(cache, "a", b"a")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "corpora").glob("a.*")}
    cache.forget("a")
    first = lock_file(tmp_path / "corpora" / "lock", "the first")
    heard = 0

    def wait(_: int) -> None:
        nonlocal heard, first
        heard += 1
        if heard == 3:  # the first process is done
            for name, data in kept.items():
                (tmp_path / "corpora" / name).write_bytes(data)
            os.close(first)

    def never(*_: Any) -> SourceReport:
        raise AssertionError("the second process tokenises, too")

    assert bytes(cache.open_or_build("a", BYTE, never, wait).tokens) == b"a"
    assert heard == 3


def test_a_full_disk_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TokenCache(tmp_path / "corpora")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(DataDirUnusable, match=r"corpora: No space left on device"):
            opened(cache, "a", b"a")
    assert not [*(tmp_path / "corpora").glob("*.tokens")]
    opened(cache, "a", b"a")


def test_a_full_temporary_folder_is_named(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(CorpusError, match=r"cannot write tokens to .*No space left"):
        corpus_module.pack([b"text"], corpus_module.ByteTokenizer(), in_memory_bytes=1)


# --- worker processes -----------------------------------------------------------------------------------


@pytest.fixture
def with_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "BYTE_WORKERS_FROM_BYTES", 0)
    plan_units = corpus_module.plan_units
    monkeypatch.setattr(corpus_module, "plan_units", lambda spec, *_: plan_units(spec, 1000))


@pytest.mark.usefixtures("with_workers")
def test_workers_give_what_one_process_gives(text: Text) -> None:
    for number in range(40):
        (text.path / f"{number}.txt").write_text(f"document {number} " * number)
    (text.path / "bad.txt").write_bytes(b"\xff")
    heard: list[int] = []
    alone = load_corpus(spec_for(text.path))
    corpus = load_corpus(spec_for(text.path), on_progress=heard.append, cache_path=text.cache, cpu_threads=2)
    assert (corpus.digest, corpus.report) == (alone.digest, alone.report)
    assert bytes(corpus.tokens) == bytes(alone.tokens)
    assert heard[-1] == len(alone.tokens)
    assert [path.suffix for path in text.cache.iterdir() if path.is_dir()] == []


@pytest.mark.usefixtures("with_workers")
def test_the_error_of_a_worker_is_that_of_one_process(text: Text) -> None:
    (text.path / "a.jsonl").write_text(json.dumps({"text": TEXT}) + "\n[")
    with pytest.raises(CorpusError, match=r"line 2 of .*a\.jsonl is not a whole JSON object") as caught:
        load_corpus(spec_for(text.path, source="jsonl"), cache_path=text.cache, cpu_threads=2)
    assert "repair" in caught.value.remedy
    assert [path.name for path in text.cache.iterdir()] == ["lock"]


@pytest.mark.usefixtures("with_workers")
def test_a_worker_that_dies_is_an_error(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")  # no interpreter starts
    with pytest.raises(ChildDied, match="a worker process ended"):
        load_corpus(spec_for(text.path), cache_path=text.cache, cpu_threads=2)


def save_words(folder: Path, words: dict[str, int]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)


@pytest.mark.parametrize("in_python", [False, True])
def test_workers_have_the_tokenizer(tmp_path: Path, in_python: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    save_words(tmp_path / "words", {"the": 0, "fox": 1, "<end>": 2, "?": 3})
    tokenizer = HuggingFaceTokenizer(str(tmp_path / "words"))
    if in_python:  # then the worker loads it by name
        monkeypatch.setattr(corpus_tokenizer, "_rust_digest", lambda *_: "")
    for name, content in (("a", "the fox <end>"), ("b", "a fox")):
        (tmp_path / f"{name}.txt").write_text(content)
    units = plan_units(InputSpec("text", str(tmp_path)), 10).units
    found = [path.read_bytes() for path, _ in tokenised_units(units, tokenizer, tmp_path, 2, lambda _: None)]
    assert found == [bytes([0, 1, 3, 3, 2]), bytes([3, 1, 2])]
    (tmp_path / "words" / "tokenizer.json").unlink()
    (tmp_path / "words" / "tokenizer_config.json").unlink()
    if in_python:
        with pytest.raises(ConfigError, match="cannot be loaded"):
            [*tokenised_units(units, tokenizer, tmp_path, 1, lambda _: None)]


# --- progress -------------------------------------------------------------------------------------------


def test_a_heartbeat_tells_progress_during_its_block_alone() -> None:
    beaten = threading.Event()
    beats = 0

    def beat() -> None:
        nonlocal beats
        beats += 1
        if beats == 3:
            beaten.set()

    with heartbeat(beat, seconds=0.001):
        assert beaten.wait(60)
    after = beats
    assert after >= 3
    assert threading.active_count() == 1 or "heartbeat" not in {thread.name for thread in threading.enumerate()}


def test_silent_work_repeats_its_last_progress() -> None:
    heard: list[int] = []
    twice = threading.Event()

    def tell(progress: int) -> None:
        heard.append(progress)
        if heard.count(7) == 3:
            twice.set()

    with repeated(tell, seconds=0.001) as remember:
        remember(7)
        assert twice.wait(60)
    assert set(heard) <= {0, 7}


def test_planning_tells_progress(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = threading.Event()
    plan_units = corpus_module.plan_units

    def slow(spec: Any) -> Any:
        assert heard.wait(60)
        return plan_units(spec)

    monkeypatch.setattr(corpus_module, "plan_units", slow)
    monkeypatch.setattr(corpus_module, "heartbeat", lambda beat: heartbeat(beat, 0.001))
    load_corpus(spec_for(text.path), on_progress=lambda _: heard.set())
