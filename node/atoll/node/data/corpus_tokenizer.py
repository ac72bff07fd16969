"""The tokenizer of a corpus as files beside it, and as worker processes load it.

`save_tokenizer` writes the files that the card lists, without fields that depend on where the tokenizer came from, and
checks that they encode as the original does. Workers read `tokenizer.json` with the Rust library alone: `transformers`
imports torch, which takes 200 MB in each process.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from atoll.core.disk import OS_DISK, Disk
from atoll.core.errors import ConfigError
from atoll.node.data.card import TOKENIZER_FILES, CardTokenizer, TokenizerFile
from atoll.node.data.chat_template import ChatFormat
from atoll.node.data.durable_files import explained, write_file
from atoll.node.data.encoders import FastEncoder, encoder_of
from atoll.node.model.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

_RUST_FILE = "tokenizer.json"
_ORIGIN_KEYS = frozenset({"is_local", "local_files_only", "name_or_path", "_commit_hash", "transformers_version"})


@dataclass(frozen=True)
class TokenizerUse:
    """Features that a build needs from a tokenizer in addition to tokens."""

    answers: bool = False  # instruction data
    pairs: bool = False  # prompts with completions, which end with the separator
    chat: bool = False  # conversations
    template: str | None = None  # replaces the tokenizer's own template


NO_ANSWERS = TokenizerUse()


@dataclass(frozen=True)
class CorpusTokenizer:
    """A tokenizer in a directory."""

    card: CardTokenizer
    directory: Path
    special: tuple[int, ...]  # numbers of its special tokens
    rust: bool  # its tokenizer.json alone determines the encoding
    chat: ChatFormat | None = None


def save_tokenizer(name: str, directory: Path, disk: Disk = OS_DISK, use: TokenizerUse = NO_ANSWERS) -> CorpusTokenizer:
    """Load the tokenizer `name` and write its files. Raises `ConfigError`, `DataDirUnusable`."""
    tokenizer = load_tokenizer(name)
    chat = _chat_format(tokenizer, use.template) if use.chat else None
    if use.pairs and not tokenizer.separator:
        raise ConfigError(
            f"tokenizer {name!r} has no end-of-sequence token, so no completion would have an end",
            "set eos_token in the tokenizer's files, or write conversations with a chat template",
        )
    saved = replace(write_tokenizer(tokenizer, directory, disk), chat=chat)
    if saved.card.files and not saved.rust and load_tokenizer(str(directory)).digest != saved.card.digest:
        raise ConfigError(
            f"the files of tokenizer {name!r} do not encode as it does, so nobody could use the corpus",
            "use a tokenizer of the tokenizers library, which has a tokenizer.json",
        )
    return saved


def write_tokenizer(tokenizer: Tokenizer, directory: Path, disk: Disk = OS_DISK) -> CorpusTokenizer:
    """Write the files of a tokenizer. Raises `DataDirUnusable`."""
    name = tokenizer.name
    shown = Path(name).name if Path(name).is_dir() else name
    if isinstance(tokenizer, HuggingFaceTokenizer):
        files = _write(tokenizer, directory, disk)
        special = tuple(sorted(tokenizer.library.all_special_ids))
    else:
        files, special = (), ()
    card = CardTokenizer(
        name=shown,
        digest=tokenizer.digest,
        vocabulary=tokenizer.vocabulary,
        separator=tokenizer.separator,
        files=files,
    )
    rust = any(file.name == _RUST_FILE for file in files) and _rust_digest(directory, card) == card.digest
    return CorpusTokenizer(card, directory, special, rust)


def _chat_format(tokenizer: Tokenizer, template: str | None) -> ChatFormat:
    """Return the format of conversations. A template that is passed in replaces the tokenizer's own."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        if template is None:
            raise _no_template(tokenizer.name)
        return ChatFormat(template, (("bos_token", ""), ("eos_token", "\0")), ("\0",))
    library = tokenizer.library
    if template is not None:
        library.chat_template = template
    own = getattr(library, "chat_template", None)
    found = own.get("default") if isinstance(own, dict) else own
    if not isinstance(found, str):
        raise _no_template(tokenizer.name)
    variables = {key: value for key, value in library.special_tokens_map.items() if isinstance(value, str)}
    encoder = encoder_of(tokenizer)
    special = set(variables.values())
    if isinstance(encoder, FastEncoder):
        special |= {each["content"] for each in json.loads(encoder.description)["added_tokens"] if each["special"]}
    return ChatFormat(found, tuple(sorted(variables.items())), tuple(sorted(special - {""})))


