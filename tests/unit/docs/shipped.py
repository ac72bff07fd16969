"""What docs and deploy files show to people, for the tests beside this: files, code blocks, tables, commands.

A command line counts as ours when it starts one of the three programs. Words are split as a shell would; a block that
is not meant for a shell is left alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from atoll.coordinator.cli.main import app as atollctl
from atoll.coordinator.cli.serve import app as coordinator
from atoll.lab.cli.main import app as atoll

ROOT = Path(__file__).parents[3]
PROGRAMS = {
    name: typer.main.get_command(app)
    for name, app in (("atoll", atoll), ("atollctl", atollctl), ("atoll-coordinator", coordinator))
}
_BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:atoll|atollctl|atoll-coordinator)(?: [^`]*)?)`")
_SEPARATORS = {"&&", "||", "|", ";", ">", "<"}


def documents() -> list[Path]:
    """Every page that people read."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "benchmarks" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]


def deploy_files() -> list[Path]:
    """Every file that starts our programs elsewhere."""
    places = (ROOT / "deploy/systemd", ROOT / "deploy/compose")
    return [ROOT / "deploy/start-node", *(path for place in places for path in sorted(place.iterdir()))]


def commands(path: Path) -> Iterator[list[str]]:
    """Our command lines in a file, as words from the program's name on."""
    text = path.read_text()
    if path.suffix == ".md":
        lines = [line for block in _BLOCK.findall(text) for line in block.splitlines()] + _INLINE.findall(text)
    else:
        lines = text.replace("[", " ").replace("]", " ").replace('",', '"').splitlines()
    for line in lines:
        yield from _commands_in(line)


def _commands_in(line: str) -> Iterator[list[str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # prose with an apostrophe
        return
    for position, word in enumerate(words):
        program = word.rpartition("/bin/")[2]
        before = words[position - 1] if position else ""
        if program not in PROGRAMS or before.startswith("-") or before in ("image:", "u", "m"):
            continue
        rest = words[position + 1 :]
        end = next((i for i, item in enumerate(rest) if item in _SEPARATORS), len(rest))
        yield [program, *rest[:end]]
        return


def problem(words: list[str]) -> str:
    """Why a command line cannot be typed as it stands; empty when it can."""
    command: Any = PROGRAMS[words[0]]  # typer brings a click of its own, whose classes have no public name
    rest = words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        inner = command.commands.get(rest[0])
        if inner is None:
            return f"{' '.join(words)}: there is no command {rest[0]!r}"
        command, rest = inner, rest[1:]
    known = {name for item in command.params for name in (*item.opts, *item.secondary_opts)} | {"--help", "-h"}
    wrong = [word for word in rest if word.startswith("-") and word != "-" and word.partition("=")[0] not in known]
    return f"{' '.join(words)}: no such option: {', '.join(wrong)}" if wrong else ""


def table(path: Path, heading: str = "") -> list[list[str]]:
    """The rows of all tables below `heading` (up to the next heading of its level), without the header rows."""
    text = path.read_text()
    if heading:
        level = heading.partition(" ")[0]
        text = text.partition(f"\n{heading}\n")[2].split(f"\n{level} ")[0]
    lines = text.splitlines()
    rows: list[list[str]] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("|") and not line.startswith("|---") and not following.startswith("|---"):
            rows.append([cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")])
    return rows


def plain(cell: str) -> str:
    """A table cell without the marks of code."""
    return cell.strip("` ")
