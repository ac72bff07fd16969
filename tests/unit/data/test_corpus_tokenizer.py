"""The tokenizer of a corpus: files that encode as the original, also after they are saved once more."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.node.data.corpus_tokenizer import RustTokenizer, load_saved, save_tokenizer
from atoll.node.model.tokenizer import ByteTokenizer, HuggingFaceTokenizer


def test_a_saved_tokenizer_encodes_as_the_original_and_can_be_saved_again(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "fox": 1, "<end>": 2, "?": 3}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(tmp_path / "words")
    original = HuggingFaceTokenizer(str(tmp_path / "words"))
    saved = load_saved(save_tokenizer(str(tmp_path / "words"), tmp_path / "first"))
    assert isinstance(saved, RustTokenizer)
    (tmp_path / "second").mkdir()
    saved.save(tmp_path / "second")
    again = HuggingFaceTokenizer(str(tmp_path / "second"))
    assert original.digest == saved.digest == again.digest
    for tokenizer in (original, saved, again):
        assert tokenizer.encode(b"the fox jumps").tolist() == [0, 1, 3]
        assert tokenizer.separator == (2,)
        assert tokenizer.decode([1, 0]) == "fox the"


def test_the_byte_tokenizer_has_no_files(tmp_path: Path) -> None:
    saved = save_tokenizer("bytes", tmp_path / "tokenizer")
    assert saved.card.files == ()
    assert isinstance(load_saved(saved), ByteTokenizer)
