"""What codes between stages, and routes that are cut at different layers, cost in loss.

First one route of four stages trains alone, its activations and gradients in each codec, beside the same in fp32.
Then three routes, of one, two and four stages, average every layer in rounds, beside three members that hold the whole
model. All in the setting of `parity` (`parity_jobs`): shared weights at the begin, real text, equal tokens. Routes are
the shipped stages in one process (`tests/support/in_process_route.py`); every message between them is packed, checked
and unpacked as for a wire. Averaging is that of `virtual_swarm`. With `--keep FILE` a benchmark that was ended goes on
where it stopped.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from support.in_process_route import InProcessRoute
from support.routes import equal_cuts

from atoll.core.run_spec import RunSpec
from atoll.node.data.corpus import Corpus
from atoll.node.exchange.codecs import CODECS
from atoll.node.model.run_model import allocate_span
from atoll.node.pipeline import message_codec
from atoll.node.pipeline.flush_machine import FlushMachine
from atoll.node.pipeline.inbox import StagePosition
from atoll.node.pipeline.messages import Message
from atoll.node.pipeline.stage import Stage
from atoll.node.pipeline.stage_checks import MicroBatchShape
from atoll.node.training.learning_rate import learning_rate
from atoll.node.training.loop import InnerLoop
from atoll.node.training.replica import StepResult
from benchmarks import parity_jobs
from benchmarks.common import Report
from benchmarks.parity_jobs import MICRO_BATCH, STEP_TOKENS, corpus_of, warm_start
from benchmarks.resumable_jobs import ResumableJobs, jobs_on_python_corpus
from benchmarks.synchronous_baseline import train_on
from benchmarks.virtual_swarm import SwarmConfig, VirtualSwarm, fresh, member_names

STAGES = 4  # of the route that trains alone
MIXED = (1, 2, 4)  # stages of the routes that train together
RATE = 2e-3  # that `parity` found for members of a swarm, and for one alone
ALONE_LIMIT, MIXED_LIMIT = 0.2, 0.5  # percent of the loss, at most


@dataclass(frozen=True)
class Job:
    """One training run, to be carried out in a process of its own."""

    stages: tuple[int, ...]  # of each route; 0: a member with the whole model and no route
    codec: str  # between stages
    averaging: str  # codec of the rounds
    steps: int  # of each route
    seed: int

    def key(self) -> str:
        """What names it."""
        return repr(self)


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    loss: float  # held-out, nats per byte
    rounds: int
    stage_bytes: int  # that activations and gradients took


# --- in the worker ----------------------------------------------------------------------------------------


class RouteLoop(InnerLoop):
    """An inner loop whose steps are flushes of a route in this process; its weights are the stages', in one vector."""

    def __init__(self, spec: RunSpec, corpus: Corpus, stages: int, codec: str) -> None:
        super().__init__(spec, corpus, "cpu")
        self.stage_bytes = 0
        self._codec = CODECS[codec]
        self._channel = message_codec.LinkFormat.of(spec, self.run.table, plan_version=1, route=0)
        room = MicroBatchShape(spec.optimizer.micro_batch_samples, spec.data.sequence_length)
        spans = equal_cuts(self.run.architecture.layers, stages)
        self._stages = [Stage(allocate_span(self.run, span, self.device), spec.optimizer, room) for span in spans]
        machines = [
            FlushMachine(StagePosition(i, stages), stage, spec.optimizer.clip_norm)
            for i, stage in enumerate(self._stages)
        ]
        self._route = InProcessRoute(machines, carry=self._carry)

    def step(self) -> StepResult:
        batch = self._loader.next()
        pieces = self.weights_E.split([stage.model.weights_E.numel() for stage in self._stages])
        for stage, piece_E in zip(self._stages, pieces, strict=True):
            stage.model.weights_E.copy_(piece_E)
        flushed = self._route.flush(torch.split(batch.tokens_BT, self.spec.optimizer.micro_batch_samples))
        for stage, piece_E in zip(self._stages, pieces, strict=True):
            piece_E.copy_(stage.model.weights_E)
        tokens = len(batch.taken.samples) * self.corpus.sequence_length
        self.progress.add(tokens, batch.taken)
        return StepResult(flushed.loss, tokens, len(batch.taken.samples))

    def set_committed_tokens(self, committed_tokens: int) -> None:
        super().set_committed_tokens(committed_tokens)
        for stage in self._stages:
            stage.set_learning_rate(learning_rate(self.spec, committed_tokens))

    def _carry(self, message: Message) -> Message:
        header, body = message_codec.pack(message, self._channel, self._codec)
        self.stage_bytes += len(body)
        return message_codec.unpack(
            message_codec.read_header(header.SerializeToString(), self._channel), body, self._channel
        )


def run_job(job: Job, corpus_path: str) -> Outcome:
    """Train and evaluate. Runs in a spawned process with one thread."""
    torch.set_num_threads(1)
    return _run_alone(job, corpus_path) if len(job.stages) == 1 else _run_together(job, corpus_path)


