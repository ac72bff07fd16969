"""Builds with real processes: the same corpus after SIGKILL at any step, after Ctrl-C and after a full disk."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.corpora import SMALL, build_inline, files_of, small_spec, tokens_of, write_jsonl

from atoll.node.data.build import build_corpus

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])}
DOCUMENTS = [f"document {number}: " + "words and " * (number % 7) for number in range(60)]
END = "<|endoftext|>"
ATOLL = [sys.executable, "-c", "from atoll.lab.cli.main import main; main()"]


def atoll(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ATOLL, "data", *map(str, arguments)], capture_output=True, text=True, env=ENVIRONMENT, timeout=240, **options
    )  # type: ignore[call-overload]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_what_one_process_gives(workers: int, tmp_path: Path) -> None:
    spec = small_spec(write_jsonl(tmp_path / "in.jsonl", DOCUMENTS))
    expected = build_inline(spec, tmp_path / "inline")
    assert build_corpus(spec, tmp_path / "corpus", workers=workers, limits=SMALL).digest == expected.digest
    assert files_of(tmp_path / "corpus") == files_of(tmp_path / "inline")


def byte_level_bpe(directory: Path) -> str:
    """Write a tokenizer with a few merges, by hand: no release of a library changes it."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    letters = "".join(chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)))
    merges = [tuple(pair.split("+")) for pair in ["w+o", "wo+r", "wor+d", "word+s", "Ġ+a", "Ġa+n", "Ġan+d", "Ġ+words"]]
    vocabulary = [*letters, *map("".join, merges), END]
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: number for number, token in enumerate(vocabulary)}, merges)
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=library, eos_token=END).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize(
    ("tokenizer", "sha256"),
    [
        ("bytes", "6a04427c1071b4745924a944a1e38cfbdef5e806ece81951177182c4b92770f5"),
        ("BPE", "45fe9f7b2a9b03660f2352f82563d018dd60d3b0cad6f7edcd822abccaead77f"),
    ],
)
def test_a_corpus_has_the_same_bytes_in_every_release(tokenizer: str, sha256: str, tmp_path: Path) -> None:
    documents = [*DOCUMENTS, f"text that spells {END}", "naïve words \N{SNOWMAN} 12  \n" * 9]
    name = tokenizer if tokenizer == "bytes" else byte_level_bpe(tmp_path / "tokenizer")
    spec = small_spec(write_jsonl(tmp_path / "in.jsonl", documents), tokenizer=name)
    card = build_corpus(spec, tmp_path / "corpus", workers=2, limits=SMALL).card
    assert hashlib.sha256(tokens_of(tmp_path / "corpus", card, "s0").tobytes()).hexdigest() == sha256


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("create", "/units/s0/.000000.spill.tmp"),
        ("rename", "/units/s0/000003.spill"),
        ("create", "/s0/.000001.tokens.tmp"),
        ("rename", "/s0/000002.tokens"),
        ("rename", "/s0/000002.documents"),
        ("rename", "/shards/s0/000004.json"),
        ("rename", "/groups/s0/000000.json"),
        ("create", "/groups/s0/.000001.json.tmp"),
        ("rename", "/corpus.json"),
    ],
)
def test_a_killed_build_goes_on_to_the_same_corpus(operation: str, name: str, tmp_path: Path) -> None:
    path, corpus = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS), tmp_path / "corpus"
    program = "from support.killed_build import main; main()"
    killed = subprocess.run(
        [sys.executable, "-c", program, str(path), str(corpus), operation, name],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=240,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (corpus / "corpus.json").exists()
    assert (corpus / ".build").exists()
    spec = small_spec(path)
    resumed = build_corpus(spec, corpus, workers=2, limits=SMALL)
    assert resumed.digest == build_inline(spec, tmp_path / "undisturbed").digest
    assert files_of(corpus) == files_of(tmp_path / "undisturbed")


def test_a_full_disk_is_a_sentence_and_the_build_goes_on(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"text that is longer than a file may be\n" * 50_000)
    command = ("build", tmp_path / "in.txt", "--to", tmp_path / "corpus")
    limit = 1_000_000

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    full = atoll(*command, preexec_fn=limit_files)
    assert full.returncode == 78, full.stderr
    assert "cannot write" in full.stderr
    assert "File too large" in full.stderr
    assert "goes on where it stopped" in full.stderr
    assert "Traceback" not in full.stderr
    assert not (tmp_path / "corpus/corpus.json").exists()
    resumed = atoll(*command)
    clean = atoll("build", tmp_path / "in.txt", "--to", tmp_path / "clean")
    assert (resumed.returncode, resumed.stdout) == (0, clean.stdout), resumed.stderr


def test_ctrl_c_ends_every_process_and_says_how_to_go_on(tmp_path: Path) -> None:
    line = json.dumps({"text": "words " * 1000}) + "\n"
    (tmp_path / "in.jsonl").write_text(line * 800)
    arguments = ["data", "build", str(tmp_path / "in.jsonl"), "--source", "jsonl", "--to", str(tmp_path / "c")]
    held = [sys.executable, "-c", "from support.killed_build import held; held()", *arguments]
    with subprocess.Popen(held, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, process_group=0) as child:
        assert child.stderr is not None
        assert child.stderr.readline().startswith("tokenising: 0 B of")
        os.killpg(child.pid, signal.SIGINT)
        told = child.stderr.read()  # to its end: no process has it open any more
    assert child.returncode == 130
    assert "repeat the command to go on" in told
    assert "Traceback" not in told
    assert not (tmp_path / "c/corpus.json").exists()
    resumed = subprocess.run([*ATOLL, *arguments], capture_output=True, text=True, env=ENVIRONMENT, timeout=240)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(atoll("show", tmp_path / "c", "-o", "json").stdout)["corpus"]["documents"] == 800
