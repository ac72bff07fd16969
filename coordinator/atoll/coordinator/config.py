"""Settings of the coordinator: one frozen model, and the precedence of its sources.

defaults < /etc/atoll/coordinator.toml < user config < `--config` < `ATOLL_COORDINATOR_*` < flags. An unknown key
is an error in every source. `origin` names the source of each value, for `atoll-coordinator config`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from atoll.coordinator import database_url
from atoll.coordinator.paths import SYSTEM_CONFIG, user_config
from atoll.coordinator.planner.question import Preferences
from atoll.coordinator.state.snapshot import Policy
from atoll.core.errors import ConfigError, TokenMalformed
from atoll.core.tokens import split_endpoint

ENVIRONMENT_PREFIX = "ATOLL_COORDINATOR_"

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400)]


class CoordinatorConfig(BaseModel):
    """Settings of a coordinator, one field each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_dir: Path  # keys, database, admin credential; mode 0700
    listen: str = "0.0.0.0"  # noqa: S104 - nodes must reach it; both ports use TLS
    enrol_port: Port = 7700  # for nodes with a token; 0: a free port
    member_port: Port = 7701  # for members and operators, mutual TLS; 0: a free port
    http_host: str = "127.0.0.1"  # page and metrics have no login: keep them on loopback
    http_port: Port = 7702  # 0: a free port
    public_endpoint: str = ""  # host:port in join tokens; default: this machine's address
    public_member_endpoint: str = ""  # default: the same host with member_port
    database: str = ""  # SQLAlchemy URL, or file:PATH; default: SQLite in the data directory
    silence_seconds: Seconds = 15.0
    lost_after_seconds: Seconds = 20.0
    plan_debounce_seconds: Seconds = 1.0
    plan_interval_seconds: Seconds = 10.0  # between two plans, unless the run would stop without a new plan
    plan_search_seconds: Seconds = 2.0  # time limit of the planner, used if some node cannot hold the whole model
    plan_goal: Literal["time", "price"] = "time"  # tokens per second, or tokens per price
    plan_hysteresis: Annotated[float, Field(ge=0, le=10)] = (
        Preferences.hysteresis
    )  # minimum gain of a plan that disturbs placed nodes
    plan_horizon_seconds: Annotated[float, Field(gt=0, le=365 * 86400)] = Preferences.horizon_seconds
    # limit of round-trip times within a route
    plan_rtt_cap_ms: Annotated[float, Field(gt=0, le=60_000)] = 1000 * Preferences.rtt_cap_seconds
    genesis_seconds: Seconds = 600.0
    recover_seconds: Seconds = 10.0
    lost_layers_seconds: Seconds = 60.0  # all holders must report layers as lost for so long
    drain_seconds: Seconds = 5.0  # for calls in progress at shutdown
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = "auto"

    @field_validator("public_endpoint", "public_member_endpoint")
    @classmethod
    def _endpoint(cls, value: str) -> str:
        if value:
            try:
                split_endpoint(value)
            except TokenMalformed as error:
                raise ValueError(str(error)) from error
        return value

    @field_validator("data_dir")
    @classmethod
    def _expanded(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @property
    def database_url(self) -> str:
        """SQLAlchemy URL of the state. Raises `ConfigError`."""
        return database_url.resolve(self.database) or f"sqlite:///{self.data_dir / 'coordinator.db'}"

    @property
    def policy(self) -> Policy:
        """Settings that the state machine needs."""
        return Policy(
            silence_seconds=self.silence_seconds,
            lost_after_seconds=self.lost_after_seconds,
            debounce_seconds=self.plan_debounce_seconds,
            plan_interval_seconds=self.plan_interval_seconds,
            solve_seconds=self.plan_search_seconds,
            genesis_seconds=self.genesis_seconds,
            recover_seconds=self.recover_seconds,
            lost_layers_seconds=self.lost_layers_seconds,
            preferences=Preferences(
                goal=self.plan_goal,
                hysteresis=self.plan_hysteresis,
                horizon_seconds=self.plan_horizon_seconds,
                rtt_cap_seconds=self.plan_rtt_cap_ms / 1000,
            ),
        )


@dataclass(frozen=True)
class Loaded:
    """A configuration and the source of each value."""

    config: CoordinatorConfig
    origin: Mapping[str, str]


def load(
    flags: Mapping[str, object], environment: Mapping[str, str], config_file: Path | None, default_data_dir: Path
) -> Loaded:
    """Merge all sources. Raises `ConfigError` that names every wrong key and its source."""
    database_url.refuse_password(str(flags.get("database") or ""))
    values: dict[str, object] = {"data_dir": default_data_dir}
    origin = dict.fromkeys(CoordinatorConfig.model_fields, "default")
    for source, new in _sources(flags, environment, config_file):
        unknown = sorted(set(new) - set(origin))
        if unknown:
            raise ConfigError(
                f"unknown key {', '.join(unknown)} in {source}", "`atoll-coordinator config` lists every key"
            )
        values.update(new)
        origin.update(dict.fromkeys(new, source))
    try:
        return Loaded(CoordinatorConfig.model_validate(values), origin)
    except ValidationError as error:
        raise ConfigError(_problems(error, origin), "`atoll-coordinator config` lists every key") from error


def _problems(error: ValidationError, origin: Mapping[str, str]) -> str:
    problems = [(str(item["loc"][0]), item["msg"].removeprefix("Value error, ")) for item in error.errors()]
    return "; ".join(f"{key} ({origin[key]}): {problem}" for key, problem in problems)


def _sources(
    flags: Mapping[str, object], environment: Mapping[str, str], config_file: Path | None
) -> Iterable[tuple[str, dict[str, object]]]:
    for path in (SYSTEM_CONFIG, user_config(environment)):
        if path.exists():
            yield str(path), _read(path)
    if config_file is not None:
        yield str(config_file), _read(config_file)
    named = {key: value for key, value in environment.items() if key.startswith(ENVIRONMENT_PREFIX)}
    yield "environment", {key.removeprefix(ENVIRONMENT_PREFIX).lower(): value for key, value in named.items()}
    yield "flag", {key: value for key, value in flags.items() if value is not None}


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
