"""Mirrors: places that have the files of a corpus, and reads of byte ranges from them.

A mirror is a directory, an `http(s)://` address, or a store that `fsspec` reads (`s3://`, `gs://`, `az://`, `hf://`). A
mirror may lie, stall, end, or send without end. So a read says how many bytes it wants, takes no more than those, and
from a web server looks at `cancelled` between any two pieces and has a deadline for silence. Bytes from a mirror are
used only after their hash was checked (`data/fetcher.py`).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import urlsplit

from atoll.core.errors import ConfigError

SILENCE = timedelta(seconds=15)  # without a byte, after which a read from a server fails
_MAX_REDIRECTS = 5
_PIECE_BYTES = 4 << 20  # of a file of unknown size
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_LOCAL_REMEDY = "check [data] mirrors in the run spec, or give a directory with the corpus with --data"

_WEB = ("http", "https")
_STORES = frozenset({"abfs", "az", "gcs", "gs", "hf", "s3"})  # of fsspec

Cancelled = Callable[[], bool]
Kind = Literal["directory", "server", "members"]


class MirrorFailed(Exception):
    """A mirror did not give the requested bytes. Never leaves `data`."""


class BlockAbsent(MirrorFailed):
    """A mirror works, but does not have these bytes now. It may have others."""


class Mirror(Protocol):
    """A place that has the files of a corpus. Its methods may be called from several threads at once."""

    name: str  # for messages; has no secrets
    kind: Kind  # a directory of this machine is fast to read again, so its blocks are not cached

    def read(self, path: str, start: int, stop: int, cancelled: Cancelled) -> bytes:
        """Return exactly bytes `start` to `stop` of a file. Raises `MirrorFailed`, `BlockAbsent`."""
        ...

    def read_whole(self, path: str, at_most: int, cancelled: Cancelled) -> bytes:
        """Return a file of unknown size. Raises `MirrorFailed`, also if it has more than `at_most` bytes."""
        ...

    def pieces(self, path: str, at_most: int, cancelled: Cancelled) -> Iterator[bytes]:
        """Yield the file in parts of a few MB at most and keep none of them. Raises the errors of `read_whole`."""
        ...

    def close(self) -> None:
        """Close the mirror's connections. Running reads fail."""
        ...


def open_mirror(address: str) -> Mirror:
    """Return the mirror at an address. Connects to nothing. Raises `ConfigError`.

    An address may come from a run spec, so only known kinds of stores are opened: `fsspec` has others, which chain
    addresses, write files or evaluate templates. Credentials have no place in an address.
    """
    if "://" not in address:
        return DirectoryMirror(Path(address))
    try:
        parts = urlsplit(address)
        scheme, host, port, user = parts.scheme.lower(), parts.hostname, parts.port, parts.username
    except ValueError as error:
        raise ConfigError(f"the address of a mirror cannot be read: {error}", _LOCAL_REMEDY) from error
    if scheme == "file":
        return DirectoryMirror(Path(parts.path))
    if scheme not in (*_WEB, *_STORES):
        known = ", ".join((*_WEB, *sorted(_STORES)))
        raise ConfigError(f"mirrors at {scheme[:20]}:// are not supported", f"use a directory, or one of {known}")
    if not host or "::" in address or parts.query or parts.fragment or user is not None:
        raise ConfigError(
            f"the address of a mirror at {scheme}:// must be a host or bucket and a path, without user or query",
            _LOCAL_REMEDY,
        )
    name = f"{scheme}://{host}{f':{port}' if port else ''}{parts.path}".rstrip("/")
    return HttpMirror(name) if scheme in _WEB else FsspecMirror(name)


class UnusableMirror:
    """A placeholder for a mirror that this node cannot open while it can open others."""

    kind: Kind = "server"

    def __init__(self, reason: str) -> None:
        self.name, self._reason = "a mirror", reason

    def read(self, path: str, start: int, stop: int, cancelled: Cancelled) -> bytes:
        raise MirrorFailed(self._reason)

    def read_whole(self, path: str, at_most: int, cancelled: Cancelled) -> bytes:
        raise MirrorFailed(self._reason)

    def pieces(self, path: str, at_most: int, cancelled: Cancelled) -> Iterator[bytes]:
        raise MirrorFailed(self._reason)

    def close(self) -> None:
        pass


class DirectoryMirror:
    """A corpus in a directory of this machine."""

    kind: Kind = "directory"

    def __init__(self, root: Path) -> None:
        self.name, self._root = str(root), root

    def read(self, path: str, start: int, stop: int, cancelled: Cancelled) -> bytes:
        try:
            with (self._root / path).open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), stop - start, start)
        except FileNotFoundError as error:  # the directory has only a part of the corpus
            raise BlockAbsent(f"{path} is not in {self.name}") from error
        except OSError as error:
            raise MirrorFailed(f"cannot read {path} in {self.name}: {error.strerror or error}") from error
        if len(data) < stop - start:  # the file is being copied
            raise BlockAbsent(f"{path} in {self.name} is cut short")
        return data

    def read_whole(self, path: str, at_most: int, cancelled: Cancelled) -> bytes:
        return b"".join(self.pieces(path, at_most, cancelled))

    def pieces(self, path: str, at_most: int, cancelled: Cancelled) -> Iterator[bytes]:
        try:
            with (self._root / path).open("rb") as file:
                yield from _no_more(iter(lambda: file.read(_PIECE_BYTES), b""), at_most, path, self.name)
        except OSError as error:
            raise MirrorFailed(f"cannot read {path} in {self.name}: {error.strerror or error}") from error

    def close(self) -> None:
        pass


