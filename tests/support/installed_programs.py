"""Programs of Atoll that run from an installed wheel, outside this checkout."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.lab.launcher import LoopbackHosts

CHECKOUT = Path(__file__).parents[2]


@dataclass
class InstalledPrograms(LoopbackHosts):
    """Runs the programs of some hosts from another environment; the others come from this one."""

    environment: Path
    hosts: Collection[str]

    def command(self, host: str, command: Sequence[str | Path]) -> list[str]:
        program, *arguments = command
        if host in self.hosts:
            program = self.environment / "bin" / Path(program).name
        return super().command(host, [program, *arguments])


def build_wheel(into: Path) -> Path:
    """Build this checkout's wheel."""
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", into, CHECKOUT)
    (wheel,) = into.glob("atoll-*.whl")
    return wheel


def install_without_torch(wheel: Path, extras: str, environment: Path) -> None:
    """Install a wheel as a seed's operator does: first the extra, then hivemind without its requirements."""
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--quiet"]
    _run(sys.executable, "-m", "venv", "--without-pip", environment)
    _run(*pip, "-c", CHECKOUT / "constraints.txt", f"{wheel}[{extras}]")
    _run(*pip, "--no-deps", pinned_hivemind())


def pinned_hivemind() -> str:
    """The requirement in pyproject.toml."""
    found = re.search(r'"(hivemind==[0-9.]+)"', (CHECKOUT / "pyproject.toml").read_text())
    assert found is not None
    return found[1]


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)
