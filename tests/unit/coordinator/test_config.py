"""Settings: which source wins, and what is said about a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.coordinator import config as module
from atoll.coordinator.cli import serve
from atoll.coordinator.config import Loaded, load
from atoll.coordinator.paths import default_data_dir
from atoll.coordinator.planner.question import Preferences
from atoll.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_system_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "SYSTEM_CONFIG", tmp_path / "etc.toml")


def read(
    tmp_path: Path,
    *,
    system: str = "",
    user: str = "",
    named: str | None = None,
    environment: dict[str, str] | None = None,
    **flags: object,
) -> Loaded:
    (tmp_path / "etc.toml").write_text(system)
    (tmp_path / "atoll").mkdir(exist_ok=True)
    (tmp_path / "atoll" / "coordinator.toml").write_text(user)
    file = None
    if named is not None:
        file = tmp_path / "named.toml"
        file.write_text(named)
    return load(flags, {"XDG_CONFIG_HOME": str(tmp_path), **(environment or {})}, file, tmp_path / "data")


def test_each_source_overrules_the_one_before(tmp_path: Path) -> None:
    sources: dict[str, object] = {}
    expected = ["default", str(tmp_path / "etc.toml"), str(tmp_path / "atoll" / "coordinator.toml")]
    expected += [str(tmp_path / "named.toml"), "environment", "flag"]
    more: list[dict[str, object]] = [
        {},
        {"system": "http_port = 1"},
        {"user": "http_port = 2"},
        {"named": "http_port = 3"},
        {"environment": {"ATOLL_COORDINATOR_HTTP_PORT": "4"}},
        {"http_port": 5},
    ]
    for port, (addition, origin) in enumerate(zip(more, expected, strict=True)):
        sources |= addition
        loaded = read(tmp_path, **sources)  # type: ignore[arg-type]
        assert loaded.config.http_port == (port or 7702)
        assert loaded.origin["http_port"] == origin


@pytest.mark.parametrize(
    "source",
    [
        {"system": "colour = 1"},
        {"user": "colour = 1"},
        {"named": "colour = 1"},
        {"environment": {"ATOLL_COORDINATOR_COLOUR": "1"}},
    ],
)
def test_unknown_keys_are_errors_everywhere(tmp_path: Path, source: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="unknown key colour"):
        read(tmp_path, **source)  # type: ignore[arg-type]


def test_a_wrong_value_names_key_and_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as wrong:
        read(tmp_path, user='enrol_port = "many"', environment={"ATOLL_COORDINATOR_LOG_LEVEL": "loud"})
    assert "enrol_port (" in str(wrong.value)
    assert "coordinator.toml" in str(wrong.value)
    assert "log_level (environment)" in str(wrong.value)


@pytest.mark.parametrize("text", ["= 1", "\xff\xfe"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="is not TOML"):
        read(tmp_path, named=text)


def test_a_missing_named_file_is_an_error_and_a_missing_user_file_is_not(tmp_path: Path) -> None:
    read(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        load({}, {"XDG_CONFIG_HOME": str(tmp_path)}, tmp_path / "absent.toml", tmp_path)


def test_preferences_of_the_operator_reach_the_planner(tmp_path: Path) -> None:
    wanted = 'plan_goal = "price"\nplan_hysteresis = 0.1\nplan_horizon_seconds = 3600\nplan_rtt_cap_ms = 50'
    assert read(tmp_path, user=wanted).config.policy.preferences == Preferences("price", 0.1, 3600, 0.05)
    assert read(tmp_path).config.policy.preferences == Preferences()
    with pytest.raises(ConfigError, match="plan_goal"):
        read(tmp_path, user='plan_goal = "fame"')


def test_public_endpoints_need_a_port(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        read(tmp_path, public_endpoint="swarm.example.org")


def test_the_data_directory_follows_service_root_and_home() -> None:
    assert default_data_dir({"STATE_DIRECTORY": "/var/lib/atoll/x"}, 0) == Path("/var/lib/atoll/x")
    assert default_data_dir({"XDG_DATA_HOME": "/data", "HOME": "/home/a"}, 1000) == Path("/data/atoll/coordinator")
    assert default_data_dir({"HOME": "/home/a"}, 1000) == Path("/home/a/.local/share/atoll/coordinator")


def test_the_database_is_in_the_data_directory_unless_named(tmp_path: Path) -> None:
    assert read(tmp_path).config.database_url == f"sqlite:///{tmp_path / 'data' / 'coordinator.db'}"
    assert read(tmp_path, database="postgresql://db/atoll").config.database_url == "postgresql://db/atoll"


SECRET = "postgresql+psycopg://ann:hunter2@reef/atoll"
SECRETS = pytest.mark.parametrize("url", [SECRET, "postgresql+psycopg://ann@reef/atoll?password=hunter2"])


def test_the_database_can_stand_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "url").write_text(f"{SECRET}\n# ours\n")
    loaded = read(tmp_path, database=f"file:{tmp_path / 'url'}")
    assert loaded.config.database_url == SECRET
    assert read(tmp_path, environment={"ATOLL_COORDINATOR_DATABASE": SECRET}).config.database_url == SECRET
    with pytest.raises(ConfigError, match="no-such"):
        _ = read(tmp_path, database=f"file:{tmp_path / 'no-such'}").config.database_url


@SECRETS
def test_a_password_on_the_command_line_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="command line") as refusal:
        read(tmp_path, database=url)
    assert "file:" in refusal.value.remedy
    assert "hunter2" not in f"{refusal.value} {refusal.value.remedy}"


@SECRETS
@pytest.mark.parametrize("output", ["text", "json"])
def test_settings_are_shown_without_the_password(url: str, output: str) -> None:
    environment = {"COLUMNS": "200", "ATOLL_COORDINATOR_DATABASE": url}
    shown = CliRunner().invoke(serve.app, ["config", "--output", output], env=environment).stdout
    assert "hunter2" not in shown
    assert "reef/atoll" in shown
