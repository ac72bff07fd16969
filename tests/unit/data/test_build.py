"""A corpus has the documents of its input, and equal builds give equal bytes, whatever happens on the way."""

from __future__ import annotations

import errno
import itertools
import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import build_inline, documents_of, files_of, small_spec, tokens_of, write_jsonl
from support.power_cut import FailingDisk

from atoll.core.errors import AlreadyExists, AlreadyRunning, ConfigError, CorpusError, DataDirUnusable
from atoll.node.data.build import build_corpus
from atoll.node.data.build_directory import BuildDirectory
from atoll.node.data.build_schedule import Limits
from atoll.node.data.build_spec import BuildSource, BuildSpec
from atoll.node.data.card import card_digest, parse_card

DOCUMENTS = [f"document {number}: " + "words and " * (number % 7) for number in range(60)]
TEXTS = st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40), min_size=1, max_size=40)
SIZES = st.integers(1, 400)


@settings(deadline=None, max_examples=60)
@given(TEXTS, SIZES, SIZES, SIZES, st.integers(1, 5), st.integers(1, 9), st.sampled_from(["input", "shuffled"]))
def test_what_is_built_is_what_was_read(
    texts: list[str], shard: int, unit: int, group: int, units: int, chance: int, order: str
) -> None:
    expected = [text.encode() for text in texts if text]
    with TemporaryDirectory() as folder:
        path, corpus = write_jsonl(Path(folder, "in.jsonl"), texts), Path(folder, "corpus")
        spec = small_spec(path, shard_bytes=shard, order=order)
        limits = Limits(unit, group, group_documents=chance, group_units=units)
        if not expected:
            with pytest.raises(CorpusError, match="no usable training text"):
                build_inline(spec, corpus, limits=limits)
            return
        built = build_inline(spec, corpus, limits=limits, chance=chance, workers=1 + chance % 3)
        found = documents_of(corpus, built.card, "s0")
        assert Counter(found) == Counter(expected)
        if order == "input":
            assert found == expected
        again = build_inline(spec, Path(folder, "again"), limits=limits, chance=chance + 1, workers=4)
        assert files_of(corpus) == files_of(Path(folder, "again"))
        assert built.digest == again.digest == card_digest((corpus / "corpus.json").read_bytes())
        assert built.card.documents == len(expected)
        assert built.card.left_out == ({"rows": len(texts) - len(expected)} if "" in texts else {})


def test_seeds_give_other_orders_and_shards_are_full(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    limits = Limits(unit_bytes=200)  # one group
    one, other = (
        build_inline(small_spec(path, seed=seed), tmp_path / str(seed), limits=limits).card for seed in (1, 2)
    )
    orders = [documents_of(tmp_path / str(seed), card, "s0") for seed, card in ((1, one), (2, other))]
    assert orders[0] != orders[1]
    assert [text.decode() for text in orders[0]] != DOCUMENTS
    sizes = [shard.tokens for shard in one.sources[0].shards]
    assert set(sizes[:-1]) == {256}
    assert 0 < sizes[-1] <= 256


def test_documents_of_all_units_of_a_group_are_mixed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [f"{number:04d}" for number in range(1000)])
    built = build_inline(small_spec(path), tmp_path / "corpus", limits=Limits(unit_bytes=1000))
    places = [int(text) for text in documents_of(tmp_path / "corpus", built.card, "s0")]
    neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(places))
    assert neighbours < 20, "two of a thousand are expected"


def test_sources_are_apart(tmp_path: Path) -> None:
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [name * 9] * 30) for name in "ab"]
    card = build_inline(small_spec(*paths), tmp_path / "corpus").card
    assert set(documents_of(tmp_path / "corpus", card, "s0")) == {b"a" * 9}
    assert set(documents_of(tmp_path / "corpus", card, "s1")) == {b"b" * 9}
    assert [source.documents for source in card.sources] == [30, 30]


def test_one_giant_document_fills_many_shards(tmp_path: Path) -> None:
    (tmp_path / "giant.txt").write_bytes(b"0123456789" * 1000)
    spec = small_spec(tmp_path).model_copy(
        update={"sources": (BuildSource(name="s0", path=str(tmp_path / "giant.txt")),)}
    )
    card = build_inline(spec, tmp_path / "corpus").card
    assert [shard.documents for shard in card.sources[0].shards] == [0] * 39 + [1]
    assert documents_of(tmp_path / "corpus", card, "s0") == [b"0123456789" * 1000]


def test_the_card_tells_nothing_of_this_machine(tmp_path: Path) -> None:
    for place in ("one", "another/place"):
        (tmp_path / place).mkdir(parents=True)
        write_jsonl(tmp_path / place / "in.jsonl", DOCUMENTS)
        build_inline(small_spec(tmp_path / place / "in.jsonl"), tmp_path / place / "corpus")
    one, other = files_of(tmp_path / "one/corpus"), files_of(tmp_path / "another/place/corpus")
    assert one == other
    assert str(tmp_path).encode() not in one["corpus.json"]
    assert {name.partition("/")[0] for name in one} == {"corpus.json", "s0"}


