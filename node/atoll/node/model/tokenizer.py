"""Tokenizers: text to token numbers and back, by bytes or with any Hugging Face tokenizer.

The byte tokenizer needs no file and no download. Its vocabulary is the 256 byte values; byte 0, which no text contains,
separates documents. Hugging Face libraries are an optional extra and are imported only when a run spec names such a
tokenizer. `data/corpus.py` packs the training text with a tokenizer; `export/` saves it beside the weights.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ConfigError

HF_REMEDY = "install atoll with its 'hf' extra: pip install '.[hf]' in a checkout"


class Tokenizer(Protocol):
    """A tokenizer, as the corpus, `generate` and the export use it."""

    @property
    def name(self) -> str:
        """The tokenizer's name in the run spec."""
        ...

    @property
    def vocabulary(self) -> int:
        """Number of token values: the largest token plus one."""
        ...

    @property
    def separator(self) -> tuple[int, ...]:
        """Tokens that end a document; may be empty."""
        ...

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of how the tokenizer encodes, without its name."""
        ...

    def encode(self, text: bytes) -> NDArray[Any]:
        """Convert UTF-8 text to token numbers, 1-D."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Convert token numbers to text; invalid UTF-8 is replaced."""
        ...

    def save(self, directory: Path) -> None:
        """Write files that `transformers.AutoTokenizer` loads. Raises `OSError`."""
        ...


class ByteTokenizer:
    """A tokenizer with one token per byte."""

    name = "bytes"
    vocabulary = 256
    separator = (0,)
    digest = hashlib.sha256(b"bytes, and byte 0 between documents").hexdigest()

    def encode(self, text: bytes) -> NDArray[Any]:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def save(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text(json.dumps(_byte_level(), indent=2) + "\n")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


class HuggingFaceTokenizer:
    """A tokenizer that `transformers` loads by name or path. Code from a repository is never run."""

    def __init__(self, name: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(f"tokenizer {name!r} needs the transformers library", HF_REMEDY) from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"tokenizer {name!r} cannot be loaded: {str(error).splitlines()[0]}",
                "check [data] tokenizer in the run spec, and that this machine can read or download it",
            ) from error
        self.name = name
        self.vocabulary = len(self._tokenizer)
        end = self._tokenizer.eos_token_id
        self.separator: tuple[int, ...] = () if end is None else (int(end),)

    @property
    def library(self) -> Any:
        """The tokenizer of the `transformers` library."""
        return self._tokenizer

    @cached_property
    def digest(self) -> str:
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        rules = fast.to_str() if fast is not None else json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        kind = "" if fast is not None else type(self._tokenizer).__name__
        return hashlib.sha256(json.dumps([kind, rules, self.separator]).encode()).hexdigest()

    def rust_description(self) -> str:
        """Return the Rust library's JSON description, from which it builds the same tokenizer.

        Raises the library's errors.
        """
        return str(self._tokenizer.backend_tokenizer.to_str())

    def encode(self, text: bytes) -> NDArray[Any]:
        numbers = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False)
        return np.asarray(numbers, dtype=np.uint32)

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def save(self, directory: Path) -> None:
        self._tokenizer.save_pretrained(directory)


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer that a run spec names. Raises `ConfigError`."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def _byte_level() -> dict[str, object]:
    """Describe the byte tokenizer in the format of the `tokenizers` library: byte-level BPE without merges."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """List the character that byte-level BPE writes for each byte, as in GPT-2.

    Printable Latin-1 bytes are written as themselves, the others as U+0100 and up, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
