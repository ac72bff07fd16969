"""A corpus of shards behind mirrors that lie, stall and end: what training gets is the truth, or an error."""

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from benchmarks.corpus_server import CorpusServer, endless_corpus, files_of, write_corpus
from numpy.typing import NDArray
from support.hurrying_clock import HurryingClock

from atoll.core.clock import SystemClock
from atoll.core.errors import AtollError, ConfigError, CorpusError, Unreachable
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.data.blocks import BLOCK_BYTES, CHUNK_BYTES
from atoll.node.data.corpus_windows import held_out
from atoll.node.data.open_corpus import CacheFolder, open_corpus
from atoll.node.data.sample_order import ORDER_VERSION, SHUFFLED_SHARDS, WOVEN_UNITS, cut_into_units
from atoll.node.data.sharded_corpus import ShardedCorpus

LENGTH = 512


def text(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).integers(1, 256, size, dtype=np.uint8).tobytes()


MIB = 1 << 20
WEB = [text(0, MIB + 70_001), text(1, 3 * BLOCK_BYTES), text(2, 2 * MIB)]
CODE = [text(3, 400_000)]


def spec_of(digest: str, mirrors: list[str], more: str = "") -> RunSpec:
    return parse_run_spec(
        f"""version = 1
[run]
name = "a"
stop_tokens = 1_000_000
seed = 5
[model]
[optimizer]
[sync]
round_tokens = 10_000
[data]
source = "corpus"
corpus = "{digest}"
mirrors = {mirrors}
sequence_length = {LENGTH}
validation_samples = 10
{more}"""
    )


@dataclass
class Lab:
    """A corpus on disk, and what its windows must be."""

    root: Path
    digest: str
    cache: Path

    def open(
        self, *mirrors: str, more: str = "", cache: CacheFolder | None = None, path: str | None = None
    ) -> ShardedCorpus:
        spec = spec_of(self.digest, list(mirrors), more)
        folder = cache or CacheFolder(self.cache)
        return open_corpus(spec.data, path, folder, SystemClock()).for_training(spec)


def truth(more: tuple[list[bytes], ...] = (WEB, CODE)) -> list[NDArray[np.int64]]:
    """All windows in the order of the card: the last one of each unit begins one token earlier."""
    found = []
    for shards in more:
        per_unit = cut_into_units((), sum(map(len, shards)), LENGTH).per_unit
        for content in shards:
            tokens = np.frombuffer(content, np.uint8).astype(np.int64)
            for number, at in enumerate(range(0, len(tokens) - LENGTH, LENGTH)):
                first = at - (number % per_unit == per_unit - 1)
                found.append(tokens[first : first + LENGTH + 1])
    return found


TRUTH = truth()


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    digest = write_corpus(tmp_path / "corpus", {"web": WEB, "code": CODE})
    return Lab(tmp_path / "corpus", digest, tmp_path / "cache")


@pytest.fixture
def server(lab: Lab) -> Iterator[CorpusServer]:
    with CorpusServer(files_of(lab.root)) as running:
        yield running


@pytest.fixture
def closing() -> Iterator[Callable[[ShardedCorpus], ShardedCorpus]]:
    opened: list[ShardedCorpus] = []

    def remember(corpus: ShardedCorpus) -> ShardedCorpus:
        opened.append(corpus)
        return corpus

    yield remember
    for corpus in opened:
        corpus.close()


Closing = Callable[[ShardedCorpus], ShardedCorpus]


def check(corpus: ShardedCorpus, samples: range) -> None:
    for start in range(samples.start, samples.stop, 16):
        windows = [corpus.window(sample) for sample in range(start, min(start + 16, samples.stop))]
        np.testing.assert_array_equal(corpus.windows(windows), np.stack([TRUTH[window] for window in windows]))


def test_a_report_tells_where_blocks_came_from_and_why_a_mirror_fails(
    lab: Lab, server: CorpusServer, closing: Closing
) -> None:
    with CorpusServer(files_of(lab.root)) as broken:
        broken.faults.status = 503
        first = closing(lab.open(broken.address, server.address))
        check(first, range(64))
        found = first.data_report(64)
        assert found.bytes_trained == 64 * LENGTH
        assert found.bytes_fetched > found.blocks.server * BLOCK_BYTES * 0.9 > 0
        assert (found.blocks.cache, found.blocks.directory, found.blocks.members) == (0, 0, 0)
        reports = {mirror.name: mirror for mirror in found.mirrors}
        assert "503" in reports[broken.address].problem
        assert reports[broken.address].bytes == 0
        assert reports[server.address] == (server.address, "server", found.bytes_fetched, "")
    again = closing(lab.open(server.address))
    check(again, range(64))
    assert again.data_report(64).blocks.cache == found.blocks.server
    assert again.data_report(64).blocks.server == again.data_report(64).bytes_fetched == 0
    own = closing(lab.open(server.address, path=str(lab.root), cache=CacheFolder(lab.cache.parent / "other")))
    check(own, range(64))
    assert own.data_report(64).blocks.directory == found.blocks.server


