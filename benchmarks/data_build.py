"""How fast `atoll data build` turns text into shards, in how much memory, and whether a killed build gives the same.

The text is generated: documents of Zipf-distributed words in JSON Lines. A byte-level BPE tokenizer is trained on its
beginning. The measure is the `tokenizers` library's own `encode_batch_fast` on all cores over the same documents, which
are in memory already: no reading, no arrays, no files. The build reads JSON, encodes, shuffles, hashes and writes, and
its time includes the start of all its processes. Both run in turn in processes of their own. Memory is the sum of the
resident sets of all processes of a build, sampled every 50 ms; pages that processes share count for each of them.
Where other programs use the machine, read the processor seconds, not the rates.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import psutil

from benchmarks.common import Report

VOCABULARY = 32_000
WORDS = 60_000
LEAST_RATE, MOST_GIB = 0.9, 1.0
_ATOLL = [sys.executable, "-c", "from atoll.lab.cli.main import main; main()"]
_ENCODE = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer, seconds, processor = Tokenizer.from_file(sys.argv[2]), 0.0, 0.0
def encode(batch):
    global seconds, processor
    begin, used = time.perf_counter(), time.process_time()
    tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    seconds, processor = seconds + time.perf_counter() - begin, processor + time.process_time() - used
batch = []
for line in open(sys.argv[1], encoding="utf-8"):
    batch.append(json.loads(line)["text"])
    if len(batch) == 4096:
        encode(batch)
        batch = []
encode(batch)
print(seconds, processor)
"""


def main() -> None:
    arguments = _arguments()
    report = Report("data_build")
    with tempfile.TemporaryDirectory(prefix="atoll-data-build-", dir=arguments.directory) as folder:
        directory = Path(folder)
        text = directory / "text.jsonl"
        text_bytes = write_text(text, arguments.megabytes * 10**6)
        train_tokenizer(text, directory / "tokenizer")
        rates, shares, peaks, digests = list[float](), list[float](), list[float](), set[str]()
        for number in range(arguments.rounds):
            library = encode(text, directory / "tokenizer")
            build = Build(text, directory / "tokenizer", directory / f"corpus-{number}")
            ours = build.run()
            rates.append(library.seconds / ours.seconds)
            shares.append(library.processor_seconds / ours.processor_seconds)
            peaks.append(build.peak_bytes / 2**30)
            digests.add(build.digest)
            report.cell(
                round=number,
                text_mb=text_bytes / 1e6,
                library_mb_per_second=text_bytes / 1e6 / library.seconds,
                build_mb_per_second=text_bytes / 1e6 / ours.seconds,
                rate_ratio=rates[-1],
                library_processor_seconds=library.processor_seconds,
                build_processor_seconds=ours.processor_seconds,
                processor_ratio=shares[-1],
                peak_gib=peaks[-1],
            )
        killed = Build(text, directory / "tokenizer", directory / "killed")
        kills = killed.run_with_kills()
        digests.add(killed.digest)
        rate, share, peak = (
            statistics.median(rates),
            statistics.median(shares),
            max([*peaks, killed.peak_bytes / 2**30]),
        )
    report.accept("rate beside encode_batch_fast alone", target=f"≥ {LEAST_RATE}", value=rate, holds=rate >= LEAST_RATE)
    report.accept(
        "the same by processor seconds of all processes",
        target=f"≥ {LEAST_RATE}",
        value=share,
        holds=share >= LEAST_RATE,
    )
    report.accept("peak memory of all processes, GiB", target=f"≤ {MOST_GIB}", value=peak, holds=peak <= MOST_GIB)
    report.accept(
        f"digests of {arguments.rounds + 1} builds, one killed {kills} times",
        target="1",
        value=len(digests),
        holds=len(digests) == 1 and kills > 0,
    )
    report.finish(
        f"{text_bytes / 1e6:.0f} MB of generated text (UTF-8, without JSON), BPE of {VOCABULARY:,} tokens, "
        f"{len(os.sched_getaffinity(0))} workers; medians of {arguments.rounds} rounds in turn"
    )


