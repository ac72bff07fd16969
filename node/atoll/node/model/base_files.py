"""The pretrained weights of a run on this node's disk: a directory whose files are those that the run spec pins."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from atoll.core.errors import PretrainedWeightsUnusable
from atoll.core.model_spec import BaseSection

_REMEDY = "get the run's weights, and name their directory: atoll join --base DIR (or `base` in node.toml)"


class BaseFiles:
    """Nothing of a file is used before its digest was compared. One process hashes a file once."""

    def __init__(self, section: BaseSection, directory: Path | None) -> None:
        """Raises `PretrainedWeightsUnusable` unless all files are there."""
        named = f" ({section.name})" if section.name else ""
        if directory is None:
            raise PretrainedWeightsUnusable(
                f"the run starts from pretrained weights{named}, and this node was given none", _REMEDY
            )
        missing = [name for name in section.files if not (directory / name).is_file()]
        if missing:
            raise PretrainedWeightsUnusable(
                f"{directory} lacks {', '.join(missing[:5])} of the run's pretrained weights{named}", _REMEDY
            )
        self.directory = directory
        self._section, self._checked = section, set[str]()

    def check(self, name: str) -> None:
        """Raise `PretrainedWeightsUnusable` unless a file of the directory is one of the run's, bit for bit."""
        wanted = self._section.files.get(name)
        if wanted is None:
            raise PretrainedWeightsUnusable(f"{self.directory / name} is none of the run's pretrained weights", _REMEDY)
        if name in self._checked:
            return
        found = file_sha256(self.directory / name)
        if found != wanted:
            raise PretrainedWeightsUnusable(
                f"{self.directory / name} is not the run's: its SHA-256 is {found[:12]}…, the run's {wanted[:12]}…",
                _REMEDY,
            )
        self._checked.add(name)

    def check_all(self, on_progress: Callable[[], object]) -> None:
        """Raise `PretrainedWeightsUnusable` unless all files are the run's. `on_progress` is called after each."""
        for name in self._section.files:
            self.check(name)
            on_progress()


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file. Raises `PretrainedWeightsUnusable`."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PretrainedWeightsUnusable(
            f"cannot read {path}: {error.strerror}", "check the directory of --base"
        ) from error
