"""How fast `atoll data build` turns text into shards, in how much memory, and whether a killed build gives the same.

The text is generated: documents of Zipf-distributed words in JSON Lines. A byte-level BPE tokenizer is trained on its
beginning. The measure is the `tokenizers` library's own `encode_batch_fast` over the same documents, with its defaults:
threads on all cores, 4,096 documents a call. Its time is that of the calls, and of freeing what they return: no start,
no reading, no arrays, no files. The build reads JSON, encodes, makes arrays, shuffles, hashes and writes, and its time
includes the start of all its processes.

Both run at the same time, and one of them is stopped (SIGSTOP) at any moment: they change every second. So other
programs on the machine slow both alike. Seconds are those in which a program was not stopped. Memory is the sum of the
proportional set sizes (PSS) of all processes of a build, sampled four times a second.

`--rounds 0` builds without the library beside it, for texts of gigabytes (`results/data_build_large.json`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import psutil

from benchmarks.common import Report

VOCABULARY = 32_000
WORDS = 60_000
LEAST_RATE, MOST_GIB = 0.9, 1.0
SLICE_SECONDS, SAMPLE_SECONDS = 1.0, 0.25
DISK_PER_TEXT = 4  # JSON, and two builds of which one holds tokens twice
_ATOLL = [sys.executable, "-c", "from atoll.lab.cli.main import main; main()"]
_ENCODE = """
import json, sys, time
from itertools import islice
from tokenizers import Tokenizer
tokenizer, encoding, lines = Tokenizer.from_file(sys.argv[2]), 0.0, open(sys.argv[1], encoding="utf-8")
while batch := [json.loads(line)["text"] for line in islice(lines, 4096)]:
    begin = time.process_time()
    tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    encoding += time.process_time() - begin
