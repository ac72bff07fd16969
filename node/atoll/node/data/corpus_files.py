"""The card of a corpus on this machine or behind a URL, and its tokenizer."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

from atoll.core.errors import CorpusError, NotFound, Unreachable
from atoll.node.data.card import CARD_NAME, MAX_CARD_BYTES, TOKENIZER_DIRECTORY, CorpusCard, parse_card
from atoll.node.data.corpus_tokenizer import open_saved
from atoll.node.model.tokenizer import Tokenizer

_TIMEOUT_SECONDS = 30
_URLS = ("http://", "https://")


def read_card(directory: Path) -> tuple[CorpusCard, bytes]:
    """Read the card of a corpus on this machine, with its bytes. Raises `NotFound`, `CorpusError`."""
    path = directory / CARD_NAME
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CARD_BYTES + 1)
    except FileNotFoundError as error:
        if (directory / ".build").is_dir():
            raise NotFound(
                f"the corpus in {directory} is not complete", "run its `atoll data build` again: it goes on"
            ) from error
        raise NotFound(f"{directory} is no corpus: it has no {CARD_NAME}", "check the path") from error
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror or error}", "check the path and its owner") from error
    return parse_card(data), data


def fetch_card(place: str) -> tuple[CorpusCard, bytes]:
    """Read the card of a corpus in a directory or behind a URL. Raises `Unreachable`, and errors of `read_card`."""
    if not place.startswith(_URLS):
        return read_card(Path(place).expanduser())
    url = f"{place.rstrip('/')}/{CARD_NAME}"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310  (only the two schemes)
            data = answer.read(MAX_CARD_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise NotFound(f"{url}: the server answers {error.code} {error.reason}", "check the URL") from error
    except (OSError, ValueError) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise Unreachable(f"cannot fetch {url}: {why}", "check the URL and this machine's connection") from error
    return parse_card(data), data


def open_tokenizer(directory: Path, card: CorpusCard) -> Tokenizer:
    """Load the tokenizer that a corpus contains. Raises `CorpusError`, `ConfigError`."""
    tokenizer = open_saved(card.tokenizer, directory / TOKENIZER_DIRECTORY)
    if tokenizer.digest != card.tokenizer.digest:
        raise CorpusError(
            f"the tokenizer in {directory} is not the one that made the tokens", "run `atoll data verify` on the corpus"
        )
    return tokenizer
