"""Instruction data from end to end: a command builds the corpus, and trainers of real processes learn its answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from benchmarks.corpus_server import CorpusServer
from benchmarks.corpus_server import files_of as files_of_directory
from support.chats import CHATML, save, talk
from support.corpora import SMALL, build_inline, files_of, write_rows
from support.documents import pieces_of, unpacked_pieces
from torch import nn

from atoll.core.clock import SystemClock
from atoll.core.run_spec import parse_run_spec
from atoll.node.data.build import build_corpus
from atoll.node.data.build_spec import BuildSpec, read_build_spec
from atoll.node.data.open_corpus import CacheFolder, open_corpus
from atoll.node.data.sharded_corpus import ShardedCorpus
from atoll.node.model.run_model import run_model
from atoll.node.trainer.trainer import Trainer, TrainerConfig
from atoll.node.training.loop import InnerLoop

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])}
ATOLL = [sys.executable, "-c", "from atoll.lab.cli.main import main; main()"]
DEADLINE = timedelta(seconds=180)
STEPS = 5
MIRROR = "http://mirror"
TALKS = [
    talk(f"is the lagoon {number} wide?", "yes, it is", f"and {number * 37 % 101}?", "no " * (1 + number % 9))
    for number in range(300)
]
BUILD_SPEC = """
tokenizer = "./tokenizer"
chat_template = "chat.jinja"
[[sources]]
name = "talks"
source = "jsonl"
path = "talks.jsonl"
messages = "messages"
"""
RUN_SPEC = """
version = 1
[run]
name = "t"
stop_tokens = 1000000
[model]
dimension = 32
layers = 2
heads = 4
kv_heads = 2
hidden_dimension = 50
vocabulary = 512
[data]
source = "corpus"
corpus = "{digest}"
tokenizer = "corpus"
sequence_length = 16
validation_samples = 13
[optimizer]
name = "adamw"
learning_rate = 0.01
micro_batch_samples = 3
accumulate = 2
[sync]
round_tokens = 1000
"""


def atoll(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ATOLL, "data", *map(str, arguments)], capture_output=True, text=True, env=ENVIRONMENT, timeout=240
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build spec with all that it names, and its corpus."""
    folder = tmp_path_factory.mktemp("instructions")
    write_rows(folder / "talks.jsonl", [{"messages": messages} for messages in TALKS])
    save("chatml", folder / "tokenizer", template=None)
    (folder / "chat.jinja").write_text(CHATML)
    (folder / "spec.toml").write_text(BUILD_SPEC)
    done = atoll("build", folder / "spec.toml", "--to", folder / "corpus")
    assert done.returncode == 0, done.stderr
    return folder


def test_the_commands_tell_what_is_trained(folder: Path) -> None:
    shown = json.loads(atoll("show", folder / "corpus", "--output", "json").stdout)["corpus"]
    assert 0 < shown["sources"][0]["targets"] < shown["tokens"]
    assert "targets" in atoll("show", folder / "corpus").stdout
    assert atoll("verify", folder / "corpus").returncode == 0
    sampled = atoll("sample", folder / "corpus", "-n", "5").stdout
    assert "assistant\n⟦yes, it is<|im_end|>⟧" in sampled
    assert "\x1b" not in sampled
    (one,) = json.loads(atoll("sample", folder / "corpus", "-n", "1", "--output", "json").stdout)["samples"]
    assert {part["trained"] for part in one["parts"]} == {False, True}


def test_one_source_needs_no_spec(folder: Path, tmp_path: Path) -> None:
    options = ["--source", "jsonl", "--messages", "messages", "--tokenizer", folder / "tokenizer", "--name", "talks"]
    refused = atoll("build", folder / "talks.jsonl", "--to", tmp_path / "a", *options)
    assert refused.returncode == 78
    assert "has no chat template" in refused.stderr
    options += ["--chat-template", folder / "chat.jinja"]
    done = atoll("build", folder / "talks.jsonl", "--to", tmp_path / "b", *options)
    assert files_of(tmp_path / "b") == files_of(folder / "corpus"), done.stderr


def test_a_template_without_end_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "loop.jinja").write_text("{% for a in range(99999) %}" * 9 + "{% endfor %}" * 9)
    spec = BUILD_SPEC.replace("chat.jinja", str(tmp_path / "loop.jinja"))
    (folder / "loop.toml").write_text(spec)
    refused = atoll("build", folder / "loop.toml", "--to", tmp_path / "corpus", "--workers", "1")
    assert (refused.returncode, refused.stdout) == (78, "")
    assert "processor time for line 1 of" in refused.stderr
    assert "Traceback" not in refused.stderr


