"""`atoll demo`: a whole swarm on this machine, in about three minutes."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.core.errors import AtollError, UsageError
from atoll.core.files import make_private_dir
from atoll.core.output import Output, OutputOption, print_json, print_to_stderr
from atoll.core.units import bytes_text, count_text

if TYPE_CHECKING:
    from atoll.lab.demo import DemoResult
    from atoll.lab.demo_pipeline import PipelineResult

_NOT_OF_PIPELINES = ("nodes", "codec", "inner_steps", "kill", "together", "freeze", "kill_coordinator")
DEFAULT_TOKENS = 340_000  # about 480 steps of a full-speed node among four


def demo(
    context: typer.Context,
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=16, help="How many nodes train.")] = 4,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", min=1, help="Committed tokens after which it stops; default: 340000, with --pipeline 120000."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of initialisation and data order.")] = 0,
    data: Annotated[Path | None, typer.Option("--data", help="Your own text: a file or a directory.")] = None,
    codec: Annotated[str, typer.Option("--codec", help="fp32, bf16, fp16, int8, int4, int2, or auto.")] = "int4",
    inner_steps: Annotated[
        int, typer.Option("--inner-steps", min=1, help="Steps of a full-speed node between rounds.")
    ] = 20,
    kill: Annotated[int, typer.Option("--kill", min=0, help="Kill that many nodes while they train (SIGKILL).")] = 0,
    together: Annotated[bool, typer.Option("--together", help="Kill them all at one moment.")] = False,
    freeze: Annotated[int, typer.Option("--freeze", min=0, help="Freeze that many for 20 s (SIGSTOP).")] = 0,
    kill_coordinator: Annotated[
        bool, typer.Option("--kill-coordinator", help="Kill the coordinator, too; with --together at that moment.")
    ] = False,
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="A model that no node can hold: five nodes, two routes, a killed stage.")
    ] = False,
    keep: Annotated[Path | None, typer.Option("--keep", help="Keep logs, state and the model here.")] = None,
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, help="Give up after that long.")] = 15.0,
    output: OutputOption = Output.TEXT,
) -> None:
    """Start a coordinator, a seed and four nodes on loopback and train a language model on real text.

    Without --data the text is the Python standard library. Two of the nodes are slowed to half and a quarter
    of the pace; the others find that out by measurement. What is killed or frozen comes back; the model must not
    notice. With --pipeline it is five nodes of limited memory, none of which can hold the model.
    """
    import asyncio

    from atoll.core.run_spec import check_codec
    from atoll.lab.demo import SLOWDOWNS, DemoOptions, run_demo
    from atoll.lab.demo_view import live_view
    from atoll.lab.faults import TroublePlan

    if pipeline:
        _check_given(context)
        _pipeline(tokens, seed, data, timedelta(minutes=minutes), keep, output)
        return
    check_codec(codec)
    slowdowns = tuple(float(SLOWDOWNS[i % len(SLOWDOWNS)]) for i in range(nodes))
    trouble = TroublePlan(kill, together, freeze, kill_coordinator)
    options = DemoOptions(
        nodes, tokens or DEFAULT_TOKENS, seed, data, codec, slowdowns, inner_steps, timedelta(minutes=minutes), trouble
    )
    if kill + freeze > nodes:
        raise UsageError(f"{kill} nodes to kill and {freeze} to freeze are more than {nodes}", "start more --nodes")
    with _place(keep) as root, live_view(quiet=output is Output.JSON and not sys.stderr.isatty()) as show:
        result = asyncio.run(run_demo(options, root, show))
    if output is Output.JSON:
        print_json({"demo": result.to_json()})
    else:
        _tell(result, keep)


def _check_given(context: typer.Context) -> None:
    """Raise `UsageError` for what `--pipeline` would leave unheard."""
    sources = {name: context.get_parameter_source(name) for name in _NOT_OF_PIPELINES}
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    if given:
        words = ", ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(f"--pipeline does not go with {words}", "it has five nodes of its own, and kills one of them")


def _pipeline(
    tokens: int | None, seed: int, data: Path | None, timeout: timedelta, keep: Path | None, output: Output
) -> None:
    import asyncio

    from atoll.lab.demo_pipeline import TOKENS, PipelineOptions, run_pipeline_demo
    from atoll.lab.demo_view import live_view

    options = PipelineOptions(tokens or TOKENS, seed, data, timeout)
    with _place(keep) as root, live_view(quiet=output is Output.JSON and not sys.stderr.isatty()) as show:
        result = asyncio.run(run_pipeline_demo(options, root, show))
    if output is Output.JSON:
        print_json({"demo": result.to_json()})
    else:
        _tell_pipeline(result, keep)


@contextmanager
def _place(keep: Path | None) -> Iterator[Path]:
    """Where the demo's programs live: removed afterwards, unless it is to be kept; of a failure the logs stay."""
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UsageError(f"{keep} is not empty", "name a new directory with --keep")
    root = make_private_dir(keep.resolve()) if keep else Path(tempfile.mkdtemp(prefix="atoll-demo-"))
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