class HttpMirror:
    """A corpus behind a web server that serves ranges. Redirects lead to web servers only."""

    kind: Kind = "server"

    def __init__(self, address: str) -> None:
        import httpx

        self.name = self._base = address
        self._httpx = httpx
        limits = httpx.Limits(max_connections=32, max_keepalive_connections=16)
        self._client = httpx.Client(
            timeout=SILENCE.total_seconds(), limits=limits, headers={"Accept-Encoding": "identity"}
        )

    def read(self, path: str, start: int, stop: int, cancelled: Cancelled) -> bytes:
        data = b"".join(self._get(path, start, stop, cancelled, stop - start))
        return _exactly(data, stop - start, path, self.name)

    def read_whole(self, path: str, at_most: int, cancelled: Cancelled) -> bytes:
        return b"".join(self.pieces(path, at_most, cancelled))

    def pieces(self, path: str, at_most: int, cancelled: Cancelled) -> Iterator[bytes]:
        return _no_more(self._get(path, 0, None, cancelled, at_most + 1), at_most, path, self.name)

    def close(self) -> None:
        self._client.close()

    def _get(self, path: str, start: int, stop: int | None, cancelled: Cancelled, wanted: int) -> Iterator[bytes]:
        """Yield at most `wanted` bytes."""
        headers = {} if stop is None else {"Range": f"bytes={start}-{stop - 1}"}
        address = f"{self._base}/{path}"
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                with self._client.stream("GET", address, headers=headers) as answer:
                    if answer.status_code in _REDIRECTS and answer.next_request is not None:
                        target = answer.next_request.url
                        if is_private(target.host) and not is_private(str(urlsplit(address).hostname)):
                            raise MirrorFailed(f"{self.name} redirects to a private address")
                        address = str(target)  # httpx has no transport but those for http and https
                        continue
                    if answer.status_code not in ((200,) if stop is None else (200, 206)):
                        raise MirrorFailed(f"{self.name} answers {answer.status_code} to {path}")
                    if stop is not None and answer.status_code == 200 and start:
                        raise MirrorFailed(f"{self.name} does not serve byte ranges")
                    for piece in answer.iter_raw():
                        yield piece[:wanted]
                        wanted -= len(piece)
                        if wanted <= 0:
                            return
                        if cancelled():
                            raise MirrorFailed(f"{self.name} was too slow")
                    return
            raise MirrorFailed(f"{self.name} redirects {path} more than {_MAX_REDIRECTS} times")
        except (self._httpx.HTTPError, self._httpx.InvalidURL, RuntimeError, OSError) as error:  # RuntimeError: closed
            raise MirrorFailed(f"{self.name} does not give {path}: {error or type(error).__name__}") from error


class FsspecMirror:
    """A corpus in a store that `fsspec` supports. Credentials come from the node's environment, never from a spec."""

    kind: Kind = "server"

    def __init__(self, address: str) -> None:
        scheme = urlsplit(address).scheme
        try:
            import fsspec

            self._files, self._root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError, OSError) as error:
            what = f"mirrors at {scheme}:// need a library: {error}"
            raise ConfigError(what, f"pip install 'fsspec[{scheme}]', or use another mirror") from error
        self.name = address

    def read(self, path: str, start: int, stop: int, cancelled: Cancelled) -> bytes:
        return _exactly(self._cat(path, start, stop), stop - start, path, self.name)

    def read_whole(self, path: str, at_most: int, cancelled: Cancelled) -> bytes:
        return b"".join(self.pieces(path, at_most, cancelled))

    def pieces(self, path: str, at_most: int, cancelled: Cancelled) -> Iterator[bytes]:
        return _no_more(self._parts(path, at_most + 1, cancelled), at_most, path, self.name)

    def close(self) -> None:
        pass

    def _parts(self, path: str, wanted: int, cancelled: Cancelled) -> Iterator[bytes]:
        try:
            told = self._files.info(f"{self._root}/{path}").get("size")
            size = min(wanted, int(told)) if told is not None else None
        except Exception as error:
            raise MirrorFailed(f"{self.name} does not give {path}: {error or type(error).__name__}") from error
        if size is None:  # some stores do not report the size of a file, and refuse reads that begin at its end
            yield self._cat(path, 0, wanted)
            return
        for start in range(0, size, _PIECE_BYTES):
            if cancelled():
                raise MirrorFailed(f"{self.name} was too slow")
            yield self._cat(path, start, min(size, start + _PIECE_BYTES))

    def _cat(self, path: str, start: int, stop: int) -> bytes:
        try:
            return bytes(self._files.cat_file(f"{self._root}/{path}", start=start, end=stop))
        except Exception as error:  # stores can raise any exception
            raise MirrorFailed(f"{self.name} does not give {path}: {error or type(error).__name__}") from error


def is_private(host: str) -> bool:
    """Return whether a host is, or resolves to, a non-public address. A host that does not resolve is not private."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return any(not ipaddress.ip_address(str(one).partition("%")[0]).is_global for one in found)


def _exactly(data: bytes, size: int, path: str, name: str) -> bytes:
    if len(data) != size:
        raise MirrorFailed(f"{name} gave {len(data)} bytes of {path} instead of {size}")
    return data


def _no_more(pieces: Iterable[bytes], at_most: int, path: str, name: str) -> Iterator[bytes]:
    left = at_most
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise MirrorFailed(f"{path} at {name} is larger than {at_most} bytes")
        yield piece
