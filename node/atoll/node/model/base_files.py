"""The pretrained weights of a run on this node's disk, checked against the digests in the run spec.

A run spec pins the name and the SHA-256 of every file, so that all nodes start from the same weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from atoll.core.errors import PretrainedWeightsUnusable
from atoll.core.model_spec import BaseSection

_REMEDY = "download the run's weights and give their directory: atoll join --base DIR (or `base` in node.toml)"


class BaseFiles:
    """The directory of a run's pretrained weights.

    A file must pass `check` before it is read. `check` hashes each file at most once in a process.
    """

    def __init__(self, section: BaseSection, directory: Path | None) -> None:
        """Check that all files exist. Raises `PretrainedWeightsUnusable`."""
        named = f" ({section.name})" if section.name else ""
        if directory is None:
            raise PretrainedWeightsUnusable(
                f"the run starts from pretrained weights{named}, and this node has no directory of them", _REMEDY
            )
        missing = [name for name in section.files if not (directory / name).is_file()]
        if missing:
            raise PretrainedWeightsUnusable(
                f"{directory} lacks {', '.join(missing[:5])} of the run's pretrained weights{named}", _REMEDY
            )
        self.directory = directory
        self._section, self._checked = section, set[str]()

    def check(self, name: str) -> None:
        """Check that a file has the digest in the run spec. Raises `PretrainedWeightsUnusable`."""
        wanted = self._section.files.get(name)
        if wanted is None:
            raise PretrainedWeightsUnusable(
                f"{self.directory / name} is not one of the files of the run's pretrained weights", _REMEDY
            )
        if name in self._checked:
            return
        found = file_sha256(self.directory / name)
        if found != wanted:
            raise PretrainedWeightsUnusable(
                f"{self.directory / name} has SHA-256 {found[:12]}…; the run spec says {wanted[:12]}…",
                _REMEDY,
            )
        self._checked.add(name)

    def check_all(self, on_progress: Callable[[], object]) -> None:
        """Check all files; call `on_progress` after each. Raises `PretrainedWeightsUnusable`."""
        for name in self._section.files:
            self.check(name)
            on_progress()


def file_sha256(path: Path) -> str:
    """Compute the hex SHA-256 of a file. Raises `PretrainedWeightsUnusable`."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PretrainedWeightsUnusable(
            f"cannot read {path}: {error.strerror}", "check the directory given with --base, and its permissions"
        ) from error
