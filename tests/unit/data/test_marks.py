"""A corpus of instruction data has marks: whatever happens on the way, they reach the trainer, and only it."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st
from support.chats import library, save, talk
from support.corpora import SMALL, build_inline, files_of, small_spec, tokens_of, write_jsonl, write_rows
from support.inline_pool import InlinePool
from support.power_cut import FailingDisk

from atoll.core.clock import SystemClock
from atoll.core.errors import BuildSpecError, ConfigError, CorpusError, DataDirUnusable
from atoll.core.run_spec import parse_run_spec
from atoll.node.data.build import BuiltCorpus
from atoll.node.data.build_spec import BuildSource, BuildSpec, parse_build_spec
from atoll.node.data.card import CorpusCard, card_digest, count_marks, parse_card, summary, top_bit
from atoll.node.data.examples import stored
from atoll.node.data.open_corpus import CacheFolder, open_corpus
from atoll.node.data.sample import sample_texts
from atoll.node.data.tokenise import token_dtype
from atoll.node.data.verify import verify_corpus

TALKS = [
    talk(f"the tide {number}?", "yes " * (number % 5), "and coral?", f"no {number}", system="be plain")
    for number in range(40)
]
PAIRS = [{"ask": f"question {number}: ", "say": "answer " * (1 + number % 3)} for number in range(30)]


def spec_of(folder: Path, kind: str = "chatml", **values: Any) -> BuildSpec:
    """Conversations, pairs and plain text, with one tokenizer."""
    write_rows(folder / "talks.jsonl", [{"messages": messages} for messages in TALKS])
    write_rows(folder / "pairs.jsonl", PAIRS)
    write_jsonl(folder / "text.jsonl", ["plain words about lagoons"] * 30)
    sources = (
        BuildSource(name="talks", source="jsonl", path=str(folder / "talks.jsonl"), messages="messages"),
        BuildSource(name="pairs", source="jsonl", path=str(folder / "pairs.jsonl"), prompt="ask", completion="say"),
        BuildSource(name="text", source="jsonl", path=str(folder / "text.jsonl")),
    )
    tokenizer = str(save(kind, folder / "tokenizer"))
    return BuildSpec(sources=sources, tokenizer=tokenizer, **values).model_copy(update={"shard_bytes": 512})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marks")


@pytest.fixture(scope="module")
def built(folder: Path) -> BuiltCorpus:
    return build_inline(spec_of(folder), folder / "corpus")


@given(st.lists(st.tuples(st.integers(0, 127), st.booleans()), min_size=1, max_size=50))
def test_a_mark_and_its_token_come_back(pairs: list[tuple[int, bool]]) -> None:
    for dtype in ("u1", "<u2", "<u4"):
        tokens = np.asarray([token for token, _ in pairs], dtype=dtype)
        marks = np.asarray([mark for _, mark in pairs])
        found = stored(tokens.copy(), marks)
        top = top_bit(found.dtype)
        assert (found & (top - 1)).tolist() == tokens.tolist()
        assert ((found & top) > 0).tolist() == marks.tolist()
        assert count_marks(found) == marks.sum()


def test_tokens_are_as_narrow_as_four_times_the_vocabulary_allows() -> None:
    widths = [(64, 1), (65, 2), (1 << 14, 2), ((1 << 14) + 1, 4), (1 << 30, 4)]
    assert [(size, token_dtype(size, marks=True).itemsize) for size, _ in widths] == widths


def test_sources_are_marked_apart(built: BuiltCorpus, folder: Path) -> None:
    card = parse_card((folder / "corpus/corpus.json").read_bytes(), built.digest)
    assert card == built.card
    assert (card.version, card.marks, card.token_bytes) == (2, True, 2)
    talks, pairs, text = card.sources
    assert text.targets == text.tokens
    assert 0 < talks.targets < talks.tokens
    assert 0 < pairs.targets < pairs.tokens
    assert summary(card)["sources"][0]["targets"] == talks.targets  # type: ignore[index]
    found = tokens_of(folder / "corpus", card, "talks")
    assert len(found) - count_marks(found) == talks.targets
    assert verify_corpus(folder / "corpus", card, 1, start_pool=InlinePool) == []


def test_samples_tell_what_is_trained(built: BuiltCorpus, folder: Path) -> None:
    for sample in sample_texts(folder / "corpus", built.card, "talks", 20, 60, 1):
        assert "".join(text for _, text in sample.parts) == sample.text
        shown = "".join(f"⟦{text}⟧" if trained else text for trained, text in sample.parts)
        assert "⟦user" not in shown
        assert "⟦<|im_start|>" not in shown
    assert all(
        trained for one in sample_texts(folder / "corpus", built.card, "text", 3, 9, 1) for trained, _ in one.parts
    )


def windows_of(folder: Path, digest: str, sequence_length: int = 24) -> Any:
    spec = parse_run_spec(
        'version = 1\n[run]\nname = "a"\nstop_tokens = 1000\n[model]\n[optimizer]\n[sync]\nround_tokens = 1000\n'
        f'[data]\nsource = "corpus"\ncorpus = "{digest}"\ntokenizer = "corpus"\nvalidation_samples = 2\n'
        f"sequence_length = {sequence_length}\n"
    )
    cache = CacheFolder(folder / "cache")
    return open_corpus(spec.data, str(folder / "corpus"), cache, SystemClock()).for_training(spec)


def test_windows_have_the_complement_of_what_is_input_only(built: BuiltCorpus, folder: Path) -> None:
    corpus = windows_of(folder, built.digest)
    try:
        top = top_bit(built.card.dtype)
        for window in range(len(corpus._cut)):
            source, shard, start, stop = corpus.place(window)
            name = f"{built.card.sources[source].name}/{shard:06d}.tokens"
            raw = np.frombuffer((folder / "corpus" / name).read_bytes()[start:stop], built.card.dtype).astype(int)
            (found,) = corpus.windows([window])
            assert found.dtype == np.int64
            numbers = [(token & top, token & (top // 2 - 1)) for token in raw.tolist()]  # also without the start bit
            assert found.tolist() == [~number if marked else number for marked, number in numbers]
    finally:
        corpus.close()


def test_a_token_beyond_the_vocabulary_is_found_under_its_mark(built: BuiltCorpus, folder: Path) -> None:
    few = built.card.tokenizer.model_copy(update={"vocabulary": 100, "separator": ()})
    lying = built.card.model_copy(update={"tokenizer": few})
    wrong = verify_corpus(folder / "corpus", lying, 1, start_pool=InlinePool)
    assert any("the vocabulary has 100" in each for each in wrong)
    corpus = windows_of(folder, built.digest)
    try:
        corpus.card = lying
        with pytest.raises(CorpusError, match="not in its vocabulary"):
            corpus.windows(range(5))
    finally:
        corpus.close()


def forged(card: CorpusCard, **values: Any) -> bytes:
    return json.dumps(json.loads(card.to_json()) | values).encode()


def test_cards_that_contradict_their_marks_are_refused(built: BuiltCorpus, folder: Path) -> None:
    card = built.card
    with pytest.raises(CorpusError, match="no marks"):
        parse_card(forged(card, marks=False))
    with pytest.raises(CorpusError, match="targets"):
        parse_card(forged(card, marks=False, version=1))
    with pytest.raises(CorpusError, match="version"):
        parse_card(forged(card, version=3))
    with pytest.raises(CorpusError, match="too narrow"):
        parse_card(forged(card, token_bytes=1))
    shards = card.sources[0].shards
    for targets in (shards[0].tokens + 1, None):
        one = card.sources[0].model_copy(
            update={"shards": (shards[0].model_copy(update={"targets": targets}), *shards[1:])}
        )
        with pytest.raises(CorpusError, match="targets"):
            parse_card(card.model_copy(update={"sources": (one, *card.sources[1:])}).to_json())
    lower = shards[0].model_copy(update={"targets": (shards[0].targets or 0) - 1})
    one = card.sources[0].model_copy(update={"shards": (lower, *shards[1:])})
    wrong = verify_corpus(folder / "corpus", card.model_copy(update={"sources": (one,)}), 1, start_pool=InlinePool)
    assert len(wrong) == 1
    assert "targets" in wrong[0]


def test_a_corpus_without_marks_has_the_card_of_earlier_releases(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [f"a text {number}" for number in range(40)])
    built = build_inline(small_spec(path), tmp_path / "corpus")
    assert built.digest == "14d0a630557fa64b361a34beb4b753713ede7e1ba83f7b23ab40a1b81212c374"
    data = (tmp_path / "corpus/corpus.json").read_bytes()
    assert b"marks" not in data
    assert b"targets" not in data
    assert card_digest(parse_card(data).to_json()) == built.digest


def test_a_build_with_marks_goes_on_after_errors_to_the_same_bytes(
    built: BuiltCorpus, folder: Path, tmp_path: Path
) -> None:
    spec = spec_of(folder)
    counting = FailingDisk(-1, errno.ENOSPC)
    build_inline(spec, tmp_path / "counted", disk=counting)
    assert counting.seen > 100
    for number in range(5, counting.seen, counting.seen // 12):
        corpus = tmp_path / f"{number}"
        with pytest.raises(DataDirUnusable):
            build_inline(spec, corpus, disk=FailingDisk(number, errno.ENOSPC, for_good=True))
        assert build_inline(spec, corpus, chance=number).digest == built.digest
        assert files_of(corpus) == files_of(folder / "corpus")


def test_another_template_is_another_build(folder: Path, tmp_path: Path) -> None:
    spec = spec_of(folder)
    with pytest.raises(DataDirUnusable):
        build_inline(spec, tmp_path / "corpus", disk=FailingDisk(60, errno.ENOSPC, for_good=True))
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    other = spec.model_copy(update={"chat_template": str(tmp_path / "own.jinja")})
    with pytest.raises(CorpusError, match="another spec or tokenizer"):
        build_inline(other, tmp_path / "corpus")


def test_left_out_examples_are_in_the_card_by_kind(folder: Path, tmp_path: Path) -> None:
    rows = [talk("a", "yes"), talk("a"), talk("a " * 90, "no"), [{"role": "user"}], [], "words", talk("a", "b " * 99)]
    write_rows(tmp_path / "in.jsonl", [{"messages": row} for row in rows])
    source = BuildSource(name="t", source="jsonl", path=str(tmp_path / "in.jsonl"), messages="messages")
    spec = BuildSpec(sources=(source,), tokenizer=str(folder / "tokenizer"), longest_example=60, long_examples="cut")
    build = build_inline(spec, tmp_path / "corpus", limits=SMALL)
    left_out = {"ends_of_long_examples": 1, "lines": 2, "long_examples": 1, "rows": 1, "unanswered_examples": 1}
    assert build.card.left_out == left_out
    told = build.reports["t"].left_out()
    assert f"(the first is line 4 of {tmp_path / 'in.jsonl'}: holds null as content of message 1, not text)" in told
    with pytest.raises(CorpusError, match="line 4 of"):
        build_inline(spec, tmp_path / "strict", strict=True)


def test_parquet_and_data_sets_give_what_lines_give(built: BuiltCorpus, folder: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line)["messages"] for line in (folder / "talks.jsonl").read_text().splitlines()]
    rows[0] = [{**rows[0][0], "name": "one"}, *rows[0][1:]]  # all rows get the key, without a value
    (tmp_path / "set").mkdir()
    parquet.write_table(pyarrow.table({"messages": rows}), tmp_path / "set/talks.parquet")
    expected = tokens_of(folder / "corpus", built.card, "talks")
    for kind, path in (("parquet", tmp_path / "set/talks.parquet"), ("huggingface", tmp_path / "set")):
        source = BuildSource(name="talks", source=kind, path=str(path), messages="messages")  # type: ignore[arg-type]
        spec = BuildSpec(sources=(source,), tokenizer=str(folder / "tokenizer"), order="input")
        found = build_inline(spec, tmp_path / kind)
        assert found.card.documents == len(TALKS)
        assert sorted(tokens_of(tmp_path / kind, found.card, "talks").tolist()) == sorted(expected.tolist())


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('messages = "m"\nprompt = "p"\ncompletion = "c"', "not both"),
        ('prompt = "p"', "come together"),
        ('messages = "m"\nfield = "text"', "field is for plain text"),
        ('messages = "m"\nsource = "text"', "need the source"),
        ('message = "m"', "did you mean messages"),
    ],
)
def test_impossible_sources_are_refused(lines: str, words: str, tmp_path: Path) -> None:
    source = "" if "source" in lines else 'source = "jsonl"\n'
    with pytest.raises(BuildSpecError, match=words):
        parse_build_spec(f'[[sources]]\nname = "a"\npath = "x"\n{source}{lines}', "spec.toml", tmp_path)
    for key in ('chat_template = "a"', "longest_example = 9", 'long_examples = "cut"'):
        with pytest.raises(BuildSpecError, match="needs"):
            parse_build_spec(f'{key}\n[[sources]]\nname = "a"\npath = "x"', "spec.toml", tmp_path)


def test_templates_that_cannot_be_used_end_the_build_with_a_sentence(folder: Path, tmp_path: Path) -> None:
    spec = spec_of(folder)
    for text, words in (("{% for %}", "no Jinja template"), ("{{ messages.__class__ }}", "sandbox forbids")):
        (tmp_path / "own.jinja").write_text(text)
        with pytest.raises(ConfigError, match=words):
            build_inline(spec.model_copy(update={"chat_template": str(tmp_path / "own.jinja")}), tmp_path / "corpus")
    for path, words in ((tmp_path / "none", "cannot read"), (tmp_path, "cannot read")):
        with pytest.raises(BuildSpecError, match=words):
            build_inline(spec.model_copy(update={"chat_template": str(path)}), tmp_path / "corpus")


# --- tokenizers with less, or with more -----------------------------------------------------------------


def test_text_of_a_tokenizer_without_an_end_of_sequence_has_ends_of_documents_only(tmp_path: Path) -> None:
    fast = library("chatml")
    fast.eos_token = None
    fast.save_pretrained(tmp_path / "t")
    path = write_jsonl(tmp_path / "in.jsonl", ["yes", "no"])
    built = build_inline(small_spec(path, tokenizer=str(tmp_path / "t"), order="input"), tmp_path / "corpus")
    assert built.card.tokenizer.separator == ()
    assert fast.decode(tokens_of(tmp_path / "corpus", built.card, "s0").tolist()) == "yesno"
    ends = np.fromfile(tmp_path / "corpus/s0/000000.documents", "<u8").tolist()
    assert (len(ends), ends[-1]) == (2, built.card.tokens)


def test_added_tokens_count_and_those_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    fast = library("chatml")
    before = len(fast)
    fast.add_tokens(["<think>", "</think>"])
    fast.save_pretrained(tmp_path / "t")
    path = write_rows(tmp_path / "in.jsonl", [{"m": talk("a", "<think>yes</think>no")}])
    source = BuildSource(name="s0", source="jsonl", path=str(path), messages="m")
    spec = BuildSpec(sources=(source,), tokenizer=str(tmp_path / "t"))
    built = build_inline(spec, tmp_path / "corpus")
    assert built.card.tokenizer.vocabulary == before + 2
    found = tokens_of(tmp_path / "corpus", built.card, "s0") & built.card.token_mask
    assert {before, before + 1} <= set(found.tolist())
    file = tmp_path / "t/tokenizer.json"
    rules = json.loads(file.read_text())
    rules["model"]["vocab"]["no"] += 5000
    file.write_text(json.dumps(rules))
    with pytest.raises(ConfigError, match="gave token 5"):
        build_inline(spec, tmp_path / "gap")
