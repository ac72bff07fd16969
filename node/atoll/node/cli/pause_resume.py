"""`atoll pause`, `resume`, `finish`, `leave`: commands of the owner to a running daemon."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from atoll.core.output import Output, OutputOption, print_json, print_to_stderr
from atoll.core.units import duration_text, parse_duration
from atoll.node.cli.options import DataDir, data_directory
from atoll.node.control.local_client import call


def pause(
    duration: Annotated[
        str | None, typer.Option("--for", help="Resume automatically after this time, for example 30m or 2h.")
    ] = None,
    data_dir: DataDir = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Stop training for a while. The node stays a member and later catches up with the other nodes."""
    seconds = parse_duration(duration).total_seconds() if duration else 0.0
    answer = call(data_directory(data_dir), "pause", seconds=seconds)
    if output is Output.JSON:
        print_json({"pause": answer})
    else:
        print_to_stderr(f"Paused for {duration_text(seconds)}." if seconds else "Paused until `atoll resume`.")
        _warn(answer)


def resume(
    force: Annotated[
        bool,
        typer.Option("--force", help="Ignore the limit that pauses the node, until this limit allows training again."),
    ] = False,
    data_dir: DataDir = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Resume training after `pause` or `finish`, unless a limit pauses the node."""
    answer = call(data_directory(data_dir), "resume", force=force)
    if output is Output.JSON:
        print_json({"resume": answer})
    else:
        reason = answer.get("reason")
        paused = f"Your pause is over, but a limit pauses the node: {reason}. `atoll resume --force` trains anyway."
        print_to_stderr(paused if reason else "Training again.")
        _warn(answer)


def finish(data_dir: DataDir = None, output: OutputOption = Output.TEXT) -> None:
    """Leave after the current round, so that no training is lost. A restarted node stays paused until `resume`."""
    answer = call(data_directory(data_dir), "finish")
    if output is Output.JSON:
        print_json({"finish": answer})
    else:
        print_to_stderr("Leaving after the current round.")
        _warn(answer)


def leave(data_dir: DataDir = None, output: OutputOption = Output.TEXT) -> None:
    """Leave and stop the daemon at once. The node loses its training since the last round."""
    answer = call(data_directory(data_dir), "leave")
    if output is Output.JSON:
        print_json({"leave": answer})
    else:
        print_to_stderr("Leaving.")


def _warn(answer: dict[str, Any]) -> None:
    if answer.get("warning"):
        print_to_stderr(f"warning: {answer['warning']}")
