"""Configuration of a node: paths, addresses and the owner's limits.

Precedence, lowest first:

1. defaults
2. /etc/atoll/node.toml
3. the user's atoll/node.toml
4. node.toml in the data directory: the values of `join` and `set`, so that `up` starts the same node after a reboot
5. the file of `--config`
6. `ATOLL_*` variables
7. flags

`load` records the origin of every value for `atoll config show`. Unknown keys are errors. `with_limits` implements
`atoll set`: it changes limits only, and either all given ones or none.
"""

from __future__ import annotations

import glob
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from atoll.core.errors import ConfigError
from atoll.core.files import write_atomic
from atoll.core.toml_text import toml_value
from atoll.node.direct.dial_policy import parse_ranges
from atoll.node.system.training_policy import TrainingPolicy, parse_hours
from atoll.node.training.device_names import parse_device_names

SYSTEM_CONFIG = Path("/etc/atoll/node.toml")
OVERRIDES_FILE = "node.toml"  # in the data directory
SET_COMMAND_ORIGIN = "atoll set"  # origin of a value changed in a running daemon
ENVIRONMENT_PREFIX = "ATOLL_"
_VARIABLES_OF_OTHER_COMMANDS = {"ATOLL_TOKEN_FILE", "ATOLL_CREDENTIALS", "ATOLL_COORDINATOR"}

LOG_FILE = "daemon.log"  # in the data directory
CORPORA = "corpora"  # folder in the data directory for training text: fetched blocks, and tokens of local files

Value = str | int | float | bool


def _setting(
    default: Value,
    help_text: str,
    *,
    between: tuple[float, float] | None = None,
    one_of: tuple[str, ...] = (),
    limit: bool = False,
) -> Any:
    """Declare a setting. `limit`: `atoll set` can change it while the daemon runs."""
    return field(default=default, metadata={"help": help_text, "between": between, "one_of": one_of, "limit": limit})


def _limit_setting(default: Value, help_text: str, *, between: tuple[float, float] | None = None, **rest: Any) -> Any:
    return _setting(default, help_text, between=between, limit=True, **rest)


@dataclass(frozen=True)
class NodeConfig:
    """One node's settings."""

    data_dir: Path = field(metadata={"help": "directory of keys, manifests, anchors and the local socket"})
    name: str = _setting(
        "", "name shown to people, 1–63 characters of a–z, 0–9 and -; default: derived from the peer id"
    )
    listen: str = _setting("0.0.0.0", "address that peers connect to")  # noqa: S104 - peers must reach us
    port: int = _setting(0, "TCP port for peers; 0 picks a free one", between=(0, 65535))
    announce: str = _setting("", "public address or host name, for a node behind a port forward")
    dial_ranges: str = _setting(
        "",
        "private address ranges in which this node may dial peers, for example 192.168.1.0/24,fd00::/8; it dials any "
        "private address if its coordinator has a private address or all its seeds have private ones",
    )
    direct: bool = _setting(True, "send bulk over direct TCP and TLS connections where possible, else over libp2p")
    direct_port: int = _setting(0, "TCP port for direct connections; 0 picks a free one", between=(0, 65535))
    device: str = _setting(
        "auto", "device for training: auto, cpu, cuda:N or mps; cuda:0,cuda:1 makes one node of two GPUs"
    )
    data: str = _setting("", "path of the training text on this machine, if it differs from the path in the run spec")
    base: str = _setting("", "directory of the run's pretrained weights, if it starts from some")
    vram_fraction: float = _limit_setting(
        1.0, "share of the GPU's memory that training may use, 0.01 to 1", between=(0.01, 1.0)
    )
    memory_megabytes: float = _setting(
        0.0,
        "main memory that training may use on a CPU, not counting torch and the corpus; 0: no limit",
        between=(0, 1e9),
    )
    power_watts: float = _limit_setting(
        0.0, "power limit of each GPU in watts while the daemon runs; 0: the driver's limit", between=(0, 10_000)
    )
    cpu_threads: int = _limit_setting(0, "threads for training; 0 uses every core", between=(0, 4096))
    minimum_step_seconds: float = _limit_setting(0.0, "minimum duration of an inner step", between=(0, 3600))
    compute_share: float = _limit_setting(
        1.0, "share of the time in which training computes, 0.01 to 1", between=(0.01, 1.0)
    )
    upload_mbit_per_second: float = _limit_setting(0.0, "rate limit to peers; 0: no limit", between=(0, 1e6))
    download_mbit_per_second: float = _limit_setting(0.0, "rate limit from peers; 0: no limit", between=(0, 1e6))
    monthly_gigabytes: float = _limit_setting(
        0.0, "traffic to and from peers in a calendar month; 0: no limit", between=(0, 1e6)
    )
    disk_gigabytes: float = _setting(20.0, "disk space for training text that this node fetches", between=(0.1, 1e6))
    hours: str = _limit_setting(
        "", "local times of day in which to train, for example 22:00-07:00,12:00-13:00; empty: always"
    )
    on_battery: str = _limit_setting(
        "pause", "pause or train while the machine runs on its battery", one_of=("pause", "train")
    )
    only_when_idle_minutes: int = _limit_setting(
        0, "train only after the machine was unused for this long; 0: always", between=(0, 1440)
    )
    stay_in_run: bool = _setting(False, "stay in the run that this node joined: the operator cannot move it to another")
    price_per_hour: float = _setting(0.0, "price of this machine, for the planner", between=(0, 1e6))
    checkpoint_keep: int = _setting(3, "number of newest checkpoints to keep", between=(1, 1000))
    checkpoint_interval_seconds: float = _setting(
        300.0, "seconds between two checkpoints; 0 writes one every round", between=(0, 86400)
    )
    log_level: str = _setting(
        "info", "level of log messages: debug, info, warning or error", one_of=("debug", "info", "warning", "error")
    )
    log_format: str = _setting(
        "auto", "format of log messages: auto, console or json", one_of=("auto", "console", "json")
    )

    def path(self, *parts: str) -> Path:
        """Join `parts` to the data directory."""
        return self.data_dir.joinpath(*parts)

    @property
    def policy(self) -> TrainingPolicy:
        """The limits that decide when this node may train."""
        return TrainingPolicy(
            hours=parse_hours(self.hours),
            monthly_bytes=self.monthly_gigabytes * 1e9,
            pause_on_battery=self.on_battery == "pause",
            idle_seconds=self.only_when_idle_minutes * 60,
        )


