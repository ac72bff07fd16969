"""`atoll demo`: a complete swarm on this machine; takes about three minutes."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from atoll.core.errors import AtollError, UsageError
from atoll.core.output import Output, OutputOption, print_json, print_to_stderr
from atoll.core.units import bytes_text, count_text
from atoll.lab.cli.work_directory import KeepOption, MinutesOption, make_work_directory

if TYPE_CHECKING:
    from atoll.lab.demo import DemoOptions, DemoResult
    from atoll.lab.demo_pipeline import PipelineResult
    from atoll.lab.demo_watch import DemoView

    Show = Callable[[DemoView], None]
    R = TypeVar("R", DemoResult, PipelineResult)

_OPTIONS_UNUSED_BY_PIPELINE = ("nodes", "codec", "inner_steps", "kill", "together", "freeze", "kill_coordinator")
DEFAULT_TOKENS = 340_000  # about 480 steps of a full-speed node in the default swarm
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        min=1,
        help="Number of committed tokens at which the run stops; default: 340000, with --pipeline 120000.",
    ),
]
InnerStepsOption = Annotated[
    int, typer.Option("--inner-steps", min=1, help="Steps of a full-speed node between rounds.")
]
KillCoordinatorOption = Annotated[
    bool,
    typer.Option(
        "--kill-coordinator", help="Also kill the coordinator; with --together, at the same time as the nodes."
    ),
]
PipelineOption = Annotated[
    bool,
    typer.Option(
        "--pipeline", help="Train a model that no single node can hold: five nodes, two routes, a killed stage."
    ),
]


def demo(
    context: typer.Context,
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=16, help="Number of nodes that train.")] = 4,
    tokens: TokensOption = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of initialisation and data order.")] = 0,
    data: Annotated[Path | None, typer.Option("--data", help="Train on your own text: a file or a directory.")] = None,
    codec: Annotated[
        str, typer.Option("--codec", help="Codec of exchanges: fp32, bf16, fp16, int8, int4, int2, or auto.")
    ] = "int4",
    inner_steps: InnerStepsOption = 20,
    kill: Annotated[int, typer.Option("--kill", min=0, help="Kill this many nodes while they train (SIGKILL).")] = 0,
    together: Annotated[bool, typer.Option("--together", help="Make all kills at the same time.")] = False,
    freeze: Annotated[int, typer.Option("--freeze", min=0, help="Freeze this many nodes for 20 s (SIGSTOP).")] = 0,
    kill_coordinator: KillCoordinatorOption = False,
    pipeline: PipelineOption = False,
    keep: KeepOption = None,
    minutes: MinutesOption = 15.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Start a coordinator, a seed and four nodes on loopback and train a language model on real text.

    Without --data, the text is the Python standard library. Two of the nodes are slowed to a half and a quarter of the
    speed. Killed and frozen nodes come back, and the model stays the same on all nodes.
    With --pipeline, five nodes with limited memory train a model that no single node can hold.
    """
    from atoll.core.run_spec import check_codec
    from atoll.lab.demo import SLOWDOWNS, DemoOptions
    from atoll.lab.faults import FaultPlan

    timeout = timedelta(minutes=minutes)
    if pipeline:
        _refuse_unused_options(context)
        _run_pipeline_demo(tokens, seed, data, timeout, keep, output)
        return
    check_codec(codec)
    if kill + freeze > nodes:
        raise UsageError(
            f"--kill {kill} and --freeze {freeze} need {kill + freeze} nodes; --nodes is {nodes}", "raise --nodes"
        )
    slowdowns = tuple(float(SLOWDOWNS[i % len(SLOWDOWNS)]) for i in range(nodes))
    faults = FaultPlan(kill, together, freeze, kill_coordinator)
    tokens = tokens or DEFAULT_TOKENS
    _run_demo(DemoOptions(nodes, tokens, seed, data, codec, slowdowns, inner_steps, timeout, faults), keep, output)


def _refuse_unused_options(context: typer.Context) -> None:
    """Raise `UsageError` for options that `--pipeline` does not use."""
    sources = {name: context.get_parameter_source(name) for name in _OPTIONS_UNUSED_BY_PIPELINE}
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    if given:
        words = ", ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(
            f"--pipeline cannot be combined with {words}", "remove them: it always has five nodes and kills one"
        )


def _run_demo(options: DemoOptions, keep: Path | None, output: Output) -> None:
    from atoll.lab.demo import run_demo

    result = _run(lambda root, show: run_demo(options, root, show), keep, output)
    if output is Output.TEXT:
        _print_result(result, keep)


def _run_pipeline_demo(
    tokens: int | None, seed: int, data: Path | None, timeout: timedelta, keep: Path | None, output: Output
) -> None:
    from atoll.lab.demo_pipeline import TOKENS, PipelineOptions, run_pipeline_demo

    options = PipelineOptions(tokens or TOKENS, seed, data, timeout)
    result = _run(lambda root, show: run_pipeline_demo(options, root, show), keep, output)
    if output is Output.TEXT:
        _print_pipeline_result(result, keep)


