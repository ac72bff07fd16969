"""Document masks over instruction data: turns that end with the separator do not divide conversations.

What is expected comes from the files of a corpus: its tokens, and the ends of documents beside them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.chats import save, talk
from support.corpora import build_inline, write_jsonl, write_rows
from support.documents import document_spec_text, gradient_of, pieces_of, unpacked_pieces
from support.inline_pool import InlinePool
from support.routes import RouteStages

from atoll.core.clock import SystemClock
from atoll.core.errors import CorpusError
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.data.blocks import hash_shard
from atoll.node.data.build_spec import BuildSource, BuildSpec
from atoll.node.data.card import CARD_NAME, CorpusCard, Shard, ShardName, card_digest, start_bit, top_bit
from atoll.node.data.corpus_files import read_card
from atoll.node.data.held_out import HeldOutLoss
from atoll.node.data.open_corpus import CacheFolder, open_corpus
from atoll.node.data.shard_writer import Group, write_shard
from atoll.node.data.sharded_corpus import ShardedCorpus
from atoll.node.data.source_report import SourceReport
from atoll.node.data.spill import write_spill
from atoll.node.data.verify import verify_corpus
from atoll.node.model.run_model import run_model
from atoll.node.model.span import Span
from atoll.node.pipeline.evaluation import Evaluation
from atoll.node.pipeline.stage_checks import MicroBatchShape
from atoll.node.training.loop import InnerLoop
from atoll.node.training.targets import IGNORED, document_starts, inputs_and_targets

pytestmark = pytest.mark.usefixtures("one_thread")
TALKS = [
    talk(f"the tide {number}?", "yes " * (number % 5), "and coral?", f"no {number}", system="be plain " * (number % 3))
    for number in range(60)
]
SAMPLES = 6  # of a step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, prompts with completions, and text, in shards that end within documents."""
    folder = tmp_path_factory.mktemp("instructions")
    write_rows(folder / "talks.jsonl", [{"messages": messages} for messages in TALKS])
    write_rows(folder / "pairs.jsonl", [{"ask": f"question {n}: ", "say": "answer " * (1 + n % 3)} for n in range(40)])
    write_jsonl(folder / "text.jsonl", ["plain words about lagoons"] * 40)
    sources = (
        BuildSource(name="talks", source="jsonl", path=str(folder / "talks.jsonl"), messages="messages"),
        BuildSource(name="pairs", source="jsonl", path=str(folder / "pairs.jsonl"), prompt="ask", completion="say"),
        BuildSource(name="text", source="jsonl", path=str(folder / "text.jsonl")),
    )
    spec = BuildSpec(sources=sources, tokenizer=str(save("chatml", folder / "tokenizer")))
    build_inline(spec.model_copy(update={"shard_bytes": 512}), folder / "corpus")
    return folder


def spec_of(digest: str, *, masks: bool = True) -> RunSpec:
    text = document_spec_text(masks=masks).replace("hidden_dimension = 48", "hidden_dimension = 48\nvocabulary = 512")
    of_corpus = f'source = "corpus"\ncorpus = "{digest}"\ntokenizer = "corpus"'
    return parse_run_spec(text.replace('source = "jsonl"\npath = "x"', of_corpus))


@contextlib.contextmanager
def opened(folder: Path, *, masks: bool = True) -> Iterator[tuple[RunSpec, ShardedCorpus]]:
    digest = card_digest((folder / CARD_NAME).read_bytes())
    spec, cache = spec_of(digest, masks=masks), CacheFolder(folder.parent / f"cache-{digest[:8]}-{masks}")
    corpus = open_corpus(spec.data, str(folder), cache, SystemClock()).for_training(spec)
    assert isinstance(corpus, ShardedCorpus)
    try:
        yield spec, corpus
    finally:
        corpus.close()


def flat(pieces: list[list[list[int]]]) -> list[list[int]]:
    return [piece for window in pieces for piece in window]


