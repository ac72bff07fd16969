"""Joining over wide-area links: 100 Mbit/s and 80 ms between any two, 40 and 400 MB of state, 1 to 7 donors.

The yardstick is the time that the state's bytes take on the newcomer's downlink, at the goodput of one raw TCP
connection from a donor, measured in the same lab before each cell.

`catch-up` is the fetch alone, of donors that do nothing else: from no connection to anybody to every byte verified.
`whole way` is the shipped programs, while donors train: from the start of `atoll join` to the commit of the first round
that gives the newcomer weight. What of that is beyond 1.3 times the yardstick is told in rounds, as long as they were
before it came; programs that load are in it. Needs root.

    python -m benchmarks.join_wan
    python -m benchmarks.join_wan --kind catch-up --megabytes 40 --donors 1 4 --path direct
    python -m benchmarks.join_wan --kind whole-way --megabytes 400 --nodes 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError
from atoll.core.files import make_private_dir
from atoll.core.identity import Identity
from atoll.lab.wan import probe
from atoll.lab.wan.namespaces import COMMAND_TIMEOUT
from atoll.lab.wan.network import WanNetwork, wan_network
from atoll.node.system import child_processes
from benchmarks.allreduce import Setting
from benchmarks.common import Report
from benchmarks.join_state import commit, make_state, write_head
from benchmarks.join_wan_swarm import SIZES, Size, time_join
from benchmarks.lab_members import JOIN_SECONDS, Member, ask_all, members

SETTING = Setting("100 Mbit/s × 80 ms", (100.0,) * 8, 80.0)
MOST_DONORS = len(SETTING.mbit) - 1
TIMES, ROUNDS = 1.3, 3
_FIGURES = ("least_s", "fetch_s", "times", "worst", "start_s", "total_s", "round_s", "beyond", "note")
_COLUMNS = ("kind", "mb", "donors", "path", *_FIGURES)
_PROBE = [sys.executable, "-I", "-S", str(Path(probe.__file__))]
_PROBE_PORT = 5000
_SLOWEST = 0.1  # of the link: a fetch that takes longer is given up


async def downlink(network: WanNetwork) -> float:
    """Bytes per second of one raw TCP connection from the first donor to the newcomer, after slow start."""
    hosts = [host.name for host in network.topology.trainers]
    donor, newcomer = hosts[0], hosts[-1]
    pipe = asyncio.subprocess.PIPE
    server = await network.exec(donor, [*_PROBE, "serve", str(_PROBE_PORT)], stdout=pipe)
    try:
        assert server.stdout is not None
        await server.stdout.readline()
        request = {"address": network.address(donor), "port": _PROBE_PORT}
        request |= {"task": "download", "warm_up": 2.0, "seconds": 8.0}
        asking = await network.exec(newcomer, [*_PROBE, "ask", json.dumps(request)], stdout=pipe)
        async with asyncio.timeout(30):
            printed, _ = await asking.communicate()
        return float(json.loads(printed)["mbit"]) * 1e6 / 8
    finally:
        await child_processes.stop(server, COMMAND_TIMEOUT)


def prepare(directory: Path, megabytes: float) -> None:
    """What donors serve: anchor and momentum of `megabytes` together, voted for by all of them."""
    make_private_dir(directory)
    state = make_state(directory / "state", int(megabytes * 1e6 / 8), 1)
    voters = [Identity.load_or_create(directory / f"member-{index}.key") for index in range(MOST_DONORS)]
    genesis = commit(state, 0, b"", [])
    write_head(directory / "genesis.manifest", genesis)
    write_head(directory / "head.manifest", commit(state, 1, genesis.hash, voters))


async def catch_up(joined: Sequence[Member], donors: int, direct: bool, seconds: float) -> dict[str, Any]:
    """One newcomer, from no connection to the whole state. Raises as `Member.ask`."""
    newcomer = joined[-1]
    contact = (await newcomer.ask({"arrive": direct}, JOIN_SECONDS))["contact"]
    greeting = asyncio.create_task(ask_all(joined[:donors], {"greet": contact}, JOIN_SECONDS))
    try:
        return await newcomer.ask({"fetch": list(range(donors))}, seconds)
    finally:
        await greeting


async def fetch_cell(
    network: WanNetwork, joined: Sequence[Member], megabytes: float, donors: int, path: str, times: int
) -> dict[str, Any]:
    """The figures of one fetch, medians; one that does not run is told with its reason."""
    least = megabytes * 1e6 / await downlink(network)
    try:
        joins = [await catch_up(joined, donors, path == "direct", least / _SLOWEST) for _ in range(times)]
    except (RuntimeError, TimeoutError) as error:
        return {"least_s": least, "note": _could_not(error)}
    seconds = [it["seconds"] for it in joins]
    told = "" if path == "libp2p" else f"{min(it['direct'] for it in joins)} of {donors} direct"
    return {
        "least_s": least,
        "fetch_s": statistics.median(seconds),
        "times": statistics.median(seconds) / least,
        "worst": max(seconds) / least,
        "note": told,
    }


async def join_cell(network: WanNetwork, place: Path, size: Size, donors: int) -> dict[str, Any]:
    """The figures of one newcomer; one that does not get there is told with its reason."""
    rate = await downlink(network)
    try:
        way = await time_join(network, place, size, donors, size.megabytes * 1e6 / rate)
    except (AtollError, TimeoutError) as error:
        return {"note": _could_not(error)}
    least = way.state_bytes / rate
    return {
        "least_s": least,
        "fetch_s": way.fetch_seconds,
        "times": way.fetch_seconds / least,
        "start_s": way.start_seconds,
        "total_s": way.total_seconds,
        "round_s": way.round_seconds,
        "beyond": (way.total_seconds - TIMES * least) / way.round_seconds,
        "note": f"{way.restarts} × the head moved on; {way.rounds} rounds from the state to the first that counts",
    }


async def run(chosen: argparse.Namespace, report: Report) -> None:
    """All cells that were asked for."""
    sizes = [size for size in SIZES if size.megabytes in chosen.megabytes]
    async with wan_network(SETTING.topology()) as network:
        for size in sizes if "catch-up" in chosen.kind else ():
            with tempfile.TemporaryDirectory(prefix="atoll-") as place:
                directory = Path(place) / "join"
                await asyncio.to_thread(prepare, directory, size.megabytes)
                async with members(network, "benchmarks.join_wan_member", "join", directory) as joined:
                    for donors, path in product(chosen.donors, chosen.path):
                        it = await fetch_cell(network, joined, size.megabytes, donors, path, chosen.repetitions)
                        _tell(report, kind="catch-up", mb=size.megabytes, donors=donors, path=path, **it)
        for size, donors in product(sizes, chosen.nodes if "whole-way" in chosen.kind else ()):
            with tempfile.TemporaryDirectory(prefix="atoll-") as place:
                it = await join_cell(network, Path(place), size, donors)
                _tell(report, kind="whole way", mb=size.megabytes, donors=donors, path="as it comes", **it)


def _tell(report: Report, **values: Any) -> None:
    report.cell(**{column: values.get(column) for column in _COLUMNS})
    print(json.dumps(report.cells[-1]), flush=True)


def _could_not(error: Exception) -> str:
    return f"could not run: {str(error) or type(error).__name__}"[:90]


def judge(report: Report) -> None:
    """The issue's acceptance, for the ways that were gone; a fetch alone is held to the same share of the link."""
    for cell in report.cells:
        if cell["kind"] == "catch-up":
            times, all_direct = cell["times"], f"{cell['donors']} of {cell['donors']} direct"
            report.accept(
                f"{cell['mb']} MB, {cell['donors']} donors, {cell['path']}: fetch, beside its bytes",
                target=f"≤ {TIMES} ×",
                value=times if times is not None and cell["note"] in ("", all_direct) else cell["note"],
                holds=times is not None and times <= TIMES and cell["note"] in ("", all_direct),
            )
        if cell["kind"] == "whole way":
            beyond = cell["beyond"]
            report.accept(
                f"{cell['mb']} MB, {cell['donors']} donors: enrol → first counted round, beyond {TIMES} × its bytes",
                target=f"≤ {ROUNDS} rounds",
                value=beyond if beyond is not None else cell["note"],
                holds=beyond is not None and beyond <= ROUNDS,
            )


def main() -> None:
    """Choose cells, run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [size.megabytes for size in SIZES]
    parser.add_argument("--kind", nargs="+", default=["catch-up", "whole-way"], choices=["catch-up", "whole-way"])
    parser.add_argument("--megabytes", nargs="+", type=int, default=sizes, choices=sizes)
    counts = range(1, MOST_DONORS + 1)
    parser.add_argument("--donors", nargs="+", type=int, default=[1, 2, 4, 7], choices=counts, help="of a catch-up")
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 3], choices=counts, help="that a newcomer comes to")
    parser.add_argument("--path", nargs="+", default=["direct", "libp2p"], choices=["direct", "libp2p"])
    parser.add_argument("--repetitions", type=int, default=3, help="of each catch-up")
    chosen = parser.parse_args()
    report = Report("join_wan")
    asyncio.run(run(chosen, report))
    judge(report)
    report.finish(
        "least: the state's bytes at the newcomer's raw TCP goodput; times: fetch over least; start: from the command "
        f"to the first question, torch loaded; beyond: total less {TIMES} × least, in rounds"
    )


if __name__ == "__main__":
    main()