def _no_template(name: str) -> ConfigError:
    return ConfigError(
        f"tokenizer {name!r} has no chat template, and conversations need one",
        'name a file with a Jinja template beside the build spec: chat_template = "chat.jinja"',
    )


def open_saved(card: CardTokenizer, directory: Path) -> Tokenizer:
    """Load the tokenizer of a corpus that may be another machine's. The caller compares its digest.

    Raises `ConfigError`.
    """
    special: tuple[int, ...] = ()
    rust = any(file.name == _RUST_FILE for file in card.files) and _rust_digest(directory, card) == card.digest
    return load_saved(CorpusTokenizer(card, directory, special, rust))


@lru_cache(maxsize=1)
def load_saved(saved: CorpusTokenizer) -> Tokenizer:
    """Load a tokenizer that `save_tokenizer` has written. Repeated calls in a process return the same object."""
    if not saved.card.files:
        return ByteTokenizer()
    return RustTokenizer(saved) if saved.rust else load_tokenizer(str(saved.directory))


class RustTokenizer(HuggingFaceTokenizer):
    """A Hugging Face tokenizer from its tokenizer.json, without the `transformers` library."""

    def __init__(self, saved: CorpusTokenizer) -> None:
        self._saved = saved
        self.name = saved.card.name
        self.vocabulary = saved.card.vocabulary
        self.separator = saved.card.separator
        self._tokenizer: Any = _Library(saved)

    def rust_description(self) -> str:
        return (self._saved.directory / _RUST_FILE).read_text(encoding="utf-8")

    def save(self, directory: Path) -> None:
        for file in self._saved.card.files:
            shutil.copyfile(self._saved.directory / file.name, directory / file.name)


class _Library:
    """The part of the `transformers` interface that `HuggingFaceTokenizer` and the encoders use."""

    def __init__(self, saved: CorpusTokenizer) -> None:
        self._directory = saved.directory
        self.all_special_ids = saved.special

    @cached_property
    def backend_tokenizer(self) -> Any:
        """Loaded when it is first used: a process that only encodes text for a build needs `FastEncoder`'s alone."""
        from tokenizers import Tokenizer as Rust

        return Rust.from_file(str(self._directory / _RUST_FILE))

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: list[int]) -> str:
        return str(self.backend_tokenizer.decode(tokens, skip_special_tokens=False))


def _rust_digest(directory: Path, card: CardTokenizer) -> str:
    try:
        return RustTokenizer(CorpusTokenizer(card, directory, (), True)).digest
    except Exception:  # the library raises plain `Exception`, for example for parts that are written in Python
        return ""


def _write(tokenizer: Tokenizer, directory: Path, disk: Disk) -> tuple[TokenizerFile, ...]:
    """Write the files whose names a card may list, with the same bytes wherever the tokenizer came from."""
    files = []
    with explained(directory), tempfile.TemporaryDirectory(prefix="atoll-tokenizer-") as folder:
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(Path(folder))
        for path in sorted(Path(folder).iterdir()):
            if path.name in TOKENIZER_FILES:
                data = _without_origin(path.read_bytes()) if path.name == "tokenizer_config.json" else path.read_bytes()
                write_file(directory / path.name, data, disk)
                files.append(TokenizerFile(name=path.name, size=len(data), sha256=hashlib.sha256(data).hexdigest()))
    return tuple(files)


def _without_origin(data: bytes) -> bytes:
    settings = {key: value for key, value in json.loads(data).items() if key not in _ORIGIN_KEYS}
    return json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"
