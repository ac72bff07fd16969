"""Does a swarm train as fast as the planner says? Real swarms over emulated wide-area links, predicted beside measured.

    python -m benchmarks.planner_lab
    python -m benchmarks.planner_lab --topology unequal-6 --seconds 240

Needs root. The shipped programs, each in a host of the lab, train a model that no host may hold (`memory_megabytes`,
which ends a trainer that takes more). A host computes for a share of the time (`compute_share`), so that all of them
together do not need more cores than there are. Nothing is told to the planner that nodes do not measure. It plans;
when its plan stands, drivers' tokens are counted from flush to flush. Then the same nodes are pinned to spans of equal
length, and to random ones, and measured again under these plans (routes between pinned spans are the planner's).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError
from atoll.lab.corpus import write_python_corpus
from atoll.lab.demo import RUN
from atoll.lab.launcher import LocalSwarm
from atoll.lab.wan.network import wan_network
from atoll.lab.wan.topology import SEED, Host, Topology, load_topology, parse_topology
from benchmarks.common import Report
from benchmarks.process_swarm import report_on_exit

LAYERS = 12
_SHARE = 0.1  # of a core, at full speed
_READY, _PLANNED = timedelta(seconds=240), timedelta(seconds=180)
_STANDS_SECONDS = 25.0  # in which no other plan came
_LOOK_SECONDS = 0.5
_DEALS = 40  # of spans at random, until none is refused for want of memory
_OFF = 0.15
_NOTES = (
    f"a decoder of 8.6 M parameters in {LAYERS} layers; hosts compute for {_SHARE:g} of the time at full speed; tokens "
    "of drivers, from flush to flush, beside what the coordinator predicted when it issued the plan, and what it would "
    "predict at the end, with links and speeds as they were measured by then"
)

SPEC = """version = 1
[run]
name = "{run}"
min_nodes = {nodes}
stop_tokens = 1000000000
[model]
preset = "nano"
dimension = 256
layers = 10
heads = 4
kv_heads = 4
hidden_dimension = 768
[data]
path = {corpus}
sequence_length = 128
validation_samples = 4
[optimizer]
micro_batch_samples = 1
[pipeline]
micro_batches = 8
[sync]
round_tokens = 16384
round_max_seconds = 120
codec = "int8"
outer_warmup_tokens = 1000000000
"""

UNEQUAL = (
    """description = "Two fast machines in one city, four of other speeds, memories and links in two more"
[defaults]
queue_ms = 100
[public]
region = "paris"
"""
    + "".join(
        f'[[host]]\nname = "{name}"\nregion = "{region}"\nuplink_mbit = {up}\ndownlink_mbit = {down}\nspeed = {speed}\n'
        for name, region, up, down, speed in (
            ("paris-1", "paris", 100, 100, 1.0),
            ("paris-2", "paris", 100, 100, 1.0),
            ("berlin-1", "berlin", 40, 100, 0.7),
            ("berlin-2", "berlin", 20, 100, 0.5),
            ("chicago-1", "chicago", 50, 200, 0.7),
            ("chicago-2", "chicago", 10, 100, 0.4),
        )
    )
    + "".join(
        f'[[route]]\nbetween = ["{one}", "{other}"]\nrtt_ms = {rtt}\n'
        for one, other, rtt in (
            ("paris", "paris", 5),
            ("berlin", "berlin", 10),
            ("chicago", "chicago", 10),
            ("paris", "berlin", 25),
            ("paris", "chicago", 100),
            ("berlin", "chicago", 115),
        )
    )
)


@dataclass(frozen=True)
class Setting:
    """Hosts, and what memory each lends."""

    topology: Topology
    megabytes: Mapping[str, int]


def settings() -> dict[str, Setting]:
    """By name."""
    regions = load_topology("two-regions-8")
    unequal = parse_topology(UNEQUAL, "unequal-6")
    lent = {"paris-1": 250, "paris-2": 210, "berlin-1": 250, "berlin-2": 210, "chicago-1": 210, "chicago-2": 210}
    return {
        "two-regions-8": Setting(regions, {host.name: 250 for host in regions.trainers}),
        "unequal-6": Setting(unequal, lent),
    }


async def measure(setting: Setting, seconds: float, root: Path, report: Report, others: bool) -> None:
    """One topology. Raises what the launcher raises."""
    names = [host.name for host in setting.topology.trainers]
    async with wan_network(setting.topology) as network:
        swarm = LocalSwarm(root, network)
        try:
            await begin(swarm, len(names))
            for host in setting.topology.trainers:
                await join(swarm, setting, host)
            version = await wait_for_plan(swarm, names, 0)
            version = await cell(swarm, setting, "planned", names, version, seconds, report)
            planned = await spans_of(swarm, version)
            dealt = [random_spans(planned, random.Random(seed)) for seed in range(_DEALS)]
            for name, choices in (("equal", [equal_spans(planned)]), ("random", dealt)) if others else ():
                if choices == [by_name(planned)]:
                    report.cell(topology=setting.topology.name, layout=name, routes="what was planned is equal")
                    continue
                try:
                    version = await pinned(swarm, names, choices, version)
                    version = await cell(swarm, setting, name, names, version, seconds / 2, report)
                except (AtollError, TimeoutError) as error:
                    report.cell(topology=setting.topology.name, layout=name, note=f"could not run: {error}")
        finally:
            await swarm.close()


async def begin(swarm: LocalSwarm, nodes: int) -> str:
    """The coordinator, the run (its text is returned) and the seed."""
    corpus = swarm.root / "corpus.txt"
    write_python_corpus(corpus, 1 << 20)
    text = SPEC.format(run=RUN, nodes=nodes, corpus=json.dumps(str(corpus)))
    await swarm.start_coordinator()
    await swarm.create_run(text)
    await swarm.start_member(SEED, "seed")
    await swarm.until(lambda: swarm.in_state(SEED, "ready"), "the seed did not become ready", _READY)
    return text


async def join(swarm: LocalSwarm, setting: Setting, host: Host) -> None:
    """Start that host's node, and wait until it measured its layers: one after the other, each has cores of its own."""
    share, most = f"{_SHARE * host.speed:g}", str(setting.megabytes[host.name])
    flags = ("--cpu-threads", "1", "--compute-share", share, "--memory-megabytes", most)
    await swarm.start_member(host.name, "node", *flags)
    await swarm.until(lambda: measured_itself(swarm, host.name), f"{host.name} did not measure its layers", _READY)


