"""Questions before irreversible actions. The option --yes of a command skips them."""

from __future__ import annotations

import typer

from atoll.core.errors import UsageError
from atoll.core.output import ask_interactively, print_to_stderr


def confirm(question: str) -> None:
    """Ask yes or no. Raises `UsageError` if the answer is no."""
    if not ask_interactively(lambda: typer.confirm(question, err=True)):
        raise UsageError("nothing was done", "answer yes, or pass --yes")


def confirm_run(run_id: str, what: str, hint: str = "") -> None:
    """Describe the action, and ask for the run's name. Raises `UsageError` if the answer is another name."""
    print_to_stderr(what)
    if ask_interactively(lambda: typer.prompt("type the name of the run", err=True)) != run_id:
        raise UsageError("nothing was done", f"type its name, or pass --yes{hint}")
