"""Text ↔ tokens: bytes by default, any Hugging Face tokenizer by name or path.

Bytes need no file and no download: the vocabulary is the 256 byte values, and byte 0, which no text holds,
separates documents. Hugging Face libraries are an optional extra and are imported only when a run names one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ConfigError

HF_REMEDY = "install atoll with its 'hf' extra: pip install '.[hf]' in a checkout"


class Tokenizer(Protocol):
    """What the corpus and `generate` need."""

    @property
    def name(self) -> str:
        """As the run spec names it."""
        ...

    @property
    def vocabulary(self) -> int:
        """One more than the largest token."""
        ...

    @property
    def separator(self) -> tuple[int, ...]:
        """Tokens that end a document."""
        ...

    def encode(self, text: bytes) -> NDArray[Any]:
        """UTF-8 text → token numbers, 1-D."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Token numbers → text; what is not valid UTF-8 is replaced."""
        ...

    def save(self, directory: Path) -> None:
        """As files that `transformers.AutoTokenizer` loads. Raises `OSError`."""
        ...


class ByteTokenizer:
    """One token per byte."""

    name = "bytes"
    vocabulary = 256
    separator = (0,)

    def encode(self, text: bytes) -> NDArray[Any]:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def save(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text(json.dumps(_byte_level(), indent=2) + "\n")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


class HuggingFaceTokenizer:
    """Any tokenizer that `transformers` loads by name or path; code from a repository is never run."""

    def __init__(self, name: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(f"tokenizer {name!r} needs the transformers library", HF_REMEDY) from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tokenizer {name!r} cannot be loaded: {str(error).splitlines()[0]}",
                "check [data] tokenizer in the run spec, and that this machine can reach it",
            ) from error
        self.name = name
        self.vocabulary = len(self._tokenizer)
        end = self._tokenizer.eos_token_id
        self.separator: tuple[int, ...] = () if end is None else (int(end),)

    def encode(self, text: bytes) -> NDArray[Any]:
        numbers = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False)
        return np.asarray(numbers, dtype=np.uint32)

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def save(self, directory: Path) -> None:
        self._tokenizer.save_pretrained(directory)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that a run spec names. Raises `ConfigError`."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def _byte_level() -> dict[str, object]:
    """One token per byte in the words of the `tokenizers` library: byte-level BPE without merges."""
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
    """How byte-level BPE writes each byte: printable Latin-1 as itself, the others from U+0100 on, in order (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
