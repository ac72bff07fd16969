"""A mirror for tests and benchmarks: a web server with the files of a corpus, and with faults that can be switched on.

Files come from a function of path, start and stop, so that a corpus of 10^12 tokens needs no disk.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from atoll.node.data.blocks import CHUNK_BYTES, hash_shard
from atoll.node.data.card import CARD_NAME, CardTokenizer, CorpusCard, Shard, ShardName, Source
from atoll.node.model.tokenizer import ByteTokenizer

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")

Files = Callable[[str, int, int | None], bytes | None]  # path, start, stop (None: the end) → bytes; None: no such file


@dataclass
class Faults:
    """What the server does wrong. Each may change while it runs."""

    lies: Callable[[str, int], bool] = lambda path, start: False  # whether an answer is wrong
    spoil: Callable[[str, int, bytes], bytes] = lambda path, start, body: body
    bytes_per_second: float = 0.0  # of each answer; 0: no limit
    delay_seconds: float = 0.0  # before each answer
    stalls: bool = False  # it accepts requests and says nothing
    status: int = 0  # it answers this
    ignores_ranges: bool = False
    endless: bool = False
    redirect: str = ""  # it leads here
    ended: threading.Event = field(default_factory=threading.Event)


class CorpusServer:
    """A web server on loopback or another address. Use it as a context manager."""

    def __init__(self, files: Files, host: str = "127.0.0.1", port: int = 0) -> None:
        self.faults = Faults()
        self.requests: list[tuple[str, int, int]] = []  # path, start, stop
        self.body_bytes = 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner._answer(self, files)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = _Server((host, port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def address(self) -> str:
        """The mirror's address."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/corpus"

    def __enter__(self) -> CorpusServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.faults.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: BaseHTTPRequestHandler, files: Files) -> None:
        faults, path = self.faults, request.path.removeprefix("/corpus/")
        asked = _RANGE.fullmatch(request.headers.get("Range", ""))
        ranged = asked is not None and not faults.ignores_ranges
        start, stop = (int(asked[1]), int(asked[2]) + 1) if asked is not None and ranged else (0, None)
        self.requests.append((path, start, stop or 0))
        if faults.stalls:
            faults.ended.wait()
            request.close_connection = True
            return
        if faults.delay_seconds:
            faults.ended.wait(faults.delay_seconds)
        if faults.redirect:
            request.send_response(302)
            request.send_header("Location", faults.redirect)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        body = None if faults.status else files(path, start, stop)
        request.send_response(faults.status or (404 if body is None else 206 if ranged else 200))
        body = body or b""
        if body and faults.lies(path, start):
            body = bytes([body[0] ^ 1]) + body[1:]
        body = faults.spoil(path, start, body)
        request.send_header("Content-Length", str(1 << 60 if faults.endless else len(body)))
        request.end_headers()
        try:
            while True:
                self._send(request, body)
                if not faults.endless or faults.ended.is_set():
                    break
        except OSError:  # the reader hung up
            request.close_connection = True

    def _send(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        rate = self.faults.bytes_per_second
        step = max(1, int(rate / 10)) if rate else 1 << 16
        for start in range(0, len(body), step):
            if self.faults.ended.is_set():
                raise OSError("the server ends")
            piece = body[start : start + step]
            request.wfile.write(piece)
            self.body_bytes += len(piece)
            if rate:
                time.sleep(len(piece) / rate)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing when a reader hangs up."""


def files_of(root: Path) -> Files:
    """Return the files of a directory."""

    def read(path: str, start: int, stop: int | None) -> bytes | None:
        file = root / path
        return file.read_bytes()[start:stop] if file.is_file() else None

    return read


def endless_corpus(tokens: int, shard_bytes: int = 64 << 20) -> tuple[Files, str]:
    """Return a corpus of bytes as tokens that claims `tokens` tokens, and the digest of its card.

    All shards have the same bytes, which are made on demand, so that only one must be hashed.
    """
    content = np.random.default_rng(7).integers(1, 256, shard_bytes, dtype=np.uint8).tobytes()
    root, digests = hash_shard(memoryview(content)[at : at + CHUNK_BYTES] for at in range(0, shard_bytes, CHUNK_BYTES))
    shard = Shard(
        tokens=shard_bytes,
        documents=1,
        sha256=hashlib.sha256(content).hexdigest(),
        root=root,
        documents_sha256="0" * 64,
    )
    card = CorpusCard(
        token_bytes=1,
        tokenizer=card_tokenizer(),
        sources=(Source(name="web", shards=(shard,) * -(-tokens // shard_bytes)),),
    ).to_json()
    names = re.compile(r"web/\d{6,}\.(tokens|digests)")

    def read(path: str, start: int, stop: int | None) -> bytes | None:
        if path == CARD_NAME:
            return card[start:stop]
        found = names.fullmatch(path)
        return None if found is None else (content if found[1] == "tokens" else digests)[start:stop]

    return read, hashlib.sha256(card).hexdigest()


def write_corpus(root: Path, sources: dict[str, list[bytes]]) -> str:
    """Write a corpus whose shards have these bytes as tokens, and return the digest of its card."""
    written = []
    for name, shards in sources.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        rows = []
        for number, content in enumerate(shards):
            tree, digests = hash_shard(content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES))
            (root / ShardName(name, number).path("tokens")).write_bytes(content)
            (root / ShardName(name, number).path("digests")).write_bytes(digests)
            rows.append(
                Shard(
                    tokens=len(content),
                    documents=1,
                    sha256=hashlib.sha256(content).hexdigest(),
                    root=tree,
                    documents_sha256="0" * 64,
                )
            )
        written.append(Source(name=name, shards=tuple(rows)))
    card = CorpusCard(token_bytes=1, tokenizer=card_tokenizer(), sources=tuple(written)).to_json()
    (root / CARD_NAME).write_bytes(card)
    return hashlib.sha256(card).hexdigest()


def card_tokenizer() -> CardTokenizer:
    """Return bytes as tokens, as a card names them."""
    tokenizer = ByteTokenizer()
    return CardTokenizer(
        name=tokenizer.name,
        digest=tokenizer.digest,
        vocabulary=tokenizer.vocabulary,
        separator=tokenizer.separator,
    )
