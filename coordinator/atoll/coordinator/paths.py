"""Paths of the coordinator's files, shared by the server and `atollctl`. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SYSTEM_CONFIG = Path("/etc/atoll/coordinator.toml")
SYSTEM_DATA_DIR = Path("/var/lib/atoll/coordinator")
_SYSTEMD = Path("/run/systemd/system")  # exists exactly if systemd runs the machine; see sd_booted(3)


def default_data_dir(environment: Mapping[str, str], user_id: int) -> Path:
    """`$STATE_DIRECTORY` of a systemd service; `/var/lib/atoll/coordinator` for root under systemd; else XDG's."""
    if environment.get("STATE_DIRECTORY"):
        return Path(environment["STATE_DIRECTORY"].split(":")[0])
    if user_id == 0 and _SYSTEMD.is_dir():
        return SYSTEM_DATA_DIR
    return _home(environment, "XDG_DATA_HOME", ".local/share") / "atoll" / "coordinator"


def user_config(environment: Mapping[str, str]) -> Path:
    """`~/.config/atoll/coordinator.toml`, or under `$XDG_CONFIG_HOME`."""
    return _home(environment, "XDG_CONFIG_HOME", ".config") / "atoll" / "coordinator.toml"


def credentials_dir(data_dir: Path) -> Path:
    """Directory in which `serve` writes `atollctl`'s credential."""
    return data_dir / "admin"


def _home(environment: Mapping[str, str], variable: str, below_home: str) -> Path:
    named = environment.get(variable)
    return Path(named) if named else Path(environment.get("HOME", "/")) / below_home
