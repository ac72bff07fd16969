"""Deploy files hold together: units verify, compose and Dockerfile name what exists, no secret is in the open."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.installed_programs import pinned_hivemind

from atoll.coordinator.config import CoordinatorConfig
from atoll.node.config import load

from .shipped import ROOT, commands, deploy_files, problem

COMPOSE = ROOT / "deploy/compose"
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
DEPLOYED = pytest.mark.parametrize("path", deploy_files(), ids=lambda path: path.name)
EACH_UNIT = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
EXPOSURE_ALLOWED = {"atoll-coordinator.service": 20, "atoll-node.service": 30}  # systemd's score × 10; 100 is naked


@DEPLOYED
def test_every_flag_exists(path: Path) -> None:
    assert [why for words in commands(path) if (why := problem(words))] == []


def test_the_checks_above_see_commands() -> None:
    seen = {" ".join(words[:2]) for path in deploy_files() for words in commands(path)}
    assert {"atoll join", "atoll up", "atoll status", "atoll-coordinator serve"} <= seen


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
@EACH_UNIT
def test_unit_verifies_and_is_hardened(unit: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={program}", unit.read_text(), flags=re.MULTILINE))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=120
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    threshold = f"--threshold={EXPOSURE_ALLOWED[unit.name]}"
    audited = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", threshold, str(copy)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert audited.returncode == 0, audited.stdout[-500:] + audited.stderr


@EACH_UNIT
def test_unit_keeps_what_the_daemons_need(unit: Path) -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))
    assert settings["Type"] == "notify"
    assert settings["ProtectSystem"] == "strict"
    assert settings["NoNewPrivileges"] == "yes"
    assert settings["StateDirectory"]
    assert int(settings["WatchdogSec"]) >= 30
    assert int(settings["LimitNOFILE"]) >= 65536, "the usual 1024 are fewer than a thousand nodes"
    if unit.name == "atoll-node.service":
        assert settings["LoadCredential"] == "token:/etc/atoll/token"
        assert settings["PrivateDevices"] == "no"
        assert "ProtectClock" not in settings, "it closes every device, GPUs too"


def test_start_node_joins_once_and_goes_on_afterwards(tmp_path: Path) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "atoll").write_text('#!/bin/sh\necho "$@"\n')
    (fake / "atoll").chmod(0o755)
    state = tmp_path / "state"
    state.mkdir()
    environment = {"PATH": f"{fake}:{os.defpath}", "ATOLL_DATA_DIR": str(state)}

    def started() -> str:
        done = subprocess.run(
            [str(ROOT / "deploy/start-node")], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout.strip()

    assert started() == "join --yes"
    (state / "credentials.json").touch()
    assert started() == "up"


def test_compose_files_name_what_exists() -> None:
    compose = _compose()
    targets = set(re.findall(r"^FROM \S+ AS (\S+)", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE))
    assert set(compose["services"]) == {"coordinator", "seed", "node"}
    for service in compose["services"].values():
        context = (COMPOSE / service["build"]["context"]).resolve()
        assert context == ROOT
        assert (context / service["build"]["dockerfile"]).is_file()
        assert service["build"]["target"] in targets
        assert service["healthcheck"]["test"][0] == "CMD"
        for volume in service["volumes"]:
            source = volume.rsplit(":", 2 if volume.endswith(":ro") else 1)[0]
            assert source in compose["volumes"] or source.startswith("${") or (COMPOSE / source).exists()
        assert set(service.get("secrets", [])) <= set(compose["secrets"])
    assert compose["services"]["coordinator"]["ulimits"]["nofile"] >= 65536
    override = yaml.safe_load((COMPOSE / "compose.gpu.yaml").read_text())
    assert set(override["services"]) <= set(compose["services"])


def test_compose_environment_is_known_to_the_programs() -> None:
    services = _compose()["services"]
    for name in ("seed", "node"):
        environment = {key: _substituted(value) for key, value in services[name]["environment"].items()}
        config = load({"data_dir": Path("/var/lib/atoll")}, {**environment, "HOME": "/nowhere"}, None).config
        assert config.port in (0, 7710)
        assert environment["ATOLL_TOKEN_FILE"] == f"/run/secrets/{services[name]['secrets'][0]}"
    for key in services["coordinator"]["environment"]:
        assert key.removeprefix("ATOLL_COORDINATOR_").lower() in CoordinatorConfig.model_fields


def test_secrets_are_files_and_are_not_committed() -> None:
    compose = _compose()
    assert all(set(secret) == {"file"} for secret in compose["secrets"].values())
    assert "/secrets/" in (COMPOSE / ".gitignore").read_text().splitlines()
    for path in deploy_files():
        assert "atl1." not in path.read_text()


def test_dockerfile_copies_only_what_exists_and_is_not_ignored() -> None:
    text = (COMPOSE / "Dockerfile").read_text()
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)
        for source in [word for word in line.split() if not word.startswith("--")][:-1]
    ]
    allowed = {line[1:] for line in (COMPOSE / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert copied
    assert set(copied) == allowed
    assert [source for source in copied if not (ROOT / source).exists()] == []
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel["packages"]) <= set(copied), "`atoll` does not start without one of its source roots"


def test_every_place_names_the_version_of_hivemind_that_nodes_have() -> None:
    shipped = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*"), *ROOT.glob("node/**/*.py")]
    texts = [path.read_text() for path in shipped if path.is_file() and path.suffix != ".pyc"]
    named = {found for text in texts for found in re.findall(r"hivemind==[0-9.]*[0-9]", text)}
    assert named == {pinned_hivemind()}


def _compose() -> dict[str, Any]:
    compose: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    return compose


def _substituted(value: object) -> str:
    """A value as compose sees it when no variable is set."""
    return re.sub(r"\$\{\w+(?::?-([^}]*))?\}", lambda match: match[1] or "", str(value))