print(encoding, time.process_time() - encoding)
"""


def main() -> None:
    arguments = _arguments()
    large = not arguments.rounds
    report = Report("data_build_large" if large else "data_build")
    with tempfile.TemporaryDirectory(prefix="atoll-data-build-", dir=arguments.directory) as folder:
        directory = Path(folder)
        text_mb = make_text(directory, arguments.megabytes)
        builds, rates, shares = list[Build](), list[float](), list[float]()
        for number in range(max(1, arguments.rounds)):
            build = Build(directory, f"corpus-{number}")
            library = None if large else Library(directory)
            alternate([build] if library is None else [library, build])
            builds.append(build)
            measured: dict[str, float] = {}
            if library is not None:
                rates.append(library.encoding_seconds / build.seconds)
                shares.append(library.encoding_processor_seconds / build.processor_seconds)
                measured = {
                    "library_mb_per_second": text_mb / library.encoding_seconds,
                    "rate_ratio": rates[-1],
                    "library_processor_seconds": library.encoding_processor_seconds,
                    "processor_ratio": shares[-1],
                }
            report.cell(
                round=number,
                text_mb=text_mb,
                build_mb_per_second=text_mb / build.seconds,
                build_processor_seconds=build.processor_seconds,
                peak_gib=build.peak_bytes / 2**30,
                **measured,
            )
            shutil.rmtree(build.corpus)
        kills, killed = run_with_kills(directory, builds[0].seconds)
        builds += killed
    beside = f"medians of {arguments.rounds} rounds" if rates else "without the library"
    if not large:
        rate, share = statistics.median(rates), statistics.median(shares)
        report.accept(
            "rate beside encode_batch_fast alone", target=f"≥ {LEAST_RATE}", value=rate, holds=rate >= LEAST_RATE
        )
        report.accept(
            "the same by processor seconds of all processes",
            target=f"≥ {LEAST_RATE}",
            value=share,
            holds=share >= LEAST_RATE,
        )
    peak, digests = max(build.peak_bytes for build in builds) / 2**30, {build.output for build in builds} - {""}
    report.accept("peak memory of all processes, GiB", target=f"≤ {MOST_GIB}", value=peak, holds=peak <= MOST_GIB)
    report.accept(
        f"digests of {len(builds) - kills} builds, one killed {kills} times",
        target="1",
        value=len(digests),
        holds=len(digests) == 1 and kills > 0,
    )
    report.finish(
        f"{text_mb:.0f} MB of generated text (UTF-8, without JSON), BPE of {VOCABULARY:,} tokens, "
        f"{len(os.sched_getaffinity(0))} workers; {beside}; "
        f"load average {os.getloadavg()[2]:.1f} in the last 15 minutes"
    )


def make_text(directory: Path, megabytes: int) -> float:
    """Write the text and the tokenizer where there is space for all builds; return the megabytes of text."""
    needed, free = megabytes * 10**6 * DISK_PER_TEXT, shutil.disk_usage(directory).free
    if free < needed:
        sys.exit(f"{directory} has {free / 1e9:.1f} GB free, and this needs {needed / 1e9:.1f} GB: see --directory")
    written = write_text(directory / "text.jsonl", megabytes * 10**6)
    train_tokenizer(directory / "text.jsonl", directory / "tokenizer")
    return written / 1e6


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


class Program:
    """A program with its child processes, which can be stopped and go on."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._child: subprocess.Popen[str] | None = None
        self.seconds = 0.0  # in which it was not stopped
        self.processor_seconds = 0.0  # of all its processes, when it has ended
        self.peak_bytes = 0
        self.output = ""  # empty if it was killed

    def run(self, seconds: float) -> bool:
        """Start, or go on, for so long; return whether it has ended. Raises `AssertionError` if it fails."""
        begin = time.perf_counter()
        if self._child is None:
            self._child = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        child = self._child
        self._signal(signal.SIGCONT)
        ended, left = False, seconds
        while not ended and left > 0:
            ended = _ends_within(child.pid, min(left, SAMPLE_SECONDS))
            self.peak_bytes = max(self.peak_bytes, sum(map(_proportional_bytes, self._processes())))
            left = begin + seconds - time.perf_counter()
        if not ended:
            self._signal(signal.SIGSTOP)
        self.seconds += time.perf_counter() - begin
        if ended:
            self._end()
        return ended

    def kill(self) -> None:
        """Kill the first process, if it runs, without warning; the others end with it."""
        if self._child is not None and self._child.returncode is None:
            self._child.kill()
            self._child.communicate()

    def _end(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        self.output = self._child.stdout.read().strip()
        _, status, used = os.wait4(self._child.pid, 0)
        self._child.returncode = os.waitstatus_to_exitcode(status)
        self.processor_seconds = used.ru_utime + used.ru_stime
        assert self._child.returncode == 0, f"{self._command} ended with {self._child.returncode}"

    def _processes(self) -> list[psutil.Process]:
        """Return the first process, and its children, if it still runs."""
        assert self._child is not None
        try:
            first = psutil.Process(self._child.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue


def _ends_within(pid: int, seconds: float) -> bool:
    """Wait for the end of a child, which stays a zombie."""
    deadline = time.perf_counter() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.perf_counter() > deadline:
            return False
        time.sleep(0.01)
    return True


def _proportional_bytes(process: psutil.Process) -> int:
    """Return a process's memory; pages that several processes share count once for all of them."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


class Library(Program):
    """`encode_batch_fast` for all documents, on all cores."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            [sys.executable, "-c", _ENCODE, str(directory / "text.jsonl"), str(directory / "tokenizer/tokenizer.json")]
        )

    @property
    def encoding_processor_seconds(self) -> float:
        """Of the calls alone."""
        return float(self.output.split()[0])

    @property
    def encoding_seconds(self) -> float:
        """Seconds without the start and the reading, which use one core."""
        return self.seconds - float(self.output.split()[1])


class Build(Program):
    """One corpus, by the command that people type."""

    def __init__(self, directory: Path, name: str) -> None:
        self.corpus = directory / name
        text, tokenizer = directory / "text.jsonl", directory / "tokenizer"
        super().__init__(
            [
                *_ATOLL, "data", "build", str(text), "--source", "jsonl", "--tokenizer", str(tokenizer),
                "--to", str(self.corpus),
            ]
        )  # fmt: skip


def alternate(programs: Sequence[Program]) -> None:
    """Run programs to their ends, one of them at a time."""
    running = list(programs)
    try:
        while running:
            seconds = SLICE_SECONDS if len(running) > 1 else 3600.0
            running = [program for program in running if not program.run(seconds)]
    except BaseException:
        for program in running:
            program.kill()
        raise


def run_with_kills(directory: Path, seconds: float) -> tuple[int, list[Build]]:
    """Kill a build twice, each time after a random part of `seconds`, and let it end; return kills and runs."""
    kills, builds = 0, list[Build]()
    for part in (random.uniform(0.1, 0.5), random.uniform(0.1, 0.4)):
        builds.append(Build(directory, "killed"))
        if builds[-1].run(part * seconds):
            return kills, builds
        builds[-1].kill()
        kills += 1
    builds.append(Build(directory, "killed"))
    alternate(builds[-1:])
    return kills, builds


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="of text")
    parser.add_argument("--rounds", type=int, default=3, help="of the build beside the library; 0: the build alone")
    parser.add_argument("--directory", type=Path, help="where text and corpora are made; default: the temporary folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