def test_bad_lines_are_counted_or_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS[:3])
    path.write_text(path.read_text() + 'not JSON\n{"text": null}\n{"text": 7}\n')
    built = build_inline(small_spec(path), tmp_path / "corpus")
    assert built.card.left_out == {"lines": 2, "rows": 1}
    assert "line 4" in built.reports["s0"].left_out()
    with pytest.raises(CorpusError, match="line 4"):
        build_inline(small_spec(path), tmp_path / "strict", strict=True)
    assert not (tmp_path / "strict/corpus.json").exists()


def test_no_text_is_an_error_and_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="is empty"):
        build_inline(small_spec(write_jsonl(tmp_path / "in.jsonl", [])), tmp_path / "corpus")
    assert not (tmp_path / "corpus/corpus.json").exists()
    with pytest.raises(CorpusError, match=r"none\.jsonl"):
        build_inline(small_spec(tmp_path / "none.jsonl"), tmp_path / "corpus")


def test_a_build_goes_on_after_an_error_at_every_operation(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    spec = small_spec(path, shard_bytes=512)
    limits = Limits(unit_bytes=1200, group_bytes=1500)
    expected = build_inline(spec, tmp_path / "undisturbed", limits=limits)
    counting = FailingDisk(-1, errno.ENOSPC)
    build_inline(spec, tmp_path / "counted", limits=limits, disk=counting)
    assert counting.seen > 100
    for number in range(counting.seen):
        corpus = tmp_path / f"{number}"
        with pytest.raises(DataDirUnusable) as refused:
            build_inline(spec, corpus, limits=limits, disk=FailingDisk(number, errno.ENOSPC, for_good=True))
        assert "goes on where it stopped" in refused.value.remedy
        assert build_inline(spec, corpus, limits=limits, chance=number).digest == expected.digest
        assert files_of(corpus) == files_of(tmp_path / "undisturbed")


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    spec = small_spec(path, shard_bytes=512)
    counting = FailingDisk(-1, errno.ENOSPC)
    build_inline(spec, tmp_path / "counted", disk=counting)
    late = FailingDisk(counting.seen * 3 // 4, errno.ENOSPC, for_good=True)
    with pytest.raises(DataDirUnusable):
        build_inline(spec, tmp_path / "corpus", disk=late)
    rest = FailingDisk(-1, errno.ENOSPC)
    seen = []
    build_inline(spec, tmp_path / "corpus", disk=rest, on_progress=seen.append)
    assert rest.seen < counting.seen / 2
    assert 0 < seen[1].bytes_earlier == seen[1].bytes_done < seen[-1].bytes_done == seen[-1].bytes_all


def test_progress_only_grows_and_ends_with_everything(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    seen = []
    built = build_inline(small_spec(path), tmp_path / "corpus", on_progress=seen.append)
    assert seen[0].phase == "plan"
    counts = [(it.bytes_done, it.tokens, it.shards) for it in seen[1:]]
    assert counts == sorted(counts)
    assert counts[-1] == (path.stat().st_size, built.card.tokens, len(built.card.sources[0].shards))


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """A directory with an unfinished build of `in.jsonl`."""
    spec = small_spec(write_jsonl(tmp_path / "in.jsonl", DOCUMENTS))
    with pytest.raises(DataDirUnusable):
        build_inline(spec, tmp_path / "corpus", disk=FailingDisk(150, errno.ENOSPC, for_good=True))
    return tmp_path


def test_another_spec_is_refused_and_restart_begins_again(interrupted: Path) -> None:
    path, corpus = interrupted / "in.jsonl", interrupted / "corpus"
    other = small_spec(path, shard_bytes=128)
    for wrong in (other, small_spec(path, seed=1), small_spec(path, order="input"), small_spec(path, path)):
        with pytest.raises(CorpusError, match="another spec") as refused:
            build_inline(wrong, corpus)
        assert "--restart" in refused.value.remedy
    clean = build_inline(other, interrupted / "clean")
    assert build_inline(other, corpus, restart=True).digest == clean.digest
    assert files_of(corpus) == files_of(interrupted / "clean")


def test_restart_deletes_the_shards_of_sources_that_are_gone(interrupted: Path) -> None:
    two = small_spec(interrupted / "in.jsonl", interrupted / "in.jsonl")
    corpus = interrupted / "two"
    with pytest.raises(DataDirUnusable):
        build_inline(two, corpus, disk=FailingDisk(500, errno.ENOSPC, for_good=True))
    assert list((corpus / "s1").iterdir())
    build_inline(small_spec(interrupted / "in.jsonl"), corpus, restart=True)
    assert not (corpus / "s1").exists()


def test_changed_input_is_refused(interrupted: Path) -> None:
    path = write_jsonl(interrupted / "in.jsonl", [*DOCUMENTS, "one more"])
    with pytest.raises(CorpusError, match="input files have changed"):
        build_inline(small_spec(path), interrupted / "corpus")
    assert build_inline(small_spec(path), interrupted / "corpus", restart=True).card.documents == len(DOCUMENTS) + 1


def test_input_that_changes_meanwhile_gives_no_corpus(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    with pytest.raises(CorpusError, match="changed while they were read"):
        build_inline(
            small_spec(path), tmp_path / "corpus", on_progress=lambda _: write_jsonl(path, ["later", *DOCUMENTS])
        )
    assert not (tmp_path / "corpus/corpus.json").exists()


def test_directories_with_other_files_are_left_alone(tmp_path: Path) -> None:
    spec = small_spec(write_jsonl(tmp_path / "in.jsonl", DOCUMENTS))
    before = files_of(tmp_path)
    with pytest.raises(AlreadyExists, match="no corpus"):
        build_inline(spec, tmp_path, restart=True)
    assert files_of(tmp_path) == before
    build_inline(spec, tmp_path / "corpus")
    before = files_of(tmp_path)
    for restart in (False, True):
        with pytest.raises(AlreadyExists, match="complete corpus"):
            build_inline(spec, tmp_path / "corpus", restart=restart)
    assert files_of(tmp_path) == before


def test_what_a_killed_clean_up_leaves_is_no_unfinished_build(tmp_path: Path) -> None:
    spec = small_spec(write_jsonl(tmp_path / "in.jsonl", DOCUMENTS))
    build_inline(spec, tmp_path / "corpus")
    before = files_of(tmp_path)
    (tmp_path / "corpus/.build.done/groups").mkdir(parents=True)
    with pytest.raises(AlreadyExists, match="complete corpus"):
        build_inline(spec, tmp_path / "corpus")
    assert not (tmp_path / "corpus/.build.done").exists()
    assert files_of(tmp_path) == before


def test_a_corpus_inside_its_own_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    spec = BuildSpec(sources=(BuildSource(name="web", path=str(tmp_path)),))
    with pytest.raises(CorpusError, match="which is the text"):
        build_inline(spec, tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


def test_two_builds_do_not_share_a_directory(tmp_path: Path) -> None:
    spec = small_spec(write_jsonl(tmp_path / "in.jsonl", DOCUMENTS))
    with BuildDirectory(tmp_path / "corpus", ["s0"]).locked(), pytest.raises(AlreadyRunning):
        build_inline(spec, tmp_path / "corpus")
    build_inline(spec, tmp_path / "corpus")


def test_a_tokenizer_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    (tmp_path / "empty").mkdir()
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        build_inline(small_spec(path, tokenizer=str(tmp_path / "empty")), tmp_path / "corpus")


def test_the_tokenizers_files_come_along(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        DOCUMENTS,
        tokenizers.trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<end>")
    path = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    for place in ("a/mine", "b/mine"):
        fast.save_pretrained(tmp_path / place)
    one, other = (
        build_inline(small_spec(path, tokenizer=str(tmp_path / place / "mine")), tmp_path / place / "corpus")
        for place in "ab"
    )
    assert one.digest == other.digest
    files = files_of(tmp_path / "a/corpus")
    assert files == files_of(tmp_path / "b/corpus")
    assert (
        {file.name for file in one.card.tokenizer.files}
        == {name.removeprefix("tokenizer/") for name in files if name.startswith("tokenizer/")}
        >= {"tokenizer.json", "tokenizer_config.json"}
    )
    assert (one.card.tokenizer.name, one.card.token_bytes, one.card.tokenizer.separator) == ("mine", 2, (0,))
    decoded = fast.decode(tokens_of(tmp_path / "a/corpus", one.card, "s0").tolist()).split("<end>")
    assert Counter(decoded) == Counter([*DOCUMENTS, ""])
    settings_ = json.loads(files["tokenizer/tokenizer_config.json"])
    assert not {"name_or_path", "is_local"} & set(settings_)


def test_a_card_of_too_many_shards_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.node.data.build.MAX_SHARDS", 3)
    path = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    with pytest.raises(CorpusError, match="more than 3 shards"):
        build_inline(small_spec(path), tmp_path / "corpus")


def test_a_real_spec_builds_without_a_pool_of_ours(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    spec = BuildSpec(sources=(BuildSource(name="web", source="jsonl", path=str(path)),))
    built = build_corpus(spec, tmp_path / "corpus", workers=1)
    assert parse_card((tmp_path / "corpus/corpus.json").read_bytes(), built.digest) == built.card
