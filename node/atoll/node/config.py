"""What a node's owner decides: where things lie, what to listen on, which limits hold.

Precedence: defaults < /etc/atoll/node.toml < user config < what `join` was told (`node.toml` in the data
directory, so that `up` after a reboot means the same node) < `--config` < `ATOLL_*` < flags. `load` keeps the
origin of every value for `atoll config show`. Unknown keys are errors.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from atoll.core.errors import ConfigError
from atoll.core.files import write_atomic

SYSTEM_CONFIG = Path("/etc/atoll/node.toml")
REMEMBERED = "node.toml"  # in the data directory
ENVIRONMENT_PREFIX = "ATOLL_"
_NOT_OURS = {"ATOLL_TOKEN_FILE", "ATOLL_CREDENTIALS", "ATOLL_COORDINATOR"}

Value = str | int | float | bool


@dataclass(frozen=True)
class NodeConfig:
    """One node's settings."""

    data_dir: Path = field(metadata={"help": "keys, manifests, anchors, the local socket"})
    name: str = field(default="", metadata={"help": "shown to people; default: derived from the peer id"})
    listen: str = field(default="0.0.0.0", metadata={"help": "address for peers"})  # noqa: S104 - peers must reach us
    port: int = field(default=0, metadata={"help": "TCP port for peers; 0 picks a free one"})
    announce: str = field(default="", metadata={"help": "public address or host name, where it differs"})
    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda:0, mps"})
    cpu_threads: int = field(default=0, metadata={"help": "0 uses every core"})
    data: str = field(default="", metadata={"help": "the corpus on this machine, where it is not the spec's path"})
    minimum_step_seconds: float = field(default=0.0, metadata={"help": "paces training: no inner step is shorter"})
    checkpoint_keep: int = field(default=3, metadata={"help": "how many of the last checkpoints to keep"})
    checkpoint_interval_seconds: float = field(
        default=300.0, metadata={"help": "between two checkpoints; 0 writes every round"}
    )
    log_level: str = field(default="info", metadata={"help": "debug, info, warning, error"})
    log_format: str = field(default="auto", metadata={"help": "auto, console, json"})

    def path(self, *parts: str) -> Path:
        """A path in the data directory."""
        return self.data_dir.joinpath(*parts)


@dataclass(frozen=True)
class Loaded:
    """A configuration and where each of its values came from."""

    config: NodeConfig
    origin: dict[str, str]


def default_data_dir(environment: Mapping[str, str]) -> Path:
    """`$XDG_DATA_HOME/atoll/node`, else `~/.local/share/atoll/node`."""
    base = environment.get("XDG_DATA_HOME") or Path(environment.get("HOME", "/")) / ".local/share"
    return Path(base) / "atoll" / "node"


def load(flags: Mapping[str, Value | Path | None], environment: Mapping[str, str], config_file: Path | None) -> Loaded:
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
    remembered = Path(os.path.expanduser(str(data_dir))).absolute() / REMEMBERED
    if remembered.exists():
        _merge(values, origin, _read(remembered), str(remembered))
    for source, name in later:
        _merge(values, origin, source, name)
    return Loaded(NodeConfig(**_typed(values, origin)), origin)  # type: ignore[arg-type]


def remember(loaded: Loaded) -> None:
    """Keep what flags and environment said, now or at an earlier join, so that the next start says the same."""
    kept = ("flag", "environment", str(loaded.config.path(REMEMBERED)))
    said = {key: getattr(loaded.config, key) for key, source in loaded.origin.items() if source in kept}
    said.pop("data_dir", None)
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in said.items()]
    write_atomic(loaded.config.path(REMEMBERED), "".join(["# written by `atoll join`\n", *lines]).encode())


def known_environment(name: str) -> bool:
    """Whether an `ATOLL_*` variable is for other commands."""
    return name in _NOT_OURS or name.startswith("ATOLL_COORDINATOR_")


def _read(path: Path) -> dict[str, Value]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, Value]:
    names = [name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and not known_environment(name)]
    return {name.removeprefix(ENVIRONMENT_PREFIX).lower(): environment[name] for name in sorted(names)}


def _merge(
    values: dict[str, Value | Path], origin: dict[str, str], new: Mapping[str, Value | Path], source: str
) -> None:
    for key, value in new.items():
        if key not in origin:
            raise ConfigError(f"unknown key {key!r} in {source}", "`atoll config show` lists every key")
        values[key] = value
        origin[key] = source


def _typed(values: Mapping[str, Value | Path], origin: Mapping[str, str]) -> dict[str, Value | Path]:
    """Values as the types of the fields say: TOML gives numbers, the environment only text."""
    kinds: dict[str, type] = {"data_dir": Path, "port": int, "cpu_threads": int, "minimum_step_seconds": float}
    kinds |= {"checkpoint_keep": int, "checkpoint_interval_seconds": float}
    typed: dict[str, Value | Path] = {}
    for key, value in values.items():
        kind = kinds.get(key, str)
        try:
            typed[key] = Path(os.path.expanduser(str(value))).absolute() if kind is Path else kind(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key} = {value!r} in {origin[key]} is not {_ARTICLE[kind]}") from error
    _check(typed, origin)
    return typed


_ARTICLE = {int: "a whole number", float: "a number", str: "text", Path: "a path"}


def _check(typed: Mapping[str, object], origin: Mapping[str, str]) -> None:
    limits = {"port": (0, 65535), "cpu_threads": (0, 4096), "minimum_step_seconds": (0.0, 3600.0)}
    limits |= {"checkpoint_keep": (1, 1000), "checkpoint_interval_seconds": (0.0, 86400.0)}
    for key, (low, high) in limits.items():
        value = typed.get(key, low)
        if not low <= value <= high:  # type: ignore[operator]
            raise ConfigError(f"{key} = {value} in {origin[key]} is not between {low} and {high}")
    choices = {"log_level": ("debug", "info", "warning", "error"), "log_format": ("auto", "console", "json")}
    for key, allowed in choices.items():
        if key in typed and typed[key] not in allowed:
            raise ConfigError(f"{key} = {typed[key]!r} in {origin[key]} is none of {', '.join(allowed)}")