SETTING_FIELDS = {item.name: item for item in fields(NodeConfig)}
SETTING_TYPES: dict[str, type] = get_type_hints(NodeConfig)
LIMITS = tuple(name for name, item in SETTING_FIELDS.items() if item.metadata.get("limit"))


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration with the origin of each value."""

    config: NodeConfig
    origin: dict[str, str]


def default_data_dir(environment: Mapping[str, str]) -> Path:
    """Return `$XDG_DATA_HOME/atoll/node`, else `~/.local/share/atoll/node`."""
    base = environment.get("XDG_DATA_HOME") or Path(environment.get("HOME", "/")) / ".local/share"
    return Path(base) / "atoll" / "node"


def load(
    flags: Mapping[str, Value | Path | None], environment: Mapping[str, str], config_file: Path | None
) -> LoadedConfig:
    """Merge all sources. Raises `ConfigError` that names the key and the source."""
    values: dict[str, Value | Path] = {"data_dir": default_data_dir(environment)}
    origin = {item.name: "default" for item in fields(NodeConfig)}
    user = (
        Path(environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME", "/")) / ".config") / "atoll/node.toml"
    )
    for path in (SYSTEM_CONFIG, user):
        if path.exists():
            _merge(values, origin, _read(path), str(path))
    later: list[tuple[Mapping[str, Value | Path], str]] = (
        [(_read(config_file), str(config_file))] if config_file is not None else []
    )
    later.append((_from_environment(environment), "environment"))
    later.append(({key: value for key, value in flags.items() if value is not None}, "flag"))
    data_dir = next((source["data_dir"] for source, _ in reversed(later) if "data_dir" in source), values["data_dir"])
    overrides = _path(data_dir) / OVERRIDES_FILE
    if overrides.exists():
        _merge(values, origin, _read(overrides), str(overrides))
    for source, name in later:
        _merge(values, origin, source, name)
    return LoadedConfig(NodeConfig(**_convert(values, origin)), origin)  # type: ignore[arg-type]


def with_limits(loaded: LoadedConfig, changes: Mapping[str, Value]) -> LoadedConfig:
    """Return a copy with these limits changed. Raises `ConfigError` that names the key and its bounds."""
    for key in changes:
        if key not in LIMITS:
            problem = "can only be set when the node starts" if key in loaded.origin else "is not a setting"
            raise ConfigError(f"{key} {problem}; `atoll set` changes limits", f"the limits are: {', '.join(LIMITS)}")
    origin = {**loaded.origin, **dict.fromkeys(changes, SET_COMMAND_ORIGIN)}
    typed: dict[str, Any] = _convert(changes, origin)
    return LoadedConfig(replace(loaded.config, **typed), origin)


def limits_of(loaded: LoadedConfig) -> dict[str, dict[str, Value]]:
    """Return every limit with its value and origin."""
    return {key: {"value": getattr(loaded.config, key), "origin": loaded.origin[key]} for key in LIMITS}


def has_flags(loaded: LoadedConfig) -> bool:
    """Whether any setting except the data directory came from a flag."""
    return any(source == "flag" for key, source in loaded.origin.items() if key != "data_dir")


def save_overrides(loaded: LoadedConfig) -> None:
    """Save settings from flags, environment and `atoll set`, with those of an earlier join, for the next start.

    Raises `DataDirUnusable`.
    """
    path = loaded.config.path(OVERRIDES_FILE)
    kept = ("flag", "environment", SET_COMMAND_ORIGIN, str(path))
    overrides = {key: getattr(loaded.config, key) for key, source in loaded.origin.items() if source in kept}
    overrides.pop("data_dir", None)
    lines = [f"{key} = {toml_value(value)}\n" for key, value in overrides.items()]
    write_atomic(path, "".join(["# written by `atoll join` and `atoll set`\n", *lines]).encode())


def has_corpus_files(path: str) -> bool:
    """Return whether `path` is an existing file or directory, or a glob pattern that matches one."""
    expanded = Path(path).expanduser()
    return expanded.exists() or bool(glob.glob(str(expanded), recursive=True))


def is_variable_of_another_command(name: str) -> bool:
    """Report whether another command reads this `ATOLL_*` variable, so that it is not a setting of the node."""
    return name in _VARIABLES_OF_OTHER_COMMANDS or name.startswith("ATOLL_COORDINATOR_")


def _read(path: Path) -> dict[str, Value]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, Value]:
    names = [
        name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and not is_variable_of_another_command(name)
    ]
    return {name.removeprefix(ENVIRONMENT_PREFIX).lower(): environment[name] for name in sorted(names)}


def _merge(
    values: dict[str, Value | Path], origin: dict[str, str], new: Mapping[str, Value | Path], source: str
) -> None:
    for key, value in new.items():
        if key not in origin:
            raise ConfigError(f"unknown key {key!r} in {source}", "list all keys: `atoll config show`")
        values[key] = value
        origin[key] = source


def _convert(values: Mapping[str, Value | Path], origin: Mapping[str, str]) -> dict[str, Value | Path]:
    """Convert values to the types of the fields: TOML gives numbers, the environment only text."""
    typed: dict[str, Value | Path] = {}
    for key, value in values.items():
        kind = SETTING_TYPES[key]
        try:
            typed[key] = _PARSERS[kind](value) if kind in _PARSERS else kind(value)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise ConfigError(f"{key} = {value!r} in {origin[key]} is not {_TYPE_NAMES[kind]}") from error
    _check(typed, origin)
    return typed


def _path(value: object) -> Path:
    return Path(os.path.expanduser(str(value))).absolute()


def _parse_bool(value: object) -> bool:
    return {"true": True, "false": False}[str(value).lower()]


_PARSERS: dict[type, Callable[[object], Any]] = {Path: _path, bool: _parse_bool}
_TYPE_NAMES = {int: "a whole number", float: "a number", str: "text", Path: "a path", bool: "true or false"}


def _check(typed: Mapping[str, Value | Path], origin: Mapping[str, str]) -> None:
    for item in fields(NodeConfig):
        value, between, one_of = typed.get(item.name), item.metadata.get("between"), item.metadata.get("one_of")
        if between is not None and isinstance(value, int | float):
            low, high = between
            if not (math.isfinite(value) and low <= value <= high):
                raise ConfigError(f"{item.name} = {value} in {origin[item.name]} must be between {low:g} and {high:g}")
        if one_of and value is not None and value not in one_of:
            raise ConfigError(f"{item.name} = {value!r} in {origin[item.name]} must be one of: {', '.join(one_of)}")
    checks: tuple[tuple[str, Callable[[str], object]], ...] = (
        ("hours", parse_hours),
        ("device", parse_device_names),
        ("dial_ranges", parse_ranges),
    )
    for key, check in checks:
        try:
            if key in typed:
                check(str(typed[key]))
        except ConfigError as error:
            raise ConfigError(f"{key} in {origin[key]}: {error}", error.remedy) from error
