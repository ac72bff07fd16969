"""Mirrors that have only a part: what one lacks comes from another, and is waited for if none has it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from support.hurrying_clock import HurryingClock

from atoll.core.clock import SystemClock
from atoll.core.errors import Unreachable
from atoll.node.data.blocks import BlockMismatch
from atoll.node.data.fetcher import Fetched, Fetcher
from atoll.node.data.mirror_health import MirrorHealth
from atoll.node.data.mirrors import BlockAbsent, Cancelled, DirectoryMirror, Kind

SOON = timedelta(seconds=60)


class Partial:
    """A mirror with some paths."""

    kind: Kind = "server"

    def __init__(self, name: str, *paths: str) -> None:
        self.name, self.paths, self.asked = name, set(paths), list[str]()

    def read(self, path: str, start: int, stop: int, cancelled: Cancelled) -> bytes:
        self.asked.append(path)
        if path not in self.paths:
            raise BlockAbsent(f"{self.name} lacks {path}")
        return bytes(stop - start)

    def read_whole(self, path: str, at_most: int, cancelled: Cancelled) -> bytes:
        return self.read(path, 0, 1, cancelled)

    def close(self) -> None:
        pass


def right(_: bytes) -> None:
    pass


def test_what_one_lacks_comes_from_another_and_it_is_asked_for_other_bytes_at_once() -> None:
    some, others = Partial("some", "a"), Partial("others", "b")
    fetcher = Fetcher([some, others], SystemClock(), SOON)
    assert fetcher.read("b", 0, 9, right) == bytes(9)
    assert fetcher.read("a", 0, 9, right) == bytes(9)
    assert fetcher.trouble == ""
    assert all(health.rests_until == 0.0 and health.failures == 0 for health in fetcher.mirrors)


def test_a_wrong_or_short_file_of_a_directory_leaves_the_others_in_use(tmp_path: Path) -> None:
    for name, data in (("right", b"right" * 9), ("short", b"sho"), ("wrong", b"wrong" * 9)):
        (tmp_path / name).write_bytes(data)
    others = Partial("others", "right", "short", "wrong")
    fetcher = Fetcher([DirectoryMirror(tmp_path), others], SystemClock(), SOON)

    def check(data: bytes) -> None:
        if data == b"wrong":
            raise BlockMismatch("another digest")

    assert fetcher.fetch("short", 0, 5, check) == Fetched(bytes(5), "server")
    assert fetcher.fetch("wrong", 0, 5, check) == Fetched(bytes(5), "server")
    assert fetcher.fetch("right", 0, 5, check) == Fetched(b"right", "directory")
    assert others.asked == ["short", "wrong"]
    assert fetcher.mirrors[0].last_problem == f"{tmp_path} sends wrong bytes: another digest"


def test_what_none_has_is_waited_for_and_said() -> None:
    only, heard = Partial("only", "a"), list[str]()
    fetcher = Fetcher([only], SystemClock(), SOON, heard.append)

    def read_later(done: Callable[[bytes], object]) -> None:
        done(fetcher.read("b", 0, 9, right))

    found = list[bytes]()
    thread = threading.Thread(target=read_later, args=(found.append,))
    thread.start()
    while not heard:
        thread.join(0.01)
    assert heard[0] == "only lacks b"
    assert fetcher.trouble == "only lacks b"
    assert fetcher.read("a", 0, 9, right) == bytes(9)  # meanwhile others do not wait
    only.paths.add("b")
    thread.join(60)
    assert found == [bytes(9)]
    assert fetcher.trouble == ""
    assert only.asked.count("b") < 20


def test_patience_ends_with_the_reason() -> None:
    heard = list[str]()
    fetcher = Fetcher([Partial("only")], HurryingClock(lambda: heard), SOON, heard.append)
    with pytest.raises(Unreachable, match="only lacks b"):
        fetcher.read("b", 0, 9, right)


def test_a_mirror_that_lacks_most_is_expected_to_cost_more() -> None:
    often, never = MirrorHealth(Partial("often")), MirrorHealth(Partial("never"))
    never.record(1000, 0.3)
    for _ in range(20):
        often.record_absence(0.1)
    assert often.expected_seconds(1000) > 10 * 0.1 > never.expected_seconds(1000)
    for _ in range(20):
        often.record(1000, 0.1)
    assert often.expected_seconds(1000) < never.expected_seconds(1000)
