"""Data directories: closed to others, whoever made them."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.errors import DataDirUnusable
from atoll.core.files import make_private_dir


def test_a_directory_of_ours_that_was_open_is_closed(tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.mkdir()
    place.chmod(0o755)
    assert make_private_dir(place).stat().st_mode & 0o777 == 0o700
    assert make_private_dir(tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_everybody_shares_is_refused_and_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    with pytest.raises(DataDirUnusable, match="shared by all users"):
        make_private_dir(place)
    assert place.stat().st_mode & 0o7777 == 0o1777
