"""Documents become the tokens that the tokenizer gives for the whole text, and text never becomes the separator."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.core.errors import ConfigError, CorpusError
from atoll.node.data import tokenise as tokenise_module
from atoll.node.data.corpus_tokenizer import load_saved, save_tokenizer
from atoll.node.data.encoders import FastEncoder, encoder_of
from atoll.node.data.long_documents import LongDocument
from atoll.node.data.readers import LongText
from atoll.node.data.tokenise import token_dtype, tokenise
from atoll.node.model.tokenizer import ByteTokenizer, HuggingFaceTokenizer

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
from tokenizers import models, normalizers, pre_tokenizers, trainers  # noqa: E402

END = "<|end|>"
SENTENCES = [
    "The quick brown fox jumps over the lazy dog, 12345 times a day.\n",
    "日本語の文章には空白がありません。東京は日本の首都です。",
    "def function(argument):\n    return argument + 1\n\n\n",
    "aaaaaaaaaaaaaaaaaaaaaaaa bbbb cccc",
    "Ein naïver Café-Gast über 🙂 Flüsse",
]


def _byte_level_bpe() -> Any:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made, trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def _bpe_without_words() -> Any:
    """Like Llama 2: spaces become a character, and the whole text is one word."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    specials = [END, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return made, trainers.BpeTrainer(vocab_size=600, special_tokens=specials, show_progress=False)


def _unigram() -> Any:
    made = tokenizers.Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return made, trainers.UnigramTrainer(
        vocab_size=300, special_tokens=[END, "<unk>"], unk_token="<unk>", show_progress=False
    )


def _word_piece() -> Any:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made, trainers.WordPieceTrainer(vocab_size=400, special_tokens=[END, "[UNK]"], show_progress=False)


def _words() -> Any:
    """Spellings of special tokens are words of the vocabulary."""
    made = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made, trainers.WordLevelTrainer(special_tokens=[END, "[UNK]"], show_progress=False)


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level BPE": _byte_level_bpe,
    "BPE without words": _bpe_without_words,
    "Unigram": _unigram,
    "WordPiece": _word_piece,
    "words": _words,
}


@cache
def backend(kind: str) -> Any:
    made, trainer = KINDS[kind]()
    made.train_from_iterator(SENTENCES * 20, trainer)
    return made


def loaded(kind: str, directory: Path, **settings: Any) -> HuggingFaceTokenizer:
    made = tokenizers.Tokenizer.from_str(backend(kind).to_str())
    library = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)
    for name, special in settings.items():
        library.add_tokens([transformers.AddedToken(name, special=special)])
    library.save_pretrained(directory)
    return HuggingFaceTokenizer(str(directory))


def fast(kind: str) -> FastEncoder:
    return FastEncoder.of(backend(kind).to_str(), [0], [])


def in_pieces(kind: str, text: str, piece: int = 300, overlap: int = 80) -> list[int]:
    data = text.encode()
    chunks = (data[at : at + 101] for at in range(0, len(data), 101))
    return np.concatenate([*LongDocument(chunks, fast(kind), piece, overlap).tokens()]).tolist()


texts = st.lists(
    st.one_of(
        st.sampled_from(SENTENCES),
        st.sampled_from(SENTENCES).map(lambda text: text[::3]),
        st.builds(lambda text, times: text * times, st.text("ab 1é日\n.", min_size=1, max_size=3), st.integers(1, 400)),
        st.text(max_size=40),
        st.just(END),
    ),
    min_size=3,
    max_size=30,
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
@example(text="a" * 5000)
@example(text="ab" * 2500 + " " * 1111 + "x")
@example(text="1" * 4003)
@example(text="東京は日本の首都です" * 400)
@example(text=" ".join(["word"] * 1500))
@example(text="\n" * 3001 + SENTENCES[0] * 30)
@example(text=(SENTENCES[0] * 9 + END) * 9)
@example(text="東京は日本の首都です。bbbbbbbbbbbb" * 100)
@example(text="".join(chr(0x4E00 + number * number % 997) for number in range(3000)))
@example(text="")
@settings(max_examples=60, deadline=None)
def test_pieces_give_the_tokens_of_the_whole(kind: str, text: str) -> None:
    assert in_pieces(kind, text) == fast(kind).encode_batch([text])[0].tolist()


def test_words_that_span_pieces_are_encoded_once_more_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    encode = FastEncoder.encode_pieces

    def heard(self: FastEncoder, pieces: Any) -> Any:
        lengths.extend(len(text) for _, text in pieces)
        return encode(self, pieces)

    monkeypatch.setattr(FastEncoder, "encode_pieces", heard)
    in_pieces("byte-level BPE", SENTENCES[0] * 100, overlap=160)
    assert len(lengths) > 10
    assert max(lengths) <= 300 + 160  # what is in memory at once does not grow with the document
    lengths.clear()
    in_pieces("WordPiece", "日" * 100 + "x" * 3000)  # the last word is one unknown token
    assert max(lengths) > 3000


def test_one_long_word_of_unigram_is_joined_where_every_end_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    encode = FastEncoder.encode_pieces

    def heard(self: FastEncoder, pieces: Any) -> Any:
        lengths.extend(len(text) for _, text in pieces)
        return encode(self, pieces)

    monkeypatch.setattr(FastEncoder, "encode_pieces", heard)
    letters = "東京は日本の首都ですabcd"
    text = "".join(letters[number * number * 7919 % 10_007 % len(letters)] for number in range(5000))
    text = re.sub(r"(.{1,32}?)\1\1", r"\1", text)
    assert in_pieces("Unigram", text) == fast("Unigram").encode_batch([text])[0].tolist()
    assert max(lengths) < len(text) / 3
    lengths.clear()
    in_pieces("Unigram", "a" * 2000)  # rounding decides between paths of equal score
    assert max(lengths) > 1900


@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_long_documents_give_what_the_library_gives(kind: str, tmp_path: Path) -> None:
    tokenizer = loaded(kind, tmp_path)
    documents = [text.encode() for text in (*SENTENCES, "", SENTENCES[0] * 17_000, "x")]
    assert len(documents[-2]) > 1 << 20
    arrays = [*tokenise(documents, tokenizer)]
    assert {array.dtype for array in arrays} == {token_dtype(tokenizer.vocabulary)}
    assert [array.tolist() for array in arrays] == [
        [*tokenizer.library.encode(document.decode(), add_special_tokens=False), 0]
        for document in documents
        if document
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [False, True])
def test_text_that_spells_the_separator_stays_text(
    kind: str, special: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenise_module, "LONG_TEXT_BYTES", 2000)
    tokenizer = loaded(kind, tmp_path, **{END: special, "<code>": False})
    text = f"one {END} two{END}{END} <code> three "
    short, long = tokenise([text.encode(), (text * 100).encode()], tokenizer)
    for array in (short, long):
        assert array[-1] == tokenizer.separator[0]
        assert not (array[:-1] == tokenizer.separator[0]).any()
    added = tokenizer.library.convert_tokens_to_ids("<code>")
    assert (short == added).sum() == 1  # an added token that is not special is part of the vocabulary
    assert (long == added).sum() == 100


def test_a_separator_that_is_also_the_unknown_token_may_stand_in_text(tmp_path: Path) -> None:
    library = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(backend("words").to_str()), eos_token="[UNK]"
    )
    library.save_pretrained(tmp_path)
    [array] = tokenise([b"unheard of"], HuggingFaceTokenizer(str(tmp_path)))
    assert array.tolist() == [1, 1, 1]