def _tell_pipeline(it: PipelineResult, keep: Path | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    equal = "[green]equal bit for bit[/]" if it.layers_equal and it.chains_equal else "[red]DIFFER[/]"
    console.print(f"\n[bold]{it.nodes} nodes trained {count_text(it.tokens)} tokens in {it.seconds:.0f} s[/]")
    console.print(f"  validation loss   {it.val_loss_first:.3f} → [bold]{it.val_loss_last:.3f}[/] nats/byte")
    console.print(
        f"  memory            training the model takes {bytes_text(it.training_state_bytes)}, "
        f"the largest node has {bytes_text(it.largest_node_cap_bytes)}"
    )
    for number, route in enumerate(it.routes, 1):
        stages = " → ".join(f"{stage['name']} ({stage['first_layer']}–{stage['last_layer']})" for stage in route)
        console.print(f"  route {number}           {stages}")
    console.print(f"  layers            {equal} on all that hold them, after {it.rounds_committed} rounds")
    console.print(
        f"  trouble           {it.kills} stage killed; {it.flushes_aborted} flushes aborted, "
        f"{it.micro_batches_counted_twice} samples counted twice"
    )
    console.print(f"\nThe model: {it.export if keep else 'nowhere: run with --keep DIR to keep it'}")


def _keep_logs(root: Path, kept: Path) -> None:
    for log in [*root.glob("*/log"), *root.glob("*/runs/*/trainer.log")]:
        shutil.copy(log, kept / "-".join(log.relative_to(root).parts))


def _tell(it: DemoResult, keep: Path | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    saved = it.averaging_bytes_fp32 / max(1, it.averaging_bytes_sent)
    steps = ", ".join(f"{name} {count}" for name, count in it.steps_per_node.items())
    equal = "[green]equal bit for bit[/]" if it.anchors_equal else "[red]DIFFER[/]"
    console.print(f"\n[bold]{it.nodes} nodes trained {count_text(it.tokens)} tokens in {it.seconds:.0f} s[/]")
    console.print(f"  validation loss   {it.val_loss_first:.3f} → [bold]{it.val_loss_last:.3f}[/] nats/byte")
    console.print(f"  rounds            {it.rounds_committed} committed of {it.rounds_opened} opened")
    console.print(f"  anchors           {equal} on all nodes ({next(iter(it.anchor_digests.values()))[:16]}…)")
    if it.kills or it.freezes or it.coordinator_restarts:
        console.print(
            f"  trouble           {it.kills} killed, {it.freezes} frozen, coordinator restarted "
            f"{it.coordinator_restarts}×; {it.rejoined} of {it.kills + it.freezes} back in the last round; "
            f"{it.rounds_tie_broken} ties broken; chains {'[green]equal[/]' if it.chains_equal else '[red]DIFFER[/]'}"
        )
    console.print(f"  steps             {steps}")
    console.print(
        f"  averaging         {bytes_text(it.averaging_bytes_sent)} sent, {saved:.1f}× less than fp32"
        f" ({bytes_text(it.averaging_bytes_fp32)}); everything else {bytes_text(it.other_bytes_sent)}"
    )
    console.print(
        f"\n[bold]What it writes[/] [dim](a million parameters, minutes old)[/]\n[cyan]{_indent(it.sample)}[/]"
    )
    where = it.checkpoint if keep else "nowhere: run with --keep DIR to keep it"
    console.print(f"\nThe model: {where}")


def _indent(text: str) -> str:
    from rich.markup import escape

    return escape("\n".join("  │ " + line for line in text.splitlines()))
