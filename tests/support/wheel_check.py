"""Check what would be published: `python -m support.wheel_check DIST` after the build (`make wheel` does both).

The wheel holds every file of the five source roots and no other. It is installed as a seed and as a coordinator, each
into an environment of its own. Neither has torch, and the seed's has no numpy and no scipy. From an empty directory,
with nothing of this checkout on any path, its programs answer, and a coordinator and a seed of a run become ready. The
coordinator serves its page, which needs the package's assets and migrations.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from support.installed_programs import CHECKOUT, InstalledPrograms, install_extra, install_seed
from support.process_swarm import SPEC

from atoll.lab.launcher import LocalSwarm

ROOTS = ("core", "protos", "node", "coordinator", "lab")
SDIST_HAS = {"pyproject.toml", "README.md", "LICENSE", "constraints.txt", "CHANGELOG.md", "PKG-INFO"}
SDIST_LACKS = (".venv", ".make", ".git/", "dist", "__pycache__")
READY = timedelta(seconds=180)
ANSWERS = {
    "seed": (("atoll", "--version"), ("atoll", "--help"), ("atoll", "join", "--help"), ("atoll", "demo", "--help")),
    "coordinator": (
        ("atollctl", "--help"),
        ("atollctl", "run", "create", "--help"),
        ("atoll-coordinator", "--help"),
    ),
}
ABSENT = {"seed": ("torch", "numpy", "scipy"), "coordinator": ("torch", "hivemind")}


def main() -> None:
    (dist,) = (Path(argument).resolve() for argument in sys.argv[1:])
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    differing = differences(wheel, CHECKOUT)
    assert not differing, f"the wheel and the source roots differ in {sorted(differing)[:20]}"
    check_sdist(sdist)
    with tempfile.TemporaryDirectory(prefix="atoll-wheel-") as scratch:
        environments = {role: Path(scratch) / role for role in ANSWERS}
        install_seed(wheel, environments["seed"])
        install_extra(wheel, "coordinator", environments["coordinator"])
        for role, environment in environments.items():
            check_absence(environment, ABSENT[role])
            check_answers(environment, ANSWERS[role], Path(scratch))
        asyncio.run(check_swarm(environments, Path(scratch) / "swarm"))
    print(f"{wheel.name}: complete; its coordinator and its seed run without this checkout and without torch")


def differences(wheel: Path, checkout: Path) -> set[str]:
    """Names of files that only one side has, or whose content differs."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *ROOTS],
        cwd=checkout,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split("\0")
    source = {name.partition("/")[2]: (checkout / name).read_bytes() for name in tracked if (checkout / name).is_file()}
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        packed = {name: archive.read(name) for name in names}
    return {name for name in source.keys() | packed.keys() if source.get(name) != packed.get(name)}


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= SDIST_HAS, f"the sdist lacks {sorted(SDIST_HAS - names)}"
    wrong = sorted(name for name in names if name.startswith(SDIST_LACKS) or "__pycache__" in name)
    assert not wrong, f"the sdist has {wrong[:20]}"


def check_absence(environment: Path, packages: Sequence[str]) -> None:
    """Packages that nobody installed must not be there: then a program that starts does not need them."""
    for package in packages:
        command = [str(environment / "bin" / "python"), "-I", "-c", f"import {package}"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert f"No module named '{package}'" in answer.stderr, f"{environment.name} has {package}"


def check_answers(environment: Path, commands: Sequence[Sequence[str]], empty: Path) -> None:
    """Run commands in a directory and an environment that do not lead to this checkout."""
    clean = {"PATH": os.defpath, "HOME": str(empty), "LANG": "C.UTF-8"}
    for program, *arguments in commands:
        command = [str(environment / "bin" / program), *arguments]
        answer = subprocess.run(command, cwd=empty, env=clean, capture_output=True, text=True, timeout=60)
        assert answer.returncode == 0, f"{program} {' '.join(arguments)}: {answer.stderr}"
        assert answer.stdout, f"{program} {' '.join(arguments)} prints nothing"


async def check_swarm(environments: Mapping[str, Path], root: Path) -> None:
    """Start a coordinator and a seed of the wheel."""
    swarm = LocalSwarm(root, InstalledPrograms(environments))
    os.environ.pop("PYTHONPATH", None)
    try:
        endpoints = await swarm.start_coordinator()
        spec = SPEC.format(nodes=1, tokens=1000, model="", corpus="text", round_tokens=100, codec="int4")
        await swarm.create_run(spec)
        await swarm.start_member("seed", "seed")
        await swarm.until(lambda: swarm.in_state("seed", "ready"), "the seed did not become ready", READY)
        page = await asyncio.to_thread(_read, endpoints["http"])
        assert b"<html" in page, page[:200]
    finally:
        await swarm.close()


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        content: bytes = answer.read()
    return content


if __name__ == "__main__":
    main()
