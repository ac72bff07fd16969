"""The pipeline demo: five nodes with limited memory, in a route of two and one of three stages, train a larger model.

No node can hold the model. Without pins, the planner would choose spans by memory and measured speed, and on one
machine it would find that a second route costs more in rounds than it gains. So the demo pins the nodes to two routes
with different spans; each layer is averaged among its holders. The demo kills a stage while it trains and starts it
again. At the end it pulls checkpoints that have all layers, from as few nodes as possible, and exports the model from
them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from atoll.core.errors import first_error
from atoll.core.manifest import Head, changed_layers
from atoll.lab import demo, demo_watch
from atoll.lab.demo import RUN
from atoll.lab.demo_watch import DemoView
from atoll.lab.faults import RESTART_DELAY_SECONDS, kill
from atoll.lab.launcher import LocalSwarm
from atoll.node.control.local_client import call

MEMORY_MEGABYTES = {"node-1": 145, "node-2": 145, "node-3": 110, "node-4": 110, "node-5": 110}
SPANS = {"node-1": "0-3", "node-2": "4-7", "node-3": "0-2", "node-4": "3-4", "node-5": "5-7"}
TOKENS = 120_000
SEQUENCE_LENGTH = 128
# 4-byte values: weights, gradients, two AdamW moments, anchor, snapshot, and in memory shared with the daemon anchor,
# momentum and pseudo-gradient
STATE_BYTES_PER_PARAMETER = 4 * 9
_KILL_AT = 0.35  # fraction of the run's tokens
_ENROL_TIMEOUT = timedelta(seconds=90)
_CHECKPOINT_TIMEOUT = timedelta(seconds=60)

SPEC = """\
version = 1

[run]
name = "{name}"
seed = {seed}
min_nodes = 5
stop_tokens = {tokens}

[model]
preset = "nano"
dimension = 256
layers = 6
heads = 4
kv_heads = 4
hidden_dimension = 768

[data]
path = {corpus}
sequence_length = {sequence_length}
validation_samples = 16

[optimizer]
warmup_tokens = {warmup}
micro_batch_samples = 1
accumulate = 4

[sync]
round_tokens = 16384
round_max_seconds = 120
codec = "int8"
part_elements = 131072
"""


@dataclass(frozen=True)
class PipelineOptions:
    """Options of `atoll demo --pipeline`."""

    tokens: int
    seed: int
    data: Path | None
    timeout: timedelta


@dataclass(frozen=True)
class PipelineResult:
    """Result of a pipeline demo. docs/ describes the JSON form."""

    nodes: int
    routes: list[list[dict[str, Any]]]  # in the last plan; each stage has name, first_layer, last_layer
    largest_node_cap_bytes: int
    training_state_bytes: int  # of the whole model
    rounds_opened: int
    rounds_committed: int
    tokens: int
    steps_per_node: dict[str, int]
    val_loss_first: float
    val_loss_last: float
    layers_equal: bool  # all holders of a layer hold the same bits at the end
    chains_equal: bool
    kills: int
    flushes_aborted: int
    micro_batches_counted_twice: int
    export: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Convert to the object that `atoll demo --pipeline --output json` prints."""
        return asdict(self)


async def run_pipeline_demo(options: PipelineOptions, root: Path, show: Callable[[DemoView], None]) -> PipelineResult:
    """Run the demo below `root` and end all its processes. Raises `ChildDied`, `DeadlineExceeded`."""
    swarm = LocalSwarm(root)
    view = DemoView(title="atoll demo --pipeline", started=time.monotonic(), stop_tokens=options.tokens)
    flags = {name: ("--memory-megabytes", str(most)) for name, most in MEMORY_MEGABYTES.items()}
    aborted: dict[str, int] = {}
    try:
        await demo_watch.start(swarm, _spec(options, root), flags, view, show)
        for name, span in SPANS.items():
            await _pin(swarm, name, span)
        async with asyncio.TaskGroup() as tasks:
            killing = tasks.create_task(_kill_a_stage(swarm, view))
            tasks.create_task(_count_aborted(view, aborted, killing))
            watching = demo_watch.watch(swarm, options.timeout, list(flags), view, show, killing)
            await tasks.create_task(watching)
        view.phase = "collecting"
        show(view)
        return await _collect(swarm, view, sum(aborted.values()))
    except ExceptionGroup as group:
        raise first_error(group) from group
    finally:
        await swarm.close()


def _spec(options: PipelineOptions, root: Path) -> str:
    return SPEC.format(
        name=RUN,
        seed=options.seed,
        tokens=options.tokens,
        corpus=json.dumps(str(demo.corpus_of(options.data, root))),
        sequence_length=SEQUENCE_LENGTH,
        warmup=options.tokens // 20,
    )


async def _pin(swarm: LocalSwarm, name: str, span: str) -> None:
    async with asyncio.timeout(_ENROL_TIMEOUT.total_seconds()):
        while name not in await swarm.ctl("node", "list"):  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.2)
    await swarm.ctl("plan", "pin", name, "--layers", span)


async def _kill_a_stage(swarm: LocalSwarm, view: DemoView) -> None:
    """Kill the last stage of the longest route, and start it again after a delay as its owner would."""
    while demo_watch.fraction_done(view) < _KILL_AT:  # noqa: ASYNC110 - polls the view
        await asyncio.sleep(0.2)
    routes = await _routes(swarm)
    victim = max(routes, key=len)[-1]["name"]
    view.faults.append(f"kill {victim} at {demo_watch.fraction_done(view):.0%}")
    await kill(swarm, victim)
    await asyncio.sleep(RESTART_DELAY_SECONDS)
    await swarm.restart_member(victim)
    view.faults.append(f"restart {victim}")


