"""The part of `atoll doctor` about a run's corpus: can its mirrors, the line and the disk feed the device?

Every check has a deadline. All mirrors together send some MB, and each its corpus card; one card at a time is kept in
memory. One failing mirror does not stop the checks of others.
"""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import AtollError, CorpusError
from atoll.core.run_spec import RunSpec
from atoll.core.units import bytes_text, count_text
from atoll.node.cli.doctor import Finding
from atoll.node.config import CORPORA, NodeConfig
from atoll.node.data.card import CARD_NAME, MAX_CARD_BYTES, CorpusCard, ShardName, parse_card
from atoll.node.data.mirrors import BlockAbsent, Cancelled, Mirror, MirrorFailed
from atoll.node.data.open_corpus import mirrors_of

_CARD_SECONDS = 10.0
_ALL_CARDS_SECONDS = 20.0  # after this time no further mirror is asked for the card to keep
_RATE_SECONDS = 5.0
_DISK_SECONDS = 20.0
_ALL_BYTES = 16 << 20  # from all mirrors together
_MOST_BYTES = 4 << 20  # from one mirror
_LEAST_BYTES = 1 << 19
_FIRST_PIECE_BYTES = 1 << 16
_DISK_BYTES = 16 << 20
FETCHED_PER_TRAINED = 1.1  # bytes; a node also fetches digests, and blocks of which it trains only a part
_ASSUMED_TOKENS_PER_SECOND = 100_000.0


@dataclass
class _Probe:
    """Results of checking a mirror."""

    mirror: Mirror
    problem: str = ""
    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0


@dataclass(frozen=True)
class _Need:
    """Bytes of text per second that training on this device needs, and where that figure comes from."""

    bytes_per_second: float
    why: str