def test_an_epoch_has_every_window_once_but_the_held_out_ones(lab: Lab, closing: Closing) -> None:
    corpus = closing(lab.open(str(lab.root)))
    held_out = set(corpus.validation_windows())
    assert len(held_out) == 10
    assert corpus.training_samples == len(TRUTH) - 10
    order = [corpus.window(sample) for sample in range(corpus.training_samples)]
    assert sorted(order) == sorted(set(range(len(TRUTH))) - held_out)
    check(corpus, range(corpus.training_samples))
    np.testing.assert_array_equal(corpus.windows(sorted(held_out)), np.stack([TRUTH[n] for n in sorted(held_out)]))


def test_the_same_from_a_server_and_then_from_the_cache_alone(lab: Lab, server: CorpusServer, closing: Closing) -> None:
    first = closing(lab.open(server.address))
    check(first, range(first.training_samples))
    assert first.fetcher.bytes_fetched >= sum(map(len, WEB + CODE)) * 0.99
    asked = len(server.requests)
    server.faults.status = 503
    again = closing(lab.open(server.address))
    check(again, range(again.training_samples))
    assert len(server.requests) == asked
    assert again.digest == first.digest
    assert again.fetcher.bytes_fetched == 0


def test_a_lease_fetches_hardly_more_than_it_trains_in_few_requests(tmp_path: Path, closing: Closing) -> None:
    files, digest = endless_corpus(10**9, shard_bytes=MIB)
    with CorpusServer(files) as server:
        spec = spec_of(digest, [server.address])
        corpus = closing(open_corpus(spec.data, None, CacheFolder(tmp_path), SystemClock()).for_training(spec))
        before, asked = server.body_bytes, len(server.requests)
        corpus.follow([(0, 2048)])
        deadline = threading.Event()
        while corpus.reader.blocks.server < 2048 * LENGTH // BLOCK_BYTES and not deadline.wait(0.02):
            pass
        for start in range(0, 2048, 16):
            corpus.windows([corpus.window(sample) for sample in range(start, start + 16)])
        assert server.body_bytes - before <= 1.1 * 2048 * LENGTH
        chunks = 2048 * LENGTH // CHUNK_BYTES
        assert len(server.requests) - asked <= 2 * chunks + SHUFFLED_SHARDS + 4 * WOVEN_UNITS


def lie(liar: CorpusServer, honest: CorpusServer, is_wrong: Callable[[str, int], bool]) -> None:
    """Have the liar send wrong bytes where `is_wrong`, and prefer it until it did."""

    def lies(path: str, start: int) -> bool:
        if is_wrong(path, start):
            honest.faults.delay_seconds = 0.0
        return is_wrong(path, start)

    liar.faults.lies, honest.faults.delay_seconds = lies, 5.0