async def _count_aborted(view: DemoView, aborted: dict[str, int], killing: asyncio.Task[None]) -> None:
    """Record the highest count of every driver: a driver's own count restarts with its trainer."""
    while not (killing.done() and all(node.get("state") == "finished" for node in view.nodes.values())):
        for name, node in view.nodes.items():
            aborted[name] = max(aborted.get(name, 0), node.get("flushes_aborted", 0))
        await asyncio.sleep(0.5)


async def _routes(swarm: LocalSwarm) -> list[list[dict[str, Any]]]:
    routes: dict[int, list[dict[str, Any]]] = {}
    for node in (await swarm.ctl_json("plan", "show"))["nodes"]:  # ordered by route and stage
        stage = {"name": node["name"], "first_layer": node["span"]["first"], "last_layer": node["span"]["last"]}
        routes.setdefault(node["route"], []).append(stage)
    return list(routes.values())


async def _collect(swarm: LocalSwarm, view: DemoView, flushes_aborted: int) -> PipelineResult:
    run = (await swarm.ctl_json("run", "show", RUN))["run"]
    losses = sorted((item["round"], item["loss"]) for item in run["evaluations"])
    statuses = {name: call(swarm.programs[name].directory, "status") for name in MEMORY_MEGABYTES}
    chains = [demo.chain_of(swarm.root / name / "runs" / RUN / "manifests") for name in MEMORY_MEGABYTES]
    known = {number: head for chain in chains for number, head in chain.items()}
    routes = await _routes(swarm)
    spans = {name: Path(status["anchor"]).parent for name, status in statuses.items()}
    exported = swarm.root / "model"
    pulled = await _pull(swarm, run["head_round"], len(run["layers"]["layers"]))
    await swarm.command("atoll", "export", "--checkpoint", str(pulled), "--to", str(exported))
    return PipelineResult(
        nodes=len(MEMORY_MEGABYTES),
        routes=routes,
        largest_node_cap_bytes=int(max(MEMORY_MEGABYTES.values()) * 1e6),
        training_state_bytes=STATE_BYTES_PER_PARAMETER * sum(int(row["parameters"]) for row in run["layers"]["layers"]),
        rounds_opened=run["rounds_opened"],
        rounds_committed=run["rounds_committed"],
        tokens=run["committed_tokens"],
        steps_per_node={name: status["steps"] for name, status in statuses.items()},
        val_loss_first=losses[0][1],
        val_loss_last=losses[-1][1],
        layers_equal=await asyncio.to_thread(_layers_equal, spans),
        chains_equal=demo.chains_agree(chains),
        kills=1,
        flushes_aborted=flushes_aborted,
        micro_batches_counted_twice=counted_twice(known),
        export=str(exported),
        seconds=round(time.monotonic() - view.started, 1),
    )


async def _pull(swarm: LocalSwarm, round_number: int, layers: int) -> Path:
    """Pull the checkpoints of a round as soon as the coordinator lists all layers. Return their directory."""

    async def listed_layers() -> set[int]:
        listed = (await swarm.ctl_json("checkpoint", "list"))["checkpoints"]
        held = [item["checkpoint"] for item in listed if item["committed"] and item["connected"]]
        spans = [item["layers"] for item in held if item["round"] == round_number]
        return {layer for span in spans for layer in range(span["first"], span["last"] + 1)}

    async with asyncio.timeout(_CHECKPOINT_TIMEOUT.total_seconds()):
        while len(await listed_layers()) < layers:  # noqa: ASYNC110 - other processes change it
            await asyncio.sleep(0.5)
    target = swarm.root / "pulled"
    await swarm.ctl("checkpoint", "pull", "--round", str(round_number), "--to", str(target))
    return target


def counted_twice(history: Mapping[int, Head]) -> int:
    """Return, by the manifests, how many samples in the first layers' sums no driver consumed."""
    tokens: dict[str, int] = {}
    samples: dict[str, int] = {}
    for head in history.values():
        for item in head.manifest.contributions:
            if changed_layers(head.manifest).start == 0:
                tokens[item.peer_id] = tokens.get(item.peer_id, 0) + item.weight
            samples[item.peer_id] = samples.get(item.peer_id, 0) + item.samples
    return sum(max(0, tokens[peer] // SEQUENCE_LENGTH - samples.get(peer, 0)) for peer in tokens)


def _layers_equal(checkpoints: Mapping[str, Path]) -> bool:
    """Return whether all checkpoints are of one round and all holders of a layer have the same bits."""
    from atoll.node.state.checkpoint import read_checkpoint  # imports torch, which takes seconds

    found: dict[int, set[bytes]] = {}
    heads = set()
    for path in checkpoints.values():
        held = read_checkpoint(path)
        heads.add(held.head.hash)
        for place, layer in enumerate(range(held.layers.numbers.start, held.layers.numbers.stop)):
            start, end = held.layers.offsets[place : place + 2]
            values = held.anchor_E[start:end].numpy().tobytes() + held.momentum_E[start:end].numpy().tobytes()
            found.setdefault(layer, set()).add(values)
    return len(heads) == 1 and all(len(values) == 1 for values in found.values())