def test_starts_are_where_the_files_of_documents_say_token_by_token(folder: Path) -> None:
    with opened(folder / "corpus") as (_, corpus):
        kinds = set[str]()
        for window in range(len(corpus._cut)):
            tokens_BT = torch.from_numpy(corpus.windows([window]))
            (pieces,) = pieces_of(folder / "corpus", corpus, [window])
            begins = np.cumsum([0, *(len(piece) for piece in pieces)])[:-1]
            length = tokens_BT.shape[1] - 1
            assert torch.nonzero(document_starts(tokens_BT)[0]).flatten().tolist() == [b for b in begins if b < length]
            inputs_BT, targets_BT = inputs_and_targets(tokens_BT)
            plain = [token for piece in pieces for token in piece]
            assert inputs_BT[0].tolist() == [~token if token < 0 else token for token in plain[:-1]]
            counts = [token >= 0 and place not in begins for place, token in enumerate(plain)][1:]
            assert (targets_BT[0] != IGNORED).tolist() == counts
            separators = torch.nonzero(inputs_BT[0] == corpus.tokenizer.separator[0]).flatten() + 1
            kinds |= {"kept" for place in separators.tolist() if place not in begins}
            kinds |= {"divided" for place in separators.tolist() if place in begins}
        assert kinds == {"kept", "divided"}  # turns that end inside a conversation, and texts


def test_a_step_an_evaluation_and_an_audit_equal_unpacked_conversations(folder: Path) -> None:
    files = folder / "corpus"
    with opened(files) as (spec, corpus):
        loop = InnerLoop(spec, corpus, "cpu")
        try:
            anchor_E = torch.empty(loop.layout.elements)
            loop.initialise_into(anchor_E)
            anchor_E.mul_(5)
            loop.load(anchor_E, ranges=((0, 10_000),))
            windows = [corpus.window(sample) for sample in range(SAMPLES)]
            pieces = pieces_of(folder / "corpus", corpus, windows)
            loss, gradient_E = unpacked_pieces(loop.run, anchor_E, flat(pieces))
            assert abs(loop.step().loss - loss) < 1e-5
            torch.testing.assert_close(gradient_of(anchor_E - loop.weights_E), gradient_E, atol=1e-5, rtol=1e-5)
            held_out = flat(pieces_of(folder / "corpus", corpus, corpus.validation_windows()))
            assert abs(loop.evaluate(anchor_E) - unpacked_pieces(loop.run, anchor_E, held_out)[0]) < 1e-5
            trained = dict[int, list[list[list[int]]]]()  # the samples that have a target
            for sample in range(20):
                one = pieces_of(files, corpus, [corpus.window(sample)])
                if any(max(piece[1:], default=-1) >= 0 for piece in flat(one)):
                    trained[sample] = one
            first, second, third, fourth = list(trained)[:4]
            gained = [
                unpacked_pieces(loop.run, anchor_E, flat(trained[sample]))[0]
                - unpacked_pieces(loop.run, 0.9 * anchor_E, flat(trained[sample]))[0]
                for sample in (first, second, third, fourth)
            ]
            found = loop.audit(anchor_E, 0.1 * anchor_E, [first, second], [third, fourth])
            assert abs(found.own - sum(gained[:2]) / 2) < 1e-5
            assert abs(found.other - sum(gained[2:]) / 2) < 1e-5
        finally:
            loop.close()


def test_a_flush_and_an_evaluation_of_a_route_equal_unpacked_conversations(folder: Path) -> None:
    with opened(folder / "corpus") as (spec, corpus):
        run = run_model(spec, corpus.tokenizer.vocabulary)
        weights_E = 5 * torch.cat(
            [values.flatten() for _, values in run.initial_parameters(Span(0, run.architecture.layers - 1))]
        )
        parts = RouteStages(run.architecture, 2, spec.optimizer, MicroBatchShape.of(spec), document_masks=True)
        parts.load(weights_E)
        windows = list(range(SAMPLES))
        loss, gradient_E = unpacked_pieces(run, weights_E, flat(pieces_of(folder / "corpus", corpus, windows)))
        found = parts.route.flush(list(torch.split(torch.from_numpy(corpus.windows(windows)), 3)))
        assert abs(found.loss - loss) < 1e-5
        torch.testing.assert_close(gradient_of(weights_E - parts.weights()), gradient_E, atol=1e-4, rtol=1e-3)
        for stage in parts.stages:
            stage.anchor = stage.model.weights.read()
        results: list[object] = []
        evaluation = Evaluation(corpus, 2, 0, results.append)
        while not results:
            evaluation.add(parts.route.flush(evaluation.next(8), anchor=0).loss)
        held_out = flat(pieces_of(folder / "corpus", corpus, corpus.validation_windows()))
        assert isinstance(results[0], HeldOutLoss)
        assert abs(results[0].value - unpacked_pieces(run, parts.weights(), held_out)[0]) < 1e-5