def write_text(path: Path, size: int) -> int:
    """Write documents of about 4 KB until there are `size` bytes of text; return how many there are."""
    chance = random.Random(1)
    letters, weights = "etaoinshrdlucmfwygpbvkxqjz", [13 / (1 + 0.35 * i) for i in range(26)]
    words = np.array(["".join(chance.choices(letters, weights, k=chance.randint(2, 11))) for _ in range(WORDS)], object)
    ends = np.array([" ", " ", " ", " ", " ", " ", " ", ", ", ". ", ".\n"], object)
    shares = 1 / np.arange(2, WORDS + 2)
    bounds = np.cumsum(shares / shares.sum())
    generator, written = np.random.Generator(np.random.PCG64(1)), 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            count = int(generator.exponential(700)) + 1
            chosen = words[np.minimum(np.searchsorted(bounds, generator.random(count)), WORDS - 1)]
            text = "".join((chosen + ends[generator.integers(0, len(ends), count)]).tolist())
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text)
    return written


def train_tokenizer(text: Path, directory: Path) -> None:
    """Train a byte-level BPE tokenizer, as GPT-2's is, on the first documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_texts(text, 5000), trainer)
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _first_texts(text: Path, count: int) -> Iterator[str]:
    with text.open(encoding="utf-8") as file:
        for line in islice(file, count):
            yield json.loads(line)["text"]


@dataclass(frozen=True)
class Cost:
    """What a program took: seconds on the wall, and those of all cores together."""

    seconds: float
    processor_seconds: float


def encode(text: Path, tokenizer: Path) -> Cost:
    """What `encode_batch_fast` takes for all documents, on all cores, and nothing else."""
    command = [sys.executable, "-c", _ENCODE, str(text), str(tokenizer / "tokenizer.json")]
    seconds, processor = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return Cost(float(seconds), float(processor))


def _processor_seconds() -> float:
    """Of all processes that have ended and were waited for, with their own children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Build:
    """One corpus, by the command that people type."""

    def __init__(self, text: Path, tokenizer: Path, corpus: Path) -> None:
        self._corpus = corpus
        self._command = [
            *_ATOLL, "data", "build", str(text), "--source", "jsonl", "--tokenizer", str(tokenizer), "--to", str(corpus)
        ]  # fmt: skip
        self.peak_bytes = 0
        self.digest = ""

    def run(self) -> Cost:
        """Build to the end."""
        begin, used = time.perf_counter(), _processor_seconds()
        with subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            sampler = threading.Thread(target=self._sample, args=(child,))
            sampler.start()
            assert child.stdout is not None
            self.digest = child.stdout.read().strip()
        sampler.join()
        assert child.returncode == 0, f"the build ended with {child.returncode}"
        return Cost(time.perf_counter() - begin, _processor_seconds() - used)

    def run_with_kills(self) -> int:
        """Kill the build when a third and two thirds of the units are tokenised, then let it end; return the kills."""
        units = self._corpus / ".build" / "units" / "text"
        kills = 0
        all_units = max(3, -(-self._text_bytes() // (16 << 20)))
        for wanted in (all_units // 3, 2 * all_units // 3):
            with subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
                while child.poll() is None:
                    if len(list(units.glob("*.spill"))) >= wanted:
                        child.kill()
                        kills += 1
                        break
                    time.sleep(0.01)
        self.run()
        return kills

    def _text_bytes(self) -> int:
        return Path(self._command[len(_ATOLL) + 2]).stat().st_size

    def _sample(self, child: subprocess.Popen[str]) -> None:
        parent = psutil.Process(child.pid)
        while child.poll() is None:
            resident = 0
            for process in [parent, *_children(parent)]:
                try:
                    resident += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak_bytes = max(self.peak_bytes, resident)
            time.sleep(0.05)


def _children(parent: psutil.Process) -> list[psutil.Process]:
    try:
        return parent.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="of text; 4000 for the largest")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where text and corpora are made; default: the temporary folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
