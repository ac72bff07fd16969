"""The demo: a coordinator, a seed and nodes on loopback train a small model on real text for a number of tokens.

An operator could do every step by hand. Two of four nodes are slowed by an option that other nodes do not know: the
swarm measures their pace, and they make fewer steps. If faults are requested, a `FaultInjector` kills and freezes
programs while they train. At the end the demo compares the anchors and the manifest chains of all nodes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from atoll.core.errors import ConfigError, first_error
from atoll.core.manifest import Head
from atoll.lab.corpus import write_python_corpus, write_python_documents
from atoll.lab.demo_watch import DemoView, fraction_done, start, watch
from atoll.lab.faults import NO_FAULTS, FaultInjector, FaultLog, FaultPlan
from atoll.lab.launcher import LocalSwarm
from atoll.node.control.local_client import call
from atoll.node.state.manifests import ManifestStore

FULL_PACE_SECONDS = 0.2  # minimum inner step of a full-speed node: keeps two cores below 80 % busy
SLOWDOWNS = (1, 1, 2, 4)  # by node, repeated for more nodes
GENERATE_TIMEOUT = timedelta(seconds=60)
RUN = "demo"
PROMPT = "def "
SEQUENCE_LENGTH, MICRO_BATCH = 128, 2
STEP_TOKENS = SEQUENCE_LENGTH * MICRO_BATCH
INNER_STEPS = 20  # of a full-speed node per round

SPEC = """\
version = 1

[run]
name = "{name}"
seed = {seed}
min_nodes = {nodes}
stop_tokens = {tokens}

[model]
preset = "nano"

[data]
{data}
sequence_length = {sequence_length}
validation_samples = 32

[optimizer]
{optimizer}
warmup_tokens = {warmup}
micro_batch_samples = {micro_batch}
accumulate = {accumulate}

[sync]
round_tokens = {round_tokens}
round_max_seconds = 30
codec = "{codec}"
part_elements = 131072
"""


@dataclass(frozen=True)
class DemoOptions:
    """Options of `atoll demo`."""

    nodes: int
    tokens: int
    seed: int
    data: Path | None
    codec: str
    slowdowns: tuple[float, ...]
    inner_steps: int  # of a full-speed node per round
    timeout: timedelta
    faults: FaultPlan = NO_FAULTS


@dataclass(frozen=True)
class DemoResult:
    """Result of a demo. docs/ describes the JSON form."""

    nodes: int
    rounds_opened: int
    rounds_committed: int
    parts_zeroed: int
    tokens: int
    steps_per_node: dict[str, int]
    val_loss_first: float
    val_loss_last: float
    anchor_digests: dict[str, str]
    anchors_equal: bool
    chains_equal: bool  # no two nodes have different manifests of the same round
    rounds_with_coordinator_vote: int
    averaging_bytes_sent: int
    averaging_bytes_fp32: int
    other_bytes_sent: int
    kills: int
    freezes: int
    rejoined: int  # killed or frozen nodes that contributed to the last round
    coordinator_restarts: int
    checkpoint: str
    seconds: float
    sample: str

    def to_json(self) -> dict[str, Any]:
        """Convert to the object that `atoll demo --output json` prints."""
        return asdict(self)


async def run_demo(options: DemoOptions, root: Path, show: Callable[[DemoView], None]) -> DemoResult:
    """Run the demo below `root` and end all its processes. Raises `ChildDied`, `DeadlineExceeded`."""
    swarm = LocalSwarm(root)
    view = DemoView(started=time.monotonic(), stop_tokens=options.tokens)
    names = [f"node-{i + 1}" for i in range(options.nodes)]
    try:
        flags = {
            name: ("--minimum-step-seconds", f"{FULL_PACE_SECONDS * slowdown:g}")
            for name, slowdown in zip(names, options.slowdowns, strict=True)
        }
        view.phase = "building the corpus"
        show(view)
        spec = await asyncio.to_thread(_spec, options, root)
        endpoints = await start(swarm, spec, flags, view, show)
        faults = FaultInjector(swarm, options.faults, names, options.seed, endpoints)
        view.faults = faults.log.events
        async with asyncio.TaskGroup() as tasks:
            making = tasks.create_task(faults.run(lambda: fraction_done(view)))
            tasks.create_task(watch(swarm, options.timeout, names, view, show, making))
        view.phase = "collecting"
        show(view)
        return await _collect(swarm, options, names, view, faults.log)
    except ExceptionGroup as group:
        raise first_error(group) from group
    finally:
        await swarm.close()


async def _collect(
    swarm: LocalSwarm, options: DemoOptions, names: list[str], view: DemoView, log: FaultLog
) -> DemoResult:
    run = (await swarm.ctl_json("run", "show", RUN))["run"]
    losses = sorted((item["round"], item["loss"]) for item in run["evaluations"])
    statuses = {name: call(swarm.programs[name].directory, "status") for name in names}
    digests = {name: await asyncio.to_thread(sha256_of, Path(statuses[name]["anchor"])) for name in names}
    chains = [chain_of(swarm.root / name / "runs" / RUN / "manifests") for name in names]
    known = {number: head for chain in chains for number, head in chain.items()}
    last = {item.peer_id for item in known[max(known)].manifest.contributions}
    struck = {statuses[name]["peer_id"] for name in (*log.killed, *log.frozen)}
    answer = await asyncio.to_thread(
        call, swarm.programs[names[0]].directory, "generate", GENERATE_TIMEOUT, prompt=PROMPT, tokens=240
    )
    members = {item.peer_id for head in known.values() for item in head.manifest.contributions}
    return DemoResult(
        nodes=options.nodes,
        rounds_opened=run["rounds_opened"],
        rounds_committed=run["rounds_committed"],
        parts_zeroed=sum(head.manifest.parts_zeroed for head in known.values()),
        tokens=run["committed_tokens"],
        steps_per_node={name: status["steps"] for name, status in statuses.items()},
        val_loss_first=losses[0][1],
        val_loss_last=losses[-1][1],
        anchor_digests=digests,
        anchors_equal=len(set(digests.values())) == 1,
        chains_equal=chains_agree(chains),
        rounds_with_coordinator_vote=sum(not head.signers <= members for head in known.values()),
        averaging_bytes_sent=sum(status["averaging_bytes_sent"] for status in statuses.values()),
        averaging_bytes_fp32=sum(status["averaging_bytes_fp32"] for status in statuses.values()),
        other_bytes_sent=sum(status["other_bytes_sent"] for status in statuses.values()),
        kills=len(log.killed),
        freezes=len(log.frozen),
        rejoined=len(struck & last),
        coordinator_restarts=log.coordinator_restarts,
        checkpoint=statuses[names[0]]["anchor"],
        seconds=round(time.monotonic() - view.started, 1),
        sample=answer["text"],
    )


def chain_of(directory: Path) -> dict[int, Head]:
    """Return the manifests that a node has stored, by round. A node lacks the rounds in which it was down."""
    store = ManifestStore(directory, RUN)
    newest = store.newest()
    found = {number: store.get(number) for number in range(1, newest.round + 1)} if newest else {}
    return {number: Head(committed) for number, committed in found.items() if committed is not None}


def chains_agree(chains: Sequence[dict[int, Head]]) -> bool:
    """Return whether no two chains have different manifests of a round."""
    rounds = {number for chain in chains for number in chain}
    return all(len({chain[number].hash for chain in chains if number in chain}) == 1 for number in rounds)


def sha256_of(path: Path) -> str:
    """Return the hex SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def corpus_of(data: Path | None, root: Path) -> Path:
    """Return the path of the training text: `data`, or the Python standard library. Raises `ConfigError`."""
    if data is None:
        corpus = root / "corpus.txt"
        write_python_corpus(corpus)
        return corpus
    if not data.exists():
        raise ConfigError(f"the training text {data} does not exist", "pass a text file or a directory of text files")
    return data.resolve()