def _run_alone(job: Job, corpus_path: str) -> Outcome:
    loop = _loop(job, corpus_path, job.stages[0])
    train_on(loop, job.steps, warm_start(job.seed, corpus_path))
    loss = loop.evaluate(loop.weights_E)
    loop.close()
    return Outcome(loss, 0, _stage_bytes(loop))


def _run_together(job: Job, corpus_path: str) -> Outcome:
    spec, members = _spec(job, corpus_path), dict(zip(member_names(len(job.stages)), job.stages, strict=True))
    ingredients = SwarmConfig((1.0,) * len(members), job.averaging, delay=0.0)
    saved = fresh(spec, len(members), warm_start(job.seed, corpus_path))
    swarm = VirtualSwarm(
        spec, corpus_of(corpus_path), ingredients, saved, make=lambda peer: _loop(job, corpus_path, members[peer])
    )
    swarm.run(spec.run.stop_tokens)
    stage_bytes = sum(_stage_bytes(loop) for loop in swarm.loops.values())
    outcome = Outcome(swarm.evaluate(), swarm.rounds, stage_bytes)
    swarm.close()
    return outcome


def _loop(job: Job, corpus_path: str, stages: int) -> InnerLoop:
    spec, corpus = _spec(job, corpus_path), corpus_of(corpus_path)
    return RouteLoop(spec, corpus, stages, job.codec) if stages else InnerLoop(spec, corpus, "cpu")


def _stage_bytes(loop: InnerLoop) -> int:
    return loop.stage_bytes if isinstance(loop, RouteLoop) else 0


def _spec(job: Job, corpus_path: str) -> RunSpec:
    program = "alone" if len(job.stages) == 1 else "swarm"
    spec = parity_jobs.spec_of(parity_jobs.Job(program, len(job.stages), job.steps, job.seed, RATE), corpus_path)
    optimizer = spec.optimizer.model_copy(update={"micro_batch_samples": 1, "accumulate": MICRO_BATCH})
    return spec.model_copy(update={"optimizer": optimizer})


# --- telling ----------------------------------------------------------------------------------------------


def main() -> None:
    arguments = _arguments()
    with jobs_on_python_corpus(arguments.keep, arguments.workers, run_job, Outcome) as finished:
        _tell(finished, arguments)


def _tell(finished: ResumableJobs[Job, Outcome], arguments: argparse.Namespace) -> None:
    report = Report("pipeline_loss")
    alone = Job((STAGES,), "fp32", "fp32", arguments.steps, 0)
    whole = Job((0,) * len(MIXED), "fp32", "int4", arguments.steps, 0)
    mixed = replace(whole, stages=MIXED)
    rows = {
        alone: (replace(alone, codec="bf16"), replace(alone, codec="int8")),
        whole: (mixed, replace(mixed, codec="int8")),
    }
    every = [seeded for base, others in rows.items() for job in (base, *others) for seeded in _seeds(job, arguments)]
    done = finished.train(every)
    for base, others in rows.items():
        beside = [done[job] for job in _seeds(base, arguments)]
        for job in (base, *others):
            outcomes = [done[seeded] for seeded in _seeds(job, arguments)]
            above = [100 * (one.loss / other.loss - 1) for one, other in zip(outcomes, beside, strict=True)]
            report.cell(
                stages=" + ".join(str(count or "whole") for count in job.stages),
                codec=job.codec,
                loss=statistics.mean(one.loss for one in outcomes),
                above=statistics.mean(above),
                by_seed=", ".join(f"{each:+.2f}" for each in above),
                rounds=outcomes[0].rounds,
                stage_mb=outcomes[0].stage_bytes / 1e6,
            )
            _accept(report, job, statistics.mean(above))
    report.finish(
        f"nats per byte on held-out text, decoder of 0.25 M parameters in five layers, {arguments.steps} steps of "
        f"{STEP_TOKENS} tokens a route, {arguments.seeds} seeds, learning rate {RATE:g}. `above`, `by_seed`: percent "
        "above the same without a codec between stages, or above three members with the whole model at equal tokens. "
        f"Rounds of {len(MIXED)} routes are in {whole.averaging}, H = {parity_jobs.PUBLISHED.inner_steps}. "
        "`stage_mb`: that activations and gradients took"
    )


def _accept(report: Report, job: Job, above: float) -> None:
    if len(job.stages) == 1 and job.codec == "int8":
        name = f"loss with int8 between {STAGES} stages, above uncompressed, percent"
        report.accept(name, target=f"≤ {ALONE_LIMIT:g}", value=above, holds=above <= ALONE_LIMIT)
    elif job.stages == MIXED:
        name = f"loss of routes of 1, 2 and 4 stages ({job.codec} between them), above full replicas, percent"
        report.accept(name, target=f"≤ {MIXED_LIMIT:g}", value=above, holds=above <= MIXED_LIMIT)


def _seeds(job: Job, arguments: argparse.Namespace) -> list[Job]:
    return [replace(job, seed=seed) for seed in range(arguments.seeds)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=480, help="of each route")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--keep", type=Path, help="a file of finished runs: those are not run again")
    return parser.parse_args()


if __name__ == "__main__":
    main()
