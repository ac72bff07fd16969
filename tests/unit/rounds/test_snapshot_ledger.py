"""What a member brings counts once: a result holds its snapshot, holds nothing of it, or nobody can tell."""

from __future__ import annotations

from dataclasses import replace

from atoll.core.round_id import RoundId
from atoll.node.rounds import types as rt
from atoll.node.rounds.snapshot_ledger import CountedShare, SnapshotLedger
from atoll.v1 import manifest_pb2

ME = "p0"
FIRST = RoundId("r", 1, 0, 1, 0)
SECOND = replace(FIRST, attempt=1)
FRONT, BACK = range(2), range(2, 3)
SNAPSHOT = rt.Frozen(FIRST, 100, 4)


def result(made: RoundId, *members: str) -> manifest_pb2.Manifest:
    return manifest_pb2.Manifest(
        round=made.to_proto(), contributions=[manifest_pb2.Contribution(peer_id=peer, samples=3) for peer in members]
    )


def begun(weighs: bool = True) -> SnapshotLedger:
    ledger = SnapshotLedger()
    ledger.keep(SNAPSHOT, FRONT)
    ledger.begin(FIRST, weighs=weighs)
    return ledger


def test_a_snapshot_serves_attempts_of_exactly_its_layers() -> None:
    ledger = SnapshotLedger()
    assert ledger.of(FRONT) is None
    assert ledger.of(()) is None
    ledger.keep(SNAPSHOT, FRONT)
    assert ledger.of(FRONT) is SNAPSHOT
    assert ledger.of(BACK) is None
    assert ledger.of(range(3)) is None


def test_a_result_of_an_attempt_that_began_with_it_holds_it() -> None:
    ledger = begun()
    assert ledger.counted(ME, result(FIRST, "p1", ME)) is rt.Counted.SNAPSHOT
    assert ledger.counted(ME, result(FIRST, "p1")) is rt.Counted.NOTHING
    assert ledger.counted(ME, result(FIRST)) is rt.Counted.NOTHING
    assert ledger.counted(ME, result(SECOND, ME)) is rt.Counted.NOTHING
    ledger.begin(SECOND, weighs=False)
    assert ledger.counted(ME, result(SECOND, ME)) is rt.Counted.SNAPSHOT
    assert ledger.counted(ME, result(FIRST, ME)) is rt.Counted.SNAPSHOT


def test_it_is_exposed_as_soon_as_one_attempt_weighs_it() -> None:
    ledger = SnapshotLedger()
    ledger.keep(SNAPSHOT, FRONT)
    assert ledger.exposed is False
    ledger.begin(FIRST, weighs=False)
    assert ledger.exposed is False
    ledger.begin(SECOND, weighs=True)
    assert ledger.exposed is True
    ledger.begin(FIRST, weighs=False)
    assert ledger.exposed is True


def test_what_nobody_saw_is_dropped_without_a_trace() -> None:
    ledger = begun()
    ledger.drop()
    assert ledger.exposed is False
    assert ledger.of(FRONT) is None
    assert ledger.of(()) is None
    assert ledger.counted(ME, result(FIRST, ME)) is rt.Counted.NOTHING
    ledger.make_room()
    assert ledger.counted(ME, result(FIRST, ME)) is rt.Counted.NOTHING


def test_nobody_can_tell_what_a_result_holds_whose_snapshot_made_room() -> None:
    ledger = begun()
    ledger.make_room()
    assert ledger.of(FRONT) is None
    assert ledger.exposed is False
    ledger.keep(replace(SNAPSHOT, round_id=SECOND), BACK)
    ledger.begin(SECOND, weighs=True)
    assert ledger.counted(ME, result(FIRST, ME)) is rt.Counted.UNKNOWN
    assert ledger.counted(ME, result(FIRST, "p1")) is rt.Counted.NOTHING
    assert ledger.counted(ME, result(SECOND, ME)) is rt.Counted.SNAPSHOT
    ledger.make_room()
    for made in (FIRST, SECOND):
        assert ledger.counted(ME, result(made, ME)) is rt.Counted.UNKNOWN


def test_one_attempt_does_without_us_and_only_where_there_is_a_snapshot() -> None:
    ledger = SnapshotLedger()
    assert ledger.hope() is False
    ledger.keep(SNAPSHOT, FRONT)
    assert ledger.hope() is True
    assert ledger.hope() is False
    ledger.make_room()
    ledger.keep(SNAPSHOT, BACK)
    assert ledger.hope() is False


def test_a_share_has_all_samples_of_a_node_and_of_no_other() -> None:
    manifest = result(FIRST, ME, "p1", ME)
    share = CountedShare.of(ME, manifest, rt.Counted.SNAPSHOT)
    assert share == CountedShare(rt.Counted.SNAPSHOT, 6)
    assert CountedShare.of("p9", manifest, rt.Counted.NOTHING).samples == 0
    assert CountedShare(rt.Counted.NOTHING).samples == 0
