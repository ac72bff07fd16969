"""Mirrors over real sockets: exact ranges, and an error instead of anything that is not what was asked for."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.corpus_server import CorpusServer, files_of

from atoll.core.errors import ConfigError
from atoll.node.data import mirrors
from atoll.node.data.mirrors import DirectoryMirror, FsspecMirror, HttpMirror, Mirror, MirrorFailed, open_mirror

CONTENT = os.urandom(300_000)


def never() -> bool:
    return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CorpusServer]:
    (tmp_path / "web").mkdir()
    (tmp_path / "web/000000.tokens").write_bytes(CONTENT)
    with CorpusServer(files_of(tmp_path)) as running:
        yield running


@pytest.fixture(params=["directory", "http", "fsspec"])
def mirror(request: pytest.FixtureRequest, server: CorpusServer, tmp_path: Path) -> Mirror:
    if request.param == "fsspec":  # as s3:// is read, from a store that needs no network
        return FsspecMirror(f"local://{tmp_path}")
    return open_mirror({"directory": str(tmp_path), "http": server.address}[request.param])


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 300_000), (7, 8), (65_536, 250_001), (299_999, 300_000)])
def test_a_range_is_exact(mirror: Mirror, start: int, stop: int) -> None:
    assert mirror.read("web/000000.tokens", start, stop, never) == CONTENT[start:stop]


def test_a_file_that_ends_early_or_is_absent_is_an_error(mirror: Mirror) -> None:
    with pytest.raises(MirrorFailed):
        mirror.read("web/000000.tokens", 299_990, 300_010, never)
    with pytest.raises(MirrorFailed):
        mirror.read("web/000001.tokens", 0, 1, never)


def test_a_whole_file_has_a_limit(mirror: Mirror) -> None:
    assert mirror.read_whole("web/000000.tokens", 300_000, never) == CONTENT
    with pytest.raises(MirrorFailed, match="larger than 299999"):
        mirror.read_whole("web/000000.tokens", 299_999, never)


@pytest.mark.parametrize("told", [{}, {"size": None}])
def test_a_store_that_tells_no_size_is_read_within_the_limit(
    server: CorpusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, object]
) -> None:
    mirror = FsspecMirror(f"local://{tmp_path}")
    monkeypatch.setattr(mirror._files, "info", lambda path: told)
    assert mirror.read_whole("web/000000.tokens", 300_000, never) == CONTENT
    with pytest.raises(MirrorFailed, match="larger than 299999"):
        mirror.read_whole("web/000000.tokens", 299_999, never)


def test_kinds_of_addresses() -> None:
    assert isinstance(open_mirror("/tmp/somewhere"), DirectoryMirror)
    assert isinstance(open_mirror("file:///tmp/somewhere"), DirectoryMirror)
    assert isinstance(open_mirror("https://example.org/x"), HttpMirror)
    assert open_mirror("https://example.org:8443/x/").name == "https://example.org:8443/x"


@pytest.mark.parametrize(
    "address",
    [
        "https://", "http:///x", "https://example.org/x?token=1", "https://example.org/x#a", "http://h:99999/c",
        "http://[::1", "https://user:secret@example.org/x", "s3://key:secret@bucket/c",
        "reference://::data:application/json;base64,e30=", "simplecache::https://example.org/x", "zip://x::https://h/y",
        "local:///etc", "memory://x", "ftp://127.0.0.1:1/x", "github://a:b@c", "dir::file:///etc", "nonsense://x",
    ],
)  # fmt: skip
def test_an_address_can_only_name_a_known_store_and_no_secret(address: str) -> None:
    """A run spec has such addresses: `fsspec` would evaluate templates, write files, and connect."""
    with pytest.raises(ConfigError) as refused:
        open_mirror(address)
    assert "secret" not in f"{refused.value} {refused.value.remedy}"


def test_a_redirect_from_a_public_to_a_private_address_is_refused(
    server: CorpusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CorpusServer(lambda path, start, stop: b"x" * 10) as inside:
        server.faults.redirect = f"{inside.address}/a"
        hosts = iter([True, False])  # the target, then the mirror
        monkeypatch.setattr(mirrors, "is_private", lambda host: next(hosts))
        with pytest.raises(MirrorFailed, match="private address"):
            open_mirror(server.address).read("a", 0, 10, never)
        assert not inside.requests


def test_what_is_private() -> None:
    assert all(map(mirrors.is_private, ("127.0.0.1", "localhost", "10.1.2.3", "169.254.169.254", "::1", "fe80::1")))
    assert not mirrors.is_private("1.1.1.1")


def test_an_endless_body_is_cut_at_what_was_asked_for(server: CorpusServer) -> None:
    server.faults.endless = True
    mirror = open_mirror(server.address)
    assert mirror.read("web/000000.tokens", 5, 100, never) == CONTENT[5:100]
    with pytest.raises(MirrorFailed, match="larger than"):
        mirror.read_whole("web/000000.tokens", 1_000_000, never)


def test_a_server_without_ranges_is_read_from_the_start_only(server: CorpusServer) -> None:
    server.faults.ignores_ranges = True
    mirror = open_mirror(server.address)
    assert mirror.read("web/000000.tokens", 0, 100, never) == CONTENT[:100]
    with pytest.raises(MirrorFailed, match="byte ranges"):
        mirror.read("web/000000.tokens", 1, 100, never)


@pytest.mark.parametrize("status", [401, 403, 404, 416, 429, 500, 503])
def test_a_status_is_named(server: CorpusServer, status: int) -> None:
    server.faults.status = status
    with pytest.raises(MirrorFailed, match=str(status)):
        open_mirror(server.address).read("web/000000.tokens", 0, 1, never)


def test_a_redirect_to_a_web_server_is_followed(server: CorpusServer, tmp_path: Path) -> None:
    with CorpusServer(files_of(tmp_path)) as other:
        server.faults.redirect = f"{other.address}/web/000000.tokens"
        assert open_mirror(server.address).read("web/000000.tokens", 3, 9, never) == CONTENT[3:9]


def test_a_redirect_elsewhere_or_in_a_circle_is_an_error(server: CorpusServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 10)
    for target in (f"file://{secret}", "ftp://127.0.0.1/x", "data:,xxxxxxxxxx", "http://[bad/", f"{server.address}/a"):
        server.faults.redirect = target
        with pytest.raises(MirrorFailed):
            open_mirror(server.address).read("web/000000.tokens", 0, 10, never)


def test_a_silent_server_is_an_error(server: CorpusServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "SILENCE", mirrors.SILENCE / 50)
    server.faults.stalls = True
    with pytest.raises(MirrorFailed):
        open_mirror(server.address).read("web/000000.tokens", 0, 1, never)


def test_a_slow_answer_can_be_cancelled(server: CorpusServer) -> None:
    server.faults.bytes_per_second = 1000.0  # five minutes for the file
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 2

    with pytest.raises(MirrorFailed, match="too slow"):
        open_mirror(server.address).read("web/000000.tokens", 0, 300_000, cancelled)


def test_a_port_where_nobody_listens_is_an_error(tmp_path: Path) -> None:
    with CorpusServer(files_of(tmp_path)) as gone:
        address = gone.address
    with pytest.raises(MirrorFailed):
        open_mirror(address).read("web/000000.tokens", 0, 1, never)