def _run(demo: Callable[[Path, Show], Coroutine[Any, Any, R]], keep: Path | None, output: Output) -> R:
    """Run a demo with its live view, and print its result if that is to be JSON."""
    import asyncio

    from atoll.lab.demo_view import live_view

    with _work_directory(keep) as root, live_view(quiet=output is Output.JSON and not sys.stderr.isatty()) as show:
        result = asyncio.run(demo(root, show))
    if output is Output.JSON:
        print_json({"demo": result.to_json()})
    return result


@contextmanager
def _work_directory(keep: Path | None) -> Iterator[Path]:
    """Yield the directory of the demo's programs. Without `keep` it is removed; after a failure the logs are kept."""
    root = make_work_directory(keep, "demo")
    try:
        yield root
    except AtollError:
        if keep is None:
            kept = Path(tempfile.mkdtemp(prefix="atoll-demo-failed-"))
            _keep_logs(root, kept)
            print_to_stderr(f"The logs of the failed demo are in {kept}")
        raise
    finally:
        if keep is None:
            shutil.rmtree(root, ignore_errors=True)


def _print_pipeline_result(result: PipelineResult, keep: Path | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    equal = "[green]equal bit for bit[/]" if result.layers_equal and result.chains_equal else "[red]DIFFER[/]"
    console.print(
        f"\n[bold]{result.nodes} nodes trained {count_text(result.tokens)} tokens in {result.seconds:.0f} s[/]"
    )
    console.print(f"  validation loss   {result.val_loss_first:.3f} → [bold]{result.val_loss_last:.3f}[/] nats/byte")
    console.print(
        f"  memory            training the model takes {bytes_text(result.training_state_bytes)}, "
        f"the largest node has {bytes_text(result.largest_node_cap_bytes)}"
    )
    for number, route in enumerate(result.routes, 1):
        stages = " → ".join(f"{stage['name']} ({stage['first_layer']}–{stage['last_layer']})" for stage in route)
        console.print(f"  route {number}           {stages}")
    console.print(f"  layers            {equal} on all that hold them, after {result.rounds_committed} rounds")
    console.print(
        f"  faults            {result.kills} stage killed; {result.flushes_aborted} flushes aborted, "
        f"{result.micro_batches_counted_twice} samples counted twice"
    )
    console.print(f"\nThe model: {result.export if keep else 'not kept; run with --keep DIR to keep it'}")


def _keep_logs(root: Path, kept: Path) -> None:
    for log in [*root.glob("*/log"), *root.glob("*/runs/*/trainer.log")]:
        shutil.copy(log, kept / "-".join(log.relative_to(root).parts))


def _print_result(result: DemoResult, keep: Path | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    saved = result.averaging_bytes_fp32 / max(1, result.averaging_bytes_sent)
    steps = ", ".join(f"{name} {count}" for name, count in result.steps_per_node.items())
    equal = "[green]equal bit for bit[/]" if result.anchors_equal else "[red]DIFFER[/]"
    console.print(
        f"\n[bold]{result.nodes} nodes trained {count_text(result.tokens)} tokens in {result.seconds:.0f} s[/]"
    )
    console.print(f"  validation loss   {result.val_loss_first:.3f} → [bold]{result.val_loss_last:.3f}[/] nats/byte")
    console.print(f"  rounds            {result.rounds_committed} committed of {result.rounds_opened} opened")
    console.print(f"  anchors           {equal} on all nodes ({next(iter(result.anchor_digests.values()))[:16]}…)")
    if result.kills or result.freezes or result.coordinator_restarts:
        console.print(
            f"  faults            {result.kills} killed, {result.freezes} frozen, coordinator restarted "
            f"{result.coordinator_restarts}×; "
            f"{result.rejoined} of {result.kills + result.freezes} back in the last round; "
            f"{result.rounds_with_coordinator_vote} rounds with the coordinator's vote; "
            f"chains {'[green]equal[/]' if result.chains_equal else '[red]DIFFER[/]'}"
        )
    console.print(f"  steps             {steps}")
    console.print(
        f"  averaging         {bytes_text(result.averaging_bytes_sent)} sent, {saved:.1f}× less than fp32"
        f" ({bytes_text(result.averaging_bytes_fp32)})"
    )
    console.print(f"  other traffic     {bytes_text(result.other_bytes_sent)} sent")
    console.print(
        f"\n[bold]Sample of its text[/] [dim](a million parameters, minutes old)[/]\n[cyan]{_indent(result.sample)}[/]"
    )
    if keep:
        typer.echo(f"\nThe model: {result.checkpoint}")
        typer.echo(f"  atoll export --to my-model --checkpoint {Path(result.checkpoint).parent}")
    else:
        console.print("\nThe model: not kept; run with --keep DIR to keep it")


def _indent(text: str) -> str:
    from rich.markup import escape

    return escape("\n".join("  │ " + line for line in text.splitlines()))