def measured_itself(swarm: LocalSwarm, name: str) -> bool:
    """Whether its trainer is there, which timed the layers first."""
    status = swarm.status(name)
    return status is not None and bool(status["device"])


async def cell(
    swarm: LocalSwarm, setting: Setting, layout: str, names: Sequence[str], version: int, seconds: float, report: Report
) -> int:
    """One row; returns the version of the plan at the end, whose whole time was measured."""
    while True:
        plan = (await json_of(swarm, "plan", "show"))["plan"]
        by_peer = {node["peer_id"]: node["name"] for node in (await json_of(swarm, "node", "list"))["nodes"]}
        routes = [[by_peer[peer] for peer in route["peer_ids"]] for route in plan["routes"]]
        rates = await trained(swarm, [route[0] for route in routes], seconds)
        history = (await json_of(swarm, "plan", "history"))["plans"]
        newest = history[-1] if history[-1]["version"] >= history[0]["version"] else history[0]
        later = (await json_of(swarm, "plan", "explain", "--seconds", "0.5"))["plan"]
        if newest["version"] == version and len(later["routes"]) == len(rates):
            break
        version = await wait_for_plan(swarm, names, max(version, newest["version"] - 1))
    predicted = newest["predicted_tokens_per_second"]
    rate = sum(rates) if all(rates) else 0.0
    told = {place["machine"]: place for place in later["places"]}
    report.cell(
        topology=setting.topology.name,
        layout=layout,
        routes=" ".join("+".join(map(str, route)) for route in await shape(swarm, routes)),
        predicted=predicted,
        predicted_later=later["tokens_per_second"],
        measured=rate,
        off=predicted / rate - 1 if rate else None,
        off_later=later["tokens_per_second"] / rate - 1 if rate else None,
        by_route=" | ".join(
            f"{found:.0f}, predicted later {route['tokens_per_second']:.0f}: "
            + "; ".join(f"{it} {told[it]['computing']:.0%}, {told[it]['waits_for']}" for it in route["machines"])
            for found, route in zip(rates, later["routes"], strict=True)
        ),
    )
    print(json.dumps(report.cells[-1]), flush=True)
    return version


async def shape(swarm: LocalSwarm, routes: Sequence[Sequence[str]]) -> list[list[int]]:
    """How many layers the stages of each route hold."""
    told = {name: await asyncio.to_thread(swarm.status, name) for route in routes for name in route}
    return [
        [(it["layers"][1] - it["layers"][0] + 1) if (it := told[name]) else 0 for name in route] for route in routes
    ]


async def trained(swarm: LocalSwarm, drivers: Sequence[str], seconds: float) -> list[float]:
    """Tokens per second of each of these, from one of its flushes to another; 0 of one that made none."""
    seen: dict[str, list[tuple[float, int]]] = {name: [] for name in drivers}
    ended = time.monotonic() + seconds
    while time.monotonic() < ended:
        told = await asyncio.gather(*(asyncio.to_thread(swarm.status, name) for name in drivers))
        for name, status in zip(drivers, told, strict=True):
            tokens = status["tokens"] if status else 0
            if not seen[name] or tokens > seen[name][-1][1]:
                seen[name].append((time.monotonic(), tokens))
        await asyncio.sleep(_LOOK_SECONDS)
    rates = []
    for found in (moments[1:] for moments in seen.values()):
        if len(found) < 3:
            rates.append(0.0)
            continue
        (began, first), (last_time, last) = found[0], found[-1]
        rates.append((last - first) / (last_time - began))
    return rates