def build_corpus_of(data: Path | None, root: Path) -> str:
    """Build a corpus from `data`, or from the Python standard library; return the lines that name it in a run spec.

    Raises `ConfigError`, `CorpusError`.
    """
    from atoll.node.data.build import build_corpus
    from atoll.node.data.build_spec import spec_of_one_source

    kind, text = {"source": "text"}, data
    if text is None:
        kind, text = {"source": "jsonl"}, root / "library.jsonl"
        write_python_documents(text)
    elif not text.exists():
        raise ConfigError(f"the training text {data} does not exist", "pass a text file or a directory of text files")
    built = build_corpus(spec_of_one_source(str(text), kind), root / "corpus", workers=1)
    return f'source = "corpus"\ncorpus = "{built.digest}"\nmirrors = [{json.dumps(str(root / "corpus"))}]'


def _spec(options: DemoOptions, root: Path) -> str:
    return spec_toml(
        seed=options.seed,
        nodes=options.nodes,
        tokens=options.tokens,
        corpus=root,
        data=build_corpus_of(options.data, root),
        codec=options.codec,
        slowdowns=options.slowdowns,
        inner_steps=options.inner_steps,
    )


def spec_toml(
    *,
    seed: int,
    nodes: int,
    tokens: int,
    corpus: Path,
    data: str = "",
    codec: str,
    slowdowns: Sequence[float],
    inner_steps: int,
    optimizer: str = "",
    accumulate: int = 1,
) -> str:
    """Return the demo's run spec. A round is due when a full-speed node has made `inner_steps` steps.

    `data`: lines that name another corpus than the text file `corpus`. `optimizer`: lines for `[optimizer]`; without
    them, its defaults apply.
    """
    pace = sum(1 / slowdown for slowdown in slowdowns)  # of all nodes together; 1 is a full-speed node
    return SPEC.format(
        name=RUN,
        seed=seed,
        nodes=nodes,
        tokens=tokens,
        data=data or f"path = {json.dumps(str(corpus))}",
        sequence_length=SEQUENCE_LENGTH,
        micro_batch=MICRO_BATCH,
        optimizer=optimizer,
        accumulate=accumulate,
        warmup=tokens // 20,
        round_tokens=int(inner_steps * pace * STEP_TOKENS),
        codec=codec,
    )
