"""Limits change all together or not at all, and are kept for the next start."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import ConfigError
from atoll.node.config import LIMITS, SET_COMMAND_ORIGIN, LoadedConfig, load, save_overrides, with_limits


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedConfig:
    environment = {"HOME": str(tmp_path), "ATOLL_LOG_LEVEL": "debug"}
    return load({"data_dir": tmp_path / "node", "cpu_threads": 3}, environment, None)


def test_a_value_from_set_is_kept_for_the_next_start(loaded: LoadedConfig, tmp_path: Path) -> None:
    new = with_limits(loaded, {"hours": "22:00-07:00", "upload_mbit_per_second": "12.5", "cpu_threads": 2})
    assert (new.config.hours, new.config.upload_mbit_per_second, new.config.cpu_threads) == ("22:00-07:00", 12.5, 2)
    assert new.origin["hours"] == SET_COMMAND_ORIGIN
    new.config.data_dir.mkdir()
    save_overrides(new)
    again = load({"data_dir": tmp_path / "node"}, {"HOME": str(tmp_path)}, None)
    assert again.config == new.config
    assert again.origin["hours"] == str(tmp_path / "node/node.toml")
    assert again.origin["on_battery"] == "default"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vram_fraction": "1.5"}, "vram_fraction.*between 0.01 and 1"),
        ({"vram_fraction": "nan"}, "vram_fraction.*between 0.01 and 1"),
        ({"cpu_threads": "2.5"}, "cpu_threads.*whole number"),
        ({"monthly_gigabytes": -1}, "monthly_gigabytes.*between"),
        ({"hours": "always"}, "hours.*window"),
        ({"on_battery": "maybe"}, "on_battery.*pause, train"),
        ({"only_when_idle_minutes": 10**9}, "only_when_idle_minutes.*between 0 and 1440"),
        ({"upload_mbit_per_second": "inf"}, "upload_mbit_per_second.*between"),
        ({"port": 7710}, "port can only be set when the node starts"),
        ({"colour": "red"}, "colour is not a setting"),
        ({"cpu_threads": 1, "on_battery": "maybe"}, "on_battery"),
    ],
)
def test_a_bad_value_names_its_key_and_its_bounds(
    loaded: LoadedConfig, changes: dict[str, str | int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        with_limits(loaded, changes)
    assert loaded.config.cpu_threads == 3


@given(st.dictionaries(st.sampled_from(LIMITS), st.one_of(st.text(), st.floats(), st.integers(), st.booleans())))
def test_any_value_is_either_accepted_or_refused_with_its_key(changes: dict[str, str | float]) -> None:
    loaded = load({"data_dir": "/nowhere"}, {}, None)
    new, refused = loaded, ""
    try:
        new = with_limits(loaded, changes)
    except ConfigError as error:
        refused = str(error)
    assert not refused or any(key in refused for key in changes)
    assert new.config.policy.idle_seconds >= 0
    assert all(type(getattr(new.config, key)) is type(getattr(loaded.config, key)) for key in LIMITS)
