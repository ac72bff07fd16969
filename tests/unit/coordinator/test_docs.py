"""The reference names every command and every kind of event that there is."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from atoll import coordinator
from atoll.coordinator.cli import main

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "atollctl.md"


def test_every_command_is_in_the_reference() -> None:
    text = REFERENCE.read_text()
    for name, group in typer.main.get_command(main.app).commands.items():  # type: ignore[attr-defined]
        for command in getattr(group, "commands", {"": None}):
            assert f"`atollctl {f'{name} {command}'.strip()}" in text


def test_every_event_is_in_the_reference() -> None:
    text = REFERENCE.read_text()
    source = "".join(path.read_text() for path in Path(next(iter(coordinator.__path__))).rglob("*.py"))
    kinds = set(re.findall(r'"((?:node|run|token|plan|round)\.[a-z-]+)"', source))
    kinds |= {f"run.{name.lower()}" for name in ("WAITING", "GENESIS", "TRAINING", "PAUSED", "FINISHED", "STOPPED")}
    assert len(kinds) > 15
    for kind in kinds:
        assert f"`{kind}`" in text, kind