def test_a_long_text_file_is_one_document_and_tells_progress(tmp_path: Path) -> None:
    tokenizer = loaded("byte-level BPE", tmp_path / "tokenizer")
    text = "".join(SENTENCES) * 5_000
    (tmp_path / "long.txt").write_text(text)
    heard: list[int] = []
    [array] = tokenise([LongText(str(tmp_path / "long.txt"))], tokenizer, heard.append)
    assert array.tolist() == [*fast("byte-level BPE").encode_batch([text])[0].tolist(), 0]
    assert len(heard) > len(text) / (1 << 18)
    assert heard == sorted(heard)
    assert heard[-1] == len(array)


def test_the_byte_tokenizer_gives_bytes(tmp_path: Path) -> None:
    text = ("naïve – ∑ 🙂\n" * 100_000).encode()
    (tmp_path / "long.txt").write_bytes(text)
    arrays = [*tokenise([b"one", b"", LongText(str(tmp_path / "long.txt"))], ByteTokenizer())]
    assert [bytes(array) for array in arrays] == [b"one\0", text + b"\0"]
    assert arrays[0].dtype == np.uint8


def test_a_long_text_that_changed_meanwhile_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_bytes(b"x\xff")
    with pytest.raises(CorpusError, match=r"long\.txt changed"):
        [*tokenise([LongText(str(tmp_path / "long.txt"))], ByteTokenizer())]


class _InPython:
    """A tokenizer that is written in Python, as `transformers` has a few."""

    eos_token_id = 3

    def __len__(self) -> int:
        return 70_000

    def encode(self, text: str, add_special_tokens: bool, split_special_tokens: bool) -> list[int]:
        assert (add_special_tokens, split_special_tokens) == (False, True)
        return [len(word) for word in text.split()]


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[HuggingFaceTokenizer]:
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: _InPython())
    return HuggingFaceTokenizer("in Python")


def test_a_tokenizer_without_the_rust_library_encodes_one_by_one(
    in_python: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenise_module, "LONG_TEXT_BYTES", 20)
    (tmp_path / "long.txt").write_text("a longer text " * 3)
    arrays = [*tokenise([b"one three", LongText(str(tmp_path / "long.txt")), b"x"], in_python)]
    assert [array.tolist() for array in arrays] == [[3, 5, 3], [1, 6, 4] * 3 + [3], [1, 3]]
    assert arrays[0].dtype == np.dtype("<u4")


def test_a_token_beyond_the_vocabulary_is_an_error(in_python: HuggingFaceTokenizer) -> None:
    in_python.vocabulary = 4
    with pytest.raises(ConfigError, match=r"gave token 5, but has 4 tokens"):
        [*tokenise([b"three"], in_python)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_of_a_corpus_gives_the_tokens_of_the_original(kind: str, tmp_path: Path) -> None:
    original = loaded(kind, tmp_path, fox=True)
    saved = load_saved(save_tokenizer(str(tmp_path), tmp_path / "corpus"))
    documents = [f"The quick {END} fox".encode(), *(text.encode() for text in SENTENCES)]
    found, expected = ([array.tolist() for array in tokenise(documents, it)] for it in (saved, original))
    assert found == expected


def test_a_tokenizer_with_parts_in_python_is_used_as_it_is(tmp_path: Path) -> None:
    tokenizer = loaded("words", tmp_path)

    class Spaces:
        def pre_tokenize(self, text: Any) -> None:
            text.split(lambda _, part: part.split(" ", "removed"))

    tokenizer.library.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Spaces())
    assert not isinstance(encoder_of(tokenizer), FastEncoder)
    assert [array[-1] for array in tokenise([b"The quick"], tokenizer)] == [0]
