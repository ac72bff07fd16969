"""Mirrors: places that have the files of a corpus, and reads of byte ranges from them.

A mirror is a directory, an `http(s)://` address, or any other address that `fsspec` knows, such as `s3://`, `gs://` and
`hf://`. A mirror may lie, stall, end, or send without end. So a read says how many bytes it wants, takes no more than
those, looks at `cancelled` between any two pieces, and has deadlines for silence. What a mirror sends is believed only
after its hash was checked (`data/fetcher.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from atoll.core.errors import ConfigError

SILENCE = timedelta(seconds=15)  # without a byte, after which a read from a server fails
_MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_LOCAL_REMEDY = "check [data] mirrors in the run spec, or give a directory with the corpus with --data"

Cancelled = Callable[[], bool]


class MirrorFailed(Exception):
    """A mirror did not give the bytes that were asked for. Never leaves `data`."""


class BlockAbsent(MirrorFailed):
    """A mirror works, but does not have these bytes now. It may have others."""


class Mirror(Protocol):
    """A place that has the files of a corpus. Its methods may be called from several threads at once."""

    name: str  # for messages; has no secrets
    local: bool  # reading again costs nothing, so that nothing is kept in the cache

    def read(self, path: str, start: int, stop: int, cancelled: Cancelled) -> bytes:
        """Return exactly bytes `start` to `stop` of a file. Raises `MirrorFailed`, `BlockAbsent`."""
        ...

    def read_whole(self, path: str, at_most: int, cancelled: Cancelled) -> bytes:
        """Return a file of unknown size. Raises `MirrorFailed`, also if it has more than `at_most` bytes."""
        ...

    def close(self) -> None:
        """End its connections. Reads that run fail."""
        ...


def open_mirror(address: str) -> Mirror:
    """Return the mirror at an address. Connects to nothing yet. Raises `ConfigError`."""
    scheme = urlsplit(address).scheme.lower() if "://" in address else ""
    if scheme == "":
        return DirectoryMirror(Path(address).expanduser())
    if scheme == "file":
        return DirectoryMirror(Path(urlsplit(address).path))
    return HttpMirror(address) if scheme in ("http", "https") else FsspecMirror(address)


class DirectoryMirror:
    """A corpus in a directory of this machine."""

    local = True

    def __init__(self, root: Path) -> None:
        self.name, self._root = str(root), root

    def read(self, path: str, start: int, stop: int, cancelled: Cancelled) -> bytes:
        try:
            with (self._root / path).open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), stop - start, start)
        except FileNotFoundError as error:  # a part of a corpus
            raise BlockAbsent(f"{path} is not in {self.name}") from error
        except OSError as error:
            raise MirrorFailed(f"cannot read {path} in {self.name}: {error.strerror or error}") from error
        return _exactly(data, stop - start, path, self.name)

    def read_whole(self, path: str, at_most: int, cancelled: Cancelled) -> bytes:
        try:
            with (self._root / path).open("rb") as file:
                data = file.read(at_most + 1)
        except OSError as error:
            raise MirrorFailed(f"cannot read {path} in {self.name}: {error.strerror or error}") from error
        return _no_more(data, at_most, path, self.name)

    def close(self) -> None:
        pass


class HttpMirror:
    """A corpus behind a web server that serves ranges. Redirects lead to web servers only."""

    local = False

    def __init__(self, address: str) -> None:
        import httpx

        parts = urlsplit(address)
        if not parts.hostname:
            raise ConfigError(f"{address} is not the address of a mirror: it has no host", _LOCAL_REMEDY)
        if parts.query or parts.fragment:
            raise ConfigError(f"{address} is not the address of a mirror: it ends in a query", _LOCAL_REMEDY)
        self.name = f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}".rstrip("/")
        self._base, self._httpx = address.rstrip("/"), httpx
        limits = httpx.Limits(max_connections=32, max_keepalive_connections=16)
        self._client = httpx.Client(
            timeout=SILENCE.total_seconds(), limits=limits, headers={"Accept-Encoding": "identity"}
        )

    def read(self, path: str, start: int, stop: int, cancelled: Cancelled) -> bytes:
        return _exactly(self._get(path, start, stop, cancelled), stop - start, path, self.name)

    def read_whole(self, path: str, at_most: int, cancelled: Cancelled) -> bytes:
        return _no_more(self._get(path, 0, None, cancelled, at_most + 1), at_most, path, self.name)

    def close(self) -> None:
        self._client.close()

    def _get(self, path: str, start: int, stop: int | None, cancelled: Cancelled, at_most: int = 0) -> bytes:
        headers = {} if stop is None else {"Range": f"bytes={start}-{stop - 1}"}
        wanted, address = at_most if stop is None else stop - start, f"{self._base}/{path}"
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                with self._client.stream("GET", address, headers=headers) as answer:
                    if answer.status_code in _REDIRECTS and answer.next_request is not None:
                        address = str(answer.next_request.url)  # httpx has no transport but those for http and https
                        continue
                    if answer.status_code not in ((200,) if stop is None else (200, 206)):
                        raise MirrorFailed(f"{self.name} answers {answer.status_code} to {path}")
                    if stop is not None and answer.status_code == 200 and start:
                        raise MirrorFailed(f"{self.name} does not serve byte ranges")
                    data = bytearray()
                    for piece in answer.iter_raw():
                        data += piece
                        if len(data) >= wanted:
                            return bytes(data[:wanted])
                        if cancelled():
                            raise MirrorFailed(f"{self.name} was too slow")
                    return bytes(data)
            raise MirrorFailed(f"{self.name} redirects {path} more than {_MAX_REDIRECTS} times")
        except (self._httpx.HTTPError, self._httpx.InvalidURL, RuntimeError, OSError) as error:  # RuntimeError: closed
            raise MirrorFailed(f"{self.name} does not give {path}: {error or type(error).__name__}") from error


class FsspecMirror:
    """A corpus in a store that `fsspec` knows. Credentials come from the environment of the node, never from a spec."""

    local = False

    def __init__(self, address: str) -> None:
        try:
            import fsspec

            self._files, self._root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            scheme = urlsplit(address).scheme
            raise ConfigError(
                f"mirrors at {scheme}:// need a library: {error}",
                f"pip install 'fsspec[{scheme}]', or use another mirror",
            ) from error
        self.name = address

    def read(self, path: str, start: int, stop: int, cancelled: Cancelled) -> bytes:
        return _exactly(self._cat(path, start, stop), stop - start, path, self.name)

    def read_whole(self, path: str, at_most: int, cancelled: Cancelled) -> bytes:
        return _no_more(self._cat(path, 0, at_most + 1), at_most, path, self.name)

    def close(self) -> None:
        pass

    def _cat(self, path: str, start: int, stop: int) -> bytes:
        try:
            return bytes(self._files.cat_file(f"{self._root}/{path}", start=start, end=stop))
        except Exception as error:  # stores raise what they like
            raise MirrorFailed(f"{self.name} does not give {path}: {error or type(error).__name__}") from error


def _exactly(data: bytes, size: int, path: str, name: str) -> bytes:
    if len(data) != size:
        raise MirrorFailed(f"{name} gave {len(data)} bytes of {path} instead of {size}")
    return data


def _no_more(data: bytes, at_most: int, path: str, name: str) -> bytes:
    if len(data) > at_most:
        raise MirrorFailed(f"{path} at {name} is larger than {at_most} bytes")
    return data
