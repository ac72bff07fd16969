"""`atoll eval`: measure a model on tasks of lm-evaluation-harness.

The model is a directory that `atoll export` wrote, or a checkpoint, which is exported to a temporary directory first.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.core.errors import UsageError
from atoll.core.output import Output, OutputOption, print_json, print_to_stderr
from atoll.node.cli.export import corpus_cache, open_and_join, temporary_torch_cache
from atoll.node.cli.options import DataDir, data_directory

if TYPE_CHECKING:
    from atoll.node.evaluation.exported_model import ExportedModel
    from atoll.node.evaluation.report import Evaluation, Metric

_SECONDS_BETWEEN_PROGRESS = "10"
_PIPE_WIDTH = 160

FewShotOption = Annotated[
    int | None,
    typer.Option(
        "--few-shot",
        min=0,
        help="Number of solved examples in each prompt; default: the number that each task defines.",
    ),
]
IncludeOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--include",
        help="A directory of your own tasks (YAML); may be repeated. Tasks can run Python: "
        "include only what you trust.",
    ),
]


def eval_(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A directory that `atoll export` wrote, or a checkpoint.", show_default=False
        ),
    ],
    tasks: Annotated[
        list[str],
        typer.Option("--tasks", help="Names of tasks, separated by commas; may be repeated.", show_default=False),
    ],
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Number of samples of each task, for a quick test; default: all."),
    ] = None,
    few_shot: FewShotOption = None,
    batch_size: Annotated[
        str, typer.Option("--batch-size", metavar="N|auto", help="Samples in one batch; auto: as many as fit.")
    ] = "8",
    device: Annotated[str, typer.Option("--device", help="Device: auto, cpu, cuda or cuda:1.")] = "auto",
    include: IncludeOption = None,
    base: Annotated[
        Path | None,
        typer.Option("--base", help="Directory of the base model, if the model is an adapter.", show_default=False),
    ] = None,
    data_dir: DataDir = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Measure a model on tasks of lm-evaluation-harness. It needs the extra `eval`. Tasks download their data."""
    names = tuple(dict.fromkeys(name.strip() for text in tasks for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError("--tasks names no task", "name at least one, for example --tasks lambada_openai")
    size = _batch_size(batch_size)
    if not sys.stderr.isatty():  # the library's progress: in a log, a line every ten seconds
        os.environ.setdefault("TQDM_MININTERVAL", _SECONDS_BETWEEN_PROGRESS)
    import lm_eval  # noqa: F401  # first: if it is missing, it is the one to name

    from atoll.node.evaluation.harness import EvaluationOptions, evaluate_export  # here: torch takes seconds
    from atoll.node.system.child_processes import treat_sigterm_as_sigint

    options = EvaluationOptions(
        names, tuple(path.expanduser() for path in include or ()), limit, few_shot, size, device
    )
    treat_sigterm_as_sigint()
    with temporary_torch_cache(), _exported(checkpoint.expanduser(), base, data_dir) as export:
        evaluation = evaluate_export(export, options)
        facts = {"directory": str(checkpoint), **export.origin, "files": export.digests()}
    if output is Output.JSON:
        print_json({"evaluation": {"checkpoint": facts, **asdict(evaluation)}})
        return
    _print_table(facts, evaluation)


def _batch_size(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 16:
        raise UsageError(f"--batch-size {text} is not a number from 1 to {1 << 16}", "or use auto")
    return int(text)


@contextmanager
def _exported(directory: Path, base: Path | None, data_dir: Path | None) -> Iterator[ExportedModel]:
    """Open an export. A checkpoint is first exported to a temporary directory."""
    from atoll.node.evaluation.exported_model import open_export
    from atoll.node.export.stored_model import holds_checkpoints

    if not holds_checkpoints(directory):
        yield open_export(directory, base)
        return
    from atoll.node.export.huggingface_export import export_huggingface

    with ExitStack() as exit_stack:
        target = Path(exit_stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-"))) / "export"
        found = open_and_join([directory], exit_stack)
        cache = exit_stack.enter_context(corpus_cache(data_directory(data_dir)))
        export_huggingface(found, target, base=base, cache=cache)
        yield open_export(target, None)


def _print_table(facts: dict[str, object], evaluation: Evaluation) -> None:
    from rich.console import Console
    from rich.table import Table

    if "run" in facts:
        print_to_stderr(f"round {facts['round']} of run {facts['run']!r}, manifest {str(facts['manifest'])[:12]}…:")
    if evaluation.truncated_requests:
        print_to_stderr(
            f"warning: {evaluation.truncated_requests} requests were longer than the model's context of "
            f"{evaluation.settings['context_tokens']} tokens and lost their beginning"
        )
    table = Table()
    for column in ("task", "metric"):
        table.add_column(column, overflow="fold")
    for column in ("value", "± stderr", "samples", "few-shot"):
        table.add_column(column, justify="right")
    for result in evaluation.results:
        for position, metric in enumerate(result.metrics):
            counts = (result.samples, result.few_shot) if position == 0 else ()
            shared = ["–" if each is None else f"{each:,}" for each in counts]
            name = result.task if position == 0 else ""
            table.add_row(name, _metric_name(metric), _figure(metric.value), _figure(metric.stderr), *shared)
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


def _metric_name(metric: Metric) -> str:
    arrow = {True: " ↑", False: " ↓", None: ""}[metric.higher_is_better]
    return metric.metric + (f" ({metric.filter})" if metric.filter != "none" else "") + arrow


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"
