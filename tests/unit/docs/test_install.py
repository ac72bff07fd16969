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
NOTE = """#!/bin/sh
program=$(basename "$0")
echo "$program $*" >> "$CALLS"
if [ -e "$FAKES/broken-$program-${1:-}" ]; then exit 1; fi
"""
PYTHON = NOTE + 'mkdir -p "$3/bin"\ncp "$FAKES/pip" "$3/bin/pip"\n'
SYSTEMCTL = NOTE + '[ "$1" != is-active ] || cat "$FAKES/state-$2" 2>/dev/null || echo active\n'


class Machine:
    """A root directory, fakes of what the script starts, and the calls that they saw."""

    def __init__(self, directory: Path) -> None:
        self.root, self._fakes, self._calls = directory / "root", directory / "fakes", directory / "calls"
        self._fakes.mkdir()
        self.root.mkdir()
        for name, text in (("python3", PYTHON), ("pip", NOTE), ("systemctl", SYSTEMCTL), ("systemd-sysusers", NOTE)):
            (self._fakes / name).write_text(text)
            (self._fakes / name).chmod(0o755)
        self.wheel = directory / "atoll-1-py3-none-any.whl"
        self.token = directory / "token.txt"
        for path in (self.wheel, self.token):
            path.write_text("content")

    def run(self, *arguments: str | Path, umask: int = 0o022, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self._fakes}:{os.defpath}", "DESTDIR": str(self.root)}
        environment |= {"FAKES": str(self._fakes), "CALLS": str(self._calls)} | more
        self._calls.write_text("")
        command = [str(word) for word in (SCRIPT, *arguments)]
        return subprocess.run(command, env=environment, umask=umask, capture_output=True, text=True, timeout=120)

    def install(self, *arguments: str | Path, umask: int = 0o022, **more: str) -> list[str]:
        """Run the script; return the calls that it made."""
        done = self.run(*arguments, umask=umask, **more)
        assert done.returncode == 0, done.stderr
        return self.calls

    @property
    def calls(self) -> list[str]:
        """What the last run called."""
        return self._calls.read_text().splitlines()

    @property
    def pip_calls(self) -> list[str]:
        return [call for call in self.calls if call.startswith("pip")]

    def damage(self, call: str) -> None:
        """Let calls fail that begin with a program and its first argument."""
        program, _, argument = call.partition(" ")
        (self._fakes / f"broken-{program}-{argument}").touch()

    def set_state(self, unit: str, state: str) -> None:
        (self._fakes / f"state-{unit}").write_text(state + "\n")

    def join(self) -> Path:
        """Leave what a member leaves that has joined."""
        credentials = self.root / "var/lib/atoll/node/credentials.json"
        credentials.parent.mkdir(parents=True)
        credentials.touch()
        return credentials

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
    assert machine.pip_calls[0].endswith(f"{machine.wheel}[seed]")
    assert machine.pip_calls[1:] == [f"pip install --quiet --no-deps {pinned_hivemind()}"]
    assert calls[-3:] == ["systemctl daemon-reload", "systemctl enable atoll-node", "systemctl restart atoll-node"]
    assert os.access(machine.release / "bin/start-node", os.X_OK)
    assert (machine.root / "etc/systemd/system/atoll-node.service").is_file()
    assert (machine.root / "etc/atoll/token").stat().st_mode & 0o777 == 0o600


def test_a_node_gets_hivemind_with_its_extra(machine: Machine) -> None:
    machine.install("node", machine.wheel)
    assert [call.rpartition("[")[2] for call in machine.pip_calls] == ["node]"]


@pytest.mark.parametrize("role", ["seed", "node"])
def test_a_coordinator_shares_a_machine_and_an_environment(machine: Machine, role: str) -> None:
    machine.install("coordinator", machine.wheel)
    calls = machine.install(role, machine.wheel)
    assert machine.pip_calls[0].endswith(f"[coordinator,{role}]")
    assert calls[-3:] == [
        "systemctl enable atoll-node",
        "systemctl restart atoll-coordinator",
        "systemctl restart atoll-node",
    ]
    assert (machine.release / "roles").read_text().split() == ["coordinator", role]


@pytest.mark.parametrize(("first", "second"), [("seed", "node"), ("node", "seed")])
def test_a_seed_and_a_node_do_not_share_a_machine(machine: Machine, first: str, second: str) -> None:
    machine.install(first, machine.wheel)
    release, releases = machine.release, machine.releases
    done = machine.run(second, machine.wheel)
    assert done.returncode == 78
    assert f"this machine has a {first}" in done.stderr
    assert (machine.release, machine.releases, machine.calls) == (release, releases, [])


def test_a_token_for_a_machine_that_has_joined_is_refused(machine: Machine) -> None:
    machine.install("node", machine.wheel)
    credentials = machine.join()
    done = machine.run("node", machine.wheel, machine.token)
    assert done.returncode == 78
    assert f"rm {credentials}" in done.stderr
    assert not (machine.root / "etc/atoll/token").exists()
    machine.install("node", machine.wheel)


def test_upgrades_keep_extras_until_they_are_dropped(machine: Machine) -> None:
    machine.install("node", machine.wheel, EXTRAS="hf")
    assert machine.pip_calls[0].endswith("[node,hf]")
    machine.install("coordinator", machine.wheel, EXTRAS="postgres, hf")
    machine.install("node", machine.wheel)
    assert machine.pip_calls[0].endswith("[coordinator,node,hf,postgres]")
    machine.install("node", machine.wheel, EXTRAS="")
    assert machine.pip_calls[0].endswith("[coordinator,node]")


