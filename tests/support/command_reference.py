"""Pages that list every command and option, from the programs themselves.

    python -m support.command_reference

writes them; a test compares them. The text is that of typer's own generator, with apostrophes as people write them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

from atoll.coordinator.cli.main import app as atollctl
from atoll.lab.cli.main import app as atoll

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGES = {"atoll.md": ("atoll", atoll), "atollctl-options.md": ("atollctl", atollctl)}
_NOTE = "<!-- Written by `make reference` from the programs' help: change it there. -->\n\n"
_REWRITTEN = (
    (r"&#x27;", "'"),
    (r"\[bold\](.*?)\[/bold\]", r"**\1**"),
    (r"\\\[", "["),
    (r"^  (?=\S)", "    "),  # examples: a block of code
    (r" +$", ""),
)


def page(name: str) -> str:
    """The text of one page."""
    program, app = PAGES[name]
    command = typer.main.get_command(app)
    with typer.Context(command, info_name=program) as context:  # type: ignore[attr-defined]
        text: str = get_docs_for_click(obj=command, ctx=context, name=program)
    for pattern, written in _REWRITTEN:
        text = re.sub(pattern, written, text, flags=re.MULTILINE)
    for shortened, whole in _short_helps(command):
        text = text.replace(shortened, whole)
    return _NOTE + text.strip() + "\n"


def _short_helps(group: Any) -> Iterator[tuple[str, str]]:
    """Yield the lines of lists of commands, as the generator cuts them and whole."""
    for name, command in getattr(group, "commands", {}).items():
        cut, whole = (command.get_short_help_str(limit).replace("\\[", "[") for limit in (45, 1000))
        yield f"* `{name}`: {cut}\n", f"* `{name}`: {whole}\n"
        yield from _short_helps(command)


def main() -> None:
    for name in PAGES:
        (REFERENCE / name).write_text(page(name))


if __name__ == "__main__":
    main()
