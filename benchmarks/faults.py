"""Swarms under fire: what killing and freezing members costs in rounds, seconds and loss, and what must not happen.

    python -m benchmarks.faults [--minutes 10] [--nodes 8]

Three swarms, one after another: one in peace; three nodes drawn at random killed every 30 s and started again at once;
three frozen every 30 s, for 5 to 60 s. Whatever the victims do, somebody must commit in time, nobody may hang, every
chain of manifests must be the same, every attempt that did not commit must have a reason, and the loss at equal
tokens must be that of the undisturbed swarm.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.core.round_id import RoundId
from atoll.lab.corpus import write_python_corpus
from atoll.lab.demo import RUN
from atoll.lab.faults import frozen, kill
from benchmarks.attempt_audit import AttemptAudit, Fault, Row, audit_attempts, parse_attempt
from benchmarks.common import Report
from benchmarks.fault_outcome import FaultOutcome, compare
from benchmarks.process_swarm import (
    Chain,
    LabSwarm,
    first_commits,
    longest_round_seconds,
    node_names,
    report_on_exit,
    start,
)

VICTIMS = 3
STRIKE_EVERY = 30.0  # seconds
SPREAD_SECONDS = 5.0  # within which the victims of one strike are struck
FREEZE_SECONDS = (5.0, 60.0)
LOSS_TOLERANCE = 0.01
KINDS = ("peace", "SIGKILL", "SIGSTOP")
_ROUNDS_PAGE = 500  # fewer than the coordinator gives at once
NOTES = (
    "opened: attempts that anybody knows of; committed: rounds; abandoned: reported by the opener, with a reason; "
    "silent: given up by others, the opener reported nothing; untold: committed rounds of which the coordinator heard "
    "nothing; voted: committed with the coordinator's vote; zeroed: parts; median_s, worst_s: seconds between commits "
    "of the swarm; hangs: swarm or node without a commit for longer than a round can take, a node counted from its "
    "last strike on; behind: times that a node had to catch up; back: of all nodes, who decide rounds again at the end"
)


@dataclass
class FaultSession:
    """What is done to a swarm."""

    strikes: list[Fault] = field(default_factory=list)
    down: set[str] = field(default_factory=set)


Attack = Callable[[LabSwarm, FaultSession], Awaitable[None]]


# --- one swarm ----------------------------------------------------------------------------------------------


async def run_with_faults(swarm: LabSwarm, kind: str, attack: Attack) -> FaultOutcome:
    """Attack a swarm, wait until all are back, stop it, and look at what it left. Ends it, whatever happens."""
    nodes = len(swarm.names)
    session = FaultSession()
    try:
        first, began = swarm.newest(), time.time()
        await attack(swarm, session)
        struck_until, recovered_members = time.time(), frozenset[str]()

        def all_back() -> bool:
            nonlocal recovered_members
            recovered_members = swarm.recovered_members(struck_until)
            return len(recovered_members) == nodes

        await swarm.becomes_true(all_back)
        last, ended = swarm.newest(), time.time()
        await swarm.stop_nodes()
        chains = {name: swarm.chain(name) for name in swarm.names}
        audit = await _account(swarm, chains, session.strikes, first, last)
        run = (await swarm.ctl("run", "show", RUN))["run"]
        sizes = [int(layer["parameters"]) for layer in run["layers"]["layers"]]
        return FaultOutcome(
            kind=kind,
            nodes=nodes,
            chains=chains,
            held={name: await asyncio.to_thread(_held_fault, swarm, name, chains) for name in swarm.names},
            window=(began, ended),
            rounds=(first, last),
            limit_seconds=longest_round_seconds(swarm.spec, sizes, nodes),
            strikes=tuple(session.strikes),
            audit=audit,
            behind=sum(began <= line["when"] <= ended for n in swarm.names for line in swarm.log_lines(n, "behind")),
            recovered_members=len(recovered_members),
            losses={item["committed_tokens"]: item["loss"] for item in run["evaluations"]},
        )
    finally:
        await swarm.local.close()


def strikes(kind: str, seconds: float) -> Attack:
    """For so long: three victims every 30 s, killed or frozen; nobody in peace. Over when every victim runs again."""

    async def attack(swarm: LabSwarm, session: FaultSession) -> None:
        rng = random.Random(11)
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            while time.monotonic() < end:
                for victim in rng.sample(swarm.names, VICTIMS) if kind != KINDS[0] else ():
                    delay, frozen_for = rng.uniform(0, SPREAD_SECONDS), rng.uniform(*FREEZE_SECONDS)
                    tasks.create_task(_inject_fault(swarm, session, victim, kind, delay, frozen_for))
                await asyncio.sleep(min(STRIKE_EVERY, max(0.0, end - time.monotonic())))

    return attack


async def _inject_fault(
    swarm: LabSwarm, session: FaultSession, victim: str, kind: str, delay: float, frozen_for: float
) -> None:
    """One victim; who is down already stays as it is."""
    await asyncio.sleep(delay)
    if victim in session.down:
        return
    session.down.add(victim)
    began = time.time()
    place = len(session.strikes)
    session.strikes.append(Fault(victim, kind, began, ended=float("inf")))
    if kind == "SIGKILL":
        await kill(swarm.local, victim)
        await swarm.local.restart_member(victim)
    else:
        with frozen(swarm.local, victim):
            await asyncio.sleep(frozen_for)
    session.strikes[place] = replace(session.strikes[place], ended=time.time())
    session.down.discard(victim)


async def _account(
    swarm: LabSwarm, chains: dict[str, Chain], strikes: list[Fault], first: int, last: int
) -> AttemptAudit:
    """What became of the attempts at the rounds after `first`, up to `last`."""
    rows = [row for row in await _rounds(swarm, first) if row.attempt.number <= last]
    ballots = {
        RoundId(RUN, item.head.ballot.plan_version, 0, number, item.head.ballot.attempt)
        for chain in chains.values()
        for number, item in chain.items()
        if first < number <= last
    }
    given_up: dict[RoundId, float] = {}
    for name in swarm.names:
        for line in swarm.log_lines(name, "round abandoned"):
            attempt = parse_attempt(RUN, line["round"])
            if first < attempt.number <= last:
                given_up[attempt] = min(line["when"], given_up.get(attempt, line["when"]))
    plans = {}
    for version in {attempt.plan_version for attempt in given_up}:
        plan = (await swarm.ctl("plan", "show", "--run", RUN, "--version", str(version)))["plan"]
        plans[version] = [item["peer_id"] for item in plan["assignments"]]
    names = {peer: name for name, peer in swarm.peers.items()}
    return audit_attempts(
        rows,
        ballots,
        given_up,
        commits={number: item.when for number, item in first_commits(chains.values()).items()},
        strikes=strikes,
        opener=lambda attempt: names[attempt.opener(plans[attempt.plan_version])],
    )


async def _rounds(swarm: LabSwarm, after: int) -> list[Row]:
    """The coordinator's log of the rounds after that one, page by page."""
    rows: dict[RoundId, Row] = {}
    while True:
        page = (await swarm.ctl("run", "rounds", RUN, "--after", str(after)))["rounds"]
        before = len(rows)
        for item in page:
            named = item["round"]
            attempt = RoundId(RUN, int(named["plan_version"]), 0, int(named["number"]), int(named["attempt"]))
            rows[attempt] = Row(attempt, item["committed"], item["reason"])
        if len(page) < _ROUNDS_PAGE or len(rows) == before:
            return list(rows.values())
        after = max(attempt.number for attempt in rows) - 1  # the last round of a page may not be whole


