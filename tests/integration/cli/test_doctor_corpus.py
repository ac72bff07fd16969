"""What `atoll doctor` finds about a run's corpus: mirrors, line and disk."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from benchmarks.corpus_server import CorpusServer, files_of, write_corpus

from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.cli import doctor_corpus
from atoll.node.cli.doctor import Finding
from atoll.node.cli.doctor_corpus import corpus_findings
from atoll.node.config import NodeConfig

MIB = 1 << 20


def spec_of(digest: str, *mirrors: str) -> RunSpec:
    return parse_run_spec(
        f'version = 1\n[run]\nname = "a"\nstop_tokens = 1000\n[sync]\nround_tokens = 100\n[data]\nsource = "corpus"\n'
        f'corpus = "{digest}"\nmirrors = {json.dumps(mirrors)}\nsequence_length = 64\n'
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor") / "corpus"


@pytest.fixture(scope="module")
def digest(root: Path) -> str:
    text = np.random.default_rng(1).integers(1, 256, 6 * MIB, dtype=np.uint8).tobytes()
    return write_corpus(root, {"web": [text]})


@pytest.fixture
def servers(root: Path, digest: str) -> Iterator[list[CorpusServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(CorpusServer(files_of(root))) for _ in range(4)]


def found(tmp_path: Path, spec: RunSpec, **settings: object) -> list[Finding]:
    return list(corpus_findings(NodeConfig(data_dir=tmp_path, **settings), spec))  # type: ignore[arg-type]


def named(findings: list[Finding], name: str) -> list[Finding]:
    return [finding for finding in findings if finding.name == name]


def test_mirrors_that_fail_stall_or_lie_are_named_and_the_others_are_measured(
    servers: list[CorpusServer], digest: str, tmp_path: Path
) -> None:
    good, down, stalled, other = servers
    down.faults.status = 503
    stalled.faults.stalls = True
    other.faults.spoil = lambda path, start, body: body + b" " if path.endswith("json") else body
    findings = found(tmp_path, spec_of(digest, *(server.address for server in servers)))
    mirrors = named(findings, "mirror")
    assert [mirror.ok for mirror in mirrors] == [True, False, False, False]
    words = ("has the corpus, answers in", "503", "did not answer within 10 s", "has another corpus")
    for mirror, server, word in zip(mirrors, servers, words, strict=True):
        assert server.address in mirror.found
        assert word in mirror.found
        assert mirror.ok or "mirrors that answer" in mirror.remedy
    assert good.body_bytes < 5 * MIB
    (line,) = named(findings, "line")
    assert line.ok
    assert "100.00 k tokens/s, assumed" in line.found
    assert [finding.ok for finding in findings if "disk" in finding.name] == [True, True]


def test_mirrors_that_hang_hide_no_mirror_that_works(servers: list[CorpusServer], digest: str, tmp_path: Path) -> None:
    """The card of the first mirror is the one that is kept, and its thread ends after the check."""
    servers[0].faults.stalls = servers[1].faults.stalls = True
    findings = found(tmp_path, spec_of(digest, *(server.address for server in servers)))
    assert [mirror.ok for mirror in named(findings, "mirror")] == [False, False, True, True]
    assert named(findings, "line")


def test_mirrors_that_hang_one_after_the_other_take_a_bounded_time(
    digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in (1.0, 5.0, 20.0):  # in which a mirror that works answers, however busy the machine is
        released = threading.Event()
        mirrors = [_HangingMirror(f"mirror {number}", int(number > 0), released) for number in range(20)]
        monkeypatch.setattr(doctor_corpus, "mirrors_of", lambda *_: mirrors)  # noqa: B023
        monkeypatch.setattr(doctor_corpus, "_CARD_SECONDS", seconds)
        monkeypatch.setattr(doctor_corpus, "_ALL_CARDS_SECONDS", 2 * seconds)
        try:
            findings = found(tmp_path, spec_of(hashlib.sha256(b"card").hexdigest(), "https://a.example/corpus"))
        finally:
            released.set()
        if "did not answer" not in named(findings, "mirror")[-1].found:
            break
    assert [mirror.ok for mirror in named(findings, "mirror")] == [False] * 20
    assert "mirror 19: not measured, other mirrors took too long" in named(findings, "mirror")[-1].found


def test_a_slow_line_is_not_enough_and_is_measured_in_a_bounded_time(
    servers: list[CorpusServer], digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_corpus, "_RATE_SECONDS", 4.0)
    servers[0].faults.bytes_per_second = 50_000.0  # 110,000 are needed
    (line,) = named(found(tmp_path, spec_of(digest, servers[0].address)), "line")
    assert not line.ok
    assert "--data" in line.remedy
    assert servers[0].body_bytes < MIB


def test_a_copy_on_this_machine_needs_no_line_and_no_cache(root: Path, digest: str, tmp_path: Path) -> None:
    findings = found(tmp_path, spec_of(digest), data=str(root), disk_gigabytes=1e6)
    assert [(finding.name, finding.ok) for finding in findings] == [("mirror", True), ("line", True)]
    assert "from --data" in findings[1].found


def test_a_directory_without_shards_needs_a_line(
    root: Path, servers: list[CorpusServer], digest: str, tmp_path: Path
) -> None:
    part = tmp_path / "part"
    shutil.copytree(root, part)
    max(part.glob("*/*.tokens"), key=lambda path: path.stat().st_size).unlink()
    findings = found(tmp_path, spec_of(digest, servers[0].address), data=str(part))
    assert "has the corpus card and no shard" in named(findings, "mirror")[0].found
    (line,) = named(findings, "line")
    assert "from the fastest mirror" in line.found
    assert named(findings, "text disk")


def test_no_mirror_that_works_leaves_one_remedy(digest: str, tmp_path: Path) -> None:
    (mirror,) = found(tmp_path, spec_of(digest, str(tmp_path / "nowhere")))
    assert not mirror.ok
    assert "--data" in mirror.remedy
    (mirrors,) = found(tmp_path, spec_of(digest))
    assert mirrors.ok
    assert "other members" in mirrors.found


def test_the_pace_comes_from_the_layer_times_of_the_last_start(
    servers: list[CorpusServer], digest: str, tmp_path: Path
) -> None:
    times = [[kind, 1e-4, 2e-4] for kind in ("embedding", "block", "head")]
    entries = {"old": {"unix": 1.0, "times": [["block", 1.0, 1.0]]}, "new": {"unix": 2.0, "times": times}}
    (tmp_path / "layer-times.json").write_text(json.dumps({"entries": entries}))
    spec = spec_of(digest, servers[0].address)
    (line,) = named(found(tmp_path, spec, compute_share=0.5), "line")
    layers = 2 + (spec.model.layers or 4)  # type: ignore[union-attr]
    assert f"{0.5 / (3e-4 * layers):.0f} tokens/s, from the layer times" in line.found


class _HangingMirror:
    """A mirror that sends its card some times and then hangs."""

    kind = "server"

    def __init__(self, name: str, times: int, released: threading.Event) -> None:
        self.name, self._times, self._released = name, times, released

    def pieces(self, path: str, at_most: int, cancelled: object) -> Iterator[bytes]:
        if not self._times:
            self._released.wait(200)
        self._times -= 1
        yield b"card"

    def close(self) -> None:
        pass


class _CardMirror:
    """A mirror that sends one card in small pieces, when all mirrors send, and notes the memory at the end of it."""

    kind = "server"

    def __init__(self, name: str, card: bytes, together: threading.Barrier) -> None:
        self.name, self._card, self._together = name, card, together
        self.memory = 0

    def pieces(self, path: str, at_most: int, cancelled: object) -> Iterator[bytes]:
        for start in range(0, len(self._card), 1 << 16):
            yield self._card[start : start + (1 << 16)]
        self._together.wait(200)
        self.memory = tracemalloc.get_traced_memory()[0]
        self._together.wait(200)

    def close(self) -> None:
        pass


def test_the_cards_of_all_mirrors_are_compared_in_the_memory_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, together = b" " * (4 * MIB), threading.Barrier(32)
    mirrors = [_CardMirror(f"mirror {number}", card, together) for number in range(32)]
    monkeypatch.setattr(doctor_corpus, "mirrors_of", lambda *_: mirrors)
    monkeypatch.setattr(doctor_corpus, "_CARD_SECONDS", 240.0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        findings = found(tmp_path, spec_of(hashlib.sha256(card).hexdigest(), "https://a.example/corpus"))
    finally:
        tracemalloc.stop()
    assert max(mirror.memory for mirror in mirrors) - before < 4 * len(card)
    assert len(named(findings, "mirror")) == 32


def test_a_disk_that_hangs_is_named_after_a_while(
    servers: list[CorpusServer], digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(doctor_corpus, "_DISK_SECONDS", 0.3)
    monkeypatch.setattr(doctor_corpus.os, "fsync", lambda _: released.wait(200))
    try:
        (disk,) = named(found(tmp_path, spec_of(digest, servers[0].address)), "disk speed")
    finally:
        released.set()
    assert not disk.ok
    assert "did not answer" in disk.found


def test_a_disk_without_room_says_what_to_do(
    servers: list[CorpusServer], digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = doctor_corpus.shutil.disk_usage(tmp_path)._replace(free=MIB)
    monkeypatch.setattr(doctor_corpus.shutil, "disk_usage", lambda _: full)
    (disk,) = named(found(tmp_path, spec_of(digest, servers[0].address)), "text disk")
    assert not disk.ok
    assert disk.remedy == "free 5.0 MiB, or set disk_gigabytes lower"
