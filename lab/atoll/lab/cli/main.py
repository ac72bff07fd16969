"""The `atoll` program: the node's commands, and `demo` and `lab`, which start complete swarms on one machine.

It is part of the lab because the node package must not import the lab.
"""

from __future__ import annotations

from atoll.core.cli import run_cli
from atoll.lab.cli import demo, lab
from atoll.node.cli.main import app

app.command()(demo.demo)
app.add_typer(lab.app, name="lab")


def main() -> None:
    """Entry point of `atoll`."""
    run_cli(app)