def test_an_extra_that_nobody_knows_changes_nothing(machine: Machine) -> None:
    done = machine.run("node", machine.wheel, EXTRAS="hf,dev")
    assert done.returncode == 2
    assert "EXTRAS has 'dev'; known are: eval hf postgres" in done.stderr
    assert list(machine.root.iterdir()) == []


@pytest.mark.parametrize(("name", "word"), [("roles", "miner"), ("extras", "dev")])
def test_a_release_with_words_that_nobody_knows_is_not_upgraded(machine: Machine, name: str, word: str) -> None:
    machine.install("node", machine.wheel)
    (machine.release / name).write_text(f"{word}\n")
    done = machine.run("node", machine.wheel)
    assert done.returncode == 78
    assert f"{name} has '{word}'" in done.stderr
    assert machine.calls == []


def test_other_accounts_can_read_what_a_strict_root_installs_but_not_the_token(machine: Machine) -> None:
    machine.root.chmod(0o755)
    machine.install("node", machine.wheel, machine.token, umask=0o077)
    closed = {path for path in machine.root.rglob("*") if not path.is_symlink() and not path.stat().st_mode & 0o004}
    assert closed == {machine.root / "etc/atoll/token"}


def test_an_upgrade_keeps_the_release_before_and_no_older_one(machine: Machine) -> None:
    seen = []
    for _ in range(3):
        machine.install("node", machine.wheel)
        seen.append(machine.release)
    assert len(set(seen)) == 3
    assert machine.releases == set(seen[1:])


@pytest.mark.parametrize("call", ["python3 -m", "pip install", "systemd-sysusers"])
def test_an_upgrade_that_fails_before_the_switch_changes_nothing(machine: Machine, call: str) -> None:
    machine.install("node", machine.wheel)
    release, releases = machine.release, machine.releases
    machine.damage(call)
    done = machine.run("node", machine.wheel)
    assert done.returncode == 1
    assert f"{call.split()[0]}" in done.stderr.splitlines()[0]
    assert "what was installed before stays in use" in done.stderr
    assert (machine.release, machine.releases) == (release, releases)
    assert not [word for word in machine.calls if word.startswith("systemctl")]


def test_an_upgrade_that_does_not_start_says_how_to_go_back(machine: Machine) -> None:
    machine.install("coordinator", machine.wheel)
    machine.install("node", machine.wheel)
    before = machine.release
    machine.damage("systemctl restart")
    done = machine.run("node", machine.wheel)
    assert done.returncode == 1
    assert "journalctl -e -u atoll-coordinator -u atoll-node" in done.stderr
    (command,) = (line.partition("go back: ")[2] for line in done.stderr.splitlines() if "go back" in line)
    assert command.endswith(" && systemctl restart atoll-coordinator atoll-node")
    assert machine.release != before
    subprocess.run(command.partition(" && ")[0].split(), check=True, timeout=120)
    assert machine.release == before
    assert (before / "bin/start-node").exists()


def test_a_first_installation_that_does_not_start_can_be_repeated(machine: Machine) -> None:
    machine.damage("systemctl enable")
    done = machine.run("node", machine.wheel)
    assert done.returncode == 1
    assert "this failed: systemctl enable atoll-node" in done.stderr
    assert "repeat the command" in done.stderr


@pytest.mark.parametrize(
    ("state", "restarts"), [("active", True), ("activating", True), ("inactive", False), ("failed", False)]
)
def test_an_upgrade_restarts_the_services_that_run(machine: Machine, state: str, restarts: bool) -> None:
    machine.install("coordinator", machine.wheel)
    machine.install("node", machine.wheel)
    machine.set_state("atoll-node", state)
    done = machine.run("node", machine.wheel)
    assert done.returncode == 0
    assert ("systemctl restart atoll-node" in machine.calls) == restarts
    assert ("to start it: systemctl start atoll-node" in done.stdout) != restarts
    assert "systemctl restart atoll-coordinator" in machine.calls
    assert "systemctl enable atoll-node" not in machine.calls, "its owner may have disabled it"


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


def test_uninstall_says_what_failed_and_can_be_repeated(machine: Machine) -> None:
    machine.install("node", machine.wheel)
    machine.damage("systemctl disable")
    done = machine.run("uninstall")
    assert done.returncode == 1
    assert "this failed: systemctl disable --now atoll-node" in done.stderr
    assert "repeat the command" in done.stderr
    assert (machine.release / "bin/start-node").exists()


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


@pytest.mark.parametrize("kind", ["folder", "link elsewhere", "link to nothing"])
def test_an_environment_that_somebody_else_made_stays_until_it_is_moved_away(machine: Machine, kind: str) -> None:
    place, elsewhere = machine.root / "opt/atoll", machine.root / "srv/atoll"
    place.parent.mkdir()
    elsewhere.mkdir(parents=True)
    if kind == "folder":
        place.mkdir()
    else:
        place.symlink_to("atoll-releases/absent" if kind == "link to nothing" else elsewhere)
    done = machine.run("node", machine.wheel)
    assert done.returncode == 78
    assert "is not from this script" in done.stderr
    assert machine.calls == []
    subprocess.run(done.stderr.strip().rpartition(": ")[2].split(), check=True, timeout=120)
    machine.install("node", machine.wheel)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not on this machine")
@pytest.mark.parametrize("name", ["install", "start-node"])
def test_shell_scripts_pass_shellcheck(name: str) -> None:
    checked = subprocess.run(["shellcheck", ROOT / "deploy" / name], capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stdout