async def wait_for_plan(swarm: LocalSwarm, names: Sequence[str], above: int) -> int:
    """Wait until a plan later than that stands and its routes work; its version."""
    deadline = time.monotonic() + _PLANNED.total_seconds() + _READY.total_seconds()
    since, version = time.monotonic(), above
    while time.monotonic() < deadline:
        swarm.check()
        told = [status for name in names if (status := await asyncio.to_thread(swarm.status, name))]
        newest = max((status["plan_version"] for status in told), default=0)
        staged = [status for status in told if status["stage"] is not None]
        if newest != version or not staged or not all(status["route_ready"] for status in staged):
            since, version = time.monotonic(), newest
        elif version > above and time.monotonic() - since >= _STANDS_SECONDS:
            return version
        await asyncio.sleep(1.0)
    raise TimeoutError("no plan came to stand")


async def spans_of(swarm: LocalSwarm, version: int) -> list[list[tuple[str, int, int]]]:
    """The routes of a plan: nodes with their layers."""
    view = await json_of(swarm, "plan", "show", "--version", str(version))
    names = {node["peer_id"]: node["name"] for node in view["nodes"]}
    spans = {it["peer_id"]: (it["span"]["first"], it["span"]["last"]) for it in view["plan"]["assignments"]}
    return [[(names[peer], *spans[peer]) for peer in route["peer_ids"]] for route in view["plan"]["routes"]]


def equal_spans(routes: Sequence[Sequence[tuple[str, int, int]]]) -> dict[str, tuple[int, int]]:
    """The same routes, cut into spans as equal as can be."""
    found: dict[str, tuple[int, int]] = {}
    for route in routes:
        ends = [LAYERS * place // len(route) for place in range(len(route) + 1)]
        found |= {name: (ends[place], ends[place + 1] - 1) for place, (name, _, _) in enumerate(route)}
    return found


def by_name(routes: Sequence[Sequence[tuple[str, int, int]]]) -> dict[str, tuple[int, int]]:
    """The same spans, by node."""
    return {name: (first, last) for route in routes for name, first, last in route}


def random_spans(routes: Sequence[Sequence[tuple[str, int, int]]], rng: random.Random) -> dict[str, tuple[int, int]]:
    """The same nodes in routes of as many, drawn and cut at random; no span is longer than planned or an equal part."""
    planned = {name: last - first + 1 for route in routes for name, first, last in route}
    while True:
        names, found = rng.sample(list(planned), len(planned)), dict[str, tuple[int, int]]()
        for route in routes:
            ends = [0, *sorted(rng.sample(range(1, LAYERS), len(route) - 1)), LAYERS]
            found |= {names.pop(): (before, after - 1) for before, after in pairwise(ends)}
        part = max(-(-LAYERS // len(route)) for route in routes)
        if all(last - first < max(planned[name], part) for name, (first, last) in found.items()):
            return found


async def pinned(
    swarm: LocalSwarm, names: Sequence[str], choices: Sequence[Mapping[str, tuple[int, int]]], above: int
) -> int:
    """Pin all of them to the first of these that fits, and wait for the plan. Raises what refuses the last."""
    for place, spans in enumerate(choices):
        for name in names:
            await swarm.ctl("plan", "unpin", name)
        try:
            for name in names:
                how = ("--layers", f"{spans[name][0]}-{spans[name][1]}") if name in spans else ("--out",)
                await swarm.ctl("plan", "pin", name, *how)
            break
        except AtollError:
            if place == len(choices) - 1:
                raise
    await swarm.ctl("plan", "apply")
    return await wait_for_plan(swarm, names, above)


async def json_of(swarm: LocalSwarm, *words: str) -> dict[str, Any]:
    """What an `atollctl … --output json` prints."""
    found: dict[str, Any] = json.loads(await swarm.ctl(*words, "--output", "json"))
    return found


def judge(report: Report) -> None:
    """The acceptance rows."""
    for found in report.cells:
        if found.get("layout") == "planned":
            report.accept(
                f"predicted of measured, {found['topology']}",
                target=f"within {_OFF:.0%}",
                value=f"{found['off']:+.1%}" if found["off"] is not None else "nothing trained",
                holds=found["off"] is not None and abs(found["off"]) <= _OFF,
            )


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = settings()
    parser.add_argument("--topology", nargs="+", choices=tuple(known), default=list(known))
    parser.add_argument("--seconds", type=float, default=180.0, help="to measure the planner's plan; half for others")
    parser.add_argument("--planned-only", action="store_true", help="without spans of equal length and random ones")
    parser.add_argument("--name", default="planner_lab", help="of the result's file")
    chosen = parser.parse_args()
    report = Report(chosen.name)
    with report_on_exit(report, _NOTES):
        for name in chosen.topology:
            with tempfile.TemporaryDirectory(prefix="atoll-") as scratch:
                asyncio.run(measure(known[name], chosen.seconds, Path(scratch), report, not chosen.planned_only))
        judge(report)


if __name__ == "__main__":
    main()