def test_without_the_key_windows_have_no_starts(folder: Path) -> None:
    with opened(folder / "corpus", masks=False) as (_, plain), opened(folder / "corpus") as (_, masked):
        windows = range(len(plain._cut))
        expected = [
            [token for piece in window for token in piece] for window in pieces_of(folder / "corpus", plain, windows)
        ]
        assert plain.windows(windows).tolist() == expected
        assert plain.digest == masked.digest


# --- the files ----------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    shard_tokens=st.integers(1, 20),
    seed=st.none() | st.integers(0, 9),
)
def test_every_document_of_a_group_starts_once(
    lengths: list[int], shard_tokens: int, seed: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("group")
    (folder / "s").mkdir()
    dtype = np.dtype("<u2")
    documents = [np.arange(1, length + 1, dtype=dtype) for length in lengths]  # each begins with 1
    spill = write_spill(folder / "0.spill", ((tokens, True) for tokens in documents), SourceReport())
    group = Group("s", 0, (spill,), seed, dtype, shard_tokens, marks=True)
    for number in range(group.shards):
        write_shard(group, number, 0, folder)
    stored = np.concatenate(
        [np.fromfile(folder / ShardName("s", number).path("tokens"), dtype) for number in range(group.shards)]
    )
    assert ((stored & start_bit(dtype)) > 0).tolist() == ((stored & (start_bit(dtype) - 1)) == 1).tolist()
    assert sorted((stored & (start_bit(dtype) - 1)).tolist()) == sorted(np.concatenate(documents).tolist())


def rewrite(folder: Path, bits: int, version: int) -> str:
    """Clear bits of all tokens of a corpus and write its hashes and card anew; return its digest."""
    card, sources = read_card(folder)[0], []
    for source in card.sources:
        shards = list[Shard]()
        for number, shard in enumerate(source.shards):
            name = ShardName(source.name, number)
            stored = np.fromfile(folder / name.path("tokens"), card.dtype)
            data = (stored & stored.dtype.type(~bits & (2 * top_bit(card.dtype) - 1))).tobytes()
            root, digests = hash_shard([data])
            (folder / name.path("tokens")).write_bytes(data)
            (folder / name.path("digests")).write_bytes(digests)
            shards.append(shard.model_copy(update={"root": root, "sha256": hashlib.sha256(data).hexdigest()}))
        sources.append(source.model_copy(update={"shards": tuple(shards)}))
    made = card.model_copy(update={"sources": tuple(sources), "version": version})
    (folder / CARD_NAME).write_bytes(made.to_json())
    return card_digest(made.to_json())


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    for path in (folder / "corpus").rglob("*"):
        if path.is_file():
            to = tmp_path / "corpus" / path.relative_to(folder / "corpus")
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(path.read_bytes())
    return tmp_path / "corpus"


def verified(folder: Path, card: CorpusCard | None = None) -> list[str]:
    return verify_corpus(folder, card or read_card(folder)[0], 1, start_pool=InlinePool)


def test_corpora_of_earlier_releases_are_read_and_masks_on_them_are_refused(folder: Path, copied: Path) -> None:
    card = read_card(copied)[0]
    rewrite(copied, start_bit(card.dtype), 1)
    assert verified(copied) == []
    with opened(copied, masks=False) as (_, old), opened(folder / "corpus", masks=False) as (_, new):
        windows = range(len(new._cut))
        np.testing.assert_array_equal(old.windows(windows), new.windows(windows))
    with pytest.raises(CorpusError, match="does not tell it") as refused, opened(copied):
        pass
    assert "build the corpus again" in refused.value.remedy


def test_starts_that_differ_from_the_files_of_documents_are_found(copied: Path) -> None:
    assert verified(copied) == []
    rewrite(copied, start_bit(read_card(copied)[0].dtype), 2)
    wrong = verified(copied)
    assert any("talks/000000.tokens does not tell that a document starts" in each for each in wrong)
    assert any("has starts of documents where no document ends before" in each for each in wrong)