def test_a_mirror_that_lies_is_not_believed_and_another_is_asked(
    lab: Lab, server: CorpusServer, closing: Closing
) -> None:
    with CorpusServer(files_of(lab.root)) as honest:
        lie(server, honest, lambda path, start: path.endswith("tokens") and (start // BLOCK_BYTES) % 2 == 1)
        corpus = closing(lab.open(server.address, honest.address))
        check(corpus, range(100))
    assert corpus.fetcher.mirrors[0].lies >= 1


def test_a_mirror_that_lies_about_digests_is_not_believed(lab: Lab, server: CorpusServer, closing: Closing) -> None:
    with CorpusServer(files_of(lab.root)) as honest:
        lie(server, honest, lambda path, start: path.endswith("digests"))
        corpus = closing(lab.open(server.address, honest.address))
        check(corpus, range(200))
    assert corpus.fetcher.mirrors[0].lies >= 1


@pytest.mark.parametrize("path", ["corpus.json", "tokens", "digests"])
def test_one_mirror_that_always_lies_gives_an_error_and_no_token(lab: Lab, server: CorpusServer, path: str) -> None:
    server.faults.lies = lambda name, start: name.endswith(path)
    heard: list[str] = []
    spec = spec_of(lab.digest, [server.address])
    clock = HurryingClock(lambda: heard)
    with pytest.raises(Unreachable, match="wrong bytes"):
        open_corpus(spec.data, None, CacheFolder(lab.cache), clock, heard.append).for_training(spec)
    assert "wrong bytes" in heard[0]


@pytest.mark.parametrize("fault", ["stalls", "slow", "gone"])
def test_a_mirror_that_stalls_is_slow_or_ends_does_not_stop_training(
    lab: Lab, server: CorpusServer, closing: Closing, fault: str
) -> None:
    with CorpusServer(files_of(lab.root)) as other:
        corpus = closing(lab.open(server.address, other.address))
        check(corpus, range(64))
        server.faults.stalls, server.faults.bytes_per_second = fault == "stalls", 1000.0 if fault == "slow" else 0.0
        server.faults.status = 503 if fault == "gone" else 0
        check(corpus, range(64, 4000))
        slow, good = corpus.fetcher.mirrors
        assert good.bytes > slow.bytes


def test_changed_and_torn_bytes_in_the_cache_are_fetched_again(
    lab: Lab, server: CorpusServer, closing: Closing
) -> None:
    first = closing(lab.open(server.address))
    check(first, range(first.training_samples))
    files = sorted((lab.cache / lab.digest / "blocks").iterdir())
    assert len(files) > 5
    for number, file in enumerate(files):
        data = bytearray(file.read_bytes())
        if number % 3 == 0:
            data[len(data) // 2] ^= 1
        file.write_bytes(data if number % 3 < 2 else data[: len(data) // 3])
    (lab.cache / lab.digest / "corpus.json").write_bytes(b"{}")
    again = closing(lab.open(server.address))
    check(again, range(again.training_samples))
    assert again.fetcher.bytes_fetched > 0


def test_the_cache_keeps_to_its_budget(lab: Lab, server: CorpusServer, closing: Closing) -> None:
    budget = 1 << 20
    corpus = closing(lab.open(server.address, cache=CacheFolder(lab.cache, budget)))
    check(corpus, range(corpus.training_samples))
    used = sum(file.stat().st_blocks * 512 for file in (lab.cache / lab.digest / "blocks").iterdir())
    assert 0 < used <= budget + MIB


def test_a_full_disk_costs_the_cache_and_nothing_else(
    lab: Lab, server: CorpusServer, closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "write", full)
    corpus = closing(lab.open(server.address))
    check(corpus, range(corpus.training_samples))
    assert not any(file.stat().st_size for file in lab.cache.rglob("*") if file.is_file())


def test_a_directory_of_the_node_is_asked_first_and_not_copied(
    lab: Lab, server: CorpusServer, closing: Closing
) -> None:
    corpus = closing(lab.open(server.address, path=str(lab.root)))
    check(corpus, range(500))
    assert not [path for path, _, _ in server.requests if path.endswith(("tokens", "digests"))]
    assert not (lab.cache / lab.digest / "blocks").exists()


def test_blocks_missing_in_the_nodes_directory_come_from_a_mirror(
    lab: Lab, server: CorpusServer, closing: Closing, tmp_path: Path
) -> None:
    part = tmp_path / "part"
    write_corpus(part, {"web": WEB, "code": CODE})
    (part / "web/000002.tokens").unlink()
    corpus = closing(lab.open(server.address, path=str(part)))
    check(corpus, range(corpus.training_samples))
    assert {path for path, _, _ in server.requests if path.endswith(".tokens")} == {"web/000002.tokens"}
    server.faults.status = 503
    again = closing(lab.open(server.address, path=str(part)))
    check(again, range(again.training_samples))


def test_several_threads_read_the_same_as_one(lab: Lab, server: CorpusServer, closing: Closing) -> None:
    corpus = closing(lab.open(server.address))
    wrong: list[Exception] = []

    def read(first: int) -> None:
        try:
            for start in range(first, 3 * corpus.training_samples, 997):
                check(corpus, range(start, start + 16))
        except (AssertionError, AtollError) as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(0, 400, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


WINDOWS_OF_WEB = sum(len(range(0, len(content) - LENGTH, LENGTH)) for content in WEB)


def test_a_mixture_decides_what_is_trained(lab: Lab, closing: Closing) -> None:
    corpus = closing(lab.open(str(lab.root), more="mixture = [{ weights = { code = 3, web = 1 } }]"))
    assert sum(corpus.window(sample) >= WINDOWS_OF_WEB for sample in range(4000)) == 3000
    only = closing(lab.open(str(lab.root), more="mixture = [{ epochs = { code = 2 } }]"))
    assert min(only.window(sample) for sample in range(500)) >= WINDOWS_OF_WEB
    assert corpus.digest != only.digest != closing(lab.open(str(lab.root))).digest


@pytest.mark.parametrize(
    ("mixture", "problem"),
    [
        ("weights = { poems = 1 }", "names the source poems, and the corpus has web, code"),
        ("weights = { web = 1, code = 1e-9 }", "less than"),
        ("epochs = { web = 1e306 }", "too large"),
    ],
)
def test_a_mixture_that_does_not_fit_the_corpus_is_refused(lab: Lab, mixture: str, problem: str) -> None:
    with pytest.raises(CorpusError, match=problem):
        lab.open(str(lab.root), more=f"mixture = [{{ {mixture} }}]")


def test_without_a_mixture_a_small_source_is_trained_once_an_epoch_like_all(tmp_path: Path, closing: Closing) -> None:
    digest = write_corpus(tmp_path / "c", {"big": [text(1, 4 * MIB)], "small": [text(2, 20 * LENGTH + 1)]})
    lab = Lab(tmp_path / "c", digest, tmp_path / "cache")
    corpus = closing(lab.open(str(lab.root)))
    order = [corpus.window(sample) for sample in range(corpus.training_samples)]
    assert len(set(order)) == len(order) == 4 * MIB // LENGTH - 1 + 20 - 10


def test_the_order_is_what_it_was(lab: Lab, closing: Closing) -> None:
    """Nodes of two releases in one run must agree. If this changes, raise `ORDER_VERSION`."""
    corpus = closing(lab.open(str(lab.root), more="mixture = [{ weights = { code = 0.3, web = 0.1 } }]"))
    order = json.dumps([corpus.window(sample) for sample in range(1000)]).encode()
    assert (ORDER_VERSION, hashlib.sha256(order).hexdigest()[:16]) == (1, "76b1378aafb531fe")


def test_held_out_samples_are_exact_on_every_python() -> None:
    """Python 3.12 adds floats otherwise than 3.11: with floats, these weights held out [15, 19, 30] there."""
    assert held_out([10**6] * 3, (0.019, 0.025, 0.04), 64) == [14, 19, 31]


def test_a_lone_mirror_is_used_again_as_soon_as_it_is_back(lab: Lab, server: CorpusServer, closing: Closing) -> None:
    corpus = closing(lab.open(server.address))
    health = corpus.fetcher.mirrors[0]
    health.rests_until, health.failures, health.asked_at = SystemClock().monotonic() + 3600, 5, -1e9
    check(corpus, range(200))  # the first read finds that it is back; the others must not wait for an hour
    assert health.failures == 0
    assert health.rests_until == 0


def test_a_read_that_should_come_soon_gives_up_soon(lab: Lab, server: CorpusServer, closing: Closing) -> None:
    clock = HurryingClock(lambda: corpus.fetcher.mirrors[0].failures, seconds=60.0)  # less than others wait
    corpus = closing(lab.open(server.address))
    corpus.fetcher._clock = clock
    server.faults.status = 503
    with pytest.raises(Unreachable, match="503"):
        corpus.windows([corpus.window(700)], soon=True)


def test_a_mirror_that_this_node_cannot_open_does_not_stop_it(lab: Lab, server: CorpusServer, closing: Closing) -> None:
    corpus = closing(lab.open("nonsense://x", server.address))
    check(corpus, range(100))
    with pytest.raises(ConfigError):
        lab.open("nonsense://x", "http://h:99999/c")


def test_text_of_other_corpora_is_forgotten(lab: Lab, server: CorpusServer, closing: Closing) -> None:
    other = lab.cache / ("0" * 64) / "blocks"
    other.mkdir(parents=True)
    (lab.cache / "mine").mkdir()
    check(closing(lab.open(server.address)), range(10))
    assert not other.parent.exists()
    assert (lab.cache / "mine").is_dir()


def test_what_does_not_fit_is_refused(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        lab.open()
    spec = spec_of(lab.digest, [str(lab.root)], "mixture = [{ weights = { code = 1 } }]")
    wide = parse_run_spec(spec.resolved_toml().replace("sequence_length = 512", "sequence_length = 200000"))
    with pytest.raises(CorpusError, match="too small"):
        open_corpus(wide.data, None, CacheFolder(lab.cache), SystemClock()).for_training(wide)
    (tmp_path / "tokens.json").write_text("{}")
    named = parse_run_spec(spec.resolved_toml().replace('tokenizer = "bytes"', f'tokenizer = "{tmp_path}"'))
    with pytest.raises(ConfigError):
        open_corpus(named.data, None, CacheFolder(lab.cache), SystemClock())


def test_the_tokenizer_of_a_corpus_of_bytes_is_bytes(lab: Lab, closing: Closing) -> None:
    assert closing(lab.open(str(lab.root), more='tokenizer = "corpus"')).tokenizer.name == "bytes"


def test_closing_ends_reads_that_wait(lab: Lab, server: CorpusServer) -> None:
    corpus = lab.open(server.address)
    server.faults.stalls = True
    found: list[Exception] = []
    ready = threading.Event()

    def read() -> None:
        ready.set()
        try:
            corpus.windows([300])
        except Unreachable as error:
            found.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    ready.wait()
    corpus.close()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert found
