"""Corpora of runs with document masks: which tokens their windows mark as no targets, and which corpora are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.corpus_server import write_corpus

from atoll.core.clock import SystemClock
from atoll.core.errors import CorpusError
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.data.corpus import Corpus, load_corpus
from atoll.node.data.documents import DOCUMENT_START
from atoll.node.data.open_corpus import open_corpus
from atoll.node.data.sharded_corpus import ShardedCorpus

LENGTH = 8
TOKENS = np.random.default_rng(1).integers(0, 6, 5000).astype(np.uint8)  # a sixth of them separators
WITHOUT = np.where(TOKENS == 0, 9, TOKENS)  # no separator


def spec_of(source: str, *, masks: bool) -> RunSpec:
    return parse_run_spec(
        f'version = 1\n[run]\nname = "t"\nstop_tokens = 100000\n[data]\n{source}\nsequence_length = {LENGTH}\n'
        f"document_masks = {str(masks).lower()}\n[sync]\nround_tokens = 1000\n"
    )


def assert_marked(marked: Corpus | ShardedCorpus, plain: Corpus | ShardedCorpus) -> None:
    windows = [*range(20), *list(marked.validation_windows())[:5]]
    coded_BT, tokens_BT = marked.windows(windows), plain.windows(windows)
    assert tokens_BT.min() == 0
    first_BT = np.pad(tokens_BT[:, :-1] == 0, ((0, 0), (1, 0)))
    assert (coded_BT == np.where(first_BT, ~(tokens_BT + DOCUMENT_START), tokens_BT)).all()


def test_windows_of_a_file_of_tokens_mark_the_first_token_of_each_document(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", TOKENS)
    marked, plain = (
        load_corpus(spec_of(f'source = "npy"\npath = "{tmp_path}"', masks=masks)) for masks in (True, False)
    )
    assert_marked(marked, plain)
    assert marked.digest == plain.digest


def test_windows_of_a_corpus_of_shards_mark_them_too(tmp_path: Path) -> None:
    digest = write_corpus(tmp_path, {"web": [TOKENS.tobytes()]})
    opened = []
    try:
        for masks in (True, False):
            source = f'source = "corpus"\ncorpus = "{digest}"\nmirrors = ["{tmp_path}"]'
            spec = spec_of(source, masks=masks)
            opened.append(open_corpus(spec.data, None, None, SystemClock()).for_training(spec))
        assert_marked(*opened)
        assert opened[0].digest == opened[1].digest
    finally:
        for corpus in opened:
            corpus.close()


def test_a_file_of_tokens_without_separators_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", WITHOUT)
    source = f'source = "npy"\npath = "{tmp_path}"'
    with pytest.raises(CorpusError, match="does not contain the token 0, which ends documents"):
        load_corpus(spec_of(source, masks=True))
    load_corpus(spec_of(source, masks=False))
