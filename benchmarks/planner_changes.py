"""How soon does a new plan stand when nodes come and go? A real swarm over an emulated wide-area network.

    python -m benchmarks.planner_changes

Needs root. All hosts of the lab's `two-regions-8` but one train a model that none of them can hold (`planner_lab`).
Then the last one joins, a stage of a route is drained, and a stage is killed for good. After each: the seconds
until the coordinator issues a plan that has taken it in, until every node that lives follows it, and until a round is
committed under it; and how many rounds were still committed under the plans before. A round is under way when something
happens, and may be finished under the old plan: one is what nobody can avoid.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.run_spec import parse_run_spec
from atoll.lab.faults import kill
from atoll.lab.launcher import LocalSwarm
from atoll.lab.wan.network import wan_network
from benchmarks.common import Report
from benchmarks.planner_lab import Setting, begin, join, json_of, settings, wait_for_plan
from benchmarks.process_swarm import LabSwarm, report_on_exit

TOPOLOGY = "two-regions-8"
_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 400.0
_MOST_ROUNDS = 1
_NOTES = (
    f"`{TOPOLOGY}`, the model and the limits of `planner_lab`; rounds_before: committed under older plans after the "
    "event; seconds since the event: a joiner's is when it had measured its layers, a drained node's is the operator's "
    "command, a killed node's is SIGKILL (the coordinator misses it after 20 s)"
)


@dataclass(frozen=True)
class Event:
    """Something that a plan has to take in."""

    kind: str
    name: str  # of the node
    joins: bool = False

    def included_in(self, placed: Sequence[str]) -> bool:
        """By a plan in which these have a place."""
        return (self.name in placed) == self.joins


async def measure(setting: Setting, root: Path, report: Report) -> None:
    """All events, one after the other. Raises what the launcher raises."""
    *first, last = setting.topology.trainers
    async with wan_network(setting.topology) as network:
        local = LocalSwarm(root, network)
        try:
            text = await begin(local, len(first))
            for host in first:
                await join(local, setting, host)
            swarm = LabSwarm(local, [host.name for host in first], parse_run_spec(text))
            await wait_until_training(swarm, 0)
            event = Event("joins", last.name, joins=True)
            await join(local, setting, last)
            swarm.names.append(last.name)
            version = await measure_event(swarm, event, report, nothing)
            await wait_until_training(swarm, version - 1)
            event = Event("is drained", (await stages(swarm))[-1])
            version = await measure_event(swarm, event, report, lambda: local.ctl("node", "drain", event.name))
            await wait_until_drained(local, event.name)
            await wait_until_training(swarm, version - 1)
            gone = Event("is killed", (await stages(swarm))[-1])
            await measure_event(swarm, gone, report, lambda: kill(local, gone.name))
        finally:
            await local.close()


async def wait_until_drained(local: LocalSwarm, name: str) -> None:
    """Wait until a drained node's program has ended by itself."""
    program = local.programs[name]
    async with asyncio.timeout(_PATIENCE_SECONDS):
        await program.child.wait()
    del local.programs[name]


async def nothing() -> None:
    """What needs no doing."""


async def wait_until_training(swarm: LabSwarm, above: int) -> None:
    """Wait until a plan later than that stands and two more rounds are committed."""
    await wait_for_plan(swarm.local, swarm.names, above)
    before = swarm.newest()
    await swarm.until(lambda: swarm.newest() >= before + 2, "the routes do not train")


async def stages(swarm: LabSwarm) -> list[str]:
    """Who has a place on a route, in its order."""
    plan = await newest_plan(swarm)
    named = await names_of(swarm)
    return [named[peer] for route in plan["routes"] for peer in route["peer_ids"]]


async def measure_event(swarm: LabSwarm, event: Event, report: Report, act: Callable[[], Awaitable[Any]]) -> int:
    """One row; the version of the plan that has taken it in."""
    began, old = time.time(), (await newest_plan(swarm))["version"]
    await act()
    if not event.joins:
        swarm.names.remove(event.name)
    deadline = began + _PATIENCE_SECONDS
    issued = followed = committed = 0.0
    version = 0
    while not committed and time.time() < deadline:
        plan = await newest_plan(swarm)
        if not version and event.included_in(await placed(swarm, plan)):
            version, issued = plan["version"], time.time() - began
        if version and not followed and await follow(swarm, version):
            followed = time.time() - began
        committed = first_under(swarm, version, began) if version else 0.0
        await asyncio.sleep(_LOOK_SECONDS)
    chain = swarm.first_commits().values()
    before = [it for it in chain if it.when > began and not 0 < version <= it.head.manifest.round.plan_version]
    report.cell(
        event=f"{event.name} {event.kind}",
        plan=f"{old} → {version}" if version else "none",
        issued_s=issued or None,
        followed_s=followed or None,
        committed_s=committed or None,
        rounds_before=len(before),
        round_s=usual_round_seconds(swarm, began),
    )
    print(json.dumps(report.cells[-1]), flush=True)
    return version


async def follow(swarm: LabSwarm, version: int) -> bool:
    """Whether all nodes that live follow that plan, or a later one."""
    told = await asyncio.gather(*(asyncio.to_thread(swarm.local.status, name) for name in swarm.names))
    return all(status is not None and status["plan_version"] >= version for status in told)


def first_under(swarm: LabSwarm, version: int, began: float) -> float:
    """Seconds until the first round was committed under that plan or a later one; 0 while none was."""
    found = [it.when for it in swarm.first_commits().values() if it.head.manifest.round.plan_version >= version]
    return max(min(found) - began, 0.0) if found else 0.0


def usual_round_seconds(swarm: LabSwarm, began: float) -> float:
    """Between the last two rounds before that moment."""
    *_, one, other = sorted(it.when for it in swarm.first_commits().values() if it.when <= began)
    return other - one


async def newest_plan(swarm: LabSwarm) -> dict[str, Any]:
    """As the coordinator has it."""
    plan: dict[str, Any] = (await json_of(swarm.local, "plan", "show"))["plan"]
    return plan


async def placed(swarm: LabSwarm, plan: dict[str, Any]) -> list[str]:
    """Names of those who hold layers under a plan, on a route or standing by."""
    named = await names_of(swarm)
    return [named[it["peer_id"]] for it in plan["assignments"]]


async def names_of(swarm: LabSwarm) -> dict[str, str]:
    """By peer id."""
    return {node["peer_id"]: node["name"] for node in (await json_of(swarm.local, "node", "list"))["nodes"]}


def judge(report: Report) -> None:
    """The acceptance rows."""
    for cell in report.cells:
        report.accept(
            f"rounds under older plans after {cell['event']}",
            target=f"≤ {_MOST_ROUNDS}",
            value=cell["rounds_before"] if cell["committed_s"] else "no plan took it in",
            holds=cell["committed_s"] is not None and cell["rounds_before"] <= _MOST_ROUNDS,
        )


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="planner_changes", help="of the result's file")
    chosen = parser.parse_args()
    report = Report(chosen.name)
    with report_on_exit(report, _NOTES), tempfile.TemporaryDirectory(prefix="atoll-") as scratch:
        asyncio.run(measure(settings()[TOPOLOGY], Path(scratch), report))
        judge(report)


if __name__ == "__main__":
    main()
