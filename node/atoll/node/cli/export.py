"""`atoll export` and `atoll base`: convert models to and from the format of other programs.

`export` writes a checkpoint as a directory that other programs can load. `base` prints the `[model]` section of a run
that starts from such a directory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.core.cli import local_path
from atoll.core.errors import Ambiguous, AtollError, CheckpointCorrupt, NotFound, UsageError
from atoll.core.output import Output, OutputOption, print_json, print_to_stderr
from atoll.node.cli.options import DataDir, data_directory
from atoll.node.config import CORPORA
from atoll.node.control.local_client import call
from atoll.node.control.run_directories import run_directories

if TYPE_CHECKING:
    from atoll.node.data.open_corpus import CacheFolder
    from atoll.node.export.stored_model import StoredModel


class Format(StrEnum):
    """Programs for which the directory is written."""

    HF = "hf"


class Dtype(StrEnum):
    """Data types of the written weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


CheckpointOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--checkpoint",
        help="Directory of a checkpoint, or a directory that `atollctl checkpoint pull` wrote. "
        "Repeat it for each stage when nodes hold only some layers.",
    ),
]


def export(
    to: Annotated[
        Path,
        typer.Option(
            "--to", callback=local_path, help="Directory to write; it must not exist yet.", show_default=False
        ),
    ],
    format_: Annotated[
        Format, typer.Option("--format", help="Format of the result. hf: for Hugging Face transformers.")
    ] = Format.HF,
    checkpoint: CheckpointOption = None,
    round_number: Annotated[
        int | None, typer.Option("--round", min=0, help="Export the checkpoint of this round; default: the newest.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="Name of the run, if this node has several.")] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Data type of the weights.")] = Dtype.FP32,
    shard_gigabytes: Annotated[
        float, typer.Option("--shard-gigabytes", min=1e-6, help="Largest size of one file of weights.")
    ] = 50.0,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            help="For adapter runs: the base model's directory. Writes the whole model with the adapters merged.",
        ),
    ] = None,
    data_dir: DataDir = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Write a checkpoint as a directory that other programs can load. The node may train meanwhile."""
    if checkpoint and (round_number is not None or run is not None):
        raise UsageError(
            "--checkpoint cannot be combined with --round or --run, which choose among this node's checkpoints",
            "leave out --checkpoint, or --round and --run",
        )
    with ExitStack() as exit_stack:
        if checkpoint:
            found = open_and_join(checkpoint, exit_stack)
        else:
            found = _open_own_checkpoint(
                _checkpoints_directory(data_directory(data_dir), run), round_number, exit_stack
            )
        from atoll.node.export.huggingface_export import export_huggingface  # here, because torch takes seconds

        with temporary_torch_cache(), corpus_cache(data_directory(data_dir)) as cache:
            export_huggingface(found, to, dtype, base, 1e9 * shard_gigabytes, cache)
    if output is Output.JSON:
        facts = {"run": found.spec.run.name, "round": found.head.round, "manifest_hash": found.head.hash.hex()}
        print_json({"export": {"directory": str(to), "format": format_.value, "dtype": dtype.value, **facts}})
        return
    print_to_stderr(f"round {found.head.round} of run {found.spec.run.name!r}, {dtype.value}:")
    typer.echo(str(to))
    if not checkpoint and round_number is None:
        _report_newer_round(data_directory(data_dir), found.spec.run.name, found.head.round)


def base(
    directory: Annotated[
        Path, typer.Argument(help="Directory with config.json and safetensors files.", show_default=False)
    ],
    name: Annotated[
        str,
        typer.Option("--name", help="Name of the repository that has these files, as information for other people."),
    ] = "",
) -> None:
    r"""Print the \[model] section of a run spec that starts from these weights. It pins every file by its digest."""
    from atoll.node.model.describe_base import describe  # here, because torch and transformers take seconds

    with temporary_torch_cache():
        text, notes = describe(directory, name)
    for note in notes:
        print_to_stderr(note)
    typer.echo(text)


@contextmanager
def corpus_cache(data_dir: Path) -> Iterator[CacheFolder]:
    """The folder for a corpus's tokenizer: the node's cache, or a temporary one on a machine without a node."""
    from atoll.node.data.open_corpus import CacheFolder  # here, because numpy takes long

    if data_dir.is_dir():
        yield CacheFolder(data_dir / CORPORA)
        return
    with tempfile.TemporaryDirectory() as directory:
        yield CacheFolder(Path(directory))


def _report_newer_round(data_dir: Path, run: str, round_number: int) -> None:
    """Tell the user if the running node of this run is at a newer round."""
    try:
        status = call(data_dir, "status")
    except AtollError:
        return
    if status.get("run") == run and isinstance(newer := status.get("round"), int) and newer > round_number:
        print_to_stderr(
            f"the node is at round {newer} now; it writes a checkpoint every few minutes, and when it leaves"
        )


def _checkpoints_directory(data_dir: Path, run: str | None) -> Path:
    """Find the directory of the run's checkpoints. Raises `NotFound`, `Ambiguous`."""
    there = [path / "checkpoints" for path in run_directories(data_dir) if run in (None, path.name)]
    found = [path for path in there if path.is_dir()]
    if not found:
        raise NotFound(
            f"no checkpoints under {data_dir}",
            "wait until the node writes its first one, or correct --data-dir or --run",
        )
    if len(found) > 1:
        names = ", ".join(path.parent.name for path in found)
        raise Ambiguous(f"this node has several runs: {names}", "choose one with --run")
    return found[0]


def _open_own_checkpoint(checkpoints: Path, round_number: int | None, exit_stack: ExitStack) -> StoredModel:
    """Open the checkpoint of the round, or the newest undamaged one. The daemon moves damaged ones."""
    from atoll.node.export.stored_model import open_checkpoint

    names = sorted((path.name for path in checkpoints.iterdir() if path.name.isdecimal()), key=int, reverse=True)
    if round_number is not None:
        if f"{round_number:09d}" not in names:
            present = ", ".join(str(int(name)) for name in names) or "none"
            raise NotFound(f"this node has no checkpoint of round {round_number}", f"it has rounds: {present}")
        return open_checkpoint(checkpoints / f"{round_number:09d}", exit_stack)
    for name in names:
        try:
            return open_checkpoint(checkpoints / name, exit_stack)
        except CheckpointCorrupt as error:
            print_to_stderr(f"warning: {error}")
    raise NotFound(
        f"no undamaged checkpoint in {checkpoints}", "start the node: it writes one soon after its next round"
    )


def open_and_join(paths: list[Path], exit_stack: ExitStack) -> StoredModel:
    """Open checkpoints of one round, or directories of them. Raises `CheckpointCorrupt`, `NotFound`."""
    from atoll.node.export.stored_model import checkpoints_in, join_checkpoints, open_checkpoint

    return join_checkpoints([open_checkpoint(found, exit_stack) for path in paths for found in checkpoints_in(path)])


@contextmanager
def temporary_torch_cache() -> Iterator[None]:
    """Give torch a cache directory that is deleted at the end; by default torch leaves one behind."""
    with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
        yield
