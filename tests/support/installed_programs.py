"""Programs of Atoll that run from an installed wheel, outside this checkout."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.lab.launcher import LoopbackHosts

CHECKOUT = Path(__file__).parents[2]


@dataclass
class InstalledPrograms(LoopbackHosts):
    """Runs the programs of some hosts from other environments; those of the other hosts come from this one."""

    environments: Mapping[str, Path]  # by host

    def command(self, host: str, command: Sequence[str | Path]) -> list[str]:
        program, *arguments = command
        if host in self.environments:
            program = self.environments[host] / "bin" / Path(program).name
        return super().command(host, [program, *arguments])


def build_wheel(into: Path) -> Path:
    """Build this checkout's wheel."""
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", into, CHECKOUT)
    (wheel,) = into.glob("atoll-*.whl")
    return wheel


def install_seed(wheel: Path, environment: Path) -> None:
    """Install a wheel as a seed's operator does: first the extra, then hivemind without its requirements."""
    install_extra(wheel, "seed", environment)
    _run(*_pip(environment), "--no-deps", pinned_hivemind())


def install_extra(wheel: Path, extra: str, environment: Path) -> None:
    """Install a wheel with one extra into a new environment."""
    _run(sys.executable, "-m", "venv", "--without-pip", environment)
    _run(*_pip(environment), "-c", CHECKOUT / "constraints.txt", f"{wheel}[{extra}]")


def pinned_hivemind() -> str:
    """The requirement in pyproject.toml."""
    found = re.search(r'"(hivemind==[0-9.]+)"', (CHECKOUT / "pyproject.toml").read_text())
    assert found is not None
    return found[1]


def _pip(environment: Path) -> list[str | Path]:
    return [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--quiet"]


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)