def _held_fault(swarm: LabSwarm, name: str, chains: dict[str, Chain]) -> str:
    """What is wrong with the newest state on a node's disk: its bytes against its manifest, that against the chain."""
    try:
        head = swarm.newest_checkpoint(name)
    except (AtollError, OSError, ValueError) as error:
        return f"{name}: {error}"
    agreed = {chain[head.round].head.hash for chain in chains.values() if head.round in chain}
    return "" if agreed == {head.hash} else f"{name}: its round {head.round} is not that of the others"


# --- what it means ------------------------------------------------------------------------------------------


def tell(report: Report, it: FaultOutcome) -> None:
    """The row of a swarm and its acceptance rows."""
    committed, audit = it.committed, it.audit
    silent = len(audit.opener_faulted) + len(audit.unexplained)
    report.cell(
        swarm=it.kind,
        opened=len(audit.opened),
        committed=len(committed),
        abandoned=len(audit.abandoned),
        silent=silent,
        untold=len(audit.unreported_rounds),
        voted=sum(not item.head.signers <= item.head.present for item in committed.values()),
        zeroed=sum(item.head.manifest.parts_zeroed for item in committed.values()),
        median_s=statistics.median(it.gaps),
        worst_s=max(it.gaps),
        kills=sum(item.kind == "SIGKILL" for item in it.strikes),
        stops=sum(item.kind == "SIGSTOP" for item in it.strikes),
        hangs=it.hangs,
        behind=it.behind,
        recovered_members=f"{it.recovered_members}/{it.nodes}",
    )
    slowest = max(gap for name in it.chains for gap in it.node_gaps(name))
    report.accept(
        f"{it.kind}: hangs",
        target="0",
        value=f"{it.hangs}; longest without a commit {max(it.gaps):.0f} s (swarm), {slowest:.0f} s (a node that was "
        f"well), of {it.limit_seconds:.0f} s that a round can take",
        holds=it.hangs == 0,
    )
    faults = it.faulty_rounds
    report.accept(
        f"{it.kind}: one manifest for every committed round, on all nodes",
        target="all rounds",
        value="; ".join(faults[:3]) or f"{len(it.known)} rounds on {it.nodes} nodes",
        holds=bool(it.known) and not faults,
    )
    wrong = [fault for fault in it.held.values() if fault]
    report.accept(
        f"{it.kind}: the state left on disk is that of the node's last manifest",
        target="all nodes",
        value="; ".join(wrong) or f"{len(it.held)} of {it.nodes} nodes",
        holds=len(it.held) == it.nodes and not wrong,
    )
    told = ", ".join(f"{count} × {reason}" for reason, count in audit.reasons.most_common(4))
    adopted = len(audit.committed) - len(committed)
    again = f" + {adopted} that committed a round again" if adopted else ""
    report.accept(
        f"{it.kind}: opened = committed + abandoned, and why",
        target="all explained",
        value=f"{len(audit.opened)} = {len(committed)} committed{again} + {len(audit.abandoned)} reported"
        f"{f' ({told})' if told else ''} + {len(audit.opener_faulted)} whose opener was struck"
        f" + {len(audit.unexplained)} unexplained",
        holds=bool(committed) and audit.all_explained,
    )
    report.accept(
        f"{it.kind}: back among those who decide",
        target="all",
        value=f"{it.recovered_members}/{it.nodes}",
        holds=it.recovered_members == it.nodes,
    )