def corpus_findings(config: NodeConfig, spec: RunSpec) -> Iterator[Finding]:
    """Check mirrors, connection and disk for a run with a corpus."""
    assert spec.data.corpus is not None
    digest, given = spec.data.corpus, [*([config.data] if config.data else []), *spec.data.mirrors]
    if not given:
        yield Finding(
            "mirrors", True, "none: the text comes from other members; see `atoll status` while the node runs"
        )
        return
    try:
        probes = [_Probe(mirror) for mirror in mirrors_of(spec.data, config.data or None, None)]
    except AtollError as error:
        yield Finding("mirrors", False, str(error), error.remedy)
        return
    keeper = _CardKeeper(digest)
    _each_within(_CARD_SECONDS, probes, keeper.look)
    ends = time.monotonic() + _ALL_CARDS_SECONDS
    for probe in [probe for probe in probes if not probe.problem]:
        if keeper.card is None and not keeper.problem:  # the mirror whose card was being kept has failed
            if time.monotonic() >= ends:
                probe.problem = f"{probe.mirror.name}: not measured, other mirrors took too long"
                continue
            keeper = _CardKeeper(digest)  # a hanging mirror holds the lock of the first one
            _each_within(_CARD_SECONDS, [probe], keeper.look)
        probe.problem = probe.problem or keeper.problem
    card = keeper.card
    answering = [probe for probe in probes if not probe.problem]
    most = max(_LEAST_BYTES, min(_MOST_BYTES, _ALL_BYTES // max(1, len(answering))))
    sizes = _shard_sizes(card) if card is not None else {}
    for probe in answering:  # one after the other, because they share the connection
        _each_within(2 * _RATE_SECONDS, [probe], lambda probe, late: _measure(probe, sizes, most, late))
    for probe in probes:
        yield _mirror_finding(probe, others=any(not one.problem for one in probes))
        probe.mirror.close()
    working = [probe for probe in probes if not probe.problem]
    if card is None or not working:
        return
    need = _need(config, spec, card)
    directories = (probe for probe in working if probe.mirror.kind == "directory")
    own = next((probe for probe in directories if _has_all(Path(probe.mirror.name), card)), None)
    fastest = own or max(working, key=lambda probe: probe.bytes_per_second)
    yield _line_finding(fastest, need)
    if own is None:
        yield from _disk_findings_in_time(config, card, need)


class _CardKeeper:
    """Compares the cards of all mirrors with the run's digest, piece by piece, and keeps the bytes of one at a time."""

    def __init__(self, digest: str) -> None:
        self.card: CorpusCard | None = None
        self.problem = ""  # fault of the card that the run names; it is the same at every mirror
        self._digest, self._keeping = digest, threading.Lock()

    def look(self, probe: _Probe, late: Cancelled) -> None:
        """Read the card of a mirror. Raises `MirrorFailed`, `CorpusError`."""
        if self.card is None and self._keeping.acquire(blocking=False):
            try:
                kept = bytearray()
                self._compare(probe, late, kept)
                self.card = self.card or parse_card(bytes(kept))
            except CorpusError as error:
                self.problem = str(error)
                raise
            finally:
                self._keeping.release()
        else:
            self._compare(probe, late, None)

    def _compare(self, probe: _Probe, late: Cancelled, kept: bytearray | None) -> None:
        found = hashlib.sha256()
        for piece in probe.mirror.pieces(CARD_NAME, MAX_CARD_BYTES, late):
            found.update(piece)
            if kept is not None:
                kept += piece
        if found.hexdigest() != self._digest:
            raise MirrorFailed(
                f"{probe.mirror.name} has another corpus: {found.hexdigest()[:12]}… instead of {self._digest[:12]}…"
            )


def _measure(probe: _Probe, sizes: dict[ShardName, int], most: int, late: Cancelled) -> None:
    """Read the start of the largest shard that the mirror has, in growing pieces."""
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        began = time.monotonic()
        with suppress(BlockAbsent):  # the directory has only a part of the corpus
            probe.mirror.read(name.path("tokens"), 0, 1, late)
            break
    else:
        raise MirrorFailed(f"{probe.mirror.name} has the corpus card and no shard")
    probe.latency_seconds = time.monotonic() - began
    most, done, piece = min(most, sizes[name]), 0, _FIRST_PIECE_BYTES
    began = time.monotonic()
    while done < most and time.monotonic() - began < _RATE_SECONDS:
        stop = min(most, done + piece)
        probe.mirror.read(name.path("tokens"), done, stop, late)
        done, piece = stop, 2 * piece
        probe.bytes_per_second = done / max(time.monotonic() - began, 1e-6)


def _shard_sizes(card: CorpusCard) -> dict[ShardName, int]:
    return {
        ShardName(source.name, number): card.shard_bytes(shard)
        for source in card.sources
        for number, shard in enumerate(source.shards)
    }


def _has_all(directory: Path, card: CorpusCard) -> bool:
    """Whether a directory has all shards; otherwise the others are fetched over the network."""
    return all((directory / name.path("tokens")).is_file() for name in _shard_sizes(card))


def _each_within(seconds: float, probes: Sequence[_Probe], check: Callable[[_Probe, Cancelled], None]) -> None:
    """Run a check of each mirror in a separate thread; a check that does not end in time becomes a problem."""
    late = threading.Event()

    def run(probe: _Probe) -> None:
        problem = ""
        try:
            check(probe, late.is_set)
        except (MirrorFailed, AtollError) as error:
            problem = str(error)
        except Exception as error:  # libraries of stores can raise any exception
            problem = f"{probe.mirror.name}: {error or type(error).__name__}"
        if problem and not (late.is_set() and probe.bytes_per_second):
            probe.problem = probe.problem or problem

    threads = [threading.Thread(target=run, args=(probe,), daemon=True) for probe in probes]
    ends = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread, probe in zip(threads, probes, strict=True):
        thread.join(max(0.0, ends - time.monotonic()))
        if thread.is_alive() and not probe.bytes_per_second:
            probe.problem = f"{probe.mirror.name} did not answer within {seconds:.0f} s"
    late.set()


def _mirror_finding(probe: _Probe, others: bool) -> Finding:
    if not probe.problem:
        rate = f"{bytes_text(probe.bytes_per_second)}/s" if probe.bytes_per_second else "too slow to measure"
        told = f"answers in {1000 * probe.latency_seconds:.0f} ms, {rate}"
        return Finding("mirror", True, f"{probe.mirror.name}: has the corpus, {told}")
    if others:
        remedy = "training goes on with the mirrors that answer; tell your operator"
    else:
        remedy = "check the network, or name a copy of the corpus on this machine with --data"
    return Finding("mirror", False, probe.problem, remedy)


def _line_finding(fastest: _Probe, need: _Need) -> Finding:
    place = "--data" if fastest.mirror.kind == "directory" else "the fastest mirror"
    found = f"{bytes_text(fastest.bytes_per_second)}/s from {place}; {bytes_text(need.bytes_per_second)}/s needed"
    return Finding(
        "line",
        fastest.bytes_per_second >= need.bytes_per_second,
        f"{found} ({need.why})",
        "the device would wait for text: use a faster line, or a copy of the corpus on this machine with --data",
    )


def _need(config: NodeConfig, spec: RunSpec, card: CorpusCard) -> _Need:
    pace, how = _tokens_per_second(config, spec, card)
    text = f"{count_text(pace)} tokens/s, {how}; {FETCHED_PER_TRAINED:g} bytes fetched for each byte trained"
    return _Need(pace * card.token_bytes * FETCHED_PER_TRAINED, text)


def _tokens_per_second(config: NodeConfig, spec: RunSpec, card: CorpusCard) -> tuple[float, str]:
    """Return the device's pace with the whole model, and where the figure comes from."""
    from atoll.node.control.local_client import call

    with suppress(AtollError):
        status = call(config.data_dir, "status")
        # the reported pace includes all waits for text
        busy = 1.0 - min(0.99, float(status.get("data_stall_share") or 0.0))
        if pace := float(status.get("tokens_per_second") or 0) / busy:
            return pace, "as the node trains now, without waits for text"
    if pace := _pace_of_layer_times(config, spec, card):
        return pace, "from the layer times of the last start"
    return _ASSUMED_TOKENS_PER_SECOND, "assumed: this device has not trained the model yet"


def _pace_of_layer_times(config: NodeConfig, spec: RunSpec, card: CorpusCard) -> float:
    """Return tokens per second of the whole model; 0 if its layers were not timed here."""
    path = config.path("layer-times.json")
    if spec.model.architecture != "built-in" or not path.is_file():
        return 0.0
    from atoll.core.built_in_shape import layer_table, resolve_shape
    from atoll.core.clock import SystemClock
    from atoll.node.trainer.layer_times_cache import LayerTimesCache

    layers = layer_table(spec, resolve_shape(spec.model, card.tokenizer.vocabulary)).layers
    times = LayerTimesCache(path, SystemClock()).newest({layer.kind for layer in layers})
    seconds = {kind: forward + backward for kind, forward, backward in times}
    return config.compute_share / sum(seconds[layer.kind] for layer in layers) if seconds else 0.0


def _disk_findings_in_time(config: NodeConfig, card: CorpusCard, need: _Need) -> Iterator[Finding]:
    """Check the disk in a separate thread, because calls may not return from a disk that hangs."""
    folder, found = config.path(CORPORA), queue.SimpleQueue[list[Finding]]()

    def run() -> None:
        try:
            found.put(list(_disk_findings(config, card, need)))
        except OSError as error:
            found.put([Finding("disk speed", False, f"cannot use {folder}: {error.strerror}", "check its owner")])

    threading.Thread(target=run, daemon=True).start()
    try:
        yield from found.get(timeout=_DISK_SECONDS)
    except queue.Empty:
        yield Finding(
            "disk speed",
            False,
            f"the disk of {folder} did not answer within {_DISK_SECONDS:.0f} s",
            "choose another disk with --data-dir",
        )


def _disk_findings(config: NodeConfig, card: CorpusCard, need: _Need) -> Iterator[Finding]:
    folder = config.path(CORPORA)
    directory = next(path for path in (folder, *folder.parents) if path.exists())
    used = sum(path.stat().st_blocks * 512 for path in folder.glob("*/blocks/*") if path.is_file())
    there = shutil.disk_usage(directory).free + used
    wanted = min(config.disk_gigabytes * 1e9, float(card.tokens * card.token_bytes))
    yield Finding(
        "text disk",
        there >= wanted,
        f"{bytes_text(there)} free or used for text at {directory}; {bytes_text(wanted)} needed",
        f"free {bytes_text(max(0.0, wanted - there))}, or set disk_gigabytes lower",
    )
    try:
        rate = _disk_rate(directory)
    except OSError as error:
        yield Finding("disk speed", False, f"cannot write to {directory}: {error.strerror}", "check its owner")
        return
    found = f"reads {bytes_text(rate)}/s; {bytes_text(need.bytes_per_second)}/s needed"
    yield Finding("disk speed", rate >= need.bytes_per_second, found, "choose a faster disk with --data-dir")


def _disk_rate(directory: Path) -> float:
    """Return bytes per second of reading a new file: from the disk if the system allows its cache to be dropped."""
    with tempfile.TemporaryFile(dir=directory) as file:
        block, ends = os.urandom(1 << 20), time.monotonic() + _RATE_SECONDS
        for _ in range(_DISK_BYTES >> 20):
            file.write(block)
            if time.monotonic() > ends:
                break
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began, done = time.monotonic(), 0
        while (piece := file.read(1 << 20)) and time.monotonic() < began + _RATE_SECONDS:
            done += len(piece)
        return done / max(time.monotonic() - began, 1e-6)