def small(folder: Path) -> BuildSpec:
    return read_build_spec(folder / "spec.toml").model_copy(update={"shard_bytes": 512})


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("rename", "/units/talks/000003.spill"),
        ("rename", "/talks/000002.tokens"),
        ("create", "/groups/talks/.000001.json.tmp"),
    ],
)
def test_a_killed_build_goes_on_to_the_same_corpus(operation: str, name: str, folder: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    program = "from support.killed_build import main; main()"
    killed = subprocess.run(
        [sys.executable, "-c", program, str(folder / "spec.toml"), str(corpus), operation, name],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=240,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = build_corpus(small(folder), corpus, workers=2, limits=SMALL)
    assert resumed.digest == build_inline(small(folder), tmp_path / "undisturbed").digest
    assert files_of(corpus) == files_of(tmp_path / "undisturbed")


def by_hand(loop: InnerLoop) -> float:
    """The mean over all targets of the held-out set that count, one by one."""
    losses = []
    for window in loop.corpus.validation_windows():
        tokens_T = torch.from_numpy(loop.corpus.windows([window]))[0]
        read_T = torch.where(tokens_T < 0, ~tokens_T, tokens_T)
        logits_TV = loop.model.run(read_T[None, :-1])[0].detach()
        each = nn.functional.cross_entropy(logits_TV, read_T[1:], reduction="none")
        losses += [float(loss) for loss, token in zip(each, tokens_T[1:], strict=True) if token >= 0]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
async def test_trainers_keep_conversations_apart(devices: str, folder: Path, tmp_path: Path) -> None:
    """From a mirror: the held-out loss is that of conversations one by one, and training lowers it."""
    digest = json.loads(atoll("show", folder / "corpus", "--output", "json").stdout)["corpus"]["digest"]
    masked = f'sequence_length = 64\ndocument_masks = true\nmirrors = ["{MIRROR}"]'
    with CorpusServer(files_of_directory(folder / "corpus")) as server:
        text = RUN_SPEC.format(digest=digest).replace("sequence_length = 16", masked).replace(MIRROR, server.address)
        spec = parse_run_spec(text)
        config = TrainerConfig(text, device=devices, cache_path=str(tmp_path / "cache"), minimum_step_seconds=0.5)
        trainer = await Trainer.spawn(config, log_path=tmp_path / "trainer.log", timeout=DEADLINE)
        opened = open_corpus(spec.data, str(folder / "corpus"), CacheFolder(tmp_path / "own"), SystemClock())
        corpus = opened.for_training(spec)
        try:
            assert isinstance(corpus, ShardedCorpus)
            await trainer.initialise()
            pieces = pieces_of(folder / "corpus", corpus, corpus.validation_windows())
            alone, _ = unpacked_pieces(
                run_model(spec, corpus.tokenizer.vocabulary), trainer.anchor, list(chain(*pieces))
            )
            await trainer.load(ranges=((0, 10_000),), committed_tokens=0)
            first = (await trainer.evaluate()).value
            assert first == pytest.approx(alone, rel=1e-5)
            await trainer.train()
            async with asyncio.timeout(DEADLINE.total_seconds()):
                while trainer.status.steps < STEPS:
                    await asyncio.sleep(0.01)
            await trainer.pause()
            await trainer.snapshot(0, trainer.facts.layer_offsets[-1])
            trainer.anchor.sub_(trainer.pseudo_gradient)
            assert (await trainer.evaluate()).value < 0.8 * first
        finally:
            corpus.close()
            await trainer.stop(DEADLINE)


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
async def test_trainers_learn_the_answers(devices: str, folder: Path, tmp_path: Path) -> None:
    """The model's vocabulary is larger than the tokenizer's, and six samples a step are uneven on two devices."""
    built = json.loads(atoll("show", folder / "corpus", "--output", "json").stdout)["corpus"]
    text = RUN_SPEC.format(digest=built["digest"])
    spec, torch_threads = parse_run_spec(text), torch.get_num_threads()
    config = TrainerConfig(
        text, str(folder / "corpus"), device=devices, cache_path=str(tmp_path / "cache"), minimum_step_seconds=0.5
    )
    trainer = await Trainer.spawn(config, log_path=tmp_path / "trainer.log", timeout=DEADLINE)
    torch.set_num_threads(1)
    opened = open_corpus(spec.data, str(folder / "corpus"), CacheFolder(tmp_path / "own"), SystemClock())
    loop = InnerLoop(spec, opened.for_training(spec), "cpu")
    try:
        await trainer.initialise()
        genesis_E = trainer.anchor.clone()
        loop.load(genesis_E, ranges=((0, 10_000),))
        await trainer.load(ranges=((0, 10_000),), committed_tokens=0)
        first = (await trainer.evaluate()).value
        assert first == pytest.approx(by_hand(loop), rel=1e-5)
        assert first == pytest.approx(loop.evaluate(genesis_E), rel=1e-5)
        await trainer.train()
        async with asyncio.timeout(DEADLINE.total_seconds()):
            while trainer.status.steps < STEPS:
                await asyncio.sleep(0.01)
        await trainer.pause()
        taken = await trainer.snapshot(0, trainer.facts.layer_offsets[-1])
        for _ in range(taken.steps):
            loop.step()
        trained_E = genesis_E - trainer.pseudo_gradient
        after = loop.evaluate(trained_E)
        assert after < 0.8 * first
        assert after == pytest.approx(loop.evaluate(loop.weights_E), rel=0.05)
        torch.testing.assert_close(trained_E, loop.weights_E, atol=2e-3, rtol=1e-2)
        assert isinstance(loop.generate(trained_E, b"is the", 40), str)  # also of tokens that no text has
    finally:
        loop.close()
        torch.set_num_threads(torch_threads)
        await trainer.stop(DEADLINE)
