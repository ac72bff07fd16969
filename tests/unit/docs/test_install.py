"""`deploy/install` installs, upgrades and removes services; here with programs that only write down their arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.installed_programs import pinned_hivemind

from .shipped import ROOT

SCRIPT = ROOT / "deploy/install"
NOTE = '#!/bin/sh\necho "$(basename "$0") $*" >> "$CALLS"\n'
PYTHON = NOTE + 'mkdir -p "$3/bin"\ncp "$FAKES/pip" "$3/bin/pip"\n'
PIP = NOTE + '[ ! -e "$FAKES/no-network" ]\n'


class Machine:
    """A root directory, fakes of what the script starts, and the calls that they saw."""

    def __init__(self, directory: Path) -> None:
        self.root, self._fakes, self._calls = directory / "root", directory / "fakes", directory / "calls"
        self._fakes.mkdir()
        self.root.mkdir()
        for name, text in (("python3", PYTHON), ("pip", PIP), ("systemctl", NOTE), ("systemd-sysusers", NOTE)):
            (self._fakes / name).write_text(text)
            (self._fakes / name).chmod(0o755)
        self.wheel = directory / "atoll-1-py3-none-any.whl"
        self.token = directory / "token.txt"
        for path in (self.wheel, self.token):
            path.write_text("content")

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self._fakes}:{os.defpath}", "DESTDIR": str(self.root)}
        environment |= {"FAKES": str(self._fakes), "CALLS": str(self._calls)}
        self._calls.write_text("")
        command = [str(word) for word in (SCRIPT, *arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    def install(self, *arguments: str | Path) -> list[str]:
        """Run the script; return the calls that it made."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return self._calls.read_text().splitlines()

    def cut_network(self) -> None:
        (self._fakes / "no-network").touch()

    @property
    def release(self) -> Path:
        return (self.root / "opt/atoll").resolve()

    @property
    def releases(self) -> set[Path]:
        return set((self.root / "opt/atoll-releases").iterdir())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_seed_gets_its_extra_then_hivemind_alone_then_a_service(machine: Machine) -> None:
    calls = machine.install("seed", machine.wheel, machine.token)
    pip = [call for call in calls if call.startswith("pip")]
    assert pip[0].endswith(f"{machine.wheel}[seed]")
    assert pip[1:] == [f"pip install --quiet --no-deps {pinned_hivemind()}"]
    assert calls[-4:-1] == ["systemctl daemon-reload", "systemctl enable atoll-node", "systemctl restart atoll-node"]
    assert os.access(machine.release / "bin/start-node", os.X_OK)
    assert (machine.root / "etc/systemd/system/atoll-node.service").is_file()
    assert (machine.root / "etc/atoll/token").stat().st_mode & 0o777 == 0o600


def test_a_node_gets_hivemind_with_its_extra(machine: Machine) -> None:
    calls = machine.install("node", machine.wheel)
    assert [call.rpartition("[")[2] for call in calls if call.startswith("pip")] == ["node]"]


def test_roles_of_one_machine_share_an_environment(machine: Machine) -> None:
    machine.install("coordinator", machine.wheel)
    machine.install("seed", machine.wheel)
    assert (machine.release / "roles").read_text().split() == ["coordinator", "seed"]
    calls = machine.install("node", machine.wheel)
    assert any(call.endswith("[coordinator,node]") for call in calls)
    assert "systemctl try-restart atoll-coordinator" in calls
    assert (machine.release / "roles").read_text().split() == ["coordinator", "node"]


def test_an_upgrade_keeps_the_release_before_and_no_older_one(machine: Machine) -> None:
    seen = []
    for _ in range(3):
        machine.install("node", machine.wheel)
        seen.append(machine.release)
    assert len(set(seen)) == 3
    assert machine.releases == set(seen[1:])


def test_an_upgrade_that_cannot_download_changes_nothing(machine: Machine) -> None:
    machine.install("node", machine.wheel)
    release, releases = machine.release, machine.releases
    machine.cut_network()
    done = machine.run("node", machine.wheel)
    assert done.returncode != 0
    assert (machine.release, machine.releases) == (release, releases)
    assert "systemctl" not in machine._calls.read_text()


def test_uninstall_keeps_settings_and_state(machine: Machine) -> None:
    machine.install("node", machine.wheel, machine.token)
    state = machine.root / "var/lib/atoll/node/identity.key"
    state.parent.mkdir(parents=True)
    state.touch()
    calls = machine.install("uninstall")
    assert calls == ["systemctl disable --now atoll-node", "systemctl daemon-reload"]
    assert not (machine.root / "opt/atoll").is_symlink()
    assert not (machine.root / "opt/atoll-releases").exists()
    assert not (machine.root / "etc/systemd/system/atoll-node.service").exists()
    assert state.exists()
    assert (machine.root / "etc/atoll/token").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("node", "absent.whl"), "cannot read absent.whl"),
        (("node", "atoll.tar.gz"), "is not a wheel"),
        (("seed", "WHEEL", "absent"), "cannot read the token"),
        (("miner", "WHEEL"), "deploy/install coordinator WHEEL"),
        ((), "deploy/install coordinator WHEEL"),
    ],
)
def test_bad_arguments_change_nothing(machine: Machine, arguments: tuple[str, ...], reason: str) -> None:
    done = machine.run(*(machine.wheel if word == "WHEEL" else word for word in arguments))
    assert done.returncode == 2
    assert reason in done.stderr
    assert list(machine.root.iterdir()) == []


def test_an_environment_that_somebody_else_made_stays(machine: Machine) -> None:
    (machine.root / "opt/atoll").mkdir(parents=True)
    done = machine.run("node", machine.wheel)
    assert done.returncode == 78
    assert "not from this script" in done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not on this machine")
@pytest.mark.parametrize("name", ["install", "start-node"])
def test_shell_scripts_pass_shellcheck(name: str) -> None:
    checked = subprocess.run(["shellcheck", ROOT / "deploy" / name], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout
