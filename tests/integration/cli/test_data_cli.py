"""`atoll data` as people and scripts use it: output, exit codes, messages, and what it imports."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.corpora import write_jsonl

ATOLL = [sys.executable, "-c", "from atoll.lab.cli.main import main; main()"]
IMPORTS = """
import sys
from atoll.lab.cli.main import main
try: main()
except SystemExit as end: code = end.code
heavy = {"torch", "hivemind", "transformers", "tokenizers", "pyarrow"}
print("heavy:", code, sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
DOCUMENTS = [f"document {number} of a small corpus" for number in range(200)]


def atoll(*arguments: object, program: list[str] = ATOLL, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [*program, "data", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=cwd)


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, and with a corpus of it."""
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(folder / "in.jsonl", DOCUMENTS)
    (folder / "spec.toml").write_text('[[sources]]\nname = "web"\nsource = "jsonl"\npath = "in.jsonl"\n')
    done = atoll("build", folder / "spec.toml", "--to", folder / "corpus")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) == 64
    return folder


def test_a_corpus_is_shown_verified_and_sampled(folder: Path) -> None:
    text = atoll("show", folder / "corpus").stdout
    shown = json.loads(atoll("show", folder / "corpus", "--output", "json").stdout)
    assert shown["version"] == 1
    assert shown["corpus"]["sources"] == [
        {"name": "web", "tokens": sum(len(it) + 1 for it in DOCUMENTS), "documents": 200, "shards": 1}
    ]
    assert (shown["corpus"]["tokenizer"]["name"], shown["corpus"]["left_out"]) == ("bytes", {})
    for word in ("web", "200", "bytes", shown["corpus"]["digest"]):
        assert word in text
    verified = atoll("verify", folder / "corpus")
    assert (verified.returncode, verified.stdout.strip()) == (0, shown["corpus"]["digest"])
    samples = json.loads(atoll("sample", folder / "corpus", "-n", 5, "--source", "web", "-o", "json").stdout)["samples"]
    assert len(samples) == 5
    assert all("of a small corpus" in sample["text"] for sample in samples)
    assert "--- web, shard 0, token" in atoll("sample", folder / "corpus", "-n", 1).stdout


def test_text_is_built_without_a_spec(folder: Path, tmp_path: Path) -> None:
    command = ("build", folder / "in.jsonl", "--source", "jsonl", "--name", "web", "--workers", 1)
    done = atoll(*command, "--to", tmp_path / "corpus", "-o", "json")
    built = json.loads(done.stdout)["corpus"]
    assert built["digest"] == json.loads(atoll("show", folder / "corpus", "-o", "json").stdout)["corpus"]["digest"]
    assert built["directory"] == str(tmp_path / "corpus")
    refused(atoll(*command, "--to", tmp_path / "corpus"), 1, "has a complete corpus")
    refused(atoll("build", folder / "spec.toml", "--seed", 1, "--to", tmp_path / "x"), 2, "--seed cannot be combined")
    refused(atoll("build", folder / "in.jsonl", "--name", "../x", "--to", tmp_path / "x"), 78, "--name: '../x'")
    refused(atoll("build", folder / "none.toml", "--to", tmp_path / "x"), 78, "cannot read")
    refused(atoll("build", folder / "none.txt", "--to", tmp_path / "x"), 78, "no training text")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", ["build text.txt --to", "verify", "sample"])
def test_a_url_is_refused_where_a_directory_is_needed(command: str, folder: Path) -> None:
    before = sorted(folder.iterdir())
    refused(atoll(*command.split(), "s3://bucket/corpus", cwd=folder), 2, "s3://bucket/corpus is a URL")
    assert sorted(folder.iterdir()) == before


def test_left_out_lines_are_named_or_end_the_build(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text((folder / "in.jsonl").read_text() + "cut off\n")
    command = ("build", tmp_path / "in.jsonl", "--source", "jsonl", "--to", tmp_path / "corpus")
    refused(atoll(*command, "--strict"), 78, "line 201")
    done = atoll(*command, "--restart")
    assert done.returncode == 0
    assert "text: 1 unusable line left out (the first is line 201" in done.stderr
    assert "left out: 1 lines" in atoll("show", tmp_path / "corpus").stdout


def test_a_damaged_corpus_is_named_and_exits_with_78(folder: Path, tmp_path: Path) -> None:
    assert atoll("build", folder / "spec.toml", "--to", tmp_path / "corpus").returncode == 0
    tokens = tmp_path / "corpus/web/000000.tokens"
    tokens.write_bytes(b"x" + tokens.read_bytes()[1:])
    refused(atoll("verify", tmp_path / "corpus"), 78, "web/000000.tokens is damaged in block 0")
    told = atoll("verify", tmp_path / "corpus", "-o", "json")
    assert told.returncode == 78
    assert json.loads(told.stdout)["verify"]["wrong"] == ["web/000000.tokens is damaged in block 0 (of 8 KiB)"]
    tokens.unlink()
    refused(atoll("verify", tmp_path / "corpus"), 78, "web/000000.tokens is missing")
    refused(atoll("verify", tmp_path), 1, "is no corpus")


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    """A static file server with the folder."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_corpus_behind_a_url_is_shown(folder: Path, url: str) -> None:
    assert atoll("show", f"{url}/corpus/", "-o", "json").stdout == atoll("show", folder / "corpus", "-o", "json").stdout
    refused(atoll("show", f"{url}/nothing"), 1, "404")
    with contextlib.closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        refused(atoll("show", f"http://127.0.0.1:{unused.getsockname()[1]}"), 69, "cannot fetch")


@pytest.mark.parametrize("command", ["show", "verify", "sample"])
def test_no_command_imports_torch(command: str, folder: Path) -> None:
    done = atoll(command, folder / "corpus", program=[sys.executable, "-c", IMPORTS])
    assert "heavy: 0 []" in done.stderr, done.stderr


def test_the_build_imports_no_torch_in_its_own_process(folder: Path, tmp_path: Path) -> None:
    command = ("build", folder / "spec.toml", "--to", tmp_path / "corpus")
    done = atoll(*command, program=[sys.executable, "-c", IMPORTS])
    assert "heavy: 0 []" in done.stderr, done.stderr
    assert os.listdir(tmp_path / "corpus") in (["web", "corpus.json"], ["corpus.json", "web"])
