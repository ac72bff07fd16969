"""`atoll export`: a checkpoint as a directory that other programs load."""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.core.errors import Ambiguous, AtollError, CheckpointCorrupt, NotFound, UsageError
from atoll.core.output import Output, OutputOption, print_json, print_to_stderr
from atoll.node.cli.options import DataDir, data_directory
from atoll.node.cli.scratch import temporary_torch_cache
from atoll.node.control.local_client import call

if TYPE_CHECKING:
    from atoll.node.export.stored_model import StoredModel


class Format(StrEnum):
    """What the directory is for."""

    HF = "hf"


class Dtype(StrEnum):
    """How numbers are stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


def export(
    to: Annotated[Path, typer.Option("--to", help="The directory to write; it must not exist.", show_default=False)],
    format_: Annotated[Format, typer.Option("--format", help="hf: for Hugging Face transformers.")] = Format.HF,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            "--checkpoint",
            help="What `atollctl checkpoint pull` wrote, or a checkpoint's directory; several, where nodes hold spans.",
        ),
    ] = None,
    round_number: Annotated[
        int | None, typer.Option("--round", min=0, help="The checkpoint of that round; default: the newest.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="The run, where this node has several.")] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="How numbers are stored.")] = Dtype.FP32,
    shard_gigabytes: Annotated[
        float, typer.Option("--shard-gigabytes", min=1e-6, help="The most that a file of weights holds.")
    ] = 50.0,
    base: Annotated[
        Path | None,
        typer.Option("--base", help="Of adapters: the base's directory. Writes the whole model, adapters merged."),
    ] = None,
    data_dir: DataDir = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Write a checkpoint as a directory that other programs load. The node may be training meanwhile."""
    if checkpoint and (round_number is not None or run is not None):
        raise UsageError("--checkpoint names a checkpoint; --round and --run choose among this node's")
    with ExitStack() as exit_stack:
        if checkpoint:
            found = _open_and_join(checkpoint, exit_stack)
        else:
            found = _open_own_checkpoint(
                _checkpoints_directory(data_directory(data_dir), run), round_number, exit_stack
            )
        from atoll.node.export.huggingface_export import export_huggingface  # takes seconds: torch

        with temporary_torch_cache():
            export_huggingface(found, to, dtype, base, 1e9 * shard_gigabytes)
    if output is Output.JSON:
        facts = {"run": found.spec.run.name, "round": found.head.round, "manifest_hash": found.head.hash.hex()}
        print_json({"export": {"directory": str(to), "format": format_.value, "dtype": dtype.value, **facts}})
        return
    print_to_stderr(f"round {found.head.round} of run {found.spec.run.name!r}, {dtype.value}:")
    typer.echo(str(to))
    if not checkpoint and round_number is None:
        _report_newer_round(data_directory(data_dir), found.spec.run.name, found.head.round)


def _report_newer_round(data_dir: Path, run: str, round_number: int) -> None:
    """Beside the round at which the node is, if one runs."""
    try:
        status = call(data_dir, "status")
    except AtollError:
        return
    if status.get("run") == run and isinstance(newer := status.get("round"), int) and newer > round_number:
        print_to_stderr(
            f"the node is at round {newer} now; it writes a checkpoint every few minutes, and when it leaves"
        )


def _checkpoints_directory(data_dir: Path, run: str | None) -> Path:
    """Where the checkpoints of the run lie."""
    found = sorted(path for path in data_dir.glob("runs/*/checkpoints") if run in (None, path.parent.name))
    if not found:
        raise NotFound(
            f"no checkpoints under {data_dir}",
            "the node has not written one yet, or --data-dir or --run is another",
        )
    if len(found) > 1:
        raise Ambiguous(f"this node has runs {', '.join(path.parent.name for path in found)}", "choose one with --run")
    return found[0]


def _open_own_checkpoint(checkpoints: Path, round_number: int | None, exit_stack: ExitStack) -> StoredModel:
    """That of the round, or the newest that is whole. Nothing is set aside: that is for the daemon."""
    from atoll.node.export.stored_model import open_checkpoint

    names = sorted((path.name for path in checkpoints.iterdir() if path.name.isdecimal()), key=int, reverse=True)
    if round_number is not None:
        if f"{round_number:09d}" not in names:
            present = ", ".join(str(int(name)) for name in names) or "none"
            raise NotFound(f"no checkpoint of round {round_number} is held here", f"held: {present}")
        return open_checkpoint(checkpoints / f"{round_number:09d}", exit_stack)
    for name in names:
        try:
            return open_checkpoint(checkpoints / name, exit_stack)
        except CheckpointCorrupt as error:
            print_to_stderr(f"warning: {error}")
    raise NotFound(f"no whole checkpoint in {checkpoints}", "the node writes one soon after its next round")


def _open_and_join(paths: list[Path], exit_stack: ExitStack) -> StoredModel:
    from atoll.node.export.stored_model import checkpoints_in, join_checkpoints, open_checkpoint

    return join_checkpoints([open_checkpoint(found, exit_stack) for path in paths for found in checkpoints_in(path)])
