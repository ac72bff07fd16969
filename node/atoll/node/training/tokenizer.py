"""Text ↔ tokens: bytes by default, any Hugging Face tokenizer by name or path.

Bytes need no file and no download: the vocabulary is the 256 byte values, and byte 0, which no text holds,
separates documents. Hugging Face libraries are an optional extra and are imported only when a run names one.
"""

from __future__ import annotations

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


class ByteTokenizer:
    """One token per byte."""

    name = "bytes"
    vocabulary = 256
    separator = (0,)

    def encode(self, text: bytes) -> NDArray[Any]:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


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


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that a run spec names. Raises `ConfigError`."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)