def tell_loss(report: Report, it: FaultOutcome, peace: FaultOutcome) -> None:
    """The acceptance row of the loss."""
    tokens, worse = compare(it.losses, peace.losses)
    report.accept(
        f"{it.kind}: loss at {tokens} tokens, against peace",
        target=f"≤ +{LOSS_TOLERANCE:.0%}",
        value=f"{worse:+.2%}",
        holds=worse <= LOSS_TOLERANCE,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each swarm, under fire")
    parser.add_argument("--nodes", type=int, default=8)
    options = parser.parse_args()
    report = Report("faults")
    notes = f"{options.minutes:g} minutes for each swarm of {options.nodes} nodes. {NOTES}"
    with tempfile.TemporaryDirectory(prefix="atoll-") as scratch, report_on_exit(report, notes):
        corpus = Path(scratch) / "corpus.txt"
        write_python_corpus(corpus)
        peace: FaultOutcome | None = None
        for kind in KINDS:
            swarm = await start(Path(scratch) / kind, node_names(options.nodes), corpus)
            outcome = await run_with_faults(swarm, kind, strikes(kind, 60 * options.minutes))
            tell(report, outcome)
            if peace is not None:
                tell_loss(report, outcome, peace)
            peace = peace or outcome


if __name__ == "__main__":
    asyncio.run(main())
