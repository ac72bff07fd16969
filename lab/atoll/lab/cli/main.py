"""The `atoll` program: the node's commands, and `demo` and `lab`, which start whole swarms on one machine.

It stands in the lab because a node must not import the lab.
"""

from __future__ import annotations

from atoll.core.cli import run_cli
from atoll.lab.cli import demo, lab
from atoll.node.cli.main import app

app.command()(demo.demo)
app.add_typer(lab.app, name="lab")


def main() -> None:
    """Entry point."""
    run_cli(app)
