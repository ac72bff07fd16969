"""Held-out text of a corpus with several sources: its losses, and its place in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.corpus_server import CorpusServer, files_of, write_corpus
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.clock import SystemClock
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.data.block_cache import BLOCKS_FOLDER
from atoll.node.data.held_out import HeldOutLoss, SourceLoss
from atoll.node.data.open_corpus import CacheFolder, open_corpus
from atoll.node.data.sharded_corpus import ShardedCorpus
from atoll.node.pipeline.evaluation import Evaluation, Outcome
from atoll.node.training.loop import InnerLoop, cross_entropy

LENGTH = 32
MICRO_BATCH = 4


def text(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).integers(1, 256, size, dtype=np.uint8).tobytes()


def spec_of(digest: str, mirror: str, mixture: str = "web = 3, code = 1") -> RunSpec:
    return parse_run_spec(
        f"""version = 1
[run]
name = "a"
stop_tokens = 1_000_000
[model]
dimension = 32
hidden_dimension = 64
layers = 1
heads = 2
[optimizer]
micro_batch_samples = {MICRO_BATCH}
[sync]
round_tokens = 10_000
[data]
source = "corpus"
corpus = "{digest}"
mirrors = ["{mirror}"]
sequence_length = {LENGTH}
validation_samples = 40
mixture = [{{ weights = {{ {mixture} }} }}]"""
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="module")
def digest(root: Path) -> str:
    return write_corpus(root, {"web": [text(1, 9000), text(2, 1 << 19)], "code": [text(3, 4000)]})


@pytest.fixture(scope="module")
def corpus(root: Path, digest: str) -> Iterator[ShardedCorpus]:
    spec = spec_of(digest, str(root))
    opened = open_corpus(spec.data, None, None, SystemClock()).for_training(spec)
    yield opened
    opened.close()


def test_the_loss_of_each_source_is_measured_with_the_loss_of_all(
    corpus: ShardedCorpus, root: Path, digest: str
) -> None:
    loop = InnerLoop(spec_of(digest, str(root)), corpus, "cpu")
    anchor_E = torch.empty(loop.layout.elements)
    loop.initialise_into(anchor_E)
    loop.load(anchor_E)
    found = loop.held_out_loss(anchor_E)
    assert [(part.name, part.windows) for part in found.sources] == [("web", 30), ("code", 10)]
    for part, (_, windows) in zip(found.sources, corpus.held_out_sets(), strict=True):
        tokens_BT = torch.from_numpy(corpus.windows(windows))
        with torch.no_grad():
            assert part.loss == pytest.approx(float(cross_entropy(loop.model.run(tokens_BT[:, :-1]), tokens_BT[:, 1:])))
    assert found.value == loop.evaluate(anchor_E)
    assert found.value == pytest.approx((30 * found.sources[0].loss + 10 * found.sources[1].loss) / 40)


@given(st.integers(1, 7), st.integers(1, 5))
def test_a_route_measures_each_source_for_itself(corpus: ShardedCorpus, size: int, most: int) -> None:
    outcomes, seen = list[Outcome](), list[float]()
    evaluation = Evaluation(corpus, size, 0, outcomes.append)
    more = True
    while more:
        micro_batches = evaluation.next(most)
        assert 1 <= len(micro_batches) <= most
        assert len({len(one) for one in micro_batches}) == 1
        rows = torch.cat(micro_batches).double().mean(dim=1)
        seen += rows.tolist()
        more = not evaluation.add(float(rows.mean()))
    (found,) = outcomes
    assert isinstance(found, HeldOutLoss)
    assert len(seen) == 40
    assert [(part.name, part.windows) for part in found.sources] == [("web", 30), ("code", 10)]
    assert found.sources[0].loss == pytest.approx(sum(seen[:30]) / 30)
    assert found.sources[1].loss == pytest.approx(sum(seen[30:]) / 10)
    assert found.value == pytest.approx(sum(seen) / 40)


def test_sources_count_by_their_targets_and_one_without_any_is_left_out() -> None:
    parts = [SourceLoss.of("chat", 4.0, 2.0, 8), SourceLoss.of("web", 6.0, 6.0, 6), SourceLoss.of("none", 0.0, 0.0, 3)]
    found = HeldOutLoss.of(parts)
    assert found.value == (4.0 + 6.0) / 8
    assert [(part.name, part.loss, part.windows) for part in found.sources] == [("chat", 2.0, 8), ("web", 1.0, 6)]
    assert HeldOutLoss.of(parts[2:]) == HeldOutLoss(0.0)


def test_one_source_has_no_loss_of_its_own(root: Path, digest: str) -> None:
    assert HeldOutLoss.of([SourceLoss("web", 2.0, 8, 8.0)]) == HeldOutLoss(2.0)
    spec = spec_of(digest, str(root), "web = 1")
    opened = open_corpus(spec.data, None, None, SystemClock()).for_training(spec)
    assert [name for name, _ in opened.held_out_sets()] == ["web"]
    opened.close()


@pytest.mark.parametrize(("budget", "stays"), [(900_000, True), (500_000, False)])
def test_held_out_text_stays_in_the_cache_unless_it_takes_a_quarter(
    root: Path, digest: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], budget: int, stays: bool
) -> None:
    with CorpusServer(files_of(root)) as server:
        spec, cache = spec_of(digest, server.address), CacheFolder(tmp_path, budget)
        opened = open_corpus(spec.data, None, cache, SystemClock()).for_training(spec)
        files = {path.name for path in (tmp_path / digest / BLOCKS_FOLDER).iterdir()}
        blocks = opened.reader._cache
        assert blocks is not None
        for number in range(40):
            blocks.write(f"other-{number:06d}", 0, bytes(60_000))
        opened.close()
    left = {path.name for path in (tmp_path / digest / BLOCKS_FOLDER).iterdir()}
    assert (files <= left) == stays
    assert len(left) < len(files) + 40
    assert ("held_out_text_not_pinned" in "".join(capfd.readouterr())) != stays
